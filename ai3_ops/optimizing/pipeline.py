"""From a module to the plan that computes it: capture, rewrite, choose, lower, and compare with the module as it was."""

from __future__ import annotations

import copy
import functools
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

from ai3_ops import _library
from ai3_ops._torch import pytree, users_level
from ai3_ops.explaining.explain import explain
from ai3_ops.explaining.report import Optimization, Step
from ai3_ops.graph import fusion, steps
from ai3_ops.graph.alike import Graphs
from ai3_ops.graph.calls import Calls
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.graph.lengths import leave_open
from ai3_ops.graph.network import Checker, Lengths, Network, Returned, Rewrite, difference, flat
from ai3_ops.graph.state import copied
from ai3_ops.measuring import gpu
from ai3_ops.optimizing import choose, on_cuda
from ai3_ops.optimizing.example import Example
from ai3_ops.optimizing.search import search
from ai3_ops.programs.body import Body
from ai3_ops.programs.lower import (
    DTYPES,
    Memory,
    Part,
    Region,
    build,
    example_values,
    module_of,
    outside,
    parts,
    refused,
    root_of,
)
from ai3_ops.programs.sized import by_sizes
from ai3_ops.programs.timing import COSTS, paired
from ai3_ops.registry import near
from ai3_ops.selecting.selectors import listed
from ai3_ops.surveying.examples import Inputs
from ai3_ops.swapping.swap import swap
from ai3_ops.tuning.settings import Settings as TuneSettings
from ai3_ops.tuning.settings import check_flags, check_limits
from ai3_ops.tuning.tune import tune_alone

DEFAULT_SECONDS = 60.0  # where the user gives no budget
SEARCH = 0.2  # of what is left for it and for measuring: the search of substitutions
PATIENCE = 3.0  # seconds after which no further part of a model is captured, beyond 1.2 times the budget
COMPARE_SECONDS = 0.5  # that two networks take turns at most, after the second turn
WORST_ERROR = 1e-4  # of the outputs against float64: beyond, nothing is changed
WORST_IN_FLOAT64 = 1e-9  # where nothing is in fewer bits
# Of what a rewrite puts in the place of something, where folded weights are rounded to so few bits.
REWRITE_ERRORS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WORST_APPROXIMATION = 5e-2  # with algorithms that approximate, which run only where the user allowed or named them
VERIFY = ("quick", "full", "off")
STRICTER = (4e-6, 1e-6)  # errors of single layers with which algorithms are chosen again where that is too much
OWN_ERROR = (
    4  # unless PyTorch's own error is so large that this many times as much is more: 16 bits, ill-conditioned networks
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
    verify: str = "quick"  # how much is computed to compare with: one of VERIFY
    portable: bool = False  # whether programs hold their weights beside the packs
    cuda_graphs: bool = True  # whether calls on a GPU are captured and replayed
    resolved: dict[str, str] | None = None  # by call, what the selectors chose for the first example
    thorough: bool = True  # search and compare; without, what was learned before is taken over

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (int, float)) or not self.alpha >= 1 or math.isinf(self.alpha):
            raise ValueError(f"ai3_ops.optimize: alpha needs a number of at least 1, got {self.alpha!r}")
        if self.verify not in VERIFY:
            words = ", ".join(map(repr, VERIFY))
            raise ValueError(
                f"ai3_ops.optimize: verify needs one of {words}, got {self.verify!r}{near(str(self.verify), VERIFY)}"
            )
        check_limits("optimize", self)
        check_flags("optimize", portable=self.portable, cuda_graphs=self.cuda_graphs)


