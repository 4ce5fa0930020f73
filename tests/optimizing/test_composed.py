"""What models compose is one step, attention of products and a softmax above all; whole window transformers are one program."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops.programs.lower import Region

SHIFTED = torch.where(torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.3, -100.0, 0.0)


class Composed(nn.Module):
    """`how` is what is done to the scores."""

    def __init__(self, how, heads=2, size=8):
        super().__init__()
        self.how, self.heads, self.size = how, heads, size
        width = heads * size
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, 6, 6))

    def forward(self, x, mask=None):
        n, length, width = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.how(self, q, k, mask)
        y = (weights @ v).transpose(1, 2).reshape(n, length, width)
        return self.out(y)


def scaled_query(m, q, k, mask):
    return ((q * m.size**-0.5) @ k.transpose(-2, -1)).softmax(-1)


def divided(m, q, k, mask):
    return torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(m.size), dim=-1)


def biased(m, q, k, mask):
    return torch.softmax(q @ k.mT * 0.3 + m.bias.unsqueeze(0), dim=-1)


def given_mask(m, q, k, mask):
    return torch.softmax(q @ k.mT * 0.3 + mask, dim=-1)


def shifted(m, q, k, mask):
    """As Swin: windows apart while their mask is added."""
    scores = (q * 0.3) @ k.transpose(-2, -1) + m.bias
    scores = scores.view(-1, 4, m.heads, 6, 6) + SHIFTED.unsqueeze(1).unsqueeze(0)
    return torch.nn.functional.dropout(scores.view(-1, m.heads, 6, 6).softmax(-1), 0.5, m.training)


def joined_behind(m, q, k, mask):
    scores = (q @ k.mT).view(-1, 4, m.heads, 6, 6) + SHIFTED[:, None]
    return scores.softmax(-1).view(-1, m.heads, 6, 6)


def by_einsum(m, q, k, mask):
    """As torchvision's MaxViT."""
    scores = torch.einsum("B H I D, B H J D -> B H I J", q, k * 0.3) + m.bias
    return scores.softmax(-1)


def by_head(m, q, k, mask):
    return ((q @ k.mT) * torch.tensor([1.0, 2.0])[:, None, None] + m.bias).softmax(-1)


def cosine(m, q, k, mask):
    """As Swin V2: of normalized queries and keys, and a scale for each head."""
    scores = nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.tensor([10.0, 3.0])[:, None, None].exp().clamp(max=10.0) + m.bias
    return (scores.view(-1, 4, m.heads, 6, 6) + SHIFTED[:, None]).view(-1, m.heads, 6, 6).softmax(-1)


def capped(m, q, k, mask):
    """As Gemma 2."""
    return (torch.tanh(q @ k.mT * 0.3 / 1.5) * 1.5 + m.bias).softmax(-1)


def capped_and_scaled(m, q, k, mask):
    return (3 * (2 * torch.tanh(q @ k.mT)) + m.bias).softmax(-1)


COMPOSED = (
    by_einsum, scaled_query, divided, biased, given_mask, shifted, joined_behind, by_head, cosine, capped, capped_and_scaled,
)  # fmt: skip


def later_scale(m, q, k, mask):
    return ((q @ k.mT + m.bias) * 0.5).softmax(-1)


def hidden_row(m, q, k, mask):
    """All keys: NaN, as in the model."""
    return (q @ k.mT + torch.tensor([0.0, 0, 0, -math.inf, 0, 0])[:, None]).softmax(-1)


def over_queries(m, q, k, mask):
    return (q @ k.mT).softmax(-2)


def capped_after(m, q, k, mask):
    """Of the sum with the bias."""
    return (torch.tanh(q @ k.mT + m.bias) * 2).softmax(-1)


def capped_by_head(m, q, k, mask):
    return (torch.tanh(q @ k.mT) * torch.tensor([1.0, 2.0])[:, None, None]).softmax(-1)


def turned(m, q, k, mask):
    """By a negative factor, which no cap is."""
    return (torch.tanh(q @ k.mT) * -2).softmax(-1)


def capped_twice(m, q, k, mask):
    return (torch.tanh(torch.tanh(q @ k.mT) * 2) * 3).softmax(-1)


def clamped(m, q, k, mask):
    return (q @ k.mT).clamp(-1, 1).softmax(-1)


OTHERS = (later_scale, hidden_row, over_queries, clamped, capped_after, capped_by_head, turned, capped_twice)


def steps_of(fast):
    return [step.operation for part in ai3_ops.explain(fast).optimization.parts for step in part.steps]


def optimized(model, inputs, **options):
    return ai3_ops.optimize(model, inputs, "default", progress=False, **options)


