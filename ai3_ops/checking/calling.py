"""How the checks call an operator: what it raises, its gradients, its opcheck, a profile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops._torch import OpOverload
from ai3_ops.checking.cases import Call


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """What a call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def has_gradients(call: Call) -> list[bool]:
    """Of each of the call's tensors: not masks, nor statistics."""
    none = registry.OPERATIONS[call.info.operation].statistics
    return [t is not None and t.is_floating_point() and i not in none for i, t in enumerate(call.tensors)]


def differentiable(call: Call) -> tuple[list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """The call's tensors as leaves that require gradients, and functions of them: the operator and ATen's function.

    Those that can have none, such as a boolean mask, are always the call's.
    """
    tensors, varied = call.tensors, has_gradients(call)
    leaves = [t.detach().clone().requires_grad_() for t, v in zip(tensors, varied, strict=True) if v and t is not None]

    def arguments(values: tuple[Tensor, ...]) -> list[Tensor | None]:
        left, wide = iter(values), values[0].dtype == torch.float64

        def given(t: Tensor | None) -> Tensor | None:
            return t.double() if wide and t is not None and t.is_floating_point() else t

        return [next(left) if v else given(t) for t, v in zip(tensors, varied, strict=True)]

    return (
        leaves,
        lambda *values: call.operator(*arguments(values)),
        lambda *values: call.aten(*arguments(values)),
    )


def opcheck(call: Call, operator: OpOverload, *args: Any, **options: Any) -> None:
    """`torch.library.opcheck`, whose error then names the case."""
    error = raised(torch.library.opcheck, operator, args, options)
    if error is None:
        return
    hint = ""
    if "dynamic" in str(error) and "algorithms that support this case" in str(error):
        hint = " (with symbolic sizes `supports` is asked with -1 for what is not known: it must accept what some size allows)"
    raise AssertionError(f"{call}: opcheck of {operator.name()}: {error}{hint}") from error


@contextlib.contextmanager
def deterministic_mode() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True), and back."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


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
