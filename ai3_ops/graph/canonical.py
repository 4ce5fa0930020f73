"""From PyTorch's operators to our steps (`ai3_ops.graph.steps`): one small function for each operator that has one.

What has none stays as it is, and PyTorch computes it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ai3_ops.graph import steps
from ai3_ops.graph.network import Network, call, is_constant, open_sizes, signature_of
from ai3_ops.graph.sequences import as_image, as_sequence, follows_image, image_of, is_sequence, on_image
from ai3_ops.operations.step import Step

aten = torch.ops.aten
Translation = Callable[..., "fx.Node | None"]  # (network, node, *the operator's arguments): the new node, or None
_TRANSLATIONS: dict[Any, Translation] = {}


def translates(*operators: Any) -> Callable[[Translation], Translation]:
    """Registers what an operator becomes."""

    def register(function: Translation) -> Translation:
        _TRANSLATIONS.update(dict.fromkeys(operators, function))
        return function

    return register


def _made_dense(node: Any) -> bool:
    """Whether a value is a copy in its dimensions' order, or follows one as it lies."""
    while node.target in _KEEPS:
        node = node.args[0]
    return node.target in _COPIES


def canonicalize(network: Network) -> None:
    """Folds what depends on constants alone, and makes steps of the operators that have one."""
    returned: Any = network.output.args[0]
    network.dense = frozenset(place for place, node in enumerate(returned) if _made_dense(node))
    fold_constants(network)
    sized = _by_lengths(network)
    for node in list(network.graph.nodes):
        translation = _translation_of(node.target) if node.op == "call_function" else None
        if translation is None or node.meta["shape"] is None or node in sized:
            continue
        try:
            new = translation(network, node, *_positional(node))
        except (TypeError, ValueError, KeyError, AttributeError):  # an unusual form of the call: PyTorch computes it
            new = None
        if new is None:
            continue
        if new.meta["shape"] != node.meta["shape"] or new.meta["dtype"] != node.meta["dtype"]:
            network.remove(new)
            continue
        new.meta["layers"] = new.meta["layers"] or node.meta["layers"]
        new.meta["scales"] = node.meta["scales"] if new.meta["scales"] is None else new.meta["scales"]
        new.meta.setdefault("lengths", node.meta.get("lengths", ()))
        new.meta.setdefault("call", node.meta.get("call", ""))  # of a new step: an identity's input has its own
        node.replace_all_uses_with(new)
        network.remove(node)
    # What is left is PyTorch's.
    for node in network.calls(
        aten.view.default, aten._unsafe_view.default
    ):  # copies that made its input dense are gone
        node.target = aten.reshape.default
    for node in network.calls(*_AS_IT_LIES):
        x = node.args[0]
        with network.graph.inserting_before(node):
            dense = network.graph.call_function(aten.contiguous.default, (x,))
        dense.meta.update(x.meta)
        node.replace_input_with(x, dense)
    network.tidy()


_COPIES = (aten.clone.default, aten.contiguous.default)
_KEEPS = (aten.detach.default, aten.alias.default)  # a value as it lies
# What reads elements as they lie in memory.
_AS_IT_LIES = (aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default)


def _by_lengths(network: Network) -> set[fx.Node]:
    """What follows from open lengths alone, and integers and masks with sizes that do: a step would hold these as numbers.

    PyTorch computes the former once for each length (`ai3_ops.programs.sized`).
    """
    alone, found = set[fx.Node](), set[fx.Node]()
    for node in network.graph.nodes:
        if node.op == "call_function":
            sizes = [a for a in node.all_input_nodes if a.meta["dtype"] is None and any(a.meta["lengths"])]
            values = [a for a in node.all_input_nodes if a.meta["dtype"] is not None and not is_constant(a)]
            if (sizes or values) and all(a in alone for a in values):
                alone.add(node)
            elif sizes and not _floating(node):
                found.add(node)
    return found | alone


def _translation_of(target: Any) -> Translation | None:
    """What an operator becomes: one of the steps here or, where that is none, of an operation's own."""
    found = [_TRANSLATIONS[target]] if target in _TRANSLATIONS else []
    for function, step in Step.by_function.items():
        if (arguments := step.stands_for.get(target)) is not None:
            found.append(functools.partial(_own_step, function, step, arguments))
    if len(found) < 2:
        return found[0] if found else None
    return lambda *args: next((new for f in found if (new := f(*args)) is not None), None)


def _own_step(function: Any, step: Step, arguments: Any, net: Network, node: fx.Node, *args: Any) -> fx.Node | None:
    if not _known(*(a for a in args if isinstance(a, fx.Node))) or (given := arguments(*args)) is None:
        return None
    named = signature_of(function).bind(*given).arguments
    if not all(named.get(name) is None or is_constant(named[name]) for name in step.constants) or not _floating(
        given[0]
    ):
        return None
    return net.step(node, function, *given, layers=node.meta["layers"])


