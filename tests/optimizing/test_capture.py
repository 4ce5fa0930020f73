"""What is captured of a model: inputs and outputs, branches, submodules."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
import weakref

import pytest
import torch
from nets import BOUND, agree, check, exact, optimized, seeded, taken
from torch import nn
from torch.utils import _pytree as pytree

import ai3_ops
from ai3_ops.graph import capture as capture_module
from ai3_ops.graph import network, steps
from ai3_ops.graph.calls import Calls, Uncapturable
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.graph.network import Checker, Network, difference


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, image, rows=None, *, twice=False):
        y = self.conv(image).relu()
        z = y.mean((2, 3)) if rows is None else self.fc(rows) + y.mean((2, 3))
        return {"image": y * 2 if twice else y, "rows": (z, y.shape[1])[:1]}


def test_several_inputs_and_nested_outputs():
    model, x, rows = Several().eval(), torch.randn(2, 3, 6, 6), torch.randn(2, 4)
    fast = taken(ai3_ops.optimize(model, {"image": x, "rows": rows}, budget_seconds=0.2))
    for args, kwargs in (((x, rows), {}), ((x,), {"rows": rows}), ((), {"image": x, "rows": rows})):
        got, expected = fast(*args, **kwargs), exact(model, x, rows)
        assert got.keys() == expected.keys()
        assert difference(got["image"], expected["image"]) <= BOUND
        assert difference(got["rows"][0], expected["rows"][0]) <= BOUND
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(fast(x, rows, twice=True)["image"], model(x, rows, twice=True)["image"], atol=1e-5)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        y = self.down(self.up(x).relu())
        sizes = x.shape[1], x.shape[1] + x.shape[0], x.shape[1]
        return {"none": None, "y": y, "sizes": sizes, "kind": "plain", "sum": y.sum(-1), "factor": 0.5}


def test_outputs_that_are_no_tensors(tmp_path):
    model = Mixed().eval()
    fast = check_leaves(ai3_ops.optimize(model, torch.randn(2, 6, 16), "default", progress=False), model)
    ai3_ops.save(fast, tmp_path / "mixed")
    check_leaves(ai3_ops.load(tmp_path / "mixed"), model)
    check_leaves(pickle.loads(pickle.dumps(fast)), model)


def check_leaves(fast, model):
    for batch, length in ((2, 6), (3, 6), (1, 9), (2, 4)):
        x = torch.randn(batch, length, 16)
        with torch.no_grad():
            (got, spec), (expected, structure) = map(pytree.tree_flatten, (fast(x), model(x)))
        assert spec == structure
        assert all(network.agree(one, other, BOUND) for one, other in zip(got, expected, strict=True))
    return taken(fast)


def test_attention_stays_and_its_layers_are_taken():
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation="gelu", batch_first=True).eval()
    fast = check(layer, torch.randn(2, 7, 32))
    agree(fast, layer, torch.randn(3, 7, 32))


def test_arguments_in_any_order():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, a, b, scale=None):
            y = self.conv(a) - b[:, :, 1:-1, 1:-1]
            return y if scale is None else y * scale

    model, a, b = Two(), torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected = model(a, b)
        for example in ((a, b), {"a": a, "b": b}, {"b": b, "a": a}):
            fast = ai3_ops.optimize(model, example, budget_seconds=0.2, progress=False)
            assert fast._ai3_first.body is not None
            for args, kwargs in (((a, b), {}), ((a,), {"b": b}), ((), {"b": b, "a": a}), ((), {"a": a, "b": b})):
                torch.testing.assert_close(fast(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)
        with pytest.warns(UserWarning, match="in the form of .*planned anew"):
            torch.testing.assert_close(
                fast(a, b, scale=b[:, :, 2:, 2:]), model(a, b, b[:, :, 2:, 2:]), rtol=1e-4, atol=1e-5
            )
        with pytest.raises(TypeError):
            fast(a, b, wrong=a)


def test_outputs_are_no_inputs():
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("table", torch.ones(2))

        def forward(self, x):
            y = self.conv(x)
            return y, y * 1.0, x * 1.0, self.table + 0

    model, x = Passes(), torch.randn(1, 3, 5, 5)
    fast = check(model, x)
    before = x.clone()
    with torch.no_grad():
        for output in fast(x):
            output.fill_(7)
        assert torch.equal(x, before)
        expected = model(x)
        for got, one in zip(fast(x), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())

    def forward(self, x):
        y = self.first(x)
        return self.second(y) if y.sum() > 0 else y


def test_control_flow_leaves_the_largest_submodules():
    model, x = Decides().eval(), torch.randn(1, 3, 8, 8)
    fast = check(model, x)
    report = ai3_ops.explain(fast).optimization
    assert [part.name for part in report.parts] == ["first", "second"]
    assert "" in report.left
    assert "not captured" in str(ai3_ops.explain(fast))
    assert list(fast.state_dict()) == list(model.state_dict())
    with pytest.raises(RuntimeError, match="for inference"):
        fast.train()
    agree(pickle.loads(pickle.dumps(fast)), model, x)


def test_hooks_and_changes_of_buffers_are_not_captured():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    seen = []
    model[0].register_forward_hook(lambda m, args, output: seen.append(1) and None)
    with pytest.raises(Uncapturable, match="hooks"):
        capture(model, (torch.randn(1, 3, 5, 5),), {})

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * 2

    with pytest.raises(Uncapturable, match="count"):
        capture(Counts(), (torch.randn(3),), {})


class OnBatch(nn.Module):
    def __init__(self, condition):
        super().__init__()
        self.conv, self.condition = nn.Conv2d(8, 8, 3), condition

    def forward(self, x):
        y = self.conv(x).relu()
        return y * 2 if self.condition(x.shape[0]) else y


@pytest.mark.parametrize(
    "condition", [lambda n: n > 4, lambda n: n % 2 == 0, lambda n: n == 1], ids=["more", "even", "one"]
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.filterwarnings("ignore:ai3_ops.optimize. optimized for")
def test_a_branch_on_the_batch_is_not_frozen(condition, batch):
    model = OnBatch(condition)
    fast = optimized(model, torch.randn(batch, 8, 9, 9))
    for size in (1, 2, 3, 8):
        agree(fast, model, torch.randn(size, 8, 9, 9))


def test_inputs_that_make_no_sense(residual):
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ai3_ops.optimize(torch.relu, residual[1])
    with pytest.raises(
        RuntimeError, match=r"ai3_ops.optimize: running the model on the example inputs \(Tensor\) failed: "
    ):
        ai3_ops.optimize(residual[0], torch.randn(1, 3, 6, 6))


def test_two_threads_that_capture_leave_standard_error_as_it_was(capsys):
    before, (first, second) = sys.stderr, (capture_module.quiet(), capture_module.quiet())
    entered, done = threading.Event(), threading.Event()

    def other():
        with second:
            entered.set()
        done.set()

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert not entered.wait(0.05)  # one at a time
        words = threading.Thread(target=lambda: print("of another thread", file=sys.stderr))
        words.start()
        words.join()
        assert "of another thread" in capsys.readouterr().err
    thread.join()
    assert done.is_set()
    assert sys.stderr is before


def test_what_a_module_is_refused_with_is_not_printed(capsys):
    def refuse():
        with capture_module.quiet():
            print("a graph of many lines", file=sys.stderr)
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        refuse()
    assert "a graph" not in capsys.readouterr().err


def test_a_graph_that_names_a_type_is_computed_in_float64():
    class FromBytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x.float() / 255)

    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    network = capture(FromBytes().eval(), (x,), {})
    (y,) = network.run([x], torch.float64)
    assert y.dtype == torch.float64
    canonicalize(network)
    assert Checker(network, [x]).of(network, network.output.all_input_nodes[0]).dtype == torch.float64


class Writes(nn.Module):
    """In place: plain, through a view, of a view, into a copy, with another type."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 3), how

    def forward(self, x):
        y = self.conv(x)
        return self.how(y, x)


