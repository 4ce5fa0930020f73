"""Conditions on open sizes that an export took for granted: whether they hold for any batch, and for any length of a cache."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ai3_ops._torch import asked_in
from ai3_ops.graph.caches import Past
from ai3_ops.graph.calls import Uncapturable
from ai3_ops.graph.network import value_of
from ai3_ops.graph.sizes import open_sizes, plain, words_of


def hold_for_any_batch(program: ExportedProgram, inputs: list[Any]) -> bool:
    """Whether the graph depends on no condition on the batch size, such as a branch that was taken for it."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    values = [
        node.meta.get("val")
        for node in program.graph.nodes
        if node.op == "placeholder" and kinds[node.name] == InputKind.USER_INPUT
    ]
    del values[len(inputs) :]  # keys and values of a cache
    lengths = {n: own for n, own in open_sizes(values, inputs) if n.is_Symbol}
    firsts = [x.shape[0] for x in values if isinstance(x, Tensor) and x.ndim and isinstance(x.shape[0], torch.SymInt)]
    batches = {plain(size) for size in firsts}
    if not batches or not all(getattr(batch, "is_Symbol", False) for batch in batches):
        return False
    return all(
        _is_of_operators(guard) and _holds_for_batches(asked, batches, lengths)
        for guard, asked in _asked(firsts[0], batches)
    )


def _asked(size: Any, symbols: Collection[Any]) -> Iterator[tuple[Any, Any]]:
    """The conditions on any of some symbols that say more than that there is a batch: as guards of an export, and in themselves.

    `size`: one of the export's.
    """
    env = size.node.shape_env
    for guard in env.guards:
        asked = env.replace(guard.expr)
        if not asked.free_symbols.isdisjoint(symbols) and not _holds_for_any_batch(guard):
            yield guard, asked


_BATCHES = 2, 3, 4, 7, 8, 16, 33, 1000  # of one item the example is, or its first


def _holds_for_batches(asked: Any, batches: set[Any], lengths: dict[Any, int]) -> bool:
    """Whether a condition on a batch and lengths holds for many batches, with the example's lengths and longer ones."""
    if not asked.free_symbols <= batches | lengths.keys():
        return False
    more, holds = (dict.fromkeys(lengths, 0), lengths, dict.fromkeys(lengths, 1000)), _by_values(asked)
    return all(
        holds(dict.fromkeys(batches, n) | {symbol: own + longer[symbol] for symbol, own in lengths.items()})
        for n, longer in itertools.product((*_BATCHES, *_numbers_in(asked)), more)
    )


def _by_values(asked: Any) -> Callable[[Mapping[Any, int]], bool]:
    """A condition as a function of its symbols' values, by the words of `Lengths`: SymPy takes a hundred times as long."""
    try:
        words = words_of(asked)
    except Uncapturable:  # it has no words for that
        return lambda sizes: bool(asked.subs(sizes))
    return lambda sizes: bool(value_of(words, {str(symbol): n for symbol, n in sizes.items()}))


def _numbers_in(asked: Any) -> set[int]:
    """Those around the numbers of a condition, from two on, where it may begin or cease to hold."""
    own = {abs(int(n)) for n in asked.atoms() if n.is_Integer and abs(n) < 2**31}
    return {n for k in own for n in (k - 1, k, k + 1, 2 * k) if n > 1}


def _is_of_operators(guard: Any) -> bool:
    """Whether operators ask it, which choose among ways to compute the same, or refuse sizes; no module's own source."""
    where = r"(_prims_common/__init__|_prims/__init__|_refs/(\w+/)?\w+|_subclasses/\w+|nn/functional)\.py"
    return re.fullmatch(where, asked_in(guard)) is not None


def hold_for_any_cache(program: ExportedProgram, cache: dict[Any, int], lengths: dict[Any, int], past: Past) -> bool:
    """Whether the branches that were taken for a cache are those of others: longer and shorter ones, of prompts of any length.

    `lengths` are those that are open beside the cache's, as a prompt's. A call with an empty cache may take another branch where
    the example is one, and all such calls take it: the comparison with the example shows that it computes the same.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [n for x in values if isinstance(x, Tensor) for n in x.shape if isinstance(n, torch.SymInt)]
    queries = _PROMPTS if lengths else (past.queries,)

    def sized(keys: int, count: int) -> dict[Any, int]:
        return dict.fromkeys(cache, keys) | dict.fromkeys(lengths, count)

    for guard, asked in _asked(sizes[-1], cache):
        if not asked.free_symbols <= cache.keys() | lengths.keys():
            return False
        holds = _by_values(asked)
        longer = [(times * n + more, n) for n in (*queries, past.length) for times, more in _LONGER]
        longer += [(keys, n) for n in queries for k in _numbers_in(asked) for keys in (k, n + k) if keys > n]
        if not all(holds(sized(keys, count)) for keys, count in longer):
            return False
        if _is_of_operators(guard):
            continue
        if not all(holds(sized(before + n, n)) for n in queries for before in _PASTS):
            return False
        first = {holds(sized(n, n)) for n in queries}
        if first != {True} and (past.queries != past.length or len(first) > 1):
            return False
    return True


_LONGER = (2, 1), (3, 1), (8, 5), (1000, 0), (1000, 7)  # as many times the queries, and some more
_PROMPTS, _PASTS = (*range(2, 20), 32, 33, 64, 100, 1000, 5000), (1, 2, 3, 7, 100)


def _holds_for_any_batch(guard: Any) -> bool:
    """Whether a condition says no more than that two sizes are one, or is an operator's own: of cuDNN, on CUDA, up to which size,
    and that a value is not empty.

    Operators ask for the latter to choose a kernel, when they are called; a module that asks does so in its own source.
    """
    expression = guard.expr
    if expression.is_Equality:
        return all(a.is_Symbol for a in expression.args)
    says = getattr(expression, "rel_op", "")
    if (says, expression.args[-1]) in (("!=", 0), (">", 0), (">", 1), (">=", 1), (">=", 2)):
        return asked_in(guard) in ("_prims_common/__init__.py", "_subclasses/fake_impls.py")
    asked = asked_in(guard) == "_ops.py"
    bounds = says in ("<", "<=")
    return asked and bounds and expression.args[0].is_Symbol and expression.args[1].is_Integer
