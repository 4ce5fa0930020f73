"""Models of every floating type through `optimize`: programs of that type, held against PyTorch's own error in it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from nets import Residual, exact, optimized, seeded_norm, seeded_prelu
from torch import nn

import ai3_ops
from ai3_ops.graph.network import difference
from ai3_ops.programs.lower import Region

DTYPES = [torch.float64, torch.bfloat16, torch.float16]


class Gated(nn.Module):
    """MobileNetV3's: depthwise, squeeze and excitation, hardswish, a slope for each channel, a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), seeded_norm(16)
        self.depthwise, self.slopes = nn.Conv2d(16, 16, 3, 1, 1, groups=16), seeded_prelu(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.last = nn.Conv2d(32, 8, 1)

    def forward(self, x):
        x = F.hardswish(self.norm(self.first(x)))
        y = self.slopes(self.depthwise(x))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.last(torch.cat([F.max_pool2d(x, 2), F.avg_pool2d(y, 2)], 1))


class Encoder(nn.Module):
    """Attention and its products, normalized."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.mlp = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.softmax(x + self.mlp(x), -1)


MODELS = {
    "residual": (Residual, (1, 8, 6, 6)),
    "gated": (Gated, (2, 3, 14, 14)),
    "encoder": (Encoder, (2, 7, 24)),
}


def made(name, dtype):
    torch.manual_seed(3)
    cls, shape = MODELS[name]
    return cls().eval().to(dtype), torch.randn(shape).to(dtype)


def agrees(fast, model, x):
    """As near to float64 as four times PyTorch's own error in the type."""
    with torch.no_grad():
        got, own, expected = fast(x), model(x), exact(model, x)
    assert got.dtype == own.dtype
    assert difference(got, expected) <= max(4 * difference(own, expected), 1e-12)
    return got


def programs(fast):
    body = fast._ai3_first.body
    assert body is not None, ai3_ops.explain(fast)
    return [module.program for module in body.modules() if isinstance(module, Region)]


@pytest.mark.parametrize("verify", ["quick", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_type_is_one_program(name, dtype, verify, tmp_path):
    model, x = made(name, dtype)
    fast = optimized(model, x, selectors="default", verify=verify)
    got = agrees(fast, model, x)
    (program,) = programs(fast)
    assert f"input {str(dtype).removeprefix('torch.')}" in program.text
    agrees(fast, model, torch.cat([x, -x]))  # another batch
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), got)
    ai3_ops.save(fast, tmp_path / "saved")
    assert torch.equal(ai3_ops.load(tmp_path / "saved")(x), got)


class TwoTypes(nn.Module):
    """A body in 16 bits, a head in float32, as models keep theirs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, x):
        y = F.relu(self.b(F.relu(self.a(x.to(self.a.weight.dtype))))).mean((2, 3))
        return self.head(y.to(self.head[0].weight.dtype)) * torch.ones(5, dtype=torch.float64)[:, None].sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_two_types(dtype):
    torch.manual_seed(5)
    model, x = TwoTypes().eval(), torch.randn(2, 3, 12, 12)
    model.a.to(dtype), model.b.to(dtype)
    fast = optimized(model, x, selectors="default")
    expected = copy.deepcopy(model).double()(x.double())
    with torch.no_grad():
        got, own = fast(x), model(x)
    assert got.dtype == own.dtype
    assert difference(got, expected) <= max(4 * difference(own, expected), 1e-6)
    kinds = {line.split()[3] for p in programs(fast) for line in p.text.splitlines() if " = input " in line}
    assert kinds <= {str(dtype).removeprefix("torch."), "float32"}


def test_weights_beside_16_bits_stay_with_pytorch():
    """A normalization in float32 beside bfloat16, as mixed precision has it."""
    torch.manual_seed(7)
    model = Encoder().eval().bfloat16()
    model.norm.float(), model.mlp[0].float()
    x = torch.randn(2, 7, 24).bfloat16()
    fast = optimized(model, x, selectors="default")
    agrees(fast, model, x)


def test_a_wrong_type_of_input_is_told():
    model, x = made("residual", torch.bfloat16)
    fast = optimized(model, x, selectors="default")
    with pytest.raises((ValueError, RuntimeError), match="bfloat16"):
        fast(x.float())
