"""Swapped networks run in channels_last, unless their code may need NCHW activations."""

import pytest
import torch
from torch import nn

import ai3_ops
from ai3_ops.nn import layout
from ai3_ops.operations.base import is_channels_last


def flat(x):
    return x.view(x.shape[0], -1)


class Views(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.conv(x)) if self.function else flat(self.conv(x)))


class Splits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y.view(y.shape[0], 2, 2, *y.shape[2:]).sum(1)


X = torch.randn(2, 3, 8, 8)


def test_nchw_images_become_channels_last_at_the_first_convolution():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    swapped = ai3_ops.swap(model, "default")
    with torch.no_grad():
        y = swapped(X)
        assert is_channels_last(y)
        torch.testing.assert_close(y, model(X), rtol=1e-4, atol=1e-4)
    assert all(is_channels_last(m.weight) for m in (swapped[0], swapped[2]))
    assert not is_channels_last(model[0].weight)
    for name, value in model.state_dict().items():
        assert torch.equal(swapped.state_dict()[name], value)


@pytest.mark.parametrize("examples", [None, X])
def test_code_that_views_activations_goes_on_working(examples):
    model = Views(None)
    assert layout.viewers(model) == ["Views"]
    swapped = ai3_ops.swap(model, "direct", examples)
    assert not is_channels_last(swapped.conv.weight)
    torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)
    assert ai3_ops.explain(swapped).layers[0].calls == 1


def test_views_that_channels_last_allows_are_found_out_with_example_inputs():
    model = Splits()
    assert not is_channels_last(ai3_ops.swap(model, "direct").conv.weight)
    swapped = ai3_ops.swap(model, "direct", X)
    assert is_channels_last(swapped.conv.weight)
    torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)


def test_inference_tensors_and_shared_weights():
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        model[1].weight = model[0].weight
        swapped = ai3_ops.swap(model, "direct")
        assert swapped[0].weight is swapped[1].weight
        assert is_channels_last(swapped[0].weight)
        x = torch.randn(1, 4, 8, 8)
        torch.testing.assert_close(swapped(x), model(x), rtol=1e-4, atol=1e-4)
