"""explain: what computes each layer of a model, and why."""

from __future__ import annotations

import fnmatch
import html
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops import _tables, registry
from ai3_ops._tables import shown_bytes
from ai3_ops.calls.call import Call
from ai3_ops.calls.spec import Spec
from ai3_ops.explaining.compiled import graphs_of
from ai3_ops.explaining.report import OptimizeReport
from ai3_ops.nn.classes import MARKS, Sites, found_in, leaf_class
from ai3_ops.nn.kinds import original_class
from ai3_ops.registry import near
from ai3_ops.selecting.selectors import listed
from ai3_ops.surveying.modules import is_of_torch, is_optimized, reachable


@dataclass(frozen=True)
class Layer:
    """One call of a model."""

    name: str
    operation: str
    requested: str | None  # what the selector that matched it asked for; None where it was matched by no selector
    # The algorithm that computes it; of a rule such as `default` the one that it chose, once shapes are known.
    used: str
    reason: str  # why `used` is not what was requested, why a rule chose it, or that this is not known yet
    shapes: list[tuple[int, ...]] | None  # of the tensors of the first call seen
    # Since the swap, without those from compiled code; None for layers that keep PyTorch's implementation.
    calls: int | None
    torch_calls: int  # how many of the calls PyTorch computed
    # Memory layout of a swapped call's first input, "NCHW" or "NHWC", where that has four dimensions, and whether the algorithm
    # copies it; before the first call, the layout that it had in the swap's run with example inputs.
    layout: str = ""
    # Where the packed weight is: "kept" between calls, made at "each call", or "not yet" made. An algorithm that does not pack,
    # but keeps a copy of its weight in the order that it reads, has "kept", too.
    packs: str = ""
    packed_bytes: int = 0  # of all packs that are kept; where none is, of the one that a call makes
    workspace: int | None = (
        None  # bytes that a call like the first one allocates besides output and kept packs; None: unknown
    )
    time_us: float | None = None  # of one call, as the plan has it that was swapped in
    torch_us: float | None = None  # and of PyTorch's implementation

    @property
    def speedup(self) -> float | None:
        """PyTorch's time / its."""
        return self.torch_us / self.time_us if self.time_us and self.torch_us else None


@dataclass(frozen=True)
class Unreached:
    """A module with calls in its own code that swap could not replace."""

    name: str
    type: str
    reason: str
    seen: dict[str, int]  # how many calls it made during the run with example inputs, by operation
    source: list[str]  # operations that are called in the source code of its forward


