"""Calls with a batch beside inputs of one item for all of it, as tables of positions have: programs are for as many of each.

What has one item is repeated then. Whether the original means that, it is asked itself.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

from torch import Tensor, nn

from ai3_ops._torch import pytree
from ai3_ops.graph.caches import narrow, noted
from ai3_ops.graph.calls import Calls
from ai3_ops.graph.network import agree, flat, of_one_batch
from ai3_ops.graph.state import copied
from ai3_ops.optimizing import pipeline

SECONDS = 0.02  # for the comparison of times with the original, at the first such call


class Mixed(nn.Module):
    """A plan's body for inputs of which some have one item for the batch of the others."""

    def __init__(self, body: nn.Module, places: frozenset[int]) -> None:
        """`places`: as `narrow` takes them."""
        super().__init__()
        self._body, self._places = (body,), places  # the body is the plan's

    def forward(self, *leaves: Any) -> Any:
        """The outputs; a cache is updated with what the original updates it with."""
        with narrow(self._places):
            return self._body[0](*(of_one_batch(leaves) or leaves))


def alone_in_updates(original: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> frozenset[int] | None:
    """Of a call with as many items of each input as the batch has: what its cache is updated with, of which the call as it is
    has one item, as `narrow` takes it. None where the original returns something else then, or cannot be called so.
    """
    leaves, spec = pytree.tree_flatten(given)
    copy = copied(original, sharing=True)
    try:
        (expected, theirs), (found, ours) = (
            _called(copy, *each) for each in (given, pytree.tree_unflatten(of_one_batch(leaves) or leaves, spec))
        )
        alone = {i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if _has_more(one, other)}
        firsts = [x[:1] if i in alone else x for i, x in enumerate(ours)]
        return frozenset(alone) if are_the_same([*firsts, *found], [*theirs, *expected]) else None
    except Exception:  # it refuses them
        return None


def are_the_same(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether values are, within rounding."""
    return len(ours) == len(theirs) and all(
        agree(one, other, pipeline.WORST_ERROR) for one, other in zip(ours, theirs, strict=True)
    )


def is_slower(original: nn.Module, made: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what was made takes longer than the original, which does once what all items of a batch share.

    A call asks it, which others may be timing: as they come, without waiting for them.
    """
    leaves, best = flat(args, kwargs), [math.inf, math.inf]
    end = time.perf_counter() + SECONDS
    for turn in itertools.count():
        for i, call in enumerate((lambda: original(*args, **kwargs), lambda: made(*leaves))):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
        if turn and time.perf_counter() > end:
            return best[1] > best[0]
    return False


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What a call returns, and what it updates a cache with besides keys and values."""
    with noted() as given:
        (_, returned), *_ = Calls(module, args, kwargs).made
    return returned, given


def _has_more(one: Any, other: Any) -> bool:
    """Whether a tensor has several items of what another one has one of."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape[:1] != other.shape[:1] == (1,)
