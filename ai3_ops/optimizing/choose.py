"""Which algorithm computes each convolution and linear layer of a captured network: what selectors say, or what is fastest."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ai3_ops import _machine, registry
from ai3_ops.calls.call import Call
from ai3_ops.calls.known import SWITCHES
from ai3_ops.calls.spec import Spec
from ai3_ops.graph import steps
from ai3_ops.graph.fusion import arguments
from ai3_ops.graph.network import Network, Node
from ai3_ops.measuring import shipped, timing
from ai3_ops.measuring.timing import Layer, Measured
from ai3_ops.nn.classes import leaf_class
from ai3_ops.nn.kinds import original_class
from ai3_ops.operations.step import Step
from ai3_ops.problem import Problem
from ai3_ops.programs.lower import memory
from ai3_ops.selecting import selectors
from ai3_ops.selecting.choice import Algorithm
from ai3_ops.selecting.plan import CHANNELS_LAST, Plan, PlannedLayer
from ai3_ops.selecting.selectors import Place
from ai3_ops.surveying.examples import Inputs
from ai3_ops.surveying.watching import survey
from ai3_ops.tuning.choosing import (
    Timed,
    ineligible,
    least_error,
    select,
    to_measure,
    unmeasured,
    warn_of_errors,
    within,
)
from ai3_ops.tuning.meter import Meter
from ai3_ops.tuning.settings import Interrupted
from ai3_ops.tuning.settings import Settings as TuneSettings

AUTO = "auto"
MEASURED = (steps.conv2d, steps.linear)  # other steps keep what programs do, or the algorithm that selectors name
_NO_SITES: dict[tuple[str, str], list[str]] = {}
_OPERATIONS: dict[Any, str] = {
    steps.conv2d: "conv2d",
    steps.linear: "linear",
    steps.max_pool2d: "max_pool2d",
    steps.avg_pool2d: "avg_pool2d",
    steps.adaptive_avg_pool2d: "adaptive_avg_pool2d",
    steps.flatten: "flatten",
    **{function: step.operation for function, step in Step.by_function.items()},
}


# conv1d's name of an algorithm that conv2d has by another: of its Winograds the one that takes kernels of one row.
_OF_SEQUENCES = {"winograd_general": "winograd"}


def name_of(operation: str | None, algorithm: str) -> str:
    """An algorithm of a program as selectors name it."""
    return _OF_SEQUENCES.get(algorithm, algorithm) if operation == "conv1d" else algorithm


def operation_of(node: fx.Node) -> str | None:
    """The operation that a step is a call of, for selectors."""
    if node.target is steps.unary and node.args[1] == "relu":
        return "relu"
    if node.kwargs.get("sequence"):
        return "conv1d" if node.target is steps.conv2d else None
    return _OPERATIONS.get(node.target)


# By a module's name and an operation: what follows its name for each functional call that it makes, in order.
CallSites = Mapping[tuple[str, str], list[str]]


def call_sites(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSites:
    """The functional calls that a module makes on the example, by the names that `swap` and `tune` give them."""
    calls: list[Call | None] = []
    try:
        described = survey(part, Inputs(args, kwargs), lambda call, *_: calls.append(call))
    except RuntimeError:  # it does not run when it is watched
        return {}
    known = {d.call: d for d in described if d.suffix}
    found: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        if call in known:
            for name in known[call].modules:
                found.setdefault((name, known[call].operation), []).append(known[call].suffix)
    return found


def _suffixes(
    network: Network, inside: Mapping[str, nn.Module], sites: CallSites
) -> Iterator[tuple[fx.Node, nn.Module, str, str]]:
    """The steps that selectors can choose for: their module, operation, and what follows its name.

    As many steps of a module and operation as it makes calls are these calls, in order. Else, as where no call sites are known
    or a call changes nothing, they are numbered, anew in every call of the module.
    """
    steps_of: dict[tuple[str, str], list[fx.Node]] = {}
    for node in network.graph.nodes:
        operation = operation_of(node)
        if operation is not None and node.meta["layers"] and node.meta["layers"][0] in inside:
            steps_of.setdefault((node.meta["layers"][0], operation), []).append(node)
    for (name, operation), nodes in steps_of.items():
        module = inside[name]
        leaf = leaf_class(original_class(module))
        made = sites.get((name, operation), [])
        counts: Counter[str] = Counter()
        for i, node in enumerate(nodes):
            if leaf is not None and leaf._ai3_operation == operation:
                suffix = ""
            elif len(made) == len(nodes):
                suffix = made[i]
            else:
                call = node.meta.get("call", "")
                suffix = f":{operation}_{counts[call]}"
                counts[call] += 1
            yield node, module, operation, suffix


def places_of(
    network: Network, part: nn.Module, modules: Mapping[str, nn.Module], path: str = "", sites: CallSites = _NO_SITES
) -> list[tuple[Place, list[fx.Node]]]:
    """What selectors can choose for, named as `swap` names it, in call order, each with the steps that call it.

    Last, without steps, come layers and calls that are not made, that no step stands for (layer_norm), or that the capture found
    to change nothing. `path` is the qualified name of `part`, whose graph this is, within the model, whose modules are given by
    name.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(module, []).append(name)
    inside = dict(part.named_modules(remove_duplicate=False))
    found: dict[tuple[nn.Module, str, str], tuple[Place, list[fx.Node]]] = {}
    order = {node: i for i, node in enumerate(network.graph.nodes)}
    for node, module, operation, suffix in sorted(_suffixes(network, inside, sites), key=lambda found: order[found[0]]):
        shape = tuple(node.all_input_nodes[0].meta["shape"])
        shape = (*shape[:2], *shape[3:]) if operation == "conv1d" else shape
        place = Place(operation, module, names.get(module, [path]), suffix, shape, watched=True)
        found.setdefault((module, operation, suffix), (place, []))[1].append(node)
    for (name, operation), made in sites.items():
        for suffix in made:
            module = inside[name]
            if (module, operation, suffix) not in found:
                place = Place(operation, module, names.get(module, [path]), suffix, watched=True)
                found[module, operation, suffix] = place, []
    for module, named in names.items():
        leaf = leaf_class(original_class(module))
        if leaf is not None and (module, leaf._ai3_operation, "") not in found:
            found[module, leaf._ai3_operation, ""] = Place(leaf._ai3_operation, module, named, watched=True), []
    return list(found.values())


