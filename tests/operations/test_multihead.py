"""nn.MultiheadAttention and the layers that hold it, with a chosen algorithm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_attention import near
from torch import nn

import ai3_ops


def made(m, **options):
    torch.manual_seed(0)
    return ai3_ops.swap(m, {"attention": "flash"}, **options)


def used(model):
    return [layer for layer in ai3_ops.explain(model).to_dict()["layers"] if layer["operation"] == "attention"]


CASES = (
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 12, "vdim": 20},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", ["", "padding", "float", "both", "heads"])
def test_multihead_attention(options, need_weights, masked):
    torch.manual_seed(0)
    m = nn.MultiheadAttention(16, 4, **options).double().eval()
    q, k, v = torch.randn(3, 7, 16), torch.randn(3, 9, m.kdim), torch.randn(3, 9, m.vdim)
    if not options.get("batch_first"):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    args = tuple(t.double() for t in (q, k, v))
    kwargs = {"need_weights": need_weights, "average_attn_weights": masked != "heads"}
    if masked in ("padding", "both"):
        kwargs["key_padding_mask"] = torch.arange(9) >= torch.tensor([[9], [5], [8]])
    if masked in ("float", "both"):
        kwargs["attn_mask"] = torch.randn(7, 9).double() if masked == "float" else torch.rand(7, 9) > 0.8
    if masked == "heads":
        kwargs["attn_mask"] = torch.rand(12, 7, 9) > 0.7
    expected, expected_weights = m(*args, **kwargs)
    swapped = made(m)
    output, weights = swapped(*args, **kwargs)
    near(output, expected, 1e-12)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        near(weights, expected_weights, 1e-12)
    assert used(swapped)[0]["used"] == "flash"
    assert used(swapped)[0]["calls"] == 1
    for other in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        near(other(*args, **kwargs)[0], expected, 1e-12)


def test_self_attention_unbatched_causal_and_in_training():
    m = nn.MultiheadAttention(16, 2)
    x, mask = torch.randn(6, 16), nn.Transformer.generate_square_subsequent_mask(6)
    swapped = made(m)
    for options in ({}, {"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}):
        near(swapped(x, x, x, need_weights=False, **options)[0], m(x, x, x, need_weights=False, **options)[0])
    grads = torch.autograd.grad(swapped(x, x, x)[0].square().sum(), [*swapped.parameters()])
    for got, expected in zip(grads, torch.autograd.grad(m(x, x, x)[0].square().sum(), [*m.parameters()]), strict=True):
        near(got, expected, 1e-4)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        swapped(x, x, x, is_causal=True)


def test_dropout_in_training():
    m = made(nn.MultiheadAttention(16, 2, dropout=0.5))
    x = torch.randn(6, 3, 16)
    m(x, x, x)
    (layer,) = used(m)
    assert (layer["calls"], layer["torch_calls"]) == (1, 1)
    assert "PyTorch drops weights that are asked for" in layer["reason"]
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(m(x, x, x, need_weights=False)[0])
    assert used(m)[0]["torch_calls"] == 1
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    m.eval()
    near(m(x, x, x, need_weights=False)[0], nn.MultiheadAttention.forward(m, x, x, x, need_weights=False)[0])
    many = torch.stack([m.train()(x, x, x, need_weights=False)[0] for _ in range(4000)])
    expected = m.eval()(x, x, x, need_weights=False)[0]
    assert (many.mean(0) - expected).abs().max() < 6 * (many.std(0) / 4000**0.5).max()


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_compute_with_the_choice(kind):
    torch.manual_seed(0)
    layer = kind(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 70, 16)
    args = (x,) if kind is nn.TransformerEncoderLayer else (x, torch.randn(2, 9, 16))
    swapped = ai3_ops.swap(layer, {"attention": "flash"}, args)
    with torch.inference_mode():
        near(swapped(*args), layer(*args))
        calls = used(swapped)
    assert [c["used"] for c in calls] == ["flash"] * len(args)
    assert [c["calls"] for c in calls] == [1] * len(args)
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        near(compiled(*args), layer(*args))
    exported = torch.export.export(swapped, args).module()
    with torch.no_grad():
        near(exported(*args), layer(*args))


def test_an_encoder_with_padding_computes_with_the_choice():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 9, 16), torch.arange(9) >= torch.tensor([[9], [5], [8]])
    swapped = made(encoder)
    with torch.no_grad():
        near(swapped(x, src_key_padding_mask=padding)[~padding], encoder(x, src_key_padding_mask=padding)[~padding])
    assert [(c["used"], c["calls"], c["torch_calls"]) for c in used(swapped)] == [("flash", 1, 0)] * 2
    loaded = pickle.loads(pickle.dumps(swapped))
    with torch.no_grad():
        assert torch.equal(loaded(x, src_key_padding_mask=padding), swapped(x, src_key_padding_mask=padding))
    plain = ai3_ops.unswap(swapped)
    assert type(plain) is nn.TransformerEncoder
    assert plain.use_nested_tensor


def test_default_leaves_small_ones_to_pytorchs_fast_path():
    m = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    swapped = ai3_ops.swap(m, "default")
    with torch.inference_mode():
        torch.testing.assert_close(swapped(x, x, x), m(x, x, x), rtol=0, atol=0)
        swapped(x.repeat(1, 60, 1), x.repeat(1, 60, 1), x.repeat(1, 60, 1), need_weights=False)
    (layer,) = used(swapped)
    assert (layer["calls"], layer["torch_calls"]) == (2, 1)
    assert ai3_ops.unswap(swapped)(x, x, x)[0].shape == (1, 5, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exports_of_default_keep_lengths_open(dtype):
    x = torch.randn(2, 200, 64, dtype=dtype)
    model = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).to(dtype).eval()
    swapped = ai3_ops.swap(model, "default", x)
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(swapped, (x,), dynamic_shapes=(sizes,)).module()
    for shape in ((2, 200, 64), (1, 7, 64), (3, 300, 64)):
        y = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(program(y), model(y), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
