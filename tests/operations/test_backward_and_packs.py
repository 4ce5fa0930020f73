"""Backward, mixed and packed operators of conv2d and linear, against ATen in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tester import window_for

import ai3_ops
from ai3_ops import _library
from ai3_ops.checking.calling import profiled
from ai3_ops.operations import activations

ops = torch.ops.ai3
GEOMETRIES = [
    # input, weight, stride, padding, dilation, groups
    ((2, 4, 7, 6), (6, 4, 3, 3), 1, 1, 1, 1),
    ((2, 4, 7, 6), (6, 4, 3, 3), 1, 0, 1, 1),
    ((1, 4, 8, 9), (6, 2, 3, 2), (2, 3), (1, 0), (1, 2), 2),
    ((2, 4, 8, 7), (4, 1, 3, 3), 2, 1, 1, 4),
    ((2, 3, 5, 5), (2, 3, 1, 1), 2, 1, 1, 1),  # padding beyond the kernel: cropped
    ((1, 2, 6, 6), (2, 2, 2, 2), 3, 3, 2, 1),
    ((4, 7, 6), (6, 4, 3, 3), 1, 1, 1, 1),  # unbatched
    ((0, 4, 7, 6), (6, 4, 3, 3), 1, 1, 1, 1),
]


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def names(operation: str, **properties: object) -> list[str]:
    found = ai3_ops.algorithms(operation, "cpu")
    return [a.name for a in found if all(getattr(a, k) == v for k, v in properties.items())]


def aten_gradients(x, w, grad, *window):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    b = torch.zeros(w.shape[0], dtype=w.dtype, requires_grad=True)
    return torch.autograd.grad(F.conv2d(x, w, b, *window), (x, w, b), grad)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("algorithm", ["", "direct", "gemm"])
def test_conv2d_gradients(geometry, layout, algorithm):
    xs, ws, *window = geometry
    x, w = data(*xs), data(*ws).contiguous(memory_format=layout)
    if x.ndim == 4:
        x = x.contiguous(memory_format=layout)
    y = F.conv2d(x, w, None, *window)
    grad = torch.randn_like(y)
    expected = aten_gradients(x, w, grad, *window)
    for wanted in ([True] * 3, [True, False, False], [False, True, False], [False, False, True], [False] * 3):
        if algorithm:
            got = ops._conv2d_mixed_backward(
                grad, x, w, *window, wanted, forward="direct", backward_input=algorithm, backward_weight=algorithm
            )
        else:
            got = ops._conv2d_direct_backward(grad, x, w, *window, wanted)
        for g, e, flag in zip(got, expected, wanted, strict=True):
            if not flag:
                assert g.shape == (0,)
                continue
            torch.testing.assert_close(g, e)
            if e.ndim == 4 and e.numel():
                assert g.is_contiguous(memory_format=layout)


# Where PyTorch's own gradient of the weight is wrong (docs/pytorch.md). Input, its strides (None: channels_last), weight, stride,
# padding, groups, dtype.
WRONG = [
    ((2, 5, 28, 28), None, (16, 5, 1, 1), 2, 0, 1, torch.float32),
    ((2, 3, 28, 28), None, (16, 3, 1, 1), 2, 0, 1, torch.float32),
    ((2, 6, 28, 28), None, (16, 6, 1, 1), 2, 0, 1, torch.float32),
    ((2, 2, 28, 28), None, (16, 2, 1, 1), 2, 0, 1, torch.float32),
    ((2, 15, 30, 30), None, (32, 15, 1, 1), 3, 0, 1, torch.float32),
    ((2, 3, 37, 14), None, (1, 3, 1, 1), (1, 2), 0, 1, torch.float32),
    ((2, 3, 96, 96), None, (48, 3, 1, 1), 2, 0, 1, torch.float32),
    ((1, 4, 28, 28), (4 * 28 * 28, 1, 4 * 28, 4), (24, 4, 1, 1), (2, 1), 0, 1, torch.float32),
    ((4, 28, 28), (1, 4 * 28, 4), (24, 4, 1, 1), (2, 1), 0, 1, torch.float32),
    ((6, 13, 14), (1, 84, 6), (8, 3, 3, 1), (1, 2), 1, 2, torch.float64),
    ((6, 7, 28), (1, 168, 6), (32, 3, 1, 3), (1, 2), (0, 3), 2, torch.float64),
    ((6, 28, 28), (1, 168, 6), (64, 3, 3, 3), (3, 1), 1, 2, torch.bfloat16),
    ((96, 7, 21), (1, 96 * 21, 96), (48, 32, 3, 1), (3, 1), (2, 1), 3, torch.float16),
]


@pytest.mark.parametrize("case", WRONG, ids=str)
@pytest.mark.parametrize("algorithm", ["default", "gemm", "direct", "smm", "im2col", "implicit_gemm", "guess"])
def test_gradients_that_pytorch_gets_wrong(case, algorithm):
    sizes, strides, weight, stride, padding, groups, dtype = case
    exact = data(*sizes).to(dtype).double().requires_grad_(), data(*weight).to(dtype).double().requires_grad_()
    x = data(*sizes).to(dtype)
    if strides is None:
        x = x.contiguous(memory_format=torch.channels_last)
    else:
        x = torch.empty_strided(sizes, strides, dtype=dtype).copy_(x)
    x.requires_grad_()
    w = data(*weight).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = getattr(ops, f"conv2d_{algorithm}")(x, w, None, stride, padding, 1, groups)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(F.conv2d(*exact, None, stride, padding, 1, groups), exact, grad.double())
    for g, e in zip(torch.autograd.grad(y, (x, w), grad), expected, strict=True):
        assert (g.double() - e).abs().max() <= {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize] * e.abs().max()


def test_mixed_forward_and_refusal():
    x, w, b = data(2, 4, 7, 6), data(6, 4, 3, 3), data(6)
    y = ops._conv2d_mixed(x, w, b, 1, 1, forward="gemm", backward_input="direct")
    torch.testing.assert_close(y, F.conv2d(x, w, b, 1, 1))
    with pytest.raises(RuntimeError, match=r"gradient of the weight: ai3::conv2d_winograd.*needs"):
        ops._conv2d_mixed_backward(y, x, w, 1, 1, 1, 1, [True] * 3, forward="direct", backward_weight="winograd")
    with pytest.raises(RuntimeError, match="no conv2d algorithm 'nothing'"):
        ops._conv2d_mixed(x, w, b, forward="nothing")
    with pytest.raises(RuntimeError, match="grad_output of the output's sizes"):
        ops._conv2d_direct_backward(x, x, w, 1, 1, 1, 1, [True] * 3)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "wanted"),
    [
        ((1, 128, 56, 56), (128, 128, 1, 7), (1, 2), (0, 3), "backward_input"),
        ((100, 32, 6, 6), (16, 32, 4, 4), 1, 0, "backward_weight"),
    ],
)
def test_what_own_gradients_cannot_do_is_the_transposed_problem(shape, kernel, stride, padding, wanted):
    x, w = data(*shape), data(*kernel)
    grad = torch.randn_like(F.conv2d(x, w, None, stride, padding))
    chosen = {"forward": "direct", wanted: "winograd_general"}
    found = ops._conv2d_mixed_backward(grad, x, w, stride, padding, 1, 1, [True] * 3, **chosen)
    for g, e in zip(found, aten_gradients(x, w, grad, stride, padding), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("algorithm", names("linear"))
def test_linear_gradients(algorithm):
    info = ai3_ops.registry.algorithm("linear", algorithm, "cpu")
    dtype = torch.float64 if "float64" in info.dtypes else torch.float32
    close = {"rtol": 5e-2, "atol": 5e-2} if info.accuracy == "approximate" else {}
    x, w, grad = data(5, 3).to(dtype), data(4, 3).to(dtype), data(5, 4).to(dtype)
    expected = (grad @ w, grad.T @ x, grad.sum(0))
    for got in (
        getattr(ops, f"_linear_{algorithm}_backward")(grad, x, w, [True] * 3),
        ops._linear_mixed_backward(
            grad, x, w, [True] * 3, forward=algorithm, backward_input=algorithm, backward_weight=algorithm
        ),
    ):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, **close)
    torch.testing.assert_close(ops._linear_mixed(x, w, forward=algorithm), F.linear(x, w), **close)


ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "prelu": lambda t: F.prelu(t, SLOPES["prelu"].to(t.dtype)),
    "leaky_relu": lambda t: F.leaky_relu(t, 0.25),
    "elu": lambda t: F.elu(t, 0.75),
}
SLOPES = {
    "prelu": torch.linspace(-0.5, 0.9, 8),
    "leaky_relu": torch.tensor([0.25]),
    "elu": torch.tensor([0.75]),
}


@pytest.mark.parametrize("algorithm", [n for n in names("conv2d") if hasattr(ops, f"_conv2d_{n}_pack")])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv2d_packed(algorithm, layout):
    window, dtype = window_for(algorithm, 4), torch.float32
    x = data(2, 4, 7, 6).to(dtype).contiguous(memory_format=layout)
    w, b = data(8, 4 // window[-1], 3, 3).to(dtype), data(8).to(dtype)
    pack = getattr(ops, f"_conv2d_{algorithm}_pack")(w, *window)
    assert pack.ndim == 1
    assert pack.dtype == dtype
    run, run_out = getattr(ops, f"_conv2d_{algorithm}_packed"), getattr(ops, f"_conv2d_{algorithm}_packed_out")
    expected = F.conv2d(x, w, b, *window)
    few_bits = ai3_ops.registry.algorithm("conv2d", algorithm, "cpu").accuracy == "approximate"
    close = dict.fromkeys(("rtol", "atol"), 1e-1 if few_bits else 2e-4)
    torch.testing.assert_close(run(x, pack, w.shape, b, *window), expected, **close)
    if ai3_ops.registry.algorithm("conv2d", algorithm, "cpu").epilogue:
        for name, function in ACTIVATIONS.items():
            y = run(x, pack, w.shape, b, *window, expected, name, SLOPES.get(name))
            torch.testing.assert_close(y, function(2 * expected), **close)
            assert y.is_contiguous(memory_format=layout)
    else:
        with pytest.raises(RuntimeError, match="fuses no"):
            run(x, pack, w.shape, b, *window, None, "relu")
    whole = torch.zeros(2, 12, *expected.shape[2:], dtype=dtype).contiguous(memory_format=layout)
    for out in (torch.empty_like(expected), whole[:, 2:10], whole.flip(3)[..., :]):
        out = out if out.shape == expected.shape else out[:, :8]
        run_out(x, pack, w.shape, b, *window, out=out)
        torch.testing.assert_close(out, expected, **close)
        if ai3_ops.registry.algorithm("conv2d", algorithm, "cpu").epilogue:
            run_out(x, pack, w.shape, b, *window, expected, "relu", out=out)
            torch.testing.assert_close(out, F.relu(2 * expected), **close)
    assert not whole[:, 10:].any()
    assert not whole[:, :2].any()
    with pytest.raises(RuntimeError, match="packed"):
        run(x, pack[:-1], w.shape, b, *window)
    with pytest.raises(RuntimeError, match="packed"):
        run(x, torch.zeros_like(pack), w.shape, b, *window)
    with pytest.raises(RuntimeError, match="needs an activation"):
        run(x, pack, w.shape, b, *window, None, "swish")


EXTREMES = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, -100.0, 100.0, -1e-30])


def test_python_and_the_operators_know_the_same_activations():
    with pytest.raises(RuntimeError, match=r"needs an activation of (.*), got 'cosine'") as told:
        ops._conv2d_direct_fused(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), activation="cosine")
    words = str(told.value).partition("needs an activation of ")[2].partition(", got")[0].split(", ")
    assert sorted(words) == sorted(activations.ACTIVATIONS)
    assert {*activations.SLOPED} <= {*words}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_activations_of_extreme_values_are_aten_s(name, layout):
    """By every algorithm that fuses: NaN stays NaN, and what infinity becomes. The bias brings them, since sums spread NaN."""
    values = EXTREMES.clone()
    if name == "gelu":  # of infinity ATen's is NaN or infinity, as the element lies
        values[1] = 1e20
    slope = torch.linspace(-0.5, 0.9, 10) if name == "prelu" else SLOPES.get(name)
    function = (lambda t: F.prelu(t, slope)) if name == "prelu" else ACTIVATIONS[name]
    for algorithm in (a.name for a in ai3_ops.registry.algorithms("conv2d", "cpu") if a.epilogue):
        window = window_for(algorithm, 10)
        x = torch.zeros(1, 10, 9, 7).contiguous(memory_format=layout)
        w = torch.zeros(10, 10 // window[-1], 3, 3)
        y = getattr(ops, f"_conv2d_{algorithm}_fused")(x, w, values, *window, None, name, slope)
        expected = function(values[None, :, None, None].expand_as(y).contiguous())
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-6, atol=1e-6, check_stride=False, msg=algorithm)
    for algorithm in (a.name for a in ai3_ops.registry.algorithms("linear", "cpu") if a.epilogue):
        for rows in (1, 40):
            y = getattr(ops, f"_linear_{algorithm}_fused")(
                torch.zeros(rows, 3), torch.zeros(10, 3), values, None, name, slope
            )
            expected = function(values.expand(rows, 10))
            torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-6, atol=1e-6, msg=algorithm)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [(4, 4), (4, 12), (8, 4)])
def test_slopes_of_small_maps(layout, batch, size):
    """Where a map has one pixel, row or column, strides do not tell which dimension the channels are."""
    x = torch.randn(batch, 10, *size).contiguous(memory_format=layout)
    slope, bias = torch.linspace(-0.5, 0.9, 10), torch.randn(10)
    for algorithm in (a.name for a in ai3_ops.registry.algorithms("conv2d", "cpu") if a.epilogue):
        groups = 10 if algorithm == "depthwise" else 1
        w = torch.randn(10, 10 // groups, 4, 4)
        if not ai3_ops.supports("conv2d", algorithm, x, w, bias, 4, 0, 1, groups)[0]:
            continue
        y = getattr(ops, f"_conv2d_{algorithm}_fused")(x, w, bias, 4, 0, 1, groups, None, "prelu", slope)
        exact = F.prelu(F.conv2d(x.double(), w.double(), bias.double(), 4, 0, 1, groups), slope.double())
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4, msg=algorithm)


# In units in the last place of the exact value, as csrc/algos/core/epilogue.h has them.
LAST_PLACES = {"sigmoid": 4, "hardsigmoid": 2, "tanh": 4, "elu": 4, "prelu": 1, "leaky_relu": 1}


@pytest.mark.parametrize("name", LAST_PLACES)
def test_activations_are_within_a_few_units_in_the_last_place(name):
    magnitudes = torch.logspace(-30, 1.9, 200_000, dtype=torch.float64).float()
    near = torch.linspace(0, 20, 200_000)
    x = torch.cat([magnitudes, -magnitudes, near, -near])[None, None, None]
    slope = {"prelu": SLOPES["leaky_relu"]}.get(name, SLOPES.get(name))
    y = ops._conv2d_direct_fused(x, torch.ones(1, 1, 1, 1), None, 1, 0, 1, 1, None, name, slope)
    exact = F.leaky_relu(x.double(), 0.25) if name == "prelu" else ACTIVATIONS[name](x.double())
    place = 2.0 ** (exact.abs().clamp_min(torch.finfo(torch.float32).smallest_normal).log2().floor() - 23)
    error = (y.double() - exact).abs() / place
    assert error.max().item() <= LAST_PLACES[name]


def test_slopes_are_checked():
    x, w = data(1, 4, 5, 5).float(), data(6, 4, 3, 3).float()
    for device in ("cpu", "meta"):
        moved = (x.to(device), w.to(device))
        for name, slope, words in [
            ("prelu", None, "needs a slope"),
            ("elu", None, "needs a slope"),
            ("relu", torch.ones(1), "needs no slope"),
            ("prelu", torch.ones(5), "slope of 1 or 6 float32"),
            ("prelu", torch.ones(6).double(), "slope of 1 or 6 float32"),
            ("prelu", torch.ones(1, 6), "slope of 1 or 6 float32"),
        ]:
            with pytest.raises(RuntimeError, match=f"ai3::conv2d_direct: needs.*{words.removeprefix('needs ')}"):
                ops._conv2d_direct_fused(*moved, activation=name, slope=None if slope is None else slope.to(device))
    op = ops._conv2d_direct_fused.default
    torch.library.opcheck(op, (x, w, None, [1], [1], [1], 1, None, "prelu", torch.linspace(-1, 1, 6)))
    out = torch.empty(1, 6, 3, 3)
    with pytest.raises(RuntimeError, match="shares no memory with slope"):
        ops._conv2d_direct_out(x, w, activation="prelu", slope=out.view(-1)[:6], out=out)


def packed_conv2d(algorithm, x, w, b=None, window=(1, 1), **options):
    pack = getattr(ops, f"_conv2d_{algorithm}_pack")(w, *window)
    return getattr(ops, f"_conv2d_{algorithm}_packed")(x, pack, w.shape, b, *window, **options)


@pytest.mark.parametrize(
    "algorithm", [n for n in names("conv2d") if ai3_ops.registry.algorithm("conv2d", n, "cpu").prologue]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [1, 3])
def test_conv2d_prologue(algorithm, layout, size):
    """Each part of it alone; enough channels for several parts of them; the network's own operators; an epilogue beside it."""
    x = data(2, 300, 7, 6).float().contiguous(memory_format=layout)
    w, b = data(40, 300, size, size).float() / 30, data(40).float()
    scale, shift = data(300).float(), data(300).float().flip(0)
    window = (1, size // 2)
    parts = {"input_scale": scale, "input_shift": shift, "input_relu": True}
    for absent in [(), ("input_relu",), ("input_scale",), ("input_shift",), ("input_scale", "input_shift")]:
        given = {k: v for k, v in parts.items() if k not in absent}
        z = x * given.get("input_scale", torch.ones(300))[:, None, None]
        z = z + given.get("input_shift", torch.zeros(300))[:, None, None]
        expected = F.conv2d(z.relu() if "input_relu" in given else z, w, b, *window)
        torch.testing.assert_close(packed_conv2d(algorithm, x, w, b, window, **given), expected, rtol=1e-4, atol=1e-4)
    epilogue = {"residual": expected, "activation": "relu"}
    y = packed_conv2d(algorithm, x, w, b, window, **epilogue, **given)
    torch.testing.assert_close(y, F.relu(2 * expected), rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=layout)
    small, large = 1e-6 * w, 1 + b.abs()  # the bias is added last: parts of the sum would round at its size
    y = packed_conv2d(algorithm, x, small, large, window, input_relu=True)
    expected = F.conv2d(x.double().relu(), small.double(), large.double(), *window)
    assert ((y - expected).abs() <= 2 * torch.finfo(torch.float32).eps * expected.abs()).all()


@pytest.mark.parametrize(
    "algorithm", [n for n in names("conv2d") if ai3_ops.registry.algorithm("conv2d", n, "cpu").prologue]
)
def test_conv2d_prologue_passes_opcheck_and_says_what_it_needs(algorithm):
    x, w, scale = data(1, 4, 5, 5).float(), data(6, 4, 3, 3).float(), data(4).float()
    pack = getattr(ops, f"_conv2d_{algorithm}_pack")(w, 1, 1)
    op = getattr(ops, f"_conv2d_{algorithm}_packed")
    arguments = (x, pack, list(w.shape), None, [1], [1], [1], 1, None, "none", None)
    torch.library.opcheck(op.default, (*arguments, scale, scale, True))
    for device in ("cpu", "meta"):
        given = [t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments]
        for bad, words in [(scale[:3], "4 float32"), (scale.double(), "4 float32"), (scale[None], "4 float32")]:
            for name in ("input_scale", "input_shift"):
                with pytest.raises(RuntimeError, match=f"ai3::conv2d_{algorithm}: needs {name} of {words}"):
                    op(*given, **{name: bad.to(device)})
    with pytest.raises(RuntimeError, match="packed weights are for inference"):
        op(*arguments, scale.requires_grad_()).sum().backward()


def test_a_prologue_is_refused_by_name_of_those_who_have_it():
    x, w = data(1, 4, 5, 5).float(), data(6, 4, 3, 3).float()
    words = "ai3::conv2d_winograd_f4: applies no scale, shift or relu to its input; algorithms that support.*direct"
    with pytest.raises(RuntimeError, match=words):
        packed_conv2d("winograd_f4", x, w, input_relu=True)
    with pytest.raises(RuntimeError, match=words):
        packed_conv2d("winograd_f4", x.to("meta"), w.to("meta"), input_relu=True)


def test_preactivation_from_and_into_slices():
    """DenseNet's layer: 1x1 on the normalized channels so far, 3x3, and its channels beside those."""
    buffer = data(2, 96, 7, 7).float().contiguous(memory_format=torch.channels_last)
    before, out = buffer.clone(), buffer[:, 64:96]
    w1, w2, scale, shift = (
        data(48, 64, 1, 1).float(),
        data(32, 48, 3, 3).float() / 8,
        data(64).float(),
        data(64).flip(0).float(),
    )
    pack1, pack2 = ops._conv2d_direct_pack(w1), ops._conv2d_winograd_f4_pack(w2, 1, 1)
    x = buffer[:, :64]
    middle = ops._conv2d_direct_packed(
        x, pack1, w1.shape, activation="relu", input_scale=scale, input_shift=shift, input_relu=True
    )
    assert middle.is_contiguous(memory_format=torch.channels_last)
    ops._conv2d_winograd_f4_packed_out(middle, pack2, w2.shape, None, 1, 1, out=out)
    normalized = F.relu(before[:, :64] * scale[:, None, None] + shift[:, None, None])
    expected = F.conv2d(F.relu(F.conv2d(normalized, w1)), w2, None, 1, 1)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(x, before[:, :64])


@pytest.mark.parametrize("algorithm", [n for n in names("linear") if hasattr(ops, f"_linear_{n}_pack")])
def test_linear_packed(algorithm):
    x, w, b = data(2, 3, 5).float(), data(7, 5).float(), data(7).float()
    pack = getattr(ops, f"_linear_{algorithm}_pack")(w)
    run = getattr(ops, f"_linear_{algorithm}_packed")
    expected = F.linear(x, w, b)
    approximate = ai3_ops.registry.algorithm("linear", algorithm, "cpu").accuracy == "approximate"
    close = {"rtol": 5e-2, "atol": 5e-2} if approximate else {}
    torch.testing.assert_close(run(x, pack, w.shape, b), expected, **close)
    torch.testing.assert_close(run(x, pack, w.shape, b, expected, "relu"), F.relu(2 * expected), **close)
    out = torch.empty(2, 3, 14)[..., ::2]
    getattr(ops, f"_linear_{algorithm}_packed_out")(x, pack, w.shape, b, out=out)
    torch.testing.assert_close(out, expected, **close)


def lacks(dtype: torch.dtype) -> bool:
    """Whether oneDNN refuses this dtype here."""
    return (
        dtype == torch.float64
        or not {
            torch.float32: lambda: True,
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        }[dtype]()
    )


@pytest.mark.parametrize("algorithm", ["onednn", "gemm", "default", "guess"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_vendor_algorithms_and_rules(algorithm, dtype, geometry):
    xs, ws, *window = geometry
    x, w, b = data(*xs).to(dtype), data(*ws).to(dtype), data(ws[0]).to(dtype)
    op = getattr(ops, f"conv2d_{algorithm}")
    if algorithm == "onednn" and lacks(dtype):
        name = str(dtype).removeprefix("torch.")
        words = (
            rf"ai3::conv2d_onednn: (oneDNN )?does not compute in {name}( on this processor)?; algorithms that support"
        )
        with pytest.raises(RuntimeError, match=words):
            op(x, w, b, *window)
        return
    tolerance = {2: 5e-2, 4: 1e-4, 8: 1e-10}[dtype.itemsize]
    expected = F.conv2d(x.double(), w.double(), b.double(), *window).to(dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=layout) if x.ndim == 4 else x
        y = op(given, w, b, *window)
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        if x.ndim == 4 and x.numel():
            assert y.stride() == F.conv2d(given, w, b, *window).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_onednn(dtype):
    if lacks(dtype):
        pytest.skip("this processor's oneDNN lacks the dtype")
    x, w, b = data(2, 3, 5).to(dtype), data(7, 5).to(dtype), data(7).to(dtype)
    torch.testing.assert_close(ops.linear_onednn(x, w, b), F.linear(x, w, b))
    torch.testing.assert_close(ops.linear_onednn(x[0, 0], w[0]), F.linear(x[0, 0], w[0]))


def test_out_shares_no_memory_with_what_is_read():
    memory = torch.zeros(2, 4, 8, 8)
    w, b = data(4, 4, 3, 3).float(), data(4).float()
    x, pack = data(2, 4, 8, 8).float(), ops._conv2d_direct_pack(w, 1, 1)
    for arguments, words in [
        ((memory, pack, w.shape, b, 1, 1), "input"),
        ((x, pack, w.shape, memory[1, 3, 7, 4:], 1, 1), "bias"),
        ((x, pack, w.shape, b, 1, 1, 1, 1, memory.mT), "residual"),
    ]:
        with pytest.raises(RuntimeError, match=f"needs an out that shares no memory with {words}"):
            ops._conv2d_direct_packed_out(*arguments, out=memory)
    with pytest.raises(RuntimeError, match="needs an out that shares no memory with the packed weight"):
        ops._conv2d_direct_packed_out(x[:, :, :2, :2], pack, w.shape, b, 1, 1, out=pack[:32].view(2, 4, 2, 2))
    m = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="needs an out that shares no memory with input"):
        ops._linear_gemm_packed_out(m, ops._linear_gemm_pack(torch.eye(3)), (3, 3), out=m)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", names("conv2d", sliced=True, accuracy="exact", rule=False))
def test_out_may_be_other_channels_of_the_input_s_buffer(algorithm, dtype, layout):
    """As a concatenation without a copy has it."""
    kernel = 1 if algorithm == "patch_gemm" else 3
    window = window_for(algorithm, 4, kernel)
    buffer = data(2, 12, 6, 7).mul(3).round().clamp(-2, 2).to(dtype).contiguous(memory_format=layout)
    w, b = data(4, 4 // window[-1], kernel, kernel).round().clamp(-2, 2).to(dtype), data(4).round().to(dtype)
    pack, before = getattr(ops, f"_conv2d_{algorithm}_pack")(w, *window), buffer.clone()
    run = getattr(ops, f"_conv2d_{algorithm}_packed_out")
    for first, out in [(0, slice(4, 8)), (5, slice(1, 5)), (0, slice(8, 12)), (8, slice(0, 4))]:
        buffer.copy_(before)
        x = buffer[:, first : first + 4]
        expected = F.conv2d(before[:, first : first + 4].double(), w.double(), b.double(), *window).to(dtype)
        run(x, pack, w.shape, b, *window, out=buffer[:, out])
        assert torch.equal(buffer[:, out], expected)
        others = [c for c in range(12) if c not in range(12)[out]]
        assert torch.equal(buffer[:, others], before[:, others])
        buffer.copy_(before)
        run(x[1], pack, w.shape, b, *window, out=buffer[1, out])
        assert torch.equal(buffer[1, out], expected[1])
    for out in (slice(3, 7), slice(0, 4), slice(2, 6)):
        with pytest.raises(RuntimeError, match="needs an out that shares no memory with input"):
            run(buffer[:, :4], pack, w.shape, b, *window, out=buffer[:, out])


def called(run, *arguments, **options) -> set[str]:
    """The operators that a call runs, PyTorch's among them."""
    with torch.inference_mode(), profiled() as profile:
        run(*arguments, **options)
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("algorithm", [n for n in names("conv2d") if hasattr(ops, f"_conv2d_{n}_packed_out")])
def test_slices_of_channels_are_read_and_written_where_they_lie(algorithm, layout):
    """No operator of PyTorch's runs, so none that allocates or copies; of those who do not promise it, one does."""
    info = ai3_ops.registry.algorithm("conv2d", algorithm, "cpu")
    kernel = 1 if algorithm == "patch_gemm" else 3  # whose output has the input's sizes
    window = window_for(algorithm, 4, kernel)
    x, y = (data(2, 12, 6, 7).float().contiguous(memory_format=layout) for _ in range(2))
    w, b = data(4, 4 // window[-1], kernel, kernel).float(), data(4).float()
    pack = getattr(ops, f"_conv2d_{algorithm}_pack")(w, *window)
    run = getattr(ops, f"_conv2d_{algorithm}_packed_out")
    alone = {f"ai3::_conv2d_{algorithm}_packed_out", "aten::transpose_"}  # which raises out's version
    dense = x[:, :4].contiguous(memory_format=layout)
    for given, out in [(x[:, 4:8], torch.empty_like(dense)), (dense, y[:, 4:8]), (x[:, 4:8], y[:, 8:])]:
        others = called(run, given, pack, w.shape, b, *window, out=out) - alone
        assert bool(others) != info.sliced, others
    # The residual is read with the output's strides; one that has others is copied into a slice.
    out = torch.empty_like(dense)
    for residual in (dense, out):
        assert called(run, dense, pack, w.shape, b, *window, residual, out=out) == alone
    if info.sliced:
        for residual in (y[:, :4], x[:, 8:]):
            assert called(run, dense, pack, w.shape, b, *window, residual, out=y[:, :4]) == alone
    assert "aten::copy_" in called(run, dense, pack, w.shape, b, *window, dense, out=y[:, :4])


@pytest.mark.parametrize("algorithm", [n for n in names("linear") if hasattr(ops, f"_linear_{n}_packed_out")])
def test_linear_reads_and_writes_rows_where_they_lie(algorithm):
    x, w, buffer = data(6, 5).float(), data(4, 5).float(), torch.empty(12, 8)
    pack = getattr(ops, f"_linear_{algorithm}_pack")(w)
    run = getattr(ops, f"_linear_{algorithm}_packed_out")
    alone = {f"ai3::_linear_{algorithm}_packed_out", "aten::transpose_"}  # which raises out's version
    assert called(run, x, pack, w.shape, out=buffer.view(24, 4)[6:12]) == alone
    assert called(run, x, pack, w.shape, None, torch.ones(6, 4), out=buffer.view(24, 4)[6:12]) == alone
    assert called(run, data(6, 15).float()[:, 5:10], pack, w.shape, out=buffer[:6, 4:]) == alone
    assert called(run, x, pack, w.shape, None, buffer[6:, :4], out=buffer[:6, :4]) == alone
    assert "aten::copy_" in called(run, x, pack, w.shape, out=buffer[:6, ::2])


PACKED_OUT = [(o, n) for o in ("conv2d", "linear") for n in names(o) if hasattr(ops, f"_{o}_{n}_packed_out")]


@pytest.mark.parametrize(("operation", "algorithm"), PACKED_OUT)
def test_out_forms_pass_opcheck(operation, algorithm):
    info = ai3_ops.registry.algorithm(operation, algorithm, "cpu")
    dtype = torch.float64 if "float64" in info.dtypes else torch.float32
    stride, padding, dilation, groups = window_for(algorithm, 4)
    image = (2, 1) if algorithm == "patch_gemm" else (6, 5)
    of_conv2d = ([stride], [padding], [dilation], groups)
    shapes, window = {
        "conv2d": (((2, 4, 6, 5), (8, 4 // groups, 3, 3), (8,), (2, 8, *image)), of_conv2d),
        "linear": (((5, 3), (4, 3), (4,), (5, 4)), ()),
    }[operation]
    x, w, b, out = (data(*s).to(dtype) for s in shapes)
    pack, run = (getattr(ops, f"_{operation}_{algorithm}_{form}") for form in ("pack", "packed_out"))
    torch.library.opcheck(run.default, (x, pack(w, *window), list(w.shape), b, *window), {"out": out})


def test_operators_told_by_name_pass_opcheck():
    x, w, b = (data(*s).requires_grad_() for s in ((2, 4, 6, 5), (6, 4, 3, 3), (6,)))
    torch.library.opcheck(
        ops._conv2d_mixed.default, (x, w, b, 1, 1), {"forward": "direct", "backward_weight": "im2col"}
    )
    y, mask = data(2, 6, 6, 5).requires_grad_(), [True] * 3
    torch.library.opcheck(ops._conv2d_mixed_backward.default, (y, x, w, 1, 1, 1, 1, mask), {"forward": "direct"})
    m, n, c = (data(*s).requires_grad_() for s in ((5, 3), (4, 3), (4,)))
    torch.library.opcheck(ops._linear_mixed.default, (m, n, c), {"forward": "gemm"})
    torch.library.opcheck(ops._linear_mixed_backward.default, (data(5, 4), m, n, mask), {"forward": "gemm"})


def test_deterministic_calls_refuse_what_is_not():
    x, w = data(1, 2, 5, 5), data(2, 2, 3, 3)
    words = "ai3::conv2d_gemm: is not deterministic, and a deterministic result was asked for; algorithms that support"
    with pytest.raises(RuntimeError, match=words):
        ops.conv2d_gemm(x, w, deterministic=True)
    with pytest.raises(RuntimeError, match=words):
        ops._conv2d_mixed(x, w, forward="gemm", deterministic=True)
    grad = F.conv2d(x, w)
    with pytest.raises(RuntimeError, match=words):
        ops._conv2d_mixed_backward(
            grad, x, w, 1, 0, 1, 1, [True] * 3, forward="direct", backward_input="gemm", deterministic=True
        )
    for name in ("direct", "default", "guess"):
        torch.testing.assert_close(getattr(ops, f"conv2d_{name}")(x, w, deterministic=True), grad)
    given = ops._conv2d_gemm_backward(grad, x, w, 1, 0, 1, 1, [True] * 3, deterministic=True)  # PyTorch's gradients
    torch.testing.assert_close(given[0], aten_gradients(x, w, grad)[0])


# Of convolutions wide enough for the project's kernels: channels in one block, in several and in part of one; strides, dilation,
# groups, padding beyond the kernel, one pixel, rows longer than a block of pixels.
WIDE = [
    ((2, 40, 9, 8), (17, 40, 3, 3), 1, 1, 1, 1),
    ((1, 64, 7, 7), (32, 64, 3, 3), 2, 1, 1, 1),
    ((3, 3, 23, 25), (16, 3, 7, 7), 2, 3, 1, 1),
    ((1, 3, 30, 31), (9, 3, 11, 11), 4, 2, 1, 1),
    ((2, 33, 6, 5), (34, 33, 1, 1), 1, 0, 1, 1),
    ((2, 16, 9, 7), (12, 16, 1, 1), 2, 1, 1, 1),
    ((1, 70, 12, 13), (30, 35, 3, 2), (2, 1), (4, 0), (1, 3), 2),
    ((1, 8, 11, 12), (8, 8, 5, 5), 1, 2, 2, 1),
    ((2, 32, 4, 4), (16, 32, 4, 4), 1, 0, 1, 1),
    ((1, 16, 3, 300), (8, 16, 1, 7), 1, (0, 3), 1, 1),
]
# Depthwise: part of a vector of channels; multipliers; kernels with a form of their own and without; slices of rows.
DEEP = [
    ((2, 40, 9, 8), (40, 1, 3, 3), 1, 1, 1, 40),
    ((1, 17, 40, 41), (17, 1, 3, 3), 2, 1, 1, 17),
    ((3, 16, 14, 15), (16, 1, 5, 5), 2, (2, 3), 1, 16),
    ((1, 33, 9, 9), (33, 1, 7, 7), 1, 3, 1, 33),
    ((2, 12, 13, 12), (24, 1, 3, 5), (2, 1), (4, 0), (1, 2), 12),
    ((1, 20, 11, 17), (60, 1, 2, 4), (3, 4), (0, 5), (2, 2), 20),
    ((1, 3, 5, 4), (3, 1, 1, 1), 2, 1, 1, 3),
    ((1, 16, 12, 100), (16, 1, 3, 3), 1, 0, (2, 3), 16),
    ((2, 16, 9, 2), (16, 1, 5, 5), 1, 2, 1, 16),  # no output sees all of the kernel's columns
    ((2, 20, 9, 8), (40, 1, 3, 3), 1, 1, 1, 20),
]
# Groups that fill vectors: several together or one alone; strides, dilation, taps in several parts, rows of odd length.
GROUPED = [
    ((2, 32, 9, 8), (32, 4, 3, 3), 1, 1, 1, 8),
    ((1, 64, 7, 7), (64, 8, 5, 5), 1, (4, 2), 1, 8),
    ((2, 64, 11, 12), (64, 16, 3, 3), 2, 1, 1, 4),
    ((1, 32, 10, 13), (32, 2, 3, 2), (2, 1), (0, 3), (1, 2), 16),
    ((3, 16, 5, 1), (16, 1, 1, 1), 1, 0, 1, 16),
]
OWN = [("implicit_gemm", g, layout) for g in WIDE for layout in (torch.contiguous_format, torch.channels_last)]
OWN += [("direct", g, torch.channels_last) for g in GROUPED]


@pytest.mark.parametrize(
    ("algorithm", "geometry", "layout"), OWN + [("depthwise", g, torch.channels_last) for g in DEEP]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_own_gradients(algorithm, geometry, layout, dtype):
    """Exact on small integers whatever the dtype, and bitwise the same for every number of threads."""
    xs, ws, *window = geometry
    x, w = (t.mul(3).round().clamp(-2, 2).to(dtype).contiguous(memory_format=layout) for t in (data(*xs), data(*ws)))
    y = F.conv2d(x.double(), w.double(), None, *window)
    grad = torch.randint(-1, 2, y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = [e.to(dtype) for e in aten_gradients(x.double(), w.double(), grad.double(), *window)]
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    backward = getattr(ops, f"_conv2d_{algorithm}_backward")
    threads, first = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for g, e in zip(backward(grad, x, w, *window, [True] * 3), expected, strict=True):
                assert torch.equal(g, e)
            found = backward(noise, x, w, *window, [True] * 3)
            first = first or found
            assert all(map(torch.equal, found, first))
    finally:
        torch.set_num_threads(threads)
    assert found[0].is_contiguous(memory_format=layout)
    assert found[1].is_contiguous(memory_format=layout)


@pytest.mark.skipif(
    _library.registry()["level"] != "avx512", reason="vectors of other lengths are filled by other groups"
)
@pytest.mark.parametrize("geometry", GROUPED)
def test_grouped_gradients_are_own(geometry):
    """PyTorch computes neither dW nor, where the stride is 1, dX."""
    xs, ws, stride, padding, *rest = geometry
    x, w = (data(*sizes).float().contiguous(memory_format=torch.channels_last) for sizes in (xs, ws))
    grad = torch.ones_like(F.conv2d(x, w, None, stride, padding, *rest))
    wanted = [stride == 1, True, True]
    assert "aten::convolution_backward" not in called(
        ops._conv2d_direct_backward, grad, x, w, stride, padding, *rest, wanted
    )


WINOGRAD_KERNELS = [(3, 3), (5, 5), (1, 7), (7, 1), (1, 3), (3, 1)]


@pytest.mark.parametrize(
    ("name", "kernel", "groups"),
    [(n, (3, 3), 1) for n in names("conv2d", backward="own") if n.startswith("winograd_f")]
    + [("winograd_general", kernel, 1) for kernel in WINOGRAD_KERNELS]
    + [("winograd_general", (5, 5), 2)],
)
@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_winograd_gradients(name, kernel, groups, pad):
    """By the method itself, within its bound, whatever the threads; by patches where dX's padding would be negative, as it is
    for 3 with 3 taps, and in the form that rounds its weights."""
    channels = 28 if kernel == (3, 3) else 32  # work enough for each of these forms to take its own gradients
    padding = [pad if taps > 1 else 0 for taps in kernel]
    x, w = data(6, groups * channels, 17, 18).float(), data(groups * 24, channels, *kernel).float()
    grad = torch.randn_like(F.conv2d(x, w, None, 1, padding, 1, groups))
    bound = ai3_ops.registry.algorithm("conv2d", name, "cpu").error_bound
    expected = aten_gradients(x.double(), w.double(), grad.double(), 1, padding, 1, groups)
    threads, first = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found = getattr(ops, f"_conv2d_{name}_backward")(grad, x, w, 1, padding, 1, groups, [True] * 3)
            for g, e in zip(found, expected, strict=True):
                assert (g - e).abs().max() <= bound * e.abs().max()
            first = first or found
            assert all(map(torch.equal, found, first))
    finally:
        torch.set_num_threads(threads)
    patches = ops._conv2d_implicit_gemm_backward(grad, x, w, 1, padding, 1, groups, [True] * 3)
    rounded = name == "winograd_f4_bf16"
    by_patches = rounded or pad > max(kernel) - 1
    assert torch.equal(first[1], patches[1]) == rounded
    assert torch.equal(first[0], patches[0]) == by_patches
    if not by_patches:  # bitwise what the method makes of the transposed convolution
        turned = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
        rest = [taps - 1 - p for taps, p in zip(kernel, padding, strict=True)]
        assert torch.equal(first[0], getattr(ops, f"conv2d_{name}")(grad, turned, None, 1, rest, 1, groups))


@pytest.mark.parametrize(("batch", "taken"), [(10, True), (1, False)])
def test_the_weight_gradient_of_3x3_is_by_the_form_with_less_to_do(batch, taken):
    x, w = data(batch, 64, 7, 7).float(), data(64, 64, 3, 3).float()
    grad = torch.randn_like(F.conv2d(x, w, None, 1, 1))
    general, f4, patches = (
        getattr(ops, f"_conv2d_{name}_backward")(grad, x, w, 1, 1, 1, 1, [False, True, False])[1]
        for name in ("winograd_general", "winograd_f4", "implicit_gemm")
    )
    assert torch.equal(general, f4) == taken
    assert not torch.equal(general, patches)
    chosen = {"forward": "direct", "backward_weight": "winograd_general"}
    mixed = ops._conv2d_mixed_backward(grad, x, w, 1, 1, 1, 1, [False, True, False], **chosen)[1]
    assert torch.equal(general, mixed)
    expected = aten_gradients(x.double(), w.double(), grad.double(), 1, 1, 1, 1)[1]
    bound = ai3_ops.registry.algorithm("conv2d", "winograd_general", "cpu").error_bound
    assert (general - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("sizes", [(5, 40, 33), (1, 7, 70), (300, 64, 96), (30, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_gradients_are_exact_on_integers(sizes, dtype):
    m, k, n = sizes
    grad, x, w = (data(*s).round().clamp(-2, 2) for s in ((m, n), (m, k), (n, k)))
    expected = (grad @ w, grad.T @ x, grad.sum(0))
    for g, e in zip(
        ops._linear_gemm_backward(grad.to(dtype), x.to(dtype), w.to(dtype), [True] * 3), expected, strict=True
    ):
        assert torch.equal(g, e.to(dtype))


@pytest.mark.parametrize("dilation", [2, 3, 5])
def test_fft_writes_no_row_that_a_dilation_leaves_empty(dilation):
    """Of a kernel of one row, whose lattices of rows are as many as the dilation, some of them without any."""
    x, w = (data(*s).float() for s in ((1, 8, 3, 12), (8, 8, 1, 7)))
    x, b = x.contiguous(memory_format=torch.channels_last), torch.full((8,), 5.0)
    images = torch.zeros(2, 8, 3, 6).contiguous(memory_format=torch.channels_last)
    pack = ops._conv2d_fft_pack(w, 1, 0, (dilation, 1), 1)
    ops._conv2d_fft_packed_out(x, pack, w.shape, b, 1, 0, (dilation, 1), 1, out=images[:1])
    torch.testing.assert_close(images[:1], F.conv2d(x, w, b, 1, 0, (dilation, 1)), rtol=1e-4, atol=1e-4)
    assert not images[1].any()
