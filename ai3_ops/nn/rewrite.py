"""Replaces the functional calls that a module's own `forward` makes, on the module's own fx graph.

The forward is traced with the module's children as leaves, in training and in evaluation mode, with every argument
that has a default left at it. What a trace would get wrong is refused with a reason (`Untraceable`), not guessed.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import itertools
import linecache
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ai3_ops.nn.calls import Call

_serial = itertools.count()
_newobj: Any = vars(copyreg)["__newobj__"]


class Untraceable(Exception):
    """Why a module's forward cannot be traced."""


class _Proxy(fx.Proxy):
    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(x, Tensor) would be baked into the graph with the wrong answer
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("torch.nn.parameter", "torch.utils._pytree"):
            frame = frame.f_back
        if frame and frame.f_globals.get("__name__", "").startswith("torch.fx."):
            return _Proxy
        raise Untraceable("its forward asks for the type of a value")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self.modes = _modes()
        names, _ = arguments_of(root_fn)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise Untraceable("its forward changes the gradient or autocast mode")
        return super().create_node(*args, **kwargs)

    def _tensors(self) -> Iterator[Tensor]:
        return itertools.chain(self.root.parameters(), self.root.buffers())

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Proxy:
            return a.node
        if isinstance(a, Tensor) and not (a in self.tensor_attrs or any(a is t for t in self._tensors())):
            raise Untraceable("its forward makes a tensor without using its inputs")
        if isinstance(a, OrderedDict):
            return self.create_node("call_function", OrderedDict, (self.create_arg(list(a.items())),), {})
        if isinstance(a, dict) and type(a) is not dict:
            raise Untraceable(f"its forward makes a {type(a).__name__}")
        return super().create_arg(a)


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def arguments_of(forward: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of the arguments without and with defaults, `self` left out."""
    names: list[str] = []
    defaults: dict[str, Any] = {}
    for p in list(inspect.signature(forward).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.default is not p.empty:
            defaults[p.name] = p.default
        elif p.kind == p.KEYWORD_ONLY:
            raise Untraceable(f"its forward needs the keyword argument {p.name!r}")
        else:
            names.append(p.name)
    return names, defaults


def trace(module: nn.Module, training: bool) -> fx.Graph:
    """The graph of the module's own forward; Untraceable, with the reason, where that is not what the forward does."""
    before, generators = _attributes(module), _generators()
    mode = module.training
    try:
        module.__dict__["training"] = training
        graph = _Tracer().trace(module)
    except Untraceable:
        raise
    except Exception as error:  # whatever the user's forward raises when it is given proxies
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Untraceable(lines[0]) from None
    finally:
        module.__dict__["training"] = mode
        changed = _restore(module, before)
        drawn = _restore_generators(generators)
    if changed:
        raise Untraceable(f"its forward changes the attribute {changed!r}")
    if drawn:
        raise Untraceable("its forward draws random numbers without using its inputs")
    return graph


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: (v, copy.copy(v) if isinstance(v, (list, dict, set)) else v) for k, v in vars(module).items()}


def _restore(module: nn.Module, before: dict[str, Any]) -> str | None:
    """Puts changed attributes back and names one of them."""
    changed = None
    for name in [name for name in vars(module) if name not in before]:
        changed = name
        del module.__dict__[name]
    for name, (value, content) in before.items():
        if name == "training":
            continue
        if module.__dict__.get(name) is not value:
            changed = name
            module.__dict__[name] = value
        if content is not value and not _same_items(content, value):
            changed = name
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
    return changed


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[k] is b[k] for k in a)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()


def _restore_generators(before: tuple[Any, ...]) -> bool:
    now = _generators()
    drawn = now[0] != before[0] or not torch.equal(now[1], before[1])
    if before[2]:
        drawn = drawn or now[2][2] != before[2][2] or (now[2][1] != before[2][1]).any()
        if drawn:
            sys.modules["numpy"].random.set_state(before[2])
    if drawn:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
    return bool(drawn)


# Which nodes are calls of an operation
def operation_of(node: fx.Node, operations: list[str]) -> type[Call] | None:
    """The kind of call that a node makes, if it is one of `operations`."""
    for operation in operations:
        call = Call.by_name.get(operation)
        if call is None:
            continue
        if node.op == "call_function" and any(node.target is f for f in call.functions):
            return call
        if node.op == "call_method" and node.target in call.methods:
            return call
    return None


def call_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a node for `Call.__call__`: in-place forms say so by `inplace=True`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.args, node.kwargs | ({"inplace": True} if in_place else {})


