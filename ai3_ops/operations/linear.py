"""linear: y[..., n] = bias[n] + sum over k of x[..., k] * weight[n, k]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ai3_ops import _library, _torch
from ai3_ops._torch import OpOverload
from ai3_ops.calls.packs import SwitchedCall
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import fast_in, weights_of
from ai3_ops.operations import base
from ai3_ops.operations.base import Dims
from ai3_ops.operations.case import CHANNELS, BadCall, Case, Draw
from ai3_ops.operations.weighted import Weighted
from ai3_ops.problem import Problem, check, check_dtype, check_same


class Linear(Weighted):
    """Rules of `ai3::linear_<algorithm>`, as torch.nn.functional.linear."""

    name = "linear"
    aten = staticmethod(torch.nn.functional.linear)

    def problem(
        self,
        label: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        deterministic: bool = False,
        exclude: str = "",
        **_: Any,
    ) -> Problem:
        """Input (..., in_features), weight (out_features, in_features) or (in_features,); RuntimeError otherwise."""
        check_same(label, input, weight, "weight")
        check(input.ndim > 0, label, "needs input of at least one dimension")
        check(
            weight.ndim in (1, 2),
            label,
            f"needs a weight (out_features, in_features) or (in_features,), got {tuple(weight.shape)}",
        )
        check(
            input.shape[-1] == weight.shape[-1],
            label,
            f"needs input of {weight.shape[-1]} features in its last dimension, got {tuple(input.shape)}",
        )
        check_dtype(label, input)
        out_features = weight.shape[0] if weight.ndim == 2 else 1
        if bias is not None:
            check_same(label, input, bias, "bias")
            expected = "(out_features,)" if weight.ndim == 2 else "()"
            check(
                bias.ndim == 0 or (bias.ndim == 1 and weight.ndim == 2 and bias.shape[0] in (1, out_features)),
                label,
                f"needs a bias of {expected} for weight {tuple(weight.shape)}, got {tuple(bias.shape)}",
            )
        rows = 1
        for size in input.shape[:-1]:
            rows = rows * size
        sizes: dict[str, Any] = {
            "rows": rows, "in_features": input.shape[-1], "out_features": out_features, "has_bias": bias is not None,
            "deterministic": deterministic,
        }  # fmt: skip
        if exclude:
            sizes["exclude"] = exclude
        return Problem(str(input.device), input.dtype, sizes, (*input.shape[:-1], *weight.shape[:-1]))

    def weight_sizes(self, label: str, weight: Tensor) -> dict[str, int]:
        """Nothing about the input."""
        check(weight.ndim == 2, label, f"needs a weight (out_features, in_features), got {tuple(weight.shape)}")
        return {"in_features": int(weight.shape[1]), "out_features": int(weight.shape[0]), "has_bias": 0}

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        """The backward products read input and weight."""
        input, weight, bias = inputs
        ctx.save_for_backward(input, weight)
        ctx.bias_shape = None if bias is None else bias.shape

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator."""
        input, weight = ctx.saved_tensors
        needs = list(ctx.needs[:3])
        w = weight if weight.ndim == 2 else weight.unsqueeze(0)
        rows = 1  # which reshape cannot tell where there are no features
        for size in input.shape[:-1]:
            rows = rows * size
        y, x = grad.reshape(rows, w.shape[0]), input.reshape(rows, input.shape[-1])
        # Of matrices; a Python callable has no operator for them.
        compute: Callable[..., Any] = pytorch_backward if ctx.operator is None else ctx.operator
        grads = compute(y, x, w, needs, **ctx.options)
        return (
            grads[0].reshape(input.shape) if needs[0] else None,
            grads[1].reshape(weight.shape) if needs[1] else None,
            grads[2].sum_to_size(ctx.bias_shape) if needs[2] else None,
        )

    def vmap(
        self,
        op: Callable[..., Tensor],
        size: int,
        dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """Folds the new dimension into the rows or, where the weights differ, into the output features."""
        dims = [*dims, None, None][:3]
        if dims[1] is None and dims[2] is None:
            assert dims[0] is not None
            return op(input.movedim(dims[0], 0), weight, bias, **options), 0
        w = base.lead(weight, dims[1], size)
        b = None if bias is None else base.lead(bias, dims[2], size)
        if dims[0] is not None:  # as many products of different matrices, each by the algorithm
            x = input.movedim(dims[0], 0)
            return torch.stack([op(x[i], w[i], None if b is None else b[i], **options) for i in range(size)]), 0
        single = w.ndim == 2  # a weight (in_features,) for each sample
        w = w.unsqueeze(1) if single else w
        if b is not None:
            b = b.reshape(size, -1).expand(w.shape[:2]).flatten()
        y = op(input, w.flatten(0, 1), b, **options).unflatten(-1, w.shape[:2]).movedim(-2, 0)
        return (y.squeeze(-1) if single else y), 0

    @staticmethod
    def flops(input: Any, weight: Any, *_: Any, out_shape: Any = None, **options: Any) -> int:
        """Two for each product."""
        count = 2 * input[-1]
        for size in out_shape:
            count *= size
        return count

    cases = (
        Case(((3, 5), (4, 5), (4,))),
        Case(((5,), (4, 5), (4,))),
        Case(((2, 3, 4, 33), (17, 33), None)),
        Case(((1, 130), (70, 130), (70,))),
        Case(((37, 64), (33, 64), (33,))),
        Case(((0, 5), (4, 5), (4,))),
        Case(((15, 2048), (9, 2048), (9,))),
        Case(((2, 7), (7,), None)),
        Case(((2, 7), (3, 7), (1,))),
        Case(((3, 5), (4, 5), (4,)), layouts=("transposed", "transposed")),
        Case(((3, 2, 5), (4, 5), (4,)), layouts=("sliced", "sliced", "sliced")),
        Case(((3, 2, 5), (4, 5), (4,)), layouts=("expanded", "expanded", "expanded")),
    )
    layers = (
        Case(((1, 512), (1000, 512), (1000,))),
        Case(((197, 768), (768, 768), (768,))),
        Case(((1, 4096), (4096, 4096), (4096,))),
        Case(((64, 49, 96), (288, 96), (288,))),
        Case(((8, 1280), (1000, 1280), (1000,))),
        Case(((16, 384), (1536, 384), None)),
    )

    def backward_call(self, call: Any) -> list[Any] | None:
        """Of matrices."""
        x, w, *_ = call.tensors
        if w.ndim == 1:
            return None
        return [*(t.flatten(0, -2) if t.ndim > 1 else t.unsqueeze(0) for t in (call.grad(), x)), w]

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """As `Tested.line`."""
        return f"linear M={x.numel() // x.shape[-1]} K={x.shape[-1]} N={y.shape[-1]}"

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """As `Tested.module_of`."""
        return nn.Linear(sizes["K"], sizes["N"])

    def input_of(self, sizes: dict[str, Any]) -> tuple[int, ...]:
        """Rows and features."""
        return sizes["M"], sizes["K"]

    def made_up(self, draw: Draw) -> Case:
        """As `Tested.made_up`."""
        pick = draw.pick
        features, out = pick(CHANNELS) * pick((1, 1, 3, 4)), pick(CHANNELS) * pick((1, 1, 3, 4))
        rows = pick(((), (1,), (2,), (7,), (16,), (37,), (64,), (197,), (2, 50), (3136,)))
        return Case(((*rows, features), (out, features), (out,) if draw.chance(0.5) else None))

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        x, w, b = new(3, 5), new(4, 5), new(4)
        yield "other number of features", [new(3, 6), w, b], []
        yield "input without dimensions", [new(), w, b], []
        yield "weight of rank 3", [x, new(1, 4, 5), b], []
        yield "weight of another dtype", [x, new(4, 5, dtype=other), None], []
        yield "bias of wrong size", [x, w, new(5)], []
        yield "bias of another dtype", [x, w, new(4, dtype=other)], []
        yield "integer tensors", [x.int(), w.int(), None], []


# Gradients ------------------------------------------------------------------------------------------------------------
def register_backward(rules: Linear, op: OpOverload, algorithm: str) -> None:
    """ai3::_linear_<algorithm>_backward: its fake kernel, second derivatives (ATen's products), vmap, FLOPs."""

    def fake(grad: Tensor, input: Tensor, weight: Tensor, mask: list[bool], **_: Any) -> tuple[Tensor, ...]:
        shapes = (input.shape, weight.shape, weight.shape[:1])
        return tuple(input.new_empty(s if wanted else 0) for s, wanted in zip(shapes, mask, strict=True))

    base.register_fake(op, fake)
    base.register_autograd(op, double_backward, save_backward, pytorch_backward)
    base.register_vmap(op, vmap_backward)
    base.register_flops(op, backward_flops)


def pytorch_backward(
    grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool], **options: Any
) -> tuple[Tensor | None, ...]:
    """What PyTorch computes for the arguments of a backward operator."""
    return grad @ weight if mask[0] else None, grad.T @ input if mask[1] else None, grad.sum(0) if mask[2] else None


