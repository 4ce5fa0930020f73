"""What follows from sizes alone is computed once for each of them, and is nobody else's to write to."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ai3_ops._torch import FakeTensorMode
from ai3_ops.graph import steps
from ai3_ops.programs import sized
from ai3_ops.programs.body import Body

aten = torch.ops.aten
KWARGS = {"device": torch.device("cpu"), "pin_memory": False}


def body(*ends, held=None, write=None):
    """Of x: what `ends` give of the graph, x, its first size and an arange of it; a body that returns each of these."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    rows = graph.call_function(aten.arange.default, (size,), KWARGS)
    made = tuple(end(graph.call_function, graph.get_attr, x, size, rows) for end in ends)
    if write is not None:
        graph.call_function(write, (x, 0.5))
    graph.output(made)
    return Body(held or {}, graph)


def added(call, get, x, size, rows):
    return call(aten.add.Tensor, (x, call(aten.unsqueeze.default, (rows, 1))))


def calls(module, *given):
    """The operators that a call makes."""
    with torch.autograd.profiler.profile() as profile:
        module(*given)
    return [event.name for event in profile.function_events]


def test_once_for_each_size():
    module, x = body(added), torch.randn(3, 2)
    assert "aten::arange" in calls(module, x)
    for given in (x, torch.randn(3, 2)):
        made = calls(module, given)
        assert "aten::arange" not in made
        assert "aten::add" in made
        assert torch.equal(module(given)[0], given + torch.arange(3)[:, None])
    other = torch.randn(5, 2)
    assert "aten::arange" in calls(module, other)
    assert torch.equal(module(other)[0], other + torch.arange(5)[:, None])
    assert "aten::arange" not in calls(module, x)


def test_those_used_last_are_kept():
    module = body(added)
    for rows in range(1, sized.CACHED + 1):
        module(torch.ones(rows, 2))
    assert "aten::arange" not in calls(module, torch.ones(1, 2))
    module(torch.ones(sized.CACHED + 1, 2))  # 2 goes
    assert "aten::arange" not in calls(module, torch.ones(1, 2))
    assert "aten::arange" in calls(module, torch.ones(2, 2))


def test_large_ones_are_not_kept(monkeypatch):
    module, x = body(added), torch.ones(3, 2)
    monkeypatch.setattr(sized, "LARGEST", 8)
    for _ in range(2):
        assert "aten::arange" in calls(module, x)
        assert torch.equal(module(x)[0], x + torch.arange(3)[:, None])


def test_values_of_inputs_are_read_in_each_call():
    """A mask of lengths: what it compares with is kept, the comparison is not."""
    module = body(lambda call, get, x, size, rows: call(aten.lt.Tensor, (rows, x)))
    for x in (torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0, 3.0, 0.0])):
        assert torch.equal(module(x)[0], torch.arange(3) < x)


def test_what_is_returned_can_be_written_to():
    def itself(call, get, x, size, rows):
        return rows

    def view(call, get, x, size, rows):
        return call(aten.unsqueeze.default, (rows, 1))

    def undeclared(call, get, x, size, rows):  # a view of which the operator's schema says nothing
        return call(aten.type_as.default, (rows, rows))

    def of_a_step(call, get, x, size, rows):
        return call(steps.permute, (call(steps.reshape, (rows, (1, -1))), (1, 0)))

    def number(call, get, x, size, rows):
        return size

    module, x = body(itself, view, undeclared, of_a_step, number), torch.randn(4, 2)
    for _ in range(3):
        *made, four = module(x)
        assert four == 4
        for value in made:
            assert torch.equal(value.flatten(), torch.arange(4))
            value.fill_(-1)


@pytest.mark.parametrize("how", ["random", "memory", "written"])
def test_what_is_no_function_of_sizes(how):
    def random(call, get, x, size, rows):
        return call(aten.rand.default, ([size],), KWARGS)

    def memory(call, get, x, size, rows):
        return call(aten.zeros_like.default, (call(aten.empty.memory_format, ([size],), KWARGS),))

    end = {"random": random, "memory": memory, "written": added}[how]
    module = body(end, write=aten.mul_.Scalar if how == "written" else None)
    found = [node.target for node in sized.by_sizes(module.graph)]
    assert found == ([] if how == "written" else [aten.sym_size.int, aten.arange.default])
    if how != "written":
        assert module(torch.ones(9))[0].shape == (9,)
    if how == "random":
        assert not torch.equal(module(torch.ones(9))[0], module(torch.ones(9))[0])


def test_sizes_of_what_is_computed_with_it():
    """A second mask that follows from the size of a value behind the first: no circle."""

    def chain(call, get, x, size, rows):
        sum_ = added(call, get, x, size, rows)
        more = call(aten.arange.default, (call(aten.sym_size.int, (sum_, 1)),), KWARGS)
        return call(aten.add.Tensor, (sum_, more))

    module = body(chain)
    for _ in range(2):
        x = torch.randn(3, 2)
        assert torch.equal(module(x)[0], x + torch.arange(3)[:, None] + torch.arange(2))


def test_constants_and_sizes_of_values():
    def table(call, get, x, size, rows):
        sum_ = call(aten.add.Tensor, (x, 1))
        return call(aten.mul.Tensor, (call(steps.expand, (get("table"), (0, -1), sum_)), 2))

    module = body(lambda *a: a[0](aten.add.Tensor, (a[2], table(*a))), held={"table": torch.arange(2.0)[None]})
    assert aten.mul.Tensor in [node.target for node in sized.by_sizes(module.graph)]
    for rows in (3, 4, 3):
        x = torch.randn(rows, 2)
        assert torch.equal(module(x)[0], x + 2 * torch.arange(2.0))


def test_copies_threads_and_modes():
    module = body(added)
    with torch.inference_mode():
        module(torch.ones(2, 2))
    weight = torch.ones(2, 2, requires_grad=True)
    module(weight)[0].sum().backward()  # reads what was made in another mode
    assert torch.equal(weight.grad, torch.ones(2, 2))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(torch.ones(3, 1))[0], torch.tensor([[1.0], [2.0], [3.0]]))
    given = [torch.randn(1 + i % 12, 2) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        for x, (y,) in zip(given, pool.map(module, given), strict=True):
            assert torch.equal(y, x + torch.arange(len(x))[:, None])


def test_traces_hold_the_whole_graph():
    module, x = body(added), torch.ones(3, 2)
    module(x)
    batch = {"x": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(module, (x,), dynamic_shapes=batch).module()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    made = make_fx(module, tracing_mode="symbolic")(x)
    for traced in (exported, compiled, made):
        y = torch.randn(5, 2)
        assert torch.equal(traced(y)[0], y + torch.arange(5)[:, None])
    with FakeTensorMode() as fake:
        assert module(fake.from_tensor(torch.ones(5, 2)))[0].shape == (5, 2)
    assert torch.equal(module(x)[0], x + torch.arange(3)[:, None])
