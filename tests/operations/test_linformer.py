"""attention_linformer: attention over projected keys and values."""

import math

import pytest
import torch
from torch.library import opcheck

import ai3_ops

linformer = torch.ops.ai3.attention_linformer
SHAPES = {  # query, key, value and both projections
    "two dimensions": ((7, 4), (9, 4), (9, 6), (3, 9), (3, 9)),
    "heads": ((2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 6), (3, 9), (3, 3, 9)),
    "one head for all": ((2, 3, 7, 4), (1, 1, 9, 4), (2, 1, 9, 6), (3, 3, 9), (1, 3, 9)),
    "five dimensions": ((2, 1, 2, 5, 4), (1, 3, 2, 9, 4), (2, 3, 2, 9, 4), (2, 3, 9), (3, 9)),
    "many of all": ((1, 2, 70, 16), (1, 2, 300, 16), (1, 2, 300, 24), (40, 300), (2, 40, 300)),
    "one query": ((2, 3, 1, 8), (2, 3, 90, 8), (2, 3, 90, 8), (33, 90), (33, 90)),
}
each_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


def made(shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    *qkv, of_key, of_value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(dtype) for t in (*qkv, of_key / 3, of_value / 3)]


def defined(query, key, value, of_key, of_value, scale=None):
    """In float64; a projection has as many dimensions as heads need."""
    query, key, value, of_key, of_value = (t.double() for t in (query, key, value, of_key, of_value))
    scores = query @ (of_key @ key).mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return scores.softmax(-1) @ (of_value @ value)


@each_shape
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values(shapes, dtype):
    tensors = made(shapes, dtype)
    exact = defined(*tensors)
    bound = {8: 1e-12, 4: 4e-6, 2: 2 * torch.finfo(dtype).eps}[dtype.itemsize]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        output = linformer(*tensors)
        assert output.dtype == dtype
        assert float((output - exact).abs().max() / exact.abs().max()) < bound
        named = dict(zip(("key_projection", "value_projection"), tensors[3:], strict=True))
        assert torch.equal(linformer(*tensors[:3], **named), output)
        assert torch.equal(linformer(*tensors[:3], None, 0.0, False, **named), output)
    other = linformer(*tensors, scale=0.3)
    exact = defined(*tensors, scale=0.3)
    assert float((other - exact).abs().max() / exact.abs().max()) < bound


def test_any_strides():
    query, key, value, of_key, of_value = made(SHAPES["heads"])
    turned = [t.mT.contiguous().mT for t in (query, key, value, of_key, of_value)]
    wide = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (query, key, value, of_key, of_value)]
    for strided in (turned, wide):
        torch.testing.assert_close(linformer(*strided), defined(*strided))
    heads_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    torch.testing.assert_close(linformer(*heads_last, of_key, of_value), defined(query, key, value, of_key, of_value))


def test_grouped_queries():
    query, key, value, of_key, of_value = made(((2, 6, 7, 4), (2, 3, 9, 4), (2, 3, 9, 6), (3, 5, 9), (5, 9)))
    tensors = [t.requires_grad_() for t in (query, key, value, of_key, of_value)]

    def grouped(query, key, value, of_key, of_value):
        return linformer(query, key, value, enable_gqa=True, key_projection=of_key, value_projection=of_value)

    wide = [key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), of_key.repeat_interleave(2, 0), of_value]
    torch.testing.assert_close(grouped(*tensors), defined(query, *wide))
    assert torch.autograd.gradcheck(grouped, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(grouped, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["two dimensions", "heads", "one head for all", "five dimensions"])
def test_derivatives(name):
    tensors = [t.requires_grad_() for t in made(SHAPES[name])]
    fast = name != "two dimensions"  # else each element's derivative by itself
    assert torch.autograd.gradcheck(linformer, tensors, check_forward_ad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(linformer, tensors, fast_mode=fast)


@each_shape
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients(shapes, dtype):
    tensors = made(shapes, dtype)
    grad = torch.randn(defined(*tensors).shape, dtype=torch.float64).to(dtype)
    exact = torch.autograd.grad(
        defined(*(ours := [t.double().clone().requires_grad_() for t in tensors])), ours, grad.double()
    )
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = torch.autograd.grad(linformer(*leaves), leaves, grad)
    bound = {8: 1e-11, 4: 2e-5, 2: 4 * torch.finfo(dtype).eps}[dtype.itemsize]
    for ours, theirs, like in zip(found, exact, tensors, strict=True):
        assert ours.shape == like.shape
        assert ours.dtype == dtype
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound
    some = [t.clone().requires_grad_(i in (1, 4)) for i, t in enumerate(tensors)]
    for ours, theirs in zip(torch.autograd.grad(linformer(*some), [some[1], some[4]], grad), found[1::3], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "projected", "size"),
    [(torch.float32, 1500, 600, 520, 8), (torch.float32, 3000, 20, 6, 5), (torch.bfloat16, 1500, 64, 16, 20)],
)
def test_gradients_of_many_queries(dtype, queries, keys, projected, size):
    # Sums of the queries' gradients that are not made in place: several parts of the keys, or rows that end within a vector.
    shapes = (1, 1, queries, size), (1, 1, keys, size), (1, 1, keys, size), (projected, keys), (projected, keys)
    *qkv, of_key, of_value = made(shapes)
    tensors = [t.to(dtype).requires_grad_() for t in (*qkv, of_key * keys**-0.5, of_value * keys**-0.5)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    q, k, v, e, f = wide
    exact = torch.autograd.grad(defined(q, k, v, e, f).square().sum(), wide)
    found = torch.autograd.grad(
        linformer(*tensors[:3], key_projection=tensors[3], value_projection=tensors[4]).square().sum(), tensors
    )
    for got, expected in zip(found, exact, strict=True):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < (3e-2 if dtype == torch.bfloat16 else 2e-5)


def test_gradients_are_the_same_bits_with_more_threads():
    tensors, results = [t.requires_grad_() for t in made(SHAPES["many of all"], torch.float32)], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(torch.autograd.grad(linformer(*tensors).square().sum(), tensors))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_transforms_and_tracing():
    tensors = made(SHAPES["heads"])
    opcheck(linformer.projected, tuple(tensors))
    opcheck(linformer.projected, tuple(t.requires_grad_() for t in made(SHAPES["heads"])))
    each = torch.func.vmap(linformer, in_dims=(0, 0, 0, None, None))(*tensors)
    torch.testing.assert_close(each, linformer(*tensors))
    stacked = [torch.stack([t, 2 * t]) for t in tensors]
    several = torch.func.vmap(linformer)(*stacked)
    torch.testing.assert_close(several[1], linformer(*(2 * t for t in tensors)))

    def total(*given):
        return linformer(*given).square().sum()

    ours = torch.func.jacrev(torch.func.grad(total, 3), 3)(*tensors)
    theirs = torch.func.jacrev(torch.func.grad(lambda *t: defined(*t).square().sum(), 3), 3)(*tensors)
    torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(linformer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), linformer(*tensors))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(t) for t in tensors[3:])

        def forward(self, *qkv):
            return linformer(*qkv, self.first, self.second)

    program = torch.export.export(Net(), tuple(tensors[:3]))
    torch.testing.assert_close(program.module()(*tensors[:3]), linformer(*tensors))


