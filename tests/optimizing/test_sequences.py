"""Convolutions of sequences in programs: what is around them joins in, and selectors know them as conv1d."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nets import agree, check, optimized, seeded_norm, seeded_prelu, taken
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm

import ai3_ops
from ai3_ops import registry
from ai3_ops.optimizing.choose import Case, operation_of
from ai3_ops.programs.constants import level
from ai3_ops.tuning.settings import Interrupted


def steps_of(fast):
    return [step for part in fast._ai3_report.parts for step in part.steps]


class Block(nn.Module):
    """HiFi-GAN's: sums of values before and after."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Conv1d(16, 16, 7, padding=3 * d, dilation=d) for d in (1, 3))
        self.second = nn.ModuleList(weight_norm(nn.Conv1d(16, 16, 3, padding=1)) for _ in (1, 3))

    def forward(self, x):
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Gated(nn.Module):
    """Conformer's, on rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.before, self.after = nn.LayerNorm(12), nn.Conv1d(12, 24, 1), nn.Conv1d(12, 12, 1)
        self.each, self.batch = nn.Conv1d(12, 12, 5, padding="same", groups=12), seeded_norm(12, nn.BatchNorm1d)

    def forward(self, x):
        y = F.glu(self.before(self.norm(x).transpose(1, 2)), 1)
        return x + self.after(F.silu(self.batch(self.each(y)))).transpose(1, 2)


class Joined(nn.Module):
    """Parts of channels and of the length, means, and a gate for each channel."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.gate = nn.Conv1d(6, 8, 4), nn.Conv1d(6, 8, 4, bias=False), nn.Conv1d(16, 16, 1)
        self.norm, self.slope = nn.GroupNorm(4, 16), seeded_prelu(16)
        self.shift = nn.Parameter(torch.randn(10, 1))

    def forward(self, x):
        y = self.slope(self.norm(torch.cat([self.a(x), torch.tanh(self.b(x))], 1)))
        y = y * torch.sigmoid(self.gate(y.mean(2, keepdim=True)))
        return F.gelu(y[:, 2:12, :-1] * 0.7) + self.shift


def classifier():
    return nn.Sequential(
        nn.Conv1d(3, 16, 15, padding=7, bias=False), seeded_norm(16, nn.BatchNorm1d), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 24, 3, 2), nn.SiLU(), nn.AvgPool1d(3, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(Block, (16, 40)), (Gated, (20, 12)), (Joined, (6, 33)), (classifier, (3, 64))],
    ids=["block", "gated", "joined", "classifier"],
)
def test_networks_of_sequences_are_one_program(model, sizes):
    torch.manual_seed(0)
    model = model().eval()
    fast = check(model, torch.randn(2, *sizes), selectors="default")
    steps = steps_of(fast)
    # What is counted from the end of an open length is PyTorch's, and sums and activations behind it, which gain nothing alone.
    left = [step.operation for step in steps if step.algorithm == "torch"]
    assert left[:1] == (["slice.Tensor"] if isinstance(model, Joined) else [])
    assert sum(step.operation == "conv1d" for step in steps) == sum(isinstance(m, nn.Conv1d) for m in model.modules())
    agree(fast, model, torch.randn(3, *sizes))
    lengths = [*sizes]
    lengths[0 if isinstance(model, Gated) else 1] += 7
    agree(fast, model, torch.randn(2, *lengths))


def test_sums_are_added_as_layers_store():
    for model, sizes, count in ((Block(), (16, 40), 2), (Gated(), (20, 12), 1)):
        steps = steps_of(check(model.eval(), torch.randn(2, *sizes), selectors="default"))
        assert sum("residual" in step.detail for step in steps) == count


def test_normalizations_are_folded():
    for model in (Gated(), classifier()):
        fast = check(model.eval(), torch.randn(2, 20, 12) if isinstance(model, Gated) else torch.randn(2, 3, 64))
        assert [r.rule for p in fast._ai3_report.parts for r in p.rewrites].count("fold normalization") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype):
    torch.manual_seed(0)
    model, x = Block().eval().to(dtype), torch.randn(2, 16, 40, dtype=dtype)
    fast = optimized(model, x, selectors="default")
    with torch.no_grad():
        expected = model.double()(x.double())
        error = float((fast(x).double() - expected).abs().max() / expected.abs().max())
    assert error < {torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]


