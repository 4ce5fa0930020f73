"""Recurrent operators at sizes for which a graph was not captured."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StatesChecked(TorchFunctionMode):
    """Raises where the states of `lstm` are of another batch than its input.

    A module checks that before it calls the operator, which does not: oneDNN's reads and writes beyond such states. A captured
    graph holds the operator alone, and states made for the example's sizes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, after the check."""
        if func is torch.ops.aten.lstm.input:
            input, states, batch = args[0], args[1], args[0].shape[0 if args[8] else 1]
            if any(state.shape[1] != batch for state in states):
                raise RuntimeError(f"lstm of {tuple(input.shape)} with states {[tuple(s.shape) for s in states]}")
        return func(*args, **kwargs or {})
