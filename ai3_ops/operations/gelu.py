"""gelu: x times the normal distribution's share below x, by erf or, approximately, by tanh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import registry
from ai3_ops.operations.elementwise import MEASURED, MEASURED_IN, WIDEST, Elementwise, ElementwiseCall, ElementwiseLine
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, is_contiguous

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line

FORMS = ("none", "tanh")  # by their numbers in C++


# Elements from which a view in the memory's order gains more than it costs, which is two nodes of the graph where gradients are
# recorded: below it took up to twice PyTorch's own time (two Zen 4 and two Zen 3 cores), from it on 0.55 to 0.9 of it.
_VIEWED, _VIEWED_TRAINED = 2**17, 2**19


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """torch.nn.functional.gelu, which takes the form by its name only.

    By erf PyTorch calls oneDNN for contiguous tensors alone: images in channels_last take 1.3 to 1.7 times as long (two Zen 5
    cores), and are seen as the contiguous tensors that their memory is.
    """
    if approximate == "none" and isinstance(input, Tensor) and input.ndim == 4 and input.is_cpu:
        enough = input.numel() >= (_VIEWED_TRAINED if input.requires_grad else _VIEWED)
        if enough and not is_contiguous(input) and is_contiguous(rows := input.permute(0, 2, 3, 1)):
            return F.gelu(rows).permute(0, 3, 1, 2)
    return F.gelu(input, approximate=approximate)


class Gelu(Elementwise):
    """Rules of `ai3::gelu_<algorithm>`, as torch.nn.functional.gelu."""

    name = "gelu"
    aten = staticmethod(F.gelu)
    signed_zeros = False  # by erf ATen's of -0 is +0 where oneDNN has AVX2

    def problem(self, label: str, input: Tensor, approximate: str = "none", **_: Any) -> Problem:
        """Any shape; RuntimeError for other dtypes than the four, and other forms than ATen's."""
        check(approximate in FORMS, label, f"needs approximate 'none' or 'tanh', got {approximate!r}")
        problem = super().problem(label, input)
        return problem._replace(sizes=problem.sizes | {"form": FORMS.index(approximate)})

    def pytorch(self, input: Tensor, approximate: str = "none", **options: Any) -> Tensor:
        """With its form."""
        return gelu(input, approximate)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The input, and the form."""
        ctx.approximate = options.get("approximate", "none")
        ctx.save_for_backward(inputs[0])

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """ATen's."""
        return (torch.ops.aten.gelu_backward(grad, *ctx.saved_tensors, approximate=ctx.approximate),)


class GeluStep(ElementwiseLine, Step):
    """A line "gelu_direct %0 approximate=tanh"."""

    operation = "gelu"

    @staticmethod
    def compute(input: Tensor, approximate: str = "none", *, algorithm: str = "default") -> Tensor:
        """As torch.nn.functional.gelu."""
        return computed("gelu", F.gelu, algorithm, input)(input, approximate=approximate)

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        return {"approximate": arguments["approximate"]}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        return operands[0], line.options.get("approximate", "none")


class GeluCall(ElementwiseCall):
    """torch.nn.functional.gelu."""

    operation = "gelu"
    functions = (F.gelu,)
    function = staticmethod(gelu)
    repeats = True
    modules: ClassVar = {nn.GELU: lambda m, x: (x, m.approximate)}
    why_left = (
        "PyTorch is faster for some calls: by erf of many elements, or in float64 (docs/algorithms/gelu/default.md)"
    )

    def arguments(self, input: Tensor, approximate: str = "none") -> tuple[Any, ...]:
        """The same, by position."""
        return input, approximate

    def choose(self, algorithm: Any) -> None:
        """The operator takes the form by name."""
        super().choose(algorithm)
        operator: Any = self.operator

        def call(input: Any, approximate: str = "none", **options: Any) -> Any:
            return operator(input, approximate=approximate, **options)

        self.operator = call

    def resolved(self, rule: str, args: tuple[Any, ...]) -> str:
        """With the form by name."""
        return registry.resolve(self.operation, rule, args[0], approximate=args[1])

    def numbers(self, args: tuple[Any, ...]) -> list[Any]:
        """The form's."""
        return [FORMS.index(args[1])]

    def gains(self, args: tuple[Any, ...]) -> bool:
        """By tanh where there is enough to compute; by erf where PyTorch's call of oneDNN takes longer than what it computes.

        It calls that for contiguous tensors alone.
        """
        input, approximate = args
        if input.device.type != "cpu":
            return True
        if input.dtype not in MEASURED_IN:
            return False
        if approximate == "tanh":
            return MEASURED and input.numel() >= _BY_TANH
        compiling = torch.compiler.is_compiling()  # Dynamo does not follow a question for threads
        threads = 1 if compiling else min(torch.get_num_threads(), 2)
        return WIDEST and input.numel() <= _BY_ERF[input.dtype] * threads and is_contiguous(input)

    def may_gain(self, module: Any) -> bool:
        """Of a module of one form, that."""
        forms = [module.approximate] if isinstance(module, nn.GELU) else FORMS
        return MEASURED and (WIDEST or "tanh" in forms)

    @classmethod
    def computed_by(cls, module: nn.Module) -> bool:
        """Also layers of transformers with this activation."""
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        return super().computed_by(module) or (isinstance(module, layers) and module.activation is F.gelu)


_BY_TANH = 2**12
_BY_ERF = {torch.float32: 2**14, torch.bfloat16: 2**13}  # for each of one or two threads: more were not measured
