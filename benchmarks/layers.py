"""Every layer of the benchmark networks on every algorithm: writes docs/benchmarks/layers.md and .json.

    python -m benchmarks.layers [NETWORK ...] [--batch N] [--threads N] [--seconds S] [--output PATH]

A shape that several layers or networks share is measured once. What takes more than a few times the fastest, and is not what the
tables show, is called a few times only. How times are taken is documented in measure.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import measure  # first: it says how OpenMP's workers wait
from benchmarks.measure import Function, Layer

# isort: split
import torch
from rich.console import Console
from torch import nn

from ai3_ops.cli import bench

SLOW = 3.0  # times the fastest: measured well only below it
TURNS = 3  # of a whole network


@dataclass
class Time:
    """Of one way to compute a layer."""

    seconds: float
    error: float  # max|y - y64| / max|y64|
    rough: bool = False  # of few calls, not in turns


@dataclass
class Result:
    """One layer."""

    peers: dict[str, Time] = field(default_factory=dict)  # PyTorch's ways
    own: dict[str, Time] = field(default_factory=dict)
    default: str = ""  # what the rule picks
    limit: float = 0.0  # share of the machine's that the best own method reaches (measure.of_limit)

    @property
    def peer(self) -> str:
        """PyTorch's fastest way."""
        return _fastest(self.peers)

    @property
    def best(self) -> str:
        """The fastest own method."""
        return _fastest(self.own)

    @property
    def chosen(self) -> Time:
        """That of what `default` picks."""
        return self.own[self.default] if self.default in self.own else self.peers["onednn"]


def _fastest(times: dict[str, Time]) -> str:
    return min(times, key=lambda name: (times[name].rough, times[name].seconds))


def compare(layer: Layer, seconds: float) -> Result:
    """Measures one layer on all own methods and all of PyTorch's ways."""
    torch.manual_seed(0)
    module, x = layer.module().eval(), layer.input()
    with torch.inference_mode():
        peers: dict[str, Function] = {"eager": lambda: module(x)}
        if x.ndim == 4:
            nchw = x.contiguous()
            peers["eager nchw"] = lambda: module(nchw)
        if isinstance(module, nn.Conv2d | nn.Linear):
            peers["onednn"] = measure.onednn(module, x)
        names = measure.own_algorithms(layer, module, x)
        modules = {name: measure.swapped(layer, module, name, x) for name in names}
        calls = peers | {name: _call(m, x) for name, m in modules.items()}
        error = measure.Reference(layer, module, x).error
        times = {name: Time(guess, error(calls[name]()), True) for name, guess in measure.guesses(calls).items()}
        result = Result({n: times[n] for n in peers}, {n: times[n] for n in names})
        result.default = measure.choice(layer, module, x)
        limit, shown = SLOW * times[_fastest(times)].seconds, (result.peer, result.best, result.default)
        close = [name for name, time in times.items() if time.seconds <= limit or name in shown]
        for name, median in zip(close, measure.interleaved([calls[n] for n in close], seconds), strict=True):
            times[name].seconds, times[name].rough = median, False
        result.limit = measure.of_limit(layer, times[result.best].seconds)
    return result


def _call(module: nn.Module, x: torch.Tensor) -> Function:
    return lambda: module(x)


