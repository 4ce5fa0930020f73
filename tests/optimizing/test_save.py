"""ai3_ops.save and load: one file without code, mapped; what it refuses, and damaged files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import struct
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nets import Residual, check, optimized, seeded
from torch import nn
from torch.utils import _pytree as pytree

import ai3_ops
from ai3_ops.optimizing import document, saved
from ai3_ops.programs import container, program

pytestmark = pytest.mark.usefixtures("faster")


class Named(nn.Module):
    """A keyword argument, a constant, sizes that a call computes with, and a dict of outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(6)
        self.register_buffer("grid", torch.randn(8, 6, 6).to(memory_format=torch.preserve_format))

    def forward(self, image, *, times=2):
        x = F.relu(self.conv(image)) + self.grid
        x = F.softsign(self.norm(x)) * times
        return {"features": x, "pooled": (x.mean((2, 3)), x.flatten(1).sum(1))}


def roundtrip(fast, path):
    ai3_ops.save(fast, path)
    return ai3_ops.load(path)


def equal(ours, theirs):
    ours, spec = pytree.tree_flatten(ours)
    theirs, other = pytree.tree_flatten(theirs)
    return spec == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.ai3"


@pytest.fixture
def small(path):
    """A saved network of a program and PyTorch's steps, its example, and what it answers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Softsign(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 6, 6)
    fast = optimized(model, x, selectors="default")
    ai3_ops.save(fast, path)
    return path, x, fast(x)


@pytest.mark.parametrize("selectors", ["default", {"conv2d": "winograd"}, {"conv2d": "direct"}])
def test_what_was_loaded_is_equal_bit_for_bit(path, selectors):
    model, x = Residual().eval(), torch.randn(2, 8, 6, 6)
    fast = optimized(model, x, selectors=selectors)
    loaded = roundtrip(fast, path)
    for batch in (2, 1, 5):
        x = torch.randn(batch, 8, 6, 6)
        assert equal(loaded(x), fast(x))
    assert str(ai3_ops.explain(loaded)) == str(ai3_ops.explain(fast))
    for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), roundtrip(loaded, path)):
        assert equal(again(x), fast(x))


def test_arguments_by_name_constants_and_structured_outputs(path):
    model, x = Named().eval(), torch.randn(2, 3, 6, 6)
    fast = ai3_ops.optimize(model, {"image": x}, "default", progress=False)
    loaded = roundtrip(fast, path)
    for given in ({"image": x}, {"image": torch.randn(2, 3, 6, 6)}):
        assert equal(loaded(**given), fast(**given))
    assert equal(loaded(x), fast(x))


def test_all_sizes_that_were_planned_are_in_the_file(path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(2)).eval()
    fast = optimized(model, torch.randn(1, 3, 8, 8), selectors="default")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(torch.randn(1, 3, 9, 11))
    loaded = roundtrip(fast, path)
    for sizes in ((8, 8), (9, 11)):
        x = torch.randn(3, 3, *sizes)
        assert equal(loaded(x), fast(x))
    with pytest.raises(ValueError, match="optimized for inputs of 1x3x8x8 float32, called with 1x3x10x10"):
        loaded(torch.randn(1, 3, 10, 10))
    with pytest.raises(RuntimeError, match="no state_dict"):
        loaded.state_dict()


def test_constants_keep_their_memory_format(path):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)
            self.register_buffer("last", torch.randn(1, 8, 5, 6).to(memory_format=torch.channels_last))
            self.register_buffer("turned", torch.randn(6, 5).t())
            self.register_buffer("wide", torch.randn(1, 1, 5, 1).expand(1, 8, 5, 6))

        def forward(self, x):
            return torch.cumsum(self.conv(x), 1) + torch.sin(self.last) * torch.cos(self.turned) + self.wide

    x = torch.randn(1, 3, 5, 6)
    fast = optimized(Adds().eval(), x, selectors="default")
    loaded = roundtrip(fast, path)
    assert equal(loaded(x), fast(x))
    strides = [
        {n: b.stride() for n, b in m._ai3_first.body.named_buffers() if b.is_contiguous() or n} for m in (fast, loaded)
    ]
    assert [s for s in strides[0].values() if 0 not in s] == [
        s for n, s in strides[1].items() if 0 not in strides[0][n]
    ]


def test_weights_are_mapped_and_shared(small):
    path, x, y = small
    loaded = ai3_ops.load(path)
    assert equal(loaded(x), y)
    parts = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
    assert parts, "the file is not mapped"
    own = [line for part in parts for line in part.splitlines()[:22] if line.startswith("Anonymous:")]
    assert own
    assert all(line.split()[1] == "0" for line in own)


def test_others_can_read_it_and_it_holds_no_pickle(small):
    path, _, _ = small
    raw = path.read_bytes()
    assert b"\x80\x04\x95" not in raw
    assert not raw.startswith(b"PK")
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        document, tensors = container.read(path)
        assert json.loads(file.metadata()["ai3_ops"])["document"] == document
        assert {*file.keys()} == {*tensors}
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_what_cannot_be_saved_is_named(path, monkeypatch):
    x = torch.randn(1, 3, 6, 6)
    with pytest.raises(TypeError, match=r"needs a module that ai3_ops.optimize returned, got Conv2d"):
        ai3_ops.save(nn.Conv2d(3, 4, 3), path)
    fast = optimized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), x)
    with pytest.raises(TypeError, match="got a Sequential of which 0 are optimized"):
        ai3_ops.save(nn.Sequential(fast), path)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

        def forward(self, x):
            y = self.body(x)
            return y if y.sum() > 0 else -y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parted = optimized(Branches().eval(), x)
    with pytest.raises(ValueError, match=r"could not be captured as a whole .*save its optimized parts alone .body"):
        ai3_ops.save(parted, path)

    class Refuses(Branches):
        def forward(self, x):
            y = x + 1 if x.sum() > 0 else x
            return torch.nn.functional.conv2d(y, self.body[0].weight)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing = optimized(Refuses().eval(), x)
    with pytest.raises(ValueError, match=r"could not be captured as a whole .*: there is no program to save"):
        ai3_ops.save(nothing, path)
    assert equal(roundtrip(parted.body, path)(x), parted.body(x))
    path.unlink()
    halves = optimized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).bfloat16().eval(), x.bfloat16())
    if isinstance(halves._ai3_first.body, saved.Swapped):
        with pytest.raises(ValueError, match="layers were swapped"):
            ai3_ops.save(halves, path)
        assert not path.exists()


def differ(monkeypatch, what):
    """This process gets another level, version or byte order; what it was."""
    here = document.versions()
    monkeypatch.setattr(document, "versions", lambda: here | {what: "another"})
    return here[what]


@pytest.mark.parametrize("what", ["level", "ai3_ops", "byte order"])
def test_another_machine_or_version_is_refused(small, monkeypatch, what):
    path, _, _ = small
    was = differ(monkeypatch, what)
    with pytest.raises(ValueError, match=f"model.ai3: it was saved with {what} {was}, and this process has another"):
        ai3_ops.load(path)


class Packed(nn.Module):
    """Weights packed by several algorithms, a flatten that a linear's columns follow, a table, a PReLU's slope."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.third, self.last, self.slope = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(288, 5), nn.PReLU(8)
        self.register_buffer("table", torch.randn(1, 8, 6, 6))

    def forward(self, x):
        return self.last((self.slope(self.third(F.relu(self.second(self.first(x))))) + self.table).flatten(1))


