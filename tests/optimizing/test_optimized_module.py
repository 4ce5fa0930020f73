"""The module that `optimize` returns: copies, other sizes, refusals, threads, programs made of it."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from nets import Residual, agree, check, exact, optimized, seeded_norm, taken
from torch import nn
from torch.export import Dim

import ai3_ops
from ai3_ops.graph.network import difference
from ai3_ops.optimizing import pipeline, planned, whole
from ai3_ops.programs.body import Body
from ai3_ops.programs.lower import Region


def test_state_dict_pickle_and_copies(residual):
    model, x = residual
    fast = check(model, x)
    assert dict(fast.named_parameters()).keys() == dict(model.named_parameters()).keys()
    other = Residual()
    other.load_state_dict(fast.state_dict())
    agree(fast, other.eval(), x)
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        with torch.no_grad():
            assert torch.equal(again(x), fast(x))
        assert str(ai3_ops.explain(again)) == str(ai3_ops.explain(fast))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 16, 3), nn.Upsample(scale_factor=2), seeded_norm(16)),
        (nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3), nn.PixelShuffle(2)),
        (nn.Flatten(2), nn.TransformerEncoderLayer(36, 2, 8, batch_first=True), nn.Softsign(), nn.Linear(36, 3)),
        (nn.Conv2d(3, 4, 3), nn.ZeroPad2d(1), nn.Linear(6, 6), nn.Softsign(), nn.Linear(6, 4)),
    ],
    ids=["affine", "shuffle", "attention", "padding"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_loaded_is_not_traced_again(layers, batch, faster):
    """Steps look at sizes, of which a trace has none."""
    model, x = nn.Sequential(*layers).eval(), torch.randn(batch, 3, 6, 6)
    fast, file = check(model, x), io.BytesIO()
    assert isinstance(fast._ai3_first.body, Body)
    torch.save(fast, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for inputs in (x, torch.cat([x, x])):
                assert torch.equal(again(inputs), fast(inputs))
        body, own = again._ai3_first.body, fast._ai3_first.body
        assert [(n.op, n.name, n.target) for n in body.graph.nodes] == [
            (n.op, n.name, n.target) for n in own.graph.nodes
        ]
        assert body.graph is not own.graph


def test_later_changes_of_the_model_are_not_seen(residual):
    model, x = residual
    fast = optimized(model, x)
    with torch.no_grad():
        before = fast(x)
        model.conv1.weight.zero_()
        assert torch.equal(fast(x), before)
    assert not torch.equal(fast.state_dict()["conv1.weight"], model.conv1.weight)


def test_other_sizes_by_the_same_programs(monkeypatch):
    """Compared with the model on one item, captured and packed no second time, without a warning."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).eval()
    fast = check(model, torch.randn(1, 3, 8, 8))
    monkeypatch.setattr(planned, "make_plan", lambda *_, **__: pytest.fail("planned anew"))
    monkeypatch.setattr(planned, "SIZES", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sizes in ((5, 3, 8, 8), (2, 3, 10, 9), (1, 3, 10, 9), *((1, 3, n, n) for n in range(11, 18))):
            agree(fast, model, torch.randn(sizes))
    assert len(fast._ai3_plans) == 3
    assert {id(plan) for plan in fast._ai3_plans.values()} == {id(fast._ai3_first)}


class BySize(nn.Module):
    """What it computes depends on the size of an image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x).relu()
        return y + 1 if x.shape[-1] > 9 else y


@pytest.mark.parametrize("model", [BySize(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(6), nn.ReLU())])
def test_other_sizes_that_need_other_programs(model, monkeypatch):
    """Planned where that takes no second; else computed by the model, which one warning says."""
    model.eval()
    fast = check(model, torch.randn(1, 3, 8, 8))
    with pytest.warns(UserWarning, match="planned anew"):
        agree(fast, model, torch.randn(1, 3, 10, 10))
    assert list(fast._ai3_plans.values())[-1].body is not None
    fast._ai3_patience = 0.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (12, 13, 12):
            agree(fast, model, torch.randn(1, 3, size, size))
    assert ["not optimized; optimize for each that matters" in str(w.message) for w in told] == [True]


def test_sizes_that_are_left_to_the_original_call_it_once(monkeypatch):
    fast, calls, forward = check(BySize().eval(), torch.randn(1, 3, 8, 8)), [], BySize.forward
    fast._ai3_patience = 0.0
    monkeypatch.setattr(BySize, "forward", lambda *given: calls.append(1) or forward(*given))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for _ in range(2):
            calls.clear()
            for size in range(10, 20):
                fast(torch.randn(1, 3, size, size))
    assert len(calls) == 10


class ByValues(BySize):
    """Of larger images, so that those cannot be captured."""

    def forward(self, x):
        y = self.conv(x).relu()
        return y + 1 if x.shape[-1] > 9 and float(y.sum()) > 0 else y


def test_what_is_left_to_the_original_is_so_in_copies_and_other_threads(monkeypatch):
    planned_anew, made = [], planned.make_plan
    monkeypatch.setattr(planned, "make_plan", lambda *given, **named: planned_anew.append(1) or made(*given, **named))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        fast = optimized(ByValues().eval(), torch.randn(1, 3, 8, 8), selectors="default")
        planned_anew.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: fast(torch.randn(1, 3, 11, 11)), range(4)))
        assert len(planned_anew) == 1
        for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
            again(torch.randn(1, 3, 11, 11))
    assert len(planned_anew) == 1


def test_plans_for_other_sizes(residual):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(288, 2)
    ).eval()
    fast = check(model, torch.randn(1, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, model, torch.randn(5, 3, 8, 8))
    x = torch.randn(2, 3, 10, 9)
    with pytest.warns(UserWarning, match="planned anew"):
        agree(fast, model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(fast, model, x)
    for size in range(11, 18):  # plans are bounded
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree(fast, model, torch.randn(1, 3, size, size))
    assert len(fast._ai3_plans) <= 4


def test_a_batch_that_the_graph_does_not_leave_open_is_the_originals(monkeypatch):
    """Said once, by the part's name; nothing is captured for it."""

    class Merges(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())

        def forward(self, x):
            return self.inner(x) * 2 if x.shape[0] == 1 else self.inner(x)

    model = Merges().eval()
    fast = check(model, torch.randn(1, 4, 8, 8))
    assert fast._ai3_first.body is not None
    assert not fast._ai3_first.dynamic
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(planned, "make_plan", lambda *_, **__: pytest.fail("planned anew"))
        for size in (2, 3, 2, 1):
            agree(fast, model, torch.randn(size, 4, 8, 8))
    assert [str(w.message)[:48] for w in told] == ["ai3_ops.optimize: the model was optimized for in"]
    assert len(fast._ai3_plans) == 1


def test_phases_that_return_are_added(monkeypatch):
    now = iter([0.0, 2.0, 2.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0])
    monkeypatch.setattr(whole.time, "monotonic", lambda: next(now))
    phases = whole.Phases()
    for text in ("capture", "programs, 1 of 2", "programs, 2 of 2"):
        phases(text)
    assert str(phases) == "8.0 s: the model's first run 2.0, capture 3.0, programs 3.0"


@pytest.mark.parametrize(
    ("inputs", "kind", "given"),
    [
        ((torch.ones(1, 4, 8, 8),), RuntimeError, "1x4x8x8 float32"),
        ((torch.ones(1, 3, 8, 8).double(),), RuntimeError, "1x3x8x8 float64"),
        ((torch.ones(1, 3, 8, 8).bfloat16(),), RuntimeError, "1x3x8x8 bfloat16"),
        ((torch.ones(1, 3, 8, 8).numpy(),), TypeError, "array(["),
    ],
)
def test_what_the_original_cannot_compute_is_one_error(inputs, kind, given):
    """The model's own, with a note on what it was optimized for; no warning, and nothing is captured for it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    fast = optimized(model, torch.randn(1, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(kind) as error:
                fast(*inputs)
            (note,) = error.value.__notes__
            words = f"ai3_ops.optimize: optimized for inputs of 1x3x8x8 float32, called with {given}"
            assert note.startswith(words)
            assert note.endswith("; the original model fails on these, too")
            assert len(note) < 160
    assert len(fast._ai3_plans) == 1
    freed = optimized(model, torch.randn(1, 3, 8, 8), keep_original=False)
    assert freed._ai3_original == ()
    with pytest.raises(ValueError, match=re.escape(f"{words}")):
        freed(*inputs)


def test_a_model_around_an_optimized_one_loads_no_weights_into_it(residual):
    """They would change nothing of what it computes."""
    model, x = residual
    around = nn.Sequential(optimized(model, x))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="load weights into the original model and optimize it again"):
        around.load_state_dict({f"0.{name}": value + 1 for name, value in before.items()})
    with pytest.raises(RuntimeError, match=r"move the original model to meta, torch\.float32"):
        around.to("meta")
    assert all(torch.equal(value, before[name]) for name, value in around[0].state_dict().items())


def test_without_the_original(residual, monkeypatch):
    model, x = residual
    gains = iter([2.0, 0.5])
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (next(gains), 2e-3, 1e-3))
    monkeypatch.setattr(pipeline, "_gain", lambda *_: 2.0)
    monkeypatch.setattr(pipeline, "search", lambda *_, **__: False)
    fast = optimized(model, x, keep_original=False)
    assert fast._ai3_original == ()
    assert not list(fast.parameters())
    with pytest.raises(RuntimeError, match="keep_original"):
        fast.state_dict()
    with pytest.raises(ValueError, match="optimize again"):
        fast(torch.randn(1, 8, 7, 7))
    agree(fast, model, x)
    agree(fast, model, torch.randn(3, 8, 6, 6))

    slower = optimized(model, x, keep_original=False)
    assert slower._ai3_original  # it is still what computes
    assert slower.state_dict().keys() == model.state_dict().keys()
    agree(slower, model, x)


def test_what_is_for_training_is_refused(residual):
    fast = optimized(*residual)
    for call, words in (
        (fast.train, "for inference"),
        (lambda: fast.double(), "optimize it again"),
        (lambda: fast.load_state_dict({}), "original model"),
        (lambda: fast(residual[1].clone().requires_grad_()), "no gradients"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert fast.eval().float().cpu() is fast
    assert not fast.training


def test_what_is_optimized_already_is_refused(residual):
    """Where there is nothing left to choose for, an empty plan or a module within a module would say nothing."""
    fast = optimized(*residual)
    for call in (
        lambda: ai3_ops.tune(fast, residual[1]),
        lambda: optimized(fast, residual[1]),
        lambda: ai3_ops.Plan({}).verify(fast, residual[1]),
    ):
        with pytest.raises(ValueError, match=r"is one that ai3_ops\.optimize returned: .* original model"):
            call()


def test_four_threads(residual):
    model, x = residual
    fast = optimized(model, x)
    inputs = [torch.randn(1 + i % 3, 8, 6, 6) for i in range(12)]
    with torch.no_grad():
        expected = [fast(x) for x in inputs]
    wrong = []

    def run():
        with torch.no_grad():
            for _ in range(20):
                for x, y in zip(inputs, expected, strict=True):
                    if not torch.equal(fast(x), y):
                        wrong.append(x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compile_and_export(residual, compiler, tmp_path):
    model, x = residual
    fast = optimized(model, x)
    with torch.no_grad():
        agree(torch.compile(fast, fullgraph=True), model, x)
        program = torch.export.export(fast, (x,))
        agree(program.module(), model, x)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "fast.pt2"))
        agree(torch._inductor.aoti_load_package(path), model, x)


@pytest.mark.parametrize(("sizes", "programs"), [({0: Dim.DYNAMIC}, True), ({2: Dim.DYNAMIC, 3: Dim.DYNAMIC}, False)])
def test_export_with_open_sizes(sizes, programs):
    """By the model's signature: with the batch open as a program, with other sizes open as the original."""
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    fast = copy.deepcopy(pickle.loads(pickle.dumps(optimized(model, x, selectors="default"))))
    assert inspect.signature(fast.forward).parameters.keys() == inspect.signature(model.forward).parameters.keys()
    with torch.no_grad():
        for shapes in ((sizes,), dict.fromkeys(inspect.signature(model.forward).parameters, sizes)):
            exported = torch.export.export(fast, (x,), dynamic_shapes=shapes).module()
            assert ("_program" in exported.code) == programs
            other = torch.randn(5, *x.shape[1:]) if programs else torch.randn(*x.shape[:2], 9, 8)
            agree(exported, model, other)


class Scaled(nn.Module):
    """Its second argument is a number or a tensor of any dtype."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, scale, image):
        return self.conv(image).relu() * scale


@pytest.mark.parametrize(("first", "later"), [(2.0, 3.0), (True, False), (torch.ones(1), torch.ones(1).double())])
def test_compiled_and_exported_programs_of_other_constants_and_dtypes(first, later):
    model, x = Scaled().eval(), torch.randn(2, 3, 8, 8)
    fast = ai3_ops.optimize(model, (first, x), budget_seconds=0.2, progress=False)
    assert fast._ai3_first.body is not None
    with torch.no_grad():
        for given in (first, later):
            expected = model(given, x)
            torch._dynamo.reset()
            compiled = torch.compile(fast, backend="eager")
            exported = torch.export.export(fast, (given, x)).module()
            for call in (compiled, exported):
                assert torch.allclose(call(given, x), expected, atol=1e-5)
                assert call(given, x).dtype == expected.dtype
    alone = ai3_ops.optimize(model, (first, x), budget_seconds=0.2, progress=False, keep_original=False)
    with torch.no_grad(), pytest.raises(Exception, match="optimized for inputs of"):
        torch.export.export(alone, (later, x))


def test_traced_at_other_sizes():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            return F.adaptive_avg_pool2d(self.conv(x), 12), self.conv(x)[:, :, :12, :12]

    model, x, other = Sizes(), torch.randn(1, 3, 12, 12), torch.randn(1, 3, 20, 20)
    fast = optimized(model, x)
    assert fast._ai3_first.body is not None
    with torch.no_grad():
        exported = torch.export.export(fast, (other,)).module()
        compiled = torch.compile(fast, backend="aot_eager")
        for form in (exported, compiled):
            for got, expected in zip(form(other), model(other), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        freed = ai3_ops.optimize(model, x, budget_seconds=0.2, progress=False, keep_original=False)
        with pytest.raises(ValueError, match="optimized for inputs of"):
            torch.export.export(freed, (other,))


def test_autocast_where_the_first_argument_is_no_tensor():
    model, x = Scaled().eval(), torch.randn(2, 3, 8, 8)
    fast = ai3_ops.optimize(model, (True, x), budget_seconds=0.2, progress=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = fast(True, x)
    assert out.dtype == torch.float32
    assert torch.allclose(out, model(True, x), atol=1e-5)


def test_autocast_and_inference_mode(residual):
    model, x = residual
    fast = optimized(model, x)
    with torch.no_grad():
        expected = fast(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fast(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            within = ai3_ops.optimize(model, x, "default", progress=False)
            assert within(x).dtype == torch.float32
        assert torch.allclose(within(x), model(x), atol=1e-4)
    with torch.inference_mode():
        assert torch.equal(fast(x), expected)
        assert torch.equal(optimized(model, x)(x), expected)


@pytest.mark.parametrize("selectors", ["auto", "default", {"conv2d": "direct"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types(residual, dtype, selectors):
    model, x = residual[0].to(dtype), residual[1].to(dtype)
    fast = optimized(model, x, selectors=selectors)
    steps = ai3_ops.explain(fast).optimization.parts[0].steps
    used = {step.algorithm for step in steps if step.operation == "conv2d"}
    assert used == {"direct"} if isinstance(selectors, dict) else len(steps) > 2
    again = pickle.loads(pickle.dumps(fast))
    for inputs in (x, x[:1], torch.cat([x, x])):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            out, expected = fast(inputs), exact(model, inputs)
            assert out.dtype == dtype
            assert difference(out, expected) <= 40 * torch.finfo(dtype).eps
            assert torch.equal(again(inputs), out)
        exported = torch.export.export(fast, (x,)).module()
        assert torch.equal(exported(x), fast(x))
    assert not fast(x).requires_grad  # the kept weights' gradients are nobody's
    assert fast.state_dict().keys() == model.state_dict().keys()
    freed = optimized(model, x, selectors=selectors, keep_original=False)
    with torch.no_grad():
        assert difference(freed(x), exact(model, x)) <= 40 * torch.finfo(dtype).eps


def test_a_type_of_one_module_that_is_captured_alone():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

        def forward(self, x):
            return self.inner(x) if x.sum() > 0 else x

    model, x = Branching().eval().double(), torch.ones(1, 3, 6, 6).double()
    fast = optimized(model, x, selectors={"inner": "direct"})
    assert [part.name for part in fast._ai3_report.parts] == ["inner"]
    with torch.no_grad():
        assert difference(fast(x), model(x)) <= 1e-12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x, more=None):
        return torch.relu(self.conv(x) if more is None else self.conv(x) + more)


def test_parts_that_a_model_tells_by_their_class_stay():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Block(), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            if x.sum() > 1e9:
                return x
            for layer in self.children():
                x = layer(x, 5 * torch.ones_like(x)) if isinstance(layer, Block) else layer(x)
            return x

    model, x = Classes().eval(), torch.randn(1, 3, 8, 8)
    fast = optimized(model, x)
    assert "parts optimized an output differs by" in fast._ai3_report.left[""]
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize("keep", [True, False])
def test_a_part_keeps_plans_for_all_sizes_of_one_call(keep):
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

        def forward(self, x):
            return [self.head(x[..., : 4 + i]) for i in range(6)] if x.sum() < 1e9 else x

    model, x = Pyramid().eval(), torch.randn(1, 3, 9, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = taken(optimized(model, x, keep_original=keep))
        plans = dict(fast.head._ai3_plans)
        with torch.no_grad():
            for ours, theirs in zip(fast(x), model(x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert fast.head._ai3_plans == plans
    assert len(plans) == 6


def test_compiled_calls_of_unequal_batches_are_the_originals():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

        def forward(self, x, y):
            return torch.relu(self.a(x) + self.b(y))

    model, x, y = Sum().eval(), torch.randn(2, 3, 8, 8), torch.randn(1, 3, 8, 8)
    fast = taken(optimized(model, x, x + 1))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fast, backend="eager")(x, y), model(x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("twice", [False, True])
def test_norms_of_swapped_layers_are_folded_where_nothing_else_reads_them(twice):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Conv3d(3, 3, 3, padding=1, bias=False) for _ in range(3))
            self.one, self.two = (seeded_norm(3, nn.BatchNorm3d) for _ in range(2))

        def forward(self, x):
            x = self.one(self.first(x))
            y = self.second(x)
            y = self.two(y) + y  # read by both
            return self.one(self.third(y)) if twice else self.third(y)

    model, x = Norms().eval().double(), torch.randn(2, 3, 4, 4, 4).double()
    fast = optimized(model, x)
    assert "swapped one by one" in str(ai3_ops.explain(fast))
    assert [r.layers for r in fast._ai3_report.parts[0].rewrites] == ([] if twice else ["first, one"])
    with torch.no_grad():
        assert difference(fast(x), model(x)) <= 1e-12


def test_a_fold_that_changes_the_outputs_is_taken_back():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv3d(3, 3, 3, padding=1, bias=False), seeded_norm(3, nn.BatchNorm3d)

        def forward(self, x):
            return self.norm(self.conv(x)) + self.conv.weight.sum()

    model, x = Tied().eval().double(), torch.randn(2, 3, 4, 4, 4).double()
    fast = optimized(model, x)
    assert not fast._ai3_report.parts[0].rewrites
    with torch.no_grad():
        assert difference(fast(x), model(x)) <= 1e-12


def test_swapped_models_take_arguments_of_other_forms_and_values():
    class Forms(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(4, 3, 3)  # without a batch: no step

        def forward(self, x, scale=1.0, *, twice=False):
            y = self.layer(x) * scale
            return {"y": (y, y + 1)} if twice else (y,)

    model, x = Forms().eval().double(), torch.randn(4, 6).double()
    for keep in (True, False):
        fast = optimized(model, x, keep_original=keep)
        with torch.no_grad():
            for args, kwargs in (((x,), {}), ((x, 2.0), {}), ((x,), {"scale": 3.0}), ((x[..., :-1],), {"twice": True})):
                got, expected = fast(*args, **kwargs), model(*args, **kwargs)
                assert type(got) is type(expected)
                torch.testing.assert_close(got, expected)


def test_lazy_modules_must_have_run():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1\.weight' of a lazy module has no size yet"):
        optimized(model, torch.ones(1, 3))
    model(torch.ones(1, 3))
    check(model, torch.ones(1, 3))


def test_what_export_refuses_is_not_printed(capfd):
    fast = optimized(nn.Sequential(nn.Conv2d(3, 4, 3), Sign()), torch.ones(1, 3, 6, 6))
    assert fast.get_submodule("0")._ai3_report.parts
    assert capfd.readouterr() == ("", "")


class Sign(nn.Module):
    """Has a condition on values."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Exchange(nn.Module):
    """An interpolation, PyTorch's, reads a layer before the last layer of the same program comes, as in HRNet."""

    def __init__(self):
        super().__init__()
        self.high, self.low = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.to_low, self.more = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        up = F.interpolate(self.to_low(self.high(x)), scale_factor=2.0)
        low = self.more(self.low(x))
        return up, F.interpolate(low, scale_factor=0.5), low + up


def test_what_pytorch_computes_between_the_layers_of_one_program(faster):
    check(Exchange().eval(), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("what", ["error", "time"])
def test_a_swapped_model_that_is_no_better_stays_as_it_was(monkeypatch, what):
    model, x = nn.Conv1d(3, 4, 3).double(), torch.randn(3, 8).double()  # without a batch: no step
    if what == "error":
        monkeypatch.setattr(pipeline.Reference, "holds", lambda *_: False)
    else:
        monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (0.5, 1e-3, 2e-3))
    said = pytest.warns(UserWarning, match="the model stays as it was: swapped") if what == "error" else nullcontext()
    with said:
        fast = optimized(model, x)
    assert fast._ai3_first.body is None
    assert fast._ai3_report.parts[0].unchanged.startswith("swapped")
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))


