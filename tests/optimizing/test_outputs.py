"""What an optimized module returns is the caller's: outputs lie in no other output, and are contiguous where the module's are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ai3_ops
from ai3_ops.graph.network import difference
from ai3_ops.surveying.examples import Inputs


class Returns(nn.Module):
    """What `outputs` makes of a value, in a program or, with `sine`, computed by PyTorch behind one."""

    def __init__(self, outputs, sine):
        super().__init__()
        self.first, self.second, self.outputs, self.sine = nn.Linear(16, 32), nn.Linear(32, 16), outputs, sine

    def forward(self, x):
        y = self.second(F.gelu(self.first(x)))
        return self.outputs(torch.sin(y) if self.sine else y, x)


OUTPUTS = {
    "clone of a row": lambda y, _: (y, y[:, 0].clone()),
    "contiguous transpose": lambda y, _: (y, y.transpose(1, 2).contiguous()),
    "view of a clone": lambda y, _: (y, y.clone().view(4, -1)),
    "part": lambda y, _: (y[:, :3].clone(), y),
    "copies of a row": lambda y, _: (y, y[:, :1].expand(-1, 5, -1).clone()),
    "two parts": lambda y, _: tuple(part.contiguous() for part in y.chunk(2, -1)),
    "transpose alone": lambda y, _: y.transpose(1, 2).contiguous(),
    "detached": lambda y, _: (y, y.transpose(1, 2).contiguous().detach()),
    "row alone": lambda y, _: y[:, :1].expand(-1, 5, -1).contiguous(),
    "of the input": lambda y, x: (y, x.transpose(1, 2).contiguous(), x[:, 0].clone()),
    "einsum": lambda y, x: (y, torch.einsum("bij->bji", y).clone(), torch.einsum("bij->bji", x).clone()),
    "of three dimensions": lambda y, x: (y, torch.atleast_3d(x).clone()),
    "unsafe parts": lambda y, x: (y, *(part.clone() for part in (*y.unsafe_chunk(2, -1), *x.unsafe_split(8, -1)))),
    "image": lambda y, _: y.unflatten(-1, (4, 4)).permute(0, 2, 3, 1).contiguous(),
    "largest": lambda y, _: (*y.max(-1), y),
}


@pytest.mark.parametrize("sine", [False, True], ids=["program", "pytorch"])
@pytest.mark.parametrize("name", list(OUTPUTS))
def test_outputs_are_of_their_own(name, sine):
    model, x = Returns(OUTPUTS[name], sine).eval(), torch.randn(4, 6, 16)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    assert fast.changed
    for given in (x, torch.randn(2, 6, 16)):
        before = given.clone()
        with torch.no_grad():
            expected, outputs = (y if isinstance(y, tuple) else (y,) for y in (model(given), fast(given)))
        for own, of in zip(outputs, expected, strict=True):
            torch.testing.assert_close(own, of)
            assert own.is_contiguous() or not of.is_contiguous()
        kept = [own.clone() for own in outputs]
        for place, own in enumerate(outputs):
            own.zero_()
            for other, was in zip(outputs[place + 1 :], kept[place + 1 :], strict=True):
                assert torch.equal(other, was)
        assert torch.equal(given, before)


MASKED = {
    "fill": lambda y, mask: y.masked_fill(~mask[:, :, None], 0.0),
    "factor": lambda y, mask: y * mask.unsqueeze(-1),
    "where": lambda y, mask: torch.where(mask.reshape(2, -1, 1), y, 0.0),
    "returned": lambda y, mask: (y, mask.unsqueeze(-1)),
    "expanded": lambda y, mask: (y, mask[:, None, :].expand(-1, 3, -1), mask.t().contiguous()),
    "attention": lambda y, mask: F.scaled_dot_product_attention(
        y, y, y, mask.t().reshape(1, 2, -1)[:, :1] | mask[:, None, :]
    ),
    "copied": lambda y, mask: F.scaled_dot_product_attention(y, y, y, mask.t().reshape(2, -1)[:, None].clone()),
}


@pytest.mark.parametrize("length", [9, 500])
@pytest.mark.parametrize("name", list(MASKED))
def test_masks_are_viewed_and_copied(name, length):
    """As wav2vec2, DeBERTa, SAM and Mask2Former do with the padded places of their inputs."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, mask):
            found = MASKED[name](self.first(x), mask)
            return (self.second(found[0]), *found[1:]) if isinstance(found, tuple) else self.second(found)

    mask = torch.rand(2, length) > 0.3
    mask[:, 0] = True
    model, x = Masked().eval(), torch.randn(2, length, 16)
    fast = ai3_ops.optimize(model, (x, mask), "default", progress=False)
    assert fast.changed
    for seen in (mask, ~mask | (torch.arange(length) == 1)):
        with torch.no_grad():
            torch.testing.assert_close(fast(x, seen), model(x, seen), equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.float16, lambda y: y * 1e-3 * 1e5),
        (torch.float16, lambda y: y / 1e5),
        (torch.float16, lambda y: y + (y - y) * -1e9),
        (torch.float32, lambda y: y * 1e-30 / 1e-40),
        (torch.float32, lambda y: y * 1e30 / 1e39),
    ],
)
def test_numbers_beyond_the_type(dtype, numbers):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.second(numbers(self.first(x)))

    model, x = Scaled().to(dtype).eval(), torch.randn(4, 16, dtype=dtype)
    fast = ai3_ops.optimize(model, x, "default", progress=False)
    assert fast.changed
    with torch.no_grad():
        assert difference(fast(x), model(x)) <= (2e-3 if dtype == torch.float16 else 1e-5)  # of the largest


