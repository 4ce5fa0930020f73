"""What modules have that programs do not see, as it was: plain attributes, parameters, buffers, modules inside, and hooks.

Each record is replaced as one, since other threads read it meanwhile, and is no pytree: torch.export writes copies of pytrees
back to a module's attributes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ai3_ops.nn.layout import names_in

# Attributes of PyTorch's modules that decide nothing in evaluation mode, or are derived from one that is watched.
_IDLE = frozenset({"momentum", "track_running_stats", "inplace", "_reversed_padding_repeated_twice", "p", "dropout"})
# Methods of PyTorch's modules that compute nothing.
_TELLING = frozenset(
    {"__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "_load_from_state_dict"}
)
_PLAIN = (bool, int, float, str, type(None))
_LONG = 64  # elements of a list that is not a setting
_read: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


_GONE = object()


@dataclass(frozen=True)
class Stores:
    """Parameters, buffers and modules inside."""

    where: list[dict[str, Any]]
    values: list[Any]
    names: list[str]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> Stores:
        """As they are."""
        stores = [own for m in modules for own in (m._parameters, m._buffers, m._modules) if own]
        where: list[dict[str, Any]] = [*stores, {"": None}]  # the end shows what the last one gains
        return Stores(where, [*chain.from_iterable(map(dict.values, where))], [*chain.from_iterable(where)])

    def are_same(self) -> bool:
        """Whether all are the same objects."""
        return all(map(operator.is_, chain.from_iterable(map(dict.values, self.where)), self.values))

    def hold_those_of(self, other: Stores) -> bool:
        """Whether the other record has the same objects under the same names, if in other dictionaries."""
        alike = len(self.values) == len(other.values) and self.names == other.names
        return alike and all(map(operator.is_, self.values, other.values))


@dataclass(frozen=True)
class Hooks:
    """Hooks of modules: where there were none, and how many there were elsewhere."""

    none: list[dict[int, Any]]
    had: list[tuple[dict[int, Any], int]]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> Hooks:
        """As they are."""
        hooks: list[Any] = [own for m in modules for own in (m._forward_hooks, m._forward_pre_hooks)]
        return Hooks([own for own in hooks if not own], [(own, len(own)) for own in hooks if own])

    def are_all(self) -> bool:
        """Whether no other came."""
        return not any(self.none) and all(len(hooks) <= had for hooks, had in self.had)


@dataclass(frozen=True)
class Attributes:
    """Attributes of plain values that methods read, by modules."""

    owners: list[nn.Module]
    names: list[str]
    values: list[Any]
    own: list[bool]  # whether the module has it, not its class
    lists: list[tuple[list[Any], Any]]  # which may change where they are, with what they held

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> Attributes:
        """As they are."""
        found = [
            (m, name, value)
            for m in modules
            for name in reads(m)
            if name != "training" and name[:4] != "_ai3" and not (name in _IDLE and _is_torchs(m))
            if _is_plain(value := vars(m).get(name, inspect.getattr_static(type(m), name, m)))
        ]
        lists = [(value, _frozen(value)) for _, _, value in found if isinstance(value, list)]
        own = [name in vars(m) for m, name, _ in found]
        return Attributes([m for m, _, _ in found], [n for _, n, _ in found], [v for _, _, v in found], own, lists)

    def now(self) -> Iterable[Any]:
        """What stands there now."""
        return map(getattr, self.owners, self.names, repeat(None))

    def are_same(self) -> bool:
        """Whether all are the same objects, lists with the same elements."""
        same = all(map(operator.is_, self.now(), self.values))
        return same and all(_frozen(value) == held for value, held in self.lists)

    def changed(self) -> tuple[nn.Module, str] | None:
        """One that has another value."""
        held = {id(value): was for value, was in self.lists}
        for m, name, value, own in zip(self.owners, self.names, self.values, self.own, strict=True):
            other, was = getattr(m, name, None if own else _GONE), held.get(id(value), value)
            if other is _GONE:  # what a class found out in another process, and would find again
                continue
            other = _frozen(other) if isinstance(value, list) and isinstance(other, list) else other
            if type(other) is not type(was) or (other != was and other == other):
                return m, name
        return None

    def renewed(self) -> Attributes:
        """With the objects that stand there now, which are equal."""
        values = [*self.now()]
        return replace(self, values=values, lists=[(v, _frozen(v)) for v in values if isinstance(v, list)])


def _is_plain(value: Any) -> bool:
    """A number, flag or word, or several: as modules have for settings."""
    several = isinstance(value, (tuple, list)) and len(value) <= _LONG
    return isinstance(value, _PLAIN) or (several and all(map(_is_plain, value)))


def _frozen(value: Any) -> Any:
    """Of lists what they hold."""
    return tuple(map(_frozen, value)) if isinstance(value, (tuple, list)) else value


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def reads(module: nn.Module) -> frozenset[str]:
    """The names that the methods of a module's classes look up, but those that make it or tell of it."""
    cls = type(module)
    if cls not in _read:
        bases = [b for b in cls.__mro__ if issubclass(b, nn.Module) and b is not nn.Module]
        found = [getattr(f, "__func__", f) for b in bases for name, f in vars(b).items() if name not in _TELLING]
        found += [f.fget for b in bases for f in vars(b).values() if isinstance(f, property)]
        codes = [f.__code__ for f in (cls.forward, *found) if hasattr(f, "__code__")]
        _read[cls] = frozenset(name for code in codes for name in names_in(code))
    return _read[cls]
