"""CUDA: layers and the paper's networks over PyTorch's, on one GPU: writes docs/benchmarks/cuda.md and .json.

    python -m benchmarks.cuda [--parts layers,rows,networks,optimize:resnet152,compiled] [--output PATH]

Every figure is a time over that of PyTorch eager in the same run, in turns, medians, by CUDA events. PyTorch has
`cudnn.benchmark`, so that it picks its fastest engine; networks are timed as they are called, host included. What an earlier run
on such a GPU measured stays on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure

# isort: split
import torch
from torch import Tensor, nn

import ai3_ops
from ai3_ops.cli import models
from ai3_ops.cli.bench import MODELS
from ai3_ops.cli.first_run import microseconds
from ai3_ops.measuring import gpu

PAGE = measure.ROOT / "docs" / "benchmarks" / "cuda.md"
# The paper's, then convolutions of ResNet-50, MobileNet and a network for upscaling; for 1 and 32 images.
CONVOLUTIONS = [
    *(layer for layer in measure.network("paper")),
    measure.conv2d(32, 64, 56, 64),
    measure.conv2d(32, 128, 28, 128),
    measure.conv2d(32, 256, 56, 64, 1, pad=0),
    measure.conv2d(32, 512, 28, 1024, 1, 2, pad=0),
    measure.conv2d(32, 3, 224, 64, 7, 2, pad=3),
    measure.conv2d(32, 96, 56, 96, groups=96),
    measure.conv2d(32, 384, 14, 384, 5, groups=384),
    measure.conv2d(1, 64, 56, 64),
    measure.conv2d(1, 512, 7, 512),
    measure.conv2d(1, 64, 512, 64),
]
PRECISIONS = {
    "float32": (torch.float32, False, torch.contiguous_format),
    "float32, channels_last": (torch.float32, False, torch.channels_last),
    "TF32": (torch.float32, True, torch.channels_last),
    "bfloat16": (torch.bfloat16, False, torch.channels_last),
}
LINEAR = [(32, 768, 3072), (6272, 768, 3072), (1, 4096, 1000), (4096, 4096, 4096)]


def _switch(tf32: bool) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32


def layers() -> dict[str, Any]:
    """Time of each algorithm over PyTorch's, by precision and layer."""
    found: dict[str, Any] = {}
    for precision, (dtype, tf32, layout) in PRECISIONS.items():
        _switch(tf32)
        for layer in CONVOLUTIONS:
            with torch.inference_mode(False):  # whose weights have no version, so that packs could not be kept
                module = layer.module().cuda().to(dtype).to(memory_format=layout)
            x = layer.input().cuda().to(dtype).to(memory_format=layout)
            made: dict[str, nn.Module] = {}
            for info in ai3_ops.algorithms("conv2d", "cuda"):
                call = (x, module.weight, module.bias, layer.sizes["stride"], layer.sizes["pad"], 1, module.groups)
                if not info.rule and ai3_ops.supports("conv2d", info.name, *call, allow_tf32=tf32)[0]:
                    with torch.inference_mode(False):
                        made[info.name] = ai3_ops.swap(module, {"conv2d": info.name}, x, strict=True)
            theirs, *ours = microseconds([_call(m, x) for m in (module, *made.values())], 7, 4)
            found.setdefault(precision, {})[layer.line] = {
                "torch_us": theirs,
                **dict(zip(made, (us / theirs for us in ours), strict=True)),
            }
    return found


