"""Interfaces of PyTorch that are not public and that this package stands on; test_edges.py and ops/test_calls.py try each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_compiled(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`, which imports the compiler: what it returns is a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_kernels_of_its_own(tensor: Tensor) -> bool:
    """Whether a tensor's class computes operators itself (DTensor, quantized tensors), so that its data are not its values."""
    own = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return own and not isinstance(tensor, FakeTensor)


def has_constant_sizes(values: Iterable[Any]) -> bool:
    """Whether the tensors among the values have sizes that are constants of the graph that is being traced."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imported by then: it takes long

    return all(has_static_value(size) for value in values if isinstance(value, Tensor) for size in value.shape)
