"""What a swapped module does when it is called, and what is left of it when it is not."""

import contextlib
import copy
import io
import pickle
import re
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from modules import EVERY, Modes, close, layers
from tester import window_for
from torch import nn

import ai3_ops
from ai3_ops import explain, swap, unswap


@pytest.fixture
def refusing():
    """A conv2d algorithm that refuses what is not 5x5, as any algorithm may."""
    return "winograd" if any(a.name == "winograd" for a in ai3_ops.algorithms("conv2d")) else "depthwise"


LEAVES = [
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(1, 3)), (2, 4, 9, 13)),
    (nn.Conv2d(4, 6, (4, 3), padding="same", bias=False), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    *((nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode=m), (2, 4, 9, 8)) for m in ("reflect", "replicate", "circular")),
    (nn.Conv2d(4, 6, 4, padding="same", padding_mode="circular"), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3), (4, 9, 8)),
    (nn.Linear(5, 3), (2, 7, 5)),
    (nn.Linear(5, 3, bias=False), (5,)),
    (nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True), (2, 4, 11, 12)),
    (nn.MaxPool2d(2), (4, 8, 8)),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 4, 10, 11)),
    (nn.AvgPool2d((2, 3), divisor_override=5), (2, 4, 8, 9)),
    (nn.AdaptiveAvgPool2d((None, 3)), (2, 4, 8, 10)),
    (nn.AdaptiveAvgPool2d(2), (4, 8, 10)),
    (nn.ReLU(), (3, 4)),
    (nn.ReLU(inplace=True), (3, 4)),
    (nn.Flatten(), (2, 3, 4)),
    (nn.Flatten(0, 1), (2, 3, 4)),
]


@pytest.mark.parametrize(("module", "shape"), LEAVES, ids=lambda v: str(v))
def test_leaf_modules(module, shape):
    x = torch.randn(shape)
    swapped = swap(module, EVERY)
    (layer,) = explain(swapped).layers
    assert layer.used != "torch", layer
    assert type(swapped) is getattr(ai3_ops.nn, type(module).__name__)
    assert type(module).__module__ != "ai3_ops.nn"
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = module(a * 1), swapped(b * 1)
    close(actual, expected)
    for y in (expected, actual):
        y.square().sum().backward()
    close(b.grad, a.grad)
    close(swapped.weight.grad, module.weight.grad) if hasattr(module, "weight") else None
    (layer,) = explain(swapped).layers
    seen = x
    if isinstance(module, nn.Conv2d):  # padded by the module where the operator cannot: another mode, two unequal sides
        pads = module._reversed_padding_repeated_twice
        if module.padding_mode != "zeros" or pads[::2] != pads[1::2]:
            seen = F.pad(x, pads)
    assert (layer.calls, layer.torch_calls, layer.shapes[0]) == (1, 0, tuple(seen.shape))
    assert "algorithm=" in repr(swapped)
    assert repr(unswap(swapped)) == repr(module)


def test_in_place_keeps_its_effect():
    x = torch.randn(5)
    expected = x.relu()
    y = swap(nn.ReLU(inplace=True), EVERY)(x)
    assert torch.equal(x, expected)
    assert y is x


def test_default_leaves_in_place_relu_to_pytorch():
    model = swap(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU()), "default")
    assert next((row.used, row.reason) for row in explain(model).layers) == (
        "torch",
        "in place: PyTorch needs no second tensor",
    )
    assert "PyTorch is faster" in explain(model).layers[1].reason  # of any other


def test_default_leaves_flatten_to_pytorch():
    class Writes(nn.Module):
        def forward(self, x):
            x.flatten(1).mul_(2)
            return x

    x = torch.randn(2, 3, 4)
    model = swap(Writes(), "default")
    assert torch.equal(model(x.clone()), 2 * x)
    model = swap(nn.Sequential(nn.Flatten()), "default")
    assert [(row.used, row.reason) for row in explain(model).layers] == [
        ("torch", "PyTorch returns a view, not a copy")
    ]
    model = swap(nn.Sequential(nn.Flatten()), {"0": "default"})
    assert explain(model).layers[0].used != "torch"


