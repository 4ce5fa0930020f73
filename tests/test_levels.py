"""Gradients and the forms of `onednn` at each level of oneDNN that this processor has: levels.py, under malloc's checks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ai3_ops import _library

PROGRAM = Path(__file__).parent / "levels.py"
# Each with the flag of /proc/cpuinfo without which it is the one before, and PyTorch's own level beside it.
LEVELS = {
    "SSE41": ("sse4_1", "default"),
    "AVX": ("avx", "default"),
    "AVX2": ("avx2", "avx2"),
    "AVX2_VNNI": ("avx_vnni", "avx2"),
    "AVX512_CORE": ("avx512dq", ""),
    "AVX512_CORE_VNNI": ("avx512_vnni", ""),
    "AVX512_CORE_BF16": ("avx512_bf16", ""),
    "AVX512_CORE_FP16": ("avx512_fp16", ""),
    "AVX512_CORE_AMX": ("amx_bf16", ""),
}


def flags() -> set[str]:
    """Of the processor; none where Linux says it in another way."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def at(level: str, *command: str, limit: float) -> subprocess.CompletedProcess[str]:
    """A Python process that oneDNN and PyTorch limit to a level, and in which glibc looks at its heap."""
    torch_level = LEVELS[level][1]
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": level, "MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    env |= {"ATEN_CPU_CAPABILITY": torch_level} if torch_level else {}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=limit)


here = [level for level, (flag, _) in LEVELS.items() if flag in flags()]
each_level = pytest.mark.parametrize("level", here)
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap's checks are glibc's")


def check(level: str, each: int, limit: float) -> None:
    """By levels.py on every so many layers."""
    done = at(level, str(PROGRAM), str(each), limit=limit)
    said = done.stdout.splitlines()
    assert done.returncode == 0, f"{said[-1:]}: {done.stderr[-2000:]}"
    assert said[-1].startswith("passed "), said[-1:]


@pytest.mark.parametrize(
    "level",
    [level if level in ("AVX2", here[-1]) else pytest.param(level, marks=pytest.mark.full) for level in here],
)
def test_gradients_and_onednn_at_each_level(level):
    check(level, 120 if level == here[-1] else 240, limit=600)


@pytest.mark.full
@each_level
def test_all_gradients_and_onednn_at_each_level(level):
    check(level, 1, limit=7200)


@each_level
def test_the_rule_knows_the_level(level, fork):
    """oneDNN reads the variable when it is first asked for something, which the import of torch does not."""
    program = "from ai3_ops import _library; print(_library.registry()['onednn_wide_vector'])"
    expected = 0 if level in ("SSE41", "AVX") else 8 if level.startswith("AVX2") else 16
    done = fork(program, ONEDNN_MAX_CPU_ISA=level)
    assert done.stdout.split() == [str(expected)], done.stderr


def test_what_onednn_is_not_limited_to_is_the_processor_s():
    wide = _library.registry()["onednn_wide_vector"]
    assert wide == (16 if "avx512dq" in flags() else 8 if "avx2" in flags() else 0)