def inputs_of(how, batch=4):
    x = torch.randn(batch, 6, 16)
    return (x, torch.randn(batch, 2, 6, 6)) if how is given_mask else (x,)


@pytest.mark.parametrize("how", COMPOSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("verify", ["quick", pytest.param("full", marks=pytest.mark.full)])
def test_it_is_one_step(how, verify):
    torch.manual_seed(1)
    model, inputs = Composed(how).eval(), inputs_of(how)
    fast = optimized(model, inputs, verify=verify)
    found = steps_of(fast)
    assert found.count("attention") == 1, found
    assert not any("matmul" in name or "softmax" in name for name in found)
    assert isinstance(fast._ai3_first.body, Region)
    with torch.no_grad():
        for batch in (4, 8):
            given = inputs_of(how, batch)
            torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", OTHERS, ids=lambda f: f.__name__)
def test_what_is_no_attention_stays(how):
    torch.manual_seed(1)
    model, inputs = Composed(how).eval(), inputs_of(how)
    fast = optimized(model, inputs)
    assert "attention" not in steps_of(fast)
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_both_products_by_einsum():
    class Grid(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(1, 1, 2, 5, 5))

        def forward(self, x):  # (batch, groups, length, width)
            n, g, length, _ = x.shape
            parts = self.qkv(x).reshape(n, g, length, 3, 2, 8).permute(3, 0, 1, 4, 2, 5)
            scores = torch.einsum("bghid,bghjd->bghij", parts[0], parts[1]) * 0.3 + self.bias
            y = torch.einsum("bghij,bghjd->bghid", scores.softmax(-1), parts[2])
            return y.permute(0, 1, 3, 2, 4).reshape(n, g, length, 16)

    model, x = Grid().eval(), torch.randn(2, 3, 5, 16)
    fast = optimized(model, x)
    assert steps_of(fast).count("attention") == 1
    assert isinstance(fast._ai3_first.body, Region)
    with torch.no_grad():
        for given in (x, torch.randn(4, 3, 5, 16)):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "equation", ["bhid,bhjd->bhji", "bhid,bhdj->bihj", "bhid,hjd->bhij", "bhid,bhid->bhi", "bhid->bh"]
)
def test_other_einsums_stay(equation):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).relu()
            second = (x[0],) if equation.partition(",")[2][:3] == "hjd" else (x.mT.contiguous().mT,)
            return torch.einsum(equation, y, *(second if "," in equation else ()))

    model, x = Net().eval(), torch.randn(2, 3, 4, 4)
    fast = optimized(model, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("lead", "found"), [(1, 1), (8, 0)])
