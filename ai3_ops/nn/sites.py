"""Finds the call sites of a module's own methods: where their source calls one of PyTorch's functions that `Call`s stand for.

A method is read from its source once. A callee is looked up as Python would: a name in the method's closure and globals, then
attributes of modules and classes; `self.act` where the instance keeps one of PyTorch's functions there. `x.relu()` is known by
its name. What cannot be looked up before the call (a local variable, an element of a dict) is no site.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, fx, nn

from ai3_ops.calls.call import Call

Position = tuple[int, int]  # line and column where the callee's name ends: no two calls of a file have the same
_MISSING: Any = object()


@dataclass(frozen=True)
class Site:
    """One call in the source of a method."""

    name: str  # "relu_1"
    kind: type[Call]
    owner: type[nn.Module]  # the class whose body has the method
    method: str
    decorated: FunctionType  # the method as the class has it
    function: FunctionType  # without its decorators
    position: Position
    callee: Any  # PyTorch's function; None for a method of tensors
    word: str  # the callee's last name
    node: ast.Call = field(compare=False, repr=False)

    @property
    def in_place(self) -> bool:
        """Whether the name says so, as that of relu_."""
        return self.word.endswith("_") and not self.word.endswith("__")


class Unreadable(Exception):
    """Why the source of a method cannot be used."""


class Source:
    """The source of a function, checked against what runs."""

    def __init__(self, function: FunctionType) -> None:
        code = function.__code__
        try:
            text = inspect.getsource(code)
        except (OSError, TypeError, SyntaxError, IndexError):
            raise Unreadable("it has no source") from None
        self.text = f"if 1:\n{text}" if text[:1].isspace() else text  # dedenting would change what strings hold
        self.first = code.co_firstlineno - self.text.startswith("if 1:\n")
        self.flags = code.co_flags & _FLAGS
        self.file = code.co_filename
        self.qualname = code.co_qualname
        head, _, self.name = self.qualname.rpartition(".")
        name = head.rpartition(".")[2]  # of the class around it, for which Python mangles names like __weight
        self.class_name = name if name.isidentifier() else ""
        self.free = code.co_freevars
        self.definition = self.parse()
        if not _same_code(self.compile(self.definition), code):
            raise Unreadable("its source is not what runs")
        self.calls = sorted(
            (node for part in self.definition.body for node in ast.walk(part) if isinstance(node, ast.Call)),
            key=lambda node: end_of(node.func),
        )
        arguments = self.definition.args.posonlyargs + self.definition.args.args
        self.self_name = arguments[0].arg if arguments else ""
        self.imports = _imports(self.definition)
        self.bound = _bound_names(self.definition) - self.imports.keys()
        self.rebinds_self = _binds(self.definition, self.self_name) > 1

    def parse(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        """A new syntax tree of the function, with the file's line numbers."""
        try:
            tree = ast.parse(self.text)
        except SyntaxError:
            raise Unreadable("its source is not a statement of its own") from None
        body = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
        if len(body) != 1 or not isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise Unreadable("its source is not a definition")
        ast.increment_lineno(tree, self.first - 1)
        return body[0]

    def compile(self, definition: ast.stmt, extra: tuple[str, ...] = ()) -> CodeType:
        """The function's code; `extra` names become variables of its closure."""
        inside = self.class_name
        names = [name for name in (*self.free, *extra) if not (inside and name == "__class__")]
        outer = inside or self.name  # which means inside what it meant there
        body = f"class {inside}:\n  pass" if inside else "pass"
        tree = ast.parse(
            f"def around({', '.join(names)}):\n {'pass' if outer in self.free else f'global {outer}'}\n {body}"
        )
        around: Any = tree.body[0]
        (around.body[-1] if inside else around).body[-1:] = [definition]
        code = compile(tree, self.file, "exec", flags=self.flags, dont_inherit=True)
        for name in ("around", *filter(None, [inside]), self.name):
            inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
            if not inner:
                raise Unreadable("it has type parameters")
            code = inner[0]
        return _renamed(code, code.co_qualname, self.qualname)