def _through_a_view(y, _):
    z = y[:, :2]
    z.mul_(2)
    return y + 1


def _of_a_view(y, _):
    z = y.view(y.shape[0], 4, -1)
    y.relu_()
    return z * 2


def _after_dropout(y, _):
    z = torch.dropout(y, 0.5, False)  # is y
    z.relu_()
    return y - 1


def _into_a_part(y, x):
    z = torch.zeros_like(y)
    z[:, 1:3] = y[:, 1:3]
    return z + x[:, :1, 1:-1, 1:-1]


@pytest.mark.parametrize(
    ("how", "simple"),
    [
        (lambda y, _: y.mul_(2).add_(1).relu_() + 1, True),
        (lambda y, x: (y.clone().add_(x[:, :1, 1:-1, 1:-1]), y.neg_()), True),
        (lambda y, _: y[:, 1:].contiguous().clamp_(0, 1), True),
        (_through_a_view, False),
        (_of_a_view, False),
        (_after_dropout, True),
        (_into_a_part, False),
        (lambda y, x: y.add_(x[:, :1, 1:-1, 1:-1].double()), False),
    ],
    ids=["plain", "copies", "of a copy", "through a view", "of a view", "dropout", "a part", "another type"],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_writes_in_place_are_what_the_module_does(how, simple, batch, monkeypatch):
    """Simple ones without another trace, which takes longer than the export."""
    traced, again = [], torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *a, **k: (traced.append(1), again(*a, **k))[1]
    )
    model, x = Writes(how).eval(), torch.randn(batch, 3, 7, 6)
    network = capture(model, (x,), {})
    assert network.dynamic
    assert bool(traced) != simple
    for size in (batch, 3):
        given = torch.randn(size, 3, 7, 6)
        with torch.no_grad():
            expected = model(given.clone())
        for got, one in zip(network.run([given]), expected if isinstance(expected, tuple) else [expected], strict=True):
            torch.testing.assert_close(got, one)


