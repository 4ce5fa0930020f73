"""Which class the user gave a module, and how it gets another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ai3_ops import operations as operations  # whose calls these are
from ai3_ops._torch import is_sharded
from ai3_ops.calls.call import Call

# PyTorch's class, the operation that its forward is one call of, and that call's arguments (as of PyTorch's function).
LEAVES: list[tuple[type[nn.Module], str, Callable[[Any, Tensor], tuple[Any, ...]]]] = [
    (module, name, arguments) for name, call in Call.by_name.items() for module, arguments in call.modules.items()
]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave a module: not ours, and not one that PyTorch generated on top of it."""
    cls = type(module)
    while (below := _below(module, cls)) is not None:
        cls = below
    return getattr(cls, "_ai3_original", cls)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Makes `module` an instance of `cls`; classes that PyTorch generated are generated anew on top of it."""
    module.__class__ = _on_top(module, type(module), cls)


def _on_top(module: nn.Module, generated: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    below = _below(module, generated)
    if below is None:
        return cls
    cls = _on_top(module, below, cls)
    names = {k: v for k, v in vars(generated).items() if k not in ("__dict__", "__weakref__")}
    prefix = generated.__name__.removesuffix(below.__name__)
    return type(f"{prefix}{cls.__name__}", (*generated.__bases__[:-1], cls), names)


def _below(module: nn.Module, cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class that PyTorch generated this one from, for a parametrization or by fully_shard; None where it did not."""
    parametrized = parametrize.is_parametrized(module) and cls.__name__.startswith("Parametrized")
    sharded = is_sharded(module) and cls.__name__.startswith("FSDP") and f"{cls.__module__}.".startswith("torch.")
    base: type[Any] = cls.__bases__[-1]
    return base if (parametrized or sharded) and issubclass(base, nn.Module) and base is not nn.Module else None
