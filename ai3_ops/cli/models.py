"""Models by the names that the command line takes: torchvision's, timm's, or a function of any package."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ai3_ops.registry import near


class Named(NamedTuple):
    """A model in evaluation mode, and inputs that it runs on."""

    name: str
    model: nn.Module
    inputs: Any
    origin: str  # where its weights are from, in words


def named(name: str, *, batch: int = 1, size: int | None = None, weights: Path | None = None) -> Named:
    """`resnet18` of torchvision or timm, or `package.module:factory`.

    A factory returns an nn.Module, which is given seeded normal images of `size` (224), or a module and its example inputs.
    ValueError for names that nothing has, ImportError where the package is missing.
    """
    torch.manual_seed(0)
    if ":" in name:
        return _made(name, batch, size)
    try:
        return _of_torchvision(name, batch, size, weights)
    except (ValueError, ImportError) as error:
        try:
            import timm
        except ImportError:
            raise error from None
        if name not in timm.list_models():
            hint = near(name, timm.list_models(), 0.8)
            raise ValueError(f"{error}; nor has timm{hint}") from None
    if weights is not None:
        raise ValueError(f"{name} is timm's: --weights is for torchvision's networks")
    model = timm.create_model(name).eval()
    side = size or timm.data.resolve_data_config({}, model=model)["input_size"][-1]
    return Named(name, model, images(batch, side), "timm, seeded random weights")


def images(batch: int, size: int) -> torch.Tensor:
    """Seeded normal numbers (batch, 3, size, size)."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def _of_torchvision(name: str, batch: int, size: int | None, weights: Path | None) -> Named:
    from ai3_ops.cli.demo import network

    net = network(name, weights)
    return Named(name, net.model, images(batch, size or net.size), net.origin)


def _made(name: str, batch: int, size: int | None) -> Named:
    module, _, attribute = name.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except ImportError as error:
        raise ImportError(f"{name}: {error}") from None
    except AttributeError as error:
        raise ValueError(f"{name}: {error}") from None
    made = factory()
    model, inputs = made if isinstance(made, tuple) else (made, images(batch, size or 224))
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must return an nn.Module, or one and its example inputs, got {type(model).__name__}")
    return Named(name, model.eval(), inputs, "made by its factory")


def settle(model: nn.Module, inputs: Any) -> None:
    """Gives batch normalizations the statistics of these inputs: numbers in a network of random weights keep their size."""
    modes = {m: m.training for m in model.modules()}
    momenta = {m: m.momentum for m in modes if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    for norm in momenta:
        norm.train()
        norm.momentum = 1.0
    try:
        with torch.no_grad(), contextlib.suppress(ValueError):  # one number for each channel has no variance
            model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in momenta.items():
            norm.momentum = momentum
