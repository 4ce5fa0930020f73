"""bench: whole networks on this package and on other engines, `python -m ai3_ops bench`.

Every engine has a process of its own (their thread pools disturb each other), the same weights, input and threads; turns
alternate, and each begins with 0.4 s of calls that do not count, when the processors are steady (`measuring.steady`), and is
taken once more where they were not at its end. Times are medians over all calls of all turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _machine
from ai3_ops.cli import models, peers
from ai3_ops.measuring.steady import Steady
from ai3_ops.registry import near

# The module that each engine of others needs, and the package that brings it.
PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime"), "openvino": ("openvino", "openvino"), "ncnn": ("ncnn", "ncnn"),
    "mnn": ("MNN", "MNN"), "opencv": ("cv2", "opencv-python-headless"),
}  # fmt: skip
OURS = ("swap default", "swap auto", "optimize", "load")
APPROXIMATE = ("optimize approximate",)  # only run where asked for, and compared with nobody
PEERS = tuple(name for name in peers.ENGINES if name not in OURS + APPROXIMATE)
CONVOLUTIONAL = "alexnet", "densenet121", "googlenet", "inception_v3", "resnet152", "squeezenet1_1", "vgg16"
MODELS = (*CONVOLUTIONAL, "vit_b_16", "swin_b")  # the ai3 paper's
NOTES = {"mnn": "MNN's wheel has no AVX-512"}
WRONG = 0.1  # an error above it is no rounding: the engine computed another function
FLOAT32_ALONE = ("onnxruntime", "ncnn", "mnn", "opencv")  # as they are run here


@dataclass
class Engine:
    """What one engine did on one network."""

    version: str = ""
    absent: str = ""  # why there are no times
    median_ms: float = 0.0
    p99_ms: float = 0.0
    images_per_second: float = 0.0
    # Of a call, above what the process held before it loaded the model: weights, packs, activations.
    peak_bytes: int = 0
    error: float = 0.0  # max|y - y64| / max|y64|, y64 in float64
    load_seconds: float = 0.0  # with conversion, tuning, and the first call
    joules: float | None = None  # of a call; None where the machine does not expose it
    calls: int = 0
    # Of a call, above what the process held before it: activations, workspaces, outputs. None where an engine keeps them.
    call_bytes: int | None = None

    @property
    def wrong(self) -> bool:
        """Whether the output is of another function: its time is shown and compared with nobody's."""
        return not self.error <= WRONG  # also NaN


@dataclass
class Result:
    """A network on all engines."""

    model: str
    batch: int
    input: str
    threads: int
    engines: dict[str, Engine] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    command: str = ""
    date: str = ""
    dtype: str = "float32"

    @property
    def key(self) -> str:
        """In the file of all results."""
        return f"{self.model} batch {self.batch}" + (f" {self.dtype}" if self.dtype != "float32" else "")

    def fastest(self, names: Sequence[str]) -> str | None:
        """Of these, the one with the lowest median; none whose output is wrong."""
        there = [n for n in names if n in self.engines and not (self.engines[n].absent or self.engines[n].wrong)]
        return min(there, key=lambda n: self.engines[n].median_ms, default=None)