def test_batch_and_heads_in_one_dimension(lead, found):
    """(batch * heads, length, size), of which the scores show both while something is added."""
    of_joined, by_head = torch.randn(lead, 5, 5), torch.randn(4, 5, 5)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            scores = torch.bmm(self.linear(x), x.transpose(1, 2)) * 0.3 + of_joined
            scores = (scores.view(2, 4, 5, 5) + by_head).view(8, 5, 5)
            return torch.bmm(scores.softmax(-1), x).relu()

    model, x = Joined().eval(), torch.randn(8, 5, 8)
    fast = optimized(model, x)
    assert steps_of(fast).count("attention") == found
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_that_are_read_elsewhere_stay():
    class Shown(nn.Module):
        def forward(self, q, k, v):
            weights = (q @ k.mT).softmax(-1)
            return weights @ v, weights

    inputs = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    fast = optimized(Shown().eval(), tuple(inputs))
    assert "attention" not in steps_of(fast)
    for ours, theirs in zip(fast(*inputs), Shown()(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_softmax_that_stays_pytorchs_keeps_it():
    model, inputs = Composed(scaled_query).eval(), inputs_of(scaled_query)
    fast = ai3_ops.optimize(model, inputs, {"softmax": "torch", "*": "default"}, progress=False)
    assert "attention" not in steps_of(fast)
    fast = ai3_ops.optimize(model, inputs, {"softmax": "direct", "*": "default"}, progress=False)
    assert "attention" not in steps_of(fast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", [biased, capped], ids=lambda f: f.__name__)
def test_other_types(how, dtype):
    model, inputs = Composed(how).eval().to(dtype), [t.to(dtype) for t in inputs_of(how)]
    fast = optimized(model, tuple(inputs))
    assert "attention" in steps_of(fast)
    with torch.no_grad():
        exact = model.double()(inputs[0].double())
        error = float((fast(*inputs) - exact).abs().max() / exact.abs().max())
    assert error < (3e-2 if dtype == torch.bfloat16 else 1e-9)


def test_slices_with_steps_and_padding_by_nothing():
    class Merging(nn.Module):
        def __init__(self):
            super().__init__()
            self.reduction = nn.Linear(64, 32)

        def forward(self, x):
            x = nn.functional.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
            parts = [x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)]
            return self.reduction(torch.cat(parts, -1)).relu()

    model, x = Merging().eval(), torch.randn(2, 8, 6, 16)
    fast = optimized(model, x)
    assert isinstance(fast._ai3_first.body, Region)
    with torch.no_grad():
        for given in (x, torch.randn(3, 8, 6, 16)):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
        odd = torch.randn(2, 7, 5, 16)
        torch.testing.assert_close(optimized(model, odd)(odd), model(odd), rtol=1e-4, atol=1e-5)


class GivenScores(nn.Module):
    def forward(self, scores, value):
        return scores.softmax(-1) @ value


class JoinedHeads(nn.Module):
    """Heads have factors while they are apart, and the query has them with the batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.factors = nn.Linear(8, 8), nn.Parameter(torch.rand(1, 2, 1, 1))

    def forward(self, x):
        q = self.linear(x)
        scores = torch.bmm(q, q.mT).view(-1, 2, 5, 5) * self.factors
        return torch.bmm(scores.softmax(-1).view(-1, 5, 5), q)


class NoFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return F.normalize(y[..., :0], dim=-1), y


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(GivenScores(), [(2, 5, 5), (2, 5, 4)]), (JoinedHeads(), [(6, 5, 8)]), (NoFeatures(), [(3, 8)])],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_only_looks_like_attention(model, shapes):
    torch.manual_seed(0)
    inputs = tuple(map(torch.randn, shapes))
    fast = optimized(model.eval(), inputs)
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [(0, 0, 0, 3, 0, 2), (0, 0, 1, 2, 3, 0), (0, 0, 0, 0, 0, 4)], ids=str)
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_rows_are_padded_within_a_program(widths, value):
    """As before windows that do not fit, of Swin V2 and SAM."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

        def forward(self, x):
            return self.second(F.pad(self.first(x), widths, value=value).flatten(1, 2))

    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(2, 5, 6, 16)
    fast = optimized(model, x)
    assert not any("pad" in step for step in steps_of(fast))
    assert "join" in steps_of(fast)
    with torch.no_grad():
        for given in (x, torch.randn(3, 5, 6, 16), torch.randn(1, 5, 6, 16)):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"mode": "reflect"}, {"mode": "circular"}, {"value": 1.0}])
def test_other_padding_stays(options):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(18, 8)

        def forward(self, x):
            return self.second(F.pad(self.first(x), (1, 1), **options))

    model, x = Padded().eval(), torch.randn(2, 5, 16)
    fast = optimized(model, x)
    assert any("pad" in step or "index" in step for step in steps_of(fast))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


WHOLE = [pytest.param(name, marks=pytest.mark.full) for name in ("V2", "swin_t", "swin_v2_t")]


@pytest.mark.parametrize("name", ["", *WHOLE])
def test_torchvisions_swin(name):
    """Two of the four stages, each of a block and one with shifted windows, and whole networks."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    if "swin" in name:
        model, blocks = torchvision.models.get_model(name), 12
    else:
        swin, blocks = torchvision.models.swin_transformer, 4
        kinds = {"block": f"SwinTransformerBlock{name}", "downsample_layer": f"PatchMerging{name}"}
        given = {argument: getattr(swin, kind) for argument, kind in kinds.items()}
        model = swin.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [8, 8] if name else [7, 7], num_classes=5, **given)
    model, x = model.eval(), torch.randn(1, 3, 64, 64)
    fast = optimized(model, x)
    found = steps_of(fast)
    assert found.count("attention") == blocks
    assert not any("matmul" in step or "vector_norm" in step or "pad" in step for step in found)
    with torch.no_grad():
        for given in (x, torch.randn(2, 3, 64, 64)):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-3, atol=1e-4)


class Gelu(nn.Module):
    """`form` is what an input becomes."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(16, 16), form

    def forward(self, x):
        return self.form(self.linear(x))


