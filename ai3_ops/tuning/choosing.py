"""Which algorithms of a network's layers, of what was measured."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from ai3_ops import _machine, registry
from ai3_ops.measuring.timing import Layer, Measured
from ai3_ops.selecting.plan import CHANNELS_LAST, CONTIGUOUS, Plan, PlannedLayer
from ai3_ops.selecting.selectors import listed
from ai3_ops.tuning import pbqp
from ai3_ops.tuning.callgraph import CallGraph, Site
from ai3_ops.tuning.meter import Meter, Times
from ai3_ops.tuning.settings import TOLERANCE, TOLERANCE_APPROXIMATE, Settings

T = TypeVar("T")
GAIN = 0.02  # the least share of the default's time that another choice must save
DEVIATIONS = 3.0  # and the least number of standard errors of the difference
UNKNOWN = 0.5  # of the time of a layer of which nothing is known: what measuring it may gain
_SEARCH_STEPS = 14  # halvings of the price of memory, of twelve decades: to a fifth of a percent
_NEVER = 1e9  # microseconds: of what is not done
NONE_HOLDS = "no algorithm holds the tolerance; the least error"
BYTE = 1e3  # microseconds that a byte is worth where memory is the objective: more than any time


@dataclass(frozen=True)
class Timed:
    """A layer, how often a network calls it, and what is known of its times, in each layout; nothing where that is nothing."""

    layer: Layer
    calls: int
    found: Collection[Mapping[str, Measured]]


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

    Where memory has a price, only what takes none is left: errors have no price to be compared with. Of all that was measured
    where that leaves none.
    """
    free = replace(settings, tolerance=math.inf)
    able = [n for n in among if n != "torch" and not ineligible(layer, n, found, free)]
    if price > 0:
        able = [name for name in able if not found[name].bytes]
    left = [name for name in ("torch", *able) if name in found]
    return min(left or found, key=lambda name: found[name].error)


def select(
    layer: Layer,
    found: Mapping[str, Measured],
    settings: Settings,
    price: float = 0.0,
    among: Collection[str] | None = None,
    usual: str = "",
) -> tuple[str, float, str]:
    """Of a layer in one layout: the algorithm, its cost (time, and price times bytes), and why; `among` these names, or all.

    `usual`, or the first named, is the one to beat; where the settings forbid it, PyTorch's. Another is taken for a gain of more
    than GAIN of its time and DEVIATIONS standard errors of the difference; of those within as little of the best, the first.
    Where none of them holds the tolerance, `least_error`.
    """
    forbidden = {name: ineligible(layer, name, found, settings) for name in (found if among is None else among)}
    first = usual if usual in forbidden else next(iter(forbidden))
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


def doubt(layer: Layer, found: Mapping[str, Measured], settings: Settings) -> float:
    """Microseconds that another algorithm than `select`'s may gain, by one standard error; 0 of what was measured here."""
    if not any(m.shipped for m in found.values()):
        return 0.0
    chosen = _chosen(layer, found, settings)
    others = [m for name, m in found.items() if m is not chosen and not ineligible(layer, name, found, settings)]
    return max([0.0, *(chosen.time_us - m.time_us + math.hypot(m.noise_us, chosen.noise_us) for m in others)])


def to_measure(cases: Mapping[T, Timed], settings: Settings) -> list[T]:
    """What is worth measuring here, first what may gain most by it.

    That is all that nothing is known of; and of what was shipped the most doubtful, until the rest of that may gain less
    than GAIN of the network's time.
    """
    known = {key: case for key, case in cases.items() if case.found}
    times = {
        key: case.calls * max(_chosen(case.layer, f, settings).time_us for f in case.found)
        for key, case in known.items()
    }
    work = sum(case.calls * case.layer.work for case in known.values())
    pace = UNKNOWN * (sum(times.values()) / work if work else 1.0)
    gains = {key: pace * case.calls * case.layer.work for key, case in cases.items()}
    gains |= {key: case.calls * max(doubt(case.layer, f, settings) for f in case.found) for key, case in known.items()}
    doubtful, worth = sum(gains[key] for key in known), []
    for key in sorted(gains, key=lambda key: -gains[key]):
        if key not in known or doubtful > GAIN * sum(times.values()):
            worth.append(key)
            doubtful -= gains[key] if key in known else 0.0
    return worth


