"""What is in the binaries: no code shared between instruction-set levels, the stable ABI alone, one OpenMP runtime."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ai3_ops

LIBRARY = Path(ai3_ops.__file__).parent / "_C.so"
ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not shutil.which("nm"), reason="needs nm (binutils)")


def symbols(*arguments: str | Path) -> list[tuple[str, str]]:
    """(type, name) of each symbol that nm prints, names as mangled."""
    lines = subprocess.run(["nm", "-P", *map(str, arguments)], capture_output=True, text=True, check=True).stdout
    return [(fields[1], fields[0]) for line in lines.splitlines() if len(fields := line.split()) > 1]


def objects() -> dict[str, list[Path]]:
    """The object files of each level and of the glue, in the newest build that this checkout has."""
    libraries = [p for p in ROOT.glob("build/**/CMakeFiles/_C.dir") if any(p.rglob("*.o"))]
    if not libraries:
        return {}
    newest = max(libraries, key=lambda p: max(o.stat().st_mtime for o in p.rglob("*.o"))).parent
    folders = {p.name: p for p in newest.glob("ai3_kernels_*.dir")}
    levels = {name.removeprefix("ai3_kernels_").removesuffix(".dir"): p for name, p in folders.items()}
    return {level: sorted(p.rglob("*.o")) for level, p in {**levels, "glue": newest / "_C.dir"}.items()}


def test_no_function_is_shared_between_levels():
    """Of functions with one name the linker keeps one, which may hold instructions that the processor lacks."""
    levels = objects()
    if not levels:
        pytest.skip("the library was built elsewhere: no object files here")
    functions = {
        level: {name for kind, name in symbols("--defined-only", *files) if kind in "TWi"}
        for level, files in levels.items()
    }
    assert len(functions) > 2
    for one, other in itertools.combinations(functions, 2):
        assert not functions[one] & functions[other], f"{one} and {other} share functions"
    for level in functions.keys() - {"glue"}:
        outside = {name for name in functions[level] if f"{len(level)}{level}" not in name}
        assert not outside, f"functions outside namespace {level}"


def test_library_uses_only_the_stable_abi():
    for library in LIBRARY.parent.glob("*.so"):
        undefined = [name for _, name in symbols("-D", "--undefined-only", library)]
        assert any(name.startswith("aoti_torch_") for name in undefined)
        unstable = [name for name in undefined if re.match(r"_ZN?K?(T[VIS])?N?K?(2at|3c10|5torch|6caffe2)", name)]
        assert not unstable, "symbols of LibTorch's C++ interface"
        assert not [name for name in undefined if re.match(r"_?Py[A-Z_]", name)], "symbols of Python"


def test_libraries_bring_no_python_and_no_path():
    for library in LIBRARY.parent.glob("*.so"):
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert "NEEDED" in dynamic
        assert "libpython" not in dynamic
        assert "RPATH" not in dynamic
        assert "RUNPATH" not in dynamic


def test_library_exports_only_its_c_interface():
    exported = {name for kind, name in symbols("-D", "--defined-only", LIBRARY) if kind in "TWVBDRui"}
    assert {"ai3_register", "ai3_registry"} <= exported
    assert not {name for name in exported if "ai3" in name and not re.match(r"ai3_|__(start|stop)_ai3_", name)}


@pytest.fixture
def run(fork):
    def printed(program: str) -> str:
        done = fork(program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


def test_one_openmp_runtime_in_the_process(run):
    runtimes = run(
        "import torch, ai3_ops\n"
        "x = torch.randn(2, 16, 32, 32)\n"
        "torch.ops.ai3.conv2d_direct(x, torch.randn(16, 16, 3, 3)), torch.relu(x @ x)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(*sorted(m for m in maps if any(r in m for r in ('libgomp', 'libomp', 'libiomp'))), sep='\\n')"
    ).split()
    assert len(runtimes) == 1, runtimes
    assert "torch" in runtimes[0], "not the runtime that PyTorch brings"


def test_threads_are_as_many_as_torch_says(run):
    counts = run(
        "import os, torch, ai3_ops\n"
        "torch.set_num_threads(1)\n"
        "x, w = torch.zeros(8, 16, 32, 32), torch.zeros(16, 16, 3, 3)\n"
        "def threads(n):\n"
        "    torch.set_num_threads(n)\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    torch.ops.ai3.conv2d_direct(x, w)\n"
        "    return len(os.listdir('/proc/self/task')) - before\n"
        "print(threads(1), threads(3), threads(3))"
    ).split()
    assert counts == ["0", "2", "0"]
