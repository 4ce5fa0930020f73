"""`torch.compile(model, backend="ai3")`: the rewriting of `optimize` on Dynamo's graphs, and Inductor for the rest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

Compiled = Callable[..., Any]


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

    Weights are packed once; where one of them changes, the graph is rewritten anew at the next call. Graphs that need
    gradients, have sizes that are not known (`dynamic=False` avoids them) or cannot be captured are left to Inductor.
    """
    from torch._guards import tracing

    from ai3_ops.optimize.capture import Uncapturable
    from ai3_ops.optimize.pipeline import Settings, make_plan

    settings = Settings(**(options or {}))
    static = [_is_static(node) for node in graph.graph.find_nodes(op="placeholder")]
    gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    unknown = any(not isinstance(x, Tensor) for x in inputs)
    if gradients or unknown or not any(map(_has_layers, graph.graph.nodes)):
        return _inductor(graph, list(inputs))

    def planned(values: Sequence[Any]) -> nn.Module | None:
        bound = _Bound(graph, values, static).eval()
        rest = tuple(x for x, known in zip(values, static, strict=True) if not known)
        with tracing(None), torch.no_grad():
            try:
                return make_plan(bound, rest, {}, settings).body
            except Uncapturable:
                return None

    body = planned(inputs)
    if body is None:
        return _inductor(graph, list(inputs))
    watched = [(i, inputs[i]) for i, known in enumerate(static) if known]
    compiled = _rest(body, [x for x, known in zip(inputs, static, strict=True) if not known])
    state: list[Any] = [compiled, _versions([x for _, x in watched])]

    def run(*values: Any) -> Any:
        versions = _versions([values[i] for i, _ in watched])
        if versions != state[1]:  # a weight was changed, or is another tensor
            new = planned(values)
            state[:] = [new or _Bound(graph, values, static), versions]
        return _tuple(state[0](*[x for x, known in zip(values, static, strict=True) if not known]))

    return run


def _inductor(graph: fx.GraphModule, inputs: list[Any]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs)
    return compiled


def _tuple(out: Any) -> Any:
    return (out,) if isinstance(out, Tensor) else out


def _is_static(node: fx.Node) -> bool:
    """Whether Dynamo says that an input is a parameter or buffer."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


def _has_layers(node: fx.Node) -> bool:
    return node.target in (torch.conv2d, torch.nn.functional.conv2d, torch.nn.functional.linear, torch._C._nn.linear)


def _versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(0 if x.is_inference() else x._version, x.data_ptr()) for x in tensors]


def _rest(body: nn.Module, inputs: Sequence[Any]) -> Compiled:
    """The body with what PyTorch computes in it compiled by Inductor; as it is where there is nothing."""

    if not isinstance(body, fx.GraphModule) or not any(_computes(node) for node in body.graph.nodes):
        return body
    return _inductor(inlined(body), list(inputs))


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def inlined(body: fx.GraphModule) -> fx.GraphModule:
    """The same graph with calls of the programs' operator, their constants as buffers, in place of submodules."""
    from ai3_ops.optimize.lower import ROWS

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
            given: list[Any] = list(node.args)
            if region.kind == ROWS:
                given = [graph.call_function(_rows, (x,)) for x in given]
            called = graph.call_function(torch.ops.ai3._program.default, (given, constants, region.program.text))
            single = not any(user.target is operator.getitem for user in node.users)
            users: list[Any] = [(node, 0)] if single else [(user, user.args[1]) for user in list(node.users)]
            for user, index in users:
                output = graph.call_function(operator.getitem, (called, index))
                if region.kind == ROWS:
                    output = graph.call_function(_unrows, (output, node.args[0]))
                user.replace_all_uses_with(output)
                if user is not node:
                    graph.erase_node(user)
        graph.erase_node(node)
    module = fx.GraphModule(root, graph)
    return module


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _unrows(y: Tensor, like: Tensor) -> Tensor:
    return y.view(*like.shape[:-1], y.shape[-1])


__all__ = ["ai3", "inlined"]
