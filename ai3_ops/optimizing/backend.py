"""`torch.compile(model, backend="ai3")`: the rewriting of `optimize` on Dynamo's graphs, and Inductor for the rest."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ai3_ops import _library, _torch
from ai3_ops._torch import pytree
from ai3_ops.explaining.compiled import Compiled, Graph, remember
from ai3_ops.graph.calls import Uncapturable
from ai3_ops.optimizing.pipeline import Settings, make_plan
from ai3_ops.registry import near


@dataclass(eq=False)
class _State:
    """What computes one of Dynamo's graphs with certain weights."""

    compiled: Compiled
    takes: Sequence[int]  # which of the graph's inputs it is called with
    seen: _Seen
    record: Graph


class _States(dict[tuple[int, ...], _State]):
    """By the weights' identities: modules of one class, each with its own, may share a graph that Dynamo made of their code."""

    def keep(self, state: _State, weights: Sequence[Tensor]) -> None:
        """Until one of the weights is gone."""
        key = tuple(map(id, weights))
        if key not in self:
            for x in weights:
                weakref.finalize(x, _drop, weakref.ref(self), key).atexit = False
        self[key] = state


def _drop(states: Callable[[], _States | None], key: tuple[int, ...]) -> None:
    if (found := states()) is not None:
        found.pop(key, None)


class _Bound(nn.Module):
    """One of Dynamo's graphs with its parameters and buffers in place; it is called with the other inputs."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], static: Sequence[bool]) -> None:
        super().__init__()
        self.graph, self.static = graph, static
        for i, (value, known) in enumerate(zip(inputs, static, strict=True)):
            if known:
                self.register_buffer(f"static_{i}", value.detach())

    def forward(self, *given: Any) -> Any:
        """The graph's outputs."""
        rest = iter(given)
        return self.graph(*[getattr(self, f"static_{i}") if s else next(rest) for i, s in enumerate(self.static)])


