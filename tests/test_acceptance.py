"""Whatever one does with a model, the swapped model gives what the unswapped one gives, or fails as that one fails.

Rows are what is done, columns are models: a classifier, a segmentation and a detection network of torchvision, with fewer
blocks, and one made to be difficult. All in float64, so that detection's thresholds and sorting decide alike.
"""

import copy
import io
import json
import os
import pickle
import socket
import warnings

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint
from torchvision.models import mobilenetv3
from torchvision.models.resnet import BasicBlock

import ai3_ops
from ai3_ops import explain, swap, unswap

EVERY = {
    "conv2d": "direct", "linear": "gemm", "max_pool2d": "direct", "avg_pool2d": "direct",
    "adaptive_avg_pool2d": "direct", "relu": "direct", "flatten": "direct",
}  # fmt: skip


class Standardized(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias, self.stride, self.padding)


class Stem(nn.Module):
    """Optional arguments, a buffer, in-place and functional calls, two inputs to a child, dict and tuple outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, (2, 4), padding="same")
        self.register_buffer("steps", torch.zeros(()))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x, scale=None, *, power=1):
        self.steps.add_(1)
        x = self.conv(x)
        if scale is not None:
            x = x * scale
        x = F.relu(x, inplace=True) ** power
        return {"a": F.max_pool2d(x, 2, ceil_mode=True), "b": (F.avg_pool2d(x, 3, 2, 1), self.relu(x - 1).sum())}


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return F.relu(self.conv(x)) if x.mean() > 0 else F.relu(-x)


class Nasty(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.twice = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", groups=2)
        self.again = self.twice
        self.normed = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
        self.branching = Branching()
        self.subclass = Standardized(8, 8, 3, padding=1)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d((2, None)), nn.Flatten(), nn.LazyLinear(4))
        self.plain = [1, 2]
        with torch.no_grad():
            self.eval()(torch.zeros(1, 3, 12, 12))
            self.train()
            self.stem.steps.zero_()

    def forward(self, x):
        out = self.stem(x) if self.training else self.stem(x, scale=2.0)
        y = self.again(torch.relu(self.twice(out["a"]))) + self.normed(out["b"][0])
        y = self.subclass(self.branching(y))
        y = y + self.attention(y.flatten(2).mT).mT.reshape(y.shape)
        return {"out": self.head(y), "side": [out["b"][1]]}


def shorter(make, **options):
    """One with MobileNetV3, of whose fifteen blocks seven are left: every kind, and every one that halves the image."""
    configuration = mobilenetv3._mobilenet_v3_conf

    def few(*args, **kwargs):
        blocks, last = configuration(*args, **kwargs)
        return [blocks[i] for i in (0, 1, 2, 3, 6, 10, 12)], last

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mobilenetv3, "_mobilenet_v3_conf", few)
        return make(weights=None, weights_backbone=None, num_classes=3, **options)


BUILD = {
    "classifier": lambda: torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10),
    "segmentation": lambda: shorter(torchvision.models.segmentation.lraspp_mobilenet_v3_large),
    "detection": lambda: shorter(
        torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn, min_size=64, max_size=64,
        rpn_pre_nms_top_n_test=20, rpn_post_nms_top_n_test=8, box_detections_per_img=4,
    ),
    "nasty": Nasty,
}  # fmt: skip
SIZE = {"classifier": 32, "segmentation": 64, "detection": 64, "nasty": 12}
_built: dict[str, nn.Module] = {}


def build(kind):
    if kind not in _built or kind == "nasty":  # PyTorch shares the class of a parametrized module with its copies
        torch.manual_seed(0)
        _built[kind] = BUILD[kind]().double().eval()
    return copy.deepcopy(_built[kind]) if kind != "nasty" else _built[kind]


def images(kind, device="cpu"):
    x = torch.rand(2, 3, SIZE[kind], SIZE[kind], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.to(device)


def inputs(kind, device="cpu"):
    x = images(kind, device)
    return (list(x),) if kind == "detection" else (x,)


def training_inputs(kind):
    if kind != "detection":
        return inputs(kind)
    boxes = torch.tensor([[5.0, 5.0, 30.0, 40.0]], dtype=torch.float64)
    return *inputs(kind), [{"boxes": boxes, "labels": torch.tensor([i + 1])} for i in range(2)]


def total(output):
    return sum(t.square().mean() for t in tree_flatten(output)[0] if t.is_floating_point())


def gradients(model, kind, call=None):
    """Loss and gradients of one training step."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = total((call or model)(*training_inputs(kind)))
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run(model, kind):
    torch.manual_seed(2)
    with torch.no_grad():
        return model(*inputs(kind))


