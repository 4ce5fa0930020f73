"""How much faster networks would be on more threads than this machine has cores: docs/benchmarks/threads.md. Nothing is measured.

Kernels that compute nothing (the test program `ai3_splits`, built by
``cmake -S . -B build/native -DAI3_TEST_SPLITS=ON && cmake --build build/native --target ai3_splits``) say how each layer's work
is split; a model of a processor, stated in the page, makes times of it.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ai3_ops.cli import bench
from benchmarks import measure
from benchmarks.measure import Layer

THREADS = 4, 8, 16, 32, 64
BATCHES = 1, 10
PROGRAM = measure.ROOT / "build" / "native" / "tests" / "cpp" / "ai3_splits"
PAGE = measure.ROOT / "docs" / "benchmarks" / "threads.md"
VECTORS = 6e9  # multiply-adds of 16 floats a second and core: two a cycle at 3 GHz, 192 GFLOP/s
MEMORY = 25e9, 400e9  # bytes a second: of one core, of the processor
STARTS = 5e-6  # seconds in which a section's threads come and go
MOST = 1.15  # a thread's work over the mean: above that a split counts as uneven

INTRODUCTION = f"""\
# Many threads: a prediction

Written by `python -m benchmarks.threads` from how each layer's work is split; **nothing here is measured**. Kernels compiled
without their arithmetic, for AVX-512, whose vectors split work least, say into which items every parallel section falls; what
each thread takes, and takes over from others, follows. A test (`tests/cpp/splits_test.cpp`) holds that in every layer the largest
thread's work over the mean is at most {MOST}, or fewer threads are used, but for the layers at the end.

The model: {VECTORS * 32 / 1e9:.0f} GFLOP/s a core, all of which is reached. Every layer's float32 input, weight and output are
moved from or to memory once, as if there were no caches: {MEMORY[0] / 1e9:.0f} GB/s for each thread, {MEMORY[1] / 1e9:.0f} at
most. A layer takes the longer of both; a section of more than one thread takes {STARTS * 1e6:g} us besides, in which its threads
come and go. `relu` and pools are layers of their own, which `optimize` would fuse; `flatten` is left out, and so is
that operators start no more threads than a layer has 65,536 products for.

## Speed-up

Over one thread of the same model:
"""
BOUNDS = f"""
## What bounds it

Shares of the time on {THREADS[-1]} threads. Even arithmetic: what it would take, split evenly among all; tiles and panels: more
than that in convolutions and linear layers, of which some threads get a tile, a panel or a position of a transform more than
others; small layers: the same of those without weights; memory: what its bytes take longer than the arithmetic.
"""
UNEVEN = f"""
## Uneven layers

All threads are used, although one has more than {MOST} of the mean: panels of filters and rows of output are not divided.
"""


@dataclass(frozen=True)
class Section:
    """A parallel section: its items, the threads that take them, the work of all and of the last thread to be done."""

    items: int
    threads: int
    work: float
    last: float


@dataclass(frozen=True)
class Split:
    """A layer on some number of threads."""

    algorithm: str
    sections: tuple[Section, ...]

    @property
    def used(self) -> int:
        """Threads."""
        return max((s.threads for s in self.sections), default=1)

    @property
    def largest(self) -> float:
        """The last thread's work over the mean of all that are used."""
        mean = sum(s.work / s.threads for s in self.sections)
        return sum(s.last for s in self.sections) / mean if mean else 1.0


@dataclass
class Time:
    """Seconds, by what they go into."""

    even: float = 0  # arithmetic, were it split evenly among all threads
    tiles: float = 0  # more than that because tiles and panels are no multiple of the threads, or fewer than they
    small: float = 0  # the same of layers without weights, whose work is too little to be split further
    memory: float = 0  # bytes that take longer than the arithmetic
    starts: float = 0

    @property
    def all(self) -> float:
        """Together."""
        return self.even + self.tiles + self.small + self.memory + self.starts

    def alone(self, threads: int) -> float:
        """The speed-up of the arithmetic."""
        return threads * self.even / (self.even + self.tiles + self.small)

    def shares(self) -> Iterator[str]:
        """Of each part."""
        for part in (self.even, self.tiles, self.small, self.memory, self.starts):
            yield f"{part / self.all:.0%}"

    def add(self, layer: Layer, split: Split, whole: float, threads: int, count: int = 1) -> None:
        """A layer `count` times, whose work on one thread is `whole`."""
        even, last = whole / threads / VECTORS, sum(s.last for s in split.sections) / VECTORS
        moved = layer.bytes / min(MEMORY[0] * split.used, MEMORY[1])
        weights = layer.operation in ("conv2d", "linear")
        self.even += count * even
        self.tiles += count * (last - even) * weights
        self.small += count * (last - even) * (not weights)
        self.memory += count * max(0.0, moved - last)
        self.starts += count * STARTS * sum(s.threads > 1 for s in split.sections)


