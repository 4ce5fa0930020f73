"""Decoders with a cache: their layers as programs around the cache's update, for prompts and steps."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from nets import optimized, seeded
from torch import nn

import ai3_ops
from ai3_ops.graph import caches
from ai3_ops.graph.network import difference
from ai3_ops.optimizing import mixed_batches, pipeline, planned, whole
from ai3_ops.optimizing.module import Optimized
from ai3_ops.programs import timing
from ai3_ops.programs.lower import Region


class Cache:
    """Grows, or (`fixed`) has its length from the beginning and is written to, as transformers' caches."""

    def __init__(self, fixed=0):
        self.fixed, self.count, self.layers = fixed, {}, {}

    def get_seq_length(self):
        return self.count.get(0, 0)

    def update(self, keys, values, layer, **_):
        was = self.count.get(layer, 0)
        self.count[layer] = was + keys.shape[2]
        if not self.fixed:
            if was:
                keys, values = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (keys, values), strict=True))
            self.layers[layer] = keys, values
            return keys, values
        for old, new in zip(self._tensors(layer, keys), (keys, values), strict=True):
            old[:, :, was : was + new.shape[2]] = new
        return self.layers[layer]

    def _tensors(self, layer, like):
        if layer not in self.layers:
            shape = (*like.shape[:2], self.fixed, like.shape[3])
            self.layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self.layers[layer]


class Layer(nn.Module):
    def __init__(self, index, features=24, heads=3, asks=False, most=0):
        super().__init__()
        self.index, self.heads, self.asks, self.most = index, heads, asks, most
        self.norm, self.qkv, self.out = nn.LayerNorm(features), nn.Linear(features, 72), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 40), nn.Linear(40, features)

    def forward(self, x, mask=None, cache=None, positions=None):
        n, length, features = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if self.asks:
                q = q * (1 + cache.get_seq_length())
            k, v = cache.update(k, v, self.index, given={"positions": positions, "kind": "plain"})
            if self.most and k.shape[2] > self.most:
                k, v = k[:, :, -self.most :], v[:, :, -self.most :]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(mask is None and length > 1))
        x = x + self.out(y.transpose(1, 2).reshape(n, length, features))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    alone = False  # whether positions are of one item for all

    def __init__(self, count=2, **settings):
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(30, 24), nn.Embedding(40, 24), nn.Linear(24, 30)
        self.layers = nn.ModuleList(Layer(i, **settings) for i in range(count))

    def forward(self, ids, attention_mask=None, cache=None, use_cache=True):
        if cache is None and use_cache:
            cache = Cache()
        past = cache.get_seq_length() if use_cache else 0
        places = torch.arange(past, past + ids.shape[1]).expand(ids.shape)
        fixed, mask = use_cache and cache.fixed, None
        if attention_mask is not None and attention_mask.all():  # as transformers do
            attention_mask = None
        if fixed or attention_mask is not None:
            columns = torch.arange(fixed or past + ids.shape[1])
            mask = (places[:, None, :, None] >= columns).expand(len(ids), 1, -1, -1)
            if attention_mask is not None:
                mask = (
                    mask
                    & F.pad(attention_mask, (0, mask.shape[-1] - attention_mask.shape[1]), value=True)[:, None, None]
                )
        x = self.words(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x, mask, cache=cache, positions=places[:1] if self.alone else places)
        return (self.head(x), cache) if use_cache else self.head(x)

    def generate(
        self, ids, attention_mask=None, *, max_new_tokens, min_new_tokens=0, do_sample=False, cache_implementation=None
    ):
        """Also the scores of each step."""
        cache, scores, new = Cache(40 if cache_implementation == "static" else 0), [], ids
        for _ in range(max_new_tokens):
            found, cache = self(new, attention_mask, cache)
            new = found[:, -1:].argmax(-1)
            ids, scores = torch.cat([ids, new], 1), [*scores, found[:, -1]]
        return ids, torch.stack(scores)


def decoder(**settings):
    return seeded(Decoder(**settings))


def of_layers(kind, layer):
    """A model of a kind with other layers."""
    model = kind()
    model.layers = nn.ModuleList(layer(i) for i in range(2))
    return seeded(model)


