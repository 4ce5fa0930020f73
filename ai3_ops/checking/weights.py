"""Checks of the operators on packed weights, and of what is fused into one: prologue, residual, activation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops.checking.calling import opcheck, raised
from ai3_ops.checking.cases import (
    Call,
    Case,
    Tally,
    allowed,
    calls,
    few_calls,
    operator_arguments,
    reference,
    require,
    same_bits,
    tensors,
    terms,
)
from ai3_ops.checking.values import assert_near
from ai3_ops.operations.activations import ACTIVATIONS, SLOPED
from ai3_ops.registry import OPERATIONS, AlgorithmInfo


def check_packed(info: AlgorithmInfo, tally: Tally) -> None:
    """The operators on packed weights give bitwise what the algorithm gives, and pass opcheck; gradients are an error."""
    pack, packed = (
        getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_{kind}", None) for kind in ("pack", "packed")
    )
    if pack is None or packed is None:
        return tally.skip("keeps no packed weights")
    if info.layout != "any":
        return tally.skip(f"its operators for packed weights convert to {info.layout}")
    for i, call in enumerate(few_calls(info, 6, "float32" if "float32" in info.dtypes else None)):
        x, w, b = (None if t is None else t.contiguous() for t in call.tensors)
        assert x is not None
        assert w is not None
        if w.ndim == 1:
            continue
        window = operator_arguments(info, call.case.arguments)
        weight = pack(w, *window)
        y = packed(x, weight, list(w.shape), b, *window)
        require(same_bits(y, call.operator(x, w, b)), f"{call}: the packed operator gives something else")
        tally.passed += 1
        if i == 0:
            opcheck(call, pack.default, w, *window)
            opcheck(call, packed.default, x, weight, list(w.shape), b, *window)
            error = raised(packed(x.requires_grad_(), weight, list(w.shape), b, *window).sum().backward)
            require(
                isinstance(error, RuntimeError) and "inference" in str(error), f"{call}: packed backward: {error!r}"
            )


def check_prologue(info: AlgorithmInfo, tally: Tally) -> None:
    """Where it says so, packed operators give relu(input * scale + shift) convolved, padding after that; NaN stays NaN."""
    if not info.prologue:
        return tally.skip("applies no scale, shift or relu to its input")
    pack, packed = (getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_{kind}") for kind in ("pack", "packed"))
    aten = OPERATIONS[info.operation].aten
    for call in itertools.chain(calls(info, "integers"), calls(info, "normal")):
        x, w, b = call.tensors
        assert x is not None
        assert w is not None
        window = operator_arguments(info, call.case.arguments)
        wide = torch.float64 if call.dtype == torch.float64 else torch.float32
        of_channels = Case(((x.shape[-3],), (x.shape[-3],)))
        scale, shift = (t for t in tensors(of_channels, wide, info.device, call.fill, 1) if t is not None)
        per_channel = [t.double()[:, None, None] for t in (scale, shift)]
        product, parameters = x.double() * per_channel[0], [w.double(), None if b is None else b.double()]
        exact = aten((product + per_channel[1]).relu(), *parameters, *window)
        magnitudes = [None if t is None else t.abs() for t in (product.abs() + per_channel[1].abs(), *parameters)]
        k = terms(info.operation, call.case) + 2  # and the two roundings of the input
        bound = allowed(info, k, call.dtype, call.fill, exact, aten(*magnitudes, *window))
        weight = pack(w, *window)
        y = packed(x, weight, list(w.shape), b, *window, None, "none", None, scale, shift, True)
        assert_near(call, y, exact, bound)
        tally.passed += 1
        if x.numel() and info.accuracy == "exact" and "expanded" not in call.case.layouts:
            x[..., 0, 0, 0] = math.nan
            y = packed(x, weight, list(w.shape), b, *window, None, "none", None, scale, shift, True)
            theirs = aten((x.double() * per_channel[0] + per_channel[1]).relu(), *parameters, *window)
            require(
                torch.equal(y.isnan(), theirs.isnan()),
                f"{call}: with NaN in a prologue's input, NaN elsewhere than in ATen",
            )


# With a tensor of slopes, which PyTorch's functions do not all take.
_BY_SLOPES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "prelu": lambda t, slopes: torch.where(t > 0, t, t * slopes),
    "leaky_relu": lambda t, slopes: torch.where(t > 0, t, t * slopes),
    "elu": lambda t, slopes: torch.where(t > 0, t, torch.expm1(t) * slopes),
}
_STEEPEST = {"none": 1.0, "relu": 1.0, "relu6": 1.0, "hardswish": 1.5, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
# function(x, slopes), and the largest slope that it has; 1 where it rounds nothing.
STEEP = {name: (_BY_SLOPES.get(name, f), _STEEPEST.get(name, 1.01)) for name, f in ACTIVATIONS.items()}


def slopes(call: Call, name: str) -> Tensor | None:
    """What a fused operator is given as `slope`: one for each output channel, or one for all."""
    weight = call.case.shapes[1]
    assert weight is not None
    if name not in SLOPED:
        return None
    count = 1 if len(weight) == 1 or name == "leaky_relu" else weight[0]
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    return torch.linspace(-0.6, 0.9, count, dtype=dtype, device=call.info.device)


def epilogue(call: Call, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """A residual; activation(output + residual) in float64; the largest error allowed."""
    info, dtype = call.info, call.dtype
    exact, magnitude = reference(info.operation, call.case, dtype, call.fill)
    (residual,) = tensors(Case((tuple(exact.shape),)), dtype, info.device, call.fill, 2)
    assert residual is not None
    k = terms(info.operation, call.case) + 1
    bound = allowed(info, k, dtype, call.fill, exact, magnitude + residual.cpu().double().abs())
    function, slope = STEEP[name]
    given, weight = slopes(call, name), call.case.shapes[1]
    assert weight is not None
    by_channel = None if given is None else given.cpu().double().reshape(-1, *[1] * max(0, len(weight) - 2))
    y = function(exact + residual.cpu().double(), by_channel)
    if info.accuracy != "exact" or call.fill != "integers" or slope > 1:
        unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        bound = slope * bound + (4 * unit if slope > 1 else unit) * (1 + y.abs())
        bound += torch.finfo(dtype).eps * y.abs() + torch.finfo(dtype).smallest_normal
    return residual, y, bound


def check_fused(info: AlgorithmInfo, tally: Tally) -> None:
    """On a plain weight, activation(output + residual) within the bounds of the accuracy class; it passes opcheck."""
    fused = getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_fused", None)
    fuse = [a for a in registry.algorithms(info.operation, info.device) if a.epilogue]
    if fused is None or not (info.epilogue or (info.rule and fuse)):
        return tally.skip("fuses no residual and no activation")
    names = itertools.cycle(a for a in ACTIVATIONS if a == "none" or info.rule or a in info.activations)
    for call in itertools.chain(calls(info, "integers"), calls(info, "normal")):
        inputs, arguments, name = call.tensors, operator_arguments(info, call.case.arguments), next(names)
        residual, exact, bound = epilogue(call, name)
        with_residual = {"residual": residual, "activation": name, "slope": slopes(call, name)}
        assert_near(call, fused(*inputs, *arguments, **with_residual), exact, bound)
        if not tally.passed:
            opcheck(call, fused.default, *inputs, *arguments, **with_residual)
            for t in inputs[:2]:
                assert t is not None
                t.requires_grad_()
            error = raised(fused(*inputs, *arguments, **with_residual).sum().backward)
            words = "fused calls are for inference"
            require(isinstance(error, RuntimeError) and words in str(error), f"{call}: fused backward: {error!r}")
        tally.passed += 1
