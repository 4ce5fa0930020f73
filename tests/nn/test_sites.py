"""Calls of a module's own methods are replaced where they stand in the source, and nothing else about the module changes."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import inspect
import linecache
import pickle
import random
import sys
import traceback
import types
import weakref
from collections import OrderedDict

import helpers_of_sites
import pytest
import torch
import torch.nn.functional
import torch.nn.functional as F
import torch.nn.functional as G
from helpers_of_sites import padded_relu
from modules import EVERY, Modes, close, layers
from torch import nn, relu
from torch.fx.experimental.optimization import fuse
from torch.nn.functional import conv2d as convolve

import ai3_ops
from ai3_ops import explain, swap, unswap
from ai3_ops.nn.sites import source_of

RELU = {"relu": "direct"}


def names(model):
    return [row.name for row in explain(model).layers]


def agrees(model, *args, selectors=EVERY, calls=1, **kwargs):
    """The swapped model, which gives what the model gives and made each of its calls `calls` times."""
    state, dice = copy.deepcopy(vars(model)), torch.get_rng_state()
    swapped = swap(model, selectors)
    torch.set_rng_state(dice)
    expected = model(*copy.deepcopy(args), **kwargs)
    vars(model).update(state)
    torch.set_rng_state(dice)
    torch.testing.assert_close(swapped(*copy.deepcopy(args), **kwargs), expected, rtol=1e-4, atol=1e-5)
    rows = explain(swapped).layers
    assert rows
    assert [row.calls for row in rows] == [calls] * len(rows), rows
    assert explain(swapped).unreached == []
    return swapped


# Forms ----------------------------------------------------------------------------------------------------------------
class Callees(nn.Module):
    """Every way to name PyTorch's function that can be looked up."""

    kept = staticmethod(F.relu)
    builtin = torch.relu

    def __init__(self):
        super().__init__()
        self.act, self.weight = torch.relu, nn.Parameter(torch.randn(2, 3, 3, 3))

    def forward(self, x):
        x = F.relu(G.relu(x - 1) + torch.nn.functional.relu(x)) + relu(x)
        x = x + torch.relu(x).relu() + self.act(x) + self.kept(x) + self.builtin(x)
        return convolve(x, self.weight).flatten(1)


def test_callees():
    swapped = agrees(Callees(), torch.randn(2, 3, 5, 5))
    assert names(swapped) == [*(f":relu_{i}" for i in range(9)), ":conv2d_0", ":flatten_0"]


def test_arguments_are_evaluated_once_and_in_order():
    class Net(nn.Module):
        def forward(self, x):
            seen = []

            def note(value):
                seen.append(value)
                return value

            y = F.relu(note(x), inplace=note(False))
            y = note(y).flatten(note(0), end_dim=note(1))
            return F.max_pool2d(*[y[None, None], note(1)], **{"stride": note(1)}), len(seen)

    agrees(Net(), torch.randn(3, 4))


class Scopes(nn.Module):
    """Lambdas, nested functions, comprehensions, generators and a name that Python mangles."""

    def __init__(self, depth=2):
        super().__init__()
        self.depth = depth
        self.__scale = 3.0

    def forward(self, x, *more, then=lambda y: y + 1, **options):
        def twice(y):
            return relu(y) + [torch.relu(v) for v in (y, -y)][1]

        inner = lambda y: F.relu(y) * self.__scale  # noqa: E731
        total = sum(F.relu(v) for v in (x, -x, *more))
        return then(inner(twice(total))) + (y := F.relu(x)) + y + options.get("bias", 0)


def test_scopes():
    x = torch.randn(9)
    swapped = swap(Scopes(), RELU)
    for args, options in (((x,), {}), ((x, x, x), {"bias": 2.0}), ((x,), {"then": torch.neg})):
        assert torch.equal(swapped(*args, **options), Scopes()(*args, **options))
    assert names(swapped) == [f":relu_{i}" for i in range(5)]
    assert [row.calls for row in explain(swapped).layers] == [3, 6, 3, 8, 3]


