"""Calls from eight Python threads at once give bitwise the same results as one."""

from __future__ import annotations

import gc
import linecache
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tester import ALGORITHMS, PROFILE, each_algorithm, name_of, stands_for_its_like
from torch import nn

import ai3_ops
from ai3_ops import swap
from ai3_ops.checking.calling import has_gradients
from ai3_ops.checking.cases import Call, few_calls, same_bits, search
from ai3_ops.registry import DTYPE_NAMES

THREADS, ROUNDS = 8, 1 if PROFILE == "quick" else 5


def at_once(function, items):
    """function(item) for all items, ROUNDS times, from threads that start together; what they return, in order."""
    start = threading.Barrier(THREADS)

    def work(first):
        start.wait()
        return [(i, function(items[i])) for k in range(ROUNDS * len(items)) for i in [(first + k) % len(items)]]

    with ThreadPoolExecutor(THREADS) as pool:
        return [pair for future in [pool.submit(work, i) for i in range(THREADS)] for pair in future.result()]


def _runs():
    """Each algorithm with two threads of its own; with one in `make test-full`."""
    for info in ALGORITHMS:
        alike = [pytest.mark.full] * (not stands_for_its_like(info))
        for threads, marks in ((1, [pytest.mark.full]), (2, alike)):
            yield pytest.param(info, threads, id=f"{name_of(info)}-{threads}", marks=marks)


@pytest.mark.parametrize(("info", "threads"), [*_runs()])
def test_operators(info, threads):
    """Each on different cases at a time, forward and backward; those that are not deterministic, within their rounding."""
    torch.set_num_threads(threads)
    calls = [c for name in DTYPE_NAMES if name in info.dtypes for c in few_calls(info, 5, name, large=True)]

    def run(call):
        torch.set_num_threads(threads)  # a setting of the thread
        tensors = [t.requires_grad_() if has else t for t, has in zip(call.tensors, has_gradients(call), strict=True)]
        output = call.operator(*tensors)
        output.sum().backward()
        return [output.detach(), *(t.grad for t in tensors if t is not None and t.requires_grad)]

    expected = [run(call) for call in calls]
    for i, results in at_once(run, calls):
        for ours, alone in zip(results, expected[i], strict=True):
            if info.deterministic and not info.vendor:
                assert same_bits(ours, alone), calls[i]
            else:
                torch.testing.assert_close(ours, alone, equal_nan=True)


def layer_for(name):
    """A convolution that the algorithm can do."""
    for kernel, groups in ((3, 1), (5, 1), (3, 8), (1, 1)):
        layer = nn.Conv2d(8, 8, kernel, padding="same", groups=groups)
        if ai3_ops.supports("conv2d", name, torch.empty(1, 8, 12, 13), layer.weight, groups=groups)[0]:
            return layer
    raise AssertionError(f"no case for {name}")


def test_a_swapped_model():
    """The first calls, which pack the weights, come at once as well."""
    infos = [a for a in ALGORITHMS if a.operation == "conv2d" and a.device == "cpu"]  # not what other tests registered
    layers = {a.name: layer_for(a.name) for a in infos if a.deterministic}
    model = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers.values())).eval()
    x = [torch.randn(1 + i % 3, 8, 12 + i, 13) for i in range(6)]
    choices = {f"{i}.0": name for i, name in enumerate(layers)}
    with torch.inference_mode():
        alone = ai3_ops.swap(model, choices, x[0])
        expected = [alone(t) for t in x]
        for _ in range(3):
            swapped = ai3_ops.swap(model, choices, x[0])
            for i, y in at_once(torch.inference_mode()(swapped), x):
                assert same_bits(y, expected[i])


