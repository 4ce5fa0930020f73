"""Which algorithm computes a call, and what is known about the call: kept in copies and files, asked of the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ai3_ops import _library, registry
from ai3_ops._torch import is_cast
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import Spec
from ai3_ops.problem import Problem
from ai3_ops.selecting.choice import Algorithm

SWITCHES = ("deterministic", "allow_tf32")  # keyword arguments that every algorithm of some operations has
# An input's shape, strides, dtype, whether on CUDA; what gradients are needed of (`Call.trained`); the registry's generation;
# whether training was the reason.
NONE_LEFT = (None, None, None, False, -1, -1, False)


def approximation(chosen: str) -> str:
    """Why a rule may not be taken that chooses this algorithm."""
    return f"chooses {chosen}, which approximates (allow_approximate=True allows it)"


class Once:
    """Shared by the calls of one model, also in a file or a copy: what its user was warned of."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __reduce__(self) -> Any:
        return Once, ()


class Known:
    """A call's algorithm, and what was found out about it."""

    operation: ClassVar[str]
    computed: str = ""  # what makes a parameter of a weight that the module computes at every call
    times: tuple[float | None, float | None] = (None, None)  # as a plan has them: microseconds of a call, and PyTorch's
    # Of a convolution in a network that computes in channels_last (`nn.layout`):
    last = False  # it is one, by a swap
    reads_last = False  # its weight cannot say so, and its input is given that format
    writes_nchw = False  # a view needs its output in NCHW

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
        self.watch: Callable[[Any], None] | None = None
        self.plans: dict[Any, CallPlan | None] = {}
        self.ways: dict[Any, CallPlan | str] = {}  # how calls of a module are made that were made before
        self.left: tuple[Any, ...] = NONE_LEFT  # the last input of a module's call that was left to PyTorch
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
            "view",
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

    def choose(self, algorithm: Algorithm) -> None:
        """Computes with `algorithm` from now on; ValueError for names or parameters that do not exist."""
        self.operator, self.options = algorithm.operator(self.operation)
        self.algorithm = algorithm
        self.generation, self.left = -1, NONE_LEFT

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

    def specs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments without their values, in the types that they are computed in: under autocast in its own."""
        specs = tuple(map(Spec.of, args))
        device = specs[0].device.split(":")[0] if isinstance(specs[0], Spec) else ""
        cast = device in _library.DEVICES and torch.is_autocast_enabled(device)
        if not (cast and registry.OPERATIONS[self.operation].autocast):
            return specs
        dtype = torch.get_autocast_dtype(device)
        return tuple(s._replace(dtype=dtype) if isinstance(s, Spec) and is_cast(s.dtype) else s for s in specs)

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

    def approximates(self, algorithm: Algorithm) -> str:
        """Why a rule may not be taken: registered algorithms that it can choose, and that the user did not allow."""
        chosen = None if self.approximate else registry.approximate_default(self.operation, algorithm.name)
        return approximation(chosen) if chosen and not algorithm.excludes(chosen) else ""

    @staticmethod
    def key(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the support of a call depends on."""
        device = args[0].device.type
        autocast = device in _library.DEVICES and torch.is_autocast_enabled(device)
        mode = autocast, torch.are_deterministic_algorithms_enabled()
        return (registry.generation(), mode, *(Spec.of(a) if isinstance(a, Tensor) else str(a) for a in args))
