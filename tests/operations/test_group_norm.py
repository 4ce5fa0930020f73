"""group_norm: values that are hard to sum, and its place in networks and programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops

ops = torch.ops.ai3
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def exact(x, groups, eps=1e-5):
    rows = x.double().contiguous().view(x.shape[0], groups, -1)
    d = rows - rows.mean(-1, keepdim=True)
    return (d / (d.square().mean(-1, keepdim=True) + eps).sqrt()).view(x.shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("far", [0.0, 1e3, 1e5])
def test_a_first_element_far_from_the_mean(layout, groups, far):
    """As a border of zeros around values that differ by little."""
    x = torch.randn(2, 8, 20, 17).add_(far)
    x[:, :, 0, :] = x[:, :, :, 0] = 0
    x = x.contiguous(memory_format=layout)
    x_without = torch.randn(2, 8, 20, 17).add_(far).contiguous(memory_format=layout)
    x_without[:, :, 0, 0] = far + 3e4
    for given in (x, x_without):
        expected = exact(given, groups)
        got = ops.group_norm_direct(given, groups)
        assert got.is_contiguous(memory_format=layout)
        assert (got - expected).abs().max() <= 4e-6 * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_small_differences_from_a_mean(layout):
    """The mean, rounded to float32, would be wrong by as much as the values differ."""
    x = (1000 + 1e-2 * torch.randn(2, 8, 5, 4)).contiguous(memory_format=layout)
    for got, expected in (
        (ops.group_norm_direct(x, 2), exact(x, 2)),
        (ops.layer_norm_direct(x.flatten(), [x.numel()]), exact(x.flatten().view(1, 1, -1), 1).flatten()),
    ):
        assert (got - expected).abs().max() <= 4e-6 * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e18, 1e30, 3e38])
def test_squares_beyond_float32(layout, scale):
    x = torch.rand(2, 6, 5, 7).sub_(0.5).mul_(scale).contiguous(memory_format=layout)
    expected = exact(x, 3)
    torch.testing.assert_close(ops.group_norm_direct(x, 3).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_not_finite_stays_in_its_group(value, layout):
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=layout)
    x[1, 2, 3, 3] = value
    got = ops.group_norm_direct(x, 3)
    assert got[1, 2:4].isnan().all()
    assert got[0].isfinite().all()
    assert got[1, [0, 1, 4, 5]].isfinite().all()


class Block(nn.Module):
    """A U-Net's, as diffusers has it."""

    def __init__(self, channels=16):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        y = self.convs[0](F.silu(self.norms[0](x)))
        return x + self.convs[1](F.silu(F.group_norm(y, 2, self.norms[1].weight, self.norms[1].bias, 1e-3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_one_program(dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(), Block()).eval().to(dtype)
    x = torch.randn(2, 3, 9, 8).to(dtype)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    text = fast._ai3_first.body.program.text
    assert text.count("group_norm_direct") == 4
    with torch.no_grad():
        for given in (x, x[:1]):
            exact_ = model.double()(given.double())
            own = (model.to(dtype)(given) - exact_).abs().max()
            assert (fast(given) - exact_).abs().max() <= max(4 * own, 1e-5)


def test_named_layers_run_and_default_leaves_what_gains_nothing():
    model, x = Block().eval(), torch.randn(1, 16, 9, 8)
    named, rule = (ai3_ops.swap(model, {"group_norm": name}, x) for name in ("direct", "default"))
    with torch.no_grad():
        for swapped in (named, rule):
            torch.testing.assert_close(swapped(x), model(x), rtol=1e-4, atol=1e-5)
    for swapped, left in ((named, 0), (rule, 1)):
        rows = [row for row in ai3_ops.explain(swapped).layers if row.operation == "group_norm" and row.calls]
        assert [row.name for row in rows] == [":group_norm_0", "norms.0"]
        assert all((row.calls, row.torch_calls) == (1, left) for row in rows)
