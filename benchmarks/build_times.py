"""The time that each file of the last build took to compile, from Ninja's log: python -m benchmarks.build_times [build/native]

Wall time of each compiler run: on a machine with nothing else to do, and without ccache (CCACHE_DISABLE=1), its processor time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path


def times(log: Path) -> dict[str, float]:
    """Seconds by output file; of a file that was built again, the last time."""
    lines = log.read_text().splitlines()
    if not lines or not lines[0].startswith("# ninja log"):
        raise ValueError(f"{log} is no log of Ninja")
    fields = [line.split("\t") for line in lines[1:]]
    return {output: (int(end) - int(start)) / 1000 for start, end, _, output, _ in fields if output.endswith(".o")}


def main() -> None:
    """Print the slowest files, each target and the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="?", type=Path, default=Path("build/native"))
    parser.add_argument("--most", type=int, default=20, help="how many files are listed")
    options = parser.parse_args()
    seconds = times(options.build / ".ninja_log")
    targets: dict[str, float] = defaultdict(float)
    for output, time in seconds.items():
        targets[output.removeprefix("CMakeFiles/").split(".dir/")[0]] += time
    for output, time in sorted(seconds.items(), key=lambda item: -item[1])[: options.most]:
        print(f"{time:8.1f} s  {output.removeprefix('CMakeFiles/').replace('.dir/', ': ', 1)}")
    for target, time in sorted(targets.items(), key=lambda item: -item[1]):
        print(f"{time:8.1f} s  all of {target}")
    print(f"{sum(seconds.values()):8.1f} s  in all")


if __name__ == "__main__":
    main()