class Functional(nn.Module):
    """Every functional form."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.register_buffer("bias", torch.randn(4))
        self.fc = nn.Parameter(torch.randn(5, 16))
        self.unused = nn.Parameter(torch.randn(2))
        self.tag = "tag"

    def forward(self, x, *, scale=1.0):
        x = F.conv2d(x, self.weight * 2, self.bias, padding="same") * scale
        x = F.max_pool2d(x, 2).relu() + torch.relu(x)[:, :, ::2, ::2]
        x = F.relu(F.avg_pool2d(x, 3, 1, padding=1), inplace=True)
        y = torch.conv2d(x, self.weight[:, :1].expand(4, 4, 3, 3), stride=(1, 1))
        y = torch.max_pool2d(y, (1, 1)).relu_()
        x = F.adaptive_avg_pool2d(x, (2, 2)).flatten(1)
        x = torch.flatten(x, start_dim=1)
        return F.linear(input=x, weight=self.fc), y.sum()


def test_functional_calls():
    model, x = Functional(), torch.randn(2, 3, 8, 8)
    for swapped in (swap(model, EVERY), swap(model, EVERY, x)):
        for expected, actual in zip(model(x), swapped(x), strict=True):
            close(actual, expected)
        report = layers(swapped)
        assert set(report) == {
            ":conv2d_0", ":conv2d_1", ":max_pool2d_0", ":max_pool2d_1", ":relu_0", ":relu_1", ":relu_2", ":relu_3",
            ":avg_pool2d_0", ":adaptive_avg_pool2d_0", ":flatten_0", ":flatten_1", ":linear_0",
        }  # fmt: skip
        assert all((row.used, row.calls, row.reason) == (EVERY[row.operation], 1, "") for row in report.values())
        assert isinstance(swapped, Functional)
        assert swapped.tag == "tag"
        assert list(swapped.state_dict()) == list(model.state_dict())
        a, b = model(x)[0].sum(), swapped(x)[0].sum()
        for p, q in zip(
            torch.autograd.grad(a, [model.weight, model.fc]),
            torch.autograd.grad(b, [swapped.weight, swapped.fc]),
            strict=True,
        ):
            close(q, p)


def test_calls_with_any_arguments():
    model, x = Functional(), torch.randn(2, 3, 8, 8)
    swapped = swap(model, EVERY)
    close(swapped(x, scale=2.0)[0], model(x, scale=2.0)[0])
    close(swapped(x=x, scale=1)[0], model(x)[0])
    assert {(row.calls, row.reason) for row in explain(swapped).layers} == {(2, "")}
    with pytest.raises(TypeError):
        swapped(x, x)
    with pytest.raises(TypeError):
        swapped(y=x)


# Refusals -------------------------------------------------------------------------------------------------------------
def test_many_layer_selectors_leave_what_the_algorithm_cannot_do(refusing):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1))
    with pytest.warns(UserWarning, match=f"2 of 3 layers keep PyTorch's implementation: .*{refusing}: 2") as caught:
        swapped = swap(model, refusing)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    rows = explain(swapped).layers
    assert [row.used for row in rows] == [refusing, "torch", "torch"]
    assert [row.requested for row in rows] == [refusing] * 3
    assert all(refusing in row.reason for row in rows[1:])
    assert type(swapped[1]) is nn.Conv2d
    with pytest.raises(ValueError, match=f"1 .conv2d.: {refusing} .*algorithms that support it: .*direct"):
        swap(model, refusing, strict=True)


def test_support_of_windows_larger_than_common_inputs(refusing):
    for module in (nn.Conv2d(1, 1, (1, 1300)), nn.Conv2d(1, 1, 3, dilation=900)):
        with pytest.raises(ValueError, match=refusing):
            swap(nn.Sequential(module), {"0": refusing})


def test_one_layer_selectors_raise(refusing):
    model = nn.Sequential(nn.Conv2d(8, 4, 1))
    for selectors in ({"0": refusing}, [refusing], lambda m: refusing):
        with pytest.raises(ValueError, match=f"0 .conv2d.: {refusing} "):
            swap(model, selectors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain(swap(model, ai3_ops.prefer(refusing, "direct"))).layers[0].used == "direct"
        assert explain(swap(model, ai3_ops.prefer(refusing, None))).layers[0].used == "torch"


def test_calls_that_the_algorithm_cannot_do_are_pytorchs_and_counted():
    model = nn.Conv2d(2, 3, 3)
    swapped, strict = swap(model, "direct"), swap(model, "direct", strict=True)
    x = torch.randn(1, 2, 5, 5, dtype=torch.complex64)
    model.to(torch.complex64), swapped.to(torch.complex64), strict.to(torch.complex64)
    for _ in range(2):
        close(swapped(x), model(x))
    (row,) = explain(swapped).layers
    assert (row.calls, row.torch_calls) == (2, 2)
    assert "complex64" in row.reason
    with pytest.raises(RuntimeError):
        strict(x)
    swapped.to(torch.float32)(x.real)
    (row,) = explain(swapped).layers
    assert (row.calls, row.torch_calls) == (3, 2)


def test_wrong_inputs_raise():
    swapped = swap(nn.Conv2d(2, 3, 3), "direct")
    for shape in [(1, 3, 5, 5), (1, 2, 2, 2), (5,)]:
        with pytest.raises(RuntimeError, match="conv2d_direct"):
            swapped(torch.randn(shape))
    assert explain(swapped).layers[0].torch_calls == 0


def test_return_indices_stays_pytorchs():
    model = swap(nn.Sequential(nn.MaxPool2d(2, return_indices=True)), EVERY)
    assert explain(model).layers == []
    pool = swap(nn.MaxPool2d(2), EVERY)
    pool.return_indices = True
    _, indices = pool(torch.randn(1, 1, 4, 4))
    assert indices.dtype == torch.int64


def test_dtypes_are_known_at_swap_time():
    for selectors in ({"0": "direct"}, "direct"):
        with pytest.raises(ValueError, match="complex64"):
            swap(nn.Sequential(nn.Conv2d(1, 1, 1, dtype=torch.complex64)), selectors, strict=True)
    with pytest.raises(ValueError, match="int64"):
        swap(nn.Sequential(nn.ReLU()), {"0": "direct"}, torch.arange(4))


def test_algorithms_of_gradients_are_known_at_swap_time():
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3)), torch.randn(1, 2, 9, 9)
    choice = ai3_ops.Algorithm("direct", backward_weight="winograd")
    with pytest.raises(ValueError, match="gradient of the weight"):
        swap(model, {"0": choice}, x)
    swapped = swap(model, {"0": choice})  # whose gradients depend on the input's size
    for m in (model, swapped):
        m.zero_grad()
        m(x).sum().backward()
    close(swapped[0].weight.grad, model[0].weight.grad)
    (row,) = explain(swapped).layers
    assert (row.calls, row.torch_calls, "gradient of the weight" in row.reason) == (1, 1, True)
    with pytest.raises(RuntimeError, match="gradient of the weight"):
        swap(model, {"0": choice}, strict=True)(x)


def test_explain_a_rule_after_a_first_call_that_fails_or_is_pytorchs():
    swapped = swap(nn.Conv2d(3, 4, 3).eval(), "default")
    with pytest.raises(RuntimeError, match="channels"):
        swapped(torch.rand(1, 5, 8, 8))
    assert explain(swapped).layers[0].shapes is None
    swapped.requires_grad_(False)(torch.rand(1, 3, 8, 8))
    assert explain(swapped).layers[0].used == "direct"
    numbers = swap(nn.Conv2d(3, 4, 3).requires_grad_(False), "default").to(torch.complex64)
    numbers(torch.rand(1, 3, 8, 8, dtype=torch.complex64))
    assert explain(numbers).layers[0].torch_calls == 1
    meta = swap(
        nn.Conv2d(3, 4, 3, device="meta").requires_grad_(False), "default", torch.rand(1, 3, 8, 8, device="meta")
    )
    meta(torch.rand(1, 3, 8, 8, device="meta"))
    assert explain(meta).layers[0].used == "direct"


def test_a_deterministic_result_is_asked_for_at_the_swap():
    with pytest.raises(ValueError, match="not deterministic"):
        swap(nn.Conv2d(3, 4, 3), {"": ai3_ops.Algorithm("gemm", deterministic=True)})


def test_calls_of_other_types_on_meta_are_pytorchs():
    swapped = swap(nn.ReLU(), {"relu": "direct"})
    for _ in range(2):
        assert swapped(torch.empty(3, dtype=torch.int32, device="meta")).shape == (3,)


def test_a_nondeterministic_algorithm_in_deterministic_mode():
    name = next(
        a.name for a in ai3_ops.algorithms("conv2d", "cpu") if not a.deterministic and not a.rule and not a.python
    )
    model, x = nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5)
    swapped = swap(model, name)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            close(swapped(x), model(x))
            with pytest.raises(RuntimeError, match="deterministic"):
                swap(model, name, strict=True)(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert explain(swapped).layers[0].torch_calls == 1
    with torch.no_grad():
        swapped(x)
    assert explain(swapped).layers[0].torch_calls == 1


def test_rules_approximate_only_when_allowed(monkeypatch):
    name = "winograd_f4_bf16"
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)).eval(), torch.randn(1, 8, 32, 33)
    before = swap(model, "default")
    set_default = sys.modules["ai3_ops.registering.register"].set_default
    set_default("conv2d", name)
    try:
        for inputs in (None, x):
            with pytest.warns(UserWarning, match="keep PyTorch's implementation"):
                refused = swap(model, "default", inputs)
            assert "allow_approximate" in explain(refused).layers[0].reason
            allowed = swap(model, "default", inputs, allow_approximate=True)
            with torch.no_grad():
                allowed(x)
            assert explain(allowed).layers[0].used == name
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                close(before(x), model(x))
        (row,) = explain(before).layers
        assert (row.calls, row.torch_calls, "approximates" in row.reason) == (2, 2, True)
    finally:
        set_default("conv2d", None)
    with torch.no_grad():
        close(before(x), model(x))
    assert explain(before).layers[0].torch_calls == 2


# Modules ------------------------------------------------------------------------------------------------------------
class Loud(nn.Conv2d):
    """Inherits the forward."""

    volume = 11


class Standardized(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        return F.conv2d(x, w - w.mean(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Louder(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("cls", [Loud, Standardized, Louder])
def test_subclasses(cls):
    model, x = cls(2, 3, 3), torch.randn(1, 2, 5, 5)
    swapped = swap(model, "direct")
    (row,) = explain(swapped).layers
    assert row.used == "direct"
    assert isinstance(swapped, cls)
    close(swapped(x), model(x))
    for other in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert torch.equal(other(x), swapped(x))
        assert explain(other).layers[0].calls == 3 - (other is not swapped)
    assert type(unswap(swapped)) is cls


def test_a_forward_on_the_instance_is_reported():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    model[0].forward = lambda x: x
    swapped = swap(model, "direct", inplace=True)
    assert type(swapped[0]) is nn.Conv2d
    (module,) = explain(swapped).unreached
    assert (module.name, module.source) == ("0", ["conv2d"])
    assert "replaced on the instance" in module.reason
    with pytest.raises(ValueError, match="replaced on the instance"):
        swap(model, "direct", strict=True, inplace=True)


class Doubled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class Halved(nn.Linear):
    weight = property(lambda self: self._parameters["weight"] * 0.5, lambda self, value: None)

    def __init__(self):
        nn.Module.__init__(self)
        self.in_features = self.out_features = 4
        self._parameters["weight"], self._parameters["bias"] = nn.Parameter(torch.randn(4, 4)), None


@pytest.mark.parametrize(
    ("model", "shape", "used"), [(Doubled(2, 3, 3), (1, 2, 5, 5), ["direct"]), (Halved(), (3, 4), ["gemm"])]
)
def test_subclasses_that_change_what_the_forward_uses(model, shape, used):
    x = torch.randn(shape)
    swapped = swap(model, EVERY)
    close(swapped(x), model(x))
    report = explain(swapped)
    assert ([row.used for row in report.layers], report.unreached) == (used, [])


def test_a_lazy_layer_is_swapped_once_it_has_weights():
    model, x = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyLinear(2)), torch.randn(1, 2, 5, 5)
    assert "before its first call" in explain(swap(model, EVERY)).unreached[0].reason
    with pytest.raises(ValueError, match="before its first call"):
        swap(model, EVERY, strict=True)
    swapped = swap(model, EVERY, x, strict=True)
    assert [row.used for row in explain(swapped).layers] == ["direct", "gemm"]
    assert swapped[1].weight.shape == (2, 3)
    assert model[0].has_uninitialized_params()
    model.load_state_dict(swapped.state_dict())
    close(swapped(x), model(x))


def test_pytorchs_own_modules_are_reported():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert {(m.name, *m.source) for m in explain(swap(model, EVERY)).unreached} >= {
        ("", "relu"),
        ("self_attn", "linear"),
    }
    for operation in ("relu", "linear"):
        with pytest.raises(ValueError, match=f"calls {operation}, which cannot be replaced"):
            swap(model, {operation: EVERY[operation]}, strict=True)


def test_what_is_out_of_reach_is_a_warning_where_selectors_speak_of_it():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.LazyConv2d(4, 3), nn.MultiheadAttention(4, 2))
    model[0].forward = model[0].forward
    for selectors in ("direct", {"*": "direct"}):
        with pytest.warns(
            UserWarning, match="calls of '0', '1' keep PyTorch's implementation, since they cannot be replaced"
        ):
            swap(model, selectors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap(model, {"linear": "gemm"})  # PyTorch's own attention keeps its layers, as the documentation says


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 4))])
def test_a_child_that_torch_jit_compiled(compiled):
    model, x = nn.Sequential(compiled(nn.Linear(4, 4)), nn.Linear(4, 4)), torch.randn(2, 4)
    for inputs in (None, x):
        with pytest.warns(UserWarning, match="torch.jit compiled stay as they are: 0;"):
            swapped = swap(model, {"linear": "gemm"}, inputs)
        assert [row.name for row in explain(swapped).layers if row.used == "gemm"] == ["1"]
        close(swapped(x), model(x))


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.line = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv3d(1, 1, 1)

    def forward(self, x):
        x = F.conv2d(self.relu(self.conv(x)), self.conv.weight.transpose(0, 1))
        return F.conv3d(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)[:, None, :, None, None], self.line.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(1, 2, 9, 9))])
def test_what_torch_jit_compiled_is_reported(compiled, inside):
    model, x = compiled(Scripted()), torch.randn(1, 2, 9, 9)
    model, name = (nn.Sequential(model), "0") if inside else (model, "")
    conv = f"{name}.conv".strip(".")
    for inputs in (None, x):
        with pytest.warns(UserWarning, match=f"torch.jit compiled stay as they are: .*{conv}") as caught:
            swapped = swap(model, "direct", inputs)
        assert caught[0].filename == __file__
        assert {m.name: (m.type, {*m.source}) for m in explain(swapped).unreached} == {
            name: ("Scripted", {"conv2d", "flatten", "adaptive_avg_pool2d"}),
            conv: ("Conv2d", {"conv2d"}),
            conv.replace("conv", "relu"): ("ReLU", {"relu"}),
        }
        with pytest.raises(ValueError, match=r"calls conv2d, which cannot be replaced: torch\.jit compiled it"):
            swap(model, "direct", inputs, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            swap(model, {"linear": "gemm"}, inputs, strict=True)
    with pytest.raises(ValueError, match=f"the calls that '{conv}' makes cannot be replaced: torch.jit compiled it"):
        swap(model, {conv: "direct"})


class Padded(nn.Module):
    def forward(self, x):
        return F.conv2d(F.pad(x, [1, 1, 1, 1]), torch.ones(3, 2, 3, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize(("module", "found"), [(Padded(), True), (nn.ConvTranspose2d(2, 3, 3), False)])
def test_convolutions_that_torch_jit_traced(module, found):
    model = torch.jit.trace(module, torch.ones(1, 2, 9, 9))
    with pytest.raises(ValueError, match="calls conv2d") if found else contextlib.nullcontext():
        swap(model, "direct", strict=True)


def test_a_failed_run_leaves_the_compiler_alone():
    class Fails(nn.ReLU):
        def forward(self, x):
            raise NotImplementedError("no forward")

    with pytest.raises(RuntimeError, match="NotImplementedError: no forward"):
        swap(nn.Sequential(Fails()), {"relu": "direct"}, torch.ones(1), inplace=True)
    function = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    function(torch.ones(1))
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.parametrize("inplace", [True, False])
def test_a_model_that_torch_compile_made(inplace):
    x, graphs = torch.randn(1, 2, 9, 9), []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), backend=backend)
    expected = compiled(x)
    swapped = swap(compiled, "direct", x, inplace=inplace)
    close(swapped(x), expected)
    assert "ai3.conv2d_direct.default" in graphs[-1]
    assert layers(swapped)["_orig_mod.0"].used == "direct"


def test_a_base_class_that_keeps_a_list_of_its_subclasses():
    class Base(nn.Module):
        known: list[str] = []  # noqa: RUF012

        def __init_subclass__(cls):
            assert cls.__name__ not in Base.known
            Base.known.append(cls.__name__)

    class Mine(Base):
        def forward(self, x):
            return F.relu(x)

    assert explain(swap(Mine(), EVERY)).layers[0].used == "direct"
    assert Base.known == ["Mine"]


def test_inplace_and_copies():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert swap(model, "direct") is not model
    assert type(model[0]) is nn.Conv2d
    assert swap(model, "direct", inplace=True) is model
    assert type(model[0]) is ai3_ops.nn.Conv2d
    assert unswap(model) is model
    assert type(model[0]) is nn.Conv2d
    assert "_ai3" not in vars(model[0])
    with pytest.raises(TypeError, match=r"needs an nn.Module, got Tensor"):
        swap(torch.zeros(1), "direct")


def test_the_run_with_example_inputs_leaves_no_trace():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout()

        def forward(self, x, again=None):
            return self.drop(self.norm(self.conv(x)))

    model = Net().train()
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    dice = torch.get_rng_state()
    for inputs in (torch.randn(1, 1, 5, 5), (torch.randn(1, 1, 5, 5), None), {"x": torch.randn(1, 1, 5, 5)}):
        torch.set_rng_state(dice)
        swap(model, "direct", inputs, inplace=True)
        assert torch.equal(torch.get_rng_state(), dice)
        (row,) = explain(model).layers[:1]
        assert row.calls == 0
        assert row.shapes[0] == (1, 1, 5, 5)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_report():
    model = swap(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten()), {"conv2d": "direct"})
    model(torch.randn(1, 1, 3, 3))
    report = explain(model)
    row = report.to_dict()["layers"][0]
    assert row.pop("packed_bytes") >= 64 + 2 * 4  # the rest depends on the instruction set
    assert row.pop("workspace") > 0
    assert row == {
        "name": "0", "operation": "conv2d", "requested": "direct", "used": "direct", "reason": "",
        "shapes": [(1, 1, 3, 3), (2, 1, 1, 1), (2,)], "calls": 1, "torch_calls": 0,
        "layout": "", "packs": "each call", "time_us": None, "torch_us": None,
    }  # fmt: skip
    assert "1x1x3x3" in str(report)
    assert [row.used for row in explain(nn.Sequential(nn.ReLU())).layers] == ["torch"]


def test_report_of_a_rule_before_its_first_call():
    model = swap(nn.Conv2d(1, 2, 1), "default")
    (row,) = explain(model).layers
    assert (row.used, row.reason.partition(":")[0]) == ("default", "not known yet")
    with torch.no_grad():
        model(torch.randn(1, 1, 3, 3))
    (row,) = explain(model).layers
    assert (row.used, row.reason) == ("depthwise", "one channel, and few filters")


def test_report_of_a_preference():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1)).eval()
    first, second = explain(swap(model, ai3_ops.prefer("depthwise", "winograd_f2", "torch"))).layers
    assert first.used == "winograd_f2"
    assert re.fullmatch("depthwise needs [^;]*", first.reason)
    assert second.used == "torch"
    assert re.fullmatch("depthwise needs .*; winograd_f2 needs .*", second.reason)


def test_transformer_layers_call_their_swapped_modules():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    swapped, x = swap(model, {"linear": "gemm"}), torch.randn(2, 5, 8)
    with torch.no_grad():
        close(swapped(x), model(x))
        close(swapped(x, src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), model(x))
    assert {row.calls for row in explain(swapped).layers if row.used == "gemm"} == {2}
    assert unswap(swapped).layers[0].activation_relu_or_gelu == 1
    buffer = io.BytesIO()
    torch.save(swap(model, {"linear": "gemm"}), buffer)
    buffer.seek(0)
    with torch.no_grad():
        close(torch.load(buffer, weights_only=False)(x), model(x))


class MyLayer(nn.TransformerEncoderLayer):
    pass


def test_subclasses_of_transformer_layers_call_their_swapped_modules():
    model, x = MyLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    swapped = swap(model, {"linear": "gemm"})
    for m in (swapped, pickle.loads(pickle.dumps(swapped))):
        with torch.no_grad():
            close(m(x), model(x))
        assert type(m).__name__ == "MyLayer"
    assert {row.calls for row in explain(swapped).layers if row.used == "gemm"} == {1}
    assert type(unswap(swapped)) is MyLayer


class OwnFeedForward(nn.TransformerEncoderLayer):
    def forward(self, x, mask=None):
        return super().forward(x, mask)

    def _ff_block(self, x):
        return self.linear2(F.silu(self.linear1(x)))


@pytest.fixture
def fused(monkeypatch):
    """A list that grows with each of PyTorch's calls of a whole encoder layer."""
    calls, function = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(1), function(*args))[1])
    return calls


