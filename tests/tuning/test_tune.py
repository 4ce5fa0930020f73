"""tune, Plan and swap(model, "auto", x): choices on given times, so that no test depends on the clock."""

import json
import math
import re
import stat
import sys
import warnings
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from modules import close, layers
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

import ai3_ops
from ai3_ops import Plan, _library, _machine, registry
from ai3_ops.calls.spec import Spec
from ai3_ops.measuring import timing
from ai3_ops.measuring.timing import Layer, Measured, Surroundings, measure, median, percentile
from ai3_ops.optimizing.choose import Case
from ai3_ops.selecting import plan as plans
from ai3_ops.selecting.plan import CHANNELS_LAST, CONTIGUOUS, PlannedLayer
from ai3_ops.tuning.callgraph import CallGraph
from ai3_ops.tuning.choosing import NONE_HOLDS, select
from ai3_ops.tuning.meter import Meter
from ai3_ops.tuning.settings import Interrupted, Settings


class Residual(nn.Module):
    """Convolutions beside each other and one after another, a call by function, a layer called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.side = nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.first(x))
        x = self.twice(self.twice(x)) + F.relu(self.side(x))
        return self.fc(self.pool(x).mean((2, 3)))


@pytest.fixture
def model():
    return Residual().eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 12, 12)


@pytest.fixture(autouse=True)
def _cache_directory(tmp_path, monkeypatch, built_in_only):
    """An empty one; while others' tests have callables registered, nothing would be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def given(monkeypatch):
    """Times instead of measured ones: given[name] or given[name, layout] in microseconds; 100 for the others."""
    times, asked = {}, []

    def fake(layer, layout, names, surroundings, p99=False, seconds=math.inf, everything=False):
        asked.append((layer, layout, tuple(names)))
        result = {}
        for name in names:
            time = times.get((name, layout), times.get(name, 100.0))
            error = times.get(f"error of {name}", 1e-6)
            result[name] = Measured(time, times.get("noise", 0.1), error, *layer.memory(name, layout))
        return result

    monkeypatch.setattr(timing, "measure", fake)
    monkeypatch.setattr(timing, "conversion", lambda *_: times.get("conversion", 1.0))
    times["asked"] = asked
    return times


def tuned(model, x, **options):
    return ai3_ops.tune(model, x, progress=False, **options)


def algorithms(plan, operation="conv2d"):
    return {name: layer.algorithm for name, layer in plan.layers.items() if layer.operation == operation}