@dataclass(frozen=True)
class Uncovered:
    """A module with weights whose operation has no algorithm."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `explain` returns: `layers` in the order of `named_modules()`, and modules with calls that could not be replaced."""

    layers: list[Layer]
    unreached: list[Unreached]
    # Steps, rewrites and gain of what `optimize` or torch.compile(backend="ai3") returned; None for other models.
    optimization: OptimizeReport | None = None
    # The same for each such module inside the model, by name.
    optimized: dict[str, OptimizeReport] = field(default_factory=dict)
    # Which modules torch.compile computes, and what this report cannot tell about them.
    notes: list[str] = field(default_factory=list)
    # Modules that PyTorch computes because no operation here is theirs.
    uncovered: list[Uncovered] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and dicts, which can be written as JSON."""
        return asdict(self)

    def filter(self, name: str = "*", *, operation: str = "*", used: str = "*") -> Report:
        """The layers whose name, operation and algorithm match these patterns, in which * stands for any characters.

        `used="torch"` finds the layers that PyTorch computes, `name="layer4*"` a part of the model. The name also selects
        from the unreached and the optimized modules; `optimization` stays as it is. ValueError where no layer or module has
        such a name, or no operation matches.
        """
        match = fnmatch.fnmatchcase
        names = [layer.name for layer in self.layers] + [m.name for m in self.unreached] + list(self.optimized)
        names += [m.name for m in self.uncovered]
        for what, pattern, known in (("layer", name, names), ("operation", operation, registry.operations())):
            if names and not any(match(one, pattern) for one in known):
                raise ValueError(f"explain: no {what} is named {pattern!r}{near(pattern, known)}")
        layers = [
            a for a in self.layers if match(a.name, name) and match(a.operation, operation) and match(a.used, used)
        ]
        unreached = [module for module in self.unreached if match(module.name, name)]
        optimized = {of: report for of, report in self.optimized.items() if match(of, name)}
        uncovered = [m for m in self.uncovered if match(m.name, name) and (operation, used) == ("*", "*")]
        return Report(layers, unreached, self.optimization, optimized, self.notes, uncovered)

    @property
    def summary(self) -> list[str]:
        """In a few lines: how many layers each algorithm computes, what was asked for, memory, and what makes the model slow."""
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
        memory = [f"{shown_bytes(kept)} of packed weights kept"] if kept else []
        memory += [f"the largest workspace {shown_bytes(most)}"] if most else []
        nothing = "" if self.optimization or self.optimized else "0 calls"
        found = [
            f"{len(self.layers)} calls: {', '.join(computed)}" if computed else nothing,
            *self._costs(),
            f"asked for: {'; '.join(reached)}" if reached else "",
            f"memory: {', '.join(memory)}" if memory else "",
        ]
        each = [layer.name for layer in self.layers if layer.packs == "each call"]
        plain = [a.name for a in self.layers if a.calls and a.operation == "conv2d" and a.layout.startswith("NCHW")]
        copied = [layer.name for layer in self.layers if "copied" in layer.layout]
        torch_calls = sum(layer.torch_calls for layer in self.layers)
        kinds = Counter(module.type for module in self.uncovered)
        found += [
            f"pack their weight at every call: {listed(each)}" if each else "",
            f"read images in NCHW: {listed(plain)}; with inputs in torch.channels_last they are as fast or faster"
            if plain
            else "",
            f"copy their input: {listed(copied)}" if copied else "",
            f"computed by PyTorch although an algorithm was chosen: {torch_calls} calls" if torch_calls else "",
            f"could not be replaced: calls in {len(self.unreached)} modules" if self.unreached else "",
            f"not covered: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}" if kinds else "",
            f"optimized: {listed(list(self.optimized))}; explain of such a module alone lists its steps"
            if self.optimized
            else "",
            *self.notes,
        ]
        return [line for line in found if line]

    def _costs(self) -> list[str]:
        """Where the time goes, once a plan says so, and what could be done about it."""
        timed = [(layer.time_us, layer) for layer in self.layers if layer.time_us]
        if not timed:
            return []
        total, torch_total = (sum(times) for times in zip(*((t, a.torch_us or t) for t, a in timed), strict=True))
        covered = sum(t for t, layer in timed if layer.used != "torch")
        lines = [
            f"time: {total / 1e3:.2f} ms in the {len(timed)} calls that were measured, PyTorch's time / theirs "
            f"{torch_total / total:.2f}x; {covered / total:.0%} of it in chosen algorithms"
        ]
        most = sorted(timed, key=lambda pair: -pair[0])[:5]
        return [*lines, f"cost most: {'; '.join(f'{a.name} {t / 1e3:.3g} ms ({_advice(a)})' for t, a in most)}"]

    def _shown(self) -> list[Layer]:
        """The layers, those that cost most first where that is known, and ReLUs alike as one."""
        alike: dict[Any, list[Layer]] = {}
        for layer in self.layers:
            fold = (layer.requested, layer.used, layer.reason) if layer.operation == "relu" else id(layer)
            alike.setdefault(fold, []).append(layer)
        shown = []
        for group in alike.values():
            if len(group) < _MANY:
                shown += group
                continue
            shapes = group[0].shapes if len({str(layer.shapes) for layer in group}) == 1 else None
            calls = None if group[0].calls is None else sum(layer.calls or 0 for layer in group)
            reason = "; ".join(filter(None, [group[0].reason, "optimize fuses them into the layers before"]))
            times = (
                sum(layer.time_us or 0 for layer in group) or None,
                sum(layer.torch_us or 0 for layer in group) or None,
            )
            name, left = _common([layer.name for layer in group]), sum(layer.torch_calls for layer in group)
            one = replace(group[0], name=name, calls=calls, torch_calls=left, shapes=shapes, reason=reason)
            shown.append(replace(one, time_us=times[0], torch_us=times[1]))
        return sorted(shown, key=lambda layer: -(layer.time_us or 0))

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of layers; columns that would be empty are left out."""
        heads = ["layer", "operation", "requested", "used", "us", _SPEEDUP, "calls", "shapes", "layout", "packs"]
        heads += ["workspace", "reason"]
        rows = []
        for layer in self._shown():
            calls = "" if layer.calls is None else str(layer.calls)
            if layer.torch_calls:
                calls += f" ({layer.torch_calls} torch)"
            shapes = " ".join("x".join(map(str, shape)) for shape in (layer.shapes or [])[:2])
            packs = f"{shown_bytes(layer.packed_bytes)} {layer.packs}".strip() if layer.packs else ""
            workspace = shown_bytes(layer.workspace or 0)
            times = ["" if layer.time_us is None else f"{layer.time_us:.1f}"]
            times += ["" if layer.speedup is None else f"{layer.speedup:.2f}x"]
            cells = [
                layer.name,
                layer.operation,
                layer.requested or "",
                layer.used,
                *times,
                calls,
                shapes,
                layer.layout,
            ]
            rows.append([*cells, packs, workspace, layer.reason])
        wanted = [i for i in range(len(heads)) if i < 4 or any(row[i] for row in rows)]
        return [heads[i] for i in wanted], [[row[i] for i in wanted] for row in rows]

    def _unreached_rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of modules with calls that could not be replaced; equal ones, such as a network's blocks, are one row."""
        alike: dict[tuple[str, str, str], list[str]] = {}
        for module in self.unreached:
            calls = ", ".join(f"{o} x{n}" for o, n in module.seen.items()) or ", ".join(module.source)
            alike.setdefault((module.type, calls, module.reason), []).append(module.name)
        rows = [[_common(names), *what] for what, names in alike.items()]
        return ["not replaced in", "type", "calls", "reason"], rows

    def _uncovered_rows(self) -> tuple[list[str], list[list[str]]]:
        """The table of modules that are not covered, those alike as one row."""
        alike: dict[tuple[str, str], list[str]] = {}
        for module in self.uncovered:
            alike.setdefault((module.type, module.reason), []).append(module.name)
        return ["not covered", "type", "reason"], [[_common(names), *what] for what, names in alike.items()]

    def __str__(self) -> str:
        above = [] if self.optimization is None else [str(self.optimization)]
        return "\n".join(filter(None, [*above, *self.summary, *([] if above and not self.layers else self._table())]))

    def _table(self) -> list[str]:
        """The lines of the layers and of the modules with calls that could not be replaced."""
        shown: list[str] = []
        notes: dict[str, int] = {}  # long reasons, below the table: a layer is one line
        heads, rows = self._rows()
        for row in rows if heads[-1] == "reason" else ():
            if len(row[-1]) > _LONG:
                row[-1] = f"[{notes.setdefault(row[-1], len(notes) + 1)}]"
        # A layer's name is what selectors need and must not be cut; the other table has sentences, which are folded.
        folded = ((self._unreached_rows(), _tables.WIDTH), (self._uncovered_rows(), _tables.WIDTH))
        for (columns, lines), width in (((heads, rows), _WIDEST), *folded):
            if lines:
                shown += _tables.lines(_tables.table(columns, lines), width=width)
        return [*shown, *(f"[{number}] {note}" for note, number in notes.items())]

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        if self.optimization is not None:  # no tables of its own in HTML
            return f"<pre>{html.escape(str(self))}</pre>"
        parts = ["<ul>", *(f"<li>{html.escape(line)}</li>" for line in self.summary), "</ul>"]
        for heads, rows in (self._rows(), self._unreached_rows(), self._uncovered_rows()):
            if rows:
                lines = [("th", heads), *(("td", row) for row in rows)]
                cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in lines)
                parts += ["<table>", *(f"<tr>{row}</tr>" for row in cells), "</table>"]
        return "\n".join(parts)


