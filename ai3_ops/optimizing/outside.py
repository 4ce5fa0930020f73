"""What calls of a module change outside of it: class attributes, default arguments, closures, globals that its code names."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops.graph.state import ATOMS, _same_values
from ai3_ops.nn.layout import names_in

_LARGE = 1 << 24  # bytes: of larger tensors the version is looked at, and not a copy
_MOST = 20_000  # objects that are looked at
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)


class Outside:
    """The values that a module's own code can reach without it, at one moment; only objects of its own kind are looked into."""

    def __init__(self, model: nn.Module) -> None:
        self._known: set[int] = set()
        self._bound: list[
            tuple[str, Callable[[Any], None], Callable[[], Any], Any]
        ] = []  # names and what they stood for
        self._held: list[tuple[str, Any, Any]] = []  # objects that can change, and what they held
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._class(type(module))
                for value in list(vars(module).values()):
                    if isinstance(value, _FUNCTIONS):
                        self._function(value)

    def changes(self) -> list[str]:
        """The names of what is another value now."""
        found = [name for name, _, read, value in self._bound if not _same(read(), value)]
        for name, value, held in self._held:
            now = _content(value)
            if isinstance(value, Tensor):
                same = now[0] == held[0] or (held[1] is not None and _same_values(value, held[1]))
            else:
                same = len(now) == len(held) and all(map(_same, now, held))
            if not same:
                found.append(name)
        return list(dict.fromkeys(found))

    def put_back(self) -> None:
        """What names stood for, and what objects held, as far as it was copied."""
        for _, write, read, value in self._bound:
            if read() is not value:
                write(value)
        for _, value, held in self._held:
            _fill(value, held)

    # Reaching ---------------------------------------------------------------------------------------------------------
    def _new(self, value: Any) -> bool:
        new = id(value) not in self._known and len(self._known) < _MOST
        self._known.add(id(value))
        return new

    def _class(self, cls: type) -> None:
        for own in cls.__mro__:
            if _foreign(own.__module__) or not self._new(own):
                continue
            for name, value in list(vars(own).items()):
                if isinstance(value, _FUNCTIONS):
                    self._function(value)
                elif not name.startswith("__"):
                    read = functools.partial(vars(own).get, name)
                    self._name(f"{own.__name__}.{name}", functools.partial(setattr, own, name), read)

    def _function(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            for given in (value.func, *value.args, *value.keywords.values()):
                self._value(f"an argument of {value.func}", given)
            return
        if isinstance(value, property):
            for own in (value.fget, value.fset):
                self._function(own)
            return
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or _foreign(function.__module__) or not self._new(function):
            return
        self._function(getattr(function, "__wrapped__", None))
        named = function.__qualname__
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(f"a default argument of {named}", default)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._name(f"{name} of {named}", functools.partial(setattr, cell, "cell_contents"), _reader(cell))
        space = function.__globals__
        for name in names_in(function.__code__):
            if name in space:
                self._name(name, functools.partial(space.__setitem__, name), functools.partial(space.get, name))

    def _name(self, name: str, write: Callable[[Any], None], read: Callable[[], Any]) -> None:
        value = read()
        if isinstance(value, (types.ModuleType, type, *_FUNCTIONS)):
            self._value(name, value)
            return
        self._bound.append((name, write, read, value))
        self._value(name, value)

    def _value(self, name: str, value: Any) -> None:
        """What an object holds; modules are copied and compared elsewhere, or are of others."""
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, _FUNCTIONS):
            self._function(value)
        elif not isinstance(value, (*ATOMS, nn.Module)) and self._looked_into(value) and self._new(value):
            held = _content(value)
            self._held.append((name, value, held))
            if not isinstance(value, Tensor):
                for each in held:
                    self._value(name, each)

    @staticmethod
    def _looked_into(value: Any) -> bool:
        if isinstance(value, (Tensor, list, tuple, dict, set, deque)):
            return True
        return not _foreign(type(value).__module__) and isinstance(getattr(value, "__dict__", None), dict)


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        small = value.layout == torch.strided and value.nbytes <= _LARGE and not value.is_meta
        return version, value.detach().clone() if small else None
    if isinstance(value, dict):
        return [
            each for item in dict.items(value) for each in item
        ]  # a subclass's own may import or compute what is asked for
    return list(value) if isinstance(value, (list, tuple, set, deque)) else _content(vars(value))


def _fill(value: Any, held: Any) -> None:
    if isinstance(value, Tensor):
        version, copy = held
        if copy is not None and version != _content(value)[0]:
            with torch.no_grad():
                value.copy_(copy)
    elif isinstance(value, (list, deque, set, dict)):
        value.clear()
        if isinstance(value, dict):
            value.update(zip(held[::2], held[1::2], strict=True))
        elif isinstance(value, set):
            value.update(held)
        else:
            value.extend(held)
    elif not isinstance(value, tuple):
        _fill(vars(value), held)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _same_values(a, b)
    return isinstance(a, ATOMS) and bool(a == b or (a != a and b != b))


def _reader(cell: types.CellType) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # nothing yet
            return None

    return read


@functools.cache
def _foreign(module: str | None) -> bool:
    """Of Python's, PyTorch's or this package's own code, which keeps nothing for a model."""
    package = (module or "builtins").partition(".")[0]
    own = package in ("torch", "torchvision", "ai3_ops", "numpy", "builtins")
    return own or (package in sys.stdlib_module_names and package != "__main__")
