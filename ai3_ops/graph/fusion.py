"""Rewrites that always pay: one function each, from a Network to the same Network with fewer steps.

What a convolution or linear layer may carry besides its product: scale, shift and ReLU of its input (prologue), bias, residual,
activation, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ai3_ops.graph import steps
from ai3_ops.graph.attended import merge_products, simplify_masks
from ai3_ops.graph.composed import compose_attention, compose_gelu, compose_normalize, compose_rms_norm
from ai3_ops.graph.network import Network, Node, only_user, signature_of
from ai3_ops.graph.sequences import sequences_as_images
from ai3_ops.graph.views import VIEW_PASSES
from ai3_ops.operations.step import Step

_PRODUCTS = (steps.conv2d, steps.linear)


def simplify(network: Network) -> None:
    """All passes, until none finds anything."""
    while any([rewrite(network) for rewrite in PASSES]):
        pass
    network.tidy()


def arguments(node: Node) -> dict[str, Any]:
    """A step's arguments by name, defaults filled in."""
    bound = signature_of(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def changed(network: Network, node: Node, before: Node, layers: tuple[str, ...], **values: Any) -> Node:
    """The same step with other arguments, put before another node."""
    named = arguments(node) | values
    inputs = [named.pop("input")] if "input" in named else []
    return network.step(before, node.target, *inputs, layers=(*node.meta["layers"], *layers), **named)


def apart(node: Node) -> bool:
    """Whether a step that is no product has an algorithm which programs do not run: nothing takes it over or moves it.

    Programs compute ReLUs, pools and flattening as their `direct` does, and run the algorithms of operations' own steps.
    """
    if node.target in Step.by_function:
        return False
    return node.target not in _PRODUCTS and node.kwargs.get("algorithm", "default") not in ("default", "direct")


def _bare(node: Any) -> bool:
    """A product to which nothing has been fused after the bias."""
    if not isinstance(node, fx.Node) or node.target not in _PRODUCTS:
        return False
    return bool(node.kwargs.get("residual") is None and node.kwargs.get("activation", "none") == "none")


def by_channel(node: Node) -> bool:
    """Whether a step's activation has a parameter for each channel where rows, with features last, have another for each row."""
    parameter = node.args[2] if node.target is steps.unary else node.kwargs.get("parameter")
    slopes = isinstance(parameter, fx.Node) and parameter.meta["shape"] not in ((), (1,))
    return slopes and len(node.meta["shape"]) != 2


def activation_of(node: Node) -> dict[str, Any]:
    """A step's activation, with its parameter, as arguments."""
    return {"activation": node.kwargs.get("activation", "none"), "parameter": node.kwargs.get("parameter")}


def of_dtype(value: Tensor, like: Tensor) -> Tensor:
    """Computed in float64, kept in the type of another."""
    return value.to(like.dtype).contiguous()


def scaled(network: Network, product: Node, scale: Tensor, shift: Tensor, before: Node) -> dict[str, Any]:
    """Weight and bias of scale * product(x) + shift, by output channel."""
    named = arguments(product)
    weight, bias = network.value(named["weight"]), network.value(named["bias"])
    wide = scale.double()
    turned = weight.double() * wide.reshape(-1, *[1] * (weight.ndim - 1))
    moved = shift.double() + (0 if bias is None else bias.double() * wide)
    name = named["weight"].target
    return {
        "weight": network.constant(of_dtype(turned, weight), f"{name}.folded", before),
        "bias": network.constant(of_dtype(moved, weight), f"{name.removesuffix('weight')}bias.folded", before),
    }


def fold_affine(network: Network) -> bool:
    """Batch normalization, and products and sums with constants, into the weights of the layer before."""
    found = False
    for node in network.calls(steps.affine):
        x, scale, shift = node.args[:3]
        if not only_user(x, node) or not _bare(x) or (x.target is steps.linear and len(x.meta["shape"]) == 4):
            continue
        weights = scaled(network, x, network.value(scale), network.value(shift), node)
        new = changed(network, x, node, node.meta["layers"], **weights, **activation_of(node))
        network.replace(node, new, "fold normalization")
        found = True
    return found


def fold_affine_forward(network: Network) -> bool:
    """A scale and shift of the input into a linear layer's weights, or a convolution's that has no padding."""
    found = False
    for node in network.calls(steps.affine):
        users = list(node.users)
        if node.kwargs.get("activation", "none") != "none" or not users or not all(
            user.target in _PRODUCTS and user.args[0] is node and node not in fx.map_arg(user.kwargs, lambda n: n).values()
            and not (user.target is steps.conv2d and (any(arguments(user)["padding"]) or arguments(user)["scale"]))
            and not user.kwargs.get("input_relu") and len(node.meta["shape"]) == (2 if user.target is steps.linear else 4)
            for user in users
        ):  # fmt: skip
            continue
        scale, shift = (network.value(c).double() for c in node.args[1:3])
        for user in users:
            named = arguments(user)
            weight, bias = network.value(named["weight"]), network.value(named["bias"])
            groups = named.get("groups", 1)
            wide = weight.double()
            rest = [1] * (weight.ndim - 2)
            per = (
                scale.reshape(groups, -1)
                .repeat_interleave(weight.shape[0] // groups, 0)
                .reshape(weight.shape[0], -1, *rest)
            )
            add = (
                shift.reshape(groups, -1)
                .repeat_interleave(weight.shape[0] // groups, 0)
                .reshape(weight.shape[0], -1, *rest)
            )
            moved = (wide * add).flatten(1).sum(1) + (0 if bias is None else bias.double())
            name = named["weight"].target
            weights = {
                "weight": network.constant(of_dtype(wide * per, weight), f"{name}.folded", user),
                "bias": network.constant(of_dtype(moved, weight), f"{name.removesuffix('weight')}bias.folded", user),
            }
            new = changed(network, user, user, node.meta["layers"], input=node.args[0], **weights)
            network.replace(user, new, "fold normalization before a layer")
        found = True
    return found


def fuse_residual(network: Network) -> bool:
    """A sum with a layer's result: the layer adds the other summand as it stores."""
    found = False
    for node in network.calls(steps.binary):
        x, y, name = node.args[:3]
        if name != "add" or x.meta["shape"] != y.meta["shape"] or x.meta["scales"] != y.meta["scales"]:
            continue
        if y.op == "get_attr":
            continue
        order = {n: i for i, n in enumerate(network.graph.nodes)}
        both = [(a, b) for a, b in ((x, y), (y, x)) if only_user(a, node) and _bare(a) and a is not b]
        if not both:
            continue
        product, other = max(both, key=lambda pair: order[pair[0]])
        new = changed(network, product, node, node.meta["layers"], residual=other, **activation_of(node))
        network.replace(node, new, "fuse addition")
        found = True
    return found


def fuse_activation(network: Network) -> bool:
    """An activation into the layer, sum, product or normalization before it."""
    found = False
    for node in network.calls(steps.unary):
        x, name, parameter = node.args
        if apart(node) or not only_user(x, node):
            continue
        if x.target not in (*_PRODUCTS, steps.binary, steps.affine) or x.kwargs.get("activation", "none") != "none":
            continue
        if x.target is steps.linear and by_channel(node):  # which computes rows
            continue
        new = changed(network, x, node, node.meta["layers"], activation=name, parameter=parameter)
        network.replace(node, new, "fuse activation", str(name))
        found = True
    return found


def activation_before_pool(network: Network) -> bool:
    """ReLU of a maximum is the maximum of ReLUs, which the layer before the pool applies as it stores."""
    found = False
    for node in network.calls(steps.unary):
        pool, name = node.args[:2]
        if name not in ("relu", "relu6") or not only_user(pool, node) or pool.target is not steps.max_pool2d:
            continue
        if apart(node) or apart(pool) or not only_user(pool.args[0], pool) or not _bare(pool.args[0]):
            continue
        first = network.step(node, steps.unary, pool.args[0], name, layers=node.meta["layers"])
        new = changed(network, pool, node, (), input=first)
        network.replace(node, new, "activation before the pool", str(name))
        found = True
    return found


def fuse_prologue(network: Network) -> bool:
    """Normalization and ReLU of a convolution's input are applied as the convolution reads it (DenseNet)."""
    found = False
    for node in network.calls(steps.conv2d):
        x = node.args[0]
        if any(node.kwargs.get(k) for k in ("scale", "shift", "input_relu")) or not only_user(x, node):
            continue
        if x.target is not steps.affine or x.kwargs.get("activation", "none") not in ("none", "relu"):
            continue
        if any(other is x for other in node.kwargs.values()):
            continue
        inner, scale, shift = x.args[:3]
        relu = x.kwargs.get("activation") == "relu"
        new = changed(network, node, node, x.meta["layers"], input=inner, scale=scale, shift=shift, input_relu=relu)
        network.replace(node, new, "fuse normalization of the input")
        found = True
    return found


def merge_affine(network: Network) -> bool:
    """Two scales and shifts in a row are one."""
    found = False
    for node in network.calls(steps.affine):
        x = node.args[0]
        if not only_user(x, node) or x.target is not steps.affine or x.kwargs.get("activation", "none") != "none":
            continue
        (a, b), (c, d) = ([network.value(k).double() for k in n.args[1:3]] for n in (x, node))
        like = network.value(node.args[1])
        first = network.constant(of_dtype(a * c, like), f"{node.name}.scale", node)
        second = network.constant(of_dtype(b * c + d, like), f"{node.name}.shift", node)
        new = changed(network, node, node, x.meta["layers"], input=x.args[0], scale=first, shift=second)
        network.replace(node, new, "merge normalizations")
        found = True
    return found


def merge_concat(network: Network) -> bool:
    """A concatenation read by concatenations alone, and slices that lie side by side, are parts of the larger one."""
    found = False
    for node in network.calls(steps.concat):
        parts: list[Node] = []
        for part in node.args[0]:
            inner = part.target is steps.concat and all(user.target is steps.concat for user in part.users)
            parts += part.args[0] if inner else [part]
        joined: list[Any] = []
        for part in parts:
            if joined and _adjoin(joined[-1], part):
                last = joined.pop()
                part = network.step(node, steps.slice_channels, part.args[0], last.args[1], part.args[2])
            joined.append(part)
        if len(joined) == len(node.args[0]) and all(a is b for a, b in zip(joined, node.args[0], strict=True)):
            continue
        new = joined[0] if len(joined) == 1 else network.step(node, steps.concat, joined, layers=node.meta["layers"])
        network.replace(node, new, "merge concatenations")
        found = True
    return found


def _adjoin(one: Node, other: Node) -> bool:
    slices = one.target is steps.slice_channels and other.target is steps.slice_channels
    return slices and one.args[0] is other.args[0] and one.args[2] == other.args[1]


def drop_slices(network: Network) -> bool:
    """A slice of everything is its input; a slice of a slice, or of one part of a concatenation, is read there."""
    found = False
    for node in network.calls(steps.slice_channels):
        x, start, stop = node.args
        if (start, stop) == (0, x.meta["shape"][1]):
            new = x
        elif x.target is steps.slice_channels:
            first = x.args[1]
            new = network.step(node, steps.slice_channels, x.args[0], first + start, first + stop)
        elif x.target is steps.concat:
            at, new = 0, None
            for part in x.args[0]:
                width = part.meta["shape"][1]
                if at <= start and stop <= at + width:
                    new = network.step(node, steps.slice_channels, part, start - at, stop - at)
                at += width
            if new is None:
                continue
        else:
            continue
        network.replace(node, new, "drop slice")
        found = True
    return found


def drop_identities(network: Network) -> bool:
    """What does not change its input: scales of one and shifts of zero."""
    found = False
    for node in network.calls(steps.affine):
        one, zero = network.value(node.args[1]), network.value(node.args[2])
        if one.device.type == "meta" or node.kwargs.get("activation", "none") != "none":
            continue
        if torch.equal(one, torch.ones_like(one)) and torch.equal(zero, torch.zeros_like(zero)):
            network.replace(node, node.args[0], "drop identity")
            found = True
    return found


def drop_repeats(network: Network) -> bool:
    """What computes the same of the same values again, as branches do that each begin with an activation or a view."""
    found = False
    seen: dict[Any, Node] = {}
    for node in network.calls(*steps.STEPS):
        key = _hashable((node.target, node.args, tuple(sorted(node.kwargs.items()))))
        first: Node = seen.setdefault(key, node)
        if first is not node:
            first.meta["layers"] = tuple(dict.fromkeys((*first.meta["layers"], *node.meta["layers"])))
            network.replace(node, first, "drop repeated step")
            found = True
    return found


def _hashable(value: Any) -> Any:
    """Arguments, where equal numbers of different types, or signs of zero, are not the same."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return value if isinstance(value, fx.Node) or callable(value) else (type(value), repr(value))


PASSES: tuple[Callable[[Network], bool], ...] = (
    drop_repeats, compose_attention, compose_gelu, compose_normalize, compose_rms_norm, sequences_as_images, *VIEW_PASSES,
    drop_identities, merge_affine, fold_affine, activation_before_pool, fuse_activation, fold_affine_forward, fuse_residual,
    fuse_prologue, merge_concat, drop_slices, simplify_masks, merge_products,
)  # fmt: skip