def test_selectors_know_them_as_conv1d():
    model, x = (
        nn.Sequential(nn.Conv1d(16, 16, 9), nn.Unflatten(2, (4, -1)), nn.Conv2d(16, 4, 3)).eval(),
        torch.randn(1, 16, 48),
    )
    found = {
        s.operation: s.algorithm for s in steps_of(check(model, x, selectors={"conv1d": "fft", "conv2d": "im2col"}))
    }
    assert (found["conv1d"], found["conv2d"]) == ("fft", "im2col")
    found = {
        s.operation: s.algorithm for s in steps_of(check(model, x, selectors={"conv1d": None, "conv2d": "direct"}))
    }
    assert (found["conv1d"], found["conv2d"]) == ("torch", "direct")
    found = {s.operation: s.algorithm for s in steps_of(check(model, x, selectors={"0": "im2col"}))}
    assert found["conv1d"] == "im2col"
    with pytest.raises(ValueError, match=r"0 \(conv1d\)"):
        optimized(model, x, selectors={"0": "winograd"})


def test_plans_of_tune_are_followed():
    model, x = nn.Sequential(nn.Conv1d(16, 16, 9), nn.ReLU(), nn.Conv1d(16, 4, 3)).eval(), torch.randn(1, 16, 48)
    plan = ai3_ops.tune(model, x, budget_seconds=0, progress=False)
    assert [layer.operation for layer in plan.layers.values() if layer.operation != "relu"] == ["conv1d", "conv1d"]
    changed = replace(
        plan, layers={n: replace(p, algorithm="im2col") for n, p in plan.layers.items() if p.operation == "conv1d"}
    )
    found = [s.algorithm for s in steps_of(check(model, x, selectors=changed)) if s.operation == "conv1d"]
    assert found == ["im2col", "im2col"]


def test_an_algorithm_that_conv1d_alone_has_is_called():
    """Programs compute by conv2d's algorithms: another one is an operator between them."""
    calls = []

    def mine(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        calls.append(tuple(x.shape))
        return F.conv1d(x, weight, bias, stride, padding, dilation, groups)

    ai3_ops.register("conv1d", "of_its_own", mine, replace=True)
    model, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)).eval(), torch.randn(1, 4, 20)
    fast = optimized(model, x, selectors={"0": "of_its_own", "2": "direct"}, verify="off")
    calls.clear()
    agree(fast, model, x)
    ran = {name: s.algorithm for s in steps_of(fast) for name in s.layers[:1] if s.operation == "conv1d"}
    assert ran == {"0": "of_its_own", "2": "direct"}
    assert calls == [(1, 4, 20)]


