"""conv1d: y[n, k, i] = bias[k] + sum over c, r of weight[k, c, r] * x[n, c, i*stride + r*dilation - padding]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library, registry
from ai3_ops.operations.case import CHANNELS, HUGE, LARGEST, BadCall, Case, Draw
from ai3_ops.operations.conv2d import Conv2d, Conv2dCall, conv, of_module


class Conv1d(Conv2d):
    """Rules of `ai3::conv1d_<algorithm>`, as torch.nn.functional.conv1d: those of conv2d in one dimension."""

    name = "conv1d"
    aten = staticmethod(F.conv1d)
    names = (("in_length",), ("kernel_length",), ("stride",), ("padding",), ("dilation",))
    shapes = ("(N, C, L)", "(C, L)", "kernel_length")

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    cases = (
        conv((2, 4, 9), (6, 4, 3), padding=1),
        conv((1, 3, 17), (4, 3, 5), bias=False),
        conv((2, 6, 40), (4, 3, 3), padding=1, groups=2),
        conv((4, 33), (7, 4, 3), padding=(2,)),
        conv((0, 4, 6), (2, 4, 3)),
        conv((1, 1, 5), (1, 1, 3)),
        conv((2, 16, 50), (16, 1, 5), 2, 3, 2, 16),
        conv((1, 33, 29), (34, 33, 1)),
        conv((2, 5, 31), (7, 5, 4), (3,), (5,), (2,)),
        conv((2, 4, 13), (6, 2, 3), 3, groups=2),
        conv((1, 18, 25), (17, 18, 7), padding=3),
        conv((2, 3, 90), (4, 3, 40), 1, 20),
        conv((1, 2, 300), (8, 2, 140), 1, 70),
        *(conv((2, 4, 19), (6, 4, 3), padding=1, layouts=(at,) * 3) for at in ("transposed", "sliced", "expanded")),
    )
    layers = (
        conv((1, 80, 300), (384, 80, 3), padding=1),
        conv((1, 384, 300), (384, 384, 3), 2, 1),
        conv((1, 1, 16000), (64, 1, 10), 5, bias=False),
        conv((4, 128, 200), (128, 128, 1)),
        conv((1, 256, 400), (256, 1, 31), padding=15, groups=256),
        conv((1, 768, 499), (768, 48, 128), padding=64, groups=16),
        conv((1, 7, 512), (128, 7, 16), 16),
    )

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """None: benchmarks leave it out."""
        return ""

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        pick = draw.pick
        kernel, length = pick((1, 1, 2, 3, 3, 3, 5, 7, 10, 31)), pick((1, 7, 16, 31, 64, 200, 1000))
        stride, dilation, groups = pick((1, 1, 1, 2, 3)), pick((1, 1, 1, 2, 3)), pick((1, 1, 1, 2, 4, 0))
        padding = pick((0, dilation * (kernel - 1) // 2, kernel - 1))
        if draw.chance(0.1):  # patches that follow one another
            stride, padding, dilation = kernel, 0, 1
        channels, filters = pick(CHANNELS), pick(CHANNELS)
        if groups == 0:  # depthwise
            groups, filters = channels, channels * pick((1, 1, 2))
        else:
            channels, filters = channels * groups, filters * groups
        x, weight = (draw.image[0], channels, length), (filters, channels // groups, kernel)
        return conv(x, weight, stride, padding, dilation, groups, bias=draw.chance(0.5))

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w, b = new(1, 4, 6), new(6, 4, 3), new(6)
        yield "too many input channels", [new(1, 5, 6), w, b], []
        yield "input of rank 1", [new(6), w, b], []
        yield "input of rank 4", [new(1, 1, 4, 6), w, b], []
        yield "weight of rank 4", [x, new(6, 4, 3, 3), b], []
        yield "weight of another dtype", [x, new(6, 4, 3, dtype=other), None], []
        yield "bias of wrong size", [x, w, new(5)], []
        yield "integer tensors", [x.int(), w.int(), None], []
        yield "kernel larger than the padded input", [x, new(6, 4, 7), b], []
        yield "no elements", [new(1, 4, 0), w, b], [[1], [2]]
        yield "empty kernel", [x, new(6, 4, 0), b], []
        yield "stride 0", [x, w, b], [[0]]
        yield "stride of 2 elements", [x, w, b], [[1, 1]]
        yield "negative padding", [x, w, b], [[1], [-1]]
        yield "dilation beyond 32 bits", [x, w, b], [[1], [0], [HUGE]]
        yield "large dilation", [x, w, b], [[1], [0], [LARGEST]]
        yield "groups 0", [x, w, b], [[1], [0], [1], 0]
        yield "groups that do not divide", [x, new(6, 1, 3), b], [[1], [0], [1], 4]


# Calls in models ------------------------------------------------------------------------------------------------------
# Products of a call below which nothing gains, and below which `direct` does not; elements of an input beyond which strides
# gain nothing with it.
_FEW, _PRODUCTS, _LARGE = 2**20, 2**21, 3 * 2**19
# Whether `direct` gains: with AVX2 PyTorch's are faster (docs/algorithms/conv1d/default.md).
_DIRECT_GAINS = _library.registry()["level"] == "avx512"
# Where csrc/algos/conv1d/default.cpp takes what saves work: channels and filters of a group; taps of `fft`, and with few
# channels, and filters then; filters of each channel of `depthwise`. F(4, 3) of `winograd` gains from more channels on.
_CHANNELS, _FILTERS = 16, 32 if _DIRECT_GAINS else 16
_MANY_TAPS, _LONG_TAPS, _LONG_FILTERS, _MULTIPLIER, _WINOGRADS_CHANNELS = 7, 96, 32, 2, 80


def _number(stride: Any) -> int:
    """As a number; 0 for what is none, which the operator refuses."""
    if isinstance(stride, (list, tuple)):
        stride = stride[0] if len(stride) == 1 else None
    try:
        return stride if isinstance(stride, int) else index(stride)
    except TypeError:
        return 0


class Conv1dCall(Conv2dCall):
    """torch.nn.functional.conv1d."""

    operation = "conv1d"
    functions = (F.conv1d,)
    function = torch.conv1d
    modules: ClassVar = {nn.Conv1d: of_module}
    why_left = (
        "PyTorch is faster for some calls, or the rule was not measured: with few products, no method that saves some, autocast, "
        "or another type than float32 (docs/algorithms/conv1d/default.md)"
    )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for (docs/algorithms/conv1d/default.md)."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """In float32, by methods that save work; with AVX-512 also `direct`, without groups, where there is much to compute."""
        input, weight = args[:2]
        if input.device.type != "cpu" or weight.ndim != 3 or input.ndim not in (2, 3):
            return True  # or the operator refuses it
        if registry.preferred.get(self.operation) is not None:  # the user's choice
            return True
        if torch.is_autocast_enabled("cpu") or input.dtype != torch.float32 or weight.dtype != torch.float32:
            return False
        step, spacing, groups = _number(args[3]), _number(args[5]), args[6]
        if step < 1 or spacing < 1 or groups < 1:
            return True
        channels, taps, filters = weight.shape[1], weight.shape[2], weight.shape[0] // groups
        if groups > 1 and channels == 1:
            return bool(taps > 1 and filters <= _MULTIPLIER)
        products = input.numel() // step * filters * taps
        if taps == 1 or products < _FEW:
            return False
        if self._transforms(input.shape[-1], channels, filters, taps, step, spacing):
            return True
        direct = _DIRECT_GAINS and groups == 1 and (step == 1 or input.numel() < _LARGE)
        return bool(direct and products >= _PRODUCTS)

    @staticmethod
    def _transforms(length: int, channels: int, filters: int, taps: int, step: int, spacing: int) -> bool:
        """Whether `fft` or `winograd` saves enough."""
        if channels < _CHANNELS or filters < _FILTERS:
            return bool(taps >= _LONG_TAPS and step == spacing == 1 and filters >= _LONG_FILTERS)
        if taps == 3 and step == spacing == 1:
            return channels >= _WINOGRADS_CHANNELS
        return taps >= _MANY_TAPS and (spacing == 1 or length // spacing >= 2 * taps)

    def gains_unpacked(self, args: tuple[Any, ...]) -> bool:
        """Never."""
        return False

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """Not measured: PyTorch computes training steps."""
        return False
