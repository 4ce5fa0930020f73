"""`Plan.verify`: a plan's choices timed again on this machine."""

from __future__ import annotations

from typing import Any

from torch import nn

from ai3_ops import _machine
from ai3_ops.measuring import timing
from ai3_ops.measuring.timing import Layer, Measured
from ai3_ops.registry import near
from ai3_ops.selecting.plan import Plan, PlannedLayer
from ai3_ops.selecting.selectors import check_algorithm
from ai3_ops.tuning.callgraph import CallGraph
from ai3_ops.tuning.choosing import BYTE, planned_layer, select, within
from ai3_ops.tuning.meter import Meter, shown
from ai3_ops.tuning.settings import Settings

_Case = tuple[Layer, str, str]  # layout and algorithm in the plan


def verified(plan: Plan, model: nn.Module, example_inputs: Any, cache: bool, progress: bool) -> Plan:
    """Each layer in the layout that the plan has for it."""
    known = Settings.__dataclass_fields__
    settings = Settings(**{k: v for k, v in plan.settings.items() if k in known})
    graph = CallGraph(model, example_inputs)
    meter = Meter(graph.bytes, settings, cache)
    sites = {site.name: site for site in graph.sites}
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
    for case, _ in zip(cases, shown([layer for layer, _, _ in cases], progress), strict=True):
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
            layers[name] = planned_layer(sites[name], chosen, layout, why, {(layer, layout): times[case]})
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
