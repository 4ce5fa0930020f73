"""Which algorithms an optimized network runs, and whether it is what runs at all."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nets import BOUND, agree, check, exact, optimized, taken
from torch import nn

import ai3_ops
from ai3_ops import registry
from ai3_ops._tables import shown_bytes
from ai3_ops.graph import canonical, steps
from ai3_ops.graph.network import difference
from ai3_ops.measuring.timing import Measured
from ai3_ops.optimizing import choose, pipeline
from ai3_ops.optimizing.module import Optimized
from ai3_ops.tuning.meter import Meter
from ai3_ops.tuning.settings import Interrupted


def algorithms_of(fast):
    return {s.layers[0]: s.algorithm for s in fast._ai3_report.parts[0].steps if s.operation in ("conv2d", "linear")}


def test_selectors_are_followed(residual):
    model, x = residual
    fast = check(model, x, selectors={"conv1": "direct", "conv2d": "im2col", "fc": None})
    assert algorithms_of(fast) == {"conv1": "direct", "conv2": "im2col", "fc": "torch"}
    with pytest.raises(ValueError, match=r"conv1 .*depthwise"):
        optimized(model, x, selectors={"conv1": "depthwise"})
    with pytest.raises(ValueError, match=r"no operation"):
        optimized(model, x, selectors={"nothing": "direct"})


def test_exclude_is_followed():
    model, x = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()), torch.randn(1, 64, 28, 28)
    used = lambda fast: fast._ai3_report.parts[0].steps[0].algorithm  # noqa: E731
    choice = ai3_ops.Algorithm("default", exclude=("winograd*",))
    assert used(check(model, x, selectors={"conv2d": "winograd"})).startswith("winograd")
    for selectors in (choice, {"0": choice}, {"conv2d": choice}):
        assert not used(check(model, x, selectors=selectors)).startswith(("winograd", "default", "torch"))


@pytest.fixture
def approximated(monkeypatch):
    """A network, as if gemm_bf16 were by far the fastest for its layers."""

    def known_in(self, layer, layout):
        return {
            n: Measured(1.0, 0.0, 3e-3, 0, 0) if n == "gemm_bf16" else Measured(100.0, 0.0, 1e-7, 0, 0)
            for n in layer.candidates(layout, self.approximate)
        }

    monkeypatch.setattr(Meter, "known_in", known_in)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(8, 64)


@pytest.mark.parametrize("given", [{"selectors": {"linear": "gemm_bf16"}}, {"allow_approximate": True}])
def test_approximations_run_where_they_are_named_or_allowed(approximated, given):
    """Their error is no reason to choose others, nor to leave the module as it was."""
    model, x = approximated
    fast = optimized(model, x, **given)
    assert set(algorithms_of(fast).values()) == {"gemm_bf16"}
    assert BOUND < difference(fast(x), exact(model, x)) < pipeline.WORST_APPROXIMATION


def test_approximations_that_are_not_allowed_or_err_too_much_are_not_taken(approximated, monkeypatch):
    model, x = approximated
    assert "gemm_bf16" not in algorithms_of(check(model, x)).values()
    monkeypatch.setattr(pipeline, "WORST_APPROXIMATION", BOUND)
    assert "gemm_bf16" not in algorithms_of(check(model, x, allow_approximate=True)).values()


class Partly(nn.Module):
    """Of which only the children can be captured."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.a = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x):
        x = self.a(x) * self.scale
        return self.b(x) if float(x.sum()) > -1e9 else x


def test_selectors_of_a_model_that_is_captured_in_parts():
    model, x = Partly(), torch.randn(1, 8, 14, 14)
    for selectors in ({"a.0": "smm"}, {"re:a\\..*": "smm"}, {"a": "smm"}, {"a.0": "smm", "b": "direct"}):
        fast = optimized(model, x, selectors=selectors)
        got = {
            part.name: [s.algorithm for s in part.steps if s.operation == "conv2d"] for part in fast._ai3_report.parts
        }
        assert got["a"] == ["smm"]
        assert got["b"] != ["smm"]
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)  # with gradients on, too
    with pytest.raises(ValueError, match=r"no operation and no name in this model; did you mean"):
        optimized(model, x, selectors={"a.7": "smm"})
    with pytest.raises(ValueError, match="a list counts the whole model's calls"):
        optimized(model, x, selectors=["smm", "smm"])