def follow(
    network: Network,
    part: nn.Module,
    selector: Any,
    resolved: dict[str, str] | None,
    whole: nn.Module | None = None,
    path: str = "",
    sites: CallSites = _NO_SITES,
    notes: list[str] | None = None,
) -> dict[str, str]:
    """Writes into each step the algorithm that the selectors choose, "auto" where it is to be measured.

    `resolved` is what an earlier call returned for the same model: the choices by the calls' names. `whole` is the model that
    the selectors are for, where the network is that of a part of it. `sites` are the part's functional calls; `notes` is told
    which choices nothing can follow.
    ValueError for selectors that make no sense, and for a layer named singly that its algorithm cannot do.
    """
    modules = dict((whole or part).named_modules(prefix="" if whole else path, remove_duplicate=False))
    places = places_of(network, part, modules, path, sites)
    if resolved is not None:
        chosen = resolved
    elif isinstance(selector, str) and selector == AUTO:
        chosen = {place.names[0]: AUTO for place, _ in places}
    else:
        selector = _within(selector, modules, path)
        every = [place for place, _ in places]
        if isinstance(selector, Plan):
            answers = selectors.assign(selector, every, modules, {})
        else:
            answers = selectors.assigned(selector, every, modules, {})
        refused: dict[str, list[str]] = {}  # by the reason
        chosen = {
            place.names[0]: _first(nodes, place, answers[i], refused) if i in answers and nodes else "default"
            for i, (place, nodes) in enumerate(places)
        }
        if refused:
            count = sum(map(len, refused.values()))
            warnings.warn(
                f"ai3_ops.optimize: {count} of {len(places)} layers keep PyTorch's implementation: the algorithm cannot do "
                "them; ai3_ops.explain gives each reason",
                stacklevel=2,
            )
        if notes is not None:
            notes += [f"PyTorch computes {selectors.listed(names)}: {reason}" for reason, names in refused.items()]
        unheard = [p.names[0] for i, (p, nodes) in enumerate(places) if not nodes and _names_own(answers.get(i))]
        if unheard and notes is not None:
            notes.append(
                f"no step of the network is {selectors.listed(unheard)}: what was chosen there changes nothing"
            )
    for place, nodes in places:
        for node in nodes:
            algorithm = chosen.get(place.names[0], "default")
            if resolved is not None and algorithm not in steps.RULES and refusal(node, Algorithm.of(algorithm)):
                algorithm = AUTO  # chosen for other sizes
            _write(node, algorithm)
            own, *others = node.meta["layers"]
            node.meta["layers"] = (own + place.suffix, *others)  # as selectors name it
    return chosen


