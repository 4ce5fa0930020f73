"""tune: measures every algorithm that supports a layer, under a network's conditions, and chooses for all layers together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ai3_ops import _machine, registry
from ai3_ops._torch import pytree
from ai3_ops.calls.call import Call, Spec
from ai3_ops.measuring import records, timing
from ai3_ops.measuring.timing import Layer, Measured, Surroundings
from ai3_ops.nn.computed import copied
from ai3_ops.nn.layout import FORMER
from ai3_ops.nn.unswap import unswap
from ai3_ops.problem import is_channels_last
from ai3_ops.registry import near
from ai3_ops.selecting.plan import CHANNELS_LAST, CONTIGUOUS, Plan, PlannedLayer
from ai3_ops.selecting.selectors import check_algorithm, listed
from ai3_ops.surveying.discover import refuse_meta, refuse_optimized, survey
from ai3_ops.tuning import pbqp

T = TypeVar("T")
OBJECTIVES = ("latency", "p99", "memory")
GAIN = 0.02  # the least share of the default's time that another choice must save
DEVIATIONS = 3.0  # and the least number of standard errors of the difference
TOLERANCE = 5e-5  # where the user gives none; twice the error of PyTorch's implementation is allowed in any dtype
TOLERANCE_APPROXIMATE = 2e-2  # likewise for algorithms that approximate, where the user allows them
_SEARCH_STEPS = 24  # halvings of the price of memory
_NEVER = 1e9  # microseconds: of what is not done
NONE_HOLDS = "no algorithm holds the tolerance; the least error"
BYTE = 1e3  # microseconds that a byte is worth where memory is the objective: more than any time


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `tune` or `optimize`: `plan` has the choices for what was measured, and `default` for the other layers.

    The measurements are in the cache, too.
    """

    def __init__(self, function: str, plan: Plan) -> None:
        super().__init__(f"ai3_ops.{function} was interrupted; this exception's .plan has what was measured until then")
        self.plan = plan


