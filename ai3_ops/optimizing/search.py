"""Which substitutions to take: best-first search that also follows networks up to `alpha` times the best cost (MetaFlow).

Costs add up over steps, so that only the surroundings of places where a substitution applies are searched, each by itself
where they have no step in common, and equal ones once. The search works on graphs whose constants have sizes only; what it found
is then applied to the real ones.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from ai3_ops.graph import fusion, steps
from ai3_ops.graph.network import Checker, Mistake, Network, Node, extract, is_constant, is_step, splice
from ai3_ops.graph.substitutions import SUBSTITUTIONS, Substitution
from ai3_ops.programs.timing import problem_of

SEGMENT = 12  # segments of fewer steps are joined up to this
EXPANSIONS = 60  # networks that are expanded around a place
LEAST_GAIN = 0.05  # of the cost around a place: smaller ones are noise

Taken = list[tuple[Substitution, str]]
_TIDYING = tuple(p for p in fusion.PASSES if p is not fusion.fuse_prologue)  # which would undo split_prologue


def search(
    network: Network,
    cost: Callable[[Node], float],
    alpha: float,
    deadline: float,
    checker: Checker | None = None,
    substitutions: Sequence[Substitution] = SUBSTITUTIONS,
    progress: Callable[[str], None] = lambda _: None,
    notes: list[str] | None = None,
) -> int:
    """Applies to `network` what the search finds; returns at how many places.

    `notes` is told what was left out: for want of time, or because it was wrong.
    """
    known: dict[Any, Taken] = {}
    changed = late = 0
    said = [] if notes is None else notes
    parts = [around for nodes in segments(network) for around in surroundings(network, nodes, substitutions)]
    for number, nodes in enumerate(parts):
        progress(f"substitutions, place {number + 1} of {len(parts)}")
        real, inputs, outputs = extract(network, nodes)
        key = state_key(real)
        if key not in known:
            if time.monotonic() > deadline:
                late += 1
                continue
            known[key] = find(real.copy("meta"), cost, alpha, deadline, substitutions)
        if not known[key]:
            continue
        if checker is not None:
            real.checker = Checker(real, [checker.of(network, node) for node in inputs], checker.tolerance)
        try:
            for substitution, place in known[key]:
                take(real, substitution, place)
        except (Mistake, LookupError) as error:  # it stays as it was here
            said.append(f"substitutions that a check refused were left out: {error}")
            known[key] = []
            continue
        network.log += real.log
        splice(network, nodes, outputs, real, inputs)
        changed += 1
    if late:
        said.append(f"no substitutions were searched at {late} of {len(parts)} places: the budget was used up")
    network.tidy()
    return changed


def surroundings(network: Network, nodes: Sequence[Node], substitutions: Sequence[Substitution]) -> list[list[Node]]:
    """Runs of a segment's steps, in order, around places where a substitution applies: what is read there, and what reads.

    Places whose runs have a step in common are one.
    """
    part, _, _ = extract(network, nodes)
    order = {node: i for i, node in enumerate(n for n in part.graph.nodes if n.op == "call_function")}
    runs: list[tuple[int, int]] = []
    for substitution in substitutions:
        for place, _ in substitution(part):
            changed = [node for node, i in order.items() if str(i) in place.split("+")]
            read = [a for node in changed for a in node.all_input_nodes if not is_constant(a)]
            beside = [user for a in read for user in a.users if user.target is steps.conv2d]
            around = [
                order[n] for n in (*changed, *read, *beside, *(u for n in changed for u in n.users)) if n in order
            ]
            runs.append((min(around), max(around)))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return [list(nodes[first : last + 1]) for first, last in joined]


def find(
    network: Network,
    cost: Callable[[Node], float],
    alpha: float,
    deadline: float,
    substitutions: Sequence[Substitution],
) -> Taken:
    """The substitutions, in order, that lead to the cheapest network found; none where nothing gains enough."""
    prices: dict[Any, float] = {}
    first = best = total(network, cost, prices)
    path: Taken = []
    serial = itertools.count()  # heaps compare no networks
    queue: list[tuple[float, int, Network, Taken]] = [(first, next(serial), network, [])]
    seen = {state_key(network)}
    for _ in range(EXPANSIONS):
        if not queue or time.monotonic() > deadline:
            break
        at, _, state, taken = heapq.heappop(queue)
        if at > alpha * best:
            break
        for substitution in substitutions:
            for place in [name for name, _ in substitution(state)]:
                changed = state.copy()
                try:
                    take(changed, substitution, place)
                except RuntimeError:  # an algorithm that was named does not support the changed layer
                    continue
                key = state_key(changed)
                if key in seen:
                    continue
                seen.add(key)
                now, steps = total(changed, cost, prices), [*taken, (substitution, place)]
                if now < best:
                    best, path = now, steps
                if now < alpha * best:
                    heapq.heappush(queue, (now, next(serial), changed, steps))
    return path if best < (1 - LEAST_GAIN) * first else []


def take(network: Network, substitution: Substitution, place: str) -> None:
    """Applies a substitution at one place, and what then can be simplified."""
    for name, apply in substitution(network):
        if name == place:
            apply()
            break
    else:
        raise LookupError(f"{substitution.__name__} does not apply at {place}")
    while any([rewrite(network) for rewrite in _TIDYING]):
        pass
    network.tidy()


def total(network: Network, cost: Callable[[Node], float], prices: dict[Any, float]) -> float:
    """The sum over all steps; `prices` keeps those of each problem."""
    found = 0.0
    for node in network.graph.nodes:
        if node.op == "call_function":
            problem = problem_of(node)
            if problem not in prices:
                prices[problem] = cost(node)
            found += prices[problem]
    return found


def state_key(network: Network) -> Any:
    """Equal for networks of the same steps on the same sizes."""
    order = {node: i for i, node in enumerate(network.graph.nodes)}
    rows: list[Any] = []
    for node in network.graph.nodes:
        if node.op == "call_function":
            rows.append((problem_of(node), tuple(order[a] for a in node.all_input_nodes if not is_constant(a))))
        elif node.op == "output":
            rows.append(("output", tuple(order[a] for a in node.all_input_nodes)))
    return tuple(rows)


def segments(network: Network) -> list[list[Node]]:
    """Runs of steps, in order, that one value enters and leaves, joined while they are short; only those of two and more."""
    order = [node for node in network.graph.nodes if node.op != "get_attr"]
    place = {node: i for i, node in enumerate(order)}
    last = {node: max((place[user] for user in node.users), default=place[node]) for node in order}
    pieces: list[list[Node]] = []
    piece: list[Node] = []
    alive: set[Node] = set()
    for i, node in enumerate(order):
        if node.op == "call_function" and is_step(node):
            piece.append(node)
        elif node.op != "placeholder":  # PyTorch's own: nothing is rewritten across it
            pieces.append(piece)
            pieces.append([])
            piece = []
        alive = {n for n in alive if last[n] > i}
        if last[node] > i:
            alive.add(node)
        if len(alive) <= 1 and piece:
            pieces.append(piece)
            piece = []
    pieces.append(piece)
    joined: list[list[Node]] = [[]]
    for piece in pieces:
        if not piece:
            joined.append([])
        elif len(joined[-1]) + len(piece) <= SEGMENT:
            joined[-1] += piece
        else:
            joined.append(list(piece))
    return [nodes for nodes in joined if len(nodes) > 1]