def encoder_layer(kind=nn.TransformerEncoderLayer, **options):
    torch.manual_seed(0)
    return kind(16, 2, 32, dropout=0.0, **{"batch_first": True, **options}).eval()


def test_layers_of_few_tokens_take_pytorchs_fast_path(fused):
    """Where nothing but `default` was asked for, and nothing is trained or watched."""
    model, x = encoder_layer(), torch.randn(2, 5, 16)
    swapped, named = swap(model, "default"), swap(model, {"attention": "default", "linear": "gemm"})

    def fuses(module, given, **more):
        fused.clear()
        output = module(given, **more)
        taken = bool(fused)
        close(output, model.double()(given.double(), **more).float())
        model.float()
        return taken

    with torch.no_grad():
        for module in (swapped, named):
            assert not fuses(module, x)  # the first is seen by each part
        assert fuses(swapped, x)
        assert not fuses(named, x)
        assert not fuses(swapped, torch.randn(64, 300, 16))
        with torch.autocast("cpu", torch.bfloat16):
            fused.clear()
            swapped(x)
            assert not fused
        rows = [row for row in explain(swapped).layers if row.operation != "relu"]
        assert {row.calls for row in rows} == {4}
        assert fuses(swapped, x)
        assert all("the whole layer in one call" in row.reason for row in explain(swapped).layers if row.calls)
    fused.clear()
    y = swapped(x)
    assert not fused
    assert y.requires_grad
    with torch.no_grad():
        swapped.linear1.register_forward_hook(lambda *_: None)
        assert not fuses(swapped, x)  # counted once
    assert {row.calls for row in explain(swapped).layers if row.operation != "relu"} == {7}


