"""What every operation's Python rules share: the fake kernel, and the registration of all rules with the dispatcher.

The stable ABI has neither fake kernels nor autograd, autocast and vmap rules, so these live here, once per operation; an
algorithm gets them by being registered. A new operation is one more subclass of `Operation` in a file of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ai3_ops import _torch, registry
from ai3_ops._torch import DispatchKeySet, OpOverload, below_autograd
from ai3_ops.operations.case import Tested
from ai3_ops.problem import Problem, check, check_place, check_workspace, spread
from ai3_ops.registry import operator_named

LIBRARY = torch.library.Library("ai3", "FRAGMENT")
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
Dims = Sequence["int | None"]


def autocast_to_float32(device: str, value: Any) -> Any:
    """A tensor of 16 bits in float32 where ATen's autocast on this device has it so: on CUDA. Float64 and the rest as it is."""
    half = device == "cuda" and isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def batched(input: Tensor) -> Tensor:
    """(C, H, W) as (1, C, H, W)."""
    return input.unsqueeze(0) if input.ndim == 3 else input


def plain(tensor: Tensor) -> Tensor:
    """The tensor, on the CPU contiguous with the strides of that: PyTorch's convolutions misread others (docs/pytorch.md)."""
    return tensor.reshape(-1).view(tensor.shape) if tensor.device.type == "cpu" else tensor