def check_limits(function: str, settings: Any) -> None:
    """ValueError, in the name of an ai3_ops function, for an objective or a limit that is none."""
    if settings.objective not in OBJECTIVES:
        words, meant = " or ".join(map(repr, OBJECTIVES)), near(str(settings.objective), OBJECTIVES)
        raise ValueError(f"ai3_ops.{function}: objective must be {words}, got {settings.objective!r}{meant}")
    for name in ("budget_seconds", "memory_limit", "tolerance"):
        value = getattr(settings, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise ValueError(f"ai3_ops.{function}: {name} needs a number of at least 0, or None, got {value!r}")


@dataclass(frozen=True)
class Settings:
    """What `tune` is asked for."""

    objective: str = "latency"
    budget_seconds: float | None = None
    memory_limit: int | None = None
    tolerance: float | None = None
    deterministic: bool = False
    allow_approximate: bool = False

    def __post_init__(self) -> None:
        check_limits("tune", self)


def tune(
    model: nn.Module,
    example_inputs: Any,
    *,
    objective: str = "latency",
    budget_seconds: float | None = None,
    memory_limit: int | None = None,
    tolerance: float | None = None,
    deterministic: bool = False,
    allow_approximate: bool = False,
    cache: bool = True,
    progress: bool = True,
) -> Plan:
    """Measures every algorithm that supports each layer of `model` on this machine, and chooses for the network as a whole.

    Layers with equal shapes, dtypes and parameters are measured once. The model is not changed; pass the plan to `swap`.

    Args:
        model: in the dtype and on the device in which it will run.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, in the memory format of later inputs.
        objective: what to minimize: "latency", the median time of a call; "p99", the time that 99 of 100 calls do not exceed;
            "memory", the bytes of packed weights and workspaces, and the time where those are equal.
        budget_seconds: after this time nothing further is measured; layers with the most work are measured first. The others
            keep `default` where the other settings allow the algorithm that it chooses, by what that states; elsewhere they
            keep PyTorch's implementation.
        memory_limit: bytes that all packed weights and the largest workspace may take together. PyTorch's own
            implementations do not state what they take, and count as 0.
        tolerance: the largest error allowed for a layer, max|y - y64| / max|y64| with y64 computed in float64, measured on
            normally distributed random numbers; PyTorch's implementation is held to it, too, and a warning names layers of which
            none keeps it, where the least error is taken. None: 5e-5, or twice the error of PyTorch's implementation,
            whichever is larger; 2e-2 for algorithms that approximate.
        deterministic: leaves out algorithms whose results may differ from run to run.
        allow_approximate: also measures algorithms that approximate (bfloat16 weights).
        cache: keeps measurements in `$XDG_CACHE_HOME/ai3_ops/tune`, and uses those that are there.
        progress: shows a progress bar on standard error, where that is a terminal.

    Where torch.distributed is initialized, every rank must call `tune`: rank 0 measures, and all ranks get its plan.

    Returns:
        The plan; `print` it for a table.

    Raises:
        ValueError: a setting is invalid, or `model` is one that `optimize` returned or has no weights yet (meta device).
        TypeError: `model` is not an nn.Module.
        RuntimeError: the model does not run on the example inputs.
        Interrupted: on Ctrl-C; a KeyboardInterrupt whose `plan` has what was measured until then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.tune needs an nn.Module, got {type(model).__name__}")
    refuse_optimized(model, "ai3_ops.tune", "tune the original model")
    refuse_meta(model, "ai3_ops.tune")
    settings = Settings(objective, budget_seconds, memory_limit, tolerance, deterministic, allow_approximate)
    return _on_rank_0(lambda: tune_alone(model, example_inputs, settings, cache, progress))


def tune_calls(model: nn.Module, example_inputs: Any, names: Collection[str], *, allow_approximate: bool) -> Plan:
    """As `tune`, but only calls of these names are measured; the others keep `default`."""
    settings = Settings(allow_approximate=allow_approximate)
    return _on_rank_0(lambda: tune_alone(model, example_inputs, settings, cache=True, progress=True, names=names))


def verify(plan: Plan, model: nn.Module, example_inputs: Any, *, cache: bool = True, progress: bool = True) -> Plan:
    """As `Plan.verify`."""
    refuse_optimized(model, "Plan.verify", "verify with the original model")
    refuse_meta(model, "Plan.verify")
    return _on_rank_0(lambda: _verify(plan, model, example_inputs, cache, progress))


Plan._verifier = verify


def _on_rank_0(make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on all ranks; its failure, too, so that nobody waits."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return make()
    told: list[Any] = [None, None]
    failure: BaseException | None = None
    if distributed.get_rank() == 0:
        try:
            told[0] = make().to_dict()
        except BaseException as error:
            failure, told[1] = error, f"{type(error).__name__}: {error}"
    distributed.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise RuntimeError(f"ai3_ops.tune: rank 0 failed: {told[1]}")
    return Plan.from_dict(told[0])


# The network ----------------------------------------------------------------------------------------------------------
@dataclass
class _Site:
    """A call of the model, as a node of the network."""

    name: str
    layer: Layer
    weighs: bool  # an nn.Conv2d, whose weight's layout decides the output's
    count: int  # how often it is called
    nodes: list[int]  # of a conv2d one, whatever its calls: they have one weight; else one for each call


class _Edge(NamedTuple):
    """A four-dimensional tensor that goes from one node to another; by their numbers."""

    first: int
    second: int
    shape: tuple[int, ...]


class Network:
    """A model's calls, in order, and which tensors go from one to another: seen in one run on the example inputs.

    The functions that the run calls are watched, so that any model has a graph, whatever its control flow. Nodes are the calls
    that can be chosen for, other functions that make one four-dimensional tensor of another, and tensors from outside.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self._largest = 0  # of what functions returned, in bytes
        self.layouts: list[tuple[str, ...]] = []  # of each node, those that it can have
        self.sites: list[_Site] = []
        self.edges: list[_Edge] = []
        self._producers = WeakIdKeyDictionary()  # the node that made a tensor
        self._nodes: dict[Call, list[int]] = {}
        self._parameters: dict[Call, tuple[bool, ...]] = {}
        self._counts: dict[Call, int] = {}
        # Parameters are shared in evaluation mode, where no forward writes to them but the first of a lazy module: their copy
        # took longer than the run.
        shared = {} if model.training else {id(p): p for p in model.parameters() if not is_lazy(p)}
        for module in model.modules():
            if FORMER in vars(module):  # whose weight gets its former memory format
                shared.pop(id(module._parameters.get("weight")), None)
        model = unswap(copied(model, "ai3_ops.tune", memo=shared))
        for site in survey(model, example_inputs, self._record):
            call, example = site.call, site.call.example
            assert example is not None
            parameters = (*self._parameters[call], *[False] * len(example))[: len(example)]
            if any(isinstance(a, Spec) and (a.device == "meta" or not a.shape) for a in example[:1]):
                continue
            layer = Layer(call.operation, tuple(map(_plain, example)), parameters, site.in_place)
            weighs = site.site is None and call.operation == "conv2d" and parameters[1] and len(example[0].shape) == 4
            nodes = self._nodes.get(call) or [self._node(layer.layouts)]
            self.sites.append(_Site(site.names[0], layer, weighs, self._counts[call], nodes))
        # What passes the caches during one call: weights, and a layer's input and output, whose memory the next ones get.
        self.bytes = sum(p.numel() * p.element_size() for p in model.parameters()) + 2 * self._largest

    def _node(self, layouts: tuple[str, ...]) -> int:
        self.layouts.append(layouts)
        return len(self.layouts) - 1

    def _record(self, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._largest = max([self._largest, *(t.numel() * t.element_size() for t in outputs)])
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if call is not None:
            self._parameters.setdefault(call, tuple(type(a) is nn.Parameter for a in args))
            self._counts[call] = self._counts.get(call, 0) + 1
            inputs = inputs[:1]
        images = [t for t in inputs if t.ndim == 4 and not isinstance(t, nn.Parameter)]
        if not images or not (call or any(t.ndim == 4 for t in outputs)):
            return
        nodes = [] if call is None else self._nodes.setdefault(call, [])
        if not (nodes and call is not None and call.operation == "conv2d"):
            nodes.append(self._node((CHANNELS_LAST, CONTIGUOUS)))
        node = nodes[-1]
        for tensor in images:
            if tensor not in self._producers:
                layout = CHANNELS_LAST if is_channels_last(tensor) else CONTIGUOUS
                self._producers[tensor] = self._node((layout,))
            self.edges.append(_Edge(self._producers[tensor], node, tuple(tensor.shape)))
        for tensor in outputs:
            if tensor.ndim == 4:
                self._producers[tensor] = node

    @property
    def layers(self) -> dict[Layer, int]:
        """The distinct ones, with how often each is called; those with most work first."""
        counts: dict[Layer, int] = {}
        for site in self.sites:
            counts[site.layer] = counts.get(site.layer, 0) + site.count
        return dict(sorted(counts.items(), key=lambda item: -item[0].work * item[1]))


def _plain(argument: Any) -> Any:
    """Without strides; lists as tuples."""
    if isinstance(argument, Spec):
        return argument._replace(stride=())
    return tuple(argument) if isinstance(argument, list) else argument


# Measuring ------------------------------------------------------------------------------------------------------------
Times = dict[tuple[Layer, str], dict[str, Measured]]  # of a layer in a layout, by algorithm; the baseline first


class Meter:
    """Measures, unless the cache knows."""

    def __init__(self, network_bytes: int, settings: Settings, cache: bool) -> None:
        self.surroundings = Surroundings(network_bytes)
        self.p99, self.approximate = settings.objective == "p99", settings.allow_approximate
        # Under a small tolerance, what is far slower may be the only one that holds it.
        self.everything = settings.tolerance is not None and settings.tolerance < TOLERANCE
        self.cache = records.Cache(cache)
        self.told: set[tuple[str, str]] = set()  # algorithms whose failure a warning has named

    def key(self, layer: Layer, layout: str) -> dict[str, Any]:
        """What an entry depends on."""
        surroundings = {"bytes": self.surroundings.bytes, "p99": self.p99, "approximate": self.approximate}
        return layer.key() | {"layout": layout} | surroundings | ({"everything": True} if self.everything else {})

    def known(self, layer: Layer) -> dict[str, dict[str, Measured]] | None:
        """All layouts' measurements from the cache, if it has them."""
        found = {}
        for layout in layer.layouts:
            entry = self.known_in(layer, layout)
            if entry is None:
                return None
            found[layout] = entry
        return found

    def known_in(self, layer: Layer, layout: str) -> dict[str, Measured] | None:
        """One layout's measurements from the cache, if it has them."""
        key = self.key(layer, layout)
        entry = self.cache.get(key)
        if entry is None:
            return None
        try:
            found = timing.from_json(entry)
            if list(found) != layer.candidates(layout, self.approximate):
                raise ValueError("has other algorithms")
        except (TypeError, ValueError, AttributeError) as error:
            self.cache.broken(key, error)
            return None
        self.tell(layer, found, "; this is from the cache, cache=False tries it again")
        return found

    def measured(self, layer: Layer, end: float = math.inf) -> dict[str, dict[str, Measured]]:
        """All layouts', now; OutOfTime where they take longer than until `end`, by `timing.clock`."""
        return {layout: self.measured_in(layer, layout, end) for layout in layer.layouts}

    def measured_in(self, layer: Layer, layout: str, end: float = math.inf) -> dict[str, Measured]:
        """One layout's, now."""
        names = layer.candidates(layout, self.approximate)
        seconds = math.inf if end == math.inf else end - timing.clock()
        found = timing.measure(layer, layout, names, self.surroundings, self.p99, seconds, self.everything)
        self.cache.put(self.key(layer, layout), timing.to_json(found))
        self.tell(layer, found)
        return found

    def tell(self, layer: Layer, found: Mapping[str, Measured], more: str = "") -> None:
        """A warning of each algorithm that fails, once: at the first layer that shows it."""
        for name, m in found.items():
            if m.failed and not m.rough and (layer.operation, name) not in self.told:
                self.told.add((layer.operation, name))
                warnings.warn(
                    f"ai3_ops.tune: {layer.operation} {name!r} fails on the layer {layer} and is not chosen there: "
                    f"{m.failed}{more}",
                    stacklevel=8,
                )

    def conversion(self, edge: _Edge, layer: Layer) -> float:
        """Microseconds to bring the edge's tensor into channels_last."""
        key = {
            "operation": "conversion", "shape": list(edge.shape), "dtype": str(layer.dtype), "device": layer.device,
            "bytes": self.surroundings.bytes,
        }  # fmt: skip
        known = self.cache.get(key)
        if not isinstance(known, float):
            known = float(timing.conversion(edge.shape, layer.dtype, layer.device, self.surroundings))
            self.cache.put(key, known)
        return known


def tune_alone(
    model: nn.Module,
    example_inputs: Any,
    settings: Settings,
    cache: bool,
    progress: bool,
    names: Collection[str] | None = None,
) -> Plan:
    """The plan that this process makes, whatever other ranks do; `names` are of those calls that are measured, or all."""
    end = math.inf if settings.budget_seconds is None else timing.clock() + settings.budget_seconds
    network = Network(model, example_inputs)
    meter = Meter(network.bytes, settings, cache)
    wanted = {site.layer for site in network.sites if names is None or site.name in names}
    layers = [layer for layer in network.layers if layer in wanted]
    times: Times = {}
    for layer in layers:
        times |= {(layer, layout): found for layout, found in (meter.known(layer) or {}).items()}
    todo = [layer for layer in layers if (layer, layer.layouts[0]) not in times]
    try:
        for number, layer in enumerate(_shown(todo, progress)):
            try:
                if end < math.inf and timing.clock() >= end:
                    raise timing.OutOfTime
                times |= {(layer, layout): found for layout, found in meter.measured(layer, end).items()}
            except timing.OutOfTime:
                left = f"{len(todo) - number} distinct layers were not measured within the budget"
                kept = "they keep `default` where the settings allow it, else PyTorch's implementation"
                warnings.warn(f"ai3_ops.tune: {left}; {kept}", stacklevel=5)
                break
        return _choose(network, times, settings, meter)
    except KeyboardInterrupt:
        raise Interrupted("tune", _choose(network, times, settings, meter)) from None


def _shown(layers: list[Layer], progress: bool) -> Iterator[Layer]:
    """With a bar on standard error: which one is measured, how many there are, and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (progress and layers)) as bar:
        task = bar.add_task("", total=len(layers))
        for layer in layers:
            bar.update(task, description=str(layer))
            yield layer
            bar.advance(task)


# Choosing -------------------------------------------------------------------------------------------------------------
def ineligible(layer: Layer, name: str, found: Mapping[str, Measured], settings: Settings) -> str:
    """Why the settings forbid an algorithm, "" where they do not. PyTorch's own is held to nothing but a tolerance."""
    if name == "torch":
        limit = settings.tolerance
        return "" if limit is None or found[name].error <= limit else f"error {found[name].error:.0e} above {limit:.0e}"
    info, m = registry.algorithm(layer.operation, name, layer.device), found[name]
    if m.failed:
        return m.failed if m.rough else f"its call fails: {m.failed}"
    if settings.deterministic and not info.deterministic:
        return "not deterministic"
    limit = settings.tolerance
    if limit is None:
        torch_error = found["torch"].error if "torch" in found else 0.0
        limit = TOLERANCE_APPROXIMATE if info.accuracy == "approximate" else max(TOLERANCE, 2 * torch_error)
    if not m.error <= limit:
        return f"error {m.error:.0e} above {limit:.0e}"
    if settings.memory_limit is not None and m.bytes > settings.memory_limit:
        return f"needs {m.bytes} bytes, more than memory_limit"
    return ""


def least_error(
    layer: Layer, found: Mapping[str, Measured], settings: Settings, price: float, among: Collection[str]
) -> str:
    """For a tolerance that none of these holds: the one with the least error, of PyTorch's and those that nothing else forbids.

    Where memory has a price, only what takes none is left: errors have no price to be compared with.
    """
    free = replace(settings, tolerance=math.inf)
    able = [n for n in among if n != "torch" and not ineligible(layer, n, found, free)]
    if price > 0:
        able = [name for name in able if not found[name].bytes]
    return min((name for name in ("torch", *able) if name in found), key=lambda name: found[name].error)


def select(
    layer: Layer,
    found: Mapping[str, Measured],
    settings: Settings,
    price: float = 0.0,
    among: Collection[str] | None = None,
) -> tuple[str, float, str]:
    """Of a layer in one layout: the algorithm, its cost (time, and price times bytes), and why; `among` these names, or all.

    The first named is the one to beat; where the settings forbid it, PyTorch's. Another is taken for a gain of more than GAIN of
    its time and DEVIATIONS standard errors of the difference; of those within as little of the best, the first. Where none of
    them holds the tolerance, `least_error`.
    """
    forbidden = {name: ineligible(layer, name, found, settings) for name in (found if among is None else among)}
    first = next(iter(forbidden))
    allowed = [name for name, why in forbidden.items() if not why]
    if not allowed:
        least = least_error(layer, found, settings, price, forbidden)
        return least, found[least].time_us + price * found[least].bytes, NONE_HOLDS
    base_name = first if first in allowed else "torch" if "torch" in allowed else allowed[0]
    cost = {name: found[name].time_us + price * found[name].bytes for name in allowed}

    def clearly(less: str, more: str) -> bool:
        noise = DEVIATIONS * math.hypot(found[less].noise_us, found[more].noise_us)
        return cost[more] - cost[less] > max(GAIN * found[more].time_us, noise)

    better = [name for name in allowed if clearly(name, base_name)]
    if not better:
        why = "default" if base_name == first else f"default is not allowed: {forbidden[first]}"
        return base_name, cost[base_name], why
    best = min(better, key=cost.__getitem__)
    chosen = next(name for name in better if not clearly(best, name))
    return chosen, cost[chosen], f"{found[base_name].time_us / found[chosen].time_us:.2f}x {base_name}"


def unmeasured(layer: Layer, layout: str, settings: Settings, price: float = 0.0) -> tuple[str, float, str]:
    """As `select`, of a layer that was not measured: `default`, unless what is known without measuring forbids it; no cost.

    Where memory has a price, only what takes none is left: nothing tells what time it would be worth.
    """
    name = layer.default(layout)
    if name == "torch":
        return name, 0.0, "not measured"
    info, limit = registry.algorithm(layer.operation, name, layer.device), settings.tolerance
    bound = {"exact": TOLERANCE, "bounded": info.error_bound}.get(info.accuracy, math.inf)  # in float32
    bound *= torch.finfo(layer.dtype).eps / torch.finfo(torch.float32).eps
    why = ""
    if settings.deterministic and not info.deterministic:
        why = "is not deterministic"
    elif limit is not None and not bound <= limit:
        why = f"may have an error above {limit:.0e}"
    elif price > 0 and (needed := sum(layer.memory(name, layout))):
        why = f"needs {needed} bytes"
    return ("torch", 0.0, f"not measured; {name} {why}") if why else (name, 0.0, "not measured")


class _Solution(NamedTuple):
    """Layouts by node, and of each site the algorithm and why."""

    layouts: list[str]
    algorithms: list[tuple[str, str]]
    bytes: int  # of all packs and the largest workspace


class _Choice:
    """The choice for a network, for any price of memory."""

    def __init__(self, network: Network, times: Times, settings: Settings, conversion: Callable[..., float]) -> None:
        self.network, self.times, self.settings = network, times, settings
        self.weighs = {node for site in network.sites if site.weighs for node in site.nodes}
        layers = {node: site.layer for site in network.sites for node in site.nodes}
        # A conv2d with a weight in channels_last answers in channels_last, converting what it reads; nothing else converts,
        # and nothing comes back: an input or a weight in channels_last is enough for an output in it.
        self.edges = [
            (edge, conversion(edge, layers[edge.second]) if edge.second in self.weighs else _NEVER)
            for edge in network.edges
        ]

    def at(self, price: float) -> _Solution:
        """The cheapest, where a byte of memory costs `price` microseconds."""
        layouts = self.network.layouts
        picked: dict[tuple[Layer, str], tuple[str, float, str]] = {}
        for (layer, layout), found in self.times.items():
            picked[layer, layout] = select(layer, found, self.settings, price)
        costs = {node: [0.0] * len(own) for node, own in enumerate(layouts)}
        for site in self.network.sites:
            for node in site.nodes:
                for i, layout in enumerate(layouts[node]):
                    _, cost, _ = picked.get((site.layer, layout), ("", 0.0, ""))
                    # Noise must not take a network to and fro.
                    costs[node][i] = site.count / len(site.nodes) * cost * (1 + GAIN * (layout == CONTIGUOUS))
        edges = [
            (edge.first, edge.second, [[_cost(a, b, us) for b in layouts[edge.second]] for a in layouts[edge.first]])
            for edge, us in self.edges
        ]
        numbers = pbqp.solve(costs, edges)
        solved = {node for node in self.weighs if layouts[node][numbers[node]] == CHANNELS_LAST}
        # Beyond series-parallel graphs the solver guesses: what all weights alike would give is looked at, too.
        tried = [self._followed(some) for some in (solved, self.weighs, set[int]())]
        return self._solution(min(tried, key=lambda found: self._total(found, costs)), picked, price)

    def _followed(self, chosen: set[int]) -> list[str]:
        """The layout of every node where the weights of these are in channels_last."""
        found = ["" if len(own) > 1 else own[0] for own in self.network.layouts]
        last = {node for node, layout in enumerate(found) if layout == CHANNELS_LAST} | chosen
        for edge in sorted(self.network.edges, key=lambda edge: edge.second):
            if edge.first in last and len(self.network.layouts[edge.second]) > 1:
                last.add(edge.second)
        return [layout or (CHANNELS_LAST if node in last else CONTIGUOUS) for node, layout in enumerate(found)]

    def _total(self, found: list[str], costs: Mapping[int, list[float]]) -> float:
        own = sum(costs[node][self.network.layouts[node].index(layout)] for node, layout in enumerate(found))
        return own + sum(
            us for edge, us in self.edges if found[edge.first] != found[edge.second] and edge.second in self.weighs
        )

    def _solution(
        self, found: list[str], picked: Mapping[tuple[Layer, str], tuple[str, float, str]], price: float
    ) -> _Solution:
        algorithms, packed, workspace = [], 0, 0
        for site in self.network.sites:
            layer, layout = site.layer, found[site.nodes[0]]
            name, _, why = picked.get((layer, layout)) or unmeasured(layer, layout, self.settings, price)
            algorithms.append((name, why))
            extra, pack = layer.memory(name, layout)
            packed, workspace = packed + pack, max(workspace, extra)
        return _Solution(found, algorithms, packed + workspace)

    def best(self) -> _Solution:
        """The cheapest within the limit of memory."""
        return within(self.settings, self.at, lambda found: found.bytes)


def within(settings: Settings, at: Callable[[float], T], size: Callable[[T], int]) -> T:
    """The cheapest choice, `at(price of a byte in microseconds)`, whose bytes keep to the limit of memory.

    The lowest price that keeps it, found by halving (Lagrangian relaxation, Everett 1963); the least bytes where none does.
    """
    limit = settings.memory_limit
    if settings.objective == "memory":
        return at(BYTE)
    found = at(0.0)
    if limit is None or size(found) <= limit:
        return found
    found = at(BYTE)
    low, high = -9.0, math.log10(BYTE)
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        tried = at(10**middle)
        if size(tried) <= limit:
            found, high = tried, middle
        else:
            low = middle
    return found


def _cost(of: str, to: str, microseconds: float) -> float:
    """Of a tensor that changes its layout."""
    return 0.0 if of == to else microseconds if to == CHANNELS_LAST else _NEVER


def _choose(network: Network, times: Times, settings: Settings, meter: Meter) -> Plan:
    solution = _Choice(network, times, settings, meter.conversion).best()
    layers = {}
    warn_of_errors(
        "tune", [s.name for s, (_, why) in zip(network.sites, solution.algorithms, strict=True) if why == NONE_HOLDS], 6
    )
    for site, (name, why) in zip(network.sites, solution.algorithms, strict=True):
        layers[site.name] = _planned(site, name, solution.layouts[site.nodes[0]], why, times)
    return Plan(layers, _machine.machine(), asdict(settings))


def warn_of_errors(function: str, names: list[str], stacklevel: int) -> None:
    """Of layers of which no algorithm holds the tolerance, where there are any."""
    if names:
        what = "no algorithm that the settings allow, PyTorch's neither, holds the tolerance"
        layers = listed([name or "the model" for name in names])
        warnings.warn(
            f"ai3_ops.{function}: {what} in {layers}: the one with the least error is taken",
            stacklevel=stacklevel,
        )


def _planned(site: _Site, name: str, layout: str, why: str, times: Times) -> PlannedLayer:
    layer = site.layer
    found = times.get((layer, layout), {}).get(name)
    workspace, packed = layer.memory(name, layout) if found is None else (found.workspace_bytes, found.packed_bytes)
    candidates = {}
    for each in layer.layouts:
        for other, m in times.get((layer, each), {}).items():
            candidates[f"{other} {each}" if len(layer.layouts) > 1 else other] = m.to_dict()
    return PlannedLayer(
        layer.operation,
        name,
        layout if len(layer.layouts) > 1 else None,
        None if found is None else found.time_us,
        None if found is None else found.error,
        workspace,
        packed,
        why,
        [list(shape) for shape in layer.shapes],
        candidates,
    )


# Verifying ------------------------------------------------------------------------------------------------------------
_Case = tuple[Layer, str, str]  # layout and algorithm in the plan


def _verify(plan: Plan, model: nn.Module, example_inputs: Any, cache: bool, progress: bool) -> Plan:
    """Each layer in the layout that the plan has for it."""
    known = Settings.__dataclass_fields__
    settings = Settings(**{k: v for k, v in plan.settings.items() if k in known})
    network = Network(model, example_inputs)
    meter = Meter(network.bytes, settings, cache)
    sites = {site.name: site for site in network.sites}
    cases: dict[_Case, list[str]] = {}
    for name, planned in plan.layers.items():
        site = sites.get(name)
        if site is None or site.layer.operation != planned.operation:
            what = f"layer {name!r} (algorithm {planned.algorithm!r})"
            if site is None:
                raise ValueError(f"plan: {what}: there is no such layer in this model{near(name, sites)}")
            raise ValueError(
                f"plan: {what}: is a {site.layer.operation} in this model, a {planned.operation} in the plan"
            )
        layouts = site.layer.layouts
        layout = planned.layout if planned.layout in layouts else layouts[-1]
        if planned.algorithm not in site.layer.candidates(layout, approximate=True):
            check_algorithm(name, planned.operation, planned.algorithm)
            raise ValueError(
                f"plan: layer {name!r}: {planned.operation} {planned.algorithm!r} does not support this layer"
            )
        cases.setdefault((site.layer, layout, planned.algorithm), []).append(name)
    price = BYTE if settings.objective == "memory" else 0.0
    times: dict[_Case, dict[str, Measured]] = {}
    failed = set()
    for case, _ in zip(cases, _shown([layer for layer, _, _ in cases], progress), strict=True):
        layer, layout, algorithm = case
        rivals = [layer.default(layout), "torch", *_rivals(plan.layers[cases[case][0]], layer, layout)]
        found = timing.measure(layer, layout, list(dict.fromkeys([algorithm, *rivals])), meter.surroundings, meter.p99)
        meter.tell(layer, found)
        if found[algorithm].failed:
            failed.add(case)
        times[case] = found
        if select(layer, found, settings, price)[0] != algorithm:
            times[case] = meter.measured(layer)[layout]

    def at(price: float) -> dict[_Case, tuple[str, str]]:
        chosen = {}
        for case, found in times.items():
            name, _, why = select(case[0], found, settings, price)
            chosen[case] = name, why
        return chosen

    def size(chosen: dict[_Case, tuple[str, str]]) -> int:
        needed = [(times[case][name], len(cases[case])) for case, (name, _) in chosen.items()]
        return sum(m.packed_bytes * count for m, count in needed) + max(
            (m.workspace_bytes for m, _ in needed), default=0
        )

    layers = dict(plan.layers)
    for case, (chosen, why) in within(settings, at, size).items():
        layer, layout, algorithm = case
        lost = f"{algorithm} {'fails' if case in failed else 'is not the best'} here: {why}"
        why = "verified" if chosen == algorithm else lost
        for name in cases[case]:
            layers[name] = _planned(sites[name], chosen, layout, why, {(layer, layout): times[case]})
    return Plan(layers, _machine.machine(), plan.settings)


def _rivals(planned: PlannedLayer, layer: Layer, layout: str) -> list[str]:
    """The fastest other algorithm of the plan's measurements that exists here."""
    able = layer.candidates(layout, approximate=False)
    times = {}
    for key, m in planned.candidates.items():
        name, _, of = key.partition(" ")
        if (
            name != planned.algorithm
            and name in able
            and of in ("", layout)
            and isinstance(m.get("time_us"), (int, float))
        ):
            times[name] = m["time_us"]
    return sorted(times, key=times.__getitem__)[:1]
