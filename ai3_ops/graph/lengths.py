"""Lengths that a graph leaves open: its reshapes name the dimensions that they keep, and no number that follows from a length.

Capture leaves lengths of sequences open where the model does (`ai3_ops.graph.capture`). Values have the example's sizes all the
same, and so do the steps that passes make of these. Here the sizes of the finished network are computed for other lengths too,
node by node; where a reshape does not fit these, its numbers are put in another way that gives the same for the example. What
holds a length as a number all the same fits the example alone, as the first call with another length finds out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ai3_ops._torch import FakeTensorMode
from ai3_ops.graph import steps
from ai3_ops.graph.caches import as_long, is_cache
from ai3_ops.graph.capture import quiet
from ai3_ops.graph.network import Network, Node, call, is_constant

_OTHERS = ((1, 2), (2, 1))  # lengths that are tried, as shares of the example's


def leave_open(network: Network, inputs: Sequence[Any]) -> None:
    """Puts the sizes of reshapes so that they hold for any length that the graph leaves open, where that can be."""
    open_ones = [node.meta.get("lengths", ()) for node in network.inputs]
    if any(map(any, open_ones)):
        for share in _OTHERS:
            try:
                others = [_other(x, of, *share) for x, of in zip(inputs, open_ones, strict=True)]
                if any(map(is_cache, inputs)):  # whose keys are as many more as there are queries
                    others = list(map(_beside_cache, inputs, others))
                return _follow(network, others)
            except Exception:  # a model may ask for a multiple, or for less than its table of positions has
                continue


def _other(x: Any, lengths: tuple[bool, ...], times: int, share: int) -> Any:
    """Sizes of an input of other lengths; what is no tensor as it is."""
    if not isinstance(x, Tensor):
        return x
    return [max(1, n * times // share) if of else n for n, of in zip(x.shape, lengths, strict=True)]


def _beside_cache(x: Any, other: Any) -> Any:
    return [*other[:-1], other[-1] + other[-2] - x.shape[-2]] if as_long(x) else other


def _follow(network: Network, inputs: list[Any]) -> None:
    """Through the graph with inputs of these sizes."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for node in list(network.graph.nodes):
            if node.op == "call_function":
                if node.target is steps.reshape:
                    node = _opened(network, node, values)
                values[node] = call(node, values.__getitem__)
            elif node.op != "output":
                sizes = next(given) if node.op == "placeholder" else network.value(node).shape
                known = isinstance(node.meta["dtype"], torch.dtype)
                values[node] = torch.empty(sizes, dtype=node.meta["dtype"]) if known else sizes


def _opened(network: Network, node: Node, values: dict[fx.Node, Any]) -> Node:
    """A reshape, or what is put in its place, that keeps the lengths of what it reads; as it is where none differs."""
    x, there = node.args[0], tuple(values[node.args[0]].shape)
    scales = x.meta["scales"], node.meta["scales"]
    if is_constant(x) or there == x.meta["shape"] or None in scales:
        return node
    read, made = (list(zip(n.meta["shape"], k, strict=True)) for n, k in zip((x, node), scales, strict=True))
    changed = [one != other for (one, _), other in zip(read, there, strict=True)]
    own, new = ([d for d, size in enumerate(sizes) if size != _ONE] for sizes in (read, made))
    if [read[d] for d in own] == [made[d] for d in new] and any(
        changed[d] for d, e in zip(own, new, strict=True) if d != e
    ):
        return _moved(network, node, own, new, values)
    apart = len(own) < len(read) and sum(k > 0 for _, k in read) <= 1
    if apart and any(changed[d] for e, d in enumerate(own) if d != e):
        node.args = _without_ones(network, node, own, values), *node.args[1:]  # which are in the way of others' places
        return _opened(network, node, values)
    stays = [d < len(read) and size == read[d] for d, size in enumerate(made)]  # with the dimension in its place
    sizes = [0 if stays[d] and changed[d] else -1 if k else n for d, (n, k) in enumerate(made)]
    if _fits(sizes, there, made):
        node.args = x, tuple(sizes)
        return node
    batch = [d for d, (_, k) in enumerate(made) if k]
    if all(stays[d] for d in batch):
        sizes = [0 if d in batch else n for d, n in enumerate(sizes)]
        lengths = {n for (n, _), other in zip(read, changed, strict=True) if other}
        free = sorted(
            (d for d, n in enumerate(sizes) if n > 1 and not stays[d]), key=lambda d: made[d][0] not in lengths
        )
        for d in free:
            tried = [*sizes[:d], -1, *sizes[d + 1 :]]
            if _fits(tried, there, made):
                node.args = x, tuple(tried)
                return node
    return node


_ONE = (1, 0)  # the size of a dimension of one element, and how much of the batch it has


def _fits(sizes: list[int], there: tuple[int, ...], made: list[tuple[int, int]]) -> bool:
    """Whether a reshape's sizes hold all elements of a value with other lengths, and the same batch where it is alone."""
    known = [there[d] if n == 0 else n for d, n in enumerate(sizes)]
    rest, more = divmod(math.prod(there), math.prod(n for n in known if n != -1))
    if -1 not in sizes:
        return (rest, more) == (1, 0)
    n, of_batch = made[sizes.index(-1)]
    return not more and (rest == n or of_batch != 1)


def _step(
    network: Network, node: Node, values: dict[fx.Node, Any], function: Any, x: fx.Node, numbers: list[int]
) -> fx.Node:
    """A new step before a node, unless it would leave what it reads as it is."""
    if function is steps.permute and numbers == [*range(len(numbers))]:
        return x
    made = network.step(node, function, x, tuple(numbers), layers=node.meta["layers"])
    values[made] = call(made, values.__getitem__)
    return made


def _without_ones(
    network: Network, node: Node, own: list[int], values: dict[fx.Node, Any], behind: Sequence[int] = ()
) -> fx.Node:
    """What a reshape reads without its dimensions of one element, but for those `behind` the `own` others."""
    x = node.args[0]
    kept = [-1 if x.meta["scales"][d] else 0 for d in own]
    x = _step(
        network, node, values, steps.permute, x, [*own, *(d for d in range(len(x.meta["shape"])) if d not in own)]
    )
    return _step(network, node, values, steps.reshape, x, [*kept, *behind])


def _moved(network: Network, node: Node, own: list[int], new: list[int], values: dict[fx.Node, Any]) -> Node:
    """Dimensions of one element that come and go: those are behind the others for a while, which keep their places.

    `own` and `new`: where the others are in what a reshape reads, and in what it makes.
    """
    rank = len(node.meta["shape"])
    x = _without_ones(network, node, own, values, [1] * (rank - len(new)))
    order = [*new, *(d for d in range(rank) if d not in new)]
    x = _step(network, node, values, steps.permute, x, [order.index(d) for d in range(rank)])
    node.replace_all_uses_with(x)
    network.graph.erase_node(node)
    return x
