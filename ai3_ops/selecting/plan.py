"""Plan: the algorithm that `ai3_ops.tune` chose for each layer, as a JSON file that a person can read and edit."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from torch import nn

from ai3_ops import _machine, _tables
from ai3_ops._tables import shown_bytes
from ai3_ops.registry import near

VERSION = 1
CONTIGUOUS, CHANNELS_LAST = LAYOUTS = ("contiguous", "channels_last")
_OPTIONAL = (int, float, type(None))


@dataclass(frozen=True)
class PlannedLayer:
    """What computes one layer, and why. Only operation, algorithm and layout have an effect; the rest is for reading."""

    operation: str
    algorithm: str  # "torch" is PyTorch's own
    # Memory format of a conv2d's weight, and so of its output: "channels_last" or "contiguous"; None does not change it.
    layout: str | None = None
    time_us: float | None = None  # of one call; None where it was not measured
    error: float | None = None  # max|y - y64| / max|y64|, where y64 is computed in float64
    workspace_bytes: int | None = None  # that a call allocates
    packed_bytes: int | None = None  # of the packed weight that the layer keeps
    reason: str = ""  # why this algorithm
    shapes: list[list[int]] = field(default_factory=list)  # of the tensors of its first call
    # All that were measured, by algorithm and layout.
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def torch_us(self) -> float | None:
        """The time of PyTorch's implementation, in the layout in which it is fastest."""
        times = [m.get("time_us") for name, m in self.candidates.items() if name.split()[0] == "torch"]
        return min((t for t in times if t is not None), default=None)


@dataclass(frozen=True)
class Plan:
    """The algorithm of each layer of a model; `str()` is a table. Given where selectors can be, it is followed exactly."""

    layers: dict[str, PlannedLayer]
    machine: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what `tune` was asked for

    _verifier: ClassVar[Callable[..., Plan]]  # what `verify` does, set by `ai3_ops.tuning`, which is built on this

    # Files ------------------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, which can be written as JSON."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan of what `to_dict` returned; a layer needs only operation and algorithm. ValueError for anything else."""
        if not isinstance(data, Mapping) or not isinstance(data.get("layers"), Mapping):
            _refuse('needs {"version": 1, "layers": {name: {"operation": …, "algorithm": …}}}', data)
        if data.get("version") != VERSION:
            _refuse(f"needs version {VERSION}", data.get("version"))
        for name in ("machine", "settings"):
            if not isinstance(data.get(name, {}), Mapping):
                _refuse(f"needs a dict as {name!r}", data[name])
        layers = {str(name): _layer(str(name), value) for name, value in data["layers"].items()}
        return cls(layers, dict(data.get("machine", {})), dict(data.get("settings", {})))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a file that `save` or a person wrote; ValueError where it is not a plan, OSError where it cannot be read."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not a plan: needs JSON, as Plan.save writes it: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    # Reading ----------------------------------------------------------------------------------------------------------
    @property
    def time_us(self) -> float:
        """The sum of the layers' times."""
        return sum(layer.time_us or 0.0 for layer in self.layers.values())

    @property
    def packed_bytes(self) -> int:
        """Of all packed weights."""
        return sum(layer.packed_bytes or 0 for layer in self.layers.values())

    @property
    def workspace_bytes(self) -> int:
        """The largest of the layers' workspaces."""
        return max((layer.workspace_bytes or 0 for layer in self.layers.values()), default=0)

    def __str__(self) -> str:
        texts, numbers = (
            ("layer", "operation", "algorithm", "layout"),
            ("us", "PyTorch's time / its", "error", "workspace", "pack"),
        )
        rows = []
        for name, layer in self.layers.items():
            torch_us = layer.torch_us
            cells = (
                "" if layer.time_us is None else f"{layer.time_us:.1f}",
                "" if not layer.time_us or not torch_us else f"{torch_us / layer.time_us:.2f}x",
                "" if layer.error is None else f"{layer.error:.0e}",
                shown_bytes(layer.workspace_bytes),
                shown_bytes(layer.packed_bytes),
            )
            rows.append((name, layer.operation, layer.algorithm, layer.layout or "", *cells, layer.reason))
        lines = _tables.lines(_tables.table((*texts, *numbers, "why"), rows, right=numbers, fold=True))
        timed = sum(layer.time_us is not None for layer in self.layers.values())
        of_those = "" if timed == len(self.layers) else f" of the {timed} that were measured"
        total = (
            f"{len(self.layers)} layers, {self.time_us / 1e3:.2f} ms in total{of_those}; packed weights "
            f"{shown_bytes(self.packed_bytes) or '0 B'}, largest workspace {shown_bytes(self.workspace_bytes) or '0 B'}"
        )
        return "\n".join([*lines, total])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Saves a picture: each layer's time beside PyTorch's, colored by algorithm, and each algorithm's share.

        The file's extension decides the format, as in matplotlib. ImportError without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("Plan.plot needs matplotlib: pip install 'ai3_ops[demo]'") from None
        timed = {name: layer for name, layer in self.layers.items() if layer.time_us}
        unmeasured = [name for name in self.layers if name not in timed]
        algorithms = sorted({layer.algorithm for layer in timed.values()} - {"torch"})
        palette = [f"C{i}" for i in range(10) if i != 7]
        colors = {"torch": "#8a8f98"} | {a: palette[i % len(palette)] for i, a in enumerate(algorithms)}
        figure = Figure(figsize=(min(40, 6 + 0.16 * len(self.layers)), 7), dpi=100, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[3, 1])
        rows = range(len(timed))
        above.bar(
            rows, [(x.torch_us or 0) / 1e3 for x in timed.values()], color="#e3e6ea", width=0.9, label="PyTorch's"
        )
        for name, color in colors.items():
            here = [i for i, layer in enumerate(timed.values()) if layer.algorithm == name]
            heights = [(layer.time_us or 0) / 1e3 for layer in timed.values() if layer.algorithm == name]
            if here:
                above.bar(here, heights, color=color, width=0.6, label=name)
        above.set_xticks(range(len(self.layers)), [*timed, *unmeasured], rotation=90, fontsize=6)
        above.set_ylabel("milliseconds per call")
        for i, name in enumerate(unmeasured, len(timed)):
            above.axvspan(i - 0.45, i + 0.45, color="#f4f5f7", hatch="//", ec="#b9bec6", lw=0)
            above.text(
                i, 0, f" {self.layers[name].algorithm}, not measured", rotation=90, ha="center", va="bottom", fontsize=6
            )
        of = f"\n{len(unmeasured)} more were not measured" if unmeasured else ""
        above.set_title(f"{len(timed)} layers, {self.time_us / 1e3:.2f} ms; behind them in grey: PyTorch's{of}")
        above.legend(fontsize=8)
        left = 0.0
        for name, color in colors.items():
            share = sum((layer.time_us or 0) / 1e3 for layer in timed.values() if layer.algorithm == name)
            if share:
                below.barh([0], [share], left=left, color=color)
                below.text(left + share / 2, 0, name, ha="center", va="center", fontsize=8, rotation=90)
            left += share
        below.set_yticks([])
        below.set_xlabel("milliseconds, by algorithm")
        figure.savefig(path)

    # Using ------------------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def check_machine(self, stacklevel: int) -> None:
        """Warns where the plan was measured on another machine than this one; `stacklevel` as in `warnings.warn`."""

        here = _machine.machine()
        other = [f"{k}: {v} there, {here[k]} here" for k, v in self.machine.items() if here.get(k, v) != v]
        if other:
            warnings.warn(
                f"ai3_ops: the plan was measured on another machine ({'; '.join(other)}); plan.verify(model, "
                "example_inputs) measures its choices on this one",
                stacklevel=stacklevel,
            )

    def verify(self, model: nn.Module, example_inputs: Any, *, cache: bool = True, progress: bool = True) -> Plan:
        """Times the plan's choices on this machine, and chooses again for layers whose algorithm is not the fastest here.

        Each layer's algorithm is timed beside `default`'s, PyTorch's and the fastest other one in the plan. A layer whose
        algorithm is slower than one of them by more than the noise is measured as by `tune`, with the plan's settings.
        Returns a plan for this machine. ValueError where the plan names layers or algorithms that do not exist.
        """
        return Plan._verifier(self, model, example_inputs, cache=cache, progress=progress)