def close(actual, expected, tolerance=1e-9):
    (a, tree_a), (b, tree_b) = tree_flatten(actual), tree_flatten(expected)
    assert tree_a == tree_b
    for x, y in zip(a, b, strict=True):
        if isinstance(y, torch.Tensor):
            scale = max(1.0, y.abs().max().item()) if y.numel() and y.is_floating_point() else 1.0
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance * scale)
        else:
            assert x == y


def assert_fails_alike(error, swapped):
    """The function fails with the same kind of error, for the reason that its first line gives."""
    with pytest.raises(type(error)) as raised:
        swapped()
    assert str(raised.value).partition("\n")[0] == str(error).partition("\n")[0]


def same(swapped, original, tolerance=1e-9):
    """Two functions give the same, or fail alike."""
    try:
        expected = original()
    except Exception as error:
        assert_fails_alike(error, swapped)
        return False
    close(swapped(), expected, tolerance)
    return True


def used(model):
    return [row for row in explain(model).layers if row.used != "torch"]


@pytest.fixture(params=BUILD)
def kind(request):
    return request.param


# Where what is tested is slow in large networks, and no different.
quick_kinds = pytest.mark.parametrize(
    "kind", [k if k in ("classifier", "nasty") else pytest.param(k, marks=pytest.mark.full) for k in BUILD]
)


@pytest.fixture
def pair(kind):
    model = build(kind)
    swapped = swap(model, EVERY)
    assert len(used(swapped)) > 10
    return model, swapped


def test_forward_with_and_without_example_inputs(kind, pair):
    model, swapped = pair
    close(run(swapped, kind), run(model, kind))
    watched = swap(model, EVERY, inputs(kind))
    close(run(watched, kind), run(model, kind))
    assert sum(row.calls for row in used(watched)) >= 10
    assert not any(row.torch_calls for row in explain(watched).layers)
    close(run(unswap(swapped), kind), run(model, kind))
    assert len(list(swapped.modules())) == len(list(model.modules()))
    for (name, ours), theirs in zip(swapped.named_modules(), model.modules(), strict=True):
        if parametrize.is_parametrized(theirs):  # a class of its own for each
            ours, theirs = (type(m).__mro__[1] for m in (ours, theirs))
            assert ours is theirs, name
        else:
            assert type(ours) is type(theirs), name


def test_state_dict_both_ways(kind, pair):
    model, swapped = pair
    a, b = model.state_dict(), swapped.state_dict()
    assert list(a) == list(b)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in swapped.named_modules()]
    changed = {k: v + 0.01 if v.is_floating_point() else v for k, v in a.items()}
    swapped.load_state_dict(changed)
    with torch.no_grad():
        run(swapped, kind)
    model.load_state_dict(swapped.state_dict())
    close(run(swapped, kind), run(model, kind))


def test_an_original_checkpoint_loads(kind, pair):
    model, swapped = pair
    buffer = io.BytesIO()
    torch.save(build(kind).state_dict(), buffer)
    buffer.seek(0)
    for p in swapped.parameters():
        p.data.zero_()
    swapped.load_state_dict(torch.load(buffer, weights_only=True))
    close(run(swapped, kind), run(model, kind))


def test_hooks_fire_once(kind):
    def fired(model):
        seen = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, n=name: seen.append(("pre", n)))
            module.register_forward_hook(lambda m, a, o, n=name: seen.append(("post", n)))
        output = run(model, kind)
        return list(seen), output

    model = build(kind)
    expected, output = fired(model)
    seen, actual = fired(swap(build(kind), EVERY))
    assert seen == expected
    close(actual, output)
    seen, _ = fired(swap(model, EVERY, inputs(kind)))  # hooks of the original survive the copy
    assert len(seen) == len(expected)


def test_deepcopy(kind, pair):
    model, swapped = pair
    other = copy.deepcopy(swapped)
    assert [row.used for row in explain(other).layers] == [row.used for row in explain(swapped).layers]
    for p in swapped.parameters():
        p.data.zero_()
    close(run(other, kind), run(model, kind))


def round_trips():
    yield "pickle", lambda m: pickle.loads(pickle.dumps(m))

    def save(model):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    yield "torch.save", save