def packed(portable):
    """The optimized network and its example."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    choices = {"first": "winograd", "second": "depthwise", "third": "winograd_f4", "last": "gemm"}
    return ai3_ops.optimize(Packed().eval(), x, choices, portable=portable, progress=False), x


@pytest.fixture
def portable(path):
    """A saved network that holds its weights, its example, and what it answers."""
    fast, x = packed(portable=True)
    ai3_ops.save(fast, path)
    return path, x, fast(x)


def test_weights_that_were_kept_are_packed_anew(portable, monkeypatch, tmp_path):
    path, x, y = portable
    assert torch.equal(ai3_ops.load(path)(x), y)
    differ(monkeypatch, "level")
    anew = ai3_ops.load(path)
    assert torch.equal(anew(x), y)  # the same level by another name
    assert torch.equal(roundtrip(anew, tmp_path / "again.ai3")(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(anew))(x), y)


def test_another_level_computes_what_was_saved_with_its_weights(portable, tmp_path, fork):
    path, x, y = portable
    torch.save((x, y), tmp_path / "call.pt")
    code = (
        "import sys, torch, ai3_ops; x, y = torch.load(sys.argv[2]); fast = ai3_ops.load(sys.argv[1]);"
        "torch.testing.assert_close(fast(x), y); print('ran')"
    )
    done = fork(code, path, tmp_path / "call.pt", AI3_OPS_ISA="portable")
    assert done.stdout == "ran\n", done.stderr


@pytest.mark.parametrize("kept", [False, True])
def test_a_pickle_of_another_level_is_packed_anew_or_refused(kept, monkeypatch):
    fast, x = packed(portable=kept)
    pickled, alone, here = pickle.dumps(fast), pickle.dumps(fast._ai3_first.body), program.level()
    monkeypatch.setattr(program, "level", lambda: "another")
    differ(monkeypatch, "level")
    if kept:
        assert torch.equal(pickle.loads(pickled)(x), fast(x))
        assert torch.equal(pickle.loads(alone)(x), fast(x))
    else:
        with pytest.raises(ValueError, match=f"it was saved with level {here}, .* has another: .* portable=True"):
            pickle.loads(pickled)
        with pytest.raises(ValueError, match=f"pickled with {here}, and this process has another: .* portable=True"):
            pickle.loads(alone)


def test_a_level_that_lacks_an_algorithm_is_refused(portable, monkeypatch):
    path, _, _ = portable
    forged(path, lambda d: d.update(json.loads(json.dumps(d).replace("conv2d_depthwise ", "conv2d_none "))))
    differ(monkeypatch, "level")
    with pytest.raises(
        ValueError, match=r"saved for another instruction set, and with .* it cannot run: .*conv2d_none"
    ):
        ai3_ops.load(path)


def test_conditions_on_lengths_have_words_of_a_list(path):
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)).eval()
    fast = optimized(model, torch.randn(2, 6, 16), selectors="default")
    loaded = roundtrip(fast, path)
    x = torch.randn(3, 9, 16)
    assert equal(loaded(x), fast(x))
    lengths = ["tuple", ["tuple", ["tuple", "s", 16]], ["tuple", ["tuple", "exit", "s"]]]
    forged(path, lambda document: document["plans"][0]["plan"].update(lengths=lengths))
    with pytest.raises(ValueError, match="KeyError: 'exit'"):
        ai3_ops.load(path)


@pytest.mark.parametrize("pack", ["_program_put_constant_", "_library", "conv2d_direct", "_none_pack"])
def test_weights_are_packed_by_operators_for_it_alone(portable, monkeypatch, pack):
    path, _, _ = portable

    def change(document):
        sources = document["plans"][0]["plan"]["region"]["sources"]
        next(source for source in sources if source["pack"])["pack"] = pack

    forged(path, change)
    differ(monkeypatch, "level")
    with pytest.raises(ValueError, match=f"{pack}"):
        ai3_ops.load(path)


def test_damaged_files_are_refused(small):
    path, _, _ = small
    raw = path.read_bytes()
    for size in (0, 7, 8, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(
            ValueError, match=r"ai3_ops.load: .*model.ai3: (it is no file of ai3_ops.save|it is cut off)"
        ):
            ai3_ops.load(path)
    draw = random.Random(0)
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    spaces = len(raw[:header]) - len(raw[:header].rstrip(b" "))
    for _ in range(300):  # a byte of the header or of a tensor, but the spaces between them
        changed, at = bytearray(raw), draw.choice((draw.randrange(header - spaces), draw.randrange(header, len(raw))))
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"ai3_ops.load: "):
            ai3_ops.load(path)
    with pytest.raises(FileNotFoundError):
        ai3_ops.load(path.parent / "none.ai3")


def forged(path, change):
    """The file with another document and its right checksum, as an attacker would make it."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    content = json.loads(header["__metadata__"]["ai3_ops"])
    change(content["document"])
    text = json.dumps(content)
    header["__metadata__"] = {"ai3_ops": text, "check": str(zlib.crc32(text.encode()))}
    out = json.dumps(header).encode()
    out += b" " * (-(8 + len(out)) % container.LINE)
    path.write_bytes(struct.pack("<Q", len(out)) + out + raw[8 + length :])


