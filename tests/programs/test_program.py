"""Programs (ai3_ops.programs.program) against PyTorch in float64."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ai3_ops import _library
from ai3_ops.operations.activations import ACTIVATIONS, SLOPED
from ai3_ops.operations.step import Step
from ai3_ops.programs.program import Builder, Program, Value
from tests import tester  # settings of hypothesis

assert tester
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
FUNCTIONS: dict[str, Any] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "prelu": lambda x: F.leaky_relu(x, 0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "elu": lambda x: F.elu(x, 0.3),
}


def parameter(activation: str) -> float | None:
    return 0.3 if activation in SLOPED else None


def error(y: Tensor, reference: Tensor) -> float:
    """max|y - y64| / max|y64|."""
    assert y.shape == reference.shape
    if y.numel() == 0:
        return 0.0
    assert y.isfinite().all()
    return ((y.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()


class Pair:
    """A program and the same network in float64, written together."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.builder, self.dtype = Builder(), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs: list[Tensor] = []
        self.exact: dict[int, Tensor] = {}  # by the value's index

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).to(self.dtype)

    def input(self, *shape: int, layout: str = "contiguous") -> Value:
        x = self.random(*shape)
        if len(shape) == 4 and layout == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        elif len(shape) == 4 and layout == "slice":
            wide = self.random(shape[0], shape[1] + 3, *shape[2:]).to(memory_format=torch.channels_last)
            x = wide[:, 2:-1]
        elif layout == "strange":
            x = self.random(*shape[:-1], 2 * shape[-1])[..., ::2]
        self.inputs.append(x)
        return self.note(self.builder.input(shape, self.dtype), x.double().contiguous())

    def note(self, value: Value, exact: Tensor) -> Value:
        assert value.shape == exact.shape
        self.exact[value.index] = exact
        return value

    def of(self, value: Value) -> Tensor:
        return self.exact[value.index]

    def conv2d(
        self,
        x: Value,
        filters: int,
        kernel: tuple[int, int] = (3, 3),
        *,
        bias: bool = True,
        activation: str = "none",
        residual: Value | None = None,
        prologue: bool = False,
        algorithm: str = "default",
        groups: int = 1,
        **window: Any,
    ) -> Value:
        channels = x.shape[1]
        weight = self.random(
            filters, channels // groups, *kernel, scale=(channels // groups * kernel[0] * kernel[1]) ** -0.5
        )
        b = self.random(filters) if bias else None
        exact = self.of(x)
        options: dict[str, Any] = {}
        if prologue:
            kind = torch.float64 if self.dtype == torch.float64 else torch.float32
            options = {
                "scale": self.random(channels).to(kind),
                "shift": self.random(channels).to(kind),
                "input_relu": True,
            }
            exact = F.relu(exact * options["scale"].double()[:, None, None] + options["shift"].double()[:, None, None])
        y = F.conv2d(exact, weight.double(), None if b is None else b.double(), groups=groups, **window)
        y = FUNCTIONS[activation](y if residual is None else y + self.of(residual))
        options |= window | {"algorithm": algorithm, "activation": activation, "residual": residual, "groups": groups}
        options["parameter"] = parameter(activation)
        return self.note(self.builder.conv2d(x, weight, b, **options), y)

    def linear(self, x: Value, features: int, *, activation: str = "none", residual: Value | None = None) -> Value:
        weight, bias = self.random(features, x.shape[-1], scale=x.shape[-1] ** -0.5), self.random(features)
        y = F.linear(self.of(x), weight.double(), bias.double())
        y = FUNCTIONS[activation](y if residual is None else y + self.of(residual))
        options = {"activation": activation, "parameter": parameter(activation), "residual": residual}
        return self.note(self.builder.linear(x, weight, bias, **options), y)

    def affine(self, x: Value, activation: str = "none") -> Value:
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        channels = x.shape[1] if len(x.shape) == 4 else x.shape[-1]
        scale, shift = self.random(channels).to(kind), self.random(channels).to(kind)
        spread = (slice(None), None, None) if len(x.shape) == 4 else ()
        y = FUNCTIONS[activation](self.of(x) * scale.double()[spread] + shift.double()[spread])
        return self.note(self.builder.affine(x, scale, shift, activation, parameter(activation)), y)

    def apply(self, name: str, x: Value, *args: Any, **options: Any) -> Value:
        """One of the Builder's methods whose arguments are PyTorch's."""
        return self.note(
            getattr(self.builder, name)(x, *args, **options), getattr(F, name)(self.of(x), *args, **options)
        )

    def unary(self, x: Value, name: str) -> Value:
        return self.note(self.builder.unary(x, name, parameter(name)), FUNCTIONS[name](self.of(x)))

    def prelu(self, x: Value, count: int) -> Value:
        slope = self.random(count)
        return self.note(self.builder.unary(x, "prelu", slope), F.prelu(self.of(x), slope.double()))

    def binary(self, x: Value, y: Value, name: str, activation: str = "none") -> Value:
        exact = self.of(x) + self.of(y) if name == "add" else self.of(x) * self.of(y)
        return self.note(
            self.builder.binary(x, y, name, activation, parameter(activation)), FUNCTIONS[activation](exact)
        )

    def concat(self, *values: Value, dim: int | None = None) -> Value:
        exact = torch.cat([self.of(v) for v in values], 1 if dim is None else dim)
        return self.note(self.builder.concat(values, dim), exact)

    def slice(self, x: Value, start: int, stop: int, dim: int | None = None) -> Value:
        exact = self.of(x).narrow(1 if dim is None else dim, start, stop - start)
        return self.note(self.builder.slice(x, start, stop, dim), exact)

    def view(self, name: str, x: Value, *args: Any) -> Value:
        """One of the Builder's methods whose arguments are those of torch.Tensor's."""
        return self.note(getattr(self.builder, name)(x, *args), getattr(self.of(x), name)(*args))

    def operation(self, name: str, x: Value, constants: dict[str, Tensor] | None = None, **arguments: Any) -> Value:
        """A step of an operation that says itself how programs have it."""
        step, given = Step.by_operation[name], arguments | (constants or {})
        wide = arguments | {n: t.double() for n, t in (constants or {}).items()}
        return self.note(self.builder.operation(step, {"input": x, **given}), step.compute(self.of(x), **wide))

    def flatten(self, x: Value) -> Value:
        return self.note(self.builder.flatten(x), self.of(x).flatten(1))

    def check(self, *outputs: Value, channels_last: bool = False) -> Program:
        """Builds and compares, twice; nothing may read memory that was not written, or change its inputs."""
        program = self.builder.build(outputs, channels_last=channels_last)
        before = [x.clone() for x in self.inputs]
        first = program(*self.inputs)
        kept = [y.clone() for y in first]
        _library.fill_workspace(0xFF)  # NaN in every dtype
        second = program(*self.inputs)
        bound = BOUNDS[self.dtype]
        for value, y, again, copied in zip(outputs, first, second, kept, strict=True):
            assert y.dtype == self.dtype
            if y.ndim == 4:
                assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            assert error(y, self.of(value)) <= bound, str(program)
            assert torch.equal(y, again)
            assert torch.equal(y, copied)
            assert y.untyped_storage().data_ptr() != again.untyped_storage().data_ptr()
        for x, b in zip(self.inputs, before, strict=True):
            assert torch.equal(x, b)
        return program


