"""A file of tensors and one JSON document, laid out as safetensors files are, so that others can read it.

Eight bytes with the header's length, the header, the tensors one behind the other. The header is JSON: of each tensor its dtype,
sizes and place, and under "__metadata__" our document, as text. Spaces fill the header up so that tensors begin at whole cache
lines; those whose bytes fill whole lines, as packed weights do, come first. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LINE = 64  # bytes that the first tensor's place is a multiple of
MOST = 100 << 20  # bytes of a header, safetensors' own limit
KEY = "ai3_ops"  # of the document in the metadata
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def can_hold(tensor: Tensor) -> bool:
    """Whether a file can hold it: on the CPU, strided, of a type that such files have."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.dtype in _NAMES


def sealed(document: Any, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """The document with a checksum of each contiguous tensor, as text; and the text's own checksum."""
    checks = {name: zlib.crc32(_view(t)) for name, t in tensors.items()}
    text = json.dumps({"document": document, "checks": checks}, sort_keys=True, allow_nan=False)
    return text, str(zlib.crc32(text.encode()))


def opened(text: Any, check: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, Tensor]]:
    """The document and the tensors that were sealed; ValueError where any was altered, or is no longer on the CPU."""
    document, checks = _document(text, check)
    _check(tensors, checks)
    return document, tensors


def _document(text: Any, check: Any) -> tuple[Any, dict[str, int]]:
    """With the tensors' checksums."""
    if not isinstance(text, str) or str(zlib.crc32(text.encode())) != check:
        raise ValueError("its description was altered")
    content = json.loads(text)
    return content["document"], content["checks"]


def _check(tensors: Mapping[str, Tensor], checks: Mapping[str, int]) -> None:
    if tensors.keys() != checks.keys():
        raise ValueError("its list of tensors was altered")
    for name, t in tensors.items():
        if not can_hold(t):
            raise ValueError(f"its tensor {name!r} is on {t.device}, and programs run on the CPU")
        if zlib.crc32(_view(t.contiguous())) != checks[name]:
            raise ValueError(f"its tensor {name!r} was altered")


def write(path: Path, document: Any, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors and the document, beside `path` first: a reader sees the old file or the whole new one."""
    order = sorted(tensors, key=lambda name: (_bytes(tensors[name]) % LINE != 0, -tensors[name].element_size()))
    header: dict[str, Any] = {}
    place = 0
    for name in order:
        t = tensors[name]
        end = place + _bytes(t)
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [place, end]}
        place = end
    text, check = sealed(document, tensors)
    header["__metadata__"] = {KEY: text, "check": check}
    raw = json.dumps(header).encode()
    raw += b" " * (-(8 + len(raw)) % LINE)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for name in order:
                file.write(_view(tensors[name]))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The document and the tensors, which are views of the file in memory: processes that read one file share it.

    ValueError where the file is no such file, cut off or altered: each tensor and the document have a checksum.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MOST, size - 8) or (8 + length) % LINE:
            raise ValueError("it is no file of ai3_ops.save, or its beginning is missing")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        document, checks = _document(metadata[KEY], metadata["check"])
    except (KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"it is no file of ai3_ops.save, or it was altered ({type(error).__name__} in its header)"
        ) from None
    data = 8 + length
    bytes_of_file = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size > data else None
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = _TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            count = 1
            for extent in shape:
                count *= _whole(extent)
            begin, end = _whole(begin), _whole(end)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the description of its tensor {name!r} was altered") from None
        if end - begin != count * dtype.itemsize or begin % dtype.itemsize:
            raise ValueError(f"the description of its tensor {name!r} was altered")
        if data + end > size:
            raise ValueError(f"it is cut off: tensor {name!r} ends at byte {data + end}, the file at {size}")
        if count and bytes_of_file is not None:
            tensors[name] = bytes_of_file[data + begin : data + end].view(dtype).view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
    _check(tensors, checks)
    return document, tensors


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 48:
        raise ValueError(f"{number!r} is no size")
    return number


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return memoryview((ctypes.c_ubyte * _bytes(tensor)).from_address(tensor.data_ptr())).cast("B")
