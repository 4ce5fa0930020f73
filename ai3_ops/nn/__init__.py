"""The classes of swapped modules: `ai3_ops.nn.Conv2d` is an `nn.Conv2d` computed by a chosen algorithm."""

from __future__ import annotations

from ai3_ops.nn.classes import OF_KINDS, TransformerEncoder, TransformerEncoderLayer

globals().update({cls.__name__: cls for cls in OF_KINDS.values()})

__all__ = ["TransformerEncoder", "TransformerEncoderLayer", *(cls.__name__ for cls in OF_KINDS.values())]
