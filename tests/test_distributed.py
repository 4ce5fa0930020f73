"""Swapped models in wrappers for several processes: swap before or after, the gradients are those of the plain model."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ai3_ops
from ai3_ops import explain, swap, unswap

CHOSEN = {"conv2d": "direct", "linear": "gemm"}
X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With a functional call, and a layer that is a group of its own where it is sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 6, 3), nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.second(x).flatten(2).mean(2))


class Products(nn.Module):
    """A layer, and a call site in a module inside of the one that is sharded; `default` would take both."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512))

        def forward(self, x):
            return F.linear(x, self.weight)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.own = nn.Linear(512, 512), self.Own()

    def forward(self, x):
        return self.own(self.layer(x))


def sharded(model):
    if isinstance(model, Net):
        fully_shard(model.second)
    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def of_plain(name):
    return name.removeprefix("module.").removeprefix("_fsdp_wrapped_module.")


def gradients(model, x):
    model.train().zero_grad()
    model(x).square().sum().backward()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {of_plain(n): p.grad.clone() for n, p in model.named_parameters()}
    return {of_plain(n): whole(p.grad) for n, p in model.named_parameters()}


def fsdp1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


WAYS = {
    "swap, then DDP": lambda x: DistributedDataParallel(swap(Net(), CHOSEN)),
    "DDP, then swap": lambda x: swap(DistributedDataParallel(Net()), CHOSEN),
    "DDP with views, then swap": lambda x: swap(
        DistributedDataParallel(Net(), gradient_as_bucket_view=True), CHOSEN, x
    ),
    "DDP, then swap in place": lambda x: swap(DistributedDataParallel(Net()), CHOSEN, x, inplace=True),
    "swap, then fully_shard": lambda x: sharded(swap(Net(), CHOSEN)),
    "swap with examples, then fully_shard": lambda x: sharded(swap(Net(), CHOSEN, x)),
    "fully_shard, then swap": lambda x: swap(sharded(Net()), CHOSEN, inplace=True),
    "fully_shard, then swap with examples": lambda x: swap(sharded(Net()), CHOSEN, x, inplace=True),
    "swap, then FSDP1": lambda x: fsdp1(swap(Net(), CHOSEN)),
    "FSDP1, then swap": lambda x: swap(fsdp1(Net()), CHOSEN, inplace=True),
}


