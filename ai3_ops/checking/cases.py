"""The calls that every algorithm must pass: the cases of each operation, their data, references and error bounds.

What is tested is read from the registry, and each operation's cases from its own file: nothing here lists algorithms. The
checks are in the files beside it. Those cases reach the branches of the methods that the project has; for one that does other
shapes, `Search` looks for those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ai3_ops import registry
from ai3_ops.calls.spec import PAIRS
from ai3_ops.operations.case import Case, Draw
from ai3_ops.operations.conv2d import conv as conv
from ai3_ops.problem import Problem
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


CASES: dict[str, list[Case]] = {name: [*rules.cases] for name, rules in OPERATIONS.items() if rules.cases}


# Data and references -------------------------------------------------------------------------------------------------
def tensors(case: Case, dtype: torch.dtype, device: str, fill: str = "normal", seed: int = 0) -> list[Tensor | None]:
    """The tensors of a call: "normal" (standard normal), "integers" (-2 … 2: products and sums do not round), "nothing"."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor | None] = []
    count, asked = len(case.shapes), dtype
    layouts = (*case.layouts, *["contiguous"] * (count - len(case.layouts)))
    dtypes = (*case.dtypes, *[""] * (count - len(case.dtypes)))
    for shape, layout, own in zip(case.shapes, layouts, dtypes, strict=True):
        if shape is None:
            made.append(None)
            continue
        dtype = getattr(torch, own) if own else asked
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
    """In float64, values unchanged; what is no number of the call's dtypes, such as a boolean mask, as it is."""
    return [v.double() if v is not None and v.is_floating_point() else v for v in values]


def reference(operation: str, case: Case, dtype: torch.dtype, fill: str, algorithm: str = "") -> tuple[Tensor, Tensor]:
    """ATen's answer in float64 on the CPU for the values as `dtype` holds them, and the sum of products' magnitudes.

    Of an algorithm with parameters of its own that it is tested with, that of its definition.
    """
    small = sum(math.prod(shape) for shape in case.shapes if shape is not None) < 100_000
    named = algorithm if OPERATIONS[operation].own_options(algorithm) else ""
    return (_cached_reference if small else _reference)(operation, case, dtype, fill, named)


def _reference(operation: str, case: Case, dtype: torch.dtype, fill: str, algorithm: str) -> tuple[Tensor, Tensor]:
    rules = OPERATIONS[operation]
    definition = rules.definition(algorithm)
    x = [None if v is None else v.contiguous() for v in widened(tensors(case, dtype, "cpu", fill))]
    given = (arranged(operation, t, case.arguments) for t in (x, rules.magnitudes(x)))
    exact, sums = (definition(*made, **rules.own_operands(algorithm, made)) for made in given)
    return exact, sums


_cached_reference = functools.lru_cache(maxsize=2048)(_reference)


def terms(operation: str, case: Case) -> int:
    """How many products (or elements) one output sums, the bias included."""
    return OPERATIONS[operation].terms(case)


