"""The package as it is shipped, and that what the documents say is so."""

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import ai3_ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(ai3_ops.__file__).parent
in_source_tree = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")


def test_package_holds_libraries_headers_and_types():
    assert (PACKAGE / "_C.so").exists()
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "include/ai3/algorithm.h").exists()


@in_source_tree
def test_headers_are_copies_of_the_kernels():
    for header in (ROOT / "csrc/algos/core").glob("*.h"):
        assert (PACKAGE / "include/ai3" / header.name).read_bytes() == header.read_bytes()


def test_what_the_package_offers():
    """No name that nothing stands behind: what comes later is not there, not even as a stub."""
    assert all(hasattr(ai3_ops, name) for name in ai3_ops.__all__)
    later = {"from_onnx"}
    assert not later & set(dir(ai3_ops))
    assert not later & set(ai3_ops.__all__)
    assert ai3_ops.__version__ == metadata.version("ai3_ops")
    assert "ai3" in torch._dynamo.list_backends(exclude_tags=())
    assert isinstance(ai3_ops.explain(torch.nn.ReLU()), ai3_ops.Report)


def test_metadata():
    assert metadata.version("ai3_ops") == "0.1.0"
    assert metadata.metadata("ai3_ops")["Requires-Python"] == ">=3.11"


@pytest.mark.full
@in_source_tree
def test_wheel_contents(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("ai3_ops-0.1.0-py3-none-linux_")
    names = set(zipfile.ZipFile(wheel).namelist())
    python = {str(p.relative_to(ROOT)) for p in (ROOT / "ai3_ops").rglob("*.py")}
    headers = {f"ai3_ops/include/ai3/{p.name}" for p in (ROOT / "csrc/algos/core").glob("*.h")}
    wanted = python | headers | {"ai3_ops/_C.so", "ai3_ops/_build.json", "ai3_ops/py.typed"}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "ai3_ops/measured").glob("*.json")}
    assert wanted <= names
    extra = {n for n in names - wanted if ".dist-info/" not in n}
    assert extra <= {"ai3_ops/_C_cuda.so"}


@pytest.mark.parametrize("seconds", [3, pytest.param(None, marks=pytest.mark.full)])
def test_readme_example_runs(seconds):
    """The README's example works when pasted: in a fresh interpreter, as it stands there, or measuring for some seconds only."""
    example = re.search(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line]) <= 10
    partial = f"functools.partial(ai3_ops.optimize, budget_seconds={seconds})"
    bound = "" if seconds is None else f"import functools, ai3_ops; ai3_ops.optimize = {partial}\n"
    result = subprocess.run(
        [sys.executable, "-c", bound + example], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "layer4.1.conv2" in result.stdout


# The next two ask processes of their own: other tests register algorithms in this one.
@in_source_tree
def test_tables_are_those_of_the_registry(fork):
    program = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    check = fork(program, ROOT / "docs/tables.py", "--check", PYTHONPATH=f"{ROOT / 'docs'}{os.pathsep}{PACKAGE.parent}")
    assert check.returncode == 0, check.stderr


def test_every_algorithm_has_its_page(fork):
    code = "from ai3_ops import registry\nfor a in registry.algorithms():\n print(a.operation + '/' + a.name)"
    listed = fork(code, PYTHONPATH=str(PACKAGE.parent))
    pages = {f"{p.parent.name}/{p.stem}" for p in (ROOT / "docs/algorithms").glob("*/*.md")}
    assert set(listed.stdout.split()) <= pages, f"without a page: {set(listed.stdout.split()) - pages}"


def test_links_in_the_documents_lead_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)\)", document.read_text()):
            place = (document.parent / target).resolve()
            if place.is_relative_to(ROOT / "docs") or (ROOT / "csrc").exists():  # a wheel's tests have the docs alone
                assert place.exists(), f"{document.relative_to(ROOT)} links to {target}"


@in_source_tree
def test_no_machine_paths_or_registry_hosts_in_tracked_files():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    private = re.compile(
        "|".join([r"/ho" + r"me/\w", r"/ro" + r"ot/", r"/us" + r"r/loc" + r"al/lib/python", r"py" + r"pi\.org"])
    )
    for name in filter(None, tracked.stdout.split("\0")):
        path = ROOT / name
        if path.suffix == ".png" or not path.is_file():
            continue
        found = private.search(path.read_text(errors="replace"))
        assert not found, f"{name}: {found.group()}"


@in_source_tree
def test_unbuilt_package_says_so(tmp_path):
    """Without its libraries the package raises an ImportError that says what to do."""
    import shutil

    shutil.copytree(PACKAGE, tmp_path / "ai3_ops", ignore=shutil.ignore_patterns("*.so", "include", "__pycache__"))
    result = subprocess.run([sys.executable, "-c", "import ai3_ops"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert "_C.so" in result.stderr


def test_importing_brings_in_nothing_that_only_some_calls_need():
    code = (
        "import sys, torch; before = {*sys.modules}; import ai3_ops\n"
        "print(*sorted({*sys.modules} - before))\n"
        "assert 'torch.utils.flop_counter' not in sys.modules or 'torch.utils.flop_counter' in before\n"
        "from torch.utils import flop_counter\n"
        "with flop_counter.FlopCounterMode(display=False) as mode:\n"
        "    torch.ops.ai3.conv2d_direct(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3))\n"
        "assert mode.get_total_flops() == 2 * 3 * 9 * 2 * 9, mode.get_total_flops()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not result.returncode, result.stderr
    heavy = {"triton", "sympy", "networkx", "rich", "numpy", "torch.export", "torch._inductor", "torch._dynamo"}
    heavy |= {"ai3_ops.checking.checks"}
    assert not heavy & {*result.stdout.split()}
