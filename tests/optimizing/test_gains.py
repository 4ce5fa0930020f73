"""What `optimize` says of a model that gains little or nothing, and that such a model costs nothing later."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from itertools import chain, repeat

import pytest
import torch
from nets import agree, optimized
from torch import nn

import ai3_ops
from ai3_ops.graph import capture
from ai3_ops.graph.calls import Uncapturable
from ai3_ops.optimizing import pipeline, planned


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


class Picks(nn.Module):
    """As many rows as values say."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        rows = self.body(x).permute(0, 2, 3, 1).flatten(0, 2)
        return self.head(rows[rows.sum(1) > 0])


def of_ai3(told):
    return [text for w in told if (text := str(w.message)).startswith("ai3_ops.optimize")]


def test_a_small_gain_is_said_with_what_pytorch_computes(monkeypatch):
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (1.02, 2.04e-3, 2e-3))
    reason = r"only 1\.02 times as fast as before: PyTorch computes lstm \(recurrent\)"
    with pytest.warns(UserWarning, match=reason) as told:
        fast = ai3_ops.optimize(Recurrent().eval(), torch.randn(2, 5, 8), "default", progress=False)
    assert len(of_ai3(told)) == 1
    assert any(text.startswith("lstm") for text in fast._ai3_report.parts[0].outside)


def test_a_small_gain_of_parts_is_said_with_what_is_not_captured(monkeypatch):
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (1.02, 2.04e-3, 2e-3))
    with pytest.warns(
        UserWarning, match=r"only 1\.02 times as fast as before: the model itself is not captured \(sizes"
    ):
        ai3_ops.optimize(Picks().eval(), torch.randn(1, 3, 8, 8), "default", progress=False)


def test_modules_that_the_budget_does_not_reach_are_named(monkeypatch):
    over = chain([False, False], repeat(True))  # asked before the body, and for its other lengths
    monkeypatch.setattr(pipeline.Budget, "over", property(lambda _: next(over)))
    with pytest.warns(UserWarning, match="the budget was used up before head, which run as they were: a larger"):
        fast = ai3_ops.optimize(Picks().eval(), torch.randn(1, 3, 8, 8), "default", progress=False)
    assert fast._ai3_report.left.keys() == {"", "head"}
    monkeypatch.setattr(pipeline.Budget, "over", True)
    with pytest.warns(UserWarning, match="as fast as before: .*body: the budget was used up, a larger") as told:
        ai3_ops.optimize(Picks().eval(), torch.randn(1, 3, 8, 8), "default", progress=False)
    assert len(of_ai3(told)) == 1


def test_sizes_that_depend_on_values_are_seen_before_an_export(monkeypatch):
    model, x = Picks().eval(), torch.randn(1, 3, 8, 8)
    fast = optimized(model, x, selectors="default")
    agree(fast, model, x)
    assert {part.name for part in fast._ai3_report.parts} == {"body", "head"}
    monkeypatch.setattr(capture, "_export", None)  # nothing calls it
    with pytest.raises(Uncapturable, match=r"sizes inside of it depend on values \(aten::index\)"):
        capture.capture(model, (x,), {})


def test_indices_are_no_sizes():
    class Gathers(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return self.fc(x[:, torch.tensor([2, 0, 1, 5, 4, 3])])

    model, x = Gathers().eval(), torch.randn(3, 6)
    fast = optimized(model, x, selectors="default")
    assert not fast._ai3_report.left
    agree(fast, model, x)


def test_a_model_that_stays_as_it_was_is_not_planned_in_calls(monkeypatch):
    model = nn.LSTM(8, 8, batch_first=True).eval()
    with pytest.warns(UserWarning, match="the model is as fast as before"):
        fast = ai3_ops.optimize(model, torch.randn(1, 5, 8), "default", progress=False)
    monkeypatch.setattr(planned, "make_plan", None)  # nothing calls it
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for x in (torch.randn(2, 5, 8), torch.randn(1, 7, 8), torch.randn(7, 8)):
            torch.testing.assert_close(fast(x)[0], model(x)[0])


def test_hooks_that_only_record_what_a_caller_asked_for_are_captured():
    """As transformers has them, for `output_hidden_states`."""
    model, x, seen = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(),
        torch.randn(1, 3, 8, 8),
        [],
    )

    def record(module, args, output):
        seen.append(1)

    record.__module__ = "transformers.utils.output_capturing"
    model[0].register_forward_hook(record)
    fast = optimized(model, x, selectors="default")
    assert not fast._ai3_report.left
    fast._ai3_original[0][2].register_forward_hook(record)
    seen.clear()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        fast(x)
        assert not seen
    fast._ai3_original[0][2].register_forward_hook(lambda m, args, y: 2 * y)
    with torch.no_grad(), pytest.warns(UserWarning, match="'2' has a hook"):
        torch.testing.assert_close(fast(x), 2 * model(x))


