"""Sequences of other lengths than the example's run by the same program, as other batches do."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from nets import agree, check, seeded
from torch import nn

import ai3_ops
from ai3_ops.graph import canonical
from ai3_ops.graph.network import Lengths, difference
from ai3_ops.optimizing import pipeline, planned, saved
from ai3_ops.optimizing.example import COMPARED
from ai3_ops.optimizing.module import Optimized
from ai3_ops.programs.lower import Region


class Encoder(nn.Module):
    """Words, positions and blocks of attention, as BERT; `positions`: how it has those."""

    def __init__(self, positions="slice", heads=3, features=24):
        super().__init__()
        self.how, self.heads = positions, heads
        self.words, self.places = nn.Embedding(50, features), nn.Embedding(40, features)
        self.register_buffer("ids", torch.arange(40)[None], persistent=False)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.norm, self.up, self.down = nn.LayerNorm(features), nn.Linear(features, 32), nn.Linear(32, features)
        self.limit = 0

    def forward(self, ids, seen=None):
        n, length = ids.shape
        match self.how:
            case "slice":
                places = self.places(self.ids[:, :length])
            case "arange":
                places = self.places(torch.arange(length))
            case "table":
                places = self.places.weight[:length]
        x = self.words(ids) + places
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if seen is None else seen[:, None, None, :].bool().expand(n, 1, length, length)
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(n, length, -1)
        x = self.norm(x + self.out(y))
        x = x + self.down(F.gelu(self.up(x)))
        return x * 2 if self.limit and length > self.limit else x


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        return self.down(F.gelu(self.up(x + y)))


def inputs(length, batch=1, padded=False):
    ids = torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))
    return (ids, (torch.arange(length) <= (length - 1 - ids[:, :1] % 3).clamp(min=0)).long()) if padded else (ids,)


class Heads(nn.Module):
    """Numbers beside a length where images have their channels."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        y = self.up(x).unflatten(-1, (3, 8))
        return self.down(((1 - y * 0.5) * self.factor / 4).flatten(2))


@pytest.fixture
def nothing_anew(monkeypatch):
    """Nothing is planned, and nothing is said, from when it is called."""
    with warnings.catch_warnings():

        def begin():
            warnings.simplefilter("error", UserWarning)
            monkeypatch.setattr(planned, "make_plan", lambda *_, **__: pytest.fail("planned anew"))

        yield begin


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", ["slice", "arange", "table"])
def test_lengths_run_by_one_program(positions, padded, nothing_anew, monkeypatch):
    model = seeded(Encoder(positions))
    fast = check(model, *inputs(8, 2, padded))
    assert len([m for m in fast._ai3_first.body.modules() if isinstance(m, Region)]) == 1
    nothing_anew()
    for length, batch in ((12, 1), (5, 3), (1, 2)):
        agree(fast, model, *inputs(length, batch, padded))
    compared = []
    monkeypatch.setattr(Optimized, "_computes", lambda *_: compared.append(_) or True)
    for length in (*range(2, 40), 12, 7):  # each another one than before
        agree(fast, model, *inputs(length, 1 + length % 2, padded))
    assert not compared
    assert {id(plan) for plan in fast._ai3_plans.values()} == {id(fast._ai3_first)}


class SelfAttends(nn.Module):
    """PyTorch's module, which lists the rows of all lengths and batches for its products."""

    def __init__(self, **options):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True, **options), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_of_any_length(batch, bias, nothing_anew, tmp_path):
    model = seeded(SelfAttends(bias=bias))
    fast = check(model, torch.randn(batch, 9, 16))
    ai3_ops.save(fast, tmp_path / "model.ai3")
    loaded = ai3_ops.load(tmp_path / "model.ai3")
    nothing_anew()
    for length, other in ((12, 1), (5, 3), (2, 2), (40, 1)):
        for each in (fast, loaded):
            agree(each, model, torch.randn(other, length, 16))


