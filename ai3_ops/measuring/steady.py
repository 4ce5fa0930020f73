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
    """Of a number of threads: PyTorch's of the process that asks, when it begins to ask."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._matrix = torch.rand(SIZE, SIZE)
            self._product = torch.empty(SIZE, SIZE)
        self._threads = torch.get_num_threads()
        together, alone = self._seconds(), self._seconds(threads=1)
        # Disturbed from the start, maybe: then half of what threads gain over one is aimed at, until something better is seen.
        self.best = min(together, alone / (1 + (self._threads - 1) * 0.5))

    def _seconds(self, threads: int | None = None) -> float:
        def once() -> float:
            start = time.perf_counter()
            torch.mm(self._matrix, self._matrix, out=self._product)
            return time.perf_counter() - start

        of_caller = torch.get_num_threads()  # what was measured before may have left another number
        torch.set_num_threads(threads or self._threads)
        try:
            return min(once() for _ in range(REPEATS))
        finally:
            torch.set_num_threads(of_caller)

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