def ids(batch=1, length=6):
    return torch.randint(0, 30, (batch, length), generator=torch.Generator().manual_seed(batch))


def optimized_layers(fast):
    return {name: m for name, m in fast.named_modules() if isinstance(m, Optimized) and name.startswith("layers")}


def generates_the_same(model, fast, *inputs, tokens=6, **options):
    with torch.no_grad():
        got, scores = fast.generate(*inputs, max_new_tokens=tokens, **options)
        expected, exact = copy.deepcopy(model).double().generate(*inputs, max_new_tokens=tokens, **options)
    assert torch.equal(got, expected)
    assert difference(scores, exact) < 1e-5


@pytest.fixture(scope="module")
def made():
    model = decoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
        patch.setattr(whole, "interleaved", lambda *_, **__: [1.0, 1.0, 3.0, 2.0])
        patch.setattr(pipeline, "PATIENCE", float("inf"))
        return model, optimized(model, ids(), selectors="default", budget_seconds=60)


def test_layers_are_two_programs_and_the_update_between_them(made):
    _, fast = made
    layers = optimized_layers(fast)
    assert [*layers] == ["layers.0", "layers.1"]
    for layer in layers.values():
        plans = {id(plan): plan for plan in layer._ai3_plans.values()}.values()
        assert len(plans) >= 3  # a prompt, a step, a step with a mask
        for plan in plans:
            assert len([m for m in plan.body.modules() if isinstance(m, Region)]) == 2
            assert [node.target for node in plan.body.graph.nodes].count(caches.update) == 1


@pytest.mark.parametrize("kind", [None, "static"])
def test_prompts_and_steps(made, kind):
    generates_the_same(*made, ids(), cache_implementation=kind)


def test_steps_run_no_original(made, monkeypatch):
    _, fast = made
    with torch.no_grad():
        found, cache = fast(ids())
        for layer in optimized_layers(fast).values():
            monkeypatch.setattr(type(layer._ai3_original[0]), "forward", None)
        for _ in range(3):  # each with one key more
            found, cache = fast(found[:, -1:].argmax(-1), None, cache)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("kind", [None, "static"])
def test_other_batches_and_padding(made, kind):
    attention_mask = torch.ones(3, 6, dtype=torch.bool)
    attention_mask[0, :2] = False
    generates_the_same(*made, ids(3), cache_implementation=kind)
    generates_the_same(*made, ids(3), attention_mask, cache_implementation=kind)


def test_prompts_of_other_lengths_run_no_original(made, monkeypatch):
    model, fast = made
    for batch, length in ((1, 9), (3, 4), (2, 17)):
        generates_the_same(model, fast, ids(batch, length))
    run_no_original(fast, monkeypatch)
    with torch.no_grad():
        _, cache = fast(ids(2, 11))  # neither the batch nor the length that any call had
    assert cache.count == {0: 11, 1: 11}


