"""What models compose of several operators, as one step: attention, RMS norm, and the GELU by tanh.

softmax(q k^T * scale + masks) v, as torchvision's Swin and many encoders write it, becomes attention with the sum of the masks:
scores are never written to memory. Masks may be added while the batch is split, as into images and their windows: the step then
has five dimensions. 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) is what transformers calls "gelu_new".
Scores may be capped, as Gemma's are, and multiplied by a factor for each head, as those of Swin V2's normalized queries and keys.
x / sqrt(mean(x^2) + eps) is how Llama, T5 and many others write RMS norm, with the weight applied afterwards and, in 16 bits, in
float32 but for the weight: the step rounds once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ai3_ops.graph import steps
from ai3_ops.graph.network import Network, Node, is_constant, only_user, open_sizes
from ai3_ops.operations.step import RULES, Step

aten = torch.ops.aten
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.type_as.default)
_EXPANDS = (steps.expand, aten.expand.default, aten.expand_as.default)
_LARGEST = 2**24  # elements of a mask that is computed beforehand
_SMALLEST = 1e-9  # length of a row that counts as zero


class _Scores(NamedTuple):
    """What leads from a product of query and key to a softmax."""

    query: Node
    key: Node  # transposed
    scale: float
    heads: Tensor | None  # by what each head's scores are multiplied besides
    softcap: float  # c of c * tanh(scores / c); 0: none
    masks: list[tuple[Node, int]]  # what is added, and to scores of how many dimensions
    widest: Node  # the scores with the most dimensions that a mask was added in, or the product


def compose_attention(network: Network) -> bool:
    """A product with the softmax of another product's scores."""
    found = False
    for node in network.calls(*_PRODUCTS):
        softmax = _through_reshapes(node.args[0], node)
        scores = None if softmax is None else _scores_of(network, softmax)
        if scores is None or not _fits(node, scores):
            continue
        mask = _mask_of(network, scores, node)
        if scores.masks and mask is None:
            continue
        network.replace(node, _attention(network, node, softmax, scores, mask), "compose attention")
        found = True
    return found


def _attention(network: Network, product: Node, softmax: Node, scores: _Scores, mask: Node | None) -> Node:
    """Of operands with the batch split as the scores have it; with the product's sizes."""
    layers = tuple(dict.fromkeys((*product.meta["layers"], *softmax.meta["layers"])))
    lead, scales = scores.widest.meta["shape"][:-2], scores.widest.meta["scales"]

    def shown(x: Node, shape: tuple[int, ...], scales: tuple[int, ...]) -> Node:
        if x.meta["shape"] == shape:
            return x
        return network.step(product, steps.reshape, x, open_sizes(shape, scales), layers=layers)

    rank = len(scores.key.meta["shape"])
    key = network.step(product, steps.permute, scores.key, (*range(rank - 2), rank - 1, rank - 2), layers=layers)
    query = scores.query
    if scores.heads is not None:
        factors = network.constant(scores.heads[:, None, None].contiguous(), f"{query.name}_heads", product)
        query = network.step(product, steps.binary, query, factors, "mul", layers=layers)
    operands = [shown(x, (*lead, *x.meta["shape"][-2:]), scales) for x in (query, key, product.args[1])]
    rule = softmax.kwargs.get("algorithm", "default")
    attention: Any = Step.by_operation["attention"].compute
    options = mask, False, scores.scale, scores.softcap
    new = network.step(product, attention, *operands, *options, layers=layers, algorithm=rule)
    return shown(new, product.meta["shape"], product.meta["scales"])


def _through_reshapes(x: Any, user: Node) -> Node | None:
    """The softmax over the last dimension that a product reads, whose leading dimensions may be split or joined behind it."""
    while only_user(x, user) and x.target is steps.reshape and x.meta["shape"][-2:] == x.args[0].meta["shape"][-2:]:
        x, user = x.args[0], x
    softmax = Step.by_operation["softmax"].compute
    if not only_user(x, user) or x.target is not softmax or x.args[1] != -1:
        return None
    return x if x.kwargs.get("algorithm", "default") in RULES[:2] else None