def fold_constants(network: Network) -> None:
    """Computes once what depends on constants alone (parametrizations, tables of positions)."""
    known: dict[fx.Node, Any] = {}
    for node in list(network.graph.nodes):
        if node.op != "call_function" or node.target in steps.STEPS:
            continue
        inputs = [a for a in node.all_input_nodes if not (node.target in _NEW and a is node.args[0])]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        if not all(is_constant(a) or a in known for a in inputs) or (not inputs and node.meta["shape"] is None):
            continue
        with torch.no_grad():
            value = call(node, lambda a: known[a] if a in known else _value(network, a))
        known[node] = value
        if isinstance(value, Tensor):
            new = network.constant(value.clone(), f"{node.name}_folded", node)
            new.meta["layers"] = node.meta["layers"]
            node.replace_all_uses_with(new)
    network.tidy()


# Of their first argument these read only the type.
_NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


def _value(network: Network, node: fx.Node) -> Tensor:
    return (
        network.value(node) if is_constant(node) else torch.empty((), dtype=node.meta["dtype"], device=network.device)
    )


def _positional(node: fx.Node) -> list[Any]:
    """The arguments in the order of the operator's schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.args)
    values = list(node.args)
    for argument in schema.arguments[len(values) :]:
        values.append(node.kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None))
    return values


def _pair(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
    if len(pair) != 2 or not all(isinstance(v, int) for v in pair):
        raise ValueError
    return pair


def _single(value: Any) -> tuple[int]:
    single = (value,) if isinstance(value, int) else tuple(value)
    if len(single) != 1 or not isinstance(single[0], int):
        raise ValueError
    return single


def _is_image(*nodes: Any) -> bool:
    return all(isinstance(n, fx.Node) and n.meta["shape"] is not None and len(n.meta["shape"]) == 4 for n in nodes)


def _floating(node: fx.Node) -> bool:
    return node.meta["dtype"] is not None and node.meta["dtype"].is_floating_point


# Layers with weights --------------------------------------------------------------------------------------------------
def _are_constants(weight: Any, bias: Any) -> bool:
    return is_constant(weight) and (bias is None or is_constant(bias))


@translates(aten.conv2d.default)
def _conv2d(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> fx.Node | None:
    if not _is_image(x) or not _are_constants(weight, bias):
        return None
    window = _pair(stride), _pair(padding), _pair(dilation), groups
    return net.step(node, steps.conv2d, x, weight, bias, *window, layers=node.meta["layers"])


@translates(aten.conv1d.default)
def _conv1d(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> fx.Node | None:
    if not is_sequence(x) or not _are_constants(weight, bias):
        return None
    window = (1, *_single(stride)), (0, *_single(padding)), (1, *_single(dilation)), groups
    weight = as_image(net, node, weight)
    return on_image(net, node, x, steps.conv2d, weight, bias, *window, sequence=True)


@translates(aten.conv2d.padding, aten.conv1d.padding)
def _conv_padding(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: str, dilation: Any, groups: int
) -> fx.Node | None:
    kernel = weight.meta["shape"][2:]
    spacing, of = (_single(dilation), _conv1d) if len(kernel) == 1 else (_pair(dilation), _conv2d)
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(spacing, kernel, strict=True)]
    if any(t % 2 for t in total):
        return None
    return of(net, node, x, weight, bias, stride, [t // 2 for t in total], dilation, groups)


@translates(aten.convolution.default)
def _convolution(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> fx.Node | None:  # fmt: skip
    if transposed:
        return None
    of = _conv1d if len(weight.meta["shape"]) == 3 else _conv2d
    return of(net, node, x, weight, bias, stride, padding, dilation, groups)


@translates(aten.linear.default)
def _linear(net: Network, node: fx.Node, x: Any, weight: Any, bias: Any) -> fx.Node | None:
    if len(x.meta["shape"]) < 2 or not _are_constants(weight, bias) or len(weight.meta["shape"]) != 2:
        return None
    return net.step(node, steps.linear, x, weight, bias, layers=node.meta["layers"])


@translates(aten.einsum.default)
def _einsum(net: Network, node: fx.Node, equation: str, operands: Any, path: Any = None) -> fx.Node | None:
    """A product of two values over their last dimensions, or over the last one of the first and the one before of the second."""
    left, _, result = equation.replace(" ", "").partition("->")
    one, _, other = left.partition(",")
    if len(operands) != 2 or any(not w.isalpha() or len({*w}) < len(w) or len(w) < 3 for w in (one, other, result)):
        return None
    x, y = operands
    batch, i, k = one[:-2], one[-2], one[-1]
    j = result[-1]
    if other == batch + j + k and result == batch + i + j and j not in one:
        y = _transpose(net, node, y, -1, -2)
    elif other != batch + k + j or result != batch + i + j or j in one:
        return None
    if y is None or x.meta["shape"][:-2] != y.meta["shape"][:-2]:
        return None
    with net.graph.inserting_before(node):
        product = net.graph.call_function(aten.matmul.default, (x, y))
    product.meta.update(node.meta)
    return product


@translates(aten.addmm.default)
def _addmm(net: Network, node: fx.Node, bias: Any, x: Any, weight: Any, beta: Any, alpha: Any) -> fx.Node | None:
    if beta != 1 or alpha != 1 or not is_constant(weight) or not is_constant(bias) or len(bias.meta["shape"]) != 1:
        return None
    turned = net.constant(net.value(weight).t().contiguous(), f"{weight.target}_t", node)
    return net.step(node, steps.linear, x, turned, bias, layers=node.meta["layers"])


# Normalization and arithmetic with constants --------------------------------------------------------------------------
@translates(operator.getitem)
def _batch_norm(net: Network, node: fx.Node, normalized: Any, index: Any) -> fx.Node | None:
    if index != 0 or getattr(normalized, "target", None) is not aten._native_batch_norm_legit_no_training.default:
        return _part(net, node, normalized, index)
    x, weight, bias, mean, variance, _, epsilon = _positional(normalized)
    return _normalized(net, node, x, weight, bias, mean, variance, epsilon, normalized.meta["layers"])


@translates(aten.batch_norm.default)
def _batch_norm_whole(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, _: float,
    epsilon: float, __: bool,
) -> fx.Node | None:  # fmt: skip
    return None if training else _normalized(net, node, x, weight, bias, mean, variance, epsilon, node.meta["layers"])


def _normalized(
    net: Network, node: fx.Node, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, epsilon: float,
    layers: tuple[str, ...],
) -> fx.Node | None:  # fmt: skip
    rank = len(x.meta["shape"])
    if (rank not in (2, 4) and not is_sequence(x)) or not all(
        is_constant(c) for c in (weight, bias, mean, variance) if c
    ):
        return None
    if not is_constant(mean) or not is_constant(variance):
        return None
    dtype, name = x.meta["dtype"], mean.target.rpartition(".")[0] or mean.target
    scale = (net.value(variance).double() + epsilon).rsqrt()
    scale = scale if weight is None else scale * net.value(weight).double()
    shift = -net.value(mean).double() * scale
    shift = shift if bias is None else shift + net.value(bias).double()
    if rank != 3:
        return _affine(net, node, x, scale.to(dtype), shift.to(dtype), name, layers)
    image = as_image(net, node, x)
    return as_sequence(net, node, _affine(net, node, image, scale.to(dtype), shift.to(dtype), name, layers))


def _affine(
    net: Network, node: fx.Node, x: fx.Node, scale: Tensor, shift: Tensor, name: str, layers: tuple[str, ...]
) -> fx.Node:
    a, b = net.constant(scale, f"{name}.scale", node), net.constant(shift, f"{name}.shift", node)
    return net.step(node, steps.affine, x, a, b, layers=layers)


def _by_channel(net: Network, x: fx.Node, value: Any) -> Tensor | None:
    """A number or constant that multiplies or shifts each channel of x alike, as (C); None where it does not."""
    shape = x.meta["shape"]
    if len(shape) < 2 or not _floating(x):
        return None
    dim = 1 if len(shape) == 4 else len(shape) - 1
    dtype, channels = x.meta["dtype"], shape[dim]
    scales = x.meta["scales"]
    if net.dynamic if scales is None else scales[dim]:  # as many as the batch has, or who knows
        return None
    if isinstance(value, (int, float)):
        filled = torch.full((channels,), float(value), dtype=torch.float64, device=net.device).to(dtype)
        fits = filled.isfinite().all() or not math.isfinite(value)
        return filled if fits else None  # PyTorch computes with the number itself
    if not is_constant(value) or value.meta["dtype"] != dtype:
        return None
    constant = net.value(value)
    if constant.numel() == 1 and constant.ndim <= len(shape):
        return constant.reshape(1).expand(channels).contiguous()
    wanted = (channels, 1, 1) if len(shape) == 4 else (channels,)
    lead = len(shape) - len(wanted)
    if tuple(constant.shape) in [(*[1] * n, *wanted) for n in range(lead + 1)]:
        return constant.reshape(-1).contiguous()
    return None


def _inverse(value: Tensor) -> Tensor | None:
    """1 / value; None where that is beyond the type, or less than its smallest normal number and so has lost digits."""
    inverse = 1 / value
    kept = inverse.isfinite() & (inverse.abs() >= torch.finfo(value.dtype).tiny)
    return inverse if bool((kept | ~value.isfinite()).all()) else None


def _arithmetic(net: Network, node: fx.Node, x: Any, y: Any, name: str) -> fx.Node | None:
    """add, sub, mul, div: with a constant an affine step, of two values of the network a binary one."""
    if not isinstance(x, fx.Node) or is_constant(x):
        if name == "sub" or name == "div":
            return None
        x, y = y, x
    if not isinstance(x, fx.Node) or x.meta["shape"] is None or not _floating(x):
        return None
    if not isinstance(y, fx.Node) or is_constant(y):
        # A length that is open is no number of channels.
        image = image_of(x)
        if image is None and is_sequence(x) and node.meta.get("lengths", ())[-1:] == (True,):
            image = as_image(net, node, x)
        other = as_image(net, node, y) if image is not None and isinstance(y, fx.Node) else y
        if image is not None and (scaled := _arithmetic(net, node, image, other, name)) is not None:
            return as_sequence(net, node, scaled)
        if (node.meta.get("lengths") or ())[1:2] == (True,) and len(x.meta["shape"]) == 4:
            return _arithmetic_of_rows(net, node, x, y, name)
        values = _by_channel(net, x, y)
        if values is None:
            return _with_table(net, node, x, y, name)
        one, zero = torch.ones_like(values), torch.zeros_like(values)
        match name:
            case "add" | "sub":
                pair = one, values if name == "add" else -values
            case _:
                factors = values if name == "mul" else _inverse(values)
                if factors is None:
                    return None
                pair = factors, zero
        return _affine(net, node, x, *pair, node.name, node.meta["layers"])
    if name not in ("add", "mul") or y.meta["shape"] is None or x.meta["dtype"] != y.meta["dtype"]:
        return None
    if not _broadcasts(node, x, y):
        x, y = y, x
        if not _broadcasts(node, x, y):
            return None
    return net.step(node, steps.binary, x, y, name, layers=node.meta["layers"])


def _arithmetic_of_rows(net: Network, node: fx.Node, x: fx.Node, y: Any, name: str) -> fx.Node | None:
    """With a number where an open length stands in the channels' place: of heads of queries, whose features are rows together."""
    one = not isinstance(y, fx.Node) or y.meta["shape"] in ((), (1,))
    shape, scales = x.meta["shape"], x.meta["scales"]
    if not one or scales is None or any(scales[1:]) or any(node.meta["lengths"][2:]):
        return _with_table(net, node, x, y, name)
    sizes = (-1 if scales[0] else shape[0], shape[1], shape[2] * shape[3])
    rows = net.step(node, steps.reshape, x, sizes, layers=())
    scaled = _arithmetic(net, node, rows, y, name)
    return None if scaled is None else _reshaped(net, node, scaled, node)