class Joins(Layer):
    """As OPT's: views by the batch's size, and rows of batch and length together."""

    def forward(self, x, mask=None, cache=None, positions=None):
        n, length, features = x.size()
        q, k, v = (part.view(n, -1, self.heads, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = cache.update(k, v, self.index)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(mask is None and length > 1))
        rows = x + self.out(y.transpose(1, 2).reshape(n, length, -1))
        shape, rows = rows.shape, rows.reshape(-1, features)
        return (rows + self.down(F.gelu(self.up(rows)))).view(shape)


def test_layers_that_join_batch_and_length(monkeypatch):
    model = of_layers(Decoder, Joins)
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    for batch, length in ((1, 6), (3, 4), (2, 17)):
        generates_the_same(model, fast, ids(batch, length))
    run_no_original(fast, monkeypatch)
    with torch.no_grad():
        _, cache = fast(ids(2, 11))
    assert cache.count == {0: 11, 1: 11}


def padded(batch, length):
    """A mask of as many tokens, of which the first items begin later."""
    return torch.arange(length) >= torch.arange(batch, 0, -1)[:, None]


def run_no_original(fast, monkeypatch):
    for layer in optimized_layers(fast).values():
        monkeypatch.setattr(type(layer._ai3_original[0]), "forward", None)


def test_padded_prompts_run_no_original(made, monkeypatch):
    model, fast = made
    for batch, length in ((1, 9), (3, 4), (2, 17)):
        generates_the_same(model, fast, ids(batch, length), padded(batch, length))
    with torch.no_grad():
        exact, _ = copy.deepcopy(model).double()(ids(2, 11), padded(2, 11))
        run_no_original(fast, monkeypatch)
        for again in (fast, pickle.loads(pickle.dumps(fast))):
            found, cache = again(ids(2, 11), padded(2, 11))
            assert difference(found, exact) < 1e-5
            assert cache.count == {0: 11, 1: 11}


def test_prompts_with_and_without_padding_after_an_example_with_it(monkeypatch):
    model = decoder()
    fast = optimized(model, ids(2), padded(2, 6), selectors="default", budget_seconds=60)
    for batch, length in ((1, 9), (3, 4), (2, 17)):
        generates_the_same(model, fast, ids(batch, length), padded(batch, length))
        generates_the_same(model, fast, ids(batch, length))
    run_no_original(fast, monkeypatch)
    with torch.no_grad():
        for mask in (None, padded(2, 11)):
            _, cache = fast(ids(2, 11), mask)
            assert cache.count == {0: 11, 1: 11}


class Rotated(nn.Module):
    """A decoder's layers with tables of positions that all items of a batch share."""

    class Layer(Layer):
        def forward(self, x, table, cache=None):
            return super().forward(x * table, cache=cache) - table

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 24), nn.Linear(24, 30)
        self.layers = nn.ModuleList(self.Layer(i) for i in range(2))

    def forward(self, ids, attention_mask=None, cache=None):
        cache = Cache() if cache is None else cache
        past, x = cache.get_seq_length(), self.words(ids)
        places = torch.arange(past, past + ids.shape[1])[None, :, None]
        table = (places / torch.arange(1, 25)).cos()
        for layer in self.layers:
            x = layer(x, table, cache=cache)
        return self.head(x), cache

    def generate(self, ids, *, max_new_tokens, **_):
        cache, scores, new = None, [], ids
        for _ in range(max_new_tokens):
            found, cache = self(new, None, cache)
            new = found[:, -1:].argmax(-1)
            ids, scores = torch.cat([ids, new], 1), [*scores, found[:, -1]]
        return ids, torch.stack(scores)


@pytest.fixture(scope="module")
def rotated():
    model = seeded(Rotated())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
        patch.setattr(whole, "interleaved", lambda *_, **__: [1.0, 1.0, 3.0, 2.0])
        patch.setattr(mixed_batches, "is_slower", lambda *_: False)
        patch.setattr(pipeline, "PATIENCE", float("inf"))
        return model, optimized(model, ids(), selectors="default", budget_seconds=60)


def test_tables_of_one_item_beside_a_batch(rotated, monkeypatch):
    model, fast = rotated
    layers = optimized_layers(fast)
    assert [*layers] == ["layers.0", "layers.1"]
    compared, agrees = [], Optimized._agrees
    monkeypatch.setattr(Optimized, "_agrees", staticmethod(lambda *given: compared.append(given) or agrees(*given)))
    for other, length in ((1, 6), (3, 6), (4, 9), (2, 3)):
        generates_the_same(model, fast, ids(other, length))
    assert compared
    compared.clear()
    for layer in layers.values():
        monkeypatch.setattr(type(layer._ai3_original[0]), "forward", None)
        monkeypatch.setattr(planned, "as_examples", lambda _, *given: given)
    with torch.no_grad():
        fast(ids(4, 9))
    assert not compared
    monkeypatch.undo()
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        generates_the_same(model, again, ids(4, 9))


def test_few_comparisons_are_enough_for_batches_beside_tables(rotated, monkeypatch):
    """Not one for every batch and length."""
    model, fast = rotated
    compared, agrees = [], Optimized._agrees
    monkeypatch.setattr(Optimized, "_agrees", staticmethod(lambda *given: compared.append(given) or agrees(*given)))
    with torch.no_grad():
        for length in (*range(4, 14), 31):
            assert difference(fast(ids(2, length))[0], model(ids(2, length))[0]) < 1e-5
    assert len(compared) <= 2 * 2 * 2  # of two layers, at two sizes, for two inputs