def _scores_of(network: Network, softmax: Node) -> _Scores | None:
    """None where something else is done to the scores than to scale, to cap, to add to and to reshape them."""
    scale, masks, user = 1.0, list[tuple[Node, int]](), softmax
    heads, shape_of_heads, softcap = None, None, 0.0
    x, widest = softmax.args[0], None
    while only_user(x, user):
        if widest is None or len(x.meta["shape"]) > len(widest.meta["shape"]):
            widest = x
        plain = scale == 1 and heads is None and not softcap  # of what is added before these, they are of the sum
        if x.target is steps.binary and x.args[2] == "add" and not x.kwargs and plain:
            masks.append((x.args[1], len(x.meta["shape"])))
        elif (cap := _cap_of(network, x)) is not None and heads is None and not softcap and scale * cap[0] > 0:
            softcap = scale * cap[0]
            scale, x, user = softcap * cap[1], x.args[0], x
        elif x.target is steps.affine and (factor := _factor_of(network, x)) is not None:
            scale *= factor
        elif (factors := _factors_of_heads(network, x)) is not None and heads is None:
            heads, shape_of_heads = factors, x.meta["shape"]
        elif x.target in _PRODUCTS:
            if heads is not None and (shape_of_heads != x.meta["shape"] or len(x.args[0].meta["shape"]) != 4):
                return None  # heads and batch are one dimension of the query
            query = x.args[0]
            if query.target is steps.affine and (factor := _factor_of(network, query)) is not None:
                scale, query = scale * factor, query.args[0]
            return _Scores(query, x.args[1], scale, heads, softcap, masks, widest)
        elif x.target is not steps.reshape or x.meta["shape"][-2:] != x.args[0].meta["shape"][-2:]:
            return None
        x, user = x.args[0], x
    return None


def _cap_of(network: Network, node: Node) -> tuple[float, float] | None:
    """The factors a, b of a * tanh(b * x), the tanh a step of its own (b is 1) or the activation of the one before."""
    if node.target is not steps.affine:
        return None
    outer, tanh = _factor_of(network, node), cast(fx.Node, node.args[0])
    if outer is None or not only_user(tanh, node):
        return None
    if tanh.target is steps.affine and tanh.kwargs == {"activation": "tanh"}:
        inner = _alike(network, tanh, activated=True)
        return None if inner is None or inner[1] != 0 else (outer, inner[0])
    return (outer, 1.0) if tanh.target is steps.unary and tanh.args[1] == "tanh" else None


def _factors_of_heads(network: Network, node: Node) -> Tensor | None:
    """By what a step multiplies each head of (N, H, L, S); None where it does anything else."""
    if node.target is not steps.affine or node.kwargs or len(node.meta["shape"]) != 4:
        return None
    scale, shift = (network.value(a) for a in node.args[1:3])
    return None if bool(shift.any()) else scale


def _factor_of(network: Network, affine: Node) -> float | None:
    """By what a step multiplies all elements alike; None where it does anything else."""
    found = _alike(network, affine)
    return found[0] if found is not None and found[1] == 0 else None


def _alike(network: Network, node: Any, activated: bool = False) -> tuple[float, float] | None:
    """Factor and summand of a step that are the same for all elements; None where it does anything else.

    `activated`: than what its activation does then.
    """
    if not isinstance(node, fx.Node) or node.target is not steps.affine or (node.kwargs and not activated):
        return None
    scale, shift = (network.value(a) for a in node.args[1:3])
    if scale.numel() == 0 or bool((scale != scale[0]).any()) or bool((shift != shift[0]).any()):
        return None
    return float(scale[0]), float(shift[0])


def _fits(product: Node, scores: _Scores) -> bool:
    """Whether all have one batch and as many heads, and four or five dimensions, of which the first alone may have the batch."""
    widest, all_read = scores.widest, (scores.query, scores.key, product.args[1], product, scores.widest)
    if any(not isinstance(x, fx.Node) or x.meta["shape"] is None or x.meta.get("scales") is None for x in all_read):
        return False
    if any(x.meta["dtype"] != product.meta["dtype"] or 0 in x.meta["shape"] for x in all_read):
        return False
    shapes = [x.meta["shape"] for x in (scores.query, scores.key, product.args[1], product)]
    one = len({shape[:-2] for shape in shapes}) == 1 and len({x.meta["scales"][:-2] for x in all_read[:4]}) == 1
    return one and len(widest.meta["shape"]) in (4, 5) and not any(widest.meta["scales"][1:])


