"""ai3_ops: every way to compute a layer is an operator of its own, and a model's owner chooses the way, layer by layer."""

from __future__ import annotations

from ai3_ops import _machine
from ai3_ops import operations as operations  # loads the library and registers the operators' rules
from ai3_ops.checking.check import CheckReport, check
from ai3_ops.explaining.explain import Report, explain
from ai3_ops.nn.unswap import unswap
from ai3_ops.operations.attention_mask import attention_mask
from ai3_ops.optimizing.optimize import load, optimize, save
from ai3_ops.registering.register import register
from ai3_ops.registering.transformers import register_transformers
from ai3_ops.registry import AlgorithmInfo, algorithms, resolve, supports, workspace
from ai3_ops.selecting.choice import Algorithm, prefer
from ai3_ops.selecting.plan import Plan
from ai3_ops.swapping.swap import swap
from ai3_ops.tuning.tune import tune

__version__ = _machine.version()

__all__ = [
    "Algorithm",
    "AlgorithmInfo",
    "CheckReport",
    "Plan",
    "Report",
    "algorithms",
    "attention_mask",
    "check",
    "explain",
    "load",
    "optimize",
    "prefer",
    "register",
    "register_transformers",
    "resolve",
    "save",
    "supports",
    "swap",
    "tune",
    "unswap",
    "workspace",
]
