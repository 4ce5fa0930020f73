"""Measurements on disk: one JSON file for each layer, in a directory for each machine, below `$XDG_CACHE_HOME/ai3_ops/tune`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai3_ops import _library, _machine, registry
from ai3_ops._directories import cache_directory

VERSION = 1  # of what the entries hold, and of how it is measured


@functools.cache
def _library_digest() -> str:
    """Of the code of all built-in algorithms."""
    digest = hashlib.sha256()
    for path in sorted(Path(_library.__file__).parent.glob("_C*.so")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def machine_key() -> dict[str, Any]:
    """What all entries of a directory have in common: the machine, the built-in algorithms, and those that a user registered."""
    own = {f"{o}_{name}": digest for (o, name), digest in sorted(registry.digests.items())}
    defaults = {o: name for o, name in sorted(registry.preferred.items()) if name}
    return {
        "version": VERSION,
        **_machine.machine(),
        "library": _library_digest(),
        "registered": own,
        "defaults": defaults,
    }


def digest(key: Mapping[str, Any]) -> str:
    """A name for a file."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


class Cache:
    """Entries by their keys; a broken or foreign one is a miss, of which one warning tells."""

    def __init__(self, enabled: bool = True) -> None:
        self.directory: Path | None = None
        self.machine = machine_key()
        self.warned = False
        # Nothing says whether a Python callable is still the one that was measured.
        if not enabled or any(
            a.python and (a.operation, a.name) not in registry.digests for a in registry.registered()
        ):
            return
        try:
            self.directory = cache_directory("tune") / digest(self.machine)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except (OSError, RuntimeError) as error:
            self.directory = None
            self._warn(f"measurements are not kept: {error}")

    def _warn(self, what: str) -> None:
        if not self.warned:
            warnings.warn(f"ai3_ops.tune: {what}", stacklevel=4)
        self.warned = True

    def get(self, key: Mapping[str, Any]) -> Any:
        """What was put there, None where there is nothing that can be trusted."""
        if self.directory is None:
            return None
        path = self.directory / f"{digest(key)}.json"
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise ValueError("belongs to somebody else")
                entry = json.load(file)
            if entry["machine"] != self.machine or entry["key"] != key:
                raise ValueError("is about something else")
            return entry["value"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.broken(key, error)
            return None

    def broken(self, key: Mapping[str, Any], error: Exception) -> None:
        """Says once that an entry could not be used."""
        assert self.directory is not None
        self._warn(f"{self.directory / digest(key)}.json cannot be used and is measured anew: {error}")

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Writes an entry whole or not at all: under another name first, then renamed."""
        if self.directory is None:
            return
        name = ""
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".part", delete=False) as file:
                name = file.name
                json.dump({"machine": self.machine, "key": key, "value": value}, file, indent=1)
            os.replace(name, self.directory / f"{digest(key)}.json")
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            self._warn(f"measurements are not kept: {error}")
