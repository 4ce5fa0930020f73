"""torchvision's function of attention in shifted windows, in Swin and Swin V2, with a chosen algorithm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import ai3_ops

swin = pytest.importorskip("torchvision.models.swin_transformer")
KINDS = {"v1": swin.ShiftedWindowAttention, "v2": swin.ShiftedWindowAttentionV2}


def made(kind, window=(4, 4), shift=(2, 2), **options):
    torch.manual_seed(0)
    m = KINDS[kind](32, [*window], [*shift], 4, **options)
    for name, p in m.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p)
    return m.eval()


def calls(model):
    return [layer for layer in ai3_ops.explain(model).to_dict()["layers"] if layer["operation"] == "attention"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [(0, 0), (2, 2), (0, 1), (3, 0)], ids=str)
@pytest.mark.parametrize("size", [(12, 12), (7, 9), (4, 11), (3, 3)], ids=str)
def test_shifted_windows(kind, shift, size):
    m = made(kind, (4, 4) if shift != (0, 1) else (3, 5), shift)
    x = torch.randn(2, *size, 32)
    swapped = ai3_ops.swap(m, {"attention": "flash"}, x)
    expected, got = m(x), swapped(x)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert got.is_contiguous()
    (layer,) = calls(swapped)
    assert (layer["used"], layer["calls"], layer["torch_calls"]) == ("flash", 1, 0)
    grads, wanted = (torch.autograd.grad(f(x).square().sum(), [*f.parameters()]) for f in (swapped, m))
    for g, w in zip(grads, wanted, strict=True):
        assert (g - w).abs().max() <= 1e-4 * max(1, w.abs().max())


def test_dropout_copies_and_compiling():
    x = torch.randn(2, 12, 12, 32)
    m = made("v1", attention_dropout=0.3, dropout=0.2)
    swapped = ai3_ops.swap(m, {"attention": "flash"}, x).train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(swapped(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    swapped.eval()
    expected = m(x)
    for other in (
        copy.deepcopy(swapped),
        pickle.loads(pickle.dumps(swapped)),
        torch.compile(swapped, backend="aot_eager", fullgraph=True),
    ):
        assert (other(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert calls(copy.deepcopy(swapped))[0]["used"] == "flash"
    torch.testing.assert_close(ai3_ops.unswap(swapped)(x), expected, rtol=0, atol=0)


def test_default_leaves_small_and_trained_ones():
    x = torch.randn(1, 8, 8, 32)
    m = made("v1")
    swapped = ai3_ops.swap(m, {"attention": "default"}, x)
    with torch.no_grad():
        torch.testing.assert_close(swapped(x), m(x), rtol=0, atol=0)
    assert calls(swapped)[0]["torch_calls"] == 1
    large = torch.randn(4, 32, 32, 32)
    with torch.no_grad():
        assert (swapped(large) - m(large)).abs().max() <= 1e-5 * m(large).abs().max()
    assert (calls(swapped)[0]["calls"], calls(swapped)[0]["torch_calls"]) == (2, 1)
    torch.testing.assert_close(swapped(large), m(large), rtol=0, atol=0)
    assert "a bias is trained" in calls(swapped)[0]["reason"]


def test_explain_says_what_stays():
    from torchvision.models import swin_t

    x = torch.randn(1, 3, 64, 64)
    model = swin_t().eval()
    swapped = ai3_ops.swap(model, {"attention": "flash"}, x)
    assert {layer["used"] for layer in calls(swapped)} == {"flash"}
    assert len(calls(swapped)) == 12
    assert "calls a function that is one call of attention" in str(ai3_ops.explain(swapped))
    with torch.inference_mode():
        expected = model(x)
        assert (swapped(x) - expected).abs().max() <= 1e-4 * expected.abs().max()


COMPOSED = {  # timm's models, small, and whether fused attention may be asked for
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}, True),
    "swinv2_tiny_window8_256": ({"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}, False),
    "xcit_nano_12_p16_224": ({"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "cls_attn_layers": 1}, True),
    "levit_128s": ({"img_size": 64, "embed_dim": (32, 48, 64), "depth": (1, 1, 1), "num_heads": (2, 3, 4)}, False),
    "tnt_s_patch16_224": ({"img_size": 32, "embed_dim": 32, "inner_dim": 12, "depth": 1, "num_heads_outer": 2}, False),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", COMPOSED)
def test_timms_attention_is_reached_or_explained(name, fused):
    timm = pytest.importorskip("timm")
    options, may = COMPOSED[name]
    before = timm.layers.use_fused_attn(), timm.layers.use_fused_attn(experimental=True)
    try:
        timm.layers.set_fused_attn(fused, fused)
        model = timm.create_model(name, **options).eval()
    finally:
        timm.layers.set_fused_attn(*before)
    x = torch.randn(1, 3, options["img_size"], options["img_size"])
    swapped = ai3_ops.swap(model, {"attention": "flash"}, x)
    with torch.inference_mode():
        expected = model(x)
        assert (swapped(x) - expected).abs().max() <= 1e-4 * expected.abs().max()
    computed = [layer for layer in calls(swapped) if layer["calls"]]
    composed = [m for m in ai3_ops.explain(swapped).unreached if m.seen.get("attention")]
    assert bool(computed) == (fused and may)
    assert {layer["used"] for layer in computed} <= {"flash"}
    assert bool(composed) != (fused and may)
    assert all("composes attention of products and a softmax" in m.reason for m in composed)


def test_composed_attention_is_no_call_that_strict_wants():
    class Attends(torch.nn.Module):
        def forward(self, x):
            weights = (x @ x.mT / 4).softmax(-1)
            return torch.einsum("bij,bjc->bic", torch.dropout(weights, 0.1, False).to(x.dtype), x)

    class Gates(torch.nn.Module):  # no product before the softmax, none behind it
        def forward(self, x):
            return (x * x.softmax(-1)) @ x.mT + (x @ x.mT).softmax(-1).sum(-1, keepdim=True)

    model, x = torch.nn.Sequential(Attends(), Gates()), torch.randn(2, 5, 5)
    swapped = ai3_ops.swap(model, "default", x, strict=True)
    torch.testing.assert_close(swapped(x), model(x))
    (found,) = ai3_ops.explain(swapped).unreached
    assert (found.name, found.seen) == ("0", {"attention": 1})
    assert ai3_ops.explain(swapped).to_dict()["unreached"][0]["reason"].startswith("composes attention")
