"""The tests that every algorithm must pass, as functions: the test-suite and `ai3_ops.check` both run them.

Each function of `CHECKS` takes an algorithm and returns a `Tally` of the cases that passed and of those left out, or raises
an AssertionError that names the failing case of `_cases`. A check that had nothing to do has passed nowhere.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ai3_ops import _library, registry
from ai3_ops._cases import (
    CASES,
    DTYPES,
    LAYOUTS,
    Call,
    Case,
    Tally,
    allowed,
    arranged,
    bad_calls,
    calls,
    close,
    few_calls,
    operator_arguments,
    reference,
    require,
    same_bits,
    search,
    tensors,
    terms,
)
from ai3_ops.operations.weighted import SLOPED
from ai3_ops.registry import OPERATIONS, AlgorithmInfo

HUGE_PAGE = 2 << 20  # large workspaces are rounded up to them


def check_values(info: AlgorithmInfo, tally: Tally) -> None:
    """Within the bounds of the accuracy class on random data, exact on integers; shape, strides and dtype as the fake's."""
    for fill in ("integers", "normal"):
        for call in calls(info, fill):
            assert_within(call, call.run())
            tally.passed += 1


REALISTIC_SECONDS = 20.0  # a slow algorithm is not kept at it for longer


def check_sizes(info: AlgorithmInfo, tally: Tally) -> None:
    """As `values`, on layers of networks and on made-up ones of such sizes, as far as `supports` accepts them."""
    end = time.monotonic() + REALISTIC_SECONDS
    for name in info.dtypes:
        cases = search(info, name).realistic
        if not cases:
            tally.skip(f"no size of networks that it supports in {name}")
        for i, case in enumerate(cases):
            if time.monotonic() > end:
                tally.skip(f"after {REALISTIC_SECONDS:.0f} s", len(cases) - i)
                break
            call = Call(info, case, DTYPES[name], "integers" if i % 2 else "normal")
            assert_within(call, call.run())
            tally.passed += 1


def assert_within(call: Call, output: Tensor) -> None:
    """The output of a call is what it must be."""
    exact, magnitude = reference(call.info.operation, call.case, call.dtype, call.fill)
    k = terms(call.info.operation, call.case)
    assert_near(call, output, exact, allowed(call.info, k, call.dtype, call.fill, exact, magnitude))


def assert_near(call: Call, output: Tensor, exact: Tensor, bound: Tensor) -> None:
    """The output of a call has the shape, dtype and strides that it must have, and is within the bound."""
    require(output.shape == exact.shape, f"{call}: got shape {tuple(output.shape)}, needs {tuple(exact.shape)}")
    require(output.dtype == call.dtype, f"{call}: got dtype {output.dtype}")
    # Not on the meta device, where a tensor of one element gets other strides.
    expected = OPERATIONS[call.info.operation].fake(
        call.info.name, *arranged(call.info.operation, call.tensors, call.case.arguments)
    )
    require(
        output.stride() == expected.stride() or not output.numel(),
        f"{call}: got strides {output.stride()}, needs {expected.stride()}",
    )
    error = (output.cpu().double() - exact.to(call.dtype).double()).abs()
    if call.info.accuracy != "exact" or call.fill != "integers":
        error = (output.cpu().double() - exact).abs()
    bad = ~(error <= bound)
    if bad.any():
        worst = int((error / bound.clamp_min(1e-300)).nan_to_num(math.inf).argmax())
        at, got = error.flatten()[worst], output.cpu().double().flatten()[worst]
        raise AssertionError(
            f"{call}: {int(bad.sum())} of {bad.numel()} outputs are outside the bound of {info_bound(call.info)}; worst: got "
            f"{got:.9g}, float64 reference {exact.flatten()[worst]:.9g}, error {at:.3g}, allowed {bound.flatten()[worst]:.3g}"
        )


def info_bound(info: AlgorithmInfo) -> str:
    """The accuracy class in words."""
    return f"{info.accuracy} algorithms" + (f" ({info.error_bound:g})" if info.error_bound else "")


def check_nonfinite(info: AlgorithmInfo, tally: Tally) -> None:
    """NaN and infinities come out where ATen's do; a method that mixes outputs may spread, never hide them.

    In weight and bias only without padding: whether it is multiplied with the weights differs within ATen too.
    """
    dtype = "float32" if "float32" in info.dtypes else None
    places = [(call, 0) for call in few_calls(info, 3, dtype)]
    if OPERATIONS[info.operation].rounding == "products":
        unpadded = [c for c in few_calls(info, 100, dtype) if c.case.arguments[1:2] in ((), (0,))]
        places += [(c, i) for c in unpadded[:3] for i in (1, 2) if c.case.shapes[i] is not None]
    for (call, place), value in itertools.product(places, (math.nan, math.inf, -math.inf)):
        inputs = call.tensors
        changed = inputs[place]
        assert changed is not None
        inputs[place] = changed = changed.contiguous()
        changed.view(-1)[changed.numel() // 2] = value
        ours = call.operator(*inputs)
        theirs = call.aten(*inputs)
        what = f"{call}: with {value} in tensor {place}"
        hidden = torch.isfinite(ours) & ~torch.isfinite(theirs)
        require(not hidden.any(), f"{what}, {int(hidden.sum())} outputs that must not be finite are")
        if info.accuracy == "exact":
            require(torch.equal(ours.isnan(), theirs.isnan()), f"{what}, NaN elsewhere than in ATen")
            spread = ours.isinf() != theirs.isinf()
            require(not spread.any(), f"{what}, infinities elsewhere than in ATen")
        tally.passed += 1


def check_zeros(info: AlgorithmInfo, tally: Tally) -> None:
    """Of zeros of either sign come zeros of the signs that ATen's have."""
    if not OPERATIONS[info.operation].signed_zeros:
        return tally.skip("ATen's own kernels differ in the signs of zeros")
    for call in few_calls(info, 6, "float32" if "float32" in info.dtypes else None):
        inputs = call.tensors
        assert inputs[0] is not None
        if len(inputs) > 1 and terms(call.info.operation, Case((*call.case.shapes[:2], None))) == 1:
            tally.skip("a sum of one product")  # of which the next comment holds
            continue
        zeros = torch.zeros_like(inputs[0], memory_format=torch.contiguous_format)
        for step in (2, 1):
            zeros.view(-1)[::step] = -0.0
            if len(inputs) > 1 and step == 1:
                continue  # the sign of a sum of -0 alone says whether it began with 0 or with the first product
            values = [zeros, *inputs[1:2], *[None] * len(inputs[2:])]
            ours, theirs = call.operator(*values), call.aten(*values)
            require(same_bits(ours, theirs), f"{call}: of zeros come zeros of other signs than ATen's")
            tally.passed += 1


def check_support(info: AlgorithmInfo, tally: Tally) -> None:
    """`supports` and the operator agree; a refusal is the documented sentence, and the algorithms it names can do the case."""
    name = f"ai3::{info.operation}_{info.name}"
    for dtype, case in itertools.product(DTYPES.values(), CASES[info.operation]):
        call = Call(info, case, dtype)
        if not case.is_of(str(dtype).removeprefix("torch.")):
            continue
        inputs = call.tensors
        ok, reason = registry.supports(info.operation, info.name, *arranged(info.operation, inputs, case.arguments))
        if ok:
            continue
        tally.passed += 1
        require(bool(reason), f"{call}: refused without a reason")
        meta = [None if t is None else t.to("meta") for t in inputs]
        given = arranged(info.operation, meta, case.arguments)
        anywhere = registry.supports(info.operation, info.name, *given)[0]
        for device, moved in ((info.device, inputs), ("meta", meta))[: 1 if anywhere else 2]:
            error = raised(call.operator, *moved)
            require(
                isinstance(error, RuntimeError) and str(error).startswith(name) and reason in str(error),
                f"{call}: `supports` refuses ({reason}), the operator on {device} does not: {error!r}",
            )
        error = raised(call.operator, *inputs)
        _, _, others = str(error).partition("; algorithms that support this case: ")
        require(bool(others), f"{call}: the refusal does not say what supports the case: {error}")
        for other in others.split(", ") if others != "none" else ():
            can, why = registry.supports(info.operation, other, *arranged(info.operation, inputs, case.arguments))
            require(can, f"{call}: the refusal names {other}, which cannot: {why}")
    if not tally.passed:
        tally.skip("refuses none of the operation's cases")


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """What a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def check_errors(info: AlgorithmInfo, tally: Tally) -> None:
    """Bad arguments raise RuntimeErrors that name the operator, with real and with meta tensors; nothing crashes."""
    name = f"ai3::{info.operation}_{info.name}"
    for what, inputs, arguments in bad_calls(info):
        for device in (info.device, "meta"):
            moved = [None if t is None else t.to(device) for t in inputs]
            error = raised(info.operator, *arranged(info.operation, moved, arguments))
            require(
                isinstance(error, RuntimeError) and name in str(error),
                f"{name} on {device}, {what}: needs a RuntimeError that names the operator, got {error!r}",
            )
            tally.passed += 1
    # int[2] in a direct call is an int, and too large an int is an error too.
    if info.operation == "conv2d":
        x = torch.ones(1, 4, 6, 6, dtype=DTYPES[info.dtypes[0]], device=info.device)
        w = torch.ones(6, 4, 3, 3, dtype=x.dtype, device=info.device)
        for stride in (-1, 0, 2**62):
            error = raised(info.operator.overloadpacket, x, w, stride=stride)
            require(isinstance(error, RuntimeError), f"{name}, stride={stride}: needs a RuntimeError, got {error!r}")


def check_determinism(info: AlgorithmInfo, tally: Tally) -> None:
    """Bitwise the same from run to run and with one thread and two, where the algorithm says so; else an alert."""
    threads = torch.get_num_threads()
    for call in few_calls(info, 6, "float32" if "float32" in info.dtypes else None, large=True):
        if info.deterministic:
            first = call.run()
            try:
                for count in (1, 2):
                    torch.set_num_threads(count)
                    hint = "register it with deterministic=False (a header: .deterministic = false) if the method is so"
                    require(same_bits(call.run(), first), f"{call}: differs with {count} threads; {hint}")
            finally:
                torch.set_num_threads(threads)
        with deterministic_mode():
            error = raised(call.run)
            if info.deterministic:
                require(error is None, f"{call}: fails in deterministic mode: {error!r}")
            else:
                require(
                    isinstance(error, RuntimeError) and "deterministic" in str(error),
                    f"{call}: is not deterministic, but runs under torch.use_deterministic_algorithms(True)",
                )
        tally.passed += 1


@contextlib.contextmanager
def deterministic_mode() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True), and back."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def differentiable(call: Call) -> tuple[list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """The call's tensors as leaves that require gradients, and functions of them: the operator and ATen's function."""
    present = [t is not None for t in call.tensors]
    leaves = [t.detach().clone().requires_grad_() for t in call.tensors if t is not None]

    def arguments(values: tuple[Tensor, ...]) -> list[Tensor | None]:
        left = iter(values)
        return [next(left) if p else None for p in present]

    return (
        leaves,
        lambda *values: call.operator(*arguments(values)),
        lambda *values: call.aten(*arguments(values)),
    )


def gradient_limit(info: AlgorithmInfo, dtype: torch.dtype) -> float:
    """Of a gradient's error: what sums of products may lose and, of a bounded method, a few times what its output may."""
    unit = torch.finfo(dtype).eps
    if info.accuracy == "exact" or dtype.itemsize == 2:
        return 2 * unit if dtype.itemsize == 2 else 100 * unit
    if info.accuracy == "approximate":
        return 2e-2
    return 100 * unit + 4 * info.error_bound * min(1.0, unit / torch.finfo(torch.float32).eps)


def check_gradients(info: AlgorithmInfo, tally: Tally) -> None:
    """gradcheck and gradgradcheck in float64; ATen's gradients in every dtype."""
    if "float64" in info.dtypes and info.accuracy != "approximate":
        for call in few_calls(info, 4):
            leaves, ours, _ = differentiable(call)
            fast: dict[str, Any] = {"fast_mode": True, "atol": 1e-4}
            require(torch.autograd.gradcheck(ours, leaves, **fast), f"{call}: gradcheck")
            require(torch.autograd.gradgradcheck(ours, leaves, **fast), f"{call}: gradgradcheck")
            tally.passed += 1
    else:
        why = "approximates" if "float64" in info.dtypes else "has no float64"
        tally.skip(f"gradcheck: {why}, ATen's gradients are compared")
    for name in info.dtypes:
        # Not in 16 bits: depthwise 7x7 in float16 misses the limit in NCHW (0.0021; in channels_last 0.0004): not understood.
        wide_enough = name in ("float32", "float64")
        large = [Call(info, case, DTYPES[name]) for case in search(info, name).realistic if wide_enough]
        for call in itertools.chain(calls(info, dtypes=(name,)), [c for c in large if c.products < 2e7][:3]):
            if "expanded" in call.case.layouts:
                continue
            tally.passed += 1
            leaves, ours, theirs = differentiable(call)
            output = ours(*leaves)
            seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            wide = [t.detach().double().requires_grad_() for t in leaves]
            grads = torch.autograd.grad(output, leaves, seed.to(output), allow_unused=True)
            exact = torch.autograd.grad(
                theirs(*wide), wide, seed.to(output.dtype).to(output.device).double(), allow_unused=True
            )
            for i, (g, e) in enumerate(zip(grads, exact, strict=True)):
                require((g is None) == (e is None), f"{call}: gradient {i} is {g}")
                if g is None or e is None or not e.numel():
                    continue
                error = float((g.double() - e).abs().max() / e.abs().max().clamp_min(1e-30))
                limit = gradient_limit(info, call.dtype)
                require(error <= limit, f"{call}: gradient {i} has error {error:.3g}, allowed {limit:.3g}")


def check_partial_gradients(info: AlgorithmInfo, tally: Tally) -> None:
    """Each tensor alone may require a gradient."""
    for call in few_calls(info, 1):
        leaves, ours, theirs = differentiable(call)
        for i in range(len(leaves)):
            values = [t.detach().requires_grad_(j == i) for j, t in enumerate(leaves)]
            (g,) = torch.autograd.grad(ours(*values).sum(), values[i])
            (e,) = torch.autograd.grad(theirs(*values).sum(), values[i])
            close(g, e, 2e-2 if info.accuracy == "approximate" else 1e-4, f"{call}: gradient {i} alone")
            tally.passed += 1


def opcheck(call: Call, operator: torch._ops.OpOverload, *args: Any, **options: Any) -> None:
    """`torch.library.opcheck`, whose error then names the case."""
    error = raised(torch.library.opcheck, operator, args, options)
    if error is None:
        return
    hint = ""
    if "dynamic" in str(error) and "algorithms that support this case" in str(error):
        hint = " (with symbolic sizes `supports` is asked with -1 for what is not known: it must accept what some size allows)"
    raise AssertionError(f"{call}: opcheck of {operator.name()}: {error}{hint}") from error


def check_backward_opcheck(info: AlgorithmInfo, tally: Tally) -> None:
    """opcheck of the backward operator, with every output and with one."""
    rules = OPERATIONS[info.operation]
    backward = getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_backward", None)
    if backward is None:
        return tally.skip("has no backward operator: PyTorch computes its gradients")
    # On integers, whose sums do not round: what is compared is one computation made in two ways.
    found = few_calls(info, 100, fill="integers")
    some = [c for c in found if None not in c.case.shapes and not c.case.layouts and rules.backward_call(c)]
    last = [c for c in found if "channels_last" in c.case.layouts]
    for call, mask in [(c, m) for c in [*some[:1], *last[:1]] for m in ([True] * 3, [False, True, False])]:
        arguments = rules.backward_call(call)
        assert arguments is not None
        leaves = (a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in arguments)
        opcheck(call, backward.default, *leaves, mask)
        tally.passed += 1


def check_opcheck(info: AlgorithmInfo, tally: Tally) -> None:
    """`torch.library.opcheck`: schema, autograd registration, fake kernel, AOT dispatch with dynamic shapes."""
    some = few_calls(info, 2, fill="integers")
    found = few_calls(info, 100, fill="integers")
    other = [c for c in found if "channels_last" in c.case.layouts or len(c.case.shapes[0] or ()) == 3]
    for call in [*some, *other[:2]]:
        leaves, _, _ = differentiable(call)
        left = iter(leaves)
        inputs = [None if t is None else next(left) for t in call.tensors]
        layouts = (*call.case.layouts, *["contiguous"] * (len(inputs) - len(call.case.layouts)))
        inputs = [
            None if t is None else LAYOUTS[layout](t.detach()).requires_grad_()
            for t, layout in zip(inputs, layouts, strict=True)
        ]
        opcheck(call, info.operator, *call.arranged(*inputs))
        tally.passed += 1


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


# As the operators name them: function(x, slopes), and the largest slope that it has; 1 where it rounds nothing.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor, Any], Tensor], float]] = {
    "none": (lambda t, _: t, 1.0),
    "relu": (lambda t, _: torch.nn.functional.relu(t), 1.0),
    "relu6": (lambda t, _: torch.nn.functional.relu6(t), 1.0),
    "hardswish": (lambda t, _: torch.nn.functional.hardswish(t), 1.5),
    "silu": (lambda t, _: torch.nn.functional.silu(t), 1.1),
    "gelu": (lambda t, _: torch.nn.functional.gelu(t), 1.13),
    "sigmoid": (lambda t, _: torch.sigmoid(t), 1.01),
    "hardsigmoid": (lambda t, _: torch.nn.functional.hardsigmoid(t), 1.01),
    "tanh": (lambda t, _: torch.tanh(t), 1.01),
    "gelu_tanh": (lambda t, _: torch.nn.functional.gelu(t, approximate="tanh"), 1.13),
    "prelu": (lambda t, slopes: torch.where(t > 0, t, t * slopes), 1.01),
    "leaky_relu": (lambda t, slopes: torch.where(t > 0, t, t * slopes), 1.01),
    "elu": (lambda t, slopes: torch.where(t > 0, t, torch.expm1(t) * slopes), 1.01),
}


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
    function, slope = ACTIVATIONS[name]
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
    if fused is None or not (info.epilogue or info.rule):
        return tally.skip("fuses no residual and no activation")
    names = itertools.cycle(ACTIVATIONS)
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


