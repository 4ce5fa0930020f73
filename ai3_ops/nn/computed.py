"""Weights that a module computes anew at every call: PyTorch's weight_norm, spectral_norm and pruning, and parametrizations."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["advice", "constant", "copied"]
_REMOVES = {WeightNorm: "torch.nn.utils.remove_weight_norm", SpectralNorm: "torch.nn.utils.remove_spectral_norm"}


def _hooks(module: nn.Module) -> Iterator[tuple[int, str, str]]:
    """Forward pre-hooks that compute an attribute from parameters: key, the attribute's name, what removes the hook."""
    prune = sys.modules.get("torch.nn.utils.prune")  # imported by those who use it
    hooks: dict[int, Any] = dict(module._forward_pre_hooks)
    for key, hook in hooks.items():
        if type(hook) in _REMOVES:
            yield key, hook.name, _REMOVES[type(hook)]
        elif prune and isinstance(hook, prune.BasePruningMethod):
            yield key, hook._tensor_name, "torch.nn.utils.prune.remove"


def advice(module: nn.Module, name: str = "weight") -> str:
    """What makes a parameter of the tensor that a module computes at every call; "" where it is one."""
    removes = [remove for _, attribute, remove in _hooks(module) if attribute == name]
    if parametrize.is_parametrized(module, name):
        removes.append("torch.nn.utils.parametrize.remove_parametrizations")
    return f'{removes[-1]}(layer, "{name}")' if removes else ""


def copied(model: nn.Module, by: str, advice: str = "", memo: dict[int, Any] | None = None) -> Any:
    """A deep copy, also of a model whose hooks have computed a weight, which PyTorch's own cannot copy while it has a graph.

    RuntimeError where there is none, in the name of `by`.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for _, name, _ in _hooks(module):
            value = vars(module).get(name)
            if isinstance(value, Tensor) and not value.is_leaf:  # computed again at the next call
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # any, of anybody's class
        names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo
        ]
        graph = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} a graph of gradients, which .detach() drops"
        what = graph if names else f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{by}: the model cannot be copied ({what}){advice}") from error


@contextmanager
def constant(model: nn.Module) -> Iterator[None]:
    """While it lasts, hooks that compute weights have computed them once and for all, as evaluation mode has it."""
    removed: list[tuple[nn.Module, int, Any]] = []
    try:
        for module in model.modules():
            for key, _, _ in _hooks(module):
                hook = module._forward_pre_hooks[key]
                with torch.no_grad():
                    hook(module, ())
                removed.append((module, key, hook))
                del module._forward_pre_hooks[key]
        yield
    finally:
        for module, key, hook in removed:
            later = dict(module._forward_pre_hooks)
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update(dict(sorted({**later, key: hook}.items())))
