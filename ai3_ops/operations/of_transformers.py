"""Attention modules of transformers that multiply matrices themselves: which calls of them one algorithm computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ai3_ops._torch import is_cast
from ai3_ops.calls.spec import leads_in


class Entry(NamedTuple):
    """A module class whose forward, given hidden states first, is attention that some algorithms compute."""

    algorithms: tuple[str, ...]  # the first is what `default` means there
    heads: str  # the attribute that says how many
    left: Callable[..., str]  # why its own forward computes a call, "" where it does not; of the forward's arguments
    forward: Callable[..., Any]  # given the module, the call and the forward's arguments
    # Why `default` leaves hidden states to the class, given whether it trains.
    slower: Callable[[Any, Tensor, bool], str] = lambda module, hidden, trains: ""

    def knows(self, cls: type) -> bool:
        """Whether the forward of a class has no other arguments, as it has in other versions of transformers."""
        _, *theirs = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
        _, _, *ours = inspect.signature(self.forward).parameters.values()
        names = [parameter.name for parameter in ours if parameter.kind is not parameter.VAR_KEYWORD]
        return [p.name for p in theirs if p.kind is not p.VAR_KEYWORD] == names


def split(x: Tensor, heads: int) -> Tensor:
    """(B, ..., C) as (B, heads, tokens, C / heads), without a copy."""
    return x.flatten(1, -2).unflatten(-1, (heads, -1)).transpose(1, 2)


def recorded() -> Collection[str]:
    """What the model that runs was asked to return of its layers, as "attentions": hooks look at what these return."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return () if collector is None else collector.get() or ()


def _weights_are_asked_for() -> bool:
    return "attentions" in recorded()


def _leads_in(hidden: Tensor) -> bool:
    """Whether PyTorch leads in their dtype, or autocast's."""
    cast = torch.is_autocast_enabled("cpu") and is_cast(hidden.dtype)
    dtype = torch.get_autocast_dtype("cpu") if cast else hidden.dtype
    return leads_in(dtype)


def _dropout(module: Any) -> float:
    return float(module.dropout) if module.training else 0.0


_WEIGHTS = "the weights are asked for"


# Longformer, and LED's encoder ----------------------------------------------------------------------------------------
def _longformer_left(
    m: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    is_index_masked: Any = None,
    is_index_global_attn: Any = None,
    is_global_attn: Any = None,
    output_attentions: bool = False,
) -> str:
    if output_attentions:
        return _WEIGHTS
    return "needs is_index_masked, as the model gives it" if is_index_masked is None else ""


