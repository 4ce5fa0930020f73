"""Layers that are alike share one export; what a trace could see keeps them apart."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from nets import optimized, seeded
from test_generating import decoder, generates_the_same, ids, optimized_layers
from torch import nn

import ai3_ops
from ai3_ops.graph.alike import differing
from ai3_ops.graph.network import difference


@pytest.fixture
def exports(monkeypatch):
    """What torch.export was called with."""
    found, export = [], torch.export.export

    def counted(module, *args, **kwargs):
        found.append(module)
        return export(module, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return found


class Layer(nn.Module):
    def __init__(self, index=0, features=16):
        super().__init__()
        self.index, self.settings = index, {"kind": "plain", "widths": [features, 24]}
        self.norm, self.up, self.down = nn.LayerNorm(features), nn.Linear(features, 24), nn.Linear(24, features)
        self.register_buffer("scales", torch.ones(features))
        self.register_buffer("order", torch.arange(features))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)[..., self.order] * self.scales)))


class Stack(nn.Module):
    """Captured in parts, since what it returns decides what it computes."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if x.sum() > 0 else -x


def of_parts(model, x):
    fast = optimized(model, x, selectors="default")
    with torch.no_grad():
        for given in (x, torch.randn(3, *x.shape[1:])):
            assert difference(fast(given), copy.deepcopy(model).double()(given.double())) < 1e-5
    return fast


def layers(count=5, change=lambda layer: None):
    made = [Layer(i) for i in range(count)]
    change(made[2])
    return seeded(Stack(made))


def test_one_export_for_layers_and_one_without_their_numbers(exports):
    fast = of_parts(layers(), torch.randn(2, 6, 16))
    assert len(optimized_layers(fast)) == 5
    assert [type(module) for module in exports].count(Layer) == 2


def scaled(layer):
    layer.forward = lambda x: 2 * Layer.forward(layer, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "up", nn.Linear(16, 24, bias=False)),
        lambda layer: setattr(layer.norm, "eps", 0.1),
        lambda layer: layer.settings["widths"].append(3),
        lambda layer: layer.order.copy_(torch.arange(15, -1, -1)),
        lambda layer: setattr(layer, "down", nn.Sequential(nn.Linear(24, 16))),
        lambda layer: setattr(layer, "table", torch.ones(3)),
        lambda layer: setattr(layer.up, "weight", nn.Parameter(torch.randn(16, 24).t())),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        scaled,
    ],
)
def test_what_sets_layers_apart(change):
    made = [Layer(), Layer()]
    assert differing(*made) == frozenset()
    change(made[1])
    assert differing(*made) is None


def test_what_is_one_object_in_one_of_them():
    tied = [Layer(), Layer()]
    tied[1].up.bias = nn.Parameter(torch.zeros(16))
    tied[0].up.bias = nn.Parameter(torch.zeros(16))
    assert differing(*tied) == frozenset()
    tied[1].up.bias = tied[1].down.bias
    assert differing(*tied) is None


def test_functions_and_objects_that_layers_hold():
    class Settings:
        def __init__(self, rate):
            self.rate, self.kinds = rate, ("a", None)

    made = [Layer(), Layer()]
    for layer, settings in zip(made, (Settings(0.5), Settings(0.5)), strict=True):
        layer.settings, layer.act = settings, functools.partial(F.gelu, approximate="tanh")
        layer.own = layer.norm.forward
    assert differing(*made) == frozenset()
    made[1].act = functools.partial(F.gelu, approximate="none")
    assert differing(*made) is None
    made[1].act = made[0].act
    made[1].settings.rate = 1
    assert differing(*made) is None


def test_numbers_are_named():
    made = [Layer(0), Layer(1)]
    made[1].norm.other = made[0].norm.other = 1
    assert differing(*made) == {("", "index")}
    made[1].norm.other = 2
    assert differing(*made) == {("", "index"), ("norm", "other")}


class Decides(Layer):
    """Its number scales what it computes."""

    def forward(self, x):
        return super().forward(x) * (1 + self.index)


class Selects(Layer):
    """Its number says beyond which length it computes something else."""

    def forward(self, x):
        return super().forward(x) * (2 if self.index and x.shape[1] > 6 + self.index else 1)


@pytest.mark.parametrize("kind", [Decides, Selects])
def test_numbers_that_decide_are_seen(kind, exports):
    model, x = seeded(Stack([kind(i) for i in range(4)])), torch.randn(2, 6, 16)
    fast = of_parts(model, x)
    assert [type(module) for module in exports].count(kind) >= 4
    with torch.no_grad():
        for length in (7, 8, 9):
            given = torch.randn(1, length, 16)
            assert difference(fast(given), copy.deepcopy(model).double()(given.double())) < 1e-5


def test_layers_that_hand_their_number_to_a_cache(exports):
    model = decoder(count=4)
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    assert len(optimized_layers(fast)) == 4
    parts = ai3_ops.explain(fast).optimization.parts
    calls = [part for part in parts if part.name.startswith("layers.0")]  # a prompt, steps with masks and without
    assert len([module for module in exports if type(module).__name__ == "Opened"]) == 2 * len(calls)
    assert not [module for module in exports if isinstance(module, type(model))]  # which returns a cache
    generates_the_same(model, fast, ids())
    with torch.no_grad():
        _, cache = fast(ids())
    assert sorted(cache.layers) == [0, 1, 2, 3]
