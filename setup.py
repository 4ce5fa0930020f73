"""Builds the wheel: setuptools around the CMake build (CMakeLists.txt), which compiles _C and, where it can, _C_cuda.

Environment:
    USE_CUDA=0              build the CPU part alone
    FORCE_CUDA=1            an error instead of the CPU part alone, when the CUDA part cannot be built
    CUDA_HOME               where the CUDA toolkit is; else nvcc on PATH, else /usr/local/cuda
    TORCH_CUDA_ARCH_LIST    GPU architectures, such as "8.0 9.0+PTX"; see cmake/cuda.cmake for the default
    MAX_JOBS                parallel compilations; by default as many as processors and memory allow
    DEBUG=1                 -O1 -g1
    CMAKE_ARGS              further arguments of cmake
    AI3_PREBUILT            a package directory whose libraries and headers are packed, instead of building them again
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
GIB_PER_JOB = 2  # what one compilation of a kernel file or of nvcc needs at most


def flag(name: str) -> bool | None:
    """An environment variable as a boolean, None when unset."""
    value = os.environ.get(name, "")
    return None if value == "" else value.lower() not in ("0", "off", "no", "false")


def max_jobs() -> int:
    """How many compilers may run at once."""
    if os.environ.get("MAX_JOBS"):
        return int(os.environ["MAX_JOBS"])
    memory = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    gib = int(memory.group(1)) / 2**20 if memory else 4
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / GIB_PER_JOB)))


class Torch(NamedTuple):
    """The torch that is built against. Asked in a process of its own, and only when something is built."""

    version: str
    cuda: str  # "" for a CPU build

    @classmethod
    def installed(cls) -> Torch:
        ask = "import torch; print(torch.__version__, torch.version.cuda or '', sep='\\n')"
        result = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        if result.returncode:
            sys.exit(
                "ai3_ops: building needs torch 2.11 or later; install it, or leave out --no-build-isolation.\n"
                + result.stderr.strip().splitlines()[-1]
            )
        version, cuda = result.stdout.split("\n")[:2]
        return cls(version, cuda)


def find_nvcc() -> Path | None:
    """Nvcc of CUDA_HOME when that is set, else from PATH or /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    candidates = (
        [Path(home, "bin/nvcc")] if home else [*([Path(on_path)] if on_path else []), Path("/usr/local/cuda/bin/nvcc")]
    )
    return next((c for c in candidates if c.exists()), None)


def cuda_compiler(torch: Torch) -> tuple[Path | None, str]:
    """Nvcc to build the CUDA part with, or None and the reason. Whether there is a GPU does not matter."""
    if flag("USE_CUDA") is False:
        return None, "USE_CUDA=0 asks for the CPU part alone"
    if not torch.cuda:
        return None, f"torch {torch.version} is a CPU build"
    nvcc = find_nvcc()
    if nvcc is None:
        return (
            None,
            f"no CUDA toolkit was found in CUDA_HOME, on PATH or in /usr/local/cuda (torch has CUDA {torch.cuda})",
        )
    release = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    found = f"{release.group(1)}.{release.group(2)}" if release else "unknown"
    if found.split(".")[0] != torch.cuda.split(".")[0]:
        return (
            None,
            f"the CUDA toolkit ({nvcc}) has version {found}, torch CUDA {torch.cuda}: the major versions must agree",
        )
    return nvcc, f"CUDA {found} ({nvcc})"


class CMakeBuild(build_ext):
    """Runs CMake; libraries and headers land in the package, for an editable install in the source tree."""

    def get_ext_filename(self, fullname: str) -> str:
        """`ai3_ops/_C.so`: a library for torch.ops.load_library, not a Python module."""
        return fullname.replace(".", "/") + ".so"

    def run(self) -> None:
        if prebuilt := os.environ.get("AI3_PREBUILT"):
            package = Path(self.build_lib).resolve() / "ai3_ops"
            for pattern in ("*.so", "_build.json", "include/*.cmake", "include/*/*.h"):
                for file in Path(prebuilt).glob(pattern):
                    to = package / file.relative_to(prebuilt)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, to)
            return
        for tool in ("cmake", "ninja"):
            if not shutil.which(tool):
                sys.exit(f"ai3_ops: building needs {tool}, which is not on PATH")
        torch = Torch.installed()
        nvcc, reason = cuda_compiler(torch)
        if nvcc is None and flag("FORCE_CUDA"):
            sys.exit(f"ai3_ops: FORCE_CUDA=1, but the CUDA part cannot be built: {reason}")
        # An editable build is what `make` continues incrementally.
        build = ROOT / "build/native" if self.inplace else Path(self.build_temp).resolve()
        package = ROOT / "ai3_ops" if self.inplace else Path(self.build_lib).resolve() / "ai3_ops"
        jobs = max_jobs()
        configuration = {
            "CMAKE_BUILD_TYPE": "Debug" if flag("DEBUG") else "Release",
            "Python_EXECUTABLE": sys.executable,
            "AI3_OUTPUT_DIRECTORY": package,
            "AI3_WITH_CUDA": "ON" if nvcc else "OFF",
            "AI3_CUDA_REASON": "" if nvcc else reason,
            **({"CMAKE_CUDA_COMPILER": nvcc} if nvcc else {}),
        }
        print("ai3_ops build configuration:")
        print(f"  torch              {torch.version}, CUDA {torch.cuda or 'none'}")
        print(f"  CUDA part          {'yes: ' if nvcc else 'no: '}{reason}")
        if nvcc:
            print(
                f"  GPU architectures  {os.environ.get('TORCH_CUDA_ARCH_LIST') or 'default list of cmake/cuda.cmake'}"
            )
        print(f"  jobs               {jobs}")
        print(f"  build directory    {build}")
        for name, value in configuration.items():
            print(f"  {name:<18} {value}")
        sys.stdout.flush()
        package.mkdir(parents=True, exist_ok=True)
        defines = [f"-D{name}={value}" for name, value in configuration.items()]
        self.spawn(
            [
                "cmake",
                "-S",
                str(ROOT),
                "-B",
                str(build),
                "-G",
                "Ninja",
                *defines,
                *shlex.split(os.environ.get("CMAKE_ARGS", "")),
            ]
        )
        self.spawn(["cmake", "--build", str(build), "--target", "package_libraries", "--parallel", str(jobs)])
        if nvcc is None:
            (package / "_C_cuda.so").unlink(missing_ok=True)  # of an earlier build: it would not fit
            print(f"ai3_ops: built for the CPU alone, because {reason}.")

    def get_outputs(self) -> list[str]:
        return sorted(
            str(p)
            for p in (Path(self.build_lib) / "ai3_ops").rglob("*")
            if p.suffix in (".so", ".h", ".json", ".cmake")
        )


class PlatformWheel(bdist_wheel):
    """The libraries hold no Python symbols: one wheel for every Python (docs/decisions/wheel.md)."""

    def run(self) -> None:
        # setuptools would pack what earlier builds left there, such as modules that have since been removed.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if sys.argv[1:] == ["--jobs"]:  # for the Makefile
    print(max_jobs())
    sys.exit()
setup(
    ext_modules=[Extension("ai3_ops._C", sources=[])], cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel}
)
