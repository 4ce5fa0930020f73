"""swap and unswap: give the layers of a model chosen algorithms, and take them back."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from ai3_ops import registry
from ai3_ops.nn import LEAVES, leaf_class, original_class, set_class, swapped_class
from ai3_ops.nn.calls import Call, Spec, approximation, unfit
from ai3_ops.nn.rewrite import Rewrite, Swapped, Untraceable
from ai3_ops.operations.base import Problem
from ai3_ops.plan import CHANNELS_LAST, Plan
from ai3_ops.selectors import Algorithm, Choice, Place, Selector, Tuner, assign, listed, spoken_of


@dataclass
class Lost:
    """Why a module's own functional calls cannot be replaced, and those that were seen or that its source has."""

    reason: str
    seen: dict[str, int] = field(default_factory=dict)
    source: list[str] = field(default_factory=list)
    of_torch: bool = False  # a module of PyTorch's own that is left to it, as docs/swap.md says


@dataclass
class _Site(Place):
    call: Call = field(kw_only=True)
    rewrite: Rewrite | None = field(kw_only=True, default=None)
    earlier: Call | None = field(kw_only=True, default=None)  # of a former swap

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call.layer = self.names[0]

    def arguments(self, input: Tensor) -> tuple[Any, ...]:
        """The operator's, for a call with this input; LookupError where they hang on other values of the forward."""
        if self.rewrite is None:
            leaf = leaf_class(original_class(self.module))
            assert leaf is not None
            return self.call.arguments(*leaf._ai3_arguments(self.module, input))
        args, kwargs = self._constants()
        return self.call.arguments(input, *args, **kwargs)

    def _constants(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.rewrite is not None
        node = self.rewrite.nodes[self.suffix.removeprefix(":")]
        args = fx.map_arg(node.args[1:], self._constant)
        return args, fx.map_arg({k: v for k, v in node.kwargs.items() if k != "input"}, self._constant)

    def _constant(self, node: fx.Node) -> Any:
        if node.op != "get_attr":
            raise LookupError
        value: Any = self.module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value

    def problem(self) -> Problem | str | None:
        """What is known about the call: everything with example inputs, else what its parameters say; why there is none."""
        if self.call.example is not None:
            try:
                return self.call.problem(*map(Spec.tensor, self.call.example))
            except RuntimeError as error:
                return str(error).removeprefix(f"ai3::{self.operation}: ")
        weight = None
        try:
            if self.rewrite is None:
                weight, groups = getattr(self.module, "weight", None), getattr(self.module, "groups", 1)
            else:
                bound = inspect.signature(self.call.arguments).bind(None, *self._constants()[0], **self._constants()[1])
                weight, groups = bound.arguments.get("weight"), bound.arguments.get("groups", 1)
            return self.call.problem_without_input(self.arguments, weight, groups)
        except RuntimeError as error:
            return None if weight is None else str(error).removeprefix(f"ai3::{self.operation}: ")
        except (LookupError, ValueError, TypeError):
            return None  # it hangs on other values of the forward

    def unfit(self) -> str:
        """Why no algorithm can read the module's own weights, "" where they can."""
        weights = self.module.parameters(recurse=False) if self.operation in ("conv2d", "linear") else ()
        return next(filter(None, map(unfit, weights)), "")

    def device(self) -> str:
        """Where the call computes, as far as one can tell."""
        if self.call.example is not None:
            return next(a.device for a in self.call.example if isinstance(a, Spec))
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return tensors[0].device.type if tensors else "meta"

    @property
    def in_place(self) -> bool:
        """Whether the call overwrites its input."""
        if self.rewrite is None:
            return bool(getattr(self.module, "inplace", False))
        from ai3_ops.nn.rewrite import call_arguments

        args, kwargs = call_arguments(self.rewrite.nodes[self.suffix.removeprefix(":")])
        return self.operation == "relu" and bool(kwargs.get("inplace") or args[1:])


def swap(
    model: nn.Module,
    selectors: Selector = "default",
    example_inputs: Any = None,
    *,
    inplace: bool = False,
    strict: bool = False,
    allow_approximate: bool = False,
) -> nn.Module:
    """Gives layers of `model` chosen algorithms; everything else about the model stays as it is.

    Where PyTorch's convolution gives infinity, that of `default` may give NaN in the outputs around it: Winograd and FFT add and
    subtract inputs before they multiply (docs/decisions/infinity.md); `exclude=("winograd*",)` keeps them away.

    selectors: an algorithm's name, a list of names (one per layer), a function (module[, input_shape]) -> name, or a
    dict from module names, "re:<regex>", operations or "*" to these; see docs/swap.md. Layers that the selectors do not
    speak of keep what they have. example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, with
    which the model is run once in evaluation mode, which gives lazy layers their weights; lists then count layers in call
    order, and support is decided with true shapes.
    inplace=False works on a deep copy. strict=True raises where a layer would stay PyTorch's because its algorithm cannot do it,
    or because its call is out of reach; what `default` itself leaves to PyTorch (in-place ReLUs, views) stays.
    allow_approximate lets rules (`default`) choose algorithms that approximate.

    Returns the swapped model. Raises ValueError for module names and regular expressions that match nothing (an operation,
    as of a bare name, or "*" may), for what does not exist, and for a layer named singly that its algorithm cannot do;
    RuntimeError where the run with example inputs fails. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.swap needs an nn.Module, got {type(model).__name__}")
    if isinstance(selectors, Plan):
        selectors.check_machine(stacklevel=3)
    if not inplace:
        model = copy.deepcopy(model)
    if example_inputs is not None and any(map(_is_lazy, model.modules())):
        _run(model, example_inputs)  # makes their weights
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    unswap(model)
    try:
        _swap(model, selectors, example_inputs, strict, allow_approximate, {id(m): v.get("_ai3") for m, _, v in before})
    except BaseException:
        unswap(model)
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).update({k: v for k, v in attributes.items() if k in ("_ai3", "_ai3_lost")})
        raise
    return model


def unswap(model: nn.Module) -> nn.Module:
    """Gives every module of `model` its original class back, in place, and returns the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.unswap needs an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, Swapped):
            set_class(module, original_class(module))
        for mark in ("_ai3", "_ai3_lost"):
            vars(module).pop(mark, None)
    return model