class Budget:
    """The seconds for everything, of all parts of a model together; they begin when it is made."""

    def __init__(self, seconds: float | None) -> None:
        self._start, self._seconds = time.monotonic(), DEFAULT_SECONDS if seconds is None else seconds
        self.begin()

    @property
    def deadline(self) -> float:
        """When they end, by time.monotonic()."""
        return self._start + self._seconds

    @property
    def over(self) -> bool:
        """Whether nothing further is begun, of which the end would be too late."""
        return time.monotonic() > self._start + 1.2 * self._seconds + PATIENCE

    def reserve(self) -> None:
        """Keeps, for programs and comparisons, as long as capture and rewrites took: on a busy machine both take longer."""
        self._end -= time.monotonic() - self._begun

    def begin(self) -> None:
        """Of a part's capture."""
        self._begun, self._end = time.monotonic(), self.deadline

    def until(self, share: float = 1.0) -> float:
        """When a share ends of what is left for search and measuring."""
        now = time.monotonic()
        return now + share * (self._end - now)


@dataclass
class Plan:
    """What computes a module for inputs of certain sizes."""

    body: nn.Module | None  # from the leaves of the arguments to the output's; None: the module stays as it was
    dynamic: bool  # for any batch size
    returned: Returned | None  # of what the body computes; None: the body returns the output itself
    report: Optimization
    resolved: dict[str, str] = field(default_factory=dict)
    lengths: Lengths | None = None  # that its graph leaves open
    seconds: float = 0.0  # that it took without search and measuring: about what one for other sizes takes
    example: Example | None = None  # what it was made of, and compared at


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
    first: Calls | None = None,
    graphs: Graphs | None = None,
) -> Plan:
    """Uncapturable where the module has no graph; ValueError for selectors that do not fit.

    `name` is the module's within `whole`, the model that the selectors are for. `swapping`: where no step can run in a
    program, the module's layers are swapped instead. `budget` is the model's, where this is a part of one. `first` is the
    module's first call, with these inputs, where it was made. `graphs`: of other parts of the model, where there are any.
    """
    report, budget, begun = Optimization(name), budget or Budget(settings.budget_seconds), time.monotonic()
    progress("capture")
    budget.begin()
    network = capture(module, args, kwargs, functional=not swapping, first=first, graphs=graphs)
    inputs, captured = flat(args, kwargs), network.copy()
    canonicalize(network)
    of_gpu = swapping and on_cuda.is_on_cuda(inputs)  # of what Inductor asks about, a GPU has no programs
    for node in network.graph.nodes if of_gpu else ():
        node.meta["device"] = "cuda"
    sites = choose.call_sites(module, args, kwargs) if settings.resolved is None and swapping else {}
    resolved = choose.follow(network, module, settings.selectors, settings.resolved, whole, name, sites, report.notes)
    plain = network.copy()
    progress("rewrites")
    fusion.simplify(network)
    budget.reserve()
    if of_gpu:
        seconds = time.monotonic() - begun
        return _on_cuda(module, args, kwargs, settings, budget.until(), captured, network, resolved, report, seconds)
    if swapping and settings.thorough and not parts(network):
        return _swapped(module, args, kwargs, settings, budget.until(), captured, plain, resolved, report)
    seconds = time.monotonic() - begun
    reference = Reference(captured, inputs, settings.verify)
    if settings.verify == "off":
        report.notes.append('verify="off": what was rewritten was not compared with float64')
    if settings.verify == "full" and not reference.holds(error := reference.error(network.run)):
        _inexact(report, f"the rewrites changed what the network computes, by {error:.2g}")
        return Plan(None, network.dynamic, network.returned, report, resolved, seconds=seconds)
    if settings.thorough:
        measuring = choose.AUTO in resolved.values()
        cost = COSTS["memory" if settings.objective == "memory" else "latency" if measuring else "work"]
        other = network.copy()
        checker = _checker(other, inputs) if settings.verify == "full" else None
        until = budget.until(SEARCH)
        changed = search(other, cost, settings.alpha, until, checker, progress=progress, notes=report.notes)
        deadline = budget.until()
        choose.measured(network, settings, deadline, progress, notes=report.notes)
        if changed:
            choose.measured(other, settings, deadline, progress)
            measured = measuring and settings.objective != "memory"
            network = _cheaper(network, other, inputs, report) if measured else other
    else:  # what the choices made before leave open: nothing is measured
        choose.measured(network, settings, -math.inf, progress)
    _fresh_outputs(network)
    leave_open(network, inputs)
    progress("programs")
    _library.release_workspace()  # what rewrites and measurements freed: packs need other sizes
    begun = time.monotonic() - seconds

    def programs() -> tuple[list[tuple[Part, Region]], nn.Module, bool]:
        """Those of the algorithms as they are chosen now, what runs them, and whether its error is small enough."""
        regions = lowered(network, inputs, report, compare=settings.thorough, keep=settings.portable)
        body = body_of(network, regions)
        error = report.error = reference.error(lambda given: flat_outputs(body(*given)))
        worst = WORST_APPROXIMATION if choose.approximates(network) else reference.worst
        return regions, body, reference.holds(error, worst)

    regions, body, accurate = programs()
    for largest in STRICTER if settings.thorough else ():
        if accurate or not choose.measured(network, settings, deadline, progress, largest):
            continue
        report.notes.append(f"an error of {report.error:.2g}: chosen again, layers with at most {largest:.0e}")
        regions, body, accurate = programs()
    _library.release_workspace()
    seconds = time.monotonic() - begun
    resolved = choose.learned(network, resolved)
    sized = {node.name for node in by_sizes(body.graph)} if isinstance(body, Body) else set[str]()
    report.steps = _steps(network, regions, sized)
    report.outside = outside(network, regions, sized)
    report.rewrites = network.log
    report.packed_bytes, report.memory_bytes, report.workspace_bytes = taken = Memory.of([r for _, r in regions])
    if settings.thorough and measuring and settings.memory_limit is not None and taken.total > settings.memory_limit:
        over = f"packed weights and arena take {taken.total} bytes, more than memory_limit: no choice that takes less was found"
        report.notes.append(over)
        warnings.warn(f"ai3_ops.optimize: {over}", stacklevel=users_level())
    if not accurate:
        _inexact(report, f"rewritten its outputs had an error of {report.error:.2g}")
        return Plan(None, network.dynamic, network.returned, report, resolved, seconds=seconds)
    if settings.thorough:
        progress("comparison with the module as it was")
        if _slower(lambda: module(*args, **kwargs), lambda: body(*inputs), report, "rewritten"):
            return Plan(None, network.dynamic, network.returned, report, resolved, seconds=seconds)
    return Plan(body, network.dynamic, network.returned, report, resolved, captured.lengths, seconds)


