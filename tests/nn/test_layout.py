"""Swapped networks run in channels_last, unless their code may need NCHW activations."""

import copy
import functools
import itertools
import pickle
from collections import OrderedDict

import pytest
import torch
from modules import close
from torch import nn
from torch.nn.utils import parameters_to_vector, prune

import ai3_ops
from ai3_ops import Plan, _library, _machine
from ai3_ops.checking.calling import profiled
from ai3_ops.nn import layout
from ai3_ops.operations.conv2d import is_wrong_in_training, meets_only_padding
from ai3_ops.problem import is_channels_last
from ai3_ops.selecting.plan import PlannedLayer


def flat(x):
    return x.view(x.shape[0], -1)


class Views(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.conv(x)) if self.function else flat(self.conv(x)))


class Splits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y.view(y.shape[0], 2, 2, *y.shape[2:]).sum(1)


X = torch.randn(2, 3, 8, 8)


def test_nchw_images_become_channels_last_at_the_first_convolution():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    swapped = ai3_ops.swap(model, "default")
    with torch.no_grad():
        y = swapped(X)
        assert is_channels_last(y)
        torch.testing.assert_close(y, model(X), rtol=1e-4, atol=1e-4)
    assert all(is_channels_last(m.weight) for m in (swapped[0], swapped[2]))
    assert not is_channels_last(model[0].weight)
    for name, value in model.state_dict().items():
        assert torch.equal(swapped.state_dict()[name], value)


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_are_trained_can_be_viewed_as_one_row(training):
    """A model that was swapped for inference gives them back when it is to train; what its user chose stays."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 8, 3), nn.Conv2d(8, 8, 1)).train(training)
    swapped = ai3_ops.swap(model, "default", X).train()
    assert torch.equal(parameters_to_vector(swapped.parameters()), parameters_to_vector(model.parameters()))
    optimizer = torch.optim.LBFGS(swapped.parameters(), max_iter=2)

    def loss():
        optimizer.zero_grad()
        y = swapped(X)
        assert is_channels_last(y)
        y.square().mean().backward()
        return y.square().mean()

    assert optimizer.step(loss) > loss()
    with torch.no_grad():
        for form in (torch.vmap, torch.fx.symbolic_trace, lambda one: torch.jit.trace(one, X)):
            x = X[:, None] if form is torch.vmap else X
            close(form(swapped)(x).reshape(2, 8, 4, 4), swapped(X))
    prune.l1_unstructured(swapped[1], "weight", 0.5)
    with torch.no_grad():
        close(swapped.eval()(X), ai3_ops.unswap(copy.deepcopy(swapped))(X))
    again = ai3_ops.swap(swapped, {"2": "direct"}, X)
    assert is_channels_last(again(X))
    own = ai3_ops.swap(model.eval().to(memory_format=torch.channels_last), "default", X).train()
    assert is_channels_last(own[0].weight)


@pytest.mark.parametrize("training", [True, False])
def test_large_weights_keep_their_format_in_training_mode(training):
    layers = (
        nn.Conv2d(c, 64, k, padding=k // 2, groups=g) for c, k, g in ((3, 3, 1), (64, 3, 1), (64, 1, 1), (64, 3, 64))
    )
    model = nn.Sequential(*layers).train(training)
    swapped = ai3_ops.swap(model, "default")
    assert [is_channels_last(layer.weight) for layer in swapped] == [not training, not training, True, True]
    x = torch.randn(2, 3, 9, 9)
    y = swapped(x)
    assert is_channels_last(y)
    y.square().sum().backward()
    expected = torch.autograd.grad(model.double()(x.double()).square().sum(), [layer.weight for layer in model])
    for layer, exact in zip(swapped, expected, strict=True):
        kept = training and layer in swapped[:2]
        grad = layer.weight.grad
        assert grad.is_contiguous(memory_format=torch.contiguous_format if kept else torch.channels_last)
        torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-3 * exact.abs().max().item())


@pytest.mark.parametrize("examples", [None, X])
def test_code_that_views_activations_goes_on_working(examples):
    model = Views(None)
    assert layout.naming(model, layout.VIEWS) == ["Views"]
    swapped = ai3_ops.swap(model, "direct", examples)
    assert not is_channels_last(swapped.conv.weight)
    torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)
    assert ai3_ops.explain(swapped).layers[0].calls == 1


def test_views_that_channels_last_allows_are_found_out_with_example_inputs():
    model = Splits().eval()
    assert not is_channels_last(ai3_ops.swap(model, "direct").conv.weight)
    swapped = ai3_ops.swap(model, "direct", X)
    assert is_channels_last(swapped.conv.weight)
    torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)


def test_inference_tensors_and_shared_weights():
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).eval()
        model[1].weight = model[0].weight
        swapped = ai3_ops.swap(model, "direct")
        assert swapped[0].weight is swapped[1].weight
        assert is_channels_last(swapped[0].weight)
        x = torch.randn(1, 4, 8, 8)
        torch.testing.assert_close(swapped(x), model(x), rtol=1e-4, atol=1e-4)


def strided(y):
    return y.as_strided((y.shape[0], 4 * 6 * 6), (4 * 6 * 6, 1))


def resized(y):
    return y.clone().resize_(y.shape[0], 4 * 6 * 6)


@pytest.mark.parametrize("function", [strided, resized])
@pytest.mark.parametrize("planned", [False, True])
def test_code_that_reads_memory_by_its_own_strides_keeps_nchw(function, planned):
    """It never raises on channels_last, where it reads other elements."""

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)

        def forward(self, x):
            return self.head(strided(self.conv(x)) if function is strided else resized(self.conv(x)))

    model = Strided()
    assert layout.naming(model, layout.MEMORY) == [Strided.__qualname__]
    swapped = ai3_ops.swap(model, of_plan("channels_last") if planned else "direct", X)
    assert not is_channels_last(swapped.conv.weight)
    with torch.no_grad():
        torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)


class Folds(nn.Module):
    """Batch and channels in one dimension, which are one in memory where the batch is 1."""

    def __init__(self):
        super().__init__()
        self.conv, self.next = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.next(self.conv(x)).relu()
        b, c, h, w = y.shape
        return y.view(1, b * c, h, w).square().view(b, c, h, w).add(1)


class FlatMean(nn.Module):
    """Flattens what has one pixel for the smallest images."""

    def __init__(self):
        super().__init__()
        self.conv, self.next = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)

    def forward(self, x, more=None):
        y = self.next(self.conv(x))
        return y.view(y.shape[0], -1).cumsum(1)


@pytest.mark.parametrize(
    ("model", "example", "later"),
    [
        (Folds(), torch.randn(1, 3, 8, 8), torch.randn(4, 3, 8, 8)),
        (Folds(), (torch.randn(1, 3, 8, 8),), torch.randn(4, 3, 9, 7)),
        (FlatMean(), torch.randn(2, 3, 3, 3), torch.randn(2, 3, 5, 4)),
        (FlatMean(), {"x": torch.randn(1, 3, 3, 3), "more": None}, torch.randn(3, 3, 5, 5)),
    ],
)
def test_an_example_in_which_both_layouts_are_the_same_memory_decides_nothing(model, example, later):
    model = model.eval()
    swapped = ai3_ops.swap(model, "direct", example)
    assert is_channels_last(swapped.conv.weight)
    with torch.no_grad():
        expected = model(later)
        torch.testing.assert_close(swapped(later), expected, rtol=1e-4, atol=1e-4)
        for again in (
            pickle.loads(pickle.dumps(swapped)),
            ai3_ops.swap(swapped, {"conv": "smm"}),
            copy.deepcopy(swapped),
        ):
            torch.testing.assert_close(again(later), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ai3_ops.unswap(swapped)(later), expected, rtol=1e-4, atol=1e-4)


def test_only_what_is_viewed_is_given_in_nchw():
    """As detectors' heads are."""
    model = FlatMean().eval()
    swapped = ai3_ops.swap(model, "direct", X)
    y = swapped.conv(X)
    assert is_channels_last(y)
    assert not is_channels_last(swapped.next(y))
    assert ["views need NCHW" in row.reason for row in ai3_ops.explain(swapped).layers] == [False, True]
    with pytest.raises(ValueError, match="needs a 3x3 kernel"):
        ai3_ops.swap(swapped, {"conv": "winograd_f4"}, X, inplace=True)
    assert is_channels_last(swapped.conv.weight)
    with torch.no_grad():
        torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)