def _within(selector: Any, modules: Mapping[str, nn.Module], path: str) -> Any:
    """Selectors of a model of which only parts are captured, without what names calls outside of the part at `path`."""
    if not path:
        return selector

    def outside(name: str) -> bool:
        owner = name.partition(":")[0]
        return owner in modules and owner != path and not owner.startswith(f"{path}.")

    if isinstance(selector, Plan):
        return replace(selector, layers={n: layer for n, layer in selector.layers.items() if not outside(n)})
    if isinstance(selector, Mapping):
        return {k: v for k, v in selector.items() if k.startswith("re:") or ":" not in k or not outside(k)}
    if isinstance(selector, (list, tuple)):
        raise ValueError(
            f"ai3_ops.optimize: a list counts the whole model's calls, of which only parts such as {path!r} can be captured: "
            "name layers in a dict"
        )
    return selector


def _names_own(choice: selectors.Choice | None) -> bool:
    """Whether a choice is an algorithm for one call by its name."""
    return choice is not None and choice.single and choice.requested not in (None, "torch", AUTO)


def _write(node: fx.Node, algorithm: str) -> None:
    if node.target in MEASURED or algorithm not in ("default", AUTO):
        node.kwargs = {**node.kwargs, "algorithm": algorithm}


def _first(nodes: list[fx.Node], place: Place, choice: selectors.Choice, refused: dict[str, list[str]]) -> str:
    """The first of the candidates that supports the steps; PyTorch where none does, which `refused` is told by the reason."""
    if choice.requested == AUTO:
        return AUTO
    reasons = []
    for candidate in choice.candidates:
        if candidate is None:
            return "torch"
        reason = next(filter(None, (refusal(node, candidate) for node in nodes)), "")
        if not reason:
            return named(nodes[0], candidate)
        reasons.append(f"{candidate.name} {reason}")
    if choice.single:
        alternatives = selectors.supporting(place.operation, lambda a: not any(refusal(node, a) for node in nodes))
        raise ValueError(
            f"ai3_ops.optimize: {place.names[0]} ({place.operation}): {'; '.join(reasons)}; {alternatives}"
        )
    refused.setdefault("; ".join(reasons), []).append(place.names[0])
    return "torch"


def refusal(node: fx.Node, algorithm: Algorithm) -> str:
    """Why an algorithm cannot do a step, "" where it can."""
    if any(algorithm.backward):
        return "has gradients' algorithms, and optimize is for inference"
    problem = problem_of(node)
    if problem is None:
        return ""
    ok, reason = registry.supports_problem(problem[0], algorithm.name, _asked(*problem, algorithm))
    return "" if ok else reason