def _inexact(report: Optimization, reason: str) -> None:
    """Notes why a module stays as it was, and warns: nobody who asked for a faster one should find out by its speed."""
    report.unchanged, report.warned = reason, True
    name = report.name or "the model"
    warnings.warn(
        f"ai3_ops.optimize: {name} stays as it was: {reason}; ai3_ops.explain names the algorithms that were chosen",
        stacklevel=users_level(),
    )


def _slower(was: Callable[[], Any], made: Callable[[], Any], report: Optimization, how: str) -> bool:
    """Whether a module has to stay as it was, by turns of both: what was made of it takes longer, by either median."""
    gain, before, after = paired(was, made, seconds=COMPARE_SECONDS)
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

    def leaves(self, given: list[Any]) -> list[Any]:
        """Those of its output."""
        return pytree.tree_leaves(self(*given))


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
    """The plan of a network of which no step can run in a program: its layers are swapped."""
    inputs, spec = flat(args, kwargs), pytree.tree_structure((args, kwargs))
    pairs = _normalized_layers(module, plain)
    if not _own_names(resolved, report.name) and not pairs:
        others = sorted({type(m).__name__ for m in module.modules() if m._parameters})
        report.unchanged = f"it makes no call that ai3_ops swaps; PyTorch computes {listed(others) or 'all of it'}"
        return Plan(None, plain.dynamic, plain.returned, report, resolved)
    folded = _without_norms(module, pairs, report) if pairs else module
    report.notes.append(f"{_no_program(plain)}: its layers are swapped one by one")
    reference = Reference(captured, inputs, settings.verify)
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        chosen = _selectors(folded, args, kwargs, settings, deadline, resolved, report.name)
        for source in (folded, module) if report.rewrites else (module,):
            body = Swapped(swap(source, chosen, allow_approximate=settings.allow_approximate), spec)
            error = report.error = reference.error(body.leaves)
            if accurate := reference.holds(error):
                break
            report.rewrites = []
    if not accurate:
        _inexact(report, f"swapped its outputs had an error of {error:.2g}")
        return Plan(None, plain.dynamic, plain.returned, report, resolved)
    report.notes += [text for w in told if (text := str(w.message)).startswith("ai3_ops.tune: ")]
    was = functools.partial(module, *args, **kwargs)
    report.steps = [Step([layer.name], layer.operation, layer.used, ()) for layer in explain(body.module).layers]
    if _slower(was, lambda: body(*inputs), report, "swapped"):
        alone = Swapped(folded, spec)  # perhaps what is folded is all that gains
        if not report.rewrites or _slower(was, lambda: alone(*inputs), report, "with normalizations folded"):
            return Plan(None, plain.dynamic, plain.returned, report, resolved)
        report.unchanged, report.steps, body = "", [], alone
        report.notes.append("its layers are not faster swapped: only normalizations are folded")
    return Plan(body, plain.dynamic, None, report, resolved)


