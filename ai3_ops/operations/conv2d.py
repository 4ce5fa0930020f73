"""conv2d: y[n, k, i, j] = bias[k] + sum over c, r, s of weight[k, c, r, s] * x[n, c, i*stride + r*dilation - padding, ...]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library, _torch, registry
from ai3_ops._torch import OpOverload
from ai3_ops.calls.packs import SwitchedCall
from ai3_ops.calls.spec import TILES, Spec, fast_in, weights_of
from ai3_ops.calls.ways import REMEMBERED
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims
from ai3_ops.operations.case import CHANNELS, HUGE, LARGEST, BadCall, Case, Draw, image, pair
from ai3_ops.operations.weighted import Weighted
from ai3_ops.problem import Problem, check, check_dtype, check_same, is_channels_last, spread


class Window(NamedTuple):
    """A convolution's arguments between bias and the keyword-only ones, and their defaults, as PyTorch has them."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


WINDOW = Window()


def conv(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    *window: Any,
    bias: bool = True,
    layouts: tuple[str, ...] = (),
    **named: Any,
) -> Case:
    """A conv2d call; `window` and `named` are Window's."""
    return Case((x, weight, (weight[0],) if bias else None), tuple(Window(*window, **named)), layouts)


_KERNELS = (
    *[(1, 1)] * 4,
    *[(3, 3)] * 4,
    *((5, 5), (7, 7), (2, 2), (4, 4), (11, 11), (1, 3), (3, 1), (1, 7), (7, 1), (3, 2), (6, 6)),
)


