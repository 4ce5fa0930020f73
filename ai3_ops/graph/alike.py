"""Graphs that modules have in common: of a decoder's equal layers one is exported, the others take its graph with their weights.

Modules are alike where nothing that a trace can see tells them apart: their classes, attributes, and sizes, types and strides of
their weights. They may also differ in a number that their code only hands on, as layers hand their index to a cache: in a trace
of its own an object stands for it that nothing can be done with. What a graph computes is compared with each module all the same.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops._torch import pytree
from ai3_ops.graph.caches import Past
from ai3_ops.graph.network import Network
from ai3_ops.graph.state import ATOMS, OF_MODULES, hooks_of

Places = frozenset[tuple[str, str]]  # of attributes: their modules' names and their own


class _Number:
    """Stands for a module's attribute in a trace, and ends it where that does more with it than to hand it on."""

    def __init__(self, place: tuple[str, str]) -> None:
        self.place = place

    def _read(self, *_: Any) -> Any:
        raise TypeError(f"{self.place[1]} decides what is computed")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _read  # all else has nothing to call


@contextmanager
def handed_on(module: nn.Module, places: Iterable[tuple[str, str]]) -> Iterator[None]:
    """While it lasts, objects that nothing can be done with stand for numbers of a module."""
    own = {place: vars(module.get_submodule(place[0])) for place in places}
    before = {place: held[place[1]] for place, held in own.items()}
    try:
        for place, held in own.items():
            held[place[1]] = _Number(place)
        yield
    finally:
        for place, held in own.items():
            held[place[1]] = before[place]


@dataclass(frozen=True)
class Made:
    """The graph that was exported of a module, as it was before it was rewritten."""

    module: nn.Module
    given: Any  # arguments
    network: Network
    numbers: Places  # in whose places the graph has objects

    def of(self, module: nn.Module) -> Network:
        """The graph with a module's own weights and numbers."""
        network = self.network.copy()
        own = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        network.constants = {name: own[name].detach() if name in own else x for name, x in network.constants.items()}

        def number(value: Any) -> Any:
            if not isinstance(value, _Number):
                return value
            return getattr(module.get_submodule(value.place[0]), value.place[1])

        for node in network.graph.nodes if self.numbers else ():
            node.args, node.kwargs = pytree.tree_map(number, (node.args, node.kwargs))
        return network


class Graphs:
    """Those that one call of `optimize` exported of parts of a model."""

    def __init__(self) -> None:
        self._made: list[Made] = []
        self._read: set[tuple[type, Places]] = set()  # numbers that decide what is computed

    def of(self, module: nn.Module, given: Any) -> tuple[Network | None, Places]:
        """A graph for a module that is called with such arguments; else the numbers that the next one has objects for."""
        numbers: Places = frozenset()
        for made in self._made:
            if type(made.module) is not type(module) or not _alike(made.given, given):
                continue
            differ = differing(made.module, module)
            if differ is not None and differ <= made.numbers:
                return made.of(module), numbers
            if differ and (type(module), differ) not in self._read:
                numbers = differ
        return None, numbers

    def add(self, made: Made) -> None:
        """One more."""
        self._made.append(made)

    def refuse(self, module: nn.Module, numbers: Places) -> None:
        """Notes that a trace did more with numbers than to hand them on."""
        self._read.add((type(module), numbers))


def differing(one: nn.Module, other: nn.Module) -> Places | None:
    """The numbers in which modules differ besides the values of their weights; None where they differ in more."""
    return _Alike().modules(one, other)


def _alike(one: Any, other: Any) -> bool:
    """Whether arguments are the same to a trace: sizes, types and strides of tensors, and all else itself."""
    (ours, spec), (theirs, structure) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    same = _Alike()
    return spec == structure and all(map(same.arguments, ours, theirs))