def test_edges():
    query, key, value, of_key, of_value = made(SHAPES["heads"])
    nothing = linformer(query, key, value, of_key[:0], of_value[:, :0])
    assert torch.equal(nothing, torch.zeros_like(nothing))
    no_keys = linformer(query, key[..., :0, :], value[..., :0, :], of_key[:, :0], of_value[..., :0])
    assert torch.equal(no_keys, torch.zeros_like(no_keys))
    assert linformer(query[:0], key[:0], value[:0], of_key, of_value).shape == (0, 3, 7, 6)
    assert linformer(query[:, :, :0], key, value, of_key, of_value).shape == (2, 3, 0, 6)
    key[0, 0, 4] = math.nan
    output = linformer(query, key, value, of_key, of_value)
    assert output[0, 0].isnan().all()
    assert not output[1].isnan().any()


def test_refusals():
    query, key, value, of_key, of_value = made(SHAPES["heads"])
    for words, wrong in (
        ("key_projection that broadcasts to", (query, key, value, of_key[:, :8], of_value)),
        ("key_projection that broadcasts to", (query, key, value, of_key.expand(2, 3, 9), of_value)),
        ("value_projection that broadcasts to", (query, key, value, of_key, of_value[None])),
        ("needs projections to one length", (query, key, value, of_key, of_value[:, :2])),
        ("key_projection of the query's dtype", (query, key, value, of_key.float(), of_value)),
        ("needs key and value of one length", (query, key, value[:, :, :8], of_key, of_value)),
    ):
        with pytest.raises(RuntimeError, match=f"ai3::attention_linformer: .*{words}"):
            linformer(*wrong)
        with pytest.raises(RuntimeError, match=words):
            linformer(*(t.to("meta") for t in wrong))
    own = {"key_projection": of_key, "value_projection": of_value}
    mask = torch.ones(7, 9, dtype=torch.bool)
    for words, more in (
        ("takes no attn_mask", (mask,)),
        ("no is_causal", (None, 0.0, True)),
    ):
        with pytest.raises(RuntimeError, match=f"ai3::attention_linformer: .*{words}"):
            linformer(query, key, value, *more, **own)
    assert ai3_ops.supports("attention", "linformer", query, key, value, **own) == (True, "")
    with pytest.raises(TypeError, match="needs key_projection and value_projection"):
        ai3_ops.supports("attention", "linformer", query, key, value)
    with pytest.raises(ValueError, match="no attention algorithm 'linformer' with a pattern"):
        ai3_ops.attention_mask("linformer", 4, 4)


def test_it_is_never_inserted_silently():
    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 9, 4)
    with pytest.warns(UserWarning, match="1 of 1 layers keep PyTorch's implementation"):
        swapped = ai3_ops.swap(Net(), {"attention": "linformer"}, x)
    assert torch.equal(swapped(x), Net()(x))
    with pytest.raises(ValueError, match="linformer needs key_projection and value_projection"):
        ai3_ops.swap(Net(), {"attention": "linformer"}, x, strict=True)


def test_workspace_is_linear_in_the_keys():
    def needed(keys):
        q, k = torch.empty(1, 8, 512, 64), torch.empty(1, 8, keys, 64)
        e = torch.empty(256, keys)
        return ai3_ops.workspace("attention", "linformer", q, k, k, key_projection=e, value_projection=e)

    assert needed(65_536) == needed(4_096)
