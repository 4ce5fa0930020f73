"""The memory format of a swapped network: weights in channels_last, so that it runs in that format from its first convolution on.

The output of a convolution is channels_last where its weight is, as in ATen, and every kernel here is fastest so. A network that
is given NCHW images then converts these few channels instead of every activation (docs/decisions/layout.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ai3_ops._torch import pytree
from ai3_ops.calls.call import Call
from ai3_ops.problem import is_channels_last

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}  # by the words of plans

# Of a module whose weight was given another format: the word of the one that it had.
FORMER = "_ai3_format"

_LARGE = 1 << 16  # bytes of a weight

# Methods that raise for a tensor in channels_last where they work for the same one in NCHW, or ask how it lies, and those that
# never raise: they take elements as they lie in memory, so that on the same tensor in channels_last they give others.
VIEWS = frozenset({"view", "view_as", "_unsafe_view", "view_as_complex", "is_contiguous"})
MEMORY = frozenset(
    {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_", "set_"}
    | {"storage", "untyped_storage", "data_ptr"}
)


def naming(model: nn.Module, methods: frozenset[str]) -> list[str]:
    """The classes of the model whose methods name one of `methods`, or functions that these call or that its objects hold.

    Of functions those count that are found by a name of their file, or of a module that it imports; of objects those that are
    attributes of the model's modules, hooks among them.
    """
    seen: set[Any] = set()
    found = []
    held: dict[type, list[Any]] = {}
    for module in model.modules():
        held.setdefault(type(module), []).extend(_held_by(module))
    for cls, values in held.items():
        functions = [f for f in (getattr(v, "__func__", v) for v in values) if isinstance(f, FunctionType)]
        classes = [c for v in values if not isinstance(v, FunctionType) for c in type(v).__mro__]
        functions += [f for c in dict.fromkeys([*cls.__mro__, *classes]) for f in _methods(c)]
        if any([_names_one(f, methods, seen) for f in functions]):
            found.append(original_name(cls))
    return found


def original_name(cls: type) -> str:
    """Of the class that the user wrote."""
    return str(getattr(cls, "_ai3_original", cls).__qualname__)


def _held_by(module: nn.Module) -> Iterator[Any]:
    """Functions and objects in a module's attributes and hooks; modules among them speak for themselves."""
    for name, value in vars(module).items():
        if name.startswith("_ai3"):
            continue
        for one in value.values() if isinstance(value, dict) else (value,):
            if not isinstance(one, (nn.Module, Tensor)):
                yield getattr(one, "func", one)  # of a functools.partial


def _is_own(name: Any) -> bool:
    return not f"{name}.".startswith(("torch.", "ai3_ops.", "builtins."))


def _methods(cls: type) -> list[FunctionType]:
    """A class's own, if somebody else wrote it."""
    if not _is_own(cls.__module__) or "_ai3_original" in vars(cls):
        return []
    values = [(name, getattr(f, "__func__", f)) for name, f in vars(cls).items()]
    return [f for name, f in values if isinstance(f, FunctionType) and name != "__init__"]


