"""A name is a promise: each name runs its own method. Multiplications are counted in tests/cpp/methods_test.cpp."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tester import ALGORITHMS, window_for
from torch import nn

import ai3_ops
from ai3_ops import _flags, _library, registry
from ai3_ops.checking.calling import profiled
from ai3_ops.checking.cases import Call, conv, few_calls

F32 = torch.float32


def own(operation):
    """The operation's own kernels."""
    return [a for a in ai3_ops.algorithms(operation, "cpu") if not (a.vendor or a.rule or a.python)]


OWN = {o: [a.name for a in own(o)] for o in ("conv2d", "linear")}  # before other tests of this process register more
VENDOR_NAMES = {o: [a.name for a in ai3_ops.algorithms(o, "cpu") if a.vendor] for o in OWN}


def workspace(name, channels=16, size=20, outputs=16, kernel=3):
    x, w = torch.empty(1, channels, size, size), torch.empty(outputs, channels, kernel, kernel)
    p = registry.OPERATIONS["conv2d"].problem("test", x, w)
    return registry.workspace_sizes("conv2d", name, "cpu", F32, **p.sizes)


def error(name, x, w):
    exact = torch.conv2d(x.double(), w.double())
    return ((getattr(torch.ops.ai3, f"conv2d_{name}")(x, w) - exact).abs().max() / exact.abs().max()).item()


def integers(*shape):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


def test_smm_packs_and_copies_nothing():
    assert workspace("smm") == 0


def test_direct_reads_the_image_where_it_lies():
    """Its memory is that of the packed weights, whatever the image; both implicit GEMMs have blocks or pointers of patches."""
    weights = 4 * 64 * 9 * 64
    for size in (56, 112):
        assert workspace("direct", channels=64, size=size, outputs=64) <= weights + 4096
        for implicit in ("implicit_gemm", "implicit_precomp_gemm"):
            assert workspace(implicit, channels=64, size=size, outputs=64) > weights + 2**18


LEVELS = list(_flags.levels())  # best first

# Which of PyTorch's operators a call runs; allocating is what every operator does.
ALLOCATES = {"aten::empty", "aten::empty_like", "aten::empty_strided"}
VIEWS = {"aten::unsqueeze", "aten::squeeze", "aten::as_strided"}  # which compute nothing: conv1d's images of height 1
VENDORS = {
    ("conv2d", "gemm"): "aten::bmm",
    ("conv1d", "onednn"): "aten::mkldnn_convolution",
    ("conv2d", "onednn"): "aten::mkldnn_convolution",
    ("linear", "onednn"): "mkldnn::",
}


@pytest.mark.parametrize("info", [a for a in ALGORITHMS if a.device == "cpu"], ids=lambda a: f"{a.operation}_{a.name}")
def test_own_methods_call_none_of_pytorch_s_operators(info):
    """For pools, relu and linear too, whose results alone could be ATen's."""
    calls = few_calls(info, 9, "float32" if "float32" in info.dtypes else None, large=True)
    call = next(c for c in calls if not c.case.layouts)  # a layout that a method does not read is copied for it
    arguments, options = call.arranged(*call.tensors), call.options(*call.tensors)
    with torch.inference_mode(), profiled() as profile:
        call.info.operator(*arguments, **options)
    called = {event.name for event in profile.events()} - ALLOCATES - VIEWS
    if info.vendor:
        assert any(name.startswith(VENDORS[info.operation, info.name]) for name in called), called
    else:
        assert called == {f"ai3::{info.operation}_{info.name}"}


