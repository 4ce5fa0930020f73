"""What builds, checks and ships the package: setup.py, the Makefile, CMake's files and .ci, where something is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the source tree")


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module, in an environment without CUDA settings."""
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    for name in ("CUDA_HOME", "CUDA_PATH", "USE_CUDA", "FORCE_CUDA", "AI3_PREBUILT"):
        monkeypatch.delenv(name, raising=False)
    return load("ai3_ops_setup", ROOT / "setup.py")


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Makes CUDA_HOME a toolkit whose nvcc says that it has some version."""

    def make(version: str) -> Path:
        nvcc = tmp_path / "cuda/bin/nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.48'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        return nvcc

    return make


def test_the_cuda_part_wants_a_toolkit_of_torch_s_major_version(setup, toolkit, tmp_path, monkeypatch):
    torch = setup.Torch("2.15.0", "13.0")
    nvcc = toolkit("13.2")
    assert setup.cuda_compiler(torch) == (nvcc, f"CUDA 13.2 ({nvcc})")
    assert setup.cuda_compiler(setup.Torch("2.15.0", "")) == (None, "torch 2.15.0 is a CPU build")
    monkeypatch.setenv("USE_CUDA", "0")
    assert setup.cuda_compiler(torch) == (None, "USE_CUDA=0 asks for the CPU part alone")
    monkeypatch.delenv("USE_CUDA")
    toolkit("12.9")
    found, reason = setup.cuda_compiler(torch)
    assert found is None
    assert "has version 12.9, torch CUDA 13.0: the major versions must agree" in reason
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    found, reason = setup.cuda_compiler(torch)
    assert found is None
    assert reason == "no CUDA toolkit was found in CUDA_HOME, on PATH or in /usr/local/cuda (torch has CUDA 13.0)"


def test_without_a_fitting_toolkit_the_cpu_part_is_built_and_the_reason_said(
    setup, toolkit, tmp_path, monkeypatch, capsys
):
    from setuptools import Distribution

    toolkit("12.9")
    monkeypatch.setattr(setup.Torch, "installed", lambda: setup.Torch("2.15.0", "13.0"))
    monkeypatch.setattr(setup.shutil, "which", lambda tool: f"/bin/{tool}")
    command = setup.CMakeBuild(Distribution())
    command.inplace, command.build_lib, command.build_temp = False, str(tmp_path / "lib"), str(tmp_path / "temp")
    spawned = []
    command.spawn = spawned.append
    command.run()
    assert "-DAI3_WITH_CUDA=OFF" in spawned[0]
    assert any("12.9" in part for part in spawned[0] if part.startswith("-DAI3_CUDA_REASON="))
    assert re.search(r"built for the CPU alone, because .*12\.9", capsys.readouterr().out)
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match=r"FORCE_CUDA=1, but the CUDA part cannot be built: .*12\.9"):
        command.run()
    toolkit("13.2")
    command.run()
    assert "-DAI3_WITH_CUDA=ON" in spawned[-2]
    for missing in ("cmake", "ninja"):
        monkeypatch.setattr(
            setup.shutil, "which", lambda tool, missing=missing: None if tool == missing else "/bin/tool"
        )
        with pytest.raises(SystemExit, match=f"building needs {missing}, which is not on PATH"):
            command.run()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("cmake", "make: needs cmake (3.22 or later), which is not on PATH"),
        ("c++", "make: needs a C++20 compiler (c++ is not on PATH; CXX names another)"),
        ("python3", "make: needs Python 3.11 or later, which is not on PATH (PYTHON=... names one)"),
    ],
)
def test_make_names_a_missing_tool(missing, sentence, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "nproc", "make"):
        (tools / tool).symlink_to(shutil.which(tool))
    for tool in {"cmake", "c++", "python3"} - {missing}:
        (tools / tool).write_text('#!/bin/sh\n[ "$1" != -m ]\n')  # a Python without venv
        (tools / tool).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    environment = {"PATH": str(tools), "HOME": str(tmp_path)}
    done = subprocess.run(
        [tools / "make", ".venv/.torch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode
    assert done.stderr.splitlines()[0] == sentence


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_names_a_missing_package_of_python(tmp_path):
    """Debian has `venv` in a package of its own."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" != -m ]\n')
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", ".venv/.torch", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode
    assert f"make: needs Python's venv module ({python} -m venv failed)" in done.stderr


