"""batch_norm: y = (x - running_mean) / sqrt(running_var + eps) * weight + bias, for each channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops._torch import OpOverload
from ai3_ops.calls.spec import weights_of
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import STRANGE, BadCall, Case, Draw
from ai3_ops.operations.normalization import NARROW, NormalizationCall, check_weights, shapes_of_images
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, check_dtype, is_channels_last

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line


class BatchNorm(Operation):
    """Rules of `ai3::batch_norm_<algorithm>`, as torch.nn.functional.batch_norm with training=False."""

    name = "batch_norm"
    aten = staticmethod(F.batch_norm)

    def problem(
        self,
        label: str,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        **_: Any,
    ) -> Problem:
        """Input (N, C, *), the others (C), also float32 ones beside 16 bits; RuntimeError."""
        check_dtype(label, input)
        check(input.ndim >= 2, label, f"needs input of at least 2 dimensions, got {tuple(input.shape)}")
        given = training or (running_mean is not None and running_var is not None)
        lacks = (
            "no running_var"
            if running_mean is not None
            else "no running_mean"
            if running_var is not None
            else "neither"
        )
        check(given, label, f"needs running_mean and running_var where training is False, got {lacks}")
        named = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        wide = check_weights(label, input, (input.shape[1],), named)
        pixels: Any = 1
        for size in input.shape[2:]:
            pixels = pixels * size
        last = is_channels_last(input)
        sizes = {
            "batch": input.shape[0], "channels": input.shape[1], "pixels": pixels, "training": bool(training),
            "has_weight": weight is not None, "has_bias": bias is not None, "wide_weight": wide, "channels_last": last,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape), channels_last=last)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """All that the derivatives read."""
        input, mean, variance, weight, _, _, _, ctx.eps = inputs
        ctx.save_for_backward(input, mean, variance, weight)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator; of running_mean and running_var there are none, as in PyTorch."""
        needs = [ctx.needs[i] for i in (0, 3, 4)]
        compute: Any = pytorch_backward if ctx.operator is None else ctx.operator
        grads = compute(grad, *ctx.saved_tensors, ctx.eps, needs)
        x, w, b = (g if wanted else None for g, wanted in zip(grads, needs, strict=True))
        return x, None, None, w, b

    def pytorch(
        self,
        input: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        **_: Any,
    ) -> Tensor:
        """In functions that have every derivative."""
        h, _scale = _normal(input, running_mean.detach(), running_var.detach(), eps)
        y = h if weight is None else h * _wide(weight, input)
        return (y if bias is None else y + _wide(bias, input)).to(input.dtype)

    def vmap(
        self, op: Callable[..., Tensor], size: int, dims: Dims, input: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, int]:
        """More images; where a sample has numbers of its own, more channels."""
        at = [*dims, *[None] * 8][: 1 + len(rest)]
        if all(d is None for d in at[1:]):
            return op(base.fold(input, at[0], 0, size), *rest, **options).unflatten(0, (size, -1)), 0
        numbers = [base.fold(t, d, 0, size) if isinstance(t, Tensor) else t for t, d in zip(rest, at[1:], strict=True)]
        return op(base.fold(input, at[0], 1, size), *numbers, **options).unflatten(1, (size, -1)), 1

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    signed_zeros = False
    statistics = (1, 2)
    # Variances are drawn as any number: with so large an eps none is of less than zero.
    cases = (
        Case(((2, 6, 4, 5), (6,), (6,), (6,), (6,)), (False, 0.1, 64.0)),
        Case(((3, 8), (8,), (8,), (8,), None), (False, 0.1, 64.0)),
        Case(((2, 4, 9), (4,), (4,), (4,), (4,)), (False, 0.1, 81.0)),
        Case(((1, 4, 2, 3, 5), (4,), (4,), None, None), (False, 0.1, 64.0)),
        Case(((2, 5, 3, 3), (5,), (5,), None, (5,)), (False, 0.1, 64.0)),
        Case(((1, 37, 20, 17), (37,), (37,), (37,), (37,)), (False, 0.1, 64.0)),
        Case(((0, 4, 3, 3), (4,), (4,), (4,), (4,)), (False, 0.1, 64.0)),
        *(Case(((2, 6, 4, 5), (6,), (6,), (6,), (6,)), (False, 0.1, 64.0), (layout,)) for layout in STRANGE),
        Case(((1, 34, 17, 19), (34,), (34,), (34,), (34,)), (False, 0.1, 64.0), ("channels_last",)),
        Case(
            ((2, 6, 4, 5), (6,), (6,), (6,), (6,)),
            (False, 0.1, 64.0),
            dtypes=("", "float32", "float32", "float32", "float32"),
            only=NARROW,
        ),
    )
    layers = (
        Case(((1, 64, 112, 112), (64,), (64,), (64,), (64,)), (False, 0.1, 64.0), ("channels_last",)),
        Case(((1, 512, 28, 28), (512,), (512,), (512,), (512,)), (False, 0.1, 64.0)),
    )

    def backward_call(self, call: Any) -> list[Any] | None:
        """The bias is not among its arguments."""
        x, mean, variance, weight, _ = call.tensors
        return [call.grad(), x, mean, variance, weight, call.case.arguments[2]]

    def terms(self, case: Case) -> int:
        """A product and a sum."""
        return 3

    def made_up(self, draw: Draw) -> Case:
        """Images of any channels."""
        n, c, h, w = draw.image
        weight, bias = ((c,) if draw.chance(0.8) else None for _ in range(2))
        return Case(((n, c, h, w), (c,), (c,), weight, bias), (False, 0.1, 64.0), draw.layouts)

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w = new(2, 6, 3, 3), new(6)
        yield "no statistics", [x, None, None, w, w], []
        yield "one of two statistics", [x, w, None, w, w], []
        yield "training", [x, w, w.abs(), w, w], [True]
        yield "one dimension", [new(6), w, w, w, w], []
        yield "weight of wrong size", [x, w, w, new(5), None], []
        yield "mean of wrong rank", [x, new(1, 6), w, None, None], []
        yield "variance of another dtype", [x.double(), w.double(), w.float(), None, None], []
        yield "integer input", [x.int(), w, w, None, None], []


