"""ai3_ops: every way to compute a layer is an operator of its own, and a model's owner chooses the way, layer by layer."""

from __future__ import annotations

from ai3_ops import doctor as _doctor
from ai3_ops import operations as operations  # loads the library and registers the operators' rules
from ai3_ops.check import CheckReport, check
from ai3_ops.explain import Report, explain
from ai3_ops.operations.patterns import attention_mask
from ai3_ops.optimize import load, optimize, save
from ai3_ops.plan import Plan
from ai3_ops.register import register
from ai3_ops.registry import AlgorithmInfo, algorithms, resolve, supports, workspace
from ai3_ops.selectors import Algorithm, prefer
from ai3_ops.swap import swap, unswap
from ai3_ops.transformers import register_transformers
from ai3_ops.tune import tune

__version__ = _doctor.version()

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
