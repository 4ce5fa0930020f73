"""The steps that a rewritten network is made of: each a plain function, computed here by PyTorch.

Passes turn the nodes of a captured fx graph into calls of these functions, and `lower` turns runs of them into one C++
program. As every step can be computed here, a graph can be run, in float64 too, before and after every rewrite.

Images are (N, C, H, W), rows (N, F); linear takes any number of leading dimensions, and views values of any rank. Sequences
(N, C, L) of convolutions and pools are images of one row (`ai3_ops.graph.sequences`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ai3_ops.operations.activations import ACTIVATIONS
from ai3_ops.operations.step import RULES as RULES
from ai3_ops.operations.step import Step, computed

Pair = tuple[int, int]


def unary(input: Tensor, name: str, parameter: float | Tensor | None = None, *, algorithm: str = "default") -> Tensor:
    """Element by element: one of ACTIVATIONS. `algorithm` is relu's."""
    if name == "relu":
        return _computes("relu", algorithm, input)(input)
    return ACTIVATIONS[name](input, parameter)


def binary(
    input: Tensor, other: Tensor, name: str, *, activation: str = "none", parameter: Tensor | float | None = None
) -> Tensor:
    """Name is "add" or "mul"; `other` is broadcast to the input's sizes: (N, C, 1, 1) beside an image, or a table."""
    return ACTIVATIONS[activation](input + other if name == "add" else input * other, parameter)


def affine(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    activation: str = "none",
    parameter: Tensor | float | None = None,
) -> Tensor:
    """activation(scale * x + shift), scale and shift (C): what batch normalization is after training."""
    if input.ndim == 4:
        scale, shift = scale[:, None, None], shift[:, None, None]
    return ACTIVATIONS[activation](torch.addcmul(shift, input, scale), parameter)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "conv1d": F.conv1d,
    "conv2d": F.conv2d,
    "linear": F.linear,
    "max_pool2d": F.max_pool2d,
    "avg_pool2d": F.avg_pool2d,
    "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "relu": F.relu,
    "flatten": torch.flatten,
}


def _computes(operation: str, algorithm: str, input: Tensor) -> Callable[..., Tensor]:
    return computed(operation, _FUNCTIONS[operation], algorithm, input)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    *,
    activation: str = "none",
    parameter: Tensor | float | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    input_relu: bool = False,
    sequence: bool = False,
    algorithm: str = "default",
) -> Tensor:
    """activation(conv2d(prologue(x)) + bias + residual), prologue relu(scale * x + shift) before padding.

    `sequence`: the image's one row is what a call of conv1d reads, for which selectors choose, among conv1d's algorithms.
    """
    if scale is not None and shift is not None:
        input = affine(input, scale, shift)
    if input_relu:
        input = F.relu(input)
    if sequence:
        row, window = (input.squeeze(2), weight.squeeze(2), bias), (stride[1:], padding[1:], dilation[1:], groups)
        output = _computes("conv1d", algorithm, input)(*row, *window).unsqueeze(2)
    else:
        output = _computes("conv2d", algorithm, input)(input, weight, bias, stride, padding, dilation, groups)
    return ACTIVATIONS[activation](output if residual is None else output + residual, parameter)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    parameter: Tensor | float | None = None,
    residual: Tensor | None = None,
    algorithm: str = "default",
) -> Tensor:
    """activation(x weight^T + bias + residual), x (..., F)."""
    output = _computes("linear", algorithm, input)(input, weight, bias)
    return ACTIVATIONS[activation](output if residual is None else output + residual, parameter)


def max_pool2d(
    input: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
    *,
    sequence: bool = False,
    algorithm: str = "default",
) -> Tensor:
    """As torch.nn.functional.max_pool2d; `sequence`: of max_pool1d, for which no selector chooses (other pools alike)."""
    return _computes("max_pool2d", algorithm, input)(input, kernel_size, stride, padding, dilation, ceil_mode)


def avg_pool2d(
    input: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    sequence: bool = False,
    algorithm: str = "default",
) -> Tensor:
    """As torch.nn.functional.avg_pool2d."""
    window = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _computes("avg_pool2d", algorithm, input)(input, *window)


def adaptive_avg_pool2d(
    input: Tensor, output_size: Pair, *, sequence: bool = False, algorithm: str = "default"
) -> Tensor:
    """As torch.nn.functional.adaptive_avg_pool2d."""
    return _computes("adaptive_avg_pool2d", algorithm, input)(input, output_size)


def concat(inputs: Sequence[Tensor]) -> Tensor:
    """Along the channels."""
    return torch.cat(list(inputs), 1)


def slice_channels(input: Tensor, start: int, stop: int) -> Tensor:
    """Channels start to stop."""
    return input[:, start:stop]


def flatten(input: Tensor, *, algorithm: str = "default") -> Tensor:
    """(N, C, H, W) to (N, C * H * W)."""
    return _computes("flatten", algorithm, input)(input, 1)


# Views: the same elements with other sizes, in another order, or a part of them. Programs move nothing for them where what reads
# them can read them as they lie. Numbers fit every batch size: -1 is the dimension that has the batch in it.
def reshape(input: Tensor, sizes: Sequence[int]) -> Tensor:
    """As torch.reshape; a size of 0 keeps the dimension in its place."""
    more = len(sizes) - input.ndim
    if (
        more
        and all(n < 1 for n in sizes[: input.ndim])
        and set((*sizes[input.ndim :], *input.shape[len(sizes) :])) == {1}
    ):
        for _ in range(abs(more)):  # without the sizes, which a traced graph would hold
            input = input.unsqueeze(-1) if more > 0 else input.squeeze(-1)
        return input
    return input.reshape(*(n or input.shape[d] for d, n in enumerate(sizes)))


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    """As torch.permute."""
    return input.permute(*dims)


def cut(input: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Elements start to stop of a dimension."""
    return input.narrow(dim, start, stop - start)


def expand(input: Tensor, sizes: Sequence[int], like: Tensor | None = None) -> Tensor:
    """As torch.Tensor.expand, without new dimensions; a size of 0 is `like`'s first one, the batch."""
    return input.expand(*(like.shape[0] if size == 0 and like is not None else size for size in sizes))


def roll(input: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Tensor:
    """As torch.roll."""
    return torch.roll(input, tuple(shifts), tuple(dims))


def join(inputs: Sequence[Tensor], dim: int) -> Tensor:
    """Along a dimension."""
    return torch.cat(list(inputs), dim)


VIEWS: tuple[Callable[..., Tensor], ...] = (reshape, permute, cut, expand)
STEPS: tuple[Callable[..., Tensor], ...] = (
    conv2d, linear, max_pool2d, avg_pool2d, adaptive_avg_pool2d, unary, binary, affine, concat, slice_channels, flatten,
    *VIEWS, roll, join, *Step.by_function,
)  # fmt: skip