def nodes(document):
    return document["plans"][0]["plan"]["graph"]["nodes"]


def called(name):
    def change(document):
        next(node for node in nodes(document) if node[0] == "call_function")[2] = name

    return change


def renamed(column, name):
    def change(document):
        nodes(document)[0][column] = name

    return change


def exampled(place, value):
    """A plan's example with another value of these: sizes, types, form, how many were compared."""

    def change(document):
        document["plans"][0]["plan"]["example"][1 + place] = (
            ["list", *value] if isinstance(value, list) and place < 2 else value
        )

    return change


@pytest.mark.parametrize(
    "change",
    [
        called("op.aten.from_file.default"),
        called("op.aten.add_.Tensor"),
        called("op.inductor._alloc_from_pool.default"),
        called("os.system"),
        called("steps.ACTIVATIONS"),
        renamed(1, "x = __import__('os')"),
        renamed(2, "x, __import__('os')"),
        lambda d: d["inputs"].update(spec='[1, {"type": null, "context": {"__enum__": true, "fqn": "this:x"}}]'),
        lambda d: d["plans"].clear(),
        lambda d: d.update(format=1),  # of a version before
        lambda d: d["plans"][0]["plan"].update(example=["list"]),
        *(exampled(place, value) for place, value in enumerate(([["tuple", "a"]], [], 5, None))),
        exampled(0, [["tuple", -1]]),
        exampled(3, ["dict", ["s1", "a"]]),
    ],
)
def test_a_file_calls_nothing_but_operators_and_steps(small, change):
    path, _, _ = small
    forged(path, change)
    with pytest.raises(ValueError, match=r"ai3_ops.load: .*model.ai3: "):
        ai3_ops.load(path)


