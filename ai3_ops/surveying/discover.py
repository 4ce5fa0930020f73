"""First step of swap: which calls a model makes, and which of them are out of reach."""

from __future__ import annotations

import copy
import pathlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from ai3_ops import registry
from ai3_ops._torch import is_sharded
from ai3_ops.calls.call import Call, Spec
from ai3_ops.nn import layout
from ai3_ops.nn.classes import Sites, found_in, leaf_class, swapped_class
from ai3_ops.nn.kinds import LEAVES, original_class, set_class
from ai3_ops.nn.sites import operations_in
from ai3_ops.nn.unswap import unswap
from ai3_ops.surveying.describe import Described
from ai3_ops.surveying.examples import Inputs, arguments, copied


@dataclass
class Lost:
    """Why calls of a module cannot be replaced, and those that were seen or that its source has."""

    reason: str
    seen: dict[str, int] = field(default_factory=dict)
    source: list[str] = field(default_factory=list)
    of_torch: bool = False  # a module of PyTorch's own that is left to it, as docs/swap.md says

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
        if reason := _opaque(module):
            lost[module] = Lost(reason, source=_operations(module, operations))
        elif leaf is not None:
            if leaf._ai3_operation in operations and not getattr(module, "return_indices", False):
                call = Call.by_name[leaf._ai3_operation]()
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


def is_optimized(module: nn.Module) -> bool:
    """Whether `optimize` returned a module: programs compute it, not the layers that it holds."""
    return "_ai3_report" in vars(module)


def refuse_optimized(model: nn.Module, function: str, advice: str) -> None:
    """ValueError for what `optimize` returned: there are no layers left in it that anything could be chosen for."""
    if is_optimized(model):
        raise ValueError(f"{function}: the module is one that ai3_ops.optimize returned: {advice}")


def refuse_meta(model: nn.Module, function: str) -> None:
    """ValueError for a model with tensors on the meta device: nothing of it can be run."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{function}: {name!r} is on the meta device, without values: give the model its weights first, by "
                "to_empty(device='cpu') and load_state_dict"
            )


def reachable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules in `named_modules()` order under all of their names, without those inside of optimized ones."""
    inside = None  # how the names begin that come next, if they are of an optimized module's own
    for name, module in model.named_modules(remove_duplicate=False):
        if inside is not None and name.startswith(inside):
            continue
        inside = None
        if is_optimized(module):
            inside = f"{name}." if name else ""
        yield name, module


def _earlier(mark: Any) -> dict[str, Call]:
    """The calls that a former swap left in a module, by what follows the module's name."""
    if isinstance(mark, list):
        return {note["suffix"]: Call.of_note(note) for note in mark}
    calls = mark.calls.values() if isinstance(mark, Sites) else [mark] if isinstance(mark, Call) else []
    return {call.suffix: call for call in calls}


def _opaque(module: nn.Module) -> str:
    """Why nothing of a module can be replaced; "" where it can be looked at."""
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit compiled it"
    for name in ("forward", "_conv_forward"):
        if name in vars(module):
            return f"its {name} was replaced on the instance"
    if is_lazy(module):
        return "its weight does not exist before its first call: swap after that, or with example inputs"
    return ""


def is_of_torch(module: nn.Module) -> bool:
    """Whether PyTorch wrote a module's class."""
    cls = original_class(module)
    return f"{cls.__module__}.".startswith("torch.") and not isinstance(module, fx.GraphModule)


def is_lazy(module: nn.Module) -> bool:
    """Whether a module has no weights yet."""
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


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


# With example inputs --------------------------------------------------------------------------------------------------
# Told of a function that was called: the call that made it, if one did, arguments, keyword arguments, and the result.
Record = Callable[["Call | None", tuple[Any, ...], dict[str, Any], Any], None]


