"""The figures that the CPU kernels are held to, measured: writes docs/benchmarks/figures.md and .json.

    python -m benchmarks.figures [--rows REGEX] [--threads N] [--seconds S] [--passes P] [--output PATH]

Each row is a claim with a target, such as "Winograd is at least 2.6 times as fast as oneDNN on each of these layers". How times
are taken is documented in measure.py. "Best own" is the fastest of the project's own methods that are not marked approximate.
With several passes the whole table is measured that often, and of each layer the pass with the median ratio counts: what others
do to a shared machine for a minute then falls on one pass.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import measure  # first: it says how OpenMP's workers wait
from benchmarks.measure import Function, Layer, conv2d, linear

# isort: split
import torch
from rich.console import Console
from torch import Tensor, nn

from ai3_ops import _library

TURNS = 5  # between measurements of the machine's limits
SHORTLIST = 3  # of the own methods, by few calls each, those that are measured in turns
BFLOAT16 = torch.bfloat16


@dataclass
class Sample:
    """One layer's result. `value` is what the row's target is about; None where it could not be measured, as `note` says."""

    layer: str
    value: float | None = None
    algorithm: str = ""
    ours: float = 0.0  # seconds
    theirs: float = 0.0  # seconds
    gflops: float = 0.0  # effective, of ours
    limit: float = 0.0  # what the machine allows over our time (measure.of_limit)
    error: float = 0.0  # of ours, against float64
    note: str = ""
    passes: list[float] = field(default_factory=list)  # the value in each pass
    fastest_ours: float = 0.0  # seconds, of the fastest turn
    fastest_theirs: float = 0.0


@dataclass(frozen=True)
class Row:
    """A claim: every layer reaches `each`, and their geometric mean reaches `mean`."""

    case: str
    against: str
    each: float | None
    samples: Callable[[Settings], Iterable[Sample]]
    mean: float | None = None


@dataclass(frozen=True)
class Settings:
    """Of the run."""

    threads: int
    seconds: float  # for each layer
    tick: Callable[[str], None]  # says what is measured now


def forward(
    layers: Iterable[Layer],
    algorithms: Iterable[str] | None = None,
    opponent: Callable[[nn.Module, Tensor], Function] = measure.onednn,
) -> Callable[[Settings], Iterator[Sample]]:
    """The given methods, or the best own one, against PyTorch's `opponent`, whose time over ours is the value."""

    def samples(run: Settings) -> Iterator[Sample]:
        for layer in layers:
            run.tick(str(layer))
            module, x = layer.module(), layer.input()
            with torch.inference_mode():
                names = measure.own_algorithms(layer, module, x) if algorithms is None else algorithms
                modules, notes = _swapped(layer, module, x, names)
                yield from notes
                if modules:
                    calls = {name: _call(m, x) for name, m in modules.items()}
                    error = measure.Reference(layer, module, x).error
                    yield _against(layer, calls, opponent(module, x), lambda name: error(calls[name]()), run)  # noqa: B023

    return samples


def training(layers: Iterable[Layer]) -> Callable[[Settings], Iterator[Sample]]:
    """Forward and backward, best own against PyTorch's eager module on the same channels_last input."""

    def samples(run: Settings) -> Iterator[Sample]:
        for layer in layers:
            run.tick(str(layer))
            module, x = layer.module(), layer.input()
            modules, _ = _swapped(layer, module, x, measure.own_algorithms(layer, module, x))
            torch.manual_seed(0)
            upstream = torch.randn_like(module(x))
            steps = {name: _step(m, x, upstream) for name, m in modules.items()}
            exact = _step(copy.deepcopy(module).double(), x.double(), upstream.double())()

            def error(name: str) -> float:
                pairs = zip(steps[name](), exact, strict=True)  # noqa: B023
                return max(((g - e).abs().max() / e.abs().max()).item() for g, e in pairs)

            yield _against(layer, steps, _step(module, x, upstream), error, run, work=3)

    return samples


