"""Caches of keys and values, which a decoder's layers update and read: objects of Python, which stay outside of graphs.

A layer calls `cache.update(keys, values, ...)` once, and reads the keys and values that this returns. In a captured graph
that is a node that calls the update of whatever cache the graph is called with; how many keys there are is open.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from ai3_ops._torch import pytree
from ai3_ops.surveying import examples
from ai3_ops.surveying.examples import Inputs

aten = torch.ops.aten
LENGTH = 2  # the dimension of keys and values, (N, heads, length, features), that grows
CACHE = "a cache"  # what is shown of one


def is_cache(leaf: Any) -> bool:
    """Whether an argument is a cache, by what transformers' caches have."""
    kind = type(leaf)
    if kind is Tensor:
        return False
    return hasattr(kind, "get_seq_length") and hasattr(kind, "update")


_notes = threading.local()


@contextmanager
def noted() -> Iterator[list[Any]]:
    """What this thread's updates of a `Past` are given besides keys and values, as places to write to: in leaves."""
    before, _notes.taken = getattr(_notes, "taken", None), list[Any]()
    try:
        yield _notes.taken
    finally:
        _notes.taken = before


@contextmanager
def narrow(places: frozenset[int]) -> Iterator[None]:
    """Of these, which are as `noted` has them, this thread's updates within graphs are given the first item."""
    before, _notes.narrow = getattr(_notes, "narrow", None), places
    try:
        yield
    finally:
        _notes.narrow = before


class Past:
    """A cache as example inputs have it: what was there before the call, for any batch. An update keeps nothing."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Of one item of the batch; `length`: how many there are after an update."""
        self.before, self.length = (keys, values), length

    @property
    def queries(self) -> int:
        """How many are new in the call."""
        return self.length - self.before[0].shape[LENGTH]

    def get_seq_length(self) -> int:
        """As transformers' caches."""
        return self.before[0].shape[LENGTH]

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """What was there before, and this."""
        if (notes := getattr(_notes, "taken", None)) is not None:
            notes += pytree.tree_leaves((more, named))
        key, value = (
            torch.cat([old.to(new.dtype).expand(new.shape[0], -1, -1, -1), new], LENGTH)
            for old, new in zip(self.before, (keys, values), strict=True)
        )
        return key, value

    def twice(self) -> Past:
        """As many again, of zeros, before the others."""
        keys, values = (
            torch.cat([x.new_zeros(*x.shape[:LENGTH], self.length, x.shape[-1]), x], LENGTH) for x in self.before
        )
        return Past(keys, values, 2 * self.length)

    def __repr__(self) -> str:
        return CACHE


