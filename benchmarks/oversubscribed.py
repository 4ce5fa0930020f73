"""More threads than cores: what networks lose by it, swapped and in PyTorch.

    python -m benchmarks.oversubscribed [--models squeezenet1_1 ...] [--times 2 4] [--turns 5]

Each network runs with as many threads as the machine has cores, then with that many times as many; every engine in a process of
its own (`python -m ai3_ops bench`). Networks that were measured before stay on the page until they are measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ai3_ops.cli import bench, models
from benchmarks import measure

PAGE = measure.ROOT / "docs" / "benchmarks" / "oversubscribed.md"
ENGINES = ("eager", "swap default", "optimize")
MODELS = ("alexnet", "squeezenet1_1", "googlenet", "densenet121", "vgg16", "mobilenet_v3_large", "vit_b_16")


def medians(name: str, threads: int, turns: int) -> dict[str, float]:
    """Milliseconds of each engine."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        found = bench.measure(models.named(name), ENGINES, threads, turns, bar)
    for engine, one in found.items():
        if one.absent:
            raise RuntimeError(f"{name} with {threads} threads: {engine} has no times: {one.absent}")
    return {engine: one.median_ms for engine, one in found.items()}


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    cores = data["cores"]
    yield "# More threads than cores"
    yield ""
    yield "Written by `python -m benchmarks.oversubscribed`. Milliseconds that a network takes with one thread for each of"
    yield f"the {cores} cores, and how many more with more threads than cores, with the same as a factor: PyTorch eager,"
    yield "swapped by `default`, and optimized; float32, NCHW, batch 1. What is lost is waiting: at the end of each"
    yield "parallel section all wait for a thread that has no core. Where there is less to compute, as much waiting is a"
    yield "larger part of the time."
    yield ""
    yield from measure.table(("machine", ""), data.get("machine", {}).items())
    yield ""
    head = ["network", *(f"{threads} threads, {engine}" for threads in (cores, *data["threads"]) for engine in ENGINES)]
    rows = [[name, *_cells(found, cores, data["threads"])] for name, found in data["networks"].items()]
    yield from measure.table(head, rows, " " + "r" * len(head))


def _cells(found: dict[str, dict[str, float]], cores: int, threads: list[int]) -> Iterator[str]:
    own = found[str(cores)]
    yield from (f"{own[engine]:.1f}" for engine in ENGINES)
    for count in threads:
        for engine in ENGINES:
            time = found[str(count)][engine]
            yield f"{time - own[engine]:+.1f} ({time / own[engine]:.2f})"


def main() -> int:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oversubscribed", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--times", nargs="+", type=int, default=(2, 4), help="as many threads as cores")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    os.environ.pop("OMP_WAIT_POLICY", None)  # measure's: workers of the engines whose turn it is not would spin
    load, cores = measure.Load(), os.cpu_count() or 1
    threads = [cores * times for times in options.times]
    new: dict[str, Any] = {"cores": cores, "threads": threads, "networks": {}}
    data = measure.stored(options.output, new)
    if (data["cores"], data["threads"]) != (cores, threads):
        data = new
    for name in options.models:
        data["networks"][name] = {str(n): medians(name, n, options.turns) for n in (cores, *threads)}
        print(name, json.dumps(data["networks"][name]))
        data["machine"] = measure.machine(cores, load)
        measure.write(options.output, page(data), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