class _Alike:
    """Compares what modules hold, object by object: what is one object in the one is one in the other."""

    def __init__(self) -> None:
        self._pairs: dict[int, int] = {}
        self._others: dict[int, int] = {}
        self._held: list[Any] = []  # so that no address is used again meanwhile

    def modules(self, one: nn.Module, other: nn.Module) -> Places | None:
        """As `differing`."""
        ours, theirs = (list(m.named_modules(remove_duplicate=False)) for m in (one, other))
        if [name for name, _ in ours] != [name for name, _ in theirs]:
            return None
        pairs = [(name, a, b) for (name, a), (_, b) in zip(ours, theirs, strict=True)]
        if not all(type(a) is type(b) and self._is_one(a, b) for _, a, b in pairs):
            return None
        numbers = set()
        for name, a, b in pairs:
            if isinstance(a, torch.jit.ScriptModule) or hooks_of(a) or hooks_of(b):
                return None
            for kind in ("_parameters", "_buffers"):
                x, y = vars(a)[kind], vars(b)[kind]
                if [*x] != [*y] or not all(map(self._weights, x.values(), y.values())):
                    return None
            x, y = ({k: v for k, v in vars(m).items() if k not in OF_MODULES} for m in (a, b))
            if x.keys() != y.keys():
                return None
            for key, value in x.items():
                if type(value) is int and type(y[key]) is int and value != y[key]:
                    numbers.add((name, key))
                elif not self._values(value, y[key]):
                    return None
        return frozenset(numbers)

    def arguments(self, a: Any, b: Any) -> bool:
        """Of calls."""
        if isinstance(a, Past) and isinstance(b, Past):
            return a.length == b.length and all(map(self._sizes, a.before, b.before))
        return self._sizes(a, b) if isinstance(a, Tensor) else self._values(a, b)

    def _is_one(self, a: Any, b: Any) -> bool:
        """Whether two objects can be the same one of either side, as far as is known."""
        self._held += (a, b)
        return self._pairs.setdefault(id(a), id(b)) == id(b) and self._others.setdefault(id(b), id(a)) == id(a)

    def _sizes(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b) or not self._is_one(a, b) or a.layout != torch.strided or b.layout != torch.strided:
            return False
        kinds = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in (a, b)]
        return kinds[0] == kinds[1]

    def _weights(self, a: Any, b: Any) -> bool:
        """Whole numbers and booleans are tables, of the same values."""
        if a is None or b is None:
            return a is b
        return self._sizes(a, b) and (a.is_floating_point() or torch.equal(a, b))

    def _values(self, a: Any, b: Any) -> bool:
        """Whether two objects hold the same; what cannot be looked into is no other object's equal."""
        if type(a) is not type(b):
            return False
        if isinstance(a, ATOMS):
            return bool(a == b or (a != a and b != b))
        known = id(a) in self._pairs
        if not self._is_one(a, b):
            return False
        if known or a is b:
            return True
        if isinstance(a, Tensor):
            return self._sizes(a, b) and torch.equal(a, b)
        if isinstance(a, nn.Module):  # which no name of the module around it leads to
            return self.modules(a, b) == frozenset()
        if type(a) in (dict, OrderedDict):
            return len(a) == len(b) and all(map(self._values, chain(a, a.values()), chain(b, b.values())))
        if type(a) in (list, tuple):
            return len(a) == len(b) and all(map(self._values, a, b))
        if type(a) in (set, frozenset):
            return bool(a == b) and all(isinstance(x, ATOMS) for x in a)
        if type(a) is types.MethodType:
            return a.__func__ is b.__func__ and self._values(a.__self__, b.__self__)
        if type(a) is functools.partial:
            return self._values([a.func, a.args, a.keywords], [b.func, b.args, b.keywords])
        return _is_plain(type(a)) and hasattr(a, "__dict__") and self._values(vars(a), vars(b))


def _is_plain(kind: type) -> bool:
    """Whether objects of a class hold what their `__dict__` has, and nothing else."""
    slots = any("__slots__" in vars(c) for c in kind.__mro__)
    return not slots and kind.__new__ is object.__new__ and kind.__reduce_ex__ is object.__reduce_ex__
