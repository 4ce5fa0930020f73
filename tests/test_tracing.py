"""What a forward does is what its trace does, or the trace is refused."""

import copy
import pickle
import random
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from modules import EVERY, Modes, close, layers
from torch import nn

from ai3_ops import explain, swap


def test_training_and_evaluation_have_their_own_traces():
    model, x = Modes(), torch.randn(9)
    swapped = swap(model, EVERY)
    for mode in (True, False):
        assert torch.equal(swapped.train(mode)(x), model.train(mode)(x))


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.extra = 2.0, None

    def forward(self, x):
        x = F.relu(x) * self.slope
        return x if self.extra is None else self.extra(x)


@pytest.mark.parametrize(("name", "value"), [("slope", 3.0), ("extra", nn.Tanh())])
def test_an_attribute_changed_after_the_swap(name, value):
    model, x = Attribute(), torch.randn(9)
    swapped = swap(model, EVERY)
    for m in (model, swapped):
        setattr(m, name, value)
    assert torch.equal(swapped(x), model(x))
    (row,) = explain(swapped).layers
    assert f"attribute {name!r} was changed" in row.reason
    (row,) = explain(swap(swapped, EVERY)).layers
    assert row.reason == ""
    assert torch.equal(swap(swapped, EVERY)(x), model(x))


