"""torch.compile of every operator: one graph, static and dynamic shapes, gradients."""

import warnings

import pytest
import torch
from modules import EveryOperator, assert_equal, each_device, swapped_net
from tester import each_kind, each_selection
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ai3_ops import swap
from ai3_ops.checking import cases
from ai3_ops.checking.calling import has_gradients


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    yield
    torch._dynamo.reset()


def dtype_of(info):
    return "float32" if "float32" in info.dtypes else info.dtypes[0]


@each_kind
def test_every_case_is_one_graph(info):
    """All cases of an algorithm in one function: shapes, layouts, absent biases; outputs and gradients are eager's."""
    calls = [c for c in cases.calls(info, dtypes=(dtype_of(info),)) if all(0 not in (s or (1,)) for s in c.case.shapes)]
    inputs = [
        c.arranged(*(t.requires_grad_() if has else t for t, has in zip(c.tensors, has_gradients(c), strict=True)))
        for c in calls
    ]

    options = [c.options(*c.tensors) for c in calls]

    def run(inputs):
        return [info.operator(*arguments, **more) for arguments, more in zip(inputs, options, strict=True)]

    def grads(outputs):
        leaves = [t for arguments in inputs for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        return torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)

    backend = CompileCounterWithBackend("aot_eager")
    actual, expected = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(inputs), run(inputs)
    assert backend.frame_count == 1
    assert_equal(actual, expected)
    assert_equal(grads(actual), grads(expected))


@each_device
@each_selection
def test_any_size_is_one_graph(device, every):
    model = EveryOperator(device, "float32", every=every)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    counts = []
    with torch.no_grad():
        for batch, larger in ((31, 21), (2, 21), (3, 22), (7, 1)):  # the first: no sizes are equal by chance
            inputs = model.inputs(batch, larger)
            assert_equal(compiled(*inputs), model(*inputs))
            counts.append(backend.frame_count)
    # 2: layer_norm's normalized sizes become constants while they are traced, for which Dynamo starts again.
    assert counts in ([1] * 4, [2] * 4)


@each_device
@each_selection
def test_autocast(device, every):
    model = EveryOperator(device, "float32", "bfloat16", every=every)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        expected = model(*model.inputs())
        assert_equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*model.inputs()), expected)


@each_device
@each_selection
@pytest.mark.usefixtures("compiler")
def test_inductor(device, every):
    """Code of inductor around operators, in inference and in training."""
    model = EveryOperator(device, "float32", every=every)
    inputs = model.inputs()

    def run(*inputs):  # something to fuse before and after each operator
        return tuple(y.sin() for y in model(*(2 * x for x in inputs)))

    compiled = torch.compile(run, fullgraph=True)
    expected, actual = run(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    leaves = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(sum(map(torch.sum, ys)), leaves) for ys in (actual, expected)]
    torch.testing.assert_close(*grads)


def gradients(function, model, x):
    """The output, and the gradients of a loss."""
    y = function(x)
    return (y, *torch.autograd.grad(y.square().sum(), list(model.parameters())))


@each_device
@pytest.mark.parametrize("dynamic", [False, True])
def test_swapped_network(device, dynamic):
    net, swapped = swapped_net(device)
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (9, 4):
        x = torch.randn(batch, 3, 20, 21, device=device)
        torch.testing.assert_close(gradients(compiled, swapped, x), gradients(net, net, x), rtol=1e-4, atol=1e-4)


LAYERS = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 9)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "linear": (lambda: nn.Linear(8, 8), (3, 8)),
    "gelu": (nn.GELU, (3, 8)),
    "gelu of images": (nn.GELU, (2, 4, 8, 9)),
    "gelu by tanh": (lambda: nn.GELU("tanh"), (3, 8)),
    "silu": (nn.SiLU, (3, 8)),
    "softmax": (lambda: nn.Softmax(-1), (3, 8)),
    "layer_norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "rms_norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 8, 9)),
    "batch_norm": (lambda: nn.BatchNorm2d(4), (2, 4, 8, 9)),
    "max_pool2d": (lambda: nn.MaxPool2d(2), (2, 4, 8, 9)),
    "large max_pool2d": (lambda: nn.MaxPool2d(3), (2, 4, 40, 40)),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), (2, 4, 8, 9)),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(2), (2, 4, 8, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rules_of_layers_are_followed_whole(name):
    """What decides whether `default` leaves a call to PyTorch is traced: in one graph, and by strict export."""
    make, shape = LAYERS[name]
    model, x = swap(nn.Sequential(make()).eval(), "default"), torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,), strict=True).module()(x), expected)


def test_rules_are_compiled_without_warnings():
    """default's rules run while Dynamo traces, which warns where it looks behind a cache."""
    x = torch.randn(2, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 8), nn.LayerNorm(8))
    compiled = torch.compile(swap(model, "default", x), backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(x).square().sum().backward()
    assert [str(w.message) for w in caught if "Dynamo" in str(w.message)] == []
