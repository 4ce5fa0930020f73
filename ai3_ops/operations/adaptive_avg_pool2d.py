"""adaptive_avg_pool2d: means of windows that divide the input as evenly as its size allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.calls.call import Call
from ai3_ops.operations.case import LARGEST, BadCall, Case, Draw, image, pair
from ai3_ops.operations.pooling import Pooling, batch_of
from ai3_ops.problem import Problem, check, is_channels_last, is_contiguous, spread


class AdaptiveAvgPool2d(Pooling):
    """Rules of `ai3::adaptive_avg_pool2d_<algorithm>`, as torch.nn.functional.adaptive_avg_pool2d."""

    name = "adaptive_avg_pool2d"
    aten = staticmethod(torch.nn.functional.adaptive_avg_pool2d)

    def problem(self, label: str, input: Tensor, output_size: Any, **_: Any) -> Problem:
        """Input (N, C, H, W) or (C, H, W); RuntimeError for what does not fit."""
        height, width = spread(label, output_size, 2, "output_size", 0)
        n, c, h, w = batch_of(label, input).shape
        check(
            (h > 0) & (w > 0),
            label,
            f"needs input with a height and width of at least 1, got {tuple(input.shape)}",
        )
        channels_last = is_channels_last(input)
        sizes = {
            "batch": n, "channels": c, "in_height": h, "in_width": w, "out_height": height, "out_width": width,
            "channels_last": channels_last,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, (n, c, height, width), channels_last, input.ndim == 3)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten._adaptive_avg_pool2d_backward(grad, *ctx.saved_tensors),)

    rounding = "means"
    cases = (
        Case(((2, 3, 9, 8),), (1,)),
        Case(((1, 17, 9, 11),), ((4, 5),)),
        Case(((3, 5, 4),), ((7, 3),)),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), (4,), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3,), ("transposed",)),
        Case(((2, 3, 9, 8),), (3,), ("sliced",)),
        Case(((2, 3, 9, 8),), (3,), ("expanded",)),
        Case(((1, 19, 12, 40),), ((7, 23),), ("sliced",)),
        Case(((1, 18, 45, 150),), ((7, 23),)),
    )
    layers = (
        Case(((8, 512, 7, 7),), (1,)),
        Case(((1, 256, 13, 13),), (6,), ("channels_last",)),
    )

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        return f"adaptive_avg_pool2d {image(x)} out={pair(y.shape[-2:])}"

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        return nn.AdaptiveAvgPool2d(sizes["out"])

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        return Case((draw.image,), (draw.pick((1, 2, 6, 7, (3, 5))),), draw.layouts)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x = new(1, 3, 6, 6)
        yield "input of rank 2", [new(6, 6)], [[2]]
        yield "integer input", [x.int()], [[2]]
        yield "negative output_size", [x], [[-1]]
        yield "output_size of 3 elements", [x], [[1, 1, 1]]
        yield "output too large to exist", [x], [[LARGEST]]


_PLANE, _ELEMENTS = 256, 2**17  # up to which PyTorch is as fast (docs/algorithms/adaptive_avg_pool2d/default.md)


class AdaptiveAvgPool2dCall(Call):
    """torch.nn.functional.adaptive_avg_pool2d."""

    operation = "adaptive_avg_pool2d"
    functions = (F.adaptive_avg_pool2d,)
    function = F.adaptive_avg_pool2d
    repeats = True
    modules: ClassVar = {nn.AdaptiveAvgPool2d: lambda m, x: (x, m.output_size)}

    why_left = (
        "PyTorch is faster for the means of few and small planes (docs/algorithms/adaptive_avg_pool2d/default.md)"
    )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """But for the means of whole planes, where these are few and small."""
        input, size = args
        whole = size == 1 or (isinstance(size, (tuple, list)) and all(n == 1 for n in size))
        if not whole or not input.is_cpu or input.ndim < 3 or not is_contiguous(input):
            return True
        return input.shape[-2] * input.shape[-1] > _PLANE or input.numel() > _ELEMENTS

    def arguments(self, input: Tensor, output_size: Any) -> tuple[Any, ...]:
        """An output size of None is the input's."""
        if isinstance(output_size, (tuple, list)) and None in output_size:
            output_size = tuple(i if o is None else o for i, o in zip(input.shape[-2:], output_size, strict=True))
        return input, output_size