def places(output: Tensor) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """Where an output like this one may be written: what that is, all of the memory, and the part of it."""

    def new(*shape: int, **layout: Any) -> Tensor:
        whole = torch.empty(shape, dtype=output.dtype, device=output.device, **layout)
        return whole.copy_(torch.arange(whole.numel(), device=output.device).reshape(shape) % 7)

    yield "dense", new(*output.shape), lambda t: t
    if output.ndim == 0:
        return
    *lead, last = output.shape
    yield "slice of rows", new(*lead, 2 * last + 1), lambda t: t[..., 1 : last + 1]
    yield "every other element", new(*lead, 2 * last), lambda t: t[..., ::2]
    if output.ndim == 4:
        n, c, h, w = output.shape
        yield "dense in channels_last", new(n, c, h, w, memory_format=torch.channels_last), lambda t: t
        for name, layout in (("channels", torch.contiguous_format), ("channels in channels_last", torch.channels_last)):
            yield f"slice of {name}", new(n, 2 * c + 1, h, w, memory_format=layout), lambda t: t[:, 1 : c + 1]


def check_out(info: AlgorithmInfo, tally: Tally) -> None:
    """`_out` writes the output, and nothing beside it, also with a residual, which may be `out` itself."""
    form = getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_out", None)
    if form is None:
        return tally.skip("is a Python callable")
    first = "float32" if "float32" in info.dtypes else info.dtypes[0]
    some = few_calls(info, 4, first) + few_calls(info, 2, first, large=True)
    some += [c for d in info.dtypes if d != first for c in few_calls(info, 1, d, large=True)]
    some += [c for case in search(info, first).realistic if (c := Call(info, case, DTYPES[first])).products < 4e6][:1]
    for call in some:
        given = call.arranged(*call.tensors)
        exact, magnitude = reference(info.operation, call.case, call.dtype, call.fill)
        bound = allowed(info, terms(info.operation, call.case), call.dtype, call.fill, exact, magnitude)
        like = OPERATIONS[info.operation].fake(info.name, *given)
        for what, whole, part in places(like):
            before, out, version = whole.clone(), part(whole), whole._version
            result = form(*given, out=out)
            require(result is None, f"{call}: its _out returns {result}")
            require(whole._version > version, f"{call}: out, {what}, has the version that it had")
            assert_near(call, like.copy_(out), exact, bound)
            tally.passed += 1
            if info.epilogue:
                residual, y, limit = epilogue(call, "relu")
                for added in (residual, out, part(whole.clone())):
                    added.copy_(residual)
                    form(*given, residual=added, activation="relu", out=out)
                    assert_near(call, like.copy_(out), y, limit)
            out.copy_(part(before))
            require(same_bits(whole, before), f"{call}: writes beside its out, {what}")
    most_dimensions = max(some[:6], key=lambda c: len(c.case.shapes[0] or ()))
    out_errors(info, form, most_dimensions)
    if info.sliced and info.layout == "any" and info.device == "cpu":
        slices_in_place(form, most_dimensions)


