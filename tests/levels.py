"""Gradients and the forms of `onednn` at the level that ONEDNN_MAX_CPU_ISA names, against float64; test_levels.py runs it.

    ONEDNN_MAX_CPU_ISA=AVX2 MALLOC_CHECK_=3 LD_PRELOAD=libc_malloc_debug.so.0 python tests/levels.py [every n-th layer]

What is about to run is printed before it does, so that the last line of a process that died names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ai3_ops
from ai3_ops import registry
from ai3_ops.checking.checks import CHECKS

LAYERS = Path(__file__).parent / "layers.txt"
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
LIMITS = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Whose gradients are all PyTorch's, and the rule's; of corners also those whose own they are.
ALGORITHMS = ("gemm", "default")
OF_CORNERS = (*ALGORITHMS, "direct", "smm", "im2col", "implicit_gemm")
# 1x1 with strides, a group's and a single channel: input, weight, stride, padding, groups.
CORNERS = [
    *[((2, c, 30, 30), (16, c, 1, 1), stride, 0, 1) for c in (1, 2, 3, 5, 7, 9, 15, 17) for stride in (2, 3, (1, 2))],
    ((2, 3, 37, 14), (1, 3, 1, 1), (1, 2), 0, 1),
    ((2, 3, 96, 96), (48, 3, 1, 1), 2, 0, 1),
    ((2, 6, 14, 14), (4, 3, 1, 1), 2, 0, 2),
    ((1, 1, 37, 6), (8, 1, 5, 5), (1, 2), (2, 0), 1),
    ((1, 8, 20, 6), (1, 8, 5, 5), 1, 2, 1),
    ((6, 13, 14), (8, 3, 3, 1), (1, 2), 1, 2),
    ((0, 3, 8, 8), (4, 3, 1, 1), 2, 0, 1),
]


def layers(
    each: int,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]]:
    """Input, weight and window of those of the file."""
    lines = [line for line in LAYERS.read_text().splitlines() if not line.startswith("#")]
    for line in lines[::each]:
        c, h, w, k, r, s, *window, groups = map(int, line.split())
        yield (2, c, h, w), (k, c // groups, r, s), tuple(window[:2]), tuple(window[2:4]), tuple(window[4:]), groups


def near(found: Tensor, exact: Tensor, what: str) -> None:
    """Within the limit of the type; an AssertionError says what is not."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    error = float((found.double() - exact).abs().max()) / (largest or 1.0) if exact.numel() else 0.0
    if not error <= LIMITS[found.dtype]:
        raise AssertionError(f"{what}: error {error:.2g}")


def laid_out(t: Tensor, name: str) -> Tensor:
    """In that memory format; of an image without batch its channels lie side by side in NHWC, with strides of no format."""
    return t.contiguous(memory_format=FORMATS[name]) if t.ndim == 4 else laid_out(t[None], name)[0]


def convolution(
    x: tuple[int, ...],
    w: tuple[int, ...],
    window: tuple[object, ...],
    dtype: torch.dtype,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> int:
    """A layer's gradients by PyTorch's operators as algorithms call them, oneDNN's forms of it; how many there were."""
    generator = torch.Generator().manual_seed(1)
    input, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (x, w, w[:1]))
    exact = [t.double().requires_grad_() for t in (input, weight, bias)]
    output = F.conv2d(*exact, *window)
    seed = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    expected = torch.autograd.grad(output, exact, seed.double())
    count = 0
    for of_input, of_weight in (("NCHW", "NCHW"), ("NCHW", "NHWC"), ("NHWC", "NHWC")):
        name, given, filters = f"{of_input} {of_weight}", laid_out(input, of_input), laid_out(weight, of_weight)
        for algorithm in algorithms:
            what = f"{algorithm} {name} {dtype} {x} {w} {window}"
            print(what, flush=True)
            leaves = [t.detach().requires_grad_() for t in (given, filters, bias)]
            gradients = torch.autograd.grad(
                getattr(torch.ops.ai3, f"conv2d_{algorithm}")(*leaves, *window), leaves, seed
            )
            for of, found, right in zip(("input", "weight", "bias"), gradients, expected, strict=True):
                near(found, right, f"gradient of the {of}, {what}")
            count += 1
        if not ai3_ops.supports("conv2d", "onednn", given, filters, bias, *window)[0]:
            continue
        what = f"onednn {name} {dtype} {x} {w} {window}"
        print(what, flush=True)
        near(torch.ops.ai3.conv2d_onednn(given, filters, bias, *window), output.detach(), what)
        module = nn.Conv2d(w[1] * window[3], w[0], w[2:], *window, dtype=dtype).requires_grad_(False)
        module.weight, module.bias = nn.Parameter(filters, False), nn.Parameter(bias, False)
        module = ai3_ops.swap(module.eval(), {"conv2d": "onednn"}, strict=True)
        with torch.inference_mode():
            for _ in range(2):  # the weight is reordered once, and kept
                near(module(given), output.detach(), f"kept, {what}")
        count += 1
    return count


def main(each: int) -> None:
    """Everything, of so few layers fewer algorithms as well; the last line says how much that was."""
    torch.set_num_threads(2)  # threads share the work of a gradient in other ways
    of_corners, count = OF_CORNERS if each <= 60 else ALGORITHMS, 0
    for x, w, stride, padding, groups in CORNERS:
        for dtype in LIMITS:
            count += convolution(x, w, (stride, padding, 1, groups), dtype, of_corners)
    for x, w, stride, padding, dilation, groups in layers(each):
        count += convolution(x, w, (stride, padding, dilation, groups), torch.float32)
    for info in registry.algorithms(device="cpu"):
        checks = ["gradients", "partial_gradients"] if each == 1 else []
        checks += ["values"] if info.name == "onednn" else []
        for name in checks:
            print(f"check_{name} of {info.operation} {info.name}", flush=True)
            count += CHECKS[name](info).passed
    print(f"passed {count}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