class Widens(nn.Module):
    """Views an output that is larger than the convolution's input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.wide, self.halves = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3, 2)

    def forward(self, x):
        y = self.second(self.first(x))
        return torch.cat([head(y).view(y.shape[0], -1) for head in (self.wide, self.halves)], 1)


def test_what_a_view_needs_in_nchw_copies_the_smaller_of_input_and_output():
    model = Widens().eval()
    swapped = ai3_ops.swap(model, "smm", X)
    weights = [is_channels_last(m.weight) for m in (swapped.first, swapped.second, swapped.wide, swapped.halves)]
    assert weights == [True, True, False, False]
    with torch.no_grad():
        torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)
    layouts = [row.layout for row in ai3_ops.explain(swapped).layers]
    assert [layout[:4] for layout in layouts[1:]] == ["NHWC", "NCHW", "NHWC"]
    again = ai3_ops.swap(swapped, {"first": "direct"}, X)
    assert not is_channels_last(again.wide.weight)
    assert again(X).allclose(model(X), atol=1e-4)
    assert not any(is_channels_last(m.weight) for m in ai3_ops.unswap(swapped).children())


class Elsewhere:
    """An object of the user's that views what it is given."""

    def flat(self, y):
        return y.view(y.shape[0], -1)


class Holds(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x):
        return self.function(self.conv(x))