def of_peak(layers: Iterable[Layer]) -> Callable[[Settings], Iterator[Sample]]:
    """Linear's gemm as a share of the multiply-add peak."""
    return _share(layers, lambda layer, limits: layer.flops / limits[0])


def of_bandwidth(layers: Iterable[Layer], algorithm: str = "gemm") -> Callable[[Settings], Iterator[Sample]]:
    """A method as a share of the read bandwidth."""
    return _share(layers, lambda layer, limits: layer.bytes / limits[1], algorithm)


def _share(
    layers: Iterable[Layer], bound: Callable[[Layer, tuple[float, float]], float], algorithm: str = "gemm"
) -> Callable[[Settings], Iterator[Sample]]:
    """Against what the machine gives in the turns between ours: both change with what others do on it."""

    def samples(run: Settings) -> Iterator[Sample]:
        for layer in layers:
            run.tick(f"{layer}, against the machine")
            module, x = layer.module(), layer.input()
            with torch.inference_mode():
                call = _call(measure.swapped(layer, module, algorithm, x), x)
                ours, theirs = [], []
                for _ in range(TURNS):
                    ours += measure.turns([call], run.seconds / TURNS)[0]
                    theirs.append(bound(layer, _library.machine(run.threads, True)))
                yield _sample(layer, algorithm, ours, theirs, measure.Reference(layer, module, x).error(call()))

    return samples


def in_bfloat16(
    layers: Iterable[Layer], algorithm: str, tensors: bool = True
) -> Callable[[Settings], Iterator[Sample]]:
    """A method in bfloat16 (its tensors, or only its arithmetic: `<algorithm>_bf16`) against itself in float32."""

    def samples(run: Settings) -> Iterator[Sample]:
        if not torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported():
            yield Sample("", note="this processor has neither AVX512-BF16 nor AMX")
            return
        for layer in layers:
            run.tick(f"{layer}, bfloat16")
            module, x = layer.module(), layer.input()
            low, y = (copy.deepcopy(module).bfloat16(), x.bfloat16()) if tensors else (module, x)
            with torch.inference_mode():
                modules, notes = _swapped(layer, low, y, [algorithm if tensors else f"{algorithm}_bf16"])
                yield from notes
                if modules:
                    calls = {name: _call(m, y) for name, m in modules.items()}
                    float32 = _call(measure.swapped(layer, module, algorithm, x), x)
                    error = measure.Reference(layer, module, x).error
                    sample = _against(layer, calls, float32, lambda name: error(calls[name]()), run)  # noqa: B023
                    yield replace(sample, limit=0.0)  # float32's limits are not bfloat16's

    return samples


def scaling(layers: Iterable[Layer]) -> Callable[[Settings], Iterator[Sample]]:
    """What `default` picks, on one thread against itself on two."""

    def with_threads(count: int, function: Function) -> Function:
        def call() -> Any:
            torch.set_num_threads(count)
            return function()

        return call

    def samples(run: Settings) -> Iterator[Sample]:
        if run.threads < 2:
            yield Sample("", note="one thread only")
            return
        for layer in layers:
            run.tick(f"{layer}, 1 and 2 threads")
            module, x = layer.module(), layer.input()
            with torch.inference_mode():
                name = measure.choice(layer, module, x)
                call = _call(measure.swapped(layer, module, name, x), x)
                error = measure.Reference(layer, module, x).error
                twice = {name: with_threads(2, call)}
                yield _against(layer, twice, with_threads(1, call), lambda name: error(twice[name]()), run)  # noqa: B023
                torch.set_num_threads(run.threads)

    return samples


