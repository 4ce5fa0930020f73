"""silu: x / (1 + e^-x)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.operations.elementwise import MEASURED, MEASURED_IN, Elementwise, ElementwiseCall, ElementwiseLine
from ai3_ops.operations.step import Step, computed


class Silu(Elementwise):
    """Rules of `ai3::silu_<algorithm>`, as torch.nn.functional.silu."""

    name = "silu"
    aten = staticmethod(F.silu)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The input."""
        ctx.save_for_backward(inputs[0])

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """In functions that have every derivative, which ATen's operator has not."""
        (input,) = ctx.saved_tensors
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        share = x.sigmoid()
        return ((grad * (share * (1 + x * (1 - share)))).to(input.dtype),)


class SiluStep(ElementwiseLine, Step):
    """A line "silu_direct %0"."""

    operation = "silu"

    @staticmethod
    def compute(input: Tensor, *, algorithm: str = "default") -> Tensor:
        """As torch.nn.functional.silu."""
        return computed("silu", F.silu, algorithm, input)(input)


class SiluCall(ElementwiseCall):
    """torch.nn.functional.silu, also in place: the result is then written back."""

    operation = "silu"
    functions = (F.silu,)
    function = F.silu
    modules: ClassVar = {nn.SiLU: lambda m, x: (x, True) if m.inplace else (x,)}
    repeats = True  # but in place, which is seen by its arguments
    in_place_argument = True
    why_left = "PyTorch is faster for some calls: of few elements, or in float64 (docs/algorithms/silu/default.md)"

    def __call__(self, input: Tensor, inplace: bool = False) -> Tensor:
        """As torch.nn.functional.silu."""
        kept = inplace and torch.is_grad_enabled()  # the gradient reads what is written over
        output = self.run_or_leave(input.clone() if kept else input)
        return input.copy_(output) if inplace else output

    def arguments(self, input: Tensor, inplace: bool = False) -> tuple[Any, ...]:
        """The same."""
        return (input,)

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Where there is enough to compute."""
        input = args[0]
        wide = MEASURED and input.dtype in MEASURED_IN and input.numel() >= _ELEMENTS
        return input.device.type != "cpu" or wide


_ELEMENTS = 2**15
