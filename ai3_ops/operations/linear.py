"""linear: y[..., n] = bias[n] + sum over k of x[..., k] * weight[n, k]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation, Problem, check


class Linear(Operation):
    """Rules of `ai3::linear_<algorithm>`, as torch.nn.functional.linear."""

    name = "linear"
    aten = staticmethod(torch.nn.functional.linear)
    autocast = True

    def problem(self, label: str, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Problem:
        """Input (..., in_features), weight (out_features, in_features) or (in_features,); RuntimeError otherwise."""
        base.check_same(label, input, weight, "weight")
        check(input.ndim > 0, label, "needs input of at least one dimension")
        check(
            weight.ndim in (1, 2),
            label,
            f"needs a weight (out_features, in_features) or (in_features,), got {tuple(weight.shape)}",
        )
        check(
            input.shape[-1] == weight.shape[-1],
            label,
            f"needs input of {weight.shape[-1]} features in its last dimension, got {tuple(input.shape)}",
        )
        base.check_dtype(label, input)
        out_features = weight.shape[0] if weight.ndim == 2 else 1
        if bias is not None:
            base.check_same(label, input, bias, "bias")
            expected = "(out_features,)" if weight.ndim == 2 else "()"
            check(
                bias.ndim == 0 or (bias.ndim == 1 and weight.ndim == 2 and bias.shape[0] in (1, out_features)),
                label,
                f"needs a bias of {expected} for weight {tuple(weight.shape)}, got {tuple(bias.shape)}",
            )
        rows = 1
        for size in input.shape[:-1]:
            rows = rows * size
        sizes = {
            "rows": rows, "in_features": input.shape[-1], "out_features": out_features, "has_bias": bias is not None,
        }  # fmt: skip
        return Problem(input.device.type, input.dtype, sizes, (*input.shape[:-1], *weight.shape[:-1]))

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The backward products read input and weight."""
        input, weight, bias = inputs
        ctx.save_for_backward(input, weight)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.options = {key: options[key] for key in ("allow_tf32", "deterministic")}

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        return backward_linear(ctx, grad, *ctx.saved_tensors, ctx.algorithm)

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """Folds the new dimension into the rows or, where the weights differ, into the output features."""
        dims = [*dims, None, None][:3]
        if dims[1] is None and dims[2] is None:
            assert dims[0] is not None
            return op(input.movedim(dims[0], 0), weight, bias, **options), 0
        w = base.lead(weight, dims[1], size)
        b = None if bias is None else base.lead(bias, dims[2], size)
        if dims[0] is not None:  # as many products of different matrices, each by the algorithm
            x = input.movedim(dims[0], 0)
            return torch.stack([op(x[i], w[i], None if b is None else b[i], **options) for i in range(size)]), 0
        single = w.ndim == 2  # a weight (in_features,) for each sample
        w = w.unsqueeze(1) if single else w
        if b is not None:
            b = b.reshape(size, -1).expand(w.shape[:2]).flatten()
        y = op(input, w.flatten(0, 1), b, **options).unflatten(-1, w.shape[:2]).movedim(-2, 0)
        return (y.squeeze(-1) if single else y), 0

    @staticmethod
    def flops(input: Any, weight: Any, *_: Any, out_shape: Any = None, **options: Any) -> int:
        """Two for each product."""
        count = 2 * input[-1]
        for size in out_shape:
            count *= size
        return count


def backward_linear(ctx: Any, grad: Tensor, input: Tensor, weight: Tensor, algorithm: str) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias that `ctx` needs, from ai3::_linear_<algorithm>_backward where there is one.

    A Python callable has none: plain products are used. The operators see matrices only.
    """
    needs = list(ctx.needs[:3])
    y, x, w = grad.reshape(-1, weight.shape[0] if weight.ndim == 2 else 1), input.reshape(-1, input.shape[-1]), weight
    if weight.ndim == 1:
        w = weight.unsqueeze(0)
    operator = getattr(torch.ops.ai3, f"_linear_{algorithm}_backward", None)
    if operator is None:
        grads = (y @ w if needs[0] else None, y.T @ x if needs[1] else None, y.sum(0) if needs[2] else None)
    else:
        grads = operator(y, x, w, needs, **ctx.options)
    return (
        grads[0].reshape(input.shape) if needs[0] else None,
        grads[1].reshape(weight.shape) if needs[1] else None,
        grads[2].sum_to_size(ctx.bias_shape).reshape(ctx.bias_shape) if needs[2] else None,
    )
