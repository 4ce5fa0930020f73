"""What `tune` and `optimize` are asked for, and what they raise where they are interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ai3_ops.registry import near
from ai3_ops.selecting.plan import Plan

OBJECTIVES = ("latency", "p99", "memory")
TOLERANCE = 5e-5  # where the user gives none; twice the error of PyTorch's implementation is allowed in any dtype
TOLERANCE_APPROXIMATE = 2e-2  # likewise for algorithms that approximate, where the user allows them


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `tune` or `optimize`: `plan` has the choices for what was measured, and `default` for the other layers.

    The measurements are in the cache, too.
    """

    def __init__(self, function: str, plan: Plan) -> None:
        super().__init__(f"ai3_ops.{function} was interrupted; this exception's .plan has what was measured until then")
        self.plan = plan


def check_limits(function: str, settings: Any) -> None:
    """ValueError, in the name of an ai3_ops function, for an objective, a limit or a flag that is none."""
    if settings.objective not in OBJECTIVES:
        words, meant = " or ".join(map(repr, OBJECTIVES)), near(str(settings.objective), OBJECTIVES)
        raise ValueError(f"ai3_ops.{function}: objective must be {words}, got {settings.objective!r}{meant}")
    for name in ("budget_seconds", "memory_limit", "tolerance"):
        value = getattr(settings, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise ValueError(f"ai3_ops.{function}: {name} needs a number of at least 0, or None, got {value!r}")
    check_flags(function, deterministic=settings.deterministic, allow_approximate=settings.allow_approximate)


def check_flags(function: str, **flags: Any) -> None:
    """ValueError, in the name of an ai3_ops function, for what is neither True nor False: any word would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"ai3_ops.{function}: {name} needs True or False, got {value!r}")


@dataclass(frozen=True)
class Settings:
    """What `tune` is asked for."""

    objective: str = "latency"
    budget_seconds: float | None = None
    memory_limit: int | None = None
    tolerance: float | None = None
    deterministic: bool = False
    allow_approximate: bool = False

    def __post_init__(self) -> None:
        check_limits("tune", self)
