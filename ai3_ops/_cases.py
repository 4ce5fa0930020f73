"""The calls that every algorithm must pass: the cases of each operation, their data, references and error bounds.

What is tested is read from the registry: nothing here lists algorithms. The checks are in `_checks`. The cases listed here
reach the branches of the methods that the project has; for one that does other shapes, `Search` looks for those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops.registry import OPERATIONS, AlgorithmInfo

DTYPES = {name: getattr(torch, name) for name in registry.DTYPE_NAMES}
Layout = Callable[[Tensor], Tensor]


def _sliced(t: Tensor) -> Tensor:
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1] + 1) if t.ndim else t.new_zeros(3)
    return wide[..., 1::2].copy_(t) if t.ndim else wide[1].copy_(t)


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t.contiguous(),
    "sliced": _sliced,
    "expanded": lambda t: t[:1].expand(t.shape) if t.ndim else t,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: the shapes of its tensors (None: an absent one), the arguments after them, and the tensors' layouts."""

    shapes: tuple[tuple[int, ...] | None, ...]
    arguments: tuple[Any, ...] = ()
    layouts: tuple[str, ...] = ()

    def __str__(self) -> str:
        layouts = " ".join(self.layouts)
        return f"shapes {self.shapes}, arguments {self.arguments}" + (f", layouts {layouts}" if layouts else "")


def conv(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
    layouts: tuple[str, ...] = (),
) -> Case:
    """A conv2d call."""
    return Case((x, weight, (weight[0],) if bias else None), (stride, padding, dilation, groups), layouts)


