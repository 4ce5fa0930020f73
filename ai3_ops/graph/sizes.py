"""Sizes of a graph's values, as torch.export notes them: of what it leaves open expressions of symbols, by SymPy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ai3_ops.graph.calls import Uncapturable
from ai3_ops.graph.network import SAYS, Lengths, batch_of


def plain(size: Any) -> Any:
    """A size as a number, or what export knows of it as an expression."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return expression if isinstance(size, torch.SymInt) and not expression.is_Integer else int(expression)


def open_sizes(values: Iterable[Any], inputs: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Of inputs what is left open of their dimensions but the first, as export has them, with the example's sizes."""
    for value, given in zip(values, inputs, strict=True):
        if isinstance(value, Tensor) and isinstance(given, Tensor):
            yield from (
                (plain(n), own)
                for n, own in zip(value.shape[1:], given.shape[1:], strict=True)
                if not isinstance(plain(n), int)
            )


def words_of(value: Any) -> Any:
    """A size, or a condition on sizes, as `Lengths` has it; Uncapturable where that has no word for it."""
    if isinstance(value, (int, torch.SymInt)):
        value = plain(value)
    kind = type(value).__name__
    if isinstance(value, int) or value.is_Integer:
        return int(value)
    if value.is_Symbol:
        return str(value)
    if value.is_Rational:
        return "Div", int(value.p), int(value.q)
    if value.is_Pow and value.exp.is_Integer and value.exp > 0:
        return "Mul", *[words_of(value.base)] * int(value.exp)
    if kind not in SAYS:
        raise Uncapturable(f"its lengths have to hold {value}")
    return kind, *map(words_of, value.args)


class Sizes:
    """What is known of values on the example, by what export noted of them; batch and lengths that are open are symbols there."""

    def __init__(self, inputs: list[Any], dynamic: bool, graph: fx.Graph, cache: dict[Any, int]) -> None:
        """`cache`: the symbols that stand for the length of a cache, which is no input of the network, with the example's."""
        self.batch, self.dynamic = batch_of(inputs), dynamic
        self._cache = cache
        self._known: dict[Any, Any] = {}
        self._sizes = set[Any]()  # that follow from lengths, and from nothing else
        self._inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        del self._inputs[len(inputs) :]  # the keys and values of a cache
        # Those of the example, by their symbols.
        self.lengths = {n: own for n, own in open_sizes(self._inputs, inputs) if not self._follows_cache(n)}
        self._batches = {plain(x.shape[0]) for x in self._inputs if isinstance(x, Tensor) and x.ndim}
        if not self._batches.isdisjoint(self.lengths) or not all(size.is_Symbol for size in self.lengths):
            raise Uncapturable("its lengths depend on each other, or on the batch")

    def of(self, value: Any) -> dict[str, Any]:
        """As a node's meta has it."""
        if not isinstance(value, Tensor):
            length = (self._is_length(value),) if isinstance(value, torch.SymInt) else ()
            return {"shape": None, "dtype": None, "batched": False, "scales": None, "lengths": length}
        shape = tuple(map(self._size, value.shape))
        scales = tuple(map(self._scale, value.shape))
        if self.dynamic:
            first, *rest = [self._of_batch(s) if isinstance(s, torch.SymInt) else None for s in (*value.shape, 0)]
            batched = first is not None and first.is_Symbol and all(e is None or e.is_Integer for e in rest)
        else:
            batched = shape[:1] == (self.batch,) and None not in scales
        sizes = (plain(n) for n in value.shape if self._is_length(n))
        self._sizes.update(n for n in sizes if n.free_symbols <= self.lengths.keys())
        known, lengths = None if None in scales else scales, tuple(map(self._is_length, value.shape))
        return {"shape": shape, "dtype": value.dtype, "batched": batched, "scales": known, "lengths": lengths}

    def conditions(self) -> Lengths | None:
        """What export took for granted of the lengths; None where none is open."""
        if not self.lengths:
            return None
        shapes: list[Any] = [x.shape[1:] if isinstance(x, Tensor) else () for x in self._inputs]
        env = next(n for shape in shapes for n in shape if self._is_length(n)).node.shape_env
        guards = {env.replace(guard.expr) for guard in env.guards}
        open_ones = self._batches | self._cache.keys()  # of which no condition is left
        own = [g for g in guards if open_ones.isdisjoint(g.free_symbols) and g != True]  # noqa: E712
        said = (tuple(None if self._follows_cache(plain(n)) else words_of(n) for n in shape) for shape in shapes)
        sizes = set[Any]()
        for n in self._sizes:
            with contextlib.suppress(Uncapturable):  # of what a file has no word for
                sizes.add(words_of(n))
        return Lengths(tuple(said), tuple(map(words_of, own)), tuple(sizes))

    def _follows_cache(self, size: Any) -> bool:
        return not isinstance(size, int) and not self._cache.keys().isdisjoint(size.free_symbols)

    def _of_batch(self, size: Any) -> Any:
        """What a size is with the example's lengths."""
        expression = size.node.expr
        if expression not in self._known:
            self._known[expression] = expression.subs(self.lengths)
        return self._known[expression]

    def _is_length(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and not self.lengths.keys().isdisjoint(size.node.expr.free_symbols)

    def _scale(self, size: Any) -> int | None:
        """How many of a dimension belong to one item of the batch; 0 where it does not depend on it, None where otherwise."""
        if not isinstance(size, torch.SymInt):
            return 0
        number, rest = self._of_batch(size).as_coeff_Mul()
        if number.is_Integer and rest.is_Symbol and rest not in self._cache:
            return int(number)
        return 0 if self._of_batch(size).is_Integer else None

    def _size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = self._of_batch(size)
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self.batch) | self._cache))