class Described(nn.Module):
    """With an attribute, a method and a place in a list that the model around it uses."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 3, 3, padding=1), 2.0

    def forward(self, x):
        return self.conv(x)

    def twice(self, x):
        return 2 * x


class Branching(nn.Module):
    """Of which only the children can be captured; what it makes of them is given."""

    def __init__(self, child, use):
        super().__init__()
        self.child, self.use = child, use

    def forward(self, x):
        return self.use(self.child, x) if float(x.sum()) > -1e9 else x


def test_parts_keep_what_the_model_around_them_reads():
    x = torch.randn(1, 3, 8, 8)
    fast = check(Branching(Described(), lambda child, x: child.twice(child(x)) * child.scale), x)
    assert [part.name for part in fast._ai3_report.parts] == ["child"]
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018
    child = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    fast = check(Branching(child, lambda child, x: child(x) * len(child)), x, left=True)
    assert fast._ai3_report.parts == []
    assert "with 1 parts optimized the model fails: TypeError" in fast._ai3_report.left[""]


def test_a_part_is_given_no_outer_layer_s_algorithm():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.conv = Inner(), nn.Conv2d(3, 3, 3)

        def forward(self, x):
            return self.conv(self.inner(x)) if float(x.sum()) > -1e9 else x

    model, x = Outer().double(), torch.randn(1, 3, 8, 8).double()
    parts = optimized(model, x, selectors={"inner.conv": "direct", "conv": "im2col"})._ai3_report.parts
    assert {part.name: [s.algorithm for s in part.steps] for part in parts} == {"inner": ["direct"], "conv": ["im2col"]}


def test_selectors_that_no_file_holds():
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), torch.randn(1, 8, 6, 6)
    fast = optimized(model, x, selectors=lambda module: "direct")
    again = pickle.loads(pickle.dumps(fast))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for inputs in (x, x[..., :5]):
            assert torch.equal(again(inputs), fast(inputs))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.clone().flatten(1),
        lambda x: x.clone()[:, :2],
        lambda x: (x * 1.0).flatten(1),
        lambda x: x.view(1, -1),
        lambda x: x.clone().split(2, 1)[0],
    ],
)
def test_outputs_are_no_views_of_inputs(view):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x):
            return self.conv(x), view(x)

    x = torch.randn(1, 3, 8, 8)
    fast, before = check(Both(), x), x.clone()
    with torch.no_grad():
        fast(x)[1].zero_()
    assert torch.equal(x, before)


def test_other_forms_without_the_original():
    class Forms(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x, y=None, *, scale=1.0):
            return self.conv(x) * scale

    x = torch.randn(1, 3, 8, 8)
    fast = optimized(Forms(), x, keep_original=False)
    with torch.no_grad():
        assert torch.equal(fast(x=x), fast(x))
        with pytest.raises(ValueError, match="optimize again, with inputs of these sizes"):
            fast(x, scale=2.0)
    with pytest.raises(Exception, match="in another form than"):
        torch.export.export(fast, (x,), {"scale": 2.0})


@pytest.mark.parametrize("last", [nn.Conv2d(8, 4, 3), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.PixelShuffle(2)])
def test_images_between_programs_stay_channels_last(last):
    """Neither the next program nor PyTorch would gain from planes; what the network returns is contiguous."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(8, 8, 3), last
    )
    x = torch.randn(2, 3, 9, 8)
    fast = check(model, x)
    regions = [m for m in fast._ai3_first.body.modules() if isinstance(m, Region)]
    returned = [region.program.text.split("return ")[1] for region in regions]
    assert returned[0].strip().endswith(":channels_last")
    assert returned[-1].strip().endswith(":contiguous" if isinstance(last, nn.Conv2d) else ":channels_last")
    with torch.no_grad():
        assert fast(x).is_contiguous()
        assert torch.equal(torch.export.export(fast, (x,)).module()(x), fast(x))


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ((nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()), (2, 3, 20)),
        ((nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8)), (2, 3, 4, 6, 6)),
    ],
    ids=["1d", "3d"],
)
def test_norms_of_other_dimensions_are_folded(layers, sizes):
    layers[1].load_state_dict(seeded_norm(8).state_dict())
    fast = check(nn.Sequential(*layers).eval(), torch.randn(sizes), selectors="default")
    (part,) = fast._ai3_report.parts
    assert [(r.rule, r.layers) for r in part.rewrites if "fold" in r.rule] == [("fold normalization", "0, 1")]
    if isinstance(layers[0], nn.Conv3d):
        assert "and it has none: its layers are swapped" in part.notes[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_gains_nothing_says_so_once():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    for model, x, reason in (
        (nn.LSTM(8, 8).eval(), torch.randn(4, 1, 8), "no call that ai3_ops swaps; PyTorch computes LSTM"),
        (scripted, torch.randn(1, 3, 8, 8), "torch.jit compiled it: give the model as it was before"),
    ):
        with pytest.warns(UserWarning, match=f"the model is as fast as before: .*{reason}") as told:
            optimized(model, x, selectors="default")
        assert len([w for w in told if "ai3_ops.optimize" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ((1, 3, 8, 8), "give a tensor, such as torch.randn(shape), not its shape"),
        ([torch.ones(1, 3, 8, 8)], "a list is one argument, a tuple has several"),
        ({"x": torch.ones(1, 3, 8, 8)}, "takes a dict as one argument it is ({'x': …},)"),
        (({"input": torch.ones(1, 3, 8, 8)},), "for arguments by name give the dict alone"),
    ],
)
def test_what_may_have_been_meant(given, hint):
    for function in (lambda m, x: ai3_ops.optimize(m, x), lambda m, x: ai3_ops.swap(m, "default", x)):
        with pytest.raises(RuntimeError, match=re.escape(hint)):
            function(nn.Conv2d(3, 4, 3), given)


def test_a_model_without_values_and_a_shell_s_pattern():
    with pytest.raises(ValueError, match="'weight' is on the meta device, without values"):
        ai3_ops.optimize(nn.Conv2d(3, 4, 3).to("meta"), torch.ones(1, 3, 8, 8, device="meta"))
    with pytest.raises(ValueError, match=r"'re:\.\*conv\.\*', which matches"):
        ai3_ops.swap(nn.Sequential(nn.Conv2d(3, 4, 3)), {"*conv*": "direct"})


def test_bounds_that_only_measuring_keeps_are_warned_of(residual):
    model, x = residual
    with pytest.warns(UserWarning, match='memory_limit and tolerance with selectors "default"'):
        ai3_ops.optimize(model, x, "default", memory_limit=10, tolerance=1e-12)


def test_what_follows_each_operator_meets_the_original(residual):
    """Programs hide theirs: gradients of weights that `functional_call` puts there were 0, vmap had no rule."""
    model, x = residual
    fast, weights = check(model, x), {name: p.detach() for name, p in model.named_parameters()}
    twice = {name: torch.stack([p, p]) for name, p in weights.items()}

    def by_weights(m):
        return lambda given: torch.func.functional_call(m, given, (x,))

    with pytest.warns(
        UserWarning, match=r"torch\.func sees nothing of programs: within it the original of the model comp"
    ):
        agrees(torch.func.vmap(lambda one: fast(one[None]))(x)[:, 0], model(x))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ai3_ops")  # once
        agrees(torch.func.vmap(by_weights(fast))(twice), torch.func.vmap(by_weights(model))(twice))
        agrees(torch.func.jvp(fast, (x,), (x,))[1], torch.func.jvp(model, (x,), (x,))[1])
        torch.func.grad(lambda factor: (factor * fast(x)).sum())(torch.ones(()))  # of what it does not depend on
    for differentiated in (
        lambda: torch.func.grad(lambda given: by_weights(fast)(given).sum())(weights),
        lambda: torch.func.vmap(torch.func.grad(lambda given: by_weights(fast)(given).sum()))(twice),
        lambda: torch.func.grad(lambda given: torch.func.vmap(lambda one: fast(one[None]))(given).sum())(x),
    ):
        with pytest.raises(RuntimeError, match="has no gradients: call it with inputs and weights that require none"):
            differentiated()
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace sees nothing of programs"):
        traced = torch.jit.trace(fast, x)
    agrees(traced(torch.cat([x, x])), model(torch.cat([x, x])))
    freed = ai3_ops.optimize(model, x, "default", progress=False, keep_original=False)
    with pytest.raises(RuntimeError, match=r"torch\.func sees nothing of programs: keep_original=False freed"):
        torch.func.vmap(lambda one: freed(one[None]))(x)


def agrees(one, other):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_an_optimized_part_is_not_hooked_by_a_swap():
    """Its programs would not call the hooks, so that it warned, and the original computed."""
    x = torch.randn(2, 3, 8, 8)
    around = nn.Sequential(check(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), x), nn.Conv2d(8, 4, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swapped = ai3_ops.swap(around, {"conv2d": "direct"}, x)
        with torch.no_grad():
            swapped(x)
    assert [layer.name for layer in ai3_ops.explain(swapped).layers] == ["1"]


class _Pairs(nn.Module):
    """Of all pairs of a batch's items: as many columns as it has, and one more."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        z = y @ y.t()
        return torch.cat([z, z[:, :1]], 1) * 0.5 + 1.0


@pytest.mark.filterwarnings("ignore:ai3_ops.optimize")
def test_numbers_hold_for_columns_that_may_follow_the_batch():
    model = _Pairs().eval()
    fast = ai3_ops.optimize(model, torch.randn(4, 8), "default", progress=False)
    with torch.no_grad():
        for n in (4, 2, 7):
            x = torch.randn(n, 8)
            torch.testing.assert_close(fast(x), model(x))


class _Divided(nn.Module):
    def __init__(self, divisors):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("divisors", divisors)

    def forward(self, x):
        return torch.relu(self.conv(x)) * 1e-2 / self.divisors


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 6, 6)], ids=["channels", "table"])
def test_divisors_that_have_no_inverse(shape):
    """1 over less than the smallest numbers is infinite, and 0 times that is not 0; whatever stands beside it."""
    divisors = torch.ones(4, 1, 1)
    divisors[0], divisors[1] = math.inf, 1e-39
    model = _Divided(divisors.expand(shape).contiguous()).eval()
    fast = ai3_ops.optimize(model, torch.randn(1, 3, 8, 8), "default", progress=False, verify="off")
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
