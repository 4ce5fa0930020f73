"""First step of swap: which calls a model makes, and which of them are out of reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ai3_ops import registry
from ai3_ops.calls.call import Call
from ai3_ops.nn.classes import Sites, found_in, leaf_class
from ai3_ops.nn.kinds import LEAVES, original_class
from ai3_ops.nn.sites import operations_in
from ai3_ops.surveying.describe import Described
from ai3_ops.surveying.modules import is_lazy, is_of_torch, is_optimized, reachable


@dataclass
class Lost:
    """Why calls of a module cannot be replaced, and those that were seen or that its source has."""

    reason: str
    seen: dict[str, int] = field(default_factory=dict)
    source: list[str] = field(default_factory=list)
    of_torch: bool = False  # a module of PyTorch's own that is left to it, as docs/swap.md says
    composed: dict[str, int] = field(default_factory=dict)  # as `seen`, but made of several calls, none of which it is

    def add(self, reason: str) -> None:
        """A further reason."""
        if reason not in self.reason.split("; "):
            self.reason = "; ".join(filter(None, [self.reason, reason]))


def discover(model: nn.Module, marks: Mapping[int, Any]) -> tuple[list[Described], dict[nn.Module, Lost]]:
    """All calls that can be chosen for, in `named_modules()` order, and the modules of whose own calls some cannot.

    What `optimize` returned, and all in it, stays as it is.

    `marks` are what a former swap left in the modules, by id.
    """
    operations = registry.operations()
    names: dict[nn.Module, list[str]] = {}
    for name, module in reachable(model):
        if not is_optimized(module):
            names.setdefault(module, []).append(name)
    calls: list[Described] = []
    lost: dict[nn.Module, Lost] = {}
    for module, paths in names.items():
        leaf, mark = leaf_class(original_class(module)), marks.get(id(module))
        earlier = _earlier(mark)
        if reason := opaque(module):
            lost[module] = Lost(reason, source=_operations(module, operations))
        elif leaf is not None:
            if leaf._ai3_operation in operations and not getattr(module, "return_indices", False):
                call = Call.by_name[leaf._ai3_operation]()
                call.whole = leaf._ai3_whole
                calls.append(Described(call.operation, module, paths, call=call, earlier=earlier.get("")))
                if beside := [o for o in _stands_for(module, operations) if o != call.operation]:
                    lost[module] = left_alone(module, beside)
        elif is_of_torch(module):
            if found := _operations(module, operations):
                lost[module] = left_alone(module, found)
        else:
            own = found_in(module)
            sites = Sites(own.sites)
            for site in own.sites:
                call = sites.calls[site.name]
                former = earlier.get(call.suffix)
                calls.append(
                    Described(
                        call.operation, module, paths, call.suffix, call=call, sites=sites, site=site, earlier=former
                    )
                )
            reached = {site.kind.operation for site in own.sites}
            reasons = dict(own.reasons)
            if beside := [o for o in _stands_for(module, operations) if o not in reached]:
                reasons.setdefault("its call is in a function outside of its methods", beside)
            if reasons:
                found = list(dict.fromkeys(o for listed in reasons.values() for o in listed))
                lost[module] = Lost("; ".join(reasons), source=found)
    return calls, lost


def _earlier(mark: Any) -> dict[str, Call]:
    """The calls that a former swap left in a module, by what follows the module's name."""
    if isinstance(mark, list):
        return {note["suffix"]: Call.of_note(note) for note in mark}
    calls = mark.calls.values() if isinstance(mark, Sites) else [mark] if isinstance(mark, Call) else []
    return {call.suffix: call for call in calls}


def opaque(module: nn.Module) -> str:
    """Why nothing of a module can be replaced; "" where it can be looked at."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit compiled it"
    for name in ("forward", "_conv_forward"):
        if name in vars(module):
            return f"its {name} was replaced on the instance"
    if is_lazy(module):
        return "its weight does not exist before its first call: swap after that, or with example inputs"
    return ""


def left_alone(module: nn.Module, found: list[str]) -> Lost:
    """Of a module of PyTorch's own."""
    return Lost(
        f"the forward of {type(module).__name__} is left to PyTorch", source=found, of_torch=is_of_torch(module)
    )


def _stands_for(module: nn.Module, operations: list[str]) -> list[str]:
    """Operations of a module by its kind."""
    return [o for o in operations if o in Call.by_name and Call.by_name[o].computed_by(module)]


def _operations(module: nn.Module, operations: list[str]) -> list[str]:
    """The operations of a module that is not looked into: by its kind, or that its forward calls by name."""
    if isinstance(module, torch.jit.ScriptModule):
        return _scripted_operations(module, operations)
    found = _stands_for(module, operations)
    forward = vars(module).get("forward", original_class(module).forward)
    if not f"{getattr(forward, '__module__', '')}.".startswith("torch."):
        found += operations_in(forward, module, operations)
    return list(dict.fromkeys(found))


def _scripted_operations(module: torch.jit.ScriptModule, operations: list[str]) -> list[str]:
    words = {f.__name__: o for o in operations if o in Call.by_name for f in Call.by_name[o].functions}
    words |= {m: o for o in operations if o in Call.by_name for m in Call.by_name[o].methods}
    kinds = [o for kind, o, _ in LEAVES if kind.__name__ == module.original_name and o in operations]
    called = [words.get(word) for word in _SCRIPT_CALL.findall(getattr(module, "code", ""))]
    graph: Any = module.graph if "conv2d" in operations and module._c._has_method("forward") else None
    traced = graph.findAllNodes("aten::_convolution") if graph is not None else []
    called += ["conv2d" for node in traced if _is_conv2d(node)]
    return list(dict.fromkeys([*kinds, *filter(None, called)]))


# The functions that TorchScript's text calls.
_SCRIPT_CALL = re.compile(r"\b(?:torch|functional)\.(?:___torch_mangle_\d+\.)?(\w+)")


def _is_conv2d(node: Any) -> bool:
    """Whether an aten::_convolution of a traced graph has a stride of two numbers and is not transposed."""
    inputs = list(node.inputs())
    stride, transposed = inputs[3].toIValue() or list(inputs[3].node().inputs()), inputs[6].toIValue()
    return len(stride) == 2 and not transposed