def _swap(
    model: nn.Module, selectors: Selector, example_inputs: Any, strict: bool, approximate: bool, marks: dict[int, Any]
) -> None:
    sites, lost = _discover(model, marks)
    names = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    if example_inputs is not None:
        sites = _observe(model, sites, lost, example_inputs)
    reasons = {name: lost[module].reason for name, module in names.items() if module in lost}
    choices = assign(selectors, sites, names, reasons, _tuner(model, example_inputs, approximate))
    scripted, others = _check_lost(selectors, names, lost, example_inputs is not None, strict)
    stay: Counter[str] = Counter()
    for index, site in enumerate(sites):
        if index in choices:
            _choose(site, choices[index], strict, approximate, stay)
        elif site.earlier is not None:
            for name in ("algorithm", "requested", "reason", "strict", "approximate"):
                setattr(site.call, name, getattr(site.earlier, name))
            site.call.operator, site.call.options = site.earlier.operator, site.earlier.options
    _apply(model, sites, lost)
    for index, choice in choices.items():
        _lay_out(sites[index], choice.layout)
    if scripted:
        warnings.warn(
            f"ai3_ops.swap: layers that torch.jit compiled stay as they are: {listed(scripted)}; swap before "
            "torch.jit.trace",
            stacklevel=3,
        )
    if others:
        warnings.warn(
            f"ai3_ops.swap: calls of {listed(others)} stay PyTorch's, since they cannot be replaced; "
            "ai3_ops.explain gives each reason",
            stacklevel=3,
        )
    if stay:
        total = ", ".join(f"{word}: {count}" for word, count in stay.items())
        warnings.warn(
            f"ai3_ops.swap: {stay.total()} of {len(choices)} layers stay PyTorch's: the algorithm cannot do them "
            f"({total}); ai3_ops.explain gives each reason",
            stacklevel=3,
        )


def _tuner(model: nn.Module, example_inputs: Any, approximate: bool) -> Tuner | None:
    """What "auto" stands for."""
    if example_inputs is None:
        return None
    from ai3_ops.tune import tune  # which needs this file

    return lambda: tune(model, example_inputs, allow_approximate=approximate)


def _lay_out(site: _Site, layout: str | None) -> None:
    """Brings a conv2d module's weight into the memory format of a plan, in place: its values and its identity stay."""
    weight = site.module._parameters.get("weight") if site.rewrite is None and site.operation == "conv2d" else None
    if layout is None or weight is None:
        return
    wanted = torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format
    weight.data = weight.data.contiguous(memory_format=wanted)


