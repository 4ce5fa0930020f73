"""Serves a saved network from one process for each core, which share its weights; prints images a second.

    python -m ai3_ops optimize resnet50 --output resnet50.ai3
    python examples/serving.py resnet50.ai3 1 3 224 224

`load` maps the file, and the processes are forked from the one that has mapped it: its weights are in memory once. Each computes
with one thread, so that no request waits for another one's. What answers requests, an HTTP server say, submits to `pool`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

import ai3_ops

model: torch.nn.Module


def answer(input: torch.Tensor) -> torch.Tensor:
    """One request, in a process of the pool."""
    with torch.inference_mode():
        return model(input)


def serve(path: str, sizes: list[int], requests: int = 64) -> tuple[float, list[torch.Tensor]]:
    """Answers so many requests as they come; requests a second, and the answers."""
    global model
    torch.set_num_threads(1)  # before any call: threads of OpenMP do not survive a fork
    model = ai3_ops.load(path)
    workers = len(os.sched_getaffinity(0))
    inputs = [torch.randn(sizes, generator=torch.Generator().manual_seed(i)) for i in range(requests)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(answer, inputs[:workers]))  # the first call of each process plans
        start = time.perf_counter()
        answers = list(pool.map(answer, inputs))
        return requests / (time.perf_counter() - start), answers


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: serving.py <file> <sizes of the input>...")
    rate, _ = serve(sys.argv[1], [int(n) for n in sys.argv[2:]])
    print(f"{rate:.1f} requests a second")