class Original:
    """The original ai3 (pip `aithree` 0.1.0), in a process and a directory of its own."""

    def __init__(self) -> None:
        directory = measure.ROOT / "build" / "original"
        if not (directory / "ai3").exists():
            install = ["install", "--quiet", "--no-deps", "--target", str(directory), "aithree==0.1.0", "packaging"]
            subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True, text=True)
        worker = [sys.executable, str(Path(__file__).with_name("original.py"))]
        environment = {**os.environ, "PYTHONPATH": str(directory)}
        self.process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request: Any) -> float:
        """The worker's answer."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def against_original(layers: Iterable[Layer]) -> Callable[[Settings], Iterator[Sample]]:
    """Our direct and smm against the original's, turns alternating, one thread each."""

    def samples(run: Settings) -> Iterator[Sample]:
        try:
            original = Original()
        except subprocess.CalledProcessError as failure:
            yield Sample("", note=f"aithree 0.1.0 does not install here: {failure.stderr.strip().splitlines()[-1]}")
            return
        torch.set_num_threads(1)
        for layer in layers:
            for algorithm in ("direct", "smm"):
                run.tick(f"{layer}, the original's {algorithm}")
                original.ask({"algorithm": algorithm, **layer.sizes})
                module, x = layer.module(), layer.input()
                with torch.inference_mode():
                    ours = _call(measure.swapped(layer, module, algorithm, x), x)
                    error = measure.Reference(layer, module, x).error(ours())
                    mine, theirs = zip(*((measure.first(ours), original.ask("run")) for _ in range(5)), strict=True)
                yield _sample(layer, algorithm, mine, theirs, error)
        torch.set_num_threads(run.threads)
        original.process.communicate()

    return samples


def _call(module: nn.Module, x: Tensor) -> Function:
    return lambda: module(x)


def _step(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], list[Tensor]]:
    x = x.detach().clone().requires_grad_()
    parameters = [x, *module.parameters()]

    def step() -> list[Tensor]:
        for p in parameters:
            p.grad = None
        module(x).backward(upstream)
        return [p.grad for p in parameters if p.grad is not None]

    return step


def _swapped(
    layer: Layer, module: nn.Module, x: Tensor, names: Iterable[str]
) -> tuple[dict[str, nn.Module], list[Sample]]:
    """The module on each algorithm; what cannot be, as samples that say why."""
    modules, notes = {}, []
    for name in names:
        try:
            modules[name] = measure.swapped(layer, module, name, x)
        except (ValueError, RuntimeError) as refusal:
            notes.append(Sample(str(layer), algorithm=name, note=str(refusal).splitlines()[0]))
    return modules, notes


def _shortlist(calls: dict[str, Function]) -> list[str]:
    if len(calls) == 1:
        return list(calls)
    guesses = measure.guesses(calls)
    return sorted(calls, key=lambda name: guesses[name])[:SHORTLIST]


def _against(
    layer: Layer,
    calls: dict[str, Function],
    opponent: Function,
    error: Callable[[str], float],
    run: Settings,
    work: int = 1,
) -> Sample:
    """The fastest of `calls` and the opponent, in turns."""
    names = _shortlist(calls)
    theirs, *ours = measure.turns([opponent, *(calls[name] for name in names)], run.seconds)
    best = min(range(len(names)), key=lambda i: statistics.median(ours[i]))
    return _sample(layer, names[best], ours[best], theirs, error(names[best]), work)


