"""Writes the tables of algorithms, from the registry, between the markers in README.md and docs/algorithms/README.md.

    python docs/tables.py            # `make docs`
    python docs/tables.py --check    # only says what is out of date

The CPU column is what the registry holds. The CUDA column is what csrc/cuda holds, one file for each algorithm under
its name, so that the tables do not depend on whether this build has a CUDA part.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ai3_ops import registry

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- algorithms: written by docs/tables.py -->", "<!-- end of algorithms -->"


def cuda_algorithms() -> set[tuple[str, str]]:
    """(operation, algorithm) of every file under csrc/cuda."""
    files = [p for p in (ROOT / "csrc/cuda").glob("*/*") if p.suffix in (".cu", ".cpp")]
    files.remove(ROOT / "csrc/cuda/attention/sparse.cu")  # what three of them call
    return {(p.parent.name, p.stem) for p in files if p.parent.name != "core"}


def overview() -> str:
    """One row for each operation, for the README."""
    cuda = cuda_algorithms()
    rows = ["| operation | on CPU | on CUDA |", "|---|---|---|"]
    for operation in registry.operations():
        link = {
            a.name: f"[{a.name}](docs/algorithms/{operation}/{a.name}.md)"
            for a in registry.algorithms(operation, "cpu")
            if not a.python
        }
        on_cuda = ", ".join(sorted(name for o, name in cuda if o == operation))
        rows.append(f"| `{operation}` | {', '.join(link.values())} | {on_cuda} |")
    return "\n".join(rows)


def details() -> str:
    """One row for each algorithm, for its index."""
    cuda = cuda_algorithms()
    rows = [
        "| operation | algorithm | CPU | CUDA | accuracy | deterministic | dtypes |",
        "|---|---|---|---|---|---|---|",
    ]
    found = {(a.operation, a.name): a for a in registry.algorithms(device="cpu") if not a.python}
    for operation, name in sorted(found.keys() | cuda):
        a = found.get((operation, name))
        page = f"[{name}]({operation}/{name}.md)"
        on_cuda = "yes" if (operation, name) in cuda else ""
        if a is None:
            rows.append(f"| `{operation}` | {page} | | {on_cuda} | | | |")
            continue
        accuracy = f"within {a.error_bound:.0e}" if a.accuracy == "bounded" else a.accuracy
        dtypes = "all" if len(a.dtypes) == 4 else ", ".join(a.dtypes)
        deterministic = "yes" if a.deterministic else "no"
        rows.append(f"| `{operation}` | {page} | yes | {on_cuda} | {accuracy} | {deterministic} | {dtypes} |")
    return "\n".join(rows)


def render() -> dict[Path, str]:
    """Each file with its table as it should be."""
    files = {ROOT / "README.md": overview(), ROOT / "docs/algorithms/README.md": details()}
    between = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    return {path: between.sub(lambda _, table=table: table + "\n", path.read_text()) for path, table in files.items()}


if __name__ == "__main__":
    stale = [path for path, text in render().items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("".join(f"{path.name} is out of date: run `make docs`\n" for path in stale) or 0)
    for path in stale:
        path.write_text(render()[path])
        print(path.relative_to(ROOT))
