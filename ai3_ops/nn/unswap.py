"""Modules get the classes back that their user gave them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ai3_ops.nn import layout
from ai3_ops.nn.classes import revert


def revert_all(model: nn.Module) -> Callable[[], None]:
    """`unswap`; returns what gives the weights the memory format again that the swap gave them."""
    holds = layout.holds_strides(model)
    undo = [layout.convert(layout.former(model, word), format, holds) for word, format in layout.FORMATS.items()]
    for module in model.modules():
        revert(module)

    def again() -> None:
        for one in undo:
            one()

    return again


def unswap(model: nn.Module) -> nn.Module:
    """Gives every module of `model` its original class back, and weights their memory format, in place; returns the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.unswap needs an nn.Module, got {type(model).__name__}")
    revert_all(model)
    return model