def test_views_are_found_in_what_a_module_holds():
    hooked = nn.Sequential(nn.Conv2d(3, 4, 3))
    hooked[0].register_forward_hook(lambda _, args, y: y.view(y.shape[0], -1))
    holding = Holds(torch.relu)
    holding.helper = Elsewhere()
    for model in (hooked, holding, Holds(Elsewhere().flat), Holds(functools.partial(flat))):
        assert layout.naming(model, layout.VIEWS)
    assert not layout.naming(Holds(torch.relu), layout.VIEWS)


class Asks(nn.Module):
    """Views where that works and else does something else, so that nothing is ever raised."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        try:
            return {"y": y.view(y.shape[0], -1)}
        except RuntimeError:
            return {"y": y.permute(0, 2, 3, 1).flatten(1)}


def test_outputs_are_compared_not_exceptions_alone():
    model = Asks().eval()
    swapped = ai3_ops.swap(model, "smm", X)
    assert not is_channels_last(swapped.conv.weight)
    layer = ai3_ops.explain(swapped).filter("conv").layers[0]
    assert (layer.calls, layer.packed_bytes) == (0, 0)
    with torch.no_grad():
        torch.testing.assert_close(swapped(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (X, X * (1 + 1e-6), True),
        (X, X + 0.1, False),
        (X, X[:1], False),
        (X, X.double(), False),
        ({"a": (X, 1.0, None)}, {"a": (X, 1.0, None)}, True),
        ({"a": X}, {"b": X}, False),
        (X.double(), X.double() * (1 + 1e-6), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False),
        (object(), object(), False),
        (torch.zeros(0), torch.zeros(0), True),
    ],
)
def test_what_counts_as_the_same_output(one, other, expected):
    assert layout.same(one, other) is expected


def of_plan(form):
    """A plan for a model whose one layer is `conv`."""
    entry = PlannedLayer("conv2d", "direct", form, None, None, None, None, "", [], {})
    return Plan({"conv": entry}, _machine.machine(), {})


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
def test_a_plans_layout_is_followed_from_the_other_one(form, kernel):
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, kernel))).eval()
    other = torch.channels_last if form == "contiguous" else torch.contiguous_format
    model.conv.weight.data = torch.empty_like(model.conv.weight, memory_format=other).copy_(model.conv.weight.data)
    swapped = ai3_ops.swap(model, of_plan(form))
    assert is_channels_last(swapped.conv.weight) == (form == "channels_last")
    with torch.no_grad():
        y = swapped(X)
    assert is_channels_last(y) == (form == "channels_last")
    torch.testing.assert_close(y, model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "size", "selectors"),
    [(3, 96, "default"), (5, 28, "default"), (3, 10, "default"), (4, 30, {"conv2d": "winograd"}), (4, 30, "direct")],
)
def test_training_where_channels_last_leads_pytorch_astray(channels, size, selectors):
    """oneDNN's gradient of a 1x1 weight with a stride and few channels (docs/pytorch.md): NCHW in the model as it was given."""
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 16, 1, 2, bias=False))
    swapped, x = ai3_ops.swap(copy.deepcopy(model), selectors), torch.randn(2, 3, size, size)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().sum().backward()
    for trained in (swapped, ai3_ops.unswap(copy.deepcopy(swapped))):
        trained(x).square().sum().backward()
        for ours, theirs in zip(trained.parameters(), exact.parameters(), strict=True):
            assert (ours.grad.double() - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("selectors", ["default", "direct", "gemm", {"conv2d": "onednn"}, {"1": "direct"}])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [(1, 3, 2, 1, 1), (1, 3, 1, 1, 1), (2, 3, 1, 2, 2), (2, 5, 3, 2, 1), (3, 2, 8, 1, 1)],
)
def test_gradients_of_what_meets_only_padding(size, kernel, stride, padding, dilation, selectors, dtype):
    """In channels_last oneDNN leaves them as the memory was (docs/pytorch.md)."""
    make = [nn.Conv2d(8, 8, kernel, stride, padding, dilation), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*make).to(dtype).train()
    x = torch.randn(2, 8, size, size).to(dtype)
    swapped, exact = ai3_ops.swap(copy.deepcopy(model), selectors, x), copy.deepcopy(model).double()
    exact(x.double()).sum().backward()
    for trained in (swapped, ai3_ops.unswap(copy.deepcopy(swapped))):
        for _ in range(3):
            trained.zero_grad()
            trained(x).sum().backward()
            for ours, theirs in zip(trained.parameters(), exact.parameters(), strict=True):
                assert (ours.grad.double() - theirs.grad).abs().max() <= 0.05 * theirs.grad.abs().max()
                ours.grad.fill_(1e4)  # what the next gradient's memory holds


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("selectors", ["default", "direct", "gemm", {"conv2d": "onednn"}, {"1": "direct"}])
@pytest.mark.parametrize(("channels", "groups", "kernel"), [(24, 1, 3), (40, 2, (1, 3)), (36, 3, 5)])
def test_gradients_with_a_dilation_in_bfloat16(channels, groups, kernel, selectors, autocast):
    """In channels_last oneDNN reads what was never written (docs/pytorch.md)."""
    make = [nn.Conv2d(channels, channels, kernel, dilation=2, groups=groups), nn.Conv2d(channels, 8, 1)]
    model = nn.Sequential(*make).to(torch.float32 if autocast else torch.bfloat16).train()
    x = torch.randn(1, channels, 32, 40, dtype=next(model.parameters()).dtype)
    swapped, exact = ai3_ops.swap(copy.deepcopy(model), selectors, x), copy.deepcopy(model).double()
    exact(x.double()).sum().backward()
    for trained in (swapped, ai3_ops.unswap(copy.deepcopy(swapped))):
        for _ in range(3):
            junk = [torch.full((2**k,), 1e30) for k in range(10, 18)]  # what the gradient's memory may hold
            del junk
            trained.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                trained(x).sum().backward()
            for ours, theirs in zip(trained.parameters(), exact.parameters(), strict=True):
                assert (ours.grad.double() - theirs.grad).abs().max() <= 0.05 * theirs.grad.abs().max()


