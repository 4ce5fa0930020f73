"""Whether the processors give what they gave at best.

Two processors of a virtual machine may share one core for seconds or minutes, and then take up to twice as long side by side.
What is measured meanwhile says nothing about the engines that are compared: benchmarks begin their turns at other times.
"""

from __future__ import annotations

import time

import torch

SIZE, REPEATS = 384, 5  # of a matrix product, of which the fastest counts: 3 ms on two cores
SLOWER = 1.15  # times the best: disturbed
WAIT = 20.0  # seconds at most


class Steady:
    """Of a number of threads, PyTorch's of the process that asks."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._matrix = torch.rand(SIZE, SIZE)
            self._product = torch.empty(SIZE, SIZE)
        threads, together = torch.get_num_threads(), self._seconds()
        torch.set_num_threads(1)
        alone = self._seconds()
        torch.set_num_threads(threads)
        # Disturbed from the start, maybe: then half of what threads gain over one is aimed at, until something better is seen.
        self.best = min(together, alone / (1 + (threads - 1) * 0.5))

    def _seconds(self) -> float:
        def once() -> float:
            start = time.perf_counter()
            torch.mm(self._matrix, self._matrix, out=self._product)
            return time.perf_counter() - start

        return min(once() for _ in range(REPEATS))

    def now(self) -> bool:
        """Whether a product takes at most `SLOWER` times as long as at best."""
        seconds = self._seconds()
        self.best = min(self.best, seconds)
        return seconds <= SLOWER * self.best

    def wait(self) -> bool:
        """Until it is so, or `WAIT` seconds; whether it is. Machines whose threads always share cores are waited for once."""
        end = time.monotonic() + WAIT
        while not self.now():
            if time.monotonic() > end:
                self.best = self._seconds()
                return False
            time.sleep(0.1)
        return True
