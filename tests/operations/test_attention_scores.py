"""What flash and math add to scores and hide by parameters of their own: sinks, ALiBi, lengths of keys, decomposed positions."""

from __future__ import annotations

import math

import pytest
import torch
from test_attention import METHODS, made, near, operator

import ai3_ops


def by_definition(q, k, v, mask=None, causal=False, **own):
    """Of tensors of four dimensions, batch by batch, head by head: each of its own keys alone."""
    q, k, v = (t.double() for t in (q, k, v))
    batch, heads, queries, _ = q.shape
    outputs = []
    for b in range(batch):
        for h in range(heads):
            keys = k.shape[-2] if own.get("key_lengths") is None else int(own["key_lengths"].expand(batch)[b])
            scores = q[b, h] @ k[b, h, :keys].T / math.sqrt(q.shape[-1])
            if own.get("softcap"):
                scores = own["softcap"] * torch.tanh(scores / own["softcap"])
            lower = own.get("causal_lower_right", False)
            behind = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries if lower else 0)
            if own.get("alibi_slopes") is not None:
                scores = scores - own["alibi_slopes"][h].double() * behind.abs()
            if own.get("rel_h") is not None:
                by_h, by_w = (own[n].double().expand(batch, heads, -1, -1)[b, h] for n in ("rel_h", "rel_w"))
                scores = scores + (by_h[:, :, None] + by_w[:, None, :]).flatten(1)[:, :keys]
            seen = torch.ones(queries, keys, dtype=torch.bool)
            if causal or lower:
                seen = behind <= 0
            if own.get("window_left", -1) >= 0:
                seen = seen & (behind >= -own["window_left"])
            if mask is not None:
                part = mask.expand(batch, heads, -1, -1)[b, h, :, :keys]
                seen, scores = (seen & part, scores) if part.dtype == torch.bool else (seen, scores + part.double())
            scores = scores.masked_fill(~seen, -math.inf)
            sink = own["sinks"][h].double() if own.get("sinks") is not None else torch.tensor(-math.inf)
            all_scores = torch.cat([scores, sink.double().expand(queries, 1)], -1)
            weights = all_scores.softmax(-1)[:, :keys].nan_to_num(0.0)
            outputs.append(weights @ v[b, h, :keys])
    return torch.stack(outputs).view(batch, heads, queries, -1)


def terms(batch, heads, queries, grid, dtype=torch.float32):
    """Of each parameter one, by its name."""
    sinks, slopes, rel_h, rel_w = made(
        (heads,), (heads,), (batch, heads, queries, grid[0]), (batch, heads, queries, grid[1]), dtype=dtype, seed=7
    )
    lengths = torch.randint(0, grid[0] * grid[1] + 1, (batch,), generator=torch.Generator().manual_seed(3))
    return {
        "sinks": {"sinks": sinks},
        "alibi": {"alibi_slopes": slopes.abs() / 8},
        "lengths": {"key_lengths": lengths},
        "rel": {"rel_h": rel_h, "rel_w": rel_w},
        "rel of all": {"rel_h": rel_h[:1, :1], "rel_w": rel_w[0, 0]},
        "all": {
            "sinks": sinks, "alibi_slopes": slopes.abs() / 8, "key_lengths": lengths, "rel_h": rel_h, "rel_w": rel_w,
            "softcap": 2.0, "causal_lower_right": True,
        },
        "alibi, lower right": {"alibi_slopes": slopes.abs() / 8, "key_lengths": lengths, "causal_lower_right": True},
        "sinks, window": {"sinks": sinks * 9, "window_left": 9, "key_lengths": lengths.int()},
    }  # fmt: skip