def test_statistics_that_a_call_updates_are_seen():
    """The schema of batch_norm does not tell."""

    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return torch.nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)

    with pytest.raises(Uncapturable, match="running"):
        capture(Trains().eval(), (torch.randn(2, 3, 4, 4),), {})


@pytest.mark.filterwarnings("ignore:ai3_ops.optimize. optimized for")
def test_a_batch_of_one_that_is_squeezed():
    """A batch of 1 loses its dimension, another one keeps it."""

    class Squeezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x):
            return self.fc(self.conv(x).mean((2, 3), keepdim=True).squeeze())

    model = Squeezes().eval()
    for batch in (1, 2):
        fast = optimized(model, torch.randn(batch, 3, 6, 6))
        for size in (1, 2, 3):
            agree(fast, model, torch.randn(size, 3, 6, 6))


class Asks(nn.Module):
    """What it computes depends on a batch, by a function that is given."""

    def __init__(self, condition):
        super().__init__()
        self.a, self.b, self.condition = nn.Linear(6, 6), nn.Linear(6, 6), condition

    def forward(self, x, y):
        x = torch.tanh(self.a(x))
        return self.condition(x), self.b(y) * (2 if y.shape[0] == 6 else 1)


def test_batches_of_each_input_are_looked_at():
    model = seeded(Asks(lambda x: x + 1))
    fast = optimized(model, torch.randn(2, 4, 6), torch.randn(2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (2, 6, 3):
            agree(fast, model, torch.randn(batch, 4, 6), torch.randn(batch, 6))


def test_other_packages_files_with_names_of_pytorchs(tmp_path, monkeypatch):
    """A condition of theirs is a model's own."""
    (tmp_path / "othernn" / "nn").mkdir(parents=True)
    for folder in ("othernn", "othernn/nn"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "othernn/nn/functional.py").write_text("def six(x):\n    return x * 3 if x.shape[0] == 6 else x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from othernn.nn.functional import six

    model = seeded(Asks(six))
    fast = optimized(model, torch.randn(2, 4, 6), torch.randn(2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (2, 6, 3):
            agree(fast, model, torch.randn(batch, 4, 6), torch.randn(batch, 6))


def test_a_slice_of_the_batch_that_the_example_fits():
    model = seeded(nn.Sequential(nn.Linear(4, 4), FirstOnes(), nn.Linear(4, 4)))
    fast = optimized(model, torch.randn(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (3, 1499, 1600):
            agree(fast, model, torch.randn(batch, 4))


class FirstOnes(nn.Module):
    def forward(self, x):
        return x.tanh()[:1500]


@pytest.mark.parametrize("name", ["add", "mul", "sub", "div"])
@pytest.mark.parametrize("of", ["constant", "constant first", "computed"])
def test_a_batch_of_one_in_another_dimension_is_no_table(name, of):
    """(length, batch, features) beside (length, 1, features): of the same sizes where the batch is one, and not of the batch."""

    class Tabled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("table", torch.rand(9, 1, 6) + 1)

        def forward(self, x):
            y = self.a(x.transpose(0, 1))
            table = self.table[: y.size(0)]
            table = self.b(table) if of == "computed" else table
            y, table = (table, y) if of == "constant first" else (y, table)
            return self.c(getattr(torch, name)(y, table).tanh()).transpose(0, 1)

    model = seeded(Tabled())
    fast = optimized(model, torch.randn(1, 5, 6))
    for batch in (1, 3, 2):
        agree(fast, model, torch.randn(batch, 5, 6))


def test_weights_are_converted_one_after_another(monkeypatch):
    """All of them in float64 at once would be twice the model's memory more."""
    from ai3_ops.graph import network

    model, x = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]).eval(), torch.randn(2, 32)
    captured, cast, converted, alive = capture(model, (x,), {}), network.cast, [], []

    def counted(value, dtype):
        made = cast(value, dtype)
        if made.shape == (32, 32):
            converted.append(weakref.ref(made))
        alive.append(sum(ref() is not None for ref in converted))
        return made

    monkeypatch.setattr(network, "cast", counted)
    captured.run([x], torch.float64)
    assert len(converted) == 5
    assert max(alive) <= 2


def test_a_model_runs_three_times_and_its_graph_twice(monkeypatch):
    """The first call, which says whether it runs at all, is one of those that the graph is compared with."""
    calls, runs, call, run = [], [], Calls.call, Network.run
    monkeypatch.setattr(Calls, "call", lambda self, *given: calls.append(1) or call(self, *given))
    monkeypatch.setattr(Network, "run", lambda self, *given, **how: runs.append(how) or run(self, *given, **how))
    optimized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 6, 6), verify="off")
    assert (len(calls), sum("sized" in how for how in runs)) == (3, 2)


def test_steps_are_sized_by_the_types_of_numbers():
    """1 and 1.0 are equal, and make different sums of an integer."""
    network = Network(torch.fx.Graph(), {})
    x = network.graph.placeholder("x")
    x.meta.update(shape=(2,), dtype=torch.int64, batched=True)
    output = network.graph.output((x,))
    made = [network.step(output, steps.binary, x, number, "add").meta["dtype"] for number in (1, 1.0, 1)]
    assert made == [torch.int64, torch.float32, torch.int64]


class Spectrum(nn.Module):
    """Reads what a layer returns as it lies in memory, once it is contiguous."""

    def __init__(self, read):
        super().__init__()
        self.conv, self.read = nn.Conv2d(2, 2, 3, padding=1), read

    def forward(self, x):
        return self.read(self.conv(x).permute(0, 2, 3, 1).contiguous())


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j),
        lambda x: x.view(torch.int32).sum(-1).float(),
        lambda x: x.as_strided((x.shape[0], 4), (128, 1)) * 2,
    ],
    ids=["complex", "integers", "strides"],
)
def test_what_is_read_as_it_lies_in_memory_is_contiguous(read):
    model, x = Spectrum(read).eval(), torch.randn(3, 2, 8, 8)
    with torch.no_grad():
        network = capture(model, (x,), {})
        canonicalize(network)
        (y,) = network.run([x])
    assert difference(y, model(x)) < 1e-5
    assert any(node.target is torch.ops.aten.contiguous.default for node in network.graph.nodes)


def test_strides_of_a_view_are_refused():
    class Strides(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x).transpose(1, 2)
            return y.as_strided((x.shape[0], 4), (y.stride(0), 2))

    with pytest.raises(Uncapturable, match=r"reads memory by strides that a graph does not keep"):
        capture(Strides(2, 2, 3).eval(), (torch.randn(3, 2, 8, 8),), {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_parts_that_are_given_nested_tensors_stay():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 4)

        def forward(self, x, mask):
            y = self.head(self.encoder(x, src_key_padding_mask=mask))
            return y if y.isfinite().all() else -y  # only its parts can be captured

    model, x = Masked().eval(), torch.randn(2, 5, 16)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        fast = ai3_ops.optimize(model, (x, mask), "default", progress=False)
        assert torch.allclose(fast(x, mask), model(x, mask), atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fast_path_in_16_bits_is_no_state():
    """PyTorch computes the layer by other operators than those that export writes down, and rounds otherwise."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().bfloat16()
    x, mask = torch.randn(2, 9, 32).bfloat16(), torch.zeros(2, 9, dtype=torch.bool)
    capture(model, (x,), {"src_key_padding_mask": mask})
