"""Weights that a layer computes at every call: by PyTorch's weight_norm, spectral_norm, pruning, or a parametrization."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm

import ai3_ops

NORMS = {
    "weight_norm": (torch.nn.utils.weight_norm, remove_weight_norm),
    "spectral_norm": (torch.nn.utils.spectral_norm, remove_spectral_norm),
    "pruning": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
    "parametrized weight_norm": (
        parametrizations.weight_norm,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
    "parametrized spectral_norm": (
        parametrizations.spectral_norm,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attribute self.weight was assigned during export"),
    pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated.*"),
]
each_norm = pytest.mark.parametrize("norm", NORMS)


def close(a, b):
    """Up to rounding: spectral_norm's weights are large before it was trained."""
    return (a - b).abs().max() <= 1e-4 * b.abs().max()


def network(norm):
    torch.manual_seed(0)
    wrap = NORMS[norm][0]
    sequence = wrap(nn.Conv1d(16, 64, 3)), nn.Flatten(1)
    images = nn.Sequential(wrap(nn.Conv2d(4, 16, 3, padding=1)), nn.ReLU(), wrap(nn.Conv2d(16, 16, 3)), nn.Flatten(2))
    return nn.Sequential(images, wrap(nn.Linear(18 * 18, 302)), *sequence)


X = torch.randn(2, 4, 20, 20, generator=torch.Generator().manual_seed(1))


@each_norm
def test_a_fresh_model_can_be_swapped_and_trains(norm):
    """Its hooks have computed a weight that has a graph, which PyTorch's deepcopy refuses."""
    model = network(norm).train(norm not in ("spectral_norm", "parametrized spectral_norm"))
    swapped = ai3_ops.swap(model, "default")
    for m in (model, swapped):
        m(X).square().sum().backward()
    grads = [dict((n, p.grad) for n, p in m.named_parameters()) for m in (model, swapped)]
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert (grad - grads[1][name]).abs().max() <= 1e-4 * grad.abs().max(), name


@each_norm
def test_default_leaves_what_it_would_pack_at_every_call_and_says_what_to_do(norm):
    model = network(norm).eval()
    with torch.no_grad():
        expected = model(X)
        for swapped in (ai3_ops.swap(model, "default", X), ai3_ops.swap(model, "default")):
            for _ in range(2):
                assert close(swapped(X), expected)
            layers = [a for a in ai3_ops.explain(swapped).layers if "computed" in a.reason or "every call" in a.reason]
            assert [a.operation for a in layers][:3] == ["conv2d", "conv2d", "linear"]
            for layer in layers:
                assert layer.used == "torch" or layer.torch_calls == layer.calls == 2
                assert "first" in layer.reason
                assert layer.packed_bytes == 0 or layer.packs != "kept"
        for layer in model.modules():
            if hasattr(layer, "weight"):
                NORMS[norm][1](layer)
        plain = ai3_ops.swap(model, "default", X)
        plain(X)
        assert all("first" not in a.reason for a in ai3_ops.explain(plain).layers)


@each_norm
@pytest.mark.parametrize("run", ["compiled", "exported"])
def test_programs_leave_it_too(norm, run):
    layer = NORMS[norm][0](nn.Conv2d(4, 16, 3, padding=1)).eval()
    with torch.no_grad():
        expected = layer(X)
        swapped = ai3_ops.swap(layer, "default")
        if run == "exported":
            program = torch.export.export(swapped, (X,))
            assert not [node for node in program.graph.nodes if str(node.target).startswith("ai3.")]
            call = program.module()
        else:
            torch.compiler.reset()
            call = torch.compile(swapped, backend="aot_eager")
        assert close(call(X), expected)


@each_norm
def test_many_pixels_are_worth_a_pack_for_each_call(norm):
    layer, x = NORMS[norm][0](nn.Conv2d(16, 16, 3, padding=1)).eval(), torch.randn(1, 16, 40, 40)
    with torch.no_grad():
        expected = layer(x)
        swapped = ai3_ops.swap(layer, "default", x)
        assert close(swapped(x), expected)
    (found,) = ai3_ops.explain(swapped).layers
    assert (found.used, found.packs, found.torch_calls) == ("winograd_f4", "each call", 0)
    assert "first, and its pack is kept" in found.reason


@each_norm
def test_optimize_computes_the_weights_once(norm):
    model = network(norm).eval()
    with torch.no_grad():
        expected = model(X)
        optimized = ai3_ops.optimize(model, X, "default", progress=False)
        assert close(optimized(X), expected)
        assert close(model(X), expected)
    report = ai3_ops.explain(optimized).optimization
    assert not report.left
    assert {"conv2d", "linear"} <= {step.operation for part in report.parts for step in part.steps}
    assert optimized.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(optimized).state_dict().keys() == model.state_dict().keys()


def test_a_frozen_tensor_is_no_computed_weight():
    """A buffer, and a parametrization's cache, are the same tensor at every call, whose pack is kept."""

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kernel", torch.randn(64, 64, 3, 3))

        def forward(self, x):
            return nn.functional.conv2d(x, self.kernel)

    x = torch.randn(1, 64, 9, 9)
    with torch.no_grad():
        swapped = ai3_ops.swap(Fixed(), "default", x)
        for _ in range(5):
            torch.testing.assert_close(swapped(x), nn.functional.conv2d(x, swapped.kernel), rtol=1e-4, atol=1e-3)
        (layer,) = ai3_ops.explain(swapped).layers
        assert (layer.packs, layer.torch_calls) == ("kept", 1)
        assert swapped._ai3.conv2d_0.packs.made == 1


def test_what_cannot_be_copied_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].scaled = model[0].weight * 2
    for function in (ai3_ops.swap, lambda m: ai3_ops.optimize(m, torch.randn(1, 3, 8, 8), progress=False)):
        with pytest.raises(RuntimeError, match=r"cannot be copied \(0\.scaled has a graph of gradients"):
            function(model)


def test_weights_without_a_version_are_named():
    with torch.inference_mode():
        swapped = ai3_ops.swap(nn.Conv2d(64, 64, 3), "default")
        x = torch.randn(1, 64, 9, 9)
        swapped(x)
        assert "have no version" in str(ai3_ops.explain(nn.Sequential(swapped)))
