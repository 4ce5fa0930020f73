"""What the rules of operations with a weight share: packed weights, fused calls."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ai3_ops import _torch, registry
from ai3_ops._torch import OpOverload
from ai3_ops.operations import base
from ai3_ops.operations.activations import SLOPED
from ai3_ops.operations.base import Operation
from ai3_ops.operations.case import Case
from ai3_ops.problem import Problem, check, check_dtype, check_place, check_workspace
from ai3_ops.registry import operator_named


class Weighted(Operation):
    """Rules of an operation whose first arguments are input, weight and bias."""

    autocast = True
    rounding = "products"
    window: ClassVar[tuple[Any, ...]] = ()  # defaults of the arguments between bias and the keyword-only ones

    def weight_sizes(self, label: str, weight: Tensor, *window: Any) -> dict[str, int]:
        """The sizes of a problem, as the registry names them, that a packed weight depends on."""
        raise NotImplementedError

    def terms(self, case: Case) -> int:
        """Those of a row of the weight."""
        weight = case.shapes[1]
        assert weight is not None
        return math.prod(weight[1:] if len(weight) > 1 else weight) + (case.shapes[2] is not None)

    def check_prologue(
        self,
        label: str,
        algorithm: str,
        input: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        relu: bool = False,
    ) -> None:
        """What a packed operator does to its input: whether the algorithm can, and one number for each channel."""
        if scale is None and shift is None and not relu:
            return
        infos = registry.algorithms(self.name)
        able = {a.name for a in infos if a.prologue}
        needs = "applies no scale, shift or relu to its input; algorithms that support this case: "
        rules = {a.name for a in infos if a.rule}
        check(algorithm in able | rules, label, needs + (", ".join(sorted(able)) or "none"))
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        for tensor, name in ((scale, "input_scale"), (shift, "input_shift")):
            if tensor is not None:
                fits = tensor.shape == input.shape[-3:-2] and tensor.dtype == dtype and tensor.device == input.device
                kind = f"{input.shape[-3]} {str(dtype).removeprefix('torch.')} elements on the input's device"
                check(fits, label, f"needs {name} of {kind}, got {tuple(tensor.shape)}")

    def register_pack(self, op: OpOverload, algorithm: str) -> None:
        """ai3::_<operation>_<algorithm>_pack: as many elements, in one dimension, as the registry says."""

        def fake(weight: Tensor, *window: Any, **parameters: Any) -> Tensor:
            label = f"ai3::{self.name}_{algorithm}"
            check_dtype(label, weight)
            known = self.weight_sizes(label, weight, *window, *self.window[len(window) :])
            # A traced weight's become constants.
            sizes: dict[str, Any] = {name: int(size) for name, size in known.items()}
            if parameters:
                sizes["parameters"] = parameters
            ok, reason = registry.supports_problem(
                self.name, algorithm, Problem(str(weight.device), weight.dtype, sizes, ())
            )
            check(ok, label, reason)
            size = registry.packed_bytes_sizes(self.name, algorithm, weight.device, weight.dtype, **sizes)
            return weight.new_empty(size // weight.element_size())

        base.register_fake(op, fake)
        base.register_inference_only(op)

    def check_epilogue(
        self,
        label: str,
        algorithm: str,
        input: Tensor,
        channels: int,
        residual: Tensor | None = None,
        activation: str = "none",
        slope: Tensor | None = None,
    ) -> None:
        """What a fused operator does to its output: whether the algorithm, or one that a rule chooses, can."""
        if residual is not None or activation != "none":
            infos = [a for a in registry.algorithms(self.name) if a.name == algorithm]
            check(any(a.epilogue or a.rule for a in infos), label, "fuses no residual and no activation")
            fits = any(activation in ("none", *a.activations) or a.rule for a in infos)
            check(fits, label, f"fuses no activation but {' and '.join(infos[0].activations)}")
        if (slope is not None) != (activation in SLOPED):
            check(False, label, f"needs {'no' if activation not in SLOPED else 'a'} slope for this activation")
        if slope is not None:
            dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
            fits = slope.ndim == 1 and slope.dtype == dtype and slope.device == input.device
            kind = f"1 or {channels} {str(dtype).removeprefix('torch.')} elements on the input's device"
            fits = fits and (slope.shape[0] in (1, channels))
            check(fits, label, f"needs a slope of {kind}, got {tuple(slope.shape)}")

    def register_fused(self, op: OpOverload, algorithm: str) -> None:
        """ai3::_<operation>_<algorithm>_fused, _out, _packed and _packed_out: the output as that of the algorithm itself."""
        packed = op._schema.arguments[1].name == "packed"

        def fake(
            input: Tensor,
            weight: Tensor,
            *args: Any,
            out: Tensor | None = None,
            workspace: Tensor | None = None,
            **options: Any,
        ) -> Tensor | None:
            if packed:
                weight, args = input.new_empty(args[0]), args[1:]
            count = 1 + len(self.window)  # the bias, too
            output = self.fake(algorithm, input, weight, *args[:count], **options)
            label, epilogue = f"ai3::{self.name}_{algorithm}", args[count : count + 3]
            for tensor, name in ((next(iter(epilogue), None), "residual"), (out, "out")):
                if tensor is not None:
                    check_place(label, output, tensor, name)
            check_workspace(label, output, workspace)
            channels = weight.shape[0] if weight.ndim > 1 else 1
            self.check_epilogue(label, algorithm, input, channels, *epilogue)
            self.check_prologue(label, algorithm, input, *args[count + 3 :])
            return output if out is None else None

        base.register_fake(op, fake)
        if op._schema.returns:
            base.register_inference_only(op)
        else:
            base.register_writes(op)

    def register_held(self, op: OpOverload, algorithm: str) -> None:
        """ai3::_<operation>_<algorithm>_held: the algorithm, with a slot in which C++ keeps the packed weight.

        Compiled and exported programs call it, and swapped modules that record gradients. Under autocast the weight is
        handed over as it is, so that one pack serves all calls.
        """
        public = operator_named(f"{self.name}_{algorithm}")
        assert public is not None
        save = self.saver(algorithm)

        def fake(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any) -> Tensor:
            if options.pop("cast_weight", False):
                weight, bias = weight.to(input.dtype), bias if bias is None else bias.to(input.dtype)
            return self.fake(algorithm, input, weight, bias, *rest[:-1], **options)

        def save_held(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            save(ctx, inputs[:-1], options, output)

        def pytorch(*args: Any, cast_weight: bool = False, **options: Any) -> Tensor:
            input, *tensors = args[:3]
            if cast_weight:
                tensors = [None if t is None else t.to(input.dtype) for t in tensors]
            return self.pytorch(input, *tensors, *args[3:-1])

        def vmap(_: Any, size: int, dims: base.Dims, *args: Any, cast_weight: bool = False, **options: Any) -> Any:
            return self.vmap(public, size, dims[: len(args) - 1], *args[:-1], **options)

        def autocast(device: str, *args: Any, cast_weight: bool = False, **options: Any) -> Any:
            input, weight, bias, *rest = args
            x = _torch.autocast(input, device)
            if torch.is_grad_enabled() or weight.dtype == torch.float64 or x.dtype == torch.float64:
                tensors = (_torch.autocast(t, device) for t in (weight, bias))
                return public(x, *tensors, *rest[:-1], **options)
            return op(x, weight, bias, *rest, **options, cast_weight=True)

        base.register_fake(op, fake)
        base.register_autograd(op, self.backward, save_held, pytorch)
        base.register_vmap(op, vmap)
        base.register_autocast(op, autocast)
        if self.flops:
            base.register_flops(op, self.flops)
