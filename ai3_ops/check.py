"""The project's own tests, run on one algorithm: `ai3_ops.check("conv2d", "mine")`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ai3_ops import registry
from ai3_ops._cases import CASES, calls
from ai3_ops._checks import CHECKS
from ai3_ops.registry import AlgorithmInfo


@dataclass(frozen=True)
class CheckResult:
    """One check on one device; `failure` says in which case it failed and how, "" when it passed."""

    check: str
    device: str
    seconds: float
    failure: str = ""


@dataclass(frozen=True)
class CheckReport:
    """What was checked; `str()` is a table."""

    operation: str
    name: str
    results: list[CheckResult] = field(default_factory=list)
    supported: dict[str, int] = field(default_factory=dict)  # by dtype, how many of the operation's test cases

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not any(r.failure for r in self.results)

    def __str__(self) -> str:
        cases = ", ".join(f"{count} in {dtype}" for dtype, count in self.supported.items())
        lines = [f"ai3::{self.operation}_{self.name}: of {len(CASES[self.operation])} cases it supports {cases}"]
        for r in self.results:
            lines.append(f"  {r.check:<18} {r.device:<5} {'FAILED' if r.failure else 'passed'}  {r.seconds:6.2f} s")
        return "\n".join(lines)


def check(operation: str, name: str) -> CheckReport:
    """Tests an algorithm as the built-in ones are tested, on every device that this machine has.

    Values against float64 within the algorithm's accuracy class, special values, memory formats and strides, errors,
    determinism (also with one thread against two; the other checks use one), gradients (`gradcheck`, `gradgradcheck`),
    `torch.library.opcheck`, autocast, vmap, FLOP counts, the stated workspace. It takes half a minute. The data are the
    same every time, so that a failing case fails again.

    Returns:
        The report; `print` it.

    Raises:
        AssertionError: a check failed; the message holds the report, and for each failure the case: dtype, shapes,
            arguments, memory layouts, and what came out.
        ValueError: no such algorithm.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    registry.algorithm(operation, name)
    infos = [a for a in registry.algorithms(operation) if a.name == name and a.device in devices]
    report = CheckReport(operation, name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller works under: gradients are checked
            for info in infos:
                for dtype in info.dtypes:
                    report.supported[dtype] = sum(1 for _ in calls(info, dtypes=(dtype,)))
                report.results.extend(_results(info))
    finally:
        torch.set_num_threads(threads)
    if not any(report.supported.values()):
        raise AssertionError(f"ai3_ops.check: {operation}_{name} supports none of the operation's test cases")
    if not report.ok:
        failures = [f"{r.check} on {r.device}: {r.failure}" for r in report.results if r.failure]
        raise AssertionError("\n\n".join([f"ai3_ops.check: {report}", *failures]))
    return report


def _results(info: AlgorithmInfo) -> Iterator[CheckResult]:
    for name, function in CHECKS.items():
        start, failure = time.perf_counter(), ""
        try:
            function(info)
        except Exception as error:  # whatever a broken algorithm makes PyTorch raise is a finding, too
            failure = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        yield CheckResult(name, info.device, time.perf_counter() - start, failure)
