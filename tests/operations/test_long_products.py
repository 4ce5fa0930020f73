"""Products of so many terms that they are summed in parts, which wait in the output (docs/decisions/gemm.md)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tester import ALGORITHMS as ALGORITHMS_OF_ALL
from tester import integers, name_of

import ai3_ops
from ai3_ops.registry import AlgorithmInfo

ops = torch.ops.ai3
# Parts of equal and of unequal length, of one tap and of several; panels that are not filled; few columns and many.
SHAPES = ((1025, 70, 1), (2500, 33, 1), (4100, 70, 1), (128, 70, 3), (300, 33, 3), (700, 70, 3))
ALGORITHMS = ("direct", "implicit_gemm", "implicit_precomp_gemm", "im2col")


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
    padding = kernel // 2
    expected = F.conv2d(x.double(), w.double(), b.double(), padding=padding)
    plain, fused = getattr(ops, f"conv2d_{algorithm}"), getattr(ops, f"_conv2d_{algorithm}_fused")
    for form in (torch.contiguous_format, torch.channels_last):
        image, other = x.to(memory_format=form), residual.to(memory_format=form)
        if not ai3_ops.supports("conv2d", algorithm, image, w, b, padding=padding)[0]:
            continue
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(plain(image, w, b, padding=padding).double(), expected)
            y = fused(image, w, b, [1, 1], [padding] * 2, [1, 1], 1, other, "relu", None)
            assert torch.equal(y.double(), (expected + residual.double()).relu())


def test_a_residual_may_be_the_output() -> None:
    x, w, b = integers(1, 2048, 7, 7).to(memory_format=torch.channels_last), integers(70, 2048, 1, 1), integers(70)
    start = integers(1, 70, 7, 7, most=99).to(memory_format=torch.channels_last)
    expected = (F.conv2d(x.double(), w.double(), b.double()) + start.double()).relu()
    for count in (1, 2):
        torch.set_num_threads(count)
        y = start.clone()
        ops._conv2d_direct_out(x, w, b, [1, 1], [0, 0], [1, 1], 1, y, "relu", out=y)
        assert torch.equal(y.double(), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("channels", "filters", "kernel"), [(2048, 70, 1), (2048, 448, 1), (300, 70, 3)])
def test_sums_do_not_depend_on_threads(channels: int, filters: int, kernel: int, algorithm: str) -> None:
    """Whose shares may have one slab of rows, or few columns."""
    generator = torch.Generator().manual_seed(0)
    x, w, residual = (
        torch.randn(shape, generator=generator)
        for shape in ((1, channels, 7, 8), (filters, channels, kernel, kernel), (1, filters, 7, 8))
    )
    fused = getattr(ops, f"_conv2d_{algorithm}_fused")
    for form in (torch.contiguous_format, torch.channels_last):
        image, other = x.to(memory_format=form), residual.to(memory_format=form)
        if not ai3_ops.supports("conv2d", algorithm, image, w, padding=kernel // 2)[0]:
            continue
        results = []
        for count in (1, 2, 4, 5, 16):
            torch.set_num_threads(count)
            results.append(fused(image, w, None, [1, 1], [kernel // 2] * 2, [1, 1], 1, other, "none", None))
        assert all(torch.equal(results[0], y) for y in results)


OWN = [a for a in ALGORITHMS_OF_ALL if a.operation in ("conv1d", "conv2d", "linear") and not a.vendor and not a.rule]


# Images in both memory formats, and of depthwise another kernel.
FORMS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
BESIDE = [
    pytest.param(info, FORMS[form], tall, id="-".join([name_of(info), form, *["tall"] * tall]))
    for info in OWN
    for form in (FORMS if info.operation == "conv2d" else ("nchw",))
    for tall in ((False, True) if (info.operation, info.name) == ("conv2d", "depthwise") else (False,))
]


def _beside_a_bias(info: AlgorithmInfo, columns: int, tall: bool) -> tuple[torch.Tensor, ...]:
    """Input, weight and bias: many products of a sum that is small beside the bias."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if info.operation == "linear":
        return draw(columns, 1024), 1e-7 * draw(48, 1024), 1 + draw(48).abs()
    space = 2 if info.operation == "conv2d" else 1
    if info.name == "depthwise":
        sides = (31, 7) if tall else (31,) * space
        return draw(1, 40, *(side + columns - 1 for side in sides)), 1e-7 * draw(40, 1, *sides), 1 + draw(40).abs()
    if info.name == "patch_gemm":
        sides, pixels = (4,) * space, (4 * columns,) * space
    else:
        sides = ((3,) if space == 2 or info.name == "winograd" else (9,)) * space
        pixels = tuple(side + columns - 1 for side in sides)
    return draw(1, 128, *pixels), 1e-7 * draw(48, 128, *sides), 1 + draw(48).abs()


@pytest.mark.parametrize(("info", "form", "tall"), BESIDE)
@pytest.mark.parametrize("columns", [1, 3, 30])
def test_a_bias_is_added_to_the_whole_sum(
    info: AlgorithmInfo, form: torch.memory_format, tall: bool, columns: int
) -> None:
    """Each of so many products would round at its size if it were added to the bias: that would be several times this error."""
    x, w, b = _beside_a_bias(info, columns, tall)
    x = x.contiguous(memory_format=form)
    options = {"groups": x.shape[1]} if info.name == "depthwise" else {}
    if info.name == "patch_gemm":
        options = {"stride": 4}
    supported, reason = ai3_ops.supports(info.operation, info.name, x, w, b, **options)
    assert supported, reason
    expected = getattr(F, info.operation)(x.double(), w.double(), b.double(), **options)
    y = getattr(ops, f"{info.operation}_{info.name}")(x, w, b, **options)
    assert ((y.double() - expected).abs() <= 2 * torch.finfo(torch.float32).eps * expected.abs()).all()