def _names_one(function: FunctionType, methods: frozenset[str], seen: set[Any]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = set(names_in(function.__code__))
    if names & methods:
        return True
    named = [function.__globals__.get(name) for name in names]
    for imported in [m for m in named if isinstance(m, ModuleType) and _is_own(m.__name__)]:
        named += [vars(imported).get(name) for name in names]
    return any(isinstance(f, FunctionType) and _is_own(f.__module__) and _names_one(f, methods, seen) for f in named)


def names_in(code: CodeType) -> Iterator[str]:
    """Those that a function's code looks up, and the functions' inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def is_costly(module: nn.Module) -> bool:
    """Whether the weight is so large that kernels would spend much of a training step on reading it in channels_last.

    They read weights in NCHW: one in channels_last is copied in the forward and in the backward pass, its gradient once more,
    unless both formats are the same memory.
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 4 and not _is_either(weight) and weight.nbytes > _LARGE


def _is_either(weight: Tensor) -> bool:
    """Whether it is the same memory in both formats."""
    return weight.shape[1] == 1 or weight.shape[2:] == (1, 1)


def _is_in(weight: Tensor, format: torch.memory_format) -> bool:
    """Also where its sizes fit both formats: the strides decide in which one the convolution answers."""
    last = format == torch.channels_last
    return weight.is_contiguous(memory_format=format) and is_channels_last(weight) == last


def holds_strides(model: nn.Module, rows: bool = False) -> Callable[[Tensor], bool]:
    """Tells weights that must keep their strides, because others have noted how they lie.

    In a process of a group (torch.distributed) that is any: a reducer lays out its buckets as the weights are when it is made,
    and fully_shard takes contiguous ones alone. Elsewhere it is those that share their memory with other tensors or processes,
    and with `rows` those that could not be viewed as one row (`parameters_to_vector`, pruning, `torch.optim.LBFGS`).
    """
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    group = group or any("reducer" in vars(module) for module in model.modules())

    def holds(weight: Tensor) -> bool:
        row = rows and not _is_either(weight)
        return group or row or weight.is_shared() or weight.untyped_storage().nbytes() != weight.nbytes

    return holds


def convert(
    convolutions: Sequence[nn.Module],
    to: torch.memory_format = torch.channels_last,
    holds: Callable[[Tensor], bool] = lambda _: False,
) -> Callable[[], None]:
    """Gives the weights of these convolutions a memory format, in place; returns what undoes it.

    Their modules note the format that they had, all those of a shared weight, for `former`. Where a weight must keep its strides
    the convolution gives its input that format.
    """
    before: list[tuple[nn.Module, nn.Parameter, Tensor]] = []
    formats: dict[nn.Parameter, str] = {}
    noted: list[nn.Module] = []
    inference: dict[nn.Parameter, nn.Parameter] = {}
    calls: list[Call] = []
    for module in convolutions:
        weight, call = module._parameters.get("weight"), vars(module).get("_ai3")
        if weight is None or weight.device.type != "cpu" or weight.ndim != 4:
            continue
        if isinstance(call, Call) and to == torch.channels_last:
            call.last = True
            calls.append(call)
        if _is_in(weight, to):
            if weight in formats and FORMER not in vars(module):
                vars(module)[FORMER] = formats[weight]
                noted.append(module)
            continue
        if type(weight) is not nn.Parameter or holds(weight):
            if isinstance(call, Call) and to == torch.channels_last:
                call.reads_last = True
            continue
        with torch.no_grad():
            formatted = torch.empty_like(weight, memory_format=to).copy_(weight)
        before.append((module, weight, weight.detach()))
        formats[weight] = "channels_last" if is_channels_last(weight) else "contiguous"
        if FORMER not in vars(module):
            vars(module)[FORMER] = formats[weight]
            noted.append(module)
        if weight.is_inference():  # takes no other data
            if weight not in inference:
                inference[weight] = nn.Parameter(formatted, weight.requires_grad)
            module._parameters["weight"] = inference[weight]
        else:
            weight.data = formatted

    def undo() -> None:
        for module, weight, data in before:
            if weight in inference:
                module._parameters["weight"] = weight
            else:
                weight.data = data
        for call in calls:
            call.last = call.reads_last = False
        for module in noted:
            vars(module).pop(FORMER, None)

    return undo


def to_row(module: nn.Module) -> None:
    """Before training: the weight that `convert` gave channels_last is contiguous again, and the module's input gets that format.

    Its gradient takes less time so (docs/decisions/layout.md), and what views weights works.
    """
    weight, call = module._parameters.get("weight"), vars(module).get("_ai3")
    if weight is None or vars(module).get(FORMER) != "contiguous" or _is_either(weight) or not isinstance(call, Call):
        return
    if weight.is_cuda:  # which `convert` leaves alone, and whose memory always counts as shared
        if type(weight) is nn.Parameter and not weight.is_inference():
            weight.data = weight.detach().contiguous()
    else:
        convert([module], FORMATS["contiguous"], holds_strides(module))
    if _is_in(weight, FORMATS["contiguous"]):
        vars(module).pop(FORMER)
        call.reads_last = True


def given(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose weights `convert` gave another format, and the word of the one that they have."""
    weights = [(m, m._parameters.get("weight")) for m in model.modules() if FORMER in vars(m)]
    return {m: "channels_last" if is_channels_last(w) else "contiguous" for m, w in weights if w is not None}


def former(model: nn.Module, format: str) -> list[nn.Module]:
    """The modules of a model whose weights had this format, given by its word, before `convert` gave them another."""
    return [module for module in model.modules() if vars(module).get(FORMER) == format]


def forget_former(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """After `module._apply(fn)`: where that gives tensors a memory format, the one before `convert` is no longer the user's.

    `model.to(memory_format=torch.channels_last)` leaves weights as they are that a swap had put into channels_last, so that only
    the function itself says that somebody asked for it.
    """
    weight, call = module._parameters.get("weight"), vars(module).get("_ai3")
    reads_last = isinstance(call, Call) and call.reads_last
    if weight is None or not (FORMER in vars(module) or reads_last):
        return
    for format in FORMATS.values():
        probe = torch.empty((2, 2, 2, 2), dtype=weight.dtype, device=weight.device, memory_format=format)
        if not fn(probe).is_contiguous(memory_format=format):
            vars(module).pop(FORMER, None)
            if isinstance(call, Call):
                call.reads_last = False  # the weight says in which format the output is
            return


class Watch(TorchFunctionMode):
    """Finds the convolutions whose outputs the model views as only NCHW can be viewed; the views succeed meanwhile."""

    def __init__(self, convolutions: dict[nn.Module, Call]) -> None:
        super().__init__()
        self.convolutions, self.found = convolutions, set[Call]()
        # The last convolutions that a tensor was computed from.
        self.sources: MutableMapping[Tensor, frozenset[Call]] = WeakTensorKeyDictionary()

    def __enter__(self) -> Any:
        self.handles = [m.register_forward_hook(self._left) for m in self.convolutions]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        super().__exit__(*error)

    def _left(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self.sources[output] = frozenset({self.convolutions[module]})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        sources = frozenset[Call]().union(*(self.sources.get(t, ()) for t in tensors))
        name = getattr(func, "__name__", "")
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if not sources or name not in VIEWS:
                raise
            self.found |= sources
            result = func(args[0].contiguous(), *args[1:], **kwargs)
        if sources and name == "is_contiguous" and not result and len(args) == 1 and not kwargs:
            self.found |= sources
            result = True
        if sources:
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor):
                    self.sources[made] = sources
        return result


# Largest difference, as max|a - b| / max|a|, of outputs that are the same but for rounding, by bytes of an element.
_ROUNDING = {2: 5e-2, 4: 1e-3, 8: 1e-9}


def same(output: Any, other: Any) -> bool:
    """Whether two outputs of a model agree but for rounding; False for what cannot be compared."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(output), pytree.tree_flatten(other)
    return bool(spec == other_spec) and all(map(_same_leaf, leaves, others))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float, complex)) and isinstance(b, (int, float, complex)):
        a, b = torch.tensor(a), torch.tensor(b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and isinstance(a, (str, bytes, type(None)))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != torch.strided or a.is_nested:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    limit = _ROUNDING.get(torch.finfo(a.dtype).bits // 8, 0.0)
    kind = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(kind), b.detach().to(kind)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return a.numel() == 0 or bool((a - b).abs().max() <= limit * a.abs().max())
