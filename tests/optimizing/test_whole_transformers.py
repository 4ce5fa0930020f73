"""Transformers through `optimize`: one program, whatever the batch, saved and loaded."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from nets import check, exact, optimized, seeded
from torch import nn

import ai3_ops
from ai3_ops.graph.network import difference
from ai3_ops.programs.lower import Region


class Patches(nn.Module):
    """A vision transformer: patches, a class token, positions, PyTorch's own blocks."""

    def __init__(self, features=16):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, features, 4, 4), nn.Linear(features, 5)
        self.token = nn.Parameter(torch.zeros(1, 1, features))
        self.positions = nn.Parameter(torch.zeros(1, 10, features))
        self.norm, self.attention = nn.LayerNorm(features), nn.MultiheadAttention(features, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, 40), nn.GELU(), nn.Linear(40, features))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(x))[:, 0])


class Block(nn.Module):
    """Attention as models write it: `how` the heads are split, and what is masked."""

    def __init__(self, how="unbind", masked="", features=24, heads=3, kv_heads=3):
        super().__init__()
        self.how, self.masked, self.heads, self.kv_heads = how, masked, heads, kv_heads
        size = features // heads
        self.qkv = nn.Linear(features, (heads + 2 * kv_heads) * size)
        self.q, self.k, self.v, self.out = (nn.Linear(features, features) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(features), nn.Linear(features, 32), nn.Linear(32, features)
        self.register_buffer("lower", torch.ones(7, 7).tril().bool())
        self.register_buffer("bias", torch.randn(1, heads, 7, 7, generator=torch.Generator().manual_seed(3)))

    def heads_of(self, x):
        n, length, features = x.shape
        size = features // self.heads
        match self.how:
            case "unbind":
                return self.qkv(x).reshape(n, length, 3, self.heads, size).permute(2, 0, 3, 1, 4).unbind(0)
            case "chunk":
                return [t.view(n, length, self.heads, size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
            case "split":
                widths = [self.heads * size, self.kv_heads * size, self.kv_heads * size]
                parts = self.qkv(x).split(widths, -1)
                return [t.unflatten(-1, (-1, size)).transpose(1, 2) for t in parts]
        return [f(x).view(n, length, self.heads, size).transpose(1, 2) for f in (self.q, self.k, self.v)]

    def forward(self, x):
        q, k, v = self.heads_of(self.norm(x))
        mask = {"boolean": self.lower, "bias": self.bias}.get(self.masked)
        causal, grouped = self.masked == "causal", self.heads != self.kv_heads
        scale = 0.25 if self.masked == "scale" else None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x), approximate="tanh"))


def regions(fast):
    return [module for module in fast._ai3_first.body.modules() if isinstance(module, Region)]


def is_one_program(fast):
    body = fast._ai3_first.body
    assert isinstance(body, Region), body
    return body.program


@pytest.mark.parametrize("batch", [1, 2])
def test_a_vision_transformer_is_one_program(batch):
    model = seeded(Patches())
    fast = check(model, torch.randn(batch, 3, 12, 12))
    is_one_program(fast)
    for other in (3, 1, 2):
        x = torch.randn(other, 3, 12, 12)
        assert difference(fast(x), exact(model, x)) < 1e-5


@pytest.mark.parametrize("how", ["unbind", "chunk", "split", "three"])
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_are_read_where_the_products_wrote_them(how, batch):
    model = seeded(Block(how))
    x = torch.randn(batch, 7, 24)
    program = is_one_program(check(model, x))
    assert "attention_" in program.text
    assert not [step for step in program.report(x).steps if step.operation == "copy"]


@pytest.mark.parametrize("masked", ["boolean", "bias", "causal", "scale"])
def test_masks_and_scales_of_attention(masked):
    model = seeded(Block(masked=masked))
    fast = check(model, torch.randn(2, 7, 24))
    is_one_program(fast)
    x = torch.randn(5, 7, 24)
    assert difference(fast(x), exact(model, x)) < 1e-5