# Every branch of the methods at the smallest sizes that reach it: tile edges, vector tails, groups, padding beyond the kernel.
CASES: dict[str, list[Case]] = {
    "conv2d": [
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1),
        conv((1, 3, 7, 7), (4, 3, 3, 3), bias=False),
        conv((2, 6, 8, 5), (4, 3, 3, 3), padding=(1, 0), groups=2),
        conv((1, 33, 14, 13), (17, 33, 3, 3), padding=1),
        conv((2, 16, 6, 6), (70, 16, 3, 3), padding=4),
        conv((4, 10, 9), (3, 4, 3, 3), padding=1),
        conv((0, 4, 6, 6), (2, 4, 3, 3)),
        conv((1, 1, 3, 3), (1, 1, 3, 3)),
        conv((2, 4, 9, 8), (8, 1, 3, 3), padding=1, groups=4),
        conv((1, 18, 9, 8), (18, 1, 5, 5), 2, 3, 2, 18),
        conv((2, 5, 12, 11), (7, 5, 5, 5), 2, 2),
        conv((1, 3, 9, 10), (4, 3, 3, 2), (2, 1), (0, 2), (1, 2)),
        conv((1, 4, 11, 11), (6, 2, 3, 3), 1, 3, 3, 2),
        conv((2, 19, 5, 7), (34, 19, 1, 1)),
        conv((2, 6, 7, 5), (9, 2, 1, 1), 2, 1, 1, 3),
        conv((1, 3, 23, 25), (5, 3, 11, 11), 4, 2),
        conv((1, 4, 5, 12), (3, 4, 1, 7), padding=(0, 3)),
        conv((1, 2, 7, 7), (3, 2, 7, 7)),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("channels_last", "contiguous")),
        conv((2, 17, 9, 8), (6, 17, 3, 3), padding=1, layouts=("channels_last", "channels_last")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), (1,), (1,), (1,), layouts=("transposed", "transposed")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("sliced", "sliced", "sliced")),
        conv((2, 4, 9, 8), (6, 4, 3, 3), padding=1, layouts=("expanded", "expanded", "expanded")),
        conv((2, 8, 8, 9), (12, 4, 3, 2), 2, 1, 1, 2, layouts=("channels_last", "sliced")),
        conv((1, 17, 6, 5), (17, 1, 3, 3), padding=4, groups=17, layouts=("channels_last",)),
        conv((1, 5, 9, 8), (5, 1, 7, 7), 2, 8, 1, 5, layouts=("channels_last",)),
        # Pixels a multiple of 4 KiB apart, which collide in the L1 cache (as linear's rows below); more channels than an edge
        # tile of the transform algorithms is padded with in place.
        conv((1, 2048, 3, 5), (5, 2048, 1, 1), layouts=("channels_last",)),
        conv((1, 2064, 4, 5), (3, 2064, 3, 3), padding=1, layouts=("channels_last",)),
    ],
    "linear": [
        Case(((3, 5), (4, 5), (4,))),
        Case(((5,), (4, 5), (4,))),
        Case(((2, 3, 4, 33), (17, 33), None)),
        Case(((1, 130), (70, 130), (70,))),
        Case(((37, 64), (33, 64), (33,))),
        Case(((0, 5), (4, 5), (4,))),
        Case(((15, 2048), (9, 2048), (9,))),
        Case(((2, 7), (7,), None)),
        Case(((2, 7), (3, 7), (1,))),
        Case(((3, 5), (4, 5), (4,)), layouts=("transposed", "transposed")),
        Case(((3, 2, 5), (4, 5), (4,)), layouts=("sliced", "sliced", "sliced")),
        Case(((3, 2, 5), (4, 5), (4,)), layouts=("expanded", "expanded", "expanded")),
    ],
    "max_pool2d": [
        Case(((2, 3, 9, 8),), (2,)),
        Case(((1, 17, 9, 11),), (3, 2, 1, 1, True)),
        Case(((3, 9, 8),), ((3, 2), (1, 2), (1, 0), (2, 1))),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), ((2,), (), (1,), (1,), True), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3, (2,)), ("transposed",)),
        Case(((2, 3, 9, 8),), (3, 1, 1), ("sliced",)),
        Case(((2, 3, 9, 8),), (2, 3), ("expanded",)),
    ],
    "avg_pool2d": [
        Case(((2, 3, 9, 8),), (2,)),
        Case(((1, 17, 9, 11),), (3, 2, 1, True, False)),
        Case(((3, 9, 8),), ((3, 2), (1, 2), (1, 0), True)),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), (3, 2, 1, False, True, 5)),
        Case(((2, 3, 9, 8),), ((2,), (), (1,), True), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3, (2,)), ("transposed",)),
        Case(((2, 3, 9, 8),), (3, 1, 1), ("sliced",)),
        Case(((2, 3, 9, 8),), (2, 3), ("expanded",)),
    ],
    "adaptive_avg_pool2d": [
        Case(((2, 3, 9, 8),), (1,)),
        Case(((1, 17, 9, 11),), ((4, 5),)),
        Case(((3, 5, 4),), ((7, 3),)),
        Case(((0, 3, 9, 8),), (2,)),
        Case(((2, 3, 9, 8),), (4,), ("channels_last",)),
        Case(((2, 3, 9, 8),), (3,), ("transposed",)),
        Case(((2, 3, 9, 8),), (3,), ("sliced",)),
        Case(((2, 3, 9, 8),), (3,), ("expanded",)),
    ],
    "relu": [
        *(Case((shape,)) for shape in ((), (5,), (0, 3), (2, 3, 9, 8), (131,))),
        *(Case(((2, 3, 9, 8),), layouts=(layout,)) for layout in list(LAYOUTS)[1:]),
    ],
    "flatten": [
        *(Case((shape,)) for shape in ((), (5,), (0, 3), (2, 3, 9, 8))),
        *(Case(((2, 3, 9, 8),), arguments) for arguments in ((1,), (1, 2), (-2, -1), (2, 2))),
        *(Case(((2, 3, 9, 8),), (1,), (layout,)) for layout in list(LAYOUTS)[1:]),
    ],
}


