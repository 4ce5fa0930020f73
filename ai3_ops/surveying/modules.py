"""What modules are: PyTorch's own, optimized, without weights yet, reachable from a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ai3_ops.nn.kinds import original_class


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


def is_of_torch(module: nn.Module) -> bool:
    """Whether PyTorch wrote a module's class."""
    cls = original_class(module)
    return f"{cls.__module__}.".startswith("torch.") and not isinstance(module, fx.GraphModule)


def is_lazy(module: nn.Module) -> bool:
    """Whether a module has no weights yet."""
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
