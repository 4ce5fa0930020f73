"""Plain values that modules have as attributes, which programs do not see: what they were, and whether one was changed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple
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


class Attributes(NamedTuple):
    """Attributes of plain values that methods read, by modules, as they were; replaced as one, for other threads."""

    owners: list[nn.Module]
    names: list[str]
    values: list[Any]
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
        return Attributes([m for m, _, _ in found], [n for _, n, _ in found], [v for _, _, v in found], lists)

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
        for m, name, value in zip(self.owners, self.names, self.values, strict=True):
            other, was = getattr(m, name, None), held.get(id(value), value)
            other = _frozen(other) if isinstance(value, list) and isinstance(other, list) else other
            if type(other) is not type(was) or (other != was and other == other):
                return m, name
        return None

    def renewed(self) -> Attributes:
        """With the objects that stand there now, which are equal."""
        values = [*self.now()]
        return self._replace(values=values, lists=[(v, _frozen(v)) for v in values if isinstance(v, list)])


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