# Data and references -------------------------------------------------------------------------------------------------
def tensors(case: Case, dtype: torch.dtype, device: str, fill: str = "normal", seed: int = 0) -> list[Tensor | None]:
    """The tensors of a call: "normal" (standard normal), "integers" (-2 … 2: products and sums do not round), "nothing"."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor | None] = []
    layouts = (*case.layouts, *["contiguous"] * (len(case.shapes) - len(case.layouts)))
    for shape, layout in zip(case.shapes, layouts, strict=True):
        if shape is None:
            made.append(None)
            continue
        if fill == "nothing":
            made.append(LAYOUTS[layout](torch.empty(shape, dtype=dtype, device=device)))
            continue
        if fill == "integers":
            values = torch.randint(-2, 3, shape, generator=generator).double()
        else:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
        made.append(LAYOUTS[layout](values.to(device, dtype)))
    return made


def widened(values: list[Tensor | None]) -> list[Tensor | None]:
    """In float64, values unchanged."""
    return [None if v is None else v.double() for v in values]


def reference(operation: str, case: Case, dtype: torch.dtype, fill: str) -> tuple[Tensor, Tensor]:
    """ATen's answer in float64 on the CPU for the values as `dtype` holds them, and the sum of products' magnitudes."""
    small = sum(math.prod(shape) for shape in case.shapes if shape is not None) < 100_000
    return (_kept_reference if small else _reference)(operation, case, dtype, fill)


def _reference(operation: str, case: Case, dtype: torch.dtype, fill: str) -> tuple[Tensor, Tensor]:
    rules = OPERATIONS[operation]
    x = [None if v is None else v.contiguous() for v in widened(tensors(case, dtype, "cpu", fill))]
    magnitude = [None if v is None else v.abs() for v in x]
    return rules.aten(*x, *case.arguments), rules.aten(*magnitude, *case.arguments)


_kept_reference = functools.lru_cache(maxsize=512)(_reference)


def terms(operation: str, case: Case) -> int:
    """How many products (or elements) one output sums, the bias included."""
    if operation in ("conv2d", "linear"):
        weight = case.shapes[1]
        assert weight is not None
        return math.prod(weight[1:] if len(weight) > 1 else weight) + (case.shapes[2] is not None)
    x = case.shapes[0]
    assert x is not None
    return math.prod(x[-2:])


def allowed(info: AlgorithmInfo, k: int, dtype: torch.dtype, fill: str, exact: Tensor, magnitude: Tensor) -> Tensor:
    """The largest error allowed in sums of k terms, componentwise; `exact` in float64, `magnitude` those of the terms."""
    stored = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal  # one rounding of the result
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    largest = exact.abs().max() if exact.numel() else exact.new_zeros(())
    if info.accuracy == "exact":
        if info.operation in ("max_pool2d", "relu", "flatten"):
            return torch.zeros_like(exact)
        if info.operation in ("conv2d", "linear"):
            if fill == "integers":
                return torch.zeros_like(exact)
            gamma = k * unit / (1 - k * unit)
        else:
            gamma = (k + 1) * unit / (1 - (k + 1) * unit)  # and the division
        reference_too = 2 if dtype == torch.float64 else 1
        return reference_too * gamma * magnitude + (0 if dtype == torch.float64 else stored)
    bound = info.error_bound or 2e-2
    if dtype == torch.float64 and info.accuracy == "bounded":
        bound *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    if info.accuracy == "approximate":  # two operands of 8 bits: all that can be said where all outputs cancel
        return torch.maximum(bound * largest, 2.0**-8 * magnitude) + stored
    return bound * largest + stored


@dataclasses.dataclass(frozen=True)
class Call:
    """A case of an algorithm on one dtype, ready to run."""

    info: AlgorithmInfo
    case: Case
    dtype: torch.dtype
    fill: str = "normal"

    def __str__(self) -> str:
        names, case = [a.name for a in self.info.operator._schema.arguments], self.case
        layouts = (*case.layouts, *[""] * len(case.shapes))
        tensors = [
            f"{n} {shape} {layout}".rstrip() for n, shape, layout in zip(names, case.shapes, layouts, strict=False)
        ]
        others = [f"{n}={value}" for n, value in zip(names[len(tensors) :], case.arguments, strict=False)]
        name = f"ai3::{self.info.operation}_{self.info.name}"
        return f"{name} on {self.info.device}, {self.dtype}, {self.fill} data, {', '.join([*tensors, *others])}"

    @property
    def tensors(self) -> list[Tensor | None]:
        """Fresh inputs."""
        return tensors(self.case, self.dtype, self.info.device, self.fill)

    def supported(self) -> bool:
        """As the registry says."""
        rules = OPERATIONS[self.info.operation]
        meta = tensors(self.case, self.dtype, "meta", "nothing")
        try:
            problem = rules.problem("", *meta, *self.case.arguments)
        except RuntimeError:
            return False
        return registry.supports_problem(
            self.info.operation, self.info.name, problem._replace(device=self.info.device)
        )[0]

    @property
    def products(self) -> int:
        """How many multiplications (or, where there are none, elements) the direct method takes."""
        shape = OPERATIONS[self.info.operation].problem("", *_meta(self.case), *self.case.arguments).shape
        return math.prod(shape) * terms(self.info.operation, self.case)

    def operator(self, *tensors: Tensor | None) -> Tensor:
        """The operator with the case's arguments."""
        return self.info.operator(*tensors, *operator_arguments(self.info, self.case.arguments))

    def run(self) -> Tensor:
        """The output; the inputs must be as before, and the output must be memory of its own."""
        inputs = self.tensors
        before = [None if t is None else t.clone() for t in inputs]
        output = self.operator(*inputs)
        for t, old in zip(inputs, before, strict=True):
            if t is not None and old is not None:
                require(same_bits(t, old), f"{self}: an input was modified")
                require(
                    output.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not output.numel(),
                    f"{self}: the output shares memory with an input",
                )
        return output


