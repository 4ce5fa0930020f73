"""Edges of what tensors, switches and processes can be, each of which once gave a wrong answer or an error."""

import ast
import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from modules import Modes, close
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import ai3_ops
from ai3_ops import _torch, explain, registry, swap

ROOT = str(Path(ai3_ops.__file__).parent.parent)


@pytest.fixture
def run(fork):
    """Runs code in a process of its own and returns what it printed."""

    def printed(code, *arguments):
        done = fork(code, *arguments, PYTHONPATH=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


# Tangents -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(3, 4, 3), (2, 3, 7, 7)),
        (nn.Linear(5, 3), (2, 5)),
        (nn.ReLU(), (3, 4)),
        (nn.MaxPool2d(2), (1, 2, 6, 6)),
        (nn.AvgPool2d(2), (1, 2, 6, 6)),
        (nn.AdaptiveAvgPool2d(2), (1, 2, 6, 6)),
        (nn.Flatten(), (2, 3, 4)),
    ],
    ids=lambda v: str(v),
)
def test_no_grad_keeps_tangents(module, shape):
    """no_grad is about backward mode alone, in PyTorch as here."""
    x, t = torch.randn(shape), torch.randn(shape)
    swapped = swap(module, {"*": "onednn"} if isinstance(module, nn.Conv2d) else {"*": "direct", "linear": "gemm"})
    with torch.no_grad():
        swapped(x)  # leaves a pack and a plan
        with forward_ad.dual_level():
            expected, actual = (
                forward_ad.unpack_dual(m(forward_ad.make_dual(x, t))).tangent for m in (module, swapped)
            )
            close(swapped(x), module(x))  # without a tangent
    assert actual is not None
    close(actual, expected)


# Tensor subclasses ----------------------------------------------------------------------------------------------------
class Halved(torch.Tensor):
    """Stored as half of its values, as quantized tensors are stored as something else; knows how to be a weight of linear."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype, device=half.device)

    def __init__(self, half):
        self.half_of = half

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(args[0].half_of.clone())
        if func in (torch.ops.aten.t.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            return func(*tree_map(lambda a: a.half_of * 2 if isinstance(a, cls) else a, args), **(kwargs or {}))
        raise NotImplementedError(f"Halved knows no {func}")


class Named(nn.Parameter):
    """A parameter that is a tensor in every respect."""


def halve(linear):
    linear.weight = nn.Parameter(Halved(linear.weight.detach() / 2), requires_grad=False)
    return linear


def test_weights_that_compute_by_themselves_stay_pytorchs():
    model, x = nn.Sequential(halve(nn.Linear(4, 3)), nn.Linear(3, 2)), torch.randn(5, 4)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"1 of 2 layers keep PyTorch's implementation: .* \(gemm: 1\)"):
        swapped = swap(model, {"linear": "gemm"})
    close(swapped(x), expected)
    first, second = explain(swapped).layers
    assert (first.used, second.used) == ("torch", "gemm")
    assert first.reason == "gemm reads plain tensors, not Halved, which computes by itself"
    with pytest.raises(ValueError, match="reads plain tensors, not Halved"):
        swap(model, {"0": "gemm"})
    assert "onednn" not in str(explain(swapped))


def test_weights_that_begin_to_compute_by_themselves():
    """As torchao's quantize_ leaves a model that was swapped before."""
    swapped, x = swap(nn.Sequential(nn.Linear(4, 3)), {"linear": "gemm"}), torch.randn(5, 4)
    expected = swapped(x)
    halve(swapped[0])
    close(swapped(x), expected)
    (layer,) = explain(swapped).layers
    assert layer.torch_calls == 1
    assert "not Halved" in layer.reason


def test_parameters_of_a_class_of_their_own_are_tensors():
    model = nn.Linear(4, 3)
    model.weight = Named(model.weight.detach())
    swapped, x = swap(model, {"linear": "gemm"}), torch.randn(5, 4)
    close(swapped(x), model(x))
    assert explain(swapped).layers[0].torch_calls == 0


# PyTorch's switches ---------------------------------------------------------------------------------------------------
TF32 = {  # what is read for conv2d and for linear
    "pass": (True, False),
    "torch.backends.cudnn.allow_tf32 = False": (False, False),
    "torch.backends.cuda.matmul.allow_tf32 = True": (True, True),
    "torch.backends.fp32_precision = 'ieee'": (False, False),
    "torch.backends.fp32_precision = 'tf32'": (True, True),
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "torch.backends.cudnn.allow_tf32 = False; torch.backends.fp32_precision = 'tf32'": (True, True),
    "torch.set_float32_matmul_precision('high')": (True, True),
}


