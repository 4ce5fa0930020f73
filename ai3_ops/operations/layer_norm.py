"""layer_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, mean and variance of each row of the last dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops import _library, _torch
from ai3_ops._torch import OpOverload
from ai3_ops.calls.call import Call
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import weights_of
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import BadCall, Case, Draw
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, check_dtype

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line

NARROW = ("bfloat16", "float16")


class LayerNorm(Operation):
    """Rules of `ai3::layer_norm_<algorithm>`, as torch.nn.functional.layer_norm."""

    name = "layer_norm"
    aten = staticmethod(F.layer_norm)

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
        check(len(shape) > 0, label, "needs a normalized_shape of at least one dimension")
        rows = input.shape[: max(input.ndim - len(shape), 0)]
        fits = input.ndim >= len(shape) and all(a == b for a, b in zip(input.shape[len(rows) :], shape, strict=True))
        check(fits, label, f"needs input whose last dimensions are {shape}, got {tuple(input.shape)}")
        first = bias if weight is None else weight
        wide = input.dtype.itemsize == 2 and first is not None and first.dtype == torch.float32
        for tensor, name in ((weight, "weight"), (bias, "bias")):
            if tensor is None:
                continue
            fits = tuple(tensor.shape) == shape
            check(fits, label, f"needs {name} of sizes {shape}, got {tuple(tensor.shape)}")
            check(
                tensor.dtype == (torch.float32 if wide else input.dtype),
                label,
                "needs input, weight and bias of one dtype (float32 ones beside 16 bits), got "
                f"{input.dtype} and {tensor.dtype}",
            )
            given = f"{input.device} and {tensor.device}"
            check(tensor.device == input.device, label, f"needs input and {name} on one device, got {given}")
        count: Any = 1
        for size in rows:
            count = count * size
        sizes = {
            "rows": count, "features": math.prod(shape), "has_weight": weight is not None, "has_bias": bias is not None,
            "wide_weight": wide,
        }  # fmt: skip
        return Problem(str(input.device), input.dtype, sizes, tuple(input.shape))

    def register_forward(self, op: OpOverload, algorithm: str) -> None:
        """Autocast is ATen's: none on the CPU, float32 on CUDA."""

        def cast(device: str, *args: Any, **options: Any) -> Any:
            wide = device == "cuda"
            return op(*(a.float() if wide and isinstance(a, Tensor) else a for a in args), **options)

        super().register_forward(op, algorithm)
        base.register_autocast(op, cast)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """Mean and variance are computed again: rows are in the cache, and saving them would cost every forward pass."""
        input, ctx.shape, weight, bias, ctx.eps = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        input, weight = ctx.saved_tensors
        needs = [ctx.needs[0], ctx.needs[2], ctx.needs[3]]
        if ctx.operator is not None:
            grads = ctx.operator(grad, input, ctx.shape, weight, ctx.eps, needs)
        elif _torch.in_transform():  # where derivatives of ATen's are wrong
            grads = pytorch_backward(grad, input, ctx.shape, weight, ctx.eps, needs)
        else:  # a Python callable, or a user's kernel
            aten = torch.ops.aten
            bias = None if ctx.bias_dtype is None else input.new_empty(ctx.shape, dtype=ctx.bias_dtype)
            _, mean, scale = aten.native_layer_norm(input, ctx.shape, weight, bias, ctx.eps)
            grads = aten.native_layer_norm_backward(grad, input, ctx.shape, mean, scale, weight, bias, needs)
        x, w, b = (g if wanted else None for g, wanted in zip(grads, needs, strict=True))
        return x, None, w, b if b is None else b.to(ctx.bias_dtype)

    def pytorch(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        **options: Any,
    ) -> Tensor:
        """Not by F.layer_norm: derivatives of its tangents are wrong, since it takes mean and scale for constants there."""
        y, _ = normalized(input, normalized_shape, eps)
        y = y if weight is None else y * weight.to(y.dtype)
        return (y if bias is None else y + bias.to(y.dtype)).to(input.dtype)

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """More rows; weights of each sample's own are applied afterwards."""
        at, _, of_weight, of_bias = [*dims, None, None, None, None][:4]
        x = input if at is None else input.movedim(at, 0)
        if of_weight is None and of_bias is None:
            return op(x, normalized_shape, weight, bias, *rest, **options), 0
        y = op(x, normalized_shape, None, None, *rest, **options)
        y = y.unsqueeze(0) if at is None else y
        for tensor, dim, apply in ((weight, of_weight, torch.mul), (bias, of_bias, torch.add)):
            if tensor is not None:
                lead, own = (1, tensor) if dim is None else (size, tensor.movedim(dim, 0))
                rows = y.ndim - 1 - len(normalized_shape)
                y = apply(y, own.reshape(lead, *[1] * rows, *normalized_shape))
        return y.to(input.dtype), 0

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    signed_zeros = False  # ATen's own kernels differ in them
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

    def terms(self, case: Case) -> int:
        """Elements of a row."""
        return math.prod(case.arguments[0])

    def backward_call(self, call: Any) -> list[Any] | None:
        """The weight may be absent, the bias is not among them."""
        x, weight, _ = call.tensors
        shape, *eps = call.case.arguments
        return [call.grad(), x, list(shape), weight, *(eps or [1e-5])]

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


