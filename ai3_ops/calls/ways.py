"""How eager inference makes a call: what was decided for one of its kind is not asked again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ai3_ops import _torch, registry
from ai3_ops.calls.known import Known
from ai3_ops.calls.plan import CallPlan
from ai3_ops.registry import operator_named

_grad_enabled, _transformed = torch.is_grad_enabled, _torch.transformed  # looked up once: a call asks both
REMEMBERED = 256  # kinds of calls, and refused problems, that a call keeps, so that it need not ask again
LEFT, UNKNOWN = "left to PyTorch", "asked each time"  # how a call is made, besides by a plan


class Ways(Known):
    """The plans of a call, by its kind."""

    def way_key(self, args: tuple[Any, ...]) -> Any:
        """What the way of a call depends on, in the state that `of_module` asks for."""
        input = args[0]
        return input.shape, input.stride(), input.dtype, input.is_cuda, args[1:]

    def doubts(self, args: tuple[Any, ...]) -> str:
        """Why the algorithm may not be taken, or its gradients' cannot do this call."""
        return self.doubt or (self.backward_doubt(args) if self.mixed and _grad_enabled() else "")

    def backward_doubt(self, args: tuple[Any, ...]) -> str:
        """`backward_refusal` of the chosen algorithm, remembered."""
        assert self.algorithm is not None
        if _transformed(args[0]):
            return ""
        key = self.key(args)
        if key not in self.gradients:
            self.gradients[key] = self.backward_refusal(self.algorithm, args)
        return self.gradients[key]

    def cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as autocast has them, where it is on; operations without a rule for it take them as they are."""
        return args

    def infer(self, plan: CallPlan, args: tuple[Any, ...]) -> Tensor | None:
        """The operator's answer outside training and tracing; None where it must be asked as always."""
        return plan.operator(args[0], plan.numbers) if plan.numbers else plan.operator(args[0])

    def renew(self) -> None:
        """After a change of the registry."""
        assert self.algorithm is not None
        infos = [a for a in registry.registered() if (a.operation, a.name) == (self.operation, self.algorithm.name)]
        self.rule, self.varies = any(a.rule for a in infos), not all(a.deterministic for a in infos)
        self.doubt, self.mixed = self.approximates(self.algorithm), any(self.algorithm.backward)
        self.generation, self.plans, self.ways, self.gradients = registry.generation(), {}, {}, {}

    def plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """How such a call is made; None where it has no way of its own."""
        key = self.plan_key(args)
        if self.rule:
            input = args[0]
            key = (key, input.shape, input.stride(), input.dtype, input.is_cuda)
        try:
            return self.plans[key]
        except KeyError:
            pass
        except TypeError:  # a list among the arguments
            return None
        if len(self.plans) >= REMEMBERED:
            self.plans.clear()
        plan = self.plans[key] = self.new_plan(args)
        return plan

    def plan_key(self, args: tuple[Any, ...]) -> Any:
        """What a plan depends on besides the input."""
        return args[1:]

    def numbers(self, args: tuple[Any, ...]) -> list[Any]:
        """All that the operator for inference gets besides tensors and the algorithm's own parameters."""
        return CallPlan.numbers_of(self.operator, args) + self.sizes(args)

    def sizes(self, args: tuple[Any, ...]) -> list[int]:
        """Further numbers."""
        return []

    def new_plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """The operators that the algorithm has for such a call."""
        assert self.algorithm is not None
        assert self.operator is not None
        name = self.algorithm.name
        if self.rule:
            name = self.resolved(name, args)
        infer = operator_named(f"_{self.operation}_{name}_infer")
        own, given = registry.parameters(self.operation, name), self.algorithm.parameters
        if infer is None or given.keys() - {p.name for p in own}:
            return None
        try:
            values = [p.number(given.get(p.name, p.default)) for p in own]
            return CallPlan(infer, CallPlan.text(self.numbers(args) + values))
        except RuntimeError:  # the operator says why
            return None

    def resolved(self, rule: str, args: tuple[Any, ...]) -> str:
        """What a rule chooses for such a call."""
        return registry.resolve(self.operation, rule, *args)
