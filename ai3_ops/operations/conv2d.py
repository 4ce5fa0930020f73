"""conv2d: y[n, k, i, j] = bias[k] + sum over c, r, s of weight[k, c, r, s] * x[n, c, i*stride + r*dilation - padding, ...]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count

from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Problem, check
from ai3_ops.operations.weighted import Weighted


class Conv2d(Weighted):
    """Rules of `ai3::conv2d_<algorithm>`, as torch.nn.functional.conv2d."""

    name = "conv2d"
    aten = staticmethod(torch.nn.functional.conv2d)
    window = (1, 0, 1, 1)  # stride, padding, dilation, groups

    @staticmethod
    def pairs(label: str, stride: Any, padding: Any, dilation: Any) -> list[tuple[int, ...]]:
        """Each as two numbers."""
        named = (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
        return [base.spread(label, value, 2, name, least) for name, value, least in named]

    @staticmethod
    def checked_weight(label: str, weight: Tensor, groups: int) -> tuple[Any, Any, int, int]:
        """Its sizes; RuntimeError for what no input fits."""
        check(
            weight.ndim == 4,
            label,
            "needs a 4-D weight (out_channels, in_channels/groups, kernel_height, kernel_width), got "
            f"{tuple(weight.shape)}",
        )
        k, cg, *kernel = weight.shape
        r, s = map(int, kernel)  # a kernel of unknown size has no algorithm: a traced one becomes constant
        check(groups > 0, label, f"needs groups of at least 1, got {groups}")
        check(
            (k > 0) & (k % groups == 0),
            label,
            f"needs a number of output channels that groups divides, got {k} and groups {groups}",
        )
        check((r > 0) & (s > 0), label, f"needs a kernel of at least 1x1, got {tuple(weight.shape)}")
        return k, cg, r, s

    def problem(
        self,
        label: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        deterministic: bool = False,
        exclude: str = "",
        **_: Any,
    ) -> Problem:
        """Input (N, C, H, W) or (C, H, W), weight (K, C/groups, R, S), bias (K); RuntimeError for what does not fit."""
        base.check_same(label, input, weight, "weight")
        k, cg, r, s = self.checked_weight(label, weight, groups)
        check(input.ndim in (3, 4), label, f"needs input (N, C, H, W) or (C, H, W), got {tuple(input.shape)}")
        base.check_dtype(label, input)
        stride, padding, dilation = self.pairs(label, stride, padding, dilation)
        x = base.batched(input)
        n, c, h, w = x.shape
        check(
            (c > 0) & (c == cg * groups),
            label,
            f"needs input of {cg * groups} channels for weight {tuple(weight.shape)} and groups {groups}, got "
            f"{tuple(input.shape)}",
        )
        outputs = []
        for size, taps, step, pad, spacing in zip((h, w), (r, s), stride, padding, dilation, strict=True):
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
            base.check_same(label, input, bias, "bias")
        channels_last = base.is_channels_last(x, weight)
        sizes = {
            "batch": n, "in_channels": c, "in_height": h, "in_width": w,
            "out_channels": k, "kernel_height": r, "kernel_width": s,
            "stride_h": stride[0], "stride_w": stride[1], "pad_h": padding[0], "pad_w": padding[1],
            "dilation_h": dilation[0], "dilation_w": dilation[1],
            "groups": groups, "has_bias": bias is not None, "channels_last": channels_last,
            "deterministic": deterministic,
        }  # fmt: skip
        if exclude:
            sizes["exclude"] = exclude
        return Problem(input.device.type, input.dtype, sizes, (n, k, *outputs), channels_last, input.ndim == 3)

    def weight_sizes(self, label: str, weight: Tensor, *window: Any) -> dict[str, int]:
        """Nothing about the input."""
        (sh, sw), (ph, pw), (dh, dw) = self.pairs(label, *window[:3])
        groups = window[3]
        k, cg, r, s = self.checked_weight(label, weight, groups)
        return {
            "in_channels": cg * groups, "out_channels": k, "kernel_height": r, "kernel_width": s, "stride_h": sh,
            "stride_w": sw, "pad_h": ph, "pad_w": pw, "dilation_h": dh, "dilation_w": dw, "groups": groups, "has_bias": 0,
            "channels_last": 0,
        }  # fmt: skip

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The backward convolutions read input and weight."""
        input, weight, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[:7]
        ctx.save_for_backward(input, weight)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        input, weight = ctx.saved_tensors
        needs, window = list(ctx.needs[:3]), (ctx.stride, ctx.padding, ctx.dilation)
        if ctx.operator is not None:
            grads = ctx.operator(grad, input, weight, *window, ctx.groups, needs, **ctx.options)
        else:  # a Python callable
            lists = [base.spread("ai3::conv2d", v, 2, "size", 0) for v in window]
            y, x, bias = base.batched(grad), base.batched(input), [weight.shape[0]]
            grads = torch.ops.aten.convolution_backward(y, x, weight, bias, *lists, False, [0, 0], ctx.groups, needs)
            if needs[0]:
                grads = (grads[0].reshape(input.shape), *grads[1:])
        return tuple(g if wanted else None for g, wanted in zip(grads, needs, strict=True))

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
            if input.ndim == 4:  # unbatched samples: the new dimension is the batch
                return op(input.movedim(dims[0], 0), weight, bias, *window, groups, **options), 0
            y = op(base.fold(input, dims[0], 0, size), weight, bias, *window, groups, **options)
            return y.unflatten(0, (size, -1)), 0
        if bias is not None:
            bias = base.fold(bias, dims[2], 0, size)
        weight = base.fold(weight, dims[1], 0, size)  # (size * K, C/groups, R, S)
        if dims[0] is not None:
            channels = input.ndim - 4  # of a sample: dimension 0 or 1
            x = base.fold(input, dims[0], channels, size)
            y = op(x, weight, bias, *window, size * groups, **options)
            return y.unflatten(channels, (size, -1)), channels
        # One input for all: the groups stay, each gets the output channels of all samples.
        order = (size, groups, -1)
        weight = weight.unflatten(0, order).transpose(0, 1).flatten(0, 2)
        if bias is not None:
            bias = bias.unflatten(0, order).transpose(0, 1).flatten()
        channels = input.ndim - 3
        y = op(input, weight, bias, *window, groups, **options).unflatten(channels, (groups, size, -1))
        return y.movedim(channels + 1, 0).flatten(channels + 1, channels + 2), 0

    @staticmethod
    def flops(input: Any, weight: Any, *_: Any, out_shape: Any = None, **options: Any) -> int:
        """Two for each product."""
        lead = (1,) * (4 - len(input))
        return conv_flop_count([*lead, *input], list(weight), [*lead, *out_shape])


