"""Models by the names that the command line takes: torchvision's, timm's, or a function of any package."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ai3_ops.registry import near


class Classifier(NamedTuple):
    """A torchvision classification network in eval mode, and what its input must look like."""

    name: str
    model: nn.Module
    origin: str  # where the weights are from, in words
    size: int
    mean: list[float]
    std: list[float]
    categories: list[str] | None  # names of the outputs, where the weights are trained ones


def classifier(name: str, weights: Path | None = None) -> Classifier:
    """A torchvision network: with the weights given, else with those in torch's cache, else with seeded random ones."""
    try:
        from torchvision import models
    except ImportError:
        raise ImportError("needs torchvision: pip install 'ai3_ops[demo]'") from None
    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(f"torchvision has no classification network {name!r}{near(name, known)}")
    pretrained = models.get_model_weights(name).DEFAULT
    preset = pretrained.transforms()
    cached = Path(torch.hub.get_dir(), "checkpoints", pretrained.url.rsplit("/", 1)[-1])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GoogLeNet and Inception announce a change of their initialization
        size = {"image_size": preset.crop_size[0]} if name.startswith("vit_") else {}
        model = models.get_model(name, weights=None, **size)
    source = weights or (cached if cached.exists() else None)
    if source:
        try:
            state = torch.load(source, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{source} is no file of weights (a state_dict): {str(error).splitlines()[0]}") from None
        if not isinstance(state, dict):
            raise ValueError(f"{source} holds no state_dict but a {type(state).__name__}")
        # Auxiliary classifiers are trained along but not part of every checkpoint, and eval mode does not run them.
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:  # sizes differ
            raise ValueError(f"{source} does not fit {name}: {str(error).splitlines()[-1].strip()}") from None
        wrong = [key for key in (*missing, *unexpected) if "aux" not in key.lower()]
        if wrong:
            raise ValueError(f"{source} does not fit {name}: {len(wrong)} keys differ, such as {wrong[0]!r}")
        if hasattr(model, "transform_input"):  # the checkpoints of GoogLeNet and Inception want their own normalization
            model.transform_input = True
    origin = (
        f"weights from {weights}"
        if weights
        else "pretrained weights from torch's cache"
        if source
        else _randomly(model)
    )
    categories = pretrained.meta["categories"] if source else None
    return Classifier(name, model.eval(), origin, preset.crop_size[0], list(preset.mean), list(preset.std), categories)


def _randomly(model: nn.Module) -> str:
    """Random weights also where a network begins with zeros, as the heads of vision transformers do: its output would be 0."""
    filled = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, (nn.Linear, nn.Conv2d)) or not isinstance(weight, nn.Parameter):
            continue
        if not weight.is_meta and not weight.any():
            nn.init.trunc_normal_(weight, std=0.02)
            filled.append(name)
    begin = "begins" if len(filled) == 1 else "begin"
    return "seeded random weights" + (f", also in {', '.join(filled)}, which {begin} as zeros" if filled else "")


class Named(NamedTuple):
    """A model in evaluation mode, and inputs that it runs on."""

    name: str
    model: nn.Module
    inputs: Any
    origin: str  # where its weights are from, in words


def named(name: str, *, batch: int = 1, size: int | None = None, weights: Path | None = None) -> Named:
    """`resnet18` of torchvision or timm, or `package.module:factory`.

    A factory returns an nn.Module, which is given seeded normal images of `size` (224), or a module and its example inputs;
    one with a parameter `batch` is given it.
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
    net = classifier(name, weights)
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
    made = factory(batch=batch) if "batch" in inspect.signature(factory).parameters else factory()
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
