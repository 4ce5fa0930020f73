"""What a model keeps between calls, and what is random in it: kept or named, and in the state in which it was given."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import warnings
from collections import UserDict, deque

import pytest
import torch
import torch.nn.functional as F
from nets import optimized, taken
from torch import nn

import ai3_ops
from ai3_ops._torch import pytree
from ai3_ops.graph.network import difference
from ai3_ops.graph.state import changes, copied, others, same_random_numbers
from ai3_ops.optimizing.module import Optimized


class Keeps(nn.Module):
    """Adds to each frame what it keeps of those before, by `step(module, frame)`."""

    def __init__(self, step, **kept):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.step = step
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return torch.relu(self.b(self.step(self, torch.relu(self.a(x)))))


def attribute(m, y):
    z = y if m.past is None else y + m.past
    m.past = y
    return z


def normalized(m, y):  # the same for inputs that differ by a factor
    return attribute(m, F.layer_norm(y, y.shape[1:]))


def in_list(m, y):
    m.past.append(y)
    return sum(m.past[-2:])


def in_dict(m, y):
    z = y + m.past.get("y", 0)
    m.past["y"] = y
    return z


def nested(m, y):
    z = y + m.past[0]["y"][-1]
    m.past[0]["y"].append(y)
    return z


def counter(m, y):
    m.past += 1
    return y * m.past


def iterator(m, y):
    return y * next(m.past)


def buffer(m, y):
    m.past += y.mean()
    return y + m.past


def log(m, y):
    m.past.append(len(m.past))
    return y


class Cache:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0.0


def slots(m, y):
    m.past.value += 1.0
    return y * m.past.value


KINDS = {
    "attribute": (attribute, lambda: None),
    "normalized": (normalized, lambda: None),
    "list": (in_list, list),
    "dict": (in_dict, dict),
    "nested": (nested, lambda: ({"y": [0]},)),
    "counter": (counter, lambda: 0),
    "iterator": (iterator, lambda: itertools.count(1)),
    "buffer": (buffer, lambda: torch.zeros(())),
    "log": (log, list),
    "deque": (log, deque),
    "slots": (slots, Cache),
}


def frames(count=4):
    return [torch.randn(1, 3, 8, 8) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
def test_state_is_kept_and_named(kind, inside):
    step, start = KINDS[kind]
    model = Keeps(step, past=start()).eval()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), model, nn.Conv2d(8, 4, 3)) if inside else model
    given, x = copy.deepcopy(model), torch.randn(1, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"a call changes (1\.)?past") as told:
        fast = optimized(model, x, selectors="default")
    assert len([w for w in told if "ai3_ops.optimize" in str(w.message)]) == 1
    assert changes(model, given) == []
    assert "past" in str(ai3_ops.explain(fast))
    parts = {part.name for part in ai3_ops.explain(fast).optimization.parts}
    assert parts >= ({"0", "1.a", "1.b", "2"} if inside else {"a", "b"})
    with torch.no_grad():
        for frame in frames():
            assert difference(fast(frame), model(frame)) <= 1e-4


_count = 0


def of_the_module(m, y):
    global _count
    _count += 1
    return y * _count


def of_a_closure():
    count = [0]

    def step(m, y):
        count[0] += 1
        return y * count[0]

    return step


def of_a_default():
    def step(m, y, past=[0.0]):  # noqa: B006
        past[0] = past[0] + y
        return past[0]

    return step


def of_the_class():
    class Own(Keeps):
        past = None

    def step(m, y):
        z = y if Own.past is None else y + Own.past
        Own.past = y
        return z

    return step, Own


OUTSIDE = {
    "global": (lambda: of_the_module, "_count"),
    "closure": (of_a_closure, "count of "),
    "default": (of_a_default, "a default argument of "),
    "class": (of_the_class, "Own.past"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_state_outside_of_the_modules_is_kept_and_named(kind):
    make, name = OUTSIDE[kind]
    step = make()
    step, cls = step if isinstance(step, tuple) else (step, Keeps)
    torch.manual_seed(3)
    model = cls(step).eval()
    before = _count
    with pytest.warns(UserWarning, match=f"a call changes {name}"):
        fast = optimized(model, torch.randn(1, 3, 8, 8), selectors="default")
    assert _count == before
    if kind == "global":  # one for the whole process
        return
    again = make()
    again, cls = again if isinstance(again, tuple) else (again, Keeps)
    plain = cls(again).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for frame in frames():
            assert difference(fast(frame), plain(frame)) <= 1e-4


def test_what_only_the_first_call_changes_is_captured():
    """A table that is made for the sizes at hand, and numbers that every call sets alike."""

    def step(m, y):
        m.size = tuple(y.shape)
        if m.table is None:
            m.table = torch.arange(float(y.shape[-1]))
        return y + m.table

    model = Keeps(step, table=None).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = optimized(model, torch.randn(1, 3, 8, 8), selectors="default")
    assert fast._ai3_first.body is not None
    assert model.table is None
    with torch.no_grad():
        for frame in frames():
            assert difference(fast(frame), model(frame)) <= 1e-4


def test_the_first_call_s_own_result_is_not_taken_for_all():
    def step(m, y):  # as ActNorm does
        if m.scale is None:
            m.scale = 1 / y.std()
        return y * m.scale

    model = Keeps(step, scale=None).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = optimized(model, torch.randn(1, 3, 8, 8), selectors="default")
    with torch.no_grad():
        for frame in frames():
            assert difference(fast(5 * frame), model(5 * frame)) <= 1e-4


def test_random_numbers_go_on_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.Conv2d(8, 8, 3)).eval()
    model[1].train()
    x = torch.randn(1, 3, 8, 8)
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimized(model, x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    with same_random_numbers():
        torch.rand(3), random.random()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


RANDOM = {
    "dropout": lambda: nn.Dropout(0.5).train(),
    "dropout2d": lambda: nn.Dropout2d(0.5).train(),
    "alpha": lambda: nn.AlphaDropout(0.5).train(),
    "feature_alpha": lambda: nn.FeatureAlphaDropout(0.5).train(),
    "rrelu": lambda: nn.RReLU().train(),
    "functional": lambda: Functional(lambda x: F.dropout(x, 0.5, training=True)),
    "noise": lambda: Functional(lambda x: x + torch.randn_like(x)),
    "attention": lambda: Functional(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_what_is_random_in_evaluation_is_kept_and_named(kind):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), RANDOM[kind](), nn.Conv2d(8, 8, 3))
    for i in (0, 1, 3):
        model[i].eval()
    model.training = False
    x = torch.randn(2, 3, 8, 8)
    fast = optimized(model, x, selectors="default")
    assert "a call draws random numbers: 2 (" in str(ai3_ops.explain(fast))
    assert [part.name for part in fast._ai3_report.parts] == ["0", "3"]
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert difference(fast(x), expected) <= 1e-4
        assert not torch.equal(fast(x), fast(x))
        again = pickle.loads(pickle.dumps(fast)) if kind not in ("functional", "noise", "attention") else fast
        assert not torch.equal(again(x), again(x))


def test_what_is_not_random_is_captured():
    """Dropout of a model in training, which `optimize` takes in evaluation; of nothing; random numbers that nothing reads."""
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.Dropout(0.5),
        nn.RReLU(),
        Functional(lambda x: (torch.rand(()), x)[1]),
        nn.Conv2d(8, 8, 1),
    ]
    fast = optimized(nn.Sequential(*layers).train(), torch.randn(2, 3, 8, 8), selectors="default")
    assert fast._ai3_first is not None
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.0), nn.Conv2d(8, 8, 1)).eval()
    model[1].train()
    assert optimized(model, torch.randn(2, 3, 8, 8), selectors="default")._ai3_first is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hooks_that_come_later_are_called(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval().to(dtype)
    x = torch.randn(1, 3, 8, 8, dtype=dtype)
    fast = optimized(model, x, selectors="default")
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        seen = []
        with torch.no_grad():
            plain = one(x)
            handle = one.get_submodule("0").register_forward_hook(lambda m, args, y: seen.append(y) or 2 * y)  # noqa: B023
            with pytest.warns(UserWarning, match="'0' has a hook"):
                changed = one(x)
            assert len(seen) == 1
            assert not torch.allclose(changed, plain)
            handle.remove()
            assert torch.equal(one(x), plain)


def test_what_would_not_be_computed_cannot_be_replaced():
    fast = optimized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 8, 8), selectors="default")
    with pytest.raises(
        RuntimeError, match="'0' of an optimized module stays as it is: replace it in the original model"
    ):
        setattr(fast, "0", nn.Identity())
    for add in (fast.add_module, fast.register_module):
        with pytest.raises(RuntimeError, match="'0' of an optimized module stays as it is"):
            add("0", nn.Identity())
    fast.note = "of the user's own"
    assert fast.note == "of the user's own"


class Scales(nn.Module):
    """A parameter and a buffer of its own, and modules."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.register_buffer("shift", torch.zeros(8, 1, 1))
        self.inside = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.last = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.inside(x) * self.scale + self.shift)