class ListsRows(nn.Module):
    """Rows in one list for a product, which are parted as they were, or into heads as well."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.up = heads, nn.Linear(16, 16)

    def forward(self, x):
        y = F.relu(x).unflatten(-1, (4, 4)) if self.heads else F.relu(x)
        return F.relu(self.up(y.reshape(-1, 16)).view(y.shape)).flatten(2)


@pytest.mark.parametrize("heads", [False, True])
def test_rows_in_one_list(heads):
    model = seeded(ListsRows(heads))
    fast = check(model, torch.randn(2, 9, 16))
    for shape in ((2, 9, 16), (5, 9, 16), (3, 12, 16)):
        agree(fast, model, torch.randn(shape))


def test_pytorchs_encoder_of_any_length(nothing_anew):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = seeded(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    fast = check(model, torch.randn(2, 9, 16))
    nothing_anew()
    for length, batch in ((12, 1), (5, 3), (40, 2)):
        agree(fast, model, torch.randn(batch, length, 16))


def test_numbers_beside_a_length_in_the_channels_place(nothing_anew):
    model = seeded(Heads())
    fast = check(model, torch.randn(2, 8, 16))
    assert isinstance(fast._ai3_first.body, Region)
    nothing_anew()
    for batch, length in ((1, 9), (3, 5), (2, 24)):
        agree(fast, model, torch.randn(batch, length, 16))


@pytest.fixture
def compared(monkeypatch):
    """What was compared with the original."""
    found, computes = [], Optimized._computes
    monkeypatch.setattr(Optimized, "_computes", lambda *given: found.append(given) or computes(*given))
    return found


def test_two_are_compared_beforehand(compared):
    model = seeded(Encoder())
    fast = check(model, *inputs(8))
    assert [given[2][0][0].shape[1] for given in compared] == [5, 9]
    assert "compared with the module at 5, 9" in str(ai3_ops.explain(fast))
    for again in (fast, pickle.loads(pickle.dumps(fast))):
        for length in (9, 10, 16, 13):
            agree(again, model, *inputs(length))
    assert len(compared) == COMPARED


def test_each_of_several_examples_has_lengths_of_its_own(tmp_path):
    """Those with a mask, too, where the first one had none."""
    model, given = seeded(Encoder()), [inputs(8), inputs(8, 2, padded=True)]
    fast = ai3_ops.optimize(model, given, "default", keep_original=False, progress=False)
    ai3_ops.save(fast, tmp_path / "model.ai3")
    for again in (fast, pickle.loads(pickle.dumps(fast)), ai3_ops.load(tmp_path / "model.ai3")):
        for length, batch in ((9, 1), (5, 3), (13, 2)):  # and without an original, which would compute others
            for padded in (False, True):
                agree(again, model, *inputs(length, batch, padded))


class Between(nn.Module):
    """A reshape that PyTorch's step alone reads, so that no program has it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, cached=False):
        n, length, _ = x.shape
        heads = self.up(x).view(n, length, 4, 16).cumsum(1)
        return self.down(F.gelu(heads.flatten(2)))


def test_reshapes_between_programs_keep_lengths_open_in_files(tmp_path):
    model = seeded(Between())
    fast = check(model, torch.randn(1, 64, 16))
    ai3_ops.save(fast, tmp_path / "model.ai3")
    assert b"op.aten.reshape.default" in (tmp_path / "model.ai3").read_bytes()
    for again in (fast, pickle.loads(pickle.dumps(fast)), ai3_ops.load(tmp_path / "model.ai3")):
        for length, batch in ((40, 1), (81, 3)):
            agree(again, model, torch.randn(batch, length, 16))


def test_arguments_that_are_no_tensors_are_in_files_too(tmp_path):
    """Decoders' `use_cache=False`."""
    model = seeded(Between())
    fast = ai3_ops.optimize(model, (torch.randn(1, 64, 16), False), "default")
    ai3_ops.save(fast, tmp_path / "model.ai3")
    for again in (fast, ai3_ops.load(tmp_path / "model.ai3")):
        for length in (40, 81):
            x = torch.randn(1, length, 16)
            assert (again(x, False) - model(x)).abs().max() < 1e-4


def test_the_first_ones_are_compared_where_none_was_before(compared):
    model = seeded(Encoder())
    fast = check(model, *inputs(8), verify="off")
    assert not compared
    for length in (9, 10, 11, 12, 11, 9):
        agree(fast, model, *inputs(length))
    assert len(compared) == COMPARED
    again = pickle.loads(pickle.dumps(fast))
    agree(again, model, *inputs(13))
    assert len(compared) == COMPARED
    another = check(model, *inputs(8), verify="off")
    for length in (16, 24, 32):  # in which a number that was left in might be a factor
        agree(another, model, *inputs(length))
    assert len(compared) == COMPARED + 3


