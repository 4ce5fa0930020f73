"""The ai3 paper's Figures 2, 3 and 4 (arXiv 2410.08300) on this machine's processor: `python -m benchmarks.paper`.

    python -m benchmarks.paper [--networks googlenet,...] [--batch 10] [--seconds 2] [--output PATH]

The paper timed cuDNN's algorithms, each of its figures in runs of its own. Here every algorithm of this package runs on the same
device as PyTorch's, warm, in turns that alternate in one process, on the NCHW images that PyTorch's users have. Figure 2's whole
models in place of PyTorch's are what `optimize` makes, Figure 3's and 4's are `swap`'s. Networks that were measured before stay
on the page until they are measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure  # first: it says how OpenMP's workers wait

# isort: split
import torch
from torch import Tensor, nn

import ai3_ops
from ai3_ops.cli import bench
from ai3_ops.cli import models as networks
from ai3_ops.optimizing import pipeline

PAGE = measure.ROOT / "docs" / "benchmarks" / "paper.md"
PYTORCH = "torch"
RULES = ("default", "guess")
# The paper's own figures: latency over PyTorch's on its GPU of implicit GEMM and of implicit precomp GEMM.
PAPER = {
    "alexnet": (0.61, 0.65), "densenet121": (1.76, 1.88), "googlenet": (1.23, 1.26), "inception_v3": (1.18, 1.32),
    "resnet152": (1.29, 1.44), "squeezenet1_1": (0.83, 0.99), "swin_b": (0.64, 0.66), "vgg16": (1.24, 1.16),
    "vit_b_16": (0.72, 0.73),
}  # fmt: skip


def algorithms() -> list[str]:
    """Those of conv2d on the CPU that compute what they are named after, and the two rules that choose among all."""
    found = ai3_ops.algorithms("conv2d", "cpu")
    own = [a.name for a in found if not (a.rule or a.python or a.vendor or a.accuracy == "approximate")]
    return [*own, *RULES]


def layer(line: measure.Layer, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of one convolution, by figure and algorithm."""
    torch.manual_seed(0)
    model = nn.Sequential(line.module()).eval()
    x = line.input().contiguous()
    made: dict[tuple[str, str], nn.Module] = {("2", PYTORCH): model}
    for name in algorithms():
        if not ai3_ops.supports("conv2d", name, *measure.arguments(model[0], x))[0]:
            continue
        chosen = {"conv2d": name}
        made["2", name] = _whole(model, x, chosen)
        made["3", name] = ai3_ops.swap(model, chosen, x, strict=True)
    times = _timed(list(made.values()), x, seconds)
    found: dict[str, dict[str, float]] = {"2": {}, "3": {PYTORCH: times[0]}}
    for (figure, name), ms in zip(made, times, strict=True):
        found[figure][name] = ms
    return found


def _whole(model: nn.Module, x: Tensor, chosen: dict[str, str]) -> nn.Module:
    """The model as `optimize` rewrites it, also where that is slower than it was."""
    plan = pipeline.make_plan(model, (x,), {}, pipeline.Settings(chosen, thorough=False))
    if plan.body is None:
        raise RuntimeError(f"optimize with {chosen}: {'; '.join(plan.report.notes)}")
    return plan.body