def test_linear_gemm_packs_its_weight():
    p = registry.OPERATIONS["linear"].problem("test", torch.empty(16, 128), torch.empty(256, 128))
    assert registry.workspace_sizes("linear", "gemm", "cpu", F32, **p.sizes) >= 4 * 128 * 256


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_is_chosen_at_run_time(level, fork):
    """AI3_OPS_ISA takes a lower level than the processor's; its results are right, and one that is not here is an error."""
    program = (
        "import ai3_ops, torch\n"
        "from ai3_ops import _library, _machine\nfrom ai3_ops.cli import doctor\n"
        "x, w = torch.ones(1, 8, 9, 9), torch.ones(8, 8, 3, 3)\n"
        "assert (torch.ops.ai3.conv2d_direct(x, w) == 72).all()\n"
        "assert doctor.self_test() == []\n"
        "print(_library.registry()['level'], _machine.machine()['instruction set'])\n"
    )
    done = fork(program, AI3_OPS_ISA=level)
    if done.returncode:
        assert f"AI3_OPS_ISA={level} is not usable here" in done.stderr
        assert LEVELS.index(level) < LEVELS.index(_library.registry()["level"])
    else:
        tiles = level == "avx512" and _library.registry()["matrix_tiles"]
        assert done.stdout.split() == [level, level, *(["and", "AMX"] if tiles else []), "(AI3_OPS_ISA)"]


def test_an_unknown_level_is_an_error(fork):
    done = fork("import ai3_ops", AI3_OPS_ISA="sse9")
    assert done.returncode == 1
    assert "ImportError: ai3_ops: ai3: AI3_OPS_ISA=sse9 is not usable here; usable: " in done.stderr


# What each operation must have on the CPU.
NAMES = {
    "conv2d": "direct smm im2col kn2row implicit_gemm implicit_precomp_gemm gemm winograd winograd_f2 winograd_f4 "
    "winograd_f6 winograd_general winograd_f4_bf16 fft depthwise patch_gemm onednn guess default",
    "conv1d": "direct im2col implicit_precomp_gemm fft winograd depthwise patch_gemm onednn default",
    "linear": "gemm onednn gemm_bf16 default",
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "relu", "flatten"), "direct default"),
}


@pytest.mark.parametrize("operation", NAMES)
def test_every_name_is_there(operation):
    assert {a.name for a in ai3_ops.algorithms(operation, "cpu")} >= set(NAMES[operation].split())


@pytest.mark.parametrize("size", [56, 112, 224])
def test_im2col_has_8_mib_of_the_matrix_of_patches_and_implicit_gemm_small_blocks(size):
    """Batch 1, 64 channels: the 3x3 patches are C * R * S * OH * OW elements. im2col has them all, or in even parts."""
    matrix, weights = 4 * 64 * 9 * (size - 2) ** 2, 4 * 64 * 9 * 64
    explicit, implicit = (workspace(name, channels=64, size=size, outputs=64) for name in ("im2col", "implicit_gemm"))
    part = explicit - weights
    assert min(matrix, 6 << 20) <= part <= (8 << 20) + 2**12
    assert implicit <= weights + 2**19 + 2**12 < matrix / 4


