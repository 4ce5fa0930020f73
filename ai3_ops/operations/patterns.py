"""Which keys the queries of attention's sparse algorithms see: their patterns as masks, in PyTorch's functions.

The kernels never make such masks. They are what patterns mean: for people who look at one, for tests, and for derivatives that
have no kernels (second ones, tangents), which take memory for all pairs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops.problem import check

_WORD, _STEP = 2**64, 0x9E3779B97F4A7C15


class Part(NamedTuple):
    """Some of the queries' rows as one plain attention: of which tensors, and under which mask."""

    mask: Tensor | None = None  # boolean, or what is added to the scores; -inf hides a key
    rows: Tensor | None = None  # (..., queries, 1), True of the rows that this part computes; None: all
    query: str = "query"
    key: str = "key"
    value: str = "value"
    share: Tensor | None = None  # by how much the call's own mask moves the scores; None: as it stands


# bigbird ----------------------------------------------------------------------------------------------------------------
def _mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _WORD
    return x ^ x >> 31


def _next(state: int, number: int) -> int:
    return _mixed((state + _STEP * (number + 1)) % _WORD)


def random_blocks(seed: int, head: int, row: int, blocks: int, count: int) -> list[int]:
    """Those that a row of blocks of a head sees beside its window and the first and the last one (docs/algorithms)."""
    seen = [0, row - 1, row, row + 1, blocks - 1]
    state, drawn = _next(_next(seed % _WORD, head), row), 0
    wanted, k = min(count, blocks - len({*seen})), 0
    found: list[int] = []
    while drawn < wanted:
        block = (_next(state, k) >> 32) * blocks >> 32
        k += 1
        if block not in seen and block not in found:
            found.append(block)
            drawn += 1
    return found


@functools.lru_cache(maxsize=32)
def _drawn(seed: int, heads: int, blocks: int, count: int) -> list[list[list[int]]]:
    return [[random_blocks(seed, h, i, blocks, count) for i in range(1, blocks - 1)] for h in range(heads)]


