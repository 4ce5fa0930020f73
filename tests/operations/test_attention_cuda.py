"""Attention on CUDA: what is refused and left to PyTorch is known without a GPU; tests/cpp has the kernels' values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_attention import made, near, operator
from test_attention_scores import KINDS, by_definition, terms

import ai3_ops
from ai3_ops import _library, registry
from ai3_ops.calls.call import UNMEASURED

built = pytest.mark.skipif(
    not ai3_ops.algorithms("attention", "cuda"), reason="needs the CUDA part, which was not built"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALF = (torch.float16, torch.bfloat16)
SIZES = {
    "batch": 2, "heads": 4, "kv_heads": 2, "queries": 8, "keys": 8, "size": 64, "value_size": 64, "has_mask": 0,
    "is_causal": 0, "has_dropout": 0, "projected": 0,
}  # fmt: skip


def asked(name, dtype=torch.float16, own=None, **changed):
    """What the registry says of such a call on CUDA: None where it is supported, else the reason."""
    parameters = registry.parameters("attention", name)
    values = [(own or {}).get(p.name, p.default or 0) for p in parameters]
    numbers = [
        torch.tensor(v, dtype=torch.float64).view(torch.int64).item() if isinstance(v, float) else int(v)
        for v in values
    ]
    sizes = SIZES | changed
    query = _library.Sizes([sizes[n] for n in _library.size_names("attention")], parameters=numbers or None)
    fine, reason = _library.supports("attention", name, "cuda", dtype, query)
    return None if fine else reason


@built
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_math_takes_every_type(dtype):
    own = {"sinks": 1, "window_left": 3, "softcap": 2.0, "alibi_slopes": 1, "key_lengths": 1}
    assert asked("math", dtype, own, has_mask=1, has_dropout=1, size=7, value_size=5, keys=3) is None
    assert asked("math", dtype, {"window_left": -2}) == "needs windows from -1 (open), got -2 and -1"
    assert asked("math", dtype, keys=1 << 31) == (
        "needs matrices of at most 2147483647 rows and columns for cuBLAS, got 2147483648"
    )


class _ToldCuda(torch.Tensor):
    """A tensor of the CPU that says it is one of a GPU."""

    is_cuda = True


class Attends(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("module", [Attends(), torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()])
def test_default_leaves_attention_to_pytorch_and_says_so(module):
    x = torch.randn(2, 2, 300, 16) if isinstance(module, Attends) else torch.randn(2, 300, 16)
    inputs = (x,) if isinstance(module, Attends) else (x, x, x)
    swapped = ai3_ops.swap(module, {"attention": "default"})
    options = {} if isinstance(module, Attends) else {"need_weights": False}
    with torch.inference_mode():
        swapped(*(t.as_subclass(_ToldCuda) for t in inputs), **options)
    (row,) = ai3_ops.explain(swapped).to_dict()["layers"]
    assert UNMEASURED in row["reason"]


# With a GPU ---------------------------------------------------------------------------------------------------------------
def on_gpu(tensors):
    return {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("kind", KINDS)
def test_math_is_the_definition(kind, dtype):
    q, k, v = made((3, 2, 40, 24), (3, 2, 143, 24), (3, 2, 143, 8), dtype=dtype)
    own = terms(3, 2, 40, (13, 11), dtype)[kind]
    y = torch.ops.ai3.attention_math(q.cuda(), k.cuda(), v.cuda(), **on_gpu(own)).cpu()
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3}.get(dtype, 2e-2)
    near(y, by_definition(q, k, v, **own), limit)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_math_are_those_of_the_cpu(kind):
    tensors = made((2, 2, 70, 8), (2, 2, 143, 8), (2, 2, 143, 8), dtype=torch.float64)
    own = terms(2, 2, 70, (13, 11), torch.float64)[kind]
    names = [n for n, t in own.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    found = []
    for device in ("cpu", "cuda"):
        given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in own.items()}
        leaves = [t.to(device).requires_grad_() for t in (*tensors, *(given[n] for n in names))]
        y = torch.ops.ai3.attention_math(*leaves[:3], **given | dict(zip(names, leaves[3:], strict=True)))
        found.append([g.cpu() for g in torch.autograd.grad(y.square().sum(), leaves)])
    for ours, expected in zip(*found, strict=True):
        near(ours, expected, 1e-11)


@needs_gpu
def test_dropout_of_math_is_the_cpus():
    q, k, v = made((2, 2, 30, 8), (2, 2, 50, 8), (2, 2, 50, 8))
    seed = torch.tensor([12345])
    ours, _ = torch.ops.ai3._attention_math_forward(q.cuda(), k.cuda(), v.cuda(), None, 0.3, dropout_seed=seed.cuda())
    near(ours.cpu(), torch.ops.ai3._attention_math_forward(q, k, v, None, 0.3, dropout_seed=seed)[0])


@needs_gpu
@pytest.mark.parametrize("name", ["math"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["contiguous", "heads inside", "expanded", "three", "five"])
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_and_gradients_in_16_bits(name, dtype, layout, causal):
    shapes = {"three": (4, 64, 32), "five": (2, 2, 4, 64, 32)}
    tensors = [t.cuda() for t in made(*[shapes.get(layout, (2, 4, 64, 32))] * 3, dtype=dtype)]
    if layout == "heads inside":
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    if layout == "expanded":
        tensors = [t[:, :1].expand(2, 4, 64, 32) for t in tensors]
    found = []
    for function, kind in ((operator(name), dtype), (F.scaled_dot_product_attention, torch.float64)):
        leaves = [t.detach().to(kind).requires_grad_() for t in tensors]
        y = function(*leaves, None, 0.0, causal)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    limit = 1e-2 if dtype == torch.float16 else 5e-2
    for ours, expected in zip(*found, strict=True):
        near(ours, expected, limit)
    q, k, v = tensors
    torch.library.opcheck(operator(name).default, (q.detach().requires_grad_(), k, v, None, 0.0, causal))


@needs_gpu
@pytest.mark.parametrize("name", ["math"])
def test_grouped_queries(name):
    q, k, v = (t.cuda() for t in made((2, 8, 64, 32), (2, 2, 80, 32), (2, 2, 80, 32), dtype=torch.bfloat16))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y = operator(name)(*leaves, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*wide, enable_gqa=True)
    near(y, expected, 5e-2)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    for got, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        near(got, wanted, 5e-2)


@needs_gpu
def test_hidden_keys_may_hold_anything():
    q, k, v = (t.cuda() for t in made((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)))
    k[..., 15:, :] = v[..., 15:, :] = math.nan
    q.requires_grad_()
    y = torch.ops.ai3.attention_math(q, k, v, (torch.arange(20, device="cuda") < 15).expand(20, 20))
    assert y.isfinite().all()
    assert torch.autograd.grad(y.sum(), q)[0].isfinite().all()
    causal = torch.ops.ai3.attention_math(q, k, v, None, 0.0, True)
    assert causal[..., :15, :].isfinite().all()
    assert causal[..., 15:, :].isnan().all()


@needs_gpu
def test_math_in_a_cuda_graph():
    q, k, v = (t.cuda() for t in made((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)))
    torch.ops.ai3.attention_math(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.ai3.attention_math(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(y, torch.ops.ai3.attention_math(q, k, v))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("heads", [None, 2])
def test_linformer_is_the_cpus(dtype, heads):
    lead = () if heads is None else (heads,)
    tensors = made((2, 4, 9, 16), (2, 2, 30, 16), (2, 2, 30, 8), (*lead, 7, 30), (*lead, 7, 30), dtype=dtype)
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [t.to(device, kind).requires_grad_() for t in tensors]
        y = torch.ops.ai3.attention_linformer(
            *leaves[:3], enable_gqa=True, key_projection=leaves[3], value_projection=leaves[4]
        )
        found.append([t.cpu() for t in (y, *torch.autograd.grad(y.square().sum(), leaves))])
    limit = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2}.get(dtype, 5e-2)
    for expected, ours in zip(*found, strict=True):
        near(ours, expected, limit)
