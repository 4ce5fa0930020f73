"""What the Python benchmarks share: layers by the lines of the shape files, their opponents, timing in turns, errors.

Every time is a median of turns that alternate between the candidates in one process, with the same data and threads. Ours is
the module that `swap` returns, under `inference_mode`, on channels_last input, weights packed by its first call; the strongest
opponent is oneDNN through PyTorch's prepacked operator, as `torch.compile` with freezing calls it.
"""

from __future__ import annotations

import os
import re

# Workers spin between calls, as they do inside a network. libgomp reads this once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "active")

import copy
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _library, _machine, registry
from ai3_ops.calls.call import Call
from ai3_ops.measuring.steady import Steady
from ai3_ops.nn.classes import leaf_class

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "benchmarks" / "shapes"
TURN_SECONDS = 0.004  # a turn repeats a short call until it takes this long
ROUNDS = 3, 15  # of turns: at least, at most
REFERENCE_FLOPS = (
    1e9  # of a float64 reference: of larger convolutions one image and as many output channels as this allows
)
Function = Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """One layer, by its line in a shape file: `conv2d N=1 C=64 H=56 W=56 K=64 kernel=3 stride=1 pad=1 ...`."""

    line: str

    @functools.cached_property
    def operation(self) -> str:
        """The operation's name."""
        return self.line.split()[0]

    @functools.cached_property
    def sizes(self) -> dict[str, Any]:
        """Sizes by name; windows are pairs."""
        sizes: dict[str, Any] = {}
        for word in self.line.split()[1:]:
            name, _, value = word.partition("=")
            numbers = [int(v) for v in value.split(",")]
            sizes[name] = (
                numbers[0] if name.isupper() or name in ("groups", "count", "ceil") else tuple(numbers * 2)[:2]
            )
        return sizes

    def batch(self, n: int) -> Layer:
        """The same layer on n images (a count of elements or rows belongs to one)."""
        if "H" not in self.sizes:
            return Layer(re.sub(r"\b(M|count)=(\d+)", lambda size: f"{size[1]}={n * int(size[2])}", self.line))
        return Layer(re.sub(r"\bN=\d+", f"N={n}", self.line))

    def module(self) -> nn.Module:
        """PyTorch's module with weights that keep the scale of their input."""
        return registry.OPERATIONS[self.operation].module_of(self.sizes)

    def input(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, images in channels_last."""
        x = torch.randn(registry.OPERATIONS[self.operation].input_of(self.sizes)).to(dtype)
        return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of a convolution's or pool's output (`ceil` left aside: only counted with)."""
        s = self.sizes
        if "out" in s:
            return s["out"]
        dilation = s.get("dilation", (1, 1))
        h, w = (
            (i + 2 * p - d * (k - 1) - 1) // st + 1
            for i, p, d, k, st in zip((s["H"], s["W"]), s["pad"], dilation, s["kernel"], s["stride"], strict=True)
        )
        return h, w

    @property
    def flops(self) -> float:
        """2 per multiply-add of the direct method, whatever an algorithm executes; 0 where nothing is multiplied."""
        s = self.sizes
        if self.operation == "linear":
            return 2.0 * s["M"] * s["K"] * s["N"]
        if self.operation == "conv2d":
            return (
                2.0 * s["N"] * s["K"] * math.prod(self.output_size) * (s["C"] // s["groups"]) * math.prod(s["kernel"])
            )
        return 0.0

    @property
    def bytes(self) -> float:
        """Of float32 input, weight and output, each moved once."""
        s = self.sizes
        match self.operation:
            case "linear":
                elements = s["M"] * s["K"] + s["K"] * s["N"] + s["M"] * s["N"]
            case _ if "count" in s:
                elements = 2 * s["count"]
            case _:
                channels = s.get("K", s["C"])
                weights = channels * (s["C"] // s["groups"]) * math.prod(s["kernel"]) if "groups" in s else 0
                elements = s["N"] * (s["C"] * s["H"] * s["W"] + channels * math.prod(self.output_size)) + weights
        return 4.0 * elements

    def __str__(self) -> str:
        """As the microbenchmarks name it, for tables."""
        s = self.sizes
        if self.operation == "linear":
            return f"{s['M']}x{s['K']} -> {s['N']}"
        if "count" in s:
            return f"{s['count']}"
        size = f"{s['H']}²" if s["H"] == s["W"] else f"{s['H']}x{s['W']}"
        batch = f"{s['N']}x " if s["N"] != 1 else ""
        if self.operation == "adaptive_avg_pool2d":
            return f"{batch}{s['C']} {size} to {'x'.join(map(str, s['out']))}"
        window = "x".join(map(str, s["kernel"])) + (f" s{_pair(s['stride'])}" if s["stride"] != (1, 1) else "")
        channels = f"{s['C']}" if "K" not in s else f"{s['C']} -> {s['K']}"
        groups = f" g{s['groups']}" if s.get("groups", 1) != 1 else ""
        pad = f" p{_pair(s['pad'])}" if s["pad"] != tuple((k - 1) // 2 for k in s["kernel"]) else ""
        return f"{batch}{channels} {size} {window}{pad}{groups}"


def _pair(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]},{pair[1]}"


def conv2d(
    n: int,
    c: int,
    size: int,
    k: int,
    kernel: int | tuple[int, int] = 3,
    stride: int = 1,
    pad: int | None = None,
    groups: int = 1,
) -> Layer:
    """A convolution; `pad` None is what keeps the size at stride 1."""
    window = (kernel, kernel) if isinstance(kernel, int) else kernel
    edges = tuple((x - 1) // 2 if pad is None else pad for x in window)
    return Layer(
        f"conv2d N={n} C={c} H={size} W={size} K={k} kernel={window[0]},{window[1]} stride={stride} "
        f"pad={edges[0]},{edges[1]} dilation=1 groups={groups}"
    )


def linear(m: int, k: int, n: int) -> Layer:
    """A matrix product of m rows."""
    return Layer(f"linear M={m} K={k} N={n}")


def network(name: str) -> dict[Layer, int]:
    """The distinct layers of a network, in order, with how often each occurs."""
    layers: dict[Layer, int] = {}
    for line in (SHAPES / f"{name}.txt").read_text().splitlines():
        text, _, comment = line.partition("#")
        if text.strip():
            layers[Layer(text.strip())] = int(comment.strip().removeprefix("x") or 1)
    return layers


def onednn(module: nn.Module, x: Tensor) -> Function:
    """oneDNN with the weight packed beforehand."""
    mkldnn: Any = torch.ops.mkldnn
    if isinstance(module, nn.Conv2d):
        window = [list(module.padding), list(module.stride), list(module.dilation), module.groups]
        weight = mkldnn._reorder_convolution_weight(module.weight.detach(), *window, list(x.shape))
        return lambda: mkldnn._convolution_pointwise(x, weight, module.bias, *window, "none", [], "")
    assert isinstance(module, nn.Linear)
    weight = mkldnn._reorder_linear_weight(module.weight.detach(), x.shape[0])
    return lambda: mkldnn._linear_pointwise(x, weight, module.bias, "none", [], "")


def swapped(layer: Layer, module: nn.Module, algorithm: str, x: Tensor) -> nn.Module:
    """What `swap` makes of a module; out of inference mode, whose weights have no version, so that packs could not be kept."""
    with torch.inference_mode(False):
        return ai3_ops.swap(module, {layer.operation: algorithm}, x, strict=True, allow_approximate=True)


def own_algorithms(layer: Layer, module: nn.Module, x: Tensor) -> list[str]:
    """The project's own methods that compute this layer in its dtype: no rules, nothing of PyTorch's, nothing approximate."""
    found = []
    for info in ai3_ops.algorithms(layer.operation, "cpu"):
        if info.vendor or info.rule or info.python or info.accuracy == "approximate":
            continue
        if ai3_ops.supports(layer.operation, info.name, *arguments(module, x))[0]:
            found.append(info.name)
    return found


def choice(layer: Layer, module: nn.Module, x: Tensor, rule: str = "default") -> str:
    """The algorithm that a rule picks."""
    return registry.resolve(layer.operation, rule, *arguments(module, x))


def arguments(module: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """Those of the operator that computes a module."""
    leaf = leaf_class(type(module))
    assert leaf is not None
    return Call.by_name[leaf._ai3_operation]().arguments(*leaf._ai3_arguments(module, x))


def once(function: Function) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def first(function: Function) -> float:
    """A first guess: seconds of the call that warms up and packs where it took long, else the least of a few more."""
    seconds = once(function)
    return seconds if seconds > 0.5 else min(once(function) for _ in range(3 if seconds < 0.05 else 1))


def guesses(calls: dict[str, Function]) -> dict[str, float]:
    """A first guess of each, the lesser of two some time apart: what disturbed one may be over."""
    once, again = ({name: first(call) for name, call in calls.items()} for _ in range(2))
    return {name: min(once[name], again[name]) for name in calls}


@functools.cache
def limits(threads: int) -> tuple[float, float]:
    """The machine's multiply-add peak (FLOP/s) and read bandwidth (bytes/s), the best of several probes."""
    probes = [_library.machine(threads, True) for _ in range(8)]
    return max(flops for flops, _ in probes), max(bandwidth for _, bandwidth in probes)


def of_limit(layer: Layer, seconds: float, work: int = 1) -> float:
    """What the machine allows over a time: the direct method's work at the peak, or float32's bytes moved once if slower."""
    flops, bandwidth = limits(torch.get_num_threads())
    return work * max(layer.flops / flops, layer.bytes / bandwidth) / seconds


def turns(functions: Sequence[Function], seconds: float = 1.0) -> list[list[float]]:
    """Seconds of each in each of its turns, which change direction, for about `seconds` altogether.

    A round begins when the processors are steady (`Steady`), and is taken again, once, where they were not at its end.
    """
    steady = _steady()
    steady.wait()
    guesses = [first(f) for f in functions]
    repeats = [max(1, round(TURN_SECONDS / max(g, 1e-7))) for g in guesses]
    of_a_round = sum(r * g for r, g in zip(repeats, guesses, strict=True))
    rounds = min(max(int(seconds / of_a_round), ROUNDS[0]), ROUNDS[1])
    times: list[list[float]] = [[] for _ in functions]
    for i in range(rounds):
        found = _round(functions, repeats, i % 2 == 1)
        if not steady.now():
            steady.wait()
            found = _round(functions, repeats, i % 2 == 1)
        for turn, one in found.items():
            times[turn].append(one)
    return times


@functools.cache
def _steady() -> Steady:
    return Steady()


def _round(functions: Sequence[Function], repeats: Sequence[int], forwards: bool) -> dict[int, float]:
    found = {}
    order = range(len(functions))
    for turn in order if forwards else reversed(order):
        function, count = functions[turn], repeats[turn]
        if count > 1:
            function()  # its own weights and code in the cache again
        start = time.perf_counter()
        for _ in range(count):
            function()
        found[turn] = (time.perf_counter() - start) / count
    return found


def interleaved(functions: Sequence[Function], seconds: float = 1.0) -> list[float]:
    """Median seconds of each, measured in turns."""
    return [statistics.median(t) for t in turns(functions, seconds)]


class Reference:
    """A layer in float64; of convolutions with much work one image, and the first output channels."""

    def __init__(self, layer: Layer, module: nn.Module, x: Tensor) -> None:
        self.channels = -1
        module = copy.deepcopy(module)
        if isinstance(module, nn.Conv2d) and layer.flops > REFERENCE_FLOPS and module.groups == 1:
            x = x[:1]
            image = layer.flops / layer.sizes["N"]
            self.channels = min(module.out_channels, max(1, int(module.out_channels * REFERENCE_FLOPS / image)))
            module.weight = nn.Parameter(module.weight[: self.channels])
            module.bias = None if module.bias is None else nn.Parameter(module.bias[: self.channels])
        with torch.inference_mode():
            self.value = module.double()(x.double())
        self.scale = self.value.abs().max().item()

    def error(self, y: Tensor) -> float:
        """max|y - y64| / max|y64|."""
        if self.channels >= 0:
            y = y[:1, : self.channels]
        return (y.double() - self.value).abs().max().item() / (self.scale or 1.0)


class Load:
    """How much of the machine other processes took meanwhile: figures from a busy one are worth nothing."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds since some time: of all processors that were not idle, of this process and its children, of all."""
        ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        hertz = os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - idle) / hertz, sum(os.times()[:4]), sum(ticks) / hertz

    def __str__(self) -> str:
        busy, own, total = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return f"{100 * max(0.0, busy - own) / max(total, 1e-9):.0f} % of the processors"


def machine(threads: int, load: Load) -> dict[str, str]:
    """What the figures of a run must be read with."""
    flops, bandwidth = limits(threads)
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    found = _machine.machine()
    found["threads"] = str(threads)
    found["versions"] += f", oneDNN {onednn.group(1) if onednn else 'unknown'}"
    found["compiler"] = _library.BUILD.get("compiler", "unknown")
    found["multiply-add peak"] = f"{flops / 1e9:.0f} GFLOP/s in float32, measured in this run"
    found["read bandwidth"] = f"{bandwidth / 1e9:.1f} GB/s, measured in this run"
    found["other load meanwhile"] = str(load)
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def progress(console: Console) -> Progress:
    """A bar with what is measured now."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> Iterator[str]:
    """The lines of a Markdown table; `right` marks the columns that are flushed right with an r."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("---:" if right[i : i + 1] == "r" else "---" for i in range(len(head))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def stored(page: Path, empty: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs measured for a page, or `empty`; ends the program where another machine did."""
    path = page.with_suffix(".json")
    data = json.loads(path.read_text()) if path.exists() else empty
    there, here = data.get("machine", {}), _machine.machine()
    for what in ("processor", "instruction set"):
        if there.get(what, here[what]) != here[what]:
            sys.exit(f"{page} has figures of {what} {there[what]}, this is {here[what]}: --output names another page")
    return data


def write(path: Path, lines: Iterable[str], data: Any) -> None:
    """`path` as Markdown, and the same as data beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))
