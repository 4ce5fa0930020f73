"""Interfaces of PyTorch that are not public and that this package stands on; test_edges.py and calls/test_calls.py try each."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKeySet as DispatchKeySet
from torch._functorch.autograd_function import custom_function_call_vmap_helper, enable_single_level_autograd_function
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims_common import alert_not_deterministic as alert_not_deterministic
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn.functional import _get_softmax_dim as implicit_softmax_dim  # type: ignore[attr-defined]  # noqa: F401
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

pytree = _pytree
_Function = TypeVar("_Function", bound=Callable[..., Any])


# Imports --------------------------------------------------------------------------------------------------------------
class _Watcher(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and calls functions with a module once it has been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for modules that nothing waits for, as for almost all."""
        if fullname not in self.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for then in self.waiting.pop(fullname, ()):
                    then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _Watcher()
sys.meta_path.insert(0, _watcher)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module: now, if it has been imported, else when it is, so that nothing waits for an import."""
    if (module := sys.modules.get(name)) is not None:
        then(module)
    else:
        _watcher.waiting.setdefault(name, []).append(then)


# Compilers ------------------------------------------------------------------------------------------------------------
check = torch._check  # raises RuntimeError(words()) unless the condition, which may be symbolic, holds


def constant_when_compiled(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`, which imports the compiler: what it returns is a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_exporting() -> bool:
    """As `torch.compiler.is_exporting`, of which Dynamo of torch 2.11 makes True in all that it compiles."""
    return torch.compiler._is_exporting_flag


def compiled_by_inductor(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What Inductor makes of a graph."""
    from torch._inductor.compile_fx import compile_fx

    return cast(Callable[..., Any], compile_fx(graph, inputs))


def outside_of_compilation() -> AbstractContextManager[Any]:
    """For what a backend traces by itself, of which the compilation under way is to know nothing."""
    from torch._guards import tracing

    return tracing(None)


# What watches or changes the operators that a call makes --------------------------------------------------------------
any_autocast = torch._C._is_any_autocast_enabled
deterministic = torch._C._get_deterministic_algorithms  # as torch.are_deterministic_algorithms_enabled
tracing_state = torch._C._get_tracing_state  # None: torch.jit.trace does not run
any_requires_grad = torch._C._any_requires_grad  # of arguments, tensors or not
in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes, _transform_level = torch._C._len_torch_dispatch_stack, torch._C._functorch.maybe_current_level


def without_torch_functions() -> AbstractContextManager[Any]:
    """Where `__torch_function__` of modes and classes sees no call."""
    return torch._C.DisableTorchFunction()


def has_kernels_of_its_own(tensor: Tensor) -> bool:
    """Whether a tensor's class computes operators itself (DTensor, quantized tensors), so that its data are not its values."""
    own = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return own and not isinstance(tensor, FakeTensor)


_SHARDED = "_is_fsdp_managed_module"  # FSDP's mark, for Dynamo


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP keeps parts of a module's parameters, and gives it whole ones, which are plain tensors, for its calls."""
    return _SHARDED in module.__dict__


def has_constant_sizes(values: Iterable[Any], start: int = 0) -> bool:
    """Whether the tensors among the values have sizes, from a dimension on, that are constants of the graph that is traced."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imported by then: it takes long

    return all(has_static_value(size) for value in values if isinstance(value, Tensor) for size in value.shape[start:])


def as_constant(value: Any) -> Any:
    """An int, or each of a list, that Dynamo made symbolic as a constant of the graph: a range is made of no symbol."""
    if isinstance(value, (list, tuple)):
        return [as_constant(v) for v in value]
    return len(range(value)) if isinstance(value, int) and value > 0 else value


def clear_cublas_workspaces() -> None:
    """Frees what cuBLAS keeps for each handle and stream: two CUDA graphs must not write to one."""
    torch._C._cuda_clearCublasWorkspaces()


def in_forward_mode() -> bool:
    """Whether tensors may have tangents; of transforms, compiled graphs enter the level without telling Python."""
    return forward_ad._current_level >= 0 or in_transform()


def tangent_of(value: Any) -> Tensor | None:
    """A tensor's tangent at the level of the function transforms that is the current one; None of anything else."""
    return torch._VF._unpack_dual(value, level=0)[1] if isinstance(value, Tensor) else None


def any_tangent(values: Iterable[Any]) -> bool:
    """Whether one of the values has a tangent at any level, also below the one that torch.func has put on top."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not in_forward_mode() or not tensors:
        return False
    interpreter, functorch = retrieve_current_functorch_interpreter() if in_transform() else None, torch._C._functorch
    kept_here = interpreter is None or interpreter.key() == functorch.TransformType.Jvp  # vmap cannot even be asked
    if kept_here and any(tangent_of(t) is not None for t in tensors):
        return True
    if interpreter is None:
        return False
    wrapped = [functorch.maybe_get_level(t) == interpreter.level() for t in tensors]
    with interpreter.lower():
        return any_tangent(functorch.get_unwrapped(t) if w else t for t, w in zip(tensors, wrapped, strict=True))


def is_wrapped(value: Any) -> bool:
    """Whether a transform of torch.func holds a tensor in a wrapper of its own, as vmap does."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(value, Tensor):  # Dynamo cannot ask, and has no wrappers
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def is_differentiated(value: Any) -> bool:
    """Whether gradients are recorded of a tensor, by autograd or at any level of torch.func's transforms."""
    while is_wrapped(value) and not value.requires_grad:
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, Tensor) and value.requires_grad


