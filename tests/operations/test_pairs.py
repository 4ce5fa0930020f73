"""Products of pairs of bfloat16: matrix tiles or vectors, whichever this processor has (docs/decisions/tiles.md)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tester import integers

import ai3_ops
from ai3_ops import _library, _machine

ops = torch.ops.ai3
# Around the heights of tiles, slabs and groups of slabs, last slabs of one and two tiles; steps of 16, 12, 11 and 4 pairs, with a
# rest of 1, an odd feature; several parts and blocks of k; outputs in half a panel, in a whole one, in both.
ROWS = (1, 4, 5, 14, 15, 16, 17, 32, 33, 65, 331, 700, 1000, 1025)
FEATURES = ((32, 16), (72, 40), (22, 33), (8, 64), (34, 96), (63, 31), (1228, 48), (1536, 17), (8192, 65))


@pytest.mark.parametrize(("features", "outputs"), FEATURES)
def test_linear_is_exact_on_integers(features: int, outputs: int) -> None:
    w, b = integers(outputs, features), integers(outputs, most=9)
    for rows in ROWS:
        x = integers(rows, features)
        expected = F.linear(x.double(), w.double(), b.double())
        pairs = ops.linear_gemm(x.bfloat16(), w.bfloat16(), b.bfloat16())
        assert torch.equal(pairs, expected.bfloat16()), rows
        assert torch.equal(ops.linear_gemm_bf16(x, w, b).double(), expected), rows


@pytest.mark.parametrize("activation", ["none", "relu", "prelu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_epilogues(activation: str, dtype: torch.dtype) -> None:
    algorithm = "gemm" if dtype == torch.bfloat16 else "gemm_bf16"
    for rows, features, outputs in ((5, 64, 33), (40, 1544, 48), (70, 64, 64)):
        x, w, b, residual = (
            t.to(dtype)
            for t in (integers(rows, features), integers(outputs, features), integers(outputs), integers(rows, outputs))
        )
        slope = torch.full((outputs,), 0.25) if activation == "prelu" else None
        fused = getattr(ops, f"_linear_{algorithm}_fused")
        y = fused(x, w, b, residual, activation, slope)
        wide = F.linear(x.double(), w.double(), b.double()) + residual.double()
        functions = {
            "none": lambda t: t,
            "relu": F.relu,
            "prelu": lambda t: F.prelu(t, t.new_tensor(0.25)),
            "gelu": F.gelu,
        }
        torch.testing.assert_close(y.double(), functions[activation](wide), rtol=2**-8, atol=1e-5)


def test_a_residual_may_be_the_output() -> None:
    for rows, features, outputs in ((40, 1536, 48), (70, 58, 64)):
        x, w, out = integers(rows, features), integers(outputs, features), integers(rows, outputs)
        expected = F.linear(x.double(), w.double()) + out.double()
        for algorithm, dtype in (("gemm", torch.bfloat16), ("gemm_bf16", torch.float32)):
            y = out.to(dtype)
            getattr(ops, f"_linear_{algorithm}_out")(x.to(dtype), w.to(dtype), None, y, "none", out=y)
            assert torch.equal(y.double(), expected.to(dtype).double())


def test_rules_know_the_tiles_of_the_processor() -> None:
    """oneDNN has them whether our own kernels use them or not."""
    tiles = _library.registry()["processor_has_matrix_tiles"]
    x = torch.zeros(1, 256, 28, 28, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    w = torch.zeros(256, 256, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    if ai3_ops.supports("conv2d", "onednn", x, w, padding=1)[0]:
        chosen = ai3_ops.resolve("conv2d", "default", x, w, padding=1)
        assert chosen == ("onednn" if tiles else "winograd_f4")
    assert ("AMX" in _machine.machine()["instruction set"]) == _library.registry()["matrix_tiles"]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("channels", "filters", "size"), [(64, 48, 7), (72, 130, 14), (48, 64, 33)])
def test_pixels_are_exact_on_integers(channels: int, filters: int, size: int, groups: int) -> None:
    x = integers(2, channels, size, size).to(memory_format=torch.channels_last)
    w, b = integers(filters, channels // groups, 1, 1), integers(filters, most=9)
    y = ops.conv2d_direct(x.bfloat16(), w.bfloat16(), b.bfloat16(), 1, 0, 1, groups)
    expected = F.conv2d(x.double(), w.double(), b.double(), 1, 0, 1, groups)
    assert torch.equal(y, expected.bfloat16())


def test_threads_change_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    for rows, features, outputs in ((5, 64, 96), (29, 256, 160), (331, 96, 33), (1100, 72, 64)):
        x, w = (torch.randn(n, features, generator=g).bfloat16() for n in (rows, outputs))
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(ops.linear_gemm(x, w))
        assert all(torch.equal(results[0], r) for r in results[1:]), (rows, features, outputs)


# Attention -------------------------------------------------------------------------------------------------------------
# Heads of whole and half vectors of pairs and of a single pair; values of one, of odd and of more than a vector's size; panels
# of queries that are full, half full and of one; keys that are odd, of one tile and of several.
HEADS = ((2, 1), (6, 7), (16, 16), (30, 33), (64, 64), (72, 40), (130, 65))
LENGTHS = ((5, 1), (16, 2), (17, 31), (33, 126), (65, 127), (130, 300), (300, 517))


@pytest.mark.parametrize(("size", "of_value"), HEADS)
def test_attention_of_equal_scores_is_the_mean(size: int, of_value: int) -> None:
    for queries, keys in LENGTHS:
        q, k, v = torch.zeros(2, queries, size), integers(2, keys, size), integers(2, keys, of_value)
        y = ops.attention_flash(q.bfloat16(), k.bfloat16(), v.bfloat16())
        seen = torch.arange(1, queries + 1).clamp(max=keys)
        causal = ops.attention_flash(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 0.0, True)
        assert torch.equal(y, v.mean(1, keepdim=True).bfloat16().expand_as(y)), (queries, keys)
        assert torch.equal(causal, (v.cumsum(1)[:, seen - 1] / seen[:, None]).bfloat16()), (queries, keys)


@pytest.mark.parametrize("scale", [None, -0.25, 0.3])
@pytest.mark.parametrize(("size", "of_value"), HEADS)
def test_attention_rounds_weights_and_outputs_alone(size: int, of_value: int, scale: float | None) -> None:
    for queries, keys in LENGTHS:
        q, k, v = (torch.randn(2, n, d).bfloat16() for n, d in ((queries, size), (keys, size), (keys, of_value)))
        y = ops.attention_flash(q, k, v, scale=scale).double()
        q, k, v = q.double(), k.double(), v.double()
        weights = (q @ k.mT * (size**-0.5 if scale is None else scale)).softmax(-1)
        bound = (weights @ v).abs() + weights @ v.abs()
        assert ((y - weights @ v).abs() <= (2**-8 + 1e-4) * bound + 1e-6).all(), (queries, keys)
