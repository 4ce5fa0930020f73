"""What `explain` says of a model: tables, summary, memory, layouts, filters, notebooks."""

from __future__ import annotations

import gc
import html
import pickle
from collections import OrderedDict

import pytest
import torch
from modules import layers
from torch import nn
from torch.nn import functional as F

import ai3_ops
from ai3_ops import Plan, _machine, explain, swap
from ai3_ops.explaining.compiled import graphs_of
from ai3_ops.optimizing import backend, pipeline
from ai3_ops.selecting.plan import PlannedLayer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv(x)) + x


def model():
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    ).eval()


X = torch.randn(1, 3, 64, 64)


def table_of(report):
    """The lines below the summary, which comes first."""
    lines = str(report).splitlines()
    assert lines[: len(report.summary)] == report.summary
    return lines[len(report.summary) :]


def test_a_name_under_a_module_reaches_all_its_calls_and_the_summary_says_so():
    report = explain(swap(model(), {"1": "direct", "conv2d": "default"}, X))
    assert "asked for: default: 2 conv2d; direct: 1 conv2d, 1 relu" in report.summary
    assert report.summary[0].startswith("8 calls: conv2d 3 (direct 2, winograd_f4 1), relu 2 (")
    assert all(line in str(report) for line in report.summary)


def test_memory_is_what_a_call_takes():
    swapped = swap(model(), {"conv2d": "winograd_f4", "0": "im2col", "linear": "gemm"}, X)
    before = layers(swapped)
    assert {before[name].packs for name in ("0", "1.conv", "5")} == {"not yet"}
    with torch.no_grad():
        swapped(X)
    after = layers(swapped)
    for name in ("0", "1.conv", "5"):
        row = after[name]
        assert row.packs == "kept"
        weight = swapped.get_submodule(name).weight
        assert row.packed_bytes >= weight.numel() * 4
    images = [torch.empty(shape) for shape in after["1.conv"].shapes]
    direct = ai3_ops.workspace("conv2d", "winograd_f4", *images, padding=1)
    assert after["1.conv"].workspace == direct - after["1.conv"].packed_bytes + 64
    assert before["1.conv"].workspace == direct
    assert (before["3"].packs, before["3"].layout) == ("", "")
    total = sum(row.packed_bytes for row in after.values())
    assert f"{total / 1024:.1f} KiB of packed weights kept" in "\n".join(explain(swapped).summary)


def test_layouts_are_those_of_the_first_call():
    for layout, word in ((torch.contiguous_format, "NCHW"), (torch.channels_last, "NHWC")):
        x = X.contiguous(memory_format=layout)
        swapped = swap(model().to(memory_format=layout), {"conv2d": "direct", "1.conv": "smm"}, x)
        found = layers(swapped)
        assert found["2.conv"].layout == word
        assert found["1.conv"].layout == ("NCHW" if word == "NCHW" else "NHWC, copied to NCHW")
        summary = "\n".join(explain(swapped).summary)
        assert "reads images" not in summary  # swapped weights are channels_last: what the calls read, they will show
        assert ("copy their input: 1.conv" in summary) == (word == "NHWC")
        with torch.no_grad():
            swapped(x)
        summary = "\n".join(explain(swapped).summary)
        assert ("read images in NCHW: 0; with inputs in torch.channels_last" in summary) == (word == "NCHW")
        assert layers(swapped)["2.conv"].layout == "NHWC"
        assert {row.layout for row in layers(swapped).values() if row.used == "torch"} == {""}
    sliced = layers(swap(nn.Conv2d(3, 4, 3), "direct", torch.randn(1, 3, 8, 16)[..., ::2]))[""]
    assert sliced.layout == "strided, copied"


def test_a_part_of_a_report():
    report = explain(swap(model(), {"conv2d": "direct"}, X))
    assert [row.name for row in report.filter("1*").layers] == ["1.conv", "1.relu"]
    assert [row.name for row in report.filter(operation="conv2d").layers] == ["0", "1.conv", "2.conv"]
    assert {row.operation for row in report.filter(used="torch").layers} == {
        "relu",
        "adaptive_avg_pool2d",
        "flatten",
        "linear",
    }
    assert report.filter("1*", operation="conv2d", used="dir*").summary[0] == "1 calls: conv2d 1 (direct 1)"
    assert report.filter(used="no such").summary == ["0 calls"]


def test_long_reasons_are_notes_and_a_layer_is_one_line():
    with pytest.warns(UserWarning, match="1 of 3 layers"):
        report = explain(swap(model(), "winograd", X))
    lines = table_of(report)
    assert lines[1].rstrip().endswith("[1]")
    (note,) = [line for line in lines if line.startswith("[1] ")]
    assert note == f"[1] {report.layers[0].reason}"
    assert len(report.layers) == sum(line.partition(" ")[0] in {row.name for row in report.layers} for line in lines)