def test_fewer_heads_of_keys():
    is_one_program(check(seeded(Block("split", kv_heads=1)), torch.randn(2, 7, 24)))


class Masked(Block):
    def forward(self, x, seen):
        q, k, v = self.heads_of(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, v, seen[:, None] if seen.ndim == 3 else seen[:, None, None])
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_are_inputs(dtype):
    model = seeded(Masked())
    for batch in (2, 3):
        seen = torch.arange(7) < torch.tensor([7, 4, 6])[:batch, None]
        given = torch.where(seen, 0.0, -math.inf) if dtype == torch.float32 else seen
        fast = check(model, torch.randn(batch, 7, 24), given)
        assert regions(fast)


def test_longer_sequences_are_right():
    model = seeded(Block())
    fast = check(model, torch.randn(1, 7, 24))
    for length in (9, 7, 4):
        x = torch.randn(2, length, 24)
        assert difference(fast(x), exact(model, x)) < 1e-5


def test_encoders_of_pytorch():
    model = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, norm_first=True, activation="gelu")
    is_one_program(check(seeded(model), torch.randn(2, 7, 24)))


class Windows(nn.Module):
    """Swin's: rolled, cut into windows, and back."""

    def __init__(self):
        super().__init__()
        self.block = Block(features=24)

    def forward(self, x):
        n, h, w, c = x.shape
        x = torch.roll(x, (-1, -2), (1, 2))
        x = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        x = self.block(x)
        x = x.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return torch.roll(x, (1, 2), (1, 2))


def test_windows():
    model = seeded(Windows())
    fast = check(model, torch.randn(2, 4, 6, 24))
    is_one_program(fast)
    x = torch.randn(3, 4, 6, 24)
    assert difference(fast(x), exact(model, x)) < 1e-5


class MaskedWindows(Windows):
    """timm's Swin: attention written out, scores of windows viewed per image, a mask for each window, and back."""

    def __init__(self):
        super().__init__()
        self.block = WrittenOut()


class WrittenOut(Block):
    def forward(self, x):
        q, k, v = self.heads_of(self.norm(x))
        windows, mask = 6, torch.zeros(6, 4, 4).masked_fill_(torch.arange(96).view(6, 4, 4) % 5 == 3, -100.0)
        scores = (q * 0.3) @ k.transpose(-2, -1)
        scores = scores.view(-1, windows, self.heads, 4, 4) + mask[None, :, None]
        y = F.softmax(scores.view(-1, self.heads, 4, 4), dim=-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_of_windows(batch):
    fast = check(seeded(MaskedWindows()), torch.randn(batch, 4, 6, 24))
    assert regions(fast)


def test_saved_and_loaded(tmp_path):
    model, x = seeded(Patches()), torch.randn(2, 3, 12, 12)
    fast = check(model, x)
    ai3_ops.save(fast, tmp_path / "transformer")
    loaded = ai3_ops.load(tmp_path / "transformer")
    for given in (x, torch.randn(3, 3, 12, 12)):
        assert torch.equal(loaded(given), fast(given))


def test_attention_that_selectors_name():
    fast = check(seeded(Block()), torch.randn(2, 7, 24), selectors={"attention": "math"})
    assert "attention_math" in is_one_program(fast).text


def test_bert_is_one_program_behind_its_embeddings():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 32}
    model = seeded(transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)))
    x = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(2))
    fast = optimized(model, x)
    assert len(regions(fast)) == 1
    for ids in (x, x[:1]):
        with torch.no_grad():
            got = fast(ids).last_hidden_state
        assert difference(got, exact(model, ids).last_hidden_state) < 1e-5


def test_gemmas_capped_scores_are_attention():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    sizes |= {"num_key_value_heads": 2, "head_dim": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1}
    config = transformers.Gemma2Config(vocab_size=50, pad_token_id=0, use_cache=False, **sizes)
    model = seeded(transformers.Gemma2Model(config))
    x = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(2))
    fast = optimized(model, x)
    (region,) = regions(fast)
    assert "softcap=2.0" in region.program.text
    for ids in (x, x[:1]):
        with torch.no_grad():
            got = fast(ids).last_hidden_state
        assert difference(got, exact(model, ids).last_hidden_state) < 1e-5