# Finding calls --------------------------------------------------------------------------------------------------------
def _discover(model: nn.Module, marks: dict[int, Any]) -> tuple[list[_Site], dict[nn.Module, Lost]]:
    """All calls that can be chosen for, in `named_modules()` order, and the modules whose own calls cannot."""
    operations = registry.operations()
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    sites: list[_Site] = []
    lost: dict[nn.Module, Lost] = {}
    for module, paths in names.items():
        leaf, mark = leaf_class(original_class(module)), marks.get(id(module))
        noted = {note["suffix"]: Call.of_note(note) for note in mark} if isinstance(mark, list) else {}
        if isinstance(module, torch.jit.ScriptModule):
            lost[module] = Lost("torch.jit compiled it")
        elif "forward" in vars(module):
            lost[module] = Lost("its forward was replaced on the instance")
        elif _is_lazy(module):
            lost[module] = Lost(
                "its weight does not exist before its first call: swap after that, or with example inputs"
            )
        elif leaf is not None:
            if leaf._ai3_operation in operations and not getattr(module, "return_indices", False):
                earlier = mark if isinstance(mark, Call) else noted.get("")
                call = Call.by_name[leaf._ai3_operation]()
                sites.append(_Site(call.operation, module, paths, call=call, earlier=earlier))
        elif isinstance(module, fx.GraphModule):
            lost[module] = Lost("it is a torch.fx.GraphModule, which generates its own forward")
        elif _is_of_torch(module):
            if _source_calls(module, operations):
                lost[module] = _left_alone(module)
        else:
            try:
                rewrite = Rewrite(module, operations)
            except Untraceable as reason:
                lost[module] = Lost(str(reason))
                continue
            former = {c.suffix: c for c in mark.calls.values()} if isinstance(mark, Rewrite) else noted
            for call in rewrite.calls.values():
                earlier = former.get(call.suffix)
                sites.append(
                    _Site(call.operation, module, paths, call.suffix, call=call, rewrite=rewrite, earlier=earlier)
                )
    for module, what in lost.items():
        what.source = _source_calls(module, operations)
    return sites, lost


def _is_of_torch(module: nn.Module) -> bool:
    return f"{type(module).__module__}.".startswith("torch.")