def _on_cuda(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    deadline: float,
    captured: Network,
    network: Network,
    resolved: dict[str, str],
    report: Optimization,
    seconds: float,
) -> Plan:
    """The plan of a network on a GPU."""
    inputs = flat(args, kwargs)
    reference = Reference(captured, inputs, settings.verify)

    def accurate(run: Callable[[list[Any]], Any]) -> bool:
        error = report.error = reference.error(lambda given: flat_outputs(run(given)))
        return reference.holds(error)

    _fresh_outputs(network)
    device = next(x.device for x in inputs if on_cuda.is_on_cuda([x]))
    with torch.cuda.device(device):
        found = on_cuda.made(network, inputs, settings, deadline, accurate, report)
    report.rewrites = network.log
    if found is None:
        _inexact(report, f"rewritten its outputs had an error of {report.error:.2g}")
        return Plan(None, network.dynamic, network.returned, report, resolved, seconds=seconds)
    body, report.steps = found
    resolved = on_cuda.learned(report.steps, resolved)
    if settings.thorough:
        with torch.cuda.device(device):
            both = [functools.partial(module, *args, **kwargs), functools.partial(body, *inputs)]
            before, after = gpu.in_turns(both, gpu.wall_seconds)
        report.before_ms, report.after_ms = before * 1e3, after * 1e3
        if after > before:
            report.unchanged = f"rewritten it took {after / before:.2f} times as long"
            report.after_ms = report.before_ms
            return Plan(None, network.dynamic, network.returned, report, resolved, seconds=seconds)
    return Plan(body, network.dynamic, network.returned, report, resolved, seconds=seconds)


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


def _no_program(network: Network) -> str:
    """Why no step of a network can run in a program."""
    found = list(network.calls(steps.conv2d, steps.linear))
    types = sorted(str(d).removeprefix("torch.") for d in {node.meta["dtype"] for node in found} - {*DTYPES})
    if types:
        return f"programs compute in floating point, and its convolutions and linear layers are {listed(types)}"
    if found:
        return "its convolutions and linear layers are left to PyTorch, or depend on no input's batch"
    return "programs compute convolutions of one and two dimensions, linear layers and what is around them, and it has none"


