"""adaptive_avg_pool2d: means of windows that divide the input as evenly as its size allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations import base
from ai3_ops.operations.base import Problem, check
from ai3_ops.operations.pooling import Pooling, batch_of


class AdaptiveAvgPool2d(Pooling):
    """Rules of `ai3::adaptive_avg_pool2d_<algorithm>`, as torch.nn.functional.adaptive_avg_pool2d."""

    name = "adaptive_avg_pool2d"
    aten = staticmethod(torch.nn.functional.adaptive_avg_pool2d)

    def problem(self, label: str, input: Tensor, output_size: Any, **_: Any) -> Problem:
        """Input (N, C, H, W) or (C, H, W); RuntimeError for what does not fit."""
        height, width = base.spread(label, output_size, 2, "output_size", 0)
        n, c, h, w = batch_of(label, input).shape
        check(
            (h > 0) & (w > 0),
            label,
            f"needs input with a height and width of at least 1, got {tuple(input.shape)}",
        )
        channels_last = base.is_channels_last(input)
        sizes = {
            "batch": n, "channels": c, "in_height": h, "in_width": w, "out_height": height, "out_width": width,
            "channels_last": channels_last,
        }  # fmt: skip
        return Problem(input.device.type, input.dtype, sizes, (n, c, height, width), channels_last, input.ndim == 3)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten._adaptive_avg_pool2d_backward(grad, *ctx.saved_tensors),)
