"""Checks of the operators that write into a given output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ai3_ops.checking.calling import opcheck, profiled, raised
from ai3_ops.checking.cases import (
    DTYPES,
    Call,
    Tally,
    allowed,
    close,
    few_calls,
    operator_arguments,
    reference,
    require,
    same_bits,
    search,
    terms,
)
from ai3_ops.checking.values import assert_near
from ai3_ops.checking.weights import epilogue
from ai3_ops.registry import OPERATIONS, AlgorithmInfo


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
        return tally.skip("has no operator that writes into a given output")
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
            try:
                result = form(*given, out=out)
            except RuntimeError as error:
                require("cuDNN refuses" in str(error), f"{call}, {what}: {error}")
                tally.skip("cuDNN refuses outputs in other strides")
                continue
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