def arranged(operation: str, tensors: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Tensors and other arguments of a call in the order of the operation's schema, as far as they are given."""
    kinds, made = {True: [*tensors], False: [*arguments]}, []
    for a in _parameters(operation):
        if not any(kinds.values()) or a.kwarg_only:
            break
        given = kinds["Tensor" in str(a.type)]
        made.append(given.pop(0) if given else a.default_value)
    return made


@functools.lru_cache(maxsize=64)
def _parameters(operation: str) -> list[Any]:
    """Those of an operation's schema, which all of its algorithms have."""
    return OPERATIONS[operation].schema.arguments


def allowed(info: AlgorithmInfo, k: int, dtype: torch.dtype, fill: str, exact: Tensor, magnitude: Tensor) -> Tensor:
    """The largest error allowed in sums of k terms, componentwise; `exact` in float64, `magnitude` those of the terms."""
    stored = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal  # one rounding of the result
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    largest = exact.abs().max() if exact.numel() else exact.new_zeros(())
    if info.accuracy == "exact":
        rounding = OPERATIONS[info.operation].rounding
        if rounding == "none" or (rounding == "products" and fill == "integers"):
            return torch.zeros_like(exact)
        k += rounding == "means"  # and the division
        gamma = k * unit / (1 - k * unit)
        reference_too = 2 if dtype == torch.float64 else 1
        return reference_too * gamma * magnitude + (0 if dtype == torch.float64 else stored)
    rounds_weights = OPERATIONS[info.operation].rounding == "weights" and (PAIRS or info.device == "cuda")
    if rounds_weights and dtype == torch.bfloat16:
        stored += torch.finfo(dtype).eps / 2 * magnitude
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
        schema, case = self.info.operator._schema.arguments, self.case
        names = {kind: [a.name for a in schema if ("Tensor" in str(a.type)) == kind] for kind in (True, False)}
        layouts, dtypes = ((*words, *[""] * len(case.shapes)) for words in (case.layouts, case.dtypes))
        tensors = [
            " ".join(filter(None, (n, str(shape), layout, dtype)))
            for n, shape, layout, dtype in zip(names[True], case.shapes, layouts, dtypes, strict=False)
        ]
        others = [f"{n}={value}" for n, value in zip(names[False], case.arguments, strict=False)]
        name = f"ai3::{self.info.operation}_{self.info.name}"
        return f"{name} on {self.info.device}, {self.dtype}, {self.fill} data, {', '.join([*tensors, *others])}"

    @property
    def tensors(self) -> list[Tensor | None]:
        """Fresh inputs."""
        return tensors(self.case, self.dtype, self.info.device, self.fill)

    def supported(self) -> bool:
        """As the registry says."""
        try:
            return _supported(self.info, _cached_problem(self.info.operation, self.case, self.dtype))
        except RuntimeError:  # the kernel does not fit
            return False

    @property
    def products(self) -> int:
        """How many multiplications (or, where there are none, elements) the direct method takes."""
        problem = _cached_problem(self.info.operation, self.case, self.dtype)
        return _products(self.info.operation, self.case, problem)

    def operator(self, *tensors: Tensor | None) -> Tensor:
        """The operator with the case's arguments."""
        return self.info.operator(*self.arranged(*tensors), **self.options(*tensors))

    def options(self, *tensors: Tensor | None) -> dict[str, Any]:
        """The algorithm's own parameters for these tensors."""
        made = arranged(self.info.operation, tensors, self.case.arguments)
        return OPERATIONS[self.info.operation].own_operands(self.info.name, made)

    def arranged(self, *tensors: Tensor | None) -> list[Any]:
        """The operator's arguments with these tensors."""
        return arranged(self.info.operation, tensors, operator_arguments(self.info, self.case.arguments))

    def aten(self, *tensors: Tensor | None) -> Tensor:
        """The function that the operation replaces, or what the algorithm is defined by, with the case's arguments."""
        made = arranged(self.info.operation, tensors, self.case.arguments)
        return OPERATIONS[self.info.operation].definition(self.info.name)(*made, **self.options(*tensors))

    def grad(self) -> Tensor:
        """Small integers of the output's sizes."""
        y = self.operator(*self.tensors)
        generator = torch.Generator(y.device).manual_seed(1)
        return torch.randint(-2, 3, y.shape, generator=generator, device=y.device).to(y)

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
            if count < _ENOUGH:
                for case in search(info, name).small[: _ENOUGH - count]:
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
    supported = 0
    small: list[Case] = []
    realistic: list[Case] = []
    left = PRODUCTS if dtype == "float32" or "float32" not in info.dtypes else OTHER_PRODUCTS
    drawn = _drawn(info.operation)
    for case, problem, products in drawn:
        if products == 0 or not _supported(info, problem._replace(dtype=DTYPES[dtype])):
            continue
        supported += 1
        elements = sum(math.prod(shape) for shape in case.shapes if shape is not None)
        if products <= _SMALL and elements <= _SMALL / 4:
            if len(small) < _ENOUGH and not case.layouts:
                small.append(case)
        elif products <= min(left, _LARGE) and elements <= _MOST_ELEMENTS and len(realistic) < MOST_REALISTIC:
            realistic.append(case)
            left -= products
    return Search(len(drawn), supported, tuple(small), tuple(realistic))


@functools.lru_cache(maxsize=64)  # most of a search's time, and the same for all algorithms and dtypes of an operation
def _drawn(operation: str) -> list[tuple[Case, Problem, int]]:
    """Layers of networks, then made-up shapes, as far as the kernel fits; with their problems in float32, and products."""
    rules, generator, found = OPERATIONS[operation], random.Random(0), []
    for i in range(_TRIED):
        case = rules.layers[i] if i < len(rules.layers) else rules.made_up(Draw(generator))
        try:
            problem = _problem(operation, case, torch.float32)
        except RuntimeError:
            continue
        found.append((case, problem, _products(operation, case, problem)))
    return found


def _products(operation: str, case: Case, problem: Problem) -> int:
    return math.prod(problem.shape) * terms(operation, case)


def _problem(operation: str, case: Case, dtype: torch.dtype) -> Problem:
    """RuntimeError for what does not fit."""
    meta = tensors(case, dtype, "meta", "nothing")
    return OPERATIONS[operation].problem("", *arranged(operation, meta, case.arguments))


_cached_problem = functools.lru_cache(maxsize=4096)(_problem)  # of cases, which each check of each algorithm asks for


def _supported(info: AlgorithmInfo, problem: Problem) -> bool:
    own = OPERATIONS[info.operation].own_options(info.name)
    sizes = problem.sizes | ({"parameters": own} if own else {})
    return registry.supports_problem(info.operation, info.name, problem._replace(device=info.device, sizes=sizes))[0]


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
    """Supported cases with some output, the smallest or largest, in one dtype.

    That is float64 where the algorithm has it, and this device supports a case of it.
    """
    some: list[Call] = []
    for chosen in [dtype] if dtype else sorted(info.dtypes, key="float64".__ne__):
        some = some or [
            c for c in calls(info, fill, (chosen,)) if all(0 not in s for s in c.case.shapes if s is not None)
        ]
    return sorted(some, key=lambda c: sum(math.prod(s) for s in c.case.shapes if s is not None), reverse=large)[:count]


def bad_calls(info: AlgorithmInfo) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Calls that no algorithm may accept: what is wrong, tensors, arguments."""
    dtype = DTYPES[info.dtypes[0]]
    other = torch.float32 if dtype != torch.float32 else torch.float64

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=info.device)

    yield from OPERATIONS[info.operation].bad_calls(new, other)
