"""`ai3_ops.attention_mask`: which pairs of query and key an algorithm of attention computes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops.operations.patterns import GLOBAL, SCORES, SPARSE, parts
from ai3_ops.operations.plain_attention import Sight


def attention_mask(algorithm: str, query_length: int, key_length: int, **parameters: Any) -> Tensor:
    """The boolean mask (..., query_length, key_length) that a sparse algorithm of attention stands for, True where a key is seen.

    `parameters` are the algorithm's own (`window=256`), or their defaults. bigbird's random blocks differ by head, which
    `heads=12` says (1 without). A block that is listed several times is seen once here; longformer's global queries see
    all keys. For looking at patterns and for tests: it takes a byte for each pair, which the algorithms never do.
    ValueError for an algorithm that has no pattern and for values that it refuses, TypeError for parameters that it does
    not have.
    """
    if algorithm not in (*SPARSE, "flash", "math"):
        raise ValueError(
            f"no attention algorithm {algorithm!r} with a pattern; those with one: {', '.join(SPARSE)}, flash, math"
        )
    heads = parameters.pop("heads", 1)
    known = {p.name for p in registry.parameters("attention", algorithm)} - {*GLOBAL, *SCORES}
    known |= {"is_causal"} if algorithm in ("flash", "math") else set()
    for name in parameters:
        if name not in known:
            raise TypeError(
                f"attention_mask({algorithm!r}) has no parameter {name!r}; its parameters: {', '.join(sorted(known))}"
            )
    if algorithm == "block_sparse" and not {"kv_num_blocks", "kv_indices"} <= parameters.keys():
        raise TypeError("attention_mask('block_sparse') needs kv_num_blocks and kv_indices")
    if algorithm in ("longformer", "bigbird") and query_length != key_length:
        raise ValueError(f"{algorithm} needs as many queries as keys, got {query_length} and {key_length}")
    if algorithm != "block_sparse":  # whose lists say themselves how many heads there are
        query, key = (torch.empty(1, 1, 1, 1).expand(1, heads, n, 1) for n in (query_length, key_length))
        numbers = {name: value for name, value in parameters.items() if not isinstance(value, Tensor)}
        asked = registry.OPERATIONS["attention"].asked(algorithm, query, key, key, **numbers)
        ok, reason = registry.supports_problem("attention", algorithm, asked)
        if not ok:
            raise ValueError(f"attention_mask({algorithm!r}): {reason}")
    if algorithm in ("flash", "math"):
        causal, lengths = parameters.pop("is_causal", False), parameters.get("key_lengths")
        lengths = None if lengths is None else lengths[..., None, None, None]
        sight, device = Sight.of(causal, parameters), torch.device("cpu")
        hidden = sight.hidden(query_length, key_length, device, lengths)
        hidden = torch.zeros((), dtype=torch.bool) if hidden is None else hidden
        return (~hidden).expand(*hidden.shape[:-2], query_length, key_length).contiguous()
    rank = 5 if algorithm == "longformer" else 3
    query, key = (torch.empty(*[1] * (rank - 2), n, 0) for n in (query_length, key_length))
    seen = None
    for part in parts(algorithm, query, key, None, heads, parameters):
        assert part.mask is not None
        mask = part.mask if part.mask.dtype == torch.bool else part.mask > -math.inf
        mask = mask if part.rows is None else mask & part.rows
        seen = mask if seen is None else seen | mask
    assert seen is not None
    while seen.ndim > 2 and seen.shape[0] == 1:
        seen = seen.squeeze(0)
    return seen.expand(*seen.shape[:-2], query_length, key_length).contiguous()
