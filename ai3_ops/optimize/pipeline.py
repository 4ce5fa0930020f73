"""From a module to the plan that computes it: capture, rewrite, choose, lower, and compare with the module as it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ai3_ops.optimize import choose, fusion, steps
from ai3_ops.optimize.canonical import canonicalize
from ai3_ops.optimize.capture import capture
from ai3_ops.optimize.lower import Part, Region, build, example_values, module_of, parts
from ai3_ops.optimize.network import Checker, Mistake, Network, difference, flat
from ai3_ops.optimize.report import Optimization, Step
from ai3_ops.optimize.search import search
from ai3_ops.optimize.timing import COSTS, paired

DEFAULT_SECONDS = 60.0  # that search and measuring may take where the user gives no budget
WORST_ERROR = 1e-4  # of the outputs against float64: beyond, nothing is changed
_compared: dict[Any, float] = {}  # gains of regions over PyTorch, by program and sizes


@dataclass(frozen=True)
class Settings:
    """What `optimize` was asked for."""

    selectors: Any = choose.AUTO
    alpha: float = 1.05
    budget_seconds: float | None = None
    objective: str = "latency"
    memory_limit: int | None = None
    tolerance: float | None = None
    deterministic: bool = False
    allow_approximate: bool = False
    resolved: dict[str, str] | None = None  # by call, what the selectors chose for the first example
    thorough: bool = True  # search and compare; without, what was learned before is taken over


@dataclass
class Plan:
    """What computes a module for inputs of certain sizes."""

    body: nn.Module | None  # from the leaves of the arguments to the output's; None: the module stays as it was
    dynamic: bool  # for any batch size
    out_spec: Any
    report: Optimization
    resolved: dict[str, str] = field(default_factory=dict)


def make_plan(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    name: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Uncapturable where the module has no graph; ValueError for selectors that do not fit."""
    report = Optimization(name)
    deadline = time.monotonic() + (DEFAULT_SECONDS if settings.budget_seconds is None else settings.budget_seconds)
    progress("capture")
    network = capture(module, args, kwargs)
    inputs = flat(args, kwargs)
    canonicalize(network)
    resolved = choose.follow(network, module, settings.selectors, settings.resolved)
    plain = network.copy()
    progress("rewrites")
    fusion.simplify(network)
    _note_error(network, plain, inputs, report)
    if settings.thorough:
        cost = COSTS["memory" if settings.objective == "memory" else "latency"]
        other = network.copy()
        changed = search(other, cost, settings.alpha, deadline, _checker(other, inputs), progress=progress)
        choose.measured(network, settings, deadline, progress)
        if changed:
            choose.measured(other, settings, deadline, progress)
            network = _cheaper(network, other, inputs, settings, report, cost)
    progress("programs")
    regions = lowered(network, inputs, report, compare=settings.thorough)
    report.steps = _steps(network, regions)
    report.rewrites = network.log
    body = body_of(network, regions)
    if not _right(body, plain, inputs, report):
        return Plan(None, network.dynamic, network.out_spec, report, resolved)
    if settings.thorough:
        progress("comparison with the module as it was")
        gain, before, after = paired(lambda: module(*args, **kwargs), lambda: body(*inputs))
        report.before_ms, report.after_ms = before * 1e3, after * 1e3
        if gain < 1:
            report.notes.append(f"stays as it was: rewritten it took {1 / gain:.2f} times as long")
            report.after_ms = report.before_ms
            return Plan(None, network.dynamic, network.out_spec, report, resolved)
    return Plan(body, network.dynamic, network.out_spec, report, resolved)


def lowered(
    network: Network, inputs: list[Any], report: Optimization, compare: bool = True
) -> list[tuple[Part, Region]]:
    """The programs, without those that are slower than PyTorch with the same steps and those that cannot be built."""
    regions: list[tuple[Part, Region]] = []
    refused = True
    while refused:  # a step that the engine refuses parts a region in two
        refused, regions = False, []
        for part in parts(network):
            try:
                regions.append((part, build(network, part)))
            except ValueError as error:
                refused |= _leave_one(network, part, str(error), report)
    if not compare:
        return regions
    needed = {node for part, _ in regions for node in part.inputs}
    values = example_values(network, inputs, needed)
    kept = []
    for part, region in regions:
        given = [values[node] for node in part.inputs]
        key = (region.program.text, tuple(x.shape for x in given), torch.get_num_threads())
        if key not in _compared:
            _compared[key] = _gain(fx_module(part.network(network)), region, given)
        if _compared[key] >= 1:
            kept.append((part, region))
        else:
            slower = f"a program of them took {1 / _compared[key]:.2f} times as long"
            report.notes.append(f"PyTorch computes {_shown(part.layers)}: {slower}")
    return kept


def _gain(own: nn.Module, region: nn.Module, given: list[Tensor]) -> float:
    return paired(lambda: own(*given), lambda: region(*given), rounds=5)[0]


def _shown(layers: list[str]) -> str:
    return ", ".join([*layers[:3], *(["…"] if len(layers) > 3 else [])]) or "some steps"


