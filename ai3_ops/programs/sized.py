"""What of a graph follows from sizes alone, as position ids, masks and tables do: computed once for each set of sizes.

Such values depend on constants and on the sizes of tensors, never on what a tensor holds. A graph with them runs as two: one
makes them of the tensors whose sizes they follow from, the other is the rest and reads what was made.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.tools_common import legalize_graph

from ai3_ops._torch import OpOverload, transformed
from ai3_ops.graph import steps
from ai3_ops.operations.step import RULES

CACHED = 8  # sets of sizes whose values are cached; the one used last longest ago goes
LARGEST = 2**27  # bytes of all of them together

aten = torch.ops.aten
# The argument of which a step or an operator reads nothing but the sizes.
_LOOKS_AT: dict[Any, int] = {steps.expand: 2, aten.sym_size.int: 0, aten.sym_numel.default: 0} | {
    getattr(aten, name).default: 0
    for name in ("new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like")
}
# Python's functions that graphs of torch.export call, on sizes and on lists of results.
PYTHON: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        *("getitem", "add", "sub", "mul", "floordiv", "mod", "truediv", "neg"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"),
    )
} | {
    f"torch.{name}": getattr(torch, name)
    for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite")
}
_ON_SIZES = (*PYTHON.values(),)


def by_sizes(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes, in order, whose values follow from constants and sizes alone.

    None where something may write to values, or where they are sizes and views and nothing is computed.
    Nor those that follow from sizes of what is computed with one of them: all of them are there before what reads one begins.
    """
    found: dict[fx.Node, None] = {}
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and not _writes_nothing(node.target):
            return {}
        looked, read = _arguments(node)
        if (
            node.op == "call_function"
            and _is_function(node)
            and behind.isdisjoint(looked)
            and all(a in found or a.op == "get_attr" for a in read)
        ):
            found[node] = None
        elif any(a in found or a in behind for a in node.all_input_nodes):
            behind.add(node)
    return found if any(node.target not in _LOOKS_AT and node.target not in _ON_SIZES for node in found) else {}


def _arguments(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a node looks at for its sizes, and what else it reads."""
    place, looked, read = _LOOKS_AT.get(node.target, len(node.args)), list[fx.Node](), list[fx.Node]()
    fx.map_arg(node.args[place : place + 1], looked.append)
    fx.map_arg((node.args[:place], node.args[place + 1 :], node.kwargs), read.append)
    return looked, read


def _writes_nothing(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return not target._schema.is_mutable
    return target in steps.STEPS or target in _ON_SIZES


def _is_function(node: fx.Node) -> bool:
    """Whether a call gives the same for the same: nothing random, no memory as it is, no code of a user."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return node.kwargs.get("algorithm", RULES[0]) in RULES
    if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return "empty" not in target.name() and "from_file" not in target.name()


class Sized:
    """Runs a graph module, of which what follows from sizes alone is cached; outside of traces, on the CPU.

    On a GPU another stream could read what is not yet there, and CUDA graphs what is no longer there.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        found = by_sizes(module.graph)
        self._run = _with_cached(module, found) if found else None

    def runs(self, given: tuple[Any, ...]) -> bool:
        """Whether it computes such inputs."""
        if self._run is None or torch.compiler.is_compiling():
            return False
        tensors = [x for x in given if isinstance(x, Tensor)]
        return all(type(x) is Tensor and x.is_cpu for x in tensors) and bool(tensors) and not transformed(tensors[0])

    def __call__(self, *given: Any) -> Any:
        """As the module."""
        assert self._run is not None
        return self._run.forward(*given)


class _Cached(nn.Module):
    """The values of a graph, by the sizes of its inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._module, self._lock = (module,), threading.Lock()
        self._values: OrderedDict[Any, tuple[tuple[Any, ...], int]] = OrderedDict()  # with their bytes
        self._constants = {_memory(x)[0] for x in module.buffers()}

    def forward(self, *like: Tensor) -> tuple[Any, ...]:
        """For tensors of these sizes."""
        key = tuple([(x.shape, x.stride()) for x in like])  # full_like has the strides, too
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        with torch.inference_mode(False), torch.no_grad():  # so that calls in any mode can read them
            made: tuple[Any, ...] = self._module[0](*like)
        memory = dict(_memory(x) for x in made if isinstance(x, Tensor))
        own = sum(size for at, size in memory.items() if at not in self._constants)
        if own <= LARGEST:
            with self._lock:
                self._values[key] = made, own
                while len(self._values) > CACHED or sum(size for _, size in self._values.values()) > LARGEST:
                    self._values.popitem(last=False)
        return made


def _memory(x: Tensor) -> tuple[int, int]:
    """Where a tensor's memory is, and how many bytes."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _own(value: Any, cached: tuple[Any, ...]) -> Any:
    """What is returned, not in memory that is cached: a caller may write to it."""
    if not isinstance(value, Tensor):
        return value
    shared = any(isinstance(x, Tensor) and _memory(x)[0] == _memory(value)[0] for x in cached)
    return value.clone() if shared else value


def _with_cached(module: fx.GraphModule, found: dict[fx.Node, None]) -> fx.GraphModule:
    """A graph that has these nodes' values of a `_Cached`."""
    nodes, near = module.graph.nodes, set(found)
    like = list(dict.fromkeys(a for node in found for a in _arguments(node)[0] if a not in found))
    results = [node for node in found if any(user not in found for user in node.users)]
    inner, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in like:
        made[node] = inner.placeholder(node.name)
    for node in nodes:
        if node in found or (node.op == "get_attr" and any(user in found for user in node.users)):
            made[node] = inner.node_copy(node, made.__getitem__)
    inner.output(tuple(made[node] for node in results))
    outer, names = fx.Graph(), dict[fx.Node, fx.Node]()
    cached = outer.call_module("cached")
    for place, node in enumerate(results):
        names[node] = outer.call_function(operator.getitem, (cached, place))
    for node in nodes:
        if node.op == "call_function" and not near.isdisjoint(node.all_input_nodes):
            near.add(node)  # what it computes may be a view
        if node.op == "output":
            read = node.all_input_nodes
            own = {n: outer.call_function(_own, (names[n], cached)) if n in near else names[n] for n in read}
            outer.output(fx.map_arg(node.args[0], own.__getitem__))
        elif node not in found and (node.op != "get_attr" or node in like or any(u not in found for u in node.users)):
            names[node] = outer.node_copy(node, names.__getitem__)
    cached.args = tuple(names[node] for node in like)
    root = {str(n.target): getattr(module, str(n.target)) for n in nodes if n.op in ("get_attr", "call_module")}
    whole = fx.GraphModule({**root, "cached": _Cached(fx.GraphModule(root, inner))}, outer)
    legalize_graph(whole)
    whole.recompile()
    return whole
