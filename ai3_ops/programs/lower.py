"""Turns the largest runs of steps into C++ programs; PyTorch computes what lies between them."""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.tools_common import legalize_graph

from ai3_ops.graph import steps
from ai3_ops.graph.fusion import apart, arguments, by_channel
from ai3_ops.graph.network import Network, call, extract, is_constant, is_step
from ai3_ops.operations.step import Step
from ai3_ops.programs.body import Body
from ai3_ops.programs.program import Builder

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VALUES = (*DTYPES, torch.bool)  # masks
FEW_BYTES = 2**13  # that a program copies in less time than PyTorch takes for a view


class Region(nn.Module):
    """A run of steps as one program."""

    def __init__(self, program: Any, algorithms: tuple[str, ...] = ()) -> None:
        """`algorithms`: of each of the part's steps, what computes it; "" where it has none to choose."""
        super().__init__()
        self.program, self.algorithms = program, algorithms

    def forward(self, *inputs: Tensor) -> Any:
        """A tensor, or a list of several."""
        outputs = self.program(*inputs)
        return outputs if len(outputs) > 1 else outputs[0]


class Memory(NamedTuple):
    """Bytes that programs take for inputs of the example's sizes."""

    packs: int  # constants: packed weights and the like
    arena: int  # activations and workspaces, of the program that needs most: programs take it in turn
    workspace: int  # the largest in the arenas

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Memory:
        """Of all programs of a network."""
        packs = sum(c.nbytes for region in regions for c in region.program.constants)
        reports = [region.program.report() for region in regions]
        steps = [step for report in reports for step in report.steps]
        arena = max((report.arena_bytes for report in reports), default=0)
        return cls(packs, arena, max((step.workspace_bytes for step in steps), default=0))

    @property
    def total(self) -> int:
        """Of all together: workspaces lie in the arena."""
        return self.packs + self.arena


@dataclass(frozen=True)
class Part:
    """Nodes that become one program."""

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


def fits(node: fx.Node) -> bool:
    """Whether a step can be part of a program: its values' sizes are known for every batch, and it computes in one type."""
    if not is_step(node) or node.kwargs.get("algorithm") == "torch" or node.meta.get("torch") or apart(node):
        return False
    values = [a for a in node.all_input_nodes if not is_constant(a)]
    known = (node, *node.all_input_nodes)
    if (
        not values
        or node.meta["dtype"] not in (VALUES if node.target in steps.VIEWS else DTYPES)
        or any(a.meta["dtype"] not in (node.meta["dtype"], torch.bool) for a in known)
    ):
        return False
    if any(a.meta["scales"] is None or sum(map(bool, a.meta["scales"])) > 1 for a in known):
        return False
    if any(len(a.meta["shape"]) < 2 for a in (node, *values)) or 0 in node.meta["shape"]:
        return False
    return not by_channel(node) or (len(node.meta["shape"]) == 4 and node.target is not steps.linear)


class _Supported(OperatorSupportBase):
    def is_node_supported(self, _: Any, node: fx.Node) -> bool:
        return node.op == "call_function" and fits(node)


def parts(network: Network) -> list[Part]:
    """The largest runs of steps that one program each can compute, with nothing else between them."""
    found: list[list[fx.Node]] = []
    module = fx.GraphModule(nn.Module(), network.graph.__class__())
    module._graph = network.graph  # the partitioner reads nothing but the graph
    order = {node: i for i, node in enumerate(network.graph.nodes)}
    partitioner = CapabilityBasedPartitioner(module, _Supported(), allows_single_node_partition=True)
    for partition in partitioner.propose_partitions():
        nodes = _trimmed(sorted(partition.nodes, key=order.__getitem__))
        found += _pieces(network.graph, nodes, found)
    made = []
    for nodes in found:
        inside = set(nodes)
        inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and not is_constant(a))
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        if any(n.target in (steps.conv2d, steps.linear) for n in nodes):  # else there is nothing to gain
            made.append(Part(tuple(nodes), tuple(inputs), tuple(outputs)))
    return made


def _trimmed(nodes: list[fx.Node]) -> list[fx.Node]:
    """Without views that PyTorch's steps alone read, for which a program would copy more than a few bytes."""
    inside = set(nodes)
    for node in reversed(nodes):
        shows = math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize
        if shows <= FEW_BYTES or node.target not in steps.VIEWS:
            continue
        if all(user not in inside and user.op != "output" for user in node.users):
            inside.discard(node)
    return [node for node in nodes if node in inside]


