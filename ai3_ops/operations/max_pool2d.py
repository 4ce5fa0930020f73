"""max_pool2d: the largest element of each window; padding is minus infinity, NaN wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.operations.case import HUGE, BadCall, Case
from ai3_ops.operations.pooling import WindowCall, WindowPooling, window_problem
from ai3_ops.problem import Problem


class MaxPool2d(WindowPooling):
    """Rules of `ai3::max_pool2d_<algorithm>`, as torch.nn.functional.max_pool2d."""

    name = "max_pool2d"
    torch_module = nn.MaxPool2d
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
        blind = self._blind(input, grad.shape[-2:], *ctx.arguments)
        if blind is not None:
            grad, indices = grad.masked_fill(blind, 0), indices.masked_fill(blind, 0)
        return (torch.ops.aten.max_pool2d_with_indices_backward(grad, input, *ctx.arguments, indices),)

    def _blind(self, input: Tensor, outputs: Any, *arguments: Any) -> Tensor | None:
        """Which windows (OH, OW) meet no pixel, since a dilation steps over a small input; None without a dilation.

        ATen's position of their maximum lies outside of the input, or in another row (docs/pytorch.md).
        """
        if arguments[3] in (1, [1], [1, 1]):
            return None
        sizes = self.problem(f"ai3::{self.name}", input, *arguments).sizes
        meets = []
        for name, count in zip(("height", "width"), outputs, strict=True):
            stride, pad, dilation = (sizes[f"{what}_{name[0]}"] for what in ("stride", "pad", "dilation"))
            taps = torch.arange(sizes[f"kernel_{name}"], device=input.device) * dilation - pad
            places = torch.arange(count, device=input.device).unsqueeze(1) * stride + taps
            meets.append(((places >= 0) & (places < sizes[f"in_{name}"])).any(1))
        return ~(meets[0].unsqueeze(1) & meets[1])

    cases = (
        Case(((2, 3, 9, 8),), (2,)),
        Case(((1, 17, 9, 11),), (3, 2, 1, 1, True)),
        Case(((3, 9, 8),), ((3, 2), (1, 2), (1, 0), (2, 1))),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), ((2,), (), (1,), (1,), True), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3, (2,)), ("transposed",)),
        Case(((2, 3, 9, 8),), (3, 1, 1), ("sliced",)),
        Case(((2, 3, 9, 8),), (2, 3), ("expanded",)),
        Case(((1, 19, 12, 40),), (3, 2, 1), ("sliced",)),
        Case(((1, 18, 45, 150),), (3, 2, 1)),
    )
    layers = (
        Case(((1, 64, 112, 112),), (3, 2, 1)),
        Case(((8, 192, 28, 28),), (3, 1, 1), ("channels_last",)),
    )

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        yield from super().bad_calls(new, other)
        x = new(1, 3, 6, 6)
        yield "dilation 0", [x], [[2], [2], [0], [0]]
        yield "dilation beyond 64 bits", [x], [[2], [2], [0], [HUGE]]


class MaxPool2dCall(WindowCall):
    """torch.nn.functional.max_pool2d without indices."""

    operation = "max_pool2d"
    functions = (F.max_pool2d, torch.max_pool2d)
    function = torch.max_pool2d
    modules: ClassVar = {
        nn.MaxPool2d: lambda m, x: (
            x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, *([True] if m.return_indices else [])
        )
    }  # fmt: skip
    worth: ClassVar = {2: 2**16, 4: 2**16, 8: 2**16}

    def of_module(self, args: tuple[Any, ...]) -> Any:
        """With indices, which may be asked of the module after the swap, they are PyTorch's."""
        return self(*args) if len(args) > 6 else super().of_module(args)

    def __call__(self, *args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
        """As torch.nn.functional.max_pool2d."""
        if return_indices or (len(args) > 6 and args[6]):  # set on the module after the swap
            return F.max_pool2d(*args[:6], **kwargs, return_indices=True)
        return super().__call__(*args[:6], **kwargs)

    def arguments(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> tuple[Any, ...]:
        """No stride is the kernel's size (an empty one, as ATen has it, torch 2.11's AOTInductor packages cannot pass)."""
        return input, kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode
