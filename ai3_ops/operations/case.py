"""What an operation says about its tests: calls that reach every branch, layers of networks, calls that no algorithm may accept.

The checks that run them are in `ai3_ops.checking`; nothing here lists algorithms.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

SIDES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 14, 16, 17, 19, 24, 28, 31, 32, 33, 48, 56, 64, 65, 96, 112, 128, 224)
CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 40, 48, 64, 65, 80, 96, 128, 160, 192, 256, 320, 512, 768, 1024)
BATCHES = (1, 1, 1, 2, 3, 4, 8, 16, 32)
STRANGE = ("channels_last", "transposed", "sliced", "expanded")  # layouts that are not contiguous
LARGEST, HUGE = 2**31 - 1, 2**62  # numbers that no kernel may be given
BadCall = tuple[str, list[Any], list[Any]]  # what is wrong, tensors, arguments


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: the shapes of its tensors (None: an absent one), its other arguments, and the tensors' layouts and dtypes.

    A tensor without a dtype of its own has the call's.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    arguments: tuple[Any, ...] = ()
    layouts: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # the call's dtypes that those fit; of any where it is empty

    def is_of(self, dtype: str) -> bool:
        """Whether it is a call in this dtype at all."""
        return not self.only or dtype in self.only

    def __str__(self) -> str:
        more = [f", {name} {' '.join(words)}" for name, words in (("layouts", self.layouts), ("dtypes", self.dtypes))]
        kept = (text for text, words in zip(more, (self.layouts, self.dtypes), strict=True) if words)
        return f"shapes {self.shapes}, arguments {self.arguments}{''.join(kept)}"


class Draw:
    """Sizes as they occur in networks, at random: an image's, and its layout."""

    def __init__(self, generator: random.Random) -> None:
        self.generator, self.pick = generator, generator.choice
        height = self.pick(SIDES)
        width = height if generator.random() < 0.7 else self.pick(SIDES)
        self.image = self.pick(BATCHES), self.pick(CHANNELS), height, width
        layout = self.pick(("contiguous", "channels_last"))
        self.layouts = () if layout == "contiguous" else (layout,)

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self.generator.random() < probability


def pair(value: int | Sequence[int]) -> str:
    """A window's size as lines of benchmarks/shapes have it: one number where both are equal."""
    a, b = (value, value) if isinstance(value, int) else value
    return str(a) if a == b else f"{a},{b}"


def image(x: Tensor) -> str:
    """The sizes of an image, for such a line."""
    n, c, h, w = x.shape
    return f"N={n} C={c} H={h} W={w}"


class Tested:
    """What an operation's class says of the tests and benchmarks of its algorithms."""

    aten: ClassVar[Callable[..., Tensor]]  # the function that it replaces
    cases: ClassVar[Sequence[Case]] = ()  # every branch of the methods, at the smallest sizes that reach it
    layers: ClassVar[Sequence[Case]] = ()  # of networks
    # What the output's rounding is: of sums of products (exact on integers), of means (also of the division), of sums by
    # weights that may be rounded to bfloat16 before, or there is none.
    rounding: ClassVar[str] = "none"
    statistics: ClassVar[tuple[int, ...]] = ()  # places of tensors that have no gradients, as running means
    signed_zeros: ClassVar[bool] = True  # of zeros come zeros of the same signs as ATen's

    def definition(self, algorithm: str) -> Callable[..., Tensor]:
        """What an algorithm computes, in PyTorch's functions: where it approximates, by its own definition."""
        return type(self).aten

    def magnitudes(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of a case's tensors, those of which the definition sums the magnitudes of the output's terms."""
        return [v.abs() if v is not None and v.is_floating_point() else v for v in values]

    def own_options(self, algorithm: str) -> dict[str, Any]:
        """Of an algorithm's own parameters those with which it is tested; True in the place of a tensor."""
        return {}

    def own_operands(self, algorithm: str, args: Sequence[Any]) -> dict[str, Any]:
        """The same for these arguments, with the tensors."""
        return self.own_options(algorithm)

    def backward_call(self, call: Any) -> list[Any] | None:
        """Arguments of the backward operator, its mask excepted, for a case of `cases.Call`; None for a case that has none."""
        grad, (x, w, *_) = call.grad(), call.tensors
        return [grad, x, w, *call.arranged(x, w, None)[3:]]

    def terms(self, case: Case) -> int:
        """How many products (or elements) one output sums, the bias included."""
        x = case.shapes[0]
        assert x is not None
        return math.prod(x[-2:])

    def made_up(self, draw: Draw) -> Case:
        """A call of any size that occurs in networks; it need not fit together."""
        return Case((draw.image,), (), draw.layouts)

    def line(self, y: Tensor, x: Tensor, *args: Any) -> str:
        """The line of benchmarks/shapes for a call, given its output and arguments; "" where benchmarks leave it out."""
        return ""

    def module_of(self, sizes: dict[str, Any]) -> nn.Module:
        """PyTorch's module for the sizes of such a line, with weights that keep the scale of their input."""
        raise ValueError(f"no layer has the sizes {sizes}")

    def input_of(self, sizes: dict[str, Any]) -> tuple[int, ...]:
        """The shape of its input."""
        return (sizes["count"],) if "count" in sizes else tuple(sizes[name] for name in "NCHW")

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """Calls that no algorithm may accept; `new(*shape, dtype=)` makes tensors, `other` is another dtype than its own."""
        yield from ()