def _longformer(
    m: Any,
    call: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Keys and values of all tokens, also for global ones; of the queries for these no others are projected."""
    own: dict[str, Any] = {"window": 2 * m.one_sided_attn_window_size, "key_padding": is_index_masked}

    def project(name: str) -> Tensor:
        return split(getattr(m, name)(hidden_states), m.num_heads)

    q, k, v = map(project, ("query", "key", "value"))
    if is_global_attn:
        assert is_index_global_attn is not None
        own["global_mask"] = is_index_global_attn
        own |= {"global_key": project("key_global"), "global_value": project("value_global")}
        if torch.compiler.is_compiling():  # how many there are is not known
            own["global_query"] = project("query_global")
        else:
            found = m.query_global(hidden_states[is_index_global_attn])
            rows = found.new_zeros(hidden_states.shape).masked_scatter(is_index_global_attn[..., None], found)
            own["global_query"] = split(rows, m.num_heads)
    return (call.own(q, k, v, dropout=_dropout(m), **own).transpose(1, 2).flatten(2),)


# BigBird --------------------------------------------------------------------------------------------------------------
def _bigbird_left(m: Any, hidden_states: Tensor, band_mask: Any = None, *_: Any, **options: Any) -> str:
    if options.get("output_attentions") or _weights_are_asked_for():
        return _WEIGHTS
    if m.training:
        return "blocks are drawn anew in training"
    if hidden_states.shape[1] % m.block_size:
        return "needs a length that blocks divide"
    return "" if hidden_states.shape[1] // m.block_size > 5 + 2 * m.num_random_blocks else "needs more blocks"


def _bigbird(
    m: Any,
    call: Any,
    hidden_states: Tensor,
    band_mask: Any,
    from_mask: Tensor,
    to_mask: Tensor,
    from_blocked_mask: Any = None,
    to_blocked_mask: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (split(f(hidden_states), m.num_attention_heads) for f in (m.query, m.key, m.value))
    own = {"block_size": m.block_size, "random_blocks": m.num_random_blocks, "random": "hf_eval"}
    y = call.own(q, k, v, to_mask > 0, **own) * from_mask
    return y.transpose(1, 2).flatten(2), None


# SAM ------------------------------------------------------------------------------------------------------------------
def _sam_left(m: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> str:
    return _WEIGHTS if output_attentions or _weights_are_asked_for() else ""


def _sam(m: Any, call: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
    return _sam_dropping(m, call, hidden_states, _dropout(m))


def _sam_sdpa(m: Any, call: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
    """Of their classes that call PyTorch's function, without dropout."""
    return _sam_dropping(m, call, hidden_states, 0.0)


def _sam_dropping(m: Any, call: Any, hidden_states: Tensor, dropout: float) -> tuple[Tensor, None]:
    """With positions of rows and of columns as they are, never added to (B, heads, tokens, tokens)."""
    batch, height, width, _ = hidden_states.shape
    q, k, v = (split(t, m.num_attention_heads) for t in m.qkv(hidden_states).chunk(3, -1))
    own = {}
    if m.use_rel_pos:
        by_h = m.get_rel_pos(height, height, m.rel_pos_h).to(q.dtype)
        by_w = m.get_rel_pos(width, width, m.rel_pos_w).to(q.dtype)
        grid = q.unflatten(2, (height, width))
        own["rel_h"] = torch.einsum("bnhwc,hkc->bnhwk", grid, by_h).flatten(2, 3)
        own["rel_w"] = torch.einsum("bnhwc,wkc->bnhwk", grid, by_w).flatten(2, 3)
    y = call.own(q, k, v, scale=m.scale, dropout=dropout, **own)
    return m.proj(y.transpose(1, 2).reshape(batch, height, width, -1)), None


def _sam_slower(m: Any, hidden: Tensor, trains: bool) -> str:
    """Both passes gain over long sequences alone, of which the class makes all scores more than once."""
    batch, height, width, _ = hidden.shape
    tokens, scores = height * width, batch * m.num_attention_heads * (height * width) ** 2
    if _leads_in(hidden):
        return _FASTER
    if trains:
        return "" if tokens >= 1600 and scores >= 2**23 else f"{_FASTER}, in training"
    return "" if scores >= 2**18 else _FASTER


_FASTER = "the class is faster for such sizes"
_LONGFORMER = Entry(("longformer",), "num_heads", _longformer_left, _longformer)
_SAM = Entry(("flash", "math"), "num_attention_heads", _sam_left, _sam, _sam_slower)
_SAM_SDPA = _SAM._replace(forward=_sam_sdpa)
_MODELS = "transformers.models."
ENTRIES = {
    f"{_MODELS}longformer.modeling_longformer:LongformerSelfAttention": _LONGFORMER,
    f"{_MODELS}led.modeling_led:LEDEncoderSelfAttention": _LONGFORMER,
    f"{_MODELS}big_bird.modeling_big_bird:BigBirdBlockSparseAttention": Entry(
        ("bigbird",), "num_attention_heads", _bigbird_left, _bigbird
    ),
    f"{_MODELS}sam.modeling_sam:SamVisionAttention": _SAM,
    f"{_MODELS}sam.modeling_sam:SamVisionSdpaAttention": _SAM_SDPA,
    f"{_MODELS}sam_hq.modeling_sam_hq:SamHQVisionAttention": _SAM,
    f"{_MODELS}sam_hq.modeling_sam_hq:SamHQVisionSdpaAttention": _SAM_SDPA,
}
