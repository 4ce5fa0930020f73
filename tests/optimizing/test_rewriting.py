"""What is folded and fused, and what the search of substitutions does."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from nets import agree, check, seeded_norm, seeded_prelu
from torch import nn

from ai3_ops.graph import fusion
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.graph.network import Checker, Mistake, difference
from ai3_ops.optimizing import backend
from ai3_ops.optimizing.search import LEAST_GAIN, search
from ai3_ops.programs.lower import Region
from ai3_ops.programs.timing import flops


def rules(fast):
    return {rewrite.rule for part in fast._ai3_report.parts for rewrite in part.rewrites}


def test_a_residual_block_is_two_convolutions_and_a_linear(residual):
    fast = check(*residual, selectors="default")
    (part,) = fast._ai3_report.parts
    assert [s.operation for s in part.steps] == ["conv2d", "conv2d", "flatten", "linear"]
    assert part.steps[1].detail == "residual, relu"
    assert {"fold normalization", "fuse activation", "fuse addition"} <= rules(fast)


class Gate(nn.Module):
    """Squeeze-and-excitation, by convolutions or linear layers."""

    def __init__(self, gate, rows):
        super().__init__()
        self.conv, self.rows = nn.Conv2d(3, 8, 3), rows
        self.fc1, self.fc2 = (nn.Linear(8, 4), nn.Linear(4, 8)) if rows else (nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1))
        self.gate = gate

    def forward(self, x):
        x = F.leaky_relu(self.conv(x), 0.2)
        s = F.adaptive_avg_pool2d(x, 1)
        s = self.gate(self.fc2(F.elu(self.fc1(s.flatten(1) if self.rows else s))))
        return x * (s[:, :, None, None] if self.rows else s)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("gate", [nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh()])
def test_gates_are_fused_with_the_layers_before_them(gate, rows):
    fast = check(Gate(gate, rows).eval(), torch.randn(2, 3, 9, 8), selectors="default")
    steps = [s for part in fast._ai3_report.parts for s in part.steps]
    names = {"Sigmoid": "sigmoid", "Hardsigmoid": "hardsigmoid", "Tanh": "tanh"}
    details = [s.detail for s in steps if s.operation in ("conv2d", "linear")]
    assert details == ["leaky_relu", "elu", names[type(gate).__name__]]
    assert not {s.operation for s in steps} & set(names.values())


@pytest.mark.parametrize("channels", [1, 8])
def test_prelu_is_fused_with_convolutions_sums_and_linear_layers(channels, compiler, faster):
    """As modules and functions, with one slope and with one of each channel; backend="ai3" does the same."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.fc = seeded_norm(8), nn.Linear(8, 8)
            self.first, self.second = seeded_prelu(channels), seeded_prelu(channels)

        def forward(self, x):
            x = self.first(self.one(x))
            x = F.prelu(x + self.norm(self.two(x)), self.second.weight)
            return self.second(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))

    model, x = Model().eval(), torch.randn(2, 3, 7, 6)
    fast = check(model, x, selectors="default", budget_seconds=0.0)  # no substitution, whose gain is measured
    details = [s.detail for part in fast._ai3_report.parts for s in part.steps if s.operation in ("conv2d", "linear")]
    assert details == ["prelu", "residual, prelu", "prelu"]
    agree(torch.compile(copy.deepcopy(model), backend=backend.ai3, options={"budget_seconds": 0.2}), model, x)


def test_slopes_that_are_not_of_the_channels_stay():
    """Of rows of three dimensions F.prelu's channels are the second one, which a linear layer's are not."""
    model = nn.Sequential(nn.Linear(6, 8), seeded_prelu(5), nn.Linear(8, 8), seeded_prelu(1), nn.Linear(8, 2))
    x = torch.randn(2, 5, 6)
    fast = check(model.eval(), x, selectors="default")
    details = [(s.operation, s.detail) for part in fast._ai3_report.parts for s in part.steps]
    assert details == [("linear", ""), ("prelu.default", ""), ("linear", "prelu"), ("linear", "")]


def graph_of(model, *inputs):
    network = capture(model.eval(), inputs, {})
    canonicalize(network)
    network.checker = Checker(network, inputs)
    fusion.simplify(network)
    return network, [node.target.__name__ for node in network.graph.nodes if node.op == "call_function"]


def test_normalization_and_relu_before_a_convolution_become_its_prologue():
    model = nn.Sequential(seeded_norm(4), nn.ReLU(), nn.Conv2d(4, 8, 1))
    network, names = graph_of(model, torch.randn(1, 4, 5, 5))
    assert names == ["conv2d"]
    assert next(network.calls(*[n.target for n in network.graph.nodes if n.op == "call_function"])).kwargs["input_relu"]


def test_normalization_before_a_convolution_without_padding_is_folded_into_its_weights():
    _, names = graph_of(nn.Sequential(seeded_norm(4), nn.Conv2d(4, 8, 3, groups=2)), torch.randn(1, 4, 5, 5))
    assert names == ["conv2d"]


def test_constants_are_folded_and_identities_dropped():
    model = nn.Sequential(
        nn.Dropout(), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Identity(), nn.MaxPool2d(1),
        nn.AdaptiveAvgPool2d(4),
    )  # fmt: skip
    _, names = graph_of(model, torch.randn(1, 3, 6, 6))
    assert names == ["conv2d"]


