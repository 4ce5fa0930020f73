"""What the 2-D poolings share: windows, output sizes, the fold of a vmap dimension into the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index
from typing import Any, ClassVar

from torch import Tensor, nn

from ai3_ops.calls.call import Call
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import HUGE, BadCall, Case, Draw, image, pair
from ai3_ops.problem import Problem, check, check_dtype, is_channels_last, spread


class Pooling(Operation):
    """Rules that do not depend on what is done with a window."""

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """ATen's backward operators read the input and the arguments."""
        input, *ctx.arguments = inputs
        ctx.save_for_backward(input)

    def vmap(
        self, op: Callable[..., Tensor], size: int, dims: Dims, input: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, int]:
        """The new dimension becomes the outer part of the batch, or the batch itself."""
        dim = dims[0]
        assert dim is not None
        if input.ndim == 4:
            return op(input.movedim(dim, 0), *args, **options), 0
        return op(base.fold(input, dim, 0, size), *args, **options).unflatten(0, (size, -1)), 0


class WindowPooling(Pooling):
    """Of poolings whose windows are given."""

    torch_module: ClassVar[type[nn.Module]]

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        s = self.problem(f"ai3::{self.name}", x, *args).sizes
        if (s["dilation_h"], s["dilation_w"], s["count_include_pad"], s["divisor"]) != (1, 1, True, 0):
            raise ValueError(f"no line says {self.name} with {args}")
        kernel, stride = pair((s["kernel_height"], s["kernel_width"])), pair((s["stride_h"], s["stride_w"]))
        padding = pair((s["pad_h"], s["pad_w"]))
        return f"{self.name} {image(x)} kernel={kernel} stride={stride} pad={padding} ceil={int(s['ceil_mode'])}"

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        window = sizes["kernel"], sizes["stride"], sizes["pad"]
        return self.torch_module(*window, ceil_mode=bool(sizes["ceil"]))

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        return Case(
            (draw.image,), (draw.pick((2, 3, (2, 3), 5)), draw.pick((1, 2, 3)), draw.pick((0, 1))), draw.layouts
        )

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x = new(1, 3, 6, 6)
        yield "input of rank 2", [new(6, 6)], [[2]]
        yield "input of rank 5", [new(1, 1, 3, 6, 6)], [[2]]
        yield "integer input", [x.int()], [[2]]
        yield "kernel_size 0", [x], [[0]]
        yield "negative kernel_size", [x], [[-2]]
        yield "kernel_size of 3 elements", [x], [[2, 2, 2]]
        yield "no kernel_size", [x], [[]]
        yield "kernel larger than the input", [x], [[7]]
        yield "kernel beyond 64 bits", [x], [[HUGE]]
        yield "stride 0", [x], [[2], [0]]
        yield "negative padding", [x], [[2], [2], [-1]]
        yield "padding above half the kernel", [x], [[2], [2], [2]]


class WindowCall(Call):
    """A call of max_pool2d or avg_pool2d."""

    repeats = True
    why_left = "PyTorch is faster for small images (docs/algorithms/max_pool2d/default.md, docs/algorithms/avg_pool2d/default.md)"
    # How much is read of images in channels_last where that is worth the operator's call: the input's elements times a window's,
    # over a stride's. By the bytes of an element.
    worth: ClassVar[dict[int, int]]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Where images are large, or in NCHW, where PyTorch's loop has no vectors; not where windows are far apart."""
        input, kernel, stride = args[:3]
        if not input.is_cpu or input.ndim < 3:
            return True
        try:
            window = _area(kernel)
            step = _area(stride) if stride not in ((), []) else window
        except (TypeError, IndexError):  # what is no size PyTorch refuses
            return False
        read = input.numel() * window // max(1, step)
        channels_last = input.stride(-3) == 1 and input.shape[-3] > 1
        worth = self.worth.get(input.dtype.itemsize, 0) if channels_last else _WORTH_PLANES
        return step <= _APART * window and read >= worth


_WORTH_PLANES, _APART = 2**12, 4


def _area(size: Any) -> int:
    if isinstance(size, (tuple, list)):
        return index(size[0]) * index(size[-1])  # one number is for both
    return index(size) ** 2


def batch_of(label: str, input: Tensor) -> Tensor:
    """The input as (N, C, H, W), checked."""
    check(input.ndim in (3, 4), label, f"needs input (N, C, H, W) or (C, H, W), got {tuple(input.shape)}")
    check_dtype(label, input)
    return base.batched(input)


def window_problem(
    label: str,
    input: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Problem:
    """The problem of a pooling with explicit windows; an empty stride is the kernel's size."""
    kernel = spread(label, kernel_size, 2, "kernel_size", 1)
    steps = kernel if stride is None or stride == [] or stride == () else spread(label, stride, 2, "stride", 1)
    pad = spread(label, padding, 2, "padding", 0)
    spacing = spread(label, dilation, 2, "dilation", 1)
    check(
        all(p <= k // 2 for p, k in zip(pad, kernel, strict=True)),
        label,
        f"needs padding of at most half the kernel size, got padding {pad} and kernel_size {kernel}",
    )
    check(divisor_override != 0, label, "needs a divisor_override other than 0, got 0")
    n, c, h, w = batch_of(label, input).shape
    check(
        (c > 0) & (h > 0) & (w > 0),
        label,
        f"needs input with no dimension of 0 but the batch, got {tuple(input.shape)}",
    )
    outputs = [_pooled(*sizes, ceil_mode=ceil_mode) for sizes in zip((h, w), kernel, steps, pad, spacing, strict=True)]
    check(
        (outputs[0] > 0) & (outputs[1] > 0),
        label,
        f"the input of {h}x{w} is too small: no window of kernel_size {kernel} and dilation {spacing} fits",
    )
    channels_last = is_channels_last(input)
    sizes = {
        "batch": n, "channels": c, "in_height": h, "in_width": w,
        "kernel_height": kernel[0], "kernel_width": kernel[1], "stride_h": steps[0], "stride_w": steps[1],
        "pad_h": pad[0], "pad_w": pad[1], "dilation_h": spacing[0], "dilation_w": spacing[1],
        "ceil_mode": ceil_mode, "count_include_pad": count_include_pad, "divisor": divisor_override or 0,
        "channels_last": channels_last,
    }  # fmt: skip
    return Problem(str(input.device), input.dtype, sizes, (n, c, *outputs), channels_last, input.ndim == 3)


def _pooled(size: Any, kernel: int, stride: int, pad: int, dilation: int, *, ceil_mode: bool) -> Any:
    """A window may start in the input or its left padding, never in what ceil_mode adds on the right."""
    room = size + 2 * pad - dilation * (kernel - 1) - 1
    out = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= size + pad else out
