"""From a module to the plan that computes it: capture, rewrite, choose, lower, and compare with the module as it was."""

from __future__ import annotations

import copy
import math
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import fuse_conv_bn_eval

from ai3_ops._torch import pytree
from ai3_ops.explain import explain
from ai3_ops.optimize import choose, fusion, steps
from ai3_ops.optimize.canonical import canonicalize
from ai3_ops.optimize.capture import capture
from ai3_ops.optimize.lower import Part, Region, build, example_values, module_of, parts
from ai3_ops.optimize.network import Checker, Network, Rewrite, difference, flat
from ai3_ops.optimize.report import Optimization, Step
from ai3_ops.optimize.search import search
from ai3_ops.optimize.timing import COSTS, paired
from ai3_ops.steps.examples import Inputs
from ai3_ops.swap import swap
from ai3_ops.tune import Settings as TuneSettings
from ai3_ops.tune import check_limits, tune_alone

DEFAULT_SECONDS = 60.0  # that search and measuring may take where the user gives no budget
WORST_ERROR = 1e-4  # of the outputs against float64: beyond, nothing is changed
WORST_APPROXIMATION = 5e-2  # with algorithms that approximate, which run only where the user allowed or named them
STRICTER = (4e-6, 1e-6)  # errors of single layers with which algorithms are chosen again where that is too much
OWN_ERROR = (
    4  # unless PyTorch's own float32 error is so large that this many times as much is more: ill-conditioned networks
)
# Settings that `tune` has too.
_TUNED = ("objective", "memory_limit", "tolerance", "deterministic", "allow_approximate")
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

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (int, float)) or not self.alpha >= 1 or math.isinf(self.alpha):
            raise ValueError(f"ai3_ops.optimize: alpha needs a number of at least 1, got {self.alpha!r}")
        check_limits("optimize", self)


class Budget:
    """The seconds for search and measuring, of all parts of a model together; they begin with the first search."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = DEFAULT_SECONDS if seconds is None else seconds
        self._end: float | None = None

    @property
    def deadline(self) -> float:
        """When they end, by time.monotonic()."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds
        return self._end


@dataclass
class Plan:
    """What computes a module for inputs of certain sizes."""

    body: nn.Module | None  # from the leaves of the arguments to the output's; None: the module stays as it was
    dynamic: bool  # for any batch size
    out_spec: Any  # of the output, whose leaves the body returns; None: the body returns the output itself
    report: Optimization
    resolved: dict[str, str] = field(default_factory=dict)


def make_plan(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    name: str = "",
    progress: Callable[[str], None] = lambda _: None,
    whole: nn.Module | None = None,
    swapping: bool = True,
    budget: Budget | None = None,
) -> Plan:
    """Uncapturable where the module has no graph; ValueError for selectors that do not fit.

    `name` is the module's within `whole`, the model that the selectors are for. `swapping`: where no step can run in a
    program, the module's layers are swapped instead. `budget` is the model's, where this is a part of one.
    """
    report, budget = Optimization(name), budget or Budget(settings.budget_seconds)
    progress("capture")
    network = capture(module, args, kwargs)
    inputs, captured = flat(args, kwargs), network.copy()
    canonicalize(network)
    sites = choose.call_sites(module, args, kwargs) if settings.resolved is None and swapping else {}
    resolved = choose.follow(network, module, settings.selectors, settings.resolved, whole, name, sites, report.notes)
    plain = network.copy()
    progress("rewrites")
    fusion.simplify(network)
    if swapping and settings.thorough and not parts(network):
        return _swapped(module, args, kwargs, settings, budget.deadline, captured, plain, resolved, report)
    expected = _exact(captured, inputs)
    error = _error(_exact(network, inputs), expected)
    if not error <= _bound(captured, inputs, error, expected):
        _inexact(report, f"the rewrites changed what the network computes, by {error:.2g}")
        return Plan(None, network.dynamic, network.out_spec, report, resolved)
    if settings.thorough:
        cost = COSTS["memory" if settings.objective == "memory" else "latency"]
        other = network.copy()
        checker = _checker(other, inputs)
        deadline = budget.deadline
        changed = search(other, cost, settings.alpha, deadline, checker, progress=progress, notes=report.notes)
        choose.measured(network, settings, deadline, progress, notes=report.notes)
        if changed:
            choose.measured(other, settings, deadline, progress)
            network = _cheaper(network, other, inputs, settings, report, cost)
    else:  # what the choices made before leave open: nothing is measured
        choose.measured(network, settings, -math.inf, progress)
    _fresh_outputs(network)
    progress("programs")

    def programs() -> tuple[list[tuple[Part, Region]], nn.Module, bool]:
        """Those of the algorithms as they are chosen now, what runs them, and whether its error is small enough."""
        regions = lowered(network, inputs, report, compare=settings.thorough)
        body = body_of(network, regions)
        error = report.error = _error(_outputs(body, captured, inputs), expected)
        worst = WORST_APPROXIMATION if choose.approximates(network) else WORST_ERROR
        return regions, body, error <= _bound(captured, inputs, error, expected, worst)

    regions, body, accurate = programs()
    for largest in STRICTER if settings.thorough else ():
        if accurate or not choose.measured(network, settings, deadline, progress, largest):
            continue
        report.notes.append(f"an error of {report.error:.2g}: chosen again, layers with at most {largest:.0e}")
        regions, body, accurate = programs()
    resolved = choose.learned(network, resolved)
    report.steps = _steps(network, regions)
    report.rewrites = network.log
    report.packed_bytes = sum(c.nbytes for _, region in regions for c in region.program.constants)
    report.memory_bytes = max((region.program.report().arena_bytes for _, region in regions), default=0)
    if not accurate:
        _inexact(report, f"rewritten its outputs had an error of {report.error:.2g}")
        return Plan(None, network.dynamic, network.out_spec, report, resolved)
    if settings.thorough:
        progress("comparison with the module as it was")
        if _slower(lambda: module(*args, **kwargs), lambda: body(*inputs), report, "rewritten"):
            return Plan(None, network.dynamic, network.out_spec, report, resolved)
    return Plan(body, network.dynamic, network.out_spec, report, resolved)