class Mixed(nn.Module):
    """Autocast within: the second layer is given 16 bits and has a weight of 32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x)).float()


@pytest.mark.parametrize("around", [False, True])
def test_what_autocast_computes_is_measured_in_its_type(given, around):
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        plan = tuned(Mixed().eval(), torch.randn(2, 8))
    assert {layer.dtype for layer, *_ in given["asked"]} == {torch.bfloat16}
    assert list(plan.layers) == ["first", "second"]


# The whole ------------------------------------------------------------------------------------------------------------
def test_measured_for_real(model, x, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan = tuned(model, x)
    assert _library.release_workspace() == 0  # what the largest algorithm took is not kept
    assert set(plan.layers) == {"first", "relu", "twice", "side", ":relu_0", "pool", "fc"}
    for name, layer in plan.layers.items():
        assert layer.time_us > 0, name
        assert layer.error < 1e-4, name
        assert any(key.split()[0] == "torch" for key in layer.candidates), name
    assert {key.split()[0] for key in plan.layers["first"].candidates} >= {
        "direct",
        "winograd_f2",
        "winograd_f4",
        "fft",
    }
    assert not any("bf16" in key for key in plan.layers["first"].candidates)
    swapped = ai3_ops.swap(model, plan, x)
    close(swapped(x), model(x))
    assert {n: layer.used for n, layer in layers(swapped).items()} == {n: p.algorithm for n, p in plan.layers.items()}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert tuned(model, x) == plan  # from the cache


def test_auto(model, x, given):
    given["winograd_f4"] = 10.0
    swapped = ai3_ops.swap(model, "auto", x)
    used = layers(swapped)
    assert used["first"].used == "winograd_f4"
    assert used["first"].requested == "auto"
    assert used["side"].used != "winograd_f4"  # of a 1x1 kernel
    close(swapped(x), model(x))
    some = ai3_ops.swap(model, {"conv2d": "direct", "twice": "auto"}, x)
    assert {n: layer.used for n, layer in layers(some).items() if layer.operation == "conv2d"} == {
        "first": "direct", "twice": "winograd_f4", "side": "direct"
    }  # fmt: skip
    listed = ai3_ops.swap(model, ["auto", "direct", "direct"], x)
    assert layers(listed)["first"].used == "winograd_f4"
    assert layers(ai3_ops.swap(model, lambda module: "auto", x))["twice"].used == "winograd_f4"
    for selectors in ("auto", {"conv2d": "auto"}, ["auto"] * 3, lambda module: "auto"):
        with pytest.raises(ValueError, match="needs example inputs"):
            ai3_ops.swap(model, selectors)


def test_in_place_and_views_keep_what_they_do(model, x, given):
    given |= {"direct": 1.0}
    plan = tuned(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()), x)
    assert algorithms(plan, "relu") == {"0": "direct"}
    assert algorithms(plan, "flatten") == {"1": "torch"}
    y = x.clone()
    ai3_ops.swap(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()), plan)(y)
    assert torch.equal(y, x.relu())


def test_layers_that_are_equal_are_measured_once(x, given):
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 5, padding=2))
    tuned(model, x)
    assert sorted(layout for _, layout, _ in given["asked"]) == [CHANNELS_LAST] * 2 + [CONTIGUOUS] * 2
    assert {layer.shapes[1][2] for layer, _, _ in given["asked"]} == {3, 5}


# Which algorithm ------------------------------------------------------------------------------------------------------
def conv(channels=8, kernel=3):
    shape = (1, channels, 16, 16), (channels, channels, kernel, kernel), (channels,)
    specs = (Spec(s, (), torch.float32, "cpu") for s in shape)
    return Layer("conv2d", (*specs, (1, 1), (kernel // 2,) * 2, (1, 1), 1), (False, True, True, *[False] * 4), False)


def found(**times):
    """Measurements by name, the default first: microseconds, or (microseconds, noise, error, workspace, pack)."""
    result = {}
    for name, values in times.items():
        values = values if isinstance(values, tuple) else (values,)
        result[name] = Measured(*values, *(0.5, 1e-6, 0, 0)[len(values) - 1 :])
    return result


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        (found(direct=100.0, torch=120.0, im2col=99.0), "direct"),  # a gain of less than two per cent
        (found(direct=100.0, torch=120.0, im2col=97.0), "im2col"),
        (found(direct=(100.0, 3.0), torch=120.0, im2col=(90.0, 3.0)), "direct"),  # a gain within the noise
        (found(direct=(100.0, 1.0), torch=120.0, im2col=(90.0, 1.0)), "im2col"),
        (found(direct=100.0, torch=50.0, im2col=70.0), "torch"),
        (found(direct=100.0, torch=120.0, im2col=80.5, kn2row=80.0), "im2col"),  # a tie: the first
        (found(direct=100.0, torch=120.0, im2col=80.5, kn2row=70.0), "kn2row"),
        (found(torch=100.0), "torch"),
    ],
)
def test_a_choice_needs_a_gain_above_the_noise(times, chosen):
    assert select(conv(), times, Settings())[0] == chosen


def test_tolerance():
    times = found(winograd_f4=(100.0, 0.1, 2e-5), torch=(200.0, 0.1, 1e-6), winograd_f6=(50.0, 0.1, 4e-5))
    assert select(conv(), times, Settings())[0] == "winograd_f6"
    assert select(conv(), times, Settings(tolerance=3e-5))[0] == "winograd_f4"
    name, _, why = select(conv(), times, Settings(tolerance=1e-5))
    assert name == "torch"
    assert "error 2e-05 above 1e-05" in why
    broken = found(direct=100.0, torch=120.0, winograd_f6=(50.0, 0.1, float("nan")))
    assert select(conv(), broken, Settings())[0] == "direct"


def test_a_tolerance_that_none_holds_leaves_the_other_settings():
    times = found(direct=(100.0, 0.1, 2e-7), torch=(120.0, 0.1, 3e-7), gemm=(50.0, 0.1, 1e-7))
    times["fft"] = Measured(100.0, 0.1, 1.5e-7, 4096, 0)
    times["smm"] = Measured(100.0, 0.1, 5e-8, 0, 0, failed="no memory")

    def least(**settings):
        return select(conv(), times, Settings(tolerance=1e-9, **settings))[::2]

    assert least() == ("gemm", NONE_HOLDS)
    assert least(deterministic=True) == ("fft", NONE_HOLDS)
    assert least(deterministic=True, memory_limit=1000) == ("direct", NONE_HOLDS)
    assert select(conv(), times, Settings(tolerance=1e-9, deterministic=True), price=1.0)[0] == "direct"
    only = {name: times[name] for name in ("gemm", "torch", "smm")}
    assert select(conv(), only, Settings(tolerance=1e-9, deterministic=True))[0] == "torch"

    case = Case(conv(), CHANNELS_LAST, times)  # of optimize: `gemm` runs in no program
    assert case.fastest(Settings(tolerance=1e-9)) == "fft"
    assert case.fastest(Settings(tolerance=1e-9, memory_limit=1000)) == "direct"
    assert case.fastest(Settings(tolerance=1e-9), price=1.0) == "direct"
    assert replace(case, found=only).fastest(Settings(tolerance=1e-9)) == "torch"


def test_half_types_are_held_to_pytorchs_error():
    times = found(direct=(100.0, 0.1, 4e-3), torch=(200.0, 0.1, 3e-3), winograd_f2=(50.0, 0.1, 9e-3))
    assert select(conv(), times, Settings())[0] == "direct"
    assert select(conv(), times, Settings(), among=("direct", "winograd_f2"))[0] == "direct"


def test_deterministic():
    times = found(direct=100.0, torch=120.0, gemm=50.0)  # the vendor's, which does not promise it
    assert select(conv(), times, Settings())[0] == "gemm"
    assert select(conv(), times, Settings(deterministic=True))[0] == "direct"


def test_approximations_need_to_be_allowed(x, given):
    given["winograd_f4_bf16"] = 1.0
    model = nn.Conv2d(3, 8, 3, padding=1)
    assert algorithms(tuned(model, x)) != {"": "winograd_f4_bf16"}
    assert algorithms(tuned(model, x, allow_approximate=True)) == {"": "winograd_f4_bf16"}
    given["error of winograd_f4_bf16"] = 3e-3
    assert algorithms(tuned(model, x, allow_approximate=True, cache=False)) == {"": "winograd_f4_bf16"}
    strict = tuned(model, x, allow_approximate=True, tolerance=1e-3, cache=False)
    assert algorithms(strict) != {"": "winograd_f4_bf16"}


def test_memory(x, given):
    given |= {"direct": 50.0, "winograd_f4": 10.0, "torch": 200.0}
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1))
    fast = tuned(model, x)
    assert set(algorithms(fast).values()) == {"winograd_f4"}
    needed = fast.packed_bytes + fast.workspace_bytes
    less = tuned(model, x, memory_limit=needed - 1)
    assert less.packed_bytes + less.workspace_bytes < needed
    assert less.time_us < 300
    for least in (tuned(model, x, memory_limit=0), tuned(model, x, objective="memory")):
        assert least.packed_bytes + least.workspace_bytes == 0


def test_budget_and_interrupt(model, x, given, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(timing, "clock", lambda: float(next(now)))
    with pytest.warns(UserWarning, match="not measured within the budget"):
        plan = tuned(model, x, budget_seconds=6.5, cache=False)
    unknown = [name for name, layer in plan.layers.items() if layer.time_us is None]
    assert 0 < len(unknown) < len(plan.layers)
    assert all(plan.layers[name].reason == "not measured" for name in unknown)
    close(ai3_ops.swap(model, plan, x)(x), model(x))

    fake, count = timing.measure, iter(range(100))

    def interrupted(*args):
        if next(count) == 4:
            raise KeyboardInterrupt
        return fake(*args)

    monkeypatch.setattr(timing, "measure", interrupted)
    with pytest.raises(Interrupted) as stop:
        tuned(model, x)
    known = [name for name, layer in stop.value.plan.layers.items() if layer.time_us is not None]
    assert 0 < len(known) < len(model.state_dict())
    given["asked"].clear()
    tuned(model, x)  # goes on where that stopped
    whole = {(layer, layout) for layer, layout, _ in given["asked"]}
    assert len(whole) == 2 * 6 + 1 - 4  # six layers with two layouts, linear with one


@pytest.mark.parametrize("settings", [{"budget_seconds": 0}, {"budget_seconds": 0, "memory_limit": 0}], ids=str)
def test_nothing_is_timed_after_the_budget(model, x, monkeypatch, settings):
    """Neither layers nor the conversions between them."""
    monkeypatch.setattr(timing, "measure", None)
    monkeypatch.setattr(timing, "conversion", None)
    with pytest.warns(UserWarning, match="not measured within the budget"):
        plan = tuned(model, x, cache=False, **settings)
    assert all(layer.time_us is None for layer in plan.layers.values())


CALLS = {  # small ones, of which swap's `default` leaves some to PyTorch
    "relu": (nn.ReLU(), (2, 8, 9, 9)),
    "batch_norm": (nn.BatchNorm2d(8), (2, 8, 9, 9)),
    "linear": (nn.Linear(16, 8), (1, 16)),
    "layer_norm": (nn.LayerNorm(16), (2, 16)),
    "group_norm": (nn.GroupNorm(2, 8), (2, 8, 3, 3)),
    "silu": (nn.SiLU(), (4, 4)),
    "conv1d": (nn.Conv1d(4, 8, 3), (1, 4, 20)),
    "conv2d": (nn.Conv2d(3, 8, 3), (1, 3, 12, 12)),
    "max_pool2d": (nn.MaxPool2d(2), (1, 3, 12, 12)),
}


@pytest.mark.parametrize("operation", CALLS)
def test_what_was_not_measured_is_what_swap_makes_of_default(operation):
    layer, shape = CALLS[operation]
    model, x = nn.Sequential(layer).eval(), torch.randn(shape)
    with pytest.warns(UserWarning, match="not measured within the budget"):
        plan = tuned(model, x, budget_seconds=0, cache=False)
    swapped = ai3_ops.swap(model, "default", x)
    with torch.no_grad():
        swapped(x)
    (used,) = ai3_ops.explain(swapped).layers
    assert plan.layers["0"].algorithm == used.used


def test_the_choice_to_beat_is_what_swap_makes_of_default(given):
    """Ours as fast as PyTorch's, where `default` leaves the call to that."""
    model, x = nn.Sequential(nn.BatchNorm2d(8)).eval(), torch.randn(2, 8, 9, 9)
    given["direct"] = 99.5
    assert tuned(model, x).layers["0"].algorithm == "torch"
    given["direct"] = 50
    assert tuned(model, x, cache=False).layers["0"].algorithm == "direct"


