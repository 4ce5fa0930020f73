"""The activations that operators, programs and steps of networks apply, by the names that they have there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPED = ("prelu", "leaky_relu", "elu")  # those with a slope (elu: its alpha), of all output channels or one each


def _prelu(x: Tensor, slope: Any) -> Tensor:
    return F.prelu(x, slope)


# activation(x, parameter), by PyTorch. Only the sloped ones have a parameter: a number, or for prelu a tensor of one or C.
ACTIVATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "none": lambda x, _: x,
    "relu": lambda x, _: F.relu(x),
    "relu6": lambda x, _: F.relu6(x),
    "hardswish": lambda x, _: F.hardswish(x),
    "silu": lambda x, _: F.silu(x),
    "gelu": lambda x, _: F.gelu(x),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "hardsigmoid": lambda x, _: F.hardsigmoid(x),
    "tanh": lambda x, _: torch.tanh(x),
    "gelu_tanh": lambda x, _: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "prelu": _prelu,
}
