"""Fixtures of the tests of ai3_ops.optimize."""

from __future__ import annotations

import pytest
import torch
from nets import Residual

from ai3_ops.optimizing import mixed_batches, pipeline, planned, whole


@pytest.fixture(autouse=True)
def gains(monkeypatch, built_in_only):
    """Every comparison says that the rewritten one is faster, so that it is what runs here, however small the network."""
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
    monkeypatch.setattr(whole, "interleaved", lambda *_, **__: [1.0, 1.0, 3.0, 2.0])  # steps of decoding
    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: False)
    monkeypatch.setattr(pipeline, "_compared", {})
    monkeypatch.setattr(pipeline, "PATIENCE", float("inf"))  # budgets are small, to measure little
    monkeypatch.setattr(planned, "PLAN_SECONDS", float("inf"))  # however busy the machine


@pytest.fixture
def faster(monkeypatch):
    """Programs and what `optimize` makes of a model are always faster than PyTorch."""
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
    monkeypatch.setattr(pipeline, "_gain", lambda *_: 2.0)


@pytest.fixture
def residual():
    return Residual().eval(), torch.randn(2, 8, 6, 6)
