"""Third step of swap: which algorithm computes each call, or why PyTorch does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ai3_ops import registry
from ai3_ops.calls.call import UNMEASURED
from ai3_ops.calls.known import Once, approximation
from ai3_ops.selecting.choice import Algorithm
from ai3_ops.selecting.selectors import ITSELF, Choice, Selector, Tuner, assign, idle, matched, supporting
from ai3_ops.surveying.describe import Described
from ai3_ops.surveying.discover import Lost
from ai3_ops.surveying.modules import reachable


@dataclass
class Outcome:
    """What the user is warned of."""

    asked: int = 0  # calls that the selectors match
    stay: Counter[str] = field(default_factory=Counter)  # those that the requested algorithm cannot do, by its name
    scripted: list[str] = field(default_factory=list)  # modules that torch.jit compiled
    others: list[str] = field(default_factory=list)  # and others with calls that cannot be replaced
    idle: list[str] = field(default_factory=list)  # strict: keys of selectors that reach no call


def decide(
    model: nn.Module,
    calls: list[Described],
    lost: Mapping[nn.Module, Lost],
    selectors: Selector,
    *,
    observed: bool,
    strict: bool,
    approximate: bool,
    tune: Tuner | None,
) -> Outcome:
    """Gives each call its algorithm. ValueError as `swap` says. `tune` is what "auto" stands for."""
    names = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    reached = {name for name, _ in reachable(model)}
    reasons = {name: "is inside of an optimized module" for name in names if name not in reached}
    reasons |= {name: lost[module].reason for name, module in names.items() if module in lost}
    choices = assign(selectors, calls, names, reasons, tune)
    outcome, once = Outcome(asked=len(choices)), Once()
    if strict and not any(
        isinstance(module, torch.jit.ScriptModule) for module in lost
    ):  # whose calls are not all known
        outcome.idle = idle(selectors, calls, names, [o for w in lost.values() for o in (*w.seen, *w.source)])
    _check_lost(outcome, selectors, names, lost, observed, strict)
    for index, described in enumerate(calls):
        described.call.once = once
        if index in choices:
            described.layout, described.call.times = choices[index].layout, choices[index].times
            _choose(described, choices[index], strict, approximate, outcome.stay)
        else:
            _keep(described)
    return outcome


def _keep(described: Described) -> None:
    """What a former swap decided."""
    earlier, described.kept = described.earlier, True
    if earlier is None:
        return
    if earlier.algorithm is not None and earlier.operator is not None:
        described.call.choose(earlier.algorithm)
    for name in ("algorithm", "requested", "reason", "missing", "strict", "approximate", "times"):
        setattr(described.call, name, getattr(earlier, name))


def _choose(described: Described, choice: Choice, strict: bool, approximate: bool, stay: Counter[str]) -> None:
    call = described.call
    call.requested, call.strict, call.approximate = choice.requested, strict, approximate
    reasons: list[str] = []
    for candidate in choice.candidates:
        if candidate is None:
            call.reason = "; ".join(reasons)
            return
        if candidate.name == "default" and not choice.single:
            if described.in_place:
                call.reason = "in place: PyTorch needs no second tensor"
                return
            if described.call.returns_view:  # what is later written to the view shows in the input
                call.reason = "PyTorch returns a view, not a copy"
                return
            ours = registry.preferred.get(described.operation) is None  # not what the user registered as default
            on_cuda = described.device().startswith("cuda")
            if ours and not on_cuda and not described.call.may_gain(described.module):
                call.reason = described.call.why_left
                return
            if ours and on_cuda and not described.call.may_gain_on_cuda(described.problem()):
                call.reason = UNMEASURED
                return
            if described.leaves_computed():
                call.reason = call.without_pack
                return
        reason = _refusal(described, candidate, approximate)
        if not reason:
            call.choose(candidate)
            if described.watched and call.example is None:
                reasons.append("not called by the run with example inputs")
            call.reason = "; ".join(reasons)
            return
        reasons.append(f"{candidate.name} {reason}")
    call.reason = "; ".join(reasons)
    if choice.single or strict:
        alternatives = supporting(
            described.operation, lambda algorithm: not _refusal(described, algorithm, approximate)
        )
        name = described.names[0] or ITSELF
        raise ValueError(f"ai3_ops.swap: {name} ({described.operation}): {call.reason}; {alternatives}")
    stay[choice.requested] += 1


def _refusal(described: Described, algorithm: Algorithm, approximate: bool) -> str:
    if reason := described.unfit() or described.call.unsuited(algorithm):
        return reason
    problem = described.problem()
    if isinstance(problem, str):
        return problem
    if problem is not None:
        problem = problem._replace(device=described.device())
        reason = described.call.refusal(algorithm, problem)
        if reason:
            return reason
        reason = described.call.backward_refusal(algorithm) if any(algorithm.backward) else ""
        if reason:
            return reason
    reason = described.call.approximates(algorithm)
    if reason or approximate or problem is None or described.call.example is None or problem.device == "meta":
        return reason
    if registry.is_rule(described.operation, algorithm.name):
        sizes = described.call.asked(algorithm, problem).sizes
        chosen = registry.resolve_sizes(described.operation, algorithm.name, problem.device, problem.dtype, **sizes)
        if registry.algorithm(described.operation, chosen).accuracy == "approximate":
            return approximation(chosen)
    return ""


def _check_lost(
    outcome: Outcome,
    selectors: Selector,
    names: Mapping[str, nn.Module],
    lost: Mapping[nn.Module, Lost],
    observed: bool,
    strict: bool,
) -> None:
    """What the selectors match and is out of reach: what torch.jit compiled, and other modules; an error when strict."""
    for module, what in lost.items():
        paths = [name for name, m in names.items() if m is module]
        shown = paths[0] or ITSELF
        opaque = isinstance(module, torch.jit.ScriptModule)  # its calls are not seen
        for operation in what.seen if observed and not opaque else what.source:
            if (what.of_torch and not strict) or not matched(selectors, operation, module, paths):
                continue
            if strict:
                raise ValueError(
                    f"ai3_ops.swap: {shown} ({type(module).__name__}) calls {operation}, "
                    f"which cannot be replaced: {what.reason}"
                )
            (outcome.scripted if opaque else outcome.others).append(shown)
            break