def test_the_budget_ends_a_layer_that_takes_long(model, x, monkeypatch):
    """One that takes longer than all of it, on a busy machine perhaps, is left as if it had not been begun."""
    now = [0.0]
    monkeypatch.setattr(timing, "clock", lambda: now[0])

    def slow(self, function, twin, input):
        now[0] += 1.0
        return 1.0

    monkeypatch.setattr(Surroundings, "sample", slow)
    monkeypatch.setattr(timing, "conversion", lambda *_: 1.0)
    with pytest.warns(UserWarning, match="7 distinct layers were not measured within the budget"):
        plan = tuned(model, x, budget_seconds=120, cache=False)
    assert 120 < now[0] <= 122
    assert all(layer.time_us is None for layer in plan.layers.values())


def test_pytorchs_implementation_keeps_the_tolerance_too(x, given):
    model = nn.Conv2d(3, 16, 3, padding=1)
    given |= {"torch": 10.0, "fft": 90.0} | {f"error of {a.name}": 3e-6 for a in registry.algorithms("conv2d", "cpu")}
    given |= {"error of torch": 2e-6, "error of fft": 5e-7}
    assert algorithms(tuned(model, x, tolerance=1e-6)) == {"": "fft"}
    with pytest.warns(UserWarning, match="PyTorch's neither, holds the tolerance in the model: "):
        plan = tuned(model, x, tolerance=1e-7)
    assert algorithms(plan) == {"": "fft"}
    assert algorithms(tuned(model, x)) == {"": "torch"}