def test_another_program_text_does_not_run_on_these_weights(small):
    path, x, _ = small

    def wider(document):
        for held in document["plans"][0]["plan"]["graph"]["held"].values():
            if "region" in held:
                held["region"]["program"] = held["region"]["program"].replace("8,3,3,3", "800,3,3,3")

    forged(path, wider)
    with pytest.raises(RuntimeError, match="constants"):
        ai3_ops.load(path)(x)


# Pickles --------------------------------------------------------------------------------------------------------------
def saved_by_torch(module, path, **how):
    torch.save(module, path)
    return torch.load(path, weights_only=False, **how)


def test_a_pickle_holds_the_document_and_each_tensor_once(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Softsign(), nn.Conv2d(64, 64, 3)).eval()
    x = torch.randn(2, 64, 6, 6)
    fast = optimized(model, x, selectors="default")
    ai3_ops.save(fast, path)
    weights, packs = (
        sum(t.nbytes for t in tensors) for tensors in (model.parameters(), container.read(path)[1].values())
    )
    pickled = pickle.dumps(fast)
    assert len(pickled) < weights + packs + 2**15
    assert b"conv2d_" in pickled
    assert all(structure not in pickled for structure in (b"ai3_ops.programs", b"torch.fx"))
    loaded = ai3_ops.load(path)  # of which each tensor is a part of the file in memory
    assert len(pickle.dumps(loaded)) < packs + 2**15
    for again in (
        pickle.loads(pickled),
        pickle.loads(pickle.dumps(loaded)),
        saved_by_torch(loaded, path.parent / "loaded.pt"),
        saved_by_torch(fast, path.parent / "whole.pt"),
        saved_by_torch(fast, path.parent / "mapped.pt", mmap=True),
        roundtrip(pickle.loads(pickled), path),
    ):
        assert equal(again(x), fast(x))
    assert os.path.getsize(path.parent / "whole.pt") < weights + packs + 2**15