def test_long_names_are_shown_whole():
    """They are the keys that selectors take."""
    path = "encoder.layers.encoder_layer_11.self_attention_block.projection_of_the_output"
    net = nn.Module()
    here = net
    for part in path.split(".")[:-1]:
        here.add_module(part, nn.Module())
        here = here.get_submodule(part)
    here.add_module(path.rpartition(".")[2], nn.Conv2d(3, 3, 3))
    lines = table_of(explain(swap(net, {"conv2d": "default"})))
    assert lines[1].split()[0] == path
    assert lines[1].endswith("[1]")


def test_a_layer_that_the_examples_do_not_reach():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)

        def forward(self, x):
            return self.used(x)

    row = layers(swap(Some().eval(), {"conv2d": "default"}, X))["unused"]
    assert row.reason == "not called by the run with example inputs; chosen at the first call"


def test_modules_alike_are_one_row():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = explain(swap(nn.TransformerEncoder(layer, 3).eval(), {"linear": "gemm"}, torch.randn(1, 4, 16)))
    assert len(report.unreached) >= 3
    assert "layers.*.self_attn (3)" in str(report)
    assert len([line for line in str(report).splitlines() if "self_attn (3)" in line]) == 1


def test_notebooks_show_html():
    report = explain(swap(model(), {"conv2d": "direct", "1.relu": ai3_ops.prefer("direct", "torch")}, X))
    text = report._repr_html_()
    assert text.count("<tr>") == 1 + len(report.layers)
    assert html.escape("prefer('direct', 'torch')") in text
    assert "prefer('direct'" not in text
    assert all(f"<li>{html.escape(line)}</li>" in text for line in report.summary)


@pytest.fixture
def holder(monkeypatch):
    """A model that holds an optimized one, whatever gains."""
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
    monkeypatch.setattr(pipeline, "_gain", lambda *_: 2.0)
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    fast = ai3_ops.optimize(inner, X, "default", budget_seconds=0.2, progress=False)
    assert fast._ai3_first.body is not None
    return nn.Sequential(OrderedDict(neck=fast, head=nn.Conv2d(8, 4, 1)))


@pytest.mark.parametrize("examples", [None, X])
def test_swap_and_explain_stop_at_an_optimized_module(holder, examples):
    swapped = swap(holder, "direct", examples)
    inside = swapped.neck.get_submodule("0")
    assert type(inside) is nn.Conv2d
    assert inside.weight.is_contiguous()
    for found in (swapped, holder):
        report = explain(found)
        assert [layer.name for layer in report.layers] == ["head"]
        assert report.unreached == []
        assert list(report.optimized) == ["neck"]
        assert "optimized: neck; explain of such a module alone" in str(report)
        assert report.to_dict()["optimized"]["neck"]["parts"][0]["steps"]
        assert list(report.filter("ne*").optimized) == ["neck"]
        assert report.filter("head").optimized == {}
    with torch.no_grad():
        torch.testing.assert_close(swapped(X), holder(X), rtol=1e-4, atol=1e-4)
    assert layers(swapped)["head"].calls == 1
    with pytest.raises(ValueError, match=r"neck\.0.*is inside of an optimized module"):
        swap(holder, {"neck.0": "direct"}, examples)


def test_a_filtered_report_on_an_optimized_module_keeps_its_optimization(holder):
    report = explain(holder.neck)
    assert report.optimization is not None
    assert report.filter("0").optimization is report.optimization
    assert str(report.filter("0")) == str(report)
    with pytest.warns(
        UserWarning, match="is one that ai3_ops.optimize returned, and stays as it is: swap the original"
    ) as caught:
        swapped = swap(holder.neck, "direct")  # has no layer that can be chosen for
    assert len([w for w in caught if w.category is UserWarning]) == 1
    with pytest.raises(ValueError, match="optimize returned"):
        swap(holder.neck, "direct", strict=True)
    assert type(swapped) is type(holder.neck)
    assert str(explain(swapped)) == str(report)


def test_a_copy_of_the_weight_in_another_order_is_counted():
    """smm packs nothing, but reads a contiguous weight where swap made it channels_last."""
    swapped = swap(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), "smm", X)
    assert layers(swapped)["0"].packed_bytes == 0
    with torch.no_grad():
        swapped(X)
    row = layers(swapped)["0"]
    assert (row.packs, row.packed_bytes) == ("kept", swapped[0]._ai3.packs.bytes)
    assert row.packed_bytes == swapped[0].weight.nbytes
    assert f"{row.packed_bytes} B of packed weights kept" in "\n".join(explain(swapped).summary)


