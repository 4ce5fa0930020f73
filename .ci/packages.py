"""Installs packages into a virtual environment.

By uv, which takes a third of pip's time and links the files that environments share; it gets pip's settings of where they
are. Where it fails, which other settings of pip may make it do, by pip.

python .ci/packages.py [--python .venv/bin/python] [--extra test ...] [packages ...]
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".venv-cache"
# pip's settings that say where packages are; uv's options have the same names.
WHERE = ("index-url", "extra-index-url", "find-links", "no-index")


def of_extras(*extras: str) -> list[str]:
    """The package's dependencies and those of extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(p for extra in extras for p in project["optional-dependencies"][extra])]


def settings(listed: str) -> tuple[list[str], dict[str, str]]:
    """uv's options and environment for what `pip config list` prints, such as `global.index-url='https://...'`."""
    options: list[str] = []
    environment = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name, value = key.rpartition(".")[2], str(ast.literal_eval(value))
        if name == "no-index":
            options += ["--no-index"] * (value.lower() in ("1", "true", "yes", "on"))
        elif name in WHERE:
            options += [word for place in value.split() for word in (f"--{name}", place)]
        elif name == "cert":
            environment["SSL_CERT_FILE"] = value
    return options, environment


def install(python: Path, packages: list[str]) -> int:
    """Exit status of the one that came to an end."""
    pip = [str(python), "-m", "pip"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "uv"])
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    options, environment = settings(listed)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python), *options, *packages]
    if subprocess.run(uv, env={"UV_CACHE_DIR": str(CACHE), **environment, **os.environ}).returncode == 0:
        return 0
    return subprocess.run([*pip, "install", *packages]).returncode


def main() -> None:
    """From the command line, into this Python's environment if no other is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=sys.executable, help="of the environment")
    parser.add_argument("--extra", action="append", default=[], help="of pyproject.toml")
    parser.add_argument("packages", nargs="*")
    given = parser.parse_args()
    sys.exit(install(given.python, [*given.packages, *(of_extras(*given.extra) if given.extra else ())]))


if __name__ == "__main__":
    main()
