"""Replaces the functional calls that a module's own `forward` makes, on the module's own fx graph.

The forward is traced with the module's children as leaves (`ai3_ops.nn.tracing`), in training and in evaluation mode, with
every argument that has a default left at it. A graph is used while what it hangs on is as it was at the trace, and for calls
with tensors; otherwise the original forward runs, and `explain` says so.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ai3_ops.nn.calls import Call
from ai3_ops.nn.tracing import MISSING, Bound, Untraceable, arguments_of, holds, holds_compiled, same, trace

__all__ = ["Rewrite", "Swapped", "Untraceable", "call_arguments", "rewritten_class"]
_serial = itertools.count()
_newobj: Any = vars(copyreg)["__newobj__"]


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
        self._other_calls = 0  # with values that the graphs are not made for
        self._trouble = ""  # why the graphs were not what the forward does
        self._prepare(module)
        for traced in self._traces:
            for name, node, kind in self._found(traced.graph):
                if name not in vars(self):
                    setattr(self, name, kind(f":{name}"))
                    self.nodes[name] = node

    def _prepare(self, module: nn.Module) -> None:
        self._functions: list[Callable[..., Any]] = []  # for evaluation and for training
        self._bound: list[Bound | None] = [None, None]
        self._forward = type(module).forward
        self._names, self._defaults = arguments_of(self._forward)
        self._positional = [
            p.name
            for p in list(inspect.signature(self._forward).parameters.values())[1:]
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._traces = [trace(module, training) for training in (False, True)]
        if any(True for traced in self._traces for _ in self._found(traced.graph)):
            for training, traced in enumerate(self._traces):
                if str(trace(module, bool(training), inference=True).graph) != str(traced.graph):
                    raise Untraceable("its forward asks for the gradient or autocast mode")
        self._guards = [traced.guards for traced in self._traces]
        self._globals = [traced.globals for traced in self._traces]
        self.nodes: dict[str, fx.Node] = {}

    @property
    def calls(self) -> dict[str, Call]:
        """By name, in the order of the trace."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Call)}

    @property
    def trouble(self) -> str:
        """Why calls ran the original forward."""
        others = "calls with other values than the defaults, or inputs that are no tensors, ran the original forward"
        return "; ".join(filter(None, [self._trouble, f"{self._other_calls} {others}" if self._other_calls else ""]))

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
        for traced in self._traces:
            wanted = {
                node: name
                for name, node, _ in self._found(traced.graph)
                if name in vars(self) and (watch or vars(self)[name].algorithm)
            }
            copied = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            for node in traced.graph.nodes:
                if node in wanted:
                    args, kwargs = fx.map_arg(call_arguments(node), copies.__getitem__)
                    copies[node] = copied.create_node("call_module", f"_ai3.{wanted[node]}", args, kwargs)
                else:
                    copies[node] = copied.node_copy(node, copies.__getitem__)
            self._functions.append(_function(copied, type(module).__qualname__))

    def forget_calls(self) -> None:
        """Starts counting anew."""
        self._other_calls, self._trouble = 0, ""

    def forget_graphs(self) -> None:
        """Only swap needs them."""
        self._traces, self.nodes = [], {}

    def __getstate__(self) -> dict[str, Any]:
        """For files: what `restore` makes again is left out."""
        return {k: v for k, v in vars(self).items() if k in ("_operations", "_other_calls") or isinstance(v, Call)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._trouble, self._functions = "", []

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewrite:
        other = memo[id(self)] = object.__new__(Rewrite)
        vars(other).update({k: copy.deepcopy(v, memo) if isinstance(v, Call) else v for k, v in vars(self).items()})
        other._bound = [None, None]
        return other

    def restore(self, module: nn.Module) -> None:
        """After unpickling: makes the forwards again; calls that they no longer have are dropped."""
        try:
            self._prepare(module)
        except Untraceable as reason:  # the user's code is another one now
            self._trouble = f"the original forward runs: {reason}"
            return
        still = {name for traced in self._traces for name, _, _ in self._found(traced.graph)}
        for name in self.calls.keys() - still:
            delattr(self, name)
        self.compile(module)
        self.forget_graphs()

    def __call__(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's forward."""
        training = int(module.training)
        if not self._functions or original is not self._forward or not self._holds(module, training):
            if self._functions and original is not self._forward:
                self._trouble = "its class has another forward now; swap again"
            return original(module, *args, **kwargs)
        values = self._bind(args, kwargs)
        if values is None:
            if not torch.compiler.is_compiling():
                self._other_calls += 1
            return original(module, *args, **kwargs)
        return self._functions[training](module, *values)

    def _holds(self, module: nn.Module, training: int) -> bool:
        """Whether what the graph hangs on is as it was. Mostly it is the same objects, which takes no time to see."""
        if torch.compiler.is_compiling():
            return holds_compiled(module, self._guards[training], self._globals[training])
        bound = self._bound[training]
        if bound is not None and bound.hold():
            return True
        return self._holds_anew(module, training)

    def _holds_anew(self, module: nn.Module, training: int) -> bool:
        for guard in self._guards[training]:
            if not holds(module, guard):
                name = ".".join((*guard.path, guard.name))
                self._trouble = f"the attribute {name!r} was changed after the swap; swap again"
                return False
        for space, name, value in self._globals[training]:
            if not same(space.get(name, MISSING), value):
                self._trouble = f"the global {name!r} was changed after the swap; swap again"
                return False
        self._bound[training] = Bound(module, self._guards[training], self._globals[training])
        return True

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
            if not isinstance(value, (Tensor, fx.Proxy)):  # the graph may hang on what else it is
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
        if function is _newobj and args[0] is cls and not cls.__module__.startswith("ai3_ops."):
            function, args = _new, (cls._ai3_original, *args[1:])
        return (function, args, *rest)


def _new(original: type[nn.Module], *args: Any) -> nn.Module:
    from ai3_ops.nn import swapped_class

    cls = swapped_class(original)
    return cls.__new__(cls, *args)


class Rewritten(Swapped):
    """What a generated subclass of the user's class adds to it; `_ai3` in the instance is its Rewrite."""

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
