"""Directories below the user's cache that nobody else can write to."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path


def cache_directory(kind: str = "algorithms") -> Path:
    """Where compiled algorithms are kept, or measurements ("tune"): `$XDG_CACHE_HOME/ai3_ops/<kind>`, its owner's alone.

    The directory is opened once and what is opened is checked; the answer leads through that descriptor, so that what takes
    the directory's place under its name later is never looked at.
    """
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ai3_ops" / kind
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError):  # the latter of a user without a home
        return _private_directory(kind)
    if not os.access(directory, os.W_OK):
        return _private_directory(kind)
    return _opened(directory) or _private_directory(kind)


_descriptors: dict[Path, int] = {}  # of directories; they stay open, since libraries are loaded through them


def _opened(directory: Path) -> Path | None:
    """The directory by an open descriptor, None without /proc; RuntimeError where others may write to it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as cause:
        raise RuntimeError(f"ai3_ops: {directory} must be a directory of yours: {cause.strerror}") from cause
    earlier = _descriptors.get(directory)
    if earlier is not None and os.path.samestat(os.fstat(earlier), os.fstat(descriptor)):
        os.close(descriptor)
        descriptor = earlier
    _descriptors[directory] = descriptor
    owner = os.fstat(descriptor)
    if owner.st_uid != os.geteuid() or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"ai3_ops: {directory} must belong to you and be writable by nobody else")
    path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    return path if path.is_dir() else None


_temporary: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _private_directory(kind: str) -> Path:
    """For a home that cannot be written: lives as long as the process."""
    keep = tempfile.TemporaryDirectory(prefix=f"ai3_ops_{kind}_")
    _temporary.append(keep)
    return Path(keep.name)