_NORMED: dict[type, type] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def _normalized_layers(module: nn.Module, plain: Network) -> list[tuple[str, str]]:
    """The names of convolutions and of the batch normalizations after them that can lie in their weights.

    Only these read what the convolutions return, and both are called once.
    """
    calls = Counter(
        name for node in plain.graph.nodes if node.target not in _NORMS for name in node.meta.get("layers", ())
    )
    found = []
    for node in plain.graph.nodes:
        before = _normalized(node)
        names = [] if before is None else [*before.meta["layers"], *node.meta["layers"]]
        if len(names) != 2 or any(calls[name] != 1 for name in names):
            continue
        conv: Any = module.get_submodule(names[0])
        norm: Any = module.get_submodule(names[1])
        kinds = type(conv), type(norm)
        if kinds in _NORMED.items() and not (conv._forward_pre_hooks or norm.training or norm.running_mean is None):
            found.append((names[0], names[1]))
    return found


def _without_norms(module: nn.Module, pairs: list[tuple[str, str]], report: Optimization) -> nn.Module:
    """A copy whose normalizations, second of each pair of names, lie in the weights of the convolutions, first of it."""
    folded = copied(module)
    for first, second in pairs:
        conv: Any = folded.get_submodule(first)
        norm: Any = folded.get_submodule(second)
        fused: Any = fuse_conv_bn_eval(copy.deepcopy(conv).double(), copy.deepcopy(norm).double())
        folded.set_submodule(first, fused.to(conv.weight.dtype))
        folded.set_submodule(second, nn.Identity())
        report.rewrites.append(Rewrite("fold normalization", f"{first}, {second}"))
    return folded


_NORMS = (torch.ops.aten._native_batch_norm_legit_no_training.default,)  # whose first result is a node of its own


def _normalized(node: fx.Node) -> fx.Node | None:
    """What a batch normalization reads, if nothing else does; None for other steps."""
    if node.target is operator.getitem and node.all_input_nodes[0].target in _NORMS:
        node = node.all_input_nodes[0]
    elif node.target not in (steps.affine, torch.ops.aten.batch_norm.default):
        return None
    read = node.all_input_nodes[0]
    return read if len(read.users) == 1 else None


def lowered(
    network: Network, inputs: list[Any], report: Optimization, compare: bool = True, keep: bool = False
) -> list[tuple[Part, Region]]:
    """The programs, without those that are slower than PyTorch with the same steps and those that cannot be built.

    With `keep` they hold their weights.
    """
    regions: list[tuple[Part, Region]] = []
    refused = True
    while refused:  # a step that the engine refuses parts a region in two
        refused, regions = False, []
        for part in parts(network):
            try:
                regions.append((part, build(network, part, keep)))
            except ValueError as error:
                refused = True
                _leave(network, part, str(error), report)
    if not compare or (
        len(regions) == 1 and _is_everything(network, regions[0][0])
    ):  # which is compared with the module
        return regions
    needed = {node for part, _ in regions for node in part.inputs}
    values = example_values(network, inputs, needed)
    kept = []
    for part, region in regions:
        given = [values[node] for node in part.inputs]
        key = (region.program.text, tuple(x.shape for x in given), torch.get_num_threads())
        if key not in _compared:
            _compared[key] = _gain(module_of(part.network(network), [], returned=False), region, given)
        if _compared[key] >= 1:
            kept.append((part, region))
        else:
            slower = f"a program of them is not faster (it took {1 / _compared[key]:.3g} times as long)"
            report.notes.append(f"{_computed(part.nodes, part.layers)}: {slower}")
    return kept


def _gain(own: nn.Module, region: nn.Module, given: list[Tensor]) -> float:
    return paired(lambda: own(*given), lambda: region(*given), rounds=5, seconds=COMPARE_SECONDS)[0]


def _shown(layers: list[str]) -> str:
    named = [name or "(the module itself)" for name in layers[:3]]
    return ", ".join([*named, *(["…"] if len(layers) > 3 else [])]) or "some steps"


def _computed(nodes: Sequence[fx.Node], layers: list[str]) -> str:
    """For a note: what computes steps outside of programs."""
    asked = {node.kwargs.get("algorithm", "default") for node in nodes}
    return f"{'PyTorch computes' if asked <= {*steps.RULES} else 'operators compute'} {_shown(layers)}"