def closing(scale):
    class Closing(nn.Module):
        def forward(self, x):
            nonlocal scale
            scale += 1
            return F.relu(x) * scale if isinstance(self, Closing) else x

    return Closing()


def test_closures_are_the_originals():
    model, x = closing(1), torch.ones(2)
    swapped = swap(model, RELU)
    assert [float(m(x)[0]) for m in (swapped, model, swapped)] == [2.0, 3.0, 4.0]


class Base(nn.Module):
    def forward(self, x):
        return self.helper(F.relu(x)) + 1

    def helper(self, x):
        return torch.relu(x - 1)

    def unused(self, x):
        return F.relu(x)


class Mixin:
    def helper(self, x):
        return super(Mixin, self).helper(x) * 2 + torch.relu(x)  # noqa: UP008


class Derived(Mixin, Base):
    def forward(self, x):
        return super().forward(x) + super().forward(-x)

    def unused(self, x):
        return F.relu(x + 1)


def test_super_and_inherited_methods():
    model, x = Derived(), torch.randn(9)
    swapped = swap(model, RELU)
    assert torch.equal(swapped(x), model(x))
    # forward first, of the class and of those that it asks super() for; then class by class, in the order of their bodies
    where = {f":{site.name}": f"{site.owner.__name__}.{site.method}" for site in type(swapped)._ai3_sites}
    assert where == {
        ":relu_0": "Base.forward",
        ":relu_1": "Derived.unused",
        ":relu_2": "Mixin.helper",
        ":relu_3": "Base.helper",
    }
    assert [row.calls for row in explain(swapped).layers] == [2, 0, 2, 2]
    assert isinstance(swapped, Derived)
    assert torch.equal(swapped.unused(x), model.unused(x))


def doubled(function):
    calls = []

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs) * 2

    wrapper.calls = calls
    return wrapper


class Decorated(nn.Module):
    @torch.no_grad()
    @doubled
    def forward(self, x):
        return F.relu(x)


def test_decorators_stay():
    model, x = Decorated(), torch.randn(3, requires_grad=True)
    before = len(Decorated.forward.__wrapped__.calls)
    swapped = swap(model, RELU)
    assert len(Decorated.forward.__wrapped__.calls) == before  # no decorator ran again
    y = swapped(x)
    assert not y.requires_grad
    assert torch.equal(y, model(x))
    assert len(Decorated.forward.__wrapped__.calls) == before + 2
    assert explain(swapped).layers[0].calls == 1
    assert inspect.signature(swapped.forward) == inspect.signature(model.forward)


class Documented(nn.Module):
    def forward(self, x, scale: float = 2.0, *, shift: int = 1):
        """What it does."""
        return F.relu(x) * scale + shift


def test_signature_defaults_and_documentation_stay():
    swapped, forward = swap(Documented(), RELU), Documented.forward
    assert inspect.signature(swapped.forward) == inspect.signature(Documented().forward)
    for name in (
        "__doc__",
        "__name__",
        "__qualname__",
        "__module__",
        "__defaults__",
        "__kwdefaults__",
        "__annotations__",
    ):
        assert getattr(swapped.forward.__func__, name) == getattr(forward, name)
    assert swapped.forward.__func__.__globals__ is forward.__globals__
    x = torch.randn(3)
    for args, kwargs in (((x,), {}), ((x, 3.0), {"shift": 2}), ((), {"x": x})):
        assert torch.equal(swapped(*args, **kwargs), Documented()(*args, **kwargs))
    for args in ((), (x, 1, 2)):
        with pytest.raises(TypeError, match=r"forward\(\)"):
            swapped(*args)


def test_tracebacks_show_the_users_file():
    class Fails(nn.Module):
        def forward(self, x):
            y = F.relu(x)
            return y + missing  # noqa: F821

    with pytest.raises(NameError) as error:
        swap(Fails(), RELU)(torch.ones(1))
    frame = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (frame.filename, frame.line) == (__file__, "return y + missing  # noqa: F821")


