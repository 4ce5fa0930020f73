"""The Python rules of every operation's operators: fake kernels, autograd, autocast, vmap, FLOP formulas."""

from __future__ import annotations

import importlib
import pkgutil

from ai3_ops import registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def register_rules(operation: str, name: str) -> None:
    """Gives the operators of an algorithm that came later their rules; those that have them keep them."""
    registry.changed()
    registry.OPERATIONS[operation].register(name)


for _algorithm in registry.registered():
    if _algorithm.operation in registry.OPERATIONS:
        registry.OPERATIONS[_algorithm.operation].register(_algorithm.name)