def test_settings_hold_for_layers_that_were_not_measured(x):
    """A spent budget: what their algorithms state decides."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 8, 1))

    def unmeasured(**settings):
        with pytest.warns(UserWarning, match="not measured within the budget"):
            plan = tuned(model, x, budget_seconds=0, cache=False, **settings)
        assert all(layer.time_us is None and layer.reason.startswith("not measured") for layer in plan.layers.values())
        return plan

    free = unmeasured()
    assert "torch" not in algorithms(free).values()
    needed = free.packed_bytes + free.workspace_bytes
    assert needed > 0
    assert algorithms(unmeasured(memory_limit=needed)) == algorithms(free)
    for least in (
        unmeasured(memory_limit=needed - 1),
        unmeasured(memory_limit=0),
        unmeasured(objective="memory"),
    ):
        assert least.packed_bytes + least.workspace_bytes == 0
    assert re.search(r"needs \d+ bytes", unmeasured(memory_limit=0).layers["1"].reason)
    assert algorithms(unmeasured(tolerance=1.0)) == algorithms(free)
    strict = unmeasured(tolerance=1e-7)
    assert set(algorithms(strict).values()) == {"torch"}
    assert "may have an error above 1e-07" in strict.layers["1"].reason


def test_layers_that_were_not_measured_keep_determinism(x, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1))
    real = registry.algorithm
    monkeypatch.setattr(registry, "algorithm", lambda *args: replace(real(*args), deterministic=False))
    with pytest.warns(UserWarning, match="not measured within the budget"):
        plan = tuned(model, x, budget_seconds=0, cache=False, deterministic=True)
    assert algorithms(plan) == {"0": "torch"}
    assert "is not deterministic" in plan.layers["0"].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective must be 'latency' or 'p99' or 'memory', got 'speed'"),
        ({"objective": "latancy"}, "did you mean 'latency'"),
        ({"budget_seconds": -1}, "budget_seconds needs a number of at least 0"),
        ({"memory_limit": "1 GB"}, "memory_limit needs a number"),
        ({"tolerance": float("nan")}, "tolerance needs a number"),
        ({"deterministic": "yes"}, "deterministic needs True or False, got 'yes'"),
        ({"allow_approximate": 1}, "allow_approximate needs True or False, got 1"),
        ({"cache": "no"}, "cache needs True or False, got 'no'"),
    ],
)
def test_settings_that_make_no_sense(model, x, options, message):
    with pytest.raises(ValueError, match=message):
        tuned(model, x, **options)


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"needs an nn\.Module, got function"):
        tuned(F.relu, torch.ones(1))


# Layouts --------------------------------------------------------------------------------------------------------------
def weight_layouts(model):
    return [
        m.weight.is_contiguous(memory_format=torch.channels_last) and not m.weight.is_contiguous()
        for m in model.modules()
        if isinstance(m, nn.Conv2d)
    ]


@pytest.mark.parametrize(("conversion", "last"), [(1.0, True), (1000.0, False)])
def test_the_network_changes_its_layout_where_that_pays(x, given, conversion, last):
    """100 contiguous against 60 in channels_last: two layers gain 80, less what it costs to get there."""
    names = [a.name for a in ai3_ops.algorithms("conv2d")] + ["torch"]
    given |= {(name, CHANNELS_LAST): 60.0 for name in names} | {"conversion": conversion}
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    plan = tuned(model, x)
    assert {layer.layout for layer in plan.layers.values()} == {CHANNELS_LAST if last else CONTIGUOUS}
    swapped = ai3_ops.swap(model, plan, x)
    assert weight_layouts(swapped) == [last, last]
    assert weight_layouts(model) == [False, False]
    assert swapped(x).is_contiguous(memory_format=torch.channels_last) == last
    close(swapped(x), model(x))


def test_an_input_in_channels_last_stays_there(x, given):
    names = [a.name for a in ai3_ops.algorithms("conv2d")] + ["torch"]
    given |= {(name, CHANNELS_LAST): 500.0 for name in names}
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    plan = tuned(model, x.contiguous(memory_format=torch.channels_last))
    assert {layer.layout for layer in plan.layers.values()} == {CHANNELS_LAST}


def test_the_network_is_a_graph(model, x):
    network = CallGraph(model, x)
    number = {site.name: site.nodes[0] for site in network.sites}
    edges = {(e.first, e.second) for e in network.edges}
    assert (number["twice"], number["twice"]) in edges  # its own output
    assert (number["first"], number["side"]) not in edges  # the in-place ReLU lies between
    assert any(first == number["first"] for first, _ in edges)
    into_pool = [first for first, second in edges if second == number["pool"]]
    assert len(into_pool) == 1
    added = {first for first, second in edges if second == into_pool[0]}
    assert added == {number["twice"], number[":relu_0"]}
    assert [site.count for site in network.sites if site.name == "twice"] == [2]


# Plans ----------------------------------------------------------------------------------------------------------------
def test_a_plan_is_json_that_a_person_can_edit(model, x, given, tmp_path):
    plan = tuned(model, x)
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["version"] == 1
    assert data["machine"] == _machine.machine()
    first = data["layers"]["first"]
    assert {"operation", "algorithm", "time_us", "error", "workspace_bytes", "candidates"} <= set(first)
    assert Plan.load(tmp_path / "plan.json") == plan
    edited = {"version": 1, "layers": {"first": {"operation": "conv2d", "algorithm": "fft"}}}
    (tmp_path / "mine.json").write_text(json.dumps(edited))
    swapped = ai3_ops.swap(model, Plan.load(tmp_path / "mine.json"))
    assert layers(swapped)["first"].used == "fft"
    assert layers(swapped)["side"].used == "torch"


def test_print_and_plot(model, x, given, tmp_path):
    pytest.importorskip("matplotlib")
    plan = tuned(model, x)
    text = str(plan)
    assert all(name in text for name in plan.layers)
    assert f"{len(plan)} layers" in text
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def layer(**more):
    return {"operation": "conv2d", "algorithm": "direct", **more}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "needs {"),
        ({"version": 2, "layers": {}}, "needs version 1; got 2"),
        ({"version": 1, "layers": {"a": []}}, "layer 'a' needs a dict"),
        ({"version": 1, "layers": {"a": {"operation": "conv2d"}}}, "layer 'a' needs a string as 'algorithm'"),
        (
            {"version": 1, "layers": {"a": layer(tiem_us=1)}},
            "layer 'a' has an unknown key 'tiem_us'; did you mean 'time_us'",
        ),
        ({"version": 1, "layers": {"a": layer(time_us="1")}}, "needs a number or null as 'time_us'"),
        (
            {"version": 1, "layers": {"a": layer(layout="nhwc")}},
            "needs null, 'contiguous' or 'channels_last' as layout",
        ),
        ({"version": 1, "layers": {}, "machine": 1}, "needs a dict as 'machine'"),
    ],
)
def test_what_is_no_plan(data, message, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"wrong\.json: not a plan") as error:
        Plan.load(path)
    assert message in str(error.value)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"wrong\.json: not a plan: needs JSON, as Plan\.save writes it: Expecting"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        (
            "frist",
            layer(),
            "layer 'frist' (algorithm 'direct'): there is no such layer in this model; did you mean 'first'",
        ),
        ("first", layer(algorithm="dierct"), "layer 'first' (algorithm 'dierct'): no conv2d algorithm 'dierct'"),
        ("fc", layer(), "layer 'fc' (algorithm 'direct'): is a linear in this model, a conv2d in the plan"),
        ("side", layer(algorithm="winograd_f4"), "side (conv2d): winograd_f4"),
    ],
)
def test_a_plan_is_followed_to_the_letter(model, x, name, entry, message):
    plan = Plan({name: PlannedLayer(**entry)})
    with pytest.raises(ValueError, match=name) as error:
        ai3_ops.swap(model, plan, x)
    assert message in str(error.value)


def test_a_layer_with_an_operations_name(x):
    """A key "relu" of a dict matches all ReLUs; a plan's entry of the layer with that name."""
    model = nn.ModuleDict({"relu": nn.ReLU(), "other": nn.ReLU()})
    swapped = ai3_ops.swap(model, Plan({"relu": PlannedLayer("relu", "direct")}))
    assert {name: layer.used for name, layer in layers(swapped).items()} == {"relu": "direct", "other": "torch"}


