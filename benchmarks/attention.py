"""attention_flash beside PyTorch's function, the composed form where that has none, and sparse forms beside flash itself:
docs/benchmarks/attention.md.

`python -m benchmarks.attention [--threads N] [--seconds S] [--output PAGE]`.
Every row is one process's alternating turns on the same tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure

PAGE = measure.ROOT / "docs" / "benchmarks" / "attention.md"
SOFTMAX = 12  # multiply-adds that a vector of scores costs besides the products, estimated for AVX-512


class Row(NamedTuple):
    """What is compared: PyTorch's call or what the name says, ours, and what bounds ours: operations, or bytes that are read."""

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    flops: float = 0.0
    bytes: float = 0.0


def _flash(*args: Any, **options: Any) -> Tensor:
    return torch.ops.ai3.attention_flash(*args, **options)


def _tensors(batch: int, heads: int, length: int, size: int, grad: bool = False) -> list[Tensor]:
    return [torch.randn(batch, heads, length, size, requires_grad=grad) for _ in range(3)]


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], like: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(function(*tensors), tensors, like)


def _composed(
    q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is None:
        return scores.softmax(-1) @ v
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def rows() -> Iterator[Row]:
    """Those of the page, made when they are measured."""
    sdpa = F.scaled_dot_product_attention
    for name, shape in (
        ("ViT-B", (1, 12, 197, 64)), ("BERT", (1, 12, 512, 64)), ("CLIP's text", (8, 8, 77, 64)),
        ("long", (1, 4, 4096, 64)), ("longer", (1, 2, 16384, 64)),
    ):  # fmt: skip
        pairs = shape[0] * shape[1] * shape[2] ** 2
        wide = _tensors(*shape)
        ours = partial(_flash, *wide)
        yield Row(f"{name} {shape}", partial(sdpa, *wide), ours, _flops(pairs, shape[3]))
        if shape[2] >= 16384:
            continue
        tensors = [t.bfloat16() for t in wide]
        yield Row(f"{name}, bfloat16, {shape}", partial(sdpa, *tensors), partial(_flash, *tensors))
        yield Row("the same, beside flash in float32", ours, partial(_flash, *tensors))
    for length in (512, 1024):
        q, k, v = _tensors(1, 8, length, 64)
        name, flops = f"causal (1, 8, {length}, 64)", _flops(4 * length * (length + 1), 64)
        yield Row(name, partial(sdpa, q, k, v, is_causal=True), partial(_flash, q, k, v, None, 0.0, True), flops)
    q, k, v = _tensors(1, 12, 512, 64)
    mask = torch.rand(1, 1, 512, 512) > 0.3
    flops = _flops(12 * 512**2, 64)
    yield Row("boolean mask (1, 12, 512, 64)", partial(sdpa, q, k, v, mask), partial(_flash, q, k, v, mask), flops)
    yield Row("the same, beside flash without a mask", partial(_flash, q, k, v), partial(_flash, q, k, v, mask), flops)
    for shape in ((1, 12, 512, 64), (1, 1, 1024, 64)):
        tensors = _tensors(*shape, grad=True)
        like = torch.randn(shape)
        both = (_with_gradients(f, tensors, like) for f in (sdpa, _flash))
        yield Row(f"forward and backward {shape}", *both, 3.5 * _flops(shape[1] * shape[2] ** 2, 64))
        tensors = [t.detach().bfloat16().requires_grad_() for t in tensors]
        both = (_with_gradients(f, tensors, like.bfloat16()) for f in (sdpa, _flash))
        yield Row(f"forward and backward, bfloat16, {shape}", *both)
    for heads in (8, 2):
        q, k, v = torch.randn(1, 8, 1, 128), *(torch.randn(1, heads, 4096, 128) for _ in range(2))
        call = {"enable_gqa": heads != 8}
        name = f"one query, 4,096 keys, 8 heads on {heads}, 128"
        for tensors in ((q, k, v), [t.bfloat16() for t in (q, k, v)]):
            both, read = (partial(f, *tensors, **call) for f in (sdpa, _flash)), sum(t.nbytes for t in tensors[1:])
            yield Row(name if tensors[0].dtype == torch.float32 else f"{name}, bfloat16", *both, bytes=read)
    q, k, v = _tensors(1, 2, 4096, 64)
    flops, sinks = _flops(2 * 4096**2, 64), torch.randn(2)
    name = "(1, 2, 4096, 64) beside the composed form"
    yield Row(f"softcap {name}", partial(_composed, q, k, v, 50.0), partial(_flash, q, k, v, softcap=50.0), flops)
    yield Row(f"sinks {name}", partial(_composed, q, k, v, 0.0, sinks), partial(_flash, q, k, v, sinks=sinks), flops)
    for windows, heads in ((64, 4), (16, 8), (4, 16), (1, 32)):  # of a Swin-B's stages, for one image
        q, k, v = _tensors(windows, heads, 49, 32)
        bias, flops = torch.randn(1, heads, 49, 49), _flops(windows * heads * 49**2, 32)
        name = f"windows and bias ({windows}, {heads}, 49, 32) beside the composed form"
        yield Row(name, partial(_composed, q, k, v, bias=bias), partial(_flash, q, k, v, bias), flops)
    q, k, v = _tensors(1, 2, 16384, 64)
    longformer = partial(torch.ops.ai3.attention_longformer, q, k, v, window=256)
    yield Row("longformer, window 256, (1, 2, 16384, 64) beside flash", partial(_flash, q, k, v), longformer)
    q, k, v = _tensors(1, 2, 4096, 64)
    bigbird = partial(torch.ops.ai3.attention_bigbird, q, k, v)
    yield Row("bigbird, default blocks, (1, 2, 4096, 64) beside flash", partial(_flash, q, k, v), bigbird)


def _flops(pairs: int, size: int) -> float:
    return pairs * (4.0 * size + 2 * SOFTMAX)


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="of a row")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load, (peak, bandwidth) = measure.Load(), measure.limits(options.threads)[:2]
    found = []
    for row in rows():
        with torch.set_grad_enabled("backward" in row.name):
            theirs, ours = measure.interleaved([row.theirs, row.ours], options.seconds)
        least = max(row.flops / peak, row.bytes / bandwidth)
        share = f"{100 * least / ours:.0f} %" if least else ""
        found.append((row.name, *map(measure.milliseconds, (theirs, ours)), f"{theirs / ours:.2f}", share))
        print(*found[-1], sep="  ", flush=True)
    machine = measure.machine(options.threads, load)
    head = "batch, heads, length, size", "PyTorch, or as named", "ours", "ratio", "of the bound"
    lines = [
        "# attention_flash beside PyTorch",
        "",
        "Written by `python -m benchmarks.attention`: float32 but where said, milliseconds, medians of alternating turns in one",
        f"process. The bound is the multiply-add peak for both products and {SOFTMAX} multiply-adds for each vector of scores,",
        "the softmax's; of both passes 3.5 times that, seven products. A share is of that bound for the pairs of a query and a",
        "key that are seen; of a single query, of the bandwidth at which its keys and values can be read.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        *measure.table(head, found, "-rrrr"),
    ]
    measure.write(options.output, lines, {"machine": machine, "rows": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
