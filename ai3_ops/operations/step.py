"""What an operation says of itself as a step of a captured network, and as a line of a program.

An operation's file has one `Step`; `optimize` and programs find it here and know none by name. In a network's graph a step is a
node that calls `compute`; in a program it is a line "<operation>_<algorithm> %x name=value ...".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ai3_ops import registry

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line

RULES = ("default", "auto", "torch")  # algorithms that outside of programs are PyTorch's function


class Step:
    """One instance for each operation. Rows are (..., F): `optimize` joins their leading dimensions."""

    operation: ClassVar[str]
    # PyTorch's operators that it stands for: from their arguments, as their schemas have them, to those of `compute`; None where
    # a call is of another kind. Of what are nodes of the graph it may look at meta["shape"] and meta["dtype"].
    stands_for: ClassVar[Mapping[Any, Callable[..., Sequence[Any] | None]]]
    constants: ClassVar[tuple[str, ...]] = ()  # arguments of `compute` that are tensors and known beforehand
    values: ClassVar[
        tuple[str, ...]
    ] = ()  # those that are tensors as the first one is, in the order of the line's values
    has_channels: ClassVar[bool] = (
        False  # values are (N, C, ...): of a sequence's image what it computes of the sequence
    )
    by_function: ClassVar[dict[Any, Step]] = {}
    by_operation: ClassVar[dict[str, Step]] = {}

    def __init_subclass__(cls) -> None:
        step = cls()
        cls.compute.__name__ = cls.operation  # by which reports and measurements know a graph's functions
        Step.by_function[cls.compute] = Step.by_operation[cls.operation] = step

    # compute(input, ..., *, algorithm="default"): the reference, by PyTorch, or by the algorithm that was asked for by name
    # (`computed`).
    compute: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def works_on_rows(input: Any, *arguments: Any) -> bool:
        """Whether each row of the last dimension has a result of its own, so that leading dimensions may be joined."""
        return True

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """The words of its line, from `compute`'s arguments: of the tensors the first alone, whose sizes are known."""
        raise NotImplementedError

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """The arguments of the operator, from a line and the values that it reads; tensors need no elements."""
        raise NotImplementedError


def computed(operation: str, function: Callable[..., Tensor], algorithm: str, input: Tensor) -> Callable[..., Tensor]:
    """PyTorch's function, or the operator of an algorithm that was asked for by name; references in float64 are PyTorch's."""
    if algorithm in RULES or input.dtype == torch.float64:
        return function
    name, own = registry.unspelled(algorithm)
    operator: Callable[..., Tensor] = getattr(torch.ops.ai3, f"{operation}_{name}").default
    return functools.partial(operator, **own) if own else operator
