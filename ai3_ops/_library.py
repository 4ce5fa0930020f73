"""Loads the native libraries and wraps their C interface (csrc/ops/dispatch/registry.cpp)."""

from __future__ import annotations

import ctypes
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_HERE = Path(__file__).resolve().parent
DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
VALUES = DTYPES | {torch.bool: 6}  # what a program reads: masks, too
DEVICES = {"cpu": 0, "cuda": 1}
_ERROR_SIZE = 4096


def _load(name: str) -> ctypes.CDLL:
    path = _HERE / f"{name}.so"
    if not path.exists():
        raise ImportError(
            f"ai3_ops: {path.name} is missing from {path.parent}: the package was not built (run `make build`)"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as cause:
        raise ImportError(f"ai3_ops: cannot load {path.name} with torch {torch.__version__}: {cause}") from cause
    return ctypes.CDLL(str(path))


C = _load("_C")
C.ai3_load_failure.restype = ctypes.c_char_p
if failure := C.ai3_load_failure().decode():
    raise ImportError(f"ai3_ops: {failure}")
BUILD: dict[str, Any] = json.loads((_HERE / "_build.json").read_text()) if (_HERE / "_build.json").exists() else {}
# The CUDA part is left alone beside a torch without CUDA or of another CUDA major version, as `doctor` then says.
if (
    (_HERE / "_C_cuda.so").exists()
    and torch.version.cuda
    and torch.version.cuda.split(".")[0] == BUILD["cuda"].split(".")[0]
):
    CUDA = _load("_C_cuda")
    CUDA.ai3_cuda_failure.restype = ctypes.c_char_p
    if failure := CUDA.ai3_cuda_failure().decode():
        raise ImportError(f"ai3_ops: {failure}")


class _Question(ctypes.Structure):  # ai3_question
    _fields_ = (
        ("device", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("allow_tf32", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("count", ctypes.c_int32),
        ("parameter_count", ctypes.c_int32),
        ("parameters", ctypes.POINTER(ctypes.c_int64)),
        ("exclude", ctypes.c_char_p),
    )


_QUERY = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Question))
_ERROR = (ctypes.c_char_p, ctypes.c_int64)
C.ai3_registry.argtypes = _ERROR
C.ai3_registry.restype = ctypes.c_char_p
C.ai3_supports.argtypes = (*_QUERY, *_ERROR)
C.ai3_resolve.argtypes = (*_QUERY, *_ERROR)
C.ai3_resolve.restype = ctypes.c_char_p
C.ai3_workspace.argtypes = (*_QUERY, *_ERROR)
C.ai3_workspace.restype = ctypes.c_int64
C.ai3_packed_bytes.argtypes = (*_QUERY, *_ERROR)
C.ai3_packed_bytes.restype = ctypes.c_int64
C.ai3_release_workspace.restype = ctypes.c_int64
C.ai3_slot_free.argtypes = (ctypes.c_int64,)
C.ai3_slot_free.restype = None
C.ai3_sample.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
C.ai3_sample.restype = ctypes.c_uint64
C.ai3_slot_bytes.argtypes = (ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_bool))
C.ai3_slot_bytes.restype = ctypes.c_int64
C.ai3_numbers_keep.argtypes = (ctypes.c_char_p, *_ERROR)
C.ai3_numbers_keep.restype = ctypes.c_int64
C.ai3_numbers_free.argtypes = (ctypes.c_int64,)
C.ai3_numbers_free.restype = None
C.ai3_register.argtypes = (ctypes.c_void_p, ctypes.c_int, *_ERROR)
C.ai3_set_default.argtypes = (ctypes.c_char_p, ctypes.c_char_p, *_ERROR)
C.ai3_program.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int, *_ERROR)
C.ai3_program.restype = ctypes.c_char_p
C.ai3_machine.argtypes = (
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_double),
    ctypes.POINTER(ctypes.c_double),
    *_ERROR,
)


def registry_text() -> bytes:
    """The registry as it is now, in JSON."""
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    if (text := C.ai3_registry(error, _ERROR_SIZE)) is None:
        raise RuntimeError(f"ai3: {error.value.decode()}")
    return text


def registry() -> dict[str, Any]:
    """The registry as it is now: instruction-set level, operations, their algorithms per device with all properties."""
    return _parsed(registry_text())


@functools.lru_cache(maxsize=1)  # it is asked for with every layer, and changes with registrations only
def _parsed(text: bytes) -> dict[str, Any]:
    return json.loads(text)


@functools.cache
def size_names(operation: str) -> tuple[str, ...]:
    """The names of a query's sizes, in order."""
    return tuple(registry()["operations"][operation]["sizes"].split())


class Sizes(NamedTuple):
    """A problem's sizes as the registry names them, in order (-1 is unknown), and what else belongs to a query."""

    numbers: Sequence[int]
    exclude: str = ""  # patterns of algorithms that a rule may not choose, between commas
    allow_tf32: bool = False
    parameters: Sequence[int] | None = None  # of the algorithm's own, as C++ keeps them; None: their defaults


