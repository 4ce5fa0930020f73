"""relu: max(x, 0); NaN stays NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation, Problem


class Relu(Operation):
    """Rules of `ai3::relu_<algorithm>`, as torch.relu."""

    name = "relu"
    aten = staticmethod(torch.relu)

    def problem(self, label: str, input: Tensor, **_: Any) -> Problem:
        """Any shape; RuntimeError for other dtypes than the four."""
        base.check_dtype(label, input)
        return Problem(input.device.type, input.dtype, {"count": input.numel()}, tuple(input.shape))

    def fake(self, algorithm: str, *args: Any, **kwargs: Any) -> Tensor:
        """Keeps the order of dimensions in memory, as ATen's elementwise functions do."""
        self.checked(algorithm, *args, **kwargs)
        return torch.empty_like(args[0])

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The output says where the input was positive."""
        ctx.save_for_backward(output)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten.threshold_backward(grad, *ctx.saved_tensors, 0),)

    def vmap(
        self, op: Callable[..., Tensor], size: int, dims: Dims, input: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, int]:
        """Elementwise."""
        assert dims[0] is not None
        return op(input, *args, **options), dims[0]