def _bigbird_counts(
    heads: int, keys: int, block: int, count: int, seed: int, plan: str, given: Tensor | None, like: Tensor
) -> Tensor:
    """(heads, blocks, blocks): how often a block of queries sees one of keys."""
    blocks = -(-keys // block)
    row = torch.arange(blocks, device=like.device)
    near = (row[:, None] - row).abs() <= 1
    ends = (row == 0) | (row == blocks - 1)
    seen = (near | ends | ends[:, None]).to(like.dtype).expand(heads, blocks, blocks)
    if plan == "hf_eval" and keys <= (5 + 2 * count) * block:  # too short to be sparse: transformers computes all
        return torch.ones_like(seen)
    if blocks < 3 or not count:
        return seen
    if given is not None:
        index = given.long().expand(heads, blocks - 2, count)
    elif plan == "hf_eval":
        index = torch.zeros(heads, blocks - 2, count, dtype=torch.long, device=like.device)
    else:
        lists = _drawn(seed, heads, blocks, count)
        none = [[[*found, *[blocks] * (count - len(found))] for found in of_head] for of_head in lists]
        index = torch.tensor(none, dtype=torch.long, device=like.device)
    more = seen.new_zeros(heads, blocks - 2, blocks + 1)
    more = more.scatter_add(-1, index, torch.ones_like(index, dtype=like.dtype))[..., :blocks]
    return seen + torch.nn.functional.pad(more, (0, 0, 1, 1))


# block_sparse -----------------------------------------------------------------------------------------------------------
def _listed(counts: Tensor | None, indices: Tensor | None, blocks: int, like: Tensor) -> Tensor | None:
    """(..., rows, blocks): how often a block is listed."""
    if counts is None or indices is None:
        return None
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    index = torch.where(used, indices, blocks).long()
    none = torch.zeros(*index.shape[:-1], blocks + 1, dtype=like.dtype, device=like.device)
    return none.scatter_add(-1, index, used.to(like.dtype))[..., :blocks]


def _of_tokens(blocks: Tensor, block: int, queries: int, keys: int) -> Tensor:
    wide = blocks.repeat_interleave(block, -1)[..., :keys]
    return wide.repeat_interleave(block, -2)[..., :queries, :]


def _counted(partial: Tensor, full: Tensor | None, mask: Tensor | None) -> Part:
    """What is seen as often as that, in partial blocks under the mask, as one mask that is added to the scores."""
    if mask is None:
        total = partial if full is None else partial + full
        return Part(torch.where(total > 0, total.clamp_min(1).log(), -math.inf))
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    added = torch.zeros_like(partial) if mask.dtype == torch.bool else mask.masked_fill(hidden, 0).to(partial.dtype)
    of_partial, seen = partial.clamp_min(1).log() + added, (partial > 0) & ~hidden
    if full is None:
        return Part(torch.where(seen, of_partial, -math.inf), share=seen.to(partial.dtype))
    of_full, fully = full.clamp_min(1).log(), full > 0
    of_either = torch.where(fully, of_full, -math.inf)
    some = torch.where(seen & fully, torch.logaddexp(of_partial, of_full), torch.where(seen, of_partial, of_either))
    share = torch.where(fully, torch.sigmoid(of_partial - of_full), torch.ones_like(of_partial))
    return Part(some, share=torch.where(seen, share, 0))


# longformer -------------------------------------------------------------------------------------------------------------
def _tokens(flags: Tensor | None, rank: int) -> Tensor | None:
    """(..., keys) of each batch as (..., 1, 1, keys), in no more dimensions than the scores have."""
    if flags is None:
        return None
    wide = flags[..., None, None, :]
    while wide.ndim > rank:
        wide = wide.squeeze(0)
    return wide


def _longformer(rank: int, keys: int, device: torch.device, own: dict[str, Any]) -> list[Part]:
    place = torch.arange(keys, device=device)
    is_global = _tokens(own.get("global_mask"), rank)
    if is_global is None:
        is_global = (place < own["global_tokens"]).expand(1, keys)
    padded = _tokens(own.get("key_padding"), rank)
    seen = torch.ones_like(is_global) if padded is None else ~padded
    is_global = is_global & seen
    near = (place[:, None] - place).abs() <= own["window"] // 2
    of_query, of_key, of_value = (n if own.get(n) is not None else n.removeprefix("global_") for n in GLOBAL)
    return [
        Part((near | is_global) & seen, (seen & ~is_global).mT),
        Part(seen.expand_as(is_global & seen), is_global.mT, of_query, of_key, of_value),
    ]


GLOBAL = ("global_query", "global_key", "global_value")
SCORES = ("softcap", "sinks", "alibi_slopes", "rel_h", "rel_w")  # which change scores, and hide none
PROJECTIONS = ("key_projection", "value_projection")  # linformer's
SPARSE = ("block_sparse", "longformer", "bigbird")


def parts(
    algorithm: str, query: Tensor, key: Tensor, mask: Tensor | None, heads: int, own: dict[str, Any]
) -> list[Part]:
    """The plain attentions of which a call of the algorithm consists; `own` has its parameters."""
    if algorithm not in SPARSE:
        return [Part(mask)]
    own = {p.name: p.default for p in registry.parameters("attention", algorithm)} | own
    queries, keys = query.shape[-2], key.shape[-2]
    like = torch.empty(0, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    if algorithm == "longformer":
        return _longformer(max(query.ndim, key.ndim), keys, query.device, own)
    block = own["block_size"]
    if algorithm == "bigbird":
        given = own.get("random_indices")
        counts = _bigbird_counts(heads, keys, block, own["random_blocks"], own["seed"], own["random"], given, like)
        if query.ndim < 3:
            counts = counts[0]
        return [_counted(_of_tokens(counts, block, queries, keys), None, mask)]
    blocks = -(-keys // block)
    partial, full = (
        _listed(own.get(f"{which}kv_num_blocks"), own.get(f"{which}kv_indices"), blocks, like)
        for which in ("", "full_")
    )
    assert partial is not None
    wide = [None if t is None else _of_tokens(t, block, queries, keys) for t in (partial, full)]
    assert wide[0] is not None
    return [_counted(wide[0], wide[1], mask)]


# Checks of tensors among parameters ---------------------------------------------------------------------------------------
class _Expected(NamedTuple):
    kind: str  # "values", "flags", "indices"
    sizes: tuple[Any, ...]  # None: any
    fixed: int  # so many of the last ones must be there as they are


def _expected(name: str, sizes: dict[str, Any], own: dict[str, Any], lead: tuple[Any, ...]) -> _Expected | None:
    block = own.get("block_size", 1)
    heads, kv_heads, queries, keys = (sizes[n] for n in ("heads", "kv_heads", "queries", "keys"))
    rows = (queries + block - 1) // block
    inner = max(0, rows - 2) if isinstance(rows, int) else rows - 2
    lists = {"num_blocks": ((rows,), 1), "indices": ((rows, None), 2)}
    return {
        "global_query": _Expected("values", (*lead, heads, queries, sizes["size"]), 2),
        "global_key": _Expected("values", (*lead, kv_heads, keys, sizes["size"]), 2),
        "global_value": _Expected("values", (*lead, kv_heads, keys, sizes["value_size"]), 2),
        **{n: _Expected("flags", (*lead, keys), 1) for n in ("global_mask", "key_padding")},
        **{
            f"{which}kv_{n}": _Expected("indices", (*lead, heads, *shape), fixed)
            for which in ("", "full_")
            for n, (shape, fixed) in lists.items()
        },
        **{n: _Expected("values", (heads,), 1) for n in ("sinks", "alibi_slopes")},
        "key_lengths": _Expected("indices", lead, 0),
        **{n: _Expected("values", (*lead, heads, queries, None), 2) for n in ("rel_h", "rel_w")},
        **dict.fromkeys(PROJECTIONS, _Expected("values", (kv_heads, None, keys), 2)),
        "random_indices": _Expected("indices", (heads, inner, own.get("random_blocks")), 2),
    }.get(name)


def check_own(label: str, query: Tensor, sizes: dict[str, Any], shape: tuple[Any, ...], own: dict[str, Any]) -> None:
    """As the operators in C++ check them but for their values; RuntimeError. `shape` is the output's."""
    if own.get("block_size", 1) < 1:
        return  # which the algorithm refuses
    lead = (1,) * (5 - len(shape)) + tuple(shape[:-3])
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor):
            continue
        needs = f"needs query and {name} on one device"
        check(tensor.device == query.device, label, needs)
        expected = _expected(name, sizes, own, lead[-2:] if len(lead) >= 2 else lead)
        if expected is None:
            continue
        wanted = expected.sizes
        fits: Any = expected.fixed <= tensor.ndim <= len(wanted)
        check(fits, label, f"needs {name} that broadcasts to {wanted}, got {tuple(tensor.shape)}")
        for d, (got, want) in enumerate(zip(reversed(tensor.shape), reversed(wanted), strict=False)):
            fits = want is None or got == want or (d >= expected.fixed and got == 1)
            check(fits, label, f"needs {name} that broadcasts to {wanted}, got {tuple(tensor.shape)}")
        dtypes, words = {
            "values": ((query.dtype,), "the query's dtype"),
            "flags": ((torch.bool,), "bool"),
            "indices": ((torch.int32, torch.int64), "int32 or int64"),
        }[expected.kind]
        check(tensor.dtype in dtypes, label, f"needs {name} of {words}, got {tensor.dtype}")
    rel_h, rel_w = own.get("rel_h"), own.get("rel_w")
    if isinstance(rel_h, Tensor) and isinstance(rel_w, Tensor):
        height, width = rel_h.shape[-1], rel_w.shape[-1]
        needs = f"needs rel_h and rel_w of a grid of {sizes['keys']} keys, got {height} x {width}"
        check(height * width == sizes["keys"] and height > 0, label, needs)
    of_key, of_value = (own.get(name) for name in PROJECTIONS)
    if isinstance(of_key, Tensor) and isinstance(of_value, Tensor):
        what = f"got {tuple(of_key.shape)} and {tuple(of_value.shape)}"
        check(of_key.shape[-2] == of_value.shape[-2], label, f"needs projections to one length, {what}")
    for which in ("", "full_"):
        counts, indices = own.get(f"{which}kv_num_blocks"), own.get(f"{which}kv_indices")
        if isinstance(counts, Tensor) and isinstance(indices, Tensor):
            what = f"got {tuple(indices.shape)} and {tuple(counts.shape)}"
            needs = f"needs {which}kv_indices with one more dimension than {which}kv_num_blocks, {what}"
            check(indices.shape[:-1] == counts.shape, label, needs)
