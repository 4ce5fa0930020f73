"""The project's own tests, run on one algorithm: `ai3_ops.check("conv2d", "mine")`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ai3_ops import registry
from ai3_ops.checking.cases import CASES, DTYPES, Call, Search, Tally, search
from ai3_ops.registry import AlgorithmInfo


@dataclass(frozen=True)
class CheckResult:
    """One check on one device: in how many cases it passed, and what it left out and why.

    `failure` says in which case it failed and how, "" where it did not. Without a case in which it passed it was skipped.
    """

    check: str
    device: str
    seconds: float
    failure: str = ""
    passed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # cases by reason

    @property
    def status(self) -> str:
        """ "passed", "skipped" or "FAILED"."""
        return "FAILED" if self.failure else "passed" if self.passed else "skipped"

    def __str__(self) -> str:
        reasons = [f"{reason} ({count})" if count > 1 else reason for reason, count in self.skipped.items()]
        cases = [f"{self.passed} cases"] if self.passed else []
        left_out = [f"{'left out: ' if self.passed else ''}{'; '.join(reasons)}"] if reasons else []
        what = "; ".join([*cases, *left_out]) or ("" if self.failure else "no case of it")
        return f"{self.check:<18} {self.device:<5} {self.status:<7} {self.seconds:6.2f} s  {what}".rstrip()


@dataclass(frozen=True)
class CheckReport:
    """What was checked; `str()` is a table."""

    operation: str
    name: str
    results: list[CheckResult] = field(default_factory=list)
    supported: dict[str, int] = field(default_factory=dict)  # by dtype, how many of the operation's test cases
    searched: dict[str, Search] = field(default_factory=dict)  # by dtype, what was found of the shapes tried

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not any(r.failure for r in self.results)

    def __str__(self) -> str:
        count = len(CASES[self.operation])
        lines = [f"ai3::{self.operation}_{self.name}: of {count} test cases, and of other shapes tried, it supports"]
        for dtype, supported in self.supported.items():
            s = self.searched[dtype]
            lines.append(
                f"  {dtype:<9} {supported:>3} cases, {s.supported} of {s.tried} shapes, of which {len(s.realistic)} of "
                "networks' sizes were run"
            )
        return "\n".join([*lines, *(f"  {result}" for result in self.results)])


def check(operation: str, name: str) -> CheckReport:
    """Tests an algorithm as the built-in ones are tested, on every device that this machine has.

    Values against float64 within the algorithm's accuracy class, special values, memory formats and strides, errors,
    determinism (also with one thread against two; the other checks use one), gradients (`gradcheck`, `gradgradcheck`,
    nested `torch.func` transforms), `torch.library.opcheck`, autocast, vmap, FLOP counts, the stated workspace. Besides the
    operation's test cases, which are small, it runs shapes that the algorithm's own `supports` accepts: layers of networks,
    and made-up ones from 1x1 to 224x224, in the algorithm's dtypes. It takes half a minute, a minute for a slow algorithm.
    Data and shapes are the same every time, so that a failing case fails again.

    Returns:
        The report; `print` it. It says how many shapes the algorithm supports, how many cases each check ran, and what
        it left out and why; a check that had no case is "skipped", not "passed".

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
                    cases = (Call(info, case, DTYPES[dtype]) for case in CASES[operation])
                    report.supported[dtype] = sum(call.supported() for call in cases)
                    report.searched[dtype] = search(info, dtype)
                report.results.extend(_results(info))
    finally:
        torch.set_num_threads(threads)
    if not (any(report.supported.values()) or any(s.supported for s in report.searched.values())):
        tried = sum(s.tried for s in report.searched.values())
        raise AssertionError(
            f"ai3_ops.check: {operation}_{name} supports none of the operation's test cases, and none of {tried} other "
            "shapes that were tried"
        )
    if not report.ok:
        failures = [f"{r.check} on {r.device}: {r.failure}" for r in report.results if r.failure]
        raise AssertionError("\n\n".join([f"ai3_ops.check: {report}", *failures]))
    return report


def _results(info: AlgorithmInfo) -> Iterator[CheckResult]:
    from ai3_ops.checking.checks import CHECKS

    for name, function in CHECKS.items():
        start, failure, tally = time.perf_counter(), "", Tally()
        try:
            tally = function(info)
        except Exception as error:  # whatever a broken algorithm makes PyTorch raise is a finding, too
            failure = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        yield CheckResult(name, info.device, seconds, failure, tally.passed, dict(tally.skipped))