def _chosen(layer: Layer, found: Mapping[str, Measured], settings: Settings) -> Measured:
    return found[select(layer, found, settings)[0]]


def unmeasured(
    layer: Layer, layout: str, settings: Settings, price: float = 0.0, usual: str = ""
) -> tuple[str, float, str]:
    """As `select`, of a layer that was not measured: `usual`, or what `default` runs, unless what is known without measuring
    forbids it; no cost.

    Where memory has a price, only what takes none is left: nothing tells what time it would be worth.
    """
    name = usual or layer.default(layout)
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

    def __init__(self, graph: CallGraph, times: Times, settings: Settings, conversion: Callable[..., float]) -> None:
        self.graph, self.times, self.settings = graph, times, settings
        self.weighs = {node for site in graph.sites if site.weighs for node in site.nodes}
        layers = {node: site.layer for site in graph.sites for node in site.nodes}
        # A conv2d with a weight in channels_last answers in channels_last, converting what it reads; nothing else converts,
        # and nothing comes back: an input or a weight in channels_last is enough for an output in it.
        self.edges = [
            (edge, conversion(edge, layers[edge.second]) if edge.second in self.weighs else _NEVER)
            for edge in graph.edges
        ]
        # What no price changes, and `at` is called for many.
        self.usual = functools.cache(Layer.usual)
        self.unmeasured = functools.cache(
            lambda layer, layout, free: unmeasured(layer, layout, settings, not free, self.usual(layer, layout))
        )
        self.memory = functools.cache(Layer.memory)

    def at(self, price: float) -> _Solution:
        """The cheapest, where a byte of memory costs `price` microseconds."""
        layouts = self.graph.layouts
        picked: dict[tuple[Layer, str], tuple[str, float, str]] = {}
        for (layer, layout), found in self.times.items():
            picked[layer, layout] = select(layer, found, self.settings, price, usual=self.usual(layer, layout))
        costs = {node: [0.0] * len(own) for node, own in enumerate(layouts)}
        for site in self.graph.sites:
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
        found = ["" if len(own) > 1 else own[0] for own in self.graph.layouts]
        last = {node for node, layout in enumerate(found) if layout == CHANNELS_LAST} | chosen
        for edge in sorted(self.graph.edges, key=lambda edge: edge.second):
            if edge.first in last and len(self.graph.layouts[edge.second]) > 1:
                last.add(edge.second)
        return [layout or (CHANNELS_LAST if node in last else CONTIGUOUS) for node, layout in enumerate(found)]

    def _total(self, found: list[str], costs: Mapping[int, list[float]]) -> float:
        own = sum(costs[node][self.graph.layouts[node].index(layout)] for node, layout in enumerate(found))
        return own + sum(
            us for edge, us in self.edges if found[edge.first] != found[edge.second] and edge.second in self.weighs
        )

    def _solution(
        self, found: list[str], picked: Mapping[tuple[Layer, str], tuple[str, float, str]], price: float
    ) -> _Solution:
        algorithms, packed, workspace = [], 0, 0
        for site in self.graph.sites:
            layer, layout = site.layer, found[site.nodes[0]]
            name, _, why = picked.get((layer, layout)) or self.unmeasured(layer, layout, price <= 0)
            algorithms.append((name, why))
            extra, pack = self.memory(layer, name, layout)
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


def choose(graph: CallGraph, times: Times, settings: Settings, meter: Meter, end: float) -> Plan:
    """The plan of what was measured; layers that were not keep `default`, or what the settings allow.

    After `end`, by `timing.clock`, nothing more is measured.
    """
    solution = _Choice(graph, times, settings, functools.partial(meter.conversion, end=end)).best()
    layers = {}
    warn_of_errors(
        "tune", [s.name for s, (_, why) in zip(graph.sites, solution.algorithms, strict=True) if why == NONE_HOLDS], 6
    )
    for site, (name, why) in zip(graph.sites, solution.algorithms, strict=True):
        layers[site.name] = planned_layer(site, name, solution.layouts[site.nodes[0]], why, times)
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


def planned_layer(site: Site, name: str, layout: str, why: str, times: Times) -> PlannedLayer:
    """As a plan has it: the choice for one call, why, and all that was measured."""
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
        f"{why}, shipped" if found is not None and found.shipped else why,
        [list(shape) for shape in layer.shapes],
        candidates,
    )
