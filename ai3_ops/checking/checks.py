"""The tests that every algorithm must pass, as functions: the test-suite and `ai3_ops.check` both run them.

Each function of `CHECKS` takes an algorithm and returns a `Tally` of the cases that passed and of those left out, or raises
an AssertionError that names the failing case of `cases`. A check that had nothing to do has passed nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ai3_ops.checking import gradients, memory, out, refusals, tracing, transforms, values, weights
from ai3_ops.checking.cases import Tally
from ai3_ops.registry import AlgorithmInfo


def _tallied(function: Callable[[AlgorithmInfo, Tally], None]) -> Callable[[AlgorithmInfo], Tally]:
    @functools.wraps(function)
    def run(info: AlgorithmInfo) -> Tally:
        tally = Tally()
        function(info, tally)
        return tally

    return run


CHECKS: dict[str, Callable[[AlgorithmInfo], Tally]] = {
    name.removeprefix("check_"): _tallied(function)
    for module in (values, refusals, gradients, transforms, weights, out, tracing, memory)
    for name, function in vars(module).items()
    if name.startswith("check_")
}
