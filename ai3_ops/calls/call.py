"""One call of an operation inside a swapped model: which algorithm computes it, and what is known about it.

Each operation's file has a subclass of `Call` that says which of PyTorch's functions and modules it stands for, and how
their arguments become the operator's. An instance is called with the PyTorch function's arguments by the module that it
sits in.
"""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ai3_ops import _library, _torch, registry
from ai3_ops.problem import Problem, spread
from ai3_ops.registry import operator_named
from ai3_ops.selecting.choice import Algorithm

# Looked up once: a call asks each of these.
_any_autocast, _tracing_state, _transformed = _torch.any_autocast, _torch.tracing_state, _torch.transformed
_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
_deterministic = _torch.deterministic
_is_exporting = _torch.is_exporting
_TANGENTS = "does not support forward-mode differentiation"
UNMEASURED = "no GPU has measured these algorithms yet, so that `default` leaves CUDA to PyTorch; a name runs"
SWITCHES = ("deterministic", "allow_tf32")  # keyword arguments that every algorithm of some operations has
REMEMBERED = 256  # refused problems that a call keeps, so that it need not ask again
LEFT, UNKNOWN = "left to PyTorch", "asked each time"  # how a call is made, besides by a plan
_NONE_LEFT = (
    None,
    None,
    None,
    False,
    -1,
)  # an input's shape, strides, dtype, whether on CUDA; the registry's generation


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(value: Any) -> Any:
        """The Spec of a dense tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        dense = value.layout == torch.strided and not value.is_nested
        shape, stride = (tuple(value.shape), value.stride()) if dense else ((), ())
        return Spec(shape, stride, value.dtype, str(value.device))

    @staticmethod
    def tensor(value: Any) -> Any:
        """A meta tensor like the one that `value` describes; anything else as it is."""
        if not isinstance(value, Spec):
            return value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


class CallPlan:
    """How eager inference makes one kind of call: the operator for it, and what that gets besides tensors.

    ai3::_<operation>_<algorithm>_infer gets all numbers as one integer, by which C++ knows them, and knows no gradients: handing
    over lists and passing autograd's Python rules takes longer than a small kernel does (docs/decisions/calls.md).
    """

    __slots__ = ("__weakref__", "numbers", "operator")

    def __init__(self, operator: Any, numbers: str) -> None:
        self.operator = operator._op
        self.numbers = _library.keep_numbers(self, numbers) if numbers else 0

    @staticmethod
    def numbers_of(operator: Any, args: tuple[Any, ...]) -> list[Any]:
        """The arguments of the operator that are not tensors; a list as so many numbers, its length first where that varies."""
        numbers: list[Any] = []
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.N:
                numbers += spread("", value, argument.N, argument.name, -(2**31))
            elif isinstance(value, (list, tuple)):
                numbers += [len(value), *value]
            elif not str(argument.type).endswith("Tensor") and not str(argument.type).startswith("Optional[Tensor"):
                numbers.append(value)
        return numbers

    @staticmethod
    def text(numbers: Iterable[Any]) -> str:
        """As the operator reads them."""
        return " ".join(map(CallPlan.word, numbers))

    @staticmethod
    def word(number: Any) -> str:
        """Of one of them; NumPy's numbers count, too."""
        if number is None:
            return "-"
        try:
            return str(index(number))
        except TypeError:
            return repr(float(number))


def unfit(tensor: Any) -> str:
    """Why the operators cannot read a tensor, "" where they can: the data of some subclasses are not their values."""
    if type(tensor) in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor):
        return ""
    kind = type(tensor).__name__
    return f"reads plain tensors, not {kind}, which computes by itself" if _torch.has_kernels_of_its_own(tensor) else ""


def weights_of(m: nn.Module) -> tuple[Any, Any]:
    """Weight and bias; from where they are kept, because nn.Module finds an attribute there only after it looked elsewhere."""
    parameters = m._parameters
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return m.weight, m.bias