def named(node: fx.Node, algorithm: Algorithm) -> str:
    """The name by which a step's algorithm is kept: of a rule that may not choose everything, what it chooses."""
    problem = problem_of(node)
    own = {name: value for name, value in algorithm.parameters.items() if name not in SWITCHES}
    if problem is None or not (algorithm.exclude or algorithm.parameters.get("deterministic")):
        return registry.spelled(algorithm.name, own)
    asked = _asked(*problem, algorithm)
    found = registry.resolve_sizes(problem[0], algorithm.name, asked.device, asked.dtype, **asked.sizes)
    return registry.spelled(found, own)


def _asked(operation: str, problem: Problem, algorithm: Algorithm) -> Problem:
    """The problem with what the algorithm excludes; a rule chooses among those that programs can run."""
    asked = Call.asked(algorithm, problem)
    if not algorithm.exclude:
        return asked
    others = ",".join(a.name for a in registry.algorithms(operation, problem.device) if a.vendor)
    return asked._replace(sizes=asked.sizes | {"exclude": f"{algorithm.excluded},{others}"})


def problem_of(node: fx.Node) -> tuple[str, Problem] | None:
    """The problem of a step that selectors can choose for, on channels_last tensors; None for others, and odd dtypes."""
    operation = operation_of(node)
    if operation is None:
        return None
    a = arguments(node)
    tensors = [_meta(a[name]) for name in ("input", "weight", "bias") if name in a]
    if operation in Step.by_operation:
        given = [_meta(v) if isinstance(v, fx.Node) else v for name, v in a.items() if name != "algorithm"]
        tensors, window = given, []
    elif operation == "conv1d":
        tensors = [None if t is None else t.squeeze(2) if t.ndim == 4 else t for t in tensors]
        window = [a[name][1:] for name in ("stride", "padding", "dilation")] + [a["groups"]]
    elif operation in ("conv2d", "linear"):
        window = [a[name] for name in ("stride", "padding", "dilation", "groups") if name in a]
    elif operation in ("relu", "flatten"):
        window = [1] if operation == "flatten" else []
    else:
        window = [value for name, value in a.items() if name not in ("input", "sequence", "algorithm")]
    try:
        problem = registry.OPERATIONS[operation].problem(f"ai3::{operation}", *tensors, *window)
    except RuntimeError:
        if node.target in MEASURED:
            raise
        return None
    return operation, problem._replace(device=node.meta.get("device", "cpu"))


def _meta(node: fx.Node | None) -> torch.Tensor | None:
    if node is None:
        return None
    x = torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device="meta")
    # On a GPU networks are in NCHW unless channels_last is faster, which is found later.
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 and "device" not in node.meta else x


def approximates(network: Network) -> bool:
    """Whether a step's algorithm is one that approximates."""
    return any(
        (name := node.kwargs.get("algorithm", "")) not in ("", *steps.RULES)
        and registry.algorithm(operation, registry.unspelled(name)[0], "cpu").accuracy == "approximate"
        for node in network.graph.nodes
        if (operation := operation_of(node)) is not None
    )


def learned(network: Network, resolved: dict[str, str]) -> dict[str, str]:
    """The choices for further sizes: what was measured for "auto" stays, where it is an algorithm that can be named."""
    found = dict(resolved)
    for node in network.calls(*MEASURED):
        name = node.kwargs.get("algorithm", "default")
        if node.meta.get("choice") == AUTO and name not in ("default", AUTO):
            own = node.meta["layers"][:1]  # later come those that are fused into it
            found |= {layer: name for layer in own if found.get(layer) == AUTO}
    return found


