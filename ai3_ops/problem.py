"""A call's arguments: the checks that all operations make, and what they describe, the problem."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ai3_ops import _library, _torch


class Problem(NamedTuple):
    """A call's arguments, checked: what the registry is asked about, and what the output looks like."""

    device: str  # "cpu", "cuda:1", "meta"
    dtype: torch.dtype
    sizes: dict[str, Any]  # by the names of the operation's query; a size may be a SymInt
    shape: tuple[Any, ...]  # of the output; with a batch dimension of 1 when `unbatched`
    channels_last: bool = False
    unbatched: bool = False

    def empty(self, device: torch.device) -> Tensor:
        """The output, uninitialized."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        output = torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=layout)
        return output.squeeze(0) if self.unbatched else output


def check(condition: Any, label: str, needs: str) -> None:
    """Raises `RuntimeError("<label>: <needs>")` unless the condition (which may be symbolic) holds."""
    if condition is not True:  # PyTorch's check takes a microsecond, and a problem has some thirty
        _torch.check(condition, lambda: f"{label}: {needs}")


def check_dtype(label: str, tensor: Tensor) -> None:
    """The dtypes that any algorithm computes in."""
    check(
        tensor.dtype in _library.DTYPES,
        label,
        f"needs float64, float32, bfloat16 or float16 tensors, got {str(tensor.dtype).removeprefix('torch.')}",
    )


def check_same(label: str, input: Tensor, other: Tensor, name: str) -> None:
    """`input` and `other` have one dtype and one device."""
    check(
        input.dtype == other.dtype,
        label,
        f"needs input and {name} of one dtype, got {input.dtype} and {other.dtype}",
    )
    check(
        input.device == other.device,
        label,
        f"needs input and {name} on one device, got {input.device} and {other.device}",
    )


def check_place(label: str, output: Tensor, tensor: Tensor, name: str) -> None:
    """`tensor`, an `out` or a residual, has the output's sizes, dtype and device."""
    fits = tensor.shape == output.shape
    check(fits, label, f"needs {name} of sizes {tuple(output.shape)}, got {tuple(tensor.shape)}")
    check_same(label, output, tensor, name)


def check_workspace(label: str, output: Tensor, workspace: Tensor | None) -> None:
    """A caller's workspace is bytes on the output's device; how many it must be is seen when the operator runs."""
    if workspace is not None:
        fits = workspace.dtype == torch.uint8 and workspace.is_contiguous() and workspace.device == output.device
        what = f"{workspace.dtype} on {workspace.device}"
        check(fits, label, f"needs a contiguous uint8 tensor on the output's device as workspace, got {what}")


def spread(label: str, value: int | Sequence[int], count: int, name: str, least: int) -> tuple[int, ...]:
    """A list argument for `count` dimensions: an int or one element stands for all of them, as in ATen."""
    check(not isinstance(value, str), label, f"{name} needs numbers, got {value!r}")
    values = (value,) if isinstance(value, (int, torch.SymInt, numbers.Integral)) else tuple(value)
    if len(values) == 1:
        values *= count
    check(len(values) == count, label, f"{name} needs 1 or {count} elements, got {values}")
    most = 2**31 - 1
    check(all(least <= v <= most for v in values), label, f"{name} needs values from {least} to {most}, got {values}")
    return values


def is_contiguous(tensor: Tensor) -> bool:
    """Asked with its memory format: a question without one is a model's own, after which it may view (`layout.Watch`)."""
    return tensor.is_contiguous(memory_format=torch.contiguous_format)


def is_channels_last(*tensors: Tensor) -> bool:
    """Whether ATen would answer in channels_last for one of these 4-D tensors."""
    return any(_torch.suggest_memory_format(t) == torch.channels_last for t in tensors)
