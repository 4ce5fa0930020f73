"""Chains of reshapes and permutations: said with as few steps as they take, and moved behind what computes rows.

A chain splits the dimensions of a value into factors, reorders these, and joins them again. `nn.MultiheadAttention`, which puts
the sequence in front of the batch and joins batch and heads for a while, comes out as one that splits heads off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from ai3_ops.graph import steps
from ai3_ops.graph.network import Network, Node, is_constant
from ai3_ops.operations.step import Step

_CHAINED = (steps.reshape, steps.permute)


@dataclass(eq=False)
class _Factor:
    """Of a dimension: a number, times the batch where `batch`."""

    size: int
    batch: bool
    of: int  # which dimension of the value where the chain begins

    @property
    def is_one(self) -> bool:
        return self.size == 1 and not self.batch


Dims = list[list[_Factor]]


@dataclass
class Chain:
    """What a node shows of the value in which its chain begins."""

    base: Node
    factors: list[_Factor]  # in the base's order
    dims: Dims  # of the node
    length: int  # steps

    @property
    def split(self) -> Dims:
        """Runs of factors of one dimension of the base, which stay together in one dimension of the node."""
        place = {factor: (d, i) for d, dim in enumerate(self.dims) for i, factor in enumerate(dim)}
        runs: Dims = []
        for factor in self.factors:
            d, i = place[factor]
            last = runs[-1][-1] if runs else None
            if last is not None and last.of == factor.of and place[last] == (d, i - 1):
                runs[-1].append(factor)
            else:
                runs.append([factor])
        return runs


def chain_of(node: Node) -> Chain | None:
    """None where sizes are not known for every batch."""
    names = [node]
    while names[-1].target in _CHAINED and not is_constant(names[-1].args[0]):
        names.append(names[-1].args[0])
    names.reverse()
    found: Chain | None = None
    for at in names:
        if at.meta.get("scales") is None or at.meta["shape"] is None:
            return None
        grown = None if found is None else _grown(found, at)
        found = _begun(at) if grown is None else grown
    return found


def _factor(size: int, scale: int, of: int) -> _Factor:
    return _Factor(scale or size, bool(scale), of)


def _begun(node: Node) -> Chain:
    pairs = enumerate(zip(node.meta["shape"], node.meta["scales"], strict=True))
    dims = [[f] if not (f := _factor(n, k, d)).is_one else [] for d, (n, k) in pairs]
    return Chain(node, [f for dim in dims for f in dim], dims, 0)


def _grown(chain: Chain, node: Node) -> Chain | None:
    """With one more step; None where its sizes are no products of factors."""
    if node.target is steps.permute:
        return Chain(chain.base, chain.factors, [chain.dims[d] for d in node.args[1]], chain.length + 1)
    factors = list(chain.factors)
    left = [f for dim in chain.dims for f in dim]
    dims: Dims = []
    for n, k in zip(node.meta["shape"], node.meta["scales"], strict=True):
        wanted, dim = _factor(n, k, 0), list[_Factor]()
        while not wanted.is_one:
            if not left:
                return None
            own = left.pop(0)
            if wanted.size % own.size == 0 and own.batch <= wanted.batch:
                wanted.size, wanted.batch = wanted.size // own.size, wanted.batch and not own.batch
                dim.append(own)
            elif own.size % wanted.size == 0 and wanted.batch <= own.batch:
                one = _Factor(wanted.size, wanted.batch, own.of)
                rest = _Factor(own.size // wanted.size, own.batch and not wanted.batch, own.of)
                at = factors.index(own)
                factors[at : at + 1] = [one, rest]
                dim.append(one)
                left.insert(0, rest)
                break
            else:
                return None
        dims.append(dim)
    return None if left else Chain(chain.base, factors, dims, chain.length + 1)


def _sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(-1 if any(f.batch for f in dim) else math.prod(f.size for f in dim) for dim in dims)


def _shown(network: Network, before: Node, base: Node, factors: list[_Factor], dims: Dims, layers: Any) -> Node:
    """The steps that show a base so."""
    chain = Chain(base, factors, dims, 0)
    split = chain.split
    own = [[f for f in factors if f.of == d] for d in range(len(base.meta["shape"]))]
    x = base
    place = {factor: i for i, run in enumerate(split) for factor in run}
    order = list(dict.fromkeys(place[f] for dim in dims for f in dim))
    moves = order != sorted(order)
    if moves and split != own:
        x = network.step(before, steps.reshape, x, _sizes(split), layers=layers)
    if moves:
        x = network.step(before, steps.permute, x, tuple(order), layers=layers)
    if (dims != [split[i] for i in order]) if moves else dims != own:
        x = network.step(before, steps.reshape, x, _sizes(dims), layers=layers)
    return x


def _length(chain: Chain) -> int:
    """Steps that it takes."""
    split = chain.split
    own = [[f for f in chain.factors if f.of == d] for d in range(len(chain.base.meta["shape"]))]
    place = {factor: i for i, run in enumerate(split) for factor in run}
    order = list(dict.fromkeys(place[f] for dim in chain.dims for f in dim))
    if order == sorted(order):
        return int(chain.dims != own)
    return 1 + (split != own) + (chain.dims != [split[i] for i in order])


def shorten_chains(network: Network) -> bool:
    """Each chain of views with as few steps as it takes."""
    found = False
    for node in network.calls(*_CHAINED):
        if all(user.target in _CHAINED for user in node.users):  # its end says it
            continue
        chain = chain_of(node)
        if chain is None or chain.length == 0 or _length(chain) >= chain.length:
            continue
        new = _shown(network, node, chain.base, chain.factors, chain.dims, node.meta["layers"])
        network.replace(node, new, "shorten views")
        found = True
    return found


def _on_rows(node: Node) -> bool:
    """Whether a step computes each row of its last dimension by itself."""
    if node.target is steps.linear:
        return node.kwargs.get("residual") is None
    if node.target is steps.unary:
        return not isinstance(node.args[2], fx.Node)
    own = Step.by_function.get(node.target)
    return own is not None and not own.values and own.works_on_rows(*node.args)


def views_behind_rows(network: Network) -> bool:
    """What changes the order of rows comes behind what computes them, so that it meets what changes it back."""
    found = False
    for node in network.calls(steps.linear, steps.unary, *Step.by_function):
        x = node.args[0]
        if not _on_rows(node) or x.target not in _CHAINED or node.meta["scales"] is None:
            continue
        chain = chain_of(x)
        if chain is None or not chain.dims[-1]:
            continue
        base, last = chain.base, chain.dims[-1]
        whole = len(chain.factors) == len({f.of for f in chain.factors})  # no dimension was split
        lead = [f for f in chain.factors if f not in last]
        if not whole or [[f] for f in lead] == [d for d in chain.dims[:-1] if d]:
            continue
        if [f for f in chain.factors if f in last] != last:
            continue
        layers = node.meta["layers"]
        rows = _shown(network, node, base, chain.factors, [*([f] for f in lead), last], x.meta["layers"])
        new = network.step(node, node.target, rows, *node.args[1:], layers=layers, **node.kwargs)
        features = _factor(new.meta["shape"][-1], 0, len(lead))
        moved = [_Factor(f.size, f.batch, d) for d, f in enumerate(lead)]
        turned = dict(zip(lead, moved, strict=True))
        dims: Dims = [[turned[f] for f in dim] for dim in chain.dims[:-1]]
        factors = [*moved, *([] if features.is_one else [features])]
        back = _shown(network, node, new, factors, [*dims, [f for f in factors if f is features]], layers)
        network.replace(node, back, "views behind rows")
        found = True
    return found


def views_behind_sums(network: Network) -> bool:
    """What shows two values alike comes behind their sum or product: OPT's layers join batch and length, and part them again."""
    found = False
    for node in network.calls(steps.binary):
        if not all(isinstance(x, fx.Node) and x.target in _CHAINED for x in node.args[:2]):
            continue
        one, other = map(chain_of, node.args[:2])
        if one is None or other is None or not one.length or not _alike(one, other):
            continue
        layers = node.meta["layers"]
        new = network.step(node, steps.binary, one.base, other.base, *node.args[2:], layers=layers, **node.kwargs)
        network.replace(node, _shown(network, node, new, one.factors, one.dims, layers), "views behind sums")
        found = True
    return found


def _alike(one: Chain, other: Chain) -> bool:
    """Whether two nodes show values of the same sizes in the same way."""

    def said(chain: Chain) -> Any:
        place = {factor: (i, factor.size, factor.batch, factor.of) for i, factor in enumerate(chain.factors)}
        return len(chain.factors), [[place[f] for f in dim] for dim in chain.dims]

    same = all(one.base.meta[key] == other.base.meta[key] for key in ("shape", "scales", "dtype"))
    return same and said(one) == said(other)


VIEW_PASSES = (views_behind_rows, views_behind_sums, shorten_chains)