def out_errors(info: AlgorithmInfo, form: Any, call: Call) -> None:
    """What `_out` refuses, in words that name the operator; and opcheck."""
    inputs = call.tensors
    out, x = call.operator(*inputs), inputs[0]
    assert x is not None
    opcheck(call, form.default, *call.arranged(*inputs), out=out)
    memory = torch.zeros(x.numel() + out.numel(), dtype=x.dtype, device=x.device)
    overlapping = memory[: x.numel()].view(x.shape), memory[x.numel() - 1 :][: out.numel()].view(out.shape)
    wrong = {
        "another size": (x, out.new_empty(2, *out.shape)),
        "another dtype": (x, out.to(torch.int32)),
        "the input's memory": overlapping,
        "a gradient": (x.clone().requires_grad_(), out),
    }
    for what, (given, to) in wrong.items():
        for device in (info.device, "meta") if what.startswith("another") else (info.device,):
            moved = [None if t is None else t.to(device) for t in (given, *inputs[1:])]
            error = raised(form, *call.arranged(*moved), out=to.to(device))
            named = isinstance(error, RuntimeError) and f"{info.operation}_{info.name}" in str(error)
            require(
                named, f"{call} on {device}: out of {what}: needs a RuntimeError that names the operator, got {error!r}"
            )


