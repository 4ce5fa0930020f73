"""A program's constants: what each is made of, and all of them in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ai3_ops import _library
from ai3_ops.registry import operator_named

ALIGNED, SEAL = 64, 64  # bytes: of each constant's place, and after the last (csrc/ops/program/plan.h)


class Source(NamedTuple):
    """What one of a program's constants is made of: a tensor, and how an algorithm packs it."""

    given: Tensor  # kept while a program is built, so that its address stays its own
    pack: str = ""  # the operator that packs it; "": copied as it is
    window: tuple[Any, ...] = ()
    parameters: tuple[tuple[str, Any], ...] = ()  # of the algorithm's own
    chw: tuple[int, ...] | None = None  # of the image whose rows a linear's weight multiplies: columns in NHWC order

    def made(self, tensor: Tensor | None = None) -> Tensor:
        """The constant, of the tensor or of another one of its sizes."""
        tensor = self.given if tensor is None else tensor
        if self.chw is not None:
            tensor = tensor.unflatten(1, self.chw).permute(0, 2, 3, 1).flatten(1)
        tensor = tensor.contiguous()
        if not self.pack:
            return tensor
        pack = operator_named(self.pack)
        if pack is None:
            raise ValueError(f"there is no operator {self.pack}")
        return pack(tensor, *self.window, **dict(self.parameters))

    @property
    def bytes(self) -> int:
        """Of the constant."""
        return self.made(self.given.to("meta")).nbytes if self.pack else self.given.nbytes


def level() -> str:
    """The instruction set that weights are packed for here."""
    return str(_library.registry()["level"])


def joined(sources: Sequence[Source]) -> Tensor:
    """A program's constants in one tensor: a call that gets hundreds of tensors takes as long for them as for some layers.

    Each is packed where it stays, one after the other.
    """
    if not sources:  # an operator needs a tensor, to know the device
        return torch.zeros(64, dtype=torch.uint8)
    whole, place = torch.ops.ai3._program_constants(sources[0].given, [s.bytes for s in sources]), 0
    with torch.no_grad():
        for source in sources:
            place = torch.ops.ai3._program_put_constant_(whole, source.made(), place, bool(source.pack))
    return whole


def unpacked(sources: Sequence[Source]) -> Tensor:
    """As large as `joined`, without memory and contents."""
    return torch.empty(sum(-(-s.bytes // ALIGNED) * ALIGNED for s in sources) + SEAL, dtype=torch.uint8, device="meta")


class Constants:
    """A program's constants, one for each weight and way to pack it."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._known: dict[Any, int] = {}

    def _add(self, source: Source) -> int:
        given = source.given
        key = (given.data_ptr(), given.shape, given.stride(), given.dtype, *source[1:])
        if key not in self._known:
            self._known[key] = len(self.sources)
            self.sources.append(source)
        return self._known[key]

    def plain(self, tensor: Tensor) -> int:
        """The number of one that is copied as it is."""
        return self._add(Source(tensor))

    def weight(
        self,
        operator: str,
        tensor: Tensor,
        window: tuple[Any, ...],
        parameters: tuple[tuple[str, Any], ...],
        chw: tuple[int, ...] | None,
    ) -> int:
        """The number of a weight that is packed for `operator`, where this packs; the rest as in Source."""
        pack = f"_{operator}_pack"
        if operator_named(pack) is None:
            return self._add(Source(tensor, chw=chw))
        return self._add(Source(tensor, pack, window, parameters, chw))
