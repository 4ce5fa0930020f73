"""Makes the classes of modules whose own functional calls are computed by chosen algorithms.

Such a class is a subclass of the user's. A method in which calls are replaced is compiled anew from its source, with
`F.relu(x)` as `(self._ai3.relu_0 if F.relu is <that function> else F.relu)(x)`; everything else about the method is as it was:
its globals, the cells of its closure, defaults, decorators, and the file and line in tracebacks. It stands in a class of its own
just before the one that has the original, so that `super()` finds its way through rewritten and original classes alike.
"""

from __future__ import annotations

import ast
import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, fx, nn

from ai3_ops import registry
from ai3_ops.calls.call import Call
from ai3_ops.nn import layout
from ai3_ops.nn.sites import Found, Site, end_of, find, source_of, undecorated

__all__ = ["FORMAT", "Sites", "Swapped", "found_in", "sites_class"]
FORMAT = 1  # of pickled swapped modules
_newobj: Any = vars(copyreg)["__newobj__"]


# Calls of one module --------------------------------------------------------------------------------------------------
class Sites:
    """The calls of one module's own methods; each is an attribute, which the rewritten method calls (`self._ai3.relu_1`)."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.calls: dict[str, Call] = {}
        self.in_place: set[str] = set()  # those whose function writes into its input
        self.trouble = ""  # why calls are PyTorch's after all
        self.found: list[Site] | None = [*sites]
        for site in self.found:
            self.calls[site.name] = site.kind(f":{site.name}")
            if site.in_place:
                self.in_place.add(site.name)
        self._make_entries()

    def _make_entries(self) -> None:
        for name, call in self.calls.items():
            vars(self)[name] = functools.partial(call, inplace=True) if name in self.in_place else call

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": self.calls, "in_place": self.in_place, "trouble": self.trouble}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.found = None
        self._make_entries()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sites:
        other = memo[id(self)] = object.__new__(Sites)
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.found = self.found
        return other

    def install(self, module: nn.Module, every: bool = False) -> None:
        """Gives the module the class in which calls with an algorithm (all, to watch them) are replaced."""
        from ai3_ops.nn import original_class, set_class

        assert self.found is not None
        calls = self.calls
        chosen = tuple(s for s in self.found if s.name in calls and (every or calls[s.name].algorithm is not None))
        for call in calls.values():
            call.holder = weakref.ref(module)
        vars(module)["_ai3"] = self
        set_class(module, sites_class(original_class(module), chosen))

    def restore(self, module: nn.Module) -> None:
        """After unpickling or copying: finds the call sites again; calls that the source no longer has are dropped."""
        from ai3_ops.nn import original_class, set_class

        if self.found is None:
            found = found_in(module)
            self.found = found.sites
            known = {site.name: site.kind.operation for site in found.sites}
            for name in [n for n, call in self.calls.items() if known.get(n) != call.operation]:
                reasons = "; ".join(found.reasons) or "its source has changed"
                self.trouble = f"{name} was not found again: {reasons}"
                del self.calls[name], vars(self)[name]
        if any(call.algorithm is not None for call in self.calls.values()):
            self.install(module)
        else:
            set_class(module, original_class(module))


def found_in(module: nn.Module) -> Found:
    """The call sites of a module's own methods."""
    from ai3_ops.nn import LEAVES, original_class

    return find(module, original_class(module), registry.operations(), tuple(cls for cls, _, _ in LEAVES))


class _Originals:
    """What the rewritten methods call in a module that the user's code made from type(self): PyTorch's functions."""

    def __init__(self, sites: Iterable[Site]) -> None:
        for site in sites:
            vars(self)[site.name] = getattr(Tensor, site.word) if site.callee is None else site.callee


def _method(entry: Callable[..., Any], receiver: Any, name: str) -> Callable[..., Any]:
    """`receiver.name`, or the call that replaces it if the receiver is a tensor."""
    if isinstance(receiver, fx.Proxy) or (
        isinstance(receiver, Tensor)
        and (type(receiver) in (Tensor, nn.Parameter) or getattr(type(receiver), name) is getattr(Tensor, name))
    ):
        return functools.partial(entry, receiver)
    return getattr(receiver, name)


# Classes --------------------------------------------------------------------------------------------------------------
class Swapped(nn.Module):
    """Mixed into the classes of swapped modules. They are pickled as the original class and what was chosen."""

    _ai3_original: type[nn.Module]

    def __init_subclass__(cls) -> None:  # the user's would meet classes that nobody wrote
        pass

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile a swapped module ({type(self).__name__}); use torch.compile or torch.export, or "
            "script what ai3_ops.unswap returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        cls = type(self)
        if function is _newobj and args[0] is cls:
            function, args = _new, (FORMAT, cls._ai3_original, *args[1:])
        return (function, args, *rest)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters move to other memory: packs of the old, which hold it, are freed at once."""
        made = self.__dict__.get("_ai3")
        for call in made.calls.values() if isinstance(made, Sites) else [made] if made else []:
            call.forget_packs()
        applied = super()._apply(*args, **kwargs)
        layout.forget_former(self, args[0] if args else kwargs["fn"])
        return applied

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        sites = self.__dict__.get("_ai3")
        if isinstance(sites, Sites):
            sites.restore(self)


def _check_format(found: Any) -> None:
    if found != FORMAT:
        raise ValueError(
            f"ai3_ops cannot load this swapped module: it was saved in format {found}, and this version reads format {FORMAT}; "
            "load it with the ai3_ops that saved it and save what ai3_ops.unswap returns, or its state_dict"
        )


def _new(found: Any, original: type[nn.Module], *args: Any) -> nn.Module:
    from ai3_ops.nn import swapped_class

    _check_format(found)
    cls = swapped_class(original)
    return cls.__new__(cls, *args)


class Slow(Swapped):
    """Holds swapped modules: PyTorch's inference fast path would not call them, and is not taken."""

    activation_relu_or_gelu = property(lambda self: 0, lambda self, value: None)