_WIDEST, _LONG = 1000, 24
_MANY = 3  # so many ReLUs alike are one row
_SPEEDUP = "PyTorch's time / its"


def _advice(layer: Layer) -> str:
    """What could be done about a layer that costs much."""
    if layer.operation in ("relu", "flatten"):
        return f"{layer.used}: optimize fuses it"
    if layer.packs == "each call":
        return f"{layer.used}: packs its weight at every call"
    if layer.layout.startswith("NCHW") and layer.operation == "conv2d":
        return f"{layer.used}: reads NCHW, inputs in torch.channels_last may be faster"
    if layer.used == "torch":
        return f"PyTorch's: {layer.reason or 'the fastest that was measured'}"
    speed = f", {layer.speedup:.2f}x" if layer.speedup else ""
    return f"{layer.used}{speed}; optimize fuses what follows it"


def _why_uncovered(module: nn.Module) -> str:
    """Why a module of PyTorch's with weights of its own has no algorithm; "" for others."""
    if hasattr(module, "_packed_params"):
        return "quantized weights have no algorithm"
    if not is_of_torch(module) or next(module.parameters(recurse=False), None) is None:
        return ""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit compiled it: swap before that"
    return "no algorithm of this operation"


def _common(names: list[str]) -> str:
    """One name, or a pattern of several with their number: equal parts as they are, others as *."""
    parts = [name.split(".") for name in names]
    if len(names) == 1:
        return names[0]
    if len({len(p) for p in parts}) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return f"{'.'.join(p[0] if len(set(p)) == 1 else '*' for p in zip(*parts, strict=True))} ({len(names)})"


