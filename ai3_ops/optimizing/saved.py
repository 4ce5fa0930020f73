"""`save` and `load`: an optimized module as one file that holds no code and that processes map.

What the file says beside programs and graphs (document.py): the structure of inputs and outputs, and the report.
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from ai3_ops._torch import pytree
from ai3_ops.explaining.report import Optimization, OptimizeReport, Step
from ai3_ops.graph.network import Lengths, Returned, Rewrite
from ai3_ops.optimizing.document import Reader, Writer, encoded, reading, refuse
from ai3_ops.optimizing.example import Example
from ai3_ops.optimizing.module import Optimized
from ai3_ops.optimizing.on_cuda import Replayed
from ai3_ops.optimizing.pipeline import Plan, Settings, Swapped
from ai3_ops.programs import container
from ai3_ops.selecting.selectors import listed

MOST = 64  # sets of sizes that one plan computes and a file has


# Writing --------------------------------------------------------------------------------------------------------------
def write(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """See `ai3_ops.save`."""
    if not isinstance(model, Optimized):
        inside = [name for name, m in model.named_modules() if isinstance(m, Optimized)]
        what = f"a {type(model).__name__} of which {listed(inside)} are optimized" if inside else type(model).__name__
        raise TypeError(f"ai3_ops.save needs a module that ai3_ops.optimize returned, got {what}")
    writer = Writer(spelling=True)
    document = _document(model, writer)
    container.write(Path(path), document, writer.tensors)


def _document(model: Optimized, writer: Writer) -> dict[str, Any]:
    first = model._ai3_first
    if first is None:
        parts = [name for name, m in model.named_modules() if name and isinstance(m, Optimized)]
        left = "; ".join(f"{name or 'the model'}: {why}" for name, why in model._ai3_report.left.items())
        advice = f"save its optimized parts alone ({listed(parts)})" if parts else "there is no program to save"
        refuse(f"the model could not be captured as a whole ({left}): {advice}")
    if first.body is None:
        refuse(f"the model stayed as it was ({model._ai3_report.parts[0].unchanged}): there is no program to save")
    if isinstance(first.body, Replayed):
        refuse("the model is on a GPU, for which there are no programs; torch.save keeps it")
    if isinstance(first.body, Swapped):
        refuse(
            "the model's layers were swapped, and its own code runs between them; torch.export and torch.save keep that"
        )
    keys: dict[int, list[Any]] = {}  # by plan
    plans = {id(plan): plan for plan in (first, *model._ai3_plans.values()) if plan.body is not None}
    for key, plan in model._ai3_plans.items():
        keys.setdefault(id(plan), []).append(encoded(key))
    return (
        writer.head
        | {
            "inputs": {
                "shown": encoded(first.example and first.example.shown),  # which a reader without Python names
                "spec": _spec_text(model._ai3_spec, "inputs"),
                "plain": model._ai3_plain,
                "signature": [
                    [p.name, int(p.kind), p.default is not p.empty] for p in model._ai3_signature.parameters.values()
                ],
            },
            # The first one first.
            "plans": [{"keys": keys[i][:MOST], "plan": _described(plan, writer)} for i, plan in plans.items()],
            "report": encoded(model._ai3_report.to_dict()),
        }
    )


def _described(plan: Plan, writer: Writer) -> dict[str, Any]:
    returned = plan.returned
    spec = None if returned is None else _spec_text(returned.spec, "outputs")
    lengths = plan.lengths and (plan.lengths.inputs, plan.lengths.conditions)
    kept = {"fixed": encoded(returned and returned.fixed), "lengths": encoded(lengths), "resolved": plan.resolved}
    example = encoded([getattr(plan.example, field.name) for field in fields(Example)])
    return writer.body(plan.body) | {"dynamic": plan.dynamic, "out_spec": spec, "example": example} | kept


def _spec_text(spec: Any, what: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        refuse(f"the structure of the {what} cannot be written: {error}")


# Reading --------------------------------------------------------------------------------------------------------------
def read(path: str | os.PathLike[str]) -> nn.Module:
    """See `ai3_ops.load`."""
    with reading(f"ai3_ops.load: {os.fspath(path)}"):
        document, tensors = container.read(Path(path))
        return _module(document, Reader(document, tensors))


_ROWS = {"steps": Step, "rewrites": Rewrite}  # of a report's part


def _spec(text: str) -> Any:
    if "__enum__" in text:  # for which PyTorch would import a module
        raise ValueError(f"it has a structure {text!r}")
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        # A library may import its parts when they are used.
        named = re.search(r"Deserializing ([\w.]+)\.\w+", str(error))
        needed = f"import {named[1]}" if named else "import the library that has this type"
        raise ValueError(f"{error}: {needed} first") from None


def _module(document: dict[str, Any], reader: Reader) -> Optimized:
    inputs, empty = document["inputs"], inspect.Parameter.empty
    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind(kind), default=None if optional else empty)
            for name, kind, optional in inputs["signature"]
        ]
    )
    plans = [(entry["keys"], _plan(entry["plan"], reader)) for entry in document["plans"]]
    if not plans or not all(isinstance(keys, list) and keys for keys, _ in plans):
        raise ValueError("a plan of it is for no inputs")
    report = reader.value(document["report"])
    report["parts"] = [
        Optimization(**part | {name: [kind(**row) for row in part[name]] for name, kind in _ROWS.items()})
        for part in report["parts"]
    ]
    return Optimized.restored(
        Settings(selectors="default", thorough=False),
        first=plans[0][1],
        plans={reader.value(key): plan for keys, plan in plans for key in keys},
        spec=_spec(inputs["spec"]),
        plain=inputs["plain"],
        signature=signature,
        report=OptimizeReport(**report),
    )


def _plan(plan: dict[str, Any], reader: Reader) -> Plan:
    spec, fixed, lengths = plan["out_spec"], reader.value(plan["fixed"]), reader.value(plan["lengths"])
    returned = None if spec is None else Returned(_spec(spec), fixed)
    lengths, example = None if lengths is None else Lengths(*lengths), Example(*reader.value(plan["example"]))
    example.check()
    example.own_lengths(lengths)  # KeyError of a condition that has another word than the list
    made = plan["dynamic"], returned, Optimization(""), plan["resolved"]
    return Plan(reader.body(plan), *made, lengths, example=example)
