"""batch_norm: what the shared tester does not reach, and its line in programs."""

from __future__ import annotations

import copy
import pickle

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


# In models ---------------------------------------------------------------------------------------------------------
class Normed(nn.Module):
    """Modules of each kind, and a function's call."""

    def __init__(self):
        super().__init__()
        self.conv, self.own, self.plain = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.untracked, self.line = nn.BatchNorm2d(8, track_running_stats=False), nn.BatchNorm1d(8)
        self.volume = nn.BatchNorm3d(2)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("variance", torch.rand(8) + 1)

    def forward(self, x):
        y = self.untracked(self.plain(F.relu(self.own(self.conv(x)))))
        y = F.batch_norm(y, self.mean, self.variance, eps=1e-3)
        return self.line(self.volume(y.unflatten(1, (2, 4))).flatten(1, 2).mean((2, 3)))


def trained():
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(4, 3, 9, 9)
    for _ in range(2):
        model(x)
    return model.eval(), x


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_direct_computes_what_has_statistics():
    model, x = trained()
    swapped = ai3_ops.swap(model, {"batch_norm": "direct"}, x)
    with torch.no_grad():
        for _ in range(3):
            close(swapped(x), model(x))
        close(torch.compile(swapped, fullgraph=True, backend="aot_eager")(x), model(x))
        close(torch.export.export(swapped, (x,)).module()(x), model(x))
        close(ai3_ops.optimize(swapped, x, "default", progress=False)(x), model(x))
        close(pickle.loads(pickle.dumps(swapped))(x), model(x))
        close(ai3_ops.unswap(copy.deepcopy(swapped))(x), model(x))
    used = {row.name: row.used for row in ai3_ops.explain(swapped).layers if row.operation == "batch_norm"}
    assert used.pop("untracked") == "torch"
    assert {*used} == {":batch_norm_0", "own", "plain", "line", "volume"}
    assert {*used.values()} == {"direct"}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_changes_the_statistics_as_pytorchs(mode):
    model, x = trained()
    swapped = getattr(ai3_ops.swap(model, {"batch_norm": "direct"}), mode)()
    model = getattr(copy.deepcopy(model), mode)()
    for m in (swapped, model):
        m(x).square().sum().backward()
    for ours, theirs in zip(swapped.parameters(), model.parameters(), strict=True):
        close(ours.grad, theirs.grad, 1e-3)
    for ours, theirs in zip(swapped.buffers(), model.buffers(), strict=True):
        close(ours, theirs)
    close(swapped.eval()(x), model.eval()(x))


def test_default_leaves_all_to_pytorch():
    model, x = trained()
    swapped = ai3_ops.swap(model, "default", x)
    assert type(swapped.own) is nn.BatchNorm2d
    rows = [row for row in ai3_ops.explain(swapped).layers if row.operation == "batch_norm"]
    assert len(rows) == 6
    assert all(row.used == "torch" and "optimize folds it" in row.reason for row in rows)


def test_errors():
    model, x = trained()
    with pytest.raises(ValueError, match=r"untracked \(batch_norm\): direct needs running_mean and running_var"):
        ai3_ops.swap(model, {"batch_norm": "direct"}, x, strict=True)
    swapped = ai3_ops.swap(model, {"own": "direct"})
    with pytest.raises(ValueError, match="expected 4D input"):
        swapped.own(torch.zeros(2, 8))