def test_what_holds_a_length_is_found_beforehand(compared, monkeypatch):
    """A rewrite that kept the example's length as a number."""
    monkeypatch.setattr(pipeline, "leave_open", lambda *_: None)
    model = seeded(Encoder())
    fast = check(model, *inputs(8))
    assert len(compared) > COMPARED
    assert not fast._ai3_first.example.compared
    agree(fast, model, *inputs(9))


def test_lengths_that_fit_are_found():
    """Of windows of four, and of no more than a table has."""
    lengths = Lengths(((), ("s", 3)), (("Equality", ("Mod", "s", 4), 0), ("LessThan", "s", 16)))
    assert list(lengths.others({"s": 16})) == [{"s": 8}]
    assert list(lengths.others({"s": 8})) == [{"s": 4}, {"s": 12}]
    assert lengths.of([(), (1, 12, 3)]) == {"s": 12}
    assert lengths.of([(), (1, 13, 3)]) is None
    assert lengths.of([(), (1, 12, 4)]) is None


class Sound(nn.Module):
    """Samples by strided convolutions into steps, the last of which is cut off, and attention among these."""

    def __init__(self, cut=-1):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 8, 10, 5), nn.Conv1d(8, 8, 3, 2)
        self.near, self.qkv, self.norm, self.cut = nn.Conv1d(8, 8, 4, padding=2), nn.Linear(8, 24), nn.LayerNorm(8), cut

    def forward(self, samples):
        x = F.gelu(self.second(F.gelu(self.first(samples[:, None]))))
        x = (x + F.gelu(self.near(x)[:, :, : self.cut])).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v)


def test_sound_of_any_length(nothing_anew):
    """What is counted from the end is counted from there in other lengths, too."""
    model = seeded(Sound())
    fast = check(model, torch.randn(1, 400))
    nothing_anew()
    for batch, length in ((1, 400), (1, 601), (3, 401), (2, 247), (1, 1000)):
        agree(fast, model, torch.randn(batch, length))


def test_lengths_of_as_many_steps_tell_nothing(compared, monkeypatch):
    """400 and 403 samples make as many steps: a number of these that was left in would fit both."""
    monkeypatch.setattr(canonical, "_is_open", lambda *_: False)
    model = seeded(Sound())
    fast = check(model, torch.randn(1, 400))
    lengths = fast._ai3_first.lengths
    ((name,),) = lengths.inputs
    assert not lengths.tell({name: 403}, {name: 400})
    assert lengths.tell({name: 601}, {name: 400})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (403, 402, 404, 601, 247, 1000):
            agree(fast, model, torch.randn(1, length))


@pytest.mark.parametrize("index", [-1, -2, 0])
def test_the_last_of_any_length(index, nothing_anew):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.a(x).tanh()
            return self.b(x[:, index] + x[:, index - 2 : -1].sum(1))

    model = seeded(Last())
    fast = check(model, torch.randn(1, 8, 6))
    nothing_anew()
    for batch, length in ((1, 13), (2, 5), (3, 8)):
        agree(fast, model, torch.randn(batch, length, 6))


