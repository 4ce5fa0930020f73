"""Checks of workspaces: what is stated, what is taken, a caller's own."""

from __future__ import annotations

import re

import torch

from ai3_ops import _library, registry
from ai3_ops.checking.calling import allocated, opcheck, profiled, raised
from ai3_ops.checking.cases import Tally, allowed, arranged, few_calls, reference, require, terms
from ai3_ops.checking.values import assert_near
from ai3_ops.registry import OPERATIONS, AlgorithmInfo

HUGE_PAGE = 2 << 20  # large workspaces are rounded up to them


def check_out_workspace(info: AlgorithmInfo, tally: Tally) -> None:
    """`_out` takes a caller's workspace and no other, of as many bytes as the registry states, and refuses what is none.

    An algorithm of PyTorch's operators, which allocate what they need, takes one and leaves it unused.
    """
    form = getattr(torch.ops.ai3, f"_{info.operation}_{info.name}_out", None)
    if form is None:
        return tally.skip("has no operator that writes into a given output")
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
    rules = OPERATIONS[info.operation]
    for call in few_calls(info, 4, "float32" if "float32" in info.dtypes else None, large=True):
        inputs = call.tensors
        if not all(t is None or t.is_contiguous() for t in inputs):
            continue
        own = call.options(*inputs)
        p = rules.asked(info.name, *arranged(info.operation, inputs, call.case.arguments), **own)
        stated = registry.workspace_sizes(info.operation, info.name, p.device, p.dtype, **p.sizes)
        _library.release_workspace()
        with torch.inference_mode(), profiled(profile_memory=True) as profile:
            output = info.operator(*call.arranged(*inputs), **own)
        rest = allocated(profile) - output.numel() * output.element_size() + _library.release_workspace()
        slack = 4096 if stated < HUGE_PAGE else HUGE_PAGE
        require(stated <= rest <= stated + slack, f"{call}: states {stated} bytes of workspace, allocates {rest}")
        tally.passed += 1
