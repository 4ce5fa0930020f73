"""group_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, mean and variance of each group of an image's channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library
from ai3_ops.calls.spec import weights_of
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims
from ai3_ops.operations.case import STRANGE, BadCall, Case, Draw
from ai3_ops.operations.normalization import (
    NARROW,
    Form,
    Normalization,
    NormalizationCall,
    check_weights,
    groups,
    shapes_of_images,
)  # fmt: skip
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, check_dtype, is_channels_last, is_contiguous

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line


class GroupNorm(Normalization):
    """Rules of `ai3::group_norm_<algorithm>`, as torch.nn.functional.group_norm."""

    name = "group_norm"
    aten = staticmethod(torch.group_norm)

    def problem(
        self,
        label: str,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        **_: Any,
    ) -> Problem:
        """Input (N, C, *), weight and bias (C), also float32 ones beside 16 bits; RuntimeError."""
        check_dtype(label, input)
        check(input.ndim >= 2, label, f"needs input of at least 2 dimensions, got {tuple(input.shape)}")
        channels = input.shape[1]
        fits = num_groups > 0 and channels % num_groups == 0
        check(fits, label, f"needs num_groups that divide {channels} channels, got {num_groups}")
        wide = check_weights(label, input, (channels,), {"weight": weight, "bias": bias})
        pixels: Any = 1
        for size in input.shape[2:]:
            pixels = pixels * size
        last = is_channels_last(input)
        sizes = {
            "batch": input.shape[0], "channels": channels, "pixels": pixels, "groups": num_groups,
            "has_weight": weight is not None, "has_bias": bias is not None, "wide_weight": wide, "channels_last": last,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape), channels_last=last)

    def form(self, how: int, input: Tensor) -> Form:
        """Groups of channels."""
        return groups(how, input)

    def weight_shape(self, how: int, input: Tensor) -> tuple[Any, ...]:
        """The channels'."""
        return (input.shape[1],)

    def aten_backward(
        self,
        grad: Tensor,
        input: Tensor,
        how: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        """By ATen's functions."""
        aten, (n, c), pixels = torch.ops.aten, input.shape[:2], math.prod(input.shape[2:])
        _, mean, scale = aten.native_group_norm(input, weight, bias, n, c, pixels, how, eps)
        return aten.native_group_norm_backward(grad, input, mean, scale, weight, n, c, pixels, how, mask)

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """More images; weights of each sample's own are applied afterwards."""
        at, _, of_weight, of_bias = [*dims, None, None, None, None][:4]
        own = of_weight is not None or of_bias is not None
        if at is None:
            y = op(input, num_groups, None, None, *rest, **options).unsqueeze(0)
        else:
            given = (None, None) if own else (weight, bias)
            x = base.fold(input, at, 0, size)
            y = op(x, num_groups, *given, *rest, **options).unflatten(0, (size, -1))
        if not own:
            return y, 0
        for tensor, dim, apply in ((weight, of_weight, torch.mul), (bias, of_bias, torch.add)):
            if tensor is not None:
                lead, numbers = (1, tensor) if dim is None else (size, tensor.movedim(dim, 0))
                y = apply(y, numbers.reshape(lead, 1, -1, *[1] * (y.ndim - 3)))
        return y.to(input.dtype), 0

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    cases = (
        Case(((2, 6, 4, 5), (6,), (6,)), (3,)),
        Case(((3, 8), (8,), (8,)), (2,)),
        Case(((2, 4, 9), (4,), None), (2,)),
        Case(((1, 4, 2, 3, 5), (4,), (4,)), (2, 1e-6)),
        Case(((1, 32, 20, 17), (32,), (32,)), (4,)),
        Case(((2, 6, 4, 5), (6,), None), (1,)),
        Case(((2, 6, 4, 5), None, (6,)), (1, 1e-3)),
        Case(((1, 38, 5, 3), (38,), (38,)), (19,)),
        Case(((1, 2, 70, 70), (2,), (2,)), (1,)),
        Case(((0, 4, 3, 3), (4,), (4,)), (2,)),
        *(Case(((2, 6, 4, 5), (6,), (6,)), (2,), (layout,)) for layout in STRANGE),
        Case(((1, 34, 17, 19), (34,), (34,)), (2,), ("channels_last",)),
        Case(((3, 18, 1, 1), (18,), (18,)), (2,), ("channels_last",)),
        Case(((2, 6, 4, 5), (6,), (6,)), (3,), dtypes=("", "float32", "float32"), only=NARROW),
        Case(((2, 6, 4, 5), None, (6,)), (3,), dtypes=("", "", "float32"), only=NARROW),
    )
    layers = (
        Case(((1, 320, 64, 64), (320,), (320,)), (32, 1e-5)),
        Case(((1, 64, 56, 56), (64,), (64,)), (1, 1e-5)),
        Case(((1, 256, 28, 28), (256,), (256,)), (32, 1e-5), ("channels_last",)),
        Case(((1, 512, 4000), (512,), (512,)), (512, 1e-5)),
    )

    def terms(self, case: Case) -> int:
        """Elements of a group."""
        shape = case.shapes[0] or (1, 1)
        return math.prod(shape[1:]) // case.arguments[0]

    def made_up(self, draw: Draw) -> Case:
        """Images of a few groups."""
        n, _, h, w = draw.image
        count, each = draw.pick((1, 2, 3, 8)), draw.pick((1, 2, 5, 16))
        weight, bias = ((count * each,) if draw.chance(0.8) else None for _ in range(2))
        return Case(((n, count * each, h, w), weight, bias), (count,), draw.layouts)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w = new(2, 6, 3, 3), new(6)
        yield "groups that do not divide the channels", [x, w, w], [4]
        yield "no groups", [x, w, w], [0]
        yield "one dimension", [new(6), w, w], [2]
        yield "weight of wrong size", [x, new(5), None], [2]
        yield "bias of wrong rank", [x, w, new(1, 6)], [2]
        yield "weight of another dtype", [x.double(), w.float(), None], [2]
        yield "integer input", [x.int(), None, None], [2]


# Steps of networks and programs ------------------------------------------------------------------------------------------
class GroupNormStep(Step):
    """A line "group_norm_direct %0 groups=32 eps=1e-05 weight=$0 bias=$1"."""

    operation = "group_norm"
    constants = ("weight", "bias")
    has_channels = True

    @staticmethod
    def compute(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *,
        algorithm: str = "default",
    ) -> Tensor:
        """As torch.nn.functional.group_norm."""
        return computed("group_norm", torch.group_norm, algorithm, input)(input, num_groups, weight, bias, eps)

    stands_for: ClassVar = {
        torch.ops.aten.group_norm.default: lambda x, groups, weight=None, bias=None, eps=1e-5, *_: (
            (x, groups, weight, bias, eps)
        )
    }

    @staticmethod
    def works_on_rows(*_: Any) -> bool:
        """Pixels of a group see each other."""
        return False

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        return {"groups": str(arguments["num_groups"]), "eps": repr(float(arguments["eps"]))}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        (x,) = operands
        weight, bias = (x.new_empty(x.shape[1]) if name in line.options else None for name in self.constants)
        return x, line.flag("groups"), weight, bias, float(line.options["eps"])


# Calls in models ------------------------------------------------------------------------------------------------------
_ELEMENTS = {2: 2**17, 4: 2**16, 8: 2**16}  # by the bytes of a number (docs/algorithms/group_norm/default.md)
_CHANNELS = 256  # of channels_last
_WIDE = _library.registry()["level"] == "avx512"


class GroupNormCall(NormalizationCall):
    """torch.nn.functional.group_norm."""

    operation = "group_norm"
    functions = (F.group_norm, torch.group_norm)
    function = torch.group_norm
    modules: ClassVar = {nn.GroupNorm: lambda m, x: (x, m.num_groups, *weights_of(m), m.eps)}
    why_left = (
        "PyTorch is faster for some calls: of few elements, or in channels_last (docs/algorithms/group_norm/default.md)"
    )

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Where there is enough to compute; in channels_last with AVX-512 and few channels."""
        input, groups = args[:2]
        size = input.dtype.itemsize
        if not input.is_cpu or input.ndim < 2 or input.numel() < _ELEMENTS.get(size, 1):
            return not input.is_cpu
        if is_contiguous(input):
            return _WIDE or input.shape[0] * groups > 1
        return _WIDE and size < 8 and input.shape[1] <= _CHANNELS and is_channels_last(input)

    input_shapes = staticmethod(shapes_of_images)