def _broadcasts(node: fx.Node, x: fx.Node, y: fx.Node) -> bool:
    """Whether y is expanded to x's sizes, or has them, whatever the batch; along no dimension that depends on it but the first.

    Sizes alone do not tell: with a batch of one they are the same of what has one item for each, and of what has one for all.
    """
    shape, scales = x.meta["shape"], x.meta["scales"]
    if shape != node.meta["shape"] or scales is None or scales != node.meta["scales"] or y.meta["scales"] is None:
        return False
    more = len(shape) - len(y.meta["shape"])
    if more < 0:
        return False
    other, own = (1,) * more + y.meta["shape"], (0,) * more + y.meta["scales"]
    same = ((n, j) == (m, k) or not (j or k) for n, m, j, k in zip(other, shape, own, scales, strict=True))
    return all([next(same, True) or own[0] == 0, *same])


def _with_table(net: Network, node: fx.Node, x: fx.Node, y: Any, name: str) -> fx.Node | None:
    """A constant that differs along several dimensions, such as positions."""
    if not is_constant(y) or y.meta["dtype"] != x.meta["dtype"] or not _broadcasts(node, x, y):
        return None
    if name in ("sub", "div"):
        value = net.value(y)
        other = -value if name == "sub" else _inverse(value)
        if other is None:
            return None
        y = net.constant(other, f"{y.target}.{name}", node)
    return net.step(node, steps.binary, x, y, {"sub": "add", "div": "mul"}.get(name, name), layers=node.meta["layers"])


