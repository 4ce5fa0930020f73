"""The CUDA part: what is known without a GPU, and what only a GPU shows. Its kernels' values are tested in tests/cpp and, with a
GPU, in the tests of every operator."""

import contextlib
import itertools
import subprocess
import types
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ai3_ops
from ai3_ops import _library
from ai3_ops.calls.call import UNMEASURED
from ai3_ops.measuring import timing
from ai3_ops.operations.conv2d import Conv2dCall
from ai3_ops.operations.linear import LinearCall
from ai3_ops.surveying.describe import Described

LIBRARY = Path(ai3_ops.__file__).parent / "_C_cuda.so"
built = pytest.mark.skipif(
    not LIBRARY.exists() or not torch.version.cuda, reason="needs the CUDA part, which was not built"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@built
def test_every_file_of_the_cuda_part_is_an_algorithm():
    source = Path(ai3_ops.__file__).parent.parent / "csrc/cuda"
    if not source.is_dir():
        pytest.skip("needs the source tree, which a wheel has not")
    files = {
        (p.parent.name, p.stem) for p in source.glob("*/*") if p.suffix in (".cu", ".cpp") and p.parent.name != "core"
    }
    files.remove(("attention", "sparse"))  # what three of them call
    assert {(a.operation, a.name) for a in ai3_ops.algorithms(device="cuda") if not a.python} == files


@built
def test_cudnn_is_the_one_that_torch_loads():
    """A dependency by name, without a path: the process has one cuDNN."""
    tool = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=False)
    if tool.returncode:
        pytest.skip("needs readelf")
    assert "[libcudnn.so.9]" in tool.stdout
    assert "RPATH" not in tool.stdout
    assert "RUNPATH" not in tool.stdout