@pytest.mark.parametrize("trip", [pytest.param(f, id=n) for n, f in round_trips()])
def test_pickle_and_torch_save(kind, pair, trip):
    model, swapped = pair
    if kind == "nasty":  # a parametrization cannot be pickled, by PyTorch's decision
        assert not same(lambda: trip(swapped), lambda: trip(model))
        for m in pair:
            parametrize.remove_parametrizations(m.normed, "weight")
    other = trip(swapped)
    close(run(other, kind), run(model, kind))
    assert [row.used for row in explain(other).layers] == [row.used for row in explain(swapped).layers]
    close(run(unswap(other), kind), run(model, kind))


def test_training_and_evaluation(kind, pair):
    model, swapped = pair
    for m in pair:
        m.train()
    close(gradients(swapped, kind), gradients(model, kind))
    close(swapped.state_dict(), model.state_dict())  # running statistics
    for m in pair:
        torch.optim.SGD(m.parameters(), 1e-3).step()
        m.eval()
    close(run(swapped, kind), run(model, kind), 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_to_another_dtype(kind, pair, dtype):
    def call(model):
        model = model.to(dtype)
        with torch.no_grad():  # detection's sorting is not stable in few digits: its features are
            return model.backbone(images(kind).to(dtype)) if kind == "detection" else model(images(kind).to(dtype))

    model, swapped = pair
    assert same(lambda: call(swapped), lambda: call(model), 5e-4 if dtype == torch.float32 else 0.2)
    assert not any(row.torch_calls for row in explain(swapped).layers)


def test_meta_device(kind):
    model = build(kind).to("meta")
    swapped = swap(model, EVERY)

    def shapes(m):
        return tree_map(lambda t: (t.shape, t.dtype, t.device), m(*inputs(kind, "meta")))

    works = same(lambda: shapes(swapped), lambda: shapes(model))
    assert works == (kind not in ("detection", "nasty"))  # which PyTorch cannot either
    assert all(p.device.type == "meta" for p in swapped.parameters())
    filled = swapped.to_empty(device="cpu")
    filled.load_state_dict(build(kind).state_dict())
    for m, n in zip(filled.modules(), build(kind).modules(), strict=True):
        for key, buffer in n.named_buffers(recurse=False):  # those that no checkpoint has
            m._buffers[key] = buffer.clone()
    if kind != "detection":  # whose anchors are plain attributes
        close(run(filled, kind), run(build(kind), kind))


@quick_kinds
@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=lambda f: f.__name__
)
def test_parametrizations(kind, norm):
    def normed(model):
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and not parametrize.is_parametrized(m)]
        torch.manual_seed(3)
        norm(convs[1])
        return convs[1], model.double().eval()

    conv, model = normed(build(kind))
    before = swap(model, EVERY)
    conv_after, after = normed(swap(build(kind), EVERY))
    for swapped in (before, after, copy.deepcopy(before), copy.deepcopy(after)):
        assert list(swapped.state_dict()) == list(model.state_dict())
        close(run(swapped, kind), run(model, kind))
    assert isinstance(conv_after, ai3_ops.nn.Conv2d)
    close(gradients(before, kind), gradients(model, kind)) if kind != "detection" else None
    for module in (conv, conv_after):
        parametrize.remove_parametrizations(module, "weight")
    close(run(after, kind), run(model, kind))


def test_a_module_in_two_places(kind):
    def shared(model):
        seen = {}
        for name, module in list(model.named_modules()):
            if type(module) is nn.Conv2d and name:
                twin = seen.setdefault((repr(module), module.weight.shape), module)
                if twin is not module:
                    parent, _, attribute = name.rpartition(".")
                    setattr(model.get_submodule(parent), attribute, twin)
                    return model, name, twin
        model.extra = nn.ModuleList([model.twice])
        return model, "again", model.twice

    model, name, _ = shared(build(kind))
    swapped = swap(model, EVERY)
    first = next(n for n, m in swapped.named_modules(remove_duplicate=False) if m is swapped.get_submodule(name))
    assert first != name
    assert swapped.get_submodule(first) is swapped.get_submodule(name)
    close(run(swapped, kind), run(model, kind))
    calls = {row.name: row.calls for row in explain(swapped).layers}
    assert calls[first] >= 2
    assert name not in calls
    assert len(used(swap(model, {name: "direct"}))) == 1


class Wrapper(nn.Module):
    """A user's module: a functional call before the model, an optional argument, control flow or checkpointing."""

    def __init__(self, kind, how="plain"):
        super().__init__()
        self.kind, self.how = kind, how
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3, generator=torch.Generator().manual_seed(4)).double() / 5)
        self.model = build(kind)

    def forward(self, x, *rest, scale=None):
        x = F.conv2d(x, self.weight, padding=1).sigmoid()
        if scale is not None:
            x = x * scale
        if self.how == "branch" and x.mean() > 0.5:
            x = torch.relu(x - 0.1)
        arguments = ([x[0], x[1]], *rest) if self.kind == "detection" else (x,)
        if self.how == "checkpoint":
            return checkpoint(self.model, *arguments, use_reentrant=False)
        return self.model(*arguments)


