"""torchvision's `shifted_window_attention` (Swin, Swin V2) as one call of attention: what is around it stays PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "torchvision.models.swin_transformer:shifted_window_attention"


def attend(
    call: Any,
    input: Tensor,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    relative_position_bias: Tensor,
    window_size: Sequence[int],
    num_heads: int,
    shift_size: Sequence[int],
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    qkv_bias: Tensor | None = None,
    proj_bias: Tensor | None = None,
    logit_scale: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """The function of an image (N, H, W, C) with `call` for attention, or torchvision's own where that is faster."""
    n, height, width, channels = input.shape
    window = window_size[0] * window_size[1]
    below, right = (-size % of for size, of in zip((height, width), window_size, strict=True))
    rows, columns = (height + below) // window_size[0], (width + right) // window_size[1]
    if call.is_free and (reason := _left(call, input, relative_position_bias, n * rows * columns * num_heads, window)):
        from torchvision.models.swin_transformer import shifted_window_attention

        call.count_left(reason)
        return shifted_window_attention(
            input, qkv_weight, proj_weight, relative_position_bias, list(window_size), num_heads, list(shift_size),
            attention_dropout, dropout, qkv_bias, proj_bias, logit_scale, training,
        )  # fmt: skip
    sizes = zip(shift_size, (rows, columns), strict=True)
    shift = [0 if count <= 1 else by for by, count in sizes]  # one window is not shifted
    x = F.pad(input, (0, 0, 0, right, 0, below))
    x = x.roll((-shift[0], -shift[1]), (1, 2)) if any(shift) else x
    x = x.unflatten(2, (columns, window_size[1])).unflatten(1, (rows, window_size[0]))
    x = x.transpose(2, 3).reshape(n, rows * columns, window, channels)
    if logit_scale is not None and qkv_bias is not None:  # keys have none there
        qkv_bias = torch.cat([b * (i != 1) for i, b in enumerate(qkv_bias.chunk(3))])
    qkv = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).permute(3, 0, 1, 4, 2, 5)
    q, k, v = qkv.unbind()
    scale = (channels // num_heads) ** -0.5
    if logit_scale is not None:
        q = F.normalize(q, dim=-1) * logit_scale.clamp(max=math.log(100.0)).exp()
        k, scale = F.normalize(k, dim=-1), 1.0
    mask = relative_position_bias.to(q.dtype)
    if any(shift):
        mask = mask + _parts(x, (rows, columns), window_size, shift).to(q.dtype)
    else:  # one mask for all windows
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = call.run_or_leave(q, k, v, mask, attention_dropout if training else 0.0, False, scale, False)
    y = F.linear(y.transpose(-3, -2).flatten(-2), proj_weight, proj_bias)
    y = F.dropout(y, dropout, training).view(n, rows, columns, *window_size, channels)
    y = y.transpose(2, 3).reshape(n, height + below, width + right, channels)
    y = y.roll((shift[0], shift[1]), (1, 2)) if any(shift) else y
    return y[:, :height, :width].contiguous()


def _parts(like: Tensor, counts: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """(windows, 1, L, L): -100 between parts of a shifted window that are no neighbours in the image."""
    parts = []
    for count, size, by in zip(counts, window, shift, strict=True):
        line = torch.arange(count * size, device=like.device) - count * size
        parts.append((line >= -size).int() + (line >= -by).int() if by else torch.zeros_like(line))
    part = (parts[0][:, None] * 3 + parts[1]).unflatten(1, (counts[1], window[1])).unflatten(0, (counts[0], window[0]))
    part = part.transpose(1, 2).reshape(counts[0] * counts[1], -1)
    return ((part[:, :, None] != part[:, None]) * -100.0)[:, None]


def _left(call: Any, input: Tensor, bias: Tensor, heads: int, window: int) -> str:
    """Why torchvision's function computes a call of `default`, "" where that does not."""
    if torch.is_grad_enabled() and bias.requires_grad:
        return "PyTorch is faster where a bias is trained"
    return call.why_sizes_left(input, heads, window, window)