def test_a_layer_that_is_called_twice_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.r = nn.Conv2d(8, 8, 3, padding=1), Relus()

        def forward(self, x):
            return self.r(self.c(self.r(self.c(x))))

    class Relus(nn.Module):
        def forward(self, x):
            return torch.relu(x - torch.relu(-x))

    model, x = Twice(), torch.randn(1, 8, 9, 9)
    fast = check(model, x, selectors=["smm"])
    assert [s.algorithm for s in fast._ai3_report.parts[0].steps if s.operation == "conv2d"] == ["smm", "smm"]
    check(model, x, selectors={"r:relu_1": None, "r:relu_0": "direct"})
    with pytest.raises(ValueError, match="r:relu_2"):
        optimized(model, x, selectors={"r:relu_2": None})


def test_some_layers_measured():
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(1, 8, 12, 12)
    fast = check(model, x, selectors={"0": "smm", "conv2d": "auto"})
    assert fast._ai3_report.parts[0].steps[0].algorithm == "smm"


def test_a_plan_may_name_what_changes_nothing():
    class Pooled(nn.Sequential):
        pass

    model = Pooled(nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d((7, 7)), nn.ReLU()).eval()
    x = torch.randn(1, 8, 7, 7)
    plan = ai3_ops.tune(model, x, budget_seconds=0, cache=False, progress=False)
    assert "1" in plan.layers
    check(model, x, selectors=plan)
    check(model, x, selectors={"1": "direct"})


def test_a_plan_of_another_machine_is_taken_with_one_warning():
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3)), torch.randn(1, 8, 9, 9)
    plan = ai3_ops.tune(model, x, budget_seconds=0, cache=False, progress=False)
    plan.machine["processor"] = "another"
    with pytest.warns(UserWarning, match="measured on another machine") as caught:
        taken(optimized(model, x, selectors=plan))
    assert len([w for w in caught if "another machine" in str(w.message)]) == 1


def test_a_swapped_model_is_taken_as_it_was(residual):
    model, x = residual
    check(ai3_ops.swap(model, "default", x), x)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"alpha": 0.9}, ValueError, "alpha"),
        ({"objective": "speed"}, ValueError, "objective"),
        ({"budget_seconds": -1}, ValueError, "budget_seconds"),
        ({"memory_limit": "much"}, ValueError, "memory_limit"),
    ],
)
def test_settings_that_make_no_sense(residual, arguments, error, words):
    with pytest.raises(error, match=words):
        ai3_ops.optimize(*residual, **arguments)


def convolutions_of(fast):
    return {s.algorithm for s in fast._ai3_report.parts[0].steps if s.operation == "conv2d"}


def test_a_tolerance_that_nothing_holds_takes_the_least_error(monkeypatch):
    """Errors as if measured: which algorithm has the least differs by processor."""

    def known_in(self, layer, layout):
        error = lambda name: {"im2col": 1e-9, "winograd_f4": 1e-6}.get(name, 1e-7)  # noqa: E731
        return {n: Measured(100.0, 0.0, error(n), 0, 0) for n in layer.candidates(layout, self.approximate)}

    monkeypatch.setattr(Meter, "known_in", known_in)
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()), torch.randn(1, 16, 12, 12)
    with pytest.warns(UserWarning, match=r"holds the tolerance in 0: the one with the least error is taken"):
        fast = optimized(model, x, tolerance=0.0)
    assert convolutions_of(fast) == {"im2col"}
    agree(fast, model, x)


def test_without_memory_what_needs_none_is_taken():
    model, x = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()), torch.randn(1, 16, 12, 12)
    assert convolutions_of(check(model, x, left=True, memory_limit=0)) <= {"torch", "smm", "direct"}


