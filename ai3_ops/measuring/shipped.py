"""Measurements that come with the package, in `ai3_ops/measured`: a table for each family of processors and instruction set.

They are where choices begin on a machine that has measured nothing; `python -m ai3_ops tune --collect` makes them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ai3_ops import _library, _machine
from ai3_ops.measuring.timing import Layer, Measured, from_json

FOLDER = Path(__file__).resolve().parent.parent / "measured"
VERSION = 1  # of what the tables hold
UNTRIED = "its packed weight takes too long to read, as shipped measurements say"


def name_of(key: Mapping[str, Any]) -> str:
    """A layer in one layout, by what its times depend on: of a key of the cache all but biases and the network's size.

    A weight that is no parameter is packed in every call, and said.
    """
    arguments, states = list(key["arguments"]), ["in_place"] if key["in_place"] else []
    if key["operation"].startswith(("conv", "linear")):
        del arguments[2:3]
        states += [] if key["parameters"][1] else ["computed_weight"]
    words = [key["operation"], *map(_word, arguments), *states, key["layout"]]
    return " ".join(words)


def _word(argument: Any) -> str:
    if isinstance(argument, str):  # a number, or several
        return argument.translate({ord(c): None for c in "()[] "})
    kind = f"{argument['dtype']}:{argument['device']}".removeprefix("torch.")
    return "x".join(map(str, argument["shape"])) + ("" if kind == "float32:cpu" else f":{kind}")


def known(layer: Layer, layout: str, names: Iterable[str]) -> dict[str, Measured] | None:
    """What the table of this machine's family and threads has of a layer, these algorithms all; None where it has not.

    AI3_OPS_SHIPPED=0 in the environment: it never has.
    """
    if os.environ.get("AI3_OPS_SHIPPED") == "0":
        return None
    record = _rows().get(name_of(layer.key() | {"layout": layout}))
    if record is None or not all(name in record for name in names):
        return None
    found = {}
    for name in names:
        if numbers := record[name]:
            time, noise, error = numbers
            found[name] = Measured(time, noise, error, *layer.memory(name, layout), shipped=True)
        else:
            found[name] = Measured.untried(UNTRIED, shipped=True)
    return found


def _rows() -> dict[str, dict[str, list[float] | None]]:
    threads = str(torch.get_num_threads())
    table = _table(threads)
    return {} if table is None else table["threads"][threads]


def origin() -> str:
    """Where the times of this process' threads were measured, in words."""
    threads = str(torch.get_num_threads())
    table = _table(threads)
    return "nowhere" if table is None else f"{table['processor']}, {table['level']}, {threads} threads"


@functools.cache
def _table(threads: str) -> dict[str, Any] | None:
    """That of this machine's family, else the nearest: another family's with this instruction set."""
    tables = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    fit = [t for t in tables if (t["version"], t["level"]) == (VERSION, level()) and threads in t["threads"]]
    return min(fit, key=lambda table: table["family"] != _machine.family(), default=None)


def level() -> str:
    """The instruction set that tables are for."""
    known = _library.registry()
    return known["level"] + (" and AMX" if known["matrix_tiles"] else "")


def collected(entries: Mapping[int, Iterable[tuple[Mapping[str, Any], Any]]], note: str) -> dict[str, Any]:
    """A table of measurements by the number of threads: keys and values as in the cache, of latencies of exact algorithms."""
    threads = {}
    for count, found in entries.items():
        rows = threads[str(count)] = dict[str, Any]()
        for key, value in sorted(found, key=lambda entry: entry[0]["bytes"]):
            measured = from_json(value)
            if not any(m.failed and not m.rough for m in measured.values()):
                rows[name_of(key)] = _record(measured)
        threads[str(count)] = dict(sorted(rows.items()))
    machine = _machine.machine()
    about = {"version": VERSION, "family": _machine.family(), "level": level(), "note": note}
    return about | {"processor": machine["processor"], "made_by": machine["versions"], "threads": threads}


def _record(measured: Mapping[str, Measured]) -> dict[str, list[float] | None]:
    """Time, noise and error by algorithm; None of those that were not called."""
    return {
        name: None if m.failed else [float(f"{n:.3g}") for n in (m.time_us, m.noise_us, m.error)]
        for name, m in measured.items()
    }


def write(table: Mapping[str, Any], path: Path) -> None:
    """One line for each layer, so that tables can be compared."""
    head = {name: value for name, value in table.items() if name != "threads"}
    blocks = []
    for count, rows in table["threads"].items():
        records = ",\n".join(f"{json.dumps(name)}:{json.dumps(r, separators=(',', ':'))}" for name, r in rows.items())
        blocks.append(f'"{count}": {{\n{records}\n}}')
    joined = ",\n".join(blocks)
    begin = json.dumps(head, indent=1).removesuffix("\n}")
    path.write_text(f'{begin},\n"threads": {{\n{joined}\n}}\n}}\n')