def worker(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    x = X[2 * rank : 2 * rank + 2]
    expected = gradients(DistributedDataParallel(Net()), x)
    found = {}
    for way, make in WAYS.items():
        model = make(x)
        grads = gradients(model, x)
        off = max(((grads[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items())
        rows = explain(model).filter(operation="conv2d").layers + explain(model).filter(operation="linear").layers
        used = [(row.used, row.calls, row.torch_calls) for row in rows]
        found[way] = {"off": off, "used": used, "unswapped": None}
        if "DDP" not in way:
            grads = gradients(unswap(model), x)
            found[way]["unswapped"] = max(
                ((grads[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()
            )
    found["weights that are gathered anew"] = gathered_anew(x)
    found["packs"] = [packs(order, algorithm, x) for order in ORDERS for algorithm in ("gemm", "default")]
    found["a checkpoint"] = checkpoint(f"{folder}/checkpoint")
    try:
        swap(sharded(Net()), CHOSEN)
    except RuntimeError as error:
        found["a copy"] = str(error)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    distributed.destroy_process_group()


def gathered_anew(x):
    """Between two calls one element changes, which no sample of elements has to show."""
    model, plain = sharded(swap(Net(), CHOSEN, x)).eval(), Net().eval()
    worst = 0.0
    with torch.no_grad():
        for element in range(7, 60, 9):
            model(x)
            local = model.second.weight.to_local()
            local.flatten()[element] += 5
            plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
            worst = max(worst, (model(x) - plain(x)).abs().max().item())
            model.reshard()
    return worst


ORDERS = {
    "swap first": lambda a, x: sharded(swap(Products(), {"linear": a}, x)),
    "fully_shard first": lambda a, x: swap(sharded(Products()), {"linear": a}, x, inplace=True),
}


def packs(order, algorithm, x):
    """What is kept of weights that are gathered anew, what explain says about it, and the largest error after changes."""
    x = x.new_ones(2, 512)
    model, plain = ORDERS[order](algorithm, x).eval(), Products().eval()
    worst = 0.0
    with torch.no_grad():
        for element in range(7, 60000, 9001):
            model(x)
            model.reshard()  # which the root leaves to its next call
            model.own.weight.to_local().flatten()[element] += 500
            plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
            expected = plain(x)
            worst = max(worst, ((model(x) - expected).abs().max() / expected.abs().max()).item())
            model.reshard()
    calls = [model.layer._ai3, *model.own._ai3.calls.values()] if algorithm == "gemm" else []
    rows = [(a.used, a.packs, a.calls == a.torch_calls, a.reason) for a in explain(model).layers]
    return {"case": (order, algorithm), "off": worst, "held": [c.held_bytes() for c in calls], "rows": rows}


def checkpoint(folder):
    model, plain = sharded(swap(Net(), CHOSEN)), Net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state)
    return all(torch.equal(p, 2 * q) for p, q in zip(plain.parameters(), Net().parameters(), strict=True))


# Forks of a process that has imported what both need.
RANKS = """
import sys
from test_distributed import worker
from torch.multiprocessing import start_processes
start_processes(worker, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="session")
def results(once, fork, tmp_path_factory):
    def compute(path):
        folder = tmp_path_factory.mktemp("group")
        places = [Path(__file__).parent, Path(ai3_ops.__file__).parents[1]]
        done = fork(RANKS, folder, PYTHONPATH=os.pathsep.join(map(str, places)))
        assert done.returncode == 0, done.stderr
        path.write_text(json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]))

    return json.loads(once("distributed_results", compute).read_text())


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_both_orders_on_both_ranks(way, results):
    for result in results:
        assert result[way]["off"] < 1e-4
        assert result[way]["used"] == [["direct", 1, 0], ["direct", 1, 0], ["gemm", 1, 0]]
        assert (result[way]["unswapped"] or 0) < 1e-4


def test_what_fully_shard_gathers_is_packed_anew(results):
    for result in results:
        assert result["weights that are gathered anew"] < 1e-4


def test_weights_that_fully_shard_gathers_are_never_kept_packed(results):
    for result in results:
        for found in result["packs"]:
            assert found["off"] < 1e-4, found["case"]
            assert not any(found["held"])
            assert len(found["rows"]) == 2
            for used, state, left, reason in found["rows"]:
                if found["case"][1] == "gemm":
                    assert (used, state, left) == ("gemm", "each call", False)
                    assert "is gathered by FSDP at every call, and packed each time" in reason
                else:
                    assert left in (True, None) or used == "torch"
                    assert "is gathered by FSDP at every call, and PyTorch is faster" in reason


def test_a_sharded_checkpoint_fits_the_plain_model(results):
    assert [result["a checkpoint"] for result in results] == [True, True]


def test_what_cannot_be_copied_is_swapped_in_place(results):
    assert all("inplace=True swaps it as it stands" in result["a copy"] for result in results)


def test_weights_that_share_their_memory_keep_their_strides():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).eval()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    with torch.no_grad():
        start = 0
        for p in model.parameters():
            p.data = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
    swapped = swap(model, "direct", inplace=True)
    assert all(p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for p in swapped.parameters())
    with torch.no_grad():
        assert swapped(X).is_contiguous(memory_format=torch.channels_last)
        expected = unswap(ai3_ops.swap(model, "direct"))(X)
        torch.testing.assert_close(swapped(X), expected, rtol=1e-4, atol=1e-4)
        flat.mul_(2)
        torch.testing.assert_close(swapped(X), unswap(model)(X), rtol=1e-4, atol=1e-4)


def test_data_parallel():
    model = swap(DataParallel(Net()), CHOSEN)
    expected = gradients(DataParallel(Net()), X)
    for name, grad in gradients(model, X).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-4)