# Values decide at run time ----------------------------------------------------------------------------------------------
def test_a_callee_that_is_bound_anew_behaves_as_written(monkeypatch):
    model, x = Modes(), torch.randn(9)
    swapped = swap(model, RELU)
    monkeypatch.setitem(globals(), "F", types.SimpleNamespace(relu=torch.tanh))
    monkeypatch.setattr("modules.F", types.SimpleNamespace(relu=torch.tanh))
    assert torch.equal(swapped(x), model(x))
    assert [row.calls for row in explain(swapped).layers] == [0, 0, 0]
    monkeypatch.undo()
    act, y = Callees(), torch.randn(2, 3, 5, 5)
    changed = swap(act, RELU)
    for m in (act, changed):
        m.act = torch.sigmoid
    monkeypatch.setitem(globals(), "G", types.SimpleNamespace(relu=torch.sin))
    close(changed(y), act(y))
    assert layers(changed)[":relu_1"].calls == layers(changed)[":relu_6"].calls == 0


class Local(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {"relu": F.relu}

    def forward(self, x, act=F.relu):
        import torch.nn.functional as here

        return act(x) + self.table["relu"](x) + here.relu(x)


def test_functions_that_are_known_at_the_call_only_are_named_as_seen():
    model, x = Local(), torch.randn(9)
    swapped = swap(model, EVERY)
    assert torch.equal(swapped(x), model(x))
    with pytest.warns(UserWarning, match="calls of the model itself keep PyTorch's implementation"):
        swapped = swap(model, EVERY, x)
    (module,) = explain(swapped).unreached
    assert module.seen == {"relu": 2}
    assert layers(swapped)[":relu_0"].shapes == [(9,)]
    assert "what Local.forward (test_sites.py:" in module.reason
    with pytest.raises(ValueError, match=r"cannot be replaced: what Local\.forward"):
        swap(model, EVERY, x, strict=True)


class Other:
    def relu(self):
        return 5.0

    def flatten(self, *args):
        return args


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.tree, self.relu, self.blocks = Other(), nn.Identity(), nn.ModuleDict()

    def forward(self, x, other):
        y = other.relu() * x.relu() + self.relu(x) + len(other.flatten(1, 2)) + self.tree.relu()
        return y.relu_().flatten(start_dim=0) + x.flatten()


class Mine(torch.Tensor):
    def relu(self):
        return torch.Tensor.relu(self) + 7


def test_methods_of_tensors_and_of_others():
    model, x = Methods(), torch.randn(2, 3)
    swapped = swap(model, EVERY)
    assert torch.equal(swapped(x, Other()), model(x, Other()))
    assert {row.name: row.calls for row in explain(swapped).layers if row.used != "torch"} == {
        ":relu_0": 0, ":relu_1": 1, ":relu_2": 1, ":flatten_0": 0, ":flatten_1": 1, ":flatten_2": 1,
    }  # fmt: skip
    mine = x.as_subclass(Mine)
    assert torch.equal(swapped(mine, Other()), model(mine, Other()))  # whose method is another one
    with pytest.raises(AttributeError, match="'int' object has no attribute 'relu'"):
        swapped(x, 3)


def test_in_place_forms_keep_their_effect():
    class InPlace(nn.Module):
        def forward(self, x):
            a, b, c, d = x.clone(), x.clone(), x.clone(), x.clone()
            F.relu_(a), torch.relu_(b), F.relu(c, inplace=True), d.relu_()
            y = F.relu(x)
            z = y
            y += 1
            return a, b, c, d, y + z

    swapped = swap(InPlace(), RELU)
    x = torch.randn(9)
    for a, e in zip(swapped(x), InPlace()(x), strict=True):
        assert torch.equal(a, e)
    assert {row.calls for row in explain(swapped).layers} == {1}
    left = explain(swap(InPlace(), "default")).layers
    assert [row.reason for row in left[:3]] == ["in place: PyTorch needs no second tensor"] * 3


# What tracing had to guard or refuse ------------------------------------------------------------------------------------
class Branch(nn.Module):
    def forward(self, x):
        return F.relu(x) if x.sum() > 0 else F.relu(-x) * 2


class Type(nn.Module):
    def forward(self, x):
        x = x[0] if isinstance(x, tuple) and type(x) is not list else x
        return F.relu(x) if hasattr(x, "shape") and str(x.dtype) == "torch.float32" else x


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
        return F.relu(x) * torch.rand(()) + torch.arange(9)


class With(nn.Module):
    def forward(self, x):
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
            y = F.relu(x)
        try:
            return F.relu(y + [1][1])
        except IndexError:
            return torch.relu(y)


class Outputs(nn.Module):
    class Kind(dict):
        pass

    def forward(self, x):
        return self.Kind(out=F.relu(x)), OrderedDict(a=[x, (x,)])


class Children(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9), nn.ReLU()])

    def forward(self, x, count=None):
        for layer in self.layers[:count]:
            x = layer(F.relu(x)).to(next(self.parameters()).dtype)
        return x


