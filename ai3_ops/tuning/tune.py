"""tune: measures every algorithm that supports a layer, under a network's conditions, and chooses for all layers together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ai3_ops import _torch
from ai3_ops.measuring import timing
from ai3_ops.measuring.timing import Layer
from ai3_ops.selecting.plan import Plan
from ai3_ops.surveying.modules import refuse_meta, refuse_optimized
from ai3_ops.tuning.callgraph import CallGraph
from ai3_ops.tuning.choosing import Timed, choose, to_measure
from ai3_ops.tuning.meter import Meter, Times, shown
from ai3_ops.tuning.settings import Interrupted, Settings, check_flags
from ai3_ops.tuning.verifying import verified


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
        cache: keeps measurements in `$XDG_CACHE_HOME/ai3_ops/tune`, uses those that are there, and begins with shipped ones
            where these are of such a processor; False measures all of it now.
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
    check_flags("tune", cache=cache, progress=progress)
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
    return _on_rank_0(lambda: verified(plan, model, example_inputs, cache, progress))


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
    graph = CallGraph(model, example_inputs)
    meter = Meter(graph.bytes, settings, cache)
    wanted = {site.layer for site in graph.sites if names is None or site.name in names}
    times: Times = {}
    known: dict[Layer, Timed] = {}
    for layer, calls in graph.layers.items():
        if layer in wanted:
            found = meter.known(layer) or {}
            times |= {(layer, layout): times_of for layout, times_of in found.items()}
            known[layer] = Timed(layer, calls, found.values())
    todo = to_measure(known, settings)
    with _torch.without_autocast():  # layers have the types that the run was seen to compute in
        try:
            for number, layer in enumerate(shown(todo, progress)):
                try:
                    if end < math.inf and timing.clock() >= end:
                        raise timing.OutOfTime
                    times |= {(layer, layout): times_of for layout, times_of in meter.measured(layer, end).items()}
                except timing.OutOfTime:
                    if left := sum(not known[layer].found for layer in todo[number:]):
                        kept = "they keep `default` where the settings allow it, else PyTorch's implementation"
                        text = f"ai3_ops.tune: {left} distinct layers were not measured within the budget; {kept}"
                        warnings.warn(text, stacklevel=5)
                    break
            return choose(graph, times, settings, meter, end)
        except KeyboardInterrupt:
            raise Interrupted("tune", choose(graph, times, settings, meter, timing.clock())) from None