def save_backward(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """The second derivatives are products of all three matrices."""
    *tensors, ctx.mask = inputs
    ctx.save_for_backward(*tensors)


def double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Of dX = dY W, dW = dY^T X, db = the sum of dY's rows."""
    y, x, w = ctx.saved_tensors
    ggx, ggw, ggb = (g if wanted else None for g, wanted in zip(grads, ctx.mask, strict=True))
    needs = ctx.needs[:3]
    to_y = torch.zeros_like(y) if needs[0] else None
    if to_y is not None:
        to_y = to_y if ggx is None else to_y + ggx @ w.T
        to_y = to_y if ggw is None else to_y + x @ ggw.T
        to_y = to_y if ggb is None else to_y + ggb
    return (
        to_y,
        y @ ggw if needs[1] and ggw is not None else None,
        y.T @ ggx if needs[2] and ggx is not None else None,
    )


def vmap_backward(
    op: Callable[..., tuple[Tensor, ...]],
    size: int,
    dims: Dims,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    mask: list[bool],
    **options: Any,
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """One call for each sample: each has a product of its own for the weight."""
    y, x, w = (base.lead(t, d, size) for t, d in zip((grad, input, weight), dims[:3], strict=True))
    results = zip(*(op(y[i], x[i], w[i], mask, **options) for i in range(size)), strict=True)
    return tuple(torch.stack(r) for r in results), (0, 0, 0)


def backward_flops(
    grad: Any, input: Any, weight: Any, mask: Any, *_: Any, out_shape: Any = None, **options: Any
) -> int:
    """As many as forward for each of input and weight."""
    return (mask[0] + mask[1]) * Linear.flops(input, weight, out_shape=grad)


Linear.rules = {
    "backward": register_backward,
    "pack": Linear.register_pack,
    **dict.fromkeys(("packed", "packed_out", "fused", "out"), Linear.register_fused),
    "held": Linear.register_held,
}


# Calls in models ------------------------------------------------------------------------------------------------------
def _is_view(view: Tensor, of: Tensor) -> bool:
    """Whether a transposed matrix still lies in the memory of another one, which was given no other since (`.data = ...`)."""
    same = view.data_ptr() == of.data_ptr() and view.dtype == of.dtype and view.device == of.device
    return same and view.shape == of.shape[::-1] and view.stride() == of.stride()[::-1]


_PRODUCTS = 2**24  # below, autograd's rules in Python take longer than kernels gain
# Whether they gain where every call packs the weight: with AVX2 both are equally fast without (docs/decisions/backward.md).
_GAINS_UNPACKED = _library.registry()["level"] == "avx512"
# PyTorch's products of short rows are faster, and those of one row, of weights that the caches hold; with AVX-512 also those that
# take no longer than a call does (docs/algorithms/linear/default.md).
_FEATURES, _WEIGHTS, _LEAST = (32, 100_000, 2**19) if _GAINS_UNPACKED else (192, 2**20, 1)


def _of_columns(module: Any, input: Tensor) -> tuple[Any, ...]:
    """Arguments of transformers' Conv1D (GPT-2's), whose weight is (in_features, out_features)."""
    weight, bias = weights_of(module)
    call = module.__dict__.get("_ai3")
    if isinstance(input, fx.Proxy):  # a tracer knows parameters, not views of them
        return input, fx.Proxy(input.tracer.create_arg(weight), input.tracer).t(), bias
    return input, weight.t() if call is None else call.transposed(weight), bias


class LinearCall(SwitchedCall):
    """torch.nn.functional.linear."""

    operation = "linear"
    functions = (F.linear,)
    function = F.linear
    repeats = True
    modules: ClassVar = {nn.Linear: lambda m, x: (x, *weights_of(m))}
    others_modules: ClassVar = {"transformers.pytorch_utils:Conv1D": _of_columns}
    inside = (nn.MultiheadAttention,)
    why_left = (
        "PyTorch is faster for some calls: of few features, one row or few products (docs/algorithms/linear/default.md)"
    )

    @staticmethod
    @_torch.constant_when_compiled
    def allow_tf32() -> bool:
        """That of matrix products; read as conv2d's is."""
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")

    def arguments(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        """The same."""
        return input, weight, bias

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for (docs/algorithms/linear/default.md)."""
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def _forget(self) -> None:
        super()._forget()
        self.view: tuple[nn.Parameter, nn.Parameter] | None = None  # of a weight, and that

    def forget_packs(self) -> None:
        """Nor is the memory of a transposed weight held."""
        self.view = None
        super().forget_packs()

    def transposed(self, weight: Tensor) -> Tensor:
        """A view of a weight; outside of training the same parameter at every call, by which a pack is known."""
        tracing = torch.compiler.is_compiling() or _torch.tracing_state() is not None
        if tracing or type(weight) is not nn.Parameter or (torch.is_grad_enabled() and weight.requires_grad):
            return weight.t()
        known = self.view
        if known is None or known[1] is not weight or not _is_view(*known):  # another one counts its changes by itself
            self.view = known = nn.Parameter(weight.detach().t(), requires_grad=False), weight
        return known[0]

    def gains(self, args: tuple[Any, ...]) -> bool:
        """By the level of instructions, the features and the rows of a call in float32; autocast's has another dtype."""
        input, weight = args[:2]
        if (
            input.dtype != torch.float32
            or torch.is_autocast_enabled("cpu")
            or input.device.type != "cpu"
            or weight.ndim != 2
        ):
            return True
        outputs, features = weight.shape
        if features < _FEATURES or (
            input.ndim and input.stride(-1) != 1
        ):  # a transposed input is copied, by PyTorch in less time
            return False
        return weight.numel() >= _WEIGHTS or (input.numel() > features and input.numel() * outputs >= _LEAST)

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """Where each call packs."""
        return args[0].device.type != "cpu" or self.gains_unpacked(args)

    def gains_unpacked(self, args: tuple[Any, ...]) -> bool:
        """By the layer's size, as conv2d's."""
        input, weight = args[:2]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        if dtype.itemsize == 2:
            return not fast_in(dtype)
        return _GAINS_UNPACKED and weight.ndim == 2 and input.numel() * weight.shape[0] >= _PRODUCTS

    def new_plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """None for a weight of one dimension, which is not packed."""
        return super().new_plan(args) if args[1].ndim == 2 else None