def operations(program: Program) -> list[str]:
    return [s.operation for s in program.report().steps]


# Steps ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "slice", "strange"])
def test_all_kinds_of_steps(dtype: torch.dtype, layout: str) -> None:
    p = Pair(0, dtype)
    x = p.input(2, 6, 13, 11, layout=layout)
    a = p.conv2d(x, 32, padding=1, activation="relu")
    b = p.conv2d(a, 32, padding=1, residual=a, activation="relu")
    c = p.conv2d(b, 16, (1, 1), prologue=True)
    d = p.conv2d(c, 16, padding=(2, 0), dilation=2, stride=(2, 1), groups=4, bias=False)
    e = p.apply("max_pool2d", b, 3, 2, 1, ceil_mode=True)
    f = p.apply("avg_pool2d", e, (3, 2), stride=1, padding=1, count_include_pad=False)
    g = p.apply("adaptive_avg_pool2d", f, 1)
    h = p.conv2d(g, 32, (1, 1), activation="silu")
    i = p.binary(b, h, "mul", "hardswish")
    j = p.binary(p.affine(i), b, "add")
    k = p.concat(j, p.slice(i, 3, 20), p.unary(b, "gelu"))
    m = p.flatten(p.apply("adaptive_avg_pool2d", k, 3))
    n = p.linear(m, 20, activation="relu")
    p.check(p.linear(n, 20, residual=n), k, d, p.flatten(g), channels_last=layout == "channels_last")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    p = Pair(1, dtype)
    x = p.input(3, 24, 5, 7)
    y = p.conv2d(x, 40, (1, 1), activation=activation)
    z = p.binary(p.affine(y, activation), y, "add", activation)
    leaky = p.note(p.builder.unary(x, "leaky_relu", 0.1), F.leaky_relu(p.of(x), 0.1))
    p.check(
        p.unary(x, activation),
        y,
        z,
        p.prelu(y, 40),
        p.prelu(y, 1),
        leaky,
        p.linear(p.flatten(y), 9, activation=activation),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["prelu", "elu"])
def test_slopes_of_channels(name: str, dtype: torch.dtype) -> None:
    """Beside a residual, into a slice of a concatenation, after a sum and before a linear; one tensor serves two layers."""

    def apply(y: Tensor, slope: Tensor) -> Tensor:
        below = y if name == "prelu" else torch.expm1(y)
        return torch.where(y > 0, y, below * slope.double().reshape(-1, *[1] * (y.ndim - 2)))

    p = Pair(4, dtype)
    x = p.input(2, 24, 9, 7)
    slope, other = p.random(24), p.random(40)
    weight, matrix = p.random(24, 24, 3, 3, scale=0.07), p.random(40, 24, scale=0.2)
    convolved = F.conv2d(p.of(x), weight.double(), padding=1)
    a = p.note(p.builder.conv2d(x, weight, padding=1, activation=name, parameter=slope), apply(convolved, slope))
    b = p.builder.conv2d(a, weight, padding=1, activation=name, parameter=slope, residual=x)
    b = p.note(b, apply(F.conv2d(p.of(a), weight.double(), padding=1) + p.of(x), slope))
    c = p.note(p.builder.binary(a, b, "add", name, slope), apply(p.of(a) + p.of(b), slope))
    d = p.flatten(p.apply("adaptive_avg_pool2d", c, 1))
    e = p.note(
        p.builder.linear(d, matrix, activation=name, parameter=other), apply(F.linear(p.of(d), matrix.double()), other)
    )
    p.check(p.concat(a, b, p.note(p.builder.unary(c, name, slope), apply(p.of(c), slope))), e)