def as_if_measured(monkeypatch, time):
    """Times of `time(algorithm, input's height)`, and memory as the algorithms state it."""

    def known_in(self, layer, layout):
        memory = {n: layer.memory(n, layout) for n in layer.candidates(layout, self.approximate)}
        return {n: Measured(time(n, layer.shapes[0][-2]), 0.0, 1e-7, *of) for n, of in memory.items()}

    monkeypatch.setattr(Meter, "known_in", known_in)
    monkeypatch.setattr(pipeline, "_slower", lambda *_: False)


def test_memory_limit_is_of_packs_and_arena_of_the_whole_network(monkeypatch):
    """As if winograd_f4, whose packs are four times as large, were faster for each layer, and most for the last."""
    as_if_measured(monkeypatch, lambda n, h: {30: 50.0, 28: 30.0, 26: 10.0}[h] if n == "winograd_f4" else 100.0)
    model = nn.Sequential(*[nn.Conv2d(64, 64, 3) for _ in range(3)])
    x = torch.randn(1, 64, 30, 30)
    packs, limit = [], None
    for _ in range(3):
        fast = check(model, x, memory_limit=limit)
        report = fast._ai3_report.parts[0]
        both = report.packed_bytes + report.memory_bytes
        assert limit is None or both <= limit
        assert algorithms_of(fast)["2"] in ("default", "winograd_f4")
        shown = map(shown_bytes, (report.packed_bytes, report.memory_bytes, report.workspace_bytes))
        said = "{} of packed weights, {} of arena, activations and workspaces (the largest {})".format(*shown)
        assert said in str(ai3_ops.explain(fast))
        packs.append(report.packed_bytes)
        limit = both - 1  # packs and largest workspace alone would stay within it
    assert packs == sorted(set(packs), reverse=True)


def test_a_memory_limit_that_nothing_keeps_is_said(monkeypatch):
    as_if_measured(monkeypatch, lambda *_: 100.0)
    model, x = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()), torch.randn(1, 64, 30, 30)
    with pytest.warns(UserWarning, match=r"arena take \d+ bytes, more than memory_limit"):
        fast = check(model, x, memory_limit=200_000)  # fewer than the activations' and the packs'
    assert "more than memory_limit" in str(ai3_ops.explain(fast))
    assert convolutions_of(check(model, x, left=True, memory_limit=0)) == {"torch"}


@pytest.mark.parametrize("fastest", ["im2col", "winograd_f4", "fft"])
def test_less_memory_is_an_objective(fastest, monkeypatch):
    """As if what takes most memory were fastest."""
    as_if_measured(monkeypatch, lambda n, _: 10.0 if n == fastest else 100.0)
    model, x = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()), torch.randn(1, 32, 20, 20)
    taken = {}
    for objective in ("latency", "memory"):
        fast = check(model, x, objective=objective)
        report = fast._ai3_report.parts[0]
        taken[objective] = report.packed_bytes + report.memory_bytes, report.packed_bytes + report.workspace_bytes
        assert report.packed_bytes
        assert (convolutions_of(fast) == {fastest}) == (objective == "latency")
    assert all(less < more for less, more in zip(taken["memory"], taken["latency"], strict=True))


def test_algorithms_are_chosen_again_where_the_whole_is_inexact(monkeypatch):
    asked = []

    def fastest(case, settings, price=0.0, largest_error=None):
        asked.append(largest_error)
        return "winograd_f6" if largest_error is None else "direct"

    monkeypatch.setattr(choose.Case, "fastest", fastest)
    monkeypatch.setattr(pipeline, "WORST_ERROR", 1e-6)
    monkeypatch.setattr(pipeline, "OWN_ERROR", 1.5)
    model, x = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3)), torch.randn(1, 64, 32, 32)
    fast = optimized(model, x)
    report = fast._ai3_report.parts[0]
    assert asked[:3] == [None, None, pipeline.STRICTER[0]]
    assert [n for n in report.notes if "chosen again" in n]
    assert {step.algorithm for step in report.steps if step.operation == "conv2d"} == {"direct"}


