"""Recurrent layers along rows of images: the graph has their operators alone, and states for the example's rows."""

import pytest
import torch
from nets import optimized
from torch import nn

import ai3_ops
from ai3_ops.optimizing.states import StatesChecked


class Rows(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.rows = kind(16, 8, batch_first=True, bidirectional=True)

    def forward(self, x):
        y = self.first(x).relu().permute(0, 2, 3, 1)
        r = self.rows(y.flatten(0, 1))[0]
        return self.last(r.reshape(*y.shape[:3], 16).permute(0, 3, 1, 2))


@pytest.mark.filterwarnings("ignore:.*(planned anew|its programs)")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_other_sizes(kind):
    torch.manual_seed(0)
    model = Rows(kind).eval()
    fast = optimized(model, torch.randn(1, 4, 16, 16), selectors="default")
    assert not fast._ai3_report.left
    with torch.no_grad():
        for shape in ((3, 4, 16, 16), (1, 4, 24, 20), (1, 4, 12, 8), (2, 4, 64, 9)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_several_sizes():
    model = Rows(nn.LSTM).eval()
    examples = [torch.randn(1, 4, 16, 16), torch.randn(1, 4, 40, 24)]
    fast = ai3_ops.optimize(model, examples, "default", progress=False)
    with torch.no_grad():
        for x in examples:
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_states_of_another_batch_are_refused(batch_first):
    layer = nn.LSTM(4, 3, batch_first=batch_first)

    def call(rows):
        x = torch.randn((rows, 5, 4) if batch_first else (5, rows, 4))
        states = [torch.zeros(1, 2, 3)] * 2
        return torch.ops.aten.lstm.input(x, states, layer._flat_weights, True, 1, 0.0, False, False, batch_first)[0]

    with torch.no_grad(), StatesChecked():
        assert call(2).shape == ((2, 5, 3) if batch_first else (5, 2, 3))
        with pytest.raises(RuntimeError, match=r"lstm of .* with states \[\(1, 2, 3\)"):
            call(6)