class Conv2d(Weighted):
    """Rules of `ai3::conv2d_<algorithm>`, as torch.nn.functional.conv2d."""

    name = "conv2d"
    aten = staticmethod(torch.nn.functional.conv2d)
    window = WINDOW

    # Names of the query's sizes, for each dimension beside batch and channels: input, kernel, stride, padding, dilation.
    names: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("in_height", "in_width"), ("kernel_height", "kernel_width"), ("stride_h", "stride_w"), ("pad_h", "pad_w"),
        ("dilation_h", "dilation_w"),
    )  # fmt: skip
    shapes: ClassVar[tuple[str, str, str]] = ("(N, C, H, W)", "(C, H, W)", "kernel_height, kernel_width")

    @property
    def space(self) -> int:
        """How many dimensions there are beside batch and channels."""
        return len(self.names[0])

    def windows(self, label: str, stride: Any, padding: Any, dilation: Any) -> list[tuple[int, ...]]:
        """Each as one number for each dimension."""
        named = (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
        return [spread(label, value, self.space, name, least) for name, value, least in named]

    def batched(self, input: Tensor) -> Tensor:
        """With a batch of 1 where the input has none."""
        return input.unsqueeze(0) if input.ndim == self.space + 1 else input

    def checked_weight(self, label: str, weight: Tensor, groups: int) -> tuple[Any, Any, list[int]]:
        """Its sizes; RuntimeError for what no input fits."""
        rank = self.space + 2
        check(
            weight.ndim == rank,
            label,
            f"needs a {rank}-D weight (out_channels, in_channels/groups, {self.shapes[2]}), got {tuple(weight.shape)}",
        )
        k, cg, *traced = weight.shape
        kernel = [*map(int, traced)]  # a kernel of unknown size has no algorithm: a traced one becomes constant
        check(groups > 0, label, f"needs groups of at least 1, got {groups}")
        check(
            (k > 0) & (k % groups == 0),
            label,
            f"needs a number of output channels that groups divides, got {k} and groups {groups}",
        )
        smallest = "x".join(["1"] * self.space)
        check(all(r > 0 for r in kernel), label, f"needs a kernel of at least {smallest}, got {tuple(weight.shape)}")
        return k, cg, kernel

    def named(self, *values: Sequence[Any]) -> dict[str, Any]:
        """Sizes for each dimension, by the query's names; as many of `names` as there are values, the last ones."""
        names = self.names[len(self.names) - len(values) :]
        return {n: v for of, given in zip(names, values, strict=True) for n, v in zip(of, given, strict=True)}

    def problem(
        self,
        label: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = WINDOW.stride,
        padding: Any = WINDOW.padding,
        dilation: Any = WINDOW.dilation,
        groups: int = WINDOW.groups,
        *,
        deterministic: bool = False,
        exclude: str = "",
        **_: Any,
    ) -> Problem:
        """Input (N, C, H, W) or (C, H, W), weight (K, C/groups, R, S), bias (K); RuntimeError for what does not fit."""
        check_same(label, input, weight, "weight")
        k, cg, kernel = self.checked_weight(label, weight, groups)
        fits = input.ndim in (self.space + 1, self.space + 2)
        check(fits, label, f"needs input {self.shapes[0]} or {self.shapes[1]}, got {tuple(input.shape)}")
        check_dtype(label, input)
        stride, padding, dilation = self.windows(label, stride, padding, dilation)
        x = self.batched(input)
        n, c, *image = x.shape
        check(
            (c > 0) & (c == cg * groups),
            label,
            f"needs input of {cg * groups} channels for weight {tuple(weight.shape)} and groups {groups}, got "
            f"{tuple(input.shape)}",
        )
        outputs = []
        for size, taps, step, pad, spacing in zip(image, kernel, stride, padding, dilation, strict=True):
            check(
                (n == 0) | (size > 0),
                label,
                f"needs input with no dimension of 0 but the batch, got {tuple(input.shape)}",
            )
            padded, extent = size + 2 * pad, spacing * (taps - 1) + 1
            check(
                padded >= extent,
                label,
                f"needs a padded input no smaller than the kernel's extent, got {padded} and {extent}",
            )
            outputs.append((padded - extent) // step + 1)
        if bias is not None:
            check(
                bias.ndim == 1 and bias.shape[0] == k,
                label,
                f"needs a bias of {k} elements, got {tuple(bias.shape)}",
            )
            check_same(label, input, bias, "bias")
        channels_last = self.space == 2 and is_channels_last(x, weight)
        sizes = {
            "batch": n, "in_channels": c, "out_channels": k, **self.named(image, kernel, stride, padding, dilation),
            "groups": groups, "has_bias": bias is not None, "deterministic": deterministic,
        }  # fmt: skip
        if self.space == 2:
            sizes["channels_last"] = channels_last
        if exclude:
            sizes["exclude"] = exclude
        return Problem(str(input.device), input.dtype, sizes, (n, k, *outputs), channels_last, x is not input)

    def weight_sizes(self, label: str, weight: Tensor, *window: Any) -> dict[str, int]:
        """Nothing about the input."""
        groups = window[3]
        k, cg, kernel = self.checked_weight(label, weight, groups)
        sizes = {"in_channels": cg * groups, "out_channels": k, "groups": groups, "has_bias": 0}
        more = {"channels_last": 0} if self.space == 2 else {}
        return sizes | self.named(kernel, *self.windows(label, *window[:3])) | more

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The backward convolutions read input and weight."""
        input, weight, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[:7]
        ctx.save_for_backward(input, weight)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        input, weight = ctx.saved_tensors
        needs, window = list(ctx.needs[:3]), (ctx.stride, ctx.padding, ctx.dilation)
        compute = self.pytorch_backward if ctx.operator is None else ctx.operator  # None: a Python callable
        grads = compute(grad, input, weight, *window, ctx.groups, needs, **ctx.options)
        return tuple(g if wanted else None for g, wanted in zip(grads, needs, strict=True))

    def pytorch_backward(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        mask: Sequence[bool],
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        """What PyTorch computes for the arguments of a backward operator."""
        lists = self.windows(f"ai3::{self.name}", stride, padding, dilation)
        y, x = self.batched(grad), self.batched(input)
        zeros = [0] * self.space
        asked = [*mask[:2], False]  # a bias's gradient may end the process (docs/pytorch.md)
        operands = base.plain(y), base.plain(x), base.plain(weight)
        of_input, of_weight, _ = torch.ops.aten.convolution_backward(
            *operands, None, *lists, False, zeros, groups, asked
        )
        of_bias = y.sum([0, *range(2, y.ndim)]) if mask[2] else None
        return of_input.reshape(input.shape) if mask[0] else None, of_weight if mask[1] else None, of_bias

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """Folds the new dimension into the batch or, where the weights differ, into the groups or output channels."""
        dims = [*dims, None, None][:3]
        window = [*rest, *self.window[len(rest) :]]
        groups = window.pop()
        if dims[1] is None and dims[2] is None:
            assert dims[0] is not None
            if input.ndim == self.space + 2:  # unbatched samples: the new dimension is the batch
                return op(input.movedim(dims[0], 0), weight, bias, *window, groups, **options), 0
            y = op(base.fold(input, dims[0], 0, size), weight, bias, *window, groups, **options)
            return y.unflatten(0, (size, -1)), 0
        if bias is not None:
            bias = base.fold(bias, dims[2], 0, size)
        weight = base.fold(weight, dims[1], 0, size)  # (size * K, C/groups, R, S)
        if dims[0] is not None:
            channels = input.ndim - self.space - 2  # of a sample: dimension 0 or 1
            x = base.fold(input, dims[0], channels, size)
            y = op(x, weight, bias, *window, size * groups, **options)
            return y.unflatten(channels, (size, -1)), channels
        # One input for all: the groups stay, each gets the output channels of all samples.
        order = (size, groups, -1)
        weight = weight.unflatten(0, order).transpose(0, 1).flatten(0, 2)
        if bias is not None:
            bias = bias.unflatten(0, order).transpose(0, 1).flatten()
        channels = input.ndim - self.space - 1
        y = op(input, weight, bias, *window, groups, **options).unflatten(channels, (groups, size, -1))
        return y.movedim(channels + 1, 0).flatten(channels + 1, channels + 2), 0

    @staticmethod
    def flops(input: Any, weight: Any, *_: Any, out_shape: Any = None, **options: Any) -> int:
        """Two for each product."""
        return 2 * math.prod(out_shape) * math.prod(weight[1:])

    cases: ClassVar[tuple[Case, ...]] = (
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1),
        conv((1, 3, 7, 7), (4, 3, 3, 3), bias=False),
        conv((2, 6, 8, 5), (4, 3, 3, 3), padding=(1, 0), groups=2),
        conv((1, 33, 14, 13), (17, 33, 3, 3), padding=1),
        conv((2, 16, 6, 6), (70, 16, 3, 3), padding=4),
        conv((4, 10, 9), (3, 4, 3, 3), padding=1),
        conv((0, 4, 6, 6), (2, 4, 3, 3)),
        conv((1, 1, 3, 3), (1, 1, 3, 3)),
        conv((2, 4, 9, 8), (8, 1, 3, 3), padding=1, groups=4),
        conv((1, 18, 9, 8), (18, 1, 5, 5), 2, 3, 2, 18),
        conv((2, 5, 12, 11), (7, 5, 5, 5), 2, 2),
        conv((1, 3, 9, 10), (4, 3, 3, 2), (2, 1), (0, 2), (1, 2)),
        conv((1, 4, 11, 11), (6, 2, 3, 3), 1, 3, 3, 2),
        conv((2, 19, 5, 7), (34, 19, 1, 1)),
        conv((2, 6, 7, 5), (9, 2, 1, 1), 2, 1, 1, 3),
        conv((1, 3, 23, 25), (5, 3, 11, 11), 4, 2),
        conv((1, 4, 5, 12), (3, 4, 1, 7), padding=(0, 3)),
        conv((1, 2, 7, 7), (3, 2, 7, 7)),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("channels_last", "contiguous")),
        conv((2, 17, 9, 8), (6, 17, 3, 3), padding=1, layouts=("channels_last", "channels_last")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), (1,), (1,), (1,), layouts=("transposed", "transposed")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("sliced", "sliced", "sliced")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("expanded", "expanded", "expanded")),
        conv((2, 8, 8, 9), (12, 4, 3, 2), 2, 1, 1, 2, layouts=("channels_last", "sliced")),
        conv((1, 17, 6, 5), (17, 1, 3, 3), padding=4, groups=17, layouts=("channels_last",)),
        conv((1, 5, 9, 8), (5, 1, 7, 7), 2, 8, 1, 5, layouts=("channels_last",)),
        # Pixels a multiple of 4 KiB apart, which collide in the L1 cache (as linear's rows below); more channels than an edge
        # tile of the transform algorithms is padded with in place.
        conv((1, 2048, 3, 5), (5, 2048, 1, 1), layouts=("channels_last",)),
        conv((1, 2064, 4, 5), (3, 2064, 3, 3), padding=1, layouts=("channels_last",)),
        # Kernels of one row, and patches that follow one another.
        conv((1, 3, 2, 90), (4, 3, 1, 40), padding=(0, 20)),
        conv((2, 16, 3, 40), (32, 16, 1, 7), 1, (0, 3), (2, 1), layouts=("channels_last", "channels_last")),
        conv((2, 6, 8, 10), (8, 3, 2, 3), (2, 3), groups=2),
        conv((1, 5, 8, 13), (7, 5, 4, 4), 4, layouts=("channels_last", "channels_last")),
        # Groups that share vectors, of which the last is full and not.
        conv((2, 24, 6, 17), (24, 8, 3, 3), padding=1, groups=3, layouts=("channels_last", "channels_last")),
        conv((1, 32, 7, 30), (32, 4, 3, 3), 2, (1, 2), groups=8, layouts=("channels_last",)),
        conv((1, 20, 5, 9), (20, 4, 3, 3), (2, 1), (0, 1), groups=5, layouts=("channels_last",)),
    )
    layers: ClassVar[tuple[Case, ...]] = (
        conv((1, 64, 56, 56), (64, 64, 3, 3), padding=1, bias=False),
        conv((1, 192, 28, 28), (64, 192, 1, 1), layouts=("channels_last", "channels_last")),
        conv((1, 16, 112, 112), (16, 1, 3, 3), 2, 1, groups=16),
        conv((1, 256, 14, 14), (256, 256, 3, 3), padding=1, layouts=("channels_last", "channels_last")),
        conv((1, 512, 7, 7), (512, 512, 3, 3), padding=1, bias=False),
        conv((2, 3, 112, 112), (64, 3, 7, 7), 2, 3, bias=False),
        conv((1, 64, 56, 56), (128, 64, 1, 1), 2, bias=False),
        conv((1, 160, 7, 7), (960, 160, 1, 1)),
        conv((1, 240, 28, 28), (240, 1, 5, 5), 2, 2, groups=240, layouts=("channels_last",)),
        conv((1, 96, 56, 56), (96, 1, 7, 7), padding=3, groups=96),
        conv((1, 64, 27, 27), (192, 64, 5, 5), padding=2, layouts=("channels_last",)),
        conv((1, 3, 224, 224), (64, 3, 11, 11), 4, 2),
        conv((1, 192, 17, 17), (192, 192, 1, 7), padding=(0, 3), bias=False),
        conv((1, 128, 17, 17), (128, 128, 7, 1), padding=(3, 0), bias=False),
        conv((1, 64, 28, 28), (64, 64, 3, 3), 1, 2, 2),
        conv((1, 3, 224, 224), (96, 3, 4, 4), 4),
        conv((1, 96, 56, 56), (192, 96, 2, 2), 2),
        conv((1, 3, 224, 224), (192, 3, 16, 16), 16),
        conv((8, 64, 16, 16), (32, 64, 3, 3), padding=1),
        conv((1, 128, 28, 28), (128, 4, 3, 3), padding=1, groups=32, bias=False),
    )

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        weight, _, stride, padding, dilation, groups = args
        return (
            f"conv2d {image(x)} K={weight.shape[0]} kernel={pair(weight.shape[2:])} stride={pair(stride)} "
            f"pad={pair(padding)} dilation={pair(dilation)} groups={groups}"
        )

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        s = sizes
        return nn.Conv2d(s["C"], s["K"], s["kernel"], s["stride"], s["pad"], s["dilation"], groups=s["groups"])

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        pick = draw.pick
        kernel = pick(_KERNELS)
        stride: Any = pick((1, 1, 1, 1, 1, 2, 2, 4, kernel[0]))
        dilation = pick((1, 1, 1, 1, 1, 2, 3))
        same = tuple(dilation * (k - 1) // 2 for k in kernel)
        padding = pick((0, same, same, tuple(k - 1 for k in kernel), (1, 2)))
        channels, filters, groups = pick(CHANNELS), pick(CHANNELS), pick((1, 1, 1, 1, 2, 4, 8, 32, 0))
        if groups == 0:  # depthwise
            groups, filters = channels, channels * pick((1, 1, 2))
        else:
            channels, filters = channels * groups, filters * groups
        x = (draw.image[0], channels, *draw.image[2:])
        weight = (filters, channels // groups, *kernel)
        return conv(x, weight, stride, padding, dilation, groups, bias=draw.chance(0.5), layouts=draw.layouts * 2)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w, b = new(1, 4, 6, 6), new(6, 4, 3, 3), new(6)
        yield "too many input channels", [new(1, 5, 6, 6), w, b], []
        yield "too few input channels", [new(1, 3, 6, 6), w, b], []
        yield "input of rank 2", [new(6, 6), w, b], []
        yield "input of rank 5", [new(1, 1, 4, 6, 6), w, b], []
        yield "weight of rank 3", [x, new(6, 4, 3), b], []
        yield "weight of another dtype", [x, new(6, 4, 3, 3, dtype=other), None], []
        yield "bias of another dtype", [x, w, new(6, dtype=other)], []
        yield "bias of wrong size", [x, w, new(5)], []
        yield "bias of rank 2", [x, w, new(6, 1)], []
        yield "integer tensors", [x.int(), w.int(), None], []
        yield "kernel larger than the padded input", [x, new(6, 4, 7, 7), b], []
        yield "no pixels", [new(1, 4, 0, 6), w, b], [[1], [2]]
        yield "no images, and a kernel larger than the padded input", [new(0, 4, 0, 0), w, b], [[1], [1]]
        yield "no channels", [new(0, 0, 6, 6), new(6, 0, 3, 3), b], []
        yield "empty kernel", [x, new(6, 4, 0, 3), b], []
        yield "no output channels", [x, new(0, 4, 3, 3), None], []
        yield "stride 0", [x, w, b], [[0]]
        yield "negative stride", [x, w, b], [[1, -1]]
        yield "stride of 3 elements", [x, w, b], [[1, 1, 1]]
        yield "negative padding", [x, w, b], [[1], [-1]]
        yield "dilation 0", [x, w, b], [[1], [0], [0]]
        yield "dilation beyond 32 bits", [x, w, b], [[1], [0], [HUGE]]
        yield "large dilation", [x, w, b], [[1], [0], [LARGEST]]
        yield "padding beyond 64 bits", [x, w, b], [[1], [HUGE]]
        yield "an output too large to exist", [x, w, b], [[1], [LARGEST]]
        yield "groups 0", [x, w, b], [[1], [0], [1], 0]
        yield "negative groups", [x, w, b], [[1], [0], [1], -1]
        yield "groups that do not divide", [x, new(6, 1, 3, 3), b], [[1], [0], [1], 4]
        yield "groups beyond 32 bits", [x, w, b], [[1], [0], [1], HUGE]


# Gradients ------------------------------------------------------------------------------------------------------------
def register_backward(rules: Conv2d, op: OpOverload, algorithm: str) -> None:
    """ai3::_conv2d_<algorithm>_backward: its fake kernel, second derivatives (ATen's), vmap, FLOPs."""

    def fake(
        grad: Tensor,
        input: Tensor,
        weight: Tensor,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        mask: list[bool],
        forward: str = algorithm,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        label = f"ai3::{rules.name}_{forward}"
        problem = rules.problem(label, input, weight, None, stride, padding, dilation, groups)
        shape = problem.shape[1:] if problem.unbatched else problem.shape
        fits = tuple(grad.shape) == tuple(shape)
        check(fits, label, f"needs grad_output of the output's sizes {tuple(shape)}, got {tuple(grad.shape)}")
        grads = (
            problem._replace(shape=rules.batched(input).shape),
            problem._replace(
                shape=weight.shape, channels_last=rules.space == 2 and is_channels_last(weight), unbatched=False
            ),
        )
        return (
            *(g.empty(input.device) if wanted else input.new_empty(0) for g, wanted in zip(grads, mask, strict=False)),
            input.new_empty(weight.shape[0]) if mask[2] else input.new_empty(0),
        )

    base.register_fake(op, fake)
    base.register_autograd(op, double_backward, save_backward, rules.pytorch_backward)
    base.register_vmap(op, vmap_backward)
    base.register_flops(op, backward_flops)


def save_backward(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """The second derivatives are convolutions of all three tensors."""
    grad, input, weight, *ctx.window, ctx.groups, ctx.mask = inputs
    ctx.save_for_backward(grad, input, weight)


def double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """By convolutions of ATen's: the output is bilinear in input and weight, and so is each second derivative."""
    grad, input, weight = ctx.saved_tensors
    ggx, ggw, ggb = (g if wanted else None for g, wanted in zip(grads, ctx.mask, strict=True))
    space = weight.ndim - 2
    unbatched = input.ndim == space + 1
    if unbatched:
        grad, input, ggx = (None if t is None else t.unsqueeze(0) for t in (grad, input, ggx))
    grad, input, weight = base.plain(grad), base.plain(input), base.plain(weight)
    ggx, ggw = (None if t is None else base.plain(t) for t in (ggx, ggw))
    lists = [spread("a convolution", v, space, "size", 0) for v in ctx.window]
    window = (*lists, False, [0] * space, ctx.groups)
    backward = torch.ops.aten.convolution_backward
    of_grad = of_input = of_weight = None
    if ctx.needs[0]:
        terms = [] if ggb is None else [ggb.reshape(-1, *[1] * space)]
        terms += [
            torch.ops.aten.convolution(x, w, None, *window)
            for x, w in ((ggx, weight), (input, ggw))
            if x is not None and w is not None
        ]
        of_grad = sum(terms[1:], terms[0]).expand_as(grad) if terms else None
    if ctx.needs[1] and ggw is not None:
        of_input = backward(grad, input, ggw, None, *window, [True, False, False])[0]
    if ctx.needs[2] and ggx is not None:
        of_weight = backward(grad, ggx, weight, None, *window, [False, True, False])[1]
    if unbatched:
        of_grad, of_input = (None if t is None else t.squeeze(0) for t in (of_grad, of_input))
    return of_grad, of_input, of_weight


def vmap_backward(
    op: Callable[..., tuple[Tensor, ...]],
    size: int,
    dims: Dims,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    mask: list[bool],
    **options: Any,
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Samples become groups, so that each has weight gradients of its own."""
    rank = weight.ndim - (dims[2] is not None)
    channels = input.ndim - (dims[1] is not None) - rank + 1  # of a sample: dimension 0 or 1
    y, x = base.fold(grad, dims[0], channels, size), base.fold(input, dims[1], channels, size)
    w = base.fold(weight, dims[2], 0, size)
    grads = op(y, x, w, stride, padding, dilation, size * groups, mask, **options)
    places = [place if wanted else None for place, wanted in zip((channels, 0, 0), mask, strict=True)]
    parts = [g if p is None else g.unflatten(p, (size, -1)) for g, p in zip(grads, places, strict=True)]
    return tuple(parts), tuple(places)


def backward_flops(grad: Any, input: Any, weight: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    """As many as forward for each of input and weight."""
    mask = rest[4]
    return (mask[0] + mask[1]) * Conv2d.flops(input, weight, out_shape=grad)


Conv2d.rules = {
    "backward": register_backward,
    "pack": Conv2d.register_pack,
    **dict.fromkeys(("packed", "packed_out", "fused", "out"), Conv2d.register_fused),
    "held": Conv2d.register_held,
}


# Calls in models ------------------------------------------------------------------------------------------------------
# A training step packs the weight of every call, which takes so many output pixels to pay.
_PIXELS, _PIXELS_16_BITS = 1024, 4096
_CHANNELS = 16  # with fewer there is little to gain
_PRODUCTS = 2**21  # below, autograd's rules in Python take longer than kernels gain
_WIDE_GROUP = 24  # channels
_BYTES_OF_VECTOR = {"avx512": 64, "avx2": 32}.get(_library.registry()["level"], 0)
_FILTERS, _PRODUCTS_OF_FEW = 32, 2**23  # of a layer with fewer channels than that in or out, as images in colour have


_WIDE_VECTOR = _library.registry()["onednn_wide_vector"]


def is_wrong_in_training(weight: Tensor, stride: Any, groups: int, dtype: torch.dtype) -> bool:
    """Whether PyTorch's gradient of this weight is wrong, or ends the process, in channels_last (docs/pytorch.md).

    csrc/ops/conv2d_backward.cpp asks the same of a call.
    """
    if dtype != torch.float32 and not (dtype == torch.bfloat16 and _WIDE_VECTOR == 16):  # oneDNN has no such kernel
        return False
    strided = stride > 1 if isinstance(stride, int) else max(stride) > 1
    return groups == 1 and tuple(weight.shape[2:]) == (1, 1) and strided and weight.shape[1] < _WIDE_VECTOR


def meets_only_padding(image: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether no pixel of the image meets some element of the kernel: at every place of the window it lies on the padding.

    PyTorch does not write such an element's gradient in 16 bits and channels_last (docs/pytorch.md);
    csrc/ops/conv2d_backward.cpp asks the same of a call. Each argument is a number for each dimension.
    """
    for size, taps, step, pad, spacing in zip(image, kernel, stride, padding, dilation, strict=True):
        places = (size + 2 * pad - spacing * (taps - 1) - 1) // step + 1
        for tap in range(taps):
            begin = pad - tap * spacing  # of the places at which it meets a pixel, times the stride
            last = size - 1 + begin
            if last < 0 or max(0, -(-begin // step)) > min(places - 1, last // step):
                return True
    return False


def reads_past_channels(channels: int, stride: Sequence[int], dilation: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether PyTorch's gradient of a weight with so many channels in a group is wrong in channels_last, by its dilation.

    oneDNN's AVX-512 kernels read what was never written (docs/pytorch.md); csrc/ops/conv2d_backward.cpp asks the same.
    """
    bfloat16 = dtype == torch.bfloat16 and _WIDE_VECTOR == 16
    return bfloat16 and max(dilation) > 1 and max(stride) == 1 and channels % 16 != 0


def trains_astray(input: Any, weight: Any, dtype: torch.dtype, window: Sequence[Any]) -> bool:
    """Whether PyTorch's gradient of the weight is wrong in channels_last. window: stride, padding, dilation and groups."""
    stride, padding, dilation, groups = window
    if is_wrong_in_training(weight, stride, groups, dtype):
        return True
    if dtype.itemsize != 2 or input.ndim not in (3, 4) or weight.ndim != 4:
        return False
    try:
        windows = registry.OPERATIONS["conv2d"].windows("", stride, padding, dilation)  # type: ignore[attr-defined]
    except RuntimeError:  # the operator says so
        return False
    steps, _, spacings = windows
    if reads_past_channels(weight.shape[1], steps, spacings, dtype):
        return True
    return meets_only_padding(input.shape[-2:], weight.shape[2:], *windows)


# In NCHW (two cores of Zen 3, AVX2: measured at no other level) outputs up to this take 0.5 to 0.97 of PyTorch's time, larger
# ones by exact algorithms, which multiply, up to 1.95 times as long, unless much less comes out than goes in; Winograd's and
# depthwise 0.35 to 0.9 of it.
_SMALL = 110_000
_LEAVES_NCHW = _library.registry()["level"] == "avx2"
# 1x1 on a single pixel (squeeze-excite): below so many weights a call costs more than the products
# (docs/algorithms/conv2d/default.md).
_OF_ONE_PIXEL = 2**17 if _LEAVES_NCHW else 2**15
# Channels in and out, and what they and the pixels multiply to, from which Winograd's beats PyTorch (docs/benchmarks/cuda.md).
_CHANNELS_ON_CUDA, _WORK_ON_CUDA = 64, 2**28
_LANES_16_BITS = 16  # of `depthwise` with AVX-512, which computes in float32


def of_module(m: Any, x: Tensor) -> tuple[Any, ...]:
    """Arguments of the function for a module and its input, which is padded here in modes that the function lacks."""
    if m.padding_mode == "zeros":
        return x, *weights_of(m), m.stride, m.padding, m.dilation, m.groups
    x = F.pad(x, m._reversed_padding_repeated_twice, mode=m.padding_mode)
    return x, *weights_of(m), m.stride, 0, m.dilation, m.groups


class Conv2dCall(SwitchedCall):
    """torch.nn.functional.conv2d."""

    operation = "conv2d"
    functions = (F.conv2d,)
    function = torch.conv2d
    repeats = True
    modules: ClassVar = {nn.Conv2d: of_module}
    why_left = (
        "PyTorch is faster for some calls: in NCHW, 1x1 on one pixel, and depthwise of few channels in 16 bits "
        "(docs/algorithms/conv2d/default.md)"
    )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what gains nothing in NCHW."""
        given = self.arguments(*args, **kwargs)
        if not self.writes_nchw:
            return self.run_or_leave(*given)
        return self.run_or_leave(*self._in_nchw(*given)).contiguous()

    @staticmethod
    def _in_nchw(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *rest: Any) -> tuple[Any, ...]:
        """Arguments whose answer in NCHW takes least: the smaller of input and output is copied (docs/decisions/layout.md)."""
        step = stride**2 if isinstance(stride, int) else stride[0] * stride[-1]
        if input.ndim == 4 and weight.ndim == 4 and weight.shape[0] >= 2 * input.shape[1] * step:
            input = input.contiguous()
        return input, weight, bias, stride, *rest

    def trained(self, args: tuple[Any, ...]) -> Any:
        """With the weight's gradient what decides whether PyTorch's is wrong (`trains_astray`)."""
        weight = args[1]
        return (weight.shape, *args[3:]) if weight.requires_grad else super().trained(args)

    @staticmethod
    def may_gain_on_cuda(problem: Any) -> bool:
        """For some batch; sizes that are not known may be any."""
        if not isinstance(problem, Problem):
            return True

        def may_be(name: str, wanted: int) -> bool:
            size = problem.sizes.get(name)
            return not isinstance(size, int) or size < 0 or size == wanted

        window = {"kernel_height": 3, "kernel_width": 3, **dict.fromkeys(("stride_h", "stride_w", "groups"), 1)}
        window |= dict.fromkeys(("dilation_h", "dilation_w"), 1)
        channels = [problem.sizes.get(name) for name in ("in_channels", "out_channels")]
        few = any(isinstance(n, int) and 0 <= n < _CHANNELS_ON_CUDA for n in channels)
        return problem.dtype == torch.float32 and not few and all(may_be(name, n) for name, n in window.items())

    def measured(self, args: tuple[Any, ...]) -> bool:
        """Strict float32, 3x3 of many channels and pixels (csrc/cuda/conv2d/default.cpp), without gradients."""
        input, weight, _, stride, _, dilation, groups = args
        shapes = input.ndim == 4 and tuple(weight.shape[2:]) == (3, 3) and min(weight.shape[:2]) >= _CHANNELS_ON_CUDA
        if not shapes or input.dtype != torch.float32:
            return False
        batch, channels, height, width = input.shape
        if batch * height * width * channels * weight.shape[0] < _WORK_ON_CUDA:
            return False
        ones = (n for window in (stride, dilation, groups) for n in ([window] if isinstance(window, int) else window))
        if any(n != 1 for n in ones) or self.allow_tf32() or _torch.any_autocast():
            return False
        return not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """In float32: large outputs take long to be written in NCHW; of few products the call itself takes as long.

        In 16 bits, where oneDNN has kernels for them: depthwise with fewer channels than a vector has lanes.
        """
        input, weight = args[:2]
        if not input.is_cpu or torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled() and weight.requires_grad and trains_astray(input, weight, input.dtype, args[3:]):
            return True
        if input.dtype != torch.float32:
            lanes = input.ndim == 4 and args[6] == input.shape[1] < _LANES_16_BITS
            return not (lanes and input.dtype.itemsize == 2 and fast_in(input.dtype))
        if _torch.any_autocast():
            return True
        if input.ndim != 4 or weight.ndim != 4 or type(weight) not in (Tensor, nn.Parameter):
            return True
        try:
            key = (registry.generation(), input.shape, input.stride(), weight.shape, weight.stride(), args[3:])
            if key not in self.gained:
                if len(self.gained) >= REMEMBERED:
                    self.gained.clear()
                self.gained[key] = self._gains(args)
            return self.gained[key]
        except TypeError:  # a list among the arguments
            return self._gains(args)
        except RuntimeError:  # the operator says why
            return True

    def _gains(self, args: tuple[Any, ...]) -> bool:
        problem = self.problem(*(Spec.tensor(a) for a in map(Spec.of, args)))
        weight, preferred = args[1], registry.preferred.get(self.operation)  # the latter is the user's choice
        inputs, outputs = args[0].numel(), math.prod(problem.shape)
        if tuple(weight.shape[2:]) == (1, 1) and args[6] == 1 and outputs == weight.shape[0] and preferred is None:
            return weight.numel() >= _OF_ONE_PIXEL
        if not _LEAVES_NCHW or problem.channels_last or outputs <= _SMALL or 2 * outputs < inputs:
            return True
        chosen = self.resolved("default", args)
        if chosen in ("depthwise", preferred):
            return True
        return registry.algorithm(self.operation, chosen, "cpu").accuracy != "exact"

    def _forget(self) -> None:
        super()._forget()
        self.gained: dict[Any, bool] = {}

    @staticmethod
    @_torch.constant_when_compiled
    def allow_tf32() -> bool:
        """Convolutions have a switch of their own; read where the old and the new way to set it both show."""
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]

    def arguments(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = WINDOW.stride,
        padding: Any = WINDOW.padding,
        dilation: Any = WINDOW.dilation,
        groups: int = WINDOW.groups,
    ) -> tuple[Any, ...]:
        """Padding given as a word becomes numbers, and a copy of the input where the two sides differ."""
        if torch.compiler.is_compiling():  # the operators' windows are numbers
            stride, dilation, groups = map(_torch.as_constant, (stride, dilation, groups))
            padding = padding if isinstance(padding, str) else _torch.as_constant(padding)
        if isinstance(padding, str):
            input, padding = _padding_of_word(input, weight, stride, padding, dilation)
        if self.reads_last and isinstance(input, Tensor) and input.ndim == 4:
            compiling = torch.compiler.is_compiling()
            traced = not compiling and _torch.tracing_state() is not None  # whose strides are tensors
            if not (compiling or traced or _torch.in_transform()):
                input = input.contiguous(memory_format=torch.channels_last)  # which fails under vmap
            elif traced or not is_channels_last(input):
                input = input.movedim(1, 3).contiguous().movedim(3, 1)
        return input, weight, bias, stride, padding, dilation, groups

    def gains_unpacked(self, args: tuple[Any, ...]) -> bool:
        """Where Winograd does, on many pixels; and where PyTorch has no kernels for pairs of 16 bits."""
        input, weight, _, stride, _, dilation, groups = args
        if weight.ndim != 4 or weight.dtype != input.dtype or torch.is_autocast_enabled("cpu"):
            return False
        if input.dtype.itemsize == 2:
            return not fast_in(input.dtype)
        few = min(weight.shape[:2]) < _CHANNELS or input.numel() // max(1, weight.shape[1]) < _PIXELS
        ones = all(
            n == 1 for window in (stride, dilation, groups) for n in ([window] if isinstance(window, int) else window)
        )
        return tuple(weight.shape[2:]) == (3, 3) and ones and input.dtype == torch.float32 and not few

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """By the layer's shape; the measurements are in docs/decisions/backward.md."""
        input, weight, _, stride, _, _, groups = args
        if input.device.type != "cpu" or input.ndim != 4 or weight.ndim != 4:
            return True
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        if trains_astray(input, weight, dtype, args[3:]):
            return True
        channels = input.shape[1]
        if channels == groups > 1:  # depthwise
            return True
        kernel = tuple(weight.shape[2:])
        strides = (stride, stride) if isinstance(stride, int) else tuple(stride) * (2 // len(stride))
        if len(strides) != 2:
            return True  # the operator says so
        pixels = input.shape[0]
        for size, k, s in zip(input.shape[2:], kernel, strides, strict=True):
            pixels = pixels * ((size - 1) // s + 1 if k > 1 or s > 1 else size)
        if fast_in(dtype):
            tiled = dtype == torch.bfloat16 and TILES  # 16 times as many products in oneDNN as in Winograd's float32
            return not tiled and kernel == (3, 3) and strides == (1, 1) and pixels >= _PIXELS_16_BITS
        if dtype.itemsize == 2:  # PyTorch's kernels take tens of times as long
            return True
        products = pixels * weight.numel()
        if groups > 1 and dtype == torch.float32 and not _groups_gain_in_training(input, weight, groups, strides):
            return False
        if min(channels, weight.shape[0]) < _CHANNELS:
            enough = channels > 1 and weight.shape[0] >= _FILTERS and products >= _PRODUCTS_OF_FEW
            return enough and kernel != (1, 1) and pixels >= _PIXELS
        return products >= _PRODUCTS if kernel == (1, 1) else pixels >= _PIXELS


def _groups_gain_in_training(input: Tensor, weight: Tensor, groups: int, strides: tuple[int, ...]) -> bool:
    """Whether groups of several channels do, in float32."""
    width = weight.shape[1]
    if strides != (1, 1):
        return False
    if width >= _WIDE_GROUP:
        return True
    lanes = _BYTES_OF_VECTOR // input.element_size()  # `direct` has gradients of groups that fill vectors
    fill = (
        lanes >= width and lanes % width == 0 and groups % (lanes // width) == 0 and weight.shape[0] == input.shape[1]
    )
    narrow = width <= 4 or (width <= 8 and input.is_contiguous(memory_format=torch.channels_last))
    return fill and narrow


def _padding_of_word(input: Tensor, weight: Tensor, stride: Any, padding: str, dilation: Any) -> tuple[Tensor, Any]:
    if padding == "valid":
        return input, 0
    if padding != "same":
        raise RuntimeError(f"conv{weight.ndim - 2}d: padding is 'valid', 'same' or numbers, got {padding!r}")
    space = weight.ndim - 2
    if any(s != 1 for s in ([stride] if isinstance(stride, int) else stride)):
        raise RuntimeError(f"conv{space}d: padding='same' needs stride 1, got {stride}")
    dilation = [dilation] * space if isinstance(dilation, int) else list(dilation) * (space // len(dilation))
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):  # the odd one goes to the right and to the bottom
        return F.pad(input, [n for t in reversed(total) for n in (t // 2, t - t // 2)]), 0
    return input, tuple(t // 2 for t in total)
