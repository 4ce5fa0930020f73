"""flatten: dimensions start_dim to end_dim become one; always a copy, since an operator's output may not alias its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ai3_ops.calls.call import Call
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import STRANGE, BadCall, Case, Draw
from ai3_ops.problem import Problem, check, check_dtype


class Flatten(Operation):
    """Rules of `ai3::flatten_<algorithm>`, as torch.flatten."""

    name = "flatten"
    aten = staticmethod(torch.flatten)

    def problem(self, label: str, input: Tensor, start_dim: int = 0, end_dim: int = -1, **_: Any) -> Problem:
        """Any shape; RuntimeError for dimensions that it does not have."""
        rank = max(input.ndim, 1)
        for value, name in ((start_dim, "start_dim"), (end_dim, "end_dim")):
            check(-rank <= value < rank, label, f"needs {name} in [{-rank}, {rank - 1}], got {value}")
        start, end = start_dim % rank, end_dim % rank
        check(start <= end, label, f"needs start_dim no later than end_dim, got {start_dim} and {end_dim}")
        check_dtype(label, input)
        shape = tuple(input.shape) or (1,)
        joined = 1
        for size in shape[start : end + 1]:
            joined = joined * size
        shape = (*shape[:start], joined, *shape[end + 1 :])
        return Problem(str(input.device), input.dtype, {"count": input.numel()}, shape)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """Only the shape is needed."""
        ctx.shape = inputs[0].shape

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The same elements in the old shape."""
        return (grad.reshape(ctx.shape),)

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        start_dim: int = 0,
        end_dim: int = -1,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """The new dimension comes first and stays."""
        assert dims[0] is not None
        input = input.movedim(dims[0], 0)
        if input.ndim == 1:  # samples without dimensions are flattened to one element
            input = input.unsqueeze(1)
        rank = input.ndim - 1
        start, end = (d + 1 if d >= 0 else d + 1 + rank for d in (start_dim, end_dim))
        return op(input, start, end, **options), 0

    cases = (
        *(Case((shape,)) for shape in ((), (5,), (0, 3), (2, 3, 9, 8))),
        *(Case(((2, 3, 9, 8),), arguments) for arguments in ((1,), (1, 2), (-2, -1), (2, 2))),
        *(Case(((2, 3, 9, 8),), (1,), (layout,)) for layout in STRANGE),
    )
    layers = (
        Case(((8, 512, 7, 7),), (1,)),
        Case(((8, 512, 7, 7),), (1,), ("channels_last",)),
    )

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        return f"flatten count={x.numel()}"

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        return nn.Flatten(0)

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        return Case((draw.image,), (draw.pick((0, 1, 2)),), draw.layouts)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        yield "integer input", [new(3).int()], []
        yield "start_dim out of range", [new(2, 3)], [2]
        yield "end_dim out of range", [new(2, 3)], [0, -3]
        yield "start_dim after end_dim", [new(2, 3)], [1, 0]


class FlattenCall(Call):
    """torch.flatten; the result is a copy."""

    operation = "flatten"
    functions = (torch.flatten,)
    methods = ("flatten",)
    function = torch.flatten
    modules: ClassVar = {nn.Flatten: lambda m, x: (x, m.start_dim, m.end_dim)}
    returns_view = True

    def arguments(self, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> tuple[Any, ...]:
        """The same."""
        return input, start_dim, end_dim
