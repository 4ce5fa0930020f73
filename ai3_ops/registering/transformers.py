"""The attention algorithms as an attention implementation of transformers models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops._torch import constant_when_compiled, pytree, users_level
from ai3_ops.operations.attention import AttentionCall
from ai3_ops.operations.plain_attention import Sight
from ai3_ops.selecting.choice import Algorithm


def register_transformers(algorithm: str | Algorithm = "default", name: str = "ai3") -> None:
    """Makes `attn_implementation="ai3"` one of transformers' attention implementations, with a mask function of its own.

    `algorithm` computes it: "default" where that gains, else PyTorch's scaled_dot_product_attention; another one always, with
    a RuntimeError for what it cannot do. `name` is what models ask for; one with "flash", "sdpa", "eager", "flex", "/" or "|"
    in it means something else to transformers and is a ValueError, as is an algorithm that does not exist. It may be called
    again, for other names.

    Masks are boolean, and are not made where causality says all; a sliding window never becomes one, with padding or without, so
    that it saves its work. `softcap` (Gemma 2) and `s_aux`, the sinks of gpt-oss, are computed, and their gradients. Attention
    weights are not returned. ImportError without transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ModuleNotFoundError as error:
        raise ImportError("ai3_ops.register_transformers needs transformers (pip install transformers)") from error

    if any(word in name for word in ("flash", "sdpa", "eager", "flex", "/", "|")):
        raise ValueError(f"ai3_ops.register_transformers: the name {name!r} means something else to transformers")
    chosen = Algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    AttentionInterface.register(name, _implementation(chosen))
    AttentionMaskInterface.register(name, _mask)


class _Window(Tensor):
    """A mask of padding, and of a sliding window, that attention reads as these; whatever else reads it gets a whole one."""

    seen: Tensor  # (B, 1, 1, keys), False where padded
    padded: bool
    sight: Sight

    @staticmethod
    def of(seen: Tensor, sight: Sight) -> _Window:
        """Of the sizes of the whole mask, which it has no memory for."""
        made = seen.expand(-1, 1, seen.shape[-1], -1).as_subclass(_Window)
        made.seen, made.padded, made.sight = seen, not bool(seen.all()), sight
        return made

    def whole(self) -> Tensor:
        """(B, 1, keys, keys)."""
        keys = self.seen.shape[-1]
        hidden = self.sight.hidden(keys, keys, self.seen.device)
        return self.seen.expand(-1, 1, keys, keys) if hidden is None else self.seen & ~hidden

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__" or func.__name__ in _METADATA:  # what compiled layers ask of it
            found = super().__torch_function__(func, types, args, kwargs or {})
            if not isinstance(found, Tensor):
                return found
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


_METADATA = frozenset(("size", "stride", "dim", "storage_offset", "is_contiguous", "untyped_storage", "data_ptr"))


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
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """As transformers' own for PyTorch's function; of padding that all see alike, and of sliding windows, a `_Window`.

    Models that do not ask for implementations get what they get by default: they add it to scores of their own.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    if not _asks(type(options.get("config"))):
        return eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device, **options,
        )  # fmt: skip
    whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    whole = whole and (attention_mask is None or attention_mask.shape[-1] == kv_length)
    causal, window = allow_is_causal_skip, local_size or 0
    may = whole and (causal or allow_is_bidirectional_skip) and not _is_traced(attention_mask)
    if may and (window or not causal) and kv_length > window and _slides(mask_function, window, kv_length, causal):
        if attention_mask is None:
            attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        sight = Sight() if not window else Sight(False, window - 1, 0) if causal else Sight(False, window, window)
        made = _Window.of(attention_mask[:, None, None].bool(), sight)
        if window or made.padded:
            return made
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        device=device, **options,
    )  # fmt: skip


@constant_when_compiled
def _asks(config: type) -> bool:
    """Whether all models of a class of configurations are known to ask for implementations, by the files of their classes."""
    from transformers import PreTrainedModel

    package, _, name = config.__module__.rpartition(".")
    files = [m for n, m in [*sys.modules.items()] if n.startswith(f"{package}.modeling_") and m is not None]
    kinds: list[Any] = [
        kind
        for file in files
        for kind in vars(file).values()
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == file.__name__
    ]
    asks = name.startswith("configuration_") and bool(kinds)
    asks = asks and all(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)
    asks = asks and all(kind._supports_sdpa or kind._supports_attention_backend for kind in kinds)
    if not asks and config not in _SAID:
        _SAID.add(config)
        warnings.warn(
            f"ai3_ops.register_transformers: models of {config.__name__} are not known to ask for an implementation, as those do "
            'not that have attention of their own: they get masks as with attn_implementation="eager"',
            stacklevel=users_level(),
        )
    return asks


_SAID: set[type] = set()


def _is_traced(mask: Tensor | None) -> bool:
    """Whether a call is recorded, for others that may be padded otherwise, or its tensors have no values to ask for."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if mask is None:
        return False
    return type(mask) is not Tensor or mask.is_meta or (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _slides(mask_function: Any, window: int, length: int, causal: bool) -> bool:
    """Whether a mask of a local size is a window, not one of chunks: those differ in one of two neighbouring rows.

    A causal one has `window` keys, one to both sides as many before and as many behind; 0: it hides nothing.
    """
    rows = torch.tensor([length // 2, max(length - 2, 0), length - 1])[:, None]
    keys = torch.arange(length)[None]
    zero = torch.zeros(1, 1, dtype=torch.long)
    behind = rows - keys
    wanted = (behind >= 0) & (behind < window) if causal else behind.abs() <= (window or length)
    return bool(torch.equal(mask_function(zero, zero, rows, keys).expand_as(wanted), wanted))


def _implementation(algorithm: Algorithm) -> Callable[..., tuple[Tensor, None]]:
    call = AttentionCall()
    call.choose(algorithm)  # ValueError where it does not exist
    call.strict = algorithm.name != "default"
    own = None if algorithm.name == "default" else algorithm.name
    slides = own is None or any(p.name == "window_left" for p in registry.parameters("attention", own))

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
        **_: Any,
    ) -> tuple[Tensor, None]:
        queries, keys = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = queries > 1 and attention_mask is None and causal
        options: dict[str, Any] = {"softcap": softcap} if softcap else {}
        mask = attention_mask
        if isinstance(attention_mask, _Window):
            sight = attention_mask.sight
            mask = attention_mask.seen if attention_mask.padded else None
            mask = mask if slides or sight.window_left < 0 else attention_mask.whole()
            if slides and sight.window_left >= 0:
                options |= {"window_left": sight.window_left, "window_right": sight.window_right}
        if causal and keys > queries:  # a cache that is empty yet
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
        if position_bias is not None:
            mask, causal = _biased(position_bias, mask, causal), False
        grouped = query.shape[1] != key.shape[1]
        if s_aux is not None:
            options["sinks"] = s_aux.to(query.dtype)
        if options:
            # Of `default`, what computes more than PyTorch's function does.
            operator: Any = registry.operator_named(f"attention_{own or ('math' if query.is_cuda else 'flash')}")
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