@pytest.mark.parametrize("mask", ["additive", "causal", "padding"])
def test_layers_with_masks_take_no_fast_path(fused, mask):
    """Which takes additive masks for boolean ones, and makes NaN of rows without tokens."""
    model, x = nn.TransformerEncoder(encoder_layer(), 2).eval(), torch.randn(2, 5, 16)
    given = {
        "additive": {"mask": torch.randn(5, 5)},
        "causal": {"mask": torch.full((5, 5), -torch.inf).triu(1), "is_causal": True},
        "padding": {"src_key_padding_mask": torch.tensor([[False] * 3 + [True] * 2, [False] * 5])},
    }[mask]
    swapped = swap(model, "default")
    expected = model(x, **given).detach()  # with gradients on, which have no fast path
    with torch.no_grad():
        for _ in range(3):
            close(swapped(x, **given), expected)
    assert not fused


def test_subclasses_with_code_of_their_own_take_no_fast_path(fused):
    model, x = encoder_layer(OwnFeedForward), torch.randn(2, 5, 16)
    swapped = swap(model, {"linear": "default", "silu": "direct"})
    expected = model(x).detach()
    with torch.no_grad():
        for _ in range(3):
            close(swapped(x=x), expected)
    assert not fused
    assert {row.calls for row in explain(swapped).layers if row.used == "direct"} == {3}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_other_tracers():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), Modes(), nn.ReLU()).eval(), torch.randn(1, 1, 5, 5)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            swapped = swap(model, EVERY)
            graph = torch.fx.symbolic_trace(swapped)
            close(graph(x), model(x))
            assert "conv2d_direct" in graph.code
            close(torch.jit.trace(swapped, x)(x), model(x))
    assert "Proxy" not in str(explain(swapped))


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.one, self.wide = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, 2, "valid")
        self.line, self.norm, self.last = nn.Conv1d(8, 8, 1), nn.LayerNorm(9), nn.Linear(9, 4)

    def forward(self, x):
        y = self.wide(F.gelu(F.relu(self.one(self.conv(x)))))
        y = self.norm(self.line(F.max_pool2d(y, 2, 1).flatten(2)))
        return self.last(F.scaled_dot_product_attention(y, y, y).softmax(-1))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "selectors", ["default", "direct", {"conv2d": "gemm", "rms_norm": "direct", "batch_norm": "direct"}]
)
def test_torch_fx_traces(selectors, grad):
    layers = nn.BatchNorm2d(8), nn.ReLU(), nn.RMSNorm(5), nn.LayerNorm(5), nn.Linear(5, 4), nn.GELU(), nn.Softmax(-1)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), *layers).eval(), torch.randn(1, 3, 7, 7)
    swapped = swap(model, selectors, x)
    with torch.set_grad_enabled(grad):
        close(torch.fx.symbolic_trace(swapped)(x), model(x))


