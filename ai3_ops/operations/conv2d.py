"""conv2d: y[n, k, i, j] = bias[k] + sum over c, r, s of weight[k, c, r, s] * x[n, c, i*stride + r*dilation - padding, ...]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count

from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation, Problem, check


class Conv2d(Operation):
    """Rules of `ai3::conv2d_<algorithm>`, as torch.nn.functional.conv2d."""

    name = "conv2d"
    aten = staticmethod(torch.nn.functional.conv2d)
    autocast = True

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
        **_: Any,
    ) -> Problem:
        """Input (N, C, H, W) or (C, H, W), weight (K, C/groups, R, S), bias (K); RuntimeError for what does not fit."""
        base.check_same(label, input, weight, "weight")
        check(
            weight.ndim == 4,
            label,
            "needs a 4-D weight (out_channels, in_channels/groups, kernel_height, kernel_width), got "
            f"{tuple(weight.shape)}",
        )
        check(input.ndim in (3, 4), label, f"needs input (N, C, H, W) or (C, H, W), got {tuple(input.shape)}")
        base.check_dtype(label, input)
        stride = base.spread(label, stride, 2, "stride", 1)
        padding = base.spread(label, padding, 2, "padding", 0)
        dilation = base.spread(label, dilation, 2, "dilation", 1)
        x = base.batched(input)
        n, c, h, w = x.shape
        k, cg, *kernel = weight.shape
        r, s = map(int, kernel)  # a kernel of unknown size has no algorithm: a traced one becomes constant
        check(groups > 0, label, f"needs groups of at least 1, got {groups}")
        check(
            (k > 0) & (k % groups == 0),
            label,
            f"needs a number of output channels that groups divides, got {k} and groups {groups}",
        )
        check(
            (c > 0) & (c == cg * groups),
            label,
            f"needs input of {cg * groups} channels for weight {tuple(weight.shape)} and groups {groups}, got "
            f"{tuple(input.shape)}",
        )
        check((r > 0) & (s > 0), label, f"needs a kernel of at least 1x1, got {tuple(weight.shape)}")
        outputs = []
        for size, kernel, step, pad, spacing in zip((h, w), (r, s), stride, padding, dilation, strict=True):
            padded, extent = size + 2 * pad, spacing * (kernel - 1) + 1
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
        }  # fmt: skip
        return Problem(input.device.type, input.dtype, sizes, (n, k, *outputs), channels_last, input.ndim == 3)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The backward convolutions read input and weight."""
        input, weight, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs[:7]
        ctx.save_for_backward(input, weight)
        ctx.options = {key: options[key] for key in ("allow_tf32", "deterministic")}

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        return backward_convolution(ctx, grad, *ctx.saved_tensors, ctx.algorithm)

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """Folds the new dimension into the batch or, where the weights differ, into the groups or output channels."""
        dims = [*dims, None, None][:3]
        window = (stride, padding, dilation)
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


def backward_convolution(
    ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, algorithm: str
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias that `ctx` needs, from ai3::_conv2d_<algorithm>_backward where there is one.

    A Python callable has none: ATen's is used.
    """
    needs = list(ctx.needs[:3])
    operator = getattr(torch.ops.ai3, f"_conv2d_{algorithm}_backward", None)
    window = (ctx.stride, ctx.padding, ctx.dilation)
    if operator is None:
        unbatched = input.ndim == 3
        spread = [base.spread("ai3::conv2d", v, 2, "size", 0) for v in window]
        grads = torch.ops.aten.convolution_backward(
            base.batched(grad),
            base.batched(input),
            weight,
            [weight.shape[0]],
            *spread,
            False,
            [0, 0],
            ctx.groups,
            needs,
        )
        if unbatched and needs[0]:
            grads = (grads[0].squeeze(0), *grads[1:])
    else:
        grads = operator(grad, input, weight, *window, ctx.groups, needs, **ctx.options)
    return tuple(g if wanted else None for g, wanted in zip(grads, needs, strict=True))
