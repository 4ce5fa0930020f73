"""docs/pytorch.md: each line of its code shows what the page says of PyTorch. One that has become right leaves the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ai3_ops import _library, _machine

PAGE = Path(__file__).resolve().parent.parent / "docs/pytorch.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")


def program(number, *after):
    """A block of the page, and what follows it."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    return "\n".join(["import torch, torch.nn.functional as F", block, *after])


@pytest.fixture
def run(fork):
    """What a block prints in a process of its own, since they set switches."""
    return lambda *block: fork(program(*block))


def dies(number, limit=None):
    """Whether a block ends its process, at once or later, under glibc's checks of its heap, which see writes past ends."""
    env = os.environ | {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    done = subprocess.run(
        [sys.executable, "-c", program(number)], capture_output=True, text=True, env=env, timeout=limit
    )
    # A signal: an exception's traceback ends with 1.
    return done.returncode < 0


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="seen on AVX-512 alone")
def test_one_channel_in_channels_last(run):
    reference = "reference = F.conv2d(x.contiguous().double(), w.double(), None, (1, 2), (2, 0), (3, 1))"
    done = run(0, reference, "print(*(bool((y - reference).abs().max() < 1e-3) for y in (wrong, right)))")
    assert done.stdout.strip() == "False True", done.stderr


def test_a_bias_beside_a_weight_of_one_dimension(run):
    assert "RuntimeError: addmm: mat2 must be a matrix" in run(1).stderr


def test_the_old_tf32_switches(run):
    assert "RuntimeError" in run(2).stderr


@pytest.mark.skipif(not _library.registry()["processor_has_matrix_tiles"], reason="seen with AMX alone")
def test_a_bias_s_gradient_in_bfloat16():
    assert dies(3)


@pytest.mark.skipif(not _library.registry()["onednn_wide_vector"], reason="seen with AVX2")
def test_a_strided_1x1_weight_s_gradient():
    """Some way to die, or none: what is overwritten decides."""
    try:
        assert dies(4, limit=25)
    except subprocess.TimeoutExpired:
        return


def test_a_weight_s_gradient_in_groups_of_an_unbatched_image(run):
    done = run(5, "print(bool((wrong - right).abs().max() > 0.1 * right.abs().max()))")
    assert done.stdout.strip() == "True", done.stderr


def test_layer_norm_of_large_values(run):
    done = run(6, "print(bool((wrong - right).abs().max() < 0.1))")
    assert done.stdout.strip() == "False", done.stderr


def test_higher_derivatives_of_layer_norm(run):
    done = run(7, "print(bool((h - h.T).abs().max() > 0.1))")
    assert done.stdout.strip() == "True", done.stderr


def test_mixed_second_derivatives_of_batch_norm(run):
    done = run(8, "print(float(g(torch.ones(1, 2)).abs().max()))")
    assert done.stdout.strip() == "0.0", done.stderr


def test_group_norm_far_from_zero(run):
    ours = "ours = torch.ops.ai3.group_norm_direct(x.contiguous(memory_format=torch.channels_last), 2)"
    errors = "print(*(float((y - right).abs().max()) for y in (last, ours)))"
    done = run(9, "import ai3_ops", ours, errors)
    wrong, right = map(float, done.stdout.split())
    assert wrong > 0.1, done.stderr
    assert right < 1e-5


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="seen on AVX-512 alone")
@pytest.mark.skipif(
    "AMD EPYC, family 25," in _machine.cpu_name(), reason="not seen on Zen 4: zeros at every level of oneDNN"
)
def test_a_weight_s_gradient_of_what_meets_only_padding(run):
    done = run(10, "print(worst > 0)")
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="seen on AVX-512 alone")
def test_a_weight_s_gradient_with_a_dilation(fork):
    without_tiles = "import os; os.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX512_CORE'\n"
    done = fork(
        without_tiles + program(11, "print(float((wrong - right).abs().nan_to_num(1e30).max() / right.abs().max()))")
    )
    assert float(done.stdout) > 0.1, done.stderr


def test_a_maximum_outside_of_the_input(run):
    done = run(12, "print(int(at.max()) > 0 or int(at.min()) < 0)")
    assert done.stdout.strip() == "True", done.stderr


def test_float_masks_of_encoder_layers(run):
    done = run(13, "print(float((fast - right).detach().abs().nan_to_num(9.0).max()))")
    assert float(done.stdout) > 0.05, done.stderr
