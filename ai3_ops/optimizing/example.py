"""What a plan was made of: an example's inputs, by which other calls are known to be of its kind."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ai3_ops.graph.caches import CACHE, is_cache
from ai3_ops.graph.network import Lengths
from ai3_ops.surveying.examples import cycled

COMPARED = 2  # other sizes of each length that the capture left open, after which they are not compared any more


@dataclass(eq=False)
class Example:
    """Sizes, types and values of an example's inputs; and how many other lengths its plan was compared at."""

    shown: list[Any]  # of each input its sizes; of a cache a word, of what else is no tensor the value
    types: list[torch.dtype]  # of the tensors
    form: str = ""  # of the arguments, where it is not the first example's
    compared: dict[str, int] = field(default_factory=dict)  # how many sizes of each open length were, with the original

    @classmethod
    def of(cls, leaves: Sequence[Any], form: str = "") -> Example:
        """That of a call's inputs."""
        shown = [tuple(x.shape) if isinstance(x, Tensor) else repr(x) if is_cache(x) else x for x in leaves]
        return cls(shown, [x.dtype for x in leaves if isinstance(x, Tensor)], form)

    def check(self) -> None:
        """ValueError for attributes of other kinds, as a file may have them."""
        tensors = [x for x in self.shown if isinstance(x, tuple)]
        sizes = all(type(n) is int and n >= 0 for x in tensors for n in x)
        types = len(self.types) == len(tensors) and all(isinstance(x, torch.dtype) for x in self.types)
        counts = all(isinstance(name, str) and type(n) is int for name, n in self.compared.items())
        if not (sizes and types and counts and isinstance(self.form, str)):
            raise ValueError(f"its example is {self.shown}, {self.types}, {self.form!r}, {self.compared}")

    def is_alike(self, leaves: Sequence[Any]) -> bool:
        """Whether tensors have the example's types and numbers of dimensions, and all else its values."""
        types = iter(self.types)
        return len(leaves) == len(self.shown) and all(
            isinstance(shown, tuple) and len(x.shape) == len(shown) and x.dtype == next(types)
            if isinstance(x, Tensor)
            else (shown == CACHE if is_cache(x) else type(x) is type(shown) and repr(x) == repr(shown))
            for x, shown in zip(leaves, self.shown, strict=True)
        )

    def is_of_another_batch(self, leaves: Sequence[Any]) -> bool:
        """Whether tensors differ from the example's in their first dimension alone."""
        tensors = [(x, shown) for x, shown in zip(leaves, self.shown, strict=False) if isinstance(x, Tensor)]
        return self.is_alike(leaves) and all(x.shape[1:] == shown[1:] for x, shown in tensors)

    def takes(self, leaves: Sequence[Any], lengths: Lengths | None) -> bool:
        """Whether they are of lengths that its plan leaves open, after some of these were compared."""
        others = self.other_lengths(leaves, lengths) if self.is_alike(leaves) else {}
        return bool(others) and all(self.compared.get(length, 0) >= COMPARED for length in others)

    def other_lengths(self, leaves: Sequence[Any], lengths: Lengths | None) -> dict[str, bool]:
        """Which open lengths differ from the example's, and whether that tells anything; {} where the plan does not hold."""
        own = self.own_lengths(lengths)
        found = lengths.of(_sizes(leaves)) if lengths else None
        if lengths is None or own is None or found is None:
            return {}
        tells = lengths.tell(found, own)
        return {name: tells for name, n in found.items() if n != own[name]}

    def own_lengths(self, lengths: Lengths | None) -> dict[str, int] | None:
        """Those of the example that its plan leaves open; None without any."""
        return None if lengths is None else lengths.of([x if isinstance(x, tuple) else () for x in self.shown])

    def note_comparison(self, leaves: Sequence[Any], lengths: Lengths | None) -> None:
        """One more, with the original, at the lengths that these inputs have."""
        for length, tells in self.other_lengths(leaves, lengths).items():
            self.compared[length] = self.compared.get(length, 0) + tells

    def __str__(self) -> str:
        types = iter(self.types)
        return listed(shown(x, next(types)) if isinstance(x, tuple) else shown(x) for x in self.shown)


def of_other_lengths(leaves: Sequence[Any], lengths: Lengths) -> Iterator[tuple[dict[str, int], list[Any]]]:
    """Some for which a plan with these lengths open holds, and the inputs with their values repeated to be as long."""
    own = lengths.of(_sizes(leaves)) or {}
    for other in islice(lengths.others(own), 2 * COMPARED):
        yield other, [_resized(x, sizes, other) for x, sizes in zip(leaves, lengths.inputs, strict=True)]


def shown(leaf: Any, dtype: torch.dtype | None = None) -> str:
    """A tensor's sizes and type in a few words (or those of one that had such sizes), another value shortened."""
    if isinstance(leaf, Tensor):
        return shown(leaf.shape, leaf.dtype)
    if dtype is not None:
        return f"{'x'.join(map(str, leaf)) or 'one number'} {str(dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(leaf).split())


def listed(words: Iterable[str]) -> str:
    """Inputs, as a warning names them."""
    return ", ".join(words) or "nothing"


def _sizes(leaves: Iterable[Any]) -> list[tuple[int, ...]]:
    """Of tensors; () of what is none."""
    return [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]


def _resized(x: Any, sizes: Sequence[int | str | None], lengths: Mapping[str, int]) -> Any:
    """An input of other lengths, in which its values repeat; the keys that a mask is of are as many more as its queries."""
    more = 0
    for dim, size in enumerate(sizes, 1):
        if isinstance(size, str):
            more = lengths[size] - x.shape[dim]
            x = cycled(x, dim, lengths[size])
        elif size is None:
            x = cycled(x, dim, x.shape[dim] + more)
    return x
