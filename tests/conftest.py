"""Settings of every test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_state():
    """The same random numbers in every test, one thread (tests run side by side), the process's switches as they were."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