def test_tf32_is_read_however_it_was_set(run):
    """Reading the old switches raises once the new ones are set: each in a fork of one process that has set none."""
    code = """
import os, sys, torch, torch._dynamo
from ai3_ops.calls.call import Call
for setting in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(setting)
        f = torch.compile(lambda x: x + Call.by_name["conv2d"].allow_tf32(), fullgraph=True, backend="eager")
        print(Call.by_name["conv2d"].allow_tf32(), Call.by_name["linear"].allow_tf32(), bool(f(torch.zeros(1))), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""
    said = run(code, *TF32).splitlines()
    assert dict(zip(TF32, said, strict=True)) == {
        s: f"{conv2d} {linear} {conv2d}" for s, (conv2d, linear) in TF32.items()
    }


# Pickles --------------------------------------------------------------------------------------------------------------
def test_modules_that_stay_pytorchs_are_unpickled_without_this_package(tmp_path, run):
    model = nn.Sequential(nn.Conv2d(1, 2, 5, stride=2), nn.Conv2d(2, 2, 3), nn.MultiheadAttention(4, 1), nn.ReLU())
    with pytest.warns(UserWarning, match="layers keep PyTorch's implementation"):
        swapped = swap(model, {"conv2d": "winograd", "linear": "gemm"})
    used = [(layer.used, layer.reason) for layer in explain(swapped).layers]
    assert [u for u, _ in used] == ["torch", "winograd", "torch", "torch"]
    assert "stride" in used[0][1]
    for index in (0, 2, 3):
        assert b"ai3_ops" not in pickle.dumps(swapped[index])
    code = (
        "import sys, torch\n"
        "sys.modules['ai3_ops'] = None  # any import of it is an error\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(tuple(model(torch.ones(1, 1, 5, 5)).shape))\n"
    )
    torch.save(swapped[0], tmp_path / "layer.pt")
    assert run(code, str(tmp_path / "layer.pt")).strip() == "(1, 2, 1, 1)"
    for other in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert [(layer.used, layer.reason) for layer in explain(other).layers] == used
        assert explain(other).unreached == explain(swapped).unreached
        with_relu = swap(other, {"relu": "direct"})  # what no selector matches keeps its reason
        assert [(layer.used, layer.reason) for layer in explain(with_relu).layers][:2] == used[:2]


def test_functional_calls_that_stay_pytorchs_are_remembered_in_plain_values():
    swapped = swap(nn.Sequential(Modes(), nn.Conv2d(1, 1, 3)), {"1": "direct"})
    before = explain(swapped).to_dict()["layers"]
    assert b"ai3_ops" not in pickle.dumps(swapped[0])
    buffer = io.BytesIO()
    torch.save(swapped, buffer)
    buffer.seek(0)
    assert explain(torch.load(buffer, weights_only=False)).to_dict()["layers"] == before


# Sizes ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "w"),
    [((3, 0), (4, 0)), ((2, 3, 0), (4, 0)), ((0,), (4, 0)), ((3, 5), (0, 5)), ((0, 3, 0), (4, 0))],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["gemm", "onednn", "default"])
def test_gradients_of_linear_without_features(algorithm, x, w):
    tensors = [torch.randn(x), torch.randn(w), torch.randn(w[:-1])]
    results = []
    for function in (F.linear, getattr(torch.ops.ai3, f"linear_{algorithm}")):
        given = [t.clone().requires_grad_() for t in tensors]
        output = function(*given)
        results.append((output, *torch.autograd.grad(output.square().sum(), given)))
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected)


def of_one_channel(layout, n, h, w):
    if layout == "slice":
        return torch.randn(n, 6, h, w).contiguous(memory_format=torch.channels_last)[:, 2:3]
    if layout == "channels_last":
        return torch.randn(n * h * w).as_strided((n, 1, h, w), (h * w, 1, w, 1))
    return torch.randn(n, 1, h, w)


@pytest.mark.parametrize("weight", ["slice", "channels_last", "contiguous"])
@pytest.mark.parametrize("input", ["slice", "channels_last", "contiguous"])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [((1, 2), (2, 0), (3, 1)), ((1, 3), (0, 0), (2, 1)), (1, 1, 1)]
)
def test_onednn_of_one_channel(input, weight, stride, padding, dilation):
    """PyTorch's own float32 convolution reads beyond such operands (docs/pytorch.md)."""
    for n in (1, 3):
        x, w = of_one_channel(input, n, 37, 6), of_one_channel(weight, 8, 5, 5)
        expected = F.conv2d(x.double().contiguous(), w.double().contiguous(), None, stride, padding, dilation)
        y = torch.ops.ai3.conv2d_onednn(x, w, None, stride, padding, dilation)
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-5)
        assert y.is_contiguous(memory_format=torch.channels_last) == ({input, weight} != {"contiguous"})


