"""The shared tester for pytest: every algorithm of the registry, and shapes that hypothesis makes up."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import ai3_ops
from ai3_ops.checking import cases
from ai3_ops.checking.cases import Case, conv
from ai3_ops.registry import OPERATIONS, AlgorithmInfo

# Other examples every time, also where Hypothesis sees that CI runs it; a failure prints the line that makes it happen again
# (@reproduce_failure).
settings.register_profile(
    "quick", max_examples=15, derandomize=False, print_blob=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "full", max_examples=500, derandomize=False, print_blob=True, deadline=None, suppress_health_check=list(HealthCheck)
)
PROFILE = os.environ.get("AI3_OPS_TEST_PROFILE", "quick")
settings.load_profile(PROFILE)
if PROFILE == "quick":  # of what `check` runs in networks' sizes, a tenth
    cases.PRODUCTS, cases.OTHER_PRODUCTS, cases.MOST_REALISTIC = 60_000_000, 10_000_000, 10

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ALGORITHMS = [a for a in ai3_ops.algorithms() if a.device in DEVICES and not a.python]


def name_of(a: AlgorithmInfo) -> str:
    """The id of an algorithm's tests."""
    return f"{a.operation}_{a.name}" + ("" if a.device == "cpu" else "_cuda")


each_algorithm = pytest.mark.parametrize("info", ALGORITHMS, ids=name_of)


def _kind(a: AlgorithmInfo) -> tuple[object, ...]:
    parameters = () if a.rule else tuple(p.name for p in a.parameters)
    return a.operation, a.device, a.layout, a.backward, a.accuracy, a.vendor, a.rule, parameters


_usual = sorted(ALGORITHMS, key=lambda a: (a.name in ("default", "direct", "flash", "gemm"), a.name))
_first = {_kind(a): a for a in _usual}  # the last of each


def stands_for_its_like(a: AlgorithmInfo) -> bool:
    """Whether others of its operation, whose rules in Python cannot differ from its own, are left to `make test-full`.

    Of those that only choose another algorithm, conv2d's stand for all.
    """
    return _first[_kind(a)] == a and (not a.rule or a.operation == "conv2d")


# Of rules in Python: `stands_for_its_like` says which run in `make test`.
each_kind = pytest.mark.parametrize(
    "info",
    [
        pytest.param(a, id=name_of(a), marks=[pytest.mark.full] * (not stands_for_its_like(a) and a.name != "default"))
        for a in ALGORITHMS
    ],
)
each_selection = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some", "every"]
)
_layouts = st.sampled_from(["contiguous", "contiguous", "channels_last", "transposed", "sliced", "expanded"])


def window_for(algorithm: str, channels: int, kernel: int = 3, padding: int = 1) -> tuple[int, int, int, int]:
    """Stride, padding, dilation and groups that an algorithm of conv2d has for a layer, of whatever kind its layers are."""
    follows = algorithm == "patch_gemm"
    return kernel if follows else 1, 0 if follows else padding, 1, channels if algorithm == "depthwise" else 1


def integers(*shape: int, most: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers up to `most`, whose products are summed without rounding; always the same ones for a shape."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@st.composite
def conv2d_cases(draw: st.DrawFn) -> Case:
    """Calls with a non-empty output: any kernel, stride, padding, dilation, groups, rank and layout."""
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    if groups == 8:  # fill vectors of direct
        c = k = groups * draw(st.sampled_from([1, 2, 4]))
    else:
        c, k = (groups * draw(st.integers(1, 9)) for _ in range(2))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)) | st.just((3, 3)))
    usual = draw(st.booleans())  # stride and dilation of 1, so that Winograd takes part
    stride, dilation = (1, 1), (1, 1)
    if not usual:
        stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    size = [
        draw(st.integers(max(1, d * (r - 1) + 1 - 2 * p), max(1, d * (r - 1) + 1 - 2 * p) + 12))
        for r, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    batch = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    bias = draw(st.booleans())
    return conv(
        (*batch, c, *size),
        (k, c // groups, *kernel),
        stride,
        padding,
        dilation,
        groups,
        bias=bias,
        layouts=draw(st.tuples(_layouts, _layouts)),
    )


@st.composite
def linear_cases(draw: st.DrawFn) -> Case:
    """Any number of leading dimensions."""
    features, out = draw(st.integers(1, 150)), draw(st.integers(1, 80))
    rows = draw(st.lists(st.integers(1, 9), max_size=3))
    bias = (out,) if draw(st.booleans()) else None
    return Case(((*rows, features), (out, features), bias), (), draw(st.tuples(_layouts, _layouts)))


@st.composite
def pool2d_cases(draw: st.DrawFn, operation: str) -> Case:
    """Windows that fit."""
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.just([]) | st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.integers(1, 2)) if operation == "max_pool2d" else 1
    size = [draw(st.integers(dilation * (k - 1) + 1, 14)) for k in kernel]
    shape = (*draw(st.sampled_from([(), (1,), (2,)])), draw(st.integers(1, 20)), *size)
    ceil = draw(st.booleans())
    if operation == "max_pool2d":
        arguments = (kernel, tuple(stride), padding, dilation, ceil)
    else:
        divisor = draw(st.none() | st.integers(1, 7))
        arguments = (kernel, tuple(stride), padding, ceil, draw(st.booleans()), divisor)
    return Case((shape,), arguments, (draw(_layouts),))


@st.composite
def adaptive_cases(draw: st.DrawFn) -> Case:
    """Output sizes that divide the input or do not."""
    shape = (*draw(st.sampled_from([(), (1,), (2,)])), *(draw(st.integers(1, 20)) for _ in range(3)))
    return Case((shape,), (draw(st.tuples(st.integers(1, 9), st.integers(1, 9))),), (draw(_layouts),))


def shapes(least: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to four dimensions."""
    return st.lists(st.integers(1, 9), min_size=least, max_size=4).map(tuple)


@st.composite
def flatten_cases(draw: st.DrawFn) -> Case:
    """Any two dimensions in order."""
    shape = draw(shapes(1))
    start = draw(st.integers(0, len(shape) - 1))
    return Case((shape,), (start, draw(st.integers(start, len(shape) - 1))), (draw(_layouts),))


def _made_up(operation: str) -> st.SearchStrategy[Case]:
    """Sizes as in networks, but of few elements."""
    draw = st.randoms(use_true_random=False).map(lambda r: OPERATIONS[operation].made_up(cases.Draw(r)))
    return draw.filter(lambda case: all(math.prod(s) < 20_000 for s in case.shapes if s is not None))


# Of an operation without one of its own: `made_up` in its file.
STRATEGIES = {name: _made_up(name) for name in OPERATIONS} | {
    "conv2d": conv2d_cases(),
    "linear": linear_cases(),
    "max_pool2d": pool2d_cases("max_pool2d"),
    "avg_pool2d": pool2d_cases("avg_pool2d"),
    "adaptive_avg_pool2d": adaptive_cases(),
    "relu": st.builds(lambda s, layout: Case((s,), (), (layout,)), shapes(0), _layouts),
    "flatten": flatten_cases(),
}
