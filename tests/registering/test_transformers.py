"""Attention of transformers models by `attn_implementation="ai3"`."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ai3_ops
from ai3_ops.registering import transformers as registering

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
DECODER = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0}
LARGE = {"initializer_range": 0.3}  # weights for which the scores of a row differ, so that their scale and caps count
SOME_SLIDE = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
DECODERS = {
    "Llama": DECODER,
    "Mistral": DECODER | {"sliding_window": 6},
    "Qwen2": DECODER | SOME_SLIDE,
    "Qwen2Moe": DECODER
    | SOME_SLIDE
    | EXPERTS
    | {"shared_expert_intermediate_size": 16},  # whose layers do not say what their window is
    "Qwen3": DECODER,
    "Gemma2": DECODER | {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "GptOss": DECODER | {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 128},
    "GPTNeoX": SMALL | {"max_position_embeddings": 128, "pad_token_id": 0},
    "Olmo2": DECODER,
    "Phi": SMALL | {"max_position_embeddings": 128, "pad_token_id": 0},
}
ENCODERS = {
    "Bert": SMALL | {"max_position_embeddings": 128},
    "Roberta": SMALL | {"max_position_embeddings": 130},
    "ModernBert": SMALL | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    ai3_ops.register_transformers("flash")
    ai3_ops.register_transformers(name="ai3_default")


def models(kind, config, head):
    found = []
    for implementation in ("eager", "ai3", "ai3_default"):
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}Config")(**(LARGE | config))
        found.append(
            getattr(transformers, f"{kind}{head}")._from_config(made, attn_implementation=implementation).eval()
        )
    for other in found[1:]:
        other.load_state_dict(found[0].state_dict())
    return found


def batch(padding, length=20):
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, :7] = 0
        mask = mask if padding == "left" else mask.flip(1)
    return ids, mask


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_models_compute_what_eager_does(kind, padding):
    config = DECODERS.get(kind) or ENCODERS[kind]
    eager, *others = models(kind, config, "ForCausalLM" if kind in DECODERS and kind != "GPT2" else "Model")
    ids, mask = batch(padding)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask)[0]
        for model in others:
            got = model(ids, attention_mask=mask)[0]
            shown = mask.bool()
            assert (got - expected)[shown].abs().max() <= 1e-4 * expected[shown].abs().max()


# Their classes multiply matrices themselves, and add what mask they get.
OWN = {
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": 60},
    "MPNet": SMALL,
    "RemBert": SMALL | {"input_embedding_size": 16},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 60},
    "Longformer": SMALL | {"attention_window": 4, "max_position_embeddings": 64},
    "BlipText": SMALL | {"encoder_hidden_size": 32, "is_decoder": True},
}


@pytest.mark.filterwarnings("ignore:ai3_ops.register_transformers")
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", OWN)
def test_models_with_attention_of_their_own(kind, padding):
    eager, *others = models(kind, OWN[kind], "Model")
    ids, mask = batch(padding)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask)[0]
        for model in others:
            assert torch.equal(model(ids, attention_mask=mask)[0], expected)


def test_models_with_attention_of_their_own_are_named():
    *_, model = models("Bloom", OWN["Bloom"], "Model")
    registering._SAID.clear()
    with pytest.warns(UserWarning, match='BloomConfig are not known to ask.*as with attn_implementation="eager"'):
        model(batch("")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(batch("")[0])


@pytest.mark.parametrize("kind", DECODERS)
def test_generate(kind):
    more = {"bos_token_id": 1, "eos_token_id": 59, "pad_token_id": 0} if kind == "GPT2" else {}
    eager, *others = models(kind, DECODERS[kind] | more, "LMHeadModel" if kind == "GPT2" else "ForCausalLM")
    ids, mask = batch("left", 9)
    expected = eager.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for model in others:
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False), expected)


def test_sinks_are_trained():
    eager, model, _ = models("GptOss", DECODERS["GptOss"], "ForCausalLM")
    ids, mask = batch("right")
    grads = []
    for each in (eager, model):
        each(ids, attention_mask=mask)[0][mask.bool()].square().mean().backward()
        grads.append([p.grad for n, p in each.named_parameters() if "self_attn" in n])
    for got, expected in zip(grads[1], grads[0], strict=True):
        assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


class Masks(TorchDispatchMode):
    """Finds what is made that has an element for each pair of so many tokens."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        pairs = isinstance(made, torch.Tensor) and made.shape[-2:] == (self.length, self.length)
        if pairs and made.untyped_storage().nbytes() >= self.length**2:  # not expanded
            self.found.append(str(func))
        return made


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("kind", ["Mistral", "ModernBert"])
def test_windows_and_padding_become_no_mask(kind, padding):
    config = DECODERS.get(kind) or (ENCODERS[kind] | {"layer_types": ["sliding_attention"] * 2})
    eager, *others = models(kind, config, "Model")
    ids, mask = batch(padding, 70)
    shown = mask.bool()
    with torch.no_grad(), Masks(70) as of_eager:
        expected = eager(ids, attention_mask=mask)[0]
    assert of_eager.found
    for model in others:
        with torch.no_grad(), Masks(70) as made:
            got = model(ids, attention_mask=mask)[0]
        assert (got - expected)[shown].abs().max() <= 1e-4 * expected[shown].abs().max()
        assert made.found == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["Mistral", "Bert"])
