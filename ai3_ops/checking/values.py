"""Checks of what comes out: within bounds, of what is not finite, of zeros, the same from run to run."""

from __future__ import annotations

import itertools
import math
import time

import torch
from torch import Tensor

from ai3_ops.checking.calling import deterministic_mode, raised
from ai3_ops.checking.cases import (
    DTYPES,
    Call,
    Case,
    Tally,
    allowed,
    arranged,
    calls,
    few_calls,
    reference,
    require,
    same_bits,
    search,
    terms,
)
from ai3_ops.registry import OPERATIONS, AlgorithmInfo


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
    exact, magnitude = reference(call.info.operation, call.case, call.dtype, call.fill, call.info.name)
    k = terms(call.info.operation, call.case)
    assert_near(call, output, exact, allowed(call.info, k, call.dtype, call.fill, exact, magnitude))


def assert_near(call: Call, output: Tensor, exact: Tensor, bound: Tensor) -> None:
    """The output of a call has the shape, dtype and strides that it must have, and is within the bound."""
    require(output.shape == exact.shape, f"{call}: got shape {tuple(output.shape)}, needs {tuple(exact.shape)}")
    require(output.dtype == call.dtype, f"{call}: got dtype {output.dtype}")
    # Not on the meta device, where a tensor of one element gets other strides.
    expected = OPERATIONS[call.info.operation].fake(
        call.info.name,
        *arranged(call.info.operation, call.tensors, call.case.arguments),
        **call.options(*call.tensors),
    )
    require(expected.shape == output.shape, f"{call}: the fake gave shape {tuple(expected.shape)}")
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
    if info.device == "cuda" and info.name == "winograd_nonfused":
        return tally.skip("cuDNN's method hides what is not finite")
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
    if info.device == "cuda" and info.name in ("fft", "fft_tiling", "winograd_nonfused"):
        return tally.skip("cuDNN's transforms add zeros of both signs")
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


def check_determinism(info: AlgorithmInfo, tally: Tally) -> None:
    """Bitwise the same from run to run and with one, two and five threads, where the algorithm says so; else an alert."""
    threads = torch.get_num_threads()
    for call in few_calls(info, 6, "float32" if "float32" in info.dtypes else None, large=True):
        if info.deterministic:
            first = call.run()
            try:
                for count in (1, 2, 5):
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
