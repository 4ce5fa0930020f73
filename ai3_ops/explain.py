"""explain: what computes each layer of a model, and why."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ai3_ops import registry
from ai3_ops.nn import leaf_class, original_class
from ai3_ops.nn.calls import Call, Spec
from ai3_ops.nn.rewrite import Sites
from ai3_ops.optimize.report import OptimizeReport


@dataclass(frozen=True)
class Layer:
    """One call of a model."""

    name: str
    operation: str
    requested: str | None  # what a selector asked for; None where none spoke of it
    used: str  # the algorithm; for rules (`default`) the one that they chose, once they saw shapes
    reason: str  # why it is not what was requested, why a rule chose it, or that this is not known yet
    shapes: list[tuple[int, ...]] | None  # of the tensors of the first call seen
    calls: int | None  # since the swap, compiled ones not counted; None for layers that are PyTorch's
    torch_calls: int  # those of them that PyTorch computed


@dataclass(frozen=True)
class Unreached:
    """A module whose own functional calls cannot be replaced."""

    name: str
    type: str
    reason: str
    seen: dict[str, int]  # its calls during the run with example inputs, by operation
    source: list[str]  # operations that the source of its forward calls


@dataclass(frozen=True)
class Report:
    """What `explain` returns: `layers` in `named_modules()` order, and modules with calls that are out of reach."""

    layers: list[Layer]
    unreached: list[Unreached]
    optimization: OptimizeReport | None = None  # of a module that `optimize` returned: its steps, rewrites and gain

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.optimization is not None:
            return str(self.optimization)
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", "operation", "requested", "used", "calls", "shapes", "reason", box=None, pad_edge=False)
        for layer in self.layers:
            calls = "" if layer.calls is None else str(layer.calls)
            if layer.torch_calls:
                calls += f" ({layer.torch_calls} torch)"
            shapes = " ".join("x".join(map(str, shape)) for shape in layer.shapes or [])
            cells = (layer.name, layer.operation, layer.requested or "", layer.used, calls, shapes, layer.reason)
            table.add_row(*(_plain(cell) for cell in cells))
        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        console.print(table)
        if self.unreached:
            table = Table("not reached", "type", "its calls", "reason", box=None, pad_edge=False)
            for module in self.unreached:
                calls = ", ".join(f"{o} x{n}" for o, n in module.seen.items()) or ", ".join(module.source)
                table.add_row(*(_plain(cell) for cell in (module.name, module.type, calls, module.reason)))
            console.print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


_WIDTH = 160


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def explain(model: nn.Module) -> Report:
    """Per layer of `model`: what was requested, what computes it, why, shapes and calls. str() is a table."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.explain needs an nn.Module, got {type(model).__name__}")
    optimization = vars(model).get("_ai3_report")
    if optimization is not None:
        return Report([], [], optimization)
    layers, unreached = [], []
    operations = registry.operations()
    for name, module in model.named_modules():
        mark = vars(module).get("_ai3")
        leaf = leaf_class(original_class(module))
        lost = vars(module).get("_ai3_lost")
        if lost is not None:
            kind = module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
            unreached.append(Unreached(name, kind, lost["reason"], lost["seen"], lost["source"]))
        if isinstance(mark, Call):
            layers.append(_layer(name, mark, ""))
        elif isinstance(mark, list):
            layers += [_layer(name, Call.of_note(note), "") for note in mark]
        elif isinstance(mark, Sites):
            layers += [_layer(name, call, mark.trouble) for call in mark.calls.values()]
        elif leaf is not None and leaf._ai3_operation in operations and not getattr(module, "return_indices", False):
            layers.append(Layer(name, leaf._ai3_operation, None, "torch", "", None, None, 0))
    return Report(layers, unreached)


def _layer(module: str, call: Call, trouble: str) -> Layer:
    call.revive()
    swapped = call.algorithm is not None
    rule = call.algorithm is not None and registry.is_rule(call.operation, call.algorithm.name)
    used, why = str(call.algorithm), ""
    if call.operator is None:  # perhaps an algorithm that this process has not registered
        used = "torch"
    elif rule and call.example is not None:
        used, why = _chosen(call)
    elif rule:
        why = _UNKNOWN
    reasons = (call.missing, call.reason, trouble if swapped else "", why)
    return Layer(
        module + call.suffix,
        call.operation,
        call.requested,
        used,
        "; ".join(filter(None, reasons)),
        call.shapes(),
        call.calls if swapped else None,
        call.torch_calls,
    )


_UNKNOWN = "which algorithm is not known yet: it is chosen at the first call, or at a swap with example inputs"


def _chosen(call: Call) -> tuple[str, str]:
    """What its rule chooses for the first call seen, and why."""
    assert call.algorithm is not None
    assert call.example is not None
    name = call.algorithm.name
    device = next(a.device for a in call.example if isinstance(a, Spec))
    try:
        problem = call.asked(call.algorithm, call.problem(*map(Spec.tensor, call.example)))
        return registry.choice_sizes(call.operation, name, device, problem.dtype, **problem.sizes)
    except RuntimeError:
        return name, ""