def operator_arguments(info: AlgorithmInfo, arguments: tuple[Any, ...]) -> list[Any]:
    """As the schema's `int[2]` wants them: the OpOverload takes lists only."""
    schema = info.operator._schema.arguments
    wants_list = ["List" in str(a.type) for a in schema if "Tensor" not in str(a.type)]
    made = zip(arguments, wants_list, strict=False)
    return [([v] if isinstance(v, int) else list(v)) if wanted else v for v, wanted in made]


def require(condition: bool, message: str) -> None:
    """Like `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def close(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    """Within `limit` of the largest magnitude expected."""
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit * scale, msg=lambda text: f"{what}: {text}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values in the same places, the zeros' signs too; any NaN is like any other."""
    if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        return False
    return not a.is_floating_point() or bool(((a.signbit() == b.signbit()) | a.isnan()).all())


def calls(info: AlgorithmInfo, fill: str = "normal", dtypes: tuple[str, ...] | None = None) -> Iterator[Call]:
    """All cases of an algorithm that it supports, in its dtypes; where they are few, also small shapes that it does support."""
    for name in dtypes or info.dtypes:
        if name in info.dtypes:
            count = 0
            for case in CASES[info.operation]:
                call = Call(info, case, DTYPES[name], fill)
                if call.supported():
                    count += 1
                    yield call
            for case in search(info, name).small[: max(0, _ENOUGH - count)]:
                yield Call(info, case, DTYPES[name], fill)


# Shapes that an algorithm supports -----------------------------------------------------------------------------------
_ENOUGH = 8  # small cases
_TRIED = 2000
_SMALL, _LARGE, _MOST_ELEMENTS = 100_000, 125_000_000, 2_500_000  # products of a call, and elements of its tensors
MOST_REALISTIC = 80
PRODUCTS, OTHER_PRODUCTS = (
    1_500_000_000,
    250_000_000,
)  # of all realistic calls in float32 (or where that is none), in others


@dataclasses.dataclass(frozen=True)
class Search:
    """What was found of an algorithm in one dtype: how many shapes were tried and supported, small ones, realistic ones."""

    tried: int
    supported: int
    small: tuple[Case, ...]
    realistic: tuple[Case, ...]  # layers of networks first, then made-up shapes of their sizes


def search(info: AlgorithmInfo, dtype: str) -> Search:
    """Shapes that the algorithm's own `supports` accepts; the same ones every time."""
    return _search(info, dtype, registry.generation())


@functools.lru_cache(maxsize=256)
def _search(info: AlgorithmInfo, dtype: str, generation: int) -> Search:
    generator = random.Random(0)
    layers = _LAYERS.get(info.operation, [])
    tried = supported = 0
    small: list[Case] = []
    realistic: list[Case] = []
    left = PRODUCTS if dtype == "float32" or "float32" not in info.dtypes else OTHER_PRODUCTS
    for i in range(_TRIED):
        case = layers[i] if i < len(layers) else _made_up(info.operation, generator)
        call = Call(info, case, DTYPES[dtype])
        try:
            products = call.products
        except RuntimeError:  # the kernel does not fit
            continue
        tried += 1
        if products == 0 or not call.supported():
            continue
        supported += 1
        elements = sum(math.prod(shape) for shape in case.shapes if shape is not None)
        if products <= _SMALL and elements <= _SMALL / 4:
            if len(small) < _ENOUGH and not case.layouts:
                small.append(case)
        elif products <= min(left, _LARGE) and elements <= _MOST_ELEMENTS and len(realistic) < MOST_REALISTIC:
            realistic.append(case)
            left -= products
    return Search(tried, supported, tuple(small), tuple(realistic))