def test_what_is_replaced_inside_is_computed():
    model, x = Scales().eval(), torch.randn(1, 3, 8, 8)
    fast = optimized(model, x, selectors="default")
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, state, (x,))
        for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            plain = one(x)
            assert difference(plain, model(x)) <= 1e-4
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for name in (*state, None):  # one, or all
                    given = state if name is None else {name: state[name]}
                    changed = torch.func.functional_call(one, given, (x,))
                    assert torch.equal(changed, torch.func.functional_call(model, given, (x,)))
            assert torch.equal(changed, expected)
            assert [str(w.message).count("was replaced, which programs do not see") for w in told] == [1]
            assert torch.equal(one(x), plain)
        one.inside[0].weight = nn.Parameter(torch.zeros_like(one.inside[0].weight))
        assert not torch.equal(one(x), plain)
        fast.inside[1] = nn.Tanh()
        assert not torch.equal(fast(x), plain)


def test_freed_weights_cannot_be_replaced():
    model, x = Scales().eval(), torch.randn(1, 3, 8, 8)
    fast = optimized(model, x, selectors="default", keep_original=False)
    with pytest.raises(RuntimeError, match="'scale' cannot be replaced: keep_original=False freed"):
        torch.func.functional_call(fast, {"scale": torch.zeros(8, 1, 1)}, (x,))
    with pytest.raises(AttributeError, match="'last': keep_original=False freed"):
        fast.last.weight = nn.Parameter(torch.zeros(8, 8, 3, 3))