# Gradients ------------------------------------------------------------------------------------------------------------
def register_backward(rules: LayerNorm, op: OpOverload, algorithm: str) -> None:
    """ai3::_layer_norm_<algorithm>_backward: its fake kernel, second derivatives, vmap."""

    def fake(
        grad: Tensor, input: Tensor, shape: list[int], weight: Tensor | None, eps: float, mask: list[bool], **_: Any
    ) -> tuple[Tensor, ...]:
        label = f"ai3::layer_norm_{algorithm}"
        rules.problem(label, input, shape, weight)
        fits = grad.shape == input.shape
        check(fits, label, f"needs grad_output of the input's sizes {tuple(input.shape)}, got {tuple(grad.shape)}")
        wide = torch.float32 if input.dtype.itemsize == 2 else input.dtype  # the bias is not seen: nothing may be lost
        dtype = wide if weight is None else weight.dtype
        kinds = ((input.shape, input.dtype), (shape, dtype), (shape, dtype))
        return tuple(input.new_empty(s if wanted else 0, dtype=d) for (s, d), wanted in zip(kinds, mask, strict=True))

    base.register_fake(op, fake)
    base.register_autograd(op, double_backward, save_backward, pytorch_backward)
    base.register_vmap(op, vmap_backward)


def normalized(input: Tensor, shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    """The normalized rows and what they were multiplied by, in functions that have every derivative.

    In float64, because squares of large float32 are beyond float32.
    """
    last = list(range(-len(shape), 0))
    x = input.double()
    d = x - x.mean(last, keepdim=True)
    scale = (d.square().mean(last, keepdim=True) + eps).rsqrt()
    return d * scale, scale


def pytorch_backward(
    grad: Tensor, input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """What the operator computes, in PyTorch's functions: of that alone tangents are taken."""
    last = list(range(-len(shape), 0))
    h, scale = normalized(input, shape, eps)
    y = grad.double()
    g = y if weight is None else y * weight.double()
    of_x = scale * (g - g.mean(last, keepdim=True) - h * (g * h).mean(last, keepdim=True))
    dtype = torch.promote_types(input.dtype, torch.float32) if weight is None else weight.dtype
    grads = of_x.to(input.dtype), (y * h).sum_to_size(shape).to(dtype), y.sum_to_size(shape).to(dtype)
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


def save_backward(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """The second derivatives read all tensors."""
    grad, input, ctx.shape, weight, ctx.eps, ctx.mask = inputs
    ctx.save_for_backward(grad, input, weight)


def double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Of dX = s (g - mean(g) - h mean(g h)), dweight = sum of dY h, dbias = sum of dY; h the normalized row, g = dY weight.

    With a, c, e the gradients of those three, and L their products' sum, dL/dg, dL/dh and dL/ds are written out below.
    """
    gy, x, w = ctx.saved_tensors
    last = list(range(-len(ctx.shape), 0))

    def mean(t: Tensor) -> Tensor:
        return t.mean(last, keepdim=True)

    def summed(t: Tensor) -> Tensor:
        return t.sum_to_size(ctx.shape)

    a, c, e = (g.double() if wanted and g is not None else None for g, wanted in zip(grads, ctx.mask, strict=True))
    dy = gy.double()
    g = dy if w is None else dy * w.double()
    h, scale = normalized(x, ctx.shape, ctx.eps)
    of_g = torch.zeros_like(dy) if a is None else scale * (a - mean(a) - h * mean(a * h))
    to_y = of_g if w is None else of_g * w.double()
    of_h = torch.zeros_like(dy) if c is None else c * dy
    to_y = to_y if c is None else to_y + c * h
    to_y = to_y if e is None else to_y + e
    of_scale = None
    if a is not None:
        of_h = of_h - scale * (a * mean(g * h) + g * mean(a * h))
        of_scale = mean(a * g) - mean(a) * mean(g) - mean(a * h) * mean(g * h)
    to_x = scale * (of_h - mean(of_h) - h * mean(of_h * h))
    to_x = to_x if of_scale is None else to_x - scale.square() * h * of_scale
    to_w = None if w is None else summed(dy * of_g).to(w.dtype)
    return to_y.to(gy.dtype), to_x.to(x.dtype), None, to_w


def vmap_backward(
    op: Callable[..., tuple[Tensor, ...]],
    size: int,
    dims: Dims,
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    eps: float,
    mask: list[bool],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """One call for each sample: each has sums of its own for the weight."""
    y, x = base.lead(grad, dims[0], size), base.lead(input, dims[1], size)
    w = [None] * size if weight is None else base.lead(weight, dims[3], size)
    results = zip(*(op(y[i], x[i], shape, w[i], eps, mask) for i in range(size)), strict=True)
    return tuple(torch.stack(r) for r in results), (0, 0, 0)


LayerNorm.rules = {"backward": register_backward, "out": LayerNorm.register_out}


# Steps of networks and programs ------------------------------------------------------------------------------------------
class LayerNormStep(Step):
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

    @staticmethod
    def works_on_rows(input: Any, normalized_shape: Sequence[int], *_: Any) -> bool:
        """Not where several dimensions are normalized together."""
        return len(normalized_shape) == 1

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        return {"dims": str(len(arguments["normalized_shape"])), "eps": repr(float(arguments["eps"]))}

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        (x,) = operands
        shape = x.shape[x.ndim - line.flag("dims", 1) :]
        weight, bias = (x.new_empty(shape) if name in line.options else None for name in self.constants)
        return x, shape, weight, bias, float(line.options["eps"])


# Calls in models ------------------------------------------------------------------------------------------------------
_ELEMENTS, _FEATURES = {4: 2**18, 8: 2**16, 2: 2**16}, {4: 384, 8: 1, 2: 256}  # by the bytes of a number
_GAINS = (
    _library.registry()["level"] == "avx512"
)  # with AVX2 PyTorch takes less (docs/algorithms/layer_norm/default.md)


class LayerNormCall(Call):
    """torch.nn.functional.layer_norm."""

    operation = "layer_norm"
    functions = (F.layer_norm, torch.layer_norm)
    function = torch.layer_norm
    repeats = True
    modules: ClassVar = {nn.LayerNorm: lambda m, x: (x, m.normalized_shape, *weights_of(m), m.eps)}
    why_left = (
        "PyTorch is faster for some calls: of few elements, or short rows (docs/algorithms/layer_norm/default.md)"
        if _GAINS
        else "PyTorch is faster with AVX2 (docs/algorithms/layer_norm/default.md)"
    )
    reads_weights = True

    def arguments(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> tuple[Any, ...]:
        """The same."""
        return input, normalized_shape, weight, bias, eps

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for (docs/algorithms/layer_norm/default.md)."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def gains(self, args: tuple[Any, ...]) -> bool:
        """With AVX-512, where there is enough to compute."""
        input, shape = args[:2]
        if input.device.type == "cpu" and not _GAINS:
            return False
        if input.device.type != "cpu":
            return True
        bytes = input.dtype.itemsize
        enough = math.prod(shape) >= _FEATURES.get(bytes, 1) and input.numel() >= _ELEMENTS.get(bytes, 1)
        return enough and input.is_contiguous()

    @staticmethod
    def input_shapes(weight: Tensor | None, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Any number of rows."""
        if weight is None:
            raise LookupError("the normalized_shape")
        return (2, *weight.shape), (5, *weight.shape)

    def infer(self, plan: CallPlan, args: tuple[Any, ...]) -> Tensor | None:
        """With weight and bias, where those are plain tensors."""
        if any(type(t) not in (nn.Parameter, Tensor) and t is not None for t in args[2:4]):
            return None
        return plan.operator(args[0], args[2], args[3], plan.numbers)

    def way_key(self, args: tuple[Any, ...]) -> Any:
        """The weight's and bias's dtypes of these."""
        input, shape, weight, bias, eps = args
        of_input = input.shape, input.stride(), input.dtype
        return of_input, shape, None if weight is None else weight.dtype, None if bias is None else bias.dtype, eps

    def plan_key(self, args: tuple[Any, ...]) -> Any:
        """All but the tensors, which are not in the plan; a rule looks at whether they are there."""
        present = [None if t is None else t.dtype for t in args[2:4]]
        return (*args[1], *present, args[4])