def _query(operation: str, algorithm: str, device: str, dtype: torch.dtype, sizes: Sizes) -> tuple[Any, ...]:
    def array(numbers: Sequence[int] | None) -> Any:
        return numbers and (ctypes.c_int64 * len(numbers))(*numbers)

    kind, _, index = device.partition(":")
    question = _Question(
        DEVICES[kind], int(index or -1), DTYPES[dtype], sizes.allow_tf32, array(sizes.numbers), len(sizes.numbers),
        len(sizes.parameters or ()), array(sizes.parameters), sizes.exclude.encode(),
    )  # fmt: skip
    return operation.encode(), algorithm.encode(), ctypes.byref(question)


def supports(operation: str, algorithm: str, device: str, dtype: torch.dtype, sizes: Sizes) -> tuple[bool, str]:
    """Whether an algorithm can do a problem, and the reason when not."""
    if dtype not in DTYPES:
        return False, f"does not compute in {str(dtype).removeprefix('torch.')}"
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    ok = C.ai3_supports(*_query(operation, algorithm, device, dtype, sizes), error, _ERROR_SIZE)
    return bool(ok), error.value.decode()


def resolve(operation: str, algorithm: str, device: str, dtype: torch.dtype, sizes: Sizes) -> tuple[str, str]:
    """The algorithm that runs: `algorithm` itself, or what its rule (`default`, `winograd`, `guess`) chooses, and why."""
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    name = C.ai3_resolve(*_query(operation, algorithm, device, dtype, sizes), error, _ERROR_SIZE)
    if name is None:
        raise RuntimeError(f"ai3::{operation}_{algorithm}: {error.value.decode()}")
    return name.decode(), error.value.decode()


def _bytes(function: Any, operation: str, algorithm: str, *problem: Any) -> int:
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    size = function(*_query(operation, algorithm, *problem), error, _ERROR_SIZE)
    if size < 0:
        raise RuntimeError(f"ai3::{operation}_{algorithm}: {error.value.decode()}")
    return size


def workspace(operation: str, algorithm: str, device: str, dtype: torch.dtype, sizes: Sizes) -> int:
    """Bytes of workspace that a direct call allocates, packed weights included."""
    return _bytes(C.ai3_workspace, operation, algorithm, device, dtype, sizes)


def release_workspace() -> int:
    """Gives the memory that CPU kernels keep for their workspaces back to the system, and says how many bytes that was."""
    return C.ai3_release_workspace()


def fill_workspace(byte: int) -> None:
    """Fills the memory that CPU kernels keep for their workspaces, for tests of what reads it before writing it."""
    C.ai3_fill_workspace(byte)


def program(text: str, inputs: Sequence[tuple[Sequence[int], torch.dtype, int]]) -> dict[str, Any]:
    """How a program is carried out for inputs of these sizes, dtypes, and elements from pixel to pixel (0: NCHW)."""
    numbers = [n for shape, dtype, row in inputs for n in (VALUES[dtype], row, len(shape), *shape)]
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    if (record := C.ai3_program(text.encode(), array, len(numbers), error, _ERROR_SIZE)) is None:
        raise RuntimeError(error.value.decode())
    return json.loads(record)


class Packs(NamedTuple):
    """What a slot holds."""

    bytes: int
    made: int  # how many packs so far
    kept: bool  # False where the weight is another one in every call, so that each call packs


def packs(slot: int) -> Packs:
    """The packed weights that C++ keeps for a layer."""
    made, kept = ctypes.c_int64(), ctypes.c_bool()
    size = C.ai3_slot_bytes(slot, ctypes.byref(made), ctypes.byref(kept))
    return Packs(size, made.value, kept.value)


def keep_numbers(owner: object, text: str) -> int:
    """The integer by which operators for inference know a text of numbers while `owner` lives; RuntimeError for words."""
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    if not (number := C.ai3_numbers_keep(text.encode(), error, _ERROR_SIZE)):
        raise RuntimeError(f"ai3: {error.value.decode()}")
    weakref.finalize(owner, C.ai3_numbers_free, number).atexit = False
    return number


def sampler(memory: Sequence[tuple[int, int]]) -> Callable[[], int]:
    """A function that hashes a fixed sample of pieces of memory, given by their addresses and bytes."""
    count = len(memory)
    addresses = (ctypes.c_void_p * count)(*[address for address, _ in memory])
    sizes = (ctypes.c_int64 * count)(*[size for _, size in memory])
    return lambda: int(C.ai3_sample(addresses, sizes, count))


def machine(threads: int, again: bool = False) -> tuple[float, float]:
    """Measured float32 multiply-add peak (FLOP/s) and read bandwidth (bytes/s) of the level that runs, with `threads` threads."""
    flops, bandwidth, error = ctypes.c_double(), ctypes.c_double(), ctypes.create_string_buffer(_ERROR_SIZE)
    if not C.ai3_machine(threads, again, ctypes.byref(flops), ctypes.byref(bandwidth), error, _ERROR_SIZE):
        raise RuntimeError(f"ai3: {error.value.decode()}")
    return flops.value, bandwidth.value


def packed_bytes(operation: str, algorithm: str, device: str, dtype: torch.dtype, sizes: Sizes) -> int:
    """Bytes of the tensor that the algorithm's pack operator returns."""
    return _bytes(C.ai3_packed_bytes, operation, algorithm, device, dtype, sizes)
