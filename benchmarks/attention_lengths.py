"""Attention as sequences grow: time and memory beside PyTorch's function and flex_attention, as a table and a plot.

    python -m benchmarks.attention_lengths [--threads N] [--lengths 512 1024 …]

Each engine and length is a process of its own, since memory is what a process takes at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import measure

PAGE = measure.ROOT / "docs" / "benchmarks" / "attention-lengths.md"
HEADS, SIZE, WINDOW = 2, 64, 256
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = 2.0  # of an engine's calls at one length
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def _flex(*_: Tensor) -> Call:
    return torch.compile(flex_attention, dynamic=False)


def _flex_window(query: Tensor, *_: Tensor) -> Call:
    def near(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= WINDOW // 2

    length = query.shape[-2]
    mask = create_block_mask(near, None, None, length, length, device="cpu", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


ENGINES: dict[str, Callable[[Tensor, Tensor, Tensor], Call]] = {
    "PyTorch": lambda *_: F.scaled_dot_product_attention,
    "flex_attention": _flex,
    "flash": lambda *_: torch.ops.ai3.attention_flash,
    f"flex_attention, window of {WINDOW}": _flex_window,
    f"longformer, window of {WINDOW}": lambda *_: (
        lambda q, k, v: torch.ops.ai3.attention_longformer(q, k, v, window=WINDOW)
    ),
}


def _memory(name: str) -> float:
    """Of /proc/self/status, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def measured(engine: str, length: int, threads: int) -> dict[str, float]:
    """Median milliseconds of a call, and MiB that calls take at their peak beside their inputs."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
    times: list[float] = []
    with torch.inference_mode():
        call = ENGINES[engine](*tensors)
        call(*tensors)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _memory("VmRSS")
        while len(times) < 3 or (sum(times) < SECONDS and len(times) < 1000):
            start = time.perf_counter()
            call(*tensors)
            times.append(time.perf_counter() - start)
        return {"ms": statistics.median(times) * 1e3, "MiB": max(0.0, _memory("VmHWM") - before)}


def in_a_process(engine: str, length: int, threads: int) -> dict[str, float]:
    """What `measured` finds, or nothing where the engine ends with an error."""
    command = [sys.executable, "-m", "benchmarks.attention_lengths", "--engine", engine, "--lengths", str(length)]
    done = subprocess.run([*command, "--threads", str(threads)], capture_output=True, text=True, cwd=measure.ROOT)
    if done.returncode != 0:
        print(f"{engine}, {length}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    yield "# Attention as sequences grow"
    yield ""
    yield f"Written by `python -m benchmarks.attention_lengths`: 1 x {HEADS} heads of {SIZE}, float32, inference. Milliseconds"
    yield "of a call (medians), and in brackets MiB at the peak beside inputs and what earlier calls left; each engine and"
    yield "length in a process of its own. flex_attention is compiled, without and with a block mask of the window."
    yield ""
    yield from (f"- {name}: {value}" for name, value in data["machine"].items())
    yield ""
    yield "![time and memory over the length](attention-lengths.png)"
    yield ""
    rows = [[length, *(_cell(found.get(e)) for e in ENGINES)] for length, found in data["lengths"].items()]
    yield from measure.table(("tokens", *ENGINES), rows, "r" * (1 + len(ENGINES)))


def _cell(found: dict[str, float] | None) -> str:
    return f"{found['ms']:.3g} ({found['MiB']:.0f})" if found else "failed"


def draw(data: dict[str, Any], path: Path) -> None:
    """Both over the length, in logarithms."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.4), dpi=80, layout="constrained")
    for i, (what, title) in enumerate(
        (("ms", "milliseconds of a call"), ("MiB", "MiB beside the inputs, at least 0.1"))
    ):
        axes = picture.add_subplot(1, 2, i + 1)
        for engine in ENGINES:
            at = [(int(n), max(0.1, f[engine][what])) for n, f in data["lengths"].items() if f.get(engine)]
            axes.plot(*zip(*at, strict=True), marker="o", ms=4, ls="--" if "flex" in engine else "-", label=engine)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    picture.savefig(path)


def main() -> int:
    """Measures, and writes the page and the plot; for one engine, prints what it takes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_lengths", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(measured(options.engine, options.lengths[0], options.threads)))
        return 0
    os.environ.pop("OMP_WAIT_POLICY", None)
    load, found = measure.Load(), {}
    for length in options.lengths:
        found[str(length)] = {engine: in_a_process(engine, length, options.threads) for engine in ENGINES}
        print(length, json.dumps(found[str(length)]), flush=True)
    data = {"machine": measure.machine(options.threads, load), "lengths": found}
    measure.write(options.output, page(data), data)
    draw(data, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
