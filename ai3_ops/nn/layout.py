"""The memory format of a swapped network: weights in channels_last, so that it runs in that format from its first convolution on.

The output of a convolution is channels_last where its weight is, as in ATen, and every kernel here is fastest so. A network that
is given NCHW images then converts these few channels instead of every activation (docs/decisions/layout.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops.operations.base import is_channels_last

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}  # by the words of plans

# Methods that raise, or show another order, for a tensor in channels_last where they work for the same one in NCHW.
_SENSITIVE = frozenset({"view", "view_as", "as_strided"})


def viewers(model: nn.Module) -> list[str]:
    """The classes of the model whose methods, or functions of their files that these call, name one of those methods."""
    seen: set[Any] = set()
    found = []
    for cls in dict.fromkeys(c for module in model.modules() for c in type(module).__mro__):
        if f"{cls.__module__}.".startswith(("torch.", "ai3_ops.", "builtins.")) or "_ai3_original" in vars(cls):
            continue
        functions = [f for name, f in vars(cls).items() if isinstance(f, FunctionType) and name != "__init__"]
        if any(_sensitive(f, seen) for f in functions):
            found.append(cls.__qualname__)
    return found


def _sensitive(function: FunctionType, seen: set[Any]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = set(_names(function.__code__))
    if names & _SENSITIVE:
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(
        isinstance(f, FunctionType) and not f.__module__.startswith("torch.") and _sensitive(f, seen) for f in called
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def convert(convolutions: list[nn.Module], to: torch.memory_format = torch.channels_last) -> Callable[[], None]:
    """Gives the weights of these convolutions a memory format, in place; returns what undoes it."""
    before: list[tuple[nn.Module, nn.Parameter, Tensor]] = []
    inference: dict[nn.Parameter, nn.Parameter] = {}
    for module in convolutions:
        weight = module._parameters.get("weight")
        if (
            type(weight) is not nn.Parameter
            or weight.device.type != "cpu"
            or weight.ndim != 4
            or is_channels_last(weight)
        ):
            continue
        with torch.no_grad():
            formatted = torch.empty_like(weight, memory_format=to).copy_(weight)
        before.append((module, weight, weight.detach()))
        if weight.is_inference():  # takes no other data
            if weight not in inference:
                inference[weight] = nn.Parameter(formatted, weight.requires_grad)
            module._parameters["weight"] = inference[weight]
        else:
            weight.data = formatted

    def undo() -> None:
        for module, weight, data in before:
            if weight in inference:
                module._parameters["weight"] = weight
            else:
                weight.data = data

    return undo
