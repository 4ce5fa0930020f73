"""The attention algorithms as an attention implementation of transformers models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops.operations.attention import AttentionCall
from ai3_ops.registry import operator_named
from ai3_ops.selecting.choice import Algorithm


def register_transformers(algorithm: str | Algorithm = "default", name: str = "ai3") -> None:
    """Makes `attn_implementation="ai3"` one of transformers' attention implementations, with a mask function of its own.

    `algorithm` computes it: "default" where that gains, else PyTorch's scaled_dot_product_attention; another one always, with
    a RuntimeError for what it cannot do. `name` is what models ask for; one with "flash", "sdpa", "eager", "flex", "/" or "|"
    in it means something else to transformers and is a ValueError, as is an algorithm that does not exist. It may be called
    again, for other names.

    Masks are boolean, and are not made where causality says all; a sliding window without padding never becomes one, so that it
    saves its work. `softcap` (Gemma 2) and `s_aux`, the sinks of gpt-oss, are computed, and their gradients. Attention
    weights are not returned. ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if any(word in name for word in ("flash", "sdpa", "eager", "flex", "/", "|")):
        raise ValueError(f"ai3_ops.register_transformers: the name {name!r} means something else to transformers")
    chosen = Algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    AttentionInterface.register(name, _implementation(chosen))
    AttentionMaskInterface.register(name, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """As transformers' own for PyTorch's function; None also for what `sliding_window` says alone, as the layers are told it."""
    from transformers.masking_utils import sdpa_mask

    whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    may = allow_is_causal_skip or allow_is_bidirectional_skip
    if may and local_size and whole and not torch.compiler.is_compiling():
        padded = attention_mask is not None and not bool(attention_mask[:, :kv_length].all())
        if not padded and _slides(mask_function, local_size, kv_length, allow_is_causal_skip):
            return None
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **options,
    )  # fmt: skip


def _slides(mask_function: Any, window: int, length: int, causal: bool) -> bool:
    """Whether a mask of a local size is a window, not one of chunks: those differ in one of two neighbouring rows.

    A causal one has `window` keys, one to both sides as many before and as many behind.
    """
    rows = torch.tensor([length // 2, max(length - 2, 0), length - 1])[:, None]
    keys = torch.arange(length)[None]
    zero = torch.zeros(1, 1, dtype=torch.long)
    behind = rows - keys
    wanted = (behind >= 0) & (behind < window) if causal else behind.abs() <= window
    return bool(torch.equal(mask_function(zero, zero, rows, keys), wanted))


def _implementation(algorithm: Algorithm) -> Callable[..., tuple[Tensor, None]]:
    call = AttentionCall()
    call.choose(algorithm)  # ValueError where it does not exist
    call.strict = algorithm.name != "default"
    own = None if algorithm.name == "default" else algorithm.name

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        queries, keys = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        around = not causal and attention_mask is None and queries == keys
        causal = queries > 1 and attention_mask is None and causal
        mask = attention_mask
        if causal and keys > queries:  # a cache that is empty yet
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
        if position_bias is not None:
            mask, causal = _biased(position_bias, mask, causal), False
        options: dict[str, Any] = {"softcap": softcap} if softcap else {}
        if (
            (causal or around) and sliding_window and sliding_window <= queries
        ):  # one key more than a layer sees to a side
            options["window_left"] = sliding_window - 1
            options |= {"window_right": sliding_window - 1} if around else {}
        grouped = query.shape[1] != key.shape[1]
        if s_aux is not None:
            options["sinks"] = s_aux.to(query.dtype)
        if options:
            # Of `default`, what computes more than PyTorch's function does.
            operator: Any = operator_named(f"attention_{own or ('math' if query.is_cuda else 'flash')}")
            output = operator(
                query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped,
                **(algorithm.parameters | options),
            )  # fmt: skip
        else:
            output = call(query, key, value, mask, dropout, causal, scaling, grouped)
        return output.transpose(1, 2).contiguous(), None

    return attention


def _biased(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """One additive mask of a bias, and a mask or causality."""
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
