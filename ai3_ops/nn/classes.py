"""The classes of swapped modules: subclasses of the user's, whose calls are computed by chosen algorithms.

A module whose forward is one call gets the class of its kind (`ai3_ops.nn.Conv2d`). One with calls in its own methods gets one in
which those methods are compiled anew (`methods`). Each stands in a class of its own just before the one that has the original, so
that `super()` finds its way through rewritten and original classes alike.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ai3_ops import registry
from ai3_ops._torch import any_autocast, is_sharded, qconfig_for, transformed
from ai3_ops.calls.call import Call
from ai3_ops.nn import layout
from ai3_ops.nn.kinds import LEAVES, original_class, set_class
from ai3_ops.nn.methods import Originals, rewritten
from ai3_ops.nn.sites import Found, Site, find

FORMAT = 1  # of pickled swapped modules
FUSED = "PyTorch computes the whole layer in one call where few tokens come (docs/swap.md)"
# What swap leaves in a module: its Call or Sites, where it is swapped; plain values for `explain` and the next swap, where not.
MARKS = ("_ai3", "_ai3_lost", layout.FORMER)
_newobj: Any = vars(copyreg)["__newobj__"]


# Calls of one module --------------------------------------------------------------------------------------------------
class Sites:
    """The calls of one module's own methods; each is an attribute, which the rewritten method calls (`self._ai3.relu_1`)."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.calls: dict[str, Call] = {}
        self.in_place: set[str] = set()  # those whose function writes into its input
        self.trouble = ""  # why calls are PyTorch's after all
        self.found: list[Site] | None = [*sites]
        for site in self.found:
            self.calls[site.name] = call = site.kind(f":{site.name}")
            call.whole = next((name for name, f in site.kind.others().items() if f is site.callee), "")
            if site.in_place:
                self.in_place.add(site.name)
        self._make_entries()

    def _make_entries(self) -> None:
        for name, call in self.calls.items():
            vars(self)[name] = functools.partial(call, inplace=True) if name in self.in_place else call

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": self.calls, "in_place": self.in_place, "trouble": self.trouble}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.found = None
        self._make_entries()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sites:
        other = memo[id(self)] = object.__new__(Sites)
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.found = self.found
        return other

    def install(self, module: nn.Module, every: bool = False) -> None:
        """Gives the module the class in which calls with an algorithm (all, to watch them) are replaced."""
        assert self.found is not None
        calls = self.calls
        chosen = tuple(s for s in self.found if s.name in calls and (every or calls[s.name].algorithm is not None))
        for call in calls.values():
            call.holder = weakref.ref(module)
        vars(module)["_ai3"] = self
        set_class(module, sites_class(original_class(module), chosen))

    def restore(self, module: nn.Module) -> None:
        """After unpickling or copying: finds the call sites again; calls that the source no longer has are dropped."""
        if self.found is None:
            found = found_in(module)
            self.found = found.sites
            known = {site.name: site.kind.operation for site in found.sites}
            for name in [n for n, call in self.calls.items() if known.get(n) != call.operation]:
                reasons = "; ".join(found.reasons) or "its source has changed"
                self.trouble = f"{name} was not found again: {reasons}"
                del self.calls[name], vars(self)[name]
        if any(call.algorithm is not None for call in self.calls.values()):
            self.install(module)
        else:
            set_class(module, original_class(module))


def found_in(module: nn.Module) -> Found:
    """The call sites of a module's own methods."""
    return find(module, original_class(module), registry.operations(), tuple(cls for cls, _, _ in LEAVES))


