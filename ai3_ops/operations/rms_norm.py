"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, the mean of each row of the last dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.operations import normalization
from ai3_ops.operations.case import BadCall, Case, Draw
from ai3_ops.operations.normalization import (
    NARROW,
    LineOfRows,
    NormalizationCall,
    RowNormalization,
    check_weights,
    row_count,
    shapes_of_rows,
)  # fmt: skip
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check_dtype


def default_eps(dtype: torch.dtype) -> float:
    """What ATen adds where no eps is given: the epsilon of the type that it computes in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _known_eps(input: Any, eps: float | None) -> float | None:
    """The same for a tensor; None stays for what a tracer gives."""
    return default_eps(input.dtype) if eps is None and isinstance(input, Tensor) else eps


class RmsNorm(RowNormalization):
    """Rules of `ai3::rms_norm_<algorithm>`, as torch.nn.functional.rms_norm."""

    name = "rms_norm"
    aten = staticmethod(F.rms_norm)
    centered = False
    own = (torch.mul,)

    def problem(
        self,
        label: str,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
        **_: Any,
    ) -> Problem:
        """Input (..., *normalized_shape), weight (normalized_shape), also a float32 one beside 16 bits; RuntimeError."""
        check_dtype(label, input)
        shape = tuple(normalized_shape)
        count = row_count(label, input, shape)
        wide = check_weights(label, input, shape, {"weight": weight})
        sizes = {
            "rows": count, "features": math.prod(shape), "has_weight": weight is not None, "wide_weight": wide,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape))

    def eps(self, input: Tensor, given: float | None) -> float:
        """The one that was given, or else ATen's."""
        return default_eps(input.dtype) if given is None else given

    def pytorch(  # type: ignore[override]
        self, input: Tensor, how: Any, weight: Tensor | None = None, eps: float | None = None, **_: Any
    ) -> Tensor:
        """In functions that have every derivative."""
        return normalization.forward(self.form(how, input), input, weight, None, self.eps(input, eps))

    def aten_backward(
        self,
        grad: Tensor,
        input: Tensor,
        how: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        """In PyTorch's functions: ATen has no such operator on the CPU."""
        return normalization.backward(self.form(how, input), grad, input, weight, eps, mask)

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    cases = (
        Case(((3, 5), (5,)), ((5,), 1e-5)),
        Case(((2, 3, 37), (37,)), ((37,), 1e-6)),
        Case(((4, 64), None), ((64,),)),
        Case(((2, 3, 4, 5), (4, 5)), ((4, 5), 1e-6)),
        Case(((7, 130), (130,)), ((130,), 1e-5)),
        Case(((4, 6), (4, 6)), ((4, 6), 1e-5)),
        Case(((0, 5), (5,)), ((5,), 1e-5)),
        Case(((3, 9000), (9000,)), ((9000,), 1e-5)),
        Case(((35, 17), (17,)), ((17,), 1e-5)),
        *(Case(((3, 2, 24), (24,)), ((24,), 1e-5), (layout,) * 2) for layout in ("transposed", "sliced", "expanded")),
        Case(((2, 4, 5, 6), (6,)), ((6,), 1e-5), ("channels_last",)),
        Case(((3, 2, 40), (40,)), ((40,), 1e-5), dtypes=("", "float32"), only=NARROW),
    )
    layers = (
        Case(((128, 768), (768,)), ((768,), 1e-6)),
        Case(((4, 128, 2048), (2048,)), ((2048,), 1e-6)),
    )

    def made_up(self, draw: Draw) -> Case:
        """Rows of any number of features."""
        features, lead = draw.pick((1, 2, 3, 7, 16, 17, 64, 96, 130, 384, 768, 1024, 3072)), draw.image[0]
        rows = draw.pick(((), (1,), (7,), (37,), (197,), (4, 49)))
        return Case(((lead, *rows, features), (features,) if draw.chance(0.8) else None), ((features,), 1e-5))

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w = new(3, 5), new(5)
        yield "no normalized_shape", [x, w], [[]]
        yield "another number of features", [new(3, 6), w], [[5]]
        yield "fewer dimensions than normalized_shape", [new(5), None], [[3, 5]]
        yield "weight of wrong size", [x, new(6)], [[5]]
        yield "weight of wrong rank", [x, new(1, 5)], [[5]]
        yield "weight of another dtype", [x.double(), w.float()], [[5]]
        yield "integer input", [x.int(), None], [[5]]


# Steps of networks and programs ------------------------------------------------------------------------------------------
class RmsNormStep(LineOfRows, Step):
    """A line "rms_norm_direct %0 dims=1 eps=1e-06 weight=$0", over the last `dims` dimensions."""

    operation = "rms_norm"
    constants = ("weight",)

    @staticmethod
    def compute(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float = 1e-5,
        *,
        algorithm: str = "default",
    ) -> Tensor:
        """As torch.nn.functional.rms_norm."""
        return computed("rms_norm", F.rms_norm, algorithm, input)(input, list(normalized_shape), weight, eps)

    stands_for: ClassVar = {
        torch.ops.aten.rms_norm.default: lambda x, shape, weight=None, eps=None: (
            x,
            tuple(shape),
            weight,
            default_eps(x.meta["dtype"]) if eps is None else eps,
        )
    }


# Calls in models ------------------------------------------------------------------------------------------------------
def _of_module(m: Any, x: Tensor) -> tuple[Any, ...]:
    return x, m.normalized_shape, m._parameters.get("weight"), _known_eps(x, m.eps)


_ELEMENTS_IN_TRAINING = 2**15


class RmsNormCall(NormalizationCall):
    """torch.nn.functional.rms_norm."""

    operation = "rms_norm"
    functions = (F.rms_norm, torch.rms_norm)
    function = torch.rms_norm
    modules: ClassVar = {nn.RMSNorm: _of_module}

    def arguments(  # type: ignore[override]
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> tuple[Any, ...]:
        """The same, with ATen's eps where none is given."""
        return input, normalized_shape, weight, _known_eps(input, eps)

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """Where there is enough to compute (docs/algorithms/rms_norm/default.md)."""
        input = args[0]
        return input.device.type != "cpu" or input.dtype.itemsize == 2 or input.numel() >= _ELEMENTS_IN_TRAINING

    input_shapes = staticmethod(shapes_of_rows)
