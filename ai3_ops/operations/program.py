"""`ai3::_program`: many layers in one call, described by a text (docs/decisions/program.md); its sizes and rules."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ai3_ops import _torch, registry
from ai3_ops.operations import base
from ai3_ops.operations.conv2d import WINDOW
from ai3_ops.operations.step import Step
from ai3_ops.problem import Problem, check

LABEL = "ai3::_program"
_LINE = re.compile(r"%(\d+) = (\S+)\s*(.*)")


@dataclasses.dataclass(frozen=True)
class Line:
    """One step of a program: its operation ("conv2d_direct", "add", ...), the values that it reads, and its options."""

    operation: str
    operands: tuple[int, ...]
    options: dict[str, str]

    def numbers(self, name: str) -> list[int]:
        """An option's numbers."""
        return [int(n) for n in self.options[name].split(",")]

    def flag(self, name: str, otherwise: int = 0) -> int:
        """A number that may be left out."""
        return int(self.options.get(name, otherwise))

    @property
    def weight(self) -> list[int]:
        """The sizes of the weight."""
        return [int(n) for n in self.options["weight"].partition(":")[2].split(",")]


@functools.lru_cache(64)
def parse(text: str) -> tuple[list[Line], list[tuple[int, bool]]]:
    """The lines of a text that `Builder` wrote, and its results: a value, and whether it is channels_last."""
    lines: list[Line] = []
    results: list[tuple[int, bool]] = []
    for row in filter(None, map(str.strip, text.splitlines())):
        if row.startswith("return "):
            results = [(int(r[1:].partition(":")[0]), r.endswith(":channels_last")) for r in row.split()[1:]]
        elif (match := _LINE.fullmatch(row)) and int(match[1]) == len(lines):
            words = match[3].split()
            operands = tuple(int(w[1:]) for w in words if w[0] == "%")
            options = dict(w.split("=", 1) for w in words if "=" in w)
            lines.append(Line(match[2], operands, options))
        else:
            raise RuntimeError(f"{LABEL}: cannot read the line {row!r}")
    if not results:
        raise RuntimeError(f"{LABEL}: needs a text that ends with return")
    return lines, results


def problem(line: Line, operands: Sequence[Tensor]) -> Problem:
    """The problem of a line that is a layer's."""
    name = next(o for o in sorted(registry.OPERATIONS, key=len, reverse=True) if line.operation.startswith(f"{o}_"))
    x, rules, label = operands[0], registry.OPERATIONS[name], f"ai3::{line.operation}"
    if name in Step.by_operation:
        return rules.problem(label, *Step.by_operation[name].arguments(line, *operands))
    if name == "conv2d":
        weight, window = x.new_empty(line.weight), [line.numbers(n) for n in WINDOW._fields[:3]]
        return rules.problem(label, x, weight, None, *window, line.flag("groups", WINDOW.groups))
    if name == "linear":
        return rules.problem(label, x, x.new_empty(line.weight))
    if name == "adaptive_avg_pool2d":
        return rules.problem(label, x, line.numbers("output_size"))
    window = [line.numbers("kernel_size"), line.numbers("stride"), line.numbers("padding")]
    if name == "max_pool2d":
        return rules.problem(label, x, *window, line.numbers("dilation"), bool(line.flag("ceil_mode")))
    divisor = line.flag("divisor") or None
    return rules.problem(
        label, x, *window, bool(line.flag("ceil_mode")), bool(line.flag("count_include_pad", 1)), divisor
    )


