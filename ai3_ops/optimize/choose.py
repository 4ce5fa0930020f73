"""Which algorithm computes each convolution and linear layer of a captured network: what selectors say, or what is fastest."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ai3_ops import registry, selectors
from ai3_ops._timing import Layer
from ai3_ops.nn import leaf_class, original_class
from ai3_ops.nn.calls import Spec
from ai3_ops.operations.base import Problem
from ai3_ops.optimize import steps
from ai3_ops.optimize.fusion import arguments
from ai3_ops.optimize.network import Network, Node
from ai3_ops.plan import CHANNELS_LAST
from ai3_ops.selectors import Algorithm, Place
from ai3_ops.tune import Meter, select
from ai3_ops.tune import Settings as TuneSettings

AUTO = "auto"
_OPERATIONS: dict[Any, str] = {
    steps.conv2d: "conv2d",
    steps.linear: "linear",
    steps.max_pool2d: "max_pool2d",
    steps.avg_pool2d: "avg_pool2d",
    steps.adaptive_avg_pool2d: "adaptive_avg_pool2d",
    steps.flatten: "flatten",
}


def operation_of(node: fx.Node) -> str | None:
    """The operation that a step is a call of, for selectors."""
    if node.target is steps.unary and node.args[1] == "relu":
        return "relu"
    return _OPERATIONS.get(node.target)


def places_of(network: Network, model: nn.Module) -> list[tuple[fx.Node, Place]]:
    """The steps that selectors can speak of, named as `swap` names them, in call order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(module, []).append(name)
    counts: Counter[tuple[nn.Module, str]] = Counter()
    found = []
    for node in network.graph.nodes:
        operation = operation_of(node)
        if operation is None or not node.meta["layers"] or node.meta["layers"][0] not in modules:
            continue
        module = modules[node.meta["layers"][0]]
        leaf = leaf_class(original_class(module))
        suffix = ""
        if leaf is None or leaf._ai3_operation != operation:
            suffix = f":{operation}_{counts[module, operation]}"
            counts[module, operation] += 1
        value = node.all_input_nodes[0]
        place = Place(operation, module, names[module], suffix, tuple(value.meta["shape"]), watched=True)
        found.append((node, place))
    return found


def follow(network: Network, model: nn.Module, selector: Any, resolved: dict[str, str] | None) -> dict[str, str]:
    """Writes into each step the algorithm that the selectors choose, "auto" where it is to be measured.

    `resolved` is what an earlier call returned for the same model: the choices by the calls' names.
    ValueError for selectors that make no sense, and for a layer named singly that its algorithm cannot do.
    """
    places = places_of(network, model)
    if resolved is not None:
        for node, place in places:
            _write(node, resolved.get(place.names[0], "default"))
        return resolved
    if isinstance(selector, str) and selector == AUTO:
        chosen = {place.names[0]: AUTO for _, place in places}
    else:
        modules = dict(model.named_modules(remove_duplicate=False))
        answers = selectors.assign(selector, [place for _, place in places], modules, {})
        chosen = {
            place.names[0]: _first(node, place, answers[i]) if i in answers else "default"
            for i, (node, place) in enumerate(places)
        }
    for node, place in places:
        _write(node, chosen[place.names[0]])
    return chosen


def _write(node: fx.Node, algorithm: str) -> None:
    if node.target in (steps.conv2d, steps.linear):
        node.kwargs = {**node.kwargs, "algorithm": algorithm}
    elif algorithm == "torch":
        node.meta["torch"] = True


def _first(node: fx.Node, place: Place, choice: selectors.Choice) -> str:
    """The first of the candidates that supports the step; PyTorch where none does."""
    reasons = []
    for candidate in choice.candidates:
        if candidate is None:
            return "torch"
        reason = refusal(node, candidate)
        if not reason:
            return candidate.name
        reasons.append(f"{candidate.name} {reason}")
    if choice.single:
        raise ValueError(f"ai3_ops.optimize: {place.names[0]} ({place.operation}): {'; '.join(reasons)}")
    return "torch"


def refusal(node: fx.Node, algorithm: Algorithm) -> str:
    """Why an algorithm cannot do a step, "" where it can."""
    if any(algorithm.backward):
        return "has gradients' algorithms, and optimize is for inference"
    problem = problem_of(node)
    if problem is None:
        return ""
    ok, reason = registry.supports_problem(problem[0], algorithm.name, problem[1])
    return "" if ok else reason


def problem_of(node: fx.Node) -> tuple[str, Problem] | None:
    """A convolution's or linear layer's problem, on channels_last tensors."""
    if node.target not in (steps.conv2d, steps.linear):
        return None
    a = arguments(node)
    tensors = [_meta(a[name]) for name in ("input", "weight", "bias")]
    window = [a[name] for name in ("stride", "padding", "dilation", "groups") if name in a]
    operation = _OPERATIONS[node.target]
    rules = registry.OPERATIONS[operation]
    return operation, rules.problem(f"ai3::{operation}", *tensors, *window)._replace(device="cpu")


def _meta(node: fx.Node | None) -> torch.Tensor | None:
    if node is None:
        return None
    x = torch.empty(node.meta["shape"], dtype=node.meta["dtype"], device="meta")
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def measured(network: Network, settings: Any, deadline: float, progress: Callable[[str], None]) -> None:
    """Gives every step that is to be measured its fastest algorithm, as `tune` finds it; `default` where time runs out."""
    todo = [n for n in network.calls(steps.conv2d, steps.linear) if n.kwargs.get("algorithm") == AUTO]
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
    for number, node in enumerate(todo):
        progress(f"algorithms, layer {number + 1} of {len(todo)}")
        node.kwargs = {**node.kwargs, "algorithm": fastest(node, meter, asked, deadline)}


def fastest(node: Node, meter: Meter, settings: TuneSettings, deadline: float) -> str:
    """The algorithm that `tune` takes, of those that programs can run."""
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
    found = meter.known_in(layer, layout)
    if found is None:
        if time.monotonic() > deadline:
            return "default"
        found = meter.measured_in(layer, layout)
    usable = {name: m for name, m in found.items() if _runs_in_programs(layer.operation, name)}
    if not usable or next(iter(found)) not in usable:
        return "default" if not usable else min(usable, key=lambda name: usable[name].time_us)
    first = next(iter(usable))
    name = select(layer, usable, settings)[0]
    return "default" if name == first else name


def _runs_in_programs(operation: str, name: str) -> bool:
    if name == "torch":
        return False
    info = registry.algorithm(operation, name, "cpu")
    return not (info.vendor or info.python or info.layout == "nchw")