class _Watched:
    """A cache that notes what its updates return."""

    def __init__(self, cache: Any) -> None:
        self._cache, self.updates = cache, list[tuple[int, Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The cache's own."""
        self.updates.append((keys.shape[LENGTH], self._cache.update(keys, *args, **kwargs)))
        return self.updates[-1][1]


def as_examples(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a `Past` for their cache; as they are where there is none.

    Also where the module, which is called with copies, updates it otherwise than once.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if is_cache(leaf)]
    on_cpu = all(leaf.is_cpu for leaf in leaves if isinstance(leaf, Tensor))  # a CUDA graph would replay no update
    if len(places) != 1 or isinstance(leaves[places[0]], Past) or not on_cpu:
        return args, kwargs
    own = pytree.tree_leaves(examples.copied(Inputs(args, kwargs)))
    if own[places[0]] is leaves[places[0]]:  # it cannot be copied
        return args, kwargs
    own[places[0]] = watched = _Watched(own[places[0]])
    called = pytree.tree_unflatten(own, spec)
    try:
        with torch.no_grad():
            module(*called[0], **called[1])
        ((new, (keys, values)),) = watched.updates
    except Exception:  # of another kind of cache, of several updates or none
        return args, kwargs
    length = keys.shape[LENGTH]
    keys, values = (x[:1, :, : length - new].clone() for x in (keys, values))
    leaves[places[0]] = Past(keys, values, length)
    given = pytree.tree_unflatten(leaves, spec)
    return given[0], given[1]


def as_long(leaf: Any) -> bool:
    """Whether an argument's last dimension is as long as the cache beside it: masks of scores."""
    return isinstance(leaf, Tensor) and leaf.ndim == 4


def open_sizes(x: Any, lengths: frozenset[int]) -> Any:
    """What an export may leave open of an input: the batch, and sizes that may be a length; None of what is no tensor."""
    if not isinstance(x, Tensor):
        return None
    return {d: Dim.AUTO if d else Dim.DYNAMIC for d, n in enumerate(x.shape) if not d or n in lengths}


def longer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with twice as many keys."""

    def twice(leaf: Any) -> Any:
        if as_long(leaf):
            return torch.cat([leaf, leaf], -1)
        return leaf.twice() if isinstance(leaf, Past) else leaf

    given = pytree.tree_map(twice, (args, kwargs))
    return given[0], given[1]


# In graphs ------------------------------------------------------------------------------------------------------------
def update(cache: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a graph calls."""
    if places := getattr(_notes, "narrow", None):
        leaves, spec = pytree.tree_flatten((args[2:], kwargs))
        more, kwargs = pytree.tree_unflatten([x[:1] if i in places else x for i, x in enumerate(leaves)], spec)
        args = *args[:2], *more
    keys, values = cache.update(*args, **kwargs)
    return keys, values


@dataclass
class Update:
    """The one update of a cache that a module makes."""

    place: int  # of the cache among the module's inputs
    inputs: int  # of the exported module
    length: int  # of keys and values, on the example
    given: Any = None  # what the update was called with, and
    out_spec: Any = None  # what the module returned, as its trace had it

    def lengths(self, program: ExportedProgram) -> dict[Any, int]:
        """The symbols that stand for the length, with the example's."""
        values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
        inputs = [value for value in values[-self.inputs :] if isinstance(value, Tensor)]
        sizes: list[Any] = [x.shape[-1] for x in inputs[:-2] if as_long(x)] + [x.shape[LENGTH] for x in inputs[-2:]]
        symbolic = (size for size in sizes if isinstance(size, torch.SymInt))
        return {symbol: self.length for size in symbolic for symbol in size.node.expr.free_symbols}

    def put_into(self, graph: fx.Graph) -> None:
        """Into a graph whose last two inputs are keys and values, and whose outputs end with what the update takes."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        _ask_others(inputs[:-2], inputs[-2:])
        output, (leaves, spec) = next(iter(reversed(graph.nodes))), pytree.tree_flatten(self.given)
        results: list[fx.Node] = list(output.args[0])
        count = sum(isinstance(leaf, Tensor) for leaf in leaves)
        output.args, taken = (tuple(results[:-count]),), results[-count:]
        rest = iter(taken)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], spec)
        order = {node: place for place, node in enumerate(graph.nodes)}
        last = max(taken, key=order.__getitem__)
        with graph.inserting_after(last):
            called = at = graph.call_function(update, (inputs[self.place], args, kwargs))
        called.meta = {"layers": (), "call": "", "val": None}
        for index, old in enumerate(inputs[-2:]):
            with graph.inserting_after(at):
                at = graph.call_function(operator.getitem, (called, index))
            at.meta = {**old.meta, "call": ""}
            old.replace_all_uses_with(at)
            graph.erase_node(old)
        early, pending = set[fx.Node](), [called]  # sizes of inputs, which are asked for first of all
        while pending:
            found = [user for user in pending.pop().users if user not in early and order.get(user, 0) < order[last]]
            pending += found
            early.update(found)
        for node in sorted(early & order.keys(), key=order.__getitem__, reverse=True):
            at.append(node)


def _ask_others(inputs: list[fx.Node], updated: list[fx.Node]) -> None:
    """The batch's size, by which what is given to an update may be viewed, is another input's, not that of what is updated."""
    values = ((node, node.meta.get("val")) for node in inputs)
    sizes = {str(n): (node, d) for node, x in values if isinstance(x, Tensor) for d, n in enumerate(x.shape)}
    for node in updated:
        for user in list(node.users):
            of_batch = user.target is aten.sym_size.int and user.args[1] == 0
            if of_batch and (other := sizes.get(str(user.meta["val"]))):
                user.args = other
                inputs[-1].append(user)


def elsewhere(graph: fx.Graph) -> list[fx.Node]:
    """All but masks as long as the cache, the keys and values that an update returned, and what is computed of those."""
    behind = set[fx.Node]()
    for node in graph.nodes:  # which are in order
        source = node.target is update or (node.op == "placeholder" and node.meta["scales"] is None)
        if source or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return [node for node in graph.nodes if node not in behind]


def group(graph: fx.Graph) -> None:
    """Attention of several heads to one of the cache's reads that one, of which models make a copy for each."""
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, *read = node.args[:3]
        keys, values = map(_one_of_each, read)
        if keys is None or values is None or keys.meta["val"].shape[1] == query.meta["val"].shape[1]:
            continue
        node.target = torch.ops.ai3.attention_flash.default
        node.args = (query, keys, values, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}


_REPEATS = (aten.unsqueeze.default, aten.slice.Tensor, aten.expand.default, aten.clone.default)
_JOINS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _one_of_each(node: Any) -> Any:
    """What an update returned, from that or from what has each head of it several times; None of anything else."""
    source, heads = node, node.meta["val"].shape[1]
    if source.target in _JOINS:
        source, wide = source.args[0], source.args[0].meta["val"].shape
        while source.target in _REPEATS:
            source = source.args[0]
        found = source.meta.get("val")
        if not isinstance(found, Tensor) or found.ndim != 4 or len(wide) != 5:
            return None
        n, own, length, size = found.shape
        if tuple(wide) != (n, own, heads // own, length, size) or node.meta["val"].shape[LENGTH:] != (length, size):
            return None
    is_updated = source.target is operator.getitem and source.args[0].target is update
    return source if is_updated else None


class Opened(nn.Module):
    """A module whose cache's keys and values are inputs, after the others, and what it gives to the cache outputs."""

    def __init__(self, module: nn.Module, spec: Any, noted: Update) -> None:
        """`spec`: of the module's arguments."""
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.training = module.training
        self._of = (module, spec, noted)

    def forward(self, *leaves: Any) -> Any:
        """The leaves of the module's output, and the tensors that its update takes."""
        module, spec, noted = self._of
        cache, given = _Traced(*leaves[-2:]), list(leaves[:-2])
        given[noted.place] = cache
        args, kwargs = pytree.tree_unflatten(given, spec)
        returned, noted.out_spec = pytree.tree_flatten(module.forward(*args, **kwargs))
        noted.given = cache.given
        return [*returned, *(x for x in pytree.tree_leaves(cache.given) if isinstance(x, Tensor))]


class _Traced:
    """What stands for the cache in a trace."""

    def __init__(self, *returned: Tensor) -> None:
        self.returned = returned
        self.given: Any = None

    def get_seq_length(self) -> int:
        """Unknown: a graph would hold for one length only."""
        raise TypeError("how long the cache is decides what is computed")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Keys and values as an input has them."""
        self.given = args, kwargs
        return self.returned


def exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: frozenset[int] | None
) -> tuple[Any, Update]:
    """The program of an `Opened` module, in which the number of keys is open; the batch and these lengths where there are any."""
    leaves, spec = pytree.tree_flatten(longer(args, kwargs))
    place = next(place for place, leaf in enumerate(leaves) if isinstance(leaf, Past))
    past = leaves[place]
    batch = next(x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim)
    given = [None if leaf is past else leaf for leaf in leaves]
    given += [x.new_zeros(batch, x.shape[1], past.length, x.shape[-1]) for x in past.before]
    noted = Update(place, len(given), past.length // 2)
    shapes: list[Any] = []
    for x in given[:-2]:
        open_ones = {} if lengths is None else open_sizes(x, lengths) or {}
        open_ones |= {3: Dim.DYNAMIC} if as_long(x) else {}
        shapes.append(open_ones if isinstance(x, Tensor) else None)
    shapes += [{LENGTH: Dim.DYNAMIC} | ({} if lengths is None else {0: Dim.DYNAMIC})] * 2
    program = torch.export.export(
        Opened(module, spec, noted), tuple(given), dynamic_shapes=(tuple(shapes),), strict=False
    )
    return program, noted
