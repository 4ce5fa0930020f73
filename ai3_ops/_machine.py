"""This machine, as far as measurements depend on it: processor, instruction set, threads, GPUs, versions."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from ai3_ops import _library


def _cpu() -> dict[str, str]:
    """What Linux says of the last core."""
    try:
        return dict(re.findall(r"^([\w ]+?)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    except OSError:
        return {}


def family() -> str:
    """The family of processors, by maker and number; the instruction set tells its generations apart."""
    said = _cpu()
    return (
        f"{said.get('vendor_id', platform.machine())} family {said.get('cpu family', said.get('CPU part', 'unknown'))}"
    )


def cpu_name() -> str:
    """The processor's name, as it gives it, with family and model, which tell generations apart where a name does not."""
    said = _cpu()
    name = said.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {said['cpu family']}, model {said['model']}" if "cpu family" in said else name


def gpu_names() -> list[str]:
    """The CUDA devices that torch can use."""
    return (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )


def machine() -> dict[str, str]:
    """What a measurement needs to be told with: processor, level, threads, GPU, versions."""
    known = _library.registry()
    level = known["level"] + (" and AMX" if known["matrix_tiles"] else "")
    forced = " (AI3_OPS_ISA)" if os.environ.get("AI3_OPS_ISA") else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": f"{cpu_name()}, {cores} logical cores",
        "instruction set": level + forced,
        "threads": str(torch.get_num_threads()),
        "GPU": ", ".join(gpu_names()) or "none",
        "versions": f"ai3_ops {version()}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def version() -> str:
    """The installed package's version."""
    try:
        return metadata.version("ai3_ops")
    except metadata.PackageNotFoundError:
        return "from the source tree"
