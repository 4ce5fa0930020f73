"""Derivatives of swapped models and of users' algorithms: `torch.func`, tangents and plain autograd, nested in each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tester import ALGORITHMS
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import ai3_ops
from ai3_ops import Algorithm, explain, registry, swap
from ai3_ops.checking import transforms
from ai3_ops.checking.checks import CHECKS
from ai3_ops.registry import OPERATIONS


@pytest.mark.parametrize("operation", sorted({a.operation for a in ALGORITHMS}))
def test_users_algorithms(operation):
    rules = OPERATIONS[operation]
    ai3_ops.register(operation, "user_derived", lambda *args: rules.aten(*args), replace=True)
    tally = CHECKS["transforms"](registry.algorithm(operation, "user_derived"))
    assert tally.passed > 50


class Everything(nn.Module):
    """A layer of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.pools = nn.Sequential(
            nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.conv1d = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pools(self.depthwise(self.conv(x)))
        return self.linear(self.norm(self.conv1d(x.unsqueeze(1))).flatten(1))


CHOICES = {
    "default": "default",
    "named": {
        "conv2d": "direct", "conv1d": "direct", "linear": "gemm", "layer_norm": "direct", "relu": "direct",
        "max_pool2d": "direct", "avg_pool2d": "direct", "adaptive_avg_pool2d": "direct", "flatten": "direct",
    },
    "mixed": {
        "conv2d": Algorithm("direct", backward_input="gemm", backward_weight="gemm"),
        "linear": Algorithm("gemm", backward_input="gemm", backward_weight="gemm"),
    },
}  # fmt: skip
# Where PyTorch's layer_norm is right, in plain autograd: of second derivatives without tangents (docs/pytorch.md).
SECOND = (
    ("grad", "sum", "grad"),
    ("grad", "sum", "vjp"),
    ("jacrev", "grad"),
    ("jacrev", "jacrev"),
    ("vmap", "grad", "sum", "grad"),
    ("autograd", "grad"),
    ("autograd", "autograd"),
)


def moved(model, x):
    """A scalar function of few numbers, by which input and parameters of a model move; one of its input alone, frozen weights."""
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]

    def call(x, *weights):
        return functional_call(model, dict(zip(names, weights, strict=True)), (x,))

    return transforms._scalar(call, [x, *weights]), transforms._scalar(model, [x])


@pytest.fixture
def networks():
    torch.manual_seed(0)
    model = Everything().double()
    return model, torch.randn(2, 2, 9, 8).double()


@pytest.mark.parametrize(
    ("choice", "frozen"),
    [pytest.param(c, f, marks=() if f == (c == "named") else pytest.mark.full) for c in CHOICES for f in (False, True)],
)
def test_swapped_models(networks, choice, frozen):
    model, x = networks
    model.requires_grad_(not frozen)
    swapped, point = swap(model, CHOICES[choice]), torch.tensor([0.5, -0.25]).double()
    model.norm = swapped.norm = nn.Identity()
    for ours, theirs in zip(moved(swapped, x), moved(model, x), strict=True):
        for chain in transforms.CHAINS:
            try:
                expected = transforms._taken(theirs, chain, 0)(point)
            except RuntimeError:  # torch.autograd.functional's own vmap lacks rules
                assert "forward-mode" in chain[0]
                continue
            got = transforms._taken(ours, chain, 0)(point)
            torch.testing.assert_close(got, expected, msg=lambda text, chain=chain: f"{' of '.join(chain)}: {text}")


def test_layer_norm_in_swapped_models(networks):
    model, x = networks
    swapped, point = swap(model, CHOICES["named"]), torch.tensor([0.5, -0.25]).double()
    for ours, theirs in zip(moved(swapped, x), moved(model, x), strict=True):
        for chain in SECOND:
            got, expected = transforms._taken(ours, chain, 0)(point), transforms._taken(theirs, chain, 1)(point)
            torch.testing.assert_close(got, expected, msg=lambda text, chain=chain: f"{' of '.join(chain)}: {text}")


def test_tangents_below_the_inner_level_are_counted():
    model, x = nn.Linear(4, 4).double(), torch.randn(2, 4).double()
    swapped, strict = (swap(model, {"linear": "gemm"}, strict=s) for s in (False, True))

    def curvature(m):
        return jvp(grad(lambda t: m(t).sin().sum()), (x,), (x,))[1]

    torch.testing.assert_close(curvature(swapped), curvature(model))
    (row,) = explain(swapped).layers
    assert (row.calls, row.torch_calls) == (1, 1)
    assert "forward-mode" in row.reason
    with pytest.raises(RuntimeError, match="forward-mode"):
        curvature(strict)
    jacrev(grad(lambda t: strict(t).sin().sum()))(x)
    swapped(x)
    assert explain(swapped).layers[0].torch_calls == 1


def test_checkpoints_and_compilation(networks):
    model, x = networks
    swapped = swap(model, CHOICES["named"])

    def twice(m):
        t = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(checkpoint(m, t, use_reentrant=False).sin().sum(), t, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [t, *m.parameters()], allow_unused=True)

    for got, expected in zip(twice(swapped), twice(model), strict=True):
        torch.testing.assert_close(got, expected)
    w = torch.diag(torch.tensor([2.0, 3.0], dtype=torch.float64))
    x = torch.ones(1, 2, dtype=torch.float64)
    for transform in (lambda f: grad(lambda t: grad(f)(t).square().sum()), lambda f: jacrev(grad(f)), hessian):
        compiled = torch.compile(
            transform(lambda t: torch.ops.ai3.linear_gemm(t, w).square().sum()), backend="aot_eager", fullgraph=True
        )
        torch.testing.assert_close(compiled(x), transform(lambda t: F.linear(t, w).square().sum())(x))


def test_modes_of_the_caller_reach_the_outer_levels():
    x = torch.randn(3).double()
    relu = torch.ops.ai3.relu_direct

    def inner(t):
        with torch.no_grad():
            return relu(t) * 2

    for function in (
        lambda t: grad(lambda u: (inner(u) * u).sum())(t).sum(),
        lambda t: grad(lambda u: u * 1.0)(t.sum()),
    ):
        assert torch.equal(grad(function)(x), torch.zeros(3).double())
    with torch.no_grad():
        got = grad(lambda t: grad(lambda u: relu(u).pow(3).sum())(t).sum())(x)
    torch.testing.assert_close(got, 6 * x.relu())
    torch.testing.assert_close(vmap(hessian(lambda t: relu(t).pow(3)))(x), 6 * x.relu())