def test_names_of_activations() -> None:
    assert set(FUNCTIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("shape", [(5, 30), (2, 7, 30), (2, 3, 2, 3, 30)])
def test_rows_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    p = Pair(2)
    x = p.input(*shape, layout="strange")
    y = p.linear(x, 30, activation="gelu", residual=x)
    p.check(p.unary(p.affine(p.binary(x, y, "mul")), "relu"), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    """Of rows, over one dimension and two, with and without weights; its input may be a slice."""
    p = Pair(20, dtype)
    x = p.input(2, 7, 30)
    weights = {"weight": p.random(30), "bias": p.random(30)}
    y = p.operation("layer_norm", p.linear(x, 30, residual=x), weights, normalized_shape=(30,), eps=1e-6)
    z = p.operation("layer_norm", y, {"weight": p.random(7, 30)}, normalized_shape=(7, 30))
    narrow = p.operation("layer_norm", p.slice(p.linear(z, 60), 20, 50, 2), None, normalized_shape=(30,))
    program = p.check(p.binary(narrow, y, "add"), z)
    assert [o for o in operations(program) if o != "copy"] == [
        "linear_gemm", "layer_norm_direct", "layer_norm_direct", "linear_gemm", "layer_norm_direct", "add",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views(dtype: torch.dtype) -> None:
    """Heads of attention, and windows: other sizes, other orders and parts of values, each with rows that something reads."""
    p = Pair(21, dtype)
    x = p.input(2, 6, 24)
    qkv = p.linear(x, 72)
    heads = p.view(
        "permute", p.note(p.builder.reshape(qkv, (0, 0, 3, 4, 6)), p.of(qkv).view(2, 6, 3, 4, 6)), (2, 0, 3, 1, 4)
    )
    query, key, value = (p.view("select", heads, 0, i) for i in range(3))
    joined = p.binary(p.binary(query, key, "mul"), value, "add")
    back = p.view("reshape", p.view("permute", joined, (0, 2, 1, 3)), (2, 6, 24))
    y = p.linear(back, 24, residual=x)
    wide = p.view("expand", p.slice(y, 0, 1, 1), (-1, 6, -1))
    rolled = p.view("roll", p.binary(y, wide, "mul"), (2, -3), (1, 2))
    p.check(p.concat(rolled, p.slice(y, 1, 4, 1), dim=1), back, query)


def test_views_move_nothing() -> None:
    p = Pair(22)
    y = p.linear(p.input(4, 9, 16), 48)
    parts = [p.linear(p.slice(y, 16 * i, 16 * i + 16, 2), 16) for i in range(3)]
    rows = p.view("reshape", p.binary(parts[0], p.binary(parts[1], parts[2], "add"), "mul"), (36, 16))
    program = p.check(p.linear(rows, 8))
    assert "copy" not in operations(program)


def test_concatenations_are_no_steps() -> None:
    """A dense block: every concatenation is a part of the last one, and is written by the layers themselves."""
    p = Pair(3)
    x = p.apply("max_pool2d", p.input(2, 16, 12, 12, layout="channels_last"), 2)
    features = [x]
    for _ in range(4):
        features.append(
            p.conv2d(p.conv2d(p.concat(*features), 32, (1, 1), prologue=True, activation="relu"), 8, padding=1)
        )
    program = p.check(p.conv2d(p.concat(*features), 24, (1, 1)), channels_last=True)
    assert "copy" not in operations(program)
    assert {s.row for s in program.report().steps if s.sizes[1] == 8} == {48}


def test_parts_of_concatenations_whose_innermost_dimension_has_size_1() -> None:
    """Rotary embeddings of one key head: what differs by channel is written with a channel of size 1 innermost."""
    for sizes, dim in (((2, 1, 8, 8), 3), ((2, 1, 8, 8), 2), ((1, 1, 8, 8), 2), ((2, 8, 1, 1), 1), ((1, 8, 1, 1), 1)):
        p = Pair(23)
        x = p.input(*sizes)
        left, right = p.slice(x, 0, 4, dim), p.slice(x, 4, 8, dim)
        turned = p.concat(p.affine(right), left, dim=dim)
        wide = p.concat(turned, p.affine(turned), dim=dim)
        p.check(wide, p.concat(p.unary(left, "relu"), p.affine(left), dim=dim))


def test_slices_are_read_in_place() -> None:
    p = Pair(4)
    x = p.input(2, 32, 9, 9, layout="channels_last")
    y = p.conv2d(x, 64, (1, 1))
    left, right = p.slice(y, 0, 24), p.slice(y, 24, 64)
    program = p.check(p.concat(p.conv2d(left, 16, padding=1), p.conv2d(right, 24, padding=1)), channels_last=True)
    assert "copy" not in operations(program)


def test_elementwise_steps_overwrite_what_nothing_reads() -> None:
    p = Pair(5)
    x = p.conv2d(p.input(1, 8, 20, 20), 16, padding=1)
    y = p.binary(p.unary(x, "silu"), p.conv2d(x, 16, padding=1), "add")
    program = p.check(p.conv2d(p.affine(y, "relu"), 8, padding=1))
    steps = program.report().steps
    affine = next(s for s in steps if s.operation == "affine")
    assert affine.input == affine.output
    silu = next(s for s in steps if s.operation == "activate")
    assert silu.input != silu.output  # the convolution reads it later


def test_what_is_folded_or_left_out() -> None:
    p = Pair(6)
    x = p.input(2, 12, 4, 5)
    y = p.conv2d(x, 10, padding=1)
    p.unary(y, "gelu")  # nothing needs it
    flat = p.flatten(y)
    program = p.check(p.binary(p.linear(flat, 7), p.linear(flat, 7), "add"))
    assert [o for o in operations(program) if o != "copy"] == ["conv2d_direct", "linear_gemm", "linear_gemm", "add"]
    assert "order=channels_last" in str(program)
    q = Pair(7)
    y = q.conv2d(q.input(2, 12, 4, 5), 10, padding=1)
    flat = q.flatten(y)
    assert "order=contiguous" in str(q.check(q.linear(flat, 7), flat))


def test_results_of_all_kinds() -> None:
    """Inputs, slices, parts of concatenations, the same value twice."""
    for layout in ("contiguous", "channels_last"):
        p = Pair(8)
        x, z = p.input(2, 6, 5, 4, layout=layout), p.input(2, 6, 5, 4)
        y = p.conv2d(x, 6, (1, 1))
        c = p.concat(x, y, y, z)
        p.check(
            x,
            c,
            c,
            p.slice(c, 4, 9),
            y,
            p.slice(x, 1, 3),
            p.concat(p.slice(c, 0, 5)),
            channels_last=layout != "contiguous",
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_images_change_their_layout(dtype: torch.dtype) -> None:
    """Three channels, whose elements are put between each other by vectors, and other numbers of them; any width."""
    for channels in (1, 2, 3, 4, 5, 9, 17):
        for width in (1, 3, 7, 8, 16, 19, 35):
            x = torch.randn(2, channels, 3, width).to(dtype)
            for begin, end in ((False, True), (True, False)):
                builder = Builder()
                program = builder.build([builder.input(x.shape, dtype)], channels_last=end)
                given = x.to(memory_format=torch.channels_last) if begin else x
                assert torch.equal(program(given)[0], x), (channels, width, begin)


def test_algorithms_by_name() -> None:
    for name in (
        "direct",
        "im2col",
        "kn2row",
        "implicit_gemm",
        "implicit_precomp_gemm",
        "winograd",
        "winograd_f2",
        "fft",
    ):
        p = Pair(9)
        x = p.input(1, 16, 9, 8)
        y = p.conv2d(p.concat(x, x), 16, padding=1, algorithm=name, activation="relu")
        program = p.check(p.concat(y, p.conv2d(x, 16, padding=1, algorithm=name, residual=y)))
        assert any(o.startswith(f"conv2d_{name}") for o in operations(program))


# Random programs ------------------------------------------------------------------------------------------------------
def apart_from(sizes: Sequence[int], dim: int) -> list[int]:
    """-1 in the dimension's place."""
    return [-1 if d == dim else size for d, size in enumerate(sizes)]


@st.composite
def networks(draw: st.DrawFn) -> tuple[Pair, list[Value], bool]:
    p = Pair(draw(st.integers(0, 2**20)), draw(st.sampled_from([torch.float32, torch.float32, torch.float64])))
    batch = draw(st.integers(1, 3))
    layouts = st.sampled_from(["contiguous", "channels_last", "slice", "strange"])
    sizes = st.integers(1, 12)
    values = [
        p.input(batch, draw(st.integers(1, 40)), draw(sizes), draw(sizes), layout=draw(layouts))
        for _ in range(draw(st.integers(1, 2)))
    ]
    activations = st.sampled_from([*ACTIVATIONS])
    for _ in range(draw(st.integers(1, 14))):
        x = draw(st.sampled_from(values))
        same = [v for v in values if v.shape == x.shape]
        dim = draw(st.one_of(st.just(1), st.integers(0, len(x.shape) - 1)))
        beside = [v for v in values if apart_from(v.shape, dim) == apart_from(x.shape, dim)]
        image = len(x.shape) == 4
        kind = draw(
            st.sampled_from(
                [
                    "conv",
                    "conv",
                    "conv",
                    "pool",
                    "map",
                    "concat",
                    "concat",
                    "slice",
                    "binary",
                    "flat",
                    "gate",
                    "permute",
                ]
            )
        )
        if kind == "conv" and image:
            kernel = draw(st.sampled_from([(1, 1), (3, 3), (3, 3), (2, 3)]))
            stride, pad = draw(st.integers(1, 2)), draw(st.integers(0, 2))
            if any(s + 2 * pad < k for s, k in zip(x.shape[2:], kernel, strict=True)):
                continue
            groups = draw(st.sampled_from([1, 1, 1, 2, x.shape[1]]))
            if x.shape[1] % groups:
                continue
            filters = groups * draw(st.integers(1, 40 // groups + 1))
            options: dict[str, Any] = {
                "stride": stride,
                "padding": pad,
                "groups": groups,
                "prologue": draw(st.booleans()),
            }
            out = tuple((s + 2 * pad - k) // stride + 1 for s, k in zip(x.shape[2:], kernel, strict=True))
            like = [x.shape[0], -1, *out]
            fitting = [v for v in values if apart_from(v.shape, 1) == like and v.shape[1] % groups == 0]
            if fitting and draw(st.booleans()):
                options["residual"] = draw(st.sampled_from(fitting))
                filters = options["residual"].shape[1]
            values.append(p.conv2d(x, filters, kernel, activation=draw(activations), **options))
        elif kind == "conv":
            values.append(p.linear(x, draw(st.integers(1, 40)), activation=draw(activations)))
        elif kind == "pool" and image:
            window = min(3, *x.shape[2:])
            name = draw(st.sampled_from(["max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"]))
            arguments = (
                (draw(st.integers(1, 3)),)
                if name.startswith("a" + "d")
                else (window, draw(st.integers(1, 2)), window // 2)
            )
            values.append(p.apply(name, x, *arguments))
        elif kind == "map":
            values.append(draw(st.sampled_from([p.unary, p.affine]))(x, draw(activations)))
        elif kind == "concat":
            parts = draw(st.lists(st.sampled_from(beside), min_size=1, max_size=4))
            if sum(v.shape[dim] for v in parts) <= 200:
                values.append(p.concat(*parts, dim=dim))
        elif kind == "slice":
            start = draw(st.integers(0, x.shape[dim] - 1))
            values.append(p.slice(x, start, draw(st.integers(start + 1, x.shape[dim])), dim))
        elif kind == "permute":
            values.append(p.view("permute", x, draw(st.permutations(range(len(x.shape))))))
        elif kind == "binary":
            values.append(
                p.binary(x, draw(st.sampled_from(same)), draw(st.sampled_from(["add", "mul"])), draw(activations))
            )
        elif kind == "flat" and image and x.shape[1] * x.shape[2] * x.shape[3] <= 400:
            values.append(p.flatten(x))
        elif kind == "gate" and image:
            values.append(p.binary(x, p.conv2d(p.apply("adaptive_avg_pool2d", x, 1), x.shape[1], (1, 1)), "mul"))
        if not 1e-3 < p.of(values[-1]).abs().max() < 1e3:
            values.pop()
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    return p, outputs, draw(st.booleans())


@given(networks())
def test_random_networks(network: tuple[Pair, list[Value], bool]) -> None:
    p, outputs, channels_last = network
    p.check(*outputs, channels_last=channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_many_dimensions(dtype: torch.dtype) -> None:
    """Of more than four that do not lie in one another: as many copies of four as the outer ones count."""
    for size, dims in (((8, 3, 40, 5, 7), (4, 2, 0, 3, 1)), ((2, 24, 2, 3, 4, 4, 3), (0, 5, 3, 1, 6, 4, 2))):
        p = Pair(5, dtype)
        x = p.input(*size)
        p.check(p.view("reshape", p.view("permute", x, dims), (size[dims[0]], -1)))


@pytest.mark.parametrize("by", ["slices", "selects"])
def test_a_product_with_one_pixel_of_itself(by: str) -> None:
    """It is read until the last pixel is written."""
    for batch in (1, 2):
        p = Pair(6)
        x = p.unary(p.input(batch, 8, 4, 4, layout="channels_last"), "relu")
        if by == "slices":
            pixel = p.slice(p.slice(x, 2, 3, 2), 1, 2, 3)
        else:
            pixel = p.view("reshape", p.view("select", p.view("select", x, 3, 1), 2, 2), (batch, 8, 1, 1))
        product = p.note(p.builder.binary(x, pixel, "mul"), p.of(x) * p.of(pixel))
        p.check(p.unary(product, "sigmoid"))


@pytest.mark.parametrize("name", ["add", "mul"])
def test_two_values_of_unequal_ranks(name: str) -> None:
    """The one of fewer dimensions is expanded, whichever comes first and however many ones the other ends in."""
    for one, other in (
        ((1, 5, 1, 1), (5, 1, 1)),
        ((5, 1, 1), (2, 5, 1, 1)),
        ((1, 1), (2, 3, 1, 1)),
        ((3, 6), (2, 3, 6)),
    ):
        for sizes in ((one, other), (other, one)):
            p = Pair(9)
            x, y = [p.input(*size) for size in sizes]
            p.check(p.binary(p.unary(x, "relu"), y, name))


def test_a_roll_along_a_dimension_that_is_named_twice() -> None:
    for shifts, dims in (((2, 3), (1, 1)), ((-1, 3, 9), (0, 1, 0)), ((4, 3), (1, 1))):
        p = Pair(7)
        p.check(p.view("roll", p.unary(p.input(3, 7), "relu"), shifts, dims))


def test_sizes_below_minus_one_are_refused() -> None:
    p = Pair(8)
    x = p.input(2, 3)
    program = p.builder.build([p.builder.reshape(x, (-2, -3))])
    with pytest.raises(RuntimeError, match="needs sizes of at least -1"):
        program(*p.inputs)


@pytest.mark.parametrize("size", [(1, 17, 11, 7), (2, 3, 4, 5), (3, 1, 1, 9), (4, 6), (2, 5, 9), (1, 1, 9)], ids=str)
def test_every_step_after_every_permutation(size: tuple[int, ...]) -> None:
    """Whatever dimension is innermost, the first too, and whatever strides those of one element have."""
    for dims in itertools.permutations(range(len(size))):
        p = Pair(3)
        x = p.unary(p.input(*size), "sigmoid")
        seen = p.view("permute", x, dims)
        outputs = [
            p.unary(seen, "tanh"),
            p.binary(seen, seen, "add", "relu"),
            p.binary(seen, p.unary(seen, "silu"), "mul"),
        ]
        if len(size) > 1:
            outputs += [p.affine(seen, "gelu"), p.linear(seen, 5) if len(size) < 4 else p.conv2d(seen, 5, (1, 1))]
        if len(size) == 4:
            outputs += [
                p.conv2d(seen, 40, (1, 1)),
                p.apply("adaptive_avg_pool2d", seen, 1),
                p.apply("max_pool2d", seen, 1),
            ]
            outputs.append(p.binary(seen, outputs[-2], "mul"))
        p.check(*outputs)
        p.check(*outputs, channels_last=True)


# Calls ----------------------------------------------------------------------------------------------------------------
def small(seed: int = 10) -> tuple[Pair, Value, Program]:
    p = Pair(seed)
    x = p.input(2, 3, 16, 16)
    a = p.conv2d(x, 32, padding=1, activation="relu")
    b = p.concat(p.conv2d(a, 32, padding=1, residual=a), a)
    y = p.linear(p.flatten(p.apply("adaptive_avg_pool2d", b, 1)), 10)
    return p, y, p.check(y, b)


def reference(program: Program, p: Pair, x: Tensor) -> list[Tensor]:
    """The same one image at a time."""
    parts = [program(image[None]) for image in x]
    return [torch.cat(values) for values in zip(*parts, strict=True)]


def test_other_sizes() -> None:
    p, _, program = small()
    for shape in ((1, 3, 16, 16), (5, 3, 16, 16), (0, 3, 16, 16), (2, 3, 9, 20), (2, 3, 16, 16)):
        x = p.random(*shape)
        y, b = program(x)
        assert y.shape == (shape[0], 10)
        assert b.shape == (shape[0], 64, *shape[2:])
        if shape[0]:
            for out, exact in zip((y, b), reference(program, p, x), strict=True):
                assert error(out, exact.double()) <= 1e-5


def test_threads_at_once() -> None:
    p, _, program = small()
    inputs = [p.random(1 + i % 3, 3, 16, 16) for i in range(12)]
    expected = [program(x) for x in inputs]

    def run(i: int) -> bool:
        return all(
            all(map(torch.equal, program(x), wanted))
            for _ in range(10)
            for x, wanted in zip(inputs[i:] + inputs[:i], expected[i:] + expected[:i], strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_copies() -> None:
    p, _, program = small()
    wanted = program(*p.inputs)
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert str(other) == str(program)
        assert all(map(torch.equal, other(*p.inputs), wanted))


def test_report_and_time() -> None:
    p, _, program = small()
    report = program.report(*p.inputs)
    assert report.steps[0].operation == "conv2d_direct"  # reads the NCHW image
    assert 0 < report.live_bytes <= report.arena_bytes
    assert "conv2d_direct" in str(report)
    times = program.time(*p.inputs, repeats=3)
    assert len(times) == len(report.steps)
    assert all(t >= 0 for t in times)


# Mistakes -------------------------------------------------------------------------------------------------------------
def test_gradients_are_an_error() -> None:
    p, _, program = small()
    x = p.inputs[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="inference"):
        program(x)
    with torch.no_grad():
        program(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        program(torch.autograd.forward_ad.make_dual(p.inputs[0], p.inputs[0]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "needs a text that ends with return"),
        ("%0 = input float32 4\n", "needs a text that ends with return"),
        ("%0 = input float32 4\nreturn", "needs a value"),
        ("%0 = input float32 4\nreturn %1", "there is no value %1"),
        ("%0 = input float32 4\nreturn %0:strided", "channels_last or contiguous"),
        ("%0 = input float32 4\nreturn %0\n%1 = concat %0", "nothing may follow return"),
        ("%1 = input float32 4\nreturn %1", "numbered in order"),
        ("%0 = input float32 2\nreturn %0", "got a tensor of sizes"),
        ("%0 = input float64 4\nreturn %0", "got a tensor of float32"),
        ("%0 = input float32 4\n%1 = input float32 4\nreturn %0", "needs 2 inputs, got 1"),
        ("%0 = input float32 4\n%1 = frobnicate %0\nreturn %1", "unknown operation 'frobnicate'"),
        ("%0 = input float32 4\n%1 = conv2d_frobnicate %0\nreturn %1", "no conv2d algorithm 'frobnicate'"),
        ("%0 = input float32 4\n%1 = conv2d_default %0\nreturn %1", "kernel of its own"),
        ("%0 = input float32 4\n%1 = conv2d_direct %0\nreturn %1", "needs weight"),
        ("%0 = input float32 4\n%1 = add %0\nreturn %1", "needs 2 values"),
        ("%0 = input float32 4\n%1 = add %0 %1\nreturn %1", "there is no value %1 yet"),
        ("%0 = input float32 4\n%1 = activate %0 activation=frobnicate\nreturn %1", "unknown activation"),
        ("%0 = input float32 4\n%1 = slice %0 start=2 stop=9\nreturn %1", "0 <= start < stop <= channels"),
        ("%0 = input float32 4\n%1 = slice %0 start=x stop=9\nreturn %1", "needs numbers as start"),
        ("%0 = input float32 4\n%1 = reshape %0 sizes=7,-1\nreturn %1", "hold all elements"),
        ("%0 = input float32 4\n%1 = reshape %0 sizes=-1,-1\nreturn %1", "one open size at most"),
        ("%0 = input float32 4\n%1 = permute %0 dims=0,1,1,2\nreturn %1", "needs a permutation"),
        ("%0 = input float32 4\n%1 = select %0 dim=1 index=3\nreturn %1", "needs a dimension and an index"),
        ("%0 = input float32 4\n%1 = expand %0 sizes=2,5,8,8\nreturn %1", "cannot expand"),
        ("%0 = input float32 4\n%1 = roll %0 shifts=1 dims=4\nreturn %1", "no such dimension"),
        ("%0 = input float32 4\n%1 = layer_norm_direct %0 dims=5 eps=1e-5\nreturn %1", "needs dims of the input's"),
        ("%0 = input float32 4\n%1 = affine %0 scale=$5\nreturn %1", "no line reads constant 0"),
        ("%0 = input float32 4\n%1 = affine %0 scale=$0\nreturn %1", "needs 128 bytes of constants"),
        ("%0 = input float32 4\n%1 = affine %0 scale=$x\nreturn %1", "needs a constant"),
        ("%0 = input float32 4\n%1 = max_pool2d_direct %0 kernel_size=9,9 stride=1,1 padding=0,0 dilation=1,1 ceil_mode=0\n"
         "return %1", "too small"),
        ("%0 = input float32 4\n%1 = max_pool2d_direct %0 kernel_size=2,2 stride=0,1 padding=0,0 dilation=1,1 ceil_mode=0\n"
         "return %1", "of at least 1"),
        ("%0 = input float32 4\n%1 = conv2d_direct %0 weight=$0:8,4,3,3 stride=1,1 padding=0,0 dilation=1,1 groups=1\n"
         "return %1", "needs input of 4 channels"),
        ("%0 = input float32 4\n%1 = conv2d_direct %0 weight=$0:8,3,9,9 stride=1,1 padding=0,0 dilation=1,1 groups=1\n"
         "return %1", "no smaller than the kernel"),
        ("%0 = input float32 4\n%1 = conv2d_direct %0 weight=$0:8,3,3,3 stride=1,1 padding=0,0 dilation=1,1 groups=1\n"
         "return %1", "bytes of constants"),
        ("%0 = input float32 4\n%1 = conv2d_direct %0 weight=$0:4611686018427387904,3,3,3 stride=1,1 padding=0,0 dilation=1,1 "
         "groups=1\nreturn %1", "sizes of weight"),
    ],
)  # fmt: skip
def test_texts_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match="ai3::") as refusal:
        torch.ops.ai3._program([torch.randn(1, 3, 8, 8)], [torch.zeros(16, dtype=torch.uint8)], text)
    assert reason in str(refusal.value)


def test_calls_that_are_refused() -> None:
    p, _, program = small()
    for inputs, reason in (
        ((), "needs 1 inputs"),
        ((p.inputs[0], p.inputs[0]), "needs 1 inputs, got 2"),
        ((p.inputs[0].double(),), "float64"),
        ((p.inputs[0].int(),), "float64, float32, bfloat16, float16 or bool"),
        ((p.inputs[0][:, :2],), "needs input of 3 channels"),
        ((p.inputs[0][0],), "got a tensor of sizes"),
    ):
        with pytest.raises(RuntimeError, match=r"ai3::|program") as refusal:
            program(*inputs)
        assert reason in str(refusal.value) or not inputs
    constants = program.constants[0]
    other = Program(program.text, [torch.zeros_like(constants)], program.examples)
    with pytest.raises(RuntimeError, match="packed for this program"):
        other(*p.inputs)
    for wrong in ([constants[1:]], [constants.float()], [constants[None]], [], [constants, constants]):
        other.constants = wrong
        with pytest.raises(RuntimeError, match="of constants"):
            other(*p.inputs)


def test_what_the_builder_refuses() -> None:
    b = Builder()
    x = b.input((1, 4, 8, 8))
    weight, row = torch.randn(4, 4, 3, 3), b.flatten(x)
    refused: list[tuple[Any, str]] = [
        (lambda: b.input((1, 4), torch.int32), "float64, float32"),
        (lambda: b.input((1, 4, 8, 8)), "inputs come before"),
        (lambda: b.conv2d(x, weight, activation="frobnicate"), "no activation 'frobnicate'"),
        (lambda: b.conv2d(x, weight, algorithm="frobnicate"), "no conv2d algorithm 'frobnicate'"),
        (lambda: b.conv2d(x, weight, algorithm="onednn"), "PyTorch's own operators"),
        (lambda: b.conv2d(x, weight, algorithm="smm"), "NCHW"),
        (lambda: b.conv2d(x, weight, stride=2, algorithm="winograd"), "stride 1"),
        (lambda: b.conv2d(x, weight.double()), "weight of torch.float32"),
        (lambda: b.conv2d(x, torch.randn(4, 5, 3, 3)), "channels"),
        (lambda: b.conv2d(x, torch.randn(4, 4, 9, 9)), "kernel's extent"),
        (lambda: b.conv2d(x, weight, residual=x), "residual of sizes"),
        (lambda: b.conv2d(x, weight, torch.randn(3)), "bias of 4 elements"),
        (lambda: b.linear(x, torch.randn(3, 8), activation="elu", parameter=1.0), "got an image"),
        (lambda: b.linear(row, torch.randn(3, 4)), "features"),
        (lambda: b.adaptive_avg_pool2d(x, (None, 1)), "needs numbers"),
        (lambda: b.max_pool2d(row, 2), "needs an image"),
        (lambda: b.max_pool2d(x, 9), "too small"),
        (lambda: b.unary(x, "relu", 0.5), "needs no parameter"),
        (lambda: b.unary(x, "prelu"), "needs a slope"),
        (lambda: b.unary(x, "prelu", torch.randn(3)), "slope of 4 elements"),
        (lambda: b.conv2d(x, weight, activation="elu"), "elu needs a slope"),
        (lambda: b.conv2d(x, weight, activation="prelu", parameter=torch.randn(3)), "slope of 4 elements"),
        (lambda: b.binary(x, x, "add", "tanh", 1.0), "needs no parameter"),
        (lambda: b.binary(x, row, "add"), "same sizes"),
        (lambda: b.binary(x, x, "div"), "no operation 'div'"),
        (lambda: b.concat([]), "needs values"),
        (lambda: b.concat([x, row]), "channels alone"),
        (lambda: b.slice(x, 3, 9), "slice needs"),
        (lambda: b.affine(x, torch.randn(3), None), "scale of 4 elements"),
        (lambda: b.build([]), "needs outputs"),
        (lambda: Builder().build([x]), "of this Builder"),
        (lambda: Builder().concat([x]), "one Builder"),
    ]
    for call, reason in refused:
        with pytest.raises(ValueError, match=r".") as refusal:
            call()
        assert reason in str(refusal.value), str(refusal.value)


# Compiled and exported ------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        y, b = self.program(x)
        return y + b.mean()


def test_opcheck() -> None:
    p, _, program = small()
    torch.library.opcheck(torch.ops.ai3._program.default, (p.inputs, program.constants, program.text))


def test_fake_sizes_and_strides() -> None:
    for channels_last in (False, True):
        p, _, _ = small()
        values = [v for v in p.builder._values if len(v.shape) == 4][-2:]
        program = p.builder.build(values, channels_last=channels_last)
        with torch._subclasses.FakeTensorMode() as mode:
            faked = torch.ops.ai3._program(
                [mode.from_tensor(x) for x in p.inputs], [mode.from_tensor(c) for c in program.constants], program.text
            )
        for f, y in zip(faked, program(*p.inputs), strict=True):
            assert (f.shape, f.stride(), f.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    p, _, program = small()
    model = Model(program)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        x = p.random(batch, 3, 16, 16)
        torch.testing.assert_close(compiled(x), model(x))


def test_exported(tmp_path: Path) -> None:
    p, _, program = small()
    model = Model(program)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, tuple(p.inputs), dynamic_shapes=({0: batch},))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for n in (1, 2, 5):
        x = p.random(n, 3, 16, 16)
        for run in (exported.module(), loaded):
            torch.testing.assert_close(run(x), model(x))


def test_a_builder_keeps_no_weights_once_it_is_gone():
    """Nor does it wait for the garbage collector, which may come long after: they are as large as the model."""
    builder, weight = Builder(), torch.randn(4, 3, 3, 3)
    program = builder.build([builder.conv2d(builder.input((1, 3, 8, 8)), weight)])
    kept = weakref.ref(weight)
    gc.disable()
    try:
        del builder, weight
        assert kept() is None
    finally:
        gc.enable()
    assert program(torch.randn(1, 3, 8, 8))[0].shape == (1, 4, 6, 6)


@pytest.mark.parametrize("algorithm", ["direct", "winograd_f4"])
def test_the_size_of_a_program_is_known_before_it_is_packed(algorithm: str) -> None:
    builder = Builder()
    y = builder.conv2d(builder.input((1, 16, 20, 20)), torch.randn(16, 16, 3, 3), torch.randn(16), algorithm=algorithm)
    packed, unpacked = (builder.build([y], pack=pack) for pack in (True, False))
    assert unpacked.constants[0].is_meta
    assert [c.nbytes for c in packed.constants] == [c.nbytes for c in unpacked.constants]
    assert packed.report() == unpacked.report()
