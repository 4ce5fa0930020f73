"""Attention over some of the keys: block_sparse, longformer and bigbird are plain attention under their masks."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import ai3_ops
from ai3_ops.operations.attention import Attention
from ai3_ops.operations.patterns import random_blocks

OPS = torch.ops.ai3


def made(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def near(actual, expected, limit=1e-13):
    error = (actual.detach().double() - expected.detach().double()).abs().max()
    assert error <= limit * max(1.0, float(expected.detach().abs().max())), float(error)


def under(mask, q, k, v, scale=None):
    """Plain attention under a boolean mask, or one that is added."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(hidden, 0)
    none = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~none, -math.inf).softmax(-1).masked_fill(none, 0) @ v


def flags(*shape, share=0.2, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def check_gradients(function, *leaves):
    leaves = [t.requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def compare(ours, theirs, *leaves, limit=1e-12):
    """Outputs, and gradients by every tensor."""
    leaves = [t.requires_grad_() for t in leaves]
    y, z = ours(*leaves), theirs(*leaves)
    near(y, z, limit)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    for got, wanted in zip(torch.autograd.grad(y, leaves, seed), torch.autograd.grad(z, leaves, seed), strict=True):
        near(got, wanted, limit)


# longformer -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("window", [0, 2, 30, 256, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_longformer_is_dense_attention_under_its_mask(length, window, tokens):
    q, k, v = made((2, 3, length, 8), (2, 3, length, 8), (2, 3, length, 6))
    options = {"window": window, "global_tokens": min(tokens, length)}
    mask = ai3_ops.attention_mask("longformer", length, length, **options)
    place = torch.arange(length)
    expected = (place[:, None] - place).abs() <= window // 2
    expected |= (place < tokens) | (place < tokens)[:, None]
    assert torch.equal(mask, expected)
    compare(functools.partial(OPS.attention_longformer, **options), functools.partial(under, mask), q, k, v)


@pytest.mark.parametrize("own", [(), ("query",), ("key",), ("value",), ("query", "key", "value")], ids=str)
def test_longformer_with_scattered_globals_padding_and_projections_of_their_own(own):
    length, window = 150, 20
    q, k, v = made((2, 2, length, 8), (2, 2, length, 8), (2, 2, length, 6))
    more = dict(zip(own, made(*({"value": v}.get(n, q).shape for n in own), seed=7), strict=True))
    is_global, padded = flags(2, length, share=0.1), flags(2, length, seed=3)
    options = {"window": window, "global_mask": is_global, "key_padding": padded}
    place = torch.arange(length)
    chosen = (is_global & ~padded)[:, None, None, :]
    near_by = ((place[:, None] - place).abs() <= window // 2) | chosen
    seen = ~padded[:, None, None, :]

    def theirs(q, k, v, *rest):
        given = dict(zip(own, rest, strict=True))
        of_global = under(
            seen.expand(2, 1, length, length),
            *(given.get(n, t) for n, t in zip(("query", "key", "value"), (q, k, v), strict=True)),
        )
        ordinary = under(near_by & seen, q, k, v)
        return torch.where(chosen.mT, of_global, ordinary).masked_fill(~seen.mT, 0)

    def ours(q, k, v, *rest):
        return OPS.attention_longformer(
            q, k, v, **options, **{f"global_{n}": t for n, t in zip(own, rest, strict=True)}
        )

    compare(ours, theirs, q, k, v, *more.values())


def test_longformer_has_derivatives_of_every_tensor():
    q, k, v, gq, gk, gv = made(*[(1, 2, 7, 3), (1, 2, 7, 3), (1, 2, 7, 2)] * 2)
    is_global, padded = torch.tensor([[False, True, False, False, True, False, False]]), torch.arange(7)[None] == 6

    def function(q, k, v, gq=None, gk=None, gv=None):
        own = {"global_query": gq, "global_key": gk, "global_value": gv}
        return OPS.attention_longformer(q, k, v, window=2, global_mask=is_global, key_padding=padded, scale=0.6, **own)

    check_gradients(function, q, k, v, gq, gk, gv)
    check_gradients(function, q, k, v)


BOTH = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])


@BOTH
def test_longformer_reads_no_padded_token(dtype, limit):
    q, k, v = made((1, 2, 200, 16), (1, 2, 200, 16), (1, 2, 200, 16), dtype=dtype)
    padded = torch.arange(200)[None] >= 150
    expected = OPS.attention_longformer(q[..., :150, :], k[..., :150, :], v[..., :150, :], window=64, global_tokens=1)
    cut = [t[..., :150, :].clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(OPS.attention_longformer(*cut, window=64, global_tokens=1).square().sum(), cut)
    q[..., 150:, :] = k[..., 150:, :] = v[..., 150:, :] = math.nan
    tensors = [t.requires_grad_() for t in (q, k, v)]
    output = OPS.attention_longformer(*tensors, window=64, global_tokens=1, key_padding=padded)
    near(output[..., :150, :], expected, limit)
    assert (output[..., 150:, :] == 0).all()
    for got, cut_call in zip(torch.autograd.grad(output.square().sum(), tensors), wanted, strict=True):
        near(got[..., :150, :], cut_call, 10 * limit)
        assert (got[..., 150:, :] == 0).all()


@BOTH
def test_nan_comes_out_where_a_window_sees_it_alone(dtype, limit):
    q, k, v = made((1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 300, 16), dtype=dtype)
    expected = OPS.attention_longformer(q, k, v, window=62)
    k[..., 100:141, :] = v[..., 100:141, :] = math.nan
    output = OPS.attention_longformer(q, k, v, window=62)
    far = (torch.arange(300) < 69) | (torch.arange(300) > 171)
    assert output[..., ~far, :].isnan().all()
    near(output[..., far, :], expected[..., far, :], limit)


def test_longformer_groups_heads_and_any_dtype():
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        q, k, v = made((2, 6, 130, 20), (2, 2, 130, 20), (2, 2, 130, 12), dtype=dtype)
        wide = [q.double(), *(t.double().repeat_interleave(3, 1) for t in (k, v))]
        mask = ai3_ops.attention_mask("longformer", 130, 130, window=32, global_tokens=3)
        compare_to = under(mask, *wide)
        near(OPS.attention_longformer(q, k, v, enable_gqa=True, window=32, global_tokens=3), compare_to, limit)


def test_longformer_refuses_by_reason():
    q, k, v = made((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
    for options, words in (
        ({"window": 3}, "even window"),
        ({"global_tokens": 1, "global_mask": flags(1, 8)}, "got both"),
        ({"global_mask": flags(1, 9)}, "global_mask that broadcasts"),
        ({"key_padding": torch.zeros(1, 8)}, "key_padding of bool"),
        ({"global_query": torch.zeros(1, 2, 8, 4)}, "global_query of the query's dtype"),
    ):
        with pytest.raises(RuntimeError, match=words):
            OPS.attention_longformer(q, k, v, **options)
    with pytest.raises(RuntimeError, match="as many queries as keys"):
        OPS.attention_longformer(q[..., :5, :], k, v)
    with pytest.raises(RuntimeError, match="key_padding"):
        OPS.attention_longformer(q, k, v, None, 0.0, True)


# bigbird ----------------------------------------------------------------------------------------------------------------
def blocks_seen(length, block, lists):
    """lists[head][row]: of the random blocks of inner rows."""
    n = -(-length // block)
    counts = torch.zeros(len(lists), n, n)
    for h, rows in enumerate(lists):
        for i in range(n):
            for j in range(n) if i in (0, n - 1) else sorted({0, i - 1, i, i + 1, n - 1}):
                counts[h, i, j] += 1
            if 0 < i < n - 1:
                for j in rows[i - 1]:
                    counts[h, i, j] += 1
    wide = counts.repeat_interleave(block, 1)[:, :length].repeat_interleave(block, 2)[..., :length]
    return wide.double().log()


@pytest.mark.parametrize("length", [1, 8, 30, 66, 250])
@pytest.mark.parametrize("random", [0, 2])
def test_bigbird_is_dense_attention_under_its_mask(length, random):
    block, heads = 8, 3
    q, k, v = made((2, heads, length, 8), (2, heads, length, 8), (2, heads, length, 6))
    n = -(-length // block)
    lists = [[random_blocks(11, h, i, n, random) for i in range(1, n - 1)] for h in range(heads)]
    added = blocks_seen(length, block, lists)
    options = {"block_size": block, "random_blocks": random, "seed": 11}
    mask = ai3_ops.attention_mask("bigbird", length, length, heads=heads, **options)
    assert torch.equal(mask, added > -math.inf)
    compare(functools.partial(OPS.attention_bigbird, **options), functools.partial(under, added), q, k, v)
    shown = flags(2, 1, 1, length, share=0.7)
    ours = OPS.attention_bigbird(q, k, v, shown, **options)
    near(ours, under(added.masked_fill(~shown, -math.inf), q, k, v))


def test_bigbird_draws_distinct_blocks_that_its_window_lacks():
    for n, count in ((3, 3), (5, 3), (6, 3), (40, 3), (40, 40)):
        for i in range(1, n - 1):
            found = random_blocks(5, 2, i, n, count)
            others = {*range(n)} - {0, i - 1, i, i + 1, n - 1}
            assert len(found) == len({*found}) == min(count, len(others))
            assert {*found} <= others
    assert random_blocks(0, 0, 1, 64, 3) == random_blocks(2**64, 0, 1, 64, 3)
    assert random_blocks(0, 0, 5, 1000, 2) != random_blocks(1, 0, 5, 1000, 2)


@pytest.mark.parametrize("given", ["hf_eval", "indices"])
def test_bigbird_counts_an_index_as_often_as_it_stands(given):
    block, heads, length, random = 8, 2, 150, 2
    q, k, v = made((1, heads, length, 8), (1, heads, length, 8), (1, heads, length, 8))
    n = -(-length // block)
    indices = torch.randint(0, n, (heads, n - 2, random), generator=torch.Generator().manual_seed(2))
    if given == "hf_eval":
        indices = torch.zeros_like(indices)
    options = {"random": "hf_eval"} if given == "hf_eval" else {"random_indices": indices.int()}
    added = blocks_seen(length, block, indices.tolist())
    ours = functools.partial(OPS.attention_bigbird, block_size=block, random_blocks=random, **options)
    compare(ours, functools.partial(under, added), q, k, v)


def test_bigbird_evaluates_short_texts_in_full_as_transformers_does():
    q, k, v = made((1, 2, 72, 8), (1, 2, 72, 8), (1, 2, 72, 8))
    ours = OPS.attention_bigbird(q, k, v, block_size=8, random_blocks=2, random="hf_eval")
    near(ours, under(torch.ones(72, 72, dtype=torch.bool), q, k, v))


def test_bigbird_has_derivatives():
    q, k, v = made((1, 2, 9, 3), (1, 2, 9, 3), (1, 2, 9, 2))
    check_gradients(functools.partial(OPS.attention_bigbird, block_size=2, random_blocks=1), q, k, v)


def test_bigbird_refuses_by_reason():
    q, k, v = made((1, 2, 40, 4), (1, 2, 40, 4), (1, 2, 40, 4))
    for options, words in (
        ({"block_size": 0}, "block_size from 1"),
        ({"random": "other"}, "counter"),
        ({"block_size": 8, "random_indices": torch.full((2, 3, 3), 5)}, "from 0 to 4, got 5"),
        ({"block_size": 8, "random_indices": torch.zeros(2, 3, 2).long()}, "random_indices that broadcasts"),
    ):
        with pytest.raises(RuntimeError, match=words):
            OPS.attention_bigbird(q, k, v, **options)


# block_sparse -----------------------------------------------------------------------------------------------------------
def listed(rows, blocks, lead, each, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, each + 1, (*lead, rows), generator=generator)
    return counts, torch.randint(0, blocks, (*lead, rows, each), generator=generator)


def counted(counts, indices, blocks, block, queries, keys):
    total = torch.zeros(*counts.shape, blocks)
    for place in range(indices.shape[-1]):
        total.scatter_add_(-1, indices[..., place : place + 1], (place < counts)[..., None].float())
    return total.repeat_interleave(block, -2)[..., :queries, :].repeat_interleave(block, -1)[..., :keys].double()


@pytest.mark.parametrize("block", [1, 16, 100, 128])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_block_sparse_is_dense_attention_under_its_lists(block, lead, kind):
    queries, keys = (20, 33) if block == 1 else (170, 260)
    rows, blocks = -(-queries // block), -(-keys // block)
    q, k, v = made((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 6))
    partial, full = (listed(rows, blocks, lead, min(3, blocks), seed) for seed in (1, 2))
    added = torch.zeros(queries, keys, dtype=torch.float64)
    mask = None
    if kind != "none":
        mask = flags(2, 1, queries, keys, share=0.7)
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
        if kind == "float":
            mask = added = added + made(mask.shape, seed=4)[0]
    weights = [counted(*lists, blocks, block, queries, keys) for lists in (partial, full)]
    total = (weights[0] * added.exp() + weights[1]).log()
    options = dict(
        zip(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), (*partial, *full), strict=True)
    )
    compare(
        lambda *tensors: OPS.attention_block_sparse(*tensors, mask, **options, block_size=block),
        functools.partial(under, total), q, k, v,
    )  # fmt: skip
    if lead in ((), (3,)):
        one = {name: t.int() for name, t in options.items() if not name.startswith("full")}
        seen = ai3_ops.attention_mask("block_sparse", queries, keys, **one, block_size=block)
        assert torch.equal(seen, weights[0] > 0)


def test_block_sparse_has_derivatives_also_of_its_mask():
    q, k, v, mask = made((1, 2, 5, 3), (1, 2, 7, 3), (1, 2, 7, 2), (5, 7))
    mask[1, 2] = mask[3, 4] = -math.inf
    partial, full = listed(3, 4, (2,), 3, 1), listed(3, 4, (2,), 2, 2)
    options = dict(
        zip(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), (*partial, *full), strict=True)
    )

    def function(q, k, v, mask=mask):
        return OPS.attention_block_sparse(q, k, v, mask, **options, block_size=2)

    check_gradients(function, q, k, v)
    finite = torch.where(mask.isinf(), 0.0, mask)
    check_gradients(function, q, k, v, finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 63])
def test_block_sparse_reads_no_key_that_is_not_listed(block, dtype):
    q, k, v = made((1, 1, 2 * block, 16), (1, 1, 4 * block, 16), (1, 1, 4 * block, 16), dtype=dtype)
    k[..., block : 3 * block, :] = v[..., block : 3 * block, :] = math.nan
    counts, indices = torch.tensor([2, 2]), torch.tensor([[0, 3, 2], [3, 0, 1]])
    tensors = [t.requires_grad_() for t in (q, k, v)]
    output = OPS.attention_block_sparse(*tensors, kv_num_blocks=counts, kv_indices=indices, block_size=block)
    assert output.isfinite().all()
    grads = torch.autograd.grad(output.square().sum(), tensors)
    assert all(g.isfinite().all() for g in grads)
    assert all((g[..., block : 3 * block, :] == 0).all() for g in grads[1:])


def test_block_sparse_refuses_what_it_must_not_read():
    q, k, v = made((1, 1, 128, 4), (1, 1, 256, 4), (1, 1, 256, 4))
    counts, indices = torch.tensor([2, 2]), torch.tensor([[0, 3], [3, 0]])
    for more, words in (
        ({"kv_indices": indices + 1}, "from 0 to 3, got 4"),
        ({"kv_num_blocks": counts + 1}, "from 0 to 2, got 3"),
        ({"kv_num_blocks": counts[:1]}, "kv_num_blocks that broadcasts"),
        ({"kv_indices": indices.double()}, "int32 or int64"),
        ({"block_size": 0}, "block_size from 1"),
        ({"full_kv_num_blocks": counts}, "both of"),
    ):
        options = {"kv_num_blocks": counts, "kv_indices": indices, "block_size": 64} | more
        with pytest.raises(RuntimeError, match=words):
            OPS.attention_block_sparse(q, k, v, **options)
    assert ai3_ops.supports(
        "attention", "block_sparse", q, k, v, kv_num_blocks=counts, kv_indices=indices, block_size=64
    )[0]


# All of them --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["block_sparse", "longformer", "bigbird"])
def test_many_threads_give_the_same_bits(name):
    q, k, v = made((1, 4, 300, 16), (1, 4, 300, 16), (1, 4, 300, 16), dtype=torch.float32)
    options = Attention().own_operands(name, (q, k, v))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def run():
        y = getattr(OPS, f"attention_{name}")(*leaves, **options)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run())
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_tensors_among_parameters_are_batched_by_vmap():
    q, k, v = made((2, 2, 12, 4), (2, 2, 12, 4), (2, 2, 12, 4))
    padded = flags(3, 2, 12)

    def call(q, padded):
        return OPS.attention_longformer(q, k, v, window=4, global_tokens=1, key_padding=padded)

    near(torch.vmap(call, (None, 0))(q, padded), torch.stack([call(q, p) for p in padded]))
    queries = torch.stack([q, -q])
    near(torch.vmap(call, (0, None))(queries, padded[0]), torch.stack([call(q, padded[0]), call(-q, padded[0])]))


def test_longformer_in_a_model():
    class Attends(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = made((1, 2, 300, 16), dtype=torch.float32)[0]
    choice = ai3_ops.Algorithm("longformer", window=64, global_tokens=1)
    swapped = ai3_ops.swap(Attends(), {"attention": choice}, x)
    mask = ai3_ops.attention_mask("longformer", 300, 300, window=64, global_tokens=1)
    near(swapped(x), under(mask, x, x, x), 1e-5)
    near(torch.compile(swapped, backend="aot_eager", fullgraph=True)(x), under(mask, x, x, x), 1e-5)
    with pytest.raises(TypeError, match="takes numbers and words"):
        ai3_ops.Algorithm("longformer", global_mask=flags(1, 300))
    for name, value in {"sinks": 3, "alibi_slopes": [1.0, 2.0]}.items():
        with pytest.raises(TypeError, match=rf"takes numbers and words, and {name} is a tensor"):
            ai3_ops.Algorithm("flash", **{name: value})


TENSORS = {  # of (1, 2, 192, 16): what direct calls alone can be given
    "longformer": lambda x: {
        "window": 16, "global_mask": flags(1, 192), "key_padding": torch.arange(192)[None] >= 180,
        "global_query": x.sin(), "global_key": x.cos(), "global_value": -x,
    },
    "bigbird": lambda x: {"block_size": 16, "random_indices": (torch.arange(10)[:, None] + torch.tensor([1, 4, 5])) % 12},
}  # fmt: skip


@pytest.mark.parametrize("name", ["math", "flash", "default", "block_sparse", "longformer", "bigbird", "linformer"])
def test_every_algorithm_is_traced_compiled_and_exported(name):
    q, k, v = made((1, 2, 192, 16), (1, 2, 192, 16), (1, 2, 192, 16), dtype=torch.float32)
    operator = getattr(OPS, f"attention_{name}")
    for options in (Attention().own_operands(name, (q, k, v)), TENSORS[name](q) if name in TENSORS else None):
        if options is None:
            continue
        torch.compiler.reset()

        class Attends(torch.nn.Module):
            def forward(self, q, k, v, options=options):
                return operator(q, k, v, **options)

        expected = operator(q, k, v, **options)
        for made_of in (
            torch.compile(Attends(), backend="aot_eager", fullgraph=True),
            torch.compile(Attends(), backend="aot_eager", fullgraph=True, dynamic=True),
            torch.export.export(Attends(), (q, k, v)).module(),
        ):
            near(made_of(q, k, v), expected, 1e-6)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        torch.library.opcheck(operator.default, tuple(leaves), options)


@pytest.mark.parametrize("name", ["block_sparse", "longformer", "bigbird", "linformer"])
def test_dropout_drops_what_it_drops_from_the_dense_weights(name):
    """The same numbers from the same seed: of a query and a key, wherever that is computed."""
    q, k, v = made((2, 4, 170, 8), (2, 2, 170, 8), (2, 2, 170, 6))
    options = Attention().own_operands(name, (q, k, v))
    if name == "longformer":
        options = {"window": 30, "global_tokens": 5}
    if name == "block_sparse":
        rows = torch.arange(6)
        lists = {"kv_num_blocks": rows % 3, "kv_indices": torch.stack([rows, (rows + 3) % 6], -1)}
        options = lists | {"block_size": 32}
    if name == "linformer":
        e, f = made((3, 170), (2, 3, 170), seed=4)
        options = {"key_projection": e, "value_projection": f}
        mask, projected = None, (lambda k, v: (e @ k, f @ v))
    else:
        mask, projected = (
            ai3_ops.attention_mask(name, 170, 170, **options, **({"heads": 4} if name == "bigbird" else {})),
            None,
        )
    operator = getattr(OPS, f"attention_{name}")

    def seeded(function, *arguments, **more):
        torch.manual_seed(11)
        return function(*arguments, 0.4, enable_gqa=True, **more)

    def dense(q, k, v):
        return seeded(OPS.attention_math, q, *(projected(k, v) if projected else (k, v)), mask)

    def ours(q, k, v):
        return seeded(operator, q, k, v, None, **options)

    compare(ours, dense, q, k, v)
    assert (operator(q, k, v, None, 1.0, enable_gqa=True, **options) == 0).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = ours(q, k, v)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, ours(q, k, v))


def test_dropout_drops_a_block_that_stands_twice_together():
    q, k, v = made((1, 2, 70, 8), (1, 2, 70, 8), (1, 2, 70, 6))
    counts, indices = torch.tensor([2, 3, 1]), torch.tensor([[0, 0, 2], [1, 2, 1], [0, 1, 1]])
    times = counted(counts, indices, 3, 32, 70, 70).log()

    def seeded(function, *arguments, **more):
        torch.manual_seed(11)
        return function(*arguments, 0.4, **more)

    options = {"kv_num_blocks": counts, "kv_indices": indices, "block_size": 32}
    compare(
        lambda q, k, v: seeded(OPS.attention_block_sparse, q, k, v, None, **options),
        lambda q, k, v: seeded(OPS.attention_math, q, k, v, times), q, k, v,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["block_sparse", "longformer", "bigbird", "linformer"])
def test_dropout_has_derivatives(name):
    q, k, v = made((1, 2, 7, 3), (1, 2, 7, 3), (1, 2, 7, 2))
    options = Attention().own_operands(name, (q, k, v))
    own = made((1, 2, 7, 3), (1, 2, 7, 3), (1, 2, 7, 2), seed=9) if name == "longformer" else []
    if name == "longformer":
        options = {"window": 2, "global_tokens": 2}

    def function(q, k, v, *own):
        torch.manual_seed(11)
        given = dict(zip(("global_query", "global_key", "global_value"), own, strict=False))
        return getattr(OPS, f"attention_{name}")(q, k, v, None, 0.4, **options, **given)

    check_gradients(function, q, k, v, *own)


def test_lists_are_those_of_flex_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = made((1, 2, 512, 32), (1, 2, 512, 32), (1, 2, 512, 32), dtype=torch.float32)

    def near_and_causal(batch, head, i, j):
        return (i >= j) & (i - j < 200)

    lists = create_block_mask(near_and_causal, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    seen = torch.arange(512)[:, None] - torch.arange(512)
    given = {
        name: getattr(lists, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    }
    output = OPS.attention_block_sparse(q, k, v, (seen >= 0) & (seen < 200), **given, block_size=64)
    with pytest.warns(UserWarning, match="without torch.compile"):
        expected = flex_attention(q, k, v, block_mask=lists)
    near(output, expected, 1e-5)


@pytest.mark.parametrize("name", ["longformer", "bigbird", "block_sparse"])
def test_five_dimensions(name):
    q, k, v = made((2, 2, 3, 96, 8), (2, 2, 3, 96, 8), (2, 2, 3, 96, 6))
    options = Attention().own_operands(name, (q, k, v))
    if name == "longformer":
        options = {"window": 8, "global_mask": flags(2, 2, 96), "key_padding": flags(2, 2, 96, seed=3)}
    operator = getattr(OPS, f"attention_{name}")
    for one in range(2):
        own = options | {n: options[n][one] for n in ("global_mask", "key_padding") if n in options}
        if name == "longformer":
            near(operator(q, k, v, **options)[one], operator(q[one], k[one], v[one], **own))
        else:
            near(operator(q, k, v, **options)[one], operator(q[one], k[one], v[one], **options))


def test_nothing_chooses_them_unasked():
    for a in ai3_ops.algorithms("attention"):
        if a.name in ("longformer", "bigbird"):
            assert a.accuracy == "approximate"
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "queries": 64, "keys": 64, "size": 16, "value_size": 16}
    ok, reason = ai3_ops.registry.supports_sizes("attention", "block_sparse", "cpu", torch.float32, **sizes)
    assert (ok, reason) == (False, "needs kv_num_blocks and kv_indices")


def test_attention_mask_names_what_it_lacks():
    with pytest.raises(ValueError, match="with a pattern"):
        ai3_ops.attention_mask("linear", 4, 4)
    with pytest.raises(TypeError, match="no parameter 'windows'"):
        ai3_ops.attention_mask("longformer", 4, 4, windows=2)
    with pytest.raises(ValueError, match="as many queries as keys"):
        ai3_ops.attention_mask("bigbird", 4, 5)
    assert ai3_ops.attention_mask("flash", 3, 3, window_left=1, is_causal=True).tolist() == [
        [True, False, False], [True, True, False], [False, True, True],
    ]  # fmt: skip


def test_fakes_check_tensors_as_kernels_do():
    q, k, v = (t.to("meta") for t in made((1, 2, 256, 4), (1, 2, 256, 4), (1, 2, 256, 4)))
    counts, indices = torch.zeros(2).long().to("meta"), torch.zeros(2, 1).long().to("meta")
    assert OPS.attention_block_sparse(q, k, v, kv_num_blocks=counts, kv_indices=indices).shape == q.shape
    with pytest.raises(RuntimeError, match="kv_num_blocks that broadcasts"):
        OPS.attention_block_sparse(q, k, v, kv_num_blocks=counts[:1], kv_indices=indices[:1])
    with pytest.raises(RuntimeError, match="global_mask of bool"):
        OPS.attention_longformer(q, k, v, global_mask=torch.zeros(1, 256, device="meta"))
    with pytest.raises(RuntimeError, match="global_query that broadcasts"):
        OPS.attention_longformer(q, k, v, global_query=q[..., :3])


@pytest.mark.parametrize(
    ("algorithm", "parameters", "words"),
    [
        ("longformer", {"window": 3}, "an even window from 0, got 3"),
        ("longformer", {"window": -4}, "an even window from 0, got -4"),
        ("bigbird", {"block_size": 0}, "block_size"),
        ("flash", {"window_left": -5}, "windows from -1"),
    ],
)
def test_values_that_no_algorithm_takes(algorithm, parameters, words):
    """Others that lack the parameter would compute something else: a refusal does not name them."""
    x = torch.randn(1, 2, 64, 4)
    with pytest.raises(ValueError, match=words):
        ai3_ops.attention_mask(algorithm, 64, 64, **parameters)
    for given in (x, x.to("meta")):
        with pytest.raises(RuntimeError, match=f"{words}.*; algorithms that support this case: none"):
            getattr(torch.ops.ai3, f"attention_{algorithm}")(given, given, given, **parameters)
