"""The solver of partitioned boolean quadratic problems, against trying everything."""

import itertools
import math
import random

import pytest

from ai3_ops.tuning.pbqp import solve


def total(nodes, edges, chosen):
    return sum(v[chosen[n]] for n, v in nodes.items()) + sum(m[chosen[a]][chosen[b]] for a, b, m in edges)


def best(nodes, edges):
    choices = itertools.product(*(range(len(v)) for v in nodes.values()))
    return min(total(nodes, edges, dict(zip(nodes, c, strict=True))) for c in choices)


def problem(rng, count, pairs, choices=3):
    nodes = {f"n{i}": [rng.randint(0, 20) for _ in range(rng.randint(1, choices))] for i in range(count)}
    edges = []
    for a, b in pairs:
        first, second = f"n{a}", f"n{b}"
        edges.append((first, second, [[rng.randint(0, 20) for _ in nodes[second]] for _ in nodes[first]]))
    return nodes, edges


SERIES_PARALLEL = {
    "chain": [(i, i + 1) for i in range(6)],
    "residual": [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)],
    "inception": [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (0, 4), (4, 5)],
    "cycle": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "itself": [(0, 0), (0, 1), (1, 1)],
    "parallel": [(0, 1), (1, 0), (0, 1)],
    "apart": [(0, 1), (2, 3)],
}


@pytest.mark.parametrize("name", SERIES_PARALLEL)
@pytest.mark.parametrize("seed", range(20))
def test_exact_on_series_parallel_graphs(name, seed):
    pairs = SERIES_PARALLEL[name]
    nodes, edges = problem(random.Random(seed), 1 + max(map(max, pairs)), pairs)
    assert total(nodes, edges, solve(nodes, edges)) == best(nodes, edges)


@pytest.mark.parametrize("seed", range(30))
def test_near_the_best_elsewhere(seed):
    """Every node beside every other: decided by a heuristic, never worse than one and a half times the best here."""
    nodes, edges = problem(random.Random(seed), 6, itertools.combinations(range(6), 2))
    assert best(nodes, edges) <= total(nodes, edges, solve(nodes, edges)) <= 1.5 * best(nodes, edges)


def test_the_first_of_equals():
    assert solve({"a": [1, 1], "b": [2, 2]}, [("a", "b", [[0, 0], [0, 0]])]) == {"a": 0, "b": 0}


def test_what_is_forbidden():
    never = math.inf
    nodes = {"a": [0], "b": [0, 5], "c": [0, 5]}
    edges = [("a", "b", [[never, 0]]), ("b", "c", [[0, never], [never, 0]])]
    assert solve(nodes, edges) == {"a": 0, "b": 1, "c": 1}
    with pytest.raises(ValueError, match="forbidden"):
        solve({"a": [never, never]}, [])
