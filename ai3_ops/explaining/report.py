"""What `ai3_ops.explain` says about a module that `optimize` returned."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ai3_ops import _tables
from ai3_ops._tables import shown_bytes
from ai3_ops.graph.network import Rewrite
from ai3_ops.selecting.selectors import listed

LITTLE = 1.05  # so many times as fast is worth a sentence about what keeps a model from more


@dataclass
class Step:
    """One step of the optimized network."""

    layers: list[str]  # names of the model's modules that it computes
    operation: str
    algorithm: str  # "torch" where PyTorch computes it
    output: tuple[int, ...]
    detail: str = ""  # what is fused into it
    reason: str = ""  # why this algorithm: "measured here", "shipped" (measurements), "default", "named"; "once a size"


@dataclass
class Optimization:
    """What was done to one module, and what it gained on the example inputs."""

    name: str  # the module's in the model, "" for the model itself
    steps: list[Step] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Why the module stays as it was: the steps and rewrites are then those that were tried, and do not run. "" where they run.
    unchanged: str = ""
    warned: bool = False  # of why it stays
    before_ms: float | None = None  # time of a call of the module as it was,
    after_ms: float | None = None  # and of the optimized one, measured in turns
    outside: list[str] = field(
        default_factory=list
    )  # what PyTorch computes between the programs, by the bytes that it reads
    error: float | None = None  # of the outputs for the example inputs, against float64
    packed_bytes: int = 0  # of the weights in the programs, packed
    memory_bytes: int = 0  # of the arena, activations and workspaces, of the program that needs most on the example
    workspace_bytes: int = 0  # the largest workspace in it

    def shown(self) -> list[Any]:
        """Sentences and tables of a report."""
        head = self.name or "the model"
        if self.before_ms and self.after_ms:
            head += f": {self.before_ms:.3g} ms before, {self.after_ms:.3g} ms after"
        if self.error is not None:
            head += f", error {self.error:.2g}"
        parts: list[Any] = [head]
        if self.unchanged:
            tried = "; tried, and not run:" if self.steps else ""
            parts.append(f"stays as it was: {self.unchanged}{tried}")
        if self.packed_bytes:
            used = [shown_bytes(n) or "0 B" for n in (self.packed_bytes, self.memory_bytes, self.workspace_bytes)]
            parts.append("{} of packed weights, {} of arena, activations and workspaces (the largest {})".format(*used))
        rows = [
            (
                step.operation,
                step.algorithm,
                step.reason,
                ", ".join(name or "(the module itself)" for name in step.layers),
                step.detail,
                "x".join(map(str, step.output)),
            )
            for step in self.steps
        ]
        parts.append(_tables.table(("step", "algorithm", "chosen", "layers", "fused", "output"), rows))
        errors: dict[tuple[str, str], list[float]] = {}
        for r in self.rewrites:
            errors.setdefault((r.rule, r.detail), []).extend([] if r.error is None else [r.error])
        times = Counter((r.rule, r.detail) for r in self.rewrites)
        counted = [
            (f"{rule} ({detail})" if detail else rule, str(times[rule, detail]), f"{max(found):.1g}" if found else "")
            for (rule, detail), found in errors.items()
        ]
        parts.append(_tables.table(("rewrite", "times", "error"), counted))
        return parts + [f"note: {note}" for note in self.notes]


@dataclass
class OptimizeReport:
    """`parts`: the model, or those of its modules that could be captured; `left`: what was not changed, and why."""

    parts: list[Optimization] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    before_ms: float | None = None  # of a call of the whole model, where it was captured in parts,
    after_ms: float | None = None  # and with these optimized

    def gains_nothing(self) -> str:
        """Why all of a model runs as it was, and what to do about it; "" where something is optimized, or that was said."""
        if any(part.warned or not part.unchanged for part in self.parts):
            return ""
        part = self.parts[0] if self.parts else None
        if "" not in self.left and part is not None:
            return f"{part.unchanged}; ai3_ops.explain lists what was tried"
        reasons = [self.left.get("", ""), *(f"{name}: {reason}" for name, reason in list(self.left.items())[1:3])]
        return (
            f"{'; '.join(filter(None, reasons))}; none of its modules gains alone, either: ai3_ops.swap chooses by layer without "
            "a graph, and a module that is given alone, without what stands in the way, can be optimized"
        )

    def gains_little(self) -> str:
        """By how little a model gains, and why; "" where that is more, or was not measured."""
        before, after, outside = self.before_ms, self.after_ms, list[str]()
        if before is None and len(self.parts) == 1:
            before, after, outside = self.parts[0].before_ms, self.parts[0].after_ms, self.parts[0].outside
        if not before or not after or before >= LITTLE * after:
            return ""
        named = [f"{name or 'the model itself'} is not captured ({reason})" for name, reason in self.left.items()][:2]
        named += [f"PyTorch computes {listed(outside)}"] if outside else []
        why = f": {'; '.join(named)}" if named else ""
        return f"{before / after:.2f} times as fast as before{why}; ai3_ops.explain lists what computes each step"

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and dicts, which can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        shown: list[Any] = []
        if self.before_ms and self.after_ms:
            took = f"{self.before_ms:.3g} ms before, {self.after_ms:.3g} ms after"
            shown.append(f"the model, of which {len(self.parts)} parts were captured: {took}")
        for part in self.parts:
            shown += part.shown()
        if self.left:
            rows = [(name or "the model itself", reason) for name, reason in self.left.items()]
            shown.append(_tables.table(("not captured", "reason"), rows))
        return "\n".join(_tables.lines(*shown))
