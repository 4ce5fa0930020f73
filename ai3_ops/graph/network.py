"""A network that is being rewritten: an fx graph, the constants that it reads, and a record of every rewrite."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ai3_ops._torch import pytree
from ai3_ops.graph.steps import STEPS

Node = Any  # an fx.Node whose arguments are known to be what a step takes, which fx's types do not say


@dataclass(frozen=True)
class Rewrite:
    """One change of the graph."""

    rule: str  # the pass or substitution
    layers: str  # what it changed, by the model's own names
    detail: str = ""
    error: float | None = None  # of the value that it replaced, in float64 on the example, where that was computed


# What conditions on lengths are made of: a list that files may name, and nothing else.
SAYS: dict[str, Callable[..., Any]] = {
    "Add": lambda *x: sum(x),
    "Mul": lambda *x: math.prod(x),
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *x: all(x),
    "Or": lambda *x: any(x),
    "Not": operator.not_,
}


@dataclass(frozen=True)
class Lengths:
    """The sizes for which a graph holds whose lengths are open: what its capture took for granted of them."""

    # Of each input its dimensions but the first: numbers, lengths by their names, None of one that follows a cache.
    inputs: tuple[tuple[int | str | None, ...], ...]
    conditions: tuple[Any, ...]  # of these: each a word of SAYS, and what it is said of: names, numbers and others such
    sizes: tuple[Any, ...] = ()  # that follow from them within the graph, said likewise; files have none

    def of(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int] | None:
        """The lengths of inputs of these sizes, () of what is no tensor; None where the graph does not hold for them."""
        found: dict[str, int] = {}
        for given, sizes in zip(shapes, self.inputs, strict=True):
            for own, size in zip(given[1:], sizes, strict=True):
                if size is not None and own != (size if isinstance(size, int) else found.setdefault(size, own)):
                    return None
        return found if self._hold(found) else None

    def others(self, own: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Lengths other than these, for which the graph holds, too: none is the same or a multiple; a shorter set first."""
        tried = list[dict[str, int]]()
        for turn in range(len(_OTHERS)):
            found = {name: _OTHERS[(turn + i) % len(_OTHERS)](n) for i, (name, n) in enumerate(own.items())}
            new = found not in tried and all(found[name] % n for name, n in own.items())
            if new and self._hold(found) and all(self._differ(found, other) for other in (own, *tried)):
                tried.append(found)
                yield found

    def tell(self, found: Mapping[str, int], own: Mapping[str, int]) -> bool:
        """Whether what a graph computes of these lengths shows that it holds none of those as a number, which fits multiples."""
        return all(n % own[name] for name, n in found.items() if n != own[name]) and self._differ(found, own)

    def _differ(self, found: Mapping[str, int], own: Mapping[str, int]) -> bool:
        """Whether all sizes that follow from lengths differ where those do.

        A convolution with a stride has as many outputs of some lengths as of others.
        """
        changed = {name for name, n in found.items() if n != own[name]}
        sizes = (size for size in self.sizes if not changed.isdisjoint(_names(size)))
        return all(value_of(size, found) != value_of(size, own) for size in sizes)

    def _hold(self, lengths: Mapping[str, int]) -> bool:
        return min(lengths.values(), default=0) > 1 and all(value_of(said, lengths) for said in self.conditions)


def _names(value: Any) -> Iterator[str]:
    """The lengths of which a condition or a size is."""
    if isinstance(value, tuple):
        for part in value[1:]:
            yield from _names(part)
    elif isinstance(value, str):
        yield value


def value_of(value: Any, lengths: Mapping[str, int]) -> Any:
    """The value of a condition, or of a size, with these lengths."""
    if isinstance(value, tuple):
        return SAYS[value[0]](*(value_of(part, lengths) for part in value[1:]))
    return lengths[value] if isinstance(value, str) else value