def test_a_network_that_is_inexact_in_pytorch_may_be_as_inexact():
    """The sum of a layer and a large constant, which is taken away again: float32 keeps few of the layer's digits."""

    class Cancels(nn.Sequential):
        def forward(self, x):
            return (super().forward(x).relu() + 3e4).relu() - 3e4

    model, x = Cancels(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 1, bias=False)), torch.randn(1, 3, 12, 12)
    assert difference(model(x), exact(model, x)) > 2 * BOUND
    report = optimized(model, x)._ai3_report.parts[0]
    assert report.error > BOUND
    assert "rewritten its outputs" not in report.unchanged


def test_a_named_algorithm_that_is_too_inexact_changes_nothing_and_that_is_said():
    def inexact(*args):
        return torch.ops.aten.conv2d(*args) * 1.01

    ai3_ops.register("conv2d", "one_percent_off", inexact, replace=True)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 9, 9)
    with pytest.warns(UserWarning, match=r"the model stays as it was: .*an error of 0.0.*; ai3_ops.explain names"):
        fast = optimized(model, x, selectors={"0": "one_percent_off"})
    assert fast._ai3_first.body is None
    assert torch.equal(fast(x), model(x))
    head, said, *_ = str(ai3_ops.explain(fast)).splitlines()
    assert head.startswith("the model, error")
    assert said.startswith("stays as it was: rewritten its outputs had an error of 0.0")
    assert said.endswith("; tried, and not run:")


@pytest.mark.parametrize("more", [[], [nn.Softsign()]], ids=["one program", "and PyTorch's"])
def test_what_is_not_faster_stays_as_it_was(more, monkeypatch):
    """A program that is the whole network is compared with the module alone."""
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), *more).eval(), torch.randn(1, 8, 9, 9)
    check(model, x)
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (0.5, 1e-3, 2e-3))
    monkeypatch.setattr(pipeline, "_compared", {})
    fast = check(model, x, left=True)
    assert fast._ai3_first.body is None
    report = fast._ai3_report.parts[0]
    assert ("a program of them is not faster (it took 2 times as long)" in "; ".join(report.notes)) == bool(more)
    assert report.unchanged == "rewritten it took 2.00 times as long"