def test_filters_that_nothing_matches_are_errors():
    report = ai3_ops.explain(ai3_ops.swap(nn.Sequential(nn.Conv2d(3, 3, 3)), "direct"))
    assert not report.filter(used="torch").layers
    for wrong, words in (({"name": "9*"}, "no layer is named '9"), ({"operation": "conv"}, "did you mean 'conv2d'")):
        with pytest.raises(ValueError, match=words):
            report.filter(**wrong)


def test_layouts_and_choices_are_those_of_the_calls():
    """Not of the run with example inputs, before weights were in channels_last, nor of an earlier size or dtype."""
    model, x = (
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)).eval(),
        torch.randn(1, 64, 28, 28),
    )
    swapped = ai3_ops.swap(model, "default", x)
    with torch.inference_mode():
        swapped(x)
        assert [layer.layout for layer in ai3_ops.explain(swapped).layers] == ["NCHW", "NHWC"]
        swapped(torch.randn(1, 64, 2, 2))
        small = [layer.used for layer in ai3_ops.explain(swapped).layers]
    expected = ai3_ops.resolve("conv2d", "default", torch.randn(1, 64, 2, 2), model[0].weight, model[0].bias, 1, 1)
    assert small[0] == expected


# torch.compile --------------------------------------------------------------------------------------------------------
@pytest.fixture
def gains(monkeypatch):
    """Programs are always faster, so that they are what runs here."""
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
    monkeypatch.setattr(pipeline, "_gain", lambda *_: 2.0)
    torch.compiler.reset()


SMALL = {"backend": backend.ai3, "options": {"selectors": "default", "budget_seconds": 0.2}}


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_the_compile_backend_says_what_it_made_of_each_graph(gains, compiler, way):
    net = model()
    if way == "torch.compile":
        compiled = torch.compile(net, **SMALL)
        assert "has compiled none of it yet: call the model" in str(explain(compiled))
    else:
        compiled = net
        net.compile(**SMALL)
    with torch.inference_mode():
        compiled(X)
    report = explain(compiled)
    assert report.layers == []
    (part,) = report.optimization.parts
    assert part.name == "graph 1 of torch.compile"
    assert {step.operation for step in part.steps} >= {"conv2d", "linear"}
    assert any(step.operation == "conv2d" and step.algorithm != "torch" for step in part.steps)
    text = str(report)
    assert text.startswith("graph 1 of torch.compile: 2 ms before, 1 ms after")
    assert "torch.compile (" not in text
    assert report.to_dict()["optimization"]["parts"][0]["rewrites"]
    with torch.inference_mode():
        compiled(torch.cat([X, X]))  # another size may be another graph: the first one stays
    assert explain(compiled).optimization.parts[0] == part
    held = explain(nn.Sequential(OrderedDict(neck=compiled, head=nn.Conv2d(4, 4, 1))))
    assert {layer.used for layer in held.layers if layer.name.startswith("neck.")} == {"torch.compile"}
    assert [layer.used for layer in held.layers if layer.name == "head"] == ["torch"]
    assert (
        "neck: torch.compile computes it (backend 'ai3'); ai3_ops.explain of this module alone lists its steps"
        in held.summary
    )


def test_what_the_compile_backend_leaves_to_inductor_is_said(gains, compiler):
    swapped = torch.compile(swap(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), "direct", X), **SMALL)
    training = torch.compile(nn.Conv2d(3, 8, 3), **SMALL)
    with torch.inference_mode():
        swapped(X)
    training(X)
    report = explain(swapped)
    assert report.optimization.left == {
        "graph 1 of torch.compile": "Inductor compiled it: its convolutions and linear layers are swapped ones"
    }
    assert [layer.used for layer in report.layers] == ["direct", "torch.compile"]
    assert "_orig_mod.0" in str(report)
    assert "swapped ones" in str(report)
    left = explain(training).optimization.left
    assert left["graph 1 of torch.compile"].startswith("Inductor compiled it: needs gradients: call it under")


def test_graphs_are_forgotten_with_what_was_compiled(gains, compiler):
    net = nn.Conv2d(3, 8, 3)
    compiled = torch.compile(net, **SMALL)
    with torch.inference_mode():
        compiled(X)
    assert len(graphs_of(net)) == 1
    torch.compiler.reset()
    gc.collect()
    assert graphs_of(net) == []
    assert "none of it yet" in str(explain(compiled))


