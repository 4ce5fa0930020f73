"""The module that `optimize` returns."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ai3_ops._torch import (
    any_autocast,
    any_tangent,
    has_constant_sizes,
    in_forward_mode,
    in_transform,
    is_differentiated,
    is_exporting,
    is_wrapped,
    pytree,
    tracing_state,
    users_level,
)
from ai3_ops.explaining.report import OptimizeReport
from ai3_ops.graph.state import hooks_of
from ai3_ops.operations.of_transformers import recorded
from ai3_ops.optimizing.attributes import Attributes, Hooks, Stores, reads
from ai3_ops.optimizing.document import Reader, Refused, Writer, reading
from ai3_ops.optimizing.pipeline import Plan, Settings, Swapped
from ai3_ops.optimizing.planned import Planned, key_of
from ai3_ops.programs import container

GENERATE = "generate"  # transformers' method
GENERATES = (
    "`generate` is the original's and calls no program: give an example with which the model returns its cache "
    "(use_cache=True)"
)
_FREED = "keep_original=False freed the original weights and modules"
_BACK = "it is put back"
_is_training = operator.attrgetter("training")


class Optimized(Planned):
    """A module for inference that computes what another one does, faster; `ai3_ops.explain` says how.

    `state_dict()`, parameters and submodules are the original's. Other batch sizes run at once; so do other lengths and
    sizes that the same programs compute, once they were compared. What needs others is planned, with a warning, where that
    takes no second.
    """

    def __init__(self, original: nn.Module, settings: Settings) -> None:
        super().__init__(original, settings)
        try:
            self._sign(_bare(inspect.signature(original.forward)))
        except ValueError:  # what torch.jit compiled has none
            self._sign(_bare(inspect.signature(self.forward)))
        self.training = False
        self._ai3_hooks, self._ai3_known_hooks = self._hooks()  # of the modules inside
        self._modules.update(original._modules)
        # The original's own, so that it computes with what `functional_call` puts there.
        self._parameters, self._buffers = original._parameters, original._buffers
        self._non_persistent_buffers_set.update(original._non_persistent_buffers_set)
        self._watch()

    @property
    def __class__(self) -> Any:
        """For `isinstance`, a layer of transformers': it looks those up by class whose outputs it records when asked to."""
        original = self.__dict__.get("_ai3_original")
        kind: type = type(original[0]) if original else Optimized
        layer = kind.__module__.startswith("transformers.models.") and not hasattr(kind, "from_pretrained")
        return kind if layer else type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        vars(object)["__class__"].__set__(self, cls)

    def _get_name(self) -> str:
        return type(self).__name__

    @classmethod
    def restored(
        cls,
        settings: Settings,
        *,
        first: Plan,
        plans: dict[Any, Plan],
        spec: Any,
        plain: int,
        signature: inspect.Signature,
        report: OptimizeReport,
    ) -> Optimized:
        """One without an original, from what a file has; the arguments are the attributes of these names."""
        module = cls(nn.Module(), settings)
        module._ai3_first, module._ai3_plans = first, plans
        module._ai3_most += len(set(map(id, plans.values())))
        module._ai3_spec, module._ai3_plain = spec, plain
        module._ai3_report = report
        module._sign(signature)
        module.forget_original()
        return module

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of the original, which may be a part of a model that reads them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = vars(self).get("_ai3_original")
            if original is None or name.startswith(("__", "_ai3")):
                raise
            if not original:
                raise AttributeError(f"ai3_ops.optimize: no attribute {name!r}: {_FREED}") from None
            found = getattr(original[0], name)
            if name == GENERATE and self.changed and self._tells(name):
                warnings.warn(f"ai3_ops.optimize: {GENERATES}", stacklevel=2)
            return found

    def _sign(self, signature: inspect.Signature) -> None:
        """The original's signature is that of `forward`, for torch.export and others who read it."""
        self._ai3_signature = signature
        signed: Any = _signed(signature)
        self.__class__ = signed

    # Pickles and copies -----------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Programs and graphs as in a file of `save`, its tensors as tensors; as they are where such a file cannot hold them."""
        left = {key: plan for key, plan in self._ai3_known.items() if plan.body is None}
        state: dict[str, Any] = super().__getstate__() | {"_ai3_known": left, "_ai3_odd": {}}
        by_key = state["_ai3_plans"]  # another thread may put a new one in its place
        plans = list({id(p): p for p in (state["_ai3_first"], *by_key.values()) if p is not None}.values())
        writer = Writer(spelling=False)
        try:
            bodies = [None if plan.body is None else writer.body(plan.body) for plan in plans]
        except Refused:
            return state
        if not any(bodies):
            return state
        number = {id(plan): i for i, plan in enumerate(plans)}
        sealed = *container.sealed(writer.head | {"bodies": bodies}, writer.tensors), _alone(writer.tensors)
        return state | {
            "_ai3_first": None,
            "_ai3_plans": {key: number[id(plan)] for key, plan in by_key.items()},
            "_ai3_container": ([replace(plan, body=None) for plan in plans], sealed),
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (), *super().__reduce_ex__(protocol)[2:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        bare, sealed = state.pop("_ai3_container", (None, None))
        super().__setstate__(state)
        self._sign(self._ai3_signature)
        if bare is None:
            return
        with reading("ai3_ops: a pickled module of optimize"):
            document, tensors = container.opened(*sealed)
            reader = Reader(document, tensors)
            bodies = [None if body is None else reader.body(body) for body in document["bodies"]]
            plans = [replace(plan, body=body) for plan, body in zip(bare, bodies, strict=True)]
        self._ai3_first, self._ai3_plans = plans[0], {key: plans[i] for key, i in state["_ai3_plans"].items()}

    def __copy__(self) -> Optimized:
        copied = type(self).__new__(type(self))
        nn.Module.__setstate__(copied, super().__getstate__())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        copied = memo[id(self)] = type(self).__new__(type(self))
        nn.Module.__setstate__(copied, copy.deepcopy(super().__getstate__(), memo))
        return copied

    @property
    def changed(self) -> bool:
        """Whether something else than the original computes a call that was planned."""
        return any(plan.body is not None for plan in self._ai3_plans.values())

    def forget_original(self) -> None:
        """Frees the original where it computes nothing any more, for no size that was planned."""
        plans = {**self._ai3_known, **self._ai3_plans}.values()
        if self.changed and all(plan.body is not None for plan in plans):
            self._ai3_original, self._ai3_hooks, self._ai3_stores = (), Hooks.of(()), Stores.of(())
            self._ai3_inside, self._ai3_attributes = list[nn.Module](), Attributes.of(())
            self._modules, self._parameters, self._buffers = {}, {}, {}

    # Calling ----------------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's, in evaluation mode and without gradients."""
        first = self._ai3_first
        form = ""  # of the arguments, where it is not the example's
        if not kwargs and len(args) == self._ai3_plain and all(type(x) is Tensor for x in args):
            leaves = list(args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if spec != self._ai3_spec:
                args, kwargs, form = self._arranged(args, kwargs)
                leaves = pytree.tree_leaves((args, kwargs))
        watched = "" if torch.compiler.is_compiling() else self._is_watched(leaves)
        if torch.is_grad_enabled():
            for x in [*leaves, *filter(is_wrapped, self.parameters())] if watched else leaves:
                if is_differentiated(x):
                    raise RuntimeError(
                        "ai3_ops.optimize: the module is for inference and has no gradients: call it with inputs and weights "
                        "that require none, or use the original model"
                    )
        if first is None:  # a model of which only submodules could be captured
            return self._by_original(args, kwargs)
        changes = first.body is not None or len(self._ai3_plans) > 1
        if watched and changes and not isinstance(first.body, Swapped):
            if not self._ai3_original:
                raise RuntimeError(f"ai3_ops.optimize: {watched} sees nothing of programs: {_FREED}")
            if self._tells(watched):
                name, level = self._ai3_report.parts[0].name or "the model", users_level()
                text = f"{watched} sees nothing of programs: within it the original of {name} computes"
                warnings.warn(f"ai3_ops.optimize: {text}", stacklevel=level)
            return self._by_original(args, kwargs)
        eagerly = changes and not torch.compiler.is_compiling()
        if eagerly and self._ai3_original and recorded():  # of modules inside, which programs do not call
            return self._by_original(args, kwargs)
        if eagerly and (self._hooked() or self._replaced() or self._altered()):
            self._warn_of_changes()
            return self._by_original(args, kwargs)
        plan: Plan | None
        if isinstance(first.body, Swapped) and not form:
            plan = first
        elif torch.compiler.is_compiling():
            plan = self._of_trace(leaves, first, form)
        else:
            key = key_of(leaves, first.dynamic, form)
            plan = self._ai3_plans.get(key) or self._ai3_known.get(key)
            if plan is None:
                plan = self._planned_mixed(key, leaves, args, kwargs, form) or self._planned(leaves, args, kwargs, form)
        if plan is None or plan.body is None:
            out = self._by_original(args, kwargs)
            if eagerly and (self._replaced() or self._altered()):
                self._watch()  # it made a table anew, for these sizes
            return out
        if any_autocast():
            with torch.autocast(self._device(leaves), enabled=False), torch.no_grad():
                out = plan.body(*leaves)
        elif isinstance(plan.body, Swapped):  # its weights may require gradients
            with torch.no_grad():
                out = plan.body(*leaves)
        else:
            out = plan.body(*leaves)
        return out if plan.returned is None else plan.returned.of(out)

    def _by_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():  # setting it again takes longer than a small layer
            return self._ai3_original[0](*args, **kwargs)
        with torch.no_grad():
            return self._ai3_original[0](*args, **kwargs)

    def _is_watched(self, leaves: list[Any]) -> str:
        """What follows each operator of this call, as "torch.func"; "" where nothing does."""
        if tracing_state() is not None:
            return "torch.jit.trace"
        if in_forward_mode() and (any(map(is_wrapped, (*leaves, *self.parameters()))) or any_tangent(leaves)):
            return "torch.func" if in_transform() else "forward-mode differentiation"
        return ""

    def _hooked(self) -> bool:
        """Whether a module inside has a hook that came later: the original runs then, which calls it."""
        if self._ai3_hooks.are_all():
            return False
        now, count = self._hooks()
        if count > self._ai3_known_hooks:
            return True
        self._ai3_hooks = now  # those that came are passive
        return False

    def _hooks(self) -> tuple[Hooks, int]:
        """The hooks of the modules inside as they are; how many of them somebody may expect to be called."""
        original = self._ai3_original[0]
        inside = [m for m in self._inside() if m is not original]
        return Hooks.of(inside), sum(len(hooks_of(m)) for m in inside)

    def _watch(self) -> None:
        """Notes what is inside as it is: where a tensor or module is replaced or a setting changed, the original computes."""
        inside = self._inside()
        self._ai3_stores = Stores.of(inside)
        self._ai3_inside = [m for m in inside if not m.training and "training" in reads(m)]  # in evaluation mode
        self._ai3_attributes = Attributes.of(inside)

    def _inside(self) -> list[nn.Module]:
        return [m for m in self._ai3_original[0].modules() if not isinstance(m, torch.jit.ScriptModule)]

    def _altered(self) -> tuple[str, str, str] | None:
        """What module inside is in training mode now, or has another plain value as an attribute, as a warning says it."""
        attributes = self._ai3_attributes
        if not any(map(_is_training, self._ai3_inside)) and attributes.are_same():
            return None
        names = {m: name for name, m in self._ai3_original[0].named_modules()}
        for m in self._ai3_inside:
            if m.training:
                return names.get(m) or "the model", "is in training mode", "it is in evaluation mode again"
        if found := attributes.changed():
            m, name = found
            return f"{names[m]}.{name}" if names.get(m) else name, "was changed, which programs do not see", _BACK
        self._ai3_attributes = attributes.renewed()  # equal ones, as of a pickle
        return None

    def _replaced(self) -> bool:
        """Whether one of them is another object now."""
        before = self._ai3_stores
        if before.are_same():
            return False
        now = Stores.of(self._inside())
        if not now.hold_those_of(before):
            return True
        self._ai3_stores = now  # torch.export leaves a module with other dictionaries of the same tensors
        return False

    def _warn_of_changes(self) -> None:
        """Names what has a hook, or was replaced."""
        modules = dict(self._ai3_original[0].named_modules())
        if self._hooked():
            kind, end = "has a hook, which programs would not call", "it is removed"
            name = next(n for n, m in modules.items() if n and hooks_of(m))
        elif not self._replaced() and (altered := self._altered()):
            name, kind, end = altered
        else:
            kind, end = "was replaced, which programs do not see", _BACK
            known = set(map(id, self._ai3_stores.values))
            names = (
                f"{name}.{key}" if name else key
                for name, m in modules.items()
                for own in (m._parameters, m._buffers, m._modules)
                for key, value in own.items()
                if id(value) not in known
            )
            name = next(names, "a weight")  # one is missing where none is new
        if self._tells(kind):
            warnings.warn(f"ai3_ops.optimize: {name!r} {kind}: the original computes until {end}", stacklevel=4)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused where the original has one of this name."""
        self._refuse_replacing(name)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what would change the original and not what is computed of it."""
        if name == "qconfig":  # torch.ao.quantization is about to replace modules inside
            raise RuntimeError("ai3_ops.optimize: an optimized module cannot be quantized: quantize the original model")
        if not name.startswith("_") and name not in ("training", "forward"):
            self._refuse_replacing(name, value)
        super().__setattr__(name, value)

    def _refuse_replacing(self, name: str, value: Any = None) -> None:
        original = vars(self).get("_ai3_original")
        if original == () and isinstance(value, Tensor):
            raise RuntimeError(f"ai3_ops.optimize: {name!r} cannot be replaced: {_FREED}")
        if original and hasattr(original[0], name):
            raise RuntimeError(
                f"ai3_ops.optimize: {name!r} of an optimized module stays as it is: replace it in the original model and "
                "optimize it again"
            )

    def _of_trace(self, leaves: list[Any], first: Plan, form: str) -> Plan | None:
        """For compiled and exported programs, which get no plans for sizes, dtypes and values that come later."""
        example = first.example
        assert example is not None
        if form:
            if self._ai3_original:
                return None
            raise ValueError(
                f"ai3_ops.optimize: optimized for {len(example.shown)} arguments in another form than {form}"
            )
        start = 1 if first.dynamic else 0
        types = iter(example.types)
        if is_exporting() and self._ai3_original and not has_constant_sizes(leaves, start):
            return None  # a comparison would make constants of them
        batch = next((x.shape[0] for x in leaves if isinstance(x, Tensor)), None) if first.dynamic else None
        for x, own in zip(leaves, example.shown, strict=True):
            if isinstance(x, Tensor):
                fits = tuple(x.shape[start:]) == own[start:] and x.dtype == next(types)
                fits = fits and (batch is None or x.shape[0] == batch)
            else:  # a constant of the plan
                fits = type(x) is type(own) and x == own
            if not fits:
                if self._ai3_original:
                    return None
                called = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
                raise ValueError(f"ai3_ops.optimize: optimized for inputs of {example.shown}, called with {called}")
        return first

    # What is refused --------------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Optimized:
        """Refused: batch normalizations are folded and weights packed. `eval()` changes nothing."""
        if mode:
            raise RuntimeError(
                "ai3_ops.optimize: an optimized module is for inference: train the original model and optimize it again"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Optimized:
        places = {p.dtype: p.device for p in (*self.parameters(), *self.buffers())}
        places = places or {torch.float32: torch.device("cpu")}
        for dtype in sorted(places, key=lambda dtype: not dtype.is_floating_point):
            probe = torch.empty(1, dtype=dtype, device=places[dtype])
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise RuntimeError(
                    f"ai3_ops.optimize: an optimized module stays where and what it is: move the original model to "
                    f"{moved.device}, {moved.dtype}, and optimize it again"
                )
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the weights are folded and packed."""
        raise RuntimeError("ai3_ops.optimize: load weights into the original model and optimize it again")

    def _load_from_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused likewise where a model around this one loads its own."""
        self.load_state_dict()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, by its names."""
        if not self._ai3_original:
            raise RuntimeError(f"ai3_ops.optimize: {_FREED}: there is no state_dict")
        return self._ai3_original[0].state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """What it gained."""
        parts = self._ai3_report.parts
        if not parts or not parts[0].before_ms or not parts[0].after_ms:
            return "optimized"
        return f"optimized: {parts[0].before_ms:.3g} ms before, {parts[0].after_ms:.3g} ms after"


def _alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are parts of other memory, as of a mapped file, in their own: a pickle would hold the whole for each."""
    return {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in tensors.items()}


def _new() -> Optimized:
    return Optimized.__new__(Optimized)


@functools.cache
def _signed(signature: inspect.Signature) -> type[Optimized]:
    """Optimized with a signature of `forward`, which is the same function."""
    parameters = signature.parameters.values()
    own = next(name for name in ("self", "_self", "_ai3_self") if name not in signature.parameters)
    first = inspect.Parameter(own, inspect.Parameter.POSITIONAL_ONLY)
    plain: Any = Optimized.forward
    forward: Any = FunctionType(
        plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__doc__, forward.__qualname__, forward.__signature__ = (
        plain.__doc__,
        plain.__qualname__,
        inspect.Signature([first, *parameters]),
    )
    names = {"__module__": Optimized.__module__, "__doc__": Optimized.__doc__, "forward": forward}
    return type(Optimized.__name__, (Optimized,), names)


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Names and kinds alone: annotations and defaults may be what no file holds."""
    empty = inspect.Parameter.empty

    def bare(p: inspect.Parameter) -> inspect.Parameter:
        return p.replace(annotation=empty, default=empty if p.default is empty else None)

    return inspect.Signature([bare(p) for p in signature.parameters.values()])
