"""Changes of an optimized module: seen by calls from several threads, after torch.export, and in another process."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import ai3_ops


@pytest.fixture
def layers():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)], nn.Linear(16, 16)).eval()
    x = torch.randn(2, 16)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    assert fast.changed
    return fast, x


def from_threads(call, times=300):
    """What a call gives in each of so many from three threads, which change places as often as they can."""
    found, before = [], sys.getswitchinterval()

    def run():
        with torch.no_grad():
            found.extend(call() for _ in range(times))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == 3 * times
    return found


@pytest.mark.filterwarnings("ignore:ai3_ops.optimize")
def test_every_thread_sees_a_replaced_weight(layers):
    fast, x = layers
    last = fast.get_submodule("12")
    weight, last.weight = last.weight, nn.Parameter(torch.zeros(16, 16))
    assert all(from_threads(lambda: torch.equal(fast(x), last.bias.expand(2, -1))))
    last.weight = weight
    with torch.no_grad():
        expected = fast(x)
    assert all(from_threads(lambda: torch.equal(fast(x), expected), 30))


@pytest.mark.filterwarnings("ignore:ai3_ops.optimize")
def test_every_thread_calls_a_hook_that_came_later(layers):
    fast, x = layers
    own = threading.local()

    def hook(*_):
        own.called += 1

    def call():
        own.called = 0
        fast(x)
        return own.called == 1

    handle = fast.get_submodule("12").register_forward_hook(hook)
    assert all(from_threads(call))
    handle.remove()
    assert not any(from_threads(call, 10))


@pytest.mark.filterwarnings("ignore:ai3_ops.optimize")
@pytest.mark.parametrize("strict", [False, True])
def test_after_an_export(layers, strict):
    """torch.export writes copies of a module's lists and dictionaries back to it."""
    fast, x = layers
    torch.export.export(fast, (x,), strict=strict)
    torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(x), fast(x))
    with torch.no_grad():
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fast):
            expected, last, called = other(x), other.get_submodule("12"), []
            handle = last.register_forward_hook(lambda *_, called=called: called.append(1))
            other(x)
            assert called == [1]
            handle.remove()
            weight, last.weight = last.weight, nn.Parameter(torch.zeros(16, 16))
            assert torch.equal(other(x), last.bias.expand(2, -1))
            last.weight = weight
            assert torch.equal(other(x), expected)


class FindsOut(nn.Module):
    """Its class keeps what it found out, as transformers' do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if not hasattr(type(self), "_can_double"):
            type(self)._can_double = True
        return self.linear(x) * (2 if self._can_double else 1)


def test_what_a_class_found_out_in_another_process(monkeypatch):
    monkeypatch.setattr(FindsOut, "_can_double", True, raising=False)
    model, x = FindsOut().eval(), torch.randn(2, 16)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    stored = pickle.dumps(fast)
    del FindsOut._can_double  # as in a process that has found out nothing
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(stored)
        assert torch.equal(again(x), fast(x))
    assert not hasattr(FindsOut, "_can_double")  # the original would have found out
    FindsOut._can_double = False
    with torch.no_grad(), pytest.warns(UserWarning, match="_can_double.*was changed"):
        assert torch.equal(again(x), model(x))