EXACT = " ".join(a.name for a in own("conv2d") if a.accuracy == "exact")
# What rules choose. Of `guess`, what follows on any processor of up to 32 operations for each byte that its memory delivers.
CHOICES = [
    ("default", conv((1, 32, 14, 14), (32, 1, 3, 3), padding=1, groups=32), "depthwise"),
    ("default", conv((1, 32, 14, 14), (64, 1, 5, 5), 2, 2, groups=32), "depthwise"),
    ("default", conv((1, 64, 28, 28), (64, 64, 3, 3), padding=1), "winograd_f4"),
    ("default", conv((1, 256, 7, 7), (256, 256, 3, 3), padding=1), "winograd_f2"),
    ("default", conv((1, 64, 28, 28), (64, 64, 5, 5), padding=2), "winograd_general"),
    ("default", conv((1, 16, 56, 56), (16, 16, 3, 3), padding=1), "winograd_f4"),
    ("default", conv((1, 15, 56, 56), (64, 15, 3, 3), padding=1), "direct"),  # too few input channels
    ("default", conv((1, 64, 56, 56), (15, 64, 3, 3), padding=1), "direct"),  # too few output channels
    ("default", conv((1, 64, 28, 28), (64, 8, 3, 3), padding=1, groups=8), "direct"),  # too few of each group
    ("default", conv((1, 16, 14, 14), (53, 16, 3, 3), padding=1), "direct"),  # 2.99 MFLOP
    ("default", conv((1, 16, 14, 14), (54, 16, 3, 3), padding=1), "winograd_f4"),  # 3.05 MFLOP
    ("default", conv((1, 64, 28, 28), (64, 64, 3, 3), 2, 1), "direct"),
    ("default", conv((1, 64, 28, 28), (64, 64, 3, 3), 1, 2, 2), "direct"),
    ("default", conv((1, 64, 28, 28), (64, 64, 1, 1)), "direct"),
    ("winograd", conv((1, 64, 12, 12), (64, 64, 3, 3), padding=1), "winograd_f2"),
    ("winograd", conv((1, 64, 13, 13), (64, 64, 3, 3), padding=1), "winograd_f4"),
    *(
        ("winograd", conv((1, 32, 14, 14), (32, 32, *kernel), padding=2), "winograd_general")
        for kernel in ((5, 5), (1, 3), (3, 1), (1, 7), (7, 1))
    ),
    ("guess", conv((1, 64, 56, 56), (64, 64, 3, 3), padding=1), "winograd_f4"),
    ("guess", conv((1, 64, 56, 56), (64, 64, 11, 11), padding=5), "fft"),
    ("guess", conv((1, 64, 28, 28), (64, 64, 1, 1)), EXACT),
    ("guess", conv((1, 32, 14, 14), (32, 1, 3, 3), padding=1, groups=32), "depthwise"),
]


@pytest.mark.parametrize(("rule", "case", "names"), CHOICES)
def test_rules_choose_as_documented_and_compute_nothing_else(rule, case, names):
    call = Call(registry.algorithm("conv2d", rule, "cpu"), case, F32)
    p = registry.OPERATIONS["conv2d"].problem("test", *call.tensors, *case.arguments)
    chosen, why = registry.choice_sizes("conv2d", rule, "cpu", F32, **p.sizes)
    assert chosen in names.split()
    assert why
    assert torch.equal(call.run(), Call(registry.algorithm("conv2d", chosen, "cpu"), case, F32).run())