def test_tables_beside_a_batch_that_take_longer_stay_the_original_s(rotated, monkeypatch):
    model, fast = rotated
    fast = copy.deepcopy(fast)
    for layer in optimized_layers(fast).values():
        layer._ai3_known, layer._ai3_mixed = {}, {}
    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: True)
    with torch.no_grad():
        for length in (6, 9):
            assert difference(fast(ids(3, length))[0], model(ids(3, length))[0]) < 1e-5
    for layer in optimized_layers(fast).values():
        assert [plan.body for plan in layer._ai3_known.values()] == [None, None]


def test_times_are_compared_while_others_are(monkeypatch):
    """A call in which a part compares its own may be one that is being timed."""
    monkeypatch.undo()
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    with timing._lock:
        assert mixed_batches.is_slower(a, nn.Sequential(b, b, b, b, b, b, b, b), (torch.ones(1, 4),), {})


def test_an_example_of_a_batch_beside_a_table(monkeypatch):
    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: False)
    model = seeded(Rotated())
    fast = optimized(model, ids(3), selectors="default", budget_seconds=60)
    layer = optimized_layers(fast)["layers.0"]
    assert layer._ai3_first.example.shown[:2] == [(3, 6, 24), (3, 6, 24)]
    for again in (fast, pickle.loads(pickle.dumps(fast))):
        for batch, length in ((3, 6), (1, 6), (2, 6), (2, 9), (4, 7), (4, 8)):
            generates_the_same(model, again, ids(batch, length))
    run_no_original(fast, monkeypatch)
    with torch.no_grad():
        _, cache = fast(ids(4, 11))
    assert cache.count == {0: 11, 1: 11}


def test_an_example_of_a_batch_beside_a_table_needs_no_original(monkeypatch):
    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: False)
    model = seeded(Rotated())
    fast = optimized(model, ids(3), selectors="default", budget_seconds=60, keep_original=False)
    assert not any(layer._ai3_original for layer in optimized_layers(fast).values())
    for again in (fast, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        for length in (6, 9, 17):
            generates_the_same(model, again, ids(3, length))
    with pytest.raises(ValueError, match="optimize again"):
        fast(ids(2, 6))


class Places(Layer):
    def forward(self, x, mask=None, cache=None, positions=None):
        return super().forward(x + positions[..., None].cos(), mask, cache, positions)


@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("verify", ["quick", "off"])
def test_padded_prompts_beside_a_table_need_no_original(verify, further, monkeypatch):
    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: False)
    model = of_layers(Decoder, Places)
    model.alone = True
    given = [ids(2), ids(1, 9)] if further else ids(2)
    settings = {"verify": verify, "keep_original": False, "progress": False, "budget_seconds": 60}
    fast = ai3_ops.optimize(model, given, "default", **settings)
    lengths = (6, 9) if verify == "quick" else (6,)
    for again in (fast, pickle.loads(pickle.dumps(fast))):
        for length in lengths:
            generates_the_same(model, again, ids(2, length))
            generates_the_same(model, again, ids(2, length), padded(2, length))