def measured(
    network: Network,
    settings: Any,
    deadline: float,
    progress: Callable[[str], None],
    largest_error: float | None = None,
    notes: list[str] | None = None,
) -> bool:
    """Gives every step that is to be measured its fastest algorithm, as `tune` finds it; `default` where time runs out.

    `largest_error` is of those whose layer's error is at most that, for a network that was measured before; `notes` is told how
    many were not measured. Whether any changed.
    """
    todo = [n for n in network.calls(*MEASURED) if AUTO in (n.kwargs.get("algorithm"), n.meta.get("choice"))]
    before = [node.kwargs["algorithm"] for node in todo]
    size = sum(value.numel() * value.element_size() for value in network.constants.values())
    asked = TuneSettings(
        settings.objective,
        None,
        settings.memory_limit,
        settings.tolerance,
        settings.deterministic,
        settings.allow_approximate,
    )
    meter = Meter(size, asked, cache=True)
    cases: list[Case] = [Case.of(node, meter) for node in todo]
    left = to_measure({case: Timed(case.layer, n, case.comparable) for case, n in Counter(cases).items()}, asked)
    interrupted = False
    try:
        for number, case in enumerate(left):
            progress(f"algorithms, layer {number + 1} of {len(left)}")
            found = case.measured(meter, deadline)
            cases = [found if other == case else other for other in cases]
    except KeyboardInterrupt:
        interrupted = True
    if notes is not None and (late := sum(case.found is None for case in cases)):
        kept = "they keep `default` where the settings allow it, else PyTorch's implementation"
        more = "a larger budget_seconds measures them, or `tune` before, whose cache is used"
        notes.append(f"{late} of {len(cases)} layers were not measured within the budget: {kept}; {more}")
    if notes is not None and (count := sum(case.source == "shipped" for case in cases)):
        notes.append(f"times of {count} of {len(cases)} layers are shipped ones, from {shipped.origin()}")

    def at(price: float) -> list[str]:
        return [case.fastest(asked, price, largest_error) for case in cases]

    def take(names: list[str]) -> None:
        for node, case, name in zip(todo, cases, names, strict=True):
            own = "default" if name == case.default != "torch" else name_of(case.operation, name)
            node.kwargs = {**node.kwargs, "algorithm": own}

    sizes: dict[tuple[str, ...], int] = {}

    def bytes_of(names: list[str]) -> int:
        """Of the programs' packs and arena, workspaces in it."""
        if (key := tuple(names)) not in sizes:
            take(names)
            sizes[key] = memory(network).total
        return sizes[key]

    names: list[str] = within(asked, at, bytes_of)
    take(names)
    for node, case in zip(todo, cases, strict=True):
        node.meta["choice"], node.meta["source"] = AUTO, case.source
    if interrupted:
        raise Interrupted("optimize", _plan(todo, cases, names, asked))
    if notes is not None:
        chosen = zip(todo, cases, names, strict=True)
        warn_of_errors("optimize", [n.meta["layers"][0] for n, case, name in chosen if not case.holds(name, asked)], 6)
    return before != [node.kwargs["algorithm"] for node in todo]


def _plan(nodes: list[Node], cases: list[Case], names: list[str], settings: TuneSettings) -> Plan:
    """What was chosen, by the layers' names."""
    layers = {}
    for node, case, name in zip(nodes, cases, names, strict=True):
        measured = None if case.found is None else case.found[name]
        layers[node.meta["layers"][0]] = PlannedLayer(
            case.operation,
            name_of(case.operation, name),
            case.layout if case.operation == "conv2d" else None,
            None if measured is None else measured.time_us,
            None if measured is None else measured.error,
            *case.layer.memory(name, case.layout),
            case.source,
            [list(shape) for shape in case.layer.shapes],
            {f"{name_of(case.operation, n)} {case.layout}": m.to_dict() for n, m in (case.found or {}).items()},
        )
    return Plan(layers, _machine.machine(), asdict(settings))


