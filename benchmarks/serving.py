"""Throughput of one network that several callers share: ours, loaded from its file, beside one session of onnxruntime.

    python -m benchmarks.serving [--models resnet50 ...] [--seconds 3] [--turns 3]

Each engine runs in a process of its own, callers are its threads, turns alternate; the medians of requests a second and of the
middle and the 99th percentile of a request's milliseconds are printed as a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NETWORKS = ("resnet50", "mobilenet_v3_large", "squeezenet1_1")


def worker(engine: str, folder: Path, callers: int, threads: int, seconds: float) -> None:
    """One turn; prints requests a second and the milliseconds of each request."""
    from ai3_ops.cli import peers

    if engine == "onnxruntime":
        call, _ = peers.onnxruntime(folder, threads)
    else:
        import torch

        import ai3_ops

        torch.set_num_threads(threads)
        model, x = ai3_ops.load(folder / "model.ai3"), torch.load(folder / "inputs.pt", weights_only=True)

        def call() -> object:
            with torch.inference_mode():
                return model(x)

    times: list[list[float]] = [[] for _ in range(callers)]
    begin = threading.Barrier(callers + 1)

    def ask(own: list[float]) -> None:
        call()  # here, not in the main thread, whose OpenMP threads would count against these (docs/serving.md)
        begin.wait()
        while (start := time.perf_counter()) < end[0]:
            call()
            own.append(time.perf_counter() - start)

    end = [0.0]
    asking = [threading.Thread(target=ask, args=(own,)) for own in times]
    for thread in asking:
        thread.start()
    end[0] = time.perf_counter() + seconds + 0.2
    begin.wait()
    start = time.perf_counter()
    for thread in asking:
        thread.join()
    took, every = time.perf_counter() - start, sorted(t for own in times for t in own)
    middle, late = every[len(every) // 2], every[min(len(every) - 1, len(every) * 99 // 100)]
    print(json.dumps({"rate": len(every) / took, "median": middle * 1e3, "p99": late * 1e3}))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=NETWORKS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--settings", nargs="+", default=["1x2", "2x1", "4x1", "4x2"], help="callers x threads of a call"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        engine, folder, callers, threads = given.worker
        return worker(engine, Path(folder), int(callers), int(threads), given.seconds)
    import ai3_ops
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
            for callers, threads in (map(int, setting.split("x")) for setting in given.settings):
                turns: dict[str, list[dict[str, float]]] = {"ours": [], "onnxruntime": []}
                for i in range(given.turns):
                    for engine in (*turns,) if i % 2 == 0 else reversed((*turns,)):
                        asked = [
                            "--worker",
                            engine,
                            folder,
                            str(callers),
                            str(threads),
                            "--seconds",
                            str(given.seconds),
                        ]
                        command = [sys.executable, "-m", "benchmarks.serving", *asked]
                        done = subprocess.run(command, capture_output=True, text=True, check=True)
                        turns[engine].append(json.loads(done.stdout.splitlines()[-1]))
                ours, theirs = (
                    {key: statistics.median(t[key] for t in turns[engine]) for key in ("rate", "median", "p99")}
                    for engine in turns
                )
                cells = [f"{ours['rate']:.1f}", f"{theirs['rate']:.1f}", f"{ours['rate'] / theirs['rate']:.2f}"]
                cells += [f"{t['median']:.2f}, {t['p99']:.2f}" for t in (ours, theirs)]
                print(f"| {name} | {callers} x {threads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
