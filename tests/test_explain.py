"""What `explain` says of a model: tables, summary, memory, layouts, filters, notebooks."""

from __future__ import annotations

import html

import pytest
import torch
from modules import layers
from torch import nn

import ai3_ops
from ai3_ops import explain, swap


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
    assert before["3"].packs == before["3"].layout == "" or before["3"].layout == "NCHW"
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
        assert ("runs in NCHW: 3 conv2d calls" in summary) == (word == "NCHW")
        assert ("copies its input: 1.conv" in summary) == (word == "NHWC")
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
    assert report.filter("no such").summary == ["0 calls: "]


def test_long_reasons_are_notes_and_a_layer_is_one_line():
    with pytest.warns(UserWarning, match="1 of 3 layers"):
        report = explain(swap(model(), "winograd", X))
    lines = str(report).splitlines()
    assert lines[1].rstrip().endswith("[1]")
    (note,) = [line for line in lines if line.startswith("[1] ")]
    assert note == f"[1] {report.layers[0].reason}"
    assert len(report.layers) == sum(line.partition(" ")[0] in {row.name for row in report.layers} for line in lines)


def test_modules_alike_are_one_row():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = explain(swap(nn.TransformerEncoder(layer, 3).eval(), {"linear": "gemm"}, torch.randn(1, 4, 16)))
    assert len(report.unreached) >= 3
    assert "layers.*.self_attn (3)" in str(report)
    assert len([line for line in str(report).splitlines() if "self_attn " in line]) == 1


def test_notebooks_show_html():
    report = explain(swap(model(), {"conv2d": "direct", "1.relu": ai3_ops.prefer("direct", "torch")}, X))
    text = report._repr_html_()
    assert text.count("<tr>") == 1 + len(report.layers)
    assert html.escape("prefer('direct', 'torch')") in text
    assert "prefer('direct'" not in text
    assert all(f"<li>{html.escape(line)}</li>" in text for line in report.summary)
