"""Methods compiled anew from their source, with calls in them replaced.

`F.relu(x)` becomes `(self._ai3.relu_0 if F.relu is <that function> else F.relu)(x)`; everything else about the method is as it
was: its globals, the cells of its closure, defaults, decorators, and the file and line in tracebacks.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, fx, nn

from ai3_ops.nn.sites import Site, end_of, source_of, undecorated


class Originals:
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


def rewritten(sites: list[Site]) -> FunctionType:
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