def explain(model: nn.Module) -> Report:
    """For each layer of `model`: what was requested, what computes it, why, shapes, calls, memory layout, packs and workspace.

    str() of the report is a table with a summary below it, `.summary` the summary alone, `.filter(...)` a part of the report and
    `.to_dict()` what can be written as JSON; notebooks show HTML. For a model that `torch.compile(model, backend="ai3")`
    returned, the report lists the steps and rewrites of each graph, once the model was called; for other backends, which
    algorithms the swapped layers call, and how to see the rest.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.explain needs an nn.Module, got {type(model).__name__}")
    optimization = vars(model).get("_ai3_report")
    if optimization is not None:
        return Report([], [], optimization)
    if _compiler(model) is not None:
        return _compiled(model)
    layers, unreached, optimized, notes, uncovered = _listed(model)
    return Report(layers, unreached, None, optimized, notes, uncovered)


def _compiler(module: nn.Module) -> str | None:
    """The backend of the torch.compile that made a module or was called by its `compile()`; None where none was."""
    own = vars(module)
    if own.get("_compiled_call_impl") is not None:
        return "ai3" if graphs_of(module) else ""  # which backend it has does not show
    context = own.get("dynamo_ctx")
    if context is None or "_orig_mod" not in module._modules or not callable(getattr(context, "callback", None)):
        return None
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)


def _compiled(model: nn.Module) -> Report:
    """Of a model that torch.compile computes."""
    backend = _compiler(model)
    layers, unreached, optimized, notes, uncovered = _listed(model)
    if list(optimized) == ["_orig_mod"]:  # of what `optimize` returned
        return Report([], [], optimized["_orig_mod"], {}, notes)
    if backend != "ai3":
        return Report(layers, unreached, None, optimized, notes, uncovered)
    parts, left = [], {}
    for number, graph in enumerate(graphs_of(model), 1):
        name = f"graph {number} of torch.compile"
        if graph.report is not None:
            parts.append(replace(graph.report, name=name))
        else:
            left[name] = f"Inductor compiled it: {graph.left}"
    if not parts and not left:
        left[""] = (
            "torch.compile has compiled none of it yet: call the model (under torch.inference_mode()), then explain it"
        )
    swapped = any(layer.calls is not None for layer in layers)
    return Report(
        layers if swapped else [], unreached if swapped else [], OptimizeReport(parts, left), optimized, notes
    )


def _note(backend: str, name: str) -> str:
    """What a report does not see of a compiled module."""
    whose = f"the compiler (backend {backend!r})" if backend else "the compiler"
    where = f"{name}: " if name else ""
    return (
        f"{where}torch.compile computes it. Layers with an algorithm call its operator from compiled code, too, where calls are "
        f"not counted; {whose} decides what computes the others: TORCH_LOGS=output_code shows it"
    )


def _listed(
    model: nn.Module,
) -> tuple[list[Layer], list[Unreached], dict[str, OptimizeReport], list[str], list[Uncovered]]:
    """The rows of a report, and its notes."""
    layers, unreached, optimized, notes, uncovered = [], [], {}, [], []
    operations = registry.operations()
    seen: set[nn.Module] = set()
    others: list[nn.Module] = []  # whose own code may make calls
    inside: list[str] = []  # how names of modules begin that torch.compile computes
    for name, module in reachable(model):
        if module in seen:
            continue
        seen.add(module)
        backend = _compiler(module)
        if backend is not None and not any(map(name.startswith, inside)):
            inside.append(f"{name}." if name else "")
            if backend != "ai3":
                notes.append(_note(backend, name))
            elif name:
                notes.append(
                    f"{name}: torch.compile computes it (backend 'ai3'); ai3_ops.explain of this module alone lists its steps"
                )
        if is_optimized(module):
            optimized[name] = vars(module)["_ai3_report"]
            continue
        mark = vars(module).get("_ai3")
        leaf = leaf_class(original_class(module))
        lost = vars(module).get("_ai3_lost")
        if lost is not None:
            kind = module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
            seen_calls = lost["seen"] | lost["composed"]
            unreached.append(Unreached(name, kind, lost["reason"], seen_calls, lost["source"]))
        if isinstance(mark, Call):
            layers.append(_layer(name, mark, "", module._parameters.get("weight")))
        elif isinstance(mark, list):
            layers += [_layer(name, Call.of_note(note), "") for note in mark]
        elif isinstance(mark, Sites):
            layers += [_layer(name, call, mark.trouble) for call in mark.calls.values()]
        elif leaf is not None and leaf._ai3_operation in operations and not getattr(module, "return_indices", False):
            layers.append(Layer(name, leaf._ai3_operation, None, "torch", "", None, None, 0))
        elif lost is None and (reason := _why_uncovered(module)):
            kind = module.original_name if isinstance(module, torch.jit.ScriptModule) else module._get_name()
            uncovered.append(Uncovered(name, kind, reason))
        elif leaf is None and not is_of_torch(module) and not isinstance(module, torch.jit.ScriptModule):
            others.append(module)
    if not any(name in vars(module) for module in seen for name in MARKS) and (
        unlisted := sum(len(found_in(module).sites) for module in others)
    ):
        notes.append(
            f"not listed before a swap: {unlisted} calls in the code of modules (F.conv2d, torch.relu and the like)"
        )
    packed = {layer.name.partition(":")[0] for layer in layers if layer.packs == "kept"}
    unversioned = [
        name
        for name, module in model.named_modules()
        if name in packed and any(p.is_inference() for p in module.parameters(recurse=False))
    ]
    if unversioned:
        notes.append(
            "weights made in inference mode have no version, so that a change in place shows only where it reaches a sample of "
            f"the elements: {listed(unversioned)}"
        )
    layers = [
        replace(layer, used="torch.compile")
        if layer.used == "torch" and any(map(layer.name.startswith, inside))
        else layer
        for layer in layers
    ]
    return layers, unreached, optimized, notes, uncovered


def _layer(module: str, call: Call, trouble: str, weight: Tensor | None = None) -> Layer:
    call.revive()
    swapped = call.algorithm is not None
    rule = call.algorithm is not None and registry.is_rule(call.operation, call.algorithm.name)
    used, why = str(call.algorithm), ""
    if call.operator is None:  # perhaps an algorithm that this process has not registered
        used = "torch"
    elif rule and call.example is not None and _is_left(call, weight):
        used, why = "torch", "" if call.reason else call.why_left
    elif rule and call.example is not None:
        used, why = _chosen(call)
    elif rule:
        why = _UNCALLED if "not called by the run" in call.reason else _UNKNOWN
    training = (
        "training steps (calls that record gradients) are left to PyTorch, which is faster there"
        if call.left_training
        else ""
    )
    formats = "its output is given in NCHW, since views need NCHW" if call.writes_nchw else ""
    if call.reads_last and not formats:
        formats = "its input is given in NHWC, since its weight must keep its strides"
    memory = _memory(call, used) if call.operator is not None and call.example is not None else {}
    each = memory.get("packs") == "each call"
    computed = ""
    if each and call.computed and call.computed not in call.reason:
        computed = f"its weight is computed at every call: {call.computed} first, and its pack is kept"
    elif each and call.gathered:
        computed = "its weight is gathered by FSDP at every call, and packed each time"
    reasons = (
        call.missing,
        call.reason,
        trouble if swapped else "",
        why,
        training,
        formats if swapped else "",
        computed,
    )
    return Layer(
        module + call.suffix,
        call.operation,
        call.requested,
        used,
        "; ".join(filter(None, reasons)),
        call.shapes(),
        call.calls if swapped else None,
        call.torch_calls,
        time_us=call.times[0],
        torch_us=call.times[1],
        **({"layout": _layout(call) if swapped else ""} | memory),
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


_UNCALLED = "chosen at the first call"
_UNKNOWN = "not known yet: chosen at the first call, or at a swap with example inputs"


def _is_left(call: Call, weight: Tensor | None) -> bool:
    """Whether `default` leaves the first call seen to PyTorch, with the weight as it lies now."""
    assert call.example is not None
    specs = list(call.example)
    if weight is not None and len(specs) > 1 and isinstance(specs[1], Spec) and specs[1].shape == tuple(weight.shape):
        specs[1] = Spec.of(weight)
    if any(a.device != "cpu" for a in specs if isinstance(a, Spec)):
        return False

    def like(a: Any) -> Any:  # memory that is not written takes no room
        return torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="cpu") if isinstance(a, Spec) else a

    try:
        return call.leaves(tuple(map(like, specs)))
    except RuntimeError:  # which the call would raise, too
        return False


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
