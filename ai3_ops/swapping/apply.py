"""Fourth step of swap: modules get the classes that make the chosen calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ai3_ops.calls.spec import Spec
from ai3_ops.nn import layout
from ai3_ops.nn.classes import SHORTCUTS, Sites, Swapped, swapped_class
from ai3_ops.nn.kinds import original_class, set_class
from ai3_ops.operations.conv2d import is_wrong_in_training, trains_astray
from ai3_ops.surveying.describe import Described
from ai3_ops.surveying.discover import Lost


def apply(model: nn.Module, calls: list[Described], lost: dict[nn.Module, Lost]) -> None:
    """Gives modules with a chosen algorithm their classes, and notes in the others why PyTorch computes them."""
    sites: dict[int, tuple[nn.Module, Sites]] = {}
    for described in calls:
        if described.sites is not None:
            sites[id(described.sites)] = described.module, described.sites
        elif described.call.algorithm is not None:
            vars(described.module)["_ai3"] = described.call
            set_class(described.module, swapped_class(original_class(described.module)))
        else:
            vars(described.module)["_ai3"] = [described.call.note()]
    for module, own in sites.values():
        if any(call.algorithm is not None for call in own.calls.values()):
            own.install(module)
        else:
            vars(module)["_ai3"] = [call.note() for call in own.calls.values()]
    for module in model.modules():
        passes = isinstance(module, tuple(SHORTCUTS)) and not isinstance(module, Swapped)
        if passes and any(isinstance(child, Swapped) for child in module.modules()):
            set_class(module, swapped_class(original_class(module)))
    for module, what in lost.items():
        if what.seen or what.source or what.composed:
            vars(module)["_ai3_lost"] = asdict(what)


def _trains_astray(described: Described) -> bool:
    """Whether PyTorch's gradient of a convolution's weight is wrong in channels_last, as far as an example tells."""
    module: Any = described.module
    weight, example = module.weight, described.call.example
    if not weight.requires_grad:
        return False
    if example is None:
        return is_wrong_in_training(weight, module.stride, module.groups, weight.dtype)
    input, _, _, *window = map(Spec.tensor, example)
    return any(trains_astray(input, weight, dtype, window) for dtype in (weight.dtype, torch.bfloat16))  # autocast's


def lay_out(
    model: nn.Module,
    calls: list[Described],
    methods: Set[str],
    run: Callable[[Any], Any],
    examples: Iterable[Any] | None,
) -> None:
    """Gives the weights of swapped convolutions the memory format channels_last, or what a plan says, in place.

    In a model in training mode weights keep their strides, also those that a plan names, and inputs become channels_last instead,
    but for those of large weights that no plan names (`layout.is_costly`) and all beside a layer that PyTorch computes but cannot
    train in channels_last (`trains_astray`). Where the model's code reads memory
    by strides of its own weights never become channels_last. Where it views activations, only if the model gives the same on
    examples after that; where a view needs NCHW, the convolution before it gives that, unless most would. Without examples, only
    if a plan says so.

    methods: the names of functions that a run was seen to call. run: runs the model once on an example, and returns its output.
    examples: first the user's, then made-up ones of other sizes, which the model may refuse.
    """
    convolutions = [d for d in calls if d.operation == "conv2d" and d.site is None]
    planned = {name: [d.module for d in convolutions if d.layout == name] for name in layout.FORMATS}
    free = [d.module for d in convolutions if d.layout is None and not d.kept and d.call.algorithm is not None]
    if any(d.call.algorithm is None and _trains_astray(d) for d in convolutions):
        free = []
    elif model.training:
        free = [module for module in free if not layout.is_costly(module)]
    former = [(d, d.earlier) for d in convolutions if d.earlier is not None]
    if all(d.call.algorithm is not None for d, earlier in former if earlier.writes_nchw):
        for d, earlier in former:
            if d.kept and (d.given or earlier.last):
                planned[d.given or "channels_last"].append(d.module)
    layout.convert(planned["contiguous"], layout.FORMATS["contiguous"], layout.holds_strides(model))
    holds = layout.holds_strides(model, rows=model.training)
    last = planned["channels_last"] + free
    if not last or methods & layout.MEMORY or layout.naming(model, layout.MEMORY):
        return
    views = bool(methods & layout.VIEWS or layout.naming(model, layout.VIEWS))
    expected = _outputs(run, examples) if views and examples is not None else []
    if not expected:
        layout.convert(planned["channels_last"] if views else last, holds=holds)
        for described, earlier in former:
            described.call.writes_nchw = earlier.writes_nchw
        return
    known = [(d.call, d.call.example, d.call.reason) for d in calls]
    undo = layout.convert(last, holds=holds)
    watch = layout.Watch({d.module: d.call for d in convolutions if d.call.algorithm is not None})
    try:
        with watch:
            proven = all(layout.same(output, run(example)) for example, output in expected)
        for call in watch.found:
            call.writes_nchw = True
        if watch.found:  # their weights stay in NCHW, in which they compute what lies so (docs/decisions/layout.md)
            undo()
            kept = {d.module for d in convolutions if d.call.writes_nchw and d.layout is None}
            undo = layout.convert([module for module in last if module not in kept], holds=holds)
        proven = proven and 2 * len(watch.found) <= len(last)  # else most outputs would be copied
        if proven and watch.found:
            proven = all(layout.same(output, run(example)) for example, output in expected)
    except RuntimeError:
        proven = False
    if not proven:
        undo()
        for call in watch.found:
            call.writes_nchw = False
    for call, example, reason in known:
        call.calls = call.torch_calls = 0
        call.example, call.reason = example, reason
        call.forget_packs()


def _outputs(run: Callable[[Any], Any], examples: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The examples that the model takes, and what it returns: of the made-up ones that of both sizes, or those of one."""
    found: list[tuple[Any, Any]] = []
    for number, example in enumerate(examples):
        try:
            with warnings.catch_warnings(action="ignore"):
                found.append((example, run(example)))
        except RuntimeError:
            if number == 0:
                return []
            continue
        if number == 1:
            break
    return found
