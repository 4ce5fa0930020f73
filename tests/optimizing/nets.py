"""Models that ai3_ops.optimize is tried on, and what compares its answer with the model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops.graph.network import difference
from ai3_ops.optimizing.module import Optimized

BOUND = 1e-4  # of float32 outputs against float64, as the issue and DESIGN have it


def exact(model, *inputs):
    with torch.no_grad():
        return copy.deepcopy(model).double().eval()(*[x.double() if x.is_floating_point() else x for x in inputs])


def optimized(model, *inputs, **kwargs):
    kwargs = {"budget_seconds": 0.2, "progress": False} | kwargs
    return ai3_ops.optimize(model, inputs, **kwargs)


def seeded(model):
    """Weights of the size that keeps values near 1, the same in every test."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(1, parameter.shape[-1]) ** 0.5)
    return model.eval()


def check(model, *inputs, left=False, **kwargs):
    """The optimized module, which agrees with the model; something in it runs as a program, unless it may be `left` as it was."""
    fast = optimized(model, *inputs, **kwargs)
    agree(fast, model, *inputs)
    return fast if left else taken(fast)


def taken(fast):
    """The module, of which at least a part runs as programs."""
    plans = [module._ai3_first for module in fast.modules() if isinstance(module, Optimized)]
    assert any(plan is not None and plan.body is not None for plan in plans)
    return fast


def agree(fast, model, *inputs):
    with torch.no_grad():
        got, expected = fast(*inputs), exact(model, *inputs)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
        assert difference(one, other) <= BOUND


def seeded_norm(channels, kind=nn.BatchNorm2d):
    norm = kind(channels)
    with torch.no_grad():
        for tensor in (norm.weight, norm.running_var):
            tensor.uniform_(0.5, 1.5)
        for tensor in (norm.bias, norm.running_mean):
            tensor.normal_(0, 0.3)
    return norm


def seeded_prelu(channels):
    layer = nn.PReLU(channels)
    with torch.no_grad():
        layer.weight.uniform_(-0.5, 0.9)
    return layer


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), seeded_norm(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), seeded_norm(8)
        self.fc = nn.Linear(8 * 36, 5)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.fc(torch.flatten(F.relu(y), 1))