def transformed(input: Tensor) -> bool:
    """Whether something watches or changes the operators of a call: tracing, tangents, torch.func, fakes, another device.

    Autocast of CUDA is one: it has rules of its own, for operations that keep their dtype on the CPU.
    """
    return (
        type(input) is not Tensor
        or forward_ad._current_level >= 0
        or not (input.is_cpu or (input.is_cuda and not any_autocast()))
        or _dispatch_modes() > 0
        or _transform_level() is not None
        or tracing_state() is not None
    )


# Quantization ---------------------------------------------------------------------------------------------------------
def qconfig_for(cls: type[nn.Module]) -> Any:
    """What the `propagate_qconfig_` of torch.ao.quantization that asks a module for its qconfig has for modules of a class.

    To be called by the property that it asks; None where something else does.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_propagate_qconfig_helper":
        return None
    named, prefix, parent = (frame.f_locals.get(name) for name in ("qconfig_dict", "prefix", "qconfig_parent"))
    return None if named is None else named.get(prefix, named.get(cls, parent))


def is_quantizing(value: Any) -> bool:
    """Whether it stands for a tensor in the graph that `prepare_fx` traces."""
    return isinstance(value, fx.Proxy) and type(value.tracer).__name__ == "QuantizationTracer"


# Dispatcher kernels ---------------------------------------------------------------------------------------------------
class SingleLevelFunction(_SingleLevelFunction):
    """A torch.autograd.Function for one level of the function transforms, at which a dispatcher kernel runs already."""

    @classmethod
    def apply_here(cls, *args: Any) -> Any:
        """Its `apply`, at the level that is the current one."""
        apply = cast(Any, cls).apply
        if not in_transform():
            return apply(*args)
        with enable_single_level_autograd_function():
            return apply(*args)


def vmapped(rule: Callable[..., Any], call: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """From a kernel for vmap: `rule(info, dims, *tensors, **options)` where a tensor has the level's dimension, else `call`."""
    interpreter = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(cast(Any, interpreter), rule, call, *tensors, **options)


def below_autograd(op: OpOverload, keys: DispatchKeySet, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """From a kernel for autograd: what comes after it."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)


@contextmanager
def derivatives(modes: tuple[bool, bool]) -> Iterator[None]:
    """Gradients and tangents as `derivative_modes` found them: a Function turns both off, also for torch.func's outer levels."""
    gradients, tangents = modes
    with torch.set_grad_enabled(gradients), forward_ad._set_fwd_grad_enabled(tangents):
        yield


def derivative_modes() -> tuple[bool, bool]:
    """Whether gradients, and whether tangents are recorded."""
    return torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()


def add_tags(op: OpOverload, tags: Sequence[torch.Tag]) -> None:
    """What tracers must know of an operator; the stable ABI defines schemas without tags."""
    op._tags.extend(tag for tag in tags if tag not in op._tags)


_AUTOCAST = DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def below_autocast() -> AbstractContextManager[Any]:
    """From a kernel for autocast: calls inside are not cast again."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
    return guard


def after_backend_select() -> DispatchKeySet:
    """The keys that come after BackendSelect, the one that every eager call passes."""
    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def is_cast(dtype: torch.dtype) -> bool:
    """Whether autocast takes tensors of a type."""
    return dtype.is_floating_point and dtype != torch.float64


def autocast(value: Any, device: str) -> Any:
    """A tensor of `device` that autocast takes in the autocast dtype; anything else as it is."""
    eligible = isinstance(value, Tensor) and is_cast(value.dtype) and value.device.type == device
    return value.to(torch.get_autocast_dtype(device)) if eligible else value


@contextmanager
def without_autocast() -> Iterator[None]:
    """Where no device casts by itself; a model's own autocast inside does."""
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def users_level() -> int:
    """The stacklevel of a warning about the frame that is neither this package's, PyTorch's nor generated."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("ai3_ops", "torch", "None"):
        level, frame = level + 1, frame.f_back
    return level


def asked_in(guard: Any) -> str:
    """The file of PyTorch's, from its directory on, in which an export asked for a condition on sizes; "" of any other."""
    root = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    name = str(getattr(getattr(getattr(guard, "sloc", None), "framework_loc", None), "filename", ""))
    return name[len(root) :].replace(os.sep, "/") if name.startswith(root) else ""