def test_packages_come_from_where_pip_takes_them(monkeypatch):
    """What `pip config list` prints becomes uv's options; where uv fails, pip installs."""
    packages = load("packages", ROOT / ".ci/packages.py")
    best = ["--index-strategy", "unsafe-best-match"]
    assert packages.settings("") == (best, {})
    printed = (
        ":env:.find-links='/wheels'\nglobal.cert='/certificates'\nglobal.index-url='https://a/simple'\n"
        "install.no-index='true'\nsite.extra-index-url='\\nhttps://b\\nhttps://c'\nglobal.timeout='60'\n"
    )
    options, environment = packages.settings(printed)
    places = "--find-links /wheels --index-url https://a/simple --no-index"
    assert " ".join(options) == f"{' '.join(best)} {places} --extra-index-url https://b --extra-index-url https://c"
    assert environment == {"SSL_CERT_FILE": "/certificates"}
    assert packages.settings("global.no-index='false'\n") == (best, {})
    assert packages.settings("global.timeout='60'\n") == (best, {})
    assert packages.settings(":env:.constraint='versions.txt'\n") is None  # which uv would not read: by pip

    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, int("uv" in command[1:4] and "pip" in command[3:4]), printed)

    monkeypatch.setattr(packages.subprocess, "run", run)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packages.install("python", ["torch"]) == 0
    assert [command[-1] for command in ran] == ["list", "uv", "torch", "torch"]
    assert ran[2][2:5] == ["uv", "pip", "install"]
    assert "--no-index" in ran[2]
    assert ran[3] == ["python", "-m", "pip", "install", "torch"]
    with pytest.raises(KeyError):
        packages.of_extras("nothing")
    assert "pytest>=8" in packages.of_extras("test")


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_without_googletest_one_sentence_says_what_is_left_out(tmp_path):
    """Neither installed nor downloadable: no proxy listens there."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(left_out NONE)\nset(AI3_BUILD_TESTS ON)\nset(AI3_BUILD_BENCHMARKS ON)\n"
        f"include({ROOT / 'cmake/dependencies.cmake'})\n"
        "if(TARGET GTest::gtest_main OR TARGET benchmark::benchmark)\n  message(FATAL_ERROR found)\nendif()\n"
    )
    nobody = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), "http://127.0.0.1:9")
    absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("GTest", "benchmark")]
    done = subprocess.run(
        ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *absent],
        env={**os.environ, **nobody, "no_proxy": "", "NO_PROXY": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "The C++ tests are left out: GTest is not installed and cannot be downloaded" in said
    assert "The microbenchmarks are left out: benchmark is not installed and cannot be downloaded" in said
    pins = re.findall(r"\b(https://\S+)\n\s+([0-9a-f]{64})\b", (ROOT / "cmake/dependencies.cmake").read_text())
    assert len(pins) == 2
    assert all(re.search(r"/v\d+\.\d+\.\d+\.tar\.gz$", url) for url, _ in pins)


def test_a_python_that_is_not_here_is_a_missing_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / ".ci")  # as of a script there
    wheels = load("ai3_ops_wheels", ROOT / ".ci/wheels.py")
    monkeypatch.setattr(wheels, "interpreter", lambda version: None if version == "3.12" else sys.executable)
    monkeypatch.setattr(wheels, "environment", lambda *_: tmp_path)
    ran = []

    def run(*command, cwd=None, env=None):
        ran.append(command)
        if "wheel" in command:
            dist = command[command.index("-w") + 1]
            dist.mkdir(parents=True)
            (dist / "ai3_ops.whl").touch()

    monkeypatch.setattr(wheels, "run", run)
    wheels.test_wheel(tmp_path / "reduced", reduced=True)
    said = capsys.readouterr().out
    assert re.findall(r"wheels: Python (\S+), torch (\S+): passed", said) == [("3.11", "2.11"), ("3.13", "newest")]
    assert "wheels: Python 3.12, torch 2.11: MISSING, since that Python is not on this machine" in said
    assert sum("pytest" in command for command in ran) == 2
    wheels.test_wheel(tmp_path / "all", reduced=False)
    said = capsys.readouterr().out
    for torch in ("2.11", "newest"):
        for version in ("3.11", "3.13"):
            assert f"wheels: Python {version}, torch {torch}: passed" in said
        assert f"wheels: Python 3.12, torch {torch}: MISSING, since that Python is not on this machine" in said
    monkeypatch.setattr(wheels, "interpreter", lambda version: None)
    for arguments in (["--reduced"], []):
        monkeypatch.setattr(sys, "argv", ["wheels.py", *arguments])
        with pytest.raises(SystemExit, match=r"wheels: needs Python 3\.11 and 3\.12 and 3\.13"):
            wheels.main()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_bench_fails_without_the_binary(tmp_path):
    """A binary of an earlier build is not run in its place."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "build/native").mkdir(parents=True)
    (tmp_path / "build/native/build.ninja").write_text("build package_libraries: phony\n")
    (tmp_path / "build/native/ai3_bench").write_text("#!/bin/sh\necho stale\n")
    for file in (tools / "cmake", tmp_path / "build/native/ai3_bench"):
        file.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", "bench", "FILTER=conv2d", "-o", "build", "JOBS=1"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode
    assert "make: needs Google Benchmark, which is neither installed nor can be downloaded" in done.stderr
    assert "stale" not in done.stdout