def _pieces(graph: fx.Graph, nodes: list[fx.Node], others: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """A partition in as few pieces as it takes that neither of it and another kind's waits for the other: mostly one."""
    pieces: list[list[fx.Node]] = []

    def waits(count: int) -> bool:
        return not _ordered(graph, [*others, *pieces, nodes[:count]])

    while nodes and waits(len(nodes)):
        # As many as go together. Without its last node a group has no more to wait for, so that halving finds them.
        count = bisect.bisect_left(range(len(nodes)), True, lo=2, key=waits) - 1
        pieces.append(nodes[:count])
        nodes = nodes[count:]
    return [*pieces, nodes]


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


def refused(network: Network, part: Part) -> dict[fx.Node, str]:
    """The steps of a part that the engine does not even do alone, each with the reason."""
    found = {}
    for node in part.nodes:
        values = tuple(dict.fromkeys(a for a in node.all_input_nodes if a.op != "get_attr"))
        try:
            build(network, Part((node,), values, (node,)), pack=False)
        except ValueError as error:
            found[node] = str(error)
    return found


def memory(network: Network) -> Memory:
    """What the programs of a network would take; none is packed."""
    network, regions = network.copy(), list[Region]()
    waiting = parts(network)
    while waiting:
        part = waiting.pop()
        try:
            regions.append(build(network, part, pack=False))
        except ValueError:
            for node in refused(network, part) or part.nodes:
                node.meta["torch"] = True
            regions, waiting = [], parts(network)
    return Memory.of(regions)


def build(network: Network, part: Part, keep: bool = False, pack: bool = True) -> Region:
    """The program of a part, which holds its weights, too, where these are to be kept; without `pack` it has a size only.

    ValueError where the engine cannot do one of its steps.
    """
    builder = Builder()
    values: dict[fx.Node, Any] = {}
    for node in part.inputs:
        values[node] = builder.input(node.meta["shape"], node.meta["dtype"])
    algorithms = []
    for node in part.nodes:
        before = builder.count
        values[node] = _EMIT[node.target](builder, _Operands(network, builder, values, node), arguments(node))
        algorithms.append(builder.algorithm_since(before))
    # What other programs and PyTorch read next stays as it is computed; what the network returns is contiguous.
    returned: Any = network.output.args[0] or ()
    layouts = [node not in returned and _is_image(node) for node in part.outputs]
    program = builder.build([values[node] for node in part.outputs], channels_last=layouts, keep=keep, pack=pack)
    try:
        program.report()
    except RuntimeError as error:  # steps that can be read, and not be planned
        raise ValueError(str(error)) from None
    return Region(program, tuple(algorithms))


_OF_IMAGES = (steps.conv2d, steps.max_pool2d, steps.avg_pool2d, steps.adaptive_avg_pool2d)
_ALIKE = (steps.unary, steps.binary, steps.affine, steps.concat, steps.slice_channels)  # results lie as what they read


def _is_image(node: fx.Node) -> bool:
    """Whether a value has its channels innermost where a program computes it."""
    while node.target in _ALIKE:
        node = node.all_input_nodes[0]
    return len(node.meta["shape"]) == 4 and (node.target in _OF_IMAGES or not is_step(node))


class _Operands:
    """A step's arguments as the builder takes them: constants are tensors, and values where the step computes with values."""

    def __init__(self, network: Network, builder: Builder, values: dict[fx.Node, Any], node: fx.Node) -> None:
        self.network, self.builder, self.values, self.node = network, builder, values, node

    def __call__(self, value: Any) -> Any:
        return fx.map_arg(value, lambda n: self.network.value(n) if is_constant(n) else self.values[n])

    def value(self, value: Any) -> Any:
        """The same, with constants as values."""
        return fx.map_arg(value, self._value)

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:
            self.values[node] = self.builder.constant(self.network.value(node).contiguous())
        return self.values[node]


def _emit_product(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    given = {name: of(value) for name, value in a.items()}
    function = b.conv2d if "stride" in a else b.linear
    given.pop("sequence", None)
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
        positional = [of(v) for k, v in a.items() if k not in (*_AFTER, "algorithm", "sequence")]
        return getattr(b, name)(*positional, **{k: of(v) for k, v in a.items() if k in _AFTER})

    return emit


def _emit_binary(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    """The second value with the first one's sizes, where it does not depend on the batch for every batch."""
    x, y = of(a["input"]), of.value(a["other"])
    one, other = a["input"].meta["scales"], a["other"].meta["scales"]
    if one[0] and not (len(one) == len(other) and other[0]):
        y = b.widened(y, len(one))
        y = b.expand(y, [0, *(n if n != s else -1 for n, s in zip(x.shape[1:], y.shape[1:], strict=True))], x)
    return b.binary(x, y, a["name"], **{k: of(a[k]) for k in _AFTER})


def _emit_view(name: str) -> Callable[[Builder, _Operands, dict[str, Any]], Any]:
    def emit(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
        return getattr(b, name)(*[of.value(v) for v in a.values()])

    return emit


def _emit_cut(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    return b.slice(of.value(a["input"]), a["start"], a["stop"], a["dim"])


def _emit_reshape(b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    return b.reshape(of.value(a["input"]), a["sizes"], channels_last=_for_images(of.node))


def _for_images(node: fx.Node) -> bool:
    """Whether what reads a value wants its channels innermost."""
    seen, waiting = {node}, [node]
    while waiting:
        value = waiting.pop()
        if len(value.meta["shape"]) != 4:
            continue
        if any(user.target in _OF_IMAGES for user in value.users):
            return True
        alike = [user for user in value.users if user.target in _ALIKE and user not in seen]
        seen.update(alike)
        waiting += alike
    return False


def _emit_own(step: Step, b: Builder, of: _Operands, a: dict[str, Any]) -> Any:
    algorithm = a.pop("algorithm")
    given = {name: of.value(value) if name in step.values else of(value) for name, value in a.items()}
    return b.operation(step, given, "default" if algorithm in steps.RULES else algorithm)


_EMIT: dict[Any, Callable[[Builder, _Operands, dict[str, Any]], Any]] = {
    steps.conv2d: _emit_product,
    steps.linear: _emit_product,
    steps.max_pool2d: _emit("max_pool2d"),
    steps.avg_pool2d: _emit("avg_pool2d"),
    steps.adaptive_avg_pool2d: _emit("adaptive_avg_pool2d"),
    steps.unary: _emit("unary"),
    steps.binary: _emit_binary,
    steps.affine: _emit("affine"),
    steps.concat: _emit_view("concat"),
    steps.join: _emit_view("concat"),
    steps.slice_channels: _emit("slice"),
    steps.cut: _emit_cut,
    steps.flatten: _emit("flatten"),
    steps.reshape: _emit_reshape,
    steps.permute: _emit_view("permute"),
    steps.expand: _emit_view("expand"),
    steps.roll: _emit_view("roll"),
    **{function: functools.partial(_emit_own, step) for function, step in Step.by_function.items()},
}


def module_of(network: Network, regions: Sequence[tuple[Part, Region]], returned: bool = True) -> Body:
    """A graph module of what the network computes, with each part as a call of its region.

    `returned`: to a caller, who may write into one output and read another.
    """
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
    if returned:
        _own_outputs(network, graph, names, {node for part, _ in regions for node in part.outputs})
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


def outside(network: Network, regions: Sequence[tuple[Part, Region]], sized: set[str], most: int = 3) -> list[str]:
    """What PyTorch computes in each call, operators with the layers that they are of, those first that touch the most memory.

    `sized`: the names of nodes that are computed once for each set of sizes.
    """
    inside = {node for part, _ in regions for node in part.nodes}
    touched: dict[str, float] = {}
    for node in network.graph.nodes:
        if node.op != "call_function" or node in inside or node.target is operator.getitem or _is_view(node):
            continue
        if node.name in sized:
            continue
        name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
        layers = ", ".join(filter(None, node.meta["layers"]))
        name += f" ({layers})" if layers else ""
        values = [v for v in (node, *node.all_input_nodes) if v.meta.get("shape") is not None]
        touched[name] = touched.get(name, 0) + sum(
            math.prod(v.meta["shape"]) * v.meta["dtype"].itemsize for v in values
        )
    return sorted(touched, key=lambda name: -touched[name])[:most]


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def root_of(node: fx.Node, own: Collection[fx.Node] = ()) -> fx.Node:
    """The value that a view, or what may be one, lies in; the node itself where it is none, or one of `own`."""
    while node.op == "call_function" and node not in own and node.all_input_nodes:
        source = node.all_input_nodes[0]
        views = _is_view(source) or source.target in _MAYBE_VIEWS
        part = node.target is operator.getitem and not views  # one of several results
        if part or not (_is_view(node) or node.target in _MAYBE_VIEWS):
            break
        node = source
    return node


_MAYBE_VIEWS = (
    *(steps.flatten, steps.slice_channels, *steps.VIEWS, operator.getitem),
    *(torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten.flatten.using_ints),
    # Composed of views, which their schemas do not say.
    *(torch.ops.aten.einsum.default, torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_chunk.default),
    *(torch.ops.aten.unsafe_split_with_sizes.default, torch.ops.aten.atleast_1d.default),
    *(torch.ops.aten.atleast_2d.default, torch.ops.aten.atleast_3d.default, torch.ops.aten.type_as.default),
    *(torch.ops.aten.broadcast_tensors.default, torch.ops.aten.meshgrid.default, torch.ops.aten.meshgrid.indexing),
    *(torch.ops.aten.sum_to_size.default, torch.ops.aten.dropout.default),
)


def _own_outputs(network: Network, graph: fx.Graph, names: dict[fx.Node, fx.Node], of_regions: set[fx.Node]) -> None:
    """What PyTorch returns is copied where it lies in another output; images may be channels_last where it read a program's."""
    output = next(iter(reversed(graph.nodes)))
    given: Any = network.output.args[0]
    taken = {node for node in given if node.op == "call_function" and root_of(node, of_regions) is node}
    for place, node in enumerate(given):
        if node in of_regions or node.op != "call_function" or node.meta["shape"] is None:
            continue
        root, own = root_of(node, of_regions), names[node]
        with graph.inserting_before(output):
            if root is not node and root in taken:
                own = graph.call_function(torch.ops.aten.clone.default, (own,))
            if len(node.meta["shape"]) == 4 and (of_regions or place in network.dense):
                own = graph.call_function(torch.ops.aten.contiguous.default, (own,))
        taken.add(root)
        output.replace_input_with(names[node], own)


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