class Twice(nn.Module):
    """Calls whose order is not that of their sites, one of them in a loop."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 3, 3, 3)), nn.Parameter(torch.randn(3, 3, 1, 1))
        self.w3 = nn.Parameter(torch.randn(3, 3, 1))

    def forward(self, x):
        y = F.conv2d(F.conv2d(x, self.w1, padding=1), self.w2)
        for _ in range(2):
            y = F.relu(F.conv2d(y, self.w1, padding=1))
        return F.conv1d(F.layer_norm(y, y.shape[1:]).flatten(2)[0], self.w3)  # without a batch: no step


def test_functional_calls_have_the_names_that_swap_gives_them():
    model, x = Twice(), torch.randn(1, 3, 8, 8)
    named = {":conv2d_0": "smm", ":conv2d_1": "im2col", ":conv2d_2": "direct"}
    swapped = ai3_ops.explain(ai3_ops.swap(model, named, x)).layers
    by_kernel = {tuple(layer.shapes[1]): layer.used for layer in swapped if layer.operation == "conv2d"}
    steps = check(model, x, selectors=named)._ai3_report.parts[0].steps
    got = [s.algorithm for s in steps if s.operation == "conv2d"]
    assert by_kernel[3, 3, 1, 1] == "smm" == got[1]
    assert got == ["im2col", "smm", "direct", "direct"]


def test_plans_name_calls_that_are_no_steps():
    model, x = Twice(), torch.randn(1, 3, 8, 8)
    plan = ai3_ops.tune(model, x, budget_seconds=0, progress=False)
    assert ":conv1d_0" in plan.layers
    changed = {n: replace(layer, algorithm="direct") for n, layer in plan.layers.items()}
    fast = check(model, x, selectors=replace(plan, layers=changed))
    (note,) = fast._ai3_report.parts[0].notes
    assert "no step of the network is" in note
    assert ":conv1d_0" in note
    with pytest.raises(ValueError, match="there is no such layer in this model"):
        optimized(model, x, selectors=replace(plan, layers=changed | {":conv1d_7": changed[":conv1d_0"]}))


@pytest.mark.parametrize("verify", ["quick", "full", "off"])
def test_translations_are_checked(verify, monkeypatch):
    """What computes something else than the captured graph is not taken, whichever step of the way it was."""
    monkeypatch.setitem(canonical._PLAIN, torch.ops.aten.tanh.default, "sigmoid")
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh()), torch.randn(1, 3, 9, 9)
    fast = optimized(model, x, verify=verify)
    (part,) = fast._ai3_report.parts
    words = {"quick": "rewritten its outputs had an error", "full": "the rewrites changed what the network computes"}
    if verify == "off":
        assert not part.unchanged
        assert part.error is None
    else:
        assert words[verify] in part.unchanged
        agree(fast, model, x)
    with pytest.raises(ValueError, match=r"verify needs one of .*, got 'ful'; did you mean"):
        optimized(model, x, verify="ful")


@pytest.mark.parametrize(("verify", "runs"), [("quick", 1), ("full", 2), ("off", 0)])
def test_how_much_is_computed_in_float64(verify, runs, monkeypatch):
    """Of the captured graph, once each: the example, or its first item, and for "full" random inputs."""
    seen, whole = [], pipeline._exact
    monkeypatch.setattr(pipeline, "_exact", lambda network, inputs: (seen.append(inputs[0]), whole(network, inputs))[1])
    x = torch.randn(2, 3, 9, 9)
    optimized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x, verify=verify, selectors="default")
    assert [len(given) for given in seen] == {"quick": [1], "full": [2, 2], "off": []}[verify]
    assert len(seen) == runs


def test_what_was_measured_is_kept_when_it_is_interrupted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 8, 1), nn.Conv2d(8, 8, 3)), torch.randn(1, 16, 12, 12)
    measured, count = Meter.measured_in, []

    def interrupted(self, layer, *args):
        count.append(layer)
        if len(count) == 2:
            raise KeyboardInterrupt
        return measured(self, layer, *args)

    monkeypatch.setattr(Meter, "measured_in", interrupted)
    monkeypatch.setattr(pipeline, "search", lambda *_, **__: 0)
    with pytest.raises(Interrupted, match=r"ai3_ops\.optimize was interrupted") as stop:
        optimized(model, x, budget_seconds=600)
    layers = stop.value.plan.layers
    assert [name for name, layer in layers.items() if layer.time_us is not None] == ["0"]  # that with most work
    check(model, x, selectors=stop.value.plan)
    count[:] = [None] * 2
    optimized(model, x, budget_seconds=600)
    assert len(count) == 4  # the other two


def test_what_the_budget_left_out_is_said():
    model, x = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)), torch.randn(1, 64, 30, 31)
    notes = optimized(model, x, budget_seconds=0)._ai3_report.parts[0].notes
    assert [n for n in notes if n.startswith("2 of 2 layers were not measured within the budget")]


class Fire(nn.Module):
    """A 1x1 and a 3x3 convolution of one input: the first is enlarged, so that both are one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return torch.cat([self.a(x), F.relu(self.b(x))], 1)


