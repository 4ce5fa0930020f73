"""avg_pool2d: the mean of each window, padding counted or not, or the sum over a given divisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.operations.case import BadCall, Case
from ai3_ops.operations.pooling import WindowCall, WindowPooling, window_problem
from ai3_ops.problem import Problem


class AvgPool2d(WindowPooling):
    """Rules of `ai3::avg_pool2d_<algorithm>`, as torch.nn.functional.avg_pool2d."""

    name = "avg_pool2d"
    torch_module = nn.AvgPool2d
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
        """ATen's; on CUDA in NCHW, since it is wrong there in channels_last (docs/cuda.md)."""
        (input,) = ctx.saved_tensors
        if input.is_cuda:
            grad, input = grad.contiguous(), input.contiguous()
        return (torch.ops.aten.avg_pool2d_backward(grad, input, *ctx.arguments),)

    rounding = "means"
    cases = (
        Case(((2, 3, 9, 8),), (2,)),
        Case(((1, 17, 9, 11),), (3, 2, 1, True, False)),
        Case(((3, 9, 8),), ((3, 2), (1, 2), (1, 0), True)),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), (3, 2, 1, False, True, 5)),
        Case(((2, 3, 9, 8),), ((2,), (), (1,), True), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3, (2,)), ("transposed",)),
        Case(((2, 3, 9, 8),), (3, 1, 1), ("sliced",)),
        Case(((2, 3, 9, 8),), (2, 3), ("expanded",)),
        Case(((1, 19, 12, 40),), (3, 2, 1), ("sliced",)),
        Case(((1, 18, 45, 150),), (3, 2, 1)),
    )
    layers = (
        Case(((1, 128, 56, 56),), (2, 2)),
        Case(((8, 192, 17, 17),), (3, 1, 1), ("channels_last",)),
    )

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        yield from super().bad_calls(new, other)
        yield "divisor 0", [new(1, 3, 6, 6)], [[2], [2], [0], False, True, 0]


class AvgPool2dCall(WindowCall):
    """torch.nn.functional.avg_pool2d."""

    operation = "avg_pool2d"
    functions = (F.avg_pool2d,)
    function = F.avg_pool2d
    worth: ClassVar = {2: 2**18, 4: 2**17, 8: 2**17}
    modules: ClassVar = {
        nn.AvgPool2d: lambda m, x: (
            x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override
        )
    }  # fmt: skip
    inside = (nn.LPPool2d,)

    def arguments(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> tuple[Any, ...]:
        """No stride is the kernel's size."""
        stride = kernel_size if stride is None else stride
        return input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