@translates(aten.add.Tensor, aten.sub.Tensor)
def _add(net: Network, node: fx.Node, x: Any, y: Any, alpha: Any = 1) -> fx.Node | None:
    name = "add" if node.target is aten.add.Tensor else "sub"
    return _arithmetic(net, node, x, y, name) if alpha == 1 else None


@translates(aten.mul.Tensor, aten.div.Tensor, operator.add, operator.mul)
def _mul(net: Network, node: fx.Node, x: Any, y: Any) -> fx.Node | None:
    names = {aten.mul.Tensor: "mul", aten.div.Tensor: "div", operator.add: "add", operator.mul: "mul"}
    return _arithmetic(net, node, x, y, names[node.target])


@translates(aten.neg.default)
def _neg(net: Network, node: fx.Node, x: Any) -> fx.Node | None:
    return _arithmetic(net, node, x, -1.0, "mul")


@translates(aten.rsub.Scalar)
def _rsub(net: Network, node: fx.Node, x: Any, y: Any, alpha: Any = 1) -> fx.Node | None:
    negative = _arithmetic(net, node, x, -1.0, "mul") if alpha == 1 else None
    return None if negative is None else _arithmetic(net, node, negative, y, "add")


# Activations ----------------------------------------------------------------------------------------------------------
_PLAIN = {
    aten.relu.default: "relu",
    aten.relu6.default: "relu6",
    aten.hardswish.default: "hardswish",
    aten.silu.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.tanh.default: "tanh",
}


