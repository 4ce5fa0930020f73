"""avg_pool2d: the mean of each window, padding counted or not, or the sum over a given divisor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations.base import Problem
from ai3_ops.operations.pooling import Pooling, window_problem


class AvgPool2d(Pooling):
    """Rules of `ai3::avg_pool2d_<algorithm>`, as torch.nn.functional.avg_pool2d."""

    name = "avg_pool2d"
    aten = staticmethod(torch.nn.functional.avg_pool2d)

    def problem(
        self,
        label: str,
        input: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        **_: Any,
    ) -> Problem:
        """Input (N, C, H, W) or (C, H, W); RuntimeError for what does not fit."""
        return window_problem(
            label, input, kernel_size, stride, padding, 1, ceil_mode, count_include_pad, divisor_override
        )

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten.avg_pool2d_backward(grad, *ctx.saved_tensors, *ctx.arguments),)