def test_substitutions_leave_alone_what_a_named_algorithm_cannot_do(monkeypatch):
    """As if each substitution gained: an algorithm of 1x1 kernels alone is not given another kernel."""
    supports = registry.supports_problem

    def only_pointwise(operation, algorithm, problem):
        if algorithm == "smm" and problem.sizes.get("kernel_height") != 1:
            return False, "needs a 1x1 kernel"
        return supports(operation, algorithm, problem)

    computes = steps._computes

    def refusing(operation, algorithm, input):
        function = computes(operation, algorithm, input)

        def call(x, weight, *rest):
            if algorithm == "smm" and weight.shape[2:] != (1, 1):
                raise RuntimeError("ai3::conv2d_smm: needs a 1x1 kernel")
            return function(x, weight, *rest)

        return call

    monkeypatch.setattr(registry, "supports_problem", only_pointwise)
    monkeypatch.setattr(steps, "_computes", refusing)
    monkeypatch.setitem(pipeline.COSTS, "latency", lambda node: 1.0)  # fewer steps are better
    model, x = Fire(), torch.randn(1, 16, 8, 8)
    assert algorithms_of(check(model, x, selectors={"a": "smm", "b": "direct"}, budget_seconds=30)) == {
        "a": "smm",
        "b": "direct",
    }


def test_explain_names_what_computes_each_step_and_why():
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(64, 8, 1))
    fast = check(model, torch.randn(1, 64, 28, 28), selectors={"0": "default", "2": "im2col"})
    first, pool, last = fast._ai3_report.parts[0].steps
    assert first.algorithm.startswith("winograd")
    assert (first.reason, pool.algorithm, pool.reason) == ("default", "direct", "")
    assert (last.algorithm, last.reason) == ("im2col", "named")
    assert "winograd" in str(ai3_ops.explain(fast))


def test_calls_of_a_module_have_selectors_names_in_the_report():
    model, x = Twice(), torch.randn(1, 3, 8, 8)
    rows = [step.layers[0] for step in check(model, x)._ai3_report.parts[0].steps if step.operation == "conv2d"]
    assert rows == [":conv2d_1", ":conv2d_0", ":conv2d_2", ":conv2d_2"]


def test_layers_that_an_algorithm_cannot_do_are_said():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)).eval()
    with pytest.warns(UserWarning, match=r"1 of 3 layers keep PyTorch's implementation: the algorithm cannot do them"):
        fast = optimized(model, torch.randn(1, 3, 12, 12), selectors="winograd")
    (note,) = [
        n for n in ai3_ops.explain(fast).optimization.parts[0].notes if n.startswith("PyTorch computes 1: winograd ")
    ]
    assert "needs" in note
    with pytest.raises(ValueError, match=r"1 \(conv2d\): winograd needs .*; algorithms that support it: .*direct"):
        optimized(model, torch.randn(1, 3, 12, 12), selectors={"1": "winograd"})


@pytest.mark.parametrize("operation", ["relu", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "flatten"])
def test_other_steps_run_the_algorithm_that_is_named(operation):
    calls = []

    def mine(*args):
        calls.append(operation)
        return getattr(torch.ops.aten, "_adaptive_avg_pool2d" if operation.startswith("adaptive") else operation)(*args)

    ai3_ops.register(operation, f"named_{operation}", mine, replace=True)
    pools = [nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *pools, nn.Linear(32, 4)).eval()
    x = torch.randn(1, 3, 18, 18)
    fast = check(model, x, selectors={"*": "default", operation: f"named_{operation}"})
    calls.clear()
    with torch.no_grad():
        fast(x)
    assert calls == [operation]
    (step,) = [s for s in fast._ai3_report.parts[0].steps if s.algorithm == f"named_{operation}"]
    assert step.reason == "named"
    with pytest.raises(ValueError, match=r"no algorithm 'named_nothing'"):
        optimized(model, x, selectors={operation: "named_nothing"})


def test_a_named_step_between_layers_of_pytorch_is_shown(faster):
    convs = [nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8, 8)]
    model, x = nn.Sequential(*convs[:2], nn.AdaptiveAvgPool2d(5), convs[2]).eval(), torch.randn(1, 3, 9, 9)
    fast = check(model, x, selectors={"*": "default", "1": None, "2": "direct", "3": None})
    steps_of = {s.layers[0]: (s.algorithm, s.reason) for s in fast._ai3_report.parts[0].steps}
    assert steps_of["2"] == ("direct", "named")
    assert steps_of["1"] == steps_of["3"] == ("torch", "")