@translates(*_PLAIN)
def _unary(net: Network, node: Any, x: Any) -> fx.Node | None:
    if not _floating(x):
        return None
    return net.step(node, steps.unary, x, _PLAIN[node.target], layers=node.meta["layers"])


@translates(aten.gelu.default)
def _gelu(net: Network, node: fx.Node, x: Any, approximate: str) -> fx.Node | None:
    name = {"none": "gelu", "tanh": "gelu_tanh"}[approximate]
    return net.step(node, steps.unary, x, name, layers=node.meta["layers"])


@translates(aten.hardtanh.default, aten.clamp.default)
def _clamp(net: Network, node: fx.Node, x: Any, low: Any, high: Any) -> fx.Node | None:
    name = {(0, 6): "relu6", (0, None): "relu"}.get((low, high))
    return net.step(node, steps.unary, x, name, layers=node.meta["layers"]) if name and _floating(x) else None


@translates(aten.clamp_min.default)
def _clamp_min(net: Network, node: fx.Node, x: Any, low: Any) -> fx.Node | None:
    return _clamp(net, node, x, low, None)


@translates(aten.leaky_relu.default)
def _leaky_relu(net: Network, node: fx.Node, x: Any, slope: float) -> fx.Node | None:
    if not _floating(x):
        return None
    return net.step(node, steps.unary, x, "leaky_relu", float(slope), layers=node.meta["layers"])


@translates(aten.elu.default)
def _elu(net: Network, node: fx.Node, x: Any, alpha: float, scale: float, input_scale: float) -> fx.Node | None:
    if (scale, input_scale) != (1, 1) or not _floating(x):
        return None
    return net.step(node, steps.unary, x, "elu", float(alpha), layers=node.meta["layers"])


@translates(aten.prelu.default, aten._prelu_kernel.default)
def _prelu(net: Network, node: fx.Node, x: Any, slope: Any) -> fx.Node | None:
    if not is_constant(slope) or slope.meta["dtype"] != x.meta["dtype"]:
        return None
    shape = x.meta["shape"]
    if follows_image(x) and slope.meta["shape"] == (shape[1],):
        return on_image(net, node, x, steps.unary, "prelu", slope)
    if slope.meta["shape"] != (1,) and not (len(shape) in (2, 4) and slope.meta["shape"] == (shape[1],)):
        values = _by_channel(net, x, slope)  # (1, C, 1, 1), as decompositions have it
        if values is None:
            return None
        slope = net.constant(values, f"{slope.target}.slope", node)
    return net.step(node, steps.unary, x, "prelu", slope, layers=node.meta["layers"])