def ai3(graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Compiled:
    """What Dynamo calls. `options` are those of `ai3_ops.optimize` from `selectors` to `allow_approximate`.

    Weights are packed once; where one of them changes, the graph is rewritten and compiled anew at the next call (`_Seen`
    says which changes show). Graphs that need gradients, have sizes that are not known (`dynamic=False` avoids them) or cannot
    be captured are left to Inductor.
    """
    known = [setting.name for setting in fields(Settings) if setting.name not in ("resolved", "thorough")]
    for name in options or {}:
        if name not in known:
            raise ValueError(f'torch.compile(backend="ai3") has no option {name!r}{near(name, known)}')
    settings = Settings(**(options or {}))
    static = [_is_static(node) for node in graph.graph.find_nodes(op="placeholder")]
    watched = [i for i, known in enumerate(static) if known]
    record = Graph()
    if left := _left(graph, inputs):
        record.left, compiled = left, _inductor(graph, list(inputs))
        remember(record, [inputs[i] for i in watched], compiled)
        return compiled

    others = [i for i, known in enumerate(static) if not known]
    inductors: list[Compiled] = []  # one at most, which takes all values, whatever weights are among them
    states, lock = _States(), threading.Lock()

    def made(values: Sequence[Any], record: Graph) -> _State:
        """What computes the graph's outputs, a program where that is faster, for the weights among the values."""
        seen = _Seen([values[i] for i in watched])  # first: what changes meanwhile is seen at the next call
        bound = _Bound(graph, values, static).eval()
        rest = [values[i] for i in others]
        with _torch.outside_of_compilation(), torch.no_grad():
            record.report, record.left = None, ""
            try:
                plan = make_plan(bound, tuple(rest), {}, settings, swapping=False)  # Inductor's otherwise
                body, record.report = plan.body, plan.report
                if body is None:
                    plan.report.notes.append("Inductor compiled it")
            except Uncapturable as reason:
                body, record.left = None, str(reason)
        if body is not None:
            return _State(_rest(body, rest), others, seen, record)
        if not inductors:
            inductors.append(_inductor(graph, list(values)))
        return _State(inductors[0], range(len(values)), seen, record)

    first = [inputs[i] for i in watched]
    state = made(inputs, record)
    if inductors:
        remember(record, first, inductors[0])
        return inductors[0]
    states.keep(state, first)

    def other(values: Sequence[Any], weights: Sequence[Tensor]) -> _State:
        """For other weights than those of the last call, or the same ones changed."""
        with lock:
            found = states.get(tuple(map(id, weights)))
            if found is not None and (found.compiled in inductors or found.seen.holds(weights)):
                return found  # Inductor's code reads the weights at each call
            new = made(values, Graph() if found is None else found.record)
            if found is None:
                remember(new.record, weights, run)
            states.keep(new, weights)
            return new

    def run(*values: Any) -> Any:
        nonlocal state
        weights = [values[i] for i in watched]
        current = state  # of one moment: another thread may replace it
        if not current.seen.holds(weights):
            current = state = other(values, weights)
        return _tuple(current.compiled(*[values[i] for i in current.takes]))

    remember(record, first, run)
    return run


def _left(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Why a graph is Inductor's from the start; "" where it is not."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return "needs gradients: call it under torch.inference_mode() or torch.no_grad()"
    if any(not isinstance(x, Tensor) for x in inputs):
        return "has sizes that are not known: torch.compile(..., dynamic=False)"
    if _has_views(graph):
        return "returns views of its inputs or of another output, which may be written to after it"
    if not any(map(_has_layers, graph.graph.nodes)):
        own = any(str(node.target).startswith("ai3.") for node in graph.graph.nodes)
        return "its convolutions and linear layers are swapped ones" if own else "has no convolution or linear layer"
    return ""


def _has_views(graph: fx.GraphModule) -> bool:
    """Whether outputs share memory with an input or each other, as Dynamo's example values do."""
    outputs = [
        node for node in pytree.tree_leaves(graph.graph.find_nodes(op="output")[0].args) if isinstance(node, fx.Node)
    ]
    given = {_storage(node) for node in graph.graph.find_nodes(op="placeholder")}
    returned = [storage for node in outputs if (storage := _storage(node)) is not None]
    return len(set(returned)) < len(returned) or not given.isdisjoint(returned)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else None


class _Seen:
    """What tells that weights changed: their memory and versions, and a sample of their elements.

    The memory is held, so that no other weight can come to lie at its address. Of each dense tensor on the CPU four words of 8
    bytes, one in each quarter, are compared: writes through `.data` and to inference tensors change no version, and show where
    they reach one of these.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = [x.detach() for x in tensors]
        self._addresses = [x.data_ptr() for x in tensors]
        self._versioned = [i for i, x in enumerate(tensors) if not x.is_inference()]
        self._versions = [tensors[i]._version for i in self._versioned]
        self._sample = _library.sampler([(x.data_ptr(), _dense_bytes(x)) for x in tensors])
        self._sampled = self._sample()

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors with the same elements, as far as that shows."""
        if [x.data_ptr() for x in tensors] != self._addresses:
            return False
        try:
            versions = [tensors[i]._version for i in self._versioned]
        except RuntimeError:  # one that is an inference tensor now
            return False
        return versions == self._versions and self._sample() == self._sampled


def _dense_bytes(x: Tensor) -> int:
    """Of memory without gaps that holds its elements and that a processor can read; 0 where there is none."""
    dense = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return x.numel() * x.element_size() if dense and x.device.type == "cpu" else 0


def _inductor(graph: fx.GraphModule, inputs: list[Any]) -> Compiled:
    return _torch.compiled_by_inductor(graph, inputs)


def _tuple(out: Any) -> Any:
    return (out,) if isinstance(out, Tensor) else out


def _is_static(node: fx.Node) -> bool:
    """Whether Dynamo says that an input is a parameter or buffer."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


def _has_layers(node: fx.Node) -> bool:
    return node.target in (torch.conv1d, torch.conv2d, F.conv1d, F.conv2d, F.linear)


def _rest(body: nn.Module, inputs: Sequence[Any]) -> Compiled:
    """The body with what PyTorch computes in it compiled by Inductor; as it is where there is nothing."""

    if not isinstance(body, fx.GraphModule) or not any(_computes(node) for node in body.graph.nodes):
        return body
    return _inductor(inlined(body), list(inputs))


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def inlined(body: fx.GraphModule) -> fx.GraphModule:
    """The same graph with calls of the programs' operator, their constants as buffers, in place of submodules."""
    graph = fx.Graph()
    names: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, names))
    root = nn.Module()
    for name, value in body.named_buffers(recurse=False):
        root.register_buffer(name, value)
    for node in [n for n in graph.nodes if n.op == "call_module"]:
        region: Any = body.get_submodule(node.target)
        with graph.inserting_before(node):
            constants = []
            for i, value in enumerate(region.program.constants):
                root.register_buffer(f"{node.target}_{i}", value)
                constants.append(graph.get_attr(f"{node.target}_{i}"))
            given = (list(node.args), constants, region.program.text)
            called = graph.call_function(torch.ops.ai3._program.default, given)
            single = not any(user.target is operator.getitem for user in node.users)
            users: list[Any] = [(node, 0)] if single else [(user, user.args[1]) for user in list(node.users)]
            for user, index in users:
                output = graph.call_function(operator.getitem, (called, index))
                user.replace_all_uses_with(output)
                if user is not node:
                    graph.erase_node(user)
        graph.erase_node(node)
    module = fx.GraphModule(root, graph)
    return module


__all__ = ["ai3", "inlined"]