def test_traces_hold_for_other_padding(kind):
    config = DECODERS.get(kind) or ENCODERS[kind]
    eager, model, _ = models(kind, config | {"use_cache": False}, "Model")
    ids, mask = batch("", 40)

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask)[0]

    with torch.no_grad():
        traced = torch.jit.trace(First(), (ids, mask))
        for padding in ("", "right"):
            ids, mask = batch(padding, 40)
            expected = eager(ids, attention_mask=mask)[0]
            shown = mask.bool()
            assert (traced(ids, mask) - expected)[shown].abs().max() <= 1e-4 * expected[shown].abs().max()


def test_a_window_is_a_whole_mask_for_whoever_reads_it():
    from transformers.masking_utils import create_sliding_window_causal_mask

    ids, mask = batch("left", 20)
    made = []
    for implementation in ("ai3", "sdpa"):
        config = transformers.MistralConfig(**DECODERS["Mistral"], attn_implementation=implementation)
        made.append(create_sliding_window_causal_mask(config, torch.zeros(*ids.shape, 32), mask, None))
    ours, theirs = made
    assert ours.shape == theirs.shape
    assert torch.equal(ours & True, theirs)
    assert torch.equal(ours[:, :, 3:], theirs[:, :, 3:])
    assert torch.equal(copy.deepcopy(ours), theirs)
    assert torch.equal(ours.mT, theirs.mT)


@pytest.mark.parametrize("kind", ["Mistral", "ModernBert"])
def test_compiled_layers_take_windows(kind):
    torch.compiler.reset()
    eager, model, _ = models(kind, DECODERS.get(kind) or ENCODERS[kind], "Model")
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    ids, mask = batch("left")
    shown = mask.bool()
    with torch.no_grad():
        expected, got = (each(ids, attention_mask=mask)[0] for each in (eager, model))
    assert (got - expected)[shown].abs().max() <= 1e-4 * expected[shown].abs().max()


@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_an_encoders_window_is_what_its_mask_says(padding):
    """T5Gemma's layers are told one key fewer to a side than ModernBERT's are, for the same mask."""
    part = {name: DECODER[name] for name in DECODER.keys() - {"pad_token_id"}}
    part |= LARGE | {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 8}
    found = []
    for implementation in ("eager", "ai3", "ai3_default"):
        torch.manual_seed(0)
        sides = [transformers.T5GemmaModuleConfig(**part) for _ in range(2)]
        config = transformers.T5GemmaConfig(encoder=sides[0], decoder=sides[1], vocab_size=60, pad_token_id=0)
        found.append(transformers.T5GemmaModel._from_config(config, attn_implementation=implementation).eval())
    ids, mask = batch(padding)
    given = {"attention_mask": mask, "decoder_input_ids": ids[:, :9]}
    shown = mask.bool()
    with torch.no_grad():
        expected = found[0](ids, **given)
        for model in found[1:]:
            got = model(ids, **given)
            a, b = (each.encoder_last_hidden_state[shown] for each in (got, expected))
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()
            assert (got[0] - expected[0]).abs().max() <= 1e-4 * expected[0].abs().max()


def test_clip_and_whisper():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    eager, *others = models("CLIPVision", small | {"image_size": 32, "patch_size": 4}, "Model")
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for model in others:
            assert (model(image)[0] - eager(image)[0]).abs().max() <= 1e-4 * eager(image)[0].abs().max()
    config = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 60, "num_mel_bins": 8, "max_source_positions": 40,
        "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 59, "decoder_start_token_id": 1,
    }  # fmt: skip
    eager, *others = models("Whisper", config, "ForConditionalGeneration")
    sound = torch.randn(2, 8, 80, generator=torch.Generator().manual_seed(3))
    ids, mask = batch("right", 12)
    with torch.no_grad():
        expected = eager(sound, decoder_input_ids=ids, decoder_attention_mask=mask)[0]
        for model in others:
            got = model(sound, decoder_input_ids=ids, decoder_attention_mask=mask)[0]
            assert (got - expected)[mask.bool()].abs().max() <= 1e-4 * expected.abs().max()
            steps = [m.generate(sound, max_new_tokens=6, do_sample=False) for m in (eager, model)]
            assert torch.equal(*steps)


@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_clips_text_tower(padding):
    config = SMALL | {"max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 59, "pad_token_id": 0}
    eager, *others = models("CLIPText", config, "Model")
    ids, mask = batch(padding)
    shown = mask.bool()
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask)[0]
        for model in others:
            got = model(ids, attention_mask=mask)[0]
            assert (got - expected)[shown].abs().max() <= 1e-4 * expected[shown].abs().max()