# Pools ----------------------------------------------------------------------------------------------------------------
@translates(aten.max_pool2d.default)
def _max_pool2d(
    net: Network, node: fx.Node, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> fx.Node | None:
    if not _is_image(x):
        return None
    window = _pair(kernel), _pair(stride or kernel), _pair(padding), _pair(dilation), ceil
    if window[:2] == ((1, 1), (1, 1)):
        return x
    return net.step(node, steps.max_pool2d, x, *window, layers=node.meta["layers"])


@translates(aten.avg_pool2d.default)
def _avg_pool2d(
    net: Network, node: fx.Node, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, pads: bool, divisor: Any
) -> fx.Node | None:
    if not _is_image(x):
        return None
    window = _pair(kernel), _pair(stride or kernel), _pair(padding), ceil, pads, divisor
    if window[:2] == ((1, 1), (1, 1)) and divisor in (None, 1):
        return x
    return net.step(node, steps.avg_pool2d, x, *window, layers=node.meta["layers"])


@translates(aten.adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(net: Network, node: fx.Node, x: Any, size: Any) -> fx.Node | None:
    if not _is_image(x):
        return None
    if _pair(size) == x.meta["shape"][2:]:
        return x
    return net.step(node, steps.adaptive_avg_pool2d, x, _pair(size), layers=node.meta["layers"])


@translates(aten.max_pool1d.default)
def _max_pool1d(
    net: Network, node: fx.Node, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> fx.Node | None:
    kernel, stride = _single(kernel), _single(stride or kernel)
    window = (1, *kernel), (1, *stride), (0, *_single(padding)), (1, *_single(dilation)), ceil
    return on_image(net, node, x, steps.max_pool2d, *window, sequence=True)


@translates(aten.avg_pool1d.default)
def _avg_pool1d(
    net: Network, node: fx.Node, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, pads: bool
) -> fx.Node | None:
    kernel, stride = _single(kernel), _single(stride or kernel)
    window = (1, *kernel), (1, *stride), (0, *_single(padding)), ceil, pads
    return on_image(net, node, x, steps.avg_pool2d, *window, sequence=True)


@translates(aten.adaptive_avg_pool1d.default)
def _adaptive_avg_pool1d(net: Network, node: fx.Node, x: Any, size: Any) -> fx.Node | None:
    return on_image(net, node, x, steps.adaptive_avg_pool2d, (1, *_single(size)), sequence=True)


@translates(aten.glu.default)
def _glu(net: Network, node: fx.Node, x: Any, dim: int) -> fx.Node | None:
    size = x.meta["shape"][dim]
    if size % 2 or not _floating(x):
        return None
    parts = [_cut(net, node, x, dim % len(x.meta["shape"]), a, b) for a, b in ((0, size // 2), (size // 2, size))]
    if None in parts:
        return None
    gate = net.step(node, steps.unary, parts[1], "sigmoid", layers=node.meta["layers"])
    return net.step(node, steps.binary, parts[0], gate, "mul", layers=node.meta["layers"])


@translates(aten.mean.dim)
def _mean(net: Network, node: fx.Node, x: Any, dims: Any, keep: bool, dtype: Any) -> fx.Node | None:
    if not (_is_image(x) or follows_image(x)) or dtype is not None or not _floating(x):
        return None
    rank = len(x.meta["shape"])
    if sorted(d % rank for d in dims) != [*range(2, rank)]:
        return None
    image = x if rank == 4 else as_image(net, node, x)
    pooled = net.step(node, steps.adaptive_avg_pool2d, image, (1, 1), layers=node.meta["layers"], sequence=rank == 3)
    if not keep:
        return net.step(node, steps.flatten, pooled, layers=node.meta["layers"])
    return pooled if rank == 4 else as_sequence(net, node, pooled)


# Views ----------------------------------------------------------------------------------------------------------------
def _known(*nodes: Any) -> bool:
    """Whether sizes are known for every batch."""
    return all(isinstance(n, fx.Node) and n.meta.get("scales") is not None for n in nodes)


@translates(
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten._unsafe_view.default, aten.unflatten.int,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip
def _view(net: Network, node: fx.Node, x: Any, *_: Any) -> fx.Node | None:
    shape, sizes = x.meta["shape"], node.meta["shape"]
    if sizes == shape and node.meta["batched"] and x.meta["batched"]:
        return x
    if len(shape) == 4 and x.meta["batched"] and node.meta["batched"] and sizes == (shape[0], math.prod(shape[1:])):
        return net.step(node, steps.flatten, x, layers=node.meta["layers"])
    return _linear_of_rows(net, node, x) or _reshaped(net, node, x, node)


def _linear_of_rows(net: Network, node: Any, x: Any) -> fx.Node | None:
    """A linear layer of the rows of a batch in one list, as nn.MultiheadAttention has it, that are parted again after it.

    Of rows as they are, a reshape need not know both the batch and a length, which other inputs may change.
    """
    if x.target is not steps.linear or len(x.users) > 1 or len(x.meta["shape"]) != 2:
        return None
    listed, *rest = x.args
    if listed.target is not steps.reshape or len(node.meta["shape"]) < 3 or not _known(listed, listed.args[0], node):
        return None
    of, lead = listed.args[0], len(node.meta["shape"]) - 1
    if any(of.meta[key][:lead] != node.meta[key][:lead] for key in ("shape", "scales")):
        return None
    if (math.prod(of.meta["shape"][:lead]), node.meta["shape"][-1]) != (listed.meta["shape"][0], x.meta["shape"][-1]):
        return None  # rows are parted into more than there were
    shape, scales = ((*node.meta[key][:lead], listed.meta[key][-1]) for key in ("shape", "scales"))
    if sum(map(bool, scales)) > 1:
        return None
    rows = of if of.meta["shape"] == shape else net.step(node, steps.reshape, of, open_sizes(shape, scales), layers=())
    return net.step(node, steps.linear, rows, *rest, layers=x.meta["layers"])


def _reshaped(net: Network, before: fx.Node, x: fx.Node, like: fx.Node) -> fx.Node | None:
    """With the sizes of another node, for every batch."""
    if not _known(x, like) or sum(map(bool, like.meta["scales"])) > 1:
        return None
    if x.meta["shape"] == like.meta["shape"] and x.meta["scales"] == like.meta["scales"]:
        return x
    sizes = open_sizes(like.meta["shape"], like.meta["scales"])
    return net.step(before, steps.reshape, x, sizes, layers=like.meta["layers"])


def _permuted(net: Network, node: fx.Node, x: Any, dims: list[int]) -> fx.Node | None:
    if not _known(x, node):
        return None
    if dims == sorted(dims):
        return x
    return net.step(node, steps.permute, x, tuple(dims), layers=node.meta["layers"])


@translates(aten.permute.default)
def _permute(net: Network, node: fx.Node, x: Any, dims: Any) -> fx.Node | None:
    return _permuted(net, node, x, [d % len(x.meta["shape"]) for d in dims])


@translates(aten.transpose.int, aten.swapaxes.default)
def _transpose(net: Network, node: fx.Node, x: Any, one: int, other: int) -> fx.Node | None:
    dims = [*range(len(x.meta["shape"]))]
    dims[one], dims[other] = dims[other], dims[one]
    return _permuted(net, node, x, dims)


@translates(aten.t.default, aten.mT.default)
def _t(net: Network, node: fx.Node, x: Any) -> fx.Node | None:
    return x if len(x.meta["shape"]) < 2 else _transpose(net, node, x, -1, -2)


def _cut(net: Network, node: fx.Node, x: Any, dim: int, start: int, stop: int) -> fx.Node | None:
    """Part of a dimension that does not depend on the batch."""
    if not _known(x) or x.meta["scales"][dim] or not 0 <= start < stop <= x.meta["shape"][dim]:
        return None
    if (start, stop) == (0, x.meta["shape"][dim]):
        return x
    if _is_image(x) and dim == 1:
        return net.step(node, steps.slice_channels, x, start, stop, layers=node.meta["layers"])
    return net.step(node, steps.cut, x, dim, start, stop, layers=node.meta["layers"])


def _is_open(x: fx.Node, dim: int) -> bool:
    """Whether a dimension has another size in other calls: what is counted from its end, steps would hold as a number."""
    return any(x.meta.get("lengths", ())[dim : dim + 1])


@translates(aten.slice.Tensor)
def _slice(net: Network, node: fx.Node, x: Any, dim: int, start: Any, end: Any, step: int) -> fx.Node | None:
    shape = x.meta["shape"]
    if node.meta["shape"] == shape and node.meta["batched"] and x.meta["batched"]:
        return x
    dim %= len(shape)
    if _is_open(x, dim) and any(isinstance(n, int) and n < 0 for n in (start, end)):
        return None
    first, last, _ = slice(start, end).indices(shape[dim])
    if step != 1:
        return _every(net, node, x, dim, first, last, step)
    return _cut(net, node, x, dim, first, last)


def _every(net: Network, node: fx.Node, x: Any, dim: int, first: int, last: int, step: int) -> fx.Node | None:
    """Each of so many elements: of a dimension that is split into these, one."""
    shape, scales = x.meta["shape"], x.meta["scales"]
    if not _known(x, node) or scales[dim] or shape[dim] % step or first >= step or last <= shape[dim] - step + first:
        return None
    sizes = open_sizes(shape, scales)
    split = net.step(node, steps.reshape, x, (*sizes[:dim], shape[dim] // step, step, *sizes[dim + 1 :]), layers=())
    return _reshaped(net, node, net.step(node, steps.cut, split, dim + 1, first, first + 1, layers=()), node)


@translates(aten.select.int)
def _select(net: Network, node: fx.Node, x: Any, dim: int, index: int) -> fx.Node | None:
    if len(x.meta["shape"]) < 3 or not _known(x, node):
        return None
    dim %= len(x.meta["shape"])
    if index < 0 and _is_open(x, dim):
        return None
    index %= x.meta["shape"][dim]
    part = _cut(net, node, x, dim, index, index + 1)
    return None if part is None else _reshaped(net, node, part, node)


@translates(aten.expand.default)
def _expand(net: Network, node: fx.Node, x: Any, *_: Any) -> fx.Node | None:
    if not _known(x, node):
        return None
    shape, scales = node.meta["shape"], node.meta["scales"]
    sizes = (*[1] * (len(shape) - len(x.meta["shape"])), *x.meta["shape"])
    if sizes == shape and scales == x.meta["scales"]:
        return x
    if is_constant(x):
        x = net.constant(net.value(x).reshape(sizes), f"{x.target}.wide", node)
    elif len(sizes) > len(x.meta["shape"]):
        return None
    to: list[int] = []
    for d, (size, n, k) in enumerate(zip(sizes, shape, scales, strict=True)):
        if k and not x.meta["scales"][d] and (d > 0 or k != 1):
            return None
        to.append(-1 if size == n and k == x.meta["scales"][d] else 0 if k else n)
    like = _batch_before(net, node) if 0 in to else None
    return (
        None
        if 0 in to and like is None
        else net.step(node, steps.expand, x, tuple(to), like, layers=node.meta["layers"])
    )


def _batch_before(net: Network, node: fx.Node) -> fx.Node | None:
    """A value of numbers that is there before a node, with the batch as its first dimension."""
    for other in net.graph.nodes:
        if other is node:
            break
        known = other.op in ("placeholder", "call_function") and other.meta.get("scales")
        if known and known[0] == 1 and len(known) > 1 and _floating(other):
            return other
    return None


@translates(aten.pad.default, aten.constant_pad_nd.default)
def _pad(net: Network, node: fx.Node, x: Any, widths: Any, *rest: Any) -> fx.Node | None:
    """As before windows: joined with a constant. Where the last dimension is padded, as of images for convolutions, it stays."""
    if not any(widths):
        return _same(net, node, x)
    modes = [r for r in rest if isinstance(r, str)]
    values = [float(r) for r in rest if isinstance(r, (int, float))]
    rank, scales, layers = len(x.meta["shape"]), x.meta["scales"], node.meta["layers"]
    if modes not in ([], ["constant"]) or any(widths[:2]) or min(widths) < 0 or len(widths) >= 2 * rank:
        return None
    if not _known(x, node) or not _floating(x) or scales[0] not in (0, 1) or any(scales[1:]):
        return None
    for place in range(2, len(widths), 2):
        dim = rank - 1 - place // 2
        parts = [x]
        for side, width in enumerate(widths[place : place + 2]):
            if not width:
                continue
            sizes = [1 if scales[0] else x.meta["shape"][0], *x.meta["shape"][1:]]
            sizes[dim] = width
            full = torch.full(sizes, values[0] if values else 0.0, dtype=x.meta["dtype"], device=net.device)
            part = net.constant(full, f"{node.name}_{dim}_{side}", node)
            if scales[0]:
                part = net.step(node, steps.expand, part, (0, *[-1] * (rank - 1)), x, layers=layers)
            parts.insert(side * len(parts), part)
        if len(parts) > 1:
            x = net.step(node, steps.join, parts, dim, layers=layers)
    return x


@translates(aten.roll.default)
def _roll(net: Network, node: fx.Node, x: Any, shifts: Any, dims: Any) -> fx.Node | None:
    rank = len(x.meta["shape"])
    if not _known(x) or len(dims) != len(shifts) or any(x.meta["scales"][d] for d in dims):
        return None
    return net.step(node, steps.roll, x, tuple(shifts), tuple(d % rank for d in dims), layers=node.meta["layers"])


@translates(aten.cat.default)
def _cat(net: Network, node: fx.Node, inputs: Any, dim: int) -> fx.Node | None:
    rank = len(node.meta["shape"])
    if not _known(node, *inputs) or any(len(a.meta["shape"]) != rank for a in inputs):
        return None
    if any(a.meta["dtype"] != node.meta["dtype"] for a in inputs) or any(a.meta["scales"][dim] for a in inputs):
        return None
    if len(inputs) == 1:
        return inputs[0]
    if rank in (2, 4) and dim % rank == 1:
        return net.step(node, steps.concat, list(inputs), layers=node.meta["layers"])
    return net.step(node, steps.join, list(inputs), dim % rank, layers=node.meta["layers"])


def _part(net: Network, node: fx.Node, parts: Any, index: Any) -> fx.Node | None:
    """One of the results of split, chunk or unbind."""
    if not isinstance(parts, fx.Node) or parts.op != "call_function":
        return None
    x, *rest = _positional(parts)
    if not isinstance(x, fx.Node) or not _known(x, node):
        return None
    target, rank = parts.target, len(x.meta["shape"])
    if target is aten.unbind.int:
        return _select(net, node, x, rest[0], index)
    dim = rest[1] % rank if len(rest) > 1 else 0
    size = x.meta["shape"][dim]
    if target is aten.split_with_sizes.default:
        widths = list(rest[0])
    elif target in (aten.split.Tensor, aten.chunk.default):
        width = rest[0] if target is aten.split.Tensor else -(-size // rest[0])
        widths = [min(width, size - at) for at in range(0, size, width)]
    else:
        return None
    index %= len(widths)
    start = sum(widths[:index])
    return _cut(net, node, x, dim, start, start + widths[index])


@translates(
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.lift_fresh_copy.default
)
def _same(net: Network, node: fx.Node, x: Any, *_: Any) -> fx.Node | None:
    if any(user.op == "output" for user in node.users) and x.op == "placeholder":
        return None  # an output is a tensor of its own
    return x


@translates(aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default)
def _to(net: Network, node: fx.Node, x: Any, *_: Any) -> fx.Node | None:
    return _same(net, node, x) if x.meta["dtype"] == node.meta["dtype"] else None


@translates(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
def _dropout(net: Network, node: fx.Node, x: Any, _: float, train: bool) -> fx.Node | None:
    return None if train else _same(net, node, x)
