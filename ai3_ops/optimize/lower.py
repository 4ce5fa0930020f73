"""Turns the largest runs of steps into C++ programs; PyTorch computes what lies between them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.tools_common import legalize_graph

from ai3_ops.operations.step import Step
from ai3_ops.optimize import steps
from ai3_ops.optimize.body import Body
from ai3_ops.optimize.fusion import apart, arguments, by_channel
from ai3_ops.optimize.network import Network, call, extract, is_constant, is_step
from ai3_ops.optimize.program import Builder

IMAGES, ROWS = "images", "rows"  # what the values of a region are: (N, C, H, W) and (N, F), or (..., F)
DTYPES = (torch.float32,)


class Region(nn.Module):
    """A run of steps as one program."""

    def __init__(self, program: Any, kind: str, algorithms: tuple[str, ...] = ()) -> None:
        """`algorithms`: of each of the part's steps, what computes it; "" where it has none to choose."""
        super().__init__()
        self.program, self.kind, self.algorithms = program, kind, algorithms

    def forward(self, *inputs: Tensor) -> Any:
        """A tensor, or a list of several."""
        if self.kind == ROWS:
            leading = inputs[0].shape[:-1]
            outputs = self.program(*[x.reshape(-1, x.shape[-1]) for x in inputs])
            outputs = [y.view(*leading, y.shape[-1]) for y in outputs]
        else:
            outputs = self.program(*inputs)
        return outputs if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True)
class Part:
    """Nodes that become one program."""

    kind: str
    nodes: tuple[fx.Node, ...]  # in order
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def layers(self) -> list[str]:
        """The model's modules that it computes."""
        return list(dict.fromkeys(name for node in self.nodes for name in node.meta["layers"]))

    def network(self, whole: Network) -> Network:
        """The same steps as a network of their own."""
        return extract(whole, self.nodes)[0]


def kind_of(node: fx.Node) -> str | None:
    """Which programs a step can be part of; None where PyTorch computes it."""
    if (
        not is_step(node)
        or node.kwargs.get("algorithm") == "torch"
        or node.meta.get("torch")
        or apart(node)
        or node.meta["dtype"] not in DTYPES
        or not node.meta["batched"]
    ):
        return None
    values = [a for a in node.all_input_nodes if not is_constant(a)]
    if not values or any(a.meta["shape"] is None or a.meta["dtype"] not in DTYPES for a in values):
        return None
    if any(is_constant(a) and a.meta["dtype"] not in DTYPES for a in node.all_input_nodes):
        return None
    ranks = {len(a.meta["shape"]) for a in (node, *values)}
    if ranks <= {2, 4} and all(a.meta["batched"] for a in values):
        own = Step.by_function.get(node.target)
        if (node.target is steps.linear or own) and ranks != {2}:
            on_rows = not by_channel(node) if own is None else own.works_on_rows(*node.args)
            return ROWS if on_rows else None
        return IMAGES
    own = Step.by_function.get(node.target)
    if own and not own.works_on_rows(*node.args):
        return None
    if (own or node.target in (steps.linear, steps.unary, steps.binary)) and len(ranks) == 1 and not by_channel(node):
        leading = {tuple(a.meta["shape"][:-1]) for a in (node, *values)}
        return ROWS if len(leading) == 1 else None
    return None


class _Supported(OperatorSupportBase):
    """Of one kind; rows of the same leading dimensions, since a program's results get those of its first input."""

    def __init__(self, kind: str, leading: tuple[int, ...] | None) -> None:
        self.kind, self.leading = kind, leading

    def is_node_supported(self, _: Any, node: fx.Node) -> bool:
        return node.op == "call_function" and kind_of(node) == self.kind and _leading(self.kind, node) == self.leading


def _leading(kind: str, node: fx.Node) -> tuple[int, ...] | None:
    return tuple(node.meta["shape"][:-1]) if kind == ROWS else None


