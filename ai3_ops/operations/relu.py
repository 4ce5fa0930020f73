"""relu: max(x, 0); NaN stays NaN."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops.calls.call import Call
from ai3_ops.operations.elementwise import Elementwise


class Relu(Elementwise):
    """Rules of `ai3::relu_<algorithm>`, as torch.relu."""

    name = "relu"
    aten = staticmethod(torch.relu)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The output says where the input was positive."""
        ctx.save_for_backward(output)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten.threshold_backward(grad, *ctx.saved_tensors, 0),)

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        return f"relu count={x.numel()}"

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        return nn.ReLU()


class ReluCall(Call):
    """torch.nn.functional.relu, also in place: the result is then written back."""

    operation = "relu"
    functions = (F.relu, torch.relu, F.relu_)
    methods = ("relu", "relu_")
    function = torch.relu
    modules: ClassVar = {nn.ReLU: lambda m, x: (x, m.inplace)}
    inside = (nn.LPPool2d,)
    in_place_argument = True
    why_left = "PyTorch is faster (docs/algorithms/relu/default.md)"
    never_gains = True

    def __call__(self, input: Tensor, inplace: bool = False) -> Tensor:
        """As torch.nn.functional.relu."""
        output = self.run(input)
        return input.copy_(output) if inplace else output

    def arguments(self, input: Tensor, inplace: bool = False) -> tuple[Any, ...]:
        """The same."""
        return (input,)

    @classmethod
    def computed_by(cls, module: nn.Module) -> bool:
        """Also layers of transformers with this activation."""
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        return super().computed_by(module) or (isinstance(module, layers) and module.activation in (F.relu, torch.relu))