def _inexact(report: Optimization, reason: str) -> None:
    """Notes why a module stays as it was, and warns: nobody who asked for a faster one should find out by its speed."""
    report.unchanged = reason
    name = report.name or "the model"
    warnings.warn(
        f"ai3_ops.optimize: {name} stays as it was: {reason}; ai3_ops.explain names the algorithms that were chosen",
        stacklevel=5,
    )


def _slower(was: Callable[[], Any], made: Callable[[], Any], report: Optimization, how: str) -> bool:
    """Whether a module has to stay as it was, by turns of both: what was made of it takes longer, by either median."""
    gain, before, after = paired(was, made)
    report.before_ms, report.after_ms = before * 1e3, after * 1e3
    factor = max(1 / gain, after / before)
    if factor > 1:
        report.unchanged = f"{how} it took {factor:.2f} times as long"
        report.after_ms = report.before_ms
    return factor > 1


class Swapped(nn.Module):
    """A swapped module as the body of a plan, called with the leaves of its arguments; it takes any sizes and values."""

    def __init__(self, module: nn.Module, spec: Any) -> None:
        super().__init__()
        self.module, self._spec = module, spec

    def forward(self, *leaves: Any) -> Any:
        """The module's output."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self._spec)
        return self.module(*args, **kwargs)


def _swapped(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    deadline: float,
    captured: Network,
    plain: Network,
    resolved: dict[str, str],
    report: Optimization,
) -> Plan:
    """The plan of a network of which no step can run in a program, as of another type than float32: its layers are swapped."""
    inputs, spec = flat(args, kwargs), pytree.tree_structure((args, kwargs))
    if not _own_names(resolved, report.name):
        report.unchanged = "it makes no call that ai3_ops swaps"
        return Plan(None, plain.dynamic, plain.out_spec, report, resolved)
    report.notes.append("no step can run in a program (of float32, on the CPU): its layers are swapped one by one")
    folded = _without_norms(module, plain, report)
    expected = _exact(captured, inputs)
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        chosen = _selectors(folded, args, kwargs, settings, deadline, resolved, report.name)
        for source in (folded, module) if report.rewrites else (module,):
            body = Swapped(swap(source, chosen, allow_approximate=settings.allow_approximate), spec)
            outputs = pytree.tree_leaves(body(*_one_item(captured, inputs)))
            error = report.error = _error(outputs, expected)
            if accurate := error <= _bound(captured, inputs, error, expected):
                break
            report.rewrites = []
    if not accurate:
        _inexact(report, f"swapped its outputs had an error of {error:.2g}")
        return Plan(None, plain.dynamic, plain.out_spec, report, resolved)
    report.notes += [text for w in told if (text := str(w.message)).startswith("ai3_ops.tune: ")]
    report.steps = [Step([layer.name], layer.operation, layer.used, ()) for layer in explain(body.module).layers]
    if _slower(lambda: module(*args, **kwargs), lambda: body(*inputs), report, "swapped"):
        return Plan(None, plain.dynamic, plain.out_spec, report, resolved)
    return Plan(body, plain.dynamic, None, report, resolved)


def _selectors(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    deadline: float,
    resolved: dict[str, str],
    path: str,
) -> dict[str, str | None]:
    """What was chosen for the calls of the module at `path`, by their names in it; "auto" measured."""
    chosen: dict[str, str | None] = {own: resolved[name] for own, name in _own_names(resolved, path).items()}
    if choose.AUTO in chosen.values():
        asked = {name: getattr(settings, name) for name in _TUNED}
        asked["budget_seconds"] = max(deadline - time.monotonic(), 1.0)
        plan = tune_alone(module, Inputs(args, kwargs), TuneSettings(**asked), cache=True, progress=False)
        measured = {name: layer.algorithm for name, layer in plan.layers.items()}
        chosen = {name: measured.get(name, "default") if a == choose.AUTO else a for name, a in chosen.items()}
    reached = {layer.name for layer in explain(swap(module, "default")).layers}
    return {"*": "default"} | {n: None if a == "torch" else a for n, a in chosen.items() if n in reached}


def _own_names(resolved: dict[str, str], path: str) -> dict[str, str]:
    """The names of calls of the module at `path` and of those inside of it, by their names in it."""
    if not path:
        return {name: name for name in resolved}
    inside = [n for n in resolved if n == path or n.startswith((f"{path}.", f"{path}:"))]
    return {name.removeprefix(path).removeprefix("."): name for name in inside}


def _without_norms(module: nn.Module, plain: Network, report: Optimization) -> nn.Module:
    """A copy whose batch normalizations lie in the weights of the convolution before, where only they read its output."""
    calls = Counter(name for node in plain.graph.nodes for name in node.meta.get("layers", ()))
    folded = copy.deepcopy(module)
    for node in plain.calls(steps.affine):
        before = node.args[0]
        if before.target is not steps.conv2d or len(before.users) > 1:
            continue
        names = [*before.meta["layers"], *node.meta["layers"]]
        if len(names) != 2 or any(calls[name] != 1 for name in names):
            continue
        conv, norm = map(folded.get_submodule, names)
        if type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
            continue
        fused = fuse_conv_bn_eval(copy.deepcopy(conv).double(), copy.deepcopy(norm).double())
        folded.set_submodule(names[0], fused.to(conv.weight.dtype))
        folded.set_submodule(names[1], nn.Identity())
        report.rewrites.append(Rewrite("fold normalization", ", ".join(names)))
    return folded


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
                refused = True
                _leave(network, part, str(error), report)
    if not compare:
        return regions
    needed = {node for part, _ in regions for node in part.inputs}
    values = example_values(network, inputs, needed)
    kept = []
    for part, region in regions:
        given = [values[node] for node in part.inputs]
        key = (region.program.text, tuple(x.shape for x in given), torch.get_num_threads())
        if key not in _compared:
            _compared[key] = _gain(module_of(part.network(network), []), region, given)
        if _compared[key] >= 1:
            kept.append((part, region))
        else:
            slower = f"a program of them is not faster (it took {1 / _compared[key]:.3g} times as long)"
            report.notes.append(f"{_computed(part.nodes, part.layers)}: {slower}")
    return kept


def _gain(own: nn.Module, region: nn.Module, given: list[Tensor]) -> float:
    return paired(lambda: own(*given), lambda: region(*given), rounds=5)[0]


def _shown(layers: list[str]) -> str:
    named = [name or "(the module itself)" for name in layers[:3]]
    return ", ".join([*named, *(["…"] if len(layers) > 3 else [])]) or "some steps"


def _computed(nodes: Sequence[fx.Node], layers: list[str]) -> str:
    """For a note: what computes steps outside of programs."""
    asked = {node.kwargs.get("algorithm", "default") for node in nodes}
    return f"{'PyTorch computes' if asked <= {*steps.RULES} else 'operators compute'} {_shown(layers)}"


def _leave(network: Network, part: Part, reason: str, report: Optimization) -> None:
    """Leaves to PyTorch those steps of a part that alone cannot be built either, or all of them where there are none."""
    left = False
    for node in part.nodes:
        values = tuple(dict.fromkeys(a for a in node.all_input_nodes if a.op != "get_attr"))
        try:
            build(network, Part(part.kind, (node,), values, (node,)))
        except ValueError as error:
            node.meta["torch"] = left = True
            report.notes.append(f"{_computed([node], list(node.meta['layers']))}: {error}")
    if not left:
        for node in part.nodes:
            node.meta["torch"] = True
        report.notes.append(f"{_computed(part.nodes, part.layers)}: {reason}")


def body_of(network: Network, regions: list[tuple[Part, Region]]) -> nn.Module:
    """The module that computes the outputs' leaves; a region itself where it is everything."""
    outputs = network.output.args[0]
    if len(regions) == 1:
        part, region = regions[0]
        if part.inputs == tuple(network.inputs) and part.outputs == outputs and len(part.outputs) == 1:
            return region
    return module_of(network, regions)