def _sample(
    layer: Layer, algorithm: str, ours: Sequence[float], theirs: Sequence[float], error: float, work: int = 1
) -> Sample:
    """Of the seconds in each turn."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    gflops = work * layer.flops / mine / 1e9
    named = layer.operation in ("conv2d", "linear")
    return Sample(
        str(layer) if named else f"{layer.operation} {layer}",
        other / mine,
        algorithm,
        mine,
        other,
        gflops,
        measure.of_limit(layer, mine, work),
        error,
        fastest_ours=min(ours),
        fastest_theirs=min(theirs),
    )


def layers_of(*networks: str, where: Callable[[Layer], bool]) -> list[Layer]:
    """The distinct layers of networks for which `where` holds."""
    return list(dict.fromkeys(layer for name in networks for layer in measure.network(name) if where(layer)))


def batches(layers: Iterable[Layer], *counts: int) -> list[Layer]:
    """Each layer at each batch size."""
    return [layer.batch(n) for n in counts for layer in layers]


GRID = [conv2d(1, c, size, c) for c in (64, 128, 256, 512) for size in (28, 56, 112, 224)]
AT_14 = [conv2d(1, c, 14, c) for c in (256, 512)]
ONE_BY_ONE = [
    *(conv2d(1, c, size, k, 1) for c, size, k in ((64, 56, 64), (64, 56, 256), (256, 56, 64), (128, 28, 512))),
    *(conv2d(1, c, size, k, 1) for c, size, k in ((512, 28, 128), (256, 14, 1024), (1024, 14, 256), (2048, 7, 512))),
    *(conv2d(1, c, size, k, 1) for c, size, k in ((16, 55, 64), (192, 28, 64), (256, 56, 128), (768, 17, 192))),
    conv2d(1, 256, 56, 512, 1, 2),
]
STRIDE_2 = [
    *(conv2d(1, c, size, c, 3, 2) for c, size in ((128, 56), (256, 28), (512, 14))),
    conv2d(1, 288, 35, 384, 3, 2, 0),
]
FIRST = [
    conv2d(1, 3, 224, 64),
    conv2d(1, 3, 224, 64, 3, 2, 0),
    conv2d(1, 3, 299, 32, 3, 2, 0),
    conv2d(1, 3, 224, 64, 7, 2),
    conv2d(1, 3, 224, 64, 11, 4, 2),
]
VIT = [linear(197, k, n) for k, n in ((768, 2304), (768, 768), (768, 3072), (3072, 768))]
SWIN = [
    linear(m, k, n)
    for m, c in ((3136, 128), (784, 256), (196, 512))
    for k, n in ((c, 3 * c), (c, c), (c, 4 * c), (4 * c, c))
] + [linear(784, 512, 256), linear(196, 1024, 512)]
GROUPED = [  # ResNeXt-50's, 32 groups
    conv2d(1, c, size, c, 3, stride, groups=32)
    for c, size, stride in ((128, 56, 1), (256, 56, 2), (256, 28, 1), (512, 28, 2), (512, 14, 1), (1024, 7, 1))
]
STREAMED = [  # from memory or the L3 cache: ResNet's, VGG16's, Inception's and EfficientNet's pools, relu on 16, 28 and 48 MB
    Layer("max_pool2d N=10 C=64 H=112 W=112 kernel=3 stride=2 pad=1 ceil=0"),
    Layer("max_pool2d N=10 C=128 H=112 W=112 kernel=2 stride=2 pad=0 ceil=0"),
    Layer("avg_pool2d N=10 C=288 H=35 W=35 kernel=3 stride=1 pad=1 ceil=0"),
    Layer("adaptive_avg_pool2d N=10 C=144 H=56 W=56 out=1"),
    *(Layer(f"relu count={count << 20}") for count in (4, 7, 12)),
]
SWIN_49 = [linear(49, k, n) for k, n in ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024), (2048, 1024))]
BATCH_1 = [linear(1, k, n) for k, n in ((25088, 4096), (4096, 4096), (4096, 1000), (9216, 4096))]
LARGE = [
    *layers_of("vgg16", "inception_v3", where=lambda layer: layer.flops > 1e9 and layer.sizes.get("C", 3) > 3),
    *(layer for layer in batches([*AT_14, *ONE_BY_ONE[1:4], STRIDE_2[0]], 10) if layer.flops > 1e9),
    linear(197 * 4, 768, 3072),
]
METHOD_LAYER = conv2d(1, 256, 56, 256)

ROWS = [
    Row("Winograd, 3x3, C = K of 64 … 512, 28² … 224², batch 1 and 10", "oneDNN", 2.6,
        forward(batches(GRID, 1, 10), ["winograd"]), mean=2.8),
    Row("Winograd, 14², C of 256 and 512, batch 1", "oneDNN", 2.2, forward(AT_14, ["winograd"])),
    Row("Winograd, 14², C of 256 and 512, batch 10", "oneDNN", 2.5, forward(batches(AT_14, 10), ["winograd"])),
    Row("best own, 7², C = 512, batch 1", "oneDNN", 1.4, forward([conv2d(1, 512, 7, 512)])),
    Row("best own, 7², C = 512, batch 10", "oneDNN", 2.1, forward([conv2d(10, 512, 7, 512)])),
    *(Row(f"DenseNet's 3x3, 128 -> 32, {size}²", "oneDNN", target, forward([conv2d(1, 128, size, 32)]))
      for size, target in ((56, 2.4), (28, 2.2), (14, 1.5))),
    Row("best own, 5x5 (AlexNet, Inception)", "oneDNN", 1.6, forward([conv2d(1, 64, 27, 192, 5), conv2d(1, 48, 35, 64, 5)])),
    Row("best own, 1x7 and 7x1 (Inception)", "oneDNN", 1.3,
        forward(layers_of("inception_v3", where=lambda layer: layer.sizes.get("kernel") in ((1, 7), (7, 1))))),
    Row("best own, 1x1, batch 1 and 10", "oneDNN", 1.0, forward(batches(ONE_BY_ONE, 1, 10))),
    Row("best own, 3x3 stride 2, batch 1 and 10", "oneDNN", 1.0, forward(batches(STRIDE_2, 1, 10))),
    Row("best own, first layers (3x3, 7x7 s2, 11x11 s4), batch 1 and 10", "oneDNN", 1.0, forward(batches(FIRST, 1, 10))),
    Row("depthwise 3x3 and 5x5 (MobileNetV3, EfficientNet-B0)", "oneDNN", 1.2,
        forward(layers_of("mobilenet_v3_large", "efficientnet_b0", where=lambda layer: layer.sizes.get("groups", 1) > 1))),
    Row("best own, grouped 3x3 (ResNeXt-50), batch 1 and 10", "oneDNN", 1.0, forward(batches(GROUPED, 1, 10))),
    Row("linear, ViT-B and Swin-B, M of 196 … 3136", "F.linear", 1.15, forward([*VIT, *SWIN], ["gemm"], _call)),
    Row("linear, ViT-B and Swin-B, M of 196 … 3136: share of the peak", "multiply-add peak", 0.95, of_peak([*VIT, *SWIN])),
    Row("linear, Swin-B, M = 49", "F.linear", 1.5, forward(SWIN_49, ["gemm"], _call)),
    Row("forward and backward, 3x3 stride 1, batch 1 and 10", "PyTorch", 1.5,
        training(batches([conv2d(1, 64, 56, 64), conv2d(1, 128, 28, 128), *AT_14, conv2d(1, 512, 7, 512)], 1, 10))),
    Row("forward and backward, other layers, batch 1 and 10", "PyTorch", 1.0,
        training([*batches([ONE_BY_ONE[1], ONE_BY_ONE[4], STRIDE_2[0], FIRST[3], conv2d(1, 64, 27, 192, 5),
                            conv2d(1, 144, 56, 144, groups=144), conv2d(1, 240, 28, 240, 5, groups=240),
                            conv2d(1, 96, 56, 96, 7, groups=96), conv2d(1, 128, 17, 128, (1, 7)), *GROUPED], 1, 10),
                  *VIT, *SWIN[2::4], *SWIN_49[:1]])),
    Row("linear, batch 1 (VGG16, AlexNet): share of the read bandwidth", "read bandwidth", 0.9, of_bandwidth(BATCH_1)),
    Row("pools and relu, batch 10: bytes moved once, as a share of the read bandwidth", "read bandwidth", 0.9,
        of_bandwidth(STREAMED, "direct")),
    Row("bfloat16 tensors, linear gemm", "our float32", 1.5, in_bfloat16([*VIT, *SWIN_49[2:4]], "gemm")),
    Row("bfloat16 tensors, conv2d direct, 1x1", "our float32", 1.5, in_bfloat16(ONE_BY_ONE[:8], "direct")),
    Row("linear gemm_bf16 on float32 tensors", "our float32", 1.5, in_bfloat16([*VIT, *SWIN_49[2:4]], "gemm", tensors=False)),
    *(Row(f"{name}, 3x3, C = K = 256, 56², and two layers of its own", "oneDNN", target, forward([METHOD_LAYER, *own], [name]))
      for name, target, own in (
          ("direct", 0.85, [ONE_BY_ONE[1], STRIDE_2[0]]),
          ("implicit_precomp_gemm", 0.85, [STRIDE_2[1], conv2d(1, 64, 27, 192, 5)]),
          ("im2col", 0.75, [STRIDE_2[1], conv2d(1, 512, 14, 512)]),
          ("kn2row", 0.6, [conv2d(1, 512, 28, 512), conv2d(1, 64, 27, 192, 5)]))),
    Row("direct and smm, batch 1, one thread each", "the original ai3", 10,
        against_original([conv2d(1, 64, 56, 64), conv2d(1, 128, 28, 128), conv2d(1, 256, 14, 256), ONE_BY_ONE[1], FIRST[1]])),
    Row("1 -> 2 threads, layers above 1 GFLOP", "one thread", 1.85, scaling(LARGE)),
]  # fmt: skip


def merged(passes: list[list[Sample]]) -> list[Sample]:
    """Of each layer the sample with the median value (the lower of two), and the fastest turns of all passes."""
    result = []
    for samples in zip(*passes, strict=True):
        measured = [s for s in samples if s.value is not None]
        values = [s.value or 0.0 for s in measured]
        if not measured:
            result.append(samples[0])
            continue
        median = sorted(measured, key=lambda s: s.value or 0.0)[(len(measured) - 1) // 2]
        ours, theirs = min(s.fastest_ours for s in measured), min(s.fastest_theirs for s in measured)
        result.append(replace(median, passes=values, fastest_ours=ours, fastest_theirs=theirs))
    return result


def worst(samples: list[Sample]) -> Sample | None:
    """The sample with the least value."""
    return min((s for s in samples if s.value is not None), key=lambda s: s.value or 0, default=None)


def verdict(row: Row, samples: list[Sample]) -> str:
    """Met or missed, and by how many layers."""
    values = [s.value for s in samples if s.value is not None]
    notes = {s.note for s in samples if s.value is None}
    if not values:
        return "not measured: " + "; ".join(sorted(notes))
    words = []
    if row.each is not None and (below := sum(v < row.each for v in values)):
        words.append(f"{below} of {len(values)} below")
    if row.mean is not None and measure.mean(values) < row.mean:
        words.append("mean below")
    if notes:
        words.append(f"{len(samples) - len(values)} not measured")
    return "missed: " + ", ".join(words) if words else "met"


def number(row: Row, value: float) -> str:
    """A ratio, or a share in percent."""
    share = row.against in ("multiply-add peak", "read bandwidth")
    return f"{100 * value:.0f} %" if share else f"{value:.2f}x"


def targets(row: Row) -> str:
    """The row's targets in words."""
    words = number(row, row.each) if row.each is not None else ""
    return words + (f", mean {number(row, row.mean)}" if row.mean is not None else "")


