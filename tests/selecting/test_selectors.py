"""Which calls each selector matches, what wins, and what is refused with which words."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops import Algorithm, explain, prefer, swap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(F.relu(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.second = Block()  # called second
        self.first = Block()
        self.stem = nn.Conv2d(3, 4, 5, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.second(self.first(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


X = torch.randn(2, 3, 13, 13)
CONVS = ["second.conv", "first.conv", "stem"]


def used(model):
    return {layer.name: layer.used for layer in explain(model).layers if layer.used != "torch"}


@pytest.fixture
def net():
    return Net().eval()


def test_a_bare_name_speaks_of_conv2d(net):
    assert used(swap(net, "direct")) == dict.fromkeys(CONVS, "direct")
    assert used(swap(net, Algorithm("direct"))) == dict.fromkeys(CONVS, "direct")
    assert used(swap(net, prefer("depthwise", "direct"))) == dict.fromkeys(CONVS, "direct")


@pytest.mark.parametrize("word", [None, "torch", {"*": None}])
def test_leaving_alone(net, word):
    assert used(swap(net, word)) == {}


def test_a_list_counts_layers_in_module_order_and_in_call_order(net):
    assert used(swap(net, ["direct", None, "torch"])) == {"second.conv": "direct"}
    assert used(swap(net, ("direct", None, "torch"), X)) == {"stem": "direct"}
    with pytest.raises(ValueError, match=r"one algorithm per conv2d layer: 3 \(second.conv, first.conv, stem\), got 2"):
        swap(net, ["direct", "direct"])
    with pytest.raises(ValueError, match=r"20 \(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, …\), got 1"):
        swap(nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(20))), ["direct"])


def test_a_list_under_keys(net):
    assert used(swap(net, {"relu": ["direct", None, "direct", None]})) == {
        "second:relu_0": "direct",
        "first:relu_0": "direct",
    }
    assert used(swap(net, {"first": ["direct"]})) == {"first.conv": "direct"}
    with pytest.raises(ValueError, match=r"'first'.*: 1 \(first.conv\), got 2"):
        swap(net, {"first": ["direct", "direct"]})


def test_functions(net):
    assert used(swap(net, lambda m: "direct" if m.kernel_size == (5, 5) else None)) == {"stem": "direct"}
    shapes = {}

    def choose(module, shape):
        shapes[module.kernel_size] = shape
        return "torch" if shape[1] == 3 else prefer("direct", "torch")

    assert used(swap(net, choose, X)) == {"first.conv": "direct", "second.conv": "direct"}
    assert shapes == {(5, 5): (2, 3, 13, 13), (3, 3): (2, 4, 5, 5)}
    with pytest.raises(ValueError, match="needs example inputs"):
        swap(net, choose)
    name = "direct"
    assert used(swap(net, lambda m, name=name: name)) == dict.fromkeys(CONVS, "direct")
    with pytest.raises(TypeError, match=r"\(module\) or \(module, input_shape\)"):
        swap(net, lambda: "direct")
    with pytest.raises(ValueError, match="gives 3"):
        swap(net, lambda m: 3)
    with pytest.raises(ValueError, match=r"gives 'dirct' for 'second.conv': no conv2d algorithm 'dirct'.*'direct'"):
        swap(net, lambda m: "dirct")
    with pytest.raises(ZeroDivisionError) as raised:
        swap(net, lambda m: 1 // (m.kernel_size[0] - 5) or "direct")
    (note,) = raised.value.__notes__
    assert note == "ai3_ops: the selector function was asked for 'stem'"


def test_a_function_gets_the_module_that_makes_a_functional_call(net):
    asked = []
    swap(net, {"flatten": lambda m: asked.append(m)}, inplace=True)
    assert asked == [net]


def test_precedence(net):
    keys = {
        "*": "torch",
        "conv2d": "direct",
        "first": "torch",
        r"re:.*stem": "torch",
        "stem": "direct",
        "first.conv": "direct",
    }
    for order in (keys, dict(reversed(keys.items()))):
        assert used(swap(net, order)) == dict.fromkeys(CONVS, "direct")
        assert used(swap(net, order | {"first.conv": None})) == {"second.conv": "direct", "stem": "direct"}
    assert used(swap(net, {"conv2d": "direct", "first": "torch", "second": "torch"})) == {"stem": "direct"}
    assert used(swap(net, {r"re:first\..*": None, r"re:.*\.conv": "direct"})) == {"second.conv": "direct"}
    assert used(swap(net, {r"re:.*\.conv": "direct", r"re:first\..*": None})) == dict.fromkeys(CONVS[:2], "direct")


def test_the_nearest_parent_wins():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Conv2d(1, 1, 1)))
    assert used(swap(model, {"0": "direct", "0.0": None})) == {"0.1": "direct"}
    assert used(swap(model, {"0.0": "direct", "0": None})) == {"0.0.0": "direct"}


def test_names_of_functional_calls(net):
    assert used(swap(net, {"second:relu_0": "direct"})) == {"second:relu_0": "direct"}
    assert used(swap(net, {"re:second.*relu.*": "direct"})) == {"second:relu_0": "direct", "second.relu": "direct"}
    assert used(swap(net, {"relu": "direct", "second": None})) == {"first:relu_0": "direct", "first.relu": "direct"}
    assert used(swap(net, {":flatten_0": "direct"})) == {":flatten_0": "direct"}
    root = {":flatten_0": "direct", ":adaptive_avg_pool2d_0": "direct"}
    assert used(swap(net, {"": "direct", "first": None, "second": None, "stem": None})) == root
    assert set(used(swap(net, {"": "direct"}))) == {
        *root,
        *CONVS,
        "first.relu",
        "second.relu",
        "first:relu_0",
        "second:relu_0",
    }


def test_a_module_called_as_an_operation_is_reached_by_a_regex():
    model = nn.Sequential()
    model.add_module("relu", nn.Conv2d(1, 1, 1))
    model.add_module("other", nn.ReLU())
    assert used(swap(model, {"relu": "direct"})) == {"other": "direct"}
    assert used(swap(model, {"re:relu": "direct"})) == {"relu": "direct"}


def test_a_name_under_a_general_key_speaks_of_the_operations_that_have_it(net):
    assert "head" not in used(swap(net, {"*": "direct"}))
    assert used(swap(net, {"*": "direct", "linear": "gemm"}))["head"] == "gemm"
    assert set(used(swap(net, {"first": "direct"}))) == {"first.conv", "first.relu", "first:relu_0"}


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        ({"frist.conv": "direct"}, "'frist.conv' is no operation and no name in this model.*'first.conv'"),
        ({"conv2": "direct"}, "did you mean 'conv2d'"),
        ({"re:nothing": "direct"}, "'re:nothing' matches no module"),
        ({"re:(": "direct"}, "is not a regular expression"),
        ({"first:relu_1": "direct"}, "did you mean 'first:relu_0'"),
        ("dirct", "no conv2d algorithm 'dirct'; did you mean 'direct'"),
        ({"first": "dirct"}, "no algorithm 'dirct'; did you mean 'direct'"),
        ({"linear": "direct"}, "no linear algorithm 'direct'"),
        ({"head": "direct"}, "'head': no call there has direct"),
        ("auto", '"auto" measures, and needs example inputs'),
        ({"conv2d": "auto"}, "needs example inputs"),
        (["auto"] * 3, "needs example inputs"),
        (lambda module: "auto", "needs example inputs"),
        ({"conv2d": Algorithm("mean", allow_tf32=True)}, "no conv2d algorithm 'mean'"),
        ("flash", "'flash' is an algorithm of attention, .* name the operation, as in {'attention': 'flash'}"),
        (ai3_ops.prefer("longformer", "flash"), "'longformer' is an algorithm of attention"),
        (Algorithm("flash", window_left=64), r"{'attention': Algorithm\('flash', window_left=64\)}"),
        (Algorithm("direct", backward_input="dirct"), "no conv2d algorithm 'dirct'"),
        (Algorithm("direct", backward_input="prototype"), "'prototype' is a Python callable"),
        (Algorithm("prototype", backward_input="direct"), "'prototype' is a Python callable"),
    ],
)
def test_mistakes(net, selectors, words):
    ai3_ops.register("conv2d", "prototype", F.conv2d, replace=True)
    with pytest.raises(ValueError, match=words):
        swap(net, selectors)


@pytest.mark.parametrize("layer", [nn.PReLU(3), nn.ConvTranspose2d(3, 3, 3), nn.Conv3d(3, 3, 3), nn.Identity()])
def test_a_layer_of_no_operation(layer):
    model = nn.Sequential(layer, nn.ReLU())
    for value in ("direct", ["direct"], lambda m: "direct"):
        with pytest.raises(
            ValueError, match=rf"'0': {type(layer).__name__} makes no call that ai3_ops swaps; .*conv2d"
        ):
            swap(model, {"0": value})
    with pytest.raises(ValueError, match="what it matches makes no call"):
        swap(model, {"re:0": "direct"})
    for value in (None, "torch", ai3_ops.prefer("torch")):
        swap(model, {"0": value}, strict=True)


@pytest.mark.parametrize(
    ("selectors", "words"),
    [
        (3, "a selector is a name.* got 3"),
        ({3: "direct"}, "key is a string, got 3"),
        ({"first": 3}, "'first': a selector is a name.* got 3"),
        ({"first": {"conv": "direct"}}, "'first': dicts do not nest; write each name out"),
        (nn.Conv2d(1, 1, 1), "a selector is a name.* got Conv2d"),
        (torch.ops.ai3.conv2d_direct, "an operator is no selector; name its algorithm"),
        ({"first": torch.ops.ai3.conv2d_direct.default}, "'first': an operator is no selector"),
    ],
)
def test_wrong_types(net, selectors, words):
    with pytest.raises(TypeError, match=words):
        swap(net, selectors)


def test_a_regex_beside_modules_that_are_out_of_reach():
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    for strict in (False, True):
        swapped = ai3_ops.swap(net, {"re:1": "gemm"}, strict=strict)
        assert [layer.used for layer in ai3_ops.explain(swapped).layers if layer.name == "1"] == ["gemm"]


def test_parameters_have_the_operators_types():
    with pytest.raises(TypeError, match="needs deterministic to be True or False, got 'yes'"):
        Algorithm("direct", deterministic="yes")


def test_auto_is_no_preference():
    with pytest.raises(ValueError, match="always finds an algorithm"):
        ai3_ops.prefer("auto", "direct")


def test_operations_and_star_may_match_nothing():
    model = nn.Sequential(nn.Identity())
    assert used(swap(model, {"conv2d": "direct", "*": "direct"})) == {}
    assert used(swap(model, {"0": None})) == {}
    assert used(swap(model, "direct")) == {}


@pytest.mark.parametrize(
    ("selectors", "named"),
    [
        ("winograd", "conv2d: winograd"),
        ({"conv1d": "direct", "linear": "gemm"}, "conv1d: direct"),
        ({"*": "fft"}, r"\*: fft"),
    ],
)
def test_what_no_call_has_is_said_where_swap_is_strict(selectors, named):
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.warns(UserWarning, match=f"no call of this model is one that these selectors speak of: {named}$"):
        swap(model, selectors, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap(model, selectors)
        swap(model, "default", strict=True)
        swap(model, {"conv1d": None, "linear": "gemm"}, strict=True)


def test_a_failed_swap_changes_nothing(net):
    swap(net, {"stem": "direct"}, inplace=True)
    classes, state = [type(m) for m in net.modules()], used(net)
    for selectors in ("dirct", {"first": lambda m: "dirct"}, {"nowhere": None}):
        with pytest.raises(ValueError, match=r"selector|no conv2d"):
            swap(net, selectors, X, inplace=True)
        assert [type(m) for m in net.modules()] == classes
        assert used(net) == state
    for inputs in (torch.randn(2, 5, 9, 9), X.double(), (X, X)):
        with pytest.raises(
            RuntimeError, match=r"running the model on the example inputs \((Tensor, )?Tensor\) failed: "
        ) as error:
            swap(net, "direct", inputs, inplace=True)
        assert isinstance(error.value.__cause__, (RuntimeError, TypeError))
        assert used(net) == state


def test_a_second_swap_keeps_what_it_does_not_speak_of(net):
    once = swap(net, {"stem": "direct", "second:relu_0": "direct"})
    assert used(swap(once, {"first.conv": "direct", "second:relu_0": None})) == {
        "stem": "direct",
        "first.conv": "direct",
    }


def test_pytorch_as_the_last_choice_is_no_loss():
    model = nn.ReLU()
    model.forward = model.forward  # of which nothing can be replaced
    swap(model, {"relu": prefer("direct", "torch")}, strict=True)
    with pytest.raises(ValueError, match="cannot be replaced"):
        swap(model, {"relu": prefer("direct")}, strict=True)


def test_a_bare_layer_as_the_model():
    layer = nn.Conv2d(3, 2, 3)
    assert used(swap(layer, "direct")) == {"": "direct"}
    assert used(swap(layer, {"": "direct"})) == {"": "direct"}
    assert used(swap(layer, ["direct"], X)) == {"": "direct"}


def test_algorithm_is_a_value():
    assert Algorithm("a", x=1) == Algorithm("a", x=1) != Algorithm("a")
    assert hash(Algorithm("a", x=1)) == hash(Algorithm("a", x=1))
    assert repr(Algorithm("a", backward_input="b", x=1)) == "Algorithm('a', backward_input='b', x=1)"
    assert copy.copy(Algorithm("a")) == Algorithm("a")
    with pytest.raises(
        TypeError, match=r"Algorithm\('winograd'\) has no parameter 'backward_weigth'; did you mean 'backward_weight'"
    ):
        Algorithm("winograd", backward_weigth="im2col")
    with pytest.raises(TypeError, match="no parameter 'tile'"):
        Algorithm("direct", tile=3)
    assert Algorithm("direct", allow_tf32=True).parameters == {"allow_tf32": True}
    with pytest.raises(ValueError, match="at least one"):
        prefer()
    with pytest.raises(TypeError):
        prefer(3)


def test_public_names():
    assert {"Algorithm", "explain", "prefer", "swap", "unswap"} <= set(ai3_ops.__all__)


def test_a_rule_does_not_choose_what_is_excluded(net):
    """In eager, traced and pickled modules, training and inference; nothing else about the rule changes."""
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1)).eval()
    x = torch.randn(1, 32, 28, 28)
    assert used(swap(model, "default", x))["0"].startswith("winograd")
    choice = Algorithm("default", exclude=("winograd*",))
    for selectors in (choice, {"*": choice}, {"0": choice}):
        swapped = swap(model, selectors, x)
        assert not used(swapped)["0"].startswith("winograd")
    swapped = swap(model, {"*": choice}, x)
    assert used(swapped)["2"] == "direct"  # no other algorithm is concerned
    again = pickle.loads(pickle.dumps(swapped))
    exported = torch.export.export(swapped, (x,))
    assert "'exclude': 'winograd*'" in str([n.kwargs for n in exported.graph.nodes])
    direct = torch.ops.ai3.conv2d_direct(x, model[0].weight, model[0].bias, padding=1)
    with torch.no_grad():
        expected = model[2](direct.relu())
    for m in (swapped, again, exported.module(), torch.compile(swapped, backend="aot_eager", fullgraph=True)):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                torch.testing.assert_close(m(x), expected, rtol=1e-5, atol=1e-6)
    algorithm = used(swapped)["0"]
    operator = getattr(torch.ops.ai3, f"conv2d_{algorithm}")
    with torch.no_grad():  # to the bit what that algorithm gives, which winograd does not
        only = swapped[0](x)
        nhwc = x.contiguous(memory_format=torch.channels_last)  # as swapped networks compute
        assert torch.equal(only, operator(nhwc, model[0].weight, model[0].bias, padding=1))
        assert not torch.equal(only, torch.ops.ai3.conv2d_winograd(nhwc, model[0].weight, model[0].bias, padding=1))
    swapped.train()(x.clone().requires_grad_()).sum().backward()
    assert swapped[0].weight.grad is not None
    guess = swap(model, Algorithm("guess", exclude=("winograd*", "direct", "fft")), x)
    assert not {"winograd", "direct", "fft"} & {name.partition("_")[0] for name in used(guess).values()}
    assert used(swap(model, {"0": Algorithm("winograd", exclude=("winograd_f4",))}, x)) == {"0": "winograd_f2"}


def test_choices_of_more_than_a_name_keep_their_packs_in_programs():
    x = torch.randn(1, 32, 28, 28)
    for choice in (Algorithm("default", exclude=("direct",)), Algorithm("winograd", backward_input="im2col")):
        swapped = swap(nn.Conv2d(32, 32, 3, padding=1), choice, x)
        exported = torch.export.export(swapped, (x,)).module()
        for form in (torch.compile(swapped, backend="aot_eager", fullgraph=True), exported):
            with torch.no_grad():
                form(x)
                made = swapped._ai3.packs.made
                assert made > 0
                for _ in range(3):
                    form(x)
            assert swapped._ai3.packs.made == made
        batches = torch.func.vmap(swapped)(x.expand(2, 1, 32, 28, 28))
        torch.testing.assert_close(
            batches[0], F.conv2d(x, swapped.weight, swapped.bias, padding=1), rtol=1e-4, atol=1e-5
        )
        assert swapped._ai3.packs.made == made


def test_exclude_is_checked():
    model = nn.Sequential(nn.Conv2d(32, 32, 3))
    for call, error, words in (
        (lambda: Algorithm("default", exclude="winograd"), TypeError, "exclude as a tuple"),
        (
            lambda: Algorithm("default", exclude=("a,b",)),
            ValueError,
            r"letters, digits, underscores, \* and \?, got 'a,b'",
        ),
        (
            lambda: swap(model, Algorithm("default", exclude=("winogard",))),
            ValueError,
            "no algorithm 'winogard'; did you mean",
        ),
        (lambda: swap(model, Algorithm("direct", exclude=("fft",))), ValueError, "no rule that chooses among others"),
    ):
        with pytest.raises(error, match=words):
            call()
    every = Algorithm("default", exclude=("*",))
    with pytest.warns(UserWarning, match="1 of 1 layers keep PyTorch's implementation"):
        report = explain(swap(model, {"conv2d": every}))
    words = "only chooses among other algorithms, and none that it may choose supports this case (some are excluded)"
    assert words in report.layers[0].reason
    assert (repr(every), hash(every) == hash(Algorithm("default"))) == ("Algorithm('default', exclude=('*',))", False)


def test_workspace_of_a_direct_call():
    x, w = torch.empty(1, 64, 28, 28, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    columns = 4 * 64 * 9 * 28 * 28
    assert ai3_ops.workspace("conv2d", "gemm", x, w, padding=1) == columns
    chosen = ai3_ops.resolve("conv2d", "default", x, w, padding=1)
    needs = ai3_ops.workspace("conv2d", "default", x, w, padding=1)
    assert needs == ai3_ops.workspace("conv2d", chosen, x, w, padding=1) > 0
    assert ai3_ops.workspace("relu", "direct", x) == 0
    with pytest.raises(RuntimeError, match="needs a 3x3 kernel"):
        ai3_ops.workspace("conv2d", "winograd_f4", x, w, stride=2)
    with pytest.raises(ValueError, match="did you mean 'winograd'"):
        ai3_ops.workspace("conv2d", "winogrd", x, w)


def test_what_is_excluded_under_a_module_leaves_operations_without_a_choice_alone():
    """ReLUs have a `direct`, too, which their rule cannot exclude."""
    choice = ai3_ops.Algorithm("default", exclude=("winograd*", "direct"))
    model = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())).eval()
    rows = ai3_ops.explain(swap(model, {"0": choice})).layers
    assert [(row.operation, row.requested == repr(choice)) for row in rows] == [("conv2d", True), ("relu", False)]
    with pytest.raises(ValueError, match="relu has no choice"):
        swap(model, {"relu": choice})
