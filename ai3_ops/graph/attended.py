"""What attention reads: query, key and value as parts of one product, which are read where they lie, and its mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ai3_ops.graph import steps
from ai3_ops.graph.network import Network, Node, is_constant, signature_of
from ai3_ops.operations.step import Step

aten = torch.ops.aten
_EXPANDS = (steps.expand, aten.expand.default)
_ANDS = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_SHOWING = (  # elements of what they read, and no others
    *_EXPANDS, *steps.VIEWS, aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.slice.Tensor,
    aten.alias.default, aten.clone.default,
)  # fmt: skip


def merge_products(network: Network) -> bool:
    """Query, key and value are slices of one product."""
    found = False
    for node in network.calls(steps.linear):
        if node._erased:
            continue
        x = node.args[0]
        beside = {user for user in x.users if user.op == "call_function" and _alike(node, user)}
        group = [n for n in node.graph.nodes if n in beside] if len(beside) > 1 else []
        if len(group) < 2 or group[0] is not node:
            continue
        _merge(network, group)
        found = True
    return found


def simplify_masks(network: Network) -> bool:
    """A mask is read as it is before it is expanded, and not at all where it hides nothing, as of sequences without padding."""
    found = False
    for node in network.calls(Step.by_operation["attention"].compute):
        mask = node.args[3]
        if mask is None:
            continue
        shown, rank = mask, len(mask.meta["shape"])
        while shown.target in (*_EXPANDS, *_ANDS):
            more = [a for a in shown.all_input_nodes if shown.target in _ANDS and not _hides_nothing(network, a)]
            inner = shown.args[0] if shown.target in _EXPANDS else more[0] if len(more) == 1 else None
            if inner is None or len(inner.meta["shape"]) != rank or inner.meta["dtype"] != mask.meta["dtype"]:
                break
            shown = inner
        if _hides_nothing(network, shown):
            shown = None
        if shown is mask:
            continue
        new = network.step(
            node, node.target, *node.args[:3], shown, *node.args[4:], layers=node.meta["layers"], **node.kwargs
        )
        network.replace(node, new, "simplify mask")
        found = True
    return found


def _hides_nothing(network: Network, mask: Node) -> bool:
    """Whether a mask of booleans is known to be true everywhere, at any length: as positions compared with 0 are."""
    if mask.meta["dtype"] != torch.bool:
        return False
    if is_constant(mask):
        value = network.value(mask)
        return value.device.type != "meta" and bool(value.all())
    if mask.target is aten.ge.Scalar:
        return not isinstance(mask.args[1], fx.Node) and _least(mask.args[0]) >= mask.args[1]
    if mask.target in _ANDS:
        return all(_hides_nothing(network, a) for a in mask.all_input_nodes)
    return mask.target in _SHOWING and _hides_nothing(network, mask.args[0])


def _least(node: Any) -> float:
    """What no element is below; -inf where that is not known."""
    if not isinstance(node, fx.Node):
        return float(node)
    if node.target in _SHOWING:
        return _least(node.args[0])
    if node.target is aten.add.Tensor and not node.kwargs:
        return _least(node.args[0]) + _least(node.args[1])
    if node.target is aten.arange.start and node.meta["dtype"] == torch.int64:
        return _least(node.args[0])
    return 0.0 if node.target is aten.arange.default else -math.inf


def _alike(one: Node, other: Node) -> bool:
    if (
        other.target is not steps.linear
        or other.args[0] is not one.args[0]
        or not (_is_plain(one) and _is_plain(other))
    ):
        return False
    same = one.kwargs.get("algorithm") == other.kwargs.get("algorithm")
    return same and (one.args[2] is None) == (other.args[2] is None) and _is_attended(one) and _is_attended(other)


def _is_plain(node: Node) -> bool:
    given = dict(signature_of(steps.linear).bind(*node.args, **node.kwargs).arguments)
    return given.get("residual") is None and given.get("activation", "none") == "none"


def _is_attended(node: Node) -> bool:
    """Whether only steps of several values, which read them with any strides, read a product, and views of it."""
    for user in node.users:
        own: Any = Step.by_function.get(user.target)
        if user.target in steps.VIEWS:
            if not _is_attended(user):
                return False
        elif own is None or not own.values:
            return False
    return bool(node.users)


def _merge(network: Network, nodes: list[Node]) -> None:
    first = nodes[0]
    weights = [network.value(n.args[1]) for n in nodes]
    weight = network.constant(torch.cat(weights), f"{first.args[1].target}.joined", first)
    bias: fx.Node | None = None
    if first.args[2] is not None:
        biases = torch.cat([network.value(n.args[2]) for n in nodes])
        bias = network.constant(biases, f"{first.args[2].target}.joined", first)
    layers = [name for n in nodes for name in n.meta["layers"]]
    whole = network.step(first, steps.linear, first.args[0], weight, bias, layers=layers, **first.kwargs)
    at, dim, parts = 0, len(whole.meta["shape"]) - 1, []
    for node, own in zip(nodes, weights, strict=True):
        end = at + own.shape[0]
        parts.append(network.step(first, steps.cut, whole, dim, at, end, layers=node.meta["layers"]))
        at = end
    for node, part in zip(nodes, parts, strict=True):
        network.replace(node, part, "merge products", f"{len(nodes)} as one")