@pytest.mark.parametrize("model", [Type(), Counts(), Draws(), Outputs()], ids=lambda m: type(m).__name__)
def test_what_a_trace_would_get_wrong(model):
    agrees(model, torch.randn(9))


def test_control_flow():
    model, x = Branch(), torch.randn(9).abs()
    swapped = swap(model, RELU, strict=True)
    for given in (x, -x, x):
        assert torch.equal(swapped(given), model(given))
    assert [row.calls for row in explain(swapped).layers] == [2, 1]
    swapped = swap(Children(), RELU)
    assert [layers(swapped)[":relu_0"].calls for _ in [swapped(torch.randn(9)), swapped(torch.randn(9), count=1)]] == [
        3,
        3,
    ]
    model = With()
    swapped = swap(model, RELU)
    y = torch.randn(3, requires_grad=True)
    assert torch.equal(swapped(y), model(y))
    assert [row.calls for row in explain(swapped).layers] == [1, 0, 1]


def test_training_and_evaluation_have_the_same_sites():
    model, x = Modes(), torch.randn(9)
    swapped = swap(model.train(), EVERY)
    assert names(swapped) == names(swap(model.eval(), EVERY)) == [":relu_0", ":relu_1", ":relu_2"]
    for mode in (True, False):
        assert torch.equal(swapped.train(mode)(x), model.train(mode)(x))
    assert [row.calls for row in explain(swapped).layers] == [1, 1, 1]


