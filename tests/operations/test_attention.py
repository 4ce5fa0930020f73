"""Attention beyond what the shared tester calls: grouped heads, scale, masks, NaN, layouts, calls in models."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops.calls import spec
from ai3_ops.checking.calling import allocated

METHODS = ("math", "flash")


def operator(name):
    return getattr(torch.ops.ai3, f"attention_{name}")


def made(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def near(actual, expected, limit=1e-5):
    error = (actual.double() - expected.double()).abs().max()
    assert error <= limit * expected.abs().max(), float(error)


@pytest.mark.parametrize("name", METHODS)
def test_grouped_queries_and_scale(name):
    q, k, v = made((2, 6, 37, 16), (2, 2, 150, 16), (2, 2, 150, 24))
    options = {"scale": -0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    near(operator(name)(q, k, v, **options), expected)


@pytest.mark.parametrize("name", METHODS)
def test_batches_and_heads_are_broadcast(name):
    q, k, v = made((3, 1, 5, 8), (4, 6, 8), (1, 1, 6, 8))
    near(operator(name)(q, k, v), F.scaled_dot_product_attention(q.double(), k.double(), v.double()))
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    grads = torch.autograd.grad(operator(name)(q, k, v).square().sum(), (q, k, v))
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))
    for got, expected in zip(grads, wanted, strict=True):
        near(got, expected, 1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(1, 150), (40, 1), (2, 1, 1, 150), (3, 40, 150), (2, 3, 40, 150)])
@pytest.mark.parametrize("kind", ["bool", "float", "query", "sliced"])
def test_masks_are_broadcast_and_not_copied(name, shape, kind):
    q, k, v = made((2, 3, 40, 16), (2, 3, 150, 16), (2, 3, 150, 16), dtype=torch.bfloat16)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    if kind == "sliced":
        mask = torch.stack([mask, ~mask], -1)[..., 0]
    elif kind != "bool":
        mask = torch.randn(shape).masked_fill(~mask, -math.inf).to(torch.float32 if kind == "float" else q.dtype)
    wide = mask if mask.dtype == torch.bool else mask.double()
    near(operator(name)(q, k, v, mask), F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_not_seen_is_harmless_and_what_is_seen_comes_out(name, kind, dtype):
    q, k, v = made((1, 2, 200, 16), (1, 2, 200, 16), (1, 2, 200, 16), dtype=dtype)
    k[..., 190:, :] = v[..., 190:, :] = math.nan
    tensors = [t.requires_grad_() for t in (q, k, v)]

    def of(seen):
        return seen if kind == "bool" else torch.zeros(200, 200, dtype=dtype).masked_fill(~seen, -math.inf)

    mask = (torch.arange(200) < 190).repeat(200, 1)
    masked, causal = operator(name)(*tensors, of(mask)), operator(name)(*tensors, None, 0.0, True)
    assert masked.isfinite().all()
    assert causal[..., :190, :].isfinite().all()
    assert causal[..., 190:, :].isnan().all()
    grads = torch.autograd.grad(masked.float().square().sum(), tensors)
    assert all(g.isfinite().all() for g in grads)
    assert all((g[..., 190:, :] == 0).all() for g in grads[1:])
    mask[7, 195] = True  # one query sees one of them
    seen = operator(name)(*tensors, of(mask)).isnan().all(-1)
    assert seen[..., 7].all()
    assert seen.sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [3, 6])  # passes over the keys of their own
@pytest.mark.parametrize("name", METHODS)
def test_nan_comes_out_with_fewer_keys_than_a_vector(name, queries, dtype):
    q, k, v = made((1, 2, queries, 16), (1, 2, 6, 16), (1, 2, 6, 16), dtype=dtype)
    of_query, of_key, of_value = (t.clone() for t in (q, k, v))
    of_query[0, 0, 2, 3] = of_key[0, 0, 2, 3] = of_value[0, 0, 2, 3] = math.nan
    output = operator(name)(of_query, k, v)
    assert output[0, 0, 2].isnan().all()
    assert output.isnan().sum() == 16
    output = operator(name)(q, of_key, v)
    assert output[0, 0].isnan().all()
    assert output[0, 1].isfinite().all()
    output = operator(name)(q, k, of_value)
    assert output[0, 0, :, 3].isnan().all()
    assert output.isnan().sum() == queries


@pytest.mark.parametrize("shape", [(1, 12, 197, 64), (1, 12, 512, 64), (8, 8, 77, 64)], ids=str)
def test_the_error_is_at_most_twice_that_of_pytorch(shape):
    for causal in (False, True):
        errors = []
        for seed in range(3):
            q, k, v = made(shape, shape, shape, seed=seed)
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
            theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal).double() - exact
            ours = torch.ops.ai3.attention_flash(q, k, v, None, 0.0, causal).double() - exact
            errors.append([t.abs().max() for t in (ours, theirs)])
            assert ours.square().mean() <= 1.3**2 * theirs.square().mean()
        most, theirs = map(max, zip(*errors, strict=True))
        assert most <= 2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window_left": 90, "window_right": 40}], ids=str)
def test_keys_that_no_cache_holds_meet_larger_tiles_of_queries(dtype, options):
    # From 4 MiB of keys and values of a head on, and 64 tiles in all: of 256 queries.
    bytes_of_a_key = 2 * 1024 * dtype.itemsize
    q, k, v = made((1, 32, 300, 1024), *[(1, 1, 2**22 // bytes_of_a_key + 9, 1024)] * 2, dtype=dtype)
    expected = by_definition(q, *(t.expand(1, 32, -1, -1) for t in (k, v)), **of(options))
    got = torch.ops.ai3.attention_flash(q, k, v, enable_gqa=True, **options)
    near(got, expected, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("case", ["plain", "grouped", "mask", "dropout", "sizes"])
def test_memory_grows_as_the_length_does(case):
    def taken(length):
        heads, size, value_size = (
            (8, 64, 64) if case == "grouped" else (2, 192, 128) if case == "sizes" else (2, 64, 64)
        )
        kv = 1 if case == "grouped" else heads
        q, k, v = made((1, heads, length, size), (1, kv, length, size), (1, kv, length, value_size))
        tensors = [t.requires_grad_() for t in (q, k, v)]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if case == "mask" else None
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            y = torch.ops.ai3.attention_flash(
                *tensors, mask, 0.1 if case == "dropout" else 0.0, enable_gqa=case == "grouped"
            )
            torch.autograd.grad(y.sum(), tensors)
        return allocated(profile)

    short, long = taken(512), taken(1024)
    assert 0 < long <= 2.2 * short
    assert long < (8 if case == "grouped" else 2) * 1024 * 1024 * 4  # less than the scores


@pytest.mark.parametrize("name", METHODS)
def test_a_query_that_sees_nothing_is_zeros_and_so_are_its_gradients(name):
    q, k, v = (t.requires_grad_() for t in made((1, 2, 6, 8), (1, 2, 9, 8), (1, 2, 9, 8), dtype=torch.float64))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = False
    output = operator(name)(q, k, v, mask)
    assert (output[..., 2, :] == 0).all()
    grads = torch.autograd.grad(output.square().sum(), (q, k, v))
    assert (grads[0][..., 2, :] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    lowest = torch.full((6, 9), torch.finfo(torch.float64).min, dtype=torch.float64)  # seen, all alike
    near(operator(name)(q, k, v, lowest), v.mean(-2, keepdim=True).expand(1, 2, 6, 8), 1e-12)


def test_lengths_that_differ_are_an_error_that_names_both():
    q, k, v = made((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 8, 4))
    for name in METHODS:
        with pytest.raises(RuntimeError, match="got 6 and 8"):
            operator(name)(q, k, v)


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_and_their_gradients(name, options):
    heads = 2 if options else 4
    q, k, v = made((1, 4, 5, 3), (1, heads, 7, 3), (1, heads, 7, 2), dtype=torch.float64)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def function(*tensors):
        return operator(name)(*tensors, mask, scale=0.7, **options)

    fast = not options  # else each element's derivative by itself
    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=fast)


HIDDEN = {"all": {}, "causal": {"is_causal": True}, "window": {"window_left": 100, "softcap": 2.0}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [16, 13])  # rows read where they are, and copied
@pytest.mark.parametrize("hidden", HIDDEN)
def test_gradients_of_keys_in_several_parts(dtype, size, hidden):
    # One head of 1,100 keys is several items for the threads, whose sums are added; NaN where no query looks stays there.
    q, k, v, like = made((1, 2, 70, size), (1, 1, 1100, size), (1, 1, 1100, 9), (1, 2, 70, 9), dtype=dtype)
    mask = torch.rand(1, 2, 70, 1100, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., 300:310] = False
    options = HIDDEN[hidden]
    given = [None if options else mask, 0.0, options.get("is_causal", False)]
    if not options:
        k[..., 300:310, :] = math.nan
    found = {}
    for name, kind, threads in (("math", torch.float64, 1), ("flash", dtype, 1), ("flash", dtype, 3)):
        tensors = [t.to(kind).requires_grad_() for t in (q, k, v)]
        own = {n: value for n, value in options.items() if n != "is_causal"}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            y = operator(name)(*tensors, *given, enable_gqa=True, **own)
            found[name, threads] = torch.autograd.grad(y, tensors, like.to(kind))
        finally:
            torch.set_num_threads(before)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    for got, same, expected in zip(found["flash", 1], found["flash", 3], found["math", 1], strict=True):
        near(got, expected, limit)
        assert torch.equal(got, same)


def test_the_output_lies_as_the_query_does():
    x = torch.randn(2, 9, 3 * 4 * 8)
    q, k, v = (t.view(2, 9, 4, 8).transpose(1, 2) for t in x.split(32, -1))
    output = torch.ops.ai3.attention_flash(q, k, v)
    assert output.transpose(1, 2).is_contiguous()
    near(output, F.scaled_dot_product_attention(q.double(), k.double(), v.double()))


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, **self.options)


def test_swap_reaches_every_call():
    x = torch.randn(1, 4, 130, 16)
    for options in (
        {},
        {"is_causal": True, "scale": 0.2},
        {"enable_gqa": True},
        {"attn_mask": torch.ones(130, 130).bool()},
    ):
        model = Attends(**options)
        swapped = ai3_ops.swap(model, {"attention": "flash"}, x)
        (layer,) = ai3_ops.explain(swapped).to_dict()["layers"]
        assert layer["operation"] == "attention"
        assert layer["used"] == "flash"
        near(swapped(x), model(x.double()))
    dropped = ai3_ops.swap(Attends(dropout_p=0.5), {"attention": "flash"}, x)
    torch.manual_seed(2)
    expected = torch.ops.ai3.attention_flash(x, x, x, None, 0.5)
    torch.manual_seed(2)
    assert torch.equal(dropped(x), expected)
    with pytest.warns(UserWarning, match="keep PyTorch's implementation"):
        refused = ai3_ops.swap(Attends(is_causal=True), {"attention": "bigbird"}, x)
    refused(x)
    assert "takes no is_causal" in str(ai3_ops.explain(refused))


class Decodes(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


# Heads, those of keys, queries, keys, and whether flash gains by the measurements (docs/algorithms/attention/default.md)
DECODING = [
    (8, 8, 1, 2048, True), (8, 8, 1, 2047, False), (8, 8, 3, 683, True), (32, 4, 1, 512, True), (32, 4, 2, 512, True),
    (32, 32, 1, 128, False), (32, 32, 4, 128, True), (32, 8, 3, 2048, False), (32, 8, 4, 4096, True),
    (1024, 1024, 4, 127, False), (1024, 1024, 2, 4, False),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "queries", "keys", "gains"), DECODING)
def test_default_leaves_short_decoding_to_pytorch(heads, kv_heads, queries, keys, gains):
    q, k, v = made((1, heads, queries, 16), (1, kv_heads, keys, 16), (1, kv_heads, keys, 16))
    swapped = ai3_ops.swap(Decodes(), "default", (q, k, v))
    with torch.no_grad():
        near(swapped(q, k, v), Decodes()(q.double(), k.double(), v.double()))
    (layer,) = ai3_ops.explain(swapped).layers
    assert (layer.calls, layer.torch_calls) == (1, 0 if gains else 1)
    assert ("PyTorch is faster" in layer.reason) != gains
    q.requires_grad_()  # training steps of few queries are PyTorch's
    assert torch.equal(swapped(q, k, v), Decodes()(q, k, v))


# Parameters of flash's and math's own ----------------------------------------------------------------------------------
def by_definition(q, k, v, mask=None, causal=False, left=-1, right=-1, lower_right=False, softcap=0.0):
    q, k, v = (t.double() for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    behind = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries if lower_right else 0)
    right = 0 if causal or lower_right else right
    seen = (behind >= -left if left >= 0 else True) & (
        behind <= right if right >= 0 else torch.ones_like(behind, dtype=torch.bool)
    )
    if mask is not None:
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            scores = scores + mask
    scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


WINDOWS = (
    {"window_left": 7},
    {"window_right": 5},
    {"window_left": 20, "window_right": 0},
    {"window_left": 0, "window_right": 0},
    {"causal_lower_right": True},
    {"causal_lower_right": True, "window_left": 33},
    {"window_left": 150, "window_right": 90},
    {"softcap": 0.8},
    {"softcap": 3.0, "window_left": 11, "causal_lower_right": True},
)


def of(options):
    words = {"window_left": "left", "window_right": "right", "causal_lower_right": "lower_right"}
    return {words.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(300, 300), (40, 170), (170, 40), (3, 700), (1, 40)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_windows_and_softcap(name, lengths, options):
    queries, keys = lengths
    q, k, v = made((2, 2, queries, 24), (2, 2, keys, 24), (2, 2, keys, 8))
    near(operator(name)(q, k, v, **options), by_definition(q, k, v, **of(options)))
    near(operator(name)(q, k, v, None, 0.0, True, **options), by_definition(q, k, v, causal=True, **of(options)))
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    near(operator(name)(q, k, v, mask, **options), by_definition(q, k, v, mask, **of(options)))


@pytest.mark.parametrize("options", [*WINDOWS, {"window_left": 1, "softcap": 0.5}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_with_windows_and_softcap(name, options):
    leaves = [t.requires_grad_() for t in made((1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2), dtype=torch.float64)]
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    for more in (None, mask):

        def function(*tensors, more=more):
            return operator(name)(*tensors, more, **options)

        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    q, k, v = (t.requires_grad_() for t in made((1, 2, 200, 8), (1, 2, 230, 8), (1, 2, 230, 8), dtype=torch.float64))
    grads = torch.autograd.grad(operator(name)(q, k, v, **options).square().sum(), (q, k, v))
    wanted = torch.autograd.grad(by_definition(q, k, v, **of(options)).square().sum(), (q, k, v))
    for got, expected in zip(grads, wanted, strict=True):
        assert (got - expected).abs().max() <= 1e-11 * max(1, expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_what_lies_outside_of_a_window_is_not_read(name, dtype):
    q, k, v = made((1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 300, 16), dtype=dtype)
    k[..., 100:140, :] = v[..., 100:140, :] = math.nan
    output = operator(name)(q, k, v, window_left=10, window_right=10)
    far = (torch.arange(300) < 90) | (torch.arange(300) >= 150)
    assert output[..., far, :].isfinite().all()
    assert output[..., ~far, :].isnan().all()


def test_parameters_that_cannot_be_are_refused():
    q, k, v = made((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    with pytest.raises(RuntimeError, match=r"needs windows from -1 \(open\), got -2 and -1"):
        torch.ops.ai3.attention_flash(q, k, v, window_left=-2)
    with pytest.raises(RuntimeError, match="needs softcap from 0"):
        torch.ops.ai3.attention_math(q, k, v, softcap=-1.0)


def test_parameters_in_a_model():
    x = torch.randn(1, 4, 130, 16)
    choice = ai3_ops.Algorithm("flash", window_left=16, window_right=16)
    swapped = ai3_ops.swap(Attends(), {"attention": choice}, x)
    near(swapped(x), by_definition(x, x, x, left=16, right=16))
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    near(compiled(x), by_definition(x, x, x, left=16, right=16))


# Few queries -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("keys", [1, 5, 512, 1300])
def test_few_queries_pass_once_over_the_keys(dtype, queries, keys):
    q, k, v = made((2, 6, queries, 36), (2, 2, keys, 36), (2, 2, keys, 20), dtype=dtype)
    mask = torch.rand(2, 6, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    for more in (None, mask, torch.randn(1, keys).masked_fill(torch.rand(1, keys) > 0.8, -math.inf)):
        expected = by_definition(q, *(t.repeat_interleave(3, 1) for t in (k, v)), more)
        limit = 1e-5 if dtype.itemsize > 2 else 1e-2
        near(torch.ops.ai3.attention_flash(q, k, v, more, enable_gqa=True), expected, limit)


def test_few_queries_of_many_chunks_keep_the_log_sum_exp_and_nan():
    q, k, v = (t.requires_grad_() for t in made((1, 2, 2, 8), (1, 2, 1500, 8), (1, 2, 1500, 8), dtype=torch.float64))
    grads = torch.autograd.grad(torch.ops.ai3.attention_flash(q, k, v).square().sum(), (q, k, v))
    wanted = torch.autograd.grad(by_definition(q, k, v).square().sum(), (q, k, v))
    for got, expected in zip(grads, wanted, strict=True):
        near(got, expected, 1e-11)
    with torch.no_grad():
        mask = torch.ones(2, 1500, dtype=torch.bool)
        k[..., 700, :] = v[..., 900, :] = math.nan
        mask[0, [700, 900]] = False
        output = torch.ops.ai3.attention_flash(q, k, v, mask)
    assert output[..., 0, :].isfinite().all()
    assert output[..., 1, :].isnan().all()


# bfloat16 -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_default_takes_16_bits_where_pytorch_does_not_lead(monkeypatch, pairs, tiles, fast):
    monkeypatch.setattr(spec, "PAIRS", pairs)
    monkeypatch.setattr(spec, "TILES", tiles)
    monkeypatch.setattr(spec, "fast_in", lambda dtype: fast)
    monkeypatch.setattr("ai3_ops.operations.attention.PAIRS", pairs)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = (*made((1, 4, 200, 16), (1, 4, 200, 16), (1, 4, 200, 16), dtype=dtype),)  # 160,000 scores
        swapped = ai3_ops.swap(Decodes(), "default", tensors)
        ours = dtype == torch.float32 or not fast or (dtype == torch.bfloat16 and pairs and not tiles)
        with torch.no_grad():
            near(swapped(*tensors), Decodes()(*(t.double() for t in tensors)), 1e-5 if dtype == torch.float32 else 1e-2)
        assert ai3_ops.explain(swapped).layers[0].torch_calls == (not ours)
        tensors[0].requires_grad_()
        swapped(*tensors).float().sum().backward()
        trains = ours and dtype == torch.bfloat16 and pairs
        assert ai3_ops.explain(swapped).layers[0].torch_calls == (not ours) + (not trains)