def test_a_scale_before_a_linear_layer_of_images():
    class Last(nn.Module):
        def __init__(self, features):
            super().__init__()
            self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(features, 5)

        def forward(self, x):
            return self.linear(self.norm(self.conv(x)).relu().permute(0, 2, 3, 1) * 0.5), self.linear(
                self.norm(x[:, :8])
            )

    class Width(Last):
        def forward(self, x):
            return self.linear(self.norm(x))

    norm = nn.BatchNorm2d(8)
    for model, x in (
        (Last(8), torch.randn(2, 8, 10, 8)),
        (Width(8), torch.randn(2, 8, 8, 8)),
        (Width(6), torch.randn(2, 8, 4, 6)),
    ):
        model.conv = nn.Conv2d(8, 8, 3)
        nn.init.uniform_(model.norm.weight), nn.init.uniform_(model.norm.running_var, 0.5, 2)
        check(model.eval(), x)
    assert norm.training


class Branches(nn.Module):
    """A fire module's expansion (SqueezeNet)."""

    def __init__(self):
        super().__init__()
        self.one, self.three = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class Slow:
    """A cost that makes every convolution the same price, so that fewer are better."""

    def __call__(self, node):
        return 1.0 if node.target.__name__ == "conv2d" else 0.01


def test_search_enlarges_a_kernel_to_join_two_convolutions():
    """Two substitutions, the first of which gains nothing by itself: what alpha is for."""
    x = torch.randn(1, 8, 6, 6)
    for alpha, expected in ((1.05, ["conv2d"]), (1.0, ["conv2d", "conv2d", "concat"])):
        network, _ = graph_of(Branches(), x)
        before = network.run([x], torch.float64)
        search(network, Slow(), alpha, float("inf"), Checker(network, [x]))
        assert [n.target.__name__ for n in network.graph.nodes if n.op == "call_function"] == expected
        assert difference(network.run([x], torch.float64)[0], before[0]) <= 1e-6
        if alpha > 1:
            taken = [r.rule for r in network.log]
            assert taken.index("enlarge kernel") < taken.index("fuse parallel convolutions")
            assert all(r.error is not None for r in network.log)


def test_search_leaves_what_gains_too_little():
    network, names = graph_of(Branches(), torch.randn(1, 8, 6, 6))
    prices = {"conv2d": 0.25, "concat": LEAST_GAIN / 8}  # for each channel: joined they cost 1 % less
    search(network, lambda n: n.meta["shape"][1] * prices[n.target.__name__], 1.05, float("inf"))
    assert [n.target.__name__ for n in network.graph.nodes if n.op == "call_function"] == names


def test_average_before_a_pointwise_convolution():
    """DenseNet's transition: four times fewer products."""
    model = nn.Sequential(seeded_norm(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AvgPool2d(2))
    x = torch.randn(1, 8, 6, 6)
    network, _ = graph_of(model, x)
    search(network, flops, 1.5, float("inf"), Checker(network, [x]))
    names = [n.target.__name__ for n in network.graph.nodes if n.op == "call_function"]
    assert names == ["affine", "avg_pool2d", "conv2d"]


def test_a_wrong_rewrite_is_found(residual):
    model, x = residual
    network, _ = graph_of(model, x)
    conv = next(n for n in network.graph.nodes if n.op == "call_function")
    worse = network.constant(network.value(conv.args[1]) * 1.01, "worse", conv)
    new = fusion.changed(network, conv, conv, (), weight=worse)
    with pytest.raises(Mistake, match="in float64"):
        network.replace(conv, new, "a mistake")


def test_a_node_that_two_removed_nodes_read_is_removed_once():
    """torch warns of a second time."""

    class Block(nn.Module):
        def forward(self, x):
            y = F.relu(x)
            return F.relu(y.tanh() + y)

    network = capture(Block(), (torch.randn(1, 3, 4, 4),), {})
    last = network.output.args[0][0]
    network.output.args = ((network.inputs[0],),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network.remove(last)
    assert [node.op for node in network.graph.nodes] == ["placeholder", "output"]


class Crossed(nn.Module):
    """Of two convolutions and two linear layers each kind's first feeds the other kind's second."""

    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.b, self.c = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x):
        return self.b(self.a(x).relu()), self.d(self.c(x).relu())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 9), nn.Conv2d(8, 4, 1)),
        nn.Sequential(nn.Linear(9, 7), nn.Conv2d(8, 8, 1), nn.Linear(7, 9)),
        Crossed(),
    ],
    ids=["images", "rows", "crossed"],
)
def test_images_and_rows_are_one_program(model, faster):
    fast = check(model.eval(), torch.randn(2, 8, 9, 9))
    assert len(regions(fast)) == 1


def regions(fast):
    return [module for module in fast._ai3_first.body.modules() if isinstance(module, Region)]


@pytest.mark.parametrize("features", [8, 5])  # as many as channels, or another number
@pytest.mark.parametrize("sizes", [(2, 8, 6, 9), (2, 8, 9), (2, 9)], ids=["4d", "3d", "2d"])
@pytest.mark.parametrize("kind", ["prelu", "norm", "scale"])
def test_what_is_by_channel_after_a_linear_layer_of_any_rank(kind, sizes, features, faster):
    channels = features if len(sizes) == 2 else 8
    norm = seeded_norm(channels)
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(sizes)](channels)
    plain.load_state_dict(norm.state_dict())
    consumer = {"prelu": seeded_prelu(channels), "norm": plain, "scale": ByChannel(channels, len(sizes))}[kind]
    model = nn.Sequential(nn.Linear(9, features), consumer, nn.ReLU(), nn.Linear(features, 4)).eval()
    fast = check(model, torch.randn(sizes))
    assert fast._ai3_first.body is not None
    assert sum(len(part.algorithms) > 0 for part in regions(fast)) > 0


class ByChannel(nn.Module):
    def __init__(self, channels, rank):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, channels).reshape(channels, *[1] * (rank - 2)))

    def forward(self, x):
        return x * self.scale + self.scale