TESTS = (
    "100% tests passed, 0 tests failed out of 9\n9 passed in 3s\nwheels: Python 3.12, torch 2.11: MISSING, since ...\n"
)
NAMES = ("winograd_f4/f32/nhwc", "direct/f32/nchw", "torch/f32/nhwc", "onednn_prepacked/f32/nhwc")
MEASURED = "".join(f"conv2d/{n}/N1_C64_H56_K64_k3s1p1/real_time 9 ns 9 ns 1 FLOPS=1.2G/s peak=0.5/s\n" for n in NAMES)


@pytest.mark.parametrize(
    ("tests", "measured", "verdict"),
    [
        (TESTS, MEASURED, ""),
        (TESTS.partition("\n")[2], MEASURED, "the C++ tests were left out"),
        (TESTS, "", "conv2d/winograd_f4/f32/nhwc/N1_C64_H56_K64_k3s1p1 was not measured"),
        (TESTS, MEASURED.replace("peak=0.5/s", ""), "was not measured"),
        (TESTS, MEASURED + "x ERROR OCCURRED: 'differs'\n", "a benchmark's result is wrong"),
    ],
)
def test_ci_fails_for_what_is_left_out(tests, measured, verdict, tmp_path):
    """The summary shows the wheel's missing cells; a `make` that only prints stands for the work."""
    for folder in ("bin", ".ci", "ai3_ops"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ai3_ops/_C_cuda.so").touch()  # as on a machine with a toolkit
    (tmp_path / "test").write_text(tests)
    (tmp_path / "bench").write_text(measured)
    make = tmp_path / "bin/make"
    make.write_text('#!/bin/sh\n[ ! -f "$1" ] || cat "$1"\n')
    make.chmod(0o755)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / ".ci/run"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bool(done.returncode) == bool(verdict), done.stdout + done.stderr
    assert verdict in done.stderr
    if not verdict:
        assert "wheels: Python 3.12, torch 2.11: MISSING" in done.stdout.partition("== summary")[2]
