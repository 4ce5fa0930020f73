"""Tests the package as users get it, on every torch and Python that it promises.

A wheel is built once, its source tree deleted, and the wheel installed and tested beside each torch and Python. Then comes
`pip install` from source: isolated, with --no-build-isolation, and editable.

python .ci/wheels.py              # with all tests, each torch on each Python; every Python must be there
python .ci/wheels.py --reduced    # what is built here; the oldest torch and Python, the newest; every operator run, values once
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import packages

ROOT = Path(__file__).resolve().parent.parent
TORCH = {"2.11": "torch==2.11.*", "newest": "torch"}
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGE = ["tests/test_package.py", "-k", "package_offers or package_holds"]
# Besides, every algorithm within its bounds in every dtype: once, since the libraries know no Python, and on the oldest torch,
# since `make test` runs all tests on the newest.
VALUES = [
    "tests/test_package.py",
    "tests/checking/test_operators.py",
    "-k",
    "values or package_offers or package_holds",
]
# As `python -m ai3_ops doctor`, after a line that says which of each was found.
DOCTOR = (
    "import ai3_ops, sys, torch; print(sys.version.split()[0], torch.__version__, ai3_ops.__file__, flush=True); "
    "from ai3_ops.cli.main import main; sys.exit(main(['doctor']))"
)
HIDDEN = {".git", ".venv", "build", "dist", "ai3_ops.egg-info", "include", "__pycache__"}


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Runs a command, or ends the program with its exit status."""
    print("+", *command, flush=True)
    status = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}).returncode
    if status:
        sys.exit(status)


@functools.cache
def interpreter(version: str) -> str | None:
    """A Python of this version: on PATH, or pyenv's."""
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for candidate in [f"python{version}", *map(str, pyenv)]:
        check = [candidate, "-c", f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"]
        if shutil.which(candidate) and subprocess.run(check, capture_output=True).returncode == 0:
            return candidate
    return None


def versions() -> list[str]:
    """The Pythons that are there."""
    return [version for version in PYTHONS if interpreter(version)]


def environment(python: str, version: str, torch: str) -> Path:
    """A virtual environment with torch and test tools; kept, since torch is a large download."""
    venv = ROOT / f".venv-wheel-{version}-torch-{torch}"
    if not (venv / ".ready").exists():
        run(python, "-m", "venv", "--clear", venv)
        if packages.install(venv / "bin/python", [TORCH[torch], *packages.of_extras("test")]):
            sys.exit(f"wheels: {venv.name} could not be made")
        (venv / ".ready").touch()
    return venv


def copy_of_source(to: Path) -> Path:
    """The sources, without what was built in them."""
    shutil.copytree(
        ROOT,
        to,
        ignore=lambda _, names: [n for n in names if n in HIDDEN or n.startswith(".venv") or n.endswith(".so")],
    )
    return to


def test_wheel(temporary: Path, reduced: bool) -> None:
    """Builds the wheel and runs the tests on it everywhere; one line for each torch and Python says what came of it."""
    source, tests, dist = copy_of_source(temporary / "source"), temporary / "tests-only", temporary / "dist"
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", dist, source)
    run(*command, env={"AI3_PREBUILT": str(ROOT / "ai3_ops")} if reduced else None)
    tests.mkdir()
    for part in ("tests", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
        move = shutil.copytree if (source / part).is_dir() else shutil.copy
        move(source / part, tests / part)
    shutil.rmtree(source)
    (wheel,) = dist.glob("*.whl")
    for torch, version in itertools.product(TORCH, PYTHONS):
        python = interpreter(version)
        ends = (next(iter(TORCH)), versions()[0]), ("newest", versions()[-1])
        if reduced and python is not None and (torch, version) not in ends:  # environments take long to make
            continue
        if python is None:
            print(
                f"wheels: Python {version}, torch {torch}: MISSING, since that Python is not on this machine",
                flush=True,
            )
            continue
        start = time.monotonic()
        venv_python = environment(python, version, torch) / "bin/python"
        ready = time.monotonic()
        run(venv_python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel)
        chosen = [] if not reduced else VALUES if (version, torch) == (versions()[0], next(iter(TORCH))) else PACKAGE
        workers = ["-n", str(len(os.sched_getaffinity(0)))] if chosen is not PACKAGE else []
        run(venv_python, "-m", "pytest", "-p", "no:cacheprovider", *workers, *chosen, cwd=tests)
        run(venv_python, "-c", DOCTOR, cwd=tests)
        print(
            f"wheels: Python {version}, torch {torch}: passed in {time.monotonic() - ready:.0f} s, "
            f"its environment made in {ready - start:.0f} s",
            flush=True,
        )


def test_installs(temporary: Path, reduced: bool) -> None:
    """`pip install` from source, each way, into an environment with the newest torch; `doctor` runs every operator."""
    version = versions()[-1]
    python = environment(str(interpreter(version)), version, "newest") / "bin/python"
    build_tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    ways = {
        "isolated": [],
        "no-build-isolation": ["--no-build-isolation"],
        "editable": ["--no-build-isolation", "--editable"],
    }
    for name, options in ways.items():
        if reduced and name != "no-build-isolation":  # the others compile everything, or install torch once more
            continue
        run(python, "-m", "pip", "uninstall", "-q", "-y", "ai3_ops")
        if options:
            run(python, "-m", "pip", "install", "-q", *(tool for tool in build_tools if not tool.startswith("torch")))
        source = copy_of_source(temporary / name)
        path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "USE_CUDA": "0"}
        if reduced:
            path["AI3_PREBUILT"] = str(ROOT / "ai3_ops")
        run(python, "-m", "pip", "install", "-q", *options, source, env=path)
        if name != "editable":
            shutil.rmtree(source)
        run(python, "-m", "ai3_ops", "doctor", cwd=temporary)
        print(f"wheels: pip install, {name}: every operator works", flush=True)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "ai3_ops")


def main() -> None:
    """The wheel on every host, and the ways to install from source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="what is built here, with short tests")
    reduced = parser.parse_args().reduced
    missing = [version for version in PYTHONS if interpreter(version) is None]
    if missing and (not reduced or len(missing) == len(PYTHONS)):
        sys.exit(f"wheels: needs Python {' and '.join(missing)}, neither on PATH nor pyenv's")
    with tempfile.TemporaryDirectory(prefix="ai3_ops-wheel-") as temporary:
        test_wheel(Path(temporary), reduced)
        test_installs(Path(temporary), reduced)


if __name__ == "__main__":
    main()
