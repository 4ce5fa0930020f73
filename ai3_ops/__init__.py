"""ai3_ops: every way to compute a layer is an operator of its own, and a model's owner chooses the way, layer by layer."""

from __future__ import annotations

from ai3_ops import _library