# Of a length, those that are tried: of half of it and one more, so that tables are, too; else of what windows and strides divide.
_OTHERS: tuple[Callable[[int], int], ...] = (
    lambda n: n // 2 + 1,
    lambda n: n + 1,
    lambda n: n - 1,
    lambda n: n // 2,
    lambda n: n + n // 2,
    *(functools.partial(operator.add, k) for k in (-8, 8, -16, 16, -2, 2, -3, 3)),
)


@dataclass(frozen=True)
class Returned:
    """What a module returns: its structure, and those of its leaves that no input decides, None and numbers, by their places."""

    spec: Any
    fixed: tuple[tuple[int, Any], ...] = ()

    def leaves(self, computed: Sequence[Any]) -> list[Any]:
        """All of them, with those that a graph computes."""
        leaves = list(computed)
        for place, value in self.fixed:
            leaves.insert(place, value)
        return leaves

    def of(self, computed: Any) -> Any:
        """The output, of what a body returns."""
        leaves = self.leaves(computed if isinstance(computed, (tuple, list)) else [computed])
        return leaves[0] if self.spec.is_leaf() else pytree.tree_unflatten(leaves, self.spec)


class Mistake(RuntimeError):
    """A rewrite that changed what the network computes."""


@dataclass
class Network:
    """`graph` has only call_function nodes besides inputs, constants (get_attr, by name) and the output.

    A node's meta holds "shape" and "dtype" of its value on the example inputs (None for what is no tensor), "batched",
    whether its first dimension is the batch and no other one depends on it, "scales", of each dimension how many of it belong
    to one item of the batch (0 where it is the same for every batch; None where sizes are otherwise), "layers", the names of
    the modules that it comes from, and "call", which of the innermost module's calls. As captured also "lengths": of each
    dimension whether it follows a length that is left open, as the batch is; all else has the example's lengths.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    dynamic: bool = False  # whether the graph holds for other batch sizes than the example's
    returned: Returned | None = None
    log: list[Rewrite] = field(default_factory=list)
    checker: Checker | None = None
    lengths: Lengths | None = None  # where some are open
    dense: frozenset[int] = frozenset()  # places of outputs that the module makes contiguous, or copies

    # Reading ----------------------------------------------------------------------------------------------------------
    @property
    def inputs(self) -> list[fx.Node]:
        """The graph's inputs."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> fx.Node:
        """The output node; its first argument is a tuple of nodes."""
        return next(node for node in reversed(self.graph.nodes) if node.op == "output")

    @property
    def device(self) -> torch.device:
        """Where its constants are; the CPU where it has none."""
        return next((value.device for value in self.constants.values()), torch.device("cpu"))

    def calls(self, *functions: Callable[..., Any]) -> Iterator[Node]:
        """The nodes that call one of these functions, in order; those that a rewrite removes or adds meanwhile left out."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target in functions and not node._erased:
                yield node

    def value(self, node: Any) -> Any:
        """What a constant's node stands for; None for None."""
        return None if node is None else self.constants[node.target]

    # Computing --------------------------------------------------------------------------------------------------------
    def run(self, inputs: Sequence[Any], dtype: torch.dtype | None = None, sized: bool = False) -> tuple[Any, ...]:
        """The outputs; in another floating type where one is given. `sized`: Mistake where a batch has other sizes than noted."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        uses, batch = {node: len(node.users) for node in self.graph.nodes}, batch_of(inputs)

        def value(node: fx.Node) -> Any:
            # At first use: graphs name all constants first, which in float64 would be twice the weights.
            if node.op == "get_attr" and node not in values:
                values[node] = cast(self.constants[str(node.target)], dtype)
            return values[node]

        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    values[node] = cast(next(given), dtype)
                elif node.op == "get_attr":
                    continue
                elif node.op == "call_function":
                    values[node] = cast(call(node, value), dtype)  # also of steps that name a type
                else:
                    return tuple(fx.map_arg(node.args[0], value))
                if sized and node.meta["batched"] and values[node].shape != (batch, *node.meta["shape"][1:]):
                    raise Mistake(f"{node.name} is {tuple(values[node].shape)}, a batch of {node.meta['shape'][1:]}")
                for used in node.all_input_nodes:
                    uses[used] -= 1
                    if not uses[used]:
                        values.pop(used, None)
        raise AssertionError("a graph without an output")

    # Writing ----------------------------------------------------------------------------------------------------------
    def constant(self, value: Tensor, hint: str, before: fx.Node) -> fx.Node:
        """A new constant's node."""
        name = hint
        while name in self.constants:
            stem, _, number = name.rpartition("_")
            name = f"{stem}_{int(number) + 1}" if stem and number.isdigit() else f"{name}_1"
        self.constants[name] = value.detach()
        with self.graph.inserting_before(before):
            node = self.graph.create_node("get_attr", name)
        scales = (0,) * value.ndim
        node.meta.update(shape=tuple(value.shape), dtype=value.dtype, batched=False, scales=scales, layers=())
        return node

    def step(
        self, before: fx.Node, function: Callable[..., Any], *args: Any, layers: Iterable[str] = (), **kwargs: Any
    ) -> fx.Node:
        """A new call of a step, put before a node that stays; its shape is what the function makes of meta tensors.

        Its node has all positional arguments, and those keyword arguments that are not the default.
        """
        args, kwargs = _normal(function, args, kwargs)
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", function, args, kwargs)
        shape, dtype = _result(function, _sized(args), _sized(tuple(kwargs.items())))
        scales = _scales(node, shape)
        batched = any(a.meta["batched"] for a in node.all_input_nodes)
        if scales and any(scales):  # a view may have moved it
            batched = scales[0] == 1 and not any(scales[1:])
        node.meta.update(shape=shape, dtype=dtype, batched=batched, scales=scales)
        node.meta["layers"] = tuple(dict.fromkeys(layers))
        return node

    def replace(self, old: fx.Node, new: fx.Node, rule: str, detail: str = "") -> None:
        """Everything that read `old` reads `new`; `old` goes, with what nothing else reads."""
        if old.meta["shape"] != new.meta["shape"] or old.meta["dtype"] != new.meta["dtype"]:
            raise Mistake(f"{rule}: {old.name} {old.meta['shape']} became {new.meta['shape']}")
        error = None if self.checker is None else self.checker.check(self, old, new, rule)
        old.replace_all_uses_with(new)
        layers = new.meta["layers"] if len(new.meta["layers"]) >= len(old.meta["layers"]) else old.meta["layers"]
        self.log.append(Rewrite(rule, ", ".join(layers) or new.name, detail, error))
        self.remove(old)

    def remove(self, node: fx.Node) -> None:
        """Removes a node that nothing reads, and then its inputs alike."""
        if node._erased or node.users or node.op in ("placeholder", "output"):  # an input may be an input's input, too
            return
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        for used in inputs:
            self.remove(used)

    def copy(self, device: str | None = None) -> Network:
        """Another graph; constants are shared, or moved to a device ("meta": sizes only)."""
        graph = fx.Graph()
        names: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, names)
        graph.output(result)
        constants = {k: v if device is None else v.to(device) for k, v in self.constants.items()}
        return Network(
            graph, constants, self.dynamic, self.returned, list(self.log), lengths=self.lengths, dense=self.dense
        )

    def tidy(self) -> None:
        """Forgets what nothing reads."""
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        self.constants = {name: value for name, value in self.constants.items() if name in used}