def test_a_relu_left_to_pytorch_is_not_fused(faster):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()), torch.randn(1, 3, 9, 9)
    steps_of = check(model, x, selectors={"*": "default", "1": None})._ai3_report.parts[0].steps
    assert [(s.layers, s.operation, s.detail) for s in steps_of] == [
        (["0"], "conv2d", ""), (["1"], "relu", ""), (["2", "3"], "conv2d", "relu"),
    ]  # fmt: skip
    assert steps_of[1].algorithm == "torch"


def test_further_sizes_keep_what_was_measured_where_it_can_do_them(monkeypatch):
    """As if a method for wide images were the fastest; the settings decide where it cannot do a layer."""
    supports = registry.supports_problem

    def wide(operation, algorithm, problem):
        narrow = algorithm == "kn2row" and problem.sizes.get("in_width", 10) < 10
        return (False, "needs wide images") if narrow else supports(operation, algorithm, problem)

    def known_in(self, layer, layout):
        if layer.arguments[0].shape[-1] != 16:
            return None
        return {
            n: Measured(1.0 if n == "kn2row" else 100.0, 0.0, 1e-7, 0, 0)
            for n in layer.candidates(layout, self.approximate)
        }

    monkeypatch.setattr(registry, "supports_problem", wide)
    monkeypatch.setattr(Meter, "known_in", known_in)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    fast = check(model, torch.randn(1, 8, 16, 16))
    assert algorithms_of(fast) == {"0": "kn2row"}
    monkeypatch.setattr(Optimized, "_computes", lambda *_: False)  # as where the first size's program cannot be used
    for size, expected in ((12, True), (8, False)):
        with pytest.warns(UserWarning, match="planned anew"), torch.no_grad():
            fast(torch.randn(1, 8, size, size))
        (step,) = list(fast._ai3_plans.values())[-1].report.steps
        assert (step.algorithm == "kn2row") is expected


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        ({"nothing": "direct"}, "'nothing' is no operation and no name"),
        ({"conv2d": "winogard"}, "no algorithm 'winogard'; did you mean"),
        ({"re:(": "direct"}, "not a regular expression"),
    ],
)
def test_selectors_mistakes_are_told_where_nothing_is_captured(selectors, words):
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale if x.sum() > 0 else x

    with pytest.raises(ValueError, match=re.escape(words)):
        optimized(Decides(), torch.randn(1, 3), selectors=selectors)


def test_parts_share_one_budget(monkeypatch):
    """Time that passes while a part is searched is gone for the next one."""
    clock = [0.0]
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: clock[0])
    deadlines = []

    def search(network, cost, alpha, deadline, *_, **__):
        deadlines.append(deadline - clock[0])
        clock[0] += 7
        return False

    monkeypatch.setattr(pipeline, "search", search)

    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(4, 4, 3))

        def forward(self, x):
            x = self.first(x)
            return self.second(x) if x.sum() < 1e9 else x

    optimized(Decides().eval(), torch.randn(1, 3, 9, 9), budget_seconds=10)
    assert deadlines == [pytest.approx(10 * pipeline.SEARCH), pytest.approx(3 * pipeline.SEARCH)]


def test_a_named_relu_that_approximates_is_held_to_their_bound(faster):
    ai3_ops.register("relu", "low", lambda x: x.clamp(min=0).bfloat16().to(x.dtype), exact=False, replace=True)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), torch.randn(1, 3, 16, 16)
    part = optimized(model, x, selectors={"*": "default", "relu": "low"})._ai3_report.parts[0]
    assert "low" in [step.algorithm for step in part.steps]
    assert part.error > BOUND
    assert not part.unchanged


def test_parts_without_calls_to_choose_for_are_not_tried(monkeypatch):
    monkeypatch.setattr(pipeline, "_without_norms", None)  # the first that would copy

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.embedding(x)
            return self.last(h) if h.sum() < 1e9 else h

    fast = optimized(Words().eval(), torch.tensor([[1, 2]]))
    assert type(fast.embedding) is nn.Embedding
    assert [p.name for p in fast._ai3_report.parts] == ["embedding", "last"]