def splits(program: Path, layers: Sequence[Layer], threads: Sequence[int]) -> dict[tuple[Layer, int], Split]:
    """How each layer is split for each number of threads."""
    lines = "".join(f"{layer.line}\n" for layer in layers)
    told = subprocess.run([program, *map(str, threads)], input=lines, text=True, capture_output=True, check=True)
    found = {}
    for at, line in zip(itertools.product(layers, threads), told.stdout.splitlines(), strict=True):
        algorithm, *numbers = line.split()
        sections = (numbers[i : i + 4] for i in range(0, len(numbers), 4))
        found[at] = Split(algorithm, tuple(Section(int(n), int(t), float(w), float(x)) for n, t, w, x in sections))
    return found


def page(found: dict[tuple[Layer, int], Split], networks: dict[tuple[str, int], dict[Layer, int]]) -> Iterator[str]:
    """The Markdown page."""
    head = ("network", "images", *(f"{t} threads" for t in THREADS))
    times = {(key, t): total(found, layers, t) for key, layers in networks.items() for t in (1, *THREADS)}
    yield INTRODUCTION
    faster = ((*named(key), *(f"{times[key, 1].all / times[key, t].all:.1f}x" for t in THREADS)) for key in networks)
    yield from measure.table(head, faster, "lrrrrrr")
    yield "\nOf the split alone, as if memory were never waited for and sections started at once:\n"
    alone = ((*named(key), *(f"{times[key, t].alone(t):.1f}x" for t in THREADS)) for key in networks)
    yield from measure.table(head, alone, "lrrrrrr")
    yield BOUNDS
    shares = ("network", "images", "even arithmetic", "tiles and panels", "small layers", "memory", "starts")
    parts = ((*named(key), *times[key, THREADS[-1]].shares()) for key in networks)
    yield from measure.table(shares, parts, "lrrrrrr")
    yield UNEVEN
    layers = dict.fromkeys(layer for counts in networks.values() for layer in counts)
    yield from measure.table(
        ("layer", "threads", "algorithm", "items", "of the mean"),
        (
            (f"{layer.operation} {layer}", f"{t}", split.algorithm, items(split), f"{split.largest:.2f}")
            for layer, t in itertools.product(layers, THREADS)
            for split in [found[layer, t]]
            if split.used == t and split.largest > MOST
        ),
        "lrlrr",
    )


def named(key: tuple[str, int]) -> tuple[str, str]:
    """A row's first cells."""
    return key[0], f"{key[1]}"


def items(split: Split) -> str:
    """Of each section."""
    return ", ".join(str(s.items) for s in split.sections)


def total(found: dict[tuple[Layer, int], Split], layers: dict[Layer, int], threads: int) -> Time:
    """Of a network."""
    time = Time()
    for layer, count in layers.items():
        time.add(layer, found[layer, threads], sum(s.work for s in found[layer, 1].sections), threads, count)
    return time


def main() -> int:
    """Ask and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=PROGRAM, help="ai3_splits (default: build/native's)")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    if not options.program.exists():
        parser.error(f"{options.program} is not built: the first lines of benchmarks/threads.py say how")
    networks = {
        (name, n): {layer.batch(n): c for layer, c in measure.network(name).items() if layer.operation != "flatten"}
        for name in bench.MODELS
        for n in BATCHES
    }
    layers = list(dict.fromkeys(layer for counts in networks.values() for layer in counts))
    found = splits(options.program, layers, (1, *THREADS))
    options.output.write_text("\n".join(page(found, networks)) + "\n")
    print(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
