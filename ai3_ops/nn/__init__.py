"""The classes of swapped modules: `ai3_ops.nn.Conv2d` is an `nn.Conv2d` computed by a chosen algorithm."""

from __future__ import annotations

from ai3_ops.nn.classes import OF_KINDS, TransformerEncoderLayer

globals().update({cls.__name__: cls for cls in OF_KINDS.values()})

__all__ = ["TransformerEncoderLayer", *(cls.__name__ for cls in OF_KINDS.values())]