def survey(model: nn.Module, example_inputs: Any, record: Record) -> list[Described]:
    """The calls of a model without swapped layers, in call order, each with the arguments of its first call.

    The model runs once as PyTorch computes it; `record` is told every function of PyTorch's that it calls.
    """
    if any(map(is_lazy, model.modules())):
        run(model, example_inputs)
    calls, lost = discover(model, {})
    calls, _ = observe(model, calls, lost, example_inputs, record)
    return [d for d in calls if d.call.example is not None]


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
        self.kinds = {f: o for o in registry.operations() if o in Call.by_name for f in Call.by_name[o].seen_as()}

    def seen(self, call: Call) -> None:
        """Called by a call just before its function."""
        self.expected = call
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
        if self.record is not None:
            self.record(call, args, kwargs or {}, result)
        return result

    def note(self, module: nn.Module, operation: str, function: Any) -> None:
        """A call out of reach; those of optimized modules are theirs."""
        if any(map(is_optimized, self.stack)):
            return
        if is_of_torch(module):
            found = self.lost.setdefault(module, left_alone(module, []))
        else:
            found = self.lost.setdefault(module, Lost(""))
            if not _opaque(module):
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
    inside = ""  # PyTorch's function that makes the call
    while frame and f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "ai3_ops.")):
        between = frame.f_globals["__name__"].startswith(_BETWEEN)
        if not between and frame.f_code.co_name != getattr(function, "__name__", ""):
            inside = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return "its call is in a function outside of its methods"
    code = frame.f_code
    where = f"{code.co_qualname} ({pathlib.PurePath(code.co_filename).name}:{frame.f_lineno})"
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

    handles = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(lambda m, _: stack.append(m)))
        handles.append(module.register_forward_hook(left, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Running --------------------------------------------------------------------------------------------------------------
def run(model: nn.Module, example_inputs: Any) -> Any:
    """Calls the model in evaluation mode, without gradients, and returns what it does.

    Afterwards model and example inputs are as before, but for the weights of lazy layers.
    """
    example_inputs = copied(example_inputs)
    args, kwargs = arguments(example_inputs)
    with _restored(model), torch.random.fork_rng(devices=[]), torch.no_grad(), _eager():
        for module in model.modules():
            module.training = False  # not by eval(), which a module may do more in, such as merging weights
        try:
            return _resharded(model, model(*args, **kwargs))
        except Exception as error:
            raise does_not_run("ai3_ops", example_inputs, error) from error


def _resharded(model: nn.Module, output: Any) -> Any:
    """The output, after fully_shard's root gave up the whole parameters that it would keep for a backward pass."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None) if is_sharded(module) else None
        if reshard is not None:
            reshard()
    return output


def does_not_run(function: str, example_inputs: Any, error: Exception) -> RuntimeError:
    """What is raised where a model fails on the example inputs: their types, the model's error, and what may be meant."""
    args, kwargs = arguments(example_inputs)
    given = ", ".join([*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())])
    what = f"{type(error).__name__}: {error}"
    return RuntimeError(
        f"{function}: running the model on the example inputs ({given}) failed: {what}{meant(example_inputs)}"
    )


def meant(example_inputs: Any) -> str:
    """The end of an error message, for example inputs with which a model fails: what may have been meant."""
    if isinstance(example_inputs, Inputs):
        args, kwargs = example_inputs
        return "" if kwargs else meant(args)
    if isinstance(example_inputs, dict):
        keys = ", ".join(f"{key!r}: …" for key in list(example_inputs)[:1])
        return f"; a dict has arguments by name; of a model that takes a dict as one argument it is ({{{keys}}},)"
    sizes = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        (sizes,) = sizes
    if sizes and all(isinstance(size, int) for size in sizes):
        return "; give a tensor, such as torch.randn(shape), not its shape"
    return "; a list is one argument, a tuple has several" if isinstance(example_inputs, list) else ""


@contextmanager
def _eager() -> Iterator[None]:
    """What is compiled would hide its calls. The compiler is not imported for it: without, nothing is compiled."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Puts back what a run changes: attributes, what lists, dicts and sets among them hold, values of buffers, training flags."""
    kept = [m for m in model.modules() if not is_lazy(m) and not isinstance(m, torch.jit.ScriptModule)]
    attributes = [
        (m, {k: (v, copy.copy(v) if type(v) in _CONTAINERS else None) for k, v in vars(m).items()})
        for m in kept
        if not is_sharded(m)  # what holds its parameters is FSDP's
    ]
    buffers = [(b, b.clone()) for m in kept for b in m._buffers.values() if b is not None and not b.is_meta]
    flags = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, before in attributes:
            for name in [name for name in vars(module) if name not in before]:
                del module.__dict__[name]
            for name, (value, content) in before.items():
                module.__dict__[name] = value
                if content is not None and _held(value) != _held(content):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(content)
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.layout != torch.strided or not torch.equal(buffer, value):  # sparse ones cannot be compared
                    buffer.copy_(value)


def _held(container: Any) -> list[Any]:
    """What a container holds, by identity: comparing tensors gives tensors."""
    if isinstance(container, dict):
        return [*zip(map(id, container), map(id, container.values()), strict=True)]
    return [*map(id, container)] if isinstance(container, list) else sorted(map(id, container))
