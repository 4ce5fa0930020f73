"""Installs packages into a virtual environment.

By uv, which takes a third of pip's time and links the files that environments share; it gets pip's settings of where they
are. Where it fails, or pip has settings of what to install (constraints, hashes, …), by pip.

python .ci/packages.py [--python .venv/bin/python] [--extra test ...] [packages ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".venv-cache"
# pip's settings that say where packages are; uv's options have the same names.
WHERE = ("index-url", "extra-index-url", "find-links", "no-index")
# Those that change nothing of what is installed.
OTHER = (
    *(
        "cert",
        "disable-pip-version-check",
        "no-python-version-warning",
        "progress-bar",
        "quiet",
        "verbose",
        "no-color",
        "log",
    ),
    *("no-input", "root-user-action", "no-warn-script-location", "timeout", "default-timeout", "retries"),
    *("cache-dir", "no-cache-dir"),
)


def of_extras(*extras: str) -> list[str]:
    """The package's dependencies and those of extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(p for extra in extras for p in project["optional-dependencies"][extra])]


def settings(listed: str) -> tuple[list[str], dict[str, str]] | None:
    """uv's options and environment of `pip config list`'s lines, such as `global.index-url='https://...'`; None of others."""
    options: list[str] = ["--index-strategy", "unsafe-best-match"]  # as pip, which takes the newest of all indexes
    environment = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name, value = key.rpartition(".")[2], str(ast.literal_eval(value))
        if name == "no-index":
            options += ["--no-index"] * (value.lower() in ("1", "true", "yes", "on"))
        elif name in WHERE:
            options += [word for place in value.split() for word in (f"--{name}", place)]
        elif name == "trusted-host":
            options += [word for host in value.split() for word in ("--allow-insecure-host", host)]
        elif name == "cert":
            environment["SSL_CERT_FILE"] = value
        elif name not in OTHER:
            return None
    return options, environment


def install(python: Path, packages: list[str]) -> int:
    """Exit status of the one that came to an end."""
    pip = [str(python), "-m", "pip"]
    found = settings(subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout)
    if found is not None:
        options, environment = found
        if not importlib.util.find_spec("uv"):
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "uv"])
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
