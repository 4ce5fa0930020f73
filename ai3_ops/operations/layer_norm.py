"""layer_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, mean and variance of each row of the last dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library
from ai3_ops.calls.spec import weights_of
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
from ai3_ops.problem import Problem, check_dtype, is_contiguous


class LayerNorm(RowNormalization):
    """Rules of `ai3::layer_norm_<algorithm>`, as torch.nn.functional.layer_norm."""

    name = "layer_norm"
    aten = staticmethod(F.layer_norm)
    centered = True
    own = (torch.mul, torch.add)

    def problem(
        self,
        label: str,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        **_: Any,
    ) -> Problem:
        """Input (..., *normalized_shape), weight and bias (normalized_shape), also float32 ones beside 16 bits; RuntimeError."""
        check_dtype(label, input)
        shape = tuple(normalized_shape)
        count = row_count(label, input, shape)
        wide = check_weights(label, input, shape, {"weight": weight, "bias": bias})
        sizes = {
            "rows": count, "features": math.prod(shape), "has_weight": weight is not None, "has_bias": bias is not None,
            "wide_weight": wide,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape))

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
        """By ATen's functions."""
        aten = torch.ops.aten
        _, mean, scale = aten.native_layer_norm(input, how, weight, bias, eps)
        return aten.native_layer_norm_backward(grad, input, how, mean, scale, weight, bias, mask)

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    cases = (
        Case(((3, 5), (5,), (5,)), ((5,),)),
        Case(((2, 3, 37), (37,), None), ((37,),)),
        Case(((2, 3, 37), None, (37,)), ((37,), 1e-3)),
        Case(((4, 64), None, None), ((64,),)),
        Case(((2, 3, 4, 5), (4, 5), (4, 5)), ((4, 5), 1e-6)),
        Case(((7, 130), (130,), (130,)), ((130,),)),
        Case(((4, 6), (4, 6), (4, 6)), ((4, 6),)),
        Case(((0, 5), (5,), (5,)), ((5,),)),
        Case(((3, 9000), (9000,), (9000,)), ((9000,),)),
        Case(((35, 17), (17,), (17,)), ((17,),)),
        *(Case(((3, 2, 24), (24,), (24,)), ((24,),), (layout,) * 3) for layout in ("transposed", "sliced", "expanded")),
        Case(((2, 4, 5, 6), (6,), (6,)), ((6,),), ("channels_last",)),
        Case(((3, 2, 40), (40,), (40,)), ((40,),), dtypes=("", "float32", "float32"), only=NARROW),
        Case(((3, 2, 40), None, (40,)), ((40,),), dtypes=("", "", "float32"), only=NARROW),
    )
    layers = (
        Case(((197, 768), (768,), (768,)), ((768,), 1e-6)),
        Case(((64, 49, 128), (128,), (128,)), ((128,),)),
        Case(((1, 56, 56, 96), (96,), (96,)), ((96,), 1e-6)),
        Case(((4, 128, 1024), (1024,), (1024,)), ((1024,),)),
    )

    def made_up(self, draw: Draw) -> Case:
        """Rows of any number of features."""
        features, lead = draw.pick((1, 2, 3, 7, 16, 17, 64, 96, 130, 384, 768, 1024, 3072)), draw.image[0]
        rows = draw.pick(((), (1,), (7,), (37,), (197,), (4, 49)))
        weight, bias = ((features,) if draw.chance(0.8) else None for _ in range(2))
        return Case(((lead, *rows, features), weight, bias), ((features,),))

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w = new(3, 5), new(5)
        yield "no normalized_shape", [x, w, w], [[]]
        yield "another number of features", [new(3, 6), w, w], [[5]]
        yield "fewer dimensions than normalized_shape", [new(5), None, None], [[3, 5]]
        yield "weight of wrong size", [x, new(6), None], [[5]]
        yield "bias of wrong rank", [x, w, new(1, 5)], [[5]]
        yield "weight of another dtype", [x.double(), w.float(), None], [[5]]
        yield "weight and bias of two dtypes", [x.double(), w.double(), w.float()], [[5]]
        yield "integer input", [x.int(), None, None], [[5]]


# Steps of networks and programs ------------------------------------------------------------------------------------------
class LayerNormStep(LineOfRows, Step):
    """A line "layer_norm_direct %0 dims=1 eps=1e-05 weight=$0 bias=$1", over the last `dims` dimensions."""

    operation = "layer_norm"
    constants = ("weight", "bias")

    @staticmethod
    def compute(
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *,
        algorithm: str = "default",
    ) -> Tensor:
        """As torch.nn.functional.layer_norm."""
        function = computed("layer_norm", F.layer_norm, algorithm, input)
        return function(input, list(normalized_shape), weight, bias, eps)

    stands_for: ClassVar = {
        torch.ops.aten.layer_norm.default: lambda x, shape, weight, bias, eps, *_: (x, tuple(shape), weight, bias, eps)
    }


# Calls in models ------------------------------------------------------------------------------------------------------
_ELEMENTS, _FEATURES = {4: 2**18, 8: 2**16, 2: 2**16}, {4: 384, 8: 1, 2: 256}  # by the bytes of a number
_GAINS = (
    _library.registry()["level"] == "avx512"
)  # with AVX2 PyTorch takes less (docs/algorithms/layer_norm/default.md)


class LayerNormCall(NormalizationCall):
    """torch.nn.functional.layer_norm."""

    operation = "layer_norm"
    functions = (F.layer_norm, torch.layer_norm)
    function = torch.layer_norm
    modules: ClassVar = {nn.LayerNorm: lambda m, x: (x, m.normalized_shape, *weights_of(m), m.eps)}
    why_left = (
        "PyTorch is faster for some calls: of few elements, or short rows (docs/algorithms/layer_norm/default.md)"
        if _GAINS
        else "PyTorch is faster with AVX2 (docs/algorithms/layer_norm/default.md)"
    )

    def gains(self, args: tuple[Any, ...]) -> bool:
        """With AVX-512, where there is enough to compute."""
        input, shape = args[:2]
        if input.device.type == "cpu" and not _GAINS:
            return False
        if input.device.type != "cpu":
            return True
        bytes = input.dtype.itemsize
        enough = math.prod(shape) >= _FEATURES.get(bytes, 1) and input.numel() >= _ELEMENTS.get(bytes, 1)
        return enough and is_contiguous(input)

    input_shapes = staticmethod(shapes_of_rows)