# What a trace would get wrong -----------------------------------------------------------------------------------------
class Branch(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.sum() > 0 else x


class Type(nn.Module):
    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return F.relu(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.seen = 0, []

    def forward(self, x):
        self.count += 1
        self.seen.append(self.count)
        return F.relu(x) * self.count


class Draws(nn.Module):
    def forward(self, x):
        return F.relu(x) * random.random()


class Makes(nn.Module):
    def forward(self, x):
        return F.relu(x) + torch.arange(9)


class NoGrad(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            x = F.relu(x)
        return x


class Checkpoints(nn.Module):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, F.relu(x), use_reentrant=False)


class Ordered(nn.Module):
    class Kind(dict):
        pass

    def forward(self, x):
        return self.Kind(out=F.relu(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branch(), "control flow"),
        (Type(), "type of a value"),
        (Counts(), "changes the attribute"),
        (Draws(), "random numbers"),
        (Makes(), "makes a tensor"),
        (NoGrad(), "gradient or autocast mode"),
        (Checkpoints(), "type of a value"),
        (Ordered(), "makes a Kind"),
    ],
)
def test_what_cannot_be_traced_is_reported(model, reason):
    x = torch.randn(9)
    state, dice = copy.deepcopy(vars(model)), random.getstate()
    swapped = swap(model, EVERY, inplace=True)
    assert random.getstate() == dice
    assert {k: v for k, v in vars(model).items() if k in state} == state
    assert swapped is model
    assert type(swapped).__module__ == __name__
    (module,) = explain(swapped).unreached
    assert reason in module.reason
    assert (module.type, module.source) == (type(model).__name__, ["relu"])
    (module,) = explain(swap(swapped, EVERY, x)).unreached
    assert module.seen == {"relu": 1} or type(model) is Branch
    for inputs in (None, x.abs()):
        with pytest.raises(ValueError, match=f"calls relu, which cannot be replaced: .*{reason}"):
            swap(model, EVERY, inputs, strict=True)
        swap(model, EVERY | {"relu": None}, inputs, strict=True)
        swap(model, {"conv2d": "direct"}, inputs, strict=True)
    assert "not reached" in str(explain(swapped))
    with pytest.raises(ValueError, match="calls that '' makes cannot be replaced"):
        swap(model, {":relu_0": "direct"})


# What the forward reads besides its inputs
class Mode(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode, self.weight = mode, nn.Parameter(torch.randn(9))

    def forward(self, x):
        with self.mode():
            return F.relu(x) * self.weight


class Asks(nn.Module):
    def forward(self, x):
        return F.relu(x) if torch.is_grad_enabled() else 100 * F.relu(x)


class Decorated(nn.Module):
    @torch.enable_grad()
    def forward(self, x):
        return F.relu(x) * 2


def autocast_off():
    return torch.autocast("cpu", enabled=False)


MODES = [
    torch.no_grad, torch.enable_grad, autocast_off, lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode,
    lambda: torch.inference_mode(False),
]  # fmt: skip


@pytest.mark.parametrize("model", [*map(Mode, MODES), Asks(), Decorated()])
@pytest.mark.parametrize("around", MODES)
def test_modes_in_a_forward(model, around):
    x = torch.randn(9)
    with around():
        swapped = swap(model, EVERY)
    for outside in MODES:
        with outside():
            expected, actual = model(x), swapped(x)
        assert (actual.dtype, actual.requires_grad) == (expected.dtype, expected.requires_grad)
        assert torch.equal(actual, expected)
    assert explain(swapped).unreached[0].source == ["relu"]


SCALE, SEEN, TABLE = 2.0, [], {"k": 3.0}


class Reads(nn.Module):
    """Reads all that may change: its attributes, a child's, a container's, its class's, and globals."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.act, self.norm = nn.LeakyReLU(0.1), nn.BatchNorm1d(4)
        self.config, self.slope, self.sizes = {"k": 2.0}, 0.5, [3]
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("mask", None)

    def forward(self, x):
        x = (
            F.leaky_relu(F.relu(x) - 1, self.act.negative_slope)
            * self.config["k"]
            * self.factor
            * SCALE
            * self.sizes[0]
        )
        x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=self.norm.training)
        for layer in self.layers:
            x = layer(x) * TABLE["k"]
        x = (
            x
            * (self.slope if hasattr(self, "slope") else 7.0)
            * (1 if getattr(self, "later", None) is None else self.later)
        )
        return self.helper(x) if self.mask is None else self.helper(x) * self.mask

    def helper(self, x):
        return x + 1


CHANGES = {
    "act.negative_slope": lambda m: setattr(m.act, "negative_slope", 0.9),
    "config": lambda m: m.config.update(k=5.0),
    "sizes": lambda m: m.sizes.__setitem__(0, 7),
    "slope": lambda m: delattr(m, "slope"),
    "later": lambda m: setattr(m, "later", 2.0),
    "mask": lambda m: m.register_buffer("mask", torch.arange(4.0)),
    "layers._modules": lambda m: m.layers.append(nn.Identity()),
    "norm.training": lambda m: m.norm.train(),
    "helper": lambda m: setattr(m, "helper", lambda x: x - 1),
    "factor": lambda m: setattr(m, "factor", 3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_the_forward_reads_may_change_after_the_swap(name):
    torch.manual_seed(0)
    model, x = Reads().eval(), torch.randn(5, 4)
    swapped = swap(model, {"relu": "direct"})
    for copied in (swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        with torch.no_grad():
            close(copied(x), model(x))
        assert (layers(copied)[":relu_0"].reason, explain(copied).unreached) == ("", [])
        calls = layers(copied)[":relu_0"].calls
        changed = copy.deepcopy(model)
        for m in (changed, copied):
            CHANGES[name](m)
        with torch.no_grad():
            close(copied(x), changed(x))
        row = layers(copied)[":relu_0"]
        assert f"attribute {name!r} was changed" in row.reason
        assert row.calls == calls


def test_the_class_and_globals_may_change_after_the_swap(monkeypatch):
    model, x = Reads().eval(), torch.randn(5, 4)
    for change in (
        lambda: monkeypatch.setattr(Reads, "factor", 5.0),
        lambda: monkeypatch.setattr(Reads, "helper", lambda self, x: x * 2),
        lambda: monkeypatch.setitem(globals(), "SCALE", 4.0),
        lambda: monkeypatch.setitem(TABLE, "k", 4.0),
        lambda: monkeypatch.setattr(Reads, "forward", lambda self, x: x),
    ):
        swapped = swap(model, {"relu": "direct"})
        close(swapped(x), model(x))
        change()
        close(swapped(x), model(x))
        assert "swap again" in layers(swapped)[":relu_0"].reason


def test_equal_values_and_other_tensors_are_no_change():
    model, x = Reads().eval(), torch.randn(5, 4)
    swapped = swap(model, EVERY)
    for m in (model, swapped):
        m.slope, m.act.negative_slope, m.sizes = float("0.5"), float("0.1"), [3]
        m.norm.running_mean = torch.ones(4)
        m.layers[0] = nn.Linear(4, 4)
    swapped.layers[0].load_state_dict(model.layers[0].state_dict())
    close(swapped(x), model(x))
    row = next(row for row in explain(swapped).layers if row.operation == "relu")
    assert (row.calls, row.reason) == (1, "")


def test_training_and_evaluation_of_a_childs_mode():
    model, x = Reads(), torch.randn(5, 4)
    swapped = swap(model.eval(), EVERY)
    for mode in (True, False):
        close(swapped.train(mode)(x), model.train(mode)(x))
    assert next(row.calls for row in explain(swapped).layers if row.operation == "relu") == 2


def test_changes_reach_compiled_models():
    torch._dynamo.reset()
    model, x = Reads().eval(), torch.randn(5, 4)
    swapped = swap(model, EVERY)
    compiled = torch.compile(swapped, backend="eager")
    close(compiled(x), model(x))
    for name in ("act.negative_slope", "slope", "sizes"):
        for m in (model, swapped):
            CHANGES[name](m)
        close(compiled(x), model(x))
    torch._dynamo.reset()


class Keeps(nn.Module):
    def forward(self, x):
        y = F.relu(x)
        SEEN.append(y)
        return y


class Keeper:
    kept: list = []  # noqa: RUF012

    @staticmethod
    def keep(x):
        Keeper.kept.append(x)
        return x


class KeepsElsewhere(nn.Module):
    def forward(self, x):
        return Keeper.keep(F.relu(x))


@pytest.mark.parametrize(("model", "kept"), [(Keeps(), SEEN), (KeepsElsewhere(), Keeper.kept)])
def test_values_kept_outside_of_the_module(model, kept):
    kept.clear()
    swapped = swap(model, EVERY)
    assert kept == []
    assert explain(swapped).unreached
    swapped(torch.randn(3))
    assert [type(v) for v in kept] == [torch.Tensor]


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x)
        return x


class Records(nn.Module):
    def __init__(self):
        super().__init__()
        self.record = Recorder()

    def forward(self, x):
        return self.record(F.relu(x))


class Same(nn.Module):
    def forward(self, x):
        y = x
        return F.relu(x) + 1 if y is x else F.relu(x)


class TypeIs(nn.Module):
    def forward(self, x):
        return F.relu(torch.cat(x) if type(x) is list else x)


class TypeIn(nn.Module):
    def forward(self, x):
        return F.relu(x[0] if type(x) in (list, tuple) else x)


class ShapeType(nn.Module):
    def forward(self, x):
        return F.relu(x) * (x.shape[0] if isinstance(x.shape, tuple) else 1)


class Lookup(nn.Module):
    def forward(self, x):
        return F.relu({torch.float32: -x}.get(x.dtype, x))


class Has(nn.Module):
    def forward(self, x):
        return F.relu(x.tensors if hasattr(x, "tensors") else x)


class Text(nn.Module):
    def forward(self, x):
        return F.relu(x) * (2 if str(x.dtype) == "torch.float32" else 3)


class Sets(nn.Module):
    def forward(self, x):
        y = F.relu(x)
        y.tag = 1
        return y


class Catches(nn.Module):
    def forward(self, x):
        try:
            return F.relu(x) if x.sum() > 0 else F.relu(x) * 2
        except Exception:
            return F.relu(x) * 3


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))

    def forward(self, x):
        return F.relu(x).to(next(self.parameters()).dtype)


class ChildState(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Identity()
        self.child.count = 0

    def forward(self, x):
        self.child.count += 1
        return F.relu(x)


class Flags(nn.Module):
    def forward(self, x):
        with torch.backends.mkldnn.flags(enabled=False):
            return F.relu(x)


@pytest.mark.parametrize(
    "model",
    [Records(), Same(), TypeIs(), TypeIn(), ShapeType(), Lookup(), Has(), Text(), Sets(), Catches(), Parameters(), ChildState(),
     Flags()],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_what_a_trace_would_get_wrong(model):
    x = torch.randn(9)
    swapped = swap(model, EVERY)
    assert torch.equal(swapped(x), model(x))
    (module,) = explain(swapped).unreached
    assert module.source == ["relu"]
    assert module.reason
    with pytest.raises(ValueError, match="cannot be replaced"):
        swap(model, EVERY, strict=True)


class InPlace(nn.Module):
    def forward(self, x):
        y = F.relu(x)
        z = y
        y += 1
        y *= 2
        return y + z


def test_in_place_operators_stay_in_place():
    model, x = InPlace(), torch.randn(9)
    swapped = swap(model, EVERY)
    assert torch.equal(swapped(x), model(x))
    assert explain(swapped).layers[0].calls == 1


class Times(nn.Module):
    def forward(self, x, factor):
        return F.relu(x) * factor


def test_inputs_that_are_no_tensors_run_the_original():
    model, x = Times(), torch.randn(9)
    swapped = swap(model, EVERY)
    for factor in (2, True, 0.5, x):
        assert torch.equal(swapped(x, factor), model(x, factor))
    (row,) = explain(swapped).layers
    assert row.calls == 1
    assert "3 calls with" in row.reason


class LambdaDefault(nn.Module):
    def forward(self, x, then=lambda x: x):
        return then(F.relu(x))


def test_pickle_of_a_forward_whose_default_cannot_be():
    swapped = pickle.loads(pickle.dumps(swap(LambdaDefault(), EVERY)))
    assert torch.equal(swapped(torch.ones(2)), torch.ones(2))
    assert explain(swapped).layers[0].calls == 1


class Flagged(nn.Module):
    flag = False

    def forward(self, x):
        return F.relu(x) if not self.flag or x.sum() > 0 else x


def test_a_file_whose_code_cannot_be_traced_any_more(monkeypatch):
    data = pickle.dumps(swap(Flagged(), EVERY))
    monkeypatch.setattr(Flagged, "flag", True)
    model, x = pickle.loads(data), -torch.ones(2)
    assert torch.equal(model(x), x)
    (row,) = explain(model).layers
    assert (row.calls, "control flow" in row.reason) == (0, True)


def test_none_for_an_argument_without_a_default():
    class Optional(nn.Module):
        def forward(self, x, y):
            return F.relu(x) if y is None else F.relu(x) + y

    model, x = Optional(), torch.randn(9)
    swapped = swap(model, EVERY)
    assert torch.equal(swapped(x, None), model(x, None))
    assert torch.equal(swapped(x, y=x), model(x, x))


def test_outputs_keep_their_types():
    class Out(nn.Module):
        def forward(self, x):
            return OrderedDict(a=F.relu(x), b=[x, (x,)])

    model, x = Out(), torch.randn(3)
    actual = swap(model, EVERY)(x)
    assert type(actual) is OrderedDict
    assert list(actual) == ["a", "b"]
    assert type(actual["b"][1]) is tuple
