"""Draws which packages of ai3_ops import which, between the markers in docs/decisions/layers.md, and finds what breaks the order.

    python docs/imports.py            # `make docs`
    python docs/imports.py --check    # only says what is out of date or out of order

Sources are read, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ai3_ops"
PAGE = ROOT / "docs/decisions/layers.md"
BEGIN, END = "<!-- imports: written by docs/imports.py -->", "<!-- end of imports -->"

# Each may import those before it. "root" are the modules beside them; "ai3_ops" is what `import ai3_ops` runs.
ORDER = (
    "root", "selecting", "calls", "operations", "registering", "nn", "surveying", "measuring", "tuning", "swapping", "graph",
    "programs", "explaining", "optimizing", "checking", "ai3_ops", "cli",
)  # fmt: skip

# Imports of our own modules inside of functions, and why.
LATE = {
    (
        "optimizing.optimize",
        "optimizing.whole",
    ): "a quarter of the time that importing the package takes, of `optimize` alone",
    ("optimizing.optimize", "optimizing.saved"): "the same, of `save` and `load`",
    ("checking.check", "checking.checks"): "the same, of `check`",
    ("cli.peers", ""): "an engine's process holds this package where it is the engine",
}
# Imports for a checker of types that go up.
TYPES = {
    ("registry", "operations.base"): "the rules that operations leave with the registry",
}


class Import(NamedTuple):
    """One module's import of another, both named without `ai3_ops.`; the package itself is ""."""

    importer: str
    imported: str
    when: str  # "first", "late" (in a function) or "types"


def modules(package: Path) -> dict[str, Path]:
    """The modules of a package by their names in it."""
    names = {p.relative_to(package).with_suffix(""): p for p in sorted(package.rglob("*.py"))}
    return {".".join(n.parts if n.name != "__init__" else n.parts[:-1]): p for n, p in names.items()}


def imports(package: Path) -> list[Import]:
    """All imports of its own modules."""
    known = modules(package)
    return [
        i for name, path in known.items() for i in dict.fromkeys(_of(ast.parse(path.read_text()), name, path, known))
    ]


def _of(tree: ast.AST, name: str, path: Path, known: Mapping[str, Path], when: str = "first") -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        now = when
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            now = "late"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            now = "types"
        if isinstance(node, ast.ImportFrom):
            here = [*name.split(".")] if path.name == "__init__.py" else name.split(".")[:-1]
            base = node.module or ""
            if node.level:
                base = ".".join(["ai3_ops", *here[: len(here) - node.level + 1], *base.split(".")]).rstrip(".")
            whole = [f"{base}.{alias.name}" for alias in node.names]
        else:
            whole = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for target in whole:
            if target.partition(".")[0] == "ai3_ops":
                found = target.removeprefix("ai3_ops").lstrip(".")
                while found not in known:
                    found = found.rpartition(".")[0]
                yield Import(name, found, when)
        yield from _of(node, name, path, known, now)


def layer(module: str, package: Path) -> str:
    """The package that a module lies in."""
    if module in ("", "__main__"):
        return "ai3_ops" if not module else "cli"
    first = module.partition(".")[0]
    return first if (package / first).is_dir() else "root"


def mistakes(
    package: Path = PACKAGE,
    order: Sequence[str] = ORDER,
    late: Mapping[tuple[str, str], str] = LATE,
    types: Mapping[tuple[str, str], str] = TYPES,
) -> list[str]:
    """Sentences: imports that go up, late ones without a reason, circles, and reasons for nothing."""
    found, rank, said = imports(package), {name: i for i, name in enumerate(order)}, []
    said += [
        f"{n} is in no place of the order" for n in {layer(m, package): 0 for m in modules(package)} if n not in rank
    ]
    if said:
        return said
    for i in found:
        pair = (i.importer, i.imported)
        up = rank[layer(i.imported, package)] > rank[layer(i.importer, package)]
        if up and not (i.when == "types" and pair in types):
            said.append(f"{i.importer} imports {i.imported}, which comes after it")
        if i.when == "late" and pair not in late:
            said.append(f"{i.importer} imports {i.imported} in a function, and no reason is known")
    said += [f"{a} imports {b} in no function" for a, b in late if Import(a, b, "late") not in found]
    said += [f"{a} imports no types of {b}" for a, b in types if Import(a, b, "types") not in found]
    return said + [f"a circle: {' -> '.join(circle)}" for circle in _circles(found)]


def _circles(found: Sequence[Import]) -> Iterator[list[str]]:
    """One circle of modules through each import that closes one."""
    after: dict[str, list[str]] = {}
    for i in found:
        if i.when != "types":
            after.setdefault(i.importer, []).append(i.imported)
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in done:
            for other in after.get(module, ()):
                yield from visit(other, [*path, module])
            done.add(module)

    for module in after:
        yield from visit(module, [])


def drawing(package: Path = PACKAGE, order: Sequence[str] = ORDER) -> str:
    """One row for each package: with a dot below each package that it imports."""
    pairs = {(layer(i.importer, package), layer(i.imported, package)) for i in imports(package) if i.when != "types"}
    width = max(map(len, order))
    rows = []
    for number, name in enumerate(order):
        dots = ["●" if (name, other) in pairs else "·" for other in order[:number]]
        rows.append(f"{name:<{width}}  {' '.join([*dots, '╲'])}")
    return "\n".join(["```text", *rows, "```"])


def render() -> str:
    """The page as it should be."""
    between = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    return between.sub(lambda _: f"{drawing()}\n", PAGE.read_text())


if __name__ == "__main__":
    wrong = mistakes()
    if "--check" in sys.argv[1:]:
        stale = [f"{PAGE.name} is out of date: run `make docs`"] if render() != PAGE.read_text() else []
        sys.exit("\n".join([*wrong, *stale]) or 0)
    PAGE.write_text(render())
    sys.exit("\n".join(wrong) or 0)
