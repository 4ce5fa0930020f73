"""A body's graph with each step between its programs spelled in PyTorch's operators, which a process without Python calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ai3_ops._torch import FakeTensorMode
from ai3_ops.graph import steps
from ai3_ops.graph.fusion import arguments
from ai3_ops.graph.network import call, is_step
from ai3_ops.programs.body import Body

_RESHAPE, _SIZE = torch.ops.aten.reshape.default, torch.ops.aten.sym_size.int


def spelled(body: Body) -> fx.Graph:
    """Another graph; the body's own where it has no steps, or where sizes are not known: of its inputs any more, or behind an
    operator that asks for values (istft).

    A step stays one where its operators would hold the batch's size as a number.
    """
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    if not any(map(is_step, body.graph.nodes)) or any("shape" not in n.meta for n in inputs):
        return body.graph
    graph, mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    graph.output(graph.graph_copy(body.graph, {}))
    with mode, torch.no_grad():
        # An argument that is no tensor (`use_cache=False`) is a value of the example, and read by nothing.
        metas = [n.meta for n in inputs]
        given = [None if m["shape"] is None else torch.empty(m["shape"], dtype=m["dtype"]) for m in metas]
        try:
            FakeTensorProp(fx.GraphModule(body, graph), mode).propagate_dont_convert_inputs(*given)
        except RuntimeError:  # there are no values
            return body.graph
        for node in list(graph.nodes):
            if is_step(node) and node.target is not steps.expand:
                _spell(graph, node)
    return graph


def _spell(graph: fx.Graph, node: fx.Node) -> None:
    reads = node.all_input_nodes

    def run(*values: Tensor) -> Any:
        return call(node, dict(zip(reads, values, strict=True)).__getitem__)

    # Before dispatch, so that operators are as the step writes them: reshape with -1, not a view of the example's batch.
    traced = make_fx(run, pre_dispatch=True)(*(n.meta["val"] for n in reads)).graph
    if any(n.op == "get_attr" for n in traced.nodes):  # a constant that the step made
        return
    places = [n for n in traced.nodes if n.op == "placeholder"]
    with graph.inserting_before(node):
        made: Any = graph.graph_copy(traced, dict(zip(places, reads, strict=True)))
    if node.target is steps.reshape and made.target is _RESHAPE:
        (value,), sizes = reads, arguments(node)["sizes"]
        with graph.inserting_before(made):  # a size that is kept is asked for: traced, it is the example's
            made.args = value, [n or graph.call_function(_SIZE, (value, d)) for d, n in enumerate(sizes)]
    node.replace_all_uses_with(made)
    graph.erase_node(node)
