"""What was built, what runs here, what is missing and how to get it: `python -m ai3_ops doctor`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ai3_ops import _library, _machine, registry
from ai3_ops.checking.cases import CASES, Call
from ai3_ops.registering.register import find_compiler

if TYPE_CHECKING:
    from rich.console import Console

# What the extra `demo` of pyproject.toml installs, by the modules' names.
DEMO_PACKAGES = {"torchvision": "torchvision", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "PIL": "pillow"}
_OPENMP = re.compile(r"/(lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*)$")


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes loaded into this process, by real path."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if _OPENMP.search(line)}
    return sorted({os.path.realpath(p) for p in paths})


def limits() -> dict[str, str]:
    """Measured float32 multiply-add peak and read bandwidth with all threads, and with the one that `guess` asks about."""
    (flops, bandwidth), (flops_1, bandwidth_1) = map(_library.machine, (torch.get_num_threads(), 1))
    return {
        "multiply-add peak": f"{flops / 1e9:.0f} GFLOP/s in float32, {flops_1 / 1e9:.0f} with one thread (measured)",
        "read bandwidth": f"{bandwidth / 1e9:.1f} GB/s, {bandwidth_1 / 1e9:.1f} with one thread (measured)",
    }


def physical_cores() -> int | None:
    """How many this process may use, as Linux tells it; None where nothing does."""
    try:
        cpus = os.sched_getaffinity(0)
        topology = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
        return len({path.read_text().strip() for path in topology})
    except (AttributeError, OSError):
        return None


def remarks() -> list[str]:
    """What is not broken and yet costs time: more threads than cores, or threads that do not help."""
    threads, cores, found = torch.get_num_threads(), physical_cores(), []
    if cores is not None and threads > cores:
        found.append(
            f"{threads} threads on {cores} physical cores: a core's second thread seldom helps; "
            f"torch.set_num_threads({cores}) or OMP_NUM_THREADS={cores}"
        )
    flops, flops_1 = (_library.machine(n)[0] for n in (threads, 1))
    if threads > 1 and flops < flops_1:
        found.append(
            f"{threads} threads multiply slower than one ({flops / 1e9:.0f} and {flops_1 / 1e9:.0f} GFLOP/s): other work has the "
            "cores, or a container's quota is smaller than its number of cores; try again on an idle machine, or fewer threads"
        )
    return found


def cuda_state() -> tuple[str, str]:
    """The CUDA part in words, and what to do about it ("" when there is nothing to do)."""
    build, gpus = _library.BUILD, _machine.gpu_names()
    if Path(_library.__file__).with_name("_C_cuda.so").exists():
        built = f"built with CUDA {build['cuda']} for {build['cuda_architectures']}"
        if torch.version.cuda is None:
            return f"{built}; torch {torch.__version__} is a CPU build", ""
        if not hasattr(_library, "CUDA"):
            return (
                f"{built}; torch has CUDA {torch.version.cuda}",
                f"install a torch for CUDA {build['cuda'].split('.')[0]}, or build again",
            )
        return built + ("" if gpus else "; torch finds no GPU"), ""
    reason = build.get("cuda_reason") or "the build did not include it"
    toolkit = torch.version.cuda or "of the major version of a CUDA torch"
    advice = f"install a CUDA toolkit {toolkit} and build again with FORCE_CUDA=1"
    return f"not built: {reason}", advice if gpus else ""


def cpp_compiler() -> str:
    """The path of the compiler that headers are built with, or why there is none."""
    try:
        command = find_compiler()[0]
    except (RuntimeError, ValueError, IndexError):  # CXX may be words that are none
        return f"none: CXX is {os.environ['CXX']!r}" if os.environ.get("CXX") else "none"
    return shutil.which(command) or f"none: CXX names {command}, which is not there"


def problems() -> list[str]:
    """What is broken: each a sentence that says what to do."""
    found = []
    runtimes = openmp_runtimes()
    if len(runtimes) > 1:
        found.append(
            f"{len(runtimes)} OpenMP runtimes are loaded ({', '.join(runtimes)}): they compete for the cores; "
            "install packages that use torch's, or preload one"
        )
    found += [f"{operator} is wrong on this machine: {why}" for operator, why in self_test()]
    return found


def self_test() -> list[tuple[str, str]]:
    """Runs every CPU operator on the first of its operation's test cases that it supports; those that fail, with the reason."""
    failures = []
    for a in registry.algorithms(device="cpu"):
        calls = (Call(a, case, torch.float32, "integers") for case in CASES[a.operation])
        call = next((call for call in calls if call.supported()), None)
        if call is None or a.python:
            continue
        tensors = call.tensors
        expected = call.aten(*tensors)
        allowed = {"exact": 1e-6, "bounded": max(a.error_bound, 1e-5)}.get(a.accuracy, 0.05)
        try:
            error = (call.operator(*tensors) - expected).abs().max().item() / (expected.abs().max().item() or 1.0)
        except RuntimeError as cause:
            failures.append((f"ai3::{a.operation}_{a.name}", str(cause)))
            continue
        if not error <= allowed:
            words = f"error {error:.1e} of the largest value, allowed {allowed:.0e}"
            failures.append((f"ai3::{a.operation}_{a.name}", words))
    return failures


def main(console: Console | None = None) -> int:
    """Prints the report; 1 when something is broken."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    build = _library.BUILD
    cuda, advice = cuda_state()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        **_machine.machine(),
        **limits(),
        "built": f"against torch {build.get('torch', 'unknown')} with {build.get('compiler', 'an unknown compiler')}",
        "levels built": f"{', '.join(build.get('levels', [])) or 'unknown'}; AI3_OPS_ISA chooses a lower one",
        "CUDA part": cuda,
        "C++ compiler": cpp_compiler(),
        "OpenMP runtime": ", ".join(openmp_runtimes()) or "none",
        "operators": f"{len(registry.algorithms())} algorithms of {len(registry.operations())} operations",
        "package": str(Path(_library.__file__).parent),
        "Python": sys.executable,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False)
    missing = [f"CUDA: {advice}"] if advice else []
    if rows["C++ compiler"].startswith("none"):
        missing.append("a C++20 compiler for ai3_ops.register and torch.compile: install g++, or let CXX name one")
    for module, package in DEMO_PACKAGES.items():
        if importlib.util.find_spec(module) is None:  # not imported: scikit-learn brings an OpenMP runtime of its own
            purpose = "demo and explain" if module == "torchvision" else "demo"
            missing.append(f"{package} for {purpose}: pip install 'ai3_ops[demo]'")
    for line in missing:
        console.print(f"missing: {line}", style="yellow", markup=False, highlight=False)
    for line in remarks():
        console.print(f"remark: {line}", style="yellow", markup=False, highlight=False)
    broken = problems()
    for line in broken:
        console.print(f"broken: {line}", style="red", markup=False, highlight=False)
    if not broken:
        console.print("every operator gives the right result here", style="green")
    return 1 if broken else 0
