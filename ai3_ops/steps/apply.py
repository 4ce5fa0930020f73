"""Fourth step of swap: modules get the classes that make the chosen calls; and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from ai3_ops.nn import layout, original_class, set_class, swapped_class
from ai3_ops.nn.rewrite import Sites, Swapped

if TYPE_CHECKING:
    from ai3_ops.steps.describe import Described
    from ai3_ops.steps.discover import Lost

# What swap leaves in a module: its Call or Sites, where it is swapped; plain values for `explain` and the next swap, where not.
MARKS = ("_ai3", "_ai3_lost")


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
        inside = any(isinstance(child, Swapped) for child in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer) and inside and not isinstance(module, Swapped):
            set_class(module, swapped_class(original_class(module)))
    for module, what in lost.items():
        if what.seen or what.source:
            vars(module)["_ai3_lost"] = asdict(what)


def lay_out(model: nn.Module, calls: list[Described], run: Callable[[], Any] | None) -> None:
    """Gives the weights of swapped convolutions the memory format channels_last, or what a plan says, in place.

    In a model in training mode large weights stay as they are unless a plan names them (`layout.is_costly`). Where the model's
    code reads memory by strides of its own weights never become channels_last. Where it views activations, only if `run`, which
    runs the model once and returns its output, then gives the same; without `run`, only if a plan says so.
    """
    convolutions = [d for d in calls if d.operation == "conv2d" and d.site is None]
    planned = {name: [d.module for d in convolutions if d.layout == name] for name in layout.FORMATS}
    free = [d.module for d in convolutions if d.layout is None and not d.kept and d.call.algorithm is not None]
    if model.training:
        free = [module for module in free if not layout.is_costly(module)]
    layout.convert(planned["contiguous"], to=layout.FORMATS["contiguous"])
    last = planned["channels_last"] + free
    if not last or layout.naming(model, layout.MEMORY):
        return
    views = bool(layout.naming(model, layout.VIEWS))
    if not views or run is None:
        layout.convert(planned["channels_last"] if views else last)
        return
    undo = None
    try:
        before = run()
        undo = layout.convert(last)
        proven = layout.same(before, run())
    except RuntimeError:
        proven = False
    if undo is not None and not proven:
        undo()
    for described in calls:
        described.call.calls = described.call.torch_calls = 0
        described.call.forget_packs()


def unswap(model: nn.Module) -> nn.Module:
    """Gives every module of `model` its original class back, in place, and returns the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.unswap needs an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, Swapped):
            set_class(module, original_class(module))
        for mark in MARKS:
            vars(module).pop(mark, None)
    return model