@pytest.mark.parametrize("choice", ["direct", None])
def test_other_backends_compute_what_the_report_does_not_see(choice):
    net = model() if choice is None else swap(model(), {"conv2d": choice}, X)
    report = explain(torch.compile(net, backend="eager"))
    used = {layer.name: layer.used for layer in report.layers}
    assert used["_orig_mod.0"] == (choice or "torch.compile")
    assert used["_orig_mod.5"] == "torch.compile"
    (note,) = report.notes
    assert "the compiler (backend 'eager') decides" in note
    assert note in str(report)
    assert note in report.filter("*").summary
    inside = nn.Sequential(OrderedDict(one=nn.Conv2d(3, 3, 1), two=torch.compile(net, backend="eager")))
    report = explain(inside)
    assert [layer.used for layer in report.layers][:2] == ["torch", choice or "torch.compile"]
    assert report.notes[0].startswith("two: torch.compile computes it.")


def test_a_compiled_optimized_module_has_its_report(holder):
    report = explain(torch.compile(holder.neck, backend="eager"))
    assert report.optimization is explain(holder.neck).optimization


def test_what_no_operation_covers_is_listed_by_kind():
    net = nn.Sequential(
        nn.Conv3d(2, 3, 3), nn.LSTM(3, 4), nn.PReLU(3), nn.PReLU(3), nn.Dropout(), nn.Linear(3, 3),
        torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3)),
    )  # fmt: skip
    net = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    for report in (explain(net), explain(swap(net, "direct")), explain(net).filter("*")):
        found = {module.name: (module.type, module.reason) for module in report.uncovered}
        assert {"0", "1", "2", "3", "5"} <= {*found}
        assert "4" not in found
        assert found["5"] == ("DynamicQuantizedLinear", "quantized weights have no algorithm")
        assert "6" in found or any(module.name == "6" for module in report.unreached)
        text = str(report)
        assert "not covered: 2 PReLU, 1 Conv3d, 1 LSTM" in text
        assert len([line for line in text.splitlines() if "PReLU  " in line]) == 1
        assert "* (2)" in text
    assert report.to_dict()["uncovered"][0]["type"] == "Conv3d"
    assert [m.name for m in report.filter("1").uncovered] == ["1"]


def test_times_of_a_plan_sort_the_layers_and_begin_the_summary():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), *[nn.ReLU() for _ in range(4)]).eval()

    def entry(operation, algorithm, time, of_torch):
        return PlannedLayer(operation, algorithm, time_us=time, candidates={"torch": {"time_us": of_torch}})

    plan = Plan(
        {"0": entry("conv2d", "direct", 100.0, 150.0), "2": entry("conv2d", "direct", 300.0, 900.0)}
        | {str(i): entry("relu", "torch", 50.0, 50.0) for i in (1, 3, 4, 5, 6)},
        _machine.machine(),
    )  # fmt: skip
    swapped = swap(net, plan)
    report = explain(swapped)
    assert report.summary[1] == (
        "time: 0.65 ms in the 7 calls that were measured, PyTorch's time / theirs 2.00x; 62% of it in chosen algorithms"
    )
    assert report.summary[2].startswith(
        "cost most: 2 0.3 ms (direct, 3.00x; optimize fuses what follows it); 0 0.1 ms ("
    )
    rows = [line.split() for line in table_of(report)[1:4]]
    assert [row[0] for row in rows] == ["2", "*", "0"]
    assert rows[0][4:6] == ["300.0", "3.00x"]
    assert "optimize fuses them into the layers before" in str(report)
    assert len(report.layers) == 7
    again = explain(pickle.loads(pickle.dumps(swap(swapped, {"2": "smm"}))))
    assert {row.name: row.time_us for row in again.layers} == {"0": 100.0, "2": None} | dict.fromkeys("13456", 50.0)
    share = str(plan).splitlines()[2]
    assert "3.00x" in str(plan)
    assert "0.33x" not in share


def test_few_relus_keep_their_lines():
    report = explain(swap(model(), "direct"))
    assert sum("relu" in line for line in table_of(report)) >= 2


def test_before_a_swap_calls_in_code_are_counted():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return F.relu(F.linear(self.layer(x), self.layer.weight))

    model = nn.Sequential(Functional(), nn.ReLU())
    unseen = "not listed before a swap: 2 calls in the code of modules"
    assert any(line.startswith(unseen) for line in explain(model).summary)
    report = explain(swap(model, "default"))
    assert not any("not listed" in line for line in report.summary)
    assert [row.name for row in report.layers if ":" in row.name] == ["0:relu_0", "0:linear_0"]
