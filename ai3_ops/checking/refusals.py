"""Checks of what an algorithm refuses, and in which words."""

from __future__ import annotations

import itertools

import torch

from ai3_ops import registry
from ai3_ops.checking.calling import raised
from ai3_ops.checking.cases import CASES, DTYPES, Call, Tally, arranged, bad_calls, require
from ai3_ops.registry import OPERATIONS, AlgorithmInfo


def check_support(info: AlgorithmInfo, tally: Tally) -> None:
    """`supports` and the operator agree; a refusal is the documented sentence, and the algorithms it names can do the case."""
    name = f"ai3::{info.operation}_{info.name}"
    for dtype, case in itertools.product(DTYPES.values(), CASES[info.operation]):
        call = Call(info, case, dtype)
        if not case.is_of(str(dtype).removeprefix("torch.")):
            continue
        inputs = call.tensors
        options = call.options(*inputs)
        given = arranged(info.operation, inputs, case.arguments)
        ok, reason = registry.supports(info.operation, info.name, *given, **options)
        if ok:
            continue
        tally.passed += 1
        require(bool(reason), f"{call}: refused without a reason")
        meta = [None if t is None else t.to("meta") for t in inputs]
        given = arranged(info.operation, meta, case.arguments)
        anywhere = registry.supports(info.operation, info.name, *given, **call.options(*meta))[0]
        # A meta tensor is answered for the CPU.
        for device, moved in ((info.device, inputs), ("meta", meta))[: 1 if anywhere or info.device != "cpu" else 2]:
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


def check_errors(info: AlgorithmInfo, tally: Tally) -> None:
    """Bad arguments raise RuntimeErrors that name the operator, with real and with meta tensors; nothing crashes."""
    name = f"ai3::{info.operation}_{info.name}"
    for what, inputs, arguments in bad_calls(info):
        for device in (info.device, "meta"):
            moved = [None if t is None else t.to(device) for t in inputs]
            given = arranged(info.operation, moved, arguments)
            try:
                options = OPERATIONS[info.operation].own_operands(info.name, given)
            except (RuntimeError, TypeError):  # of arguments that fit nothing
                options = {}
            error = raised(info.operator, *given, **options)
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