@pytest.mark.parametrize("selectors", ["default", "direct"])
@pytest.mark.parametrize(
    "layer",
    [nn.ReLU(), nn.Conv2d(1, 1, 1), nn.Linear(2, 2), nn.RMSNorm(2), nn.LayerNorm(2), nn.GELU(), nn.MaxPool2d(2)],
)
def test_what_is_no_tensor_is_refused_as_by_pytorch(layer, selectors):
    for module in (layer, swap(nn.Sequential(layer), selectors)):
        with pytest.raises(TypeError, match=r"must be Tensor, not NoneType|invalid combination"):
            module(None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("selectors", ["default", {"conv2d": "winograd_general", "linear": "gemm", "relu": "direct"}])
def test_torch_jit_trace(selectors, grad, warm):
    """Which traces twice, the second time without gradients, and compares the graphs."""
    model, x = Traced().eval(), torch.randn(2, 3, 11, 11)
    swapped = swap(model, selectors, x)
    with torch.set_grad_enabled(grad):
        for _ in range(2 * warm):
            swapped(x)
        traced = torch.jit.trace(swapped, x)
    assert "ai3::conv2d" in str(traced.inlined_graph)
    for given in (x, torch.randn(1, 3, 11, 11)):
        close(traced(given), model(given))


def test_forward_mode_differentiation_is_pytorchs():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    swapped = swap(model, {"linear": "gemm"})
    for actual, expected in zip(torch.func.jvp(swapped, (x,), (x,)), torch.func.jvp(model, (x,), (x,)), strict=True):
        close(actual, expected)
    assert explain(swapped).layers[0].torch_calls == 1
    swapped(x)
    assert explain(swapped).layers[0].torch_calls == 1
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(swap(model, {"linear": "gemm"}, strict=True), (x,), (x,))


def test_an_algorithm_that_a_process_does_not_have():
    model = swap(nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1))), "direct")
    model[0][0]._ai3.algorithm = ai3_ops.Algorithm("elsewhere")
    other = pickle.loads(pickle.dumps(model))
    x = torch.randn(1, 1, 3, 3)
    words = r"ai3_ops: 0.0 \(conv2d\): no conv2d algorithm 'elsewhere'; .*; PyTorch computes this layer"
    with pytest.warns(UserWarning, match=words) as caught:
        close(other(x), model(x))
    assert caught[0].filename == __file__
    (row,) = explain(other).layers
    assert (row.requested, row.used, row.calls, row.torch_calls) == ("direct", "torch", 1, 1)
    assert "'elsewhere'" in row.reason


