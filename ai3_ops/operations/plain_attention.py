"""Attention by its definition, in PyTorch's functions: what has every derivative, in memory for all scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ai3_ops.operations import patterns


def _scale_of(query: Tensor, scale: float | None) -> float:
    return (1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0) if scale is None else scale


def _widened(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """In at least float32, each head of the query with its own of key and value."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (t.to(wide) for t in (query, key, value))
    if grouped and k.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(times, -3) for t in (k, v))
    return q, k, v


def _narrowed(grad: Tensor, like: Tensor, grouped: bool) -> Tensor:
    """The gradient of what `_widened` was given."""
    if grouped and like.ndim > 2 and like.shape[-3] and grad.shape[-3] != like.shape[-3]:
        grad = grad.unflatten(-3, (like.shape[-3], grad.shape[-3] // like.shape[-3])).sum(-3)
    return reduced(grad, like).to(like.dtype)


def reduced(grad: Tensor, like: Tensor) -> Tensor:
    """Summed to the sizes of what was broadcast, which may have more dimensions of size 1 in front."""
    shape = like.shape[max(0, like.ndim - grad.ndim) :]
    return grad.sum_to_size(shape).reshape(like.shape)


def fitted(tensor: Tensor, rank: int) -> Tensor:
    """Without the first dimensions, of size 1, that a tensor has beyond so many."""
    while tensor.ndim > rank:
        tensor = tensor.squeeze(0)
    return tensor


class Sight(NamedTuple):
    """What a query sees before the mask is asked, and the cap of its scores: `is_causal`, and parameters of algorithms' own."""

    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    lower_right: bool = False
    softcap: float = 0.0

    @staticmethod
    def of(causal: bool, options: dict[str, Any]) -> Sight:
        """Of an operator's arguments."""
        left, right = options.get("window_left", -1), options.get("window_right", -1)
        lower_right = bool(options.get("causal_lower_right", False))
        return Sight(causal, left, right, lower_right, float(options.get("softcap", 0.0)))

    def behind(self, queries: int, keys: int, device: torch.device, lengths: Tensor | None = None) -> Tensor:
        """(..., queries, keys): how far a key lies behind a query's own one; of `lengths` (..., 1, 1) keys."""
        own = torch.arange(queries, device=device)[:, None]
        if self.lower_right:
            own = own + ((keys if lengths is None else lengths) - queries)
        return torch.arange(keys, device=device) - own

    def hidden(self, queries: int, keys: int, device: torch.device, lengths: Tensor | None = None) -> Tensor | None:
        """(..., queries, keys), True where a key is not seen; None where all are."""
        right = 0 if self.causal or self.lower_right else self.window_right
        missing = None if lengths is None else torch.arange(keys, device=device) >= lengths
        if right < 0 and self.window_left < 0:
            return missing
        behind = self.behind(queries, keys, device, lengths)
        hidden = behind > right if right >= 0 else torch.zeros_like(behind, dtype=torch.bool)
        hidden = hidden | (behind < -self.window_left) if self.window_left >= 0 else hidden
        return hidden if missing is None else hidden | missing


class _Weights(NamedTuple):
    """The softmax, in which rows that see no key are zeros, with what it was computed from."""

    weights: Tensor
    key: Tensor  # zeros where no query sees one, so that NaN there stays without effect
    value: Tensor
    slope: Tensor | None  # the derivative of capped scores; None where they are not
    bend: Tensor | None  # its derivative
    of_sink: Tensor | None  # (..., queries, 1): the weight of a further logit, which has no value

    def sloped(self, gradient: Tensor) -> Tensor:
        """Of the scores before they are capped, given that of those after."""
        return gradient if self.slope is None else gradient * self.slope


class Plain(NamedTuple):
    """A call as plain attentions in PyTorch's functions, which have every derivative: of all its rows, or of some each."""

    algorithm: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sight: Sight
    scale: float | None
    grouped: bool
    own: dict[str, Any]  # and dropout's seed
    dropout: float = 0.0

    def parts(self) -> list[patterns.Part]:
        """What is computed."""
        heads = max(t.shape[-3] if t.ndim > 2 else 1 for t in (self.query, self.key, self.value))
        return patterns.parts(self.algorithm, self.query, self.key, self.mask, heads, self.own)

    def tensors(self, part: patterns.Part) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a part."""
        known = self.own | {"query": self.query, "key": self.key, "value": self.value}
        return known[part.query], known[part.key], known[part.value]

    # What flash and math have beside the mask -----------------------------------------------------------------------------
    def lengths(self, rank: int) -> Tensor | None:
        """`key_lengths`, broadcast to the scores."""
        lengths = self.own.get("key_lengths")
        return None if lengths is None else fitted(lengths[..., None, None, None], rank)

    def distance(self, q: Tensor, k: Tensor) -> Tensor:
        """Between a query's own key and each key."""
        behind = self.sight.behind(q.shape[-2], k.shape[-2], q.device, self.lengths(q.ndim))
        return behind.abs().to(q.dtype)

    def added(self, q: Tensor, k: Tensor, given: dict[str, Any]) -> Tensor | None:
        """What `alibi_slopes`, `rel_h` and `rel_w` of `given` add to the scores, of which it is a linear function."""
        here = [name for name in _ADDED if self.own.get(name) is not None and given.get(name) is not None]
        total, wide = None, {name: given[name].to(q.dtype) for name in here}
        if "alibi_slopes" in wide:
            total = -fitted(wide["alibi_slopes"][:, None, None], q.ndim) * self.distance(q, k)
        for name, dim in (("rel_h", -1), ("rel_w", -2)):
            if name in wide:
                rel = fitted(wide[name], q.ndim).unsqueeze(dim)
                rel = rel.expand(*rel.shape[:-2], *self.grid).flatten(-2)
                total = rel if total is None else total + rel
        return total

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the keys."""
        return self.own["rel_h"].shape[-1], self.own["rel_w"].shape[-1]

    def of_added(self, q: Tensor, k: Tensor, of_scores: Tensor) -> list[tuple[str, Tensor]]:
        """Gradients of those, given that of the scores after they are capped."""
        found = []
        if self.own.get("alibi_slopes") is not None:
            found.append(("alibi_slopes", _by_head(of_scores * -self.distance(q, k))))
        if self.own.get("rel_h") is not None:
            wide = of_scores.unflatten(-1, self.grid)
            found += [("rel_h", wide.sum(-1)), ("rel_w", wide.sum(-2))]
        return found

    def weights(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> _Weights:
        """Of a part's tensors, under its mask."""
        hidden = self.sight.hidden(q.shape[-2], k.shape[-2], q.device, self.lengths(q.ndim))
        if mask is not None:
            masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
            hidden = masked if hidden is None else masked | hidden
        if hidden is not None:
            if hidden.ndim < 2:
                hidden = hidden.expand(q.shape[-2], k.shape[-2])
            unseen = hidden.expand(*hidden.shape[:-1], k.shape[-2]).all(-2)[..., None]
            k, v = (torch.where(unseen, 0, t) for t in (k, v))
        scores, slope, bend = q @ k.mT * scale, None, None
        if cap := self.sight.softcap:
            t = torch.tanh(scores / cap)
            scores, slope = cap * t, 1 - t * t
            bend = -2 / cap * t * slope
        if (added := self.added(q, k, self.own)) is not None:
            scores = scores + added
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(mask == -math.inf, 0).to(scores.dtype)
        if hidden is None:  # as of a row that sees no key, which is what PyTorch makes of it, too
            none = (scores == -math.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(none, 0)
        else:
            none = hidden.all(-1, keepdim=True)
            scores = scores.masked_fill(hidden & ~none, -math.inf).masked_fill(none, 0)
        of_sink = None
        if (sinks := self.own.get("sinks")) is None:
            found = scores.softmax(-1)
        else:
            sink = fitted(sinks.to(q.dtype)[:, None, None], q.ndim)
            rows = torch.broadcast_shapes(scores.shape[:-1], sink.shape[:-1])
            columns = torch.cat([scores.expand(*rows, -1), sink.expand(*rows, 1)], -1).softmax(-1)
            found, of_sink = columns[..., :-1], columns[..., -1:]
        return _Weights(found.masked_fill(none, 0), k, v, slope, bend, of_sink)

    def dropped(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
        """What dropout makes of weights, as the kernels do (docs/attention.md)."""
        if not self.dropout:
            return lambda weights: weights
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        kept = _kept(self.own["dropout_seed"], (*lead, q.shape[-2]), k.shape[-2], self.dropout)
        factor = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        return lambda weights: weights * kept * factor

    # The output and its derivatives -----------------------------------------------------------------------------------------
    def forward(self) -> Tensor:
        """The output."""
        outputs = []
        for part in self.parts():
            query, key, value = self.tensors(part)
            q, k, v = _widened(query, key, value, self.grouped)
            found = self.weights(q, k, v, part.mask, _scale_of(query, self.scale))
            dropped = self.dropped(q, k, v)
            outputs.append(_rows(dropped(found.weights) @ found.value, part.rows))
        return sum(outputs[1:], outputs[0]).to(self.query.dtype)

    def backward(self, grad: Tensor, of_mask: bool = False) -> dict[str, Tensor]:
        """Gradients by the names of the tensors, and where asked for that of the mask."""
        sums: dict[str, Tensor] = {}
        for part in self.parts():
            query, key, value = self.tensors(part)
            q, k, v = _widened(query, key, value, self.grouped)
            g, factor = _rows(grad.to(q.dtype), part.rows), _scale_of(query, self.scale)
            found = self.weights(q, k, v, part.mask, factor)
            p, k, v = found[:3]
            dropped = self.dropped(q, k, v)
            dp = dropped(g @ v.mT)
            d = _row_sums(p * dp)
            dt = p * (dp - d)
            ds = found.sloped(dt)
            grads = ((part.query, ds @ k * factor), (part.key, ds.mT @ q * factor), (part.value, dropped(p).mT @ g))
            _add(sums, (*grads, *self.of_added(q, k, dt)))
            if found.of_sink is not None:
                _add(sums, [("sinks", _by_head(-found.of_sink * d))])
            if of_mask and self.mask is not None:
                moved = dt if part.share is None else dt * part.share
                sums["attn_mask"] = moved.sum_to_size(self.mask.shape)
        return self.narrowed(sums)

    def second(self, grad: Tensor, given: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of grad and of the tensors, `given` those of the tensors' gradients.

        Of dQ = s dS K, dK = s dS^T Q, dV = (M P)^T G, with dS = U dT, dT = P (dP - D), dP = M (G V^T), D the rows' sums of P dP.
        U is the slope of capped scores, or 1, M what dropout multiplies weights by. With a, b, c the gradients of those three: f
        is that of dS, e of dT, x of dP, w of P, r of the scores before they are capped, t of those after. A sink is one more
        column of P, with a value of zeros.
        """
        sums: dict[str, Tensor] = {}
        of_grad = []
        for part in self.parts():
            query, key, value = self.tensors(part)
            q, k, v = _widened(query, key, value, self.grouped)
            g, s = _rows(grad.to(q.dtype), part.rows), _scale_of(query, self.scale)
            a, b, c = (
                None if t is None else t.to(q.dtype) for t in (given.get(n) for n in (part.query, part.key, part.value))
            )
            if self.grouped and key.shape[-3]:
                times = q.shape[-3] // key.shape[-3]
                b, c = (None if t is None else t.repeat_interleave(times, -3) for t in (b, c))
            found = self.weights(q, k, v, part.mask, s)
            p, k, v = found[:3]
            dropped = self.dropped(q, k, v)
            dp = dropped(g @ v.mT)
            d = _row_sums(p * dp)
            dt = p * (dp - d)
            ds, f = found.sloped(dt), torch.zeros_like(p)
            f = f if a is None else f + a @ k.mT * s
            f = f if b is None else f + q @ b.mT * s
            e, of_added = found.sloped(f), self.added(q, k, given)
            e = e if of_added is None else e + of_added
            sum_e, w_sink = _row_sums(p * e), None
            if found.of_sink is not None:
                sinks = given.get("sinks")
                e_sink = torch.zeros_like(d) if sinks is None else _to_rows(sinks, d)
                sum_e = sum_e + found.of_sink * e_sink
                w_sink = -e_sink * d
            x, w = p * (e - sum_e), e * (dp - d) - sum_e * dp
            w = w if c is None else w + dropped(g @ c.mT)
            sum_w = _row_sums(p * w)
            if found.of_sink is not None and w_sink is not None:
                sum_w = sum_w + found.of_sink * w_sink
                _add(sums, [("sinks", _by_head(found.of_sink * (w_sink - sum_w)))])
            t = p * (w - sum_w)
            r = found.sloped(t)
            r = r if found.bend is None else r + f * dt * found.bend
            x = dropped(x)
            to_g, to_v = x @ v, x.mT @ g
            to_q, to_k = r @ k * s, r.mT @ q * s
            to_g = to_g if c is None else to_g + dropped(p) @ c
            to_q = to_q if b is None else to_q + ds @ b * s
            to_k = to_k if a is None else to_k + ds.mT @ a * s
            of_grad.append(_rows(to_g, part.rows))
            _add(sums, ((part.query, to_q), (part.key, to_k), (part.value, to_v), *self.of_added(q, k, t)))
        return sum(of_grad[1:], of_grad[0]).to(grad.dtype), self.narrowed(sums)

    def narrowed(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the tensors' sizes and dtypes."""
        known = self.own | {"query": self.query, "key": self.key, "value": self.value, "attn_mask": self.mask}
        grouped = dict.fromkeys(("key", "value", "global_key", "global_value"), self.grouped)
        return {
            n: g.to(known[n].dtype) if n == "attn_mask" else _narrowed(g, known[n], grouped.get(n, False))
            for n, g in sums.items()
        }


class Projected(NamedTuple):
    """linformer: a plain attention over projected keys and values, and the products with the projections."""

    plain: Plain  # of the call as it stands

    def inner(self) -> Plain:
        """Over the projected rows."""
        key, value = (projection @ tensor for _, tensor, projection, _ in self._each())
        own = {name: value for name, value in self.plain.own.items() if name not in patterns.PROJECTIONS}
        return self.plain._replace(algorithm="math", key=key, value=value, own=own)

    def forward(self) -> Tensor:
        """The output."""
        return self.inner().forward()

    def backward(self, grad: Tensor, of_mask: bool = False) -> dict[str, Tensor]:
        """As Plain's: with dK' and dV' the gradients of projected rows, dK = E^T dK' and dE = dK' K^T."""
        found = self.inner().backward(grad)
        sums = {"query": found["query"]}
        for name, tensor, projection, own in self._each():
            _add(sums, ((name, projection.mT @ found[name]), (own, found[name] @ tensor.mT)))
        return self._narrowed(sums)

    def second(self, grad: Tensor, given: dict[str, Tensor | None]) -> tuple[Tensor, dict[str, Tensor]]:
        """As Plain's. Of dK = E^T dK' and dE = dK' K^T with the gradients b and e: that of dK' is E b + e K."""
        inner, below = self.inner(), dict[str, Tensor]()
        for name, tensor, projection, own in self._each():
            if (b := given.get(name)) is not None:
                _add(below, [(name, projection @ b.to(tensor.dtype))])
            if (e := given.get(own)) is not None:
                _add(below, [(name, fitted(e.to(tensor.dtype), projection.ndim) @ tensor)])
        first = inner.backward(grad)
        of_grad, found = inner.second(grad, {"query": given.get("query"), **below})
        sums = {"query": found["query"]} if "query" in found else {}
        for name, tensor, projection, own in self._each():
            if (again := found.get(name)) is not None:
                _add(sums, ((name, projection.mT @ again), (own, again @ tensor.mT)))
            if (e := given.get(own)) is not None:
                _add(sums, [(name, fitted(e.to(tensor.dtype), projection.ndim).mT @ first[name])])
            if (b := given.get(name)) is not None:
                _add(sums, [(own, first[name] @ b.to(tensor.dtype).mT)])
        return of_grad, self._narrowed(sums)

    def _each(self) -> Iterator[tuple[str, Tensor, Tensor, str]]:
        """Key and value with their projections, in at least float32, these in no more dimensions than those have."""
        wide = torch.promote_types(self.plain.query.dtype, torch.float32)
        names = zip(("key", "value"), patterns.PROJECTIONS, strict=True)
        for name, own in names:
            tensor = self.plain.key if name == "key" else self.plain.value
            yield name, tensor.to(wide), fitted(self.plain.own[own].to(wide), max(2, tensor.ndim)), own

    def _narrowed(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        known = self.plain.own | {"query": self.plain.query, "key": self.plain.key, "value": self.plain.value}
        return {name: reduced(g, known[name]).to(known[name].dtype) for name, g in sums.items()}


def plain(
    algorithm: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sight: Sight,
    scale: float | None,
    grouped: bool,
    own: dict[str, Any],
    dropout: float = 0.0,
) -> Plain | Projected:
    """A call of an algorithm in PyTorch's functions."""
    call = Plain(algorithm, query, key, value, mask, sight, scale, grouped, own, dropout)
    return Projected(call) if algorithm == "linformer" else call


def _kept(seed: Tensor, rows: tuple[int, ...], keys: int, dropout: float) -> Tensor:
    """(*rows, keys), True where dropout keeps a weight. Numbers are of 64 bits, and shifted without their sign."""
    low, words = 2**32 - 1, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    step, one, other = (w - 2**64 for w in words)
    x = seed + step * (torch.arange(math.prod(rows), device=seed.device) + 1)
    x = (x ^ (x >> 30 & 2**34 - 1)) * one
    x = (x ^ (x >> 27 & 2**37 - 1)) * other
    state = (x ^ (x >> 31 & 2**33 - 1)).view(*rows, 1)
    x = (state & low) + torch.arange(keys, device=seed.device) * 0x9E3779B9 & low
    x = (x ^ x >> 16) * 0x7FEB352D & low ^ (state >> 32 & low)
    x = (x ^ x >> 15) * 0x846CA68B & low
    return (x ^ x >> 16) >> 8 >= math.ceil(dropout * 2**24)


_ADDED = ("alibi_slopes", "rel_h", "rel_w")


def _add(sums: dict[str, Tensor], more: Iterable[tuple[str, Tensor]]) -> None:
    """Where parts have tensors in common."""
    for name, gradient in more:
        sums[name] = sums[name] + gradient if name in sums else gradient


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Zeros but in those rows."""
    return tensor if rows is None else torch.where(rows, tensor, 0)


def _row_sums(tensor: Tensor) -> Tensor:
    return tensor.sum(-1, keepdim=True)


def _by_head(tensor: Tensor) -> Tensor:
    """(heads,): the sum over everything else."""
    heads = tensor.sum((-2, -1))
    return heads[None] if tensor.ndim < 3 else heads.sum_to_size(heads.shape[-1:])


def _to_rows(of_heads: Tensor, like: Tensor) -> Tensor:
    """(heads,) as rows of scores."""
    return fitted(of_heads.to(like.dtype)[:, None, None], like.ndim).expand_as(like)
