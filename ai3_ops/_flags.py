"""Compiler flags of the kernels: for CMakeLists.txt (which runs this file) and for users' algorithms (ai3_ops.register)."""

from __future__ import annotations

import platform
import sys

COMMON = ["-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wextra"]


def levels() -> dict[str, list[str]]:
    """Compiler flags of each instruction-set level that this architecture has, best first."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    avx512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
    return {
        **({"avx512": avx512.split(), "avx2": ["-mavx2", "-mfma", "-mf16c"]} if x86 else {}),
        "portable": [],
    }


if __name__ == "__main__":  # one semicolon-separated list
    lists = {"common": COMMON, "levels": list(levels())} | {f"flags:{name}": flags for name, flags in levels().items()}
    print(";".join(lists.get(sys.argv[1], [])))
