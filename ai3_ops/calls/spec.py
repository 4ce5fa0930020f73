"""What is known of tensors without their values, and of a module's weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ai3_ops import _library, _torch

PAIRS: bool = _library.registry()["pair_products"]  # whether our kernels multiply pairs of bfloat16 in one instruction
TILES: bool = _library.registry()["processor_has_matrix_tiles"]  # Intel's AMX


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(value: Any) -> Any:
        """The Spec of a dense tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        dense = value.layout == torch.strided and not value.is_nested
        shape, stride = (tuple(value.shape), value.stride()) if dense else ((), ())
        return Spec(shape, stride, value.dtype, str(value.device))

    @staticmethod
    def tensor(value: Any) -> Any:
        """A meta tensor like the one that `value` describes; anything else as it is."""
        if not isinstance(value, Spec):
            return value
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


def unfit(tensor: Any) -> str:
    """Why the operators cannot read a tensor, "" where they can: the data of some subclasses are not their values."""
    if type(tensor) in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor):
        return ""
    kind = type(tensor).__name__
    return f"reads plain tensors, not {kind}, which computes by itself" if _torch.has_kernels_of_its_own(tensor) else ""


def weights_of(m: nn.Module) -> tuple[Any, Any]:
    """Weight and bias; from where they are kept, because nn.Module finds an attribute there only after it looked elsewhere."""
    parameters = m._parameters
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return m.weight, m.bias


@_torch.constant_when_compiled  # Dynamo would look into a cache's function, and warn
def fast_in(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes in these 16 bits here, through oneDNN, which multiplies pairs of them where the processor does."""
    mkldnn: Any = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(mkldnn._is_mkldnn_fp16_supported())


def leads_in(dtype: torch.dtype) -> bool:
    """Whether PyTorch's attention is not known to be slower in 16 bits: it is where our kernels multiply pairs, too.

    Where it alone does, ours widen; beside its matrix tiles nothing has been compared.
    """
    compared = dtype == torch.bfloat16 and PAIRS and not TILES
    return dtype.itemsize == 2 and not compared and fast_in(dtype)