def _mask_of(network: Network, scores: _Scores, before: Node) -> Node | None:
    """The sum of what is added to the scores, of as many dimensions; None where there is nothing, or no such sum."""
    rank, total = len(scores.widest.meta["shape"]), None
    dtype = scores.widest.meta["dtype"]
    for mask, own in scores.masks:
        if mask.meta["dtype"] != dtype or mask.meta["shape"] is None:
            return None
        if not is_constant(mask):  # read as it is
            return mask if len(scores.masks) == 1 and own == rank and len(mask.meta["shape"]) > 1 else None
        value = network.value(mask)
        value = value.reshape(*[1] * (own - value.ndim), *value.shape)
        if own < rank:
            if any(n != 1 for n in value.shape[:-3]):
                return None
            value = value.reshape(*[1] * (rank - value.ndim), *value.shape)
        pairs = zip(value.shape, scores.widest.meta["shape"], strict=True)
        if any(n not in (1, size) for n, size in pairs):  # of batch and heads, which were one dimension
            return None
        total = value.double() if total is None else total + value
        if total.numel() > _LARGEST:
            return None
    if total is None or bool((total == -torch.inf).all(-1).any()):  # of such a row a softmax is NaN
        return None
    shape = scores.widest.meta["shape"]
    if any(
        n not in (1, size) for n, size in zip(total.shape, shape, strict=True)
    ):  # of batch and heads, which were one dimension
        return None
    return network.constant(total.to(dtype).contiguous(), f"{scores.masks[0][0].target}.mask", before)


def compose_normalize(network: Network) -> bool:
    """x / max(|x|, eps) over the last dimension, as `F.normalize` writes it: RMS norm, whose sum of squares has eps^2 added.

    Where eps is so small that the two differ in rows alone that are as good as zero.
    """
    found = False
    for node in network.calls(aten.div.Tensor):
        x, length, user = node.args[0], node.args[1], node
        while only_user(length, user) and length.target in _EXPANDS:
            length, user = length.args[0], length
        if not only_user(length, user) or length.target is not aten.clamp_min.default:
            continue
        norm, eps = length.args
        if not only_user(norm, length) or norm.target is not aten.linalg_vector_norm.default:
            continue
        rank, dtype = len(x.meta["shape"]), x.meta["dtype"]
        read, order, dims, keep = (*norm.args, 2, None, False)[:4]
        if read is not x or order != 2 or list(dims or ()) not in ([-1], [rank - 1]) or not keep or norm.kwargs:
            continue
        features, least = x.meta["shape"][-1], float(torch.tensor(eps, dtype=dtype))
        if features == 0 or x.meta["scales"][-1]:  # known of this batch alone
            continue
        weight = torch.full((features,), features**-0.5, dtype=dtype, device=network.device)
        exact = dtype.itemsize > 2 or float(weight[0]) == features**-0.5
        if not 0 < least <= _SMALLEST or not exact or node.meta["dtype"] != dtype:
            continue
        scale = network.constant(weight, f"{node.name}_weight", node)
        rms_norm: Any = Step.by_operation["rms_norm"].compute
        new = network.step(node, rms_norm, x, (features,), scale, eps**2 / features, layers=node.meta["layers"])
        network.replace(node, new, "compose normalize")
        found = True
    return found


def compose_rms_norm(network: Network) -> bool:
    """Of products with 1 / sqrt(mean(x^2) + eps) over the last dimension, and with a weight then."""
    found = False
    for node in network.calls(steps.binary):
        if node.args[2] != "mul" or node.kwargs:
            continue
        for x, root in (node.args[:2], node.args[1::-1]):
            eps = _eps_of_root(network, root, node, x)
            if eps is not None and _rms_norm(network, node, x, eps):
                found = True
                break
    return found