def test_parts_warn_once_for_the_whole_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 8, 1)).eval()
    model[1].train()
    fast = optimized(model, torch.randn(1, 3, 8, 8), selectors="default")
    parts = [m for m in fast.modules() if isinstance(m, Optimized) and m is not fast]
    assert len(parts) == 2
    for part in parts:
        assert part._ai3_told is fast._ai3_told
    again = copy.deepcopy(fast)
    assert again.get_submodule("0")._ai3_told is again._ai3_told
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in ("0", "2"):
            part = fast.get_submodule(name)
            part._ai3_first.dynamic = False  # as if the batch were not left open
            part._ai3_plans.clear()
        fast(torch.randn(2, 3, 8, 8))
    assert len([w for w in told if "batches of other sizes" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_weights_that_hooks_compute_are_plain_in_the_graph(norm):
    model = nn.Sequential(norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(1, 3, 8, 8)
    for _ in range(2):  # freshly made, and with a weight that a call with gradients left
        fast = optimized(model, x, selectors="default")
        assert fast._ai3_first.body is not None
        assert fast.state_dict().keys() == model.state_dict().keys()
        with torch.no_grad():
            assert difference(fast(x), model(x)) <= 1e-4
        model(x).sum().backward()


def test_other_inputs_differ_and_stay_in_range():
    x, index = torch.rand(2, 3), torch.arange(6).reshape(2, 3)
    (y, kept), named = others((x, index), {"scale": 2.0})
    assert ((y < x) & (y >= x / 2)).all()
    assert torch.equal(kept, index)
    assert named == {"scale": 2.0}
    assert others((torch.zeros(3),), {})[0][0].count_nonzero() == 3
    assert torch.equal(others((index,), {})[0][0], index.flip(-1))


def test_copies_share_parameters_and_nothing_else():
    model = Keeps(log, past=[torch.ones(2)], table=torch.zeros(2))
    copy_ = copied(model, sharing=True)
    assert copy_.a.weight is model.a.weight
    assert copy_.table is not model.table
    assert copy_.past is not model.past
    assert changes(model, copy_) == []
    copy_.past.append(1)
    copy_.table += 1
    copy_.a.training = False
    assert changes(model, copy_) == ["a.training", "past", "table"]


class Lazy(dict):
    """Entries that are made when somebody asks for all of them, as tables of a large library are."""

    def items(self):
        raise ImportError("what is not installed")


_LAZY = Lazy(a=1)


def test_tables_that_are_made_when_asked_for_are_not():
    class Named(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * _LAZY["a"]

    assert optimized(Named(3, 4, 3).eval(), torch.randn(1, 3, 6, 6)).changed


class Writes(nn.Module):
    """As sentence-transformers' modules, which hand features on in one dict."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), how

    def forward(self, features):
        match self.how:
            case "adds":
                features["out"] = self.inner(features["x"])
            case "replaces":
                features["x"] = self.inner(features["x"]) + features["x"]
                return features["x"] + features["y"] if "y" in features else features["x"]
            case "takes":
                return self.inner(features.pop("x"))
            case "appends":
                features.append(self.inner(features[-1]))
                return features[-1]
        return features


@pytest.mark.parametrize("how", ["adds", "replaces", "takes", "appends"])
def test_a_call_that_writes_into_its_argument(how):
    """It is not captured; its layers are, and each call leaves the argument as the model does."""
    torch.manual_seed(0)
    model, x, y = Writes(how).eval(), torch.randn(3, 8), torch.randn(3, 8)
    new = (lambda *v: [*v]) if how == "appends" else (lambda *v: dict(zip("xyz", v, strict=False)))
    example = new(x)
    fast = taken(ai3_ops.optimize(model, (example,), "default", progress=False))
    assert list(example) == list(new(x))
    (part,) = fast._ai3_report.parts
    assert part.name == "inner"
    assert "writes into its argument 'features'" in fast._ai3_report.left[""]
    for given in ((x,), (y,), (x, y), (x[:2],), (x, y)):
        one, other = new(*given), new(*given)
        with torch.no_grad():
            got, expected = fast(one), model(other)
        for a, b in ((got, expected), (one, other)):
            a, b = (pytree.tree_flatten(v) for v in (a, b))
            assert a[1] == b[1]
            torch.testing.assert_close(a[0], b[0])


def test_a_mapping_has_arguments_by_name():
    class Encoding(UserDict):
        """As tokenizers return."""

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, mask=None):
            return self.layer(x) * mask

    model, given = Takes().eval(), Encoding(x=torch.randn(2, 8), mask=torch.rand(2, 1))
    fast = ai3_ops.optimize(model, given, "default", progress=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(**given), model(**given))
    assert ai3_ops.tune(model, given, budget_seconds=0, progress=False).layers


def test_a_call_of_another_length_that_writes_into_its_argument():
    class Tells(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(4, 4, 3)

        def forward(self, x, said):
            if x.shape[2] > 30:
                said["long"] = x.shape[2]
            return self.layer(x)

    model, said = Tells().eval(), {}
    fast = taken(optimized(model, torch.randn(1, 4, 20), said, selectors="default"))
    with pytest.warns(UserWarning, match="writes into its argument 'said'"), torch.no_grad():
        fast(torch.randn(1, 4, 40), said)
    assert said == {"long": 40}
