"""What calls of a module change besides their outputs: its attributes and what these hold, buffers, random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops._torch import pytree
from ai3_ops.nn import computed


def copied(model: nn.Module, *, sharing: bool = False) -> Any:
    """A copy; with `sharing` its parameters are the model's own."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()} if sharing else {}
    return computed.copied(model, "ai3_ops.optimize", memo=memo)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards generators go on as if nothing had been drawn: PyTorch's on the CPU, Python's, NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    mine, theirs = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(mine)
            if numpy is not None:
                numpy.random.set_state(theirs)


def others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the same sizes and types, within the range of the given ones, that differ from them.

    Floating numbers become smaller, each by another factor; where there are none, integers change places.
    """
    floating = any(_is_floating(x) and x.numel() for x in pytree.tree_leaves((args, kwargs)))

    def other(x: Tensor) -> Tensor:
        if _is_floating(x):
            steps = torch.linspace(1, 0.5, x.numel() + 1, dtype=torch.float64, device=x.device)[1:]
            shrunk = steps.reshape(x.shape).to(x.dtype)
            return x * shrunk if x.count_nonzero() else (shrunk - 0.25).to(x.dtype)
        return x if floating or not x.ndim else x.flip(-1)

    return pytree.tree_map_only(Tensor, other, (args, kwargs))


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


# Of libraries: what they hand to their own caller, within one call of the model, is in its graph like all that it returns.
_PASSIVE = ("transformers.utils.output_capturing",)


def hooks_of(module: nn.Module) -> list[Any]:
    """The forward hooks of a module that somebody may expect to be called."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if getattr(hook, "__module__", "") not in _PASSIVE]


# What differs ---------------------------------------------------------------------------------------------------------
# What every nn.Module has: modules are compared one by one, parameters are shared by copies.
OF_MODULES = frozenset(vars(nn.Module()).keys() - {"training"})


def changes(before: nn.Module, after: nn.Module) -> list[str]:
    """The names of attributes, buffers and submodules that two copies of a module do not have in common."""
    one, two = (dict(m.named_modules(remove_duplicate=False)) for m in (before, after))
    found = [name for name in {**one, **two} if (name in one) != (name in two)]
    seen: set[tuple[int, int]] = set()
    for name in one.keys() & two.keys():
        a, b = one[name], two[name]
        if isinstance(a, torch.jit.ScriptModule):
            pairs = [({k: v for k, v in m.named_buffers(recurse=False)}) for m in (a, b)]
        else:
            pairs = [{k: v for k, v in vars(m).items() if k not in OF_MODULES} | m._buffers for m in (a, b)]
        for key in {**pairs[0], **pairs[1]}:
            if not (key in pairs[0] and key in pairs[1] and _equal(pairs[0][key], pairs[1][key], seen)):
                found.append(f"{name}.{key}" if name else key)
    return sorted(found)


ATOMS = (
    int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device, torch.Size, slice, range,
    types.ModuleType,
)  # fmt: skip


def _equal(a: Any, b: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether two objects hold the same; functions and what cannot be looked into are taken for equal."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen.add((id(a), id(b)))
    if isinstance(a, Tensor):
        return _same_values(a, b)
    if isinstance(a, ATOMS):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, Mapping):
        return len(a) == len(b) and all(_equal([*x], [*y], seen) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (set, frozenset)):
        return bool(a == b) or len(a) == len(b)  # of objects that compare by identity the number alone
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, seen) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__array__") and hasattr(a, "tobytes"):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return True
    held = [getattr(x, "__dict__", None) for x in (a, b)]
    if isinstance(a, nn.Module) or held[0]:
        return _equal(dict(held[0] or {}), dict(held[1] or {}), seen)
    try:  # iterators, deques, generators of random numbers, objects with slots
        reduced = [x.__reduce_ex__(4)[1:] for x in (a, b)]
    except Exception:
        return True
    plain = [[list(x) if isinstance(x, Iterator) else x for x in r] for r in reduced]
    return _equal(plain[0], plain[1], seen)


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    with contextlib.suppress(Exception), torch.no_grad():  # not every kind of tensor can be compared
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return True
