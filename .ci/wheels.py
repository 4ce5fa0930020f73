"""Tests the wheel as users get it: built once, its source tree deleted, installed beside each torch and Python.

python .ci/wheels.py            # torch 2.11 and the newest, Python 3.11 and 3.12, all tests
python .ci/wheels.py --smoke    # the newest Python at hand with torch 2.11, the CPU part, a part of the tests
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = {"2.11": "torch==2.11.*", "newest": "torch"}
PYTHONS = ("3.11", "3.12")
SMOKE = ["tests/test_package.py", "tests/test_cli.py", "-k", "not demo"]
HIDDEN = {".git", ".venv", "build", "dist", "ai3_ops.egg-info", "include", "__pycache__"}


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Runs a command, or ends the program with its exit status."""
    print("+", *command, flush=True)
    status = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}).returncode
    if status:
        sys.exit(status)


def interpreter(version: str) -> str | None:
    """A Python of this version: on PATH, or pyenv's."""
    pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for candidate in [f"python{version}", *map(str, pyenv)]:
        check = [candidate, "-c", f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"]
        if shutil.which(candidate) and subprocess.run(check, capture_output=True).returncode == 0:
            return candidate
    return None


def environment(python: str, version: str, torch: str) -> Path:
    """A virtual environment with torch and test tools, without ai3_ops; kept, since torch is a large download."""
    venv = ROOT / f".venv-wheel-{version}-torch-{torch}"
    if not (venv / ".ready").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
        run(python, "-m", "venv", "--clear", venv)
        run(venv / "bin/python", "-m", "pip", "install", "-q", TORCH[torch], *needed)
        (venv / ".ready").touch()
    run(venv / "bin/python", "-m", "pip", "uninstall", "-q", "-y", "ai3_ops")
    return venv


def main() -> None:
    """Builds the wheel and runs the tests on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="torch 2.11 on one Python, a part of the tests")
    smoke = parser.parse_args().smoke
    with tempfile.TemporaryDirectory(prefix="ai3_ops-wheel-") as name:
        temporary = Path(name)
        source, tests, dist = temporary / "source", temporary / "tests-only", temporary / "dist"
        shutil.copytree(
            ROOT,
            source,
            ignore=lambda _, names: [n for n in names if n in HIDDEN or n.startswith(".venv") or n.endswith(".so")],
        )
        command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", dist, source)
        run(*command, env={"USE_CUDA": "0"} if smoke else None)
        tests.mkdir()
        for part in ("tests", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
            move = shutil.copytree if (source / part).is_dir() else shutil.copy
            move(source / part, tests / part)
        shutil.rmtree(source)
        (wheel,) = dist.glob("*.whl")
        ran = 0
        for torch in ["2.11"] if smoke else TORCH:
            for version in reversed(PYTHONS) if smoke else PYTHONS:
                python = interpreter(version)
                if python is None:
                    if not smoke:
                        sys.exit(f"wheels: needs Python {version}, which is neither on PATH nor pyenv's")
                    continue
                bin_ = environment(python, version, torch) / "bin"
                run(bin_ / "python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel)
                run(
                    bin_ / "python",
                    "-c",
                    "import ai3_ops, sys, torch; print(sys.version.split()[0], torch.__version__, ai3_ops.__file__)",
                    cwd=tests,
                )
                run(bin_ / "python", "-m", "pytest", "-p", "no:cacheprovider", *(SMOKE if smoke else []), cwd=tests)
                ran += 1
                if smoke:
                    break
        if not ran:
            sys.exit("wheels: none of the Pythons " + ", ".join(PYTHONS) + " is here: nothing was tested")


if __name__ == "__main__":
    main()