# Classes --------------------------------------------------------------------------------------------------------------
class Swapped(nn.Module):
    """Mixed into the classes of swapped modules. They are pickled as the original class and what was chosen."""

    _ai3_original: type[nn.Module]

    @property
    def qconfig(self) -> Any:
        """What torch.ao.quantization is to make of the module; it knows PyTorch's classes, and gets the original one."""
        if "qconfig" not in vars(self):
            asked = qconfig_for(original_class(self))
            if asked is None:
                raise AttributeError
            self.qconfig = asked
        return vars(self)["qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["qconfig"] = value
        if value is not None:
            if word := vars(self).get(layout.FORMER):
                layout.convert([self], layout.FORMATS[word], layout.holds_strides(self))
            revert(self)

    @qconfig.deleter
    def qconfig(self) -> None:
        del vars(self)["qconfig"]

    def __init_subclass__(cls) -> None:  # the user's would meet classes that nobody wrote
        pass

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile a swapped module ({type(self).__name__}); use torch.compile or torch.export, or "
            "script what ai3_ops.unswap returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        cls = type(self)
        if function is _newobj and args[0] is cls:
            function, args = _new, (FORMAT, cls._ai3_original, *args[1:])
        return (function, args, *rest)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters move to other memory: packs of the old, which hold it, are freed at once."""
        made = self.__dict__.get("_ai3")
        for call in made.calls.values() if isinstance(made, Sites) else [made] if made else []:
            call.forget_packs()
        applied = super()._apply(*args, **kwargs)
        layout.forget_former(self, args[0] if args else kwargs["fn"])
        return applied

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        sites = self.__dict__.get("_ai3")
        if isinstance(sites, Sites):
            sites.restore(self)


def revert(module: nn.Module) -> None:
    """Gives a module the class back that its user gave it, and nothing that swap left in it."""
    if isinstance(module, Swapped):
        set_class(module, original_class(module))
    for mark in MARKS:
        vars(module).pop(mark, None)


def _check_format(found: Any) -> None:
    if found != FORMAT:
        raise ValueError(
            f"ai3_ops cannot load this swapped module: it was saved in format {found}, and this version reads format {FORMAT}; "
            "load it with the ai3_ops that saved it and save what ai3_ops.unswap returns, or its state_dict"
        )


def _new(found: Any, original: type[nn.Module], *args: Any) -> nn.Module:
    _check_format(found)
    cls = swapped_class(original)
    return cls.__new__(cls, *args)


_whole = threading.local()  # the layer that PyTorch may compute in one call, by thread


def _fast_path(layer: Any) -> int:
    return vars(layer).get("activation_relu_or_gelu", 0) if getattr(_whole, "layer", None) is layer else 0


class Slow(Swapped):
    """Holds swapped modules: PyTorch's inference fast path would not call them, and is not taken."""

    activation_relu_or_gelu = property(_fast_path, lambda self, value: vars(self).update(activation_relu_or_gelu=value))


class Dense(Swapped):
    """Holds swapped modules: padded tokens stay in its input, which else only PyTorch's own kernels could compute."""

    use_nested_tensor = property(lambda self: False, lambda self, value: None)


class _Graph(Swapped):
    """Of an fx.GraphModule, whose class is its own, made with the code that it generates."""

    def _plain(self) -> Any:
        """The module before the swap; it shares everything with this one."""
        plain = object.__new__(type(self)._ai3_original)
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k != "_ai3"}
        return plain

    def recompile(self) -> Any:
        """Generates the code anew, and finds the calls in it that were chosen for."""
        made = self._plain().recompile()
        self.__dict__["_ai3"].found = None
        self.__dict__["_ai3"].restore(self)
        return made

    def __copy__(self) -> nn.Module:
        return _graph(FORMAT, copy.copy(self._plain()), copy.deepcopy(self.__dict__["_ai3"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        other = copy.deepcopy(self._plain(), memo)
        memo[id(self)] = other
        return _graph(FORMAT, other, copy.deepcopy(self.__dict__["_ai3"], memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _graph, (FORMAT, self._plain(), self.__dict__["_ai3"])


def _graph(found: Any, module: nn.Module, sites: Sites) -> nn.Module:
    _check_format(found)
    sites.found = None  # it has a class of its own
    vars(module)["_ai3"] = sites
    sites.restore(module)
    return module


SHORTCUTS = {nn.TransformerEncoderLayer: Slow, nn.TransformerEncoder: Dense}  # past the modules that they hold
_BASES: dict[type[nn.Module], type[Swapped]] = {fx.GraphModule: _Graph, **SHORTCUTS}


def sites_class(original: type[nn.Module], sites: tuple[Site, ...]) -> type[Any]:
    """The subclass of `original` in which these calls are replaced: one for each choice of sites, which goes with its modules."""
    for known in type.__subclasses__(original):
        if vars(known).get("_ai3_sites") == sites:
            return known
    owners = [cls for cls in original.__mro__ if cls is original or any(site.owner is cls for site in sites)]
    bases: list[type] = [next((base for kind, base in _BASES.items() if issubclass(original, kind)), Swapped)]
    for owner in owners:
        methods = {site.method for site in sites if site.owner is owner}
        made = {name: rewritten([s for s in sites if (s.owner, s.method) == (owner, name)]) for name in methods}
        if made:
            bases.append(type(owner.__name__, (), {"__slots__": (), "__module__": owner.__module__, **made}))
        bases.append(owner)
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ai3_original": original,
        "_ai3_sites": sites,
        "_ai3": Originals(sites),
    }
    return types.new_class(original.__name__, tuple(bases), exec_body=lambda space: space.update(names))


# Of PyTorch's classes -------------------------------------------------------------------------------------------------
class Leaf(Swapped):
    """What these classes add to PyTorch's; `_ai3` in an instance is its Call."""

    _ai3_whole = ""  # of another package's: its name among `elsewhere`

    def train(self, mode: bool = True) -> Any:
        """PyTorch's, with the weight as training takes it."""
        if mode:
            layout.to_row(self)
        return super().train(mode)

    def extra_repr(self) -> str:
        """PyTorch's, and the algorithm."""
        call = self.__dict__.get("_ai3")
        return ", ".join(filter(None, [super().extra_repr(), f"algorithm={call.algorithm}" if call else ""]))


def _leaf_class(
    original: type[nn.Module], operation: str, arguments: Callable[..., Any], module: str, whole: str = ""
) -> type[nn.Module]:
    def forward(self: Any, input: Tensor) -> Tensor:
        call = self.__dict__.get("_ai3")
        if call is None:  # made by the user's code from type(self)
            return original.forward(self, input)
        if is_sharded(self):
            call.gathered = True
        return call.of_module(arguments(self, input))

    wholes = [f for cls, f in Call.by_name[operation].forwards.items() if issubclass(original, cls)]

    def forward_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.__dict__.get("_ai3")
        return original.forward(self, *args, **kwargs) if call is None else wholes[0](self, call, *args, **kwargs)

    def forward_elsewhere(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.__dict__.get("_ai3")
        if call is None:
            return original.forward(self, *args, **kwargs)
        return call.of_elsewhere(self, original.forward, args, kwargs)

    if wholes or whole:
        forward = forward_whole if wholes else forward_elsewhere
    forward.__doc__, forward.__qualname__ = original.forward.__doc__, original.forward.__qualname__
    names: dict[str, Any] = {
        "__module__": module,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": forward,
    }
    names |= {"_ai3_original": original, "_ai3_operation": operation, "_ai3_arguments": staticmethod(arguments)}
    names["_ai3_whole"] = whole
    return type(original.__name__, (Leaf, original), names)


OF_KINDS = {original: _leaf_class(original, operation, made, "ai3_ops.nn") for original, operation, made in LEAVES}


_PRODUCTS = 2**23  # of a linear layer: below, PyTorch's one call gains more than the parts do


class TransformerEncoderLayer(Slow, nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer without its fast path, but for few tokens and where nothing else than `default` was chosen.

    Not with masks, which that path takes for others (docs/pytorch.md).
    """

    __module__ = "ai3_ops.nn"
    _ai3_original = nn.TransformerEncoderLayer

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """PyTorch's."""
        masked = src_mask is not None or src_key_padding_mask is not None or is_causal
        calls = [] if torch.compiler.is_compiling() or masked else self._left_whole(src)
        if not calls:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        before, _whole.layer = [call.calls for call in calls], self
        try:
            output = super().forward(src)
        finally:
            _whole.layer = None
        if [call.calls for call in calls] == before:  # it may have had reasons to call them after all
            for call in calls:
                call.calls, call.torch_calls, call.reason = call.calls + 1, call.torch_calls + 1, FUSED
        return output

    def _left_whole(self, src: Any) -> list[Call]:
        """The calls inside, where `default` leaves them all to PyTorch's one call."""
        if type(src) is not Tensor or src.dtype != torch.float32 or not src.is_cpu or torch.is_grad_enabled():
            return []
        if src.numel() * self.linear1.out_features >= _PRODUCTS or transformed(src) or any_autocast():
            return []
        children = self.__dict__["_modules"].values()
        calls: list[Any] = [child.__dict__.get("_ai3") for child in children if isinstance(child, Swapped)]
        for call in calls:
            algorithm = call.algorithm if isinstance(call, Call) else None
            if algorithm is None or algorithm.name != "default" or call.strict or not call.calls:
                return []
            if algorithm.parameters or algorithm.exclude or any(algorithm.backward):
                return []
            if registry.preferred.get(call.operation) is not None:
                return []
        return calls


class TransformerEncoder(Dense, nn.TransformerEncoder):
    """nn.TransformerEncoder without nested tensors."""

    __module__ = "ai3_ops.nn"
    _ai3_original = nn.TransformerEncoder


def _unknown(module: nn.Module, input: Tensor) -> tuple[Any, ...]:
    raise LookupError("they are known at the call")


def _known_leaf(original: type[nn.Module]) -> type[Any] | None:
    """The class that was made for one before."""
    return next((cls for cls in type.__subclasses__(original) if "_ai3_operation" in vars(cls)), None)


def leaf_class(original: type[nn.Module]) -> type[Any] | None:
    """The class that makes the one call of `original`'s forward; None where the forward is something else.

    A user's subclass of a known class counts where it inherits the forward.
    """
    if original in OF_KINDS:
        return OF_KINDS[original]
    if original.__module__.startswith("torch."):
        return None
    name = f"{original.__module__}:{original.__qualname__}"
    for operation, call in Call.by_name.items():
        arguments = call.others_modules.get(name)
        whole = name if name in call.elsewhere and call.elsewhere[name].knows(original) else ""
        if arguments is not None or whole:
            return _known_leaf(original) or _leaf_class(
                original, operation, arguments or _unknown, original.__module__, whole
            )
    for base, operation, arguments in LEAVES:
        inherits = all(
            getattr(original, name, None) is getattr(base, name, None)
            for name in ("forward", "_conv_forward", "weight", "bias")
        )
        if issubclass(original, base) and inherits:
            return _known_leaf(original) or _leaf_class(original, operation, arguments, original.__module__)
    return None


def swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass that instances of `original` get, before any call in its own methods is replaced."""
    if original is nn.TransformerEncoderLayer:
        return TransformerEncoderLayer
    if original is nn.TransformerEncoder:
        return TransformerEncoder
    return leaf_class(original) or sites_class(original, ())
