"""Example inputs: copies that a run may write to, and made-up ones of other sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ai3_ops._torch import pytree, without_torch_functions


class Inputs(NamedTuple):
    """Example inputs of both kinds, where callers have them apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(example: Any) -> Inputs:
    """Positional and keyword arguments: a tuple has several of these, a mapping those, and anything else is one."""
    if isinstance(example, Inputs):
        return example
    if isinstance(example, Mapping):  # a dict, or what a tokenizer returns
        return Inputs((), dict(example))
    return Inputs(example if isinstance(example, tuple) else (example,), {})


def copied(example: Any) -> Any:
    """The same values in tensors (of the same strides), containers and objects of its own; what cannot be copied as it is."""
    memo: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = _copied_tensor(leaf)
            return memo[id(leaf)]
        if isinstance(leaf, (nn.Module, FunctionType, type)):
            return leaf
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:  # any, of anybody's class
            return leaf

    with without_torch_functions():  # who watches the run sees the model's calls alone
        return pytree.tree_map(one, example)


def renewed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The same tensors and objects in containers of their own, into which a model may write."""

    def one(leaf: Any) -> Any:  # a container that PyTorch does not know, as a UserDict
        return copy.copy(leaf) if isinstance(leaf, (Mapping, MutableSequence)) else leaf

    return Inputs(*pytree.tree_map(one, (args, kwargs)))


def _copied_tensor(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0
        if not plain or tensor.is_complex() or tensor.is_quantized or tensor.is_nested:
            made = tensor.detach().clone()
        else:  # also slices and expanded ones keep their strides
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            flat = tensor.detach().as_strided((extent,), (1,)).clone()
            made = flat.new_empty(0).set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())
    return made.requires_grad_(tensor.requires_grad)


# Other sizes ----------------------------------------------------------------------------------------------------------
_STEP, _LARGE = 64, 128  # images of at least _LARGE pixels grow by _STEP, which most networks' strides divide


def of_other_sizes(example: Any) -> Iterator[Any]:
    """Examples of another batch and another image size, of another batch, and of another image size.

    The batch is the first dimension of tensors, or the length of a list of images or dicts; images are tensors of four and more
    dimensions or, where there are none, of three. Values are the example's, repeated.
    """
    tensors = [
        leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]
    most = max((t.ndim for t in tensors), default=0)
    rank = 4 if most >= 4 else 3
    sides = {tuple(t.shape[-2:]) for t in tensors if t.ndim >= rank}
    grown = (lambda side: side + _STEP) if len(sides) == 1 and min(min(sides)) >= _LARGE else (lambda side: 2 * side)
    batches = any(t.ndim > 0 for t in tensors)
    for batch, image in ((True, True), (True, False), (False, True)):
        if (batch and not batches) or (image and not sides):
            continue
        yield _resized(example, batch, rank if image else None, grown)


def _resized(value: Any, batch: bool, rank: int | None, grown: Callable[[int], int]) -> Any:
    """`rank`: of the least tensors that are images; None: images keep their size."""

    def of(part: Any, batch: bool = batch) -> Any:
        return _resized(part, batch, rank, grown)

    if isinstance(value, Tensor) and value.layout == torch.strided:
        if batch and value.ndim > 0:
            value = cycled(value, 0, _other(value.shape[0]))
        if rank is not None and value.ndim >= rank:
            for dim in (-2, -1):
                value = cycled(value, dim, grown(value.shape[dim]))
        return value
    if isinstance(value, dict) and type(value) is dict:
        return {key: of(part) for key, part in value.items()}
    if type(value) is list:
        items = [part for part in value if isinstance(part, dict) or (isinstance(part, Tensor) and part.ndim <= 3)]
        if batch and items and len(items) == len(value):
            return [of(value[i % len(value)], batch=False) for i in range(_other(len(value)))]
        return [of(part) for part in value]
    if isinstance(value, tuple):
        parts = [of(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _other(size: int) -> int:
    return 0 if size == 0 else 3 if size == 2 else 2


def cycled(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A tensor of another size in one dimension, in which its values repeat."""
    before = tensor.shape[dim]
    return tensor if size == before else tensor.index_select(dim, torch.arange(size, device=tensor.device) % before)