def _eps_of_root(network: Network, root: Any, product: Node, x: Any) -> float | None:
    """Of 1 / sqrt(mean(x^2) + eps), which nothing but the product reads; None where it is something else."""
    if not only_user(root, product) or root.target is not aten.rsqrt.default or not x.meta["shape"]:
        return None
    total: Any = root.args[0]
    alike = _alike(network, total) if only_user(total, root) else None
    mean: Any = total.args[0] if alike is not None and alike[0] == 1 and alike[1] > 0 else None
    if alike is None or not only_user(mean, total) or mean.target is not aten.mean.dim:
        return None
    square, dims, keep = (*mean.args, False)[:3]
    if list(dims) not in ([-1], [len(x.meta["shape"]) - 1]) or not keep or len(mean.args) > 3 or mean.kwargs:
        return None
    if not only_user(square, mean):
        return None
    powers = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    products = square.target is steps.binary and square.args[2] == "mul" and square.args[1] is square.args[0]
    if not powers and not products and square.target is not aten.square.default:
        return None
    return alike[1] if _unwidened(square.args[0]) is _unwidened(x) and not square.kwargs else None


def _rms_norm(network: Network, product: Node, x: Any, eps: float) -> bool:
    """In the place of a product, or of the rounding to 16 bits and the weight that follow it."""
    last, weight, source, features = product, None, _unwidened(x), x.meta["shape"][-1]
    after: Any = next(iter(last.users), None)
    if source.meta["dtype"] != product.meta["dtype"]:
        if only_user(last, after) and after.target in _CASTS and after.meta["dtype"] == source.meta["dtype"]:
            x, last = source, after
        elif x is source:
            return False
    after = next(iter(last.users), None)
    if only_user(last, after) and after.target is steps.affine and not after.kwargs and after.args[0] is last:
        scale, shift = (network.value(a) for a in after.args[1:3])
        if len(last.meta["shape"]) != 4 and scale.numel() == features and not bool(shift.any()):
            last, weight = after, after.args[1]
    layers = tuple(dict.fromkeys((*last.meta["layers"], *product.meta["layers"])))
    rms_norm: Any = Step.by_operation["rms_norm"].compute
    new = network.step(last, rms_norm, x, (features,), weight, eps, layers=layers)
    network.replace(last, new, "compose rms norm")
    return True


def _unwidened(x: Any) -> Any:
    """What a value of float32 was in 16 bits, or the value itself."""
    if not isinstance(x, fx.Node) or x.target not in _CASTS or x.meta["dtype"] != torch.float32:
        return x
    narrow: Any = x.args[0]
    return narrow if narrow.meta["dtype"].itemsize == 2 else x


def compose_gelu(network: Network) -> bool:
    """Of the product of x / 2 with 1 + tanh(...), which nothing else reads."""
    found = False
    for node in network.calls(steps.binary):
        if node.args[2] != "mul" or node.kwargs:
            continue
        for half, other in (node.args[:2], reversed(node.args[:2])):
            x = half.args[0] if _near(network, half, 0.5, 0.0) else None
            if x is not None and only_user(other, node) and _is_tanh_of(network, other, x):
                new = network.step(node, steps.unary, x, "gelu_tanh", layers=node.meta["layers"])
                network.replace(node, new, "compose gelu")
                found = True
                break
    return found


def _near(network: Network, node: Any, factor: float, summand: float) -> bool:
    """Whether a step multiplies and adds so, up to what the model's type rounds."""
    found, wanted = _alike(network, node), (factor, summand)
    eps = 0.0 if found is None else torch.finfo(node.meta["dtype"]).eps
    return found is not None and all(abs(a - b) <= eps * abs(b) for a, b in zip(found, wanted, strict=True))


def _is_tanh_of(network: Network, node: Any, x: Node) -> bool:
    """1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    if not _near(network, node, 1.0, 1.0):
        return False
    tanh = node.args[0]
    if not only_user(tanh, node) or tanh.target is not steps.unary or tanh.args[1] != "tanh":
        return False
    inner = tanh.args[0]
    if not only_user(inner, tanh) or not _near(network, inner, math.sqrt(2 / math.pi), 0.0):
        return False
    total = inner.args[0]
    if not only_user(total, inner) or total.target is not steps.binary or total.args[2] != "add" or total.kwargs:
        return False
    cubes = [a for a in total.args[:2] if a is not x]
    if len(cubes) != 1 or not only_user(cubes[0], total) or not _near(network, cubes[0], 0.044715, 0.0):
        return False
    power = cubes[0].args[0]
    return bool(only_user(power, cubes[0]) and power.target is aten.pow.Tensor_Scalar and power.args == (x, 3))
