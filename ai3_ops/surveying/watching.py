"""The calls that a run makes: seen by a TorchFunctionMode, and told to the modules that make them."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ai3_ops import registry
from ai3_ops.calls.call import Call
from ai3_ops.calls.spec import Spec
from ai3_ops.nn import layout
from ai3_ops.nn.classes import Sites, leaf_class, swapped_class
from ai3_ops.nn.kinds import original_class, set_class
from ai3_ops.nn.unswap import unswap
from ai3_ops.operations import windows
from ai3_ops.surveying.composed import REASON, Composed
from ai3_ops.surveying.describe import Described
from ai3_ops.surveying.discover import Lost, discover, left_alone, opaque
from ai3_ops.surveying.modules import is_lazy, is_of_torch, is_optimized, reachable
from ai3_ops.surveying.running import run

# Told of a function that was called: the call that made it, if one did, arguments, keyword arguments, and the result.
Record = Callable[["Call | None", tuple[Any, ...], dict[str, Any], Any], None]


def survey(model: nn.Module, example_inputs: Any, record: Record) -> list[Described]:
    """The calls of a model without swapped layers, in call order, each with the arguments of its first call.

    The model runs once as PyTorch computes it; `record` is told every function of PyTorch's that it calls. Not those that have a
    pattern of their own, which one algorithm computes.
    """
    if any(map(is_lazy, model.modules())):
        run(model, example_inputs)
    calls, lost = discover(model, {})
    calls, _ = observe(model, calls, lost, example_inputs, record)
    return [d for d in calls if d.call.example is not None and not d.call.is_elsewhere]


def observe(
    model: nn.Module,
    calls: list[Described],
    lost: dict[nn.Module, Lost],
    example_inputs: Any,
    record: Record | None = None,
) -> tuple[list[Described], set[str]]:
    """Runs the model once as PyTorch computes it; the calls in call order, those not called last.

    Also the names of functions that it called to which the memory format matters.
    """
    watch = _Watch(lost, record)
    sites: dict[int, tuple[Sites, nn.Module]] = {}
    for described in calls:
        described.call.watch = watch.seen
        if described.sites is None:
            vars(described.module)["_ai3"] = described.call
            set_class(described.module, swapped_class(original_class(described.module)))
        else:
            sites[id(described.sites)] = described.sites, described.module
    for own, module in sites.values():
        own.install(module, every=True)
    with _stack(model, watch.stack), watch:
        try:
            run(model, example_inputs)
        finally:
            unswap(model)
            for described in calls:
                described.call.watch = None
    for described in calls:
        described.watched = True
        if described.call.example is not None:
            described.shape = next(a.shape for a in described.call.example if isinstance(a, Spec))
    order = {call: i for i, call in enumerate(watch.order)}
    return sorted(calls, key=lambda described: order.get(described.call, len(order))), watch.functions


class _Watch(TorchFunctionMode):
    """Sees the functional calls that are not replaced, and whose they are."""

    def __init__(self, lost: dict[nn.Module, Lost], record: Record | None = None) -> None:
        super().__init__()
        self.lost, self.record = lost, record
        self.order: list[Call] = []
        self.functions: set[str] = set()  # the names of those that depend on how tensors lie
        self.stack: list[nn.Module] = []
        self.expected: Call | None = None  # the call whose own function comes next
        self.composed, self.attending = Composed(), set[nn.Module]()  # modules that made a call of attention
        self.kinds = {f: o for o in registry.operations() if o in Call.by_name for f in Call.by_name[o].seen_as()}

    def seen(self, call: Call) -> None:
        """Called by a call just before its function."""
        self.expected = None if call.is_elsewhere else call
        if call.operation == "attention" and self.stack:
            self.attending.add(self.stack[-1])
        if call not in self.order:
            self.order.append(call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, call = self.kinds.get(func), None
        name = getattr(func, "__name__", "")
        if name in layout.VIEWS | layout.MEMORY and not _is_of_wrapper():
            self.functions.add(name)
        if operation is not None:
            if self.expected:
                call, self.expected = self.expected, None
            elif self.stack and (self.stack[-1] in self.lost or leaf_class(original_class(self.stack[-1])) is None):
                self.note(self.stack[-1], operation, func)
        result = func(*args, **(kwargs or {}))
        if self.composed.ends(name, args, result) and self.stack and not is_of_torch(self.stack[-1]):
            self.note_composed(self.stack[-1])
        if self.record is not None:
            self.record(call, args, kwargs or {}, result)
        return result

    def note_composed(self, module: nn.Module) -> None:
        """Attention out of reach; not what a call of it computes."""
        if module in self.attending or any(map(is_optimized, self.stack)):
            return
        found = self.lost.setdefault(module, Lost(""))
        found.add(REASON)
        found.composed["attention"] = found.composed.get("attention", 0) + 1

    def note(self, module: nn.Module, operation: str, function: Any) -> None:
        """A call out of reach; those of optimized modules are theirs."""
        if any(map(is_optimized, self.stack)):
            return
        if is_of_torch(module):
            found = self.lost.setdefault(module, left_alone(module, []))
        else:
            found = self.lost.setdefault(module, Lost(""))
            if not opaque(module):
                found.add(_place(module, function))
        found.seen[operation] = found.seen.get(operation, 0) + 1


def _is_of_wrapper() -> bool:
    """Whether code of torch.distributed's makes the call, as the hooks of fully_shard do."""
    frame: FrameType | None = sys._getframe(2)
    while frame and f"{frame.f_globals.get('__name__')}.".startswith(("torch.overrides.", "torch._tensor.")):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("torch.distributed.")


_BETWEEN = ("torch.overrides", "torch._jit_internal", "torch._compile", "torch._dynamo", "ai3_ops")


def _place(module: nn.Module, function: Any) -> str:
    """Why the call of `function` that is being made is no call site of the module."""
    frame: FrameType | None = sys._getframe(3)
    inside, of_whole = (
        "",
        False,
    )  # PyTorch's function that makes the call; whether what stands for another package's does
    while frame and f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "ai3_ops.")):
        of_whole = of_whole or frame.f_globals["__name__"] == windows.__name__
        between = frame.f_globals["__name__"].startswith(_BETWEEN)
        if not between and frame.f_code.co_name != getattr(function, "__name__", ""):
            inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return "its call is in a function outside of its methods"
    code = frame.f_code
    where = f"{code.co_qualname} ({pathlib.PurePath(code.co_filename).name}:{frame.f_lineno})"
    if of_whole:
        return f"{where} calls a function that is one call of attention; what is around that stays PyTorch's"
    if inside:
        return f"the call is in PyTorch's {inside}, called by {where}"
    if _is_method(code.co_qualname, module):
        return f"what {where} calls is known at the call only"
    return f"the call is in {where}, a function outside of its methods"


def _is_method(qualname: str, module: nn.Module) -> bool:
    return any(qualname.startswith(f"{cls.__qualname__}.") for cls in type(module).__mro__)


@contextmanager
def _stack(model: nn.Module, stack: list[nn.Module]) -> Iterator[None]:
    """Keeps the modules whose forwards run in `stack`."""

    def left(*_: Any) -> None:  # a hook's result would replace the output
        stack.pop()

    handles, hooked = [], set[nn.Module]()
    for _, module in reachable(model):  # inside of optimized ones a hook would be seen, and the original would compute
        if module in hooked or isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            continue
        hooked.add(module)
        handles.append(module.register_forward_pre_hook(lambda m, _: stack.append(m)))
        handles.append(module.register_forward_hook(left, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