def network(name: str, batch: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of a whole network by algorithm, and how many of its calls of conv2d each computed."""
    named = networks.named(name, batch=batch)
    networks.settle(named.model, named.inputs)
    made = {PYTORCH: named.model}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that an algorithm leaves to PyTorch; they are counted below
        for algorithm in algorithms():
            made[algorithm] = ai3_ops.swap(named.model, {"conv2d": algorithm}, named.inputs)
    computed = {}
    for algorithm, model in made.items():
        layers = [found for found in ai3_ops.explain(model).layers if found.operation == "conv2d"]
        computed[algorithm] = sum(found.used != PYTORCH for found in layers), len(layers)
    times = _timed(list(made.values()), named.inputs, seconds)
    return {"ms": dict(zip(made, times, strict=True)), "computed": computed, "batch": batch}


def _timed(models: list[nn.Module], x: Tensor, seconds: float) -> list[float]:
    """Median milliseconds of each, in turns."""

    def call(model: nn.Module) -> measure.Function:
        return lambda: model(x)

    with torch.inference_mode():
        calls = [call(model) for model in models]
        for function in calls:
            function()  # packs the weights
        return [s * 1e3 for s in measure.interleaved(calls, seconds * len(calls))]


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    yield "# The ai3 paper's figures on a processor"
    yield ""
    yield "Written by `python -m benchmarks.paper`. Every algorithm on the same device, warm, in turns with PyTorch's own"
    yield "convolution, float32, NCHW input, `inference_mode`. The paper's (arXiv 2410.08300) are cuDNN's on a GPU: what compares"
    yield "is the shape of the figures, not the times."
    yield ""
    yield from measure.table(("machine", ""), data.get("machine", {}).items())
    for figure, title in (("2", "Figure 2: one convolution, whole model rewritten (as `optimize` does)"),
                          ("3", "Figure 3: one convolution, module replaced (`swap`)")):  # fmt: skip
        yield f"\n## {title}\n"
        yield "Milliseconds; empty where an algorithm does not support the layer.\n"
        names = [PYTORCH, *algorithms()]
        rows = [
            [str(measure.Layer(line)), *(_ms(found[figure].get(n)) for n in names)]
            for line, found in data["layers"].items()
        ]
        yield from measure.table(["layer", *names], rows, " " + "r" * len(names))
    yield "\n![Latency of one convolution by algorithm](paper.png)"
    yield "\n## Figure 4: whole networks, latency over PyTorch's\n"
    yield "Below 1 is faster than PyTorch, as in the paper's table. In brackets how many of the network's convolutions the"
    yield "algorithm computes where that is not all; the others keep PyTorch's implementation. Last the paper's, on its GPU.\n"
    names = algorithms()
    rows = []
    for name, found in data["networks"].items():
        cells = [_relative(found, n) for n in names]
        rows.append([name, *cells, *(f"{v:.2f}" for v in PAPER.get(name, ()))])
    yield from measure.table(
        ["network", *names, "paper, implicit_gemm", "paper, implicit_precomp_gemm"], rows, " " + "r" * (len(names) + 2)
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _relative(found: dict[str, Any], name: str) -> str:
    if name not in found["ms"]:
        return ""
    count, whole = found["computed"][name]
    if count == 0:
        return ""
    ratio = found["ms"][name] / found["ms"][PYTORCH]
    return f"{ratio:.2f}" + ("" if count == whole else f" ({count} of {whole})")


def draw(data: dict[str, Any], path: Path) -> None:
    """Figures 2 and 3 as bars: one group for each layer, latency over PyTorch's."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 6.4), dpi=80, layout="constrained")
    for i, figure in enumerate(("2", "3")):
        axes = picture.add_subplot(2, 1, i + 1)
        names = algorithms()
        width = 0.85 / len(names)
        lines = list(data["layers"].items())
        for j, name in enumerate(names):
            at = [k + (j - len(names) / 2) * width for k, (_, f) in enumerate(lines) if name in f[figure]]
            heights = [f[figure][name] / f[figure][PYTORCH] for _, f in lines if name in f[figure]]
            axes.bar(at, heights, width, label=name, color=f"C{j}" if j < 10 else f"{0.1 * (j - 9):.1f}")
        axes.axhline(1, color="#2b2f36", lw=0.8)
        axes.set_yscale("log")
        axes.set_xticks(range(len(lines)), [str(measure.Layer(line)) for line, _ in lines])
        axes.set_ylabel("latency over PyTorch's")
        axes.set_title(f"Figure {figure}: {'optimize' if figure == '2' else 'swap'}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    picture.savefig(path)


def main() -> int:
    """Measures, and writes the page and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(bench.MODELS), help="of Figure 4; none for an empty name")
    parser.add_argument("--batch", type=int, default=10, help="images in Figure 4 (default: the paper's 10)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of turns for each algorithm (default: 2)")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    load = measure.Load()
    data = measure.stored(options.output, {"layers": {}, "networks": {}})
    lines = [line.line for line in measure.network("paper")]
    if list(data["layers"]) != lines:
        data["layers"] = {line: layer(measure.Layer(line), options.seconds) for line in lines}
    for name in filter(None, options.networks.split(",")):
        data["networks"][name] = network(name, options.batch, options.seconds)
        print(name, json.dumps(data["networks"][name]), flush=True)
        data["machine"] = measure.machine(torch.get_num_threads(), load)
        measure.write(options.output, page(data), data)
    measure.write(options.output, page(data), data)
    draw(data, options.output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