KINDS = (*terms(1, 1, 1, (1, 1)),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3, 40, 150])
@pytest.mark.parametrize("name", METHODS)
def test_outputs(name, queries, kind):
    grid = (13, 11) if queries < 150 else (10, 30)
    keys = grid[0] * grid[1]
    q, k, v = made((3, 2, queries, 24), (3, 2, keys, 24), (3, 2, keys, 8))
    own = terms(3, 2, queries, grid)[kind]
    near(operator(name)(q, k, v, **own), by_definition(q, k, v, **own))
    if "causal_lower_right" not in own:
        near(operator(name)(q, k, v, None, 0.0, True, **own), by_definition(q, k, v, causal=True, **own))
    mask = torch.rand(3, 1, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    near(operator(name)(q, k, v, mask, **own), by_definition(q, k, v, mask, **own))
    added = torch.randn(1, keys)
    near(operator(name)(q, k, v, added, **own), by_definition(q, k, v, added, **own))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_other_dtypes(name, dtype):
    for queries in (2, 70):
        q, k, v = made((2, 2, queries, 16), (2, 2, 80, 16), (2, 2, 80, 16), dtype=dtype)
        own = terms(2, 2, queries, (8, 10), dtype)["all"]
        limit = {torch.float64: 1e-12, torch.float16: 3e-3}.get(dtype, 2e-2)
        near(operator(name)(q, k, v, **own), by_definition(q, k, v, **own), limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_key_lengths_are_as_though_there_were_no_other_keys(name, dtype):
    for queries in (3, 80):
        q, k, v = made((3, 4, queries, 16), (3, 2, 700, 16), (3, 2, 700, 16), dtype=dtype)
        lengths = torch.tensor([700, 0, 291])
        k[1], v[1], k[2, :, 291:], v[2, :, 291:] = math.nan, math.nan, math.nan, math.nan
        leaves = [t.requires_grad_() for t in (q, k, v)]
        y = operator(name)(*leaves, enable_gqa=True, key_lengths=lengths, causal_lower_right=True)
        assert (y[1] == 0).all()
        alone = operator(name)(q[2:], k[2:, :, :291], v[2:, :, :291], enable_gqa=True, causal_lower_right=True)
        near(y[2:], alone, 1e-6)
        grads = torch.autograd.grad(y.square().sum(), leaves)
        assert all(g.isfinite().all() for g in grads)
        assert (grads[1][2, :, 291:] == 0).all()
        assert (grads[2][1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_gradients(name, kind):
    grid = (13, 11)
    leaves = made((2, 2, 70, 8), (2, 2, 143, 8), (2, 2, 143, 8), dtype=torch.float64)
    own = terms(2, 2, 70, grid, torch.float64)[kind]
    names = [n for n, t in own.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    rest = {n: t for n, t in own.items() if n not in names}
    leaves = [t.requires_grad_() for t in (*leaves, *(own[n] for n in names))]

    def call(function, *tensors):
        return function(*tensors[:3], **rest, **dict(zip(names, tensors[3:], strict=True)))

    y, expected = call(operator(name), *leaves), call(by_definition, *leaves)
    seed = made(y.shape, dtype=torch.float64, seed=9)[0]
    grads, wanted = (torch.autograd.grad(t, leaves, seed) for t in (y, expected))
    for got, want in zip(grads, wanted, strict=True):
        assert (got - want).abs().max() <= 1e-11 * max(1, want.abs().max())
    some = (
        torch.autograd.grad(
            call(operator(name), *(t if i > 2 else t.detach() for i, t in enumerate(leaves))).sum(), leaves[3:]
        )
        if names
        else ()
    )
    assert all(g.isfinite().all() for g in some)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_derivatives_of_all_orders(name, kind):
    leaves = made((2, 2, 3, 2), (2, 2, 6, 2), (2, 2, 6, 2), dtype=torch.float64)
    own = terms(2, 2, 3, (2, 3), torch.float64)[kind]
    names = [n for n, t in own.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    rest = {n: t for n, t in own.items() if n not in names}
    leaves = [t.requires_grad_() for t in (*leaves, *(own[n] for n in names))]

    def function(*tensors):
        return operator(name)(*tensors[:3], scale=0.7, **rest, **dict(zip(names, tensors[3:], strict=True)))

    fast = kind != "sinks"  # else each element's derivative by itself
    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=False, fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=fast)


def test_fewer_dimensions_and_batched_calls():
    q, k, v = made((5, 8), (6, 8), (6, 8), dtype=torch.float64)
    sinks, slopes, rel_h, rel_w = made((1,), (1,), (5, 2), (5, 3), dtype=torch.float64)
    own = {"sinks": sinks, "alibi_slopes": slopes, "rel_h": rel_h, "rel_w": rel_w, "key_lengths": torch.tensor(4)}
    wide = own | {"rel_h": rel_h[None, None], "rel_w": rel_w[None, None], "key_lengths": torch.tensor([4])}
    leaves = [t.requires_grad_() for t in (q, k, v, sinks, rel_h)]
    wide |= {"rel_h": rel_h[None, None]}
    expected = by_definition(*(t[None, None] for t in (q, k, v)), **wide)[0, 0]
    y = torch.ops.ai3.attention_flash(q, k, v, **own)
    near(y, expected, 1e-12)
    for got, want in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        assert (got - want).abs().max() <= 1e-12 * max(1, want.abs().max())
    lengths = torch.tensor([4, 0, 6])
    batched = torch.vmap(lambda n: torch.ops.ai3.attention_flash(q, k, v, **(own | {"key_lengths": n})))(lengths)
    for n, got in zip(lengths, batched, strict=True):
        near(got, torch.ops.ai3.attention_flash(q, k, v, **(own | {"key_lengths": n})), 1e-12)


def test_bits_do_not_depend_on_threads():
    q, k, v = made((2, 3, 300, 16), (2, 3, 330, 16), (2, 3, 330, 16))
    own = terms(2, 3, 300, (11, 30))["all"]
    leaves = [t.requires_grad_() for t in (q, k, v, own["sinks"], own["alibi_slopes"], own["rel_h"])]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = torch.ops.ai3.attention_flash(q, k, v, **own)
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_sink_far_above_all_scores_leaves_nothing():
    q, k, v = made((1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16))
    y = torch.ops.ai3.attention_flash(q, k, v, sinks=torch.tensor([200.0, -math.inf]))
    assert y.isfinite().all()
    assert y[0, 0].abs().max() < 1e-30
    near(y[0, 1], torch.ops.ai3.attention_flash(q, k, v)[0, 1], 1e-6)


def test_compiled_and_exported():
    q, k, v = made((2, 2, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16))
    own = terms(2, 2, 24, (4, 6))["all"]

    class Attends(torch.nn.Module):
        def forward(self, q, k, v, own):
            return torch.ops.ai3.attention_flash(q, k, v, **own)

    expected = by_definition(q, k, v, **own)
    near(torch.compile(Attends(), backend="aot_eager", fullgraph=True)(q, k, v, own), expected)
    near(torch.export.export(Attends(), (q, k, v, own)).module()(q, k, v, own), expected)
    torch.library.opcheck(torch.ops.ai3.attention_flash.default, (q.requires_grad_(), k, v), own)


def test_what_cannot_be_is_an_error():
    q, k, v = made((2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4))
    for options, words in (
        ({"sinks": torch.zeros(3)}, "sinks that broadcasts"),
        ({"sinks": torch.zeros(2).double()}, "sinks of the query's dtype"),
        ({"alibi_slopes": torch.zeros(2, 2)}, "alibi_slopes that broadcasts"),
        ({"key_lengths": torch.zeros(2)}, "key_lengths of int32 or int64"),
        ({"key_lengths": torch.tensor([3, 7])}, "key_lengths from 0 to 6, got 7"),
        ({"key_lengths": torch.tensor([3, -1])}, "key_lengths from 0 to 6, got -1"),
        ({"key_lengths": torch.tensor([3, 1, 2])}, "key_lengths that broadcasts"),
        ({"rel_h": torch.zeros(6, 2)}, "both of rel_h and rel_w"),
        ({"rel_h": torch.zeros(6, 2), "rel_w": torch.zeros(6, 2)}, "a grid of 6 keys, got 2 x 2"),
        ({"rel_h": torch.zeros(5, 2), "rel_w": torch.zeros(6, 3)}, "rel_h that broadcasts"),
    ):
        for name in METHODS:
            with pytest.raises(RuntimeError, match=words):
                operator(name)(q, k, v, **options)
        if "got" not in words or "grid" in words:
            meta = {n: t.to("meta") for n, t in options.items()}
            with pytest.raises(RuntimeError, match=words):
                torch.ops.ai3.attention_flash(*(t.to("meta") for t in (q, k, v)), **meta)


def test_the_mask_of_lengths():
    mask = ai3_ops.attention_mask(
        "flash", 3, 4, key_lengths=torch.tensor([2, 4]), window_left=1, causal_lower_right=True
    )
    assert mask[:, 0].int().tolist() == [
        [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
    ]  # fmt: skip
    with pytest.raises(TypeError, match="no parameter 'sinks'"):
        ai3_ops.attention_mask("flash", 3, 4, sinks=torch.zeros(2))


# Dropout ----------------------------------------------------------------------------------------------------------------
def what_is_kept(function, q, k, dropout, **options):
    """The weights that are not dropped: values of one output element each make them visible."""
    keys = k.shape[-2]
    eye = torch.eye(keys, dtype=q.dtype).expand(*k.shape[:-1], keys)
    torch.manual_seed(5)
    weights = function(q, k, eye, None, dropout, **options)
    return weights, weights != 0


@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize("name", METHODS)
def test_dropout_drops_as_many_as_it_says(name, queries):
    q, k = made((3, 4, queries, 8), (3, 2, 600, 8))
    whole = operator(name)(q, k, torch.eye(600).expand(3, 2, 600, 600), enable_gqa=True)
    for dropout in (0.1, 0.5):
        weights, kept = what_is_kept(operator(name), q, k, dropout, enable_gqa=True)
        share = 1 - kept.float().mean()
        assert abs(share - dropout) < 5 * math.sqrt(dropout * (1 - dropout) / kept.numel())
        near(weights, torch.where(kept, whole / (1 - dropout), 0))
        by_row, by_key = kept.float().mean(-1), kept.float().mean((0, 1, 2))
        assert (by_row - 1 + dropout).abs().max() < 6 * math.sqrt(dropout * (1 - dropout) / 600)
        assert (by_key - 1 + dropout).abs().max() < 6 * math.sqrt(dropout * (1 - dropout) / (12 * queries))
        rows = kept.flatten(0, 2).float() - 1 + dropout
        alike = (rows[:-1] * rows[1:]).mean() / (dropout * (1 - dropout))  # of neighbouring rows
        assert abs(alike) < 6 / math.sqrt(kept.numel())


def test_dropout_is_the_generators_and_the_same_for_all_methods():
    q, k, v = made((1, 2, 40, 8), (1, 2, 150, 8), (1, 2, 150, 8))
    outputs = []
    for name in METHODS:
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            for leaf in (False, True):
                torch.manual_seed(1)
                with context():
                    outputs.append(operator(name)(q.detach().requires_grad_(leaf), k, v, None, 0.3).detach())
    assert all(torch.equal(outputs[0], y) or (outputs[0] - y).abs().max() < 1e-5 for y in outputs)
    again, other = (torch.ops.ai3.attention_flash(q, k, v, None, 0.3) for _ in range(2))
    assert not torch.equal(again, other)
    assert (torch.ops.ai3.attention_flash(q, k, v, None, 1.0) == 0).all()


@pytest.mark.parametrize("kind", ["all", "sinks", "alibi"])
@pytest.mark.parametrize("queries", [3, 70])
def test_dropout_has_derivatives(queries, kind):
    grid = (2, 3) if queries == 3 else (13, 11)
    keys = grid[0] * grid[1]
    leaves = made((2, 2, queries, 2), (2, 2, keys, 2), (2, 2, keys, 2), dtype=torch.float64)
    own = terms(2, 2, queries, grid, torch.float64)[kind]
    names = [n for n, t in own.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    rest = {n: t for n, t in own.items() if n not in names}
    leaves = [t.requires_grad_() for t in (*leaves, *(own[n] for n in names))]

    def function(*tensors):
        torch.manual_seed(3)
        given = dict(zip(names, tensors[3:], strict=True))
        return torch.ops.ai3.attention_flash(*tensors[:3], None, 0.4, **rest, **given)

    if queries == 3:
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradcheck(
            function, leaves, check_forward_ad=True, check_backward_ad=False, fast_mode=True
        )
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    torch.manual_seed(3)
    y = function(*leaves)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    with torch.no_grad():
        moved = [t + 1e-6 * torch.randn(t.shape, dtype=t.dtype) for t in leaves]
        change = (function(*moved).square().sum() - function(*leaves).square().sum()).item()
    slope = sum(((m - t) * g).sum() for m, t, g in zip(moved, leaves, grads, strict=True)).item()
    assert abs(change - slope) < 1e-4 * max(abs(slope), 1e-6)


def test_dropout_of_a_batch_of_calls_and_compiled():
    q, k, v = made((3, 2, 9, 8), (3, 2, 20, 8), (3, 2, 20, 8))

    def loss(q, k, v):
        return torch.ops.ai3.attention_flash(q, k, v, None, 0.5).square().sum()

    for randomness in ("same", "different"):
        torch.manual_seed(4)
        grads = torch.vmap(torch.func.grad(loss), randomness=randomness)(q, k, v)
        assert grads.shape == q.shape
        torch.manual_seed(4)
        moved, losses = q + 1e-3 * torch.randn(q.shape, generator=torch.Generator().manual_seed(8)), []
        for queries in (q, moved):
            torch.manual_seed(4)
            losses.append(torch.vmap(torch.func.grad_and_value(loss), randomness=randomness)(queries, k, v)[1])
        change = losses[1] - losses[0]
        slope = ((moved - q) * grads).sum((1, 2, 3))
        assert ((change - slope).abs() < 0.05 * slope.abs().max()).all()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaf = q.clone().requires_grad_()
    torch.manual_seed(6)
    (got,) = torch.autograd.grad(compiled(leaf, k, v), leaf)
    torch.manual_seed(6)
    (expected,) = torch.autograd.grad(loss(leaf, k, v), leaf)
    near(got, expected, 1e-6)


def test_seeds_that_cannot_be():
    q, k, v = made((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    forward = torch.ops.ai3._attention_flash_forward
    with pytest.raises(RuntimeError, match="needs dropout_seed where dropout_p is not 0"):
        forward(q, k, v, None, 0.5)
    with pytest.raises(RuntimeError, match="one number of int64"):
        forward(q, k, v, None, 0.5, dropout_seed=torch.zeros(2))