def test_swaps_beside_calls():
    """Nothing that a swap does is seen by another thread's calls or swaps."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("scale", torch.ones(4, 1, 1))

        def forward(self, x):
            return torch.relu(self.conv(x) * self.scale)

    net = nn.Sequential(Block(), Block())
    net[1].conv = nn.Conv2d(4, 4, 3)
    x, stop, call, attribute = torch.rand(1, 3, 9, 9), threading.Event(), nn.Module.__call__, nn.Module.__getattr__
    expected = net(x).detach()

    def serve():
        calls = 0
        while not stop.is_set() or calls == 0:
            torch.testing.assert_close(net(x), expected)
            calls += 1

    with ThreadPoolExecutor(6) as pool:
        served = [pool.submit(serve) for _ in range(2)]
        swapped = [pool.submit(ai3_ops.swap, net, {"conv2d": "direct", "relu": "direct"}) for _ in range(12)]
        try:
            for future in swapped:
                assert not ai3_ops.explain(future.result()).unreached
                torch.testing.assert_close(future.result()(x), expected)
        finally:
            stop.set()
        for future in served:
            future.result()
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is attribute
    assert "__getattribute__" not in vars(nn.Module)


def test_plans_of_many_shapes():
    """A rule has a plan for each shape; threads make them at the same time."""
    swapped = ai3_ops.swap(nn.Conv2d(3, 4, 3), "default")
    images = [torch.rand(1, 3, 5 + i // 20, 5 + i % 20) for i in range(300)]
    with torch.no_grad():
        expected = [swapped(x) for x in images]

    def call(item):
        with torch.no_grad():
            return swapped(item[0]), item[1]

    for _, (y, wanted) in at_once(call, list(zip(images, expected, strict=True))):
        assert same_bits(y, wanted)


@each_algorithm
def test_many_threads_compute_what_one_does(info):
    """More than the machine has cores, and no power of two."""
    if info.device != "cpu" or info.vendor or not info.deterministic:
        pytest.skip("sums in an order of the device's or the vendor's")
    calls = few_calls(info, 3, "float32" if "float32" in info.dtypes else None, large=True)
    calls += [Call(info, case, torch.float32) for case in search(info, "float32").realistic[:1]]
    for call in calls:
        torch.set_num_threads(1)
        one = call.run()
        for threads in (4, 7, 16):
            torch.set_num_threads(threads)
            assert same_bits(call.run(), one), f"{call} with {threads} threads"


class Computed(torch.utils.data.Dataset):
    """What a swapped model makes of each index."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.inference_mode():
            return self.model(torch.full((1, 16, 20, 20), float(index)))


def test_forked_workers_of_a_loader_run_a_swapped_model():
    """Also after the parent's threads have: a child has none of them, nor what they hold locked."""
    torch.set_num_threads(2)
    model = swap(nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval(), {"conv2d": "winograd_f4"})
    data = Computed(model)
    expected = [data[i] for i in range(len(data))]
    options = {"batch_size": None, "num_workers": 2, "timeout": 120}
    found = list(torch.utils.data.DataLoader(data, multiprocessing_context="fork", **options))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_swaps_leave_no_memory_behind(count):
    """Classes, generated code, packs and what is remembered of calls go with their models."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return torch.relu(self.conv(x))

    model, x = Net().eval(), torch.randn(1, 8, 12, 12)

    def swaps(count):
        for _ in range(count):
            with torch.no_grad():
                swap(model, {"conv2d": "winograd_f4", "relu": "direct"}, x)(x)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects()), len(linecache.cache)

    swaps(100)
    for _ in range(3):  # pages come in larger pieces now and then; what is left behind, each time
        before = swaps(50)
        after = swaps(count)
        grown = [b - a for a, b in zip(before, after, strict=True)]
        if grown[0] < count << 13:
            break
    else:
        pytest.fail(f"{grown[0] / count:.0f} bytes a swap")
    assert grown[1] < count / 2
    assert grown[2] <= 2


def test_many_threads_pack_an_empty_weight():
    torch.set_num_threads(4)
    packed = torch.ops.ai3._linear_gemm_bf16_pack(torch.randn(0, 512))
    assert packed.numel() < 1024