def test_batches_that_differ_among_inputs_are_the_originals():
    model = seeded(Adds())
    fast = check(model, torch.randn(1, 8, 16), torch.randn(1, 8, 16))
    for length in (9, 10, 11, 12):
        agree(fast, model, torch.randn(1, length, 16), torch.randn(1, length, 16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree(fast, model, torch.randn(4, length, 16), torch.randn(1, length, 16))


def test_a_condition_on_the_length():
    """Beyond it another program is needed, which is planned; on its own side lengths run as ever."""
    model = seeded(Encoder())
    model.limit = 10
    fast = check(model, *inputs(8))
    for length in (6, 7, 9, 10, 5):
        agree(fast, model, *inputs(length))
    assert {id(plan) for plan in fast._ai3_plans.values()} == {id(fast._ai3_first)}
    with pytest.warns(UserWarning, match="planned anew"):
        agree(fast, model, *inputs(11))
    agree(fast, model, *inputs(4))
    assert len({id(plan) for plan in fast._ai3_plans.values()}) == 2


def test_copies_pickles_and_files(tmp_path, nothing_anew):
    model = seeded(Encoder())
    model.limit = 20
    fast, freed = check(model, *inputs(8)), check(model, *inputs(8), keep_original=False)
    ai3_ops.save(fast, tmp_path / "encoder")
    ai3_ops.save(freed, tmp_path / "freed")
    loaded = [ai3_ops.load(tmp_path / name) for name in ("encoder", "freed")]
    nothing_anew()
    for again in (copy.deepcopy(fast), freed, *loaded, *(pickle.loads(pickle.dumps(m)) for m in (fast, freed))):
        for length in (9, 4, 12, 11):
            agree(again, model, *inputs(length, 1 + length % 2))
    for alone in (freed, *loaded):
        with pytest.raises(ValueError, match="optimize again, with inputs of these sizes in a list"):
            alone(*inputs(21))


def test_files_of_lengths_that_were_not_compared(tmp_path):
    model = seeded(Encoder())
    ai3_ops.save(check(model, *inputs(8), verify="off"), tmp_path / "encoder")
    loaded = ai3_ops.load(tmp_path / "encoder")
    agree(loaded, model, *inputs(8, 3))
    with pytest.raises(ValueError, match="optimize again"):
        loaded(*inputs(9))


def test_traces_at_other_lengths_have_the_originals_layers():
    model = seeded(Encoder())
    fast = check(model, *inputs(8))
    for length in (8, 9):
        exported = torch.export.export(fast, inputs(length), strict=False)
        agree(exported.module(), model, *inputs(length))


def test_examples_of_several_lengths_share_the_program(tmp_path, monkeypatch):
    model, lengths = seeded(Encoder()), (8, 5, 12)
    examples = [inputs(n) for n in lengths]
    fast = ai3_ops.optimize(model, examples, "default", keep_original=False, verify="off", progress=False)
    assert {id(plan) for plan in fast._ai3_plans.values()} == {id(fast._ai3_first)}
    monkeypatch.setattr(saved, "MOST", 1)
    ai3_ops.save(fast, tmp_path / "encoder")
    loaded = ai3_ops.load(tmp_path / "encoder")
    assert len(loaded._ai3_plans) == 1
    for length in (*lengths, 7):  # two others than the first were compared
        agree(fast, model, *inputs(length, 2))
        agree(loaded, model, *inputs(length, 2))


SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
MODELS = {
    "Bert": SMALL,
    "DistilBert": {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 32},
    "ModernBert": SMALL | {"pad_token_id": 0, "local_attention": 6},
    "T5Encoder": {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3},
    "GPT2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "use_cache": False},
    "Llama": SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
}


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    "name", ["Bert", "Llama", *(pytest.param(n, marks=pytest.mark.full) for n in MODELS if n not in ("Bert", "Llama"))]
)
def test_transformers(name, padded, nothing_anew):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(vocab_size=50, **MODELS[name])
    model = seeded(getattr(transformers, f"{name}Model")(config))

    def given(length, batch):
        return dict(zip(("input_ids", "attention_mask"), inputs(length, batch, padded), strict=False))

    fast = ai3_ops.optimize(model, given(8, 2), budget_seconds=0.2, progress=False)
    assert isinstance(fast, Optimized)
    assert fast._ai3_first is not None
    if name in ("Bert", "DistilBert") and not padded:  # a mask that is true at any length is not read
        (region,) = (m for m in fast._ai3_first.body.modules() if isinstance(m, Region))
        assert re.findall(r"attention_flash((?: %\d+)+)", region.program.text)[0].count("%") == 3
    nothing_anew()
    for length, batch in ((8, 2), (13, 1), (5, 3), (9, 2), (30, 1)):
        with torch.no_grad():
            got = fast(**given(length, batch)).last_hidden_state
            expected = copy.deepcopy(model).double()(**given(length, batch)).last_hidden_state
        assert difference(got, expected) < 1e-5
    assert {id(plan) for plan in fast._ai3_plans.values()} == {id(fast._ai3_first)}