def test_a_pickle_keeps_which_plan_is_for_which_sizes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Softsign(), nn.Conv2d(8, 4, 1), nn.Flatten(2)).eval()
    x, others = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 9, 11)
    fast = ai3_ops.optimize(model, [x, others], "default", progress=False)
    again = pickle.loads(pickle.dumps(fast))
    for one in (fast, again):
        assert one._ai3_first in one._ai3_plans.values()
        assert len(one._ai3_plans) == 2
    same = [[plan is one._ai3_first for plan in one._ai3_plans.values()] for one in (fast, again)]
    assert same[0] == same[1]
    assert [p.report is again._ai3_report.parts[0] for p in again._ai3_plans.values()] == [
        p.report is fast._ai3_report.parts[0] for p in fast._ai3_plans.values()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (x, others):
            assert equal(again(given), fast(given))


def test_copies_make_no_container(monkeypatch):
    fast, x = packed(portable=True)
    monkeypatch.setattr(container, "sealed", None)
    shallow, deep = copy.copy(fast), copy.deepcopy(fast)
    assert shallow._ai3_first is fast._ai3_first
    ours, theirs = deep._ai3_first.body.program.constants[0], fast._ai3_first.body.program.constants[0]
    assert ours.data_ptr() != theirs.data_ptr()
    assert torch.equal(ours, theirs)
    for again in (shallow, deep):
        assert equal(again(x), fast(x))


@pytest.mark.parametrize("what", ["level", "ai3_ops", "byte order"])
def test_a_pickle_of_another_machine_or_version_is_refused(monkeypatch, what):
    pickled = pickle.dumps(packed(portable=False)[0])
    was = differ(monkeypatch, what)
    with pytest.raises(
        ValueError, match=f"a pickled module of optimize: it was saved with {what} {was}, and this process has another"
    ):
        pickle.loads(pickled)


def test_damaged_pickles_are_refused(tmp_path):
    fast, _ = packed(portable=False)
    pickled = pickle.dumps(fast)
    pack = fast._ai3_first.body.program.constants[0].numpy().tobytes()
    for place, what in (
        (pickled.index(pack), "its tensor 'tensor_0' was altered"),
        (pickled.index(pack) + len(pack) - 1, "its tensor 'tensor_0' was altered"),
        (pickled.index(b"conv2d_depthwise "), "its description was altered"),
        (pickled.index(b'"tensor_0": ') + 12, "its description was altered"),
    ):
        changed = bytearray(pickled)
        changed[place] ^= 1
        with pytest.raises(ValueError, match=f"ai3_ops: a pickled module of optimize: {what}"):
            pickle.loads(changed)
    torch.save(fast, tmp_path / "fast.pt")
    with pytest.raises(ValueError, match="its tensor 'tensor_0' is on meta, and programs run on the CPU"):
        torch.load(tmp_path / "fast.pt", map_location="meta", weights_only=False)


def test_what_a_file_cannot_hold_is_pickled_as_it_is(path):
    @torch.library.custom_op("ai3_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    class Twice(nn.Module):
        def forward(self, x):
            return torch.ops.ai3_tests.twice(x)

    globals()["Twice"], Twice.__qualname__ = Twice, "Twice"
    x = torch.randn(2, 3, 6, 6)
    fast = optimized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Twice()).eval(), x, selectors="default")
    with pytest.raises(ValueError, match="an operator of another library"):
        ai3_ops.save(fast, path)
    for again in (pickle.loads(pickle.dumps(fast)), saved_by_torch(fast, path)):
        assert equal(again(x), fast(x))


class _Masked(nn.Module):
    """A network between Fourier transforms, of which the way back asks its window for values."""

    def __init__(self):
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1)) for _ in range(3)
        ]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, x):
        spectrum = torch.view_as_real(torch.stft(x, 64, 16, 64, self.window, return_complex=True))
        y = self.layers(spectrum.permute(0, 3, 1, 2).contiguous()).permute(0, 2, 3, 1).contiguous()
        return torch.istft(torch.view_as_complex(y), 64, 16, 64, self.window, length=x.shape[-1])


def test_operators_that_ask_for_values(path):
    x = torch.randn(1, 2048)
    fast = check(seeded(_Masked()), x, selectors="default")
    ai3_ops.save(fast, path)
    with torch.no_grad():
        assert torch.equal(ai3_ops.load(path)(x), fast(x))