def test_a_plan_is_no_value():
    with pytest.raises(TypeError, match="is for a whole model"):
        ai3_ops.swap(nn.ReLU(), {"*": Plan({})})


def test_a_plan_of_another_machine(model, x, given):
    plan = tuned(model, x)
    other = replace(plan, machine=plan.machine | {"processor": "Abacus", "threads": "99"})
    with pytest.warns(UserWarning, match="another machine.*Abacus there") as warned:
        ai3_ops.swap(model, other, x)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ai3_ops.swap(model, plan, x)


def test_verify(model, x, given):
    given |= {"winograd_f4": 10.0}
    plan = replace(tuned(model, x), machine={"processor": "Abacus"})
    assert plan.layers["first"].algorithm == "winograd_f4"
    given["asked"].clear()
    same = plan.verify(model, x, progress=False)
    assert algorithms(same) == algorithms(plan)
    assert same.machine == _machine.machine()
    everything = {name for _, _, names in given["asked"] for name in names}
    assert "winograd_f6" not in everything  # only the choices and their rivals were timed
    given |= {"winograd_f4": 300.0, "winograd_f6": 20.0}
    other = plan.verify(model, x, progress=False)
    assert other.layers["first"].algorithm == "winograd_f6"
    assert "winograd_f4 is not the best here" in other.layers["first"].reason
    assert other.layers["side"].algorithm == plan.layers["side"].algorithm
    for name, entry in (("frist", PlannedLayer("conv2d", "direct")), ("first", PlannedLayer("conv2d", "dierct"))):
        with pytest.raises(ValueError, match=f"(?s){name}.*{entry.algorithm}"):
            Plan({name: entry}).verify(model, x, progress=False)


@pytest.mark.parametrize(("settings", "most"), [({"objective": "memory"}, 0), ({"memory_limit": 200_000}, 200_000)])
def test_verify_keeps_to_the_plans_memory(settings, most, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    model, x = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))), torch.randn(1, 64, 28, 28)
    plan = ai3_ops.tune(model, x, progress=False, cache=False, **settings)
    for one in (plan, plan.verify(model, x, progress=False, cache=False)):
        layers = one.layers.values()
        assert sum(p.packed_bytes for p in layers) + max(p.workspace_bytes for p in layers) <= most


def test_a_lazy_model_is_not_changed(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    model = nn.Sequential(nn.LazyConv2d(4, 3)).eval()
    ai3_ops.tune(model, torch.randn(1, 3, 8, 8), progress=False, cache=False)
    assert is_lazy(model[0].weight)


# The cache ------------------------------------------------------------------------------------------------------------
def entries(path):
    return sorted((path / "cache/ai3_ops/tune").glob("*/*.json"))


def test_cache(model, x, given, tmp_path):
    plan = tuned(model, x)
    files = entries(tmp_path)
    measured = len(given["asked"])
    assert measured == 2 * 6 + 1
    assert not list(tmp_path.rglob("*.part"))
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(files[0].parent.parent.stat().st_mode) == 0o700
    assert tuned(model, x) == plan
    assert len(given["asked"]) == measured
    tuned(model, x, tolerance=1e-3, deterministic=True, memory_limit=10**6)  # of the same measurements
    assert len(given["asked"]) == measured
    tuned(model, x, cache=False)
    assert len(given["asked"]) == 2 * measured
    assert entries(tmp_path) == files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_machine, "machine", lambda: {"processor": "Abacus"})
        tuned(model, x)
    assert len(given["asked"]) == 3 * measured
    assert len(entries(tmp_path)) == 2 * len(files)