def _left_alone(module: nn.Module) -> Lost:
    return Lost(f"the forward of {type(module).__name__} is left to PyTorch", of_torch=_is_of_torch(module))


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _source_calls(module: nn.Module, operations: list[str]) -> list[str]:
    """The operations that the source of the module's forward calls by name, or that the kind of module stands for."""
    found = dict.fromkeys(o for kind, o in _KINDS if isinstance(module, kind) and o in operations)
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and module.activation in (
        F.relu,
        torch.relu,
    ):
        found["relu"] = None
    words = {f.__name__: o for o in operations if o in Call.by_name for f in Call.by_name[o].functions}
    words |= {m: o for o in operations if o in Call.by_name for m in Call.by_name[o].methods}
    if isinstance(module, torch.jit.ScriptModule):
        kinds = [o for kind, o, _ in LEAVES if kind.__name__ == module.original_name and o in operations]
        called = [words.get(word) for word in _SCRIPT_CALL.findall(getattr(module, "code", ""))]
        graph: Any = module.graph if "conv2d" in operations and module._c._has_method("forward") else None
        traced = graph.findAllNodes("aten::_convolution") if graph is not None else []
        called += ["conv2d" for node in traced if _is_conv2d(node)]
        return list(dict.fromkeys([*kinds, *filter(None, called)]))
    forward = vars(module).get("forward", original_class(module).forward)
    if f"{getattr(forward, '__module__', '')}.".startswith("torch."):
        return list(found)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return list(found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            of_self = isinstance(node.func, ast.Attribute) and ast.unparse(node.func).startswith("self.")
            word = getattr(node.func, "attr", getattr(node.func, "id", None))
            if word in words and not of_self:
                found[words[word]] = None
    return list(found)


# The functions that TorchScript's text calls.
_SCRIPT_CALL = re.compile(r"\b(?:torch|functional)\.(?:___torch_mangle_\d+\.)?(\w+)")


def _is_conv2d(node: Any) -> bool:
    """Whether an aten::_convolution of a traced graph has a stride of two numbers and is not transposed."""
    inputs = list(node.inputs())
    stride, transposed = inputs[3].toIValue() or list(inputs[3].node().inputs()), inputs[6].toIValue()
    return len(stride) == 2 and not transposed


# Modules that compute an operation although their own source may not say so.
_KINDS = [(kind, operation) for kind, operation, _ in LEAVES]
_KINDS += [(nn.MultiheadAttention, "linear"), (nn.LPPool2d, "avg_pool2d"), (nn.LPPool2d, "relu")]


# Told of a function that was called: the site that made the call, if one did, arguments, keyword arguments, and the result.
Record = Callable[["Call | None", tuple[Any, ...], dict[str, Any], Any], None]


class _Watch(TorchFunctionMode):
    """Sees the functional calls that are no sites, and whose they are."""

    def __init__(self, lost: dict[nn.Module, Lost], record: Record | None = None) -> None:
        super().__init__()
        self.lost, self.record = lost, record
        self.order: list[Call] = []
        self.stack: list[nn.Module] = []
        self.expected: Call | None = None  # the site whose own function comes next
        self.kinds = {f: o for o in registry.operations() if o in Call.by_name for f in Call.by_name[o].seen_as()}

    def seen(self, call: Call) -> None:
        """Called by a site just before its own function."""
        self.expected = call
        if call not in self.order:
            self.order.append(call)

    @staticmethod
    def _why(module: nn.Module) -> Lost:
        rewrite = vars(module).get("_ai3")
        if isinstance(rewrite, Rewrite):
            return Lost(rewrite.trouble or "the call is inside a function that torch.fx does not enter")
        return _left_alone(module)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, call = self.kinds.get(func), None
        if operation is not None:
            if self.expected:
                call, self.expected = self.expected, None
            elif self.stack and (self.stack[-1] in self.lost or leaf_class(original_class(self.stack[-1])) is None):
                seen = self.lost.setdefault(self.stack[-1], self._why(self.stack[-1])).seen
                seen[operation] = seen.get(operation, 0) + 1
        result = func(*args, **(kwargs or {}))
        if self.record is not None:
            self.record(call, args, kwargs or {}, result)
        return result


@contextmanager
def _eager() -> Iterator[None]:
    """What is compiled would hide its calls. The compiler is not imported for it: without, nothing is compiled."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


def survey(model: nn.Module, example_inputs: Any, record: Record) -> list[_Site]:
    """The calls of a model without swapped layers, in call order, each with the arguments of its first call.

    The model runs once as PyTorch computes it; `record` is told every function of PyTorch's that it calls.
    """
    if any(map(_is_lazy, model.modules())):
        _run(model, example_inputs)
    sites, lost = _discover(model, {})
    return [site for site in _observe(model, sites, lost, example_inputs, record) if site.call.example is not None]


def _observe(
    model: nn.Module,
    sites: list[_Site],
    lost: dict[nn.Module, Lost],
    example_inputs: Any,
    record: Record | None = None,
) -> list[_Site]:
    """Runs the model once as PyTorch computes it; the sites in call order, those not called last."""
    watch = _Watch(lost, record)
    for site in sites:
        site.call.watch = watch.seen
        if site.rewrite is not None:
            site.rewrite.compile(site.module, watch=True)
        _install(site)
    with _stack(model, watch.stack), watch:
        try:
            _run(model, example_inputs)
        finally:
            unswap(model)
            for site in sites:
                site.call.watch = None
                if site.rewrite is not None:
                    site.rewrite.forget_calls()
    for site in sites:
        site.watched = True
        if site.call.example is not None:
            site.shape = next(a.shape for a in site.call.example if isinstance(a, Spec))
    order = {call: i for i, call in enumerate(watch.order)}
    return sorted(sites, key=lambda site: order.get(site.call, len(order)))


def _run(model: nn.Module, example_inputs: Any) -> None:
    args, kwargs = (example_inputs, {}) if isinstance(example_inputs, tuple) else ((example_inputs,), {})
    if isinstance(example_inputs, dict):
        args, kwargs = (), example_inputs
    with _evaluating(model), torch.no_grad(), _eager():
        try:
            model(*args, **kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            given = ", ".join(
                [*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())]
            )
            raise RuntimeError(
                f"ai3_ops.swap: running the model on the example inputs ({given}) failed: {what}"
            ) from error


@contextmanager
def _stack(model: nn.Module, stack: list[nn.Module]) -> Iterator[None]:
    handles = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(lambda m, _: stack.append(m)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


# Choosing -------------------------------------------------------------------------------------------------------------
def _choose(site: _Site, choice: Choice, strict: bool, approximate: bool, stay: Counter[str]) -> None:
    call = site.call
    call.requested, call.strict, call.approximate = choice.requested, strict, approximate
    reasons: list[str] = []
    for candidate in choice.candidates:
        if candidate is None:
            call.reason = "; ".join(reasons)
            return
        if candidate.name == "default" and not choice.single:
            if site.in_place:
                call.reason = "in place: PyTorch's needs no second tensor"
                return
            if site.operation == "flatten":  # what is later written to the view shows in the input
                call.reason = "a view there, a copy here"
                return
        reason = _refusal(site, candidate, approximate)
        if not reason:
            call.choose(candidate)
            if site.watched and call.example is None:
                reasons.append("not called by the run with example inputs")
            call.reason = "; ".join(reasons)
            return
        reasons.append(f"{candidate.name} {reason}")
    call.reason = "; ".join(reasons)
    if choice.single or strict:
        can = [
            a
            for a in dict.fromkeys(a.name for a in registry.algorithms(site.operation))
            if not _refusal(site, Algorithm(a), approximate)
        ]
        name = site.names[0] or "the model itself"
        raise ValueError(
            f"ai3_ops.swap: {name} ({site.operation}): {call.reason}; "
            f"algorithms that support it: {', '.join(can) or 'none'}"
        )
    stay[choice.requested] += 1


def _refusal(site: _Site, algorithm: Algorithm, approximate: bool) -> str:
    if reason := site.unfit():
        return reason
    problem = site.problem()
    if isinstance(problem, str):
        return problem
    if problem is not None:
        problem = problem._replace(device=site.device())
        reason = site.call.refusal(algorithm, problem)
        if reason:
            return reason
        reason = site.call.backward_refusal(algorithm) if any(algorithm.backward) else ""
        if reason:
            return reason
    reason = site.call.approximates(algorithm)
    if reason or approximate or problem is None or site.call.example is None or problem.device == "meta":
        return reason
    if registry.is_rule(site.operation, algorithm.name):
        sizes = site.call.asked(algorithm, problem).sizes
        chosen = registry.resolve_sizes(site.operation, algorithm.name, problem.device, problem.dtype, **sizes)
        if registry.algorithm(site.operation, chosen).accuracy == "approximate":
            return approximation(chosen)
    return ""


def _check_lost(
    selectors: Selector, names: dict[str, nn.Module], lost: dict[nn.Module, Lost], observed: bool, strict: bool
) -> tuple[list[str], list[str]]:
    """What the selectors speak of and is out of reach: what torch.jit compiled, and other modules; an error when strict."""
    scripted: dict[str, None] = {}
    others: dict[str, None] = {}
    for module, what in lost.items():
        paths = [name for name, m in names.items() if m is module]
        shown = paths[0] or "the model itself"
        opaque = isinstance(module, torch.jit.ScriptModule)  # its calls are not seen
        for operation in what.seen if observed and not opaque else what.source:
            if (what.of_torch and not strict) or not spoken_of(selectors, operation, module, paths):
                continue
            (scripted if opaque else others)[shown] = None
            if strict:
                raise ValueError(
                    f"ai3_ops.swap: {shown} ({type(module).__name__}) calls {operation}, "
                    f"which cannot be replaced: {what.reason}"
                )
    return list(scripted), list(others)


# Applying -------------------------------------------------------------------------------------------------------------
def _install(site: _Site) -> None:
    vars(site.module)["_ai3"] = site.rewrite or site.call
    if not isinstance(site.module, Swapped):
        set_class(site.module, swapped_class(original_class(site.module)))


def _apply(model: nn.Module, sites: list[_Site], lost: dict[nn.Module, Lost]) -> None:
    for site in sites:
        if site.call.algorithm is not None:
            _install(site)
    for site in sites:
        if not isinstance(site.module, Swapped):  # stays as it was: what `explain` says of it are plain values
            vars(site.module).setdefault("_ai3", []).append(site.call.note())
    for rewrite, module in {id(s.rewrite): (s.rewrite, s.module) for s in sites if s.rewrite}.values():
        if isinstance(module, Swapped):
            rewrite.compile(module)
        rewrite.forget_graphs()
    for module in model.modules():
        inside = any(isinstance(child, Swapped) for child in module.modules())
        if isinstance(module, nn.TransformerEncoderLayer) and inside and not isinstance(module, Swapped):
            set_class(module, swapped_class(original_class(module)))
    for module, what in lost.items():
        if what.seen or what.source:
            vars(module)["_ai3_lost"] = asdict(what)