def _meta(case: Case) -> list[Tensor | None]:
    return tensors(case, torch.float32, "meta", "nothing")


# Layers of ResNet18, GoogLeNet, MobileNetV3, EfficientNet, AlexNet, InceptionV3, FCN, ConvNeXt, Swin and ViT.
_LAYERS: dict[str, list[Case]] = {
    "conv2d": [
        conv((1, 64, 56, 56), (64, 64, 3, 3), padding=1, bias=False),
        conv((1, 192, 28, 28), (64, 192, 1, 1), layouts=("channels_last", "channels_last")),
        conv((1, 16, 112, 112), (16, 1, 3, 3), 2, 1, groups=16),
        conv((1, 256, 14, 14), (256, 256, 3, 3), padding=1, layouts=("channels_last", "channels_last")),
        conv((1, 512, 7, 7), (512, 512, 3, 3), padding=1, bias=False),
        conv((2, 3, 112, 112), (64, 3, 7, 7), 2, 3, bias=False),
        conv((1, 64, 56, 56), (128, 64, 1, 1), 2, bias=False),
        conv((1, 160, 7, 7), (960, 160, 1, 1)),
        conv((1, 240, 28, 28), (240, 1, 5, 5), 2, 2, groups=240, layouts=("channels_last",)),
        conv((1, 96, 56, 56), (96, 1, 7, 7), padding=3, groups=96),
        conv((1, 64, 27, 27), (192, 64, 5, 5), padding=2, layouts=("channels_last",)),
        conv((1, 3, 224, 224), (64, 3, 11, 11), 4, 2),
        conv((1, 192, 17, 17), (192, 192, 1, 7), padding=(0, 3), bias=False),
        conv((1, 128, 17, 17), (128, 128, 7, 1), padding=(3, 0), bias=False),
        conv((1, 64, 28, 28), (64, 64, 3, 3), 1, 2, 2),
        conv((1, 3, 224, 224), (96, 3, 4, 4), 4),
        conv((1, 96, 56, 56), (192, 96, 2, 2), 2),
        conv((1, 3, 224, 224), (192, 3, 16, 16), 16),
        conv((8, 64, 16, 16), (32, 64, 3, 3), padding=1),
        conv((1, 128, 28, 28), (128, 4, 3, 3), padding=1, groups=32, bias=False),
    ],
    "linear": [
        Case(((1, 512), (1000, 512), (1000,))),
        Case(((197, 768), (768, 768), (768,))),
        Case(((1, 4096), (4096, 4096), (4096,))),
        Case(((64, 49, 96), (288, 96), (288,))),
        Case(((8, 1280), (1000, 1280), (1000,))),
        Case(((16, 384), (1536, 384), None)),
    ],
    "max_pool2d": [Case(((1, 64, 112, 112),), (3, 2, 1)), Case(((8, 192, 28, 28),), (3, 1, 1), ("channels_last",))],
    "avg_pool2d": [Case(((1, 128, 56, 56),), (2, 2)), Case(((8, 192, 17, 17),), (3, 1, 1), ("channels_last",))],
    "adaptive_avg_pool2d": [Case(((8, 512, 7, 7),), (1,)), Case(((1, 256, 13, 13),), (6,), ("channels_last",))],
    "relu": [Case(((1, 64, 112, 112),)), Case(((8, 256, 28, 28),), (), ("channels_last",))],
    "flatten": [Case(((8, 512, 7, 7),), (1,)), Case(((8, 512, 7, 7),), (1,), ("channels_last",))],
}
_SIDES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 14, 16, 17, 19, 24, 28, 31, 32, 33, 48, 56, 64, 65, 96, 112, 128, 224)
_CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 40, 48, 64, 65, 80, 96, 128, 160, 192, 256, 320, 512, 768, 1024)
_KERNELS = (
    *[(1, 1)] * 4,
    *[(3, 3)] * 4,
    *((5, 5), (7, 7), (2, 2), (4, 4), (11, 11), (1, 3), (3, 1), (1, 7), (7, 1), (3, 2), (6, 6)),
)
_BATCHES = (1, 1, 1, 2, 3, 4, 8, 16, 32)


