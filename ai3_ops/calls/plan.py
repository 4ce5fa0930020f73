"""How eager inference makes one kind of call."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from ai3_ops import _library
from ai3_ops.problem import spread


class CallPlan:
    """How eager inference makes one kind of call: the operator for it, and what that gets besides tensors.

    ai3::_<operation>_<algorithm>_infer gets all numbers as one integer, by which C++ knows them, and knows no gradients: handing
    over lists and passing autograd's Python rules takes longer than a small kernel does (docs/decisions/calls.md).
    """

    __slots__ = ("__weakref__", "numbers", "operator")

    def __init__(self, operator: Any, numbers: str) -> None:
        self.operator = operator._op
        self.numbers = _library.keep_numbers(self, numbers) if numbers else 0

    @staticmethod
    def numbers_of(operator: Any, args: tuple[Any, ...]) -> list[Any]:
        """The arguments of the operator that are not tensors; a list as so many numbers, its length first where that varies."""
        numbers: list[Any] = []
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.N:
                numbers += spread("", value, argument.N, argument.name, -(2**31))
            elif isinstance(value, (list, tuple)):
                numbers += [len(value), *value]
            elif not str(argument.type).endswith("Tensor") and not str(argument.type).startswith("Optional[Tensor"):
                numbers.append(value)
        return numbers

    @staticmethod
    def text(numbers: Iterable[Any]) -> str:
        """As the operator reads them."""
        return " ".join(map(CallPlan.word, numbers))

    @staticmethod
    def word(number: Any) -> str:
        """Of one of them; NumPy's numbers count, too."""
        if number is None:
            return "-"
        try:
            return str(index(number))
        except TypeError:
            return repr(float(number))
