"""What torch.ao.quantization, which knows modules by their types, makes of swapped models."""

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.nn import quantized
from torch.ao.quantization.quantize_fx import prepare_fx

from ai3_ops import swap

X = torch.randn(2, 3, 9, 9)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.dequant(self.last(torch.relu(self.head(self.body(self.quant(x)).mean((2, 3))))))


@pytest.fixture
def model():
    return Net().eval()


def swapped_of(model):
    return swap(model, {"conv2d": "im2col", "linear": "gemm", "relu": "direct"}, X)


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        (None, (quantized.dynamic.Linear, quantized.dynamic.Linear)),
        ({nn.Linear}, (quantized.dynamic.Linear, quantized.dynamic.Linear)),
        ({"last"}, (nn.Linear, quantized.dynamic.Linear)),
    ],
)
def test_dynamic(model, asked, kinds):
    swapped = swapped_of(model)
    made = quantization.quantize_dynamic(swapped, asked)
    assert (type(made.head), type(made.last)) == tuple(type(swapped.head) if k is nn.Linear else k for k in kinds)
    assert type(made.body[0]) is type(swapped.body[0])  # what is not quantized stays swapped
    with torch.no_grad():
        torch.testing.assert_close(made(X), quantization.quantize_dynamic(model, asked)(X), rtol=0.1, atol=0.02)
    assert not hasattr(swapped.head, "qconfig")


def test_static(model):
    outputs = []
    for one in (model, swapped_of(model)):
        one = copy.deepcopy(one)
        one.qconfig = quantization.default_qconfig
        one.last.qconfig = None
        prepared = quantization.prepare(one)
        with torch.no_grad():
            prepared(X)
        made = quantization.convert(prepared)
        assert isinstance(made.body[0], quantized.Conv2d)
        assert isinstance(made.head, quantized.Linear)
        made.last, made.dequant = made.dequant, nn.Identity()
        del one.last.qconfig
        assert not hasattr(one.last, "qconfig")
        outputs.append(made.body(made.quant(X)).dequantize())
    torch.testing.assert_close(*outputs, rtol=0.1, atol=0.1)


def test_graphs_are_refused(model):
    with pytest.raises(RuntimeError, match=r"knows no swapped layers: .*unswap"):
        prepare_fx(swapped_of(model), quantization.get_default_qconfig_mapping(), (X,))