def _call(module: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
    return lambda: module(*inputs)


def rows() -> dict[str, Any]:
    """Time over PyTorch's of what is no convolution."""
    found: dict[str, Any] = {}
    for precision, (dtype, tf32, _) in PRECISIONS.items():
        if "," in precision:
            continue
        _switch(tf32)

        def measured(what: str, theirs: Callable[[], Any], ours: Callable[[], Any], precision: str = precision) -> None:
            of_torch, own = microseconds([theirs, ours], 7, 4)
            found.setdefault(precision, {})[what] = {"torch_us": of_torch, "ratio": own / of_torch}

        for m, k, n in LINEAR:
            x, w, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (n, k), (n,)))
            for name, ours in (("", torch.ops.ai3.linear_gemm), (", cublaslt", torch.ops.ai3.linear_cublaslt)):
                measured(f"linear {m}x{k} -> {n}{name}", _call(torch.nn.functional.linear, x, w, b),
                         lambda x=x, w=w, b=b, tf32=tf32, ours=ours: ours(x, w, b, allow_tf32=tf32))  # fmt: skip
        x = torch.randn(6272, 768, device="cuda", dtype=dtype)
        w, b = torch.randn(2, 768, device="cuda", dtype=dtype)
        measured("layer_norm 6272x768", _call(torch.nn.functional.layer_norm, x, [768], w, b),
                 lambda x=x, w=w, b=b: torch.ops.ai3.layer_norm_direct(x, [768], w, b))  # fmt: skip
        measured("rms_norm 6272x768", _call(torch.nn.functional.rms_norm, x, [768], w),
                 lambda x=x, w=w: torch.ops.ai3.rms_norm_direct(x, [768], w))  # fmt: skip
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(8, 320, 64, 64, device="cuda", dtype=dtype).to(memory_format=layout)
            w, b, mean, variance = torch.rand(4, 320, device="cuda", dtype=dtype)
            name = "channels_last" if layout == torch.channels_last else "NCHW"
            measured(f"group_norm 8x320x64x64, 32, {name}", _call(torch.nn.functional.group_norm, x, 32, w, b),
                     lambda x=x, w=w, b=b: torch.ops.ai3.group_norm_direct(x, 32, w, b))  # fmt: skip
            measured(f"batch_norm 8x320x64x64, {name}", _call(torch.nn.functional.batch_norm, x, mean, variance, w, b),
                     _call(torch.ops.ai3.batch_norm_direct, x, mean, variance, w, b))  # fmt: skip
        for shape in ((6272, 768), (384, 197, 197), (64, 8192)):
            x = torch.randn(shape, device="cuda", dtype=dtype)
            measured(f"softmax {shape}", lambda x=x: x.softmax(-1), lambda x=x: torch.ops.ai3.softmax_direct(x, -1))
        x = torch.randn(32, 64, 112, 112, device="cuda", dtype=dtype)
        for what, theirs, ours in (
            ("relu", torch.relu, torch.ops.ai3.relu_direct),
            ("gelu", torch.nn.functional.gelu, torch.ops.ai3.gelu_direct),
            ("silu", torch.nn.functional.silu, torch.ops.ai3.silu_direct),
        ):
            measured(f"{what} 32x64x112x112", _call(theirs, x), _call(ours, x))
        measured("max_pool2d 3, stride 2", _call(torch.nn.functional.max_pool2d, x, 3, 2, 1),
                 lambda x=x: torch.ops.ai3.max_pool2d_direct(x, [3, 3], [2, 2], [1, 1]))  # fmt: skip
        measured("adaptive_avg_pool2d to 1", _call(torch.nn.functional.adaptive_avg_pool2d, x, 1),
                 lambda x=x: torch.ops.ai3.adaptive_avg_pool2d_direct(x, [1, 1]))  # fmt: skip
    return found


def networks() -> dict[str, Any]:
    """The paper's Figure 4: networks whose convolutions one algorithm computes, in strict float32; and default."""
    found: dict[str, Any] = {}
    _switch(False)
    for name in MODELS:
        with torch.inference_mode(False):
            named = models.named(name, batch=10)
            model, x = named.model.cuda(), named.inputs.cuda()
        made: dict[str, nn.Module] = {"torch": model}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for algorithm in ("implicit_gemm", "implicit_precomp_gemm", "default"):
                with torch.inference_mode(False):
                    made[algorithm] = ai3_ops.swap(model, {"conv2d": algorithm}, x)
            with torch.inference_mode(False):
                made["all default"] = ai3_ops.swap(model, "default", x)
        theirs, *ours = gpu.in_turns([_call(m, x) for m in made.values()], gpu.wall_seconds)
        found[name] = {"torch_ms": theirs * 1e3, **{k: s / theirs for k, s in zip([*made][1:], ours, strict=True)}}
    return found


# Networks and precisions that `optimize` is measured with: all in strict float32, two in what tensor cores take, a small one
# beside torch.compile's max-autotune, which takes minutes to compile.
_FEW = "resnet152", "vit_b_16"
_COMPILED = ("squeezenet1_1",)


def optimized(names: tuple[str, ...] = MODELS) -> dict[str, Any]:
    """Networks through `optimize`, over eager."""
    found: dict[str, Any] = {}
    for name in names:
        for precision, (dtype, tf32, _) in PRECISIONS.items():
            if "," in precision or (precision != "float32" and name not in _FEW):
                continue
            for batch in (1, 10):
                _switch(tf32)
                key = f"{name}, {batch}, {precision}"
                found[key] = _optimized(name, batch, dtype, False)
                print(key, found[key], flush=True)
    return found


def compiled() -> dict[str, Any]:
    """As `optimized`, beside torch.compile's max-autotune."""
    found: dict[str, Any] = {}
    _switch(False)
    for name in _COMPILED:
        found[f"{name}, 1, float32"] = _optimized(name, 1, torch.float32, True)
        print(name, found[f"{name}, 1, float32"], flush=True)
    return found