def sizes(line: Line, operands: Sequence[Tensor]) -> tuple[Any, ...]:
    """The sizes of a line's value; RuntimeError where its operands do not fit."""
    if line.operation == "constant":
        return tuple(line.numbers("sizes"))
    x = operands[0]

    def require(condition: Any, needs: str) -> None:
        shapes = " and ".join(str(tuple(t.shape)) for t in operands)
        check(condition, f"{LABEL}: {line.operation}", f"{needs}, got {shapes}")

    match line.operation:
        case "activate" | "affine":
            return tuple(x.shape)
        case "add" | "multiply":
            other = operands[1].shape
            broadcast = x.ndim == 4 and len(other) == 4 and other == (*x.shape[:2], 1, 1)
            require(other == x.shape or broadcast, "needs values of the same sizes, or a second one (N, C, 1, 1)")
            return tuple(x.shape)
        case "concat":
            dim = line.flag("dim", 1)
            known = "dim" in line.options or x.ndim in (2, 4)
            require(known and dim < x.ndim, "needs images (N, C, H, W) or rows (N, F), or a dimension that they have")
            for other_value in operands:
                lead, rest = other_value.shape[:dim], other_value.shape[dim + 1 :]
                fits = (*lead, *rest) == (*x.shape[:dim], *x.shape[dim + 1 :])
                require(fits, "needs values that differ in channels alone")
            return (*x.shape[:dim], sum(t.shape[dim] for t in operands), *x.shape[dim + 1 :])
        case "slice":
            dim, start, stop = line.flag("dim", 1), line.flag("start"), line.flag("stop")
            known = "dim" in line.options or x.ndim in (2, 4)
            require(known and dim < x.ndim and 0 <= start < stop <= x.shape[dim], f"needs channels {start} to {stop}")
            return (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
        case "select":
            dim, index = line.flag("dim"), line.flag("index")
            fits = x.ndim > 1 and 0 <= dim < x.ndim and 0 <= index < x.shape[dim]
            require(fits, "needs a dimension and an index of it")
            return (*x.shape[:dim], *x.shape[dim + 1 :])
        case "permute":
            dims = line.numbers("dims")
            require(sorted(dims) == [*range(x.ndim)], "needs a permutation of the dimensions")
            return tuple(x.shape[d] for d in dims)
        case "expand":
            like = operands[1] if len(operands) > 1 else None
            to = [n if n or like is None else like.shape[0] for n in line.numbers("sizes")]
            fits = len(to) == x.ndim and all(
                n in (-1, s) or (s == 1 and (n > 0 or like is not None)) for n, s in zip(to, x.shape, strict=True)
            )
            require(fits, "cannot expand")
            return tuple(s if n == -1 else n for n, s in zip(to, x.shape, strict=True))
        case "roll":
            dims = line.numbers("dims")
            require(
                len(dims) == len(line.numbers("shifts")) and all(0 <= d < x.ndim for d in dims), "has no such dimension"
            )
            return tuple(x.shape)
        case "reshape":
            return reshaped(line.numbers("sizes"), x, require)
        case "flatten":
            require(x.ndim == 4, "needs an image (N, C, H, W)")
            return (x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
        case _:
            return problem(line, operands).shape


def reshaped(to: Sequence[int], x: Tensor, check: Callable[[Any, str], None]) -> tuple[Any, ...]:
    """x's sizes as `to` has them, where 0 keeps a dimension and -1 is what is left."""
    check(
        to.count(-1) <= 1 and all(n > 0 or n == -1 or d < x.ndim for d, n in enumerate(to)),
        "needs one open size at most",
    )
    known = [x.shape[d] if n == 0 else n for d, n in enumerate(to)]
    elements, others = x.numel(), math.prod(n for n in known if n != -1)
    check(others == elements if -1 not in known else elements % others == 0, "needs sizes that hold all elements")
    return tuple(elements // others if n == -1 else n for n in known)


def _fake(inputs: list[Tensor], constants: list[Tensor], program: str) -> list[Tensor]:
    lines, results = parse(program)
    values: list[Tensor] = []
    for line in lines:
        if line.operation == "input":
            check(len(values) < len(inputs), LABEL, f"needs more inputs than {len(inputs)}")
            values.append(inputs[len(values)])
        elif line.operation == "constant":
            dtype = getattr(torch, line.options["dtype"])
            values.append(inputs[0].new_empty(sizes(line, ()), dtype=dtype))
        else:
            operands = [values[i] for i in line.operands]
            values.append(operands[0].new_empty(sizes(line, operands)))
    return [
        torch.empty(
            values[i].shape,
            dtype=values[i].dtype,
            device=inputs[0].device,
            memory_format=torch.channels_last if last and values[i].ndim == 4 else torch.contiguous_format,
        )
        for i, last in results
    ]


PROGRAM = torch.ops.ai3._program.default


def _inference(keys: _torch.DispatchKeySet, inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    """Gradients are an error, never silently zero."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        raise RuntimeError(f"{LABEL}: is for inference and has no gradient: call it under torch.no_grad()")
    if _torch.in_forward_mode() and any(_torch.tangent_of(t) is not None for t in inputs):
        raise RuntimeError(f"{LABEL}: does not support forward-mode differentiation")
    outputs: list[Tensor] = _torch.below_autograd(PROGRAM, keys, (inputs, *rest), {})
    return outputs


base.register_fake(PROGRAM, _fake)
base.LIBRARY.impl(PROGRAM, _inference, "Autograd", with_keyset=True)