# Files that the engines read --------------------------------------------------------------------------------------------
def prepare(named: models.Named, engines: Sequence[str], folder: Path, dtype: str = "float32") -> None:
    """The model, its input and the float64 output, and what the engines' converters make of it.

    In `dtype` for PyTorch and us; ONNX stays float32, and OpenVINO is asked for `dtype`. The float64 output is of the float32
    weights.
    """
    model, inputs = copy.deepcopy(named.model), named.inputs
    models.settle(model, inputs)
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def converted(to: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
        floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
        return copy.deepcopy(model).to(to), tuple(
            a.to(to) if floating else a for a, floating in zip(args, floats, strict=True)
        )

    given, given_args = (model, args) if dtype == "float32" else converted(getattr(torch, dtype))
    torch.save(given, folder / "model.pt")
    torch.save(given_args if isinstance(inputs, tuple) else given_args[0], folder / "inputs.pt")
    (folder / peers.DTYPE).write_text(dtype)
    del given
    with torch.inference_mode():
        double, double_args = converted(torch.float64)
        exact = double(*double_args)
    import numpy

    exact = (
        exact[0]
        if isinstance(exact, (tuple, list))
        else next(iter(exact.values()))
        if isinstance(exact, dict)
        else exact
    )
    numpy.save(folder / "expected.npy", exact.numpy())
    if not (len(args) == 1 and isinstance(args[0], Tensor)):
        return
    numpy.save(folder / "input.npy", args[0].numpy())
    if {"onnxruntime", "openvino", "opencv", "mnn"} & set(engines):
        _export(model, args, folder)
    if "mnn" in engines and (folder / "model.onnx").exists():
        _convert(
            ["mnnconvert", "-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "x"],
            folder,
            "mnn",
        )
    if "ncnn" in engines:
        _pnnx(model, args, folder)


def _export(model: nn.Module, args: tuple[Any, ...], folder: Path) -> None:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            torch.onnx.export(model, args, str(folder / "model.onnx"), dynamo=True, external_data=False, verbose=False)
    except Exception as error:
        (folder / "onnx.txt").write_text(f"{type(error).__name__}: {error}")


def _pnnx(model: nn.Module, args: tuple[Any, ...], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one = args[0][:1]  # ncnn takes images one by one
            torch.jit.trace(model, one, check_trace=False).save(str(folder / "model.torchscript"))
        except Exception as error:
            (folder / "pnnx.txt").write_text(f"{type(error).__name__}: {error}")
            return
    shape = ",".join(map(str, one.shape))
    _convert(["pnnx", "model.torchscript", f"inputshape=[{shape}]", "fp16=0"], folder, "pnnx")


def _environment(threads: int) -> dict[str, str]:
    """Of a process that finds this package."""
    root = str(Path(ai3_ops.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}


def _convert(command: list[str], folder: Path, name: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs a converter that a package brings, from beside this Python or PATH."""
    beside = Path(sys.executable).parent / command[0]
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        (folder / f"{name}.txt").write_text(f"{command[0]} is not there")
        return
    done = subprocess.run([program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    (folder / f"{name}.txt").write_text(done.stdout[-2000:] + done.stderr[-2000:])


# Processes ------------------------------------------------------------------------------------------------------------
class Worker:
    """An engine's process."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        self.engine = engine
        self.log = open(folder / f"{engine.replace(' ', '_')}.log", "w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", peers.__file__, engine, str(folder), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=_environment(threads), cwd=folder,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Its next line; why there is none, where it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        last = self.log.read().strip().splitlines()[-1:]
        return {"absent": f"its process ended with {self.process.wait()}: {' '.join(last)}"}

    def turn(self) -> dict[str, Any]:
        """A turn's seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            return {"absent": f"its process ended with {self.process.wait()}"}
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def measure(
    named: models.Named, engines: Sequence[str], threads: int, turns: int, bar: Progress, dtype: str = "float32"
) -> dict[str, Engine]:
    """Each engine's figures."""
    results: dict[str, Engine] = {}
    task = bar.add_task(f"{named.name}: files", total=len(engines) * (1 + turns))
    with tempfile.TemporaryDirectory(prefix="ai3_ops_bench_") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        there = []
        for engine in engines:
            module, package = PACKAGES.get(engine, ("torch", "torch"))
            if importlib.util.find_spec(module) is None:
                results[engine] = Engine(absent=f"not installed: pip install {package}")
            elif dtype != "float32" and engine in FLOAT32_ALONE:
                results[engine] = Engine(absent="computes in float32")
            else:
                there.append(engine)
        prepare(named, there, folder, dtype)
        if "load" in there:
            bar.update(task, description=f"{named.name}: the file that load reads")
            saving = "import sys; from ai3_ops.cli import peers; peers.save(*sys.argv[1:])"  # apart: its memory is not load's
            command = [sys.executable, "-P", "-c", saving, str(folder), str(threads)]
            _convert(command, folder, "save", _environment(threads))
        workers = []
        for engine in there:
            bar.update(task, description=f"{named.name}: loading {engine}")
            worker = Worker(engine, folder, threads)
            stack.callback(worker.close)
            said = worker.answer()  # one after another, so that tuning has the machine
            results[engine] = Engine(**said)
            if "absent" not in said:
                workers.append(worker)
            bar.advance(task)
        seconds: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        joules: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        steady = Steady()
        for i in range(turns):
            for worker in workers if i % 2 == 0 else reversed(workers):
                bar.update(task, description=f"{named.name}: turn {i + 1}, {worker.engine}")
                steady.wait()
                said = worker.turn()
                if "absent" not in said and not steady.now():  # once more, and that counts
                    steady.wait()
                    said = worker.turn()
                bar.advance(task)
                if "absent" in said:
                    results[worker.engine].absent = said["absent"]
                    continue
                seconds[worker.engine] += said["seconds"]
                joules[worker.engine] += [said["joules"]] if said["joules"] is not None else []
        batch = named.inputs.shape[0] if isinstance(named.inputs, Tensor) else 1
        for engine, times in seconds.items():
            found = results[engine]
            if found.absent or not times:
                continue
            found.calls, found.median_ms = len(times), statistics.median(times) * 1e3
            found.p99_ms = torch.tensor(times, dtype=torch.float64).quantile(0.99).item() * 1e3
            found.images_per_second = batch * len(times) / sum(times)
            found.joules = statistics.median(joules[engine]) if joules[engine] else None
    return {engine: results[engine] for engine in engines}


def commit() -> str:
    """Of the source tree that this package lies in; the version where it lies in none."""
    root = Path(ai3_ops.__file__).parent.parent
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 and (root / "csrc").exists() else f"version {_machine.version()}"


# What is written ------------------------------------------------------------------------------------------------------
def save(path: Path, results: Mapping[str, Result]) -> None:
    """JSON, the same as a Markdown page, and a picture, beside each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({k: asdict(r) for k, r in results.items()}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(document(results, path.with_suffix(".png").name)) + "\n")
    with contextlib.suppress(ImportError):
        draw(results, path.with_suffix(".png"))


def load(path: Path) -> dict[str, Result]:
    """What `save` wrote; nothing where there is nothing."""
    if not path.with_suffix(".json").exists():
        return {}
    data = json.loads(path.with_suffix(".json").read_text())
    return {
        key: Result(**{**r, "engines": {n: Engine(**e) for n, e in r["engines"].items()}}) for key, r in data.items()
    }


def document(results: Mapping[str, Result], picture: str) -> Iterator[str]:
    """The Markdown page."""
    yield "# Whole networks beside other engines\n"
    yield """Written by `python -m ai3_ops bench`. Each engine in a process of its own, with the same seeded random weights (batch
normalizations with the statistics of the input), input (NCHW) and threads, float32; turns alternate, each after 0.4 s of
calls that do not count, and not while the processors compute more slowly than at best (two of a virtual machine may share a
core). Where a row says bfloat16, model and input are of it, and OpenVINO is asked for it (its file stays float32).
Milliseconds of one call: median and 99th percentile of all calls of all turns. Images/s: images over their time.
Memory: the peak of a call above what the process held before it loaded the model (weights, packs, activations); "of the
call" is above what it held before the call, when nothing free was kept (activations, workspaces, outputs; empty for engines
that keep those between calls). Error: max|y - y64| / max|y64| of the output, y64 from PyTorch in float64; above 0.1 the
output is called wrong and its engine is not compared. Energy: joules of a call, where the machine exposes it (RAPL). Load:
seconds until the first output, with conversion and tuning (cached measurements are taken). "load" runs what another process
optimized and saved. "optimize approximate" is `optimize(model, x, allow_approximate=True)`, which may use bfloat16, and is
not compared either.
"""
    yield f"![medians of all engines]({picture})\n"
    yield "## Medians, ms\n"
    names = [n for n in peers.ENGINES if any(n in r.engines and not r.engines[n].absent for r in results.values())]
    yield "| network | " + " | ".join(names) + " | fastest peer / our fastest |"
    yield "|---|" + "---:|" * (len(names) + 1)
    for result in results.values():
        cells = [_ms(result.engines.get(name), result.fastest(PEERS + OURS) == name) for name in names]
        yield f"| {result.key} | " + " | ".join(cells) + f" | {_ratio(result)} |"
    yield "\n## Memory, MiB\n"
    yield "| network | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    for result in results.values():
        taken = {name: e.peak_bytes for name, e in result.engines.items() if e.peak_bytes and not e.absent}
        least = min(taken.values(), default=0)
        cells = [f"**{_mib(size)}**" if size == least else _mib(size) for size in map(taken.get, names)]
        yield f"| {result.key} | " + " | ".join(cells) + " |"
    for result in results.values():
        yield f"\n## {result.key}\n"
        facts = {"input": result.input, "command": f"`{result.command}`", "commit": result.commit, "date": result.date}
        yield "| | |\n|---|---|"
        for key, value in {**facts, **result.machine}.items():
            yield f"| {key} | {value} |"
        energy = any(e.joules is not None for e in result.engines.values())
        yield "\n| engine | version | median | p99 | images/s | memory, MiB | of the call | error | load, s |" + (
            " J |" if energy else ""
        )
        yield "|---|---|---:|---:|---:|---:|---:|---:|---:|" + ("---:|" if energy else "")
        for name, e in result.engines.items():
            if e.absent:
                yield (
                    f"| {name} | {textwrap.shorten(e.absent, 160, placeholder=' …').replace('|', '/')} | | | | | | | |"
                    + (" |" if energy else "")
                )
                continue
            version = f"{e.version} ({NOTES[name]})" if name in NOTES else e.version
            numbers = (
                f"{e.median_ms:.3g}", f"{e.p99_ms:.3g}", f"{e.images_per_second:.3g}", f"{e.peak_bytes / 2**20:.0f}",
                _mib(e.call_bytes), f"{e.error:.0e}", f"{e.load_seconds:.1f}",
            )  # fmt: skip
            joules = ("" if e.joules is None else f"{e.joules:.3g}",) if energy else ()
            yield f"| {name} | {version} | " + " | ".join((*numbers, *joules)) + " |"
        if not energy:
            yield "\nThis machine exposes no energy."


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"


def _ms(engine: Engine | None, fastest: bool) -> str:
    if engine is None or engine.absent:
        return ""
    if engine.wrong:
        return f"{engine.median_ms:.3g} (wrong output)"
    return f"**{engine.median_ms:.3g}**" if fastest else f"{engine.median_ms:.3g}"


def _ratio(result: Result) -> str:
    peer, own = result.fastest(PEERS), result.fastest(OURS)
    if peer is None or own is None:
        return ""
    return f"{result.engines[peer].median_ms / result.engines[own].median_ms:.2f}x ({peer} / {own})"


def draw(results: Mapping[str, Result], path: Path) -> None:
    """A picture: for each network the engines' medians as bars, with p99 as a thin line; none whose output is wrong."""
    from matplotlib.figure import Figure

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), dpi=80, layout="constrained")
    for i, result in enumerate(results.values()):
        axes = figure.add_subplot(rows, columns, i + 1)
        shown = sorted((e.median_ms, name) for name, e in result.engines.items() if not (e.absent or e.wrong))
        medians, names = [m for m, _ in shown], [n for _, n in shown]
        axes.barh(names, medians, color=["#3b6fb6" if n in OURS + APPROXIMATE else "#8a8f98" for n in names])
        axes.hlines(names, medians, [result.engines[n].p99_ms for n in names], color="#2b2f36", lw=0.8)
        for j, median in enumerate(medians):
            axes.annotate(f" {median:.3g}", (median, j), va="center", fontsize=8)
        axes.set_xlim(0, max(medians, default=1) * 1.2)
        axes.invert_yaxis()
        axes.set_title(f"{result.key}, ms", fontsize=10)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)


def show(result: Result, console: Console) -> None:
    """The table of one network."""
    table = Table("engine", "version", title=f"{result.key}, {result.input}", title_justify="left")
    for heading in ("median ms", "p99 ms", "images/s", "memory MiB", "of the call", "error", "load s"):
        table.add_column(heading, justify="right")
    for name, e in result.engines.items():
        if e.absent:
            table.add_row(name, textwrap.shorten(e.absent, 120, placeholder=" …"))
            continue
        table.add_row(
            name, e.version, f"{e.median_ms:.3g}", f"{e.p99_ms:.3g}", f"{e.images_per_second:.3g}",
            f"{e.peak_bytes / 2**20:.0f}", _mib(e.call_bytes), f"{e.error:.0e}", f"{e.load_seconds:.1f}",
        )  # fmt: skip
    console.print(table, highlight=False)
    console.print(f"fastest peer over our fastest: {_ratio(result) or 'one of them is missing'}", highlight=False)


def main(options: argparse.Namespace, console: Console) -> int:
    """Measures, prints, writes; 1 where none of the engines ran a network."""
    names = {name.replace("-", " ").replace("_", " "): name for name in peers.ENGINES}
    engines = []
    for given in options.peers or PEERS + OURS:
        name = names.get(given.replace("-", " ").replace("_", " "))
        if name is None:
            raise ValueError(
                f"no engine {given!r}{near(given, peers.ENGINES) or '; there are: ' + ', '.join(peers.ENGINES)}"
            )
        engines.append(name)
    threads = options.threads or torch.get_num_threads()
    command = shlex.join(["python", "-m", "ai3_ops", *sys.argv[1:]])
    machine = _machine.machine() | {"threads": str(threads)}
    for earlier in load(options.output).values() if options.output else ():
        if earlier.machine.get("processor") != machine["processor"]:
            raise ValueError(
                f"{options.output} has {earlier.key} of processor {earlier.machine.get('processor')}, "
                f"this is {machine['processor']}: --output names another page"
            )
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    status = 0
    for name in options.models or MODELS:
        named = models.named(name, batch=options.batch, size=options.size)
        inputs = named.inputs
        shape = "x".join(map(str, inputs.shape)) if isinstance(inputs, Tensor) else "given by its factory"
        result = Result(name, options.batch, f"{shape}, {named.origin}", threads, dtype=options.dtype)
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            result.engines = measure(named, list(dict.fromkeys(engines)), threads, options.turns, bar, options.dtype)
        result.machine = machine
        result.commit, result.command, result.date = commit(), command, time.strftime("%Y-%m-%d")
        show(result, console)
        status |= all(e.absent for e in result.engines.values())
        if options.output:
            save(options.output, load(options.output) | {result.key: result})
    return int(status)
