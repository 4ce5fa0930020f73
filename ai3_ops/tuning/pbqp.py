"""The cheapest choice for every node of a graph whose edges have costs, too: a partitioned boolean quadratic problem.

Every node has a vector of costs, one for each of its choices, every edge a matrix, one for each pair of its ends' choices.
Anderson & Gregg (Optimal DNN primitive selection with partitioned boolean quadratic programming, CGO 2018) select the layers'
algorithms so; the reductions are those of Scholz & Eckstein (2002): a node without edges takes its cheapest choice (R0), one
with one neighbour is added to the neighbour's vector (R1), one with two becomes an edge between them (R2). They are exact,
and solve series-parallel graphs whole: chains, residual connections, branches that meet again. What is left when
every node has three neighbours or more (densely connected blocks) is decided by a heuristic: the node with most neighbours
takes the choice that is cheapest when each neighbour answers with its best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Vector = Sequence[float]
Matrix = Sequence[Sequence[float]]  # [choice of the first end][choice of the second]


def solve(nodes: Mapping[Node, Vector], edges: Sequence[tuple[Node, Node, Matrix]]) -> dict[Node, int]:
    """The index of each node's choice. Infinite costs forbid; of equal costs the first choice is taken.

    ValueError where everything is forbidden.
    """
    costs = {node: list(vector) for node, vector in nodes.items()}
    around: dict[Node, dict[Node, list[list[float]]]] = {node: {} for node in nodes}
    for a, b, matrix in edges:
        if a == b:  # its own input, as in a module called twice
            for i, row in enumerate(matrix):
                costs[a][i] += row[i]
        else:
            _add(around, a, b, [list(row) for row in matrix])
    order = {node: i for i, node in enumerate(nodes)}  # of equals the first, so that results do not vary
    taken: list[tuple[Node, list[float], dict[Node, list[list[float]]]]] = []

    def rank(node: Node) -> tuple[int, int, int, Node]:
        return min(len(around[node]), 3), -len(around[node]), order[node], node

    queue = [rank(node) for node in nodes]  # also ranks that nodes had before they lost or got a neighbour
    heapq.heapify(queue)
    while queue:
        found = heapq.heappop(queue)
        node = found[-1]
        if node not in around or found != rank(node):
            continue
        vector, edges_of = costs[node], around.pop(node)
        for other in edges_of:
            del around[other][node]
        taken.append((node, vector, edges_of))
        match list(edges_of.items()):
            case []:
                pass
            case [(other, matrix)]:
                for j in range(len(costs[other])):
                    costs[other][j] += min(c + row[j] for c, row in zip(vector, matrix, strict=True))
            case [(a, to_a), (b, to_b)]:
                merged = [
                    [
                        min(c + p[i] + q[j] for c, p, q in zip(vector, to_a, to_b, strict=True))
                        for j in range(len(costs[b]))
                    ]
                    for i in range(len(costs[a]))
                ]
                _add(around, a, b, merged)
            case _:
                best = _best(
                    [
                        c + sum(min(map(sum, zip(costs[o], m[i], strict=True))) for o, m in edges_of.items())
                        for i, c in enumerate(vector)
                    ]
                )
                taken[-1] = (node, [c if i == best else math.inf for i, c in enumerate(vector)], edges_of)
                for other, matrix in edges_of.items():
                    costs[other] = [c + d for c, d in zip(costs[other], matrix[best], strict=True)]
        for other in edges_of:
            heapq.heappush(queue, rank(other))
    chosen: dict[Node, int] = {}
    for node, vector, edges_of in reversed(taken):
        chosen[node] = _best(
            [c + sum(m[i][chosen[other]] for other, m in edges_of.items()) for i, c in enumerate(vector)]
        )
    return chosen


def _add(around: dict[Node, dict[Node, list[list[float]]]], a: Node, b: Node, matrix: list[list[float]]) -> None:
    before = around[a].get(b)
    if before is not None:
        matrix = [[x + y for x, y in zip(r, s, strict=True)] for r, s in zip(before, matrix, strict=True)]
    around[a][b] = matrix
    around[b][a] = [list(column) for column in zip(*matrix, strict=True)]


def _best(costs: Sequence[float]) -> int:
    best = min(range(len(costs)), key=costs.__getitem__)
    if math.isinf(costs[best]):
        raise ValueError("every choice is forbidden")
    return best