def _leave(network: Network, part: Part, reason: str, report: Optimization) -> None:
    """Leaves to PyTorch those steps of a part that alone cannot be built either, or all of them where there are none."""
    found = refused(network, part)
    for node, why in found.items():
        node.meta["torch"] = True
        report.notes.append(f"{_computed([node], list(node.meta['layers']))}: {why}")
    if not found:
        for node in part.nodes:
            node.meta["torch"] = True
        report.notes.append(f"{_computed(part.nodes, part.layers)}: {reason}")


def body_of(network: Network, regions: list[tuple[Part, Region]]) -> nn.Module:
    """The module that computes the outputs' leaves; a region itself where it is everything."""
    if len(regions) == 1 and _is_everything(network, regions[0][0]):
        return regions[0][1]
    return module_of(network, regions)


def _is_everything(network: Network, part: Part) -> bool:
    """Whether a part takes the network's inputs and gives its one output."""
    outputs = network.output.args[0]
    return part.inputs == tuple(network.inputs) and part.outputs == outputs and len(part.outputs) == 1


def _fresh_outputs(network: Network) -> None:
    """Copies of inputs, constants and of what is returned twice: a caller may write into what a module returns.

    Other outputs that lie in one another: `ai3_ops.programs.lower.module_of`. A view that the module makes contiguous is so.
    """
    outputs: list[fx.Node] = []
    given: Any = network.output.args[0]
    for place, node in enumerate(given):
        root = None if node.meta["shape"] is None else root_of(node)
        if root is not None and (node in outputs or root.op != "call_function"):
            node = _copied(network, node, torch.ops.aten.clone.default)
        if root is not None and root is not node and place in network.dense and len(node.meta["shape"]) != 4:
            node = _copied(network, node, torch.ops.aten.contiguous.default)  # images all are, once programs are made
        outputs.append(node)
    network.output.args = (tuple(outputs),)


def _copied(network: Network, node: fx.Node, operator: Any) -> fx.Node:
    with network.graph.inserting_before(network.output):
        copied = network.graph.call_function(operator, (node,))
    copied.meta.update(node.meta)
    return copied


def _checker(network: Network, inputs: list[Any]) -> Checker | None:
    """On the first item of the batch."""
    return Checker(network, _one_item(network, inputs), max(REWRITE_ERRORS[d] for d in _types(network)))


class Reference:
    """The outputs that a network has to have, in float64 of the network as it was captured; computed once, when first needed.

    Of the first item of the example's batch; "full": of the whole example, and of random inputs.
    """

    def __init__(self, captured: Network, inputs: list[Any], verify: str) -> None:
        self._captured = captured
        self._given = [_one_item(captured, inputs)]
        if verify == "full":
            self._given = [inputs, [_random(x) for x in inputs]]
        elif verify == "off":
            self._given = []
        self._expected: list[tuple[Any, ...]] = []
        self.worst = WORST_IN_FLOAT64 if _types(captured) == {torch.float64} else WORST_ERROR

    def error(self, run: Callable[[list[Any]], Any]) -> float | None:
        """The largest error of the outputs of `run(inputs)`; None where nothing is compared."""
        if not self._expected:
            self._expected = [_exact(self._captured, given) for given in self._given]
        with torch.no_grad():
            errors = [_error(run(given), exact) for given, exact in zip(self._given, self._expected, strict=True)]
        return max(errors, default=None)

    def holds(self, error: float | None, worst: float | None = None) -> bool:
        """Whether an error is allowed: by `worst`, or because the captured network's own, in its own type, is large."""
        worst = self.worst if worst is None else worst
        if error is None or error <= worst:
            return True
        own = [_error(self._captured.run(x), exact) for x, exact in zip(self._given, self._expected, strict=True)]
        return error <= max(worst, OWN_ERROR * max(own))