# Packed weights -------------------------------------------------------------------------------------------------------
PACKING = [a.name for a in ai3_ops.algorithms("conv2d", "cpu") if a.packs]


@pytest.mark.parametrize("algorithm", [*PACKING, "default"])
def test_packs_follow_their_weights(algorithm):
    window = stride, _, dilation, groups = window_for(algorithm, 4)
    model = nn.Conv2d(4, 4, 3, *window).double()
    swapped, x = swap(model, algorithm), torch.randn(2, 4, 9, 9).double()

    def agree():
        with torch.no_grad():
            close(swapped(x), F.conv2d(x, swapped.weight, swapped.bias, *window))

    agree()
    packs = swapped._ai3.packs
    assert packs.bytes > 0
    assert packs.made == 1
    agree()
    with torch.inference_mode():
        swapped(x)
    swapped(x).sum().backward()
    assert swapped._ai3.packs == packs  # made once, whatever the mode
    optimizer = torch.optim.SGD(swapped.parameters(), lr=0.5)
    swapped(x).square().mean().backward()
    optimizer.step()
    agree()
    swapped.load_state_dict({k: v + 1 for k, v in swapped.state_dict().items()})
    agree()
    swapped.weight.data.mul_(0.9)
    agree()
    swapped.weight.data = torch.randn_like(swapped.weight)
    agree()
    swapped.weight = nn.Parameter(torch.randn_like(swapped.weight))
    agree()
    other = {"weight": nn.Parameter(torch.randn_like(swapped.weight)), "bias": torch.zeros(4).double()}
    with torch.no_grad():
        actual = torch.func.functional_call(swapped, other, x)
        close(actual, F.conv2d(x, *other.values(), *window))
    agree()
    for copied in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert copied._ai3.packs.bytes == 0
    assert list(swapped.state_dict()) == ["weight", "bias"]
    swapped.to(memory_format=torch.channels_last)
    agree()
    with torch.inference_mode():
        constant = swap(nn.Conv2d(4, 4, 3, stride, 0, dilation, groups).double(), algorithm)
        close(constant(x), F.conv2d(x, constant.weight, constant.bias, stride, 0, dilation, groups))
        constant.weight.mul_(2)
        close(constant(x), F.conv2d(x, constant.weight, constant.bias, stride, 0, dilation, groups))