def approximation(chosen: str) -> str:
    """Why a rule may not be taken that chooses this algorithm."""
    return f"chooses {chosen}, which approximates (allow_approximate=True allows it)"


class Once:
    """Shared by the calls of one model, also in a file or a copy: what its user was warned of."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __reduce__(self) -> Any:
        return Once, ()


class Call:
    """A call that a selector can match. Without an algorithm it is PyTorch's own, and only watched."""

    operation: ClassVar[str]
    functions: ClassVar[tuple[Callable[..., Any], ...]]  # PyTorch's, all with the signature of `arguments`
    methods: ClassVar[tuple[str, ...]] = ()  # of torch.Tensor
    function: ClassVar[Callable[..., Any]]  # PyTorch's, given the operator's arguments
    # Modules whose forward is this call, and its arguments, as of PyTorch's function, for a module and its input.
    modules: ClassVar[dict[type[nn.Module], Callable[[Any, Tensor], tuple[Any, ...]]]] = {}
    # Of those among them whose forward has more to do: that, given the module, the call and the forward's arguments.
    forwards: ClassVar[dict[type[nn.Module], Callable[..., Any]]] = {}
    inside: ClassVar[tuple[type[nn.Module], ...]] = ()  # other modules of PyTorch that make it somewhere
    reads_weights: ClassVar[bool] = False  # of the module
    in_place_argument: ClassVar[bool] = False  # the function's first after the input says whether it overwrites that
    computed: str = ""  # what makes a parameter of a weight that the module computes at every call
    why_left: ClassVar[str] = "some calls had sizes for which PyTorch is faster"
    returns_view: ClassVar[bool] = False  # PyTorch's function, where the operator makes a copy
    repeats: ClassVar[bool] = False  # whether `__call__` does no more than `run_or_leave` with `arguments`
    by_name: ClassVar[dict[str, type[Call]]] = {}
    times: tuple[float | None, float | None] = (None, None)  # as a plan has them: microseconds of a call, and PyTorch's
    # Of a convolution in a network that computes in channels_last (`nn.layout`):
    last = False  # it is one, by a swap
    reads_last = False  # its weight cannot say so, and its input is given that format
    writes_nchw = False  # a view needs its output in NCHW

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "operation"):
            Call.by_name[cls.operation] = cls

    @classmethod
    def computed_by(cls, module: nn.Module) -> bool:
        """Whether a module makes this call, although its own source may not say so."""
        return isinstance(module, (*cls.modules, *cls.inside))

    @classmethod
    def seen_as(cls) -> tuple[Callable[..., Any], ...]:
        """All that a TorchFunctionMode may see when PyTorch computes this call."""
        return *cls.functions, cls.function, *(getattr(Tensor, name) for name in cls.methods)

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix  # what follows the module's qualified name: "" or ":relu_1"
        self.layer = suffix  # the whole name at the swap, for messages
        self.algorithm: Algorithm | None = None
        self.requested: str | None = None
        self.reason = ""  # why PyTorch computes what another was requested for
        self.missing = ""  # why this process does not have the algorithm
        self.once = Once()
        self.strict = False
        self.approximate = True  # whether a rule may choose an algorithm that approximates
        self.example: tuple[Any, ...] | None = None  # the operator's arguments when first seen, tensors as Specs
        self.calls = self.torch_calls = 0
        self._forget()

    def _forget(self) -> None:
        self.operator: Callable[..., Any] | None = None
        self.options: dict[str, Any] = {}
        self.refused: dict[Any, str] = {}
        self.watch: Callable[[Call], None] | None = None
        self.plans: dict[Any, CallPlan | None] = {}
        self.ways: dict[Any, CallPlan | str] = {}  # how calls of a module are made that were made before
        self.left: tuple[Any, ...] = _NONE_LEFT  # the last input of a module's call that was left to PyTorch
        self.generation = -1  # of the registry, for which the plans, the ways and `rule` hold
        self.rule = False  # whether the algorithm names another one for each problem
        self.gathered = False  # whether FSDP gathers the weight at every call: same memory, same version
        self.holder: Callable[[], nn.Module | None] | None = None  # a call site's module, which may be sharded later
        self.doubt = ""  # why it may not be taken after all
        self.left_training = False  # whether PyTorch computed the last training step, as `default` has it
        self.mixed = False  # whether the gradients have algorithms of their own
        self.varies = False  # whether the algorithm is not deterministic
        self.gradients: dict[Any, str] = {}  # why the algorithms of the gradients cannot do a problem

    def __getstate__(self) -> dict[str, Any]:
        left_out = (
            "operator",
            "options",
            "refused",
            "watch",
            "plans",
            "ways",
            "left",
            "generation",
            "rule",
            "doubt",
            "gradients",
            "slot",
            "held",
            "last_weight",
            "left_training",
            "gathered",
            "holder",
        )
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
        self.revive()

    def revive(self) -> None:
        """Looks once for an algorithm that this process did not have: a user's own, registered since."""
        if self.algorithm is None or self.operator is not None or self.generation == registry.generation():
            return
        try:
            self.choose(self.algorithm)
            self.missing = ""
        except ValueError as error:
            self.missing, self.generation = str(error), registry.generation()

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

    def choose(self, algorithm: Algorithm) -> None:
        """Computes with `algorithm` from now on; ValueError for names or parameters that do not exist."""
        self.operator, self.options = algorithm.operator(self.operation)
        self.algorithm = algorithm
        self.generation, self.left = -1, _NONE_LEFT

    # Support ----------------------------------------------------------------------------------------------------------
    def refusal(self, algorithm: Algorithm, problem: Problem) -> str:
        """The reason why `algorithm` cannot do a problem, "" where it can."""
        roles = {algorithm.backward[1]: "backward_weight", algorithm.backward[0]: "backward_input"}
        problem = self.asked(algorithm, problem._replace(sizes=problem.sizes | self.precision(problem.device)))
        for name in algorithm.names:
            ok, reason = registry.supports_problem(self.operation, name, problem)
            if not ok:
                return reason if name == algorithm.name else f"with {roles[name]}={name!r}, which {reason}"
        return ""

    def precision(self, device: str) -> dict[str, bool]:
        """PyTorch's switches of a call on that device, as queries name them."""
        return {}

    @staticmethod
    def asked(algorithm: Algorithm, problem: Problem) -> Problem:
        """The problem as the registry is asked about it where `algorithm` is to compute it."""
        more: dict[str, Any] = {s: True for s in SWITCHES if algorithm.parameters.get(s)}
        if own := {name: value for name, value in algorithm.parameters.items() if name not in SWITCHES}:
            more["parameters"] = own
        if algorithm.exclude:
            more["exclude"] = algorithm.excluded
        return problem._replace(sizes=problem.sizes | more) if more else problem

    def backward_refusal(self, algorithm: Algorithm, args: tuple[Any, ...] | None = None) -> str:
        """The reason why the algorithms of the gradients cannot do the example (or this call): tried once, on zeros."""
        specs = self.example if args is None else tuple(map(Spec.of, args))
        if specs is None or any(isinstance(s, Spec) and s.device == "meta" for s in specs):
            return ""
        operator, options = algorithm.operator(self.operation)
        with torch.inference_mode(False), torch.enable_grad():
            tried = [
                torch.zeros(s.shape, dtype=s.dtype, device=s.device, requires_grad=True) if isinstance(s, Spec) else s
                for s in specs
            ]
            try:
                operator(*tried, **options).sum().backward()
            except RuntimeError as error:
                return str(error)
        return ""

    def shapes(self) -> list[tuple[int, ...]] | None:
        """Of the tensors of the first call seen."""
        return None if self.example is None else [a.shape for a in self.example if isinstance(a, Spec)]

    def problem(self, *args: Any) -> Problem:
        """What the registry is asked about for these operator arguments; RuntimeError where they do not fit."""
        return registry.OPERATIONS[self.operation].problem(f"ai3::{self.operation}", *args)

    def problem_without_input(self, arguments: Callable[[Tensor], Any], weight: Tensor | None, groups: int) -> Problem:
        """The problem with those sizes only that do not depend on the input; `arguments(input)` are the operator's."""
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        first, second = (
            self.problem(*(Spec.tensor(Spec.of(a)) for a in arguments(torch.empty(shape, dtype=dtype, device="meta"))))
            for shape in self.input_shapes(weight, groups)
        )
        return first._replace(sizes={name: size for name, size in first.sizes.items() if second.sizes[name] == size})

    @staticmethod
    def input_shapes(weight: Tensor | None, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two inputs' shapes that fit the weight, differ in every size that it leaves open, and are larger than any window."""
        if weight is None:
            return (2, 3, 100_000, 110_000), (5, 7, 130_000, 170_000)
        if weight.ndim > 2:
            channels, space = weight.shape[1] * groups, weight.ndim - 2
            return (2, channels, *(100_000, 110_000)[:space]), (5, channels, *(130_000, 170_000)[:space])
        return (2, weight.shape[-1]), (5, weight.shape[-1])

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
            device, rules = str(args[0].device), registry.OPERATIONS[self.operation]
            if rules.autocast and torch.is_autocast_enabled(args[0].device.type):
                dtype = torch.get_autocast_dtype(args[0].device.type)
                args = tuple(
                    Spec.tensor(s._replace(dtype=dtype)) if isinstance(s, Spec) else s for s in map(Spec.of, args)
                )
            reason = self.refusal(self.algorithm, self.problem(*args)._replace(device=device))
            if not reason and torch.are_deterministic_algorithms_enabled():
                info = registry.algorithm(self.operation, self.algorithm.name, args[0].device.type)
                return "" if info.deterministic else "is not deterministic"
            return reason
        except RuntimeError:
            return ""

    # Calling ----------------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call, with the arguments of PyTorch's function."""
        return self.run(*self.arguments(*args, **kwargs))

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """From the arguments of PyTorch's function to the operator's."""
        raise NotImplementedError

    def of_module(self, args: tuple[Any, ...]) -> Tensor:
        """As `__call__`, for a module: what was decided about such a call once is not asked again.

        Only while gradients are off; what is not left to PyTorch only where nothing watches or changes what is called. A small
        layer takes less time than to ask.
        """
        input = args[0]
        if not self.repeats or self.writes_nchw or self.reads_last or type(input) is not Tensor:
            return self(*args)
        if _is_compiling() or _grad_enabled() or _any_autocast():
            return self(*args)
        shape, stride, dtype, cuda, generation = self.left
        try:
            same = input.shape == shape and input.stride() == stride and input.dtype is dtype and input.is_cuda == cuda
        except RuntimeError:  # a nested tensor has none of these
            return self(*args)
        if same and generation == registry.generation():
            self.calls, self.torch_calls = self.calls + 1, self.torch_calls + 1
            return type(self).function(*args)
        if _deterministic() or _transformed(input) or self.operator is None or not self.calls:
            return self(*args)
        if registry.generation() != self.generation:
            self.renew()
        try:
            key = self.way_key(args)
            way = self.ways.get(key)
        except (AttributeError, TypeError):  # an argument that is no tensor; a list among them
            return self(*args)
        if way is None:
            output = self(*args)
            if len(self.ways) >= REMEMBERED:
                self.ways.clear()
            self.ways[key] = self.way(args)
            return output
        if way is LEFT:
            self.left = input.shape, input.stride(), input.dtype, input.is_cuda, self.generation
        elif type(way) is CallPlan:
            try:
                inferred = self.infer(way, args)
            except RuntimeError:  # a refusal, of which `__call__` knows more
                inferred = None
            if inferred is not None:
                self.calls += 1
                return inferred
        return self(*args)

    def way_key(self, args: tuple[Any, ...]) -> Any:
        """What the way of a call depends on, in the state that `of_module` asks for."""
        input = args[0]
        return input.shape, input.stride(), input.dtype, input.is_cuda, args[1:]

    def way(self, args: tuple[Any, ...]) -> CallPlan | str:
        """How a call of a module is made, where its arguments are the operator's already."""
        given = self.arguments(*args)
        same = (a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(given, args, strict=False))
        if len(given) != len(args) or not all(same):
            return UNKNOWN
        if self.refused or self.varies or self.doubt:
            return UNKNOWN
        if self.leaves(args):
            return LEFT
        return self.plan(args) or UNKNOWN

    def leaves(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` leaves such a call to PyTorch, as `run_or_leave` finds."""
        rule = self.algorithm is not None and self.algorithm.name == "default" and not self.strict
        return rule and (self.is_unmeasured(args[0]) or not self.gains(args))

    @classmethod
    def is_unmeasured(cls, input: Any) -> bool:
        """Whether `default` knows nothing of a call on this input's device; what the user registered as default runs."""
        return isinstance(input, Tensor) and input.is_cuda and registry.preferred.get(cls.operation) is None

    def run(self, *args: Any) -> Tensor:
        """The call, with the operator's arguments."""
        if _grad_enabled() and self.leaves_training(args):
            return self.leave(args)
        algorithm = self.algorithm
        if algorithm is not None and algorithm.name == "default" and not self.strict and self.is_unmeasured(args[0]):
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
        if not isinstance(args[0], Tensor):  # torch.fx traces
            return operator(*args, **self.options)
        if _tracing_state() is not None:  # torch.jit.trace does
            return operator(*args, **self.switches(args[0]))
        example = self.example
        if example is None or self.calls == 0:  # what the swap saw may have had another layout
            self.example = tuple(map(Spec.of, args))
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

        While a call is compiled or exported, that is decided by sizes which are constants there; one of sizes that may change
        keeps its operator, because no one choice would be right for all of them.
        """
        rule = self.algorithm is not None and self.algorithm.name == "default" and not self.strict
        if rule and self.is_unmeasured(args[0]):
            return self.leave(args, UNMEASURED)
        if rule and _is_compiling():
            left = _torch.has_constant_sizes(args) and not self.gains(args)
            return type(self).function(*args) if left else self.run(*args)
        if rule and _grad_enabled() and self.leaves_training(args):
            return self.leave(args)
        if not rule or type(args[0]) is not Tensor or self.gains(args):
            return self.run_chosen(args)
        return self.leave(args, self.why_left)

    def leave(self, args: tuple[Any, ...], reason: str = "") -> Tensor:
        """PyTorch's answer to a call that `default` leaves to it; counted, but in programs, which would count once."""
        output = type(self).function(*args)
        if isinstance(args[0], Tensor) and not _is_compiling():
            if self.example is None or self.calls == 0:
                self.example = tuple(map(Spec.of, args))
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
                self.example = tuple(map(Spec.of, args))
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

    def cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as autocast has them, where it is on; operations without a rule for it take them as they are."""
        return args

    def infer(self, plan: CallPlan, args: tuple[Any, ...]) -> Tensor | None:
        """The operator's answer outside training and tracing; None where it must be asked as always."""
        return plan.operator(args[0], plan.numbers) if plan.numbers else plan.operator(args[0])

    def renew(self) -> None:
        """After a change of the registry."""
        assert self.algorithm is not None
        infos = [a for a in registry.registered() if (a.operation, a.name) == (self.operation, self.algorithm.name)]
        self.rule, self.varies = any(a.rule for a in infos), not all(a.deterministic for a in infos)
        self.doubt, self.mixed = self.approximates(self.algorithm), any(self.algorithm.backward)
        self.generation, self.plans, self.ways, self.gradients = registry.generation(), {}, {}, {}

    def doubts(self, args: tuple[Any, ...]) -> str:
        """Why the algorithm may not be taken, or its gradients' cannot do this call."""
        return self.doubt or (self.backward_doubt(args) if self.mixed and _grad_enabled() else "")

    def backward_doubt(self, args: tuple[Any, ...]) -> str:
        """`backward_refusal` of the chosen algorithm, remembered."""
        assert self.algorithm is not None
        if _transformed(args[0]):
            return ""
        key = self.key(args)
        if key not in self.gradients:
            self.gradients[key] = self.backward_refusal(self.algorithm, args)
        return self.gradients[key]

    def approximates(self, algorithm: Algorithm) -> str:
        """Why a rule may not be taken: registered algorithms that it can choose, and that the user did not allow."""
        chosen = None if self.approximate else registry.approximate_default(self.operation, algorithm.name)
        return approximation(chosen) if chosen and not algorithm.excludes(chosen) else ""

    def plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """How such a call is made; None where it has no way of its own."""
        key = self.plan_key(args)
        if self.rule:
            input = args[0]
            key = (key, input.shape, input.stride(), input.dtype, input.is_cuda)
        try:
            return self.plans[key]
        except KeyError:
            pass
        except TypeError:  # a list among the arguments
            return None
        if len(self.plans) >= REMEMBERED:
            self.plans.clear()
        plan = self.plans[key] = self.new_plan(args)
        return plan

    def plan_key(self, args: tuple[Any, ...]) -> Any:
        """What a plan depends on besides the input."""
        return args[1:]

    def numbers(self, args: tuple[Any, ...]) -> list[Any]:
        """All that the operator for inference gets besides tensors and the algorithm's own parameters."""
        return CallPlan.numbers_of(self.operator, args) + self.sizes(args)

    def sizes(self, args: tuple[Any, ...]) -> list[int]:
        """Further numbers."""
        return []

    def new_plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """The operators that the algorithm has for such a call."""
        assert self.algorithm is not None
        assert self.operator is not None
        name = self.algorithm.name
        if self.rule:
            name = self.resolved(name, args)
        infer = operator_named(f"_{self.operation}_{name}_infer")
        own, given = registry.parameters(self.operation, name), self.algorithm.parameters
        if infer is None or given.keys() - {p.name for p in own}:
            return None
        try:
            values = [p.number(given.get(p.name, p.default)) for p in own]
            return CallPlan(infer, CallPlan.text(self.numbers(args) + values))
        except RuntimeError:  # the operator says why
            return None

    def resolved(self, rule: str, args: tuple[Any, ...]) -> str:
        """What a rule chooses for such a call."""
        return registry.resolve(self.operation, rule, *args)

    def switches(self, input: Tensor) -> dict[str, Any]:
        """Keyword arguments: the algorithm's parameters, and PyTorch's own switches."""
        return self.options

    def leaves_training(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` leaves a call that records gradients to PyTorch, where that is faster."""
        if self.algorithm is None or self.algorithm.name != "default" or self.strict or _is_exporting():
            return False
        if self.operator is None or not any(isinstance(a, Tensor) and a.requires_grad for a in args):
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
                self.example = tuple(map(Spec.of, args))
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

    @staticmethod
    def key(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the support of a call depends on."""
        device = args[0].device.type
        autocast = device in _library.DEVICES and torch.is_autocast_enabled(device)
        mode = autocast, torch.are_deterministic_algorithms_enabled()
        return (registry.generation(), mode, *(Spec.of(a) if isinstance(a, Tensor) else str(a) for a in args))


class WeightedCall(Call):
    """Of operations with a weight, which a packing algorithm may keep in a form of its own between calls.

    The packs are kept in C++ (csrc/ops/slots.h), in a slot that is this call's alone and goes with it.
    """

    reads_weights = True

    def _forget(self) -> None:
        super()._forget()
        self.slot = secrets.randbits(62) + 1  # exported programs name it, too: no two calls anywhere have the same
        weakref.finalize(self, _library.C.ai3_slot_free, self.slot).atexit = False
        self.held: Callable[..., Any] | None = None  # the operator with a slot
        self.last_weight: Callable[[], Any] | None = None  # the last weight that was no parameter, while it lives

    @property
    def packs(self) -> _library.Packs:
        """The packed weights that are kept."""
        return _library.packs(self.slot)

    def choose(self, algorithm: Algorithm) -> None:
        """Also finds the operator with a slot, where the choice has no gradients' algorithms and parameters of its own."""
        super().choose(algorithm)
        own = {p.name for p in registry.parameters(self.operation, algorithm.name)}
        plain = not any(algorithm.backward) and self.options.keys() <= {*SWITCHES, *own}
        self.held = operator_named(f"_{self.operation}_{algorithm.name}_held") if plain else None

    def forward(self, args: tuple[Any, ...]) -> Tensor:
        """With a slot, but for a weight that is trained, or that is no parameter and may be computed for every call."""
        weight = args[1]
        if not _is_compiling():
            self.is_gathered()
        if self.leaves_computed(args):
            return self.leave_computed(args)
        if _is_compiling():
            trained = _grad_enabled() and weight.requires_grad and not _is_exporting()
        else:
            trained = type(weight) is not nn.Parameter or (_grad_enabled() and weight.requires_grad)
        trained = trained or self.gathered  # nor for one whose pack nothing could tell from that of the next call's
        assert self.operator is not None
        if trained or (self.held is None and "forward" not in self.options):
            return super().forward(args)
        if self.held is None:  # one operator for all choices that name more than an algorithm
            return self.operator(*args, slot=self.slot, **self.switches(args[0]))
        return self.held(*args, self.slot, **self.switches(args[0]))

    def held_bytes(self) -> int:
        """Of the slot."""
        return self.packs.bytes

    def forget_packs(self) -> None:
        """They are made anew at the next call."""
        _library.C.ai3_slot_free(self.slot)

    def pack_state(self) -> str:
        """Also where one is kept."""
        kept = self.packs.bytes and self.packs.kept and not (self.computed or self.gathered)
        return "kept" if kept else super().pack_state()

    def infer(self, plan: CallPlan, args: tuple[Any, ...]) -> Tensor | None:
        """With the version of the weight, by which C++ knows whether its pack still holds."""
        weight = args[1]
        if type(weight) is not nn.Parameter or ((self.gathered or self.holder) and self.is_gathered()):
            if type(weight) not in (Tensor, nn.Parameter):
                return None
            if self.leaves_computed(args):
                return self.leave_computed(args)
        version = -1 if weight.is_inference() else weight._version
        try:
            return plan.operator(args[0], weight, args[2], plan.numbers, version)
        finally:
            if self.gathered:
                self.forget_packs()

    def plan_key(self, args: tuple[Any, ...]) -> Any:
        """A rule may look at all of it."""
        weight = args[1]
        mode = _any_autocast(), torch.are_deterministic_algorithms_enabled(), self.rounds(args[0])
        return mode, args[0].dtype, weight.shape, weight.stride(), weight.dtype, args[2] is None, args[3:]

    def way_key(self, args: tuple[Any, ...]) -> Any:
        """Of the weight its format; other sizes or another dtype for such an input are refused, and then asked about."""
        input = args[0]
        size = input.shape, input.stride(), input.dtype, self.rounds(input)
        return size, input.is_cuda, args[1].stride(), args[2] is None, args[3:]

    def rounds(self, input: Tensor) -> bool:
        """Whether PyTorch's switches let a call on this input round float32 to TF32, which only CUDA does."""
        return input.is_cuda and bool(self.precision("cuda"))

    def leaves_computed(self, args: tuple[Any, ...]) -> bool:
        """Whether `default` leaves a call to PyTorch because its weight, computed for this call, would be packed for it alone.

        To be asked once in a call: a tensor that is no parameter counts as computed unless it is the last call's.
        """
        weight = args[1]
        computed = self.gathered
        if _is_compiling():  # in whose programs only the module tells a parameter from what is computed
            computed = computed or bool(self.computed)
        elif not computed and type(weight) is not nn.Parameter:
            computed = self.last_weight is None or self.last_weight() is not weight
            self.last_weight = weakref.ref(weight)
        if not computed or self.algorithm is None or self.algorithm.name != "default" or self.strict:
            return False
        if args[0].device.type != "cpu" or (_grad_enabled() and weight.requires_grad):
            return False
        return (_is_compiling() and not _torch.has_constant_sizes(args)) or not self.gains_unpacked(args)

    def is_gathered(self) -> bool:
        """Sets `gathered`, also after the swap; what is compiled knows what was found before."""
        if not self.gathered and self.holder is not None:
            module = self.holder()
            self.gathered = module is not None and _torch.is_sharded(module)
        return self.gathered

    def leave_computed(self, args: tuple[Any, ...]) -> Tensor:
        """PyTorch's answer where the weight is computed at every call."""
        if not _is_compiling():
            self.torch_calls += 1
            self.reason = self.without_pack
        return type(self).function(*args)

    def sizes(self, args: tuple[Any, ...]) -> list[int]:
        """PyTorch's switches, whether the weight must be cast, and the slot, which stops keeping what is new at every call."""
        cast = _any_autocast() and args[1].dtype != args[0].dtype
        return [torch.are_deterministic_algorithms_enabled(), self.rounds(args[0]), cast, self.slot]

    def cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Under autocast, the input in its dtype: C++ casts the weight once, when it packs it."""
        if not _any_autocast() or args[1].dtype == torch.float64 or not torch.is_autocast_enabled("cpu"):
            return args
        return (_torch.autocast(args[0], "cpu"), *args[1:])

    def resolved(self, rule: str, args: tuple[Any, ...]) -> str:
        """As PyTorch's switch has it; in the dtype of the input."""
        assert self.algorithm is not None
        dtype = args[0].dtype
        device = str(args[0].device)
        args = tuple(Spec.tensor(s._replace(dtype=dtype)) if isinstance(s, Spec) else s for s in map(Spec.of, args))
        p = self.problem(*args)._replace(device=device)
        switches = {"deterministic": torch.are_deterministic_algorithms_enabled()} | self.precision(device)
        sizes = self.asked(self.algorithm, p._replace(sizes=p.sizes | switches)).sizes
        return registry.resolve_sizes(self.operation, rule, p.device, p.dtype, **sizes)


class SwitchedCall(WeightedCall):
    """Of operations whose operators have PyTorch's switches as arguments."""

    @staticmethod
    def allow_tf32() -> bool:
        """PyTorch's switch for this operation."""
        raise NotImplementedError

    def switches(self, input: Tensor) -> dict[str, Any]:
        """What the algorithm was given goes before PyTorch's switches."""
        options = self.options
        if torch.are_deterministic_algorithms_enabled():
            options = {"deterministic": True} | options
        if input.is_cuda and self.allow_tf32():
            options = {"allow_tf32": True} | options
        return options

    def precision(self, device: str) -> dict[str, bool]:
        """TF32 is CUDA's."""
        return {"allow_tf32": True} if device.startswith("cuda") and self.allow_tf32() else {}


@_torch.constant_when_compiled  # Dynamo would look into a cache's function, and warn
def fast_in(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies pairs of 16 bits on this processor, through oneDNN."""
    mkldnn: Any = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(mkldnn._is_mkldnn_fp16_supported())
