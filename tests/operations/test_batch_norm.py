"""batch_norm: what the shared tester does not reach, and its line in programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops

ops = torch.ops.ai3


def numbers(channels):
    generator = torch.Generator().manual_seed(4)
    mean, variance, weight, bias = (torch.randn(channels, generator=generator) for _ in range(4))
    return mean, variance.abs() + 0.1, weight, bias


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_and_gradients(dtype, layout):
    given = [t.to(dtype) for t in numbers(19)]
    x = torch.randn(2, 19, 7, 9).to(dtype).contiguous(memory_format=layout).requires_grad_()
    weight, bias = (t.requires_grad_() for t in given[2:])
    y = ops.batch_norm_direct(x, *given[:2], weight, bias)
    assert y.is_contiguous(memory_format=layout)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    z = F.batch_norm(exact[0], *[t.double() for t in given[:2]], *exact[1:])
    eps = torch.finfo(dtype).eps
    assert (y - z).abs().max() <= 4 * eps * z.abs().max()
    gy = torch.randn_like(y)
    for got, expected in zip(
        torch.autograd.grad(y, (x, weight, bias), gy), torch.autograd.grad(z, exact, gy.double()), strict=True
    ):
        assert got.dtype == dtype
        assert (got - expected).abs().max() <= 8 * eps * expected.abs().max()


def test_training_is_refused_and_changes_nothing():
    mean, variance, weight, bias = numbers(5)
    kept = mean.clone()
    with pytest.raises(RuntimeError, match="ai3::batch_norm_direct: computes with given statistics, and training=True"):
        ops.batch_norm_direct(torch.randn(2, 5, 3), mean, variance, weight, bias, True)
    with pytest.raises(RuntimeError, match="needs running_mean and running_var where training is False"):
        ops.batch_norm_direct(torch.randn(2, 5, 3), None, variance)
    assert torch.equal(mean, kept)


class Volumes(nn.Module):
    """A normalization of volumes between layers of rows, which takes no weights' place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 24), nn.BatchNorm3d(2), nn.Linear(24, 5)
        self.norm.load_state_dict(dict(zip(("weight", "bias"), numbers(2)[2:], strict=True)), strict=False)
        self.norm.running_mean.copy_(numbers(2)[0])
        self.norm.running_var.copy_(numbers(2)[1])

    def forward(self, x):
        y = self.first(x).view(-1, 2, 2, 3, 2)
        return self.last(F.gelu(self.norm(y)).flatten(1))


def test_volumes_are_normalized_in_a_program():
    model, x = Volumes().eval(), torch.randn(3, 6)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    assert "batch_norm_direct" in fast._ai3_first.body.program.text
    with torch.no_grad():
        for given in (x, x[:1]):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
