"""nn.MultiheadAttention as one call of attention: its projections, which stay PyTorch's, and what its masks mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ai3_ops._torch import has_constant_sizes


def project(m: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Query, key and value of all heads, (N, length, E); the same input twice is multiplied once, and split without a copy."""
    size, bias = m.embed_dim, m.in_proj_bias
    if not m._qkv_same_embed_dim:
        parts = (None, None, None) if bias is None else bias.chunk(3)
        weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
        return [F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, parts, strict=True)]

    def part(of: Tensor, first: int, count: int) -> tuple[Tensor, ...]:
        rows = slice(first * size, (first + count) * size)
        return F.linear(of, m.in_proj_weight[rows], None if bias is None else bias[rows]).chunk(count, -1)

    if key is value:
        return [*part(query, 0, 3)] if query is key else [*part(query, 0, 1), *part(key, 1, 2)]
    return [*part(query, 0, 1), *part(key, 1, 1), *part(value, 2, 1)]


def seen(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, further: int
) -> Tensor | None:
    """The module's masks, in which True hides, as one of scaled_dot_product_attention's; `further` keys at the end are seen."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask.unflatten(0, (batch, heads)) if attn_mask.ndim == 3 else attn_mask)
    if key_padding_mask is not None:
        masks.append((key_padding_mask if key_padding_mask.ndim == 2 else key_padding_mask[None])[:, None, None])
    if further:
        masks = [F.pad(mask, (0, further)) for mask in masks]
    if any(mask.is_floating_point() for mask in masks):
        dtype = next(mask.dtype for mask in masks if mask.is_floating_point())
        masks = [
            mask if mask.is_floating_point() else torch.zeros((), dtype=dtype).masked_fill(mask, float("-inf"))
            for mask in masks
        ]
        return masks[0] if len(masks) == 1 else masks[0] + masks[1]
    masks = [~mask for mask in masks]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def weights(query: Tensor, key: Tensor, mask: Tensor | None, average: bool) -> Tensor:
    """The softmax by its definition, (N, heads, L, S), or its mean over the heads."""
    scores = query * query.shape[-1] ** -0.5 @ key.mT
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    found = scores.softmax(-1)
    return found.mean(1) if average else found


def attend(
    m: Any,
    call: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of nn.MultiheadAttention with `call` for attention, or PyTorch's own where that is faster or drops some."""
    batched = query.ndim == 3
    if reason := _left(m, call, query, key, value, need_weights, batched):
        call.count_left(reason)
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return nn.MultiheadAttention.forward(m, query, key, value, *options)
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    heads, causal = m.num_heads, is_causal and key_padding_mask is None and not need_weights and m.bias_k is None
    causal = causal and not m.add_zero_attn
    inputs: dict[int, Tensor] = {}  # the same input stays the same
    for t in (query, key, value):
        if id(t) not in inputs:
            inputs[id(t)] = t[None] if not batched else t if m.batch_first else t.transpose(0, 1)
    q, k, v = project(m, *(inputs[id(t)] for t in (query, key, value)))
    batch = q.shape[0]
    if m.bias_k is not None:
        k, v = (torch.cat([t, b.expand(batch, 1, -1)], 1) for t, b in ((k, m.bias_k), (v, m.bias_v)))
    if m.add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(batch, 1, t.shape[-1])], 1) for t in (k, v))
    further = (m.bias_k is not None) + bool(m.add_zero_attn)
    mask = None if causal else seen(attn_mask, key_padding_mask, batch, heads, further)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    output = call(q, k, v, mask, m.dropout if m.training else 0.0, causal).transpose(1, 2).flatten(2)
    output = F.linear(output, m.out_proj.weight, m.out_proj.bias)
    found = weights(q, k, mask, average_attn_weights) if need_weights else None
    if not batched:
        return output[0], None if found is None else found[0]
    return output if m.batch_first else output.transpose(0, 1), found


def _left(m: Any, call: Any, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, batched: bool) -> str:
    """Why PyTorch computes the module, "" where it does not."""
    if m.training and m.dropout > 0 and need_weights:
        return "PyTorch drops weights that are asked for"
    if any(t.is_nested or t.ndim not in (2, 3) for t in (query, key, value)):
        return "needs dense tensors"
    if not call.is_free:
        return ""
    if need_weights:
        return "PyTorch is faster where the weights are asked for"
    if torch.compiler.is_compiling() and not has_constant_sizes((query, key)):
        return ""
    length, keys = (t.shape[1 if m.batch_first and batched else 0] for t in (query, key))
    batch = query.shape[0 if m.batch_first else 1] if batched else 1
    return call.why_sizes_left(query, batch * m.num_heads, length, keys)