def _layer(name: str, value: Any) -> PlannedLayer:
    if not isinstance(value, Mapping):
        _refuse(f"layer {name!r} needs a dict", value)
    for key in ("operation", "algorithm"):
        if not isinstance(value.get(key), str):
            _refuse(f"layer {name!r} needs a string as {key!r}", value.get(key))
    known = [f.name for f in fields(PlannedLayer)]
    for key in value:
        if key not in known:
            _refuse(f"layer {name!r} has an unknown key {key!r}{near(str(key), known)}", value[key])
    if value.get("layout") not in (None, *LAYOUTS):
        _refuse(f"layer {name!r} needs null, {' or '.join(map(repr, LAYOUTS))} as layout", value["layout"])
    for key in ("time_us", "error", "workspace_bytes", "packed_bytes"):
        if not isinstance(value.get(key), _OPTIONAL):
            _refuse(f"layer {name!r} needs a number or null as {key!r}", value[key])
    candidates = value.get("candidates", {})
    if not isinstance(candidates, Mapping) or not all(
        isinstance(k, str) and k.split() and isinstance(m, Mapping) and isinstance(m.get("time_us"), _OPTIONAL)
        for k, m in candidates.items()
    ):
        _refuse(f"layer {name!r} needs {{algorithm: {{\"time_us\": …, …}}}} as 'candidates'", candidates)
    if not isinstance(value.get("shapes", []), list):
        _refuse(f"layer {name!r} needs a list as 'shapes'", value["shapes"])
    if not isinstance(value.get("reason", ""), str):
        _refuse(f"layer {name!r} needs a string as 'reason'", value["reason"])
    return PlannedLayer(**value)


def _refuse(needs: str, got: Any) -> NoReturn:
    text = repr(got)
    raise ValueError(f"not a plan: {needs}; got {text if len(text) < 60 else text[:57] + '...'}")