def summary(row: Row, samples: list[Sample]) -> tuple[str, ...]:
    """Case, opponent, targets, least and mean, the layer of the least, verdict."""
    low = worst(samples)
    if low is None:
        return row.case, row.against, targets(row), "", "", "", verdict(row, samples)
    values = [s.value for s in samples if s.value is not None]
    least, mean = number(row, min(values)), number(row, measure.mean(values))
    return row.case, row.against, targets(row), least, mean, f"{low.layer} ({low.algorithm})", verdict(row, samples)


HEAD = ("case", "against", "at least", "measured: least", "geometric mean", "least at", "verdict")


def document(machine: dict[str, str], results: list[tuple[Row, list[Sample]]]) -> Iterator[str]:
    """The Markdown page."""
    yield "# Figures of the CPU kernels\n"
    yield from (
        "Written by `python -m benchmarks.figures`. Float32 unless said otherwise; ours is the module that `swap` returns, under",
        "`inference_mode` on channels_last input; oneDNN is PyTorch's prepacked operator; medians of turns that alternate in one",
        "process. Error: max|y - y64| / max|y64|, y64 in float64 (of convolutions above 1 GFLOP on a part of the output;",
        "forward and backward: the largest of the gradients'). GFLOP/s: the direct method's work over the time. Of the limit:",
        "what the machine allows, that work at the peak or bytes moved once at the read bandwidth, whichever is slower,",
        "over our time: above 100 % where a method multiplies less, or where caches hold the bytes. Peak and bandwidth, where",
        "they are the opponent, are measured between our turns. Where there are several passes, of each layer",
        "the one with the median ratio. A layer such as 10x 64 -> 128 56² 3x3 s2 p1 g2: a batch of 10, 64 channels, 128 filters,",
        "a map of 56x56, a kernel of 3x3, stride 2, padding 1, 2 groups. Best own: the fastest of our methods not marked",
        "approximate. Of the fastest turns: the opponent's fastest turn in all passes over ours, which others on the machine",
        "disturb least. Above 100 % of the read bandwidth: the weight stays in a cache, or is prefetched, which the probe",
        "does not do. Why targets are missed: [limits](../decisions/limits.md).\n",
    )
    yield from measure.table(("machine", ""), machine.items())
    yield ""
    yield from measure.table(HEAD, (summary(row, samples) for row, samples in results), "llrrrll")
    for row, samples in results:
        yield f"\n## {row.case}\n"
        ours = ((s, number(row, s.value) if s.value is not None else s.note) for s in samples)
        head = (
            "layer",
            "algorithm",
            "ours, ms",
            f"{row.against}, ms",
            "ratio",
            "in each pass",
            "of the fastest turns",
            "GFLOP/s",
            "of the limit",
            "error",
        )
        yield from measure.table(head, (_cells(s, value, row) for s, value in ours), "llrrrrrrrr")