@pytest.mark.parametrize(("channels", "size"), [(64, 56), (256, 28), (512, 14)])
def test_guess_never_takes_the_least_accurate(channels, size):
    p = registry.OPERATIONS["conv2d"].problem(
        "test", torch.empty(1, channels, size, size), torch.empty(channels, channels, 3, 3)
    )
    assert registry.resolve_sizes("conv2d", "guess", "cpu", F32, **p.sizes) != "winograd_f6"


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (1, 7), (7, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize(("channels", "size"), [(16, 56), (512, 7), (512, 14)])
def test_nothing_picks_weights_of_fewer_bits_unasked(channels, size, kernel):
    p = registry.OPERATIONS["conv2d"].problem(
        "test", torch.empty(1, channels, size, size), torch.empty(channels, channels, *kernel)
    )
    for name in ("default", "winograd", "guess"):
        assert registry.resolve_sizes("conv2d", name, "cpu", F32, **p.sizes) != "winograd_f4_bf16"


def test_the_indirection_buffer_grows_with_pixels_not_with_channels():
    """A pointer for each output pixel and tap, whatever the channels; im2col's matrix grows by 48 * 9 * pixels."""
    pixels = 18 * 18
    few, many = (workspace("implicit_precomp_gemm", channels=c) for c in (16, 64))
    assert few >= 8 * 9 * pixels
    weights_and_copy = 4 * 32 * 9 * 48 + 4 * 20 * 20 * 48  # packed weights; an NCHW input is turned to NHWC
    assert many - few < weights_and_copy + 8 * 1024 < 4 * 48 * 9 * pixels


def test_transforms_round_as_only_they_do():
    """F2's matrices hold halves: no rounding on small integers. F4's divide by 243, F6's by 5775, FFT's hold sines."""
    x, w = integers(1, 16, 14, 14), integers(16, 16, 3, 3)
    assert error("winograd_f2", x, w) == 0
    f4, f6, fft = (error(name, x, w) for name in ("winograd_f4", "winograd_f6", "fft"))
    assert 0 < f4 < f6 < 1e-3
    assert 0 < fft < 1e-4


@pytest.mark.parametrize("name", [a.name for a in own("conv2d") if a.accuracy == "exact"])
def test_sums_of_products_are_exact_on_integers(name):
    window = window_for(name, 16)
    x, w = integers(1, 16, 14, 14), integers(16, 16 // window[-1], 3, 3)
    exact = torch.conv2d(x.double(), w.double(), None, *window)
    assert torch.equal(getattr(torch.ops.ai3, f"conv2d_{name}")(x, w, None, *window).double(), exact)


@pytest.mark.parametrize("name", [a.name for a in own("conv2d") if a.accuracy == "exact" and a.name != "patch_gemm"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_only_patches_hold_the_padding(name, layout):
    """Its zeros are NaN where they are multiplied with an infinite weight."""
    groups = 2 if name == "depthwise" else 1
    x, w = torch.ones(1, 2, 4, 5), torch.ones(2, 2 // groups, 3, 3)
    w[0, 0, 0, 0] = torch.inf
    y = getattr(torch.ops.ai3, f"conv2d_{name}")(x.contiguous(memory_format=layout), w, padding=1, groups=groups)
    border = torch.zeros(1, 2, 4, 5, dtype=torch.bool)
    if name in ("im2col", "implicit_gemm", "implicit_precomp_gemm"):
        border[0, 0, 0] = border[0, 0, :, 0] = True
    assert torch.equal(y.isnan(), border)


def into_a_slice(name, x, w, b, padding, before, after):
    """Written into channels of an NHWC tensor that has `before` and `after` others, which stay as they are."""
    pack = getattr(torch.ops.ai3, f"_conv2d_{name}_pack")(w, 1, padding)
    whole = torch.full((len(x), before + len(w) + after, *x.shape[2:]), 7.0).to(memory_format=torch.channels_last)
    y = whole[:, before : before + len(w)]
    getattr(torch.ops.ai3, f"_conv2d_{name}_packed_out")(x, pack, w.shape, b, 1, padding, out=y)
    assert (whole[:, :before] == 7).all()
    assert (whole[:, before + len(w) :] == 7).all()
    return y


# Where vectors are lines, those of 64 filters go past the caches; beside 8 other channels they are no whole lines and are asked
# for ahead, as narrower vectors are. 40 filters are no whole blocks: each tile is found alone, and 1x1 is the packed product.
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("filters", "beside"), [(64, 0), (64, 8), (40, 0)])
@pytest.mark.parametrize(("channels", "kernel"), [(3, 3), (16, 1)])
def test_direct_writes_large_outputs(channels, kernel, filters, beside, bias):
    x = integers(1, channels, 230, 148).to(memory_format=torch.channels_last)
    w, b = integers(filters, channels, kernel, kernel), integers(filters) if bias else None
    exact = torch.conv2d(x, w, b, padding=kernel // 2)
    assert exact.nbytes > 4 << 20
    y = into_a_slice("direct", x, w, b, kernel // 2, 0, beside)
    assert torch.equal(y, exact)


@pytest.mark.parametrize("name", ["winograd_f2", "winograd_f4", "fft"])
def test_transforms_write_large_outputs(name):
    """Past the caches, whole lines at a time, also at edge tiles and into slices."""
    x = integers(1, 8, 91, 75).to(memory_format=torch.channels_last)
    w, b = integers(64, 8, 3, 3), integers(64)
    exact = torch.conv2d(x.double(), w.double(), b.double(), padding=1)
    y = getattr(torch.ops.ai3, f"conv2d_{name}")(x, w, b, padding=1)
    assert y.nbytes > 3 << 19
    assert (y - exact).abs().max() <= 1e-4 * exact.abs().max()
    assert torch.equal(into_a_slice(name, x, w, b, 1, 16, 32), y)


def test_gemm_bf16_rounds_its_operands_and_nothing_else():
    """Of integers that need more bits than a bfloat16 has; sums of their products are exact in float32.

    Without instructions for pairs only the weight is rounded.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-1000, 1000, s, generator=generator).float() for s in ((33, 16), (37, 16)))
    y = torch.ops.ai3.linear_gemm_bf16(x, w).double()
    pairs = _library.registry()["level"] == "avx512" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert torch.equal(y, (x.bfloat16() if pairs else x).double() @ w.bfloat16().double().T)
    assert not torch.equal(y, x.double() @ w.double().T)
    assert torch.equal(torch.ops.ai3.linear_gemm(x, w).double(), x.double() @ w.double().T)


CALL = {"conv2d": "run(x, w[:, : 16 // window[-1]], None, *window)", "linear": "run(x[0, 0], x[0, 1])"}
ONEDNN = "torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)"
MKL = "torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON)"


@pytest.fixture(scope="module")
def logged():
    """What oneDNN and MKL print about one call of each algorithm, by the library's switch, the operation and the name."""
    switches = [s for s, there in ((ONEDNN, torch.backends.mkldnn), (MKL, torch.backends.mkl)) if there.is_available()]
    asked = [(s, o, name) for s in switches for o, names in OWN.items() for name in (*names, *VENDOR_NAMES[o])]
    lines = ["import os, torch, ai3_ops", "x, w = torch.randn(1, 16, 20, 20), torch.randn(16, 16, 3, 3)"]
    for i, (switch, operation, name) in enumerate(asked):
        lines += [f"window, run = {window_for(name, 16, padding=0)}, torch.ops.ai3.{operation}_{name}"]
        lines += [f"with torch.inference_mode(), {switch}:", f"    {CALL[operation]}"]
        lines += [f"os.write(1, b'end of {i}\\n')"]  # past Python's buffer, as the libraries write past it
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = re.split(r"end of \d+\n", done.stdout)
    assert len(said) == len(asked) + 1, done.stdout
    return dict(zip(asked, said[:-1], strict=True))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_onednn_says_that_it_ran(logged):
    assert "exec,cpu,convolution" in logged[ONEDNN, "conv2d", "onednn"]
    assert "exec,cpu,inner_product" in logged[ONEDNN, "linear", "onednn"]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_own_kernels_call_no_library(logged):
    for (switch, operation, name), said in logged.items():
        if name in OWN[operation]:
            assert ("exec,cpu" if switch == ONEDNN else "GEMM") not in said, name


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch without MKL")
def test_gemm_is_the_vendors(logged):
    assert "SGEMM" in logged[MKL, "conv2d", "gemm"]


@pytest.mark.parametrize("channels", [16, 24])  # whole lines, which go past the caches, and lines that are shared
def test_pools_write_large_outputs(channels):
    """10 and 15 MB of output, from an input that is prefetched."""
    x = torch.randn(2, channels, 600, 520, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(torch.ops.ai3.max_pool2d_direct(x, [3, 3], [2, 2], [1, 1]), nn.functional.max_pool2d(x, 3, 2, 1))
    mean = torch.ops.ai3.avg_pool2d_direct(x, [2, 2], [2, 2])
    torch.testing.assert_close(mean, nn.functional.avg_pool2d(x, 2, 2))
    mean = torch.ops.ai3.adaptive_avg_pool2d_direct(x, [1, 2])
    torch.testing.assert_close(mean, nn.functional.adaptive_avg_pool2d(x.double(), (1, 2)).float())


@pytest.mark.parametrize("beyond", [0, 37])
def test_relu_writes_large_outputs(beyond):
    """From 32 MiB on past the caches, but for the rest of a vector."""
    x = torch.randn((8 << 20) + beyond)
    assert torch.equal(torch.ops.ai3.relu_direct(x), x.relu())