class Checker:
    """Computes in float64, on the example inputs, what a rewrite replaced and what it put there."""

    def __init__(self, network: Network, inputs: Sequence[Any], tolerance: float = 1e-5) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.tolerance = tolerance
        for node, given in zip(network.inputs, inputs, strict=True):
            self.values[node] = cast(given, torch.float64)

    def of(self, network: Network, node: fx.Node) -> Any:
        """A node's value; computed when first asked for, and kept."""
        pending = [node]
        with torch.no_grad():
            while pending:
                top = pending[-1]
                missing = [a for a in top.all_input_nodes if a not in self.values]
                if top in self.values or not missing:
                    if top.op == "get_attr":
                        self.values[top] = cast(network.value(top), torch.float64)
                    elif top not in self.values:
                        self.values[top] = cast(call(top, self.values.__getitem__), torch.float64)
                    pending.pop()
                else:
                    pending += missing
        return self.values[node]

    def check(self, network: Network, old: fx.Node, new: fx.Node, rule: str) -> float:
        """The error of the new value; Mistake where it is another one."""
        expected, got = self.of(network, old), self.of(network, new)
        error = difference(got, expected)
        if not error <= self.tolerance:
            raise Mistake(f"{rule} at {old.name}: an error of {error:.2g} in float64, allowed {self.tolerance:g}")
        return error