_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def _renamed(code: CodeType, before: str, after: str) -> CodeType:
    """With a qualified name, also of what is inside of it."""
    consts = tuple(_renamed(c, before, after) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_qualname=after + code.co_qualname.removeprefix(before), co_consts=consts)


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Whether they do the same, wherever they stand."""
    names = ("co_names", "co_varnames", "co_freevars", "co_cellvars")
    if len(a.co_consts) != len(b.co_consts) or any(getattr(a, n) != getattr(b, n) for n in names):
        return False
    if (a.co_flags ^ b.co_flags) & ~inspect.CO_NESTED or not (a.co_code == b.co_code or _steps(a) == _steps(b)):
        return False
    return all(map(_same_constant, a.co_consts, b.co_consts))


def _same_constant(a: Any, b: Any) -> bool:
    """Also where they are no number, or sets in another order."""
    if type(a) is not type(b) or isinstance(a, CodeType):
        return type(a) is type(b) and _same_code(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_constant, a, b))
    return bool(a == b) if isinstance(a, frozenset) else repr(a) == repr(b)


_HELPERS = ("PUSH_NULL", "PRECALL", "CACHE", "NOP", "EXTENDED_ARG")


def _steps(code: CodeType) -> list[tuple[str, Any]]:
    """Its instructions, but for those that call what the file imports otherwise than methods, which only the file tells apart."""
    index: dict[int, int] = {}
    found: list[dis.Instruction] = []
    for at in dis.get_instructions(code):
        index[at.offset] = len(found)
        if at.opname not in _HELPERS:
            found.append(at)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (
            at.opname.replace("LOAD_METHOD", "LOAD_ATTR"),
            index.get(at.argval)
            if at.opcode in jumps
            else None
            if isinstance(at.argval, CodeType)
            else repr(at.argval),
        )
        for at in found
    ]


def end_of(node: ast.expr) -> Position:
    """Where an expression ends."""
    return node.end_lineno or 0, node.end_col_offset or 0


def _names(node: ast.AST) -> Iterator[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name


def _bound_names(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """All names that the function or a scope inside it binds."""
    return {name for node in ast.walk(definition) if node is not definition for name in _names(node)}


def _imports(definition: ast.AST) -> dict[str, tuple[str, str]]:
    """Module and name that the function's own import statements give names to which nothing else binds."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Import):
            found |= {a.asname: (a.name, "") for a in node.names if a.asname}
            found |= {name: (name, "") for a in node.names if not a.asname for name in [a.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {a.asname or a.name: (node.module, a.name) for a in node.names}
    return {name: origin for name, origin in found.items() if _binds(definition, name) == 1}


def _binds(definition: ast.AST, name: str) -> int:
    return sum(name in _names(node) for node in ast.walk(definition))


_sources: weakref.WeakKeyDictionary[FunctionType, Source | str] = weakref.WeakKeyDictionary()


def source_of(function: FunctionType) -> Source:
    """Read once, and kept as long as the function is."""
    found = _sources.get(function)
    if found is None:
        try:
            found = Source(function)
        except Unreadable as reason:
            found = str(reason)
        _sources[function] = found
    if isinstance(found, str):
        raise Unreadable(found)
    return found


# Methods --------------------------------------------------------------------------------------------------------------
def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _words(function: FunctionType) -> set[str]:
    """All names of globals and attributes in a function."""
    return {name for code in _codes(function.__code__) for name in (*code.co_names, *code.co_freevars)}


def undecorated(value: FunctionType, qualname: str) -> tuple[FunctionType, ...]:
    """A method's functions, from the outermost decorator's to its own, each of which the one before holds in its closure."""

    def down(function: FunctionType, above: tuple[FunctionType, ...]) -> tuple[FunctionType, ...] | None:
        chain = (*above, function)
        if function.__code__.co_qualname == qualname:
            return chain
        for held in _closure(function).values():
            if isinstance(held, FunctionType) and held not in chain and (found := down(held, chain)):
                return found
        return None

    return down(value, ()) or (value,)


def _closure(function: FunctionType) -> dict[str, Any]:
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return values


def _is_users(cls: type, leaves: tuple[type, ...]) -> bool:
    """Whether calls in a class's methods are looked for: not in PyTorch's, but in those that stand for one operation."""
    if cls in leaves:
        return True
    if issubclass(cls, fx.GraphModule):
        return "forward" in vars(cls) and cls is not fx.GraphModule
    return not f"{cls.__module__}.".startswith("torch.") and cls is not object


def _is_special(name: str) -> bool:
    """Methods that build, copy or print a module are none that compute."""
    return name.startswith("__") and name.endswith("__") and name != "__call__"


def methods_of(cls: type[nn.Module], leaves: tuple[type, ...]) -> list[tuple[type[nn.Module], str, Any]]:
    """Class, name and value of each method that `self.name` and `super().name` may run: forward first, then class by class.

    Not those whose names a subclass defines anew without asking `super()` for them.
    """
    found: list[tuple[type[nn.Module], str, Any]] = []
    defined: set[str] = set()
    named: set[str] = set()  # all names in the methods so far
    asked: set[str] = set()  # those in methods that use super()
    for owner in cls.__mro__:
        methods = {n: v for n, v in vars(owner).items() if isinstance(v, _METHODS) and not _is_special(n)}
        for name in sorted(methods, key=lambda n: n != "forward") if _is_users(owner, leaves) else ():
            value = methods[name]
            if (name in defined and name not in asked) or (owner in leaves and name not in ("forward", *named)):
                continue
            found.append((owner, name, value))
            if isinstance(value, FunctionType):
                words = _words(undecorated(value, f"{owner.__qualname__}.{name}")[-1])
                named |= words
                asked |= words if "super" in words else set()
        defined |= methods.keys()
    return sorted(found, key=lambda method: method[1] != "forward")


_METHODS = (FunctionType, staticmethod, classmethod, property)


# Callees --------------------------------------------------------------------------------------------------------------
def _chain(node: ast.expr) -> list[str] | None:
    """The names of a.b.c."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def _looked_up(names: list[str], function: FunctionType, imports: Mapping[str, tuple[str, str]]) -> Any:
    """What a chain of names that begins in a closure, global or import stands for, as far as that can be seen without a call."""
    closure = _closure(function)
    if names[0] in imports:
        of, name = imports[names[0]]
        value = sys.modules.get(of, _MISSING)
        value = getattr(value, name, _MISSING) if name and value is not _MISSING else value
    elif names[0] in function.__code__.co_freevars:
        value = closure.get(names[0], _MISSING)
    else:
        value = function.__globals__.get(names[0], getattr(builtins, names[0], _MISSING))
    for name in names[1:]:
        if not isinstance(value, (types.ModuleType, type)):
            return _MISSING
        value = (
            vars(value).get(name, _MISSING) if isinstance(value, types.ModuleType) else getattr(value, name, _MISSING)
        )
    return value


def _kept(module: nn.Module, name: str) -> Any:
    """What `self.name` is, where that is a plain value of the instance or of its class."""
    if name in vars(module):
        return vars(module)[name]
    value = inspect.getattr_static(type(module), name, _MISSING)
    return value.__func__ if isinstance(value, staticmethod) else value


def _is_builtin(value: Any) -> bool:
    return isinstance(value, types.BuiltinFunctionType)


class _Kinds:
    """Which kind of call a function or a method of tensors is."""

    def __init__(self, operations: list[str]) -> None:
        kinds = [Call.by_name[o] for o in operations if o in Call.by_name]
        self.functions = {id(f): (kind, f) for kind in kinds for f in (*kind.functions, *kind.others().values())}
        self.methods = {name: kind for kind in kinds for name in kind.methods}
        self.words = {f.__name__ for _, f in self.functions.values()} | set(self.methods)

    def of(self, value: Any) -> type[Call] | None:
        found = self.functions.get(id(value))
        return found[0] if found else None


def _calls(
    source: Source, function: FunctionType, module: nn.Module, kinds: _Kinds
) -> Iterator[tuple[ast.Call, type[Call], Any]]:
    """The calls in a function that are one of the kinds: the node, the kind, and the callee (None: a method of tensors)."""
    for node in source.calls:
        names = _chain(node.func)
        if names and names[0] == source.self_name:
            value = _kept(module, names[1]) if len(names) == 2 else _MISSING
            kind = kinds.of(value)
            if kind and (names[1] in vars(module) or _is_builtin(value) or _is_static(module, names[1])):
                yield node, kind, value
                continue
            if len(names) == 2:
                continue
        elif names and names[0] not in source.bound:
            value = _looked_up(names, function, source.imports)
            if kind := kinds.of(value):
                yield node, kind, value
            if value is not _MISSING:
                continue
        if not isinstance(node.func, ast.Attribute) or _is_no_tensor(node.func.value, source, function, module):
            continue
        if kind := kinds.methods.get(node.func.attr):
            yield node, kind, None


def _is_static(module: nn.Module, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(module), name, None), staticmethod)


def _is_no_tensor(node: ast.expr, source: Source, function: FunctionType, module: nn.Module) -> bool:
    """Whether an expression is surely no tensor: super(), a global of another kind, a child of the module."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    names = _chain(node)
    if names is None:
        return False
    if names[0] == source.self_name:
        value: Any = module
        for name in names[1:]:
            stores = [vars(value), value._modules] if isinstance(value, nn.Module) else []
            value = next((store[name] for store in stores if name in store), _MISSING)
        return value is not _MISSING and not isinstance(value, Tensor)
    if names[0] in source.bound:
        return False
    value = _looked_up(names, function, source.imports)
    return value is not _MISSING and not isinstance(value, Tensor)


# Finding --------------------------------------------------------------------------------------------------------------
@dataclass
class Found:
    """What `find` returns."""

    sites: list[Site]
    reasons: dict[str, list[str]]  # why calls in some methods are no sites, and their operations


def _may_call(function: FunctionType, kinds: _Kinds, module: nn.Module) -> bool:
    """Whether it has the name of any of the functions, or of something that is one."""
    words = _words(function)
    if words & kinds.words:
        return True
    spaces = [function.__globals__, _closure(function), vars(module)]
    values = [space[word] for word in words for space in spaces if word in space]
    if any(map(kinds.of, values)) or any(kinds.of(_kept(module, word)) for word in words):
        return True
    modules = [value for value in values if isinstance(value, types.ModuleType)]
    return any(kinds.of(vars(m).get(word)) for m in modules for word in words)


def find(module: nn.Module, cls: type[nn.Module], operations: list[str], leaves: tuple[type, ...]) -> Found:
    """The call sites of a module whose class is `cls`, numbered by operation: methods as `methods_of`, calls by source."""
    kinds = _Kinds(operations)
    found = Found([], {})
    counts: dict[str, int] = {}
    for owner, name, value in methods_of(cls, leaves):
        if not isinstance(value, FunctionType):
            inner = value.fget if isinstance(value, property) else value.__func__
            what = {property: "property", staticmethod: "static method", classmethod: "class method"}[type(value)]
            if isinstance(inner, FunctionType) and kinds.of(inner) is None and _may_call(inner, kinds, module):
                _lose(found, f"{name} is a {what}", operations_in(inner, module, operations))
            continue
        function = undecorated(value, f"{owner.__qualname__}.{name}")[-1]
        if not _may_call(function, kinds, module):
            continue
        try:
            source = source_of(function)
        except Unreadable as reason:
            _lose(found, f"{name}: {reason}", operations_in(function, module, operations))
            continue
        calls = list(_calls(source, function, module, kinds))
        if (
            owner.__module__ == "torch.nn.modules.conv" and name == "_conv_forward"
        ):  # which has one call for each padding mode
            calls = [c for c in calls if ("pad" in ast.dump(c[0].args[0])) == (module.padding_mode != "zeros")]
        if calls and (not source.self_name or source.rebinds_self):
            _lose(found, f"{name} has no name for its module", [kind.operation for _, kind, _ in calls])
            continue
        for node, kind, callee in calls:
            index = counts.get(kind.operation, 0)
            counts[kind.operation] = index + 1
            word = node.func.attr if callee is None and isinstance(node.func, ast.Attribute) else callee.__name__
            place = (owner, name, value, function, end_of(node.func))
            found.sites.append(Site(f"{kind.operation}_{index}", kind, *place, callee, word, node))
    return found


def _lose(found: Found, reason: str, operations: list[str]) -> None:
    if operations:
        found.reasons[reason] = operations


def operations_in(function: Callable[..., Any], module: nn.Module, operations: list[str]) -> list[str]:
    """The operations that a function calls, by its source, or by its code where it has none."""
    kinds = _Kinds(operations)
    inner = inspect.unwrap(function)
    inner = getattr(inner, "__func__", inner)
    if not isinstance(inner, FunctionType):
        return []
    try:
        return list(dict.fromkeys(kind.operation for _, kind, _ in _calls(source_of(inner), inner, module, kinds)))
    except Unreadable:
        return list(dict.fromkeys(_in_code(inner, kinds)))


def _in_code(function: FunctionType, kinds: _Kinds) -> Iterator[str]:
    """By what its instructions load."""
    for code in _codes(function.__code__):
        value: Any = _MISSING
        loads_self = False
        for at in dis.get_instructions(code):
            if at.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                value = _looked_up([at.argval], function, {})
            elif at.opname in ("LOAD_ATTR", "LOAD_METHOD") and value is not _MISSING:
                value = vars(value).get(at.argval, _MISSING) if isinstance(value, types.ModuleType) else _MISSING
            elif at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if (at.argval in kinds.methods) and not loads_self:
                    yield kinds.methods[at.argval].operation
            else:
                value = _MISSING
            loads_self = at.opname.startswith("LOAD_FAST") and at.argval == code.co_varnames[0]
            if kind := kinds.of(value):
                yield kind.operation


# Arguments ------------------------------------------------------------------------------------------------------------
def known_arguments(site: Site, module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments but for its input: constants, and attributes of the module; LookupError where one is neither."""
    source = source_of(site.function)

    def value(node: ast.expr) -> Any:
        names = _chain(node)
        if names and names[0] == source.self_name and len(names) > 1:
            found: Any = module
            for name in names[1:]:
                try:
                    found = getattr(found, name)
                except Exception:  # properties may raise anything
                    raise LookupError(name) from None
            return found
        if isinstance(node, (ast.Tuple, ast.List)):
            return [*map(value, node.elts)] if isinstance(node, ast.List) else (*map(value, node.elts),)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise LookupError(ast.unparse(node)) from None

    args = site.node.args if site.callee is None or not site.node.args else site.node.args[1:]
    keywords = {k.arg: value(k.value) for k in site.node.keywords if k.arg != "input"}
    if None in keywords or any(isinstance(a, ast.Starred) for a in site.node.args):
        raise LookupError("the call hands a list or dict on")
    return [*map(value, args)], keywords  # type: ignore[return-value]