def test_meets_only_padding():
    for size, kernel, stride, pad, dilation in itertools.product(
        (1, 2, 5), (1, 2, 3, 5), (1, 2, 4), range(4), (1, 2, 3)
    ):
        if size + 2 * pad <= dilation * (kernel - 1):
            continue
        x = torch.ones(1, 1, size, 1, dtype=torch.float64)
        w = torch.zeros(1, 1, kernel, 1, dtype=torch.float64, requires_grad=True)
        torch.conv2d(x, w, None, (stride, 1), (pad, 0), (dilation, 1)).sum().backward()
        found = meets_only_padding((size, 1), (kernel, 1), (stride, 1), (pad, 0), (dilation, 1))
        assert found == bool((w.grad == 0).any()), (size, kernel, stride, pad, dilation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_python_and_cpp_know_the_same_gradients_that_pytorch_gets_wrong(dtype):
    """Of gemm, which leaves gradients to PyTorch, those of weights: C++ computes the wrong ones itself."""
    for channels, kernel, stride, groups in itertools.product((1, 2, 6, 8, 14, 16), (1, 3), (1, 2, (1, 2)), (1, 2)):
        if channels % groups:
            continue
        x = torch.randn(1, channels, 7, 7, dtype=dtype).to(memory_format=torch.channels_last)
        w = torch.randn(16, channels // groups, kernel, kernel, dtype=dtype).to(memory_format=torch.channels_last)
        y = torch.conv2d(x, w, None, stride, 0, 1, groups)
        asked = torch.randn_like(y), x, w, stride, 0, 1, groups, [False, True, False]
        with profiled(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ops.ai3._conv2d_gemm_backward(*asked)
        names = {event.name for event in profile.events()}
        wrong = is_wrong_in_training(w, stride, groups, dtype)
        assert wrong == ("aten::convolution_backward" not in names), (channels, kernel, stride, groups)


@pytest.mark.parametrize(
    ("layer", "size", "left"),
    [
        (nn.Conv2d(16, 64, 1), 80, 1),
        (nn.Conv2d(16, 64, 1), 40, 0),
        (nn.Conv2d(64, 24, 1), 80, 0),
        (nn.Conv2d(64, 64, 3, padding=1), 48, 0),
        (nn.Conv2d(64, 64, 3, padding=1, groups=64), 48, 0),
    ],
)
def test_default_leaves_to_pytorch_what_gains_nothing_in_nchw(layer, size, left):
    model = nn.Sequential(layer, Holds(flat)).eval()
    model[1].conv = nn.Identity()
    x = torch.randn(1, layer.in_channels, size, size)
    swapped = ai3_ops.swap(model, "default")
    with torch.no_grad():
        torch.testing.assert_close(swapped(x), model(x), rtol=1e-3, atol=1e-3)
    row = ai3_ops.explain(swapped).layers[0]
    left *= _library.registry()["level"] == "avx2"  # the only level of which that was measured
    assert row.torch_calls == left
    assert ("in NCHW" in row.reason) == bool(left)
    last = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        swapped[0](last)
        strict = ai3_ops.swap(model, "default", strict=True)
        strict(x)
    assert ai3_ops.explain(strict).layers[0].torch_calls == 0
    assert ai3_ops.explain(swapped).layers[0].torch_calls == left


@pytest.mark.parametrize("filters", [3, 8, 12, 16, 24, 28, 32])
@pytest.mark.parametrize("last", [False, True])
def test_default_takes_images_of_few_filters(filters, last):
    model, x = nn.Sequential(nn.Conv2d(3, filters, 3, 2, 1)).eval(), torch.randn(1, 3, 64, 64)
    x = x.to(memory_format=torch.channels_last) if last else x
    swapped = ai3_ops.swap(model, "default")
    with torch.no_grad():
        torch.testing.assert_close(swapped(x), model(x), rtol=1e-4, atol=1e-4)
    assert ai3_ops.explain(swapped).layers[0].torch_calls == 0


class Branches(nn.Module):
    """Views that need NCHW, a layer that PyTorch cannot train in channels_last, and two that share a weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.step = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 16, 1, 2, bias=False)
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.two.weight = self.one.weight

    def forward(self, x):
        y = self.two(self.one(x)).relu()
        return self.conv(x).view(len(x), -1).sum(1) + y.flatten(1).sum(1) + self.step(x).flatten(1).sum(1)


def strides(model):
    return [p.stride() for p in model.parameters()]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("last", [(), ("one",), ("step", "one"), ("step",)])
def test_unswap_gives_each_weight_the_memory_format_that_it_had(last, whole):
    model = Branches().eval()
    for name in last:
        model.get_submodule(name).to(memory_format=torch.channels_last)
    before = strides(model)
    for selectors in ("default", {"conv": "direct", "one": "smm"}, of_plan("contiguous")):
        swapped = ai3_ops.swap(model, selectors, X if whole else None)
        for made in (swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
            again = ai3_ops.swap(made, {"step": "im2col"}, X if whole else None)
            assert [is_channels_last(m.conv.weight) for m in (made, again)] == [is_channels_last(made.conv.weight)] * 2
            for one in (again, made):
                assert strides(ai3_ops.unswap(one)) == before
                assert not any(name.startswith("_ai3") for m in one.modules() for name in vars(m))
                for p, q in zip(one.parameters(), model.parameters(), strict=True):
                    assert torch.equal(p, q)
    assert strides(model) == before


def test_unswap_keeps_the_memory_format_that_the_user_gave_meanwhile():
    model = ai3_ops.swap(Branches().eval(), of_plan("channels_last"), inplace=True)
    assert is_channels_last(model.conv.weight)
    for moved in (model.float(), model.to("cpu"), copy.deepcopy(model)):
        assert not is_channels_last(ai3_ops.unswap(copy.deepcopy(moved)).conv.weight)
    later = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert is_channels_last(ai3_ops.unswap(ai3_ops.swap(later)).conv.weight)
    back = copy.deepcopy(later).to(memory_format=torch.contiguous_format)
    assert not is_channels_last(ai3_ops.unswap(back).conv.weight)
    only = copy.deepcopy(model)
    only.conv.to(memory_format=torch.channels_last)
    ai3_ops.unswap(only)
    assert [is_channels_last(m.weight) for m in (only.conv, only.one)] == [True, False]


def test_what_fails_leaves_the_memory_formats_of_the_former_swap():
    swapped = ai3_ops.swap(Branches().eval(), of_plan("channels_last"))
    before = strides(swapped)
    with pytest.raises(ValueError, match="needs a 3x3 kernel"):
        ai3_ops.swap(swapped, {"step": "winograd_f4"}, inplace=True)
    assert strides(swapped) == before
    kept = ai3_ops.swap(swapped, {"step": "direct"})
    assert is_channels_last(kept.conv.weight)
    assert not is_channels_last(ai3_ops.unswap(kept).conv.weight)


def test_tuning_leaves_the_memory_formats_of_a_swapped_model():
    swapped = ai3_ops.swap(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), "default", X)
    assert is_channels_last(swapped[0].weight)
    ai3_ops.tune(swapped, X, budget_seconds=0, progress=False)
    assert is_channels_last(swapped[0].weight)


@pytest.mark.parametrize(
    "behind",
    [
        nn.GELU(), nn.SiLU(), nn.ReLU(), nn.GroupNorm(2, 16), nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(2), nn.MaxPool2d(2),
        nn.Softmax(1), nn.LayerNorm((16, 16)), nn.LayerNorm(16), nn.Linear(16, 8),
    ],
    ids=str,
)  # fmt: skip
def test_questions_of_our_own_calls_are_no_views(behind):
    """The model's code views something; what swapped calls ask of how a tensor lies does not count as that."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.behind, self.last = nn.Conv2d(3, 16, 1), behind, nn.Conv2d(3, 16, 1)

        def forward(self, x):
            y = self.conv(x)
            y = self.behind(y.permute(0, 2, 3, 1) if y.shape[-1] == 16 and isinstance(behind, nn.LayerNorm) else y)
            return y, self.last(x), x.view(x.shape[0], -1)

    swapped = ai3_ops.swap(Net().eval(), "default", torch.randn(1, 3, 16, 16))
    assert not any("given in NCHW" in (layer.reason or "") for layer in ai3_ops.explain(swapped).layers)
    assert swapped.conv.weight.is_contiguous(memory_format=torch.channels_last)
