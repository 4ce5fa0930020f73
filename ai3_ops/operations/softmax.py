"""softmax: y = exp(x) / (the sum of exp(x) over a dimension)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library
from ai3_ops._torch import OpOverload, implicit_softmax_dim
from ai3_ops.calls.call import Call
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import STRANGE, BadCall, Case, Draw
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, check_dtype

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line


class Softmax(Operation):
    """Rules of `ai3::softmax_<algorithm>`, as torch.softmax."""

    name = "softmax"
    aten = staticmethod(torch.softmax)

    def problem(self, label: str, input: Tensor, dim: int, **_: Any) -> Problem:
        """Any shape, and a dimension of it; RuntimeError."""
        check_dtype(label, input)
        rank = max(input.ndim, 1)
        fits = -rank <= dim < rank
        check(fits, label, f"needs dim in [{-rank}, {rank - 1}], got {dim}")
        at = dim % rank
        shape = tuple(input.shape) or (1,)
        sizes = {"outer": math.prod(shape[:at]), "size": shape[at], "inner": math.prod(shape[at + 1 :])}
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape))

    def register_forward(self, op: OpOverload, algorithm: str) -> None:
        """Autocast is ATen's: none on the CPU, float32 on CUDA."""

        def cast(device: str, input: Tensor, *args: Any, **options: Any) -> Any:
            return op(base.autocast_to_float32(device, input), *args, **options)

        super().register_forward(op, algorithm)
        base.register_autocast(op, cast)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The derivatives are made of the output."""
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        (output,) = ctx.saved_tensors
        return (torch.ops.aten._softmax_backward_data(grad, output, ctx.dim, output.dtype),)

    def vmap(
        self, op: Callable[..., Tensor], size: int, dims: Dims, input: Tensor, dim: int, *args: Any, **options: Any
    ) -> tuple[Tensor, int]:
        """One more dimension in front."""
        assert dims[0] is not None
        x = input.movedim(dims[0], 0)
        if x.ndim == 1:  # each sample is one number, whatever its only dimension is called
            return op(x.unsqueeze(1), 1, *args, **options).squeeze(1), 0
        return op(x, dim % (x.ndim - 1) + 1, *args, **options), 0

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    cases = (
        Case(((3, 5),), (-1,)),
        Case(((),), (0,)),
        Case(((0, 5),), (1,)),
        Case(((5, 0),), (1,)),
        Case(((2, 3, 37),), (2,)),
        Case(((2, 3, 130),), (-1,)),
        Case(((2, 9000),), (1,)),
        Case(((7, 3),), (0,)),
        Case(((2, 9, 16),), (1,)),
        Case(((2, 70, 5, 27),), (1,)),
        Case(((3, 4, 5, 1),), (2,)),
        *(Case(((2, 3, 9, 8),), (dim,), (layout,)) for layout in STRANGE for dim in (1, 3)),
    )
    layers = (
        Case(((12, 197, 197),), (-1,)),
        Case(((8, 4, 49, 49),), (-1,)),
        Case(((64, 1000),), (1,)),
        Case(((1, 21, 128, 128),), (1,)),
    )
    signed_zeros = False  # of zeros come no zeros

    def terms(self, case: Case) -> int:
        """Elements of a sum."""
        shape = case.shapes[0] or (1,)
        return shape[case.arguments[0]]

    def made_up(self, draw: Draw) -> Case:
        """Rows of any length, or any dimension of an image."""
        if draw.chance(0.5):
            rows = draw.pick((1, 7, 37, 197))
            return Case(
                ((*draw.pick(((), (2,), (12,))), rows, draw.pick((1, 2, 5, 16, 49, 64, 77, 197, 1000))),), (-1,)
            )
        return Case((draw.image,), (draw.pick((1, 2, 3)),), draw.layouts)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        yield "no such dimension", [new(3, 4)], [2]
        yield "no such dimension from the end", [new(3, 4)], [-3]
        yield "integer input", [new(3).int()], [0]


# Steps of networks and programs ------------------------------------------------------------------------------------------
class SoftmaxStep(Step):
    """A line "softmax_direct %0 dim=-1"."""

    operation = "softmax"

    @staticmethod
    def compute(input: Tensor, dim: int, *, algorithm: str = "default") -> Tensor:
        """As torch.softmax."""
        return computed("softmax", torch.softmax, algorithm, input)(input, dim)

    stands_for: ClassVar = {
        torch.ops.aten.softmax.int: lambda x, dim, dtype: _step_arguments(x, dim, dtype),
        torch.ops.aten._softmax.default: lambda x, dim, wider: _step_arguments(
            x, dim, torch.float32 if wider else None
        ),
    }

    @staticmethod
    def works_on_rows(input: Any, dim: int) -> bool:
        """Over the last dimension."""
        return dim == -1

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        return {"dim": str(arguments["dim"])}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        return operands[0], line.flag("dim")


def _step_arguments(x: Any, dim: int, dtype: torch.dtype | None) -> tuple[Any, ...] | None:
    """The dimension counted from the end: right also where a view in front goes behind. None where the input is cast."""
    rank = len(x.meta["shape"])
    if rank == 0 or dtype not in (None, x.meta["dtype"]):
        return None
    return x, dim % rank - rank


# Calls in models ------------------------------------------------------------------------------------------------------
class SoftmaxCall(Call):
    """torch.nn.functional.softmax."""

    operation = "softmax"
    functions = (F.softmax, torch.softmax)
    methods = ("softmax",)
    function = F.softmax  # as nn.Softmax: its dimension may become None after the swap
    repeats = True
    modules: ClassVar = {nn.Softmax: lambda m, x: (x, m.dim)}
    inside = (nn.Softmax2d,)
    why_left = (
        "PyTorch is faster for some calls: of few elements, short sums or 16 bits (docs/algorithms/softmax/default.md)"
    )

    def arguments(
        self,
        input: Tensor,
        dim: int | None = None,
        stacklevel: int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """The input in `dtype`, which torch.softmax has in third place; without `dim` the dimension that PyTorch warns of."""
        dtype = stacklevel if isinstance(stacklevel, torch.dtype) else dtype
        if dim is None:
            dim = implicit_softmax_dim("softmax", input.dim(), 5)
        return input if dtype is None else input.to(dtype), dim

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for (docs/algorithms/softmax/default.md)."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Where there is enough to compute: in long rows, or in other dimensions with many neighbours."""
        input, dim = args
        if input.device.type != "cpu":
            return True
        if not _GAINS or input.dtype.itemsize == 2 or input.numel() < _ELEMENTS:
            return False
        inner = math.prod(input.shape[dim % input.ndim + 1 :])
        return inner >= _NEIGHBOURS or (inner == 1 and input.shape[dim] >= _ROW)


_GAINS = _library.registry()["level"] in ("avx512", "avx2")  # where PyTorch's was measured
_ELEMENTS, _ROW, _NEIGHBOURS = 2**16, 128, 64