class Causal(nn.Module):
    """As transformers' decoders: a mask of positions for each item of the batch, made in each call, and one of padding."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.block = nn.Embedding(50, 24), nn.Embedding(7, 24), Masked()

    def forward(self, ids, seen=None):
        rows, places = torch.arange(ids.shape[0]), torch.arange(ids.shape[1])
        mask = (places[:, None] >= places).expand(ids.shape[0], 7, 7)
        mask = mask[rows[:, None, None], places[:, None], places]
        x = self.words(ids) + self.positions(places)
        return self.block(x, mask if seen is None else mask & seen[:, None])


@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_sizes_are_made_once(padded, tmp_path):
    model = seeded(Causal())

    def inputs(batch):
        ids = torch.randint(0, 50, (batch, 7), generator=torch.Generator().manual_seed(batch))
        return (ids, torch.arange(7) < 7 - ids[:, :1] % 5) if padded else (ids,)

    fast = check(model, *inputs(2))
    steps = fast._ai3_report.parts[0].steps
    once = {step.operation.partition(".")[0] for step in steps if step.reason == "once a size"}
    assert {"arange", "index"} <= once
    assert not {"embedding", "__and__"} & once
    ai3_ops.save(fast, tmp_path / "causal")
    loaded = ai3_ops.load(tmp_path / "causal")
    for module in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded):
        for batch in (2, 3, 2, 1):
            assert difference(module(*inputs(batch)), exact(model, *inputs(batch))) < 1e-5
        given = inputs(3)
        with torch.autograd.profiler.profile() as profile:
            module(*given)
        assert not {"aten::arange", "aten::index"} & {event.name for event in profile.function_events}
    batch = torch.export.Dim("batch")
    exported = torch.export.export(loaded, inputs(2), dynamic_shapes=tuple({0: batch} for _ in inputs(2)))
    compiled = torch.compile(loaded, backend="eager", dynamic=True)
    for traced in (exported.module(), compiled):
        assert difference(traced(*inputs(5)), exact(model, *inputs(5))) < 1e-5


class Grown:
    """Keys and values so far, of no type that export knows, as transformers' caches."""

    def __init__(self):
        self.rows = {}

    def add(self, layer, new):
        old = self.rows.get(layer)
        self.rows[layer] = new if old is None else torch.cat([old, new], -2)
        return self.rows[layer]


class Cached(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.key, self.query = layer, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, mask, cache):
        kv = cache.add(self.layer, self.key(x))
        return x + F.scaled_dot_product_attention(self.query(x), kv, kv, mask)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Cached(i) for i in range(2)), nn.Linear(16, 7)

    def forward(self, x, mask, cache=None):
        cache = cache or Grown()
        for layer in self.layers:
            x = layer(x, mask, cache)
        return self.head(x), cache


@pytest.mark.parametrize("grad", [True, False])
def test_a_cache_that_grows_with_a_mask_of_one_length(grad):
    """Parts run alone on what they were given, which later layers and calls have changed since."""
    torch.manual_seed(0)
    model, x, mask = Decoder().eval(), torch.randn(2, 9, 16), torch.ones(9, 9).tril().bool()
    with torch.set_grad_enabled(grad):
        fast = ai3_ops.optimize(model, (x, mask), "default", progress=False)
    with torch.no_grad():
        (expected, cache), (got, ours) = model(x, mask), fast(x, mask)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        step, more = torch.randn(2, 1, 16), torch.ones(1, 10).bool()
        torch.testing.assert_close(fast(step, more, ours)[0], model(step, more, cache)[0], rtol=1e-4, atol=1e-5)
        assert ours.rows[1].shape == cache.rows[1].shape == (2, 10, 16)