@pytest.mark.skipif("fft" not in PACKING, reason="needs the algorithm with the largest packs")
def test_packs_that_dwarf_their_weights_are_not_kept():
    small, large = swap(nn.Conv2d(2, 2, 3), "fft"), swap(nn.Conv2d(128, 128, 1), "fft")
    with torch.no_grad():
        for model in (small, large):
            x = torch.randn(1, model.in_channels, 5, 5)
            close(model(x), F.conv2d(x, model.weight, model.bias))
            assert explain(model).layers[0].torch_calls == 0
    assert small._ai3.packs.bytes > 0
    assert large._ai3.packs.bytes == 0


def test_packs_under_transforms():
    swapped, x = swap(nn.Conv2d(4, 4, 3), "direct"), torch.randn(3, 2, 4, 9, 9)
    with torch.no_grad():
        expected = swapped(x[0])
        close(torch.func.vmap(swapped)(x)[0], expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert swapped(x[0]).dtype == torch.bfloat16
        graph = torch.fx.experimental.proxy_tensor.make_fx(swapped)(x[0])
        close(graph(x[0]), expected)


def test_silu_in_place_has_gradients():
    """They read the input, which is written over."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(inplace=True), nn.Conv2d(4, 2, 1)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.double)
    model(x).square().sum().backward()
    swapped = swap(model, {"*": "direct"}, x)
    swapped.zero_grad()
    swapped(x).square().sum().backward()
    for one, other in zip(swapped.parameters(), model.parameters(), strict=True):
        close(one.grad, other.grad)
    given = torch.randn(5, dtype=torch.double, requires_grad=True) * 1
    before = given.detach().clone()
    assert swapped[1](given) is given
    close(given, F.silu(before))
    one = torch.func.grad(lambda x: torch.func.vmap(lambda each: swapped[1](each * 1))(x).sum())(before)
    close(one, torch.func.grad(lambda x: F.silu(x).sum())(before))
    compiled = torch.compile(swapped[1], backend="aot_eager", fullgraph=True)
    close(compiled(given * 1), F.silu(F.silu(before)))


def test_gelu_of_channels_last_under_vmap():
    """vmap cannot be asked for a memory format."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 4, 1)).eval()
    x = torch.randn(2, 3, 16, 16)
    swapped = swap(model, "default", x)
    weights = {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}
    with torch.no_grad():
        one, other = (
            torch.func.vmap(lambda given, m=m: torch.func.functional_call(m, given, (x,)))(weights)
            for m in (swapped, model)
        )
    close(one, other)


def test_packs_of_linear():
    swapped, x = swap(nn.Linear(6, 5), {"linear": "gemm"}), torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(2):
            close(swapped(x), F.linear(x, swapped.weight, swapped.bias))
        assert swapped._ai3.packs.made == 1
        swapped.weight.data.add_(1)
        close(swapped(x), F.linear(x, swapped.weight, swapped.bias))


def test_a_shallow_copy_has_its_own_numbers():
    swapped, x = swap(nn.Conv2d(3, 4, 3), "direct"), torch.randn(1, 3, 9, 9)
    with torch.inference_mode():
        before = swapped(x)
        other = copy.copy(swapped)
        other.stride = (2, 2)
        torch.testing.assert_close(other(x), F.conv2d(x, swapped.weight, swapped.bias, 2), rtol=1e-4, atol=1e-5)
        assert torch.equal(swapped(x), before)


def test_empty_containers_in_the_run_with_example_inputs():
    """They are falsy, and a hook that returned one would replace the output by it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.shortcut = nn.Conv2d(4, 4, 3, padding=1), nn.Sequential()

        def forward(self, x):
            return self.conv(x) + self.shortcut(x)

    model, x = Block(), torch.randn(1, 4, 6, 6)
    close(swap(model, "direct", x)(x), model(x))


def test_a_run_of_a_model_with_sparse_buffers():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("edges", torch.eye(5).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.edges, self.layer(x))

    model, x = Graph().train(), torch.randn(5, 4)
    expected = model(x)
    swap(model, {"linear": "gemm"}, x, inplace=True)
    assert model.training
    close(model(x), expected)


def test_a_convolution_that_is_replaced_on_the_instance_is_reported():
    """As is usual to make images tile."""
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1)), torch.randn(1, 2, 5, 5)

    def tiled(self, input, weight, bias):
        return F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias)

    model[0]._conv_forward = tiled.__get__(model[0])
    expected = model(x)
    swapped = swap(model, "direct", inplace=True)
    assert torch.equal(swapped(x), expected)
    (module,) = explain(swapped).unreached
    assert "its _conv_forward was replaced on the instance" in module.reason


def test_a_second_swap_keeps_operators_and_layouts():
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 9, 4)).eval()
    layers = {"0": {"operation": "conv2d", "algorithm": "winograd", "layout": "contiguous"}}
    once = swap(model, ai3_ops.Plan.from_dict({"version": 1, "layers": layers}))
    twice = swap(once, {"linear": "gemm"})
    assert [layer.used for layer in explain(twice).layers] == ["winograd", "torch", "torch", "gemm"]
    assert twice[0].weight.is_contiguous()
    x = torch.randn(1, 16, 7, 7)
    with torch.no_grad():
        program = torch.export.export(twice, (x,))
    called = [str(node.target) for node in program.graph.nodes if "winograd" in str(node.target)]
    assert called == ["ai3._conv2d_winograd_held.default"]


def test_functional_calls_that_record_gradients_are_left_where_layers_are():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return F.softmax(F.linear(x, self.weight), -1)

    model, x = swap(Net(), "default"), torch.randn(2, 4)
    model(x).sum().backward()
    assert [(layer.calls, layer.torch_calls) for layer in explain(model).layers] == [(1, 1), (1, 1)]
    assert all("training steps" in layer.reason for layer in explain(model).layers)
    with torch.no_grad():
        model(x)
    assert [layer.calls for layer in explain(model).layers] == [2, 2]
    layer = swap(nn.Linear(4, 8).eval(), "default")  # who forgets no_grad
    layer(x)
    assert (layer._ai3.calls, layer._ai3.torch_calls) == (1, 1)
    layer.requires_grad_(False)(x)
    assert layer._ai3.calls == 2


class WritesIntoWhatItIsGiven(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, more=None):
        if more is not None:
            more["seen"] = True
            more["list"].append(more["list"][0].zero_())
            more["object"].value.fill_(3)
        x.sub_(1)
        return self.conv(x)


def test_runs_leave_example_inputs_as_they_were():
    model = WritesIntoWhatItIsGiven()
    wide, held = torch.randn(2, 6, 8, 10), torch.randn(3)
    for x in (
        wide[:, :3],
        wide[:, ::2, :, 1:],
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        wide[:1, :3],
    ):
        more = {"list": [held], "object": types.SimpleNamespace(value=torch.zeros(2))}
        before, strides = x.clone(), x.stride()
        swapped = swap(model, "direct", {"x": x, "more": more})
        ai3_ops.tune(model, (x, more), budget_seconds=0, cache=False, progress=False)
        assert torch.equal(x, before)
        assert x.stride() == strides
        assert list(more) == ["list", "object"]
        assert len(more["list"]) == 1
        assert more["list"][0] is held
        assert held.any()
        assert not more["object"].value.any()
        assert explain(swapped).layers[0].shapes[0] == x.shape


def test_a_rule_for_products_of_float32_says_nothing_of_autocast(monkeypatch):
    monkeypatch.setattr("ai3_ops.operations.linear._FEATURES", 192)
    layer, x = swap(nn.Linear(32, 8).requires_grad_(False), "default"), torch.randn(5, 32)
    layer(x)
    assert explain(layer).layers[0].torch_calls == 1
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert explain(layer).layers[0].torch_calls == 1


class Mixed(nn.Module):
    """Autocast within: the second convolution is given 16 bits and has a weight of 32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x)).float()


def test_a_call_under_autocast_is_described_as_it_computes():
    model, x = Mixed().eval(), torch.randn(2, 3, 8, 8)
    swapped = swap(model, {"first": "direct", "second": "smm"}, x)
    torch.testing.assert_close(swapped(x), model(x), rtol=0.02, atol=0.02)
    assert [layer.torch_calls for layer in explain(swapped).layers] == [0, 0]


class Computes:
    """No tensor, but computes as one, by __torch_function__."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.tensor if isinstance(a, Computes) else a for a in args]
        return Computes(function(*plain, **(kwargs or {})))


class CallsWithThose(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.relu = nn.Linear(3, 4), nn.ReLU()

    def forward(self, x):
        return self.relu(F.relu(self.linear(Computes(x))).tensor)


@pytest.mark.parametrize("selectors", ["default", {"linear": "gemm"}])
def test_calls_that_get_no_tensor_when_seen_are_as_if_not_seen(selectors):
    model, x = CallsWithThose(), torch.randn(2, 3)
    swapped = swap(model, selectors, x)
    with torch.no_grad():
        torch.testing.assert_close(swapped(x), model(x))
    assert {row.name for row in explain(swapped).layers if row.shapes is not None} == {"relu"}