def slices_in_place(form: Any, call: Call) -> None:
    """A sliced algorithm's `_out` reads and writes slices with no other operator, so none that allocates or copies."""
    arguments = operator_arguments(call.info, call.case.arguments)
    inputs = [None if t is None else t.contiguous() for t in call.tensors]
    assert inputs[0] is not None
    y = call.operator(*inputs)
    images = inputs[0].ndim == y.ndim == 4
    for layout in (torch.contiguous_format, torch.channels_last)[: 1 + images]:
        slices = (
            "slice of channels" + " in channels_last" * (layout == torch.channels_last) if images else "slice of rows"
        )
        (source, out) = (part(whole) for t in (inputs[0], y) for name, whole, part in places(t) if name == slices)
        source.copy_(inputs[0])
        with torch.inference_mode(), profiled() as profile:
            form(source, *inputs[1:], *arguments, out=out)
        others = {event.name for event in profile.events()} - {form.default.name(), "aten::transpose_"}
        require(not others, f"{call}: from and into a {slices}: runs {', '.join(sorted(others))} besides")
        close(out, y, 1e-4 + 4 * call.info.error_bound, f"{call}: from and into a {slices}")


def check_out_workspace(info: AlgorithmInfo, tally: Tally) -> None:
    """`_out` takes a caller's workspace and no other, of as many bytes as the registry states, and refuses what is none.

    An algorithm of PyTorch's operators, which allocate what they need, takes one and leaves it unused.
    """
    form = getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_out", None)
    if form is None:
        return tally.skip("is a Python callable")
    rules, label = OPERATIONS[info.operation], f"ai3::{info.operation}_"
    first = "float32" if "float32" in info.dtypes else info.dtypes[0]
    some = few_calls(info, 4, first, large=True)
    for call in some:
        given = call.arranged(*call.tensors)
        exact, magnitude = reference(info.operation, call.case, call.dtype, call.fill)
        bound = allowed(info, terms(info.operation, call.case), call.dtype, call.fill, exact, magnitude)
        out = rules.fake(info.name, *given)
        nothing = torch.empty(0, dtype=torch.uint8, device=out.device)
        needed = bytes_needed(raised(form, *given, out=out, workspace=nothing))
        dense = all(t is None or t.is_contiguous() for t in (*call.tensors, out))
        if dense and info.layout == "any" and not (info.vendor or info.rule):
            p = rules.problem(label, *given)
            stated = registry.workspace_sizes(info.operation, info.name, p.device, p.dtype, **p.sizes)
            require(needed == stated, f"{call}: needs {needed} bytes of a caller's workspace, states {stated}")
        memory = torch.full((needed + 64,), 170, dtype=torch.uint8, device=out.device)
        if needed:
            error = raised(form, *given, out=out, workspace=memory[: needed - 1])
            words = f"needs a workspace of {needed} bytes, got {needed - 1}"
            require(
                label in str(error) and words in str(error),
                f"{call}: needs a RuntimeError that says '{words}', got {error!r}",
            )
        _library.release_workspace()
        result = form(*given, out=out, workspace=memory[:needed])
        require(result is None, f"{call}: its _out returns {result}")
        require(_library.release_workspace() == 0, f"{call}: takes other memory beside the caller's workspace")
        require(bool((memory[needed:] == 170).all()), f"{call}: writes behind the caller's workspace")
        assert_near(call, out, exact, bound)
        for what, wrong in {
            "another dtype": memory.view(torch.int8),
            "another device": memory.to("meta"),
            "gaps": torch.cat([memory, memory])[::2],
            "its beginning between two words": torch.cat([memory, memory])[1:],
            "the output's memory": nothing.set_(out.untyped_storage()),
        }.items():
            error = raised(form, *given, out=out, workspace=wrong)
            require(
                label in str(error) and "workspace" in str(error),
                f"{call}: a workspace of {what}: needs a RuntimeError that names it, got {error!r}",
            )
        if call is some[-1]:
            opcheck(call, form.default, *given, out=out, workspace=memory[:needed])
        tally.passed += 1


