"""Second step of swap: what is known about each call before anything is chosen for it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ai3_ops._torch import is_sharded
from ai3_ops.calls.call import Call
from ai3_ops.calls.spec import Spec, unfit
from ai3_ops.nn.classes import Sites, leaf_class
from ai3_ops.nn.computed import advice
from ai3_ops.nn.kinds import original_class
from ai3_ops.nn.sites import Site, known_arguments
from ai3_ops.problem import Problem
from ai3_ops.selecting.selectors import Place


@dataclass
class Described(Place):
    """A call of the model that can be chosen for: that of a layer, or at a call site of a module's own methods."""

    call: Call = field(kw_only=True)
    sites: Sites | None = field(kw_only=True, default=None)  # all of the module; None for a layer
    site: Site | None = field(kw_only=True, default=None)
    earlier: Call | None = field(kw_only=True, default=None)  # what a former swap decided
    given: str | None = field(init=False, default=None)  # the memory format that a former swap gave its weight
    layout: str | None = field(init=False, default=None)  # of a conv2d's weight, where a plan has one
    kept: bool = field(init=False, default=False)  # no selector matches it: it keeps what it has

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call.layer = self.names[0]
        self.call.computed = "" if self.site else advice(self.module)
        self.call.gathered = is_sharded(self.module)

    def leaves_computed(self) -> bool:
        """Whether `default` leaves a layer to PyTorch because its weight is computed, and would be packed, at every call."""
        call = self.call
        anew = call.computed or call.gathered
        if not anew or call.example is None or self.module.training or self.device() != "cpu":
            return False
        return not call.gains_unpacked(tuple(map(Spec.tensor, call.example)))

    def arguments(self, input: Tensor) -> tuple[Any, ...]:
        """The operator's, for a call with this input; LookupError where they depend on other values of the method."""
        if self.site is not None:
            args, kwargs = known_arguments(self.site, self.module)
            return self.call.arguments(input, *args, **kwargs)
        leaf = leaf_class(original_class(self.module))
        assert leaf is not None
        return self.call.arguments(*leaf._ai3_arguments(self.module, input))

    def problem(self) -> Problem | str | None:
        """What is known about the call: everything with example inputs, else what its parameters say; why there is none."""
        if self.call.example is not None:
            try:
                return self.call.problem(*map(Spec.tensor, self.call.example))
            except RuntimeError as error:
                return str(error).removeprefix(f"ai3::{self.operation}: ")
        weight = None
        try:
            if self.site is None:
                weight, groups = getattr(self.module, "weight", None), getattr(self.module, "groups", 1)
            else:
                args, kwargs = known_arguments(self.site, self.module)
                bound = inspect.signature(self.call.arguments).bind(None, *args, **kwargs)
                weight, groups = bound.arguments.get("weight"), bound.arguments.get("groups", 1)
            return self.call.problem_without_input(self.arguments, weight, groups)
        except RuntimeError as error:
            return (
                None
                if weight is None or is_sharded(self.module)
                else str(error).removeprefix(f"ai3::{self.operation}: ")
            )
        except (LookupError, ValueError, TypeError, AttributeError):
            return None  # it depends on other values of the method

    def unfit(self) -> str:
        """Why no algorithm can read the module's own weights, "" where they can."""
        weights = self.module.parameters(recurse=False) if self.call.reads_weights else ()
        if is_sharded(self.module):  # the calls get others
            return ""
        return next(filter(None, map(unfit, weights)), "")

    def device(self) -> str:
        """Where the call computes, as far as one can tell."""
        if self.call.example is not None:
            return next(a.device for a in self.call.example if isinstance(a, Spec))
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return str(tensors[0].device) if tensors else "meta"

    @property
    def in_place(self) -> bool:
        """Whether the call overwrites its input, or may."""
        if not self.call.in_place_argument:
            return False
        if self.site is None:
            return bool(getattr(self.module, "inplace", False))
        try:
            args, kwargs = known_arguments(self.site, self.module)
        except LookupError:
            return True
        return self.site.in_place or bool([*args, *kwargs.values()][:1] and [*args, *kwargs.values()][0])