@pytest.mark.parametrize("damage", ["{", "[]", '{"machine": {}}', "other machine", "no numbers", "fewer"])
def test_a_broken_entry_is_a_miss(model, x, given, tmp_path, damage):
    plan = tuned(model, x)
    for path in entries(tmp_path):
        entry = json.loads(path.read_text())
        if damage == "other machine":
            entry["machine"] = {}
        elif damage in ("no numbers", "fewer") and not isinstance(entry["value"], dict):
            continue
        elif damage == "no numbers":
            entry["value"] = {"torch": {**asdict(Measured(1.0, 1.0, 1.0, 0, 0)), "time_us": "1"}}
        elif damage == "fewer":
            entry["value"].popitem()
        path.write_text(damage if damage.startswith(("{", "[")) else json.dumps(entry))
    given["asked"].clear()
    with pytest.warns(UserWarning, match="cannot be used and is measured anew") as warned:
        assert tuned(model, x) == plan
    assert len(warned) == 1
    assert len(given["asked"]) == 2 * 6 + 1
    given["asked"].clear()
    assert tuned(model, x) == plan  # written again
    assert not given["asked"]


def test_a_directory_of_others_is_not_used(model, x, given, tmp_path):
    directory = tmp_path / "cache/ai3_ops/tune"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.warns(UserWarning, match="measurements are not kept.*writable by nobody else"):
        tuned(model, x)
    assert not list(directory.iterdir())


def test_python_callables_are_not_kept(model, x, given, tmp_path):
    """Nothing would tell that one changed."""
    ai3_ops.register("relu", "tune_test", lambda input: input.clamp_min(0), replace=True)
    given["tune_test"] = 1.0
    plan = tuned(model, x)
    assert plan.layers[":relu_0"].algorithm == "tune_test"
    assert not entries(tmp_path)


# Algorithms that fail --------------------------------------------------------------------------------------------------
GLUTTON = """
#include <ai3/algorithm.h>
template <class T>
void {operation}_{name}(const ai3::{problem}& p, {arguments} T*, ai3::Workspace& workspace) {{
  workspace.take<char>(int64_t{{1}} << 62);
}}
AI3_ALGORITHM({operation}, {name})
"""


def glutton(operation, name, tmp_path, problem="Conv2dProblem", arguments="const T*, const T*, const T*,"):
    """An algorithm that wants more memory than there is."""
    header = tmp_path / f"{name}.h"
    header.write_text(GLUTTON.format(operation=operation, name=name, problem=problem, arguments=arguments))
    ai3_ops.register(operation, name, header)


def failures(plan):
    return {
        (layer, name.split()[0]): m["failed"]
        for layer, planned in plan.layers.items()
        for name, m in planned.candidates.items()
        if "failed" in m
    }


def test_an_algorithm_that_fails_is_not_chosen(x, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)).eval()
    glutton("conv2d", "tune_glutton", tmp_path)
    glutton("relu", "tune_starving", tmp_path, "ElementwiseProblem", "const T*,")
    with pytest.warns(UserWarning, match="fails on the layer") as warned:
        plan = tuned(model, x)
    said = [str(w.message) for w in warned]
    assert len(said) == 2  # of each algorithm one, though two layers and two layouts show the first
    assert any(
        re.search(r"conv2d 'tune_glutton' fails on the layer conv2d .*8x3x3x3.*not enough memory", s) for s in said
    )
    assert any("relu 'tune_starving' fails on the layer relu 2x8x12x12" in s for s in said)
    assert set(failures(plan)) == {("0", "tune_glutton"), ("1", "tune_starving"), ("2", "tune_glutton")}
    assert "tune_glutton" not in str(plan)
    assert len(str(plan).splitlines()) == 5
    plan.save(tmp_path / "plan.json")
    assert "Infinity" not in (tmp_path / "plan.json").read_text()
    assert Plan.load(tmp_path / "plan.json") == plan
    close(ai3_ops.swap(model, plan, x)(x), model(x))
    monkeypatch.setattr(timing, "measure", lambda *_: pytest.fail("measured although it is in the cache"))
    with pytest.warns(UserWarning, match="not enough memory.*cache=False"):
        assert tuned(model, x) == plan


def test_a_default_that_fails_falls_to_pytorch(x, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)

    def broken(x, weight, bias, stride, padding, dilation, groups):
        raise ValueError("no luck today")

    ai3_ops.register("conv2d", "tune_unlucky", broken, replace=True)
    layer = conv()
    found = measure(layer, CHANNELS_LAST, ["tune_unlucky", "torch", "im2col"], Surroundings(2**20))
    assert list(found) == ["tune_unlucky", "torch", "im2col"]
    assert found["tune_unlucky"].failed == "ValueError: no luck today"
    assert not found["torch"].rough  # now the one to beat
    slow = {name: replace(m, time_us=100.0) if not m.failed else m for name, m in found.items()}
    name, _, why = select(layer, slow, Settings())
    assert name == "torch"
    assert "its call fails: ValueError: no luck today" in why
    assert timing.from_json(json.loads(json.dumps(timing.to_json(found)))) == found


