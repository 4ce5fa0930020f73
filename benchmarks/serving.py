"""Throughput of one network that several callers share: ours, loaded from its file, beside one session of onnxruntime.

    python -m benchmarks.serving [--models resnet50 ...] [--seconds 3] [--turns 3]

Each engine runs in a process of its own; callers are its threads ("2x1" are two, with one thread for a call) or processes
("2px1"): ours are forked after loading, onnxruntime's load for themselves. Turns alternate; the medians of requests a second
and of the middle and the 99th percentile of a request's milliseconds are printed as a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.dummy
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ai3_ops

SETTING = re.compile("([1-9][0-9]*)(p?)x([1-9][0-9]*)")
NETWORKS = ("resnet50", "mobilenet_v3_large", "squeezenet1_1")


def worker(engine: str, folder: Path, asked: str, seconds: float) -> None:
    """One turn; prints requests a second and the milliseconds of each request."""
    from ai3_ops.cli import peers

    callers, processes, threads = SETTING.fullmatch(asked).groups()  # type: ignore[union-attr]
    together: Any = multiprocessing.get_context("fork") if processes else multiprocessing.dummy

    def ready() -> Callable[[], object]:
        if engine == "onnxruntime":
            return peers.onnxruntime(folder, int(threads))[0]
        torch.set_num_threads(int(threads))
        model, x = ai3_ops.load(folder / "model.ai3"), torch.load(folder / "inputs.pt", weights_only=True)

        def call() -> object:
            with torch.inference_mode():
                return model(x)

        return call

    begin, results = together.Barrier(int(callers)), together.Queue()
    # Processes are forked from the one that has loaded; threads of a session of onnxruntime do not survive that.
    shared = ready() if engine == "ours" or not processes else None

    def ask() -> None:
        call, own = shared or ready(), []
        call()  # here, not in the main thread, whose OpenMP threads would count against these (docs/serving.md)
        begin.wait()
        first = time.perf_counter()
        while (start := time.perf_counter()) < first + seconds:
            call()
            own.append(time.perf_counter() - start)
        results.put((len(own) / (time.perf_counter() - first), own))

    asking = [together.Process(target=ask) for _ in range(int(callers))]
    for caller in asking:
        caller.start()
    answered = [results.get() for _ in asking]
    for caller in asking:
        caller.join()
    every = sorted(t for _, own in answered for t in own)
    middle, late = every[len(every) // 2], every[min(len(every) - 1, len(every) * 99 // 100)]
    print(json.dumps({"rate": sum(rate for rate, _ in answered), "median": middle * 1e3, "p99": late * 1e3}))


def setting(text: str) -> str:
    """An argument such as 2x1 or 2px1."""
    if not SETTING.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: needs callers x threads of a call, as 2x1, or 2px1 for processes")
    return text


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", nargs="+", default=["1x2", "2x1", "4x1", "4x2", "2px1"], type=setting)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker[0], Path(given.worker[1]), given.worker[2], given.seconds)
    from ai3_ops.cli import bench, models

    print(
        "| network | callers x threads | ours, requests/s | onnxruntime | ratio | ours, ms: median, p99 | onnxruntime |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            named = models.named(name)
            bench.prepare(named, ["optimize", "onnxruntime"], Path(folder))
            fast = ai3_ops.optimize(named.model, named.inputs, progress=False)
            ai3_ops.save(fast, Path(folder) / "model.ai3")
            for each in given.settings:
                turns: dict[str, list[dict[str, float]]] = {"ours": [], "onnxruntime": []}
                for i in range(given.turns):
                    for engine in (*turns,) if i % 2 == 0 else reversed((*turns,)):
                        asked = ["--worker", engine, folder, each, "--seconds", str(given.seconds)]
                        command = [sys.executable, "-m", "benchmarks.serving", *asked]
                        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
                        turns[engine].append(json.loads(done.stdout.splitlines()[-1]))
                ours, theirs = (
                    {key: statistics.median(t[key] for t in turns[engine]) for key in ("rate", "median", "p99")}
                    for engine in turns
                )
                cells = [f"{ours['rate']:.1f}", f"{theirs['rate']:.1f}", f"{ours['rate'] / theirs['rate']:.2f}"]
                cells += [f"{t['median']:.2f}, {t['p99']:.2f}" for t in (ours, theirs)]
                print(
                    f"| {name} | {each.replace('p', ' processes').replace('x', ' x ')} | {' | '.join(cells)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
