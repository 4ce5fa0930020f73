"""Seconds of calls on a GPU: by its own events, or as the host sees them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Function = Callable[[], Any]


def event_seconds(call: Function, repeats: int = 1) -> float:
    """Of one call on the current device, as the GPU tells the time, of several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3 / repeats)


def wall_seconds(call: Function) -> float:
    """Of one call, from the host to the end on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(calls: Sequence[Function], seconds: Callable[[Function], float], turns: int = 9) -> list[float]:
    """The median of `seconds(call)` of each, which take turns after three calls each that warm up."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    for _ in range(turns):
        for call, seen in zip(calls, times, strict=True):
            seen.append(seconds(call))
    return [statistics.median(seen) for seen in times]
