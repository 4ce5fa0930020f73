"""Which steps become one program."""

from __future__ import annotations

import random

import pytest
from torch import fx

from ai3_ops.programs import lower


def _graph(seed: int) -> tuple[fx.Graph, list[fx.Node]]:
    """Steps of up to two earlier ones each."""
    draw, graph = random.Random(seed), fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(24):
        nodes.append(graph.call_function(max, tuple(draw.sample(nodes, min(2, len(nodes))))))
    graph.output(nodes[-1])
    return graph, nodes[1:]


@pytest.mark.parametrize("seed", range(20))
def test_a_partition_is_cut_where_another_one_needs_what_lies_between(seed):
    graph, nodes = _graph(seed)
    draw = random.Random(seed)
    own = [node for node in nodes if draw.random() < 0.6]
    other = [[node] for node in nodes if node not in own]
    found = lower._pieces(graph, own, other)
    assert [node for piece in found for node in piece] == own
    assert lower._ordered(graph, [*other, *found])
    for i, piece in enumerate(found[:-1]):  # none takes another step
        assert not lower._ordered(graph, [*other, *found[:i], [*piece, found[i + 1][0]]])


def test_most_partitions_are_whole():
    graph, nodes = _graph(0)
    assert lower._pieces(graph, nodes, []) == [nodes]
