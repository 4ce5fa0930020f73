"""Products of so many terms that they are summed in parts, which wait in the output (docs/decisions/gemm.md)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ai3_ops

ops = torch.ops.ai3
# Parts of equal and of unequal length, of one tap and of several, panels that are not filled.
SHAPES = ((1025, 33, 1), (2048, 64, 1), (2500, 40, 1), (128, 70, 3), (300, 33, 3), (1024, 32, 3))
ALGORITHMS = ("direct", "implicit_gemm", "implicit_precomp_gemm", "im2col")


def integers(*shape: int, most: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "filters", "kernel"), SHAPES)
def test_convolutions_are_exact_on_integers(
    channels: int, filters: int, kernel: int, dtype: torch.dtype, algorithm: str
) -> None:
    """With every part of the epilogue, in both memory formats."""
    x = integers(1, channels, 7, 8, dtype=dtype)
    w, b = integers(filters, channels, kernel, kernel, dtype=dtype), integers(filters, most=9, dtype=dtype)
    residual = integers(1, filters, 7, 8, most=99, dtype=dtype)
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=kernel // 2)
    plain = getattr(ops, f"conv2d_{algorithm}")
    fused = getattr(ops, f"_conv2d_{algorithm}_fused")
    for form in (torch.contiguous_format, torch.channels_last):
        image, other = x.to(memory_format=form), residual.to(memory_format=form)
        if not ai3_ops.supports("conv2d", algorithm, image, w, b, padding=kernel // 2)[0]:
            continue
        assert torch.equal(plain(image, w, b, padding=kernel // 2).double(), expected)
        y = fused(image, w, b, [1, 1], [kernel // 2] * 2, [1, 1], 1, other, "relu", None)
        assert torch.equal(y.double(), (expected + residual.double()).relu())


def test_a_residual_may_be_the_output() -> None:
    x, w = integers(1, 2048, 7, 7).to(memory_format=torch.channels_last), integers(64, 2048, 1, 1)
    y = integers(1, 64, 7, 7, most=99).to(memory_format=torch.channels_last)
    expected = (F.conv2d(x.double(), w.double()) + y.double()).relu()
    ops._conv2d_direct_out(x, w, None, [1, 1], [0, 0], [1, 1], 1, y, "relu", out=y)
    assert torch.equal(y.double(), expected)