def difference(got: Tensor, expected: Tensor) -> float:
    """max|got - expected| / max|expected|; NaN and infinities must be in the same places."""
    if got.shape != expected.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    size = torch.where(finite, expected, zero).abs().max().item()
    error = torch.where(finite, got - expected, zero).abs().max().item()
    return error / size if size else error


def agree(got: Any, expected: Any, worst: float) -> bool:
    """Whether an output is what a module returns: a tensor of its type within a `difference`, anything else equal."""
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return got.dtype == expected.dtype and difference(got, expected) <= worst
    return type(got) is type(expected) and bool(got == expected)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating tensor in another type; anything else as it is."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype)


def call(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """What a call_function node computes."""
    function: Any = node.target
    return function(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))


def only_user(node: Any, user: Any) -> bool:
    """Whether a node is read by one other and by nothing else."""
    if not isinstance(node, fx.Node) or user.op != "call_function":
        return False
    return len(node.users) == 1 and user in node.users


def open_sizes(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, ...]:
    """Sizes as `steps.reshape` takes them: -1 is the dimension that has the batch in it."""
    return tuple(-1 if k else n for n, k in zip(shape, scales, strict=True))


def is_step(node: Any) -> bool:
    """Whether a node calls one of our steps."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in STEPS


def is_constant(node: Any) -> bool:
    """Whether a node stands for a constant."""
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _normal(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = signature_of(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    defaults = {name: p.default for name, p in signature.parameters.items()}
    given = {k: v for k, v in bound.kwargs.items() if isinstance(v, fx.Node) or v != defaults[k]}
    return bound.args, given


signature_of = functools.cache(inspect.signature)


def _scales(node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of a step's dimensions, as meta has it, by its sizes for twice the batch."""
    given: list[Any] = [a.meta.get("scales") for a in node.all_input_nodes]
    if None in given:
        return None
    if not any(map(any, given)):
        return (0,) * len(shape)
    first = next(a for a in node.all_input_nodes if any(a.meta["scales"]))
    batch = next(n // k for n, k in zip(first.meta["shape"], first.meta["scales"], strict=True) if k)
    try:
        args, kwargs = _sized(node.args, 2), _sized(tuple(node.kwargs.items()), 2)
        doubled: tuple[int, ...] = _result(node.target, args, kwargs).shape
    except (RuntimeError, TypeError, ValueError):  # it holds for one batch only
        return None
    if not batch or any(b not in (a, 2 * a) for a, b in zip(shape, doubled, strict=True)):
        return None
    return tuple(a // batch if a != b else 0 for a, b in zip(shape, doubled, strict=True))


class _Size(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Plain(NamedTuple):
    kind: type  # 1, 1.0 and True are equal
    value: Any


def _sized(value: Any, times: int = 1) -> Any:
    """Arguments with sizes for nodes, and tuples for lists: two that are equal give results of the same size.

    `times`: of so many times the batch.
    """
    if isinstance(value, fx.Node):
        shape = tuple(value.meta["shape"])
        if times > 1:
            shape = tuple(n * times if k else n for n, k in zip(shape, value.meta["scales"], strict=True))
        return _Size(shape, value.meta["dtype"])
    if isinstance(value, (list, tuple)):
        return tuple(_sized(v, times) for v in value)
    return _Plain(type(value), value)


@functools.lru_cache(maxsize=4096)
def _result(function: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> _Size:
    """The size of what a step returns, computed of meta tensors: of `_sized` arguments, kwargs as pairs."""

    def meta(value: Any) -> Any:
        if isinstance(value, _Size):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value.value if isinstance(value, _Plain) else tuple(map(meta, value))

    out = function(*map(meta, args), **dict(map(meta, kwargs)))
    return _Size(tuple(out.shape), out.dtype)


def batch_of(inputs: Sequence[Any]) -> int:
    """The batch: of the images, beside a vector of scales; 0 where there are no tensors."""
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.ndim]
    return int(max(tensors, key=lambda x: x.ndim).shape[0]) if tensors else 0


def of_one_batch(leaves: Sequence[Any]) -> list[Any] | None:
    """Inputs, of which some have one item for the whole batch of the others, as rotary tables and masks do, with that for each.

    None where that is not how their first dimensions differ, or they do not.
    """
    batches = {x.shape[0] if x.ndim else 0 for x in leaves if isinstance(x, Tensor)}
    if len(batches) != 2 or 1 not in batches or 0 in batches:
        return None
    batch = max(batches)
    alone = (isinstance(x, Tensor) and x.shape[0] == 1 for x in leaves)
    return [x.expand(batch, *x.shape[1:]).contiguous() if one else x for x, one in zip(leaves, alone, strict=True)]


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call's arguments, in the order of a captured graph's inputs."""
    return pytree.tree_leaves((args, kwargs))


def extract(network: Network, nodes: Sequence[fx.Node]) -> tuple[Network, list[fx.Node], list[fx.Node]]:
    """Some steps as a network of their own, whose nodes have names by order; and its inputs and outputs in the larger one."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and not is_constant(a)))
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph, names = fx.Graph(), dict[fx.Node, fx.Node]()
    constants: dict[str, Tensor] = {}
    for number, node in enumerate(inputs):
        names[node] = graph.placeholder(f"input_{number}")
        names[node].meta = dict(node.meta)
    for number, node in enumerate(nodes):
        for constant in node.all_input_nodes:
            if is_constant(constant) and constant not in names:
                constants[str(constant.target)] = network.constants[str(constant.target)]
                names[constant] = graph.create_node("get_attr", str(constant.target))
                names[constant].meta = dict(constant.meta)
        args, kwargs = fx.map_arg(node.args, names.__getitem__), fx.map_arg(node.kwargs, names.__getitem__)
        names[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"step_{number}")
        names[node].meta = dict(node.meta)
    graph.output(tuple(names[node] for node in outputs))
    return Network(graph, constants, network.dynamic), inputs, outputs


def splice(
    network: Network, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], part: Network, inputs: Sequence[fx.Node]
) -> None:
    """Puts a changed part back where it was taken from."""
    names = dict(zip(part.inputs, inputs, strict=True))
    before = nodes[-1].next
    for node in part.graph.nodes:
        if node.op == "get_attr":
            names[node] = network.constant(part.constants[node.target], node.target, before)
        elif node.op == "call_function":
            with network.graph.inserting_before(before):
                names[node] = network.graph.node_copy(node, names.__getitem__)
            names[node].meta = dict(node.meta)
    results: Any = part.output.args[0]
    for old, new in zip(outputs, results, strict=True):
        old.replace_all_uses_with(names[new])
    for node in reversed(nodes):
        if not node._erased and not node.users:
            network.remove(node)