def _fresh_outputs(network: Network) -> None:
    """Copies of inputs, constants and of what is returned twice: a caller may write into what a module returns."""
    outputs: list[fx.Node] = []
    given: Any = network.output.args[0]
    for node in given:
        if node not in outputs and not _lies_in_another(node):
            outputs.append(node)
            continue
        with network.graph.inserting_before(network.output):
            copied = network.graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta.update(node.meta)
        outputs.append(copied)
    network.output.args = (tuple(outputs),)


def _lies_in_another(node: fx.Node) -> bool:
    """Whether a value may share the memory of an input or a constant: it is one, or a view of one."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        views = schema is not None and any(result.alias_info is not None for result in schema.returns)
        if not views and node.target not in (steps.flatten, steps.slice_channels, *_MAYBE_VIEWS):
            return False
        node = node.all_input_nodes[0]
    return True


_MAYBE_VIEWS = (
    operator.getitem,
    torch.ops.aten.reshape.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.flatten.using_ints,
)


def _checker(network: Network, inputs: list[Any]) -> Checker | None:
    """On the first item of the batch."""
    return Checker(network, _one_item(network, inputs))


def _exact(network: Network, inputs: list[Any]) -> tuple[Any, ...]:
    """The outputs for the first item of the batch, in float64 where the graph can be computed so."""
    one = _one_item(network, inputs)
    try:
        return network.run(one, torch.float64)
    except RuntimeError:  # a graph that asks for a type of its own
        return network.run(one)


def _outputs(body: nn.Module, captured: Network, inputs: list[Any]) -> list[Any]:
    """What the programs compute for the first item of the batch."""
    with torch.no_grad():
        out = body(*_one_item(captured, inputs))
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _bound(captured: Network, inputs: list[Any], error: float, expected: Any, worst: float = WORST_ERROR) -> float:
    """How large the outputs' error may be."""
    return worst if error <= worst else max(worst, OWN_ERROR * _own_error(captured, inputs, expected))