# Gradients ------------------------------------------------------------------------------------------------------------
def register_backward(rules: Conv2d, op: torch._ops.OpOverload, algorithm: str) -> None:
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
        label = f"ai3::conv2d_{forward}"
        problem = rules.problem(label, input, weight, None, stride, padding, dilation, groups)
        shape = problem.shape[1:] if problem.unbatched else problem.shape
        fits = tuple(grad.shape) == tuple(shape)
        check(fits, label, f"needs grad_output of the output's sizes {tuple(shape)}, got {tuple(grad.shape)}")
        grads = (
            problem._replace(shape=base.batched(input).shape),
            problem._replace(shape=weight.shape, channels_last=base.is_channels_last(weight), unbatched=False),
        )
        return (
            *(g.empty(input.device) if wanted else input.new_empty(0) for g, wanted in zip(grads, mask, strict=False)),
            input.new_empty(weight.shape[0]) if mask[2] else input.new_empty(0),
        )

    base.register_fake(op, fake)
    base.register_autograd(op, double_backward, save_backward)
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
    unbatched = input.ndim == 3
    if unbatched:
        grad, input, ggx = (None if t is None else t.unsqueeze(0) for t in (grad, input, ggx))
    lists = [base.spread("ai3::conv2d", v, 2, "size", 0) for v in ctx.window]
    window = (*lists, False, [0, 0], ctx.groups)
    backward = torch.ops.aten.convolution_backward
    of_grad = of_input = of_weight = None
    if ctx.needs[0]:
        terms = [] if ggb is None else [ggb.reshape(-1, 1, 1)]
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
    channels = input.ndim - (dims[1] is not None) - 3  # of a sample: dimension 0 or 1
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
    "packed": Conv2d.register_packed,
    "packed_out": Conv2d.register_packed,
    "held": Conv2d.register_held,
}