def test_pytorch_failing_raises(monkeypatch):
    clock = Clock(monkeypatch, {"direct": 0.010, "torch": lambda n: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        measure(conv(), CHANNELS_LAST, ["direct", "torch"], Surroundings(2**20))
    assert "direct" in clock.order


def test_failing_in_place_leaves_the_input_to_the_others(monkeypatch):
    """A call that fails half way: what is measured next sees the numbers that it should."""
    function = Layer.function

    def half(layer, name, arguments):
        def run():
            arguments[0].fill_(-7.0)
            raise MemoryError("half way")

        return run if name == "direct" else function(layer, name, arguments)

    monkeypatch.setattr(Layer, "function", half)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    layer = Layer("relu", (Spec((1, 8, 4, 4), (), torch.float32, "cpu"),), (False,), True)
    found = measure(layer, CONTIGUOUS, ["direct", "torch"], Surroundings(2**20))
    assert found["direct"].failed == "MemoryError: half way"
    assert found["torch"].error == 0.0


def test_failing_later_than_the_first_call(monkeypatch):
    def tired(n):
        if n > 8:
            raise RuntimeError("tired")
        return 0.010

    Clock(monkeypatch, {"direct": 0.010, "torch": 0.012, "im2col": tired})
    found = measure(conv(), CHANNELS_LAST, ["direct", "torch", "im2col"], Surroundings(2**20))
    assert [m.failed for m in found.values()] == ["", "", "RuntimeError: tired"]


def test_verify_of_an_algorithm_that_fails(x, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    glutton("conv2d", "tune_glutton_verified", tmp_path)
    model = nn.Conv2d(3, 8, 3, padding=1)
    plan = Plan({"": PlannedLayer("conv2d", "tune_glutton_verified")})
    with pytest.warns(UserWarning, match="'tune_glutton_verified' fails on the layer"):
        verified = plan.verify(model, x, progress=False)
    assert verified.layers[""].algorithm != "tune_glutton_verified"
    assert verified.layers[""].reason.startswith("tune_glutton_verified fails here")


def test_optimize_without_an_algorithm_that_fails(x, tmp_path):
    glutton("conv2d", "tune_glutton_optimized", tmp_path)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval()
    with pytest.warns(UserWarning, match="'tune_glutton_optimized' fails on the layer"):
        fast = ai3_ops.optimize(model, x, progress=False)
    close(fast(x), model(x))


# Measuring ------------------------------------------------------------------------------------------------------------
def test_median_without_outliers():
    value, noise = median([10.0, 10.2, 9.8, 10.0, 9.9, 10.1, 10.0, 250.0, 16.0])
    assert value == 10.0
    assert 0 < noise < 0.2
    assert median([10.0, 11.0])[1] > 0.5  # too few to tell


def test_percentile():
    value, noise = percentile([float(i) for i in range(1000)])
    assert value == pytest.approx(989, abs=1)
    assert noise == pytest.approx(3, abs=1)


class Clock:
    """Time that passes only in calls: seconds by the algorithm's name, or of the number of its call."""

    def __init__(self, monkeypatch, costs):
        self.now, self.costs, self.order = 0.0, costs, []
        monkeypatch.setattr(timing, "clock", lambda: self.now)
        function = Layer.function

        def slow(layer, name, arguments):
            call = function(layer, name, arguments)

            def run():
                cost = self.costs[name]
                self.now += cost(self.order.count(name)) if callable(cost) else cost
                self.order.append(name)
                return call()

            return run

        monkeypatch.setattr(Layer, "function", slow)


def test_candidates_take_turns_and_hopeless_ones_leave(monkeypatch):
    clock = Clock(monkeypatch, {"direct": 0.010, "torch": 0.012, "smm": 0.200, "im2col": 0.011})
    names = ["direct", "torch", "im2col", "smm"]
    results = measure(conv(), CHANNELS_LAST, names, Surroundings(2**20))
    assert {n: m.rough for n, m in results.items()} == {n: n == "smm" for n in names}
    assert {n: m.time_us for n, m in results.items()} == {n: pytest.approx(clock.costs[n] * 1e6) for n in names}
    assert clock.order.count("smm") == 6  # first calls and two looks, of the layer and the one before
    close = [name for name in clock.order if name != "smm"][-6 * timing.ROUNDS[0] :: 2]
    assert close[:6] in (["direct", "torch", "im2col", "im2col", "torch", "direct"], close[:6][::-1])
    slow = measure(conv(), CHANNELS_LAST, ["smm", "torch"], Surroundings(2**20))
    assert not slow["smm"].rough  # the one to beat is measured well


def test_packs_of_hopeless_candidates_are_gone_when_others_are_measured(monkeypatch):
    """What a candidate's functions hold, its packs, lives until it is known to be far slower."""
    Clock(monkeypatch, {"direct": 0.010, "torch": 0.012, "smm": 0.200, "im2col": 0.300})
    made, alive = weakref.WeakSet(), []
    function, sample = Layer.function, Surroundings.sample

    def kept(layer, name, arguments):
        run = function(layer, name, arguments)
        run.algorithm = name
        made.add(run)
        return run

    def counted(surroundings, *given):
        alive.append(sorted(run.algorithm for run in made))
        return sample(surroundings, *given)

    monkeypatch.setattr(Layer, "function", kept)
    monkeypatch.setattr(Surroundings, "sample", counted)
    measure(conv(), CHANNELS_LAST, ["direct", "torch", "smm", "im2col"], Surroundings(2**20))
    assert max(map(len, alive)) == 6  # never both of the hopeless ones
    assert alive[-1] == ["direct", "direct", "torch", "torch"]
    assert not made


def test_packs_that_take_too_long_to_read_are_not_made(monkeypatch):
    clock = Clock(monkeypatch, {"direct": 0.010, "torch": 0.012, "fft": 0.001})
    monkeypatch.setattr(timing, "cache_bytes", lambda: 4096)
    layer, names = conv(), ["direct", "torch", "fft"]
    packed = layer.memory("fft", CHANNELS_LAST)[1]
    assert packed > 4096

    def measured(seconds, **options):
        monkeypatch.setattr(_library, "machine", lambda threads: (1.0, packed / seconds))
        del clock.order[:]
        return measure(layer, CHANNELS_LAST, names, Surroundings(2**20), **options)

    found = measured(0.041)
    assert "fft" not in clock.order
    assert list(found) == names
    assert found["fft"].rough
    assert str(packed) in found["fft"].failed
    assert timing.from_json(json.loads(json.dumps(timing.to_json(found)))) == found
    assert select(layer, found, Settings())[0] == "direct"
    Meter(0, Settings(), cache=False).tell(layer, found)  # no warning
    assert measured(0.041, everything=True)["fft"].error > 0
    assert not measured(0.039)["fft"].failed


def test_under_a_small_tolerance_everything_is_tried():
    """What is far slower may be the only one that holds it; such measurements have entries of their own."""
    usual, small = (Meter(0, Settings(tolerance=limit), cache=False) for limit in (None, 1e-6))
    assert (usual.everything, small.everything) == (False, True)
    assert usual.key(conv(), CHANNELS_LAST) != small.key(conv(), CHANNELS_LAST)


def test_p99_keeps_what_the_median_drops(monkeypatch):
    """Every twentieth sample takes five times as long; odd calls are the samples."""
    costs = {"direct": lambda n: 0.050 if n % 40 == 39 else 0.010, "torch": lambda n: 0.012}
    clock = Clock(monkeypatch, costs)
    tail = measure(conv(), CHANNELS_LAST, ["direct", "torch"], Surroundings(2**20), p99=True)
    assert clock.order.count("direct") >= 2 * timing.ROUNDS_P99
    assert tail["direct"].time_us == pytest.approx(50_000)
    assert tail["torch"].time_us == pytest.approx(12_000)
    usual = measure(conv(), CHANNELS_LAST, ["direct", "torch"], Surroundings(2**20))
    assert usual["direct"].time_us == pytest.approx(10_000)


def test_errors_are_against_float64():
    results = measure(conv(16), CHANNELS_LAST, ["direct", "torch", "winograd_f6"], Surroundings(2**20))
    assert 0 < results["direct"].error < 2e-6
    assert results["direct"].error < results["winograd_f6"].error < 1e-4
    assert results["winograd_f6"].packed_bytes > 16 * 16 * 9 * 4


def test_variances_are_not_below_zero():
    """Else all that is measured of a batch normalization is its error, which is no number."""
    model, x = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)).eval(), torch.randn(2, 8, 9, 9)
    for layer in {site.layer for site in CallGraph(model, x).sites}:
        found = measure(layer, CONTIGUOUS, ["direct", "torch"], Surroundings(2**20))
        assert all(0 < m.error < 1e-6 for m in found.values())


def test_what_is_not_finite_has_an_error_that_nothing_allows(monkeypatch):
    made = Layer.tensors

    def infinite(layer, layout, **options):
        x, *others = made(layer, layout, **options)
        return torch.full_like(x, torch.inf), *others

    monkeypatch.setattr(Layer, "tensors", infinite)
    found = measure(conv(), CONTIGUOUS, ["direct", "torch"], Surroundings(2**20))
    assert all(m.error == sys.float_info.max for m in found.values())
    assert json.loads(json.dumps(timing.to_json(found), allow_nan=False))


# Everywhere the same --------------------------------------------------------------------------------------------------
RANKS = """
import os, sys, torch, torch.distributed as dist, ai3_ops
from ai3_ops.measuring import timing
torch.set_num_threads(1)
other = os.fork()
rank = int(not other)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
def fake(layer, layout, names, *_):
    assert rank == 0, "rank 1 measures"
    wanted = "fft"
    return {n: timing.Measured(1.0 if n == wanted else 9.0, 0.1, 1e-6, 0, 0) for n in names}
timing.measure = fake
timing.conversion = lambda *_: 1.0
model = torch.nn.Conv2d(3, 4, 3)
plan = ai3_ops.tune(model, torch.randn(1, 3, 8, 8), progress=False, cache=False)
try:
    ai3_ops.tune(model, torch.randn(1, 3, 8, 8) if rank else None, progress=False)
except (RuntimeError, TypeError) as error:
    os.write(1, f"{rank} {plan.layers[''].algorithm} {type(error).__name__}\\n".encode())  # at once, unlike print
dist.destroy_process_group()
assert not other or os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_all_ranks_take_rank_0s_choices(tmp_path, fork):
    done = fork(RANKS, tmp_path / "meeting", PYTHONPATH=str(Path(ai3_ops.__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 fft RuntimeError", "1 fft RuntimeError"]


def test_names_of_layouts():
    assert set(plans.LAYOUTS) == set(timing.FORMATS)


def test_auto_measures_what_it_is_asked_for(model, x, given):
    given["winograd_f4"] = 10.0
    swapped = ai3_ops.swap(model, {"first": "auto", "*": "default"}, x)
    assert layers(swapped)["first"].used == "winograd_f4"
    assert {layer.operation for layer, _, _ in given["asked"]} == {"conv2d"}
    assert len({layer for layer, _, _ in given["asked"]}) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"candidates": None}, "'candidates'"),
        ({"candidates": {"": {}}}, "'candidates'"),
        ({"candidates": {"torch": {"time_us": "fast"}}}, "'candidates'"),
        ({"shapes": None}, "'shapes'"),
        ({"reason": 3}, "'reason'"),
    ],
)
def test_what_is_no_measurement_in_a_plan(more, words):
    layer = {"operation": "conv2d", "algorithm": "direct"} | more
    with pytest.raises(ValueError, match=words):
        ai3_ops.Plan.from_dict({"version": 1, "layers": {"0": layer}})


def test_a_plan_names_algorithms_not_rules_to_measure():
    plan = ai3_ops.Plan.from_dict({"version": 1, "layers": {"0": {"operation": "conv2d", "algorithm": "auto"}}})
    with pytest.raises(ValueError, match=r"layer '0'.*no conv2d algorithm 'auto'"):
        ai3_ops.swap(nn.Sequential(nn.Conv2d(3, 8, 3)), plan)


def test_a_model_on_the_meta_device_is_an_error():
    with pytest.raises(
        ValueError, match="tune: 'weight' is on the meta device, without values: give the model its weights"
    ):
        ai3_ops.tune(nn.Conv2d(3, 4, 3, device="meta"), torch.randn(1, 3, 5, 5))