def optimized(name: str, layers: Iterable[Layer], batch: int, threads: int) -> float:
    """Seconds of a whole network as `optimize` makes it, of NCHW images, in a process of its own.

    Before layers are measured in this one: its OpenMP workers spin between calls, and would take a core from the other's.
    """
    size = next((layer.sizes["H"] for layer in layers if layer.sizes.get("C") == 3), 224)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "networks.md"
        asked = {"--models": {"unet": "benchmarks.networks:unet"}.get(name, name), "--peers": "optimize"}
        asked |= {"--batch": batch, "--size": size, "--threads": threads, "--turns": TURNS, "--output": output}
        words = [str(word) for option in asked.items() for word in option]
        env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        command = [sys.executable, "-m", "ai3_ops", "bench", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=measure.ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        (found,) = bench.load(output).values()
    engine = found.engines["optimize"]
    if engine.absent:
        raise RuntimeError(f"{name}: {engine.absent}")
    return engine.median_ms / 1e3


SUMMARY = (
    "network", "eager NCHW", "eager channels_last", "PyTorch's fastest", "best own", "default",
    "PyTorch's fastest / default", "regret of default", "optimized network", "optimized / best own",
)  # fmt: skip
HEAD = (
    "layer", "times", "PyTorch's fastest", "ms", "error", "best own", "ms", "error", "of the limit", "ratio",
    "default", "ms", "error", "regret",
)  # fmt: skip


def document(
    machine: dict[str, str],
    results: dict[Layer, Result],
    networks: dict[str, dict[Layer, int]],
    whole: dict[str, float],
    seconds: float,
) -> Iterator[str]:
    """The Markdown page."""
    yield "# Layers of the benchmark networks\n"
    yield from (
        "Written by `make bench` (`python -m benchmarks.layers`). Float32; ours is the module that `swap` returns, under",
        "`inference_mode` on channels_last input; PyTorch's ways are the eager module in both layouts and oneDNN's prepacked",
        "operator. Milliseconds are medians of turns that alternate in one process, for each distinct shape once, about",
        f"{seconds:g} s; what took more than {SLOW:g} times the fastest, and is not shown, is in the JSON only, with the least",
        "of few calls. Error: max|y - y64| / max|y64|, y64 in float64 (of convolutions above 1 GFLOP on a part of the",
        "output). Ratio: PyTorch's fastest over the best own. Of the limit: what the machine allows, the direct method's",
        "multiply-adds at the peak or bytes moved once at the read bandwidth, whichever is slower, over the time of the best",
        "own: above 100 % where it multiplies less, or where caches hold the bytes. Regret: what `default` picks over the best",
        "own. `flatten` is left out: PyTorch's is a view.\n",
    )
    yield from measure.table(("machine", ""), machine.items())
    yield "\nSums over all layers, in milliseconds, and the whole network as `optimize` makes it, of NCHW images, in a process of"
    yield "its own (`python -m ai3_ops bench`): at most 1 where fusion pays for what stands between the layers (attention and"
    yield "other operations without a line below are in it, too):\n"
    rows = (_sums(name, layers, results, whole[name]) for name, layers in networks.items())
    yield from measure.table(SUMMARY, rows, "l" + "r" * len(SUMMARY))
    for name, layers in networks.items():
        yield f"\n## {name}\n"
        yield from measure.table(
            HEAD, (_cells(layer, n, results[layer]) for layer, n in layers.items()), "lrlrrlrrrrlrrr"
        )


def _sums(name: str, layers: dict[Layer, int], results: dict[Layer, Result], whole: float) -> tuple[str, ...]:
    def total(time: Callable[[Result], float]) -> float:
        return sum(count * time(results[layer]) for layer, count in layers.items())

    nchw = total(lambda r: r.peers.get("eager nchw", r.peers["eager"]).seconds)
    eager = total(lambda r: r.peers["eager"].seconds)
    fastest = total(lambda r: r.peers[r.peer].seconds)
    best = total(lambda r: r.own[r.best].seconds)
    default = total(lambda r: r.chosen.seconds)
    times = (measure.milliseconds(t) for t in (nchw, eager, fastest, best, default))
    ratios = f"{fastest / default:.2f}x", f"{default / best:.2f}x"
    return name, *times, *ratios, measure.milliseconds(whole), f"{whole / best:.2f}x"


def _cells(layer: Layer, count: int, r: Result) -> tuple[str, ...]:
    def of(time: Time) -> tuple[str, str]:
        return measure.milliseconds(time.seconds), f"{time.error:.0e}"

    peer, best = r.peers[r.peer], r.own[r.best]
    ratio, regret = f"{peer.seconds / best.seconds:.2f}x", f"{r.chosen.seconds / best.seconds:.2f}x"
    name = str(layer) if layer.operation == "conv2d" else f"{layer.operation} {layer}"
    best_cells = r.best, *of(best), f"{r.limit:.0%}"
    return name, f"{count}", r.peer, *of(peer), *best_cells, ratio, r.default, *of(r.chosen), regret


def main() -> int:
    """Measure, print the sums, write."""
    names = sorted(path.stem for path in measure.SHAPES.glob("*.txt") if path.stem != "paper")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--batch", type=int, default=1, help="images (default: 1)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, default=0.5, help="of turns for each distinct shape (default: 0.5)")
    parser.add_argument(
        "--output", type=Path, help="default: docs/benchmarks/layers.md, or nothing with networks named"
    )
    options = parser.parse_args()
    if unknown := set(options.networks) - set(names):
        parser.error(f"no shapes of {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    output = options.output or (None if options.networks else measure.ROOT / "docs" / "benchmarks" / "layers.md")
    torch.set_num_threads(options.threads)
    networks = {
        name: {
            layer.batch(options.batch): count
            for layer, count in measure.network(name).items()
            if layer.operation != "flatten"  # our copy has nothing to be compared with: PyTorch's is a view
        }
        for name in options.networks or names
    }
    layers = dict.fromkeys(layer for counts in networks.values() for layer in counts)
    load = measure.Load()
    console = Console() if sys.stdout.isatty() else Console(width=180)
    results, whole = {}, {}
    with measure.progress(console) as bar:
        task = bar.add_task("", total=len(layers) + len(networks))
        for name, counts in networks.items():
            bar.update(task, description=f"{name}, optimized")
            whole[name] = optimized(name, counts, options.batch, options.threads)
            bar.advance(task)
        for layer in layers:
            bar.update(task, description=f"{layer.operation} {layer}")
            results[layer] = compare(layer, options.seconds)
            bar.advance(task)
    for line in measure.table(
        SUMMARY, (_sums(name, counts, results, whole[name]) for name, counts in networks.items())
    ):
        console.print(line, highlight=False, soft_wrap=True)
    machine = measure.machine(options.threads, load)
    console.print(f"other processes took {load}", highlight=False)
    if output:
        data = {
            "machine": machine,
            "networks": {name: {layer.line: n for layer, n in counts.items()} for name, counts in networks.items()},
            "layers": {layer.line: asdict(result) for layer, result in results.items()},
            "optimized": whole,
        }
        measure.write(output, document(machine, results, networks, whole, options.seconds), data)
        console.print(f"written: {output} and {output.with_suffix('.json').name}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
