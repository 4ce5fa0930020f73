"""A user's own algorithm: a C++ header that is compiled on first use, or a Python callable."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from ai3_ops import _flags, _library, operations, registry
from ai3_ops._directories import cache_directory
from ai3_ops._torch import OpOverloadPacket

_INCLUDE = Path(__file__).resolve().parent.parent / "include"
_SHOWN_LINES = 24  # of a compiler's messages
_BUILT_IN = frozenset((a.operation, a.name) for a in registry.registered())
_lock = threading.RLock()
_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])

# Passes on the ELF section that AI3_ALGORITHM writes to. Weak: a header without the macro has no such section.
_UNIT = """\
{problems}
#include "{header}"
extern "C" {{
[[gnu::weak, gnu::visibility("hidden")]] extern const ai3::AlgorithmInfo* const __start_ai3_algorithms[];
[[gnu::weak, gnu::visibility("hidden")]] extern const ai3::AlgorithmInfo* const __stop_ai3_algorithms[];
[[gnu::visibility("default")]] const ai3::AlgorithmInfo* const* ai3_records() {{ return __start_ai3_algorithms; }}
[[gnu::visibility("default")]] int64_t ai3_record_count() {{ return __stop_ai3_algorithms - __start_ai3_algorithms; }}
}}
"""


class _Info(ctypes.Structure):  # ai3::AlgorithmInfo
    _fields_ = (
        ("abi", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("operation", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("level", ctypes.c_char_p),
    )


@overload
def register(
    operation: str,
    name: str,
    source: str | os.PathLike[str] | Callable[..., torch.Tensor],
    *,
    default: bool = False,
    replace: bool = False,
    exact: bool = True,
    deterministic: bool = True,
) -> OpOverloadPacket: ...


@overload
def register(
    operation: str,
    name: str,
    *,
    default: bool = False,
    replace: bool = False,
    exact: bool = True,
    deterministic: bool = True,
) -> Callable[[_Function], _Function]: ...


def register(
    operation: str,
    name: str,
    source: str | os.PathLike[str] | Callable[..., torch.Tensor] | None = None,
    *,
    default: bool = False,
    replace: bool = False,
    exact: bool = True,
    deterministic: bool = True,
) -> Any:
    """Makes `ai3::<operation>_<name>` of a C++ header or a Python callable, selectable wherever built-in ones are.

    Args:
        operation: what it computes, such as `"conv2d"`.
        name: what it is called; letters, digits and underscores, not `auto` or `torch`, which mean something in selectors.
        source: the path of a header that holds one function template `<operation>_<name>` and
            `AI3_ALGORITHM(<operation>, <name>)`, see docs/your-own-algorithm.md. It is compiled for this machine's
            instruction set and cached; only a header named here is ever built. Or a callable that takes the operator's
            tensors and arguments in the order of its schema. Without it, `register` is a decorator for such a callable.
        default: of a header: the operation's `default` runs it wherever it supports the case.
        replace: takes the place of one that was registered under that name, a header of a header and a callable of a
            callable, also in models that are swapped already. The names of built-in algorithms stay theirs.
        exact: of a callable: rounds only as a sum of products does. A header says it in its macro (`.accuracy`).
        deterministic: of a callable: bitwise the same result every time. A header says it in its macro.

    Returns:
        The operator `torch.ops.ai3.<operation>_<name>`; as a decorator, the callable.

    Raises:
        ValueError: unknown operation, a name that is taken or no identifier.
        TypeError: the callable does not take the operator's arguments.
        FileNotFoundError: no such header.
        RuntimeError: the header does not compile (with the compiler's messages) or registers something else.
    """
    if source is None:

        def decorator(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            register(
                operation, name, function, default=default, replace=replace, exact=exact, deterministic=deterministic
            )
            return function

        return decorator
    with _lock:
        _check_name(operation, name, replace, callable(source))
        if callable(source):
            _check_signature(operation, name, source)
            if default:
                raise ValueError("ai3_ops.register: `default` runs without Python; only a header can be what it runs")
            registry.add_python_algorithm(
                operation, name, source, replace=replace, exact=exact, deterministic=deterministic
            )
        else:
            if not isinstance(source, (str, os.PathLike)):
                raise TypeError(f"ai3_ops.register needs a header's path or a callable, got {source!r}")
            if not (exact and deterministic):
                raise ValueError(
                    "ai3_ops.register: a header says in its macro what it is, as in AI3_ALGORITHM"
                    f"({operation}, {name}, .accuracy = ai3::Accuracy::approximate, .deterministic = false)"
                )
            library = _build(operation, name, Path(source))
            _add(operation, name, library, Path(source), replace)
            registry.digests[operation, name] = library.parent.name
        if default:
            set_default(operation, name)
    return getattr(torch.ops.ai3, f"{operation}_{name}")


def set_default(operation: str, name: str | None) -> None:
    """Makes `name` what the operation's `default` runs wherever it supports the case; `None` goes back to the rules."""
    error = ctypes.create_string_buffer(4096)
    if not _library.C.ai3_set_default(operation.encode(), (name or "").encode(), error, len(error)):
        raise RuntimeError(error.value.decode())
    registry.preferred[operation] = name
    registry.changed()


def _check_name(operation: str, name: str, replace: bool, python: bool) -> None:
    if operation not in registry.operations():
        raise ValueError(f"ai3_ops.register: no operation {operation!r}; there are: {', '.join(registry.operations())}")
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(
            f"ai3_ops.register: {name!r} cannot name an algorithm: letters, digits and underscores only, no digit first"
        )
    if name in ("auto", "torch"):
        raise ValueError(
            f"ai3_ops.register: {name!r} cannot name an algorithm: selectors give the word a meaning of its own"
        )
    taken = next((a for a in registry.registered() if (a.operation, a.name) == (operation, name)), None)
    if taken is None:
        return
    why = ""
    if (operation, name) in _BUILT_IN:
        why = ", which is built in; choose another name"
    elif not replace:
        why = "; replace=True puts this one in its place"
    elif taken.python != python:
        kinds = ("a Python callable", "a header") if taken.python else ("a header", "a Python callable")
        why = f", {kinds[0]} that {kinds[1]} cannot replace; choose another name"
    if why:
        raise ValueError(f"ai3_ops.register: {operation} has an algorithm {name!r} already{why}")


def _check_signature(operation: str, name: str, function: Callable[..., torch.Tensor]) -> None:
    """A callable must take what the operator passes: all positional arguments of its schema."""
    model = next(
        a.operator for a in registry.registered() if a.operation == operation and not (a.python or a.parameters)
    )
    names = [a.name for a in model._schema.arguments if not a.kwarg_only]
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise TypeError(
            f"ai3_ops.register: {operation} {name!r} is called with {len(names)} arguments, ({', '.join(names)}), which "
            f"{getattr(function, '__qualname__', function)!s} does not take: {error}"
        ) from None
    except ValueError:  # a builtin that does not tell its signature
        return


def find_compiler() -> list[str]:
    """The C++ compiler's command; RuntimeError where there is none."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for candidate in ("g++", "c++", "clang++"):
        if path := shutil.which(candidate):
            return [path]
    raise RuntimeError("ai3_ops.register: a header needs a C++20 compiler: install g++, or let CXX name one")


@cache
def _flags_for(compiler: tuple[str, ...]) -> tuple[str, list[str]]:
    """The compiler's version and the flags of this machine's instruction-set level."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as cause:
        raise RuntimeError(f"ai3_ops.register: the compiler {shlex.join(compiler)} does not run: {cause}") from cause
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-DAI3_LEVEL=user", f"-I{_INCLUDE}"]
    flags += ["-fmax-errors=3", "-fdiagnostics-color=never", "-Wl,--as-needed"]
    flags += [f for f in _flags.COMMON if not f.startswith("-W")]
    flags += _flags.levels()[_library.registry()["level"]]
    if "clang" in version:
        # Clang's OpenMP runtime would be a second thread pool in the process.
        warnings.warn("ai3_ops.register: built with Clang, the algorithm runs on one thread; use g++", stacklevel=2)
    else:
        flags.append("-fopenmp")
    return version, flags


def _run(command: list[str], unit: str, header: Path) -> str:
    done = subprocess.run([*command, "-x", "c++", "-"], input=unit, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ai3_ops.register: {header} does not compile:\n{_readable(done.stderr, header)}")
    return done.stdout


def _readable(messages: str, header: Path) -> str:
    """The errors, once per place, without the paths of inclusion and instantiation that lead to them."""
    shown, places, fresh, keep = [], set(), False, False
    for line in messages.splitlines():
        if "error:" in line:
            place = line.partition("error:")[0]
            keep = fresh = place not in places
            places.add(place)
        elif not line.startswith(" "):
            keep = (fresh and "note:" in line and str(header) in line) or "undefined reference" in line
        if keep:
            shown.append(line)
    shown = shown or messages.splitlines()
    rest = len(shown) - _SHOWN_LINES
    return "\n".join(shown[:_SHOWN_LINES]) + (f"\n({rest} more lines)" if rest > 0 else "")


def _build(operation: str, name: str, header: Path) -> Path:
    """Compiles the header unless the cache has the result of the same sources, flags, torch and compiler."""
    header = header.expanduser().absolute()
    if not header.is_file():
        raise FileNotFoundError(f"ai3_ops.register: no header {header}")
    compiler = find_compiler()
    version, flags = _flags_for(tuple(compiler))
    problems = "\n".join(f"#include <ai3/{o}.h>" for o in registry.operations())
    unit = _UNIT.format(problems=problems, header=str(header).replace("\\", "\\\\").replace('"', '\\"'))
    # Preprocessed text holds everything that the result depends on: the header and all that it includes.
    text = _run([*compiler, *flags, "-E", "-P"], unit, header)
    _check_text(operation, name, header, text)
    key = hashlib.sha256("\0".join([text, *compiler, *flags, version, torch.__version__]).encode()).hexdigest()[:32]
    directory = cache_directory() / key
    directory.mkdir(mode=0o700, exist_ok=True)
    library = directory / f"{operation}_{name}.so"
    with open(directory / "lock", "w") as lock:  # released by the kernel however the process ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            building = library.with_suffix(f".{os.getpid()}")
            try:
                _run([*compiler, *flags, "-o", str(building)], unit, header)
                building.replace(library)
            finally:
                building.unlink(missing_ok=True)
    return library


def _check_text(operation: str, name: str, header: Path, text: str) -> None:
    """RuntimeError, before anything is compiled, where the preprocessed text lacks the macro, its function or a struct."""
    found = re.findall(r'::ai3::kDevice, "(\w+)", "(\w+)"', text)
    if found != [(operation, name)]:
        raise RuntimeError(_needs(operation, name, header, [", ".join(pair) for pair in found]))
    function = f"{operation}_{name}"
    if f"{function}<T>(" in text and not re.search(rf"\b{function}\b(?!<T>\()", text):
        raise RuntimeError(f"ai3_ops.register: {header} needs a function template {function}, which its macro calls")
    own = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(errors="replace"), flags=re.DOTALL)
    for word in dict.fromkeys(re.findall(r"\bconst\s+(?:ai3::)?(\w+Problem)\s*&", own)):
        if not re.search(rf"\b(?:struct|class|union|typename|using)\s+{word}\b|\btypedef\b[^;]*\b{word}\s*;", text):
            known = re.search(rf"\busing {operation} = (?:::)?(?:ai3::)?(\w+);", text)
            hint = f"; {operation}'s is ai3::{known[1]}" if known else ""
            raise RuntimeError(f"ai3_ops.register: {header} names {word}, which is declared nowhere{hint}")


def _needs(operation: str, name: str, header: Path, found: list[str]) -> str:
    has = " and ".join(f"AI3_ALGORITHM({f})" for f in found) or "none"
    return f"ai3_ops.register: {header} needs one AI3_ALGORITHM({operation}, {name}, ...), has {has}"


def _add(operation: str, name: str, library: Path, header: Path, replace: bool) -> None:
    loaded = ctypes.CDLL(str(library))
    loaded.ai3_records.restype = ctypes.POINTER(ctypes.POINTER(_Info))
    loaded.ai3_record_count.restype = ctypes.c_int64
    records = loaded.ai3_records()[: loaded.ai3_record_count()]
    found = [f"{r.contents.operation.decode()}, {r.contents.name.decode()}" for r in records]
    if found != [f"{operation}, {name}"]:
        raise RuntimeError(_needs(operation, name, header, found))
    error = ctypes.create_string_buffer(4096)
    if not _library.C.ai3_register(records[0], int(replace), error, len(error)):
        raise RuntimeError(error.value.decode())
    operations.register_rules(operation, name)
    registry.changed()
