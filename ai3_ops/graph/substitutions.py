"""Relaxed graph substitutions in the sense of MetaFlow (Jia et al., SysML 2019): each may make the network slower by itself
and faster together with what it enables. One function each: it yields, for every place where it applies, a function that
applies it there. `search` decides which are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ai3_ops.graph import steps
from ai3_ops.graph.fusion import apart, arguments, changed
from ai3_ops.graph.network import Network, Node, is_constant, only_user

Place = tuple[str, Callable[[], None]]  # where, and how
Substitution = Callable[[Network], Iterator[Place]]
_LARGEST = 3  # kernels are enlarged up to this


def enlarge_kernel(network: Network) -> Iterator[Place]:
    """A 1x1 convolution is a 3x3 one whose other weights are zero, where a 3x3 one beside it reads the same input."""
    for node in network.calls(steps.conv2d):
        a = arguments(node)
        kernel = a["weight"].meta["shape"][2:]
        beside = [
            n for n in _readers(node) if n.args[1].meta["shape"][2:] == (_LARGEST, _LARGEST) and _same_walk(n, node)
        ]
        if kernel != (1, 1) or a["groups"] != 1 or tuple(a["padding"]) != (0, 0) or not beside:
            continue
        if tuple(arguments(beside[0])["padding"]) != (1, 1) or tuple(arguments(beside[0])["dilation"]) != (1, 1):
            continue

        def apply(node: Node = node, weight: Node = a["weight"]) -> None:
            wide = F.pad(network.value(weight), (1, 1, 1, 1))
            new = changed(
                network, node, node, (), weight=network.constant(wide, f"{weight.target}.wide", node), padding=(1, 1),
                dilation=(1, 1),
            )  # fmt: skip
            network.replace(node, new, "enlarge kernel", "1x1 to 3x3")

        yield _place(network, node), apply


def fuse_parallel(network: Network) -> Iterator[Place]:
    """Convolutions of one input are one convolution with the weights of both, whose output is sliced."""
    order = {node: i for i, node in enumerate(network.graph.nodes)}
    for first in network.calls(steps.conv2d):
        group = [n for n in _readers(first) if _alike(first, n)]
        if any(order[n] < order[first] for n in group):
            continue
        for size in range(1, len(group) + 1) if len(group) > 1 else (len(group),):
            others = group[:size]
            if not others:
                continue

            def apply(nodes: tuple[Node, ...] = (first, *others)) -> None:
                _join(network, nodes)

            yield _place(network, first, *others), apply


def _join(network: Network, nodes: tuple[Node, ...]) -> None:
    first = nodes[0]
    named = [arguments(n) for n in nodes]
    weights = [network.value(a["weight"]) for a in named]
    biases = [network.value(a["bias"]) for a in named]
    filled = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    weight = network.constant(torch.cat(weights), f"{named[0]['weight'].target}.joined", first)
    bias = None
    if any(b is not None for b in biases):
        bias = network.constant(torch.cat(filled), f"{named[0]['weight'].target}.bias.joined", first)
    layers = tuple(name for n in nodes for name in n.meta["layers"])
    joined = changed(network, first, first, layers, weight=weight, bias=bias)
    at = 0
    for node, own in zip(nodes, weights, strict=True):
        part = network.step(
            joined.next, steps.slice_channels, joined, at, at + own.shape[0], layers=node.meta["layers"]
        )
        network.replace(node, part, "fuse parallel convolutions", f"{len(nodes)} as one")
        at += own.shape[0]


def fuse_addition(network: Network) -> Iterator[Place]:
    """A convolution's residual that is the convolution's own input, or another convolution of it, is a part of its weights."""
    for node in network.calls(steps.conv2d):
        a = arguments(node)
        residual = a["residual"]
        if residual is None or a["groups"] != 1 or a["scale"] is not None or a["input_relu"]:
            continue
        weight = a["weight"].meta["shape"]
        if residual is a["input"] and weight[0] == weight[1] and weight[2] == weight[3] and weight[2] % 2 == 1:
            centred = tuple(a["padding"]) == (weight[2] // 2 * a["dilation"][0],) * 2 and tuple(a["stride"]) == (1, 1)
            if centred:

                def apply_identity(node: Node = node, weight: Node = a["weight"]) -> None:
                    value = network.value(weight).clone()
                    if value.device.type != "meta":
                        middle = value.shape[2] // 2
                        value[:, :, middle, middle] += torch.eye(len(value)).to(value)
                    new = changed(
                        network, node, node, (), residual=None,
                        weight=network.constant(value, f"{weight.target}.identity", node),
                    )  # fmt: skip
                    network.replace(node, new, "fuse addition into weights", "identity kernel")

                yield _place(network, node), apply_identity
        elif (
            only_user(residual, node)
            and residual.target is steps.conv2d
            and residual.args[0] is a["input"]
            and residual.kwargs.get("activation", "none") == "none"
            and residual.kwargs.get("residual") is None
            and _same_window(residual, node)
        ):

            def apply_sum(node: Node = node, other: Node = residual) -> None:
                one, two = arguments(node), arguments(other)
                total = network.value(one["weight"]) + network.value(two["weight"])
                biases = [network.value(n["bias"]) for n in (one, two) if n["bias"] is not None]
                bias = network.constant(sum(biases[1:], biases[0]), f"{node.name}.bias", node) if biases else None
                weight = network.constant(total, f"{one['weight'].target}.sum", node)
                new = changed(network, node, node, other.meta["layers"], weight=weight, bias=bias, residual=None)
                network.replace(node, new, "fuse addition into weights", "sum of two convolutions")

            yield _place(network, node), apply_sum


def pool_first(network: Network) -> Iterator[Place]:
    """An average of a 1x1 convolution is the 1x1 convolution of averages, of which there are fewer."""
    for pool in network.calls(steps.avg_pool2d, steps.adaptive_avg_pool2d):
        conv = pool.args[0]
        if apart(pool) or not only_user(conv, pool) or conv.target is not steps.conv2d:
            continue
        a = arguments(conv)
        plain = a["activation"] == "none" and a["residual"] is None and tuple(a["padding"]) == (0, 0)
        if not plain or a["weight"].meta["shape"][2:] != (1, 1) or tuple(a["stride"]) != (1, 1):
            continue
        window = arguments(pool)
        if pool.target is steps.avg_pool2d and (
            any(window["padding"]) or window["divisor_override"] or window["ceil_mode"]
        ):
            continue

        def apply(pool: Node = pool, conv: Node = conv, a: dict = a) -> None:
            x = a["input"]
            if a["scale"] is not None:
                activation = "relu" if a["input_relu"] else "none"
                x = network.step(
                    pool, steps.affine, x, a["scale"], a["shift"], activation=activation, layers=conv.meta["layers"]
                )
            elif a["input_relu"]:
                x = network.step(pool, steps.unary, x, "relu", layers=conv.meta["layers"])
            small = changed(network, pool, pool, (), input=x)
            new = changed(
                network, conv, pool, pool.meta["layers"], input=small, scale=None, shift=None, input_relu=False
            )
            network.replace(pool, new, "average before a 1x1 convolution")

        yield _place(network, pool), apply


def split_prologue(network: Network) -> Iterator[Place]:
    """Normalization and ReLU of an input as a step of their own: what a kernel without prologue would do anyway."""
    for node in network.calls(steps.conv2d):
        a = arguments(node)
        if a["scale"] is None:
            continue

        def apply(node: Node = node, a: dict = a) -> None:
            activation = "relu" if a["input_relu"] else "none"
            x = network.step(node, steps.affine, a["input"], a["scale"], a["shift"], activation=activation)
            new = changed(network, node, node, (), input=x, scale=None, shift=None, input_relu=False)
            network.replace(node, new, "split normalization of the input")

        yield _place(network, node), apply


def _place(network: Network, *nodes: Node) -> str:
    """By their numbers in the order of calls, which are the same in every copy of the graph."""
    numbers = {n: i for i, n in enumerate(n for n in network.graph.nodes if n.op == "call_function")}
    return "+".join(str(numbers[n]) for n in nodes)


def _readers(node: Node) -> list[Node]:
    """Other convolutions of the same input, in order."""
    x = node.args[0]
    found = {n for n in x.users if n is not node and n.target is steps.conv2d and n.args[0] is x}
    return [n for n in node.graph.nodes if n in found] if found else []


def _same_walk(one: Node, other: Node) -> bool:
    """The same outputs' places: stride and size."""
    a, b = arguments(one), arguments(other)
    return tuple(a["stride"]) == tuple(b["stride"]) and one.meta["shape"][2:] == other.meta["shape"][2:]


def _same_window(one: Node, other: Node) -> bool:
    a, b = arguments(one), arguments(other)
    names = ("stride", "padding", "dilation", "groups", "scale", "shift", "input_relu", "algorithm")
    sizes = a["weight"].meta["shape"][1:] == b["weight"].meta["shape"][1:]
    return sizes and all(_plain(a[name]) == _plain(b[name]) for name in names)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _alike(one: Node, other: Node) -> bool:
    a, b = arguments(one), arguments(other)
    fused = all(n["residual"] is None and n["parameter"] is None and n["groups"] == 1 for n in (a, b))
    return fused and a["activation"] == b["activation"] and _same_window(one, other) and is_constant(b["weight"])


SUBSTITUTIONS: tuple[Substitution, ...] = (enlarge_kernel, fuse_parallel, fuse_addition, pool_first, split_prologue)
