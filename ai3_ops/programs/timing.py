"""What a step costs: measured through the engine, or counted; kept for the process by the step's sizes."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ai3_ops.graph import steps
from ai3_ops.graph.fusion import arguments
from ai3_ops.graph.network import Network, Node, is_constant
from ai3_ops.programs.lower import Part, build, fits

TURN_SECONDS = 0.002  # a turn repeats a short call until it takes this long
_measured: dict[Any, float] = {}
_lock = threading.Lock()  # two measurements at once would time each other


def interleaved(functions: Sequence[Callable[[], Any]], rounds: int = 9, seconds: float = math.inf) -> list[float]:
    """Seconds of a call of each: medians of turns that alternate, so that what disturbs one disturbs all."""
    deadline = time.perf_counter() + seconds
    with _lock, torch.no_grad():
        repeats = []
        for function in functions:
            function()
            start = time.perf_counter()
            function()
            repeats.append(max(1, math.ceil(TURN_SECONDS / max(time.perf_counter() - start, 1e-7))))
        turns: list[list[float]] = [[] for _ in functions]
        for number in range(rounds):
            for function, count, times in zip(functions, repeats, turns, strict=True):
                start = time.perf_counter()
                for _ in range(count):
                    function()
                times.append((time.perf_counter() - start) / count)
            if number >= 2 and time.perf_counter() > deadline:
                break
    return [statistics.median(times) for times in turns]


# After so many rounds in which all pairs differ by so much, all to the same side, no further ones are taken.
DECIDED = ((2, 1.25), (3, 1.1), (5, 1.03))


def paired(
    slow: Callable[[], Any], fast: Callable[[], Any], rounds: int = 9, seconds: float = math.inf
) -> tuple[float, float, float]:
    """The median ratio over pairs of turns that alternate, and both medians in seconds.

    Ends before all rounds where there is no doubt about which is faster, and after two rounds where the seconds are over.
    """
    deadline = time.perf_counter() + seconds
    with _lock, torch.no_grad():
        firsts = [_seconds(function, 1) for function in (slow, fast)]
        pairs = [firsts] if min(firsts) >= 10 * TURN_SECONDS else []  # long calls are warm before they end
        least, counts = 2 + len(pairs), [1, 1]
        if not pairs:
            again = [_seconds(function, 1) for function in (slow, fast)]
            counts = [max(1, math.ceil(TURN_SECONDS / max(took, 1e-7))) for took in again]
        for number in range(len(pairs), rounds):
            times = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                times[which] = _seconds((slow, fast)[which], counts[which])
            pairs.append(times)
            ratios = [a / b for a, b in pairs]
            if any(len(pairs) >= n and (min(ratios) >= by or max(ratios) <= 1 / by) for n, by in DECIDED):
                break
            if len(pairs) >= least and time.perf_counter() > deadline:
                break
    return (
        statistics.median(ratios),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def _seconds(function: Callable[[], Any], count: int) -> float:
    """Of a call, on average."""
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def problem_of(node: Node) -> tuple[Any, ...]:
    """What a step's cost depends on: the function, sizes of tensors, numbers, and which inputs are constants."""

    def describe(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (*value.meta["shape"], str(value.meta["dtype"]), is_constant(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(describe, value))
        return value

    # Copies of a node have it, and no rewrite changes sizes. What a concatenation copies depends on who else reads its parts.
    kept = node.meta.get("problem")
    if kept is None or kept[:2] != (node.target, node.kwargs.get("algorithm")):
        named = arguments(node)
        described = (node.target.__name__, *((k, describe(v)) for k, v in named.items()))
        kept = node.meta["problem"] = node.target, node.kwargs.get("algorithm"), described
    return (*kept[2], _moved(node)) if node.target is steps.concat else kept[2]


def latency(node: Node) -> float:
    """Seconds, measured on random weights of the step's sizes."""
    moved = _moved(node)
    if moved is not None:
        return moved / _bandwidth()
    key = (*problem_of(node), torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _measure(node)
    return _measured[key]


def _moved(node: Node) -> int | None:
    """Bytes that a step copies which computes nothing; None for others."""
    size = node.meta["dtype"].itemsize
    if node.target in (steps.slice_channels, steps.flatten, *steps.VIEWS):
        return 0
    if node.target in (steps.roll, steps.join):
        return 2 * size * math.prod(node.meta["shape"])
    if node.target is not steps.concat:
        return None
    # What writes into one concatenation alone writes there at once; anything else is copied there.
    copied = [
        part
        for part in node.args[0]
        if part.target is steps.slice_channels or part.op != "call_function" or len(_concats(part)) > 1
    ]
    return sum(2 * size * math.prod(part.meta["shape"]) for part in copied)


def _concats(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is steps.concat]


def _bandwidth() -> float:
    """Bytes a second that a copy moves."""
    key = ("copy", torch.get_num_threads())
    if key not in _measured:
        x = torch.randn(1 << 18)
        y = torch.empty_like(x)
        _measured[key] = 2 * 4 * x.numel() / interleaved([lambda: y.copy_(x)], rounds=5)[0]
    return _measured[key]


def _measure(node: Node) -> float:
    """The step alone as a program; of steps that the engine does not have, by PyTorch."""
    network = Network(fx.Graph(), {})
    names: dict[Node, Node] = {}
    anchor = network.graph.output(None)
    for source in node.all_input_nodes:
        shape, dtype = source.meta["shape"], source.meta["dtype"]
        if is_constant(source):
            names[source] = network.constant(
                torch.randn(shape, dtype=dtype) / max(1, math.prod(shape[1:])) ** 0.5, "c", anchor
            )
        else:
            with network.graph.inserting_before(anchor):
                names[source] = network.graph.placeholder("x")
        names[source].meta.update(source.meta)
    with network.graph.inserting_before(anchor):
        copied = network.graph.node_copy(node, names.__getitem__)
    copied.meta.update(node.meta)
    inputs = [n for n in names.values() if not is_constant(n)]
    tensors = [torch.randn(n.meta["shape"], dtype=n.meta["dtype"]) for n in inputs]
    tensors = [_channels_last(t) for t in tensors]
    try:
        if not fits(copied):
            raise ValueError
        region = build(network, Part((copied,), tuple(inputs), (copied,)))
        return interleaved([lambda: region(*tensors)], rounds=5)[0]
    except (ValueError, RuntimeError):
        network.graph.erase_node(anchor)
        network.graph.output((copied,))
        return interleaved([lambda: network.run(tensors)], rounds=5)[0]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def flops(node: Node) -> float:
    """2 per product of convolutions and linear layers, 1 per output of the rest."""
    outputs = math.prod(node.meta["shape"])
    if node.target in (steps.conv2d, steps.linear):
        weight = node.args[1].meta["shape"]
        return 2.0 * outputs * math.prod(weight[1:])
    return 0.0 if _moved(node) is not None else float(outputs)


def memory(node: Node) -> float:
    """Bytes of the output and of constants."""
    values = [node] if _moved(node) is None or node.target is steps.concat else []
    values += [a for a in node.all_input_nodes if is_constant(a)]
    return float(sum(math.prod(v.meta["shape"]) * v.meta["dtype"].itemsize for v in values))


FLOPS_A_BYTE = 16.0  # that processors compute while they move a byte: between what memory and what caches give


def work(node: Node) -> float:
    """What takes longer, computing or moving, in floating-point operations: where nothing is to be measured."""
    if (moved := _moved(node)) is not None:
        return FLOPS_A_BYTE * moved
    values = [node, *node.all_input_nodes]
    return max(flops(node), FLOPS_A_BYTE * sum(math.prod(v.meta["shape"]) * v.meta["dtype"].itemsize for v in values))


COSTS: dict[str, Callable[[Node], float]] = {"latency": latency, "memory": memory, "flops": flops, "work": work}