def _made_up(operation: str, generator: random.Random) -> Case:
    """A call of any size that occurs in networks; its kernel may not fit."""
    pick = generator.choice
    height = pick(_SIDES)
    width = height if generator.random() < 0.7 else pick(_SIDES)
    image = (pick(_BATCHES), pick(_CHANNELS), height, width)
    layout = pick(("contiguous", "channels_last"))
    layouts = () if layout == "contiguous" else (layout,)
    match operation:
        case "conv2d":
            kernel = pick(_KERNELS)
            stride, dilation = pick((1, 1, 1, 1, 1, 2, 2, 4, kernel[0])), pick((1, 1, 1, 1, 1, 2, 3))
            same = tuple(dilation * (k - 1) // 2 for k in kernel)
            padding = pick((0, same, same, tuple(k - 1 for k in kernel), (1, 2)))
            channels, filters, groups = pick(_CHANNELS), pick(_CHANNELS), pick((1, 1, 1, 1, 2, 4, 8, 32, 0))
            if groups == 0:  # depthwise
                groups, filters = channels, channels * pick((1, 1, 2))
            else:
                channels, filters = channels * groups, filters * groups
            x = (image[0], channels, height, width)
            bias = generator.random() < 0.5
            return conv(x, (filters, channels // groups, *kernel), stride, padding, dilation, groups, bias, layouts * 2)
        case "linear":
            features, out = pick(_CHANNELS) * pick((1, 1, 3, 4)), pick(_CHANNELS) * pick((1, 1, 3, 4))
            rows = pick(((), (1,), (2,), (7,), (16,), (37,), (64,), (197,), (2, 50), (3136,)))
            return Case(((*rows, features), (out, features), (out,) if generator.random() < 0.5 else None))
        case "max_pool2d" | "avg_pool2d":
            return Case((image,), (pick((2, 3, (2, 3), 5)), pick((1, 2, 3)), pick((0, 1))), layouts)
        case "adaptive_avg_pool2d":
            return Case((image,), (pick((1, 2, 6, 7, (3, 5))),), layouts)
        case "flatten":
            return Case((image,), (pick((0, 1, 2)),), layouts)
        case _:
            return Case((image,), (), layouts)


@dataclasses.dataclass
class Tally:
    """What one check did: in how many cases it passed, and how many it left out, by reason."""

    passed: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)

    def skip(self, reason: str, count: int = 1) -> None:
        """`count` cases were left out."""
        if count:
            self.skipped[reason] += count


def few_calls(
    info: AlgorithmInfo, count: int, dtype: str | None = None, *, large: bool = False, fill: str = "normal"
) -> list[Call]:
    """Supported cases with some output, the smallest or largest, in one dtype (float64 where the algorithm has it)."""
    chosen = dtype or ("float64" if "float64" in info.dtypes else info.dtypes[0])
    some = [c for c in calls(info, fill, (chosen,)) if all(0 not in s for s in c.case.shapes if s is not None)]
    return sorted(some, key=lambda c: sum(math.prod(s) for s in c.case.shapes if s is not None), reverse=large)[:count]


def bad_calls(info: AlgorithmInfo) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Calls that no algorithm may accept: what is wrong, tensors, arguments."""
    dtype = DTYPES[info.dtypes[0]]
    other = torch.float32 if dtype != torch.float32 else torch.float64
    largest, huge = 2**31 - 1, 2**62

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=info.device)

    if info.operation == "conv2d":
        x, w, b = new(1, 4, 6, 6), new(6, 4, 3, 3), new(6)
        yield "too many input channels", [new(1, 5, 6, 6), w, b], []
        yield "too few input channels", [new(1, 3, 6, 6), w, b], []
        yield "input of rank 2", [new(6, 6), w, b], []
        yield "input of rank 5", [new(1, 1, 4, 6, 6), w, b], []
        yield "weight of rank 3", [x, new(6, 4, 3), b], []
        yield "weight of another dtype", [x, new(6, 4, 3, 3, dtype=other), None], []
        yield "bias of another dtype", [x, w, new(6, dtype=other)], []
        yield "bias of wrong size", [x, w, new(5)], []
        yield "bias of rank 2", [x, w, new(6, 1)], []
        yield "integer tensors", [x.int(), w.int(), None], []
        yield "kernel larger than the padded input", [x, new(6, 4, 7, 7), b], []
        yield "empty kernel", [x, new(6, 4, 0, 3), b], []
        yield "no output channels", [x, new(0, 4, 3, 3), None], []
        yield "stride 0", [x, w, b], [[0]]
        yield "negative stride", [x, w, b], [[1, -1]]
        yield "stride of 3 elements", [x, w, b], [[1, 1, 1]]
        yield "negative padding", [x, w, b], [[1], [-1]]
        yield "dilation 0", [x, w, b], [[1], [0], [0]]
        yield "dilation beyond 32 bits", [x, w, b], [[1], [0], [huge]]
        yield "large dilation", [x, w, b], [[1], [0], [largest]]
        yield "padding beyond 64 bits", [x, w, b], [[1], [huge]]
        yield "an output too large to exist", [x, w, b], [[1], [largest]]
        yield "groups 0", [x, w, b], [[1], [0], [1], 0]
        yield "negative groups", [x, w, b], [[1], [0], [1], -1]
        yield "groups that do not divide", [x, new(6, 1, 3, 3), b], [[1], [0], [1], 4]
        yield "groups beyond 32 bits", [x, w, b], [[1], [0], [1], huge]
    elif info.operation == "linear":
        x, w, b = new(3, 5), new(4, 5), new(4)
        yield "other number of features", [new(3, 6), w, b], []
        yield "input without dimensions", [new(), w, b], []
        yield "weight of rank 3", [x, new(1, 4, 5), b], []
        yield "weight of another dtype", [x, new(4, 5, dtype=other), None], []
        yield "bias of wrong size", [x, w, new(5)], []
        yield "bias of another dtype", [x, w, new(4, dtype=other)], []
        yield "integer tensors", [x.int(), w.int(), None], []
    elif info.operation in ("max_pool2d", "avg_pool2d"):
        x = new(1, 3, 6, 6)
        yield "input of rank 2", [new(6, 6)], [[2]]
        yield "input of rank 5", [new(1, 1, 3, 6, 6)], [[2]]
        yield "integer input", [x.int()], [[2]]
        yield "kernel_size 0", [x], [[0]]
        yield "negative kernel_size", [x], [[-2]]
        yield "kernel_size of 3 elements", [x], [[2, 2, 2]]
        yield "no kernel_size", [x], [[]]
        yield "kernel larger than the input", [x], [[7]]
        yield "kernel beyond 64 bits", [x], [[huge]]
        yield "stride 0", [x], [[2], [0]]
        yield "negative padding", [x], [[2], [2], [-1]]
        yield "padding above half the kernel", [x], [[2], [2], [2]]
        if info.operation == "max_pool2d":
            yield "dilation 0", [x], [[2], [2], [0], [0]]
            yield "dilation beyond 64 bits", [x], [[2], [2], [0], [huge]]
        else:
            yield "divisor 0", [x], [[2], [2], [0], False, True, 0]
    elif info.operation == "adaptive_avg_pool2d":
        x = new(1, 3, 6, 6)
        yield "input of rank 2", [new(6, 6)], [[2]]
        yield "integer input", [x.int()], [[2]]
        yield "negative output_size", [x], [[-1]]
        yield "output_size of 3 elements", [x], [[1, 1, 1]]
        yield "output too large to exist", [x], [[largest]]
    elif info.operation == "relu":
        yield "integer input", [new(3).int()], []
    elif info.operation == "flatten":
        yield "integer input", [new(3).int()], []
        yield "start_dim out of range", [new(2, 3)], [2]
        yield "end_dim out of range", [new(2, 3)], [0, -3]
        yield "start_dim after end_dim", [new(2, 3)], [1, 0]
