"""What functions of one element share: relu, gelu, silu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ai3_ops import _library
from ai3_ops.calls.call import Call
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import STRANGE, BadCall, Case
from ai3_ops.problem import Problem, check_dtype

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line


class Elementwise(Operation):
    """Rules of such an operation; a subclass has `save` and `backward`."""

    def problem(self, label: str, input: Tensor, **_: Any) -> Problem:
        """Any shape; RuntimeError for other dtypes than the four."""
        check_dtype(label, input)
        return Problem(str(input.device), input.dtype, {"count": input.numel()}, tuple(input.shape))

    def fake(self, algorithm: str, *args: Any, **kwargs: Any) -> Tensor:
        """Keeps the order of dimensions in memory, as ATen's elementwise functions do."""
        self.checked(algorithm, *args, **kwargs)
        return torch.empty_like(args[0])

    def vmap(
        self, op: Callable[..., Tensor], size: int, dims: Dims, input: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, int]:
        """Elementwise."""
        assert dims[0] is not None
        return op(input, *args, **options), dims[0]

    cases = (
        *(Case((shape,)) for shape in ((), (5,), (0, 3), (2, 3, 9, 8), (131,))),
        *(Case(((2, 3, 9, 8),), layouts=(layout,)) for layout in STRANGE),
    )
    layers = (
        Case(((1, 64, 112, 112),)),
        Case(((8, 256, 28, 28),), (), ("channels_last",)),
    )

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        yield "integer input", [new(3).int()], []


class ElementwiseLine:
    """What their `Step`s have: a line "silu_direct %0". `optimize` has activations instead, which it fuses (`steps.unary`)."""

    stands_for: ClassVar[Mapping[Any, Callable[..., Sequence[Any] | None]]] = {}

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """None."""
        return {}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """The input alone."""
        return operands


class ElementwiseCall(Call):
    """Of such a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))


# Where PyTorch's own were measured: not in float16, nor without AVX2.
_LEVEL = _library.registry()["level"]
WIDEST, MEASURED = _LEVEL == "avx512", _LEVEL in ("avx512", "avx2")
MEASURED_IN = (torch.float32, torch.bfloat16)