@built
@pytest.mark.parametrize("name", ["implicit_precomp_gemm", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cudnn_is_listed_for_every_dtype(dtype, name):
    (info,) = [a for a in ai3_ops.algorithms("conv2d", "cuda") if a.name == name]
    assert str(dtype).removeprefix("torch.") in info.dtypes
    assert info.deterministic
    assert info.accuracy == "exact"


@built
def test_packs_of_as_many_elements_differ_in_size():
    """A pack on CUDA is checked by its size alone: a tag in it could be read only by waiting for the device."""

    def conv2d(k, c, r, s):
        sizes = _library.Sizes([1, c, 9, 9, k, r, s, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0])
        return _library.packed_bytes("conv2d", "im2col", "cuda", torch.float32, sizes)

    def linear(rows, columns):
        names = _library.size_names("linear")
        sizes = {"in_features": columns, "out_features": rows}
        numbers = _library.Sizes([sizes.get(name, 1) for name in names])
        return _library.packed_bytes("linear", "gemm", "cuda", torch.float32, numbers)

    for a, b in itertools.permutations((8, 16, 64, 96, 512), 2):
        assert conv2d(a, b, 3, 3) != conv2d(b, a, 3, 3)
        assert linear(a, b) != linear(b, a)
    assert len({conv2d(64, 64, *window) for window in ((1, 9), (3, 3), (9, 1))}) == 3
    assert conv2d(64, 64, 3, 3) - 64 * 64 * 9 * 4 < 32 << 10


@needs_gpu
@pytest.mark.parametrize("name", ["implicit_precomp_gemm", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_cudnn_computes_the_convolution_on_any_stream(dtype, memory_format, name):
    x = torch.randint(-3, 4, (2, 8, 9, 11), device="cuda").to(dtype).to(memory_format=memory_format)
    w = torch.randint(-3, 4, (12, 4, 3, 3), device="cuda").to(dtype)
    b = torch.randint(-3, 4, (12,), device="cuda").to(dtype)
    expected = F.conv2d(x.double(), w.double(), b.double(), 2, 1, 1, 2).to(dtype)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = getattr(torch.ops.ai3, f"conv2d_{name}")(x, w, b, 2, 1, 1, 2)
        stream.synchronize()
        assert torch.equal(y, expected)
        if dtype != torch.float64:  # which ATen answers in NCHW whatever it gets, and we as ever
            assert y.stride() == F.conv2d(x, w, b, 2, 1, 1, 2).stride()


@needs_gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("scale", "mean"), [(1, 0), (1e-30, 0), (1e18, 0), (1e38, 0), (1e-2, 1000)])
def test_norms_are_those_of_the_cpu(scale, mean, memory_format):
    """Also of squares that float32 cannot hold, and of small differences from a mean that is not small."""
    x = torch.randn(3, 12, 9, 14).clamp(-3, 3).mul_(scale).add_(mean).to(memory_format=memory_format)
    w, b = torch.randn(2, 12)
    rows = torch.randn(14)
    for name, args in (
        ("group_norm", (4, w, b, 1e-5)),
        ("layer_norm", ([14], rows, None, 1e-5)),
        ("rms_norm", ([14], rows, 1e-5)),
    ):
        found = []
        for device in ("cpu", "cuda"):
            given = x.to(device).requires_grad_()
            moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
            y = getattr(torch.ops.ai3, f"{name}_direct")(given, *moved)
            (grad,) = torch.autograd.grad(y, given, x.sign().to(device))
            found.append((y.detach(), grad))
        for ours, expected in zip(found[1], found[0], strict=True):
            assert ours.stride() == expected.stride()
            assert (ours.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max(), name


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cublaslt_adds_the_bias_before_it_rounds(dtype):
    """Of slices, too, which lie at any multiple of their elements."""
    x = torch.randint(-3, 4, (130, 67), device="cuda").to(dtype)
    w = torch.randint(-3, 4, (33, 67), device="cuda").to(dtype)
    b = -(x[0].double() @ w.double().t()).to(dtype) + 0.25
    for rows, features in ((slice(1), 33), (slice(3, None), 31)):
        y = torch.ops.ai3.linear_cublaslt(x[rows], w[:features], b[:features])
        assert torch.equal(y, F.linear(x[rows].double(), w[:features].double(), b[:features].double()).to(dtype))


@needs_gpu
def test_a_pack_of_other_sizes_is_refused():
    pack = torch.ops.ai3._conv2d_im2col_pack(torch.randn(8, 16, 3, 3, device="cuda"))
    with pytest.raises(RuntimeError, match="needs a packed weight of"):
        torch.ops.ai3._conv2d_im2col_packed(torch.randn(1, 8, 9, 9, device="cuda"), pack, [16, 8, 3, 3])


@needs_gpu
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("name", ["implicit_precomp_gemm", "cudnn"])
def test_cudnn_runs_in_a_cuda_graph(name, called):
    """Also where its first call of the problem is the captured one, in which a plan is made."""
    conv2d = getattr(torch.ops.ai3, f"conv2d_{name}")
    x, w = torch.randn(1, 8, 14 + called, 14, device="cuda"), torch.randn(16, 8, 3, 3, device="cuda")
    conv2d(x if called else x[..., :3, :], w, None, 1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(x, w, None, 1, 1)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, conv2d(x, w, None, 1, 1))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_cudnn_reads_slices_that_begin_anywhere(dtype, memory_format):
    """Some engines read 16 bytes at once: the operator copies what begins elsewhere."""
    x = torch.randint(-3, 4, (3, 8, 9, 11), device="cuda").to(dtype).to(memory_format=memory_format)
    w, b = torch.randint(-3, 4, (16, 8, 3, 3), device="cuda").to(dtype), torch.arange(17, device="cuda").to(dtype)
    odd = x.flatten().new_empty(x.numel() + 1)[1:].as_strided(x.shape, x.stride()).copy_(x)
    expected = F.conv2d(x.double(), w.double(), b[1:].double(), 1, 1).to(dtype)
    for input in (odd, x):
        assert torch.equal(torch.ops.ai3.conv2d_cudnn(input, w, b[1:], 1, 1), expected)


@needs_gpu
def test_a_guess_is_one_of_cudnn_s_methods():
    x, w = torch.randn(10, 64, 56, 56, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    method = ai3_ops.resolve("conv2d", "guess", x, w, None, 1, 1)
    named = getattr(torch.ops.ai3, f"conv2d_{method}")
    assert torch.equal(torch.ops.ai3.conv2d_guess(x, w, None, 1, 1), named(x, w, None, 1, 1))


class _ToldCuda(torch.Tensor):
    """A tensor of the CPU that says it is one of a GPU."""

    is_cuda = True


def test_default_leaves_what_no_gpu_has_measured_to_pytorch(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    x = torch.randn(1, 3, 8, 8)
    swapped = ai3_ops.swap(model, {"*": "default", "0": "direct"}, x)
    with torch.inference_mode():
        assert swapped(x.as_subclass(_ToldCuda)).shape == (1, 5)
    rows = {row["name"]: row for row in ai3_ops.explain(swapped).to_dict()["layers"]}
    assert UNMEASURED in rows["3"]["reason"]
    assert rows["0"]["used"] == "direct"
    # Of a model that is on a GPU already, it is known when it is swapped, but for convolutions, of which some gain.
    monkeypatch.setattr(Described, "device", lambda self: "cuda:0")
    report = ai3_ops.explain(ai3_ops.swap(model[1:], "default")).to_dict()["layers"]
    assert {row["used"] for row in report} == {"torch"}
    assert [row for row in report if UNMEASURED in row["reason"]]


@pytest.mark.parametrize(
    ("change", "gains"),
    [
        ({}, True),
        ({"channels": 32}, False),
        ({"stride": 2}, False),
        ({"groups": 2, "channels": 128}, False),
        ({"dilation": 2}, False),
        ({"kernel": 1}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"format": torch.channels_last}, True),
        ({"size": 200}, False),
        ({"tf32": True}, False),
        ({"grad": True}, False),
    ],
)
def test_default_takes_winograd_where_a_gpu_has_shown_it_to_be_faster(change, gains, monkeypatch):
    at = {"channels": 64, "stride": 1, "groups": 1, "dilation": 1, "kernel": 3, "dtype": torch.float32} | change
    monkeypatch.setattr(Conv2dCall, "allow_tf32", staticmethod(lambda: change.get("tf32", False)))
    size = change.get("size", 256)
    x = torch.empty(1, at["channels"], size, size, dtype=at["dtype"])
    x = x.to(memory_format=change.get("format", torch.contiguous_format))
    w = torch.randn(64, at["channels"] // at["groups"], at["kernel"], at["kernel"], dtype=at["dtype"])
    w.requires_grad_(change.get("grad", False))
    call = Conv2dCall()
    args = (x, w, None, at["stride"], 1, at["dilation"], at["groups"])
    assert call.measured(args) == gains
    assert call.is_unmeasured((x.as_subclass(_ToldCuda), *args[1:])) != gains
    assert not call.is_unmeasured(args)  # on the CPU other rules hold
    # While a graph is made, sizes that may change are nobody's: PyTorch computes the call.
    monkeypatch.setattr("ai3_ops.calls.call._is_compiling", lambda: True)
    monkeypatch.setattr("ai3_ops._torch.has_constant_sizes", lambda values: False)
    assert call.is_unmeasured((x.as_subclass(_ToldCuda), *args[1:]))


@pytest.mark.parametrize(
    ("x", "w", "window", "may"),
    [
        ((1, 64, 9, 9), (64, 64, 3, 3), (1, 1, 1, 1), True),
        ((1, 64, 9, 9), (64, 64, 1, 1), (1, 0, 1, 1), False),
        ((1, 64, 9, 9), (64, 64, 3, 3), (2, 1, 1, 1), False),
        ((1, 64, 9, 9), (64, 64, 3, 3), (1, 1, 2, 1), False),
        ((1, 128, 9, 9), (128, 64, 3, 3), (1, 1, 1, 2), False),
        ((1, 32, 9, 9), (64, 32, 3, 3), (1, 1, 1, 1), False),
    ],
)
def test_layers_that_no_batch_gives_to_default_keep_their_class(x, w, window, may):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = (torch.empty(shape, dtype=dtype, device="meta") for shape in (x, w))
        problem = ai3_ops.registry.OPERATIONS["conv2d"].problem("", *tensors, None, *window)
        assert Conv2dCall.may_gain_on_cuda(problem) == (may and dtype == torch.float32)
    assert Conv2dCall.may_gain_on_cuda(None)
    assert not LinearCall.may_gain_on_cuda(None)


@built
@pytest.mark.parametrize(
    "operation",
    [
        "attention", "conv2d", "linear", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "relu",
        "batch_norm", "group_norm", "layer_norm", "rms_norm",
    ],
)  # fmt: skip
def test_the_rule_of_a_direct_call_is_listed(operation):
    assert any(a.name == "default" and a.rule for a in ai3_ops.algorithms(operation, "cuda"))


class _Event:
    """Of a GPU that takes 3 ms for whatever lies between two."""

    made: typing.ClassVar[list["_Event"]] = []

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.recorded = self.waited = False
        _Event.made.append(self)

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded
        self.waited = True

    def elapsed_time(self, end):
        assert self.recorded
        assert end.waited
        return 3.0


def test_a_gpu_times_by_events_and_flushes_its_own_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=40 << 20)
    )
    assert timing.Surroundings(1 << 40).bytes_on(torch.device("cuda")) == 50 << 20
    assert timing.Surroundings(7 << 20).bytes_on(torch.device("cuda")) == 7 << 20
    surroundings, calls = timing.Surroundings(1 << 20), []
    input = types.SimpleNamespace(device=torch.device("cpu"), is_cuda=True)
    assert surroundings.sample(lambda: calls.append("call"), lambda: calls.append("twin"), input) == 3e-3
    assert calls == ["twin", "call"]
    assert [e.waited for e in _Event.made] == [False, True]


@pytest.mark.parametrize(
    ("name", "given", "results"),
    [
        (
            "_flash_attention_forward",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left "
            "window_size_right",
            5,
        ),
        (
            "_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused scale "
            "window_size_left window_size_right",
            3,
        ),
    ],
)
def test_flash_gives_pytorch_its_operators_arguments(name, given, results):
    """csrc/cuda/flash.cpp hands them over by place; what follows is none there."""
    schema = getattr(torch.ops.aten, name).default._schema
    arguments, count = schema.arguments, len(given.split())
    assert [a.name for a in arguments[:count]] == given.split()
    assert all(isinstance(a.type, torch.OptionalType) and a.default_value is None for a in arguments[count:])
    assert [str(r.type) for r in schema.returns] == ["Tensor"] * results
    assert len(arguments) <= 32
