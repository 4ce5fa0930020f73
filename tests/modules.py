"""Modules that call operators, and what the tests of models share."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tester import ALGORITHMS, DEVICES, stands_for_its_like
from torch import Tensor, nn

from ai3_ops import Algorithm, _library, explain, registry, swap
from ai3_ops.checking import cases
from ai3_ops.checking.calling import has_gradients
from ai3_ops.checking.cases import DTYPES, Call
from ai3_ops.registry import AlgorithmInfo

EVERY = {
    "conv2d": "direct", "linear": "gemm", "max_pool2d": "direct", "avg_pool2d": "direct",
    "adaptive_avg_pool2d": "direct", "relu": "direct", "flatten": "direct",
}  # fmt: skip
each_device = pytest.mark.parametrize("device", DEVICES)
# What does not depend on the dtype, but for its kernels, which other tests call.
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d == "float32" else pytest.mark.full) for d in DTYPES]
)


def layers(model):
    return {layer.name: layer for layer in explain(model).layers}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Modes(nn.Module):
    def forward(self, x):
        return F.relu(x) if self.training else F.relu(x - 1) + F.relu(x)


def batched_call(info: AlgorithmInfo, dtype: str) -> Call | None:
    """A supported call of the tester whose input has a batch dimension, with all tensors and as many arguments as there are.

    None where this machine supports none, as oneDNN on processors without instructions for float16.
    """
    some = [c for c in cases.calls(info, dtypes=(dtype,)) if all(s is not None and 0 not in s for s in c.case.shapes)]
    if not some:
        return None
    # What also takes unbatched inputs has them one rank lower.
    call = max(some, key=lambda c: (len(c.case.shapes[0] or ()), len(c.case.arguments)))
    return dataclasses.replace(call, case=dataclasses.replace(call.case, layouts=()))


class Layer(nn.Module):
    """A call on any input; the call's other tensors are parameters, of which statistics need no gradients."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.operator = call.info.operator
        count, names = len(call.tensors), [f"tensor_{i}" for i in range(len(call.tensors))]
        arguments = cases.operator_arguments(call.info, call.case.arguments)
        self.order = cases.arranged(call.info.operation, names, arguments)
        self.places = {i: names.index(a) for i, a in enumerate(self.order) if isinstance(a, str)}
        assert len(self.places) == count
        for i, (tensor, has) in enumerate(zip(call.tensors, has_gradients(call), strict=True)):
            if i > 0:
                self.register_parameter(f"tensor_{i}", None if tensor is None else nn.Parameter(tensor, has))
        self.options = {}
        for name, value in call.options(*call.tensors).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                self.options[name] = value

    def forward(self, input: Tensor) -> Tensor:
        tensors = [input, *self._parameters.values()]
        ordered = (tensors[self.places[i]] if i in self.places else a for i, a in enumerate(self.order))
        return self.operator(*ordered, **self.options, **self._buffers)


class EveryOperator(nn.Module):
    """Every operator of a device that computes in a dtype, and in others, each with an input of its own; or of its like one.

    All of any batch: not those whose other tensors have the input's batch, too (attention's key and value).
    """

    def __init__(self, device: str, dtype: str, *others: str, every: bool = True) -> None:
        super().__init__()
        infos = [a for a in ALGORITHMS if a.device == device and (every or stands_for_its_like(a))]
        infos = [a for a in infos if all(batched_call(a, other) for other in others)]
        infos = [a for a in infos if "kv_heads" not in _library.size_names(a.operation)]
        self.calls = {f"{a.operation}_{a.name}": call for a in infos if (call := batched_call(a, dtype))}
        self.layers = nn.ModuleDict({name: Layer(call) for name, call in self.calls.items()})

    def inputs(self, batch: int = 2, larger: int = 0) -> tuple[Tensor, ...]:
        """One for each layer; images are `larger` in height and width than the tester's."""
        generator = torch.Generator().manual_seed(batch)
        made = []
        for call in self.calls.values():
            _, *sizes = call.case.shapes[0] or ()
            if "in_height" in _library.size_names(call.info.operation):
                sizes[-2:] = (size + larger for size in sizes[-2:])
            made.append(torch.randn(batch, *sizes, generator=generator).to(call.info.device, call.dtype))
        return tuple(made)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers.values(), inputs, strict=True))


class Net(nn.Module):
    """A network with every operation, some as functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        return self.head(F.avg_pool2d(torch.relu(self.depthwise(x)) + x, 2))


def swapped_net(device: str) -> tuple[Net, nn.Module]:
    """A network, and the same with an algorithm for every call, one of them with other algorithms for its gradients."""
    net = Net().to(device)
    selectors = dict.fromkeys(registry.operations(), "default")
    return net, swap(net, {**selectors, "stem": Algorithm("direct", backward_input="direct")})


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """The same operators on the same values: equal to the last bit, in the same layout."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)
        assert a.stride() == e.stride()
