"""Networks that Hypothesis draws: every rewrite, and all of `optimize`, keep what is computed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from nets import agree, check, exact, optimized, seeded_norm, seeded_prelu
from torch import nn

import tests.tester  # noqa: F401  the profiles
from ai3_ops.graph import fusion
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.graph.network import Checker, difference
from ai3_ops.graph.substitutions import SUBSTITUTIONS
from ai3_ops.optimizing.search import search, take
from ai3_ops.programs.timing import flops

MEAN = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d}
# By the number of dimensions: convolution, normalization, pools.
KINDS = {
    1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d),
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d),
}


class Drawn(nn.Module):
    """Layers and how their values are combined, as Hypothesis drew them: (kind, indices of values, module or number)."""

    def __init__(self, channels, plan, outputs):
        super().__init__()
        self.plan, self.outputs = plan, outputs
        self.layers = nn.ModuleList(layer for _, _, layer in plan if isinstance(layer, nn.Module))
        self.channels = channels

    def forward(self, x):
        values = [x.clone()]  # what follows may be in place
        for kind, at, extra in self.plan:
            given_values = [values[i] for i in at]
            match kind:
                case "layer" | "activation":
                    values.append(extra(given_values[0]))
                case "add":
                    values.append(given_values[0] + given_values[1])
                case "add_":
                    values.append(given_values[0].clone().add_(given_values[1]))
                case "cat":
                    values.append(torch.cat(given_values, 1))
                case "slice":
                    values.append(given_values[0][:, extra[0] : extra[1]])
                case "scale":
                    values.append(given_values[0] * extra(MEAN[x.ndim](given_values[0], 1)))
                case "shift":
                    values.append(given_values[0] * extra + 0.5)
        results = tuple(values[i] for i in self.outputs)
        return results if len(results) > 1 else results[0]


class Excitation(nn.Module):
    def __init__(self, conv, channels, last):
        super().__init__()
        self.fc1, self.fc2, self.last = conv(channels, 4, 1), conv(4, channels, 1), last

    def forward(self, x):
        return self.last(self.fc2(F.relu(self.fc1(x))))


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardswish(), nn.SiLU(), nn.GELU(), nn.Sigmoid(), nn.Hardsigmoid(),
    nn.LeakyReLU(0.1), nn.Tanh(), nn.ELU(0.7), nn.PReLU(), nn.Identity(), nn.Dropout(),
]  # fmt: skip


@st.composite
def networks(draw):
    """A network of up to nine steps on a small image or sequence, all values of which have sizes known here."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    channels, size, dims = (
        draw(st.sampled_from([1, 3, 8, 16])),
        draw(st.integers(3, 9)),
        draw(st.sampled_from([2, 2, 1])),
    )
    conv, norm, max_pool, avg_pool = KINDS[dims]
    extents = [size] * dims
    shapes, plan = [(channels, *extents)], []
    shared = None
    for _ in range(draw(st.integers(2, 9))):
        at = draw(st.integers(0, len(shapes) - 1))
        c, *pixels = shapes[at]
        kind = draw(
            st.sampled_from(
                ["conv", "conv", "conv", "pair", "norm", "activation", "activation", "add", "cat", "slice", "pool", "scale",
                 "shift", "again"]
            )
        )  # fmt: skip
        same = [i for i, s in enumerate(shapes) if s == (c, *pixels)]
        fits = [i for i, s in enumerate(shapes) if list(s[1:]) == pixels]
        if kind == "conv" or (kind == "again" and (shared is None or shared[0] not in shapes)):
            kernel = draw(st.sampled_from([1, 1, 2, 3, 3, 5]))
            stride, dilation = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2]))
            padding = draw(st.integers(0, kernel))
            extent = dilation * (kernel - 1) + 1
            if min(pixels) + 2 * padding < extent:
                continue
            groups = draw(st.sampled_from([g for g in (1, 1, 2, c) if c % g == 0]))
            out = groups * draw(st.sampled_from([1, 2, 8, 9][: 4 if groups == 1 else 2]))
            bias = draw(st.booleans())
            layer = conv(c, out, kernel, stride, padding, dilation, groups, bias)
            plan.append(("layer", [at], layer))
            shapes.append((out, *((s + 2 * padding - extent) // stride + 1 for s in pixels)))
            if shapes[-1] == (c, *pixels):
                shared = (c, *pixels), layer
        elif kind == "again":  # a module that is used twice
            plan.append(("layer", [shapes.index(shared[0])], shared[1]))
            shapes.append(shared[0])
        elif kind == "pair":  # parallel branches that substitutions can join
            for kernel in (1, 3):
                plan.append(("layer", [at], conv(c, 4, kernel, padding=kernel // 2)))
                shapes.append((4, *pixels))
            if draw(st.booleans()):
                plan.append(("cat", [len(shapes) - 2, len(shapes) - 1], None))
                shapes.append((8, *pixels))
        elif kind == "norm":
            plan.append(("layer", [at], seeded_norm(c, norm)))
            shapes.append((c, *pixels))
        elif kind == "activation":
            layer = draw(st.sampled_from([*ACTIVATIONS, seeded_prelu(c)]))
            if getattr(layer, "inplace", False):  # writes to its input, which other steps may read
                layer = nn.Sequential(nn.Identity(), layer) if draw(st.booleans()) else layer
            plan.append(("activation", [at], layer))
            shapes.append((c, *pixels))
        elif kind == "add":
            plan.append((draw(st.sampled_from(["add", "add_"])), [at, draw(st.sampled_from(same))], None))
            shapes.append((c, *pixels))
        elif kind == "cat":
            parts = draw(st.lists(st.sampled_from(fits), min_size=1, max_size=3))
            plan.append(("cat", [at, *parts], None))
            shapes.append((c + sum(shapes[i][0] for i in parts), *pixels))
        elif kind == "slice" and c > 1:
            start = draw(st.integers(0, c - 1))
            stop = draw(st.integers(start + 1, c))
            plan.append(("slice", [at], (start, stop)))
            shapes.append((stop - start, *pixels))
        elif kind == "pool" and min(pixels) >= 2:
            layer = draw(st.sampled_from([max_pool(2, 1), avg_pool(2), max_pool(3, 2, 1), avg_pool(3, 1, 1)]))
            plan.append(("layer", [at], layer))
            shapes.append(tuple(layer(torch.zeros(1, c, *pixels)).shape[1:]))
        elif kind == "scale":
            last = draw(st.sampled_from([nn.Sigmoid(), nn.Hardsigmoid()]))
            plan.append(("scale", [at], Excitation(conv, c, last)))
            shapes.append((c, *pixels))
        elif kind == "shift":
            plan.append(("shift", [at], 0.7))
            shapes.append((c, *pixels))
    count = len(shapes)
    outputs = draw(st.lists(st.integers(1, count - 1), min_size=1, max_size=2, unique=True)) if count > 1 else [0]
    outputs = sorted({*outputs, count - 1})
    batch = draw(st.integers(1, 3))
    return Drawn(channels, plan, outputs).eval(), torch.randn(batch, channels, *extents)


@pytest.mark.hypothesis
@given(networks())
def test_every_rewrite_keeps_what_is_computed(drawn):
    """Passes and substitutions, one by one: what is replaced and what comes in its place are computed in float64."""
    model, x = drawn
    if not model.plan:
        return
    network = capture(model, (x,), {})
    canonicalize(network)
    network.checker = Checker(network, [x], 1e-5)
    before = network.run([x], torch.float64)
    fusion.simplify(network)
    for got, expected in zip(network.run([x], torch.float64), before, strict=True):
        assert difference(got, expected) <= 1e-5
    taken = []
    for substitution in SUBSTITUTIONS:
        for place in [name for name, _ in substitution(network)][:4]:
            changed = network.copy()
            changed.checker = Checker(changed, [x], 1e-5)
            take(changed, substitution, place)
            taken.append(substitution.__name__)
            for got, expected in zip(changed.run([x], torch.float64), before, strict=True):
                assert difference(got, expected) <= 1e-5, taken
    note(str(taken))
    search(network, flops, 2.0, float("inf"), Checker(network, [x], 1e-5))
    for got, expected in zip(network.run([x], torch.float64), before, strict=True):
        assert difference(got, expected) <= 1e-5


@pytest.mark.hypothesis
@given(networks())
def test_random_networks_agree_with_float64(drawn):
    model, x = drawn
    state, given_x = copy.deepcopy(model.state_dict()), x.clone()
    fast = check(model, x, left=True)
    with torch.no_grad():
        first = fast(x)
    kept = [y.clone() for y in (first if isinstance(first, tuple) else (first,))]
    other = torch.randn(x.shape[0] + 1, *x.shape[1:])
    agree(fast, model, other)
    for y, old in zip(first if isinstance(first, tuple) else (first,), kept, strict=True):
        assert torch.equal(y, old), "an earlier output was overwritten"
    assert torch.equal(x, given_x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert list(fast.state_dict()) == list(state)


@pytest.mark.hypothesis
@given(networks(), st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
def test_random_networks_of_other_types(drawn, dtype):
    """Their errors are of the size of PyTorch's own in that type."""
    model, x = drawn[0].to(dtype), drawn[1].to(dtype)
    fast = optimized(model, x)
    with torch.no_grad():
        results = fast(x), model(x), exact(model, x)
    least = 1e-9 if dtype == torch.float64 else 1e-2
    for got, own, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert got.dtype == dtype
        assert difference(got, expected) <= max(least, 8 * difference(own, expected))
