"""One call of an operation inside a swapped model: which algorithm computes it, and what is known about it.

Each operation's file has a subclass of `Call` that says which of PyTorch's functions and modules it stands for, and how
their arguments become the operator's. An instance is called with the PyTorch function's arguments by the module that it
sits in.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ai3_ops import _library, _torch, registry
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import Spec, unfit
from ai3_ops.calls.ways import LEFT, REMEMBERED, UNKNOWN, Ways
from ai3_ops.selecting.choice import Algorithm

# Looked up once: a call asks each of these.
_any_autocast, _tracing_state, _transformed = _torch.any_autocast, _torch.tracing_state, _torch.transformed
_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
_deterministic, _any_requires_grad = _torch.deterministic, _torch.any_requires_grad
_is_exporting = _torch.is_exporting
_TANGENTS = "does not support forward-mode differentiation"
QUANTIZED = "torch.ao.quantization knows no swapped layers: give it what ai3_ops.unswap returns"
UNMEASURED = "on CUDA `default` leaves to PyTorch what no GPU has shown to be faster (docs/cuda.md); a name runs"


class Call(Ways):
    """A call that a selector can match. Without an algorithm it is PyTorch's own, and only watched."""

    functions: ClassVar[tuple[Callable[..., Any], ...]]  # PyTorch's, all with the signature of `arguments`
    methods: ClassVar[tuple[str, ...]] = ()  # of torch.Tensor
    function: ClassVar[Callable[..., Any]]  # PyTorch's, given the operator's arguments
    # Modules whose forward is this call, and its arguments, as of PyTorch's function, for a module and its input.
    modules: ClassVar[dict[type[nn.Module], Callable[[Any, Tensor], tuple[Any, ...]]]] = {}
    # Of those among them whose forward has more to do: that, given the module, the call and the forward's arguments.
    forwards: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}
    # As `modules`, of other packages, by "module:class".
    others_modules: ClassVar[dict[str, Callable[[Any, Tensor], tuple[Any, ...]]]] = {}
    # Functions of other packages that make it somewhere, by "module:name": what computes them, given the call and the arguments.
    wholes: ClassVar[dict[str, Callable[..., Any]]] = {}
    # Modules of other packages, by "module:class", whose forward is this call and more.
    elsewhere: ClassVar[dict[str, Any]] = {}
    inside: ClassVar[tuple[type[nn.Module], ...]] = ()  # other modules of PyTorch that make it somewhere
    reads_weights: ClassVar[bool] = False  # of the module
    in_place_argument: ClassVar[bool] = False  # the function's first after the input says whether it overwrites that
    why_left: ClassVar[str] = "some calls had sizes for which PyTorch is faster"
    never_gains: ClassVar[bool] = False  # `default` leaves all to PyTorch, for which no class is needed
    variances: ClassVar[frozenset[int]] = frozenset()  # places of the operator's arguments that are, and never below 0
    returns_view: ClassVar[bool] = False  # PyTorch's function, where the operator makes a copy
    repeats: ClassVar[bool] = False  # whether `__call__` does no more than `run_or_leave` with `arguments`
    by_name: ClassVar[dict[str, type[Call]]] = {}
    whole = ""  # which of `wholes` or `elsewhere` it is

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "operation"):
            Call.by_name[cls.operation] = cls

    def may_gain(self, module: nn.Module) -> bool:
        """Whether `default` could be faster than PyTorch on this CPU for some call of the module, or in its methods."""
        return not self.never_gains

    @classmethod
    def computed_by(cls, module: nn.Module) -> bool:
        """Whether a module makes this call, although its own source may not say so."""
        return isinstance(module, (*cls.modules, *cls.inside))

    @classmethod
    def others(cls) -> dict[str, Callable[..., Any]]:
        """Those of `wholes` that are imported."""
        parts = {name: name.split(":") for name in cls.wholes}
        found = {name: getattr(sys.modules.get(module), f, None) for name, (module, f) in parts.items()}
        return {name: f for name, f in found.items() if f is not None}

    @classmethod
    def seen_as(cls) -> tuple[Callable[..., Any], ...]:
        """All that a TorchFunctionMode may see when PyTorch computes this call."""
        return *cls.functions, cls.function, *(getattr(Tensor, name) for name in cls.methods)

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is the forward of a module of another package, which is more than PyTorch's function."""
        return self.whole in self.elsewhere

    def unsuited(self, algorithm: Algorithm) -> str:
        """Why an algorithm cannot compute this call, whatever its sizes; "" where that depends on them."""
        return ""

    def of_elsewhere(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of such a module, whose own one is `forward`."""
        raise NotImplementedError

    def note(self) -> dict[str, Any]:
        """What is known of a call that PyTorch computes, in plain values: the module that keeps it is unpickled without us."""
        names = ("operation", "suffix", "layer", "requested", "reason", "strict", "approximate", "times")
        example = self.example and tuple(("tensor", *a) if isinstance(a, Spec) else a for a in self.example)
        return {"example": example} | {name: getattr(self, name) for name in names}

    @staticmethod
    def of_note(note: dict[str, Any]) -> Call:
        """The call that made the note."""
        call = Call.by_name[note["operation"]](note["suffix"])
        vars(call).update({name: value for name, value in note.items() if name != "operation"})
        if call.example is not None:
            call.example = tuple(Spec(*a[1:]) if type(a) is tuple and a[:1] == ("tensor",) else a for a in call.example)
        return call

    def refusal_now(self, args: tuple[Any, ...]) -> str:
        """The reason why the chosen algorithm cannot do this call, "" where it can, so that something else is wrong."""
        assert self.algorithm is not None
        if doubt := self.doubts(args):
            return doubt
        if _torch.any_tangent(args):
            return _TANGENTS
        for a in args:
            if isinstance(a, Tensor):
                if reason := unfit(a):
                    return reason
                if a.layout != torch.strided or a.is_nested:
                    return "needs dense tensors"
                if a.dtype not in _library.DTYPES:
                    return f"does not compute in {str(a.dtype).removeprefix('torch.')}"
        try:
            device = str(args[0].device)
            problem = self.problem(*map(Spec.tensor, self.specs(args)))
            reason = self.refusal(self.algorithm, problem._replace(device=device))
            if not reason and torch.are_deterministic_algorithms_enabled():
                info = registry.algorithm(self.operation, self.algorithm.name, args[0].device.type)
                return "" if info.deterministic else "is not deterministic"
            return reason
        except RuntimeError:
            return ""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call, with the arguments of PyTorch's function."""
        return self.run(*self.arguments(*args, **kwargs))

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """From the arguments of PyTorch's function to the operator's."""
        raise NotImplementedError

    def of_module(self, args: tuple[Any, ...]) -> Tensor:
        """As `__call__`, for a module: what was decided about such a call once is not asked again.

        What is not left to PyTorch only while gradients are off, and nothing watches or changes what is called. A small layer
        takes less time than to ask.
        """
        input = args[0]
        if not self.repeats or self.writes_nchw or type(input) is not Tensor:
            return self(*args)
        if _is_compiling() or _any_autocast() or _tracing_state() is not None:
            return self(*args)
        grad = _grad_enabled()
        trained = self.trained(args) if grad else 0
        shape, stride, dtype, cuda, before, generation, left_training = self.left
        try:
            if self.reads_last and input.ndim == 4:
                args = (input := input.contiguous(memory_format=torch.channels_last)), *args[1:]
            same = input.shape == shape and input.stride() == stride and input.dtype is dtype and input.is_cuda == cuda
        except RuntimeError:  # a nested tensor has none of these
            return self(*args)
        if same and trained == before and generation == registry.generation():
            self.calls, self.torch_calls = self.calls + 1, self.torch_calls + 1
            if trained:
                self.left_training = left_training
            return type(self).function(*args)
        if _deterministic() or _transformed(input) or self.operator is None or not self.calls:
            return self(*args)
        if registry.generation() != self.generation:
            self.renew()
        try:
            key = trained, self.way_key(args)
            way = self.ways.get(key)
        except (AttributeError, TypeError, RuntimeError):  # no tensor among the arguments; a list; a sparse weight
            return self(*args)
        if way is None:
            output = self(*args)
            if len(self.ways) >= REMEMBERED:
                self.ways.clear()
            self.ways[key] = self.way(args, bool(trained))
            return output
        if way is LEFT:
            output, form = self(*args), (input.shape, input.stride(), input.dtype, input.is_cuda)
            self.left = *form, trained, self.generation, self.left_training
            return output
        if type(way) is CallPlan and not grad:
            try:
                inferred = self.infer(way, args)
            except RuntimeError:  # a refusal, of which `__call__` knows more
                inferred = None
            if inferred is not None:
                self.calls += 1
                return inferred
        return self(*args)

    def trained(self, args: tuple[Any, ...]) -> Any:
        """What needs gradients, as far as it decides whether `default` leaves a call to PyTorch; false: nothing."""
        return int(_any_requires_grad(*args))

    def way(self, args: tuple[Any, ...], trained: bool) -> CallPlan | str:
        """How a call of a module is made, where its arguments are the operator's already; one that is trained, if it is left."""
        given = self.arguments(*args)
        same = (a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(given, args, strict=False))
        if len(given) != len(args) or not all(same):
            return UNKNOWN
        if self.refused or self.varies or self.doubt:
            return UNKNOWN
        if self.leaves(args) or (trained and self.leaves_training(args)):
            return LEFT
        return UNKNOWN if trained else self.plan(args) or UNKNOWN

    def leaves(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` leaves such a call to PyTorch, as `run_or_leave` finds."""
        rule = self.algorithm is not None and self.algorithm.name == "default" and not self.strict
        return rule and (self.is_unmeasured(args) or not self.gains(args))

    def is_unmeasured(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` has nothing for such a call on CUDA; what the user registered as default runs."""
        on_cuda = isinstance(args[0], Tensor) and args[0].is_cuda and registry.preferred.get(self.operation) is None
        if not on_cuda:
            return False
        # Of sizes that may change no one choice would be right for all.
        if _tracing_state() is not None or (_is_compiling() and not _torch.has_constant_sizes(args)):
            return True
        return not self.measured(args)

    @staticmethod
    def may_gain_on_cuda(problem: Any) -> bool:
        """Whether `measured` could be true of a call of which this much is known: a Problem, or none."""
        return False

    def measured(self, args: tuple[Any, ...]) -> bool:
        """Whether a GPU has shown that what `default` takes for such a call on CUDA is faster than PyTorch."""
        return False

    def run(self, *args: Any) -> Tensor:
        """The call, with the operator's arguments."""
        if _grad_enabled() and self.leaves_training(args):
            return self.leave(args)
        algorithm = self.algorithm
        if algorithm is not None and algorithm.name == "default" and not self.strict and self.is_unmeasured(args):
            return self.leave(args, UNMEASURED)
        return self.run_chosen(args)

    def run_chosen(self, args: tuple[Any, ...]) -> Tensor:
        """`run` where `default` leaves nothing to PyTorch."""
        operator = self.operator
        if _is_compiling():
            if operator is None and not self.watch:
                raise RuntimeError(self.trouble)
            return type(self).function(*args) if operator is None else self.forward(args)
        if operator is None:
            return self.without_operator(args)
        if not isinstance(args[0], Tensor):  # torch.fx traces; what else is no tensor PyTorch refuses
            traced = any(isinstance(a, torch.fx.Proxy) for a in args)
            if any(map(_torch.is_quantizing, args)):
                raise RuntimeError(f"ai3_ops: {self.layer or 'the model itself'} ({self.operation}): {QUANTIZED}")
            return operator(*args, **self.options) if traced else type(self).function(*args)
        if _tracing_state() is not None:  # torch.jit.trace does
            return operator(*args, **self.switches(args[0]))
        example = self.example
        if example is None or self.calls == 0:  # what the swap saw may have had another layout
            self.example = self.specs(args)
        self.calls += 1
        if not (self.refused and self.key(args) in self.refused):
            try:
                return self.compute(args)
            except RuntimeError:
                reason = self.refusal_now(args)
                if self.strict or not reason:
                    self.example = example
                    raise
            if len(self.refused) < REMEMBERED and not _torch.in_forward_mode():  # which the key does not tell
                self.refused[self.key(args)] = reason
            self.reason = reason
        self.torch_calls += 1
        return type(self).function(*args)

    def run_or_leave(self, *args: Any) -> Tensor:
        """As `run`, but where `default` gains nothing: PyTorch makes that call.

        While a call is compiled or exported, that is decided by sizes which are constants there; one of sizes that may change,
        as all do for torch.jit.trace, keeps its operator, because no one choice would be right for all of them.
        """
        rule = self.algorithm is not None and self.algorithm.name == "default" and not self.strict
        if rule and self.is_unmeasured(args):
            return self.leave(args, UNMEASURED)
        if rule and _is_compiling():
            left = _torch.has_constant_sizes(args) and not self.gains(args)
            return type(self).function(*args) if left else self.run(*args)
        if rule and _grad_enabled() and self.leaves_training(args):
            return self.leave(args)
        if not rule or type(args[0]) is not Tensor or _tracing_state() is not None or self.gains(args):
            return self.run_chosen(args)
        return self.leave(args, self.why_left)

    def leave(self, args: tuple[Any, ...], reason: str = "") -> Tensor:
        """PyTorch's answer to a call that `default` leaves to it; counted, but in programs, which would count once."""
        output = type(self).function(*args)
        if isinstance(args[0], Tensor) and not _is_compiling():
            if self.example is None or self.calls == 0:
                self.example = self.specs(args)
            self.calls, self.torch_calls = self.calls + 1, self.torch_calls + 1
            self.reason = reason or self.reason
        return output

    @property
    def without_pack(self) -> str:
        """Why `default` leaves a call to PyTorch whose weight is computed for it, and what to do."""
        first = f": {self.computed} first" if self.computed else ""
        made = "is gathered by FSDP" if self.gathered else "is another tensor"
        return f"its weight {made} at every call, and PyTorch is faster than packing each{first}"

    def gains_unpacked(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` beats PyTorch where each call packs its weight, by the operator's arguments."""
        return False

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` takes less time than PyTorch for a call with the operator's arguments, as `run_or_leave` asks."""
        return True

    def compute(self, args: tuple[Any, ...]) -> Tensor:
        """The operator's answer."""
        assert self.operator is not None
        assert self.algorithm is not None
        if registry.generation() != self.generation:
            self.renew()
        if self.varies and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(f"ai3::{self.operation}_{self.algorithm.name}: is not deterministic")
        if doubt := self.doubts(args):
            raise RuntimeError(f"ai3::{self.operation}: {doubt}")
        if not (_grad_enabled() or _transformed(args[0])):
            given = self.cast(args)
            known = len(self.plans)
            plan = self.plan(given)
            if len(self.plans) != known:  # a kind of call that is new: a rule's choice for it is what explain shows
                self.example = self.specs(args)
            if plan is not None:
                output = self.infer(plan, given)
                if output is not None:
                    return output
        if _torch.in_forward_mode() and _torch.any_tangent(args):
            raise RuntimeError(f"ai3::{self.operation}_{self.algorithm.name}: {_TANGENTS}")
        return self.forward(args)

    def forward(self, args: tuple[Any, ...]) -> Tensor:
        """The operator's answer, with all its rules."""
        assert self.operator is not None
        return self.operator(*args, **self.switches(args[0]))

    def held_bytes(self) -> int:
        """Of packed weights, and of copies in another order, that are kept."""
        return 0

    def forget_packs(self) -> None:
        """Frees them."""

    def pack_state(self) -> str:
        """Of an algorithm that packs: whether its packed weight is "kept", made "each call" or "not yet"."""
        return "not yet" if self.calls == self.torch_calls else "each call"

    def switches(self, input: Tensor) -> dict[str, Any]:
        """Keyword arguments: the algorithm's parameters, and PyTorch's own switches."""
        return self.options

    def leaves_training(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` leaves a call that records gradients to PyTorch, where that is faster."""
        if self.algorithm is None or self.algorithm.name != "default" or self.strict or _is_exporting():
            return False
        if _tracing_state() is not None:  # sizes are tensors, and what is recorded is for inference
            return False
        if (
            self.operator is None
            or not isinstance(args[0], Tensor)
            or not any(isinstance(a, Tensor) and a.requires_grad for a in args)
        ):
            return False
        left = not self.gains_in_training(args)
        self.left_training = left
        return left

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` beats PyTorch in a training step, by the operator's arguments.

        Here: gradients by Python's rules cost more than it gains.
        """
        return False

    @property
    def trouble(self) -> str:
        """The reason, and which layer it is about."""
        return f"ai3_ops: {self.layer or 'the model itself'} ({self.operation}): {self.missing or self.reason}"

    def without_operator(self, args: tuple[Any, ...]) -> Tensor:
        """A call that swap watches, or one whose algorithm this process does not have."""
        self.revive()
        if self.operator is not None:
            return self.run(*args)
        if self.watch:
            self.watch(self)
            if self.example is None and isinstance(args[0], Tensor):  # others compute by themselves
                self.example = self.specs(args)
        else:
            if self.strict:
                raise RuntimeError(self.trouble)
            if self.missing not in self.once.said:
                self.once.said.add(self.missing)
                others = "and any other that needs it; ai3_ops.explain names them"
                warnings.warn(f"{self.trouble}; PyTorch computes this layer, {others}", stacklevel=_torch.users_level())
            self.calls += 1
            self.torch_calls += 1
        return type(self).function(*args)