def _cells(s: Sample, value: str, row: Row) -> tuple[str, ...]:
    if s.value is None:
        return s.layer, s.algorithm, "", "", value, "", "", "", "", ""
    times = measure.milliseconds(s.ours), measure.milliseconds(s.theirs)
    passes = ", ".join(number(row, v) for v in s.passes)
    fastest = number(row, s.fastest_theirs / s.fastest_ours)
    limit = f"{s.limit:.0%}" if s.limit else ""
    return s.layer, s.algorithm, *times, value, passes, fastest, f"{s.gflops:.0f}", limit, f"{s.error:.1e}"


def main() -> int:
    """Measure, print, write; 0 also where targets are missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only cases that match this regular expression")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, default=0.6, help="of turns for each layer (default: 0.6)")
    parser.add_argument("--passes", type=int, default=1, help="through the table (default: 1)")
    parser.add_argument("--output", type=Path, help="default: docs/benchmarks/figures.md, or nothing with --rows")
    options = parser.parse_args()
    output = options.output or (None if options.rows else measure.ROOT / "docs" / "benchmarks" / "figures.md")
    torch.set_num_threads(options.threads)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    rows = [row for row in ROWS if re.search(options.rows, row.case)]
    load = measure.Load()
    measured: list[list[list[Sample]]] = [[] for _ in rows]
    with measure.progress(console) as bar:
        task = bar.add_task("", total=options.passes * len(rows))
        for row, passes in [*zip(rows, measured, strict=True)] * options.passes:
            torch.manual_seed(0)
            run = Settings(options.threads, options.seconds, lambda words: bar.update(task, description=words))
            passes.append(list(row.samples(run)))
            console.print(" | ".join(summary(row, passes[-1])), highlight=False, soft_wrap=True)
            bar.advance(task)
    results = [(row, merged(passes)) for row, passes in zip(rows, measured, strict=True)]
    if options.passes > 1:
        console.print(f"\nof {options.passes} passes:")
        for row, samples in results:
            console.print(" | ".join(summary(row, samples)), highlight=False, soft_wrap=True)
    machine = measure.machine(options.threads, load)
    console.print(f"other processes took {load}", highlight=False)
    if output:
        data = [
            {"case": r.case, "against": r.against, "each": r.each, "mean": r.mean, "verdict": verdict(r, s)}
            | {"samples": [asdict(x) for x in s]}
            for r, s in results
        ]
        measure.write(output, document(machine, results), {"machine": machine, "rows": data})
    return 0


if __name__ == "__main__":
    sys.exit(main())