class Rewrite:
    """The rewritten forwards of one module; the calls in them are attributes (`relu_1`)."""

    def __init__(self, module: nn.Module, operations: list[str]) -> None:
        self._operations = operations
        self._other_calls = 0  # with values other than the defaults, or after `_stale`
        self._stale = ""  # the attribute that was changed after the trace
        self._functions: list[Callable[..., Any]] = []  # for evaluation and for training
        self._prepare(module)
        for graph in self._graphs:
            for name, node, kind in self._found(graph):
                if name not in vars(self):
                    setattr(self, name, kind(f":{name}"))
                    self.nodes[name] = node

    def _prepare(self, module: nn.Module) -> None:
        forward = type(module).forward
        self._names, self._defaults = arguments_of(forward)
        self._positional = [
            p.name
            for p in list(inspect.signature(forward).parameters.values())[1:]
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._graphs = [trace(module, training) for training in (False, True)]
        self.nodes: dict[str, fx.Node] = {}

    @property
    def calls(self) -> dict[str, Call]:
        """By name, in the order of the trace."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Call)}

    @property
    def trouble(self) -> str:
        """Why calls ran the original forward."""
        if self._stale:
            return f"the attribute {self._stale!r} was changed after the swap; swap again"
        if not self._other_calls:
            return ""
        return f"{self._other_calls} calls with other values than the defaults ran the original forward"

    def _found(self, graph: fx.Graph) -> Iterator[tuple[str, fx.Node, type[Call]]]:
        counts: dict[str, int] = {}
        for node in graph.nodes:
            kind = operation_of(node, self._operations)
            if kind is not None:
                index = counts.get(kind.operation, 0)
                counts[kind.operation] = index + 1
                yield f"{kind.operation}_{index}", node, kind

    def compile(self, module: nn.Module, watch: bool = False) -> None:
        """Makes the forwards, in which calls that have an algorithm (all, to watch them) are replaced."""
        self._functions = []
        for graph in self._graphs:
            wanted = {
                node: name
                for name, node, _ in self._found(graph)
                if name in vars(self) and (watch or vars(self)[name].algorithm)
            }
            copied = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            for node in graph.nodes:
                if node in wanted:
                    args, kwargs = fx.map_arg(call_arguments(node), copies.__getitem__)
                    copies[node] = copied.create_node("call_module", f"_ai3.{wanted[node]}", args, kwargs)
                else:
                    copies[node] = copied.node_copy(node, copies.__getitem__)
            self._functions.append(_function(copied, type(module).__qualname__))

    def forget_calls(self) -> None:
        """Starts counting anew."""
        self._other_calls = 0

    def forget_graphs(self) -> None:
        """Only swap needs them."""
        self._graphs, self.nodes = [], {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_functions", "_graphs", "nodes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._functions = []
        self.forget_graphs()

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewrite:
        other = memo[id(self)] = object.__new__(Rewrite)
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other._functions = self._functions
        return other

    def restore(self, module: nn.Module) -> None:
        """After unpickling: makes the forwards again; calls that they no longer have are dropped."""
        self._prepare(module)
        still = {name for graph in self._graphs for name, _, _ in self._found(graph)}
        for name in self.calls.keys() - still:
            delattr(self, name)
        self.compile(module)
        self.forget_graphs()

    def __call__(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's forward."""
        values = None if self._stale else self._bind(args, kwargs)
        if values is None:
            if not torch.compiler.is_compiling():
                self._other_calls += 1
            return original(module, *args, **kwargs)
        return self._functions[int(module.training)](module, *values)

    def _bind(self, args: Any, kwargs: Any) -> Any:
        """The values of the arguments without defaults; None where the trace does not hold for this call."""
        values = args
        if kwargs or len(args) != len(self._names):
            if len(args) > len(self._positional):
                return None
            given = dict(zip(self._positional, args, strict=False))
            for name, value in kwargs.items():
                if name in given:
                    return None
                given[name] = value
            for name, default in self._defaults.items():
                if name in given and not _equal(given.pop(name), default):
                    return None
            if len(given) != len(self._names):
                return None
            values = []
            for name in self._names:
                if name not in given:
                    return None
                values.append(given[name])
        for value in values:
            if value is None or value is True or value is False:  # a trace cannot tell these from a tensor by `is`
                return None
        return values


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(b, (int, float, str, tuple)) and a == b)


def _function(graph: fx.Graph, qualname: str) -> Callable[..., Any]:
    code = graph.python_code("self")
    name = f"<ai3_ops {qualname}.forward {next(_serial)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)  # for tracebacks
    space = dict(code.globals)
    exec(compile(code.src, name, "exec"), space)
    return space["forward"]


class Swapped(nn.Module):
    """Mixed into the classes of swapped modules. A generated class is pickled as the original one."""

    _ai3_original: type[nn.Module]

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile a swapped module ({type(self).__name__}); use torch.compile or torch.export, or "
            "script what ai3_ops.unswap returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        cls = type(self)
        if function is _newobj and args[0] is cls and not cls.__module__.startswith("ai3_ops."):
            function, args = _new, (cls._ai3_original, *args[1:])
        return (function, args, *rest)


def _new(original: type[nn.Module], *args: Any) -> nn.Module:
    from ai3_ops.nn import swapped_class

    cls = swapped_class(original)
    return cls.__new__(cls, *args)


class Rewritten(Swapped):
    """What a generated subclass of the user's class adds to it; `_ai3` in the instance is its Rewrite."""

    def __setattr__(self, name: str, value: Any) -> None:
        rewrite = self.__dict__.get("_ai3")
        if isinstance(rewrite, Rewrite) and name != "training" and not name.startswith("__"):
            old = getattr(self, name, None)
            same_kind = any(isinstance(old, kind) and isinstance(value, kind) for kind in (Tensor, nn.Module))
            if not (same_kind or _equal(value, old)):
                rewrite._stale = name
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        rewrite = self.__dict__.get("_ai3")
        if isinstance(rewrite, Rewrite) and not rewrite._functions:
            module: nn.Module = self
            swapped, module.__class__ = type(self), type(self)._ai3_original
            try:
                rewrite.restore(module)
            finally:
                module.__class__ = swapped


@functools.cache
def rewritten_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `original` whose instances run their Rewrite."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewrite = self.__dict__.get("_ai3")
        if rewrite is None:  # made by the user's code from type(self)
            return original.forward(self, *args, **kwargs)
        return rewrite(self, original.forward, args, kwargs)

    names = {
        "forward": forward,
        "_ai3_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (Rewritten, original), names | {"__qualname__": original.__qualname__})
