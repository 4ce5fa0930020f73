"""max_pool2d: the largest element of each window; padding is minus infinity, NaN wins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations.base import Problem
from ai3_ops.operations.pooling import Pooling, window_problem


class MaxPool2d(Pooling):
    """Rules of `ai3::max_pool2d_<algorithm>`, as torch.nn.functional.max_pool2d."""

    name = "max_pool2d"
    aten = staticmethod(torch.max_pool2d)

    def problem(
        self,
        label: str,
        input: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        **_: Any,
    ) -> Problem:
        """Input (N, C, H, W) or (C, H, W); RuntimeError for what does not fit."""
        return window_problem(label, input, kernel_size, stride, padding, dilation, ceil_mode)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's, with the positions of the maxima found again: saving them would cost every forward pass."""
        (input,) = ctx.saved_tensors
        _, indices = torch.ops.aten.max_pool2d_with_indices(input.detach(), *ctx.arguments)
        return (torch.ops.aten.max_pool2d_with_indices_backward(grad, input, *ctx.arguments, indices),)