def test_repeated_steps_are_computed_once():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(4, 4, k, padding=k // 2) for k in (3, 5))

        def forward(self, x):
            return sum(layer(F.silu(x)) for layer in self.layers)

    fast = check(Branches().eval(), torch.randn(2, 4, 24), selectors="default")
    assert [s.operation for s in steps_of(fast)].count("silu") == 1


def test_a_layer_that_is_called_again_is_packed_once():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(64, 64, 9, padding=4)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    class Once(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch.relu(self.layer(x))

    torch.manual_seed(0)
    model, x = Again().eval(), torch.randn(1, 64, 200)
    packed = [
        check(m, x, selectors={"conv1d": "fft"})._ai3_report.parts[0].packed_bytes for m in (model, Once(model.layer))
    ]
    assert packed[0] == packed[1]


def test_auto_finds_what_conv1d_calls_by_another_name():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(64, 64, 7, padding=3), nn.ReLU()).eval(), torch.randn(1, 64, 500)
    with torch.no_grad():
        swapped = ai3_ops.swap(model, {"conv1d": "winograd"}, x)
        torch.testing.assert_close(swapped(x), model(x), atol=1e-3, rtol=1e-3)
    (step,) = [s for s in steps_of(check(model, x, selectors={"0": "winograd"})) if s.operation == "conv1d"]
    assert step.algorithm == "winograd"
    node = fx.Graph().call_function(F.relu)
    for case, known in ((Case(None, "", None, "conv1d"), True), (Case(None, "", None, "linear"), False)):
        case = replace(case, layer=SimpleNamespace(operation="conv2d"))
        assert case.runs_in_programs("winograd_general") is known
        assert not case.runs_in_programs("smm")
    assert operation_of(node) is None


def test_plans_of_what_was_measured_fit_conv1d(monkeypatch):
    """Also one that is interrupted, which names what stands for `default`."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(64, 64, 7, padding=3), nn.Linear(300, 4)).eval(), torch.randn(1, 64, 300)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Case, "measured", interrupt)
    with pytest.raises(Interrupted) as stopped:
        optimized(model, x, selectors="auto", budget_seconds=5)
    plan = stopped.value.plan
    assert plan.layers["0"].operation == "conv1d"
    assert plan.layers["0"].algorithm in {a.name for a in registry.algorithms("conv1d", "cpu")}
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(ai3_ops.swap(model, plan)(x), model(x), atol=1e-3, rtol=1e-3)


def test_functions_as_selectors_see_sequences():
    seen = []

    def choose(module, shape):
        seen.append(shape)
        return "im2col"

    model, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU()).eval(), torch.randn(2, 4, 20)
    check(model, x, selectors={"conv1d": choose})
    ai3_ops.swap(model, {"conv1d": choose}, x)
    assert seen == [(2, 4, 20)] * 2


def test_pools_of_sequences_are_no_pools_of_images():
    model, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(2)).eval(), torch.randn(2, 4, 20)
    fast = check(model, x, selectors={"conv1d": "direct"})
    assert not [s.operation for s in steps_of(fast) if s.algorithm == "torch"]
    with pytest.raises(ValueError, match="'1'"):
        optimized(model, x, selectors={"1": "direct"})


def test_torch_compile_makes_programs_of_sequences():
    model, x = classifier().eval(), torch.randn(2, 3, 64)
    compiled = torch.compile(model, backend="ai3")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    assert "conv1d" in str(ai3_ops.explain(compiled))


def test_a_mean_of_a_number_is_left():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(4, 4, 3)

        def forward(self, x):
            y = self.layer(x)
            return y, y.sum().mean(0)

    check(Sums().eval(), torch.randn(2, 4, 20))


class Around(nn.Module):
    """A convolution, and numbers and tables beside what it, PyTorch or nothing computed."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.wider = nn.Conv1d(8, 8, 3, padding=1), nn.ConvTranspose1d(8, 8, 4, 2, 1)
        self.gain, self.function = nn.Parameter(torch.rand(8, 1)), function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (y := m.conv(x)) + torch.sin(y * m.gain),
        lambda m, x: torch.cos((y := m.conv(x)).mean(2, keepdim=True) * torch.sin(y)),
        lambda m, x: m.conv((m.conv(x) + m.conv(F.relu(x))) / 3),
        lambda m, x: m.conv(-m.wider(x) / 3),
        lambda m, x: m.conv(m.gain - torch.sin(x) * m.gain),
        lambda m, x: F.conv1d(x, m.conv.weight, stride=5).relu() * 2,
    ],
    ids=["snake", "gate", "sum", "wider", "table", "stride"],
)
def test_other_lengths_need_no_other_plan(function, tmp_path):
    """Neither in the module nor in a file of it."""
    torch.manual_seed(0)
    model, x, longer = Around(function).eval(), torch.randn(2, 8, 40), torch.randn(3, 8, 53)
    fast = taken(optimized(model, x, selectors="default", keep_original=False))
    ai3_ops.save(fast, tmp_path / "model.ai3")
    with torch.no_grad():
        for one in (fast, ai3_ops.load(tmp_path / "model.ai3")):
            torch.testing.assert_close(one(longer), model(longer), atol=1e-4, rtol=1e-4)


def test_default_of_images_of_one_row():
    of_64 = {1: "direct", 3: "winograd_general", 7: "winograd_general", 9: "fft"}
    of_16 = {3: "direct", 7: "direct", 9: "direct" if level() == "avx512" else "fft"}
    for channels, taps, wanted in [(c, *rule) for c, of in ((64, of_64), (16, of_16)) for rule in of.items()]:
        x, weight = torch.randn(1, channels, 1, 500), torch.randn(channels, channels, 1, taps)
        assert ai3_ops.resolve("conv2d", "default", x, weight, None, 1, (0, taps // 2)) == wanted
