"""Sequences (N, C, L) as images of one row (N, C, 1, L), in which programs compute convolutions, pools and what is around them.

As an image lies with its channels innermost, so does a sequence (N, L, C) whose last dimensions are exchanged: between layers
of transformers and convolutions nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ai3_ops.graph import steps
from ai3_ops.graph.network import Network, Node, is_constant, open_sizes
from ai3_ops.operations.step import Step


def is_sequence(node: Any) -> bool:
    """Whether a value is (N, C, L) for every batch, of which neither C nor L depends on it."""
    if not isinstance(node, fx.Node) or node.meta["shape"] is None or len(node.meta["shape"]) != 3:
        return False
    scales = node.meta.get("scales")
    return scales is not None and not any(scales[1:])


def as_image(network: Network, before: Node, x: Node) -> Node:
    """(N, C, L) as (N, C, 1, L); a constant may have fewer dimensions, as those that are broadcast."""
    if is_constant(x):
        value = network.value(x)
        return network.constant(
            value.reshape(*[1] * (3 - value.ndim), *value.shape).unsqueeze(2), f"{x.target}.row", before
        )
    batch, channels, length = open_sizes(x.meta["shape"], x.meta["scales"])
    return network.step(before, steps.reshape, x, (batch, channels, 1, length), layers=x.meta["layers"])


def _is_read_as_image(node: Node) -> bool:
    """Whether all that reads a sequence reads its image."""
    n, channels, length = node.meta["shape"]
    wanted = (n, channels, 1, length)
    return bool(node.users) and all(u.target is steps.reshape and u.meta["shape"] == wanted for u in node.users)


def as_sequence(network: Network, before: Node, image: Node) -> Node | None:
    """(N, C, 1, L) as (N, C, L); None where a size depends on the batch in another way."""
    shape, scales = image.meta["shape"], image.meta["scales"]
    if scales is None or any(scales[1:]):
        return None
    batch, channels, _, length = open_sizes(shape, scales)
    return network.step(before, steps.reshape, image, (batch, channels, length), layers=image.meta["layers"])


def on_image(
    network: Network, node: Node, x: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Node | None:
    """A step computed on a sequence's image; None where that is no sequence."""
    if not is_sequence(x):
        return None
    image = as_image(network, node, x)
    return as_sequence(network, node, network.step(node, function, image, *args, layers=node.meta["layers"], **kwargs))


def image_of(node: Any) -> Node | None:
    """The image of which a value is the one row, where a step computed one."""
    if not is_sequence(node) or node.target is not steps.reshape:
        return None
    image: Any = node.args[0]
    shape, scales = image.meta["shape"], image.meta["scales"]
    n, channels, length = node.meta["shape"]
    if shape != (n, channels, 1, length) or scales is None or any(scales[1:]) or image.target not in steps.STEPS:
        return None
    return None if image.target in steps.VIEWS else image


def _taken_over() -> list[Callable[..., Any]]:
    """What computes the same of a sequence's image."""
    of_channels = (function for function, step in Step.by_function.items() if step.has_channels)
    return [steps.unary, steps.binary, steps.cut, steps.join, *of_channels]


def follows_image(node: Any) -> bool:
    """Whether a value is computed of an image's row by what `sequences_as_images` takes over, so that it is no (N, L, C)."""
    while is_sequence(node) and node.target in _taken_over():
        node = node.args[0][0] if node.target is steps.join else node.args[0]
    return image_of(node) is not None


def sequences_as_images(network: Network) -> bool:
    """What computes elements, normalizes, or takes channels apart and together, does so before an image is said to be a sequence.

    There the layer before it takes it over, and the layer after it reads an image. So does what only such layers read: it is then
    made an image once.
    """
    found = False
    for node in network.calls(*_taken_over()):
        new = _lifted(network, node)
        back = None if new is None else as_sequence(network, node, new)
        back = _with_rows(network, node) if back is None else back
        if back is not None:
            network.replace(node, back, "sequence as an image")
            found = True
    return found


def _with_rows(network: Network, node: Node) -> Node | None:
    """The sum of rows, (N, L, C) or (L, N, C), with what a convolution makes of them, which then adds as it stores."""
    if node.target is not steps.binary or node.args[2] != "add":
        return None
    layers = node.meta["layers"]
    for x, other in (node.args[:2], node.args[1::-1]):
        image = image_of(x.args[0]) if x.target is steps.permute else None
        same = not is_constant(other) and all(x.meta[k] == other.meta[k] for k in ("shape", "scales"))
        if image is not None and image.target is steps.conv2d and same and len(x.users) == len(x.args[0].users) == 1:
            dims = x.args[1]
            there = network.step(node, steps.permute, other, tuple(map(dims.index, range(3))), layers=layers)
            there = as_image(network, node, there)
            image = network.step(node, steps.binary, image, there, "add", layers=layers, **node.kwargs)
            back = as_sequence(network, node, image)
            return None if back is None else network.step(node, steps.permute, back, dims, layers=layers)
    return None


def _lifted(network: Network, node: Node) -> Node | None:
    layers, kwargs = node.meta["layers"], node.kwargs
    if not is_sequence(node):
        return None
    if node.target is steps.join:
        images = [image_of(a) for a in node.args[0]]
        fits = node.args[1] == 1 and None not in images
        return network.step(node, steps.concat, images, layers=layers) if fits else None
    image = image_of(node.args[0])
    if node.target is steps.unary and image is None and _is_read_as_image(node) and is_sequence(node.args[0]):
        image = as_image(network, node, node.args[0])
    if node.target is steps.binary and image is None and image_of(node.args[1]) is not None:
        image = as_image(network, node, node.args[0]) if is_sequence(node.args[0]) else None
    if image is None:
        return None
    if node.target is steps.unary or node.target in Step.by_function:
        return network.step(node, node.target, image, *node.args[1:], layers=layers, **kwargs)
    if node.target is steps.cut:
        dim, start, stop = node.args[1:]
        if dim == 1:
            return network.step(node, steps.slice_channels, image, start, stop, layers=layers)
        return network.step(node, steps.cut, image, 3, start, stop, layers=layers) if dim == 2 else None
    other, name = node.args[1:3]
    if not is_sequence(other) and not is_constant(other):
        return None
    return network.step(node, steps.binary, image, as_image(network, node, other), name, layers=layers, **kwargs)