def lead(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with its vmap dimension of `size` in front; where it has none (dim is None), expanded."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def fold(tensor: Tensor, dim: int | None, into: int, size: int) -> Tensor:
    """Makes the vmap dimension the outer part of dimension `into` of the per-sample tensor."""
    return lead(tensor, dim, size).movedim(0, into).flatten(into, into + 1)


def algorithm_operators(operation: str, algorithm: str) -> dict[str, OpOverload]:
    """The operators that an algorithm has, by kind: "" (the algorithm itself), "backward", "pack", "packed", ..."""
    names = {"": f"{operation}_{algorithm}"}
    kinds = ("forward", "backward", "pack", "packed", "packed_out", "fused", "out", "held")
    names |= {kind: f"_{operation}_{algorithm}_{kind}" for kind in kinds}
    return {kind: op for kind, name in names.items() if (op := operator_named(name))}


class Operation(Tested):
    """The rules of one operation, for all of its algorithms.

    A subclass gives `name`, `problem`, and `save` / `backward`; what it has in addition (`vmap`, `flops`, rules of its
    `_backward` or packing operators) it overrides.
    """

    name: ClassVar[str]
    aten: ClassVar[
        Callable[..., Tensor]
    ]  # the function that it replaces, called with the operator's positional arguments
    registered: ClassVar[set[str]]  # algorithms that have their rules
    autocast: ClassVar[bool] = False  # casts to the autocast dtype, as ATen does for the function it replaces

    # What subclasses define -------------------------------------------------------------------------------------------
    def problem(self, label: str, *args: Any, **kwargs: Any) -> Problem:
        """Checks a call's arguments (RuntimeError) and describes it."""
        raise NotImplementedError

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Keeps for `backward` what it needs; `options` are the keyword-only arguments."""
        raise NotImplementedError

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the first arguments; trailing ones that have none are left out."""
        raise NotImplementedError

    def vmap(self, op: Callable[..., Tensor], size: int, dims: Dims, *args: Any, **options: Any) -> tuple[Tensor, int]:
        """The operator over one more dimension of `size`, by one call; dims[i] is its place in args[i], or None."""
        raise NotImplementedError

    tags: ClassVar[tuple[torch.Tag, ...]] = ()  # of what computes the output, such as nondeterministic_seeded

    # An operator of kind "forward", where the algorithm has one, returns what `backward` reads besides the output (a
    # log-sum-exp, mean and scale): calls that record gradients run it, and `save` gets all that it returns.
    def draw(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Random state of one call, as tensors: further arguments of the "forward" operator, which then always runs."""
        return {}

    flops: Callable[..., int] | None = None  # of shapes, as torch.utils.flop_counter calls it
    rules: ClassVar[dict[str, Callable[..., None]]] = {}  # for other kinds of operators: function (self, op, algorithm)

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "name"):
            registry.OPERATIONS[cls.name] = cls()
            cls.registered = set()

    # What they get ----------------------------------------------------------------------------------------------------
    def asked(self, algorithm: str, *args: Any, **kwargs: Any) -> Problem:
        """`problem` of a call of an algorithm, with its own parameters and PyTorch's switches; RuntimeError as that."""
        own = {p.name: kwargs.pop(p.name) for p in registry.parameters(self.name, algorithm) if p.name in kwargs}
        own = {name: True if isinstance(value, Tensor) else value for name, value in own.items()}  # whether it is there
        problem = self.problem(f"ai3::{self.name}_{algorithm}", *args, **kwargs)
        more: dict[str, Any] = {"parameters": own} if own else {}
        if kwargs.get("allow_tf32"):
            more["allow_tf32"] = True
        return problem._replace(sizes=problem.sizes | more) if more else problem

    def checked(self, algorithm: str, *args: Any, **kwargs: Any) -> Problem:
        """The problem of a call that the algorithm can do; RuntimeError otherwise."""
        label = f"ai3::{self.name}_{algorithm}"
        problem = self.asked(algorithm, *args, **kwargs)
        if all(isinstance(size, int) for size in problem.shape):
            check(math.prod(problem.shape) * 8 < 2**63, label, f"a tensor of sizes {problem.shape} is too large")
        ok, reason = registry.supports_problem(self.name, algorithm, problem)
        if not ok:
            names = sorted({a.name for a in registry.algorithms(self.name) if not a.python} - {algorithm})
            own = registry.parameters(self.name, algorithm)
            given = problem.sizes.get("parameters", {})
            others = problem
            if any(p.name in given and given[p.name] != p.default for p in own):  # which mean something to these alone
                known = [p.name for p in own]
                names = [name for name in names if [p.name for p in registry.parameters(self.name, name)] == known]
            else:
                others = problem._replace(sizes={k: v for k, v in problem.sizes.items() if k != "parameters"})
            able = [name for name in names if registry.supports_problem(self.name, name, others)[0]]
            raise RuntimeError(f"{label}: {reason}; algorithms that support this case: {', '.join(able) or 'none'}")
        return problem

    def fake(self, algorithm: str, *args: Any, **kwargs: Any) -> Tensor:
        """The output without its values: sizes, strides, dtype, device and errors are the real kernel's."""
        return self.checked(algorithm, *args, **kwargs).empty(args[0].device)

    @functools.cached_property
    def schema(self) -> Any:
        """What all algorithms' operators have before the parameters of their own; the registry is asked once."""
        plain = (a for a in registry.registered() if a.operation == self.name and not (a.python or a.parameters))
        return next(plain).operator._schema

    def in_full(self, label: str, args: Sequence[Any]) -> list[Any]:
        """An operator's positional arguments with those that were left out, lists for so many dimensions as ATen wants."""
        parameters = [a for a in self.schema.arguments if not a.kwarg_only]
        given = [*args, *(a.default_value for a in parameters[len(args) :])]
        return [
            spread(label, v, a.N, a.name, -(2**31)) if a.N and v else v for a, v in zip(parameters, given, strict=True)
        ]

    def define(self, algorithm: str, function: Callable[..., Tensor]) -> None:
        """Defines the operator of an algorithm that is a Python callable, with the operation's schema and rules."""
        model, name = self.schema, f"{self.name}_{algorithm}"
        label = f"ai3::{name}"

        def kernel(*args: Any, **options: Any) -> Tensor:
            output = self.fake(algorithm, *args, **options)
            result = function(*self.in_full(label, args))
            check(isinstance(result, Tensor), label, f"the callable must return a tensor, got {type(result).__name__}")
            fits = result.shape == output.shape and result.dtype == output.dtype and result.device == output.device
            check(
                fits,
                label,
                f"the callable must return {tuple(output.shape)}, {output.dtype} on {output.device}, got "
                f"{tuple(result.shape)}, {result.dtype} on {result.device}",
            )
            inputs = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
            if result.stride() == output.stride() and result.untyped_storage()._cdata not in inputs:
                return result
            return output.copy_(result)

        LIBRARY.define(str(model).replace(model.name, label, 1).removeprefix("ai3::"))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        self.register(algorithm)

    def register(self, algorithm: str) -> None:
        """Gives the operators of an algorithm their rules; those that have them already keep them.

        Called again where a new version of the algorithm may have further operators.
        """
        first = not self.registered
        if first and (mixed := operator_named(f"_{self.name}_mixed")):  # one for all algorithms, told their names
            self.register_forward(mixed, "mixed")
            self.rules["backward"](self, operator_named(f"_{self.name}_mixed_backward"), "mixed")
        infer = operator_named(f"_{self.name}_{algorithm}_infer")
        for kind, op in algorithm_operators(self.name, algorithm).items():
            if kind in ("", "held", "fused", "out"):
                register_determinism(op, self.name, algorithm)
            if op.name() not in self.registered:
                self.registered.add(op.name())
                self.rules[kind](self, op, algorithm) if kind else self.register_forward(op, algorithm)
        if infer and infer.name() not in self.registered:  # as if autograd were not there: it is off
            self.registered.add(infer.name())
            for key in ("AutogradCPU", "AutogradCUDA"):
                LIBRARY.impl(infer, torch.library.fallthrough_kernel, key)

    def register_out(self, op: OpOverload, algorithm: str) -> None:
        """ai3::_<operation>_<algorithm>_out: the output goes to `out`."""

        def fake(*args: Any, out: Tensor, workspace: Tensor | None = None, **options: Any) -> None:
            output = self.fake(algorithm, *args, **options)
            check_place(f"ai3::{self.name}_{algorithm}", output, out, "out")
            check_workspace(f"ai3::{self.name}_{algorithm}", output, workspace)

        register_fake(op, fake)
        register_writes(op)

    def saver(self, algorithm: str) -> Callable[..., None]:
        """`save`, and which operator computes the gradients with which options."""
        backward = operator_named(f"_{self.name}_{algorithm}_backward")
        known = () if backward is None else {a.name for a in backward._schema.arguments}
        tensors = own_tensors(backward) if backward else []  # which `save` keeps, as it does those of the operation

        def save(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            ctx.operator, ctx.algorithm = backward, algorithm
            ctx.options = {n: value for n, value in options.items() if n in known and n not in tensors}
            if "deterministic" in ctx.options:
                ctx.options["deterministic"] |= torch.are_deterministic_algorithms_enabled()
            self.save(ctx, inputs, options, output)

        return save

    def pytorch(self, *args: Any, **options: Any) -> Tensor:
        """What PyTorch computes for the operator's arguments."""
        return type(self).aten(*self.in_full(f"ai3::{self.name}", args))

    def derivable(self, algorithm: str) -> Callable[..., Tensor]:
        """`pytorch` of what an algorithm computes, where that depends on it."""
        return self.pytorch

    def register_forward(self, op: OpOverload, algorithm: str) -> None:
        """The rules of an operator that computes the output; of "mixed" ones, `forward` names the algorithm."""

        def fake(*args: Any, forward: str = algorithm, **options: Any) -> Tensor:
            return self.fake(forward, *args, **options)

        register_fake(op, fake)
        recording = operator_named(f"_{self.name}_{algorithm}_forward")
        recorder = Recorder(recording, self.draw) if recording else None
        register_autograd(op, self.backward, self.saver(algorithm), self.derivable(algorithm), recorder)
        _torch.add_tags(op, self.tags)
        call = without_slot(op) if algorithm == "mixed" else op
        register_vmap(op, lambda _, *args, **options: self.vmap(call, *args, **options))
        if self.autocast:
            register_autocast(op, cast_before(call))
        if self.flops:
            register_flops(op, self.flops)


Operation.rules = {"out": Operation.register_out}


# Registration with the dispatcher -------------------------------------------------------------------------------------
def register_fake(op: OpOverload, function: Callable[..., Any]) -> None:
    """The kernel for fake and meta tensors."""
    torch.library.register_fake(op.name(), function, lib=LIBRARY)


class _Step(NamedTuple):
    """What a call of an operator hands to its autograd Function besides the operator's own arguments."""

    keys: DispatchKeySet
    options: dict[str, Any]
    tangents: tuple[Tensor | None, ...] | None  # of the outputs; None where no argument has one
    modes: tuple[bool, bool] | None  # those of the outer levels of torch.func's transforms, where there may be any


class Recorder(NamedTuple):
    """What computes an operator's output where gradients are recorded."""

    operator: OpOverload  # returns the output first, then what has no gradients and only `save` gets
    draw: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]  # its further arguments; with any it always runs


def register_autograd(
    op: OpOverload,
    backward: Callable[..., Any],
    save: Callable[..., None],
    pytorch: Callable[..., Any] | None = None,
    recorder: Recorder | None = None,
) -> None:
    """`save(ctx, inputs, options, output)` and `backward(ctx, *grads)`, which may leave out trailing gradients.

    Tensors among the arguments that are given by name are in `options`; their gradients follow those of all others.
    Tangents are those of `pytorch(*args, **options)`, what PyTorch computes for such a call; without it forward mode is refused.
    With a `recorder`, `save` gets the tuple of all that its operator returns.

    As torch.library.register_autograd, which cannot be used under torch.func.grad: a dispatcher kernel already runs at one
    level of the function transforms, so a single-level Function is what is needed there. The levels outside of it come
    below its kernel, which is where they record theirs.
    """
    arguments = op._schema.arguments
    count = sum(not a.kwarg_only for a in arguments)
    defaults = [a.default_value for a in arguments]
    names = [a.name for a in arguments[count:]]
    own = own_tensors(op)
    inputs_in_all = count + len(own)

    computing = recorder.operator if recorder else op

    def named(args: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(own, args[count:], strict=True)) if own else {}

    class Rule(_torch.SingleLevelFunction):
        @staticmethod
        def forward(step: _Step, *args: Any) -> Any:
            options = step.options | named(args) if own else step.options
            if step.modes is None:
                return below_autograd(computing, step.keys, args[:count], options)
            with _torch.derivatives(step.modes):
                return below_autograd(computing, step.keys, args[:count], options)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            step, *args = inputs
            if step.tangents is not None:
                outputs = output if isinstance(output, tuple) else (output,)
                given = zip(outputs, step.tangents, strict=recorder is None)
                tangents = tuple(torch.zeros_like(y) if t is None else t for y, t in given)
                ctx.tangents = (*tangents, *[None] * (len(outputs) - len(tangents)))
            if recorder:
                ctx.mark_non_differentiable(*output[1:])
            options = dict(zip(names, defaults[count:], strict=True)) | step.options | named(args)
            save(ctx, tuple(args[:count]), options, output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            ctx.needs = ctx.needs_input_grad[1:]
            found = backward(ctx, *grads[:1] if recorder else grads)
            return (None, *found, *[None] * inputs_in_all)[: inputs_in_all + 1]

        @staticmethod
        def jvp(ctx: Any, *_: Any) -> Any:
            return ctx.tangents if len(ctx.tangents) > 1 else ctx.tangents[0]

    def kernel(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        tangents = None
        if recorder:
            options |= recorder.draw(args, options)
        given = [options.get(name) for name in own]
        if _torch.in_forward_mode() and any(_torch.tangent_of(a) is not None for a in (*args, *given)):
            tangents = tangents_of(args, options)
        elif not (torch.is_grad_enabled() and _torch.any_requires_grad(*args, *given)):
            if options.keys() - {*names}:
                return below_autograd(computing, keys, args, options)[0]
            return below_autograd(op, keys, args, options)
        modes = _torch.derivative_modes() if _torch.in_transform() else None
        if own:
            options = {name: value for name, value in options.items() if name not in own}
        result = Rule.apply_here(_Step(keys, options, tangents, modes), *args, *defaults[len(args) : count], *given)
        return result[0] if recorder else result

    def tangents_of(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor | None, ...]:
        if pytorch is None:
            raise RuntimeError(f"{op.name()}: does not support forward-mode differentiation")
        output = pytorch(*args, **options)
        return tuple(map(_torch.tangent_of, output if isinstance(output, tuple) else (output,)))

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def register_inference_only(op: OpOverload) -> None:
    """Packed weights and fused calls have no gradients: asking for one is an error, never silently zero."""
    what = "fused calls" if op._opname.endswith("_fused") else "packed weights"

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{op.name()}: {what} are for inference; ai3::{op._opname} has no gradient")

    register_autograd(op, backward, lambda ctx, inputs, options, output: None)


def register_writes(op: OpOverload) -> None:
    """An operator that writes to `out`, as ATen's do, refuses tensors that need a gradient. C++ raises `out`'s version."""

    def kernel(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and _torch.any_requires_grad(*args, options["out"]):
            raise RuntimeError(f"{op.name()}: writes to out, which has no gradient; call it under torch.no_grad()")
        if _torch.in_forward_mode() and any(_torch.tangent_of(a) is not None for a in (*args, options["out"])):
            raise RuntimeError(f"{op.name()}: writes to out; does not support forward-mode differentiation")
        return below_autograd(op, keys, args, options)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def register_vmap(op: OpOverload, rule: Callable[..., Any]) -> None:
    """`rule(op, size, dims, *args, **options)` gives the result and the place of its new dimension.

    Where a tensor among the arguments that are given by name has one, there is one call for each sample.
    """

    def batch(info: Any, dims: Any, *args: Any, **options: Any) -> Any:
        return rule(op, info.batch_size, dims, *args, **options)

    own = own_tensors(op)
    if not own:
        torch.library.register_vmap(op.name(), batch, lib=LIBRARY)
        return

    def kernel(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        names, count = [name for name in own if name in options], len(args)

        def call(*given: Any, **rest: Any) -> Any:
            return op(*given[:count], **rest, **dict(zip(names, given[count:], strict=True)))

        def batch_all(info: Any, dims: Any, *given: Any, **rest: Any) -> Any:
            if all(d is None for d in dims[count:]):
                return batch(info, dims[:count], *given[:count], **rest, **dict(zip(names, given[count:], strict=True)))
            results = [
                call(*(g.select(d, i) if isinstance(d, int) else g for g, d in zip(given, dims, strict=True)), **rest)
                for i in range(info.batch_size)
            ]
            if isinstance(results[0], tuple):
                stacked = tuple(map(torch.stack, zip(*results, strict=True)))
                return stacked, (0,) * len(stacked)
            return torch.stack(results), 0

        tensors = (options.pop(name) for name in names)
        return _torch.vmapped(batch_all, call, *args, *tensors, **options)

    LIBRARY.impl(op, kernel, "FuncTorchBatched", with_keyset=True)


def own_tensors(op: OpOverload) -> list[str]:
    """The names of the tensors among the arguments that are given by name."""
    return [a.name for a in op._schema.arguments if a.kwarg_only and "Tensor" in str(a.type)]


def without_slot(op: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for weights that are not the layer's own, which its slot must not keep."""

    def call(*args: Any, slot: int = 0, **options: Any) -> Any:
        return op(*args, **options)

    return call


def cast_before(op: Callable[..., Any]) -> Callable[..., Any]:
    """The autocast rule that casts all tensors and calls the operator."""

    def rule(device: str, *args: Any, **options: Any) -> Any:
        named = {name: _torch.autocast(value, device) for name, value in options.items()}
        return op(*(_torch.autocast(value, device) for value in args), **named)

    return rule


def register_autocast(op: OpOverload, rule: Callable[..., Any] | None = None) -> None:
    """Tensors are cast to the autocast dtype, as ATen does for convolutions and linear.

    `rule(device, *args, **options)`, where given, casts and calls; it runs without autocast.
    """
    cast = rule or cast_before(op)
    for device, key in AUTOCAST.items():

        def kernel(*args: Any, _device: str = device, **options: Any) -> Any:
            with _torch.below_autocast():
                return cast(_device, *args, **options)

        LIBRARY.impl(op, kernel, key)


def register_flops(op: OpOverload, formula: Callable[..., int]) -> None:
    """For `torch.utils.flop_counter`: multiplications and additions of the direct method, whatever the algorithm."""
    packet = op.overloadpacket

    def register(counter: Any) -> None:
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)

    _torch.when_imported("torch.utils.flop_counter", register)  # which imports Triton


_undetermined: set[str] = set()  # operators of which a version was not deterministic


@functools.lru_cache(maxsize=1)
def _nondeterministic(generation: int) -> dict[tuple[str, str], set[str]]:
    """By operation and name, on which devices libraries' algorithms are not deterministic, in one generation of the registry."""
    found: dict[tuple[str, str], set[str]] = {}
    for a in registry.registered():
        if not (a.deterministic or a.python):
            found.setdefault((a.operation, a.name), set()).add(a.device)
    return found


def register_determinism(op: OpOverload, operation: str, algorithm: str) -> None:
    """An algorithm that is not deterministic says so under `torch.use_deterministic_algorithms(True)`.

    Every eager call passes BackendSelect, also under inference_mode; only such algorithms pay for it.
    """

    def devices() -> set[str]:
        return _nondeterministic(registry.generation()).get((operation, algorithm), set())

    if op.name() in _undetermined or not devices():
        return
    _undetermined.add(op.name())
    below = _torch.after_backend_select()

    def kernel(keys: DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled() and args[0].device.type in devices():
            _torch.alert_not_deterministic(op.name())
        return op.redispatch(keys & below, *args, **options)

    LIBRARY.impl(op, kernel, "BackendSelect", with_keyset=True)