def _types(network: Network) -> set[torch.dtype]:
    """In which the network computes; float32 where nothing is floating point."""
    found = {node.meta.get("dtype") for node in network.graph.nodes}
    return {dtype for dtype in found if dtype in REWRITE_ERRORS} or {torch.float32}


def _random(x: Any) -> Any:
    """Another input of the same sizes: normal numbers of the same mean and deviation."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() < 2:
        return x
    generator = torch.Generator().manual_seed(0)
    return x.mean() + x.std() * torch.randn(x.shape, generator=generator).to(x)


def flat_outputs(output: Any) -> list[Any]:
    """Of a body."""
    return list(output) if isinstance(output, (list, tuple)) else [output]


def _exact(network: Network, inputs: list[Any]) -> tuple[Any, ...]:
    """The outputs in float64 where the graph can be computed so."""
    try:
        return network.run(inputs, torch.float64)
    except RuntimeError:  # a graph that asks for a type of its own
        return network.run(inputs)


def _one_item(network: Network, inputs: list[Any]) -> list[Any]:
    """The first item of the batch, where the batch may have any size."""
    return [x[:1] if network.dynamic and isinstance(x, Tensor) else x for x in inputs]


def _error(outputs: Any, expected: Any) -> float:
    """The largest of the outputs' errors; what are no tensors was compared when the graph was captured."""
    tensors = ([x for x in given if isinstance(x, Tensor)] for given in (outputs, expected))
    return max((difference(a, b) for a, b in zip(*tensors, strict=True)), default=0.0)


def _cheaper(network: Network, other: Network, inputs: list[Any], report: Optimization) -> Network:
    """The network with substitutions, if it is faster as a whole, too."""
    scratch = Optimization("")
    bodies = [body_of(n, lowered(n, inputs, scratch, compare=False)) for n in (network, other)]
    gain, *_ = paired(lambda: bodies[0](*inputs), lambda: bodies[1](*inputs), rounds=15, seconds=COMPARE_SECONDS)
    if gain > 1.01:
        report.notes.append(f"substitutions made it {gain:.2f} times as fast")
        return other
    report.notes.append(f"substitutions that promised a gain were taken back: the whole ran {gain:.2f} times as fast")
    return network


def _steps(network: Network, regions: list[tuple[Part, Region]], sized: set[str]) -> list[Step]:
    """For `explain`; `sized`: the names of nodes that are computed once for each set of sizes."""
    computed = {n: a for part, region in regions for n, a in zip(part.nodes, region.algorithms, strict=True)}
    found = []
    for node in network.graph.nodes:
        if node.op != "call_function":
            continue
        name = choose.operation_of(node) or str(getattr(node.target, "__name__", node.target))
        a = fusion.arguments(node) if node.target in steps.STEPS else {}
        fused = [k for k in ("residual", "scale", "input_relu") if a.get(k)] if node.target in choose.MEASURED else []
        words = {"scale": "normalization of the input", "input_relu": "ReLU of the input"}
        detail = [a["activation"]] if a.get("activation", "none") != "none" else []
        detail = [*(words.get(k, k) for k in fused), *detail]
        asked = a.get("algorithm", "")
        if node.target not in choose.MEASURED and not fusion.apart(node) and asked in steps.RULES:
            asked = ""  # no choice was made
        algorithm = computed.get(node, "torch" if not asked or asked in steps.RULES else asked)
        algorithm = choose.name_of(name, algorithm)
        measured = node.meta.get("source", "named")
        reason = "" if not asked or algorithm == "torch" else asked if asked in steps.RULES else measured
        reason = "once a size" if node.name in sized else reason
        layers, shape = list(node.meta["layers"]), node.meta["shape"] or ()
        found.append(Step(layers, a.get("name", name), algorithm, shape, ", ".join(detail), reason))
    return found


def unthorough(settings: Settings, resolved: dict[str, str]) -> Settings:
    """For further sizes: the choices made before, without search."""
    return replace(settings, resolved=resolved, selectors=None, thorough=False)
