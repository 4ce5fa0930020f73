"""explain: what computes each layer of a model, and why."""

from __future__ import annotations

import fnmatch
import html
import io
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ai3_ops import registry
from ai3_ops.nn import leaf_class, original_class
from ai3_ops.nn.rewrite import Sites
from ai3_ops.operations.calls import Call, Spec
from ai3_ops.optimize.report import OptimizeReport
from ai3_ops.registry import near
from ai3_ops.selectors import listed
from ai3_ops.steps.discover import is_optimized, reachable


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
    layout: str = ""  # of the first input, where it has four dimensions: "NCHW" or "NHWC", and whether it is copied
    # Of an algorithm that packs its weight: "kept", made "each call" or "not yet" made; of another one "kept", where it keeps a
    # copy of its weight in the order that it reads.
    packs: str = ""
    packed_bytes: int = 0  # of all that is kept; of the pack that is made where nothing is
    workspace: int | None = (
        None  # bytes that a call like the first one allocates beside its output and kept packs; None: unknown
    )


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
    optimized: dict[str, OptimizeReport] = field(
        default_factory=dict
    )  # the same of such modules inside of the model, by name

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, fit for JSON."""
        return asdict(self)

    def filter(self, name: str = "*", *, operation: str = "*", used: str = "*") -> Report:
        """The layers whose name, operation and algorithm match these patterns, in which * stands for any characters.

        `used="torch"` finds what PyTorch computes, `name="layer4*"` a part of the model, which of the unreached and the
        optimized modules, too. The report on a module that is itself optimized keeps that. ValueError for a name
        that no layer has, and for what is no operation.
        """
        match = fnmatch.fnmatchcase
        names = [layer.name for layer in self.layers] + [m.name for m in self.unreached] + list(self.optimized)
        for pattern, known in ((name, names), (operation, registry.operations())):
            if names and not any(match(one, pattern) for one in known):
                raise ValueError(f"explain: nothing is called {pattern!r}{near(pattern, known)}")
        layers = [
            a for a in self.layers if match(a.name, name) and match(a.operation, operation) and match(a.used, used)
        ]
        unreached = [module for module in self.unreached if match(module.name, name)]
        optimized = {of: report for of, report in self.optimized.items() if match(of, name)}
        return Report(layers, unreached, self.optimization, optimized)

    @property
    def summary(self) -> list[str]:
        """In a few lines: how many layers which algorithms compute, what was asked for, packs and workspace, what is slow."""
        by: dict[str, Counter[str]] = {}
        asked: dict[str, Counter[str]] = {}
        for layer in self.layers:
            by.setdefault(layer.operation, Counter())[layer.used] += 1
            if layer.requested:
                asked.setdefault(layer.requested, Counter())[layer.operation] += 1
        computed = [f"{o} {c.total()} ({', '.join(f'{u} {n}' for u, n in c.most_common())})" for o, c in by.items()]
        reached = [f"{r}: {', '.join(f'{n} {o}' for o, n in c.items())}" for r, c in asked.items()]
        kept = sum(layer.packed_bytes for layer in self.layers if layer.packs == "kept")
        most = max((layer.workspace or 0 for layer in self.layers), default=0)
        memory = [f"{_bytes(kept)} of packed weights kept"] if kept else []
        memory += [f"{_bytes(most)} the largest workspace"] if most else []
        found = [
            f"{len(self.layers)} calls: {', '.join(computed)}",
            f"asked for: {'; '.join(reached)}" if reached else "",
            f"memory: {', '.join(memory)}" if memory else "",
        ]
        each = [layer.name for layer in self.layers if layer.packs == "each call"]
        plain = [
            a.name for a in self.layers if a.used != "torch" and a.operation == "conv2d" and a.layout.startswith("NCHW")
        ]
        copied = [layer.name for layer in self.layers if "copied" in layer.layout]
        torch_calls = sum(layer.torch_calls for layer in self.layers)
        found += [
            f"packs its weight at every call: {listed(each)}" if each else "",
            f"runs in NCHW: {len(plain)} conv2d calls; input and model in torch.channels_last are as fast or faster"
            if plain
            else "",
            f"copies its input: {listed(copied)}" if copied else "",
            f"computed by PyTorch although an algorithm was chosen: {torch_calls} calls" if torch_calls else "",
            f"not reached: {len(self.unreached)} modules with calls of their own" if self.unreached else "",
            f"optimized, as explain of each lists: {listed(list(self.optimized))}" if self.optimized else "",
        ]
        return [line for line in found if line]

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of layers; columns that would be empty are left out."""
        heads = ["layer", "operation", "requested", "used", "calls", "shapes", "layout", "packs", "workspace", "reason"]
        rows = []
        for layer in self.layers:
            calls = "" if layer.calls is None else str(layer.calls)
            if layer.torch_calls:
                calls += f" ({layer.torch_calls} torch)"
            shapes = " ".join("x".join(map(str, shape)) for shape in (layer.shapes or [])[:2])
            packs = f"{_bytes(layer.packed_bytes)} {layer.packs}".strip() if layer.packs else ""
            workspace = _bytes(layer.workspace or 0)
            cells = [layer.name, layer.operation, layer.requested or "", layer.used, calls, shapes, layer.layout]
            rows.append([*cells, packs, workspace, layer.reason])
        wanted = [i for i in range(len(heads)) if i < 4 or any(row[i] for row in rows)]
        return [heads[i] for i in wanted], [[row[i] for i in wanted] for row in rows]

    def _unreached_rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of modules out of reach; modules alike, such as a network's equal blocks, are one row."""
        alike: dict[tuple[str, str, str], list[str]] = {}
        for module in self.unreached:
            calls = ", ".join(f"{o} x{n}" for o, n in module.seen.items()) or ", ".join(module.source)
            alike.setdefault((module.type, calls, module.reason), []).append(module.name)
        rows = [[_common(names), *what] for what, names in alike.items()]
        return ["not reached", "type", "its calls", "reason"], rows

    def __str__(self) -> str:
        if self.optimization is not None:
            return str(self.optimization)
        from rich.console import Console
        from rich.table import Table

        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        notes: dict[str, int] = {}  # long reasons, below the table: a layer is one line
        heads, rows = self._rows()
        for row in rows if heads[-1] == "reason" else ():
            if len(row[-1]) > _LONG:
                row[-1] = f"[{notes.setdefault(row[-1], len(notes) + 1)}]"
        for columns, lines in ((heads, rows), self._unreached_rows()):
            if not lines:
                continue
            table = Table(*columns, box=None, pad_edge=False)
            for row in lines:
                table.add_row(*map(_plain, row))
            console.print(table)
        table_text = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*table_text, *(f"[{number}] {note}" for note, number in notes.items()), *self.summary])

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        if self.optimization is not None:
            return f"<pre>{html.escape(str(self))}</pre>"
        parts = ["<ul>", *(f"<li>{html.escape(line)}</li>" for line in self.summary), "</ul>"]
        for heads, rows in (self._rows(), self._unreached_rows()):
            if rows:
                lines = [("th", heads), *(("td", row) for row in rows)]
                cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
                parts += ["<table>", *(f"<tr>{row}</tr>" for row in cells), "</table>"]
        return "\n".join(parts)