def parts(network: Network) -> list[Part]:
    """The largest runs of steps that one program each can compute, with nothing else between them."""
    found: list[tuple[str, list[fx.Node]]] = []
    module = fx.GraphModule(nn.Module(), network.graph.__class__())
    module._graph = network.graph  # the partitioner reads nothing but the graph
    order = {node: i for i, node in enumerate(network.graph.nodes)}
    rows = [node for node in order if node.op == "call_function" and kind_of(node) == ROWS]
    for kind, leading in [(IMAGES, None), *dict.fromkeys((ROWS, _leading(ROWS, node)) for node in rows)]:
        partitioner = CapabilityBasedPartitioner(module, _Supported(kind, leading), allows_single_node_partition=True)
        for partition in partitioner.propose_partitions():
            nodes = sorted(partition.nodes, key=order.__getitem__)
            found += [(kind, piece) for piece in _pieces(network.graph, nodes, [others for _, others in found])]
    made = []
    for kind, nodes in found:
        inside = set(nodes)
        inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and not is_constant(a))
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        if any(n.target in (steps.conv2d, steps.linear) for n in nodes):  # else there is nothing to gain
            made.append(Part(kind, tuple(nodes), tuple(inputs), tuple(outputs)))
    return made


def _pieces(graph: fx.Graph, nodes: list[fx.Node], others: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """A partition in as few pieces as it takes that neither of it and another kind's waits for the other: mostly one."""
    if _ordered(graph, [*others, nodes]):
        return [nodes]
    pieces: list[list[fx.Node]] = []
    for node in nodes:
        if pieces and _ordered(graph, [*others, *pieces[:-1], [*pieces[-1], node]]):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return pieces


def _ordered(graph: fx.Graph, groups: list[list[fx.Node]]) -> bool:
    """Whether there is an order in which each group can be computed at once."""
    group = {node: number for number, nodes in enumerate(groups) for node in nodes}
    before: dict[Any, set[Any]] = {}
    for node in graph.nodes:
        own = group.get(node, node)
        before.setdefault(own, set()).update(o for a in node.all_input_nodes if (o := group.get(a, a)) != own)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def build(network: Network, part: Part) -> Region:
    """The program of a part; ValueError where the engine cannot do one of its steps."""
    builder = Builder()
    values: dict[fx.Node, Any] = {}
    for node in part.inputs:
        shape = node.meta["shape"] if part.kind == IMAGES else (-1, node.meta["shape"][-1])
        if shape[0] == -1:
            shape = (_count(node.meta["shape"][:-1]), shape[1])
        values[node] = builder.input(shape, node.meta["dtype"])
    algorithms = []
    for node in part.nodes:
        before = builder.count
        values[node] = _EMIT[node.target](builder, _Operands(network, values), arguments(node))
        algorithms.append(builder.algorithm_since(before))
    # What other programs and PyTorch read next stays as it is computed; what the network returns is contiguous.
    returned: Any = network.output.args[0] or ()
    layouts = [node not in returned for node in part.outputs]
    program = builder.build([values[node] for node in part.outputs], channels_last=layouts)
    return Region(program, part.kind, tuple(algorithms))


def _count(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


class _Operands:
    """A step's arguments as the builder takes them."""

    def __init__(self, network: Network, values: dict[fx.Node, Any]) -> None:
        self.network, self.values = network, values

    def __call__(self, value: Any) -> Any:
        return fx.map_arg(value, lambda n: self.network.value(n) if is_constant(n) else self.values[n])


def _emit_product(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    given = {name: of(value) for name, value in a.items()}
    function = b.conv2d if "stride" in a else b.linear
    operands = given.pop("input"), given.pop("weight"), given.pop("bias")
    if given.pop("algorithm") not in steps.RULES:
        return function(*operands, **given, algorithm=a["algorithm"])
    try:
        return function(*operands, **given)
    except ValueError:  # the rule chooses one of PyTorch's own, which a program cannot run
        return function(*operands, **given, algorithm="implicit_precomp_gemm" if "stride" in a else "gemm")


_AFTER = ("activation", "parameter")


def _emit(name: str) -> Callable[[Builder, _Operands, dict[str, Any]], Any]:
    def emit(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
        positional = [of(v) for k, v in a.items() if k not in (*_AFTER, "algorithm")]
        return getattr(b, name)(*positional, **{k: of(v) for k, v in a.items() if k in _AFTER})

    return emit


def _emit_own(step: Step, b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    algorithm = a.pop("algorithm")
    given = {name: of(value) for name, value in a.items()}
    return b.operation(step, given, "default" if algorithm in steps.RULES else algorithm)


_EMIT: dict[Any, Callable[[Builder, _Operands, dict[str, Any]], Any]] = {
    steps.conv2d: _emit_product,
    steps.linear: _emit_product,
    steps.max_pool2d: _emit("max_pool2d"),
    steps.avg_pool2d: _emit("avg_pool2d"),
    steps.adaptive_avg_pool2d: _emit("adaptive_avg_pool2d"),
    steps.unary: _emit("unary"),
    steps.binary: _emit("binary"),
    steps.affine: _emit("affine"),
    steps.concat: _emit("concat"),
    steps.slice_channels: _emit("slice"),
    steps.flatten: _emit("flatten"),
    **{function: functools.partial(_emit_own, step) for function, step in Step.by_function.items()},
}


def module_of(network: Network, regions: Sequence[tuple[Part, Region]]) -> Body:
    """A graph module of what the network computes, with each part as a call of its region."""
    graph, names = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(network.graph, names))
    held: dict[str, Any] = {}
    for number, (part, region) in enumerate(regions):
        name = f"region_{number}"
        held[name] = region
        own = [names[node] for node in part.nodes]
        with graph.inserting_before(own[-1]):
            called = graph.call_module(name, tuple(names[n] for n in part.inputs))
            for index, node in enumerate(part.outputs):
                value = called if len(part.outputs) == 1 else graph.call_function(operator.getitem, (called, index))
                names[node].replace_all_uses_with(value, _outside(set(own)))
                names[node] = value  # what a later part reads
        for gone in reversed(own):
            graph.erase_node(gone)
    if regions:
        _contiguous_outputs(network, graph, names, {node for part, _ in regions for node in part.outputs})
    constants = [n for n in graph.nodes if n.op == "get_attr"]
    for node in constants:
        if not node.users:  # packed into a region; fx's own elimination needs the order that the nodes get below
            graph.erase_node(node)
    for number, node in enumerate(n for n in constants if n.users):
        name = f"constant_{number}"
        held[name] = network.constants[str(node.target)]
        node.target = name
    module = Body(held, graph)
    legalize_graph(module)
    module.recompile()
    return module


def _contiguous_outputs(
    network: Network, graph: fx.Graph, names: dict[fx.Node, fx.Node], of_regions: set[fx.Node]
) -> None:
    """Images that PyTorch returns may be channels_last where it read a program's."""
    output = next(iter(reversed(graph.nodes)))
    given: Any = network.output.args[0]
    for node in given:
        if node not in of_regions and node.op == "call_function" and len(node.meta["shape"] or ()) == 4:
            with graph.inserting_before(output):
                dense = graph.call_function(torch.ops.aten.contiguous.default, (names[node],))
            output.replace_input_with(names[node], dense)


def _outside(nodes: set[fx.Node]) -> Callable[[fx.Node], bool]:
    return lambda user: user not in nodes


def example_values(network: Network, inputs: Sequence[Any], wanted: set[fx.Node]) -> dict[fx.Node, Any]:
    """The values of some nodes on the example."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    uses = {node: len(node.users) for node in network.graph.nodes}
    with torch.no_grad():
        for node in network.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = network.constants[node.target]
            elif node.op == "call_function":
                values[node] = call(node, values.__getitem__)
            for used in node.all_input_nodes:
                uses[used] -= 1
                if not uses[used] and used not in wanted:
                    del values[used]
    return {node: values[node] for node in wanted}