def new_gelu(x):
    """As transformers writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def other_order(x):
    return (torch.tanh((0.044715 * x**3 + x) * math.sqrt(2 / math.pi)) + 1) * (x * 0.5)


def other_number(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.05 * torch.pow(x, 3.0))))


def square(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0))))


@pytest.mark.parametrize("form", [new_gelu, other_order, other_number, square], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_by_tanh(form, dtype):
    model, x = Gelu(form).eval().to(dtype), torch.randn(4, 16, dtype=dtype)
    fast = optimized(model, x)
    assert ("gelu_tanh" in str(ai3_ops.explain(fast))) == (form in (new_gelu, other_order))
    with torch.no_grad():
        exact = model.double()(x.double())
    assert float((fast(x) - exact).abs().max() / exact.abs().max()) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


# Normalized rows --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "found"),
    [
        (lambda x: nn.functional.normalize(x, dim=-1), 1),
        (lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), 1),
        (lambda x: nn.functional.normalize(x, dim=-1, eps=0.1), 0),
        (lambda x: nn.functional.normalize(x, dim=1), 0),
        (lambda x: nn.functional.normalize(x, p=1.0, dim=-1), 0),
        (lambda x: x.flip(-1) / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalized_rows(how, found, dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 8)

        def forward(self, x):
            return self.second(how(self.first(x)))

    torch.manual_seed(2)
    model, x = Net().eval().to(dtype), torch.randn(3, 5, 16, dtype=dtype)
    x[0, 0] = 0  # a row of zeros stays one
    fast = optimized(model, x)
    assert steps_of(fast).count("rms_norm") == found
    with torch.no_grad():
        for given in (x, torch.cat([x, x * 1e-6])):
            exact = copy.deepcopy(model).double()(given.double())
            error = float((fast(given) - exact).abs().max() / exact.abs().max())
            assert error < {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]


# RMS norm ---------------------------------------------------------------------------------------------------------------
class Rms(nn.Module):
    """`how` is what is done between two layers."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(16, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return self.second(self.how(self, self.first(x)))


def as_llama(m, h):
    dtype, h = h.dtype, h.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * h.to(dtype)


def as_t5(m, h):
    return m.weight * (h * torch.rsqrt(h.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)).to(m.weight.dtype)


def as_gemma(m, h):
    return (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + m.weight.float())).type_as(
        h
    )


def of_squares(m, h):
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-3)


def by_function(m, h):
    return nn.functional.rms_norm(h, (16,), m.weight, 1e-6)


def without_eps(m, h):
    return nn.functional.rms_norm(h, (16,))


@pytest.mark.parametrize("how", [as_llama, as_t5, as_gemma, of_squares, by_function, without_eps])
def test_rms_norm_is_one_step(how):
    torch.manual_seed(2)
    model, x = Rms(how).eval(), torch.randn(2, 5, 16)
    fast = optimized(model, x)
    assert steps_of(fast) == ["linear", "rms_norm", "linear"]
    for given in (x, x[:1], 1e3 * x):
        torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [as_llama, by_function])
def test_rms_norm_of_16_bits_rounds_once(how):
    torch.manual_seed(2)
    model, x = Rms(how).eval().bfloat16(), torch.randn(2, 5, 16).bfloat16()
    fast = optimized(model, x)
    assert "rms_norm" in steps_of(fast)
    assert "to.dtype" not in steps_of(fast)
    with torch.no_grad():
        exact = model.double()(x.double())
        own = (model.bfloat16()(x) - exact).abs().max()
        assert (fast(x) - exact).abs().max() <= 2 * own


def minus_the_mean(m, h):
    return h * torch.rsqrt((h - 1).pow(2).mean(-1, keepdim=True) + 1e-6)


def cubes(m, h):
    return h * torch.rsqrt(h.abs().pow(3).mean(-1, keepdim=True) + 1e-6)


def over_rows(m, h):
    return h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + 1e-6)


def read_twice(m, h):
    root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h * root + root


def of_another(m, h):
    return h.tanh() * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def shifted_root(m, h):
    return h * torch.rsqrt(2 * h.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("how", [minus_the_mean, cubes, over_rows, read_twice, of_another, shifted_root])
def test_what_is_no_rms_norm_stays(how):
    torch.manual_seed(2)
    model, x = Rms(how).eval(), torch.randn(2, 5, 16)
    fast = optimized(model, x)
    assert "rms_norm" not in steps_of(fast)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Rotary(nn.Module):
    """An encoder's layer as Llama's are: halves turned, gates of SiLU."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads, self.q, self.k, self.v, self.o = heads, *(nn.Linear(width, width, False) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(width, 48, False),
            nn.Linear(width, 48, False),
            nn.Linear(48, width, False),
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width, 1e-6) for _ in range(2))
        angles = torch.outer(torch.arange(6.0), 1 / 10 ** torch.linspace(0, 3, width // heads // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x):
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def test_layers_with_rotary_positions_are_one_program():
    torch.manual_seed(3)
    model, x = nn.Sequential(Rotary(), Rotary()).eval(), torch.randn(2, 6, 32)
    fast = optimized(model, x)
    (part,) = ai3_ops.explain(fast).optimization.parts
    assert all(step.algorithm != "torch" for step in part.steps)
    assert steps_of(fast).count("rms_norm") == 4
    with torch.no_grad():
        for given in (x, x[:1]):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