@dataclass(frozen=True)
class Case:
    """A step whose algorithm is to be measured, as `tune` sees it."""

    layer: Layer
    layout: str
    found: dict[str, Measured] | None = field(compare=False)  # None where the time did not last
    # For selectors, where it is another: calls of conv1d are measured as those of conv2d that they become.
    operation: str = ""

    @classmethod
    def of(cls, node: Node, meter: Meter) -> Case:
        """What the cache knows."""
        a = arguments(node)
        operands = [a[name] for name in ("input", "weight", "bias")]
        specs = [Spec.of(_meta(x)) for x in operands]
        if node.target is steps.linear:
            specs[0] = specs[0]._replace(
                shape=(math.prod(specs[0].shape[:-1]), specs[0].shape[-1]), stride=(specs[0].shape[-1], 1)
            )
        specs = [s._replace(device="cpu") if isinstance(s, Spec) else s for s in specs]
        window = [a[name] for name in ("stride", "padding", "dilation", "groups") if name in a]
        parameters = (False, True, a["bias"] is not None, *[False] * len(window))
        layer = Layer(_OPERATIONS[node.target], (*specs, *window), parameters, in_place=False)
        layout = CHANNELS_LAST if CHANNELS_LAST in layer.layouts else layer.layouts[0]
        return cls(layer, layout, meter.known_in(layer, layout), operation_of(node) or "")

    def measured(self, meter: Meter, deadline: float) -> Case:
        """With what is measured now, by `time.monotonic()` until the deadline; without, where that is too soon."""
        seconds = deadline - time.monotonic()
        if seconds < 0:
            return self
        try:
            return replace(self, found=meter.measured_in(self.layer, self.layout, timing.clock() + seconds))
        except timing.OutOfTime:
            return self

    @property
    def source(self) -> str:
        """Where its times are from."""
        if self.found is None:
            return "not measured"
        return "shipped" if any(m.shipped for m in self.found.values()) else "measured here"

    @property
    def comparable(self) -> list[dict[str, Measured]]:
        """What is known of those that programs can run, where there are any."""
        able = {n: m for n, m in (self.found or {}).items() if self.runs_in_programs(n)}
        return [found for found in [able or self.found] if found]

    def holds(self, name: str, settings: TuneSettings) -> bool:
        """Whether an algorithm keeps the tolerance that was asked for, as far as it was measured."""
        limit = settings.tolerance
        return limit is None or self.found is None or self.found[name].error <= limit

    @property
    def default(self) -> str:
        """What `default` stands for."""
        return self.layer.default(self.layout) if self.found is None else next(iter(self.found))

    def fastest(self, settings: TuneSettings, price: float = 0.0, largest_error: float | None = None) -> str:
        """The algorithm that `tune` takes, of those that programs can run, where a byte costs `price` microseconds.

        Within an error, where one is given. Not measured: `default`, unless `tune` would not take it or a limit of the layer's
        cannot be held without measuring: PyTorch then.
        """
        if self.found is None:
            name, limit = unmeasured(self.layer, self.layout, settings, price)[0], settings.memory_limit
            held = settings.tolerance is None and (limit is None or sum(self.layer.memory(name, self.layout)) <= limit)
            return name if held else "torch"
        allowed = {
            name: m
            for name, m in self.found.items()
            if self.runs_in_programs(name) and not ineligible(self.layer, name, self.found, settings)
        }
        if not allowed and self.holds("torch", settings):
            return "torch"
        if not allowed:
            able = [name for name in self.found if self.runs_in_programs(name)]
            return least_error(self.layer, self.found, settings, price, able)
        if largest_error is not None:
            exact = {name: m for name, m in allowed.items() if m.error <= largest_error}
            if not exact:
                return min(allowed, key=lambda n: allowed[n].error)
            return min(exact, key=lambda n: exact[n].time_us + price * exact[n].bytes)
        return select(self.layer, self.found, settings, price, allowed)[0]

    def runs_in_programs(self, name: str) -> bool:
        """Whether an algorithm does, and has a name by which selectors can ask for it."""
        operation = self.operation or self.layer.operation
        known = {a.name for a in registry.algorithms(operation, "cpu")}
        if name == "torch" or name_of(operation, name) not in known:
            return False
        info = registry.algorithm(self.layer.operation, name, "cpu")
        return not (info.vendor or info.python or info.layout == "nchw")