def _own_error(captured: Network, inputs: list[Any], expected: Any) -> float:
    """Of the network as it was captured, computed by PyTorch in its own type."""
    return _error(captured.run(_one_item(captured, inputs)), expected)


def _one_item(network: Network, inputs: list[Any]) -> list[Any]:
    """The first item of the batch, where the batch may have any size."""
    return [x[:1] if network.dynamic and isinstance(x, Tensor) else x for x in inputs]


def _error(outputs: Any, expected: Any) -> float:
    """The largest of the outputs' errors."""
    return max((difference(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)


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
    computed = {n: a for part, region in regions for n, a in zip(part.nodes, region.algorithms, strict=True)}
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
        asked = a.get("algorithm", "")
        if node.target not in choose.MEASURED and not fusion.apart(node) and asked in steps.RULES:
            asked = ""  # no choice was made
        algorithm = computed.get(node, "torch" if not asked or asked in steps.RULES else asked)
        measured = "measured" if node.meta.get("choice") == choose.AUTO else "named"
        reason = "" if not asked or algorithm == "torch" else asked if asked in steps.RULES else measured
        layers, shape = list(node.meta["layers"]), node.meta["shape"] or ()
        found.append(Step(layers, a.get("name", name), algorithm, shape, ", ".join(detail), reason))
    return found


def unthorough(settings: Settings, resolved: dict[str, str]) -> Settings:
    """For further sizes: the choices made before, without search."""
    return replace(settings, resolved=resolved, selectors=None, thorough=False)