def bytes_needed(error: Exception | None) -> int:
    """What a refused workspace of 0 bytes should have had; 0 where nothing was refused."""
    found = re.search(r"needs a workspace of (\d+) bytes, got 0$", str(error))
    require(
        error is None or found is not None,
        f"a workspace of 0 bytes: needs a RuntimeError with the bytes needed, got {error!r}",
    )
    return int(found[1]) if found else 0


def check_autocast(info: AlgorithmInfo, tally: Tally) -> None:
    """The output dtype is what ATen's function gives under autocast."""
    wanted = "bfloat16" if info.device == "cpu" else "float16"
    if not {"float32", wanted} <= set(info.dtypes):
        return tally.skip(f"needs float32 and {wanted}")
    for call in few_calls(info, 1, "float32"):
        leaves, ours, theirs = differentiable(call)
        with torch.autocast(info.device, DTYPES[wanted]):
            y, z = ours(*leaves), theirs(*leaves)
        require(y.dtype == z.dtype, f"{call}: under autocast ATen gives {z.dtype}, got {y.dtype}")
        close(y, z, 5e-2, f"{call} under autocast")
        y.sum().backward()
        require(
            all(t.grad is not None and t.grad.dtype == t.dtype for t in leaves), f"{call}: gradients under autocast"
        )
        if "float64" in info.dtypes:
            wide = [t.detach().double() for t in leaves]
            with torch.autocast(info.device, DTYPES[wanted]):
                require(ours(*wide).dtype == torch.float64, f"{call}: autocast must leave float64 alone")
        tally.passed += 1


