"""The one list of native sources and flags, for setup.py and CMakeLists.txt (which runs this file).

Files are found by their place: a new algorithm is a new file and nothing else.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # LibTorch's stable ABI as of 2.11
_flags = runpy.run_path(str(ROOT / "ai3_ops/_flags.py"))  # without importing the package, which is not built yet
COMMON: list[str] = _flags["COMMON"]
levels: Callable[[], dict[str, list[str]]] = _flags["levels"]


def kernels() -> list[str]:
    """Torch-free kernel files, compiled once per level."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/algos").rglob("*.cpp"))


def glue() -> list[str]:
    """Schemas, checks and the way from tensors to kernels."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/ops").rglob("*.cpp"))


def cuda() -> list[str]:
    """CUDA kernels and their glue."""
    return sorted(str(p.relative_to(ROOT)) for s in ("*.cu", "*.cpp") for p in (ROOT / "csrc/cuda").rglob(s))


if __name__ == "__main__":  # for CMake: one semicolon-separated list
    what = sys.argv[1]
    if what.startswith("flags:"):
        print(";".join(levels().get(what.removeprefix("flags:"), [])))
    else:
        print(";".join({"levels": list(levels()), "kernels": kernels(), "glue": glue(), "common": COMMON}[what]))