def test_without_the_original_programs_run_while_layers_are_recorded():
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), torch.randn(1, 3, 8, 8)
    fast = optimized(model, x, selectors="default", keep_original=False)
    token = capturing._active_collector.set({"hidden_states": []})
    try:
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
    finally:
        capturing._active_collector.reset(token)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.factor = nn.Conv2d(3, 8, 3), nn.Dropout(0.5), 2.0

    def forward(self, x):
        return self.drop(self.conv(x)) * self.factor


def test_modes_and_values_of_modules_inside_that_change_between_calls():
    model, x = nn.Sequential(Scales(), nn.Conv2d(8, 8, 1)).eval(), torch.randn(1, 3, 8, 8)
    for make in (lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        fast = make(optimized(model, x, selectors="default"))
        scales = fast.get_submodule("0")
        with torch.no_grad():
            plain = fast(x)
            scales.drop.train()  # Monte Carlo dropout
            with pytest.warns(
                UserWarning, match="'0.drop' is in training mode: the original computes until it is in eval"
            ):
                assert not torch.equal(fast(x), fast(x))
            scales.drop.eval()
            assert torch.equal(fast(x), plain)
            scales.factor = 4.0
            with pytest.warns(UserWarning, match="'0.factor' was changed, which programs do not see: the original"):
                changed = fast(x)
            scales.factor = 2.0 * float("1.0")  # equal, and another object
            assert torch.equal(fast(x), plain)
        assert not torch.allclose(changed, plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [("0.stride", (2, 2)), ("0.padding", (1, 1)), ("1.eps", 0.5), ("3.kernel_size", 3)],
)
def test_settings_of_pytorchs_own_modules_that_change_between_calls(name, value):
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 3, 9, 9)
    fast = pickle.loads(pickle.dumps(optimized(model, x, selectors="default")))
    with torch.no_grad():
        plain = fast(x)
        module, _, attribute = name.partition(".")
        before = getattr(fast.get_submodule(module), attribute)
        for one in (model, fast):
            setattr(one.get_submodule(module), attribute, value)
        with pytest.warns(UserWarning, match=f"'{name}' was changed, which programs do not see: the original"):
            torch.testing.assert_close(fast(x), model(x))
        setattr(fast.get_submodule(module), attribute, before)
        assert torch.equal(fast(x), plain)


class _Own(nn.Conv2d):
    pass


class _Wide(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float())


class _Scaled(nn.Module):
    flag = True

    def __init__(self):
        super().__init__()
        self.scales, self.layer = [1.0, 2.0], _Own(3, 3, 3, padding=1)
        self.norm, self.drop = _Wide(8), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))

    def forward(self, x):
        y = self.drop(self.norm(self.layer(x)) * self.scales[0] + self.scales[1])
        return y if self.flag else -y


def _first_scale(m, value):
    m.scales[0] = value


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layer.padding_mode", lambda m, back: setattr(m.layer, "padding_mode", "zeros" if back else "circular")),
        ("norm.eps", lambda m, back: setattr(m.norm, "eps", 1e-5 if back else 0.5)),
        ("drop.dilation", lambda m, back: setattr(m.drop, "dilation", (1, 1) if back else (2, 2))),
        ("scales", lambda m, back: _first_scale(m, 1.0 if back else 3.0)),
        ("flag", lambda m, back: setattr(m, "flag", back)),
    ],
    ids=["subclass", "super", "parametrized", "list", "class"],
)
def test_settings_of_own_classes_that_change_between_calls(name, change):
    fast, x = (
        optimized(nn.Sequential(_Scaled()).eval(), torch.randn(1, 3, 8, 8), selectors="default"),
        torch.randn(1, 3, 8, 8),
    )
    inside = fast.get_submodule("0")
    with torch.no_grad():
        plain = fast(x)
        change(inside, False)
        with pytest.warns(UserWarning, match=f"'0.{name}' was changed"):
            assert torch.equal(fast(x), inside(x))
        weight = inside.layer.weight  # another change beside it, taken back alone, changes nothing
        inside.layer.weight = nn.Parameter(weight.detach() * 2)
        assert torch.equal(fast(x), inside(x))
        inside.layer.weight = weight
        assert torch.equal(fast(x), inside(x))
        change(inside, True)
        assert torch.equal(fast(x), plain)


def test_quantization_is_refused():
    """It would replace modules inside, which programs do not see."""
    fast = optimized(nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.randn(1, 3, 9, 9), selectors="default")
    with pytest.raises(RuntimeError, match="cannot be quantized: quantize the original model"):
        torch.ao.quantization.quantize_dynamic(fast)


def test_swap_and_optimize_say_the_same_of_inputs_that_do_not_run():
    model, said = nn.Conv2d(3, 4, 3), []
    for given in ((1, 3, 8, 8), [torch.ones(1)], {"x": torch.ones(1)}, (torch.ones(1), "2")):
        for function in (lambda x: ai3_ops.optimize(model, x), lambda x: ai3_ops.swap(model, "default", x)):
            with pytest.raises(RuntimeError, match=re.escape("running the model on the example inputs (")) as error:
                function(given)
            said.append(str(error.value).partition(": ")[2])
        assert said[-1] == said[-2]