def _leave_one(network: Network, part: Part, reason: str, report: Optimization) -> bool:
    """Leaves to PyTorch those steps of a part that alone cannot be built either; whether there were any."""
    left = False
    for node in part.nodes:
        values = tuple(dict.fromkeys(a for a in node.all_input_nodes if a.op != "get_attr"))
        try:
            build(network, Part(part.kind, (node,), values, (node,)))
        except ValueError as error:
            node.meta["torch"] = left = True
            report.notes.append(f"PyTorch computes {_shown(list(node.meta['layers']))}: {error}")
    if not left:
        for node in part.nodes:
            node.meta["torch"] = True
        report.notes.append(f"PyTorch computes {_shown(part.layers)}: {reason}")
    return True


def fx_module(network: Network) -> fx.GraphModule:
    """A network that PyTorch computes."""
    return module_of(network, [])


def body_of(network: Network, regions: list[tuple[Part, Region]]) -> nn.Module:
    """The module that computes the outputs' leaves; a region itself where it is everything."""
    outputs = network.output.args[0]
    if len(regions) == 1:
        part, region = regions[0]
        if part.inputs == tuple(network.inputs) and part.outputs == outputs and len(part.outputs) == 1:
            return region
    return module_of(network, regions)


def _checker(network: Network, inputs: list[Any]) -> Checker | None:
    """On the first item of the batch."""
    one = [x[:1] if network.dynamic and isinstance(x, Tensor) else x for x in inputs]
    return Checker(network, one)


def _exact(network: Network, inputs: list[Any]) -> tuple[Any, ...]:
    """The outputs for the first item of the batch, in float64 where the graph can be computed so."""
    one = [x[:1] if network.dynamic and isinstance(x, Tensor) else x for x in inputs]
    try:
        return network.run(one, torch.float64)
    except RuntimeError:  # a graph that asks for a type of its own
        return network.run(one)


def _note_error(network: Network, plain: Network, inputs: list[Any], report: Optimization) -> None:
    """Holds the rewritten graph against the captured one in float64."""
    expected, got = _exact(plain, inputs), _exact(network, inputs)
    error = max((difference(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
    if not error <= 1e-4:
        raise Mistake(f"ai3_ops.optimize: the rewrites changed what the network computes: an error of {error:.2g}")
    report.expected = expected


def _right(body: nn.Module, plain: Network, inputs: list[Any], report: Optimization) -> bool:
    """Whether the outputs on the example are right; the report gets the error."""
    expected = report.expected
    count = 1 if plain.dynamic else None
    with torch.no_grad():
        one = [x[:count] if isinstance(x, Tensor) and count else x for x in inputs]
        out = body(*one)
    outputs = list(out) if isinstance(out, (list, tuple)) else [out]
    report.error = max((difference(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)
    report.expected = None
    if report.error <= WORST_ERROR or plain.inputs[0].meta["dtype"] != torch.float32:
        return True
    report.notes.append(f"stays as it was: rewritten its outputs had an error of {report.error:.2g}")
    return False


def _cheaper(
    network: Network,
    other: Network,
    inputs: list[Any],
    settings: Settings,
    report: Optimization,
    cost: Callable[[fx.Node], float],
) -> Network:
    """The network with substitutions, if it is faster as a whole, too; or smaller, where memory is what counts."""
    if settings.objective == "memory":
        return other
    scratch = Optimization("")
    bodies = [body_of(n, lowered(n, inputs, scratch, compare=False)) for n in (network, other)]
    gain, *_ = paired(lambda: bodies[0](*inputs), lambda: bodies[1](*inputs), rounds=15)
    if gain > 1.01:
        report.notes.append(f"substitutions made it {gain:.2f} times as fast")
        return other
    report.notes.append(f"substitutions that promised a gain were taken back: the whole ran {gain:.2f} times as fast")
    return network


def _steps(network: Network, regions: list[tuple[Part, Region]]) -> list[Step]:
    inside = {node for part, _ in regions for node in part.nodes}
    found = []
    for node in network.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", str(node.target))
        a = fusion.arguments(node) if node.target in steps.STEPS else {}
        fused = [k for k in ("residual", "scale", "input_relu") if a.get(k)] if a else []
        words = {"scale": "normalization of the input", "input_relu": "ReLU of the input"}
        detail = [a["activation"]] if a.get("activation", "none") != "none" else []
        detail = [*(words.get(k, k) for k in fused), *detail]
        algorithm = a.get("algorithm", "")
        if node not in inside and (not algorithm or algorithm in steps.RULES):
            algorithm = "torch"
        found.append(
            Step(list(node.meta["layers"]), a.get("name", name), algorithm, node.meta["shape"] or (), ", ".join(detail))
        )
    return found


def unthorough(settings: Settings, resolved: dict[str, str]) -> Settings:
    """For further sizes: the choices made before, without search."""
    return replace(settings, resolved=resolved, selectors=None, thorough=False)


__all__ = ["Plan", "Settings", "copy", "lowered", "make_plan", "unthorough"]
