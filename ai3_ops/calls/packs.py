"""Calls with a weight, which a packing algorithm keeps in a form of its own."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops import _library, _torch, registry
from ai3_ops.calls.call import Call
from ai3_ops.calls.known import SWITCHES
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import Spec
from ai3_ops.registry import operator_named
from ai3_ops.selecting.choice import Algorithm

_any_autocast, _grad_enabled, _is_compiling = _torch.any_autocast, torch.is_grad_enabled, torch.compiler.is_compiling
_is_exporting = _torch.is_exporting


class WeightedCall(Call):
    """Of operations with a weight, which a packing algorithm may keep in a form of its own between calls.

    The packs are kept in C++ (csrc/ops/prepare/slots.h), in a slot that is this call's alone and goes with it.
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
