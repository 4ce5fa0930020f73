"""The Python rules of every operation's operators: fake kernels, autograd, autocast, vmap, FLOP formulas."""

from __future__ import annotations

import importlib
import pkgutil

from ai3_ops import registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

_registered: set[tuple[str, str]] = set()


def register_rules(operation: str, name: str) -> None:
    """Gives the operators of one algorithm their rules; for an algorithm that has them already, nothing is done."""
    if (operation, name) not in _registered:
        _registered.add((operation, name))
        registry.OPERATIONS[operation].register(name)


for _algorithm in registry.algorithms():
    if _algorithm.operation in registry.OPERATIONS:
        register_rules(_algorithm.operation, _algorithm.name)
