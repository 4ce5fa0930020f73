"""Attention that a model composes of products and a softmax, seen as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

REASON = "composes attention of products and a softmax, which are no one call: `optimize` joins such"
_PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"))


class Composed:
    """Which values are products, and which the softmax of one, however they were scaled, masked or viewed since."""

    def __init__(self) -> None:
        self.kinds: Any = WeakIdKeyDictionary()  # of a value that lives: "product" or "weights"

    def ends(self, name: str, args: Any, result: Any) -> bool:
        """Whether the function of that name, now called, multiplied the weights with the values."""
        if not isinstance(result, Tensor):
            return False
        given = [t for t in _tensors(args) if t in self.kinds]
        if name in _PRODUCTS:
            if any(self.kinds[t] == "weights" for t in given):
                return True
            if result.ndim > 2:
                self.kinds[result] = "product"
        elif given and max(t.numel() for t in given) == result.numel():  # not what was reduced
            self.kinds[result] = "weights" if name == "softmax" else self.kinds[given[0]]
        return False


def _tensors(args: Any) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from _tensors(a)
