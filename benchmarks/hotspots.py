"""Where a layer's time goes: its module called over and over under `perf`, by function.

    python -m benchmarks.hotspots 'conv2d N=1 C=256 H=14 W=14 K=256 kernel=3 stride=1 pad=1 dilation=1 groups=1' winograd

Samples of the CPU clock, a thousand a second in every thread. Workers spin between calls, so that all threads' samples together
are the calls' time. Needs Linux's `perf` and the right to use it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks import measure  # first: it says how OpenMP's workers wait
from benchmarks.measure import Layer

# isort: split
import torch
from rich.console import Console

LEAST = 0.005  # share of the time below which functions of other libraries are summed up


def record(layer: Layer, algorithm: str, seconds: float) -> tuple[float, Counter[tuple[str, str]]]:
    """Seconds of a call, and how many samples fell into each (library, function)."""
    module, x = layer.module().eval(), layer.input()
    swapped = measure.swapped(layer, module, algorithm, x)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        data = Path(folder) / "perf.data"
        for _ in range(20):
            swapped(x)
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-p", str(os.getpid()), "-o", str(data)]
        with subprocess.Popen(command) as perf:
            while not data.exists() and perf.poll() is None:
                time.sleep(0.01)
            calls, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                swapped(x)
                calls += 1
            call = (time.perf_counter() - start) / calls
            perf.send_signal(signal.SIGINT)
        script = ["perf", "script", "-i", str(data), "-F", "ip,sym,dso", "--demangle"]
        lines = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    return call, Counter(map(_place, filter(None, map(str.strip, lines))))


def _place(line: str) -> tuple[str, str]:
    """(library, function) of "address function (path)"."""
    found = re.fullmatch(r"\S+ (.*) \((.*)\)", line)
    function, path = found.groups() if found else ("?", "?")
    return Path(path).name if path.startswith("/") else path, function


def _short(function: str) -> str:
    """Without template arguments and parameters, from the class on."""
    previous = ""
    while previous != function:
        previous, function = function, re.sub(r"<[^<>]*>|\([^()]*\)", "", function)
    parts = [part.strip() for part in function.split("::")]
    return "::".join([part for part in parts if part][-3:]).replace(" const", "")


def main() -> int:
    """Record and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", type=Layer, help="a line of benchmarks/shapes/*.txt")
    parser.add_argument("algorithm")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, default=3, help="(default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    call, samples = record(options.layer, options.algorithm, options.seconds)
    total = sum(samples.values())
    places: Counter[tuple[str, str]] = Counter()
    for (library, function), count in samples.items():
        own = library.startswith("_C") or count >= LEAST * total
        places[library, _short(function) if own else "the rest"] += count
    console = Console() if sys.stdout.isatty() else Console(width=180)
    rows = (
        (f"{call * 1e6 * count / total:.1f}", f"{count / total:.1%}", library, function)
        for (library, function), count in places.most_common()
        if count >= LEAST * total / 5
    )
    console.print(f"{options.layer}, {options.algorithm}: {call * 1e6:.1f} us a call", highlight=False)
    for line in measure.table(("us of each thread", "share", "library", "function"), rows, "rrll"):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