class Reads(nn.Module):
    """Reads all that may change: its attributes, a child's, a container's, its class's, and globals."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.config, self.slope, self.norm = {"k": 2.0}, 0.5, nn.BatchNorm1d(4)
        self.register_buffer("mask", None)

    def forward(self, x):
        x = F.relu(x) * self.config["k"] * self.factor * SCALE * self.slope
        x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=self.norm.training)
        x = x if self.mask is None else x * self.mask
        return self.helper(x) if torch.is_grad_enabled() else -self.helper(x)

    def helper(self, x):
        return x + 1


SCALE = 2.0
CHANGES = {
    "container": lambda m: m.config.update(k=5.0),
    "attribute": lambda m: setattr(m, "slope", 3.0),
    "buffer": lambda m: m.register_buffer("mask", torch.arange(4.0)),
    "child": lambda m: m.norm.eval(),
    "method": lambda m: setattr(m, "helper", lambda x: x - 1),
    "class": lambda m: setattr(m, "factor", 3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_the_forward_reads_may_change_after_the_swap(name, monkeypatch):
    torch.manual_seed(0)
    model, x = Reads(), torch.randn(5, 4)
    swapped = swap(model, RELU)
    compiled = torch.compile(copy.deepcopy(swapped), backend="eager")
    close(compiled(x), copy.deepcopy(model)(x))
    for copied in (swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped)), compiled):
        changed = copy.deepcopy(model)
        for m in (changed, copied._orig_mod if copied is compiled else copied):
            CHANGES[name](m)
            m.norm.load_state_dict(nn.BatchNorm1d(4).state_dict())
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "SCALE", 4.0)
            close(copied(x), changed(x))
        assert copied is compiled or (layers(copied)[":relu_0"].reason, layers(copied)[":relu_0"].calls) == ("", 1)
    torch._dynamo.reset()


MODES = [
    torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode,
]  # fmt: skip


@pytest.mark.parametrize("around", MODES)
def test_swapped_under_any_mode(around):
    model, x = Reads(), torch.randn(5, 4)
    with around():
        swapped = swap(model, RELU)
    for outside in MODES:
        with outside():
            expected, actual = copy.deepcopy(model)(x), copy.deepcopy(swapped)(x)
        assert (actual.dtype, actual.requires_grad) == (expected.dtype, expected.requires_grad)
        close(actual, expected)


# What is out of reach -----------------------------------------------------------------------------------------------------
class Helped(nn.Conv2d):
    def forward(self, x):
        return padded_relu(helpers_of_sites.F.conv2d(x, self.weight)) if self.bias is None else beside(self, x)


def beside(layer, x):
    return F.conv2d(x, layer.weight, layer.bias)


class Outside(nn.Module):
    def forward(self, x):
        return padded_relu(x) + torch.utils.checkpoint.checkpoint(F.relu, F.pad(x, (1, 1)), use_reentrant=False)


def test_functions_outside_of_the_methods_are_named_as_seen():
    model, x = Outside(), torch.randn(3, 4)
    assert explain(swap(model, EVERY)).unreached == []
    with pytest.warns(
        UserWarning, match="calls of the model itself keep PyTorch's implementation, since they cannot be replaced"
    ):
        swapped = swap(model, EVERY, x)
    assert torch.equal(swapped(x), model(x))
    (module,) = explain(swapped).unreached
    assert module.seen == {"relu": 2}
    assert "the call is in padded_relu (helpers_of_sites.py:7), a function outside of its methods" in module.reason
    assert "the call is in PyTorch's checkpoint, called by Outside.forward" in module.reason
    with pytest.raises(ValueError, match="calls relu, which cannot be replaced: the call is in padded_relu"):
        swap(model, EVERY, x, strict=True)
    swap(model, EVERY | {"relu": None}, x, strict=True)


def test_a_layer_whose_forward_hands_its_call_on():
    model = Helped(2, 3, 3)
    swapped = swap(model, {"conv2d": "direct"})
    assert names(swapped) == [":conv2d_0"]
    assert torch.equal(swap(model, {"conv2d": "direct"}, torch.randn(1, 2, 5, 5)).weight, model.weight)
    (module,) = explain(swap(model, {"relu": "direct"}, torch.randn(1, 2, 5, 5))).unreached
    assert module.seen == {"conv2d": 1}
    assert "beside (test_sites.py" in module.reason


def made(text, **values):
    """A module class whose source is nowhere."""
    space = {"nn": nn, "F": F, "torch": torch, "__name__": __name__} | values
    exec(text, space)
    return space["Made"]


WITHOUT_SOURCE = (
    "class Made(nn.Module):\n    def forward(self, x):\n        return F.relu(x.flatten()) + self.relu(x)\n"
)


class Static(nn.Module):
    @staticmethod
    def act(x):
        return F.relu(x)

    def forward(self, x):
        return self.act(x)


class Selfless(nn.Module):
    def forward(*args):
        return F.relu(args[1])


class Rebinds(nn.Module):
    def forward(self, x):
        self, x = None, F.relu(x)
        return (x, self)[0]


def elsewhere(self, x):
    return F.relu(x)


class OnAnInstance(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(elsewhere, self)


class Lambda(nn.Module):
    forward = lambda self, x: F.relu(x)  # noqa: E731


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (made(WITHOUT_SOURCE), "forward: it has no source"),
        (Static, "act is a static method"),
        (Selfless, "forward has no name for its module"),
        (Rebinds, "forward has no name for its module"),
        (OnAnInstance, "its forward was replaced on the instance"),
        (Lambda, "forward: its source is not a definition"),
    ],
)
def test_what_cannot_be_rewritten_is_reported(model, reason):
    model, x = model(), torch.randn(9)
    model.relu = nn.Identity()
    swapped = swap(model, RELU)
    assert torch.equal(swapped(x), model(x))
    (module,) = explain(swapped).unreached
    assert reason in module.reason
    assert "relu" in module.source
    assert set(module.source) <= {"relu", "flatten"}
    assert "not replaced in" in str(explain(swapped))
    for inputs in (None, x):
        with pytest.raises(ValueError, match="calls relu, which cannot be replaced"):
            swap(model, RELU, inputs, strict=True)
    with pytest.raises(ValueError, match="calls that '' makes cannot be replaced"):
        swap(model, {":relu_0": "direct"})


@pytest.mark.parametrize("module", [argparse, functools, inspect, torch.nn.modules.conv, torch.nn.modules.transformer])
def test_sources_compile_to_what_runs(module):
    """Names of the own class and function, mangled names, closures, super(): whatever a method may hold."""
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    functions = {id(f): f for space in (module, *classes) for f in vars(space).values() if inspect.isfunction(f)}
    own = [f for f in functions.values() if f.__code__.co_filename == module.__file__ and f.__name__ != "<lambda>"]
    assert len(own) > 10
    for function in own:
        source_of(function)


def attached(self, x, times=2):
    return attached(self, F.relu(x), times - 1) if times else x


def test_a_function_that_a_class_is_given():
    class Given(nn.Module):
        forward = attached

    swapped = swap(Given(), RELU)
    x = torch.randn(9)
    assert torch.equal(swapped(x), F.relu(x))
    assert explain(swapped).layers[0].calls == 1  # that it calls itself is another function's business


def test_a_file_that_changed_after_its_import_is_not_used(tmp_path, monkeypatch):
    text = "from torch import nn\nimport torch.nn.functional as F\nclass Made(nn.Module):\n    def forward(self, x):\n"
    file = tmp_path / "changing_module.py"
    file.write_text(f"{text}        return F.relu(x) * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import changing_module

    file.write_text(f"{text}        return F.relu(x) * 3\n")
    linecache.checkcache(str(file))
    model, x = changing_module.Made(), torch.ones(3)
    swapped = swap(model, RELU)
    assert torch.equal(swapped(x), 2 * x)
    assert "its source is not what runs" in explain(swapped).unreached[0].reason
    del sys.modules["changing_module"]


# fx -----------------------------------------------------------------------------------------------------------------------
class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.flatten(F.relu(self.norm(self.conv(x))).relu(), 1)


def trips(model):
    return copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("given", [False, True])
def test_graph_modules(given):
    model, x = fuse(Convolutional().eval()), torch.randn(2, 3, 8, 8)
    assert isinstance(model, torch.fx.GraphModule)
    swapped = swap(model, EVERY, x if given else None, strict=True)
    for m in (swapped, *trips(swapped), pickle.loads(pickle.dumps(nn.Sequential(swapped)))[0]):
        close(m(x), model(x))
        assert {row.used for row in explain(m).layers} == {"direct"}
        assert isinstance(m, torch.fx.GraphModule)
    close(torch.compile(swapped, backend="eager", fullgraph=True)(x), model(x))
    torch._dynamo.reset()
    for node in swapped.graph.nodes:
        if node.target is F.relu:
            node.target, node.kwargs = torch.tanh, {}
    swapped.recompile()  # the graph's new code, in which the other calls are still replaced
    expected = torch.flatten(torch.tanh(model.conv(x)).relu(), 1)
    close(swapped(x), expected)
    assert layers(swapped)[":flatten_0"].used == "direct"
    close(unswap(swapped)(x), expected)


def test_symbolic_traces_of_swapped_modules():
    for model in (Convolutional().eval(), Modes(), Derived()):
        x = torch.randn(2, 3, 8, 8)
        graph = torch.fx.symbolic_trace(swap(model, EVERY))
        close(graph(x), model(x))
        assert "relu_direct" in graph.code
        assert ".relu(" not in graph.code


# Files, copies, memory ------------------------------------------------------------------------------------------------------
class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.act = 2.0, F.relu

    def forward(self, x):
        return self.act(x) * self.slope + F.relu(x)


def test_copies_read_their_own_attributes():
    model, x = Keeps(), torch.randn(9)
    swapped = swap(model, RELU)
    for other in trips(swapped):
        other.slope = 5.0
        expected = copy.copy(model)
        expected.slope = 5.0
        assert torch.equal(other(x), expected(x))
        assert torch.equal(swapped(x), model(x))
        assert type(other) is type(swapped)
        assert [row.used for row in explain(other).layers] == ["direct", "direct"]


class Grown(nn.Module):
    def forward(self, x):
        return torch.relu(F.relu(x))


def test_a_file_whose_source_has_changed(monkeypatch):
    data = pickle.dumps(swap(Grown(), RELU))

    def forward(self, x):
        return F.relu(x) + 1

    forward.__qualname__ = "Grown.forward"
    monkeypatch.setattr(Grown, "forward", forward)
    model, x = pickle.loads(data), torch.randn(9)
    assert torch.equal(model(x), F.relu(x) + 1)
    (row,) = explain(model).layers
    assert (row.name, row.calls) == (":relu_0", 1)
    assert "relu_1 was not found again: its source has changed" in row.reason


def test_a_method_replaced_on_the_class_is_seen_at_the_next_swap(monkeypatch):
    model, x = Grown(), torch.randn(9)
    swapped = swap(model, RELU)
    forward = Grown.forward
    monkeypatch.setattr(Grown, "forward", lambda self, x: forward(self, x) * 2)
    again = swap(unswap(swapped), RELU)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Conv2d(1, 1, 1)), Keeps(), fuse(Convolutional().eval())])
def test_files_have_a_format(model, monkeypatch):
    swapped = swap(model, EVERY)
    with monkeypatch.context() as patch:
        patch.setattr("ai3_ops.nn.classes.FORMAT", 99)
        data = pickle.dumps(swapped)
    with pytest.raises(ValueError, match="saved in format 99, and this version reads format 1"):
        pickle.loads(data)


def test_untouched_modules_load_without_ai3_ops(tmp_path, fork):
    model = swap(nn.Sequential(nn.Conv2d(1, 1, 1), nn.MultiheadAttention(2, 1), nn.ReLU()), {"conv2d": None, "*": None})
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = (
        "import pickle, sys; sys.modules['ai3_ops'] = None; print(type(pickle.load(open(sys.argv[1], 'rb'))).__name__)"
    )
    done = fork(code, tmp_path / "model.pickle")
    assert done.stdout == "Sequential\n", done.stderr


def test_nothing_grows_and_classes_go_with_their_modules():
    class Own(nn.Module):
        def forward(self, x):
            return F.relu(x) + torch.relu(x)

    swap(Own(), RELU)  # reads the file
    before = len(linecache.cache)
    model = Own()
    kinds = set()
    for _ in range(20):
        swap(model, RELU, inplace=True)
        kinds.add(type(model))
        unswap(model)
    assert len(kinds) == 1  # one class serves all swaps alike
    assert len(linecache.cache) == before
    gone = weakref.ref(Own), weakref.ref(kinds.pop())
    del Own, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_nothing_outside_of_the_module_is_touched():
    model = Callees()
    before = [dict(vars(space)) for space in (nn.Module, F, torch, torch.fx.Tracer)]
    dice, threshold = (random.getstate(), torch.get_rng_state()), gc.isenabled()
    space, body = dict(globals()), dict(vars(Callees))
    swap(model, EVERY)
    assert [dict(vars(space)) for space in (nn.Module, F, torch, torch.fx.Tracer)] == before
    assert (random.getstate(), threshold) == (dice[0], gc.isenabled())
    assert torch.equal(torch.get_rng_state(), dice[1])
    assert dict(globals()) == space
    assert dict(vars(Callees)) == body


def test_a_module_that_the_users_code_makes_from_its_own_class():
    class Makes(nn.Module):
        def forward(self, x, deep=True):
            y = F.relu(x).relu() + F.relu_(x.clone())
            return y + (type(self)()(x, deep=False) if deep else 0)

    model, x = Makes(), torch.randn(9)
    swapped = swap(model, RELU)
    assert torch.equal(swapped(x), model(x))
    assert {row.calls for row in explain(swapped).layers} == {1}


def test_a_subclass_of_pytorchs_layers():
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(F.pad(x, (1, 0, 1, 0)))

    for mode in ("zeros", "circular"):
        swapped = agrees(Padded(2, 3, 3, padding=1, padding_mode=mode), torch.randn(1, 2, 5, 5))
        assert names(swapped) == [":conv2d_0"]


# Support ------------------------------------------------------------------------------------------------------------------
class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.stride = nn.Parameter(torch.randn(4, 3, 5, 5)), 2

    def forward(self, x):
        y = F.conv2d(x, self.weight * 1, stride=self.stride)
        return F.conv2d(x, self.weight, None, self.stride, groups=1).sum() + y.sum()


def test_what_the_arguments_say_is_known_at_the_swap():
    name = "winograd_f2"
    with pytest.raises(ValueError, match=r":conv2d_1 .*winograd_f2 needs"):
        swap(Strided(), {":conv2d_1": name})
    swap(Strided(), {":conv2d_0": name})  # whose weight is computed
    with pytest.raises(ValueError, match=r":conv2d_0 .*winograd_f2 needs"):
        swap(Strided(), {":conv2d_0": name}, torch.randn(1, 3, 9, 9))


# Runs with example inputs ---------------------------------------------------------------------------------------------------
class Merges(nn.Module):
    """Merges its weights for evaluation, as adapters do."""

    def __init__(self):
        super().__init__()
        self.linear, self.merged, self.more = nn.Linear(4, 4), False, nn.Parameter(torch.ones(4, 4))
        self.seen, self.register = [], self.register_buffer("steps", torch.zeros(()))

    def train(self, mode=True):
        if self.merged == mode:
            with torch.no_grad():
                self.linear.weight += -self.more if mode else self.more
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        self.steps += 1
        self.seen.append(x)
        self.last = x
        self.linear.bias.mul_(0) if x.shape[-1] == 5 else None
        return self.linear(x) if self.merged else self.linear(x) + x @ self.more.T


@pytest.mark.parametrize("mode", [True, False])
def test_a_run_leaves_flags_buffers_and_attributes_as_they_were(mode):
    model, x = Merges().train(mode), torch.randn(2, 4)
    state = copy.deepcopy(model.state_dict())
    swap(model, {"linear": "gemm"}, x, inplace=True)
    with pytest.raises(RuntimeError, match="running the model on the example inputs"):
        swap(model, {"linear": "direct"}, torch.randn(2, 5), inplace=True)
    assert (model.training, model.merged, model.linear.training) == (mode, not mode, mode)
    assert (model.seen, hasattr(model, "last")) == ([], False)
    state["linear.bias"].zero_()  # a parameter that the forward writes to is not put back
    model.linear.bias.data.zero_()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert explain(model).layers[0].used == "gemm"


def test_a_missing_algorithm_is_warned_of_once(recwarn):
    model = swap(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), Keeps()), {"conv2d": "direct", "relu": "direct"})
    for row in (model[0]._ai3, model[1]._ai3):
        row.algorithm, row.reason = ai3_ops.Algorithm("somewhere"), "depthwise needs as many groups as channels"
    other = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        other(torch.randn(1, 1, 3, 3))
    assert len([w for w in recwarn if "somewhere" in str(w.message)]) == 1
    rows = explain(other).layers
    assert all("'somewhere'" in row.reason and "as many groups" in row.reason for row in rows[:2])
    again = pickle.loads(pickle.dumps(other))  # a file read anew warns anew
    again(torch.randn(1, 1, 3, 3))
    assert len([w for w in recwarn if "somewhere" in str(w.message)]) == 2
    ai3_ops.register("conv2d", "somewhere", F.conv2d, replace=True)
    assert "as many groups" in explain(again).layers[0].reason
    assert "'somewhere'" not in explain(again).layers[0].reason
