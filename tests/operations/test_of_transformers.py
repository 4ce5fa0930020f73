"""Attention modules of transformers that multiply matrices themselves, in swapped models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ai3_ops
from ai3_ops.operations.of_transformers import ENTRIES

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
pytestmark = pytest.mark.filterwarnings("ignore:Input ids are automatically padded")


def longformer(**options):
    torch.manual_seed(0)
    config = transformers.LongformerConfig(**SMALL, attention_window=[8, 4], max_position_embeddings=130, **options)
    return transformers.LongformerModel(config).eval()


def led():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 60}
    more = {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_window": [8]}
    return transformers.LEDModel(transformers.LEDConfig(**sizes, **more, max_encoder_position_embeddings=130)).eval()


def bigbird(random=1):
    torch.manual_seed(0)
    options = {"attention_type": "block_sparse", "block_size": 8, "num_random_blocks": random}
    config = transformers.BigBirdConfig(**SMALL, **options, max_position_embeddings=130)
    return transformers.BigBirdModel(config, add_pooling_layer=False).eval()


def batch(length=38):
    """Padding in one row, and global tokens that are scattered, others in each row."""
    ids = torch.randint(3, 60, (3, length), generator=torch.Generator().manual_seed(1))
    seen, all_see = torch.ones_like(ids), torch.zeros_like(ids)
    seen[1, -9:] = 0
    all_see[0, [0, 5, length - 1]] = 1
    all_see[1, [2, 3]] = 1
    return {"input_ids": ids, "attention_mask": seen, "global_attention_mask": all_see}


def rows(model):
    return [layer for layer in ai3_ops.explain(model).to_dict()["layers"] if layer["operation"] == "attention"]


def is_close(got, expected, seen, limit=1e-5):
    return (got - expected)[seen].abs().max() <= limit * expected[seen].abs().max()


@pytest.mark.parametrize("algorithm", ["longformer", "default"])
@pytest.mark.parametrize("globals_", [True, False])
def test_longformer(algorithm, globals_):
    model, inputs = longformer(), batch()
    seen = inputs["attention_mask"].bool()
    if not globals_:
        del inputs["global_attention_mask"]
    swapped = ai3_ops.swap(model, {"attention": algorithm}, inputs)
    with torch.no_grad():
        assert is_close(swapped(**inputs)[0], model(**inputs)[0], seen)
    assert [(r["name"], r["used"], r["calls"], r["torch_calls"]) for r in rows(swapped)] == [
        (f"encoder.layer.{i}.attention.self", "longformer", 1, 0) for i in range(2)
    ]
    grads = []
    for each in (model, swapped):
        each(**inputs)[0][seen].square().mean().backward()
        grads.append({n: p.grad for n, p in each.named_parameters() if "attention.self" in n and p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        assert (grads[1][name] - expected).abs().max() <= 1e-4 * max(1e-2, expected.abs().max()), name


def test_leds_encoder_is_longformers():
    model, inputs = led(), batch()
    swapped = ai3_ops.swap(model.encoder, {"attention": "longformer"}, inputs)
    with torch.no_grad():
        assert is_close(swapped(**inputs)[0], model.encoder(**inputs)[0], inputs["attention_mask"].bool())
    assert [(r["used"], r["torch_calls"]) for r in rows(swapped)] == [("longformer", 0)]


def test_what_stays_the_classes_own_and_why():
    model, inputs = longformer(), batch()
    with pytest.warns(UserWarning, match="keep PyTorch's implementation"):
        other = ai3_ops.swap(model, {"attention": "flash"}, inputs)
    assert "is not what LongformerSelfAttention computes, which longformer does" in rows(other)[0]["reason"]
    wide = ai3_ops.Algorithm("longformer", window=16)
    with pytest.raises(ValueError, match="takes its parameters from LongformerSelfAttention"):
        ai3_ops.swap(model, {"encoder.layer.0.attention.self": wide})  # known without inputs, too
    swapped = ai3_ops.swap(model, {"attention": "longformer"}, inputs)
    with torch.no_grad():
        expected, got = (each(**inputs, output_attentions=True) for each in (model, swapped))
    for a, b in zip(
        got.attentions + got.global_attentions, expected.attentions + expected.global_attentions, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (rows(swapped)[0]["torch_calls"], rows(swapped)[0]["reason"]) == (1, "the weights are asked for")
    strict = ai3_ops.swap(model, {"attention": "longformer"}, inputs, strict=True)
    with pytest.raises(RuntimeError, match=r"encoder.layer.0.attention.self .*the weights are asked for"):
        strict(**inputs, output_attentions=True)


@pytest.mark.parametrize("kind", ["longformer", "sam"])
def test_training_with_dropout(kind):
    """Other weights are dropped than the class drops, as many of them: means over many calls are near the output without."""
    if kind == "longformer":
        model, inputs, algorithm = longformer(hidden_dropout_prob=0.0), batch(), "longformer"
    else:
        model, inputs, algorithm = sam("eager"), {"pixel_values": torch.randn(1, 3, 48, 48)}, "flash"
    swapped = ai3_ops.swap(model, {"attention": algorithm}, inputs)
    name = rows(swapped)[0]["name"]
    swapped(**inputs)
    given = []
    layer = swapped.get_submodule(name)
    layer.register_forward_pre_hook(lambda m, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        swapped(**inputs)
        args, kwargs = given[0]
        whole = layer(*args, **kwargs)[0]
        layer.dropout = 0.3
        torch.testing.assert_close(layer(*args, **kwargs)[0], whole)  # in evaluation
        layer.train()
        draws = []
        for seed in range(300):
            torch.manual_seed(seed)
            draws.append(layer(*args, **kwargs)[0])
        torch.manual_seed(7)
        assert torch.equal(layer(*args, **kwargs)[0], draws[7])
    found = torch.stack(draws)
    assert not torch.equal(draws[0], draws[1])
    error = (found.mean(0) - whole).abs() / (found.std(0) / 300**0.5).clamp_min(1e-6)
    assert error.max() < 6
    assert rows(swapped)[0]["torch_calls"] == 0


def test_copies_files_and_unswap():
    model, inputs = longformer(), batch()
    swapped = ai3_ops.swap(model, {"attention": "longformer"}, inputs)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)[0]
        for other in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
            assert is_close(other(**inputs)[0], expected, seen)
            assert {r["used"] for r in rows(other)} == {"longformer"}
        plain = ai3_ops.unswap(swapped)
        torch.testing.assert_close(plain(**inputs)[0], expected, rtol=0, atol=0)
    layer = plain.encoder.layer[0].attention.self
    assert type(layer) is transformers.models.longformer.modeling_longformer.LongformerSelfAttention


def test_compiled_and_tuned():
    model, inputs = longformer(), batch()
    layer = model.encoder.layer[0].attention.self
    swapped = ai3_ops.swap(layer, {"attention": "longformer"})
    x, padded, all_see = (
        torch.randn(3, 40, 32),
        torch.zeros(3, 40, dtype=torch.bool),
        torch.zeros(3, 40, dtype=torch.bool),
    )
    padded[1, -9:] = all_see[0, [0, 5]] = all_see[1, 3] = True
    mask = (all_see.int() - padded.int()) * 10000.0
    options = {
        "attention_mask": mask,
        "is_index_masked": padded,
        "is_index_global_attn": all_see,
        "is_global_attn": True,
    }
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert is_close(compiled(x, **options)[0], layer(x, **options)[0], ~padded)
    with pytest.warns(UserWarning, match="not measured within the budget"):
        plan = ai3_ops.tune(model, inputs, cache=False, progress=False, budget_seconds=0.1)
    assert {r["used"] for r in rows(ai3_ops.swap(model, plan, inputs))} == {"torch"}


@pytest.mark.parametrize("random", [1, 3])
def test_bigbird_in_evaluation(random):
    model, inputs = bigbird(random), batch(104)
    del inputs["global_attention_mask"]
    seen = inputs["attention_mask"].bool()
    swapped = ai3_ops.swap(model, {"attention": "bigbird"}, inputs)
    with torch.no_grad():
        expected = model(**inputs)[0]
        assert is_close(swapped(**inputs)[0], expected, seen)
        assert [(r["used"], r["calls"], r["torch_calls"]) for r in rows(swapped)] == [("bigbird", 1, 0)] * 2
        got = swapped(**inputs, output_attentions=True).attentions
        for a, b in zip(got, model(**inputs, output_attentions=True).attentions, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert rows(swapped)[0]["reason"] == "the weights are asked for"
    swapped.train()(**inputs)
    assert rows(swapped)[0]["reason"] == "blocks are drawn anew in training"


# SAM ------------------------------------------------------------------------------------------------------------------
def sam(implementation, image_size=48, kind="Sam", **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "window_size": 7}
    more = {"global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 48, "image_size": image_size}
    config = getattr(transformers, f"{kind}VisionConfig")(**sizes, **more, **options)
    model = getattr(transformers, f"{kind}VisionModel")._from_config(config, attn_implementation=implementation).eval()
    for name, p in model.named_parameters():
        if "rel_pos" in name:
            torch.nn.init.normal_(p)
    return model


@pytest.mark.parametrize("kind", ["Sam", "SamHQ"])
def test_sams_classes_of_pytorchs_function_drop_nothing(kind):
    model, image = sam("sdpa", kind=kind), torch.randn(1, 3, 48, 48)
    swapped = ai3_ops.swap(model, {"attention": "flash"}, image)
    for each in (model, swapped):
        for layer in each.vision_encoder.layers:
            layer.attn.train().dropout = 0.5
    expected, got = (each(image)[0] for each in (model, swapped))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert rows(swapped)[0]["torch_calls"] == 0


def test_sams_training_where_pytorch_leads_is_the_classes(monkeypatch):
    entry, hidden = ENTRIES["transformers.models.sam.modeling_sam:SamVisionAttention"], torch.empty(2, 40, 40, 32)
    layer = sam("eager").vision_encoder.layers[0].attn
    assert not entry.slower(layer, hidden, True)
    monkeypatch.setattr("ai3_ops.operations.of_transformers.leads_in", lambda dtype: True)
    assert entry.slower(layer, hidden.bfloat16(), True)


@pytest.mark.parametrize("kind", ["Sam", "SamHQ"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("positions", [True, False])
def test_sam(implementation, kind, positions):
    model, image = sam(implementation, kind=kind, use_rel_pos=positions), torch.randn(2, 3, 48, 48)
    for algorithm in ("flash", "math"):
        swapped = ai3_ops.swap(model, {"attention": algorithm}, image)
        with torch.no_grad():
            expected, got = (each(image)[0] for each in (model, swapped))
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert [(r["name"], r["used"], r["torch_calls"]) for r in rows(swapped)] == [
            (f"vision_encoder.layers.{i}.attn", algorithm, 0) for i in range(2)
        ]
    grads = []
    for each in (model, ai3_ops.swap(model, {"attention": "flash"}, image)):
        each(image)[0].square().mean().backward()
        grads.append({n: p.grad for n, p in each.named_parameters() if ".attn." in n})
    for name, expected in grads[0].items():
        assert (grads[1][name] - expected).abs().max() <= 1e-4 * expected.abs().max(), name


SIZES = [  # of a batch and a grid of tokens of two heads, in training or not, and whether `flash` gains (docs/attention.md)
    ((2, 14, 14), False, False), ((3, 14, 14), False, False), ((4, 14, 14), False, True), ((1, 20, 20), False, True),
    ((4, 14, 14), True, False), ((1, 40, 40), True, False), ((2, 40, 40), True, True), ((9, 39, 40), True, False),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "trains", "gains"), SIZES)
def test_default_leaves_sams_small_windows_and_training_to_the_class(sizes, trains, gains):
    layer = sam("eager").vision_encoder.layers[0].attn
    entry = ENTRIES["transformers.models.sam.modeling_sam:SamVisionAttention"]
    assert ("the class is faster" in entry.slower(layer, torch.empty(*sizes, 32, device="meta"), trains)) != gains
    if sizes[1] > 20:  # which would take a second
        return
    x = torch.randn(*sizes, 32)
    swapped = ai3_ops.swap(layer, "default", x)
    with torch.set_grad_enabled(trains):
        assert (swapped(x)[0] - layer(x)[0]).abs().max() <= 1e-5 * layer(x)[0].abs().max()
    left = [r["torch_calls"] for r in rows(swapped)]
    assert left == [0 if gains else 1]
    if not gains:
        again = ai3_ops.swap(pickle.loads(pickle.dumps(swapped)), {"linear": "torch"})  # keeps what was decided
        with torch.set_grad_enabled(trains):
            again(x)
        assert "the class is faster for such sizes" in rows(again)[0]["reason"]
    named = ai3_ops.swap(layer, {"attention": "flash"}, x)
    named(x)
    assert [r["torch_calls"] for r in rows(named)] == [0]


def test_default_takes_every_longformer_and_bigbird():
    for model, inputs in ((longformer(), batch()), (bigbird(), batch(104))):
        if "BigBird" in type(model).__name__:
            del inputs["global_attention_mask"]
        swapped = ai3_ops.swap(model, "default", inputs)
        swapped(**inputs)[0].sum().backward()
        assert [(r["calls"], r["torch_calls"]) for r in rows(swapped)] == [(1, 0)] * 2


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple) else (made,):
            self.bytes = max(self.bytes, t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0)
        return made


def test_sam_makes_no_bias_of_all_pairs():
    layer, x = sam("sdpa", 256).vision_encoder.layers[1].attn, torch.randn(1, 64, 64, 32)  # one window of 64 x 64
    swapped = ai3_ops.swap(layer, {"attention": "flash"})
    largest, outputs = [], []
    for each in (layer, swapped):
        with torch.no_grad(), Largest() as made:
            outputs.append(each(x)[0])
        largest.append(made.bytes)
    assert (outputs[1] - outputs[0]).abs().max() <= 1e-5 * outputs[0].abs().max()
    assert largest[0] >= 4 * 2 * 4096**2
    assert largest[1] <= 2 * 4 * 4096 * 3 * 32  # queries, keys and values, or positions of rows and of columns
    q = torch.empty(1, 2, 4096, 16)
    rel = {"rel_h": torch.empty(1, 2, 4096, 64), "rel_w": torch.empty(1, 2, 4096, 64)}
    assert ai3_ops.workspace("attention", "flash", q, q, q, **rel) < 2**24


def test_sam_gives_weights_that_are_asked_for():
    model, image = sam("eager"), torch.randn(1, 3, 48, 48)
    swapped = ai3_ops.swap(model, {"attention": "flash"}, image)
    with torch.no_grad():
        expected, got = (each(image, output_attentions=True).attentions for each in (model, swapped))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert rows(swapped)[0]["reason"] == "the weights are asked for"