def sum_of_squares(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """A loss."""
    return function(*values).square().sum()


class _LastCall(TorchDispatchMode):
    """Remembers the last call of an operator of the project's, as vmap has folded it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ai3":
            self.func, self.args = func, args
        return func(*args, **kwargs or {})

    def refused(self, info: AlgorithmInfo) -> bool:
        """Whether the algorithm, or who computes its gradients, does not support it."""
        args = self.args if self.func is info.operator else (*self.args[1:3], None, *self.args[3:-1])
        return not registry.supports(info.operation, info.name, *args)[0]


def check_vmap(info: AlgorithmInfo, tally: Tally) -> None:
    """`torch.func.vmap`, and gradients inside of it, for every choice of batched tensors, equal to a loop."""
    for call in few_calls(info, 5):
        leaves, ours, _ = differentiable(call)
        leaves = [t.detach() for t in leaves]
        stacked = [torch.stack([t, -t, t * 2], dim=min(1, t.ndim)) for t in leaves]
        names = [a.name for a in info.operator._schema.arguments]
        for choice in itertools.product((True, False), repeat=len(leaves)):
            if not any(choice):
                continue
            dims = tuple(min(1, t.ndim) if c else None for t, c in zip(leaves, choice, strict=True))
            args = [s if c else t for s, t, c in zip(stacked, leaves, choice, strict=True)]

            def sample(i: int, args: list[Tensor] = args, dims: tuple[int | None, ...] = dims) -> list[Tensor]:
                return [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]

            loss = torch.func.grad(functools.partial(sum_of_squares, ours), argnums=tuple(range(len(leaves))))
            what = f"{call}: vmap over {', '.join(n for n, c in zip(names, choice, strict=False) if c)}"
            limit = gradient_limit(info, call.dtype)  # folding changes at most the order of sums
            for function in (lambda *values, ours=ours: (ours(*values),), loss):
                with warnings.catch_warnings(), _LastCall() as last:
                    warnings.simplefilter("error")
                    try:
                        got = torch.vmap(function, dims)(*args)
                    except RuntimeError as error:  # folded into groups or channels that the method does not have
                        refused = "algorithms that support this case" in str(error) and last.refused(info)
                        require(refused, f"{what}: {error}")
                        tally.skip("refuses what vmap folds the samples into")
                        continue
                parts = [function(*sample(i)) for i in range(3)]
                for g, e in zip(got, map(torch.stack, zip(*parts, strict=True)), strict=True):
                    close(g, e, limit, what)
                tally.passed += 1


def check_flops(info: AlgorithmInfo, tally: Tally) -> None:
    """`FlopCounterMode` counts what it counts for ATen's function, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    for call in few_calls(info, 3):
        leaves, ours, theirs = differentiable(call)
        counted = []
        for function in (ours, theirs):
            with FlopCounterMode(display=False) as counter:
                function(*leaves).sum().backward()
            counted.append(counter.get_total_flops())
        if not counted[1] and counted[0]:
            tally.skip("ATen's function has no formula")
            continue  # ATen's function has no formula here, as for a matrix times a vector
        names = [a.name for a in info.operator._schema.arguments if "Tensor" not in str(a.type)]
        if dict(zip(names, call.case.arguments, strict=False)).get("groups", 1) > 1:
            tally.skip("ATen's formula leaves groups out")
            continue  # ATen's formula leaves groups out of the weight's gradient
        require(counted[0] == counted[1], f"{call}: counted {counted[0]} FLOPs, ATen's function {counted[1]}")
        tally.passed += 1


def check_workspace(info: AlgorithmInfo, tally: Tally) -> None:
    """A call on the CPU allocates the workspace that the registry states, beside its output.

    That it takes no more than that is seen in every check: the operator raises an error.
    """
    kinds = {
        "runs on CUDA": info.device != "cpu",
        "calls PyTorch's operators, which allocate": info.vendor,
        "is a Python callable": info.python,
        "is a rule": info.rule,
        "converts what it reads to nhwc": info.layout == "nhwc",  # inputs are contiguous below
    }
    if any(kinds.values()):
        return tally.skip(next(reason for reason, given in kinds.items() if given))
    rules, name = OPERATIONS[info.operation], f"ai3::{info.operation}_{info.name}"
    for call in few_calls(info, 4, "float32" if "float32" in info.dtypes else None, large=True):
        inputs = call.tensors
        if not all(t is None or t.is_contiguous() for t in inputs):
            continue
        p = rules.problem(name, *arranged(info.operation, inputs, call.case.arguments))
        stated = registry.workspace_sizes(info.operation, info.name, p.device, p.dtype, **p.sizes)
        _library.release_workspace()
        with torch.inference_mode(), profiled(profile_memory=True) as profile:
            output = call.operator(*inputs)
        rest = allocated(profile) - output.numel() * output.element_size() + _library.release_workspace()
        slack = 4096 if stated < HUGE_PAGE else HUGE_PAGE
        require(stated <= rest <= stated + slack, f"{call}: states {stated} bytes of workspace, allocates {rest}")
        tally.passed += 1


@contextlib.contextmanager
def profiled(**options: Any) -> Iterator[torch.profiler.profile]:
    """torch's profiler, kept from saying on stderr that it starts and stops: it asks at its first use in a process."""
    name = "KINETO_LOG_LEVEL"
    given = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        with torch.profiler.profile(**options) as profile:
            yield profile
    finally:
        if not given:
            del os.environ[name]


def allocated(profile: Any) -> int:
    """Bytes that were allocated under a profiler with profile_memory."""
    events = profile.profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


def _tallied(function: Callable[[AlgorithmInfo, Tally], None]) -> Callable[[AlgorithmInfo], Tally]:
    @functools.wraps(function)
    def run(info: AlgorithmInfo) -> Tally:
        tally = Tally()
        function(info, tally)
        return tally

    return run


CHECKS: dict[str, Callable[[AlgorithmInfo], Tally]] = {
    name.removeprefix("check_"): _tallied(function)
    for name, function in list(globals().items())
    if name.startswith("check_")
}