def _wide(numbers: Tensor, input: Tensor) -> Tensor:
    """In float64, so that they broadcast to the channels."""
    return numbers.double().reshape(-1, *[1] * (input.ndim - 2))


def _normal(input: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = (_wide(variance, input) + eps).rsqrt()
    return (input.double() - _wide(mean, input)) * scale, scale


def _summed(tensor: Tensor) -> Tensor:
    """Over all but the channels."""
    return tensor.sum([0, *range(2, tensor.ndim)])


# Gradients ------------------------------------------------------------------------------------------------------------
def pytorch_backward(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    mask: list[bool],
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """What the operator computes, in PyTorch's functions."""
    h, scale = _normal(input, mean, variance, eps)
    y = grad.double()
    of_x = y * scale if weight is None else y * scale * _wide(weight, input)
    dtype = mean.dtype
    grads = of_x.to(input.dtype), _summed(y * h).to(dtype), _summed(y).to(dtype)
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


def register_backward(rules: BatchNorm, op: OpOverload, algorithm: str) -> None:
    """ai3::_batch_norm_<algorithm>_backward: its fake kernel, second derivatives, vmap."""

    def fake(
        grad: Tensor,
        input: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        eps: float,
        mask: list[bool],
        **_: Any,
    ) -> tuple[Tensor, ...]:
        label = f"ai3::batch_norm_{algorithm}"
        problem = rules.problem(label, input, mean, variance, weight)
        fits = grad.shape == input.shape
        check(fits, label, f"needs grad_output of the input's sizes {tuple(input.shape)}, got {tuple(grad.shape)}")
        of_x = problem.empty(input.device) if mask[0] else input.new_empty(0)
        return (of_x, *(mean.new_empty(input.shape[1] if wanted else 0) for wanted in mask[1:]))

    def save(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        *tensors, ctx.eps, ctx.mask = inputs
        ctx.save_for_backward(*tensors)

    def second(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of dX = dY s w, dweight = sum of dY (x - mean) s and dbias = sum of dY, s the scale of a channel."""
        gy, x, mean, variance, weight = ctx.saved_tensors
        a, c, e = (g.double() if wanted and g is not None else None for g, wanted in zip(grads, ctx.mask, strict=True))
        h, scale = _normal(x, mean, variance, ctx.eps)
        dy = gy.double()
        to_y, to_x = torch.zeros_like(dy), torch.zeros_like(dy)
        to_w = None
        if a is not None:
            to_y = a * scale if weight is None else a * scale * _wide(weight, x)
            to_w = None if weight is None else _summed(a * dy * scale).to(weight.dtype)
        if c is not None:
            to_y, to_x = to_y + _wide(c, x) * h, _wide(c, x) * dy * scale
        if e is not None:
            to_y = to_y + _wide(e, x)
        if weight is not None and to_w is None:
            to_w = torch.zeros_like(weight)
        return to_y.to(gy.dtype), to_x.to(x.dtype), None, None, to_w

    base.register_fake(op, fake)
    base.register_autograd(op, second, save, pytorch_backward)
    base.register_vmap(op, vmap_backward)


def vmap_backward(
    op: Callable[..., tuple[Tensor, ...]], size: int, dims: Dims, *args: Any, **options: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """One call for each sample: each has sums of its own."""
    at = [*dims, *[None] * len(args)][: len(args)]
    each = [base.lead(a, d, size) if isinstance(a, Tensor) else [a] * size for a, d in zip(args, at, strict=True)]
    results = zip(*(op(*values, **options) for values in zip(*each, strict=True)), strict=True)
    return tuple(torch.stack(r) for r in results), (0, 0, 0)


BatchNorm.rules = {"backward": register_backward, "out": Operation.register_out}


# Steps of networks and programs ------------------------------------------------------------------------------------------
class BatchNormStep(Step):
    """A line "batch_norm_direct %0 eps=1e-05 running_mean=$0 running_var=$1 weight=$2 bias=$3".

    Of two and four dimensions a network has products and sums by channel in its place, which lie in the weights before or after.
    """

    operation = "batch_norm"
    constants = ("running_mean", "running_var", "weight", "bias")

    @staticmethod
    def compute(
        input: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *,
        algorithm: str = "default",
    ) -> Tensor:
        """As torch.nn.functional.batch_norm."""
        function = computed("batch_norm", F.batch_norm, algorithm, input)
        return function(input, running_mean, running_var, weight, bias, training, momentum, eps)

    stands_for: ClassVar = {torch.ops.aten.batch_norm.default: lambda *args: _step_arguments(*args)}

    @staticmethod
    def works_on_rows(*_: Any) -> bool:
        """Channels are not the last dimension."""
        return False

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        return {"eps": repr(float(arguments["eps"]))}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        (x,) = operands
        numbers = [x.new_empty(x.shape[1]) if name in line.options else None for name in self.constants]
        return x, *numbers, False, 0.1, float(line.options["eps"])


def _step_arguments(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float, *_: Any
) -> tuple[Any, ...] | None:
    """Not of what a convolution returns that is no step: there the normalization lies in its weights."""
    folds = getattr(x.target, "_schema", None) is not None and "conv" in x.target._schema.name
    if training or folds or len(x.meta["shape"]) in (2, 4):
        return None
    return x, mean, variance, weight, bias, False, momentum, eps


# Calls in models ------------------------------------------------------------------------------------------------------
def _of_module(m: Any, x: Tensor) -> tuple[Any, ...]:
    """Of a module that normalizes by the statistics that it keeps."""
    return x, m.running_mean, m.running_var, *weights_of(m), False, 0.1, m.eps


def _forward(m: Any, call: Any, input: Tensor) -> Tensor:
    """The forward of nn.BatchNorm1d, 2d and 3d with `call`, where the statistics are not the batch's own."""
    if m.training or m.running_mean is None or m.running_var is None:
        if call.strict and not m.training:
            raise RuntimeError(f"ai3_ops: {call.layer or 'the model itself'} (batch_norm): {_BY_BATCH}")
        if not torch.compiler.is_compiling():
            call.calls, call.torch_calls, call.reason = call.calls + 1, call.torch_calls + 1, _BY_BATCH
        return m._ai3_original.forward(m, input)
    if isinstance(input, Tensor):  # not what a tracer gives
        m._check_input_dim(input)
    return call.of_module(_of_module(m, input))


_BY_BATCH = "PyTorch normalizes by the batch's own statistics, in training and where none are kept"


class BatchNormCall(NormalizationCall):
    """torch.nn.functional.batch_norm."""

    operation = "batch_norm"
    functions = (F.batch_norm,)
    function = F.batch_norm
    modules: ClassVar = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _of_module)
    forwards: ClassVar = dict.fromkeys(modules, _forward)
    why_left = "PyTorch is faster, and optimize folds it into the layer before (docs/algorithms/batch_norm/default.md)"
    never_gains = True
    variances = frozenset({2})

    def arguments(  # type: ignore[override]
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> tuple[Any, ...]:
        """The same."""
        return input, running_mean, running_var, weight, bias, training, momentum, eps

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Never on the CPU."""
        return args[0].device.type != "cpu"

    @staticmethod
    def parted(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Statistics, weight and bias apart."""
        return args[1:5], args[5:]

    input_shapes = staticmethod(shapes_of_images)