def _optimized(name: str, batch: int, dtype: torch.dtype, compiles: bool) -> dict[str, float]:
    named = models.named(name, batch=batch)
    model, x = named.model.cuda().to(dtype), named.inputs.cuda().to(dtype)
    start = time.perf_counter()
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        ours = ai3_ops.optimize(model, x, budget_seconds=20)
    took = time.perf_counter() - start
    calls = [_call(model, x), _call(ours, x)]
    if compiles:
        calls.append(_call(torch.compile(model, mode="max-autotune"), x))
    theirs, *others = gpu.in_turns(calls, gpu.wall_seconds)
    ratios = dict(zip(("optimize", "max-autotune"), (s / theirs for s in others), strict=False))
    return {"torch_ms": theirs * 1e3, **ratios, "seconds": took}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "layers": layers,
    "rows": rows,
    "networks": networks,
    "optimize": optimized,
    "compiled": compiled,
}


def machine() -> dict[str, str]:
    """What the figures must be read with: the GPU, its measured copy bandwidth and float32 product rate."""
    properties = torch.cuda.get_device_properties(0)
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    a: Tensor = torch.randn(4096, 4096, device="cuda")
    _switch(False)
    copy_us, product_us = microseconds([lambda: other.copy_(big), lambda: a @ a], 5, 5)
    return {
        "GPU": properties.name,
        "copy bandwidth": f"{2 * big.numel() / copy_us / 1e3:.0f} GB/s, bytes read and written, measured in this run",
        "float32 product": f"{2 * 4096**3 / product_us / 1e6:.1f} TFLOP/s without TF32, measured in this run",
        "versions": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    yield "# CUDA"
    yield ""
    yield "Written by `python -m benchmarks.cuda`. Times over PyTorch eager's with `cudnn.benchmark`, in turns, each table in one"
    yield "run (`optimize` in two): below 1 is faster than PyTorch. Float32 is strict, and in NCHW where nothing else is said;"
    yield "TF32 and bfloat16 are in channels_last. Columns `default` of networks are of the rule as it is, from two runs."
    yield ""
    yield from measure.table(("machine", ""), data["machine"].items())
    for precision, found in data.get("layers", {}).items():
        names = sorted({name for ratios in found.values() for name in ratios if name != "torch_us"})
        yield f"\n## conv2d, {precision}\n"
        lines = [
            [str(measure.Layer(line)), f"{r['torch_us']:.0f}", *(f"{r[n]:.2f}" if n in r else "" for n in names)]
            for line, r in found.items()
        ]
        yield from measure.table(["layer", "PyTorch, us", *names], lines, " " + "r" * (len(names) + 1))
    for precision, found in data.get("rows", {}).items():
        yield f"\n## Other operations, {precision}\n"
        lines = [[what, f"{r['torch_us']:.1f}", f"{r['ratio']:.2f}"] for what, r in found.items()]
        yield from measure.table(["operation", "PyTorch, us", "ours over it"], lines, " rr")
    if "networks" in data:
        yield "\n## The paper's networks, (10, 3, 224, 224), strict float32\n"
        names = [n for n in next(iter(data["networks"].values())) if n != "torch_ms"]
        lines = [
            [k, f"{r['torch_ms']:.2f}", *(f"{r[n]:.2f}" if n in r else "" for n in names)]
            for k, r in data["networks"].items()
        ]
        yield from measure.table(["network", "PyTorch, ms", *names], lines, " " + "r" * (len(names) + 1))

    if both := data.get("optimize", {}) | data.get("compiled", {}):
        yield "\n## optimize, over PyTorch eager with `cudnn.benchmark`\n"
        lines = []
        for what, r in both.items():
            peer = f"{r['max-autotune']:.2f}" if "max-autotune" in r else ""
            lines.append([what, f"{r['torch_ms']:.2f}", f"{r['optimize']:.2f}", peer, f"{r['seconds']:.0f}"])
        head = ["network, images, precision", "PyTorch, ms", "optimize", "max-autotune", "optimize took, s"]
        yield from measure.table(head, lines, " rrrr")


def main() -> int:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which to measure (default: all); optimize:NETWORK one"
    )
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 1
    data: dict[str, Any] = json.loads(PAGE.with_suffix(".json").read_text()) if PAGE.exists() else {}
    with torch.inference_mode():
        here = machine()
        if data.get("machine", {}).get("GPU", here["GPU"]) != here["GPU"]:
            data = {}
        data["machine"] = here
        for part in options.parts.split(","):
            name, _, network = part.partition(":")
            found = optimized((network,)) if network else PARTS[name]()
            data[name] = data.get(name, {}) | found
            measure.write(options.output, page(data), data)
    print(options.output.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