def test_names_that_mean_something_else():
    with pytest.raises(ValueError, match="means something else"):
        ai3_ops.register_transformers(name="ai3_flash")
    with pytest.raises(ValueError, match="none_such"):
        ai3_ops.register_transformers("none_such", name="ai3_none")


# Classes with attention of their own, as references of our operators -------------------------------------------------------
def _heads(m, x, names, heads=4):
    return [getattr(m, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for name in names]


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("window", [4, 8])
def test_longformer_is_transformers_layer(window, length):
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = transformers.LongformerConfig(**SMALL, attention_window=[window])
    layer = LongformerSelfAttention(config, 0).double().eval()
    x = torch.randn(3, length, 32, dtype=torch.float64)
    kind = torch.zeros(3, length)
    kind[0, [0, 5, length - 1]] = 1  # global ones, others in each row of the batch, and none in the last
    kind[1, [2, 3, length // 2]] = 1
    kind[1, -6:] = kind[2, -1:] = -1
    for asked in (kind, kind.clamp_max(0)):
        is_global, padded = asked > 0, asked < 0
        (expected,) = layer(
            x, attention_mask=asked * 10000, is_index_masked=padded, is_index_global_attn=is_global,
            is_global_attn=bool(is_global.any()),
        )  # fmt: skip
        q, k, v = _heads(layer, x, ("query", "key", "value"))
        of_global = _heads(layer, x, ("query_global", "key_global", "value_global"))
        names = ("global_query", "global_key", "global_value")
        got = torch.ops.ai3.attention_longformer(
            q,
            k,
            v,
            window=window,
            global_mask=is_global,
            key_padding=padded,
            **dict(zip(names, of_global, strict=True)),
        )
        got, shown = got.transpose(1, 2).flatten(2), ~padded
        assert (got - expected)[shown].abs().max() <= 1e-6 * expected[shown].abs().max()
        assert (got[padded] == 0).all()


@pytest.mark.parametrize("blocks", [6, 12])
@pytest.mark.parametrize("random", [1, 2])
def test_bigbird_is_transformers_layer_in_evaluation(random, blocks):
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        **SMALL, attention_type="block_sparse", block_size=8, num_random_blocks=random, max_position_embeddings=128
    )
    layer = BigBirdBlockSparseAttention(config).double().eval()
    length = 8 * blocks
    x = torch.randn(2, length, 32, dtype=torch.float64)
    seen = torch.ones(2, length, dtype=torch.float64)
    seen[1, -11:] = 0
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(seen, 8)
    expected = layer(x, band, rows, columns, blocked, blocked)[0]
    q, k, v = _heads(layer, x, ("query", "key", "value"))
    options = {"block_size": 8, "random_blocks": random}
    if length > (5 + 2 * random) * 8:  # below, transformers' model takes another layer
        options["random"] = "hf_eval"
    else:
        options["random_indices"] = torch.zeros(4, blocks - 2, random, dtype=torch.long)
    got = torch.ops.ai3.attention_bigbird(q, k, v, seen[:, None, None].bool(), **options).transpose(1, 2).flatten(2)
    shown = seen.bool()
    assert (got - expected)[shown].abs().max() <= 1e-6 * expected[shown].abs().max()


def test_sam_is_swapped_and_its_positions_are_rel_h_and_rel_w():
    from transformers.models.sam.modeling_sam import SamVisionModel

    torch.manual_seed(0)
    config = transformers.SamVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=48, patch_size=4, global_attn_indexes=[1],
        window_size=7, output_channels=16, mlp_dim=48,
    )  # fmt: skip
    model = SamVisionModel._from_config(config, attn_implementation="sdpa").eval()
    for name, p in model.named_parameters():
        if "rel_pos" in name:
            torch.nn.init.normal_(p)
    image = torch.randn(1, 3, 48, 48)
    swapped = ai3_ops.swap(model, {"attention": "flash"}, image)
    assert [row["used"] for row in ai3_ops.explain(swapped).to_dict()["layers"] if row["operation"] == "attention"] == [
        "flash", "flash",
    ]  # fmt: skip
    layer = model.vision_encoder.layers[1].attn
    x = torch.randn(2, 12, 12, 32)
    with torch.no_grad():
        assert (swapped(image)[0] - model(image)[0]).abs().max() <= 1e-4 * model(image)[0].abs().max()
        q, k, v = layer.qkv(x).reshape(2, 144, 3, 2, 16).permute(2, 0, 3, 1, 4)
        by_h, by_w = (layer.get_rel_pos(12, 12, p) for p in (layer.rel_pos_h, layer.rel_pos_w))
        grid = q.unflatten(2, (12, 12))
        rel_h = torch.einsum("bnhwc,hkc->bnhwk", grid, by_h).flatten(2, 3)
        rel_w = torch.einsum("bnhwc,wkc->bnhwk", grid, by_w).flatten(2, 3)
        y = torch.ops.ai3.attention_flash(q, k, v, rel_h=rel_h, rel_w=rel_w)
        got = layer.proj(y.transpose(1, 2).reshape(2, 12, 12, 32))
        expected = layer(x)[0]
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
