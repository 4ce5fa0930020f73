"""Measurements of layers: from the cache, or made now."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ai3_ops.measuring import records, shipped, timing
from ai3_ops.measuring.timing import Layer, Measured, Surroundings
from ai3_ops.tuning.callgraph import Edge
from ai3_ops.tuning.settings import TOLERANCE, Settings

CONVERTED = 4e9  # bytes of a tensor a second that change their layout, about, on one core
Times = dict[tuple[Layer, str], dict[str, Measured]]  # of a layer in a layout, by algorithm; the baseline first


class Meter:
    """Measures, unless the cache knows, or a table that came with the package."""

    def __init__(self, network_bytes: int, settings: Settings, cache: bool) -> None:
        self.surroundings = Surroundings(network_bytes)
        self.p99, self.approximate = settings.objective == "p99", settings.allow_approximate
        # Under a small tolerance, what is far slower may be the only one that holds it.
        self.everything = settings.tolerance is not None and settings.tolerance < TOLERANCE
        self.cache = records.Cache(cache)
        # Tables have medians, and nothing of what needs too much memory to be fast.
        self.shipped = (
            cache and settings.objective == "latency" and settings.memory_limit is None and not self.everything
        )
        self.told: set[tuple[str, str]] = set()  # algorithms whose failure a warning has named

    def key(self, layer: Layer, layout: str) -> dict[str, Any]:
        """What an entry depends on."""
        surroundings = {"bytes": self.surroundings.bytes, "p99": self.p99, "approximate": self.approximate}
        return layer.key() | {"layout": layout} | surroundings | ({"everything": True} if self.everything else {})

    def known(self, layer: Layer) -> dict[str, dict[str, Measured]] | None:
        """All layouts' measurements, as `known_in`."""
        found = {}
        for layout in layer.layouts:
            entry = self.known_in(layer, layout)
            if entry is None:
                return None
            found[layout] = entry
        return found

    def known_in(self, layer: Layer, layout: str) -> dict[str, Measured] | None:
        """One layout's measurements from the cache, if it has them; else those that came with the package."""
        key = self.key(layer, layout)
        entry = self.cache.get(key)
        if entry is None:
            return shipped.known(layer, layout, layer.candidates(layout, self.approximate)) if self.shipped else None
        try:
            found = timing.from_json(entry)
            if list(found) != layer.candidates(layout, self.approximate):
                raise ValueError("has other algorithms")
        except (TypeError, ValueError, AttributeError) as error:
            self.cache.broken(key, error)
            return None
        self.tell(layer, found, "; this is from the cache, cache=False tries it again")
        return found

    def measured(self, layer: Layer, end: float = math.inf) -> dict[str, dict[str, Measured]]:
        """All layouts', now; OutOfTime where they take longer than until `end`, by `timing.clock`."""
        return {layout: self.measured_in(layer, layout, end) for layout in layer.layouts}

    def measured_in(self, layer: Layer, layout: str, end: float = math.inf) -> dict[str, Measured]:
        """One layout's, now."""
        names = layer.candidates(layout, self.approximate)
        seconds = math.inf if end == math.inf else end - timing.clock()
        found = timing.measure(layer, layout, names, self.surroundings, self.p99, seconds, self.everything)
        self.cache.put(self.key(layer, layout), timing.to_json(found))
        self.tell(layer, found)
        return found

    def tell(self, layer: Layer, found: Mapping[str, Measured], more: str = "") -> None:
        """A warning of each algorithm that fails, once: at the first layer that shows it."""
        for name, m in found.items():
            if m.failed and not m.rough and (layer.operation, name) not in self.told:
                self.told.add((layer.operation, name))
                warnings.warn(
                    f"ai3_ops.tune: {layer.operation} {name!r} fails on the layer {layer} and is not chosen there: "
                    f"{m.failed}{more}",
                    stacklevel=8,
                )

    def conversion(self, edge: Edge, layer: Layer, end: float = math.inf) -> float:
        """Microseconds to bring the edge's tensor into channels_last; after `end`, by its size."""
        key = {
            "operation": "conversion", "shape": list(edge.shape), "dtype": str(layer.dtype), "device": layer.device,
            "bytes": self.surroundings.bytes,
        }  # fmt: skip
        known = self.cache.get(key)
        if isinstance(known, float):
            return known
        if timing.clock() >= end:
            return 1e6 * math.prod(edge.shape) * layer.dtype.itemsize / CONVERTED
        known = float(timing.conversion(edge.shape, layer.dtype, layer.device, self.surroundings))
        self.cache.put(key, known)
        return known


def shown(layers: list[Layer], progress: bool) -> Iterator[Layer]:
    """With a bar on standard error: which one is measured, how many there are, and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (progress and layers)) as bar:
        task = bar.add_task("", total=len(layers))
        for layer in layers:
            bar.update(task, description=str(layer))
            yield layer
            bar.advance(task)
