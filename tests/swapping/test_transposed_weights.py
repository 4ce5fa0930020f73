"""transformers' Conv1D, GPT-2's linear layer, whose weight is (in_features, out_features)."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ai3_ops

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


@pytest.fixture
def layer():
    torch.manual_seed(0)
    made = Conv1D(48, 32)
    nn.init.normal_(made.bias)
    return made


@pytest.fixture
def x():
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def swapped(layer, x):
    return ai3_ops.swap(layer, {"linear": "gemm"}, x)


def assert_same(ours, theirs, x):
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_layer_is_linear(layer, x):
    ours = swapped(layer, x)
    assert isinstance(ours, Conv1D)
    assert ours.weight is not layer.weight
    for shape in ((32,), (1, 32), (0, 32), (2, 3, 5, 32)):
        assert_same(ours, layer, torch.randn(shape))
    row = ai3_ops.explain(ours).layers[0]
    assert (row.operation, row.used, row.packs) == ("linear", "gemm", "kept")
    assert type(ai3_ops.unswap(ours)) is Conv1D


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(layer, x, dtype):
    ours = swapped(layer, x)
    assert_same(ours, layer, x)
    limit = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}[dtype]
    expected = layer.double()(x.to(dtype).double())
    with torch.inference_mode():
        found = ours.double().to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected.detach(), rtol=limit, atol=limit * 4)


def test_one_pack_serves_all_calls(layer, x):
    ours = swapped(layer, x)
    with torch.no_grad():
        for _ in range(5):
            ours(x)
    assert ours._ai3.packs.made == 1


def test_training_step(layer, x):
    ours = swapped(layer, x)
    for m in (ours, layer):
        m(x).square().sum().backward()
    for a, b in zip(ours.parameters(), layer.parameters(), strict=True):
        assert a.grad.stride() == b.grad.stride()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for m in (ours, layer):
            for p in m.parameters():
                p -= 0.1 * p.grad
    assert_same(ours, layer, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(layer, x, copied):
    ours = swapped(layer, x)
    assert_same(ours, layer, x)
    other = copied(ours)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
        assert not other(x).any()
    assert_same(ours, layer, x)
    assert ai3_ops.explain(other).layers[0].used == "gemm"


def test_compiled_and_exported(layer, x):
    ours = swapped(layer, x)
    assert_same(torch.compile(ours, fullgraph=True, backend="aot_eager"), layer, x)
    program = torch.export.export(ours, (x,))
    assert any("linear_gemm" in str(node.target) for node in program.graph.nodes)
    assert_same(program.module(), layer, x)
    with torch.no_grad():
        assert_same(torch.jit.trace(ours, x), layer, x)


def test_weights_of_a_transform(layer, x):
    ours = swapped(layer, x)
    weights = torch.randn(3, 32, 48)

    def call(m, weight):
        return torch.func.functional_call(m, {"weight": weight}, (x,))

    torch.testing.assert_close(
        torch.vmap(lambda w: call(ours, w))(weights),
        torch.vmap(lambda w: call(layer, w))(weights),
        rtol=1e-4,
        atol=1e-4,
    )
