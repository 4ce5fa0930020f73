"""The classes of swapped modules: `ai3_ops.nn.Conv2d` is an `nn.Conv2d` computed by a chosen algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ai3_ops._torch import is_sharded
from ai3_ops.calls.call import Call
from ai3_ops.nn.rewrite import Slow, Swapped, sites_class

# PyTorch's class, the operation that its forward is one call of, and that call's arguments (as of PyTorch's function).
LEAVES: list[tuple[type[nn.Module], str, Callable[[Any, Tensor], tuple[Any, ...]]]] = [
    (module, name, arguments) for name, call in Call.by_name.items() for module, arguments in call.modules.items()
]


class Leaf(Swapped):
    """What these classes add to PyTorch's; `_ai3` in an instance is its Call."""

    def extra_repr(self) -> str:
        """PyTorch's, and the algorithm."""
        call = self.__dict__.get("_ai3")
        return ", ".join(filter(None, [super().extra_repr(), f"algorithm={call.algorithm}" if call else ""]))


def _leaf_class(
    original: type[nn.Module], operation: str, arguments: Callable[..., Any], module: str
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

    if wholes:
        forward = forward_whole
    forward.__doc__, forward.__qualname__ = original.forward.__doc__, original.forward.__qualname__
    names: dict[str, Any] = {
        "__module__": module,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": forward,
    }
    names |= {"_ai3_original": original, "_ai3_operation": operation, "_ai3_arguments": staticmethod(arguments)}
    return type(original.__name__, (Leaf, original), names)


_classes = {original: _leaf_class(original, operation, made, __name__) for original, operation, made in LEAVES}
globals().update({cls.__name__: cls for cls in _classes.values()})


class TransformerEncoderLayer(Slow, nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer without its fast path."""

    _ai3_original = nn.TransformerEncoderLayer


__all__ = [*(cls.__name__ for cls in _classes.values()), "TransformerEncoderLayer"]


def leaf_class(original: type[nn.Module]) -> type[Any] | None:
    """The class that makes the one call of `original`'s forward; None where the forward is something else.

    A user's subclass of a known class counts where it inherits the forward.
    """
    if original in _classes:
        return _classes[original]
    if original.__module__.startswith("torch."):
        return None
    for base, operation, arguments in LEAVES:
        inherits = all(
            getattr(original, name, None) is getattr(base, name, None)
            for name in ("forward", "_conv_forward", "weight", "bias")
        )
        if issubclass(original, base) and inherits:
            known = [cls for cls in type.__subclasses__(original) if "_ai3_operation" in vars(cls)]
            return known[0] if known else _leaf_class(original, operation, arguments, original.__module__)
    return None


def swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass that instances of `original` get, before any call in its own methods is replaced."""
    if original is nn.TransformerEncoderLayer:
        return TransformerEncoderLayer
    return leaf_class(original) or sites_class(original, ())


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