def test_onednn_supports_answers_where_pytorch_cannot_tell(run):
    """As where PyTorch was built without oneDNN: `supports` once threw what the question's operator threw."""
    code = """
import torch, warnings
warnings.simplefilter("ignore")
library = torch.library.Library("mkldnn", "IMPL")
def no():
    raise RuntimeError("built without oneDNN")
for dtype in ("bf16", "fp16"):
    library.impl(f"_is_mkldnn_{dtype}_supported", no, "CompositeImplicitAutograd")
import ai3_ops
x = torch.ones(1, 2, 5, 5, dtype=torch.bfloat16)
print(ai3_ops.supports("conv2d", "onednn", x, x))
print(ai3_ops.supports("linear", "onednn", x.half()[0, 0], x.half()[0, 0]))
print(ai3_ops.supports("conv2d", "onednn", x.float(), x.float()))
"""
    answers = run(code).splitlines()
    assert answers[0] == "(False, 'oneDNN does not compute in bfloat16 on this processor')"
    assert answers[1] == "(False, 'oneDNN does not compute in float16 on this processor')"
    assert answers[2] == "(True, '')"


SIZES = {
    "in_channels": 16, "in_height": 9, "in_width": 9, "out_channels": 16, "kernel_height": 3, "kernel_width": 3, "stride_h": 1,
    "stride_w": 1, "pad_h": 0, "pad_w": 0, "dilation_h": 1, "dilation_w": 1, "groups": 1, "batch": 2,
}  # fmt: skip


@pytest.mark.parametrize("missing", [("batch",), ("in_height", "in_width"), ("batch", "in_height"), ("in_channels",)])
@pytest.mark.parametrize(
    "algorithm", ["gemm", "im2col", "direct", "winograd_f4", "fft", "implicit_precomp_gemm", "default"]
)
def test_workspace_of_sizes_that_are_not_known_is_refused(algorithm, missing):
    """-1, which says so, was a factor like others: two of them made a number that looked right."""
    for unknown in (None, -1, -7):
        sizes = SIZES | dict.fromkeys(missing, unknown)
        assert registry.supports_sizes("conv2d", algorithm, "cpu", torch.float32, **sizes)[0]
        with pytest.raises(RuntimeError, match="needs every size for its workspace"):
            registry.workspace_sizes("conv2d", algorithm, "cpu", torch.float32, **sizes)
    assert registry.workspace_sizes("conv2d", algorithm, "cpu", torch.float32, **SIZES) < 2**32


def test_packs_of_sizes_that_are_not_known_are_refused():
    with pytest.raises(RuntimeError, match="needs the weight's sizes for its pack"):
        registry.packed_bytes_sizes("conv2d", "winograd_f4", "cpu", torch.float32, **SIZES | {"in_channels": None})
    with pytest.raises(RuntimeError, match="needs the weight's sizes for its pack"):
        registry.packed_bytes_sizes("linear", "gemm", "cpu", torch.float32, rows=3, in_features=4)
    without_input = SIZES | {"batch": None, "in_height": None, "in_width": None}
    known = registry.packed_bytes_sizes("conv2d", "winograd_f4", "cpu", torch.float32, **SIZES)
    assert registry.packed_bytes_sizes("conv2d", "winograd_f4", "cpu", torch.float32, **without_input) == known


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_queries_of_inputs_that_no_window_fits_into_are_refused(stride):
    """(1 - 2) / 2 + 1 is 1 where division rounds towards zero, and (1 - 3) + 1 is -1, which says unknown."""
    for size, kernel in ((1, 2), (1, 3), (2, 5)):
        sizes = SIZES | {"in_height": size, "kernel_height": kernel, "stride_h": stride, "stride_w": stride}
        answer = registry.supports_sizes("conv2d", "direct", "cpu", torch.float32, **sizes)
        assert answer == (
            False,
            f"needs a padded input no smaller than the kernel's extent, got {size} and {kernel}",
        )


