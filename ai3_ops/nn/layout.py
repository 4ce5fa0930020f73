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

from ai3_ops._torch import pytree
from ai3_ops.operations.base import is_channels_last

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}  # by the words of plans

_LARGE = 1 << 16  # bytes of a weight

# Methods that raise for a tensor in channels_last where they work for the same one in NCHW, and those that never raise: they
# take elements as they lie in memory, so that on the same tensor in channels_last they give others.
VIEWS = frozenset({"view", "view_as"})
MEMORY = frozenset(
    {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "untyped_storage", "data_ptr"}
)


def naming(model: nn.Module, methods: frozenset[str]) -> list[str]:
    """The classes of the model whose methods, or functions of their files that these call, name one of `methods`."""
    seen: set[Any] = set()
    found = []
    for cls in dict.fromkeys(c for module in model.modules() for c in type(module).__mro__):
        if f"{cls.__module__}.".startswith(("torch.", "ai3_ops.", "builtins.")) or "_ai3_original" in vars(cls):
            continue
        functions = [f for name, f in vars(cls).items() if isinstance(f, FunctionType) and name != "__init__"]
        if any(_names_one(f, methods, seen) for f in functions):
            found.append(cls.__qualname__)
    return found


def _names_one(function: FunctionType, methods: frozenset[str], seen: set[Any]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = set(_names(function.__code__))
    if names & methods:
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(
        isinstance(f, FunctionType) and not f.__module__.startswith("torch.") and _names_one(f, methods, seen)
        for f in called
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def is_costly(module: nn.Module) -> bool:
    """Whether the weight is so large that kernels would spend much of a training step on reading it in channels_last.

    They read weights in NCHW: one in channels_last is copied in the forward and in the backward pass, its gradient once more,
    unless both formats are the same memory.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 4 or weight.shape[1] == 1 or weight.shape[2:] == (1, 1):
        return False
    return weight.nbytes > _LARGE


def _is_in(weight: Tensor, format: torch.memory_format) -> bool:
    """Also where its sizes fit both formats: the strides decide in which one the convolution answers."""
    last = format == torch.channels_last
    return weight.is_contiguous(memory_format=format) and is_channels_last(weight) == last


def convert(convolutions: list[nn.Module], to: torch.memory_format = torch.channels_last) -> Callable[[], None]:
    """Gives the weights of these convolutions a memory format, in place; returns what undoes it."""
    before: list[tuple[nn.Module, nn.Parameter, Tensor]] = []
    inference: dict[nn.Parameter, nn.Parameter] = {}
    for module in convolutions:
        weight = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.ndim != 4 or _is_in(weight, to):
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


# Largest difference, as max|a - b| / max|a|, of outputs that are the same but for rounding, by bytes of an element.
_ROUNDING = {2: 5e-2, 4: 1e-3, 8: 1e-9}


def same(output: Any, other: Any) -> bool:
    """Whether two outputs of a model agree but for rounding; False for what cannot be compared."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(output), pytree.tree_flatten(other)
    return bool(spec == other_spec) and all(map(_same_leaf, leaves, others))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float, complex)) and isinstance(b, (int, float, complex)):
        a, b = torch.tensor(a), torch.tensor(b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and isinstance(a, (str, bytes, type(None)))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided or a.is_nested:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    limit = _ROUNDING.get(torch.finfo(a.dtype).bits // 8, 0.0)
    kind = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(kind), b.detach().to(kind)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return a.numel() == 0 or bool((a - b).abs().max() <= limit * a.abs().max())
