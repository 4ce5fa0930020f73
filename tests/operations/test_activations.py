"""softmax, gelu and silu: what the shared tester does not reach, their modules, and their lines in programs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops.operations.step import Step
from ai3_ops.programs.program import Builder

ops = torch.ops.ai3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_by_both_forms(dtype, approximate):
    torch.manual_seed(0)
    x = torch.randn(3, 131, dtype=dtype)
    y = ops.gelu_direct(x, approximate=approximate)
    exact = F.gelu(x.double(), approximate=approximate)
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=4e-6)
    with torch.no_grad():
        out = torch.empty_like(x)
        ops._gelu_direct_out(x, approximate=approximate, out=out)
        assert torch.equal(out, y)
        swapped = ai3_ops.swap(nn.GELU(approximate), {"gelu": "direct"})
        assert torch.equal(swapped(x), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("size", [1, 5, 131])
def test_gelu_keeps_the_sign_of_zero(dtype, approximate, size):
    """As ATen's does but by erf where oneDNN has AVX2."""
    for algorithm in (ops.gelu_direct, ops.gelu_default):
        y = algorithm(torch.tensor([0.0, -0.0], dtype=dtype).repeat(size), approximate=approximate)
        assert (y == 0).all()
        assert y.signbit().tolist() == [False, True] * size


def test_gelu_by_erf_keeps_its_bits_where_it_is_small():
    x = -torch.linspace(0.01, 13, 1000)
    exact = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2  # ATen's own loses them
    torch.testing.assert_close(ops.gelu_direct(x).double(), exact, rtol=2e-6, atol=1e-37)
    assert ops.gelu_direct(torch.tensor([20.0, float("inf")])).tolist() == [20.0, float("inf")]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_derivatives_of_gelu(approximate):
    torch.manual_seed(0)
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ops.gelu_direct(t, approximate=approximate), x)
    assert torch.autograd.gradgradcheck(lambda t: ops.gelu_direct(t, approximate=approximate), x)


def test_gelu_refuses_other_forms():
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=r"ai3::gelu_direct: needs approximate 'none' or 'tanh', got 'cubic'"):
            ops.gelu_direct(torch.ones(3, device=device), approximate="cubic")


class Softmaxes(nn.Module):
    def forward(self, x):
        return x.softmax(1), torch.softmax(x, -1, torch.float64), F.softmax(x, dim=0, dtype=torch.float64)


def test_softmax_in_all_ways_that_pytorch_has():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6)
    swapped = ai3_ops.swap(Softmaxes(), {"softmax": "direct"}, x, strict=True)
    with torch.no_grad():
        for y, expected in zip(swapped(x), Softmaxes()(x), strict=True):
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected)
    assert [layer.used for layer in ai3_ops.explain(swapped).layers] == ["direct"] * 3


def test_softmax_without_a_dimension_takes_pytorchs_and_warns():
    x = torch.randn(3, 4)
    swapped = ai3_ops.swap(nn.Softmax(), {"softmax": "direct"})
    with torch.no_grad(), pytest.warns(UserWarning, match="Implicit dimension choice for softmax"):
        torch.testing.assert_close(swapped(x), x.softmax(1))


def test_silu_in_place_keeps_its_effect():
    x = torch.randn(5)
    expected, given = F.silu(x), x.clone()
    with torch.no_grad():
        y = ai3_ops.swap(nn.SiLU(inplace=True), {"": "direct"})(given)
    assert y is given
    torch.testing.assert_close(given, expected)
    (layer,) = ai3_ops.explain(ai3_ops.swap(nn.SiLU(inplace=True), "default")).layers
    assert layer.used == "torch"


@pytest.mark.parametrize("dtype", DTYPES)
def test_lines_of_programs(dtype):
    torch.manual_seed(0)
    x, builder = torch.randn(2, 6, 5, 7, dtype=dtype), Builder()
    image = builder.input(x.shape, dtype)
    steps = Step.by_operation
    curved = builder.operation(steps["silu"], {"input": builder.slice(image, 1, 5)})
    both = builder.concat([builder.operation(steps["gelu"], {"input": curved, "approximate": "tanh"}), image])
    sums = [builder.operation(steps["softmax"], {"input": both, "dim": dim}) for dim in (1, 3)]
    program = builder.build(sums)
    reference = torch.cat([F.gelu(F.silu(x[:, 1:5].double()), approximate="tanh"), x.double()], 1)
    for given in (x, x.to(memory_format=torch.channels_last)):
        for y, dim in zip(program(given), (1, 3), strict=True):
            tolerance = 4e-6 if dtype.itemsize > 2 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(y.double(), reference.softmax(dim), rtol=0, atol=tolerance)


@pytest.mark.parametrize("height", [25, 96, 384])
def test_gelu_that_default_leaves_keeps_channels_last(height):
    """PyTorch computes it as the contiguous tensor that its memory is where images are large, without and with gradients."""
    x = torch.randn(2, 16, 48, height).contiguous(memory_format=torch.channels_last)
    swapped = ai3_ops.swap(nn.GELU(), "default")
    with torch.no_grad():
        for _ in range(3):
            y = swapped(x)
            assert y.stride() == x.stride()
            torch.testing.assert_close(y, F.gelu(x), rtol=1e-5, atol=2e-6)
    given = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(swapped(given).sum(), given)
    expected = x.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(F.gelu(expected).sum(), expected)[0], rtol=1e-5, atol=1e-6)


def test_arguments_of_modules_may_change_after_calls_were_left():
    softmax, pool = ai3_ops.swap(nn.Softmax(1), "default"), ai3_ops.swap(nn.MaxPool2d(2), "default")
    x, image = torch.randn(2, 5), torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            softmax(x), pool(image)
        softmax.dim, pool.kernel_size, pool.stride = None, 3, ()
        with pytest.warns(UserWarning, match="Implicit dimension choice"):
            torch.testing.assert_close(softmax(x), x.softmax(1))
        torch.testing.assert_close(pool(image), F.max_pool2d(image, 3))


def test_silu_in_place_and_not():
    x = torch.randn(3, 5)
    for inplace in (False, True):
        swapped, given = ai3_ops.swap(nn.SiLU(inplace), "default"), x.clone()
        with torch.no_grad():
            for _ in range(3):
                given.copy_(x)
                y = swapped(given)
                torch.testing.assert_close(y, F.silu(x))
                assert (y is given or y.data_ptr() == given.data_ptr()) == inplace
                assert torch.equal(given, y if inplace else x)