_WIDTH, _LONG = 160, 40


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _bytes(count: int) -> str:
    """In the largest unit of which there is one; nothing for 0."""
    if not count:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _common(names: list[str]) -> str:
    """One name, or a pattern of several with their number: equal parts as they are, others as *."""
    parts = [name.split(".") for name in names]
    if len(names) == 1:
        return names[0]
    if len({len(p) for p in parts}) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return f"{'.'.join(p[0] if len(set(p)) == 1 else '*' for p in zip(*parts, strict=True))} ({len(names)})"


def explain(model: nn.Module) -> Report:
    """Per layer of `model`: what was requested, what computes it, why, shapes, calls, memory layout, packs and workspace.

    str() is a table with a summary below it, `.summary` that alone, `.filter(...)` a part, `.to_dict()` fit for JSON; notebooks
    show HTML.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.explain needs an nn.Module, got {type(model).__name__}")
    optimization = vars(model).get("_ai3_report")
    if optimization is not None:
        return Report([], [], optimization)
    layers, unreached, optimized = [], [], {}
    operations = registry.operations()
    seen: set[nn.Module] = set()
    for name, module in reachable(model):
        if module in seen:
            continue
        seen.add(module)
        if is_optimized(module):
            optimized[name] = vars(module)["_ai3_report"]
            continue
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
    return Report(layers, unreached, None, optimized)


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
    training = "training steps are PyTorch's, which is faster there" if call.left_training else ""
    reasons = (call.missing, call.reason, trouble if swapped else "", why, training)
    memory = _memory(call, used) if call.operator is not None and call.example is not None else {}
    return Layer(
        module + call.suffix,
        call.operation,
        call.requested,
        used,
        "; ".join(filter(None, reasons)),
        call.shapes(),
        call.calls if swapped else None,
        call.torch_calls,
        **({"layout": _layout(call)} | memory),
    )


def _layout(call: Call) -> str:
    """The memory layout of the first input."""
    input = next((a for a in call.example or () if isinstance(a, Spec)), None)
    if input is None or len(input.shape) != 4:
        return ""
    tensor = Spec.tensor(input)
    nchw, nhwc = (tensor.is_contiguous(memory_format=f) for f in (torch.contiguous_format, torch.channels_last))
    return "" if nchw and nhwc else "NCHW" if nchw else "NHWC" if nhwc else "strided"


def _is_slice(call: Call) -> bool:
    """Whether the first input is a slice of the channels of a larger tensor, which lies there as a dense one does."""
    input = next(a for a in call.example or () if isinstance(a, Spec))
    (_, c, h, w), (image, channel, row, pixel) = input.shape, input.stride
    rows = row == w * pixel
    return rows and (
        (pixel == 1 and channel == h * row and image >= c * channel) or (channel == 1 and image == h * row)
    )


def _memory(call: Call, used: str) -> dict[str, Any]:
    """The fields of a Layer that say what memory its algorithm takes, and in which layout that computes."""
    assert call.algorithm is not None
    assert call.example is not None
    device, layout = next(a.device for a in call.example if isinstance(a, Spec)), _layout(call)
    name = call.algorithm.name if used == str(call.algorithm) else used
    try:
        info = registry.algorithm(call.operation, name, device)
        p = call.asked(call.algorithm, call.problem(*map(Spec.tensor, call.example)))
        workspace = registry.workspace_sizes(call.operation, name, device, p.dtype, **p.sizes)
        packed = registry.packed_bytes_sizes(call.operation, name, device, p.dtype, **p.sizes) if info.packs else 0
    except (RuntimeError, ValueError):  # it cannot do the example, or is a rule of which nothing is known
        return {}
    computes = {"any": layout, "nchw": "NCHW", "nhwc": "NHWC"}[info.layout]
    if layout and (computes != layout or (layout == "strided" and not (info.sliced and _is_slice(call)))):
        layout += ", copied" if computes in (layout, "strided") else f", copied to {computes}"
    held = call.held_bytes()
    packs = call.pack_state() if packed or held else ""
    if packs == "kept" and packed:
        workspace = max(0, workspace - packed + _TAG)
    return {"layout": layout, "packs": packs, "packed_bytes": held or packed, "workspace": workspace}


_TAG = 64  # bytes of a packed tensor that say what it was made for


_UNKNOWN = "not known yet: chosen at the first call, or at a swap with example inputs"


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