@pytest.mark.parametrize("slower", [False, True])
def test_an_example_of_a_batch_that_is_not_the_same_with_as_many_tables_stays_planned(slower, monkeypatch):
    class Tells(Rotated.Layer):
        def forward(self, x, table, cache=None):
            return super().forward(x * (3 if table.shape[0] == 1 and not slower else 1), table, cache=cache)

    monkeypatch.setattr(mixed_batches, "is_slower", lambda *_: slower)
    model = of_layers(Rotated, Tells)
    fast = optimized(model, ids(3), selectors="default", budget_seconds=60)
    layer = optimized_layers(fast)["layers.0"]
    assert layer._ai3_first.example.shown[:2] == [(3, 6, 24), (1, 6, 24)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in (3, 1, 2):
            generates_the_same(model, fast, ids(batch))


class ByPositions(Cache):
    """One that writes where it is told to."""

    def update(self, keys, values, layer, given=None):
        (positions,) = given["positions"]  # of one item for all
        was = self._tensors(layer, keys)
        for old, new in zip(was, (keys, values), strict=True):
            old.index_copy_(2, positions, new)
        self.count[layer] = int(positions[-1]) + 1
        return was


def test_a_batch_that_a_layer_tells_from_others_beside_a_table():
    class Tells(Rotated.Layer):
        def forward(self, x, table, cache=None):
            more = 3 if table.shape[0] == 1 and x.shape[0] > 4 else 1
            return super().forward(x * more, table, cache=cache)

    model = of_layers(Rotated, Tells)
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch, length in ((2, 6), (2, 7), (3, 6), (3, 8), (5, 6), (6, 9)):
            generates_the_same(model, fast, ids(batch, length))


class Odd(Cache):
    copies = 0

    def __deepcopy__(self, memo):
        type(self).copies += 1
        raise TypeError("no copies")


def test_caches_that_cannot_be_copied_are_tried_once_for_each_kind_of_call(rotated):
    model, fast = rotated
    fast = copy.deepcopy(fast)
    for layer in optimized_layers(fast).values():
        layer._ai3_known, layer._ai3_mixed = {}, {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(ids(3))[0]
        assert difference(fast(ids(3), None, Odd())[0], expected) < 1e-5
        tried = Odd.copies
        for _ in range(2):
            assert difference(fast(ids(3), None, Odd())[0], expected) < 1e-5
    assert Odd.copies == tried


def test_caches_are_told_of_one_item_what_the_original_tells_them():
    class Places(Decoder):
        def forward(self, ids, attention_mask=None, cache=None, use_cache=True):
            cache = Cache(40) if cache is None else cache
            past, x = cache.get_seq_length(), self.words(ids)
            places = torch.arange(past, past + ids.shape[1])[None]
            mask = places[:, None, :, None] >= torch.arange(40)
            for layer in self.layers:
                x = layer(x, mask, cache=cache, positions=places)
            return self.head(x), cache

    model = seeded(Places())
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    assert optimized_layers(fast)
    for batch in (1, 3, 2):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, cache = fast(ids(batch), None, ByPositions(40))
            expected, other = model(ids(batch), None, ByPositions(40))
        assert difference(got, expected) < 1e-5
        assert cache.count == other.count
        assert all(difference(one, of) < 1e-5 for one, of in zip(cache.layers[1], other.layers[1], strict=True))


@pytest.mark.parametrize(
    ("branch", "lengths"), [(lambda n: n < 5, (12, 5, 4, 3, 2)), (lambda n: n % 32 == 0, (29, 12, 32, 30))]
)
def test_a_branch_for_some_numbers_of_keys_is_seen(branch, lengths):
    """Shorter prompts have fewer keys than any that the capture was shown."""

    class Few(Layer):
        def forward(self, x, mask=None, cache=None, positions=None):
            n, length, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            k, v = cache.update(k, v, self.index)
            if self.branch(k.shape[2]):
                q, v = q * 3, v * 0.5
            y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(length > 1))
            return x + self.out(y.transpose(1, 2).flatten(2))

    Few.branch = staticmethod(branch)
    model = of_layers(Decoder, Few)
    fast = optimized(model, ids(1, 12), selectors="default", budget_seconds=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in lengths:
            generates_the_same(model, fast, ids(2, length))


def test_tables_that_a_layer_takes_for_a_batch_stay_the_original_s():
    """Of one item the layer takes the first alone, of several all: as many of the table would be something else."""

    class Counts(Rotated.Layer):
        def forward(self, x, table, cache=None):
            return super().forward(x + table.sum(0), table[:1], cache=cache)

    model = of_layers(Rotated, Counts)
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in (1, 3):
            generates_the_same(model, fast, ids(other))


@pytest.mark.filterwarnings("ignore:.*(planned anew|its programs)")
def test_other_prompts_update_the_cache_once(made):
    model, fast = made
    with torch.no_grad():
        _, cache = fast(ids(1, 9))
    assert cache.count == {0: 9, 1: 9}
    generates_the_same(model, fast, ids(1, 9))


@pytest.mark.filterwarnings("ignore:.*(planned anew|its programs)")
def test_many_prompts_leave_steps_their_programs(made, monkeypatch):
    fast = copy.deepcopy(made[1])
    for layer in optimized_layers(fast).values():
        layer._ai3_patience = 0.0  # as though planning took longer than a call may
    with torch.no_grad():
        for length in (2, 3, *range(7, 19)):
            fast(ids(1, length))
        found, cache = fast(ids())
        for layer in optimized_layers(fast).values():
            monkeypatch.setattr(type(layer._ai3_original[0]), "forward", None)
        fast(found[:, -1:].argmax(-1), None, cache)


def test_copies_and_pickles(made):
    model, fast = made
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        generates_the_same(model, other, ids())


def test_explain_lists_prompts_and_steps(made):
    text = str(ai3_ops.explain(made[1]))
    assert "layers.0, called with 1x1x24 float32" in text
    assert "the steps of 8 tokens after a prompt were 2.00 times as fast" in text


@pytest.mark.parametrize("settings", [{"asks": True}, {"most": 20}], ids=str)  # the latter on none of the examples
def test_layers_that_ask_for_the_length_are_taken_apart(settings):
    model = decoder(**settings)
    fast = optimized(model, ids(), selectors="default", budget_seconds=60)
    report = ai3_ops.explain(fast).optimization
    assert "how long the cache is decides" in report.left["layers.0"]
    assert any(part.name.startswith("layers.0.up") and not part.unchanged for part in report.parts)
    generates_the_same(model, fast, ids(), tokens=20)


def test_what_generates_more_slowly_stays(monkeypatch):
    monkeypatch.setattr(whole, "interleaved", lambda *_, **__: [1.0, 0.5, 2.0, 1.75])  # its prompt alone is faster
    fast = optimized(decoder(), ids(), selectors="default", budget_seconds=60)
    assert not optimized_layers(fast)
    assert "its steps took 1.2 s instead of 1 for 8 tokens" in ai3_ops.explain(fast).optimization.left[""]


def test_a_model_captured_whole_says_that_it_does_not_generate():
    fast = ai3_ops.optimize(decoder(), {"ids": ids(), "use_cache": False}, "default", progress=False)
    assert any("`generate` is the original's" in note for note in ai3_ops.explain(fast).optimization.parts[0].notes)
    with pytest.warns(UserWarning, match="`generate` is the original's"):
        fast.generate(ids(), max_new_tokens=2)


_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3", "gemma2"))]
)
def test_transformers_decoders(kind):
    t = pytest.importorskip("transformers")
    words = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    sizes = {"hidden_size": 32, "num_key_value_heads": 2, "head_dim": 8} | _SIZES | words
    model = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **words)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(sliding_window=16, **sizes)),
    }[kind]()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.normal_(0, 0.2)
    given = torch.randint(2, 50, (1, 8))
    fast = optimized(model, given, selectors="default", budget_seconds=60)
    assert any(
        isinstance(m, Optimized) and m.changed for name, m in fast.named_modules() if name.endswith((".0", ".1"))
    )
    if kind == "llama":
        (layer,) = (m for name, m in fast.named_modules() if name == "model.layers.0")
        graphs = [[node.target for node in plan.body.graph.nodes] for plan in layer._ai3_plans.values()]
        assert sum(torch.ops.ai3.attention_flash.default in targets for targets in graphs) == 3  # keys are not repeated
    attention_mask = torch.ones(2, 8, dtype=torch.long)
    attention_mask[0, :3] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad():  # which transformers records by hooks that it makes when it is first asked for them
            shown, expected = (m(given, output_hidden_states=True).hidden_states for m in (fast, model))
        for one, other in zip(shown, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for batch, options in (
            (1, {}),
            (1, {"cache_implementation": "static"}),
            (1, {"num_beams": 3}),
            (2, {"attention_mask": attention_mask}),
        ):
            options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False} | options
            got = fast.generate(given.expand(batch, -1), **options)
            assert torch.equal(got, model.generate(given.expand(batch, -1), **options))
