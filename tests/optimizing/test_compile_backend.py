"""`torch.compile(model, backend="ai3")`."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import torch
from nets import BOUND, agree, exact
from torch import nn

from ai3_ops.explaining.compiled import graphs_of
from ai3_ops.graph.calls import Uncapturable
from ai3_ops.graph.network import difference
from ai3_ops.optimizing import backend, pipeline


def test_backend(residual, compiler):
    model, x = residual
    with open(Path(__file__).parent.parent.parent / "pyproject.toml", "rb") as file:
        entry = tomllib.load(file)["project"]["entry-points"]["torch_dynamo_backends"]["ai3"]
    # What `backend="ai3"` of the installed package is.
    loaded = EntryPoint("ai3", entry, "torch_dynamo_backends").load()
    compiled = torch.compile(model, backend=loaded, options={"budget_seconds": 0.2})
    with torch.no_grad():
        agree(compiled, model, x)
        model.conv1.weight.mul_(0.5)  # is seen
        agree(compiled, model, x)
    compiled(x).sum().backward()  # Inductor's
    assert model.conv1.weight.grad is not None


def test_backend_sees_writes_that_change_no_version(residual, compiler, faster):
    model, x = residual
    compiled = torch.compile(model, backend=backend.ai3, options={"budget_seconds": 0.2})
    with torch.no_grad():
        agree(compiled, model, x)
        for name in ("conv1.weight", "bn1.running_mean"):
            tensor = model.get_submodule(name.partition(".")[0])
            tensor = getattr(tensor, name.partition(".")[2])
            version = tensor._version
            tensor.data.mul_(0.5).add_(0.1)
            assert tensor._version == version
            agree(compiled, model, x)


def test_backend_sees_changes_of_inference_tensors(compiler, faster):
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        x = torch.randn(1, 3, 6, 6)
        compiled = torch.compile(model, backend=backend.ai3, options={"budget_seconds": 0.2})
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model[0].weight.mul_(0.5)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_backend_leaves_views_to_inductor(compiler, faster):
    """What is written to after a graph break is seen in what shares its memory."""
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(1, 3, 6, 6)

    def of_output(x):
        y = torch.relu(conv(x))
        part = y[:, :4]
        torch._dynamo.graph_break()
        part.add_(100)
        return y

    def of_input(x):
        part, y = x[:, :2], conv(x)
        torch._dynamo.graph_break()
        part.add_(100)
        return x, y

    for function in (of_output, of_input):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend.ai3, options={"budget_seconds": 0.1})
        with torch.no_grad():
            torch.testing.assert_close(compiled(x.clone()), function(x.clone()), rtol=1e-4, atol=1e-4)


class Sorts(nn.Module):
    """A layer, and a step that PyTorch computes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.cumsum(self.conv(x), 1) * 2


def test_backend_compiles_the_rest_anew_after_a_change(compiler, faster, monkeypatch):
    """By one of the threads that find the change."""
    model, x = Sorts().eval(), torch.randn(2, 3, 8, 8)
    made = []
    inductor = backend._inductor
    monkeypatch.setattr(backend, "_inductor", lambda *args: made.append(args) or inductor(*args))
    compiled = torch.compile(model, backend=backend.ai3, options={"budget_seconds": 0.2})
    with torch.no_grad():
        agree(compiled, model, x)
        assert len(made) == 1
        model.conv.weight.mul_(0.5)
        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(lambda _: torch.no_grad()(compiled)(x), range(8)))
        assert len(made) == 2
        for output in (*outputs, compiled(x)):
            assert difference(output, exact(model, x)) <= BOUND


def test_backend_leaves_to_inductor_what_no_longer_can_be_captured(residual, compiler, faster, monkeypatch):
    """Once: Inductor's code reads the weights at each call."""
    model, x = residual
    planned, make_plan = [], pipeline.make_plan

    def first_alone(*given, **settings):
        planned.append(given)
        if len(planned) > 1:
            raise Uncapturable("as it is")
        return make_plan(*given, **settings)

    monkeypatch.setattr(backend, "make_plan", first_alone)
    compiled = torch.compile(model, backend=backend.ai3, options={"budget_seconds": 0.2})
    with torch.no_grad():
        agree(compiled, model, x)
        for _ in range(2):
            model.conv1.weight.mul_(0.5)
            agree(compiled, model, x)
    assert len(planned) == 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x).relu()


class Breaks(nn.Module):
    """Layers of one class, each compiled by itself from code that they share."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_backend_plans_once_for_the_weights_of_each_module(compiler, faster, monkeypatch):
    model, x = Breaks().eval(), torch.randn(1, 8, 9, 9)
    planned, make_plan = [], pipeline.make_plan
    monkeypatch.setattr(backend, "make_plan", lambda *a, **k: planned.append(a) or make_plan(*a, **k))
    compiled = torch.compile(model, backend=backend.ai3, options={"budget_seconds": 0.2})
    with torch.no_grad():
        agree(compiled, model, x)
        assert len(planned) == 3
        agree(compiled, model, x)
        assert len(planned) == 3
        model.layers[1].conv.weight.mul_(0.5)
        agree(compiled, model, x)
        agree(compiled, model, x)
        assert len(planned) == 4
    assert len(graphs_of(model)) == 3