# PyTorch's private interfaces -----------------------------------------------------------------------------------------
def private_names(source):
    """What code takes of PyTorch by a name that begins with an underscore; operators' names are no interfaces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            found = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        names = [name for name in found if re.match(r"(torch|forward_ad)\b(?!\.ops)", name)]
        yield from (name for name in names if re.search(r"\._[^_]", name))


def test_private_interfaces_stand_in_one_file_a_language():
    assert [*private_names("import torch._guards\nfrom torch.utils import _pytree\ntorch._C.f()\ntorch.ops.ai3._g()")] == [
        "torch._guards", "torch.utils._pytree", "torch._C.f", "torch._C",
    ]  # fmt: skip
    package = Path(ai3_ops.__file__).parent
    others = {package / name for name in ("_torch.py", "cli/peers.py")}  # a peer's compiler is set up as its users do
    found = {str(path): [*private_names(path.read_text())] for path in {*package.rglob("*.py")} - others}
    assert {path: names for path, names in found.items() if names} == {}
    sources = [path for folder in ("csrc/ops", "csrc/cuda") for path in Path(ROOT, folder).rglob("*.*")]
    detail = [path.name for path in sources if "stable::detail" in path.read_text()]
    assert detail == (["stable.h"] if sources else [])


def test_what_changes_operators_is_seen():
    x, seen = torch.ones(2), []

    def look(t):
        seen.append((_torch.transformed(t), _torch.in_transform(), _torch.tracing_state() is not None))
        return t * 2

    look(x)
    torch.func.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    with FlopCounterMode(display=False):
        look(x)
    assert seen == [(False, False, False), (True, True, False), (True, False, True), (True, False, False)]
    for other in (nn.Parameter(x), x.to("meta"), _torch.FakeTensorMode().from_tensor(x)):
        assert _torch.transformed(other)
    assert not _torch.in_forward_mode()
    assert not _torch.any_autocast()
    with torch.autocast("cpu"):
        assert _torch.any_autocast()
    with forward_ad.dual_level():
        assert _torch.in_forward_mode()
        assert _torch.transformed(x)
    assert _torch.any_requires_grad(1, x, nn.Parameter(x))
    assert not _torch.any_requires_grad(1, x)
    own = [
        _torch.has_kernels_of_its_own(t)
        for t in (Halved(x), x, nn.Parameter(x), _torch.FakeTensorMode().from_tensor(x))
    ]
    assert own == [True, False, False, False]


def test_kernels_for_the_dispatchers_keys():
    """An operator of y = 2 x whose gradient says 3, and which autocast halves first."""
    library, keys = torch.library.Library("ai3_edges", "FRAGMENT"), []
    library.define("twice(Tensor x) -> Tensor")
    op = torch.ops.ai3_edges.twice.default

    class Rule(_torch.SingleLevelFunction):
        @staticmethod
        def forward(keys, x):
            with _torch.derivatives((False, True)):
                assert forward_ad._is_fwd_grad_enabled()
                return _torch.below_autograd(op, keys, (x,), {})

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return None, 3 * grad

    def cast(x):
        with _torch.below_autocast():
            return op(x / 2)

    def select(keyset, x):
        keys.append(keyset)
        return op.redispatch(keyset & _torch.after_backend_select(), x)

    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda keyset, x: Rule.apply_here(keyset, x), "Autograd", with_keyset=True)
    library.impl("twice", cast, "AutocastCPU")
    library.impl("twice", select, "BackendSelect", with_keyset=True)
    x = torch.full((2,), 5.0, requires_grad=True)
    op(x).sum().backward()
    assert (x.grad == 3).all()
    assert torch.func.grad(lambda x: op(x).sum())(x.detach()).tolist() == [3, 3]
    with torch.autocast("cpu"):
        assert op(x).tolist() == [5, 5]
    with torch.inference_mode():
        assert op(x).tolist() == [10, 10]
    assert len(keys) == 4


def test_what_compilers_are_told():
    stream = io.StringIO("41")  # whose calls are in no graph

    @_torch.constant_when_compiled
    def read():
        return int(stream.read())

    assert torch.compile(lambda x: x + read(), backend="eager", fullgraph=True)(torch.ones(1)).item() == 42
    graph = torch.fx.symbolic_trace(lambda x: (x.relu() + 1,))
    x = torch.randn(5)
    close(_torch.compiled_by_inductor(graph, [x])(x)[0], x.relu() + 1)
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        assert torch._guards.TracingContext.try_get()
        with _torch.outside_of_compilation():
            assert not torch._guards.TracingContext.try_get()
    assert _torch.pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    with pytest.raises(RuntimeError, match="words"):
        _torch.check(False, lambda: "words")


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 0x7F81), (torch.float16, 0x7C01)])
def test_copies_of_16_bits_keep_signalling_nan(dtype, bits):
    x = torch.full((2, 20, 5, 7), bits, dtype=torch.int16).view(dtype).contiguous(memory_format=torch.channels_last)
    flat = torch.ops.ai3.flatten_direct(x, 1)
    assert flat.view(torch.int16).eq(bits).all()


IMAGE, WEIGHT = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (((1, 3, 8, 8), WEIGHT), {}, "ai3::conv2d_direct needs a tensor as input, got tuple"),
        ((IMAGE, WEIGHT), {"input": IMAGE}, "ai3::conv2d_direct got 'input' by position and by name"),
        ((IMAGE, WEIGHT, 3), {}, "ai3::conv2d_direct needs a tensor as bias, got int"),
    ],
)
def test_queries_name_what_they_were_given(args, kwargs, words):
    for ask in (ai3_ops.supports, ai3_ops.workspace):
        with pytest.raises(TypeError, match=re.escape(words)):
            ask("conv2d", "direct", *args, **kwargs)
