"""Checks of what PyTorch makes of an operator: opcheck, autocast, vmap, FLOP counts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops._torch import TorchDispatchMode
from ai3_ops.checking.calling import differentiable, has_gradients, opcheck
from ai3_ops.checking.cases import DTYPES, LAYOUTS, Tally, close, few_calls, require
from ai3_ops.checking.gradients import gradient_limit
from ai3_ops.registry import AlgorithmInfo


def check_opcheck(info: AlgorithmInfo, tally: Tally) -> None:
    """`torch.library.opcheck`: schema, autograd registration, fake kernel, AOT dispatch with dynamic shapes."""
    found = few_calls(info, 100, fill="integers")
    other = [c for c in found if "channels_last" in c.case.layouts or len(c.case.shapes[0] or ()) == 3]
    for call in dict.fromkeys([*found[:2], *other[:2]]):
        leaves, _, _ = differentiable(call)
        left = iter(leaves)
        own = has_gradients(call)
        inputs = [next(left) if has else t for t, has in zip(call.tensors, own, strict=True)]
        layouts = (*call.case.layouts, *["contiguous"] * (len(inputs) - len(call.case.layouts)))
        inputs = [
            None if t is None else LAYOUTS[layout](t.detach()).requires_grad_(has)
            for t, layout, has in zip(inputs, layouts, own, strict=True)
        ]
        opcheck(call, info.operator, *call.arranged(*inputs), **call.options(*inputs))
        tally.passed += 1


def check_autocast(info: AlgorithmInfo, tally: Tally) -> None:
    """The output dtype is what ATen's function gives under autocast."""
    wanted = "bfloat16" if info.device == "cpu" else "float16"
    if not {"float32", wanted} <= set(info.dtypes):
        return tally.skip(f"needs float32 and {wanted}")
    for call in few_calls(info, 1, "float32"):
        if not dataclasses.replace(call, dtype=DTYPES[wanted]).supported():
            tally.skip(f"does not compute in {wanted} on this machine")
            continue
        leaves, ours, theirs = differentiable(call)
        with torch.autocast(info.device, DTYPES[wanted]):
            y, z = ours(*leaves), theirs(*leaves)
        expected = DTYPES[wanted] if call.options(*call.tensors) else z.dtype  # PyTorch has no function of its pattern
        require(y.dtype == expected, f"{call}: under autocast ATen gives {expected}, got {y.dtype}")
        close(y, z.to(y.dtype), 5e-2, f"{call} under autocast")
        y.sum().backward()
        require(
            all(t.grad is not None and t.grad.dtype == t.dtype for t in leaves), f"{call}: gradients under autocast"
        )
        if "float64" in info.dtypes and dataclasses.replace(call, dtype=torch.float64).supported():
            wide = [t.detach().double() for t in leaves]
            with torch.autocast(info.device, DTYPES[wanted]):
                require(ours(*wide).dtype == torch.float64, f"{call}: autocast must leave float64 alone")
        tally.passed += 1


def sum_of_squares(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """A loss."""
    return function(*values).square().sum()


class _LastCall(TorchDispatchMode):
    """Remembers the last call of an operator of the project's, as vmap has folded it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ai3":
            self.func, self.args = func, args
        return func(*args, **kwargs or {})

    def refused(self, info: AlgorithmInfo) -> bool:
        """Whether the algorithm, or who computes its gradients, does not support it."""
        args = self.args if self.func is info.operator else (*self.args[1:3], None, *self.args[3:-1])
        return not registry.supports(info.operation, info.name, *args)[0]


def check_vmap(info: AlgorithmInfo, tally: Tally) -> None:
    """`torch.func.vmap`, and gradients inside of it, for every choice of batched tensors, equal to a loop."""
    for call in few_calls(info, 5):
        leaves, ours, _ = differentiable(call)
        leaves = [t.detach() for t in leaves]
        stacked = [torch.stack([t, -t, t * 2], dim=min(1, t.ndim)) for t in leaves]
        names = [a.name for a in info.operator._schema.arguments]
        for choice in itertools.product((True, False), repeat=len(leaves)):
            if not any(choice):
                continue
            dims = tuple(min(1, t.ndim) if c else None for t, c in zip(leaves, choice, strict=True))
            args = [s if c else t for s, t, c in zip(stacked, leaves, choice, strict=True)]

            def sample(i: int, args: list[Tensor] = args, dims: tuple[int | None, ...] = dims) -> list[Tensor]:
                return [a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)]

            loss = torch.func.grad(functools.partial(sum_of_squares, ours), argnums=tuple(range(len(leaves))))
            what = f"{call}: vmap over {', '.join(n for n, c in zip(names, choice, strict=False) if c)}"
            limit = gradient_limit(info, call.dtype)  # folding changes at most the order of sums
            for function in (lambda *values, ours=ours: (ours(*values),), loss):
                with warnings.catch_warnings(), _LastCall() as last:
                    warnings.simplefilter("error")
                    try:
                        got = torch.vmap(function, dims)(*args)
                    except RuntimeError as error:  # folded into groups or channels that the method does not have
                        refused = "algorithms that support this case" in str(error) and last.refused(info)
                        require(refused, f"{what}: {error}")
                        tally.skip("refuses what vmap folds the samples into")
                        continue
                parts = [function(*sample(i)) for i in range(3)]
                for g, e in zip(got, map(torch.stack, zip(*parts, strict=True)), strict=True):
                    close(g, e, limit, what)
                tally.passed += 1


def check_flops(info: AlgorithmInfo, tally: Tally) -> None:
    """`FlopCounterMode` counts what it counts for ATen's function, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    for call in few_calls(info, 3):
        leaves, ours, theirs = differentiable(call)
        if call.options(*call.tensors):
            tally.skip("PyTorch has no function of its pattern")
            continue
        counted = []
        for function in (ours, theirs):
            with FlopCounterMode(display=False) as counter:
                function(*leaves).sum().backward()
            counted.append(counter.get_total_flops())
        if not counted[1] and counted[0]:
            tally.skip("ATen's function has no formula")
            continue  # ATen's function has no formula here, as for a matrix times a vector
        names = [a.name for a in info.operator._schema.arguments if "Tensor" not in str(a.type)]
        if dict(zip(names, call.case.arguments, strict=False)).get("groups", 1) > 1:
            tally.skip("ATen's formula leaves groups out")
            continue  # ATen's formula leaves groups out of the weight's gradient
        require(counted[0] == counted[1], f"{call}: counted {counted[0]} FLOPs, ATen's function {counted[1]}")
        tally.passed += 1