def test_a_functional_call_inside_a_users_module(kind):
    model = Wrapper(kind).eval()
    swapped = swap(model, EVERY)
    with torch.no_grad():
        close(swapped(images(kind)), model(images(kind)))
    rows = {row.name: row for row in explain(swapped).layers}
    assert (rows[":conv2d_0"].used, rows[":conv2d_0"].calls) == ("direct", 1)


def test_optional_arguments_given_and_not(kind):
    model = Wrapper(kind).eval()
    swapped = swap(model, EVERY)
    with torch.no_grad():
        for options in ({}, {"scale": 0.5}, {"scale": None}):
            close(swapped(images(kind), **options), model(images(kind), **options))
    row = next(row for row in explain(swapped).layers if row.name == ":conv2d_0")
    assert (row.calls, row.reason) == (3, "")


def test_control_flow(kind):
    model = Wrapper(kind, "branch").eval()
    swapped = swap(model, EVERY)
    with torch.no_grad():
        for x in (images(kind), -images(kind)):
            close(swapped(x), model(x))
    calls = {row.name: row.calls for row in explain(swapped).layers if row.name.startswith(":")}
    assert calls[":conv2d_0"] == 2
    assert ":relu_0" in calls
    assert len(used(swapped)) > 10


@quick_kinds
def test_activation_checkpointing(kind):
    def step(model, wrapper):
        def call(*arguments):
            return wrapper(images(kind), *arguments[1:])

        return gradients(model, kind, call)

    model = Wrapper(kind, "checkpoint")
    swapped = swap(model, EVERY)
    for m in (model, swapped):
        m.train()
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    # Batch norms of a few pixels magnify how sums round, which channels_last changes.
    close(step(swapped, swapped), step(model, model), 1e-8)
    assert sum(row.calls for row in used(swapped)) > 0


def test_functional_call(kind, pair):
    model, swapped = pair
    others = {name: p * 1.05 for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, others, inputs(kind))
        close(torch.func.functional_call(swapped, others, inputs(kind)), expected)
    close(run(swapped, kind), run(model, kind))


@quick_kinds
def test_compile(kind, pair):
    model, swapped = pair
    torch._dynamo.reset()
    backend = lookup_backend("eager" if kind == "detection" else "aot_eager")
    targets = set()

    def recording(graph, example_inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return backend(graph, example_inputs)

    whole = kind != "detection" and same(
        lambda: run(torch.compile(swapped, backend=recording, fullgraph=True), kind),
        lambda: run(torch.compile(model, backend=backend, fullgraph=True), kind),
    )
    assert whole == (kind in ("classifier", "segmentation"))
    if not whole:
        torch._dynamo.reset()
        close(run(torch.compile(swapped, backend=recording), kind), run(model, kind))
    torch._dynamo.reset()
    assert any("conv2d_direct" in target for target in targets)
    assert not any("conv2d" in target for target in targets if not target.startswith("ai3."))


def test_export(kind, pair):
    def export(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, inputs(kind))

    model, swapped = pair
    try:
        export(model)
    except Exception as error:
        assert kind in ("detection", "nasty")
        assert_fails_alike(error, lambda: export(swapped))
        return
    program = export(swapped)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "ai3._conv2d_direct_held.default" in targets
    assert not any("aten.conv2d" in target for target in targets)
    close(run(program.module(), kind), run(model, kind))


# Distributed data parallel ------------------------------------------------------------------------------------------
def ddp_worker(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    for kind in BUILD:
        grads = []
        for model in (build(kind), swap(build(kind), EVERY)):
            parallel = nn.parallel.DistributedDataParallel(model.train(), find_unused_parameters=True)
            grads.append(gradients(model, kind, parallel))
        try:
            close(grads[1], grads[0])
            assert explain(parallel).layers[0].calls == 1
            results[kind] = ""
        except AssertionError as error:
            results[kind] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def ddp_results(once, tmp_path_factory):
    def train(path):
        folder = tmp_path_factory.mktemp("ddp")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.spawn(ddp_worker, (port, folder), nprocs=2)
        path.write_text(json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]))

    return json.loads(once("ddp_results", train).read_text())


@pytest.mark.full  # test_distributed has both orders of a small network
def test_ddp_with_two_processes(kind, ddp_results):
    assert [of_rank[kind] for of_rank in ddp_results] == ["", ""]