def test_products_of_two_batches():
    """As CLIP compares as many texts as images: neither dimension of the scores is one of channels."""

    class Similar(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.scale = nn.Parameter(torch.tensor(2.6))

        def forward(self, x, y):
            return self.first(x) @ self.second(y).t() * self.scale.exp() * 0.5

    model, example = Similar().eval(), (torch.randn(2, 16), torch.randn(2, 16))
    fast = ai3_ops.optimize(model, example, "default", progress=False)
    assert fast.changed
    for sizes in ((2, 2), (3, 3), (3, 2), (1, 1)):
        given = [torch.randn(n, 16) for n in sizes]
        with torch.no_grad():
            torch.testing.assert_close(fast(*given), model(*given))


def test_a_mask_of_one_dimension():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, mask):
            query, key, value = (
                layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            return torch.softmax(query @ key.transpose(-1, -2) * 0.25 + mask, -1) @ value

    model, example = Scores().eval(), (torch.randn(2, 7, 16), torch.randn(7))
    fast = ai3_ops.optimize(model, example, "default", progress=False)
    assert fast.changed
    with torch.no_grad():
        torch.testing.assert_close(fast(*example), model(*example))


def test_batches_of_nothing_and_inputs_of_fewer_dimensions():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            y = F.gelu(self.first(x))
            return self.second(y[:, :1].expand(-1, 5, -1) * self.second(y[:, :5]))

    model = Rows().eval()
    fast = ai3_ops.optimize(model, torch.randn(4, 8, 16), "default", progress=False)
    assert fast.changed
    assert fast(torch.randn(0, 8, 16)).shape == (0, 5, 16)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.first = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, *indices):
            return F.gelu(self.first(sum(map(self.table, indices))))

    words = Words().eval()
    for example in ((torch.arange(6),), (torch.arange(6), torch.arange(6))):
        fast = ai3_ops.optimize(words, example, "default", progress=False)
        assert fast.changed
        for given in (example, [x[:4] for x in example], [x[3] for x in example]):
            with torch.no_grad():
                torch.testing.assert_close(fast(*given), words(*given))


def test_any_batch_of_arguments_without_names(recwarn):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)

        def forward(self, *inputs, factor=None):
            y = sum(self.first(x) for x in inputs)
            return y if factor is None else y * factor

    model = Many().eval()
    for example, named in (
        ((torch.randn(4, 16),), {}),
        ((torch.randn(4, 16), torch.randn(4, 16)), {"factor": torch.ones(4, 1)}),
    ):
        fast = ai3_ops.optimize(model, Inputs(example, named), "default", progress=False)
        given = [x[:3] for x in example], {name: x[:3] for name, x in named.items()}
        with torch.no_grad():
            torch.testing.assert_close(fast(*given[0], **given[1]), model(*given[0], **given[1]))
    assert not [w for w in recwarn if "batches" in str(w.message)]