class _Graph(Swapped):
    """Of an fx.GraphModule, whose class is its own, made with the code that it generates."""

    def _plain(self) -> Any:
        """The module before the swap; it shares everything with this one."""
        plain = object.__new__(type(self)._ai3_original)
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k != "_ai3"}
        return plain

    def recompile(self) -> Any:
        """Generates the code anew, and finds the calls in it that were chosen for."""
        made = self._plain().recompile()
        self.__dict__["_ai3"].found = None
        self.__dict__["_ai3"].restore(self)
        return made

    def __copy__(self) -> nn.Module:
        return _graph(FORMAT, copy.copy(self._plain()), copy.deepcopy(self.__dict__["_ai3"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        other = copy.deepcopy(self._plain(), memo)
        memo[id(self)] = other
        return _graph(FORMAT, other, copy.deepcopy(self.__dict__["_ai3"], memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _graph, (FORMAT, self._plain(), self.__dict__["_ai3"])


def _graph(found: Any, module: nn.Module, sites: Sites) -> nn.Module:
    _check_format(found)
    sites.found = None  # it has a class of its own
    vars(module)["_ai3"] = sites
    sites.restore(module)
    return module


def sites_class(original: type[nn.Module], sites: tuple[Site, ...]) -> type[Any]:
    """The subclass of `original` in which these calls are replaced: one for each choice of sites, which goes with its modules."""
    for known in type.__subclasses__(original):
        if vars(known).get("_ai3_sites") == sites:
            return known
    owners = [cls for cls in original.__mro__ if cls is original or any(site.owner is cls for site in sites)]
    bases: list[type] = [
        _Graph
        if issubclass(original, fx.GraphModule)
        else Slow
        if issubclass(original, nn.TransformerEncoderLayer)
        else Swapped
    ]
    for owner in owners:
        methods = {site.method for site in sites if site.owner is owner}
        rewritten = {name: _rewritten([s for s in sites if (s.owner, s.method) == (owner, name)]) for name in methods}
        if rewritten:
            bases.append(type(owner.__name__, (), {"__slots__": (), "__module__": owner.__module__, **rewritten}))
        bases.append(owner)
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ai3_original": original,
        "_ai3_sites": sites,
        "_ai3": _Originals(sites),
    }
    return types.new_class(original.__name__, tuple(bases), exec_body=lambda space: space.update(names))


# Methods --------------------------------------------------------------------------------------------------------------
class _Replace(ast.NodeTransformer):
    def __init__(self, self_name: str, sites: list[Site]) -> None:
        self.self_name = self_name
        self.wanted = {site.position: site for site in sites}
        self.names = {id(f): f"_ai3_function_{i}" for i, f in enumerate(site.callee for site in sites)}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        site = self.wanted.get(end_of(node.func))
        self.generic_visit(node)
        if site is None:
            return node

        def at(made: Any) -> Any:
            return ast.copy_location(made, func)

        def name(word: str) -> Any:
            return at(ast.Name(word, ast.Load()))

        func = node.func
        entry = at(ast.Attribute(at(ast.Attribute(name(self.self_name), "_ai3", ast.Load())), site.name, ast.Load()))
        if site.callee is None:
            assert isinstance(func, ast.Attribute)
            node.func = at(ast.Call(name("_ai3_method"), [entry, func.value, at(ast.Constant(func.attr))], []))
        else:
            same = at(ast.Compare(func, [ast.Is()], [name(self.names[id(site.callee)])]))
            node.func = at(ast.IfExp(same, entry, func))
        return node


def _rewritten(sites: list[Site]) -> FunctionType:
    """The method in which these calls are replaced, inside the decorators that it has."""
    function = sites[0].function
    source = source_of(function)
    replace = _Replace(source.self_name, sites)
    definition = source.parse()
    definition.body = [replace.visit(statement) for statement in definition.body]
    extra = {replace.names[id(s.callee)]: s.callee for s in sites if s.callee is not None} | {"_ai3_method": _method}
    code = source.compile(definition, tuple(extra))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(held) for name, held in extra.items()}
    made = _copy(function, code, tuple(cells[name] for name in code.co_freevars))
    chain = undecorated(sites[0].decorated, f"{sites[0].owner.__qualname__}.{sites[0].method}")
    for outer, inner in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        assert outer.__closure__ is not None
        closure = tuple(CellType(made) if _contents(c) is inner else c for c in outer.__closure__)
        wrapped, made = made, _copy(outer, outer.__code__, closure)
        if vars(made).get("__wrapped__") is inner:
            made.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return made


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _copy(function: FunctionType, code: types.CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure or None)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__annotations__ = function.__annotations__
    vars(made).update(vars(function))
    return made
