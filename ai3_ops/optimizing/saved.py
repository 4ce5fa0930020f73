"""`save` and `load`: an optimized module as one file that holds no code and that processes map.

The document in it has the programs' texts and the graph around them as nodes, by the names of PyTorch's operators and of the
steps in steps.py: reading a file calls nothing else. The tensors are the packed weights and the graph's constants.
"""

from __future__ import annotations

import inspect
import json
import keyword
import operator
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from ai3_ops import _machine
from ai3_ops._torch import OpOverload, pytree
from ai3_ops.explaining.report import Optimization, OptimizeReport, Step
from ai3_ops.graph import steps
from ai3_ops.graph.network import Rewrite
from ai3_ops.operations.step import Step as OwnStep
from ai3_ops.optimizing.module import Optimized
from ai3_ops.optimizing.on_cuda import Replayed
from ai3_ops.optimizing.pipeline import Plan, Settings, Swapped
from ai3_ops.programs import container
from ai3_ops.programs.body import Body
from ai3_ops.programs.constants import Source, joined, level
from ai3_ops.programs.lower import Region
from ai3_ops.programs.program import Program
from ai3_ops.programs.spelled import spelled
from ai3_ops.selecting.selectors import listed

FORMAT = 1
_FILES = ("aten::from_file",)  # operators that reach outside of tensors
# Python's functions that graphs of torch.export call, on sizes and on lists of results.
_PYTHON = (
    "getitem",
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "truediv",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
)


def _functions() -> dict[str, Callable[..., Any]]:
    """What a graph may call besides operators, by name."""
    known = {f"operator.{name}": getattr(operator, name) for name in _PYTHON}
    for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite"):
        known[f"torch.{name}"] = getattr(torch, name)
    own = inspect.getmembers(steps, inspect.isfunction)
    known |= {f"steps.{name}": f for name, f in own if f.__module__ == steps.__name__ and not name.startswith("_")}
    return known | {f"steps.{step.operation}": function for function, step in OwnStep.by_function.items()}


# Writing --------------------------------------------------------------------------------------------------------------
def write(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """See `ai3_ops.save`."""
    if not isinstance(model, Optimized):
        inside = [name for name, m in model.named_modules() if isinstance(m, Optimized)]
        what = f"a {type(model).__name__} of which {listed(inside)} are optimized" if inside else type(model).__name__
        raise TypeError(f"ai3_ops.save needs a module that ai3_ops.optimize returned, got {what}")
    saver = _Saver()
    document = saver.document(model)
    container.write(Path(path), document, saver.tensors)


def _refuse(reason: str) -> NoReturn:
    raise ValueError(f"ai3_ops.save: {reason}")


class _Saver:
    """Collects the tensors while the document is made; each is in the file once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[Any, dict[str, Any]] = {}
        self._names = {function: name for name, function in _functions().items()}

    def document(self, model: Optimized) -> dict[str, Any]:
        first = model._ai3_first
        if first is None:
            parts = [name for name, m in model.named_modules() if name and isinstance(m, Optimized)]
            left = "; ".join(f"{name or 'the model'}: {why}" for name, why in model._ai3_report.left.items())
            _refuse(
                f"the model could not be captured as a whole ({left}): save its optimized parts alone ({listed(parts)})"
            )
        if first.body is None:
            _refuse(f"the model stayed as it was ({model._ai3_report.parts[0].unchanged}): there is no program to save")
        if isinstance(first.body, Replayed):
            _refuse("the model is on a GPU, for which there are no programs; torch.save keeps it")
        if isinstance(first.body, Swapped):
            _refuse(
                "the model's layers were swapped, and its own code runs between them; torch.export and torch.save keep that"
            )
        plans = [
            {"key": _encoded(key), "plan": self.plan(plan)}
            for key, plan in model._ai3_plans.items()
            if plan.body is not None
        ]
        return {
            "format": FORMAT,
            "made_by": _versions(),
            "inputs": {
                "shown": _encoded(model._ai3_shown),
                "types": _encoded(model._ai3_types),
                "spec": _spec_text(model._ai3_spec, "inputs"),
                "plain": model._ai3_plain,
                "signature": [
                    [p.name, int(p.kind), p.default is not p.empty] for p in model._ai3_signature.parameters.values()
                ],
            },
            "first": next(i for i, plan in enumerate(model._ai3_plans.values()) if plan is first),
            "plans": plans,
            "report": _encoded(model._ai3_report.to_dict()),
        }

    def plan(self, plan: Plan) -> dict[str, Any]:
        body = plan.body
        made = {"region": self.region(body)} if isinstance(body, Region) else {"graph": self.graph(body)}
        spec = None if plan.out_spec is None else _spec_text(plan.out_spec, "outputs")
        return made | {"dynamic": plan.dynamic, "out_spec": spec, "resolved": plan.resolved}

    def region(self, region: Region) -> dict[str, Any]:
        program = region.program
        return {
            "program": program.text,
            "constants": [self.tensor(t) for t in program.constants],
            "examples": _encoded(program.examples),
            "algorithms": list(region.algorithms),
        } | ({} if program.sources is None else {"sources": [self.source(s) for s in program.sources]})

    def source(self, source: Source) -> dict[str, Any]:
        return {
            "given": self.tensor(source.given),
            "pack": source.pack,
            "window": _encoded(tuple(source.window)),
            "parameters": _encoded(source.parameters),
            "chw": _encoded(source.chw and tuple(source.chw)),
        }

    def graph(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, Body):
            _refuse(f"a {type(body).__name__} computes the model, which is no graph")
        held = {
            str(n.target): getattr(body, str(n.target)) for n in body.graph.nodes if n.op in ("get_attr", "call_module")
        }
        nodes = spelled(body).nodes
        return {
            "held": {
                name: {"region": self.region(value)} if isinstance(value, Region) else {"tensor": self.tensor(value)}
                for name, value in held.items()
            },
            "nodes": [[n.op, n.name, self.target(n), _encoded(n.args), _encoded(n.kwargs)] for n in nodes],
        }

    def target(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, str):
            return target
        if isinstance(target, OpOverload):
            if (why := _unfit(target)) is not None:
                _refuse(f"{target} is computed between programs, {why}")
            return f"op.{target}"
        if target not in self._names:
            _refuse(f"{getattr(target, '__name__', target)} is computed between programs, which a file cannot name")
        return self._names[target]

    def tensor(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor) or not container.can_hold(value):
            what = (
                f"a {value.dtype} tensor on {value.device}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            _refuse(f"{what} is among the constants, which a file cannot hold")
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self._known:
            # Of dense memory in another order (channels_last) the order of the dimensions is kept.
            strides = value.stride()
            order = sorted(range(value.ndim), key=lambda d: (-strides[d], d))
            stored = value.detach().permute(order)
            if not stored.is_contiguous():
                order, stored = list(range(value.ndim)), value.detach().contiguous()
            name = f"tensor_{len(self.tensors)}"
            self.tensors[name] = stored
            self._known[key] = {"name": name} | ({"order": order} if order != sorted(order) else {})
        return self._known[key]


def _unfit(op: OpOverload) -> str | None:
    """Why a file may not call an operator; None where it may."""
    if op.namespace not in ("aten", "ai3"):
        return "an operator of another library"
    if op._schema.name in _FILES or op._schema.is_mutable:
        return "which writes to what it gets"
    return None


def _versions() -> dict[str, str]:
    return {
        "ai3_ops": _machine.version(),
        "torch": torch.__version__,
        "level": level(),
        "byte order": sys.byteorder,
    }


def _spec_text(spec: Any, what: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        _refuse(f"the structure of the {what} cannot be written: {error}")


# Values that are no tensors, in JSON. What JSON has stands for itself, everything else is a list that begins with a word.
_WORDS: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.memory_format: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.layout: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.device: lambda v: ["device", str(v)],
    fx.Node: lambda v: ["node", v.name],
    slice: lambda v: ["slice", *map(_encoded, (v.start, v.stop, v.step))],
    list: lambda v: ["list", *map(_encoded, v)],
    dict: lambda v: ["dict", *([_encoded(k), _encoded(x)] for k, x in v.items())],
    float: lambda v: v if v - v == 0 else ["float", str(v)],
}


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return ["tuple", *map(_encoded, value)]
    for kind, encode in _WORDS.items():
        if isinstance(value, kind):
            return encode(value)
    _refuse(f"{value!r} is among the graph's arguments, which a file cannot hold")


# Reading --------------------------------------------------------------------------------------------------------------
def read(path: str | os.PathLike[str]) -> nn.Module:
    """See `ai3_ops.load`."""
    try:
        document, tensors = container.read(Path(path))
        return _Loader(tensors).module(document)
    except ValueError as error:
        raise ValueError(f"ai3_ops.load: {os.fspath(path)}: {error}") from None
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, AssertionError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ValueError(f"ai3_ops.load: {os.fspath(path)}: cannot be read: {type(error).__name__}: {words}") from error


_ROWS = {"steps": Step, "rewrites": Rewrite}  # of a report's part


def _spec(text: str) -> Any:
    if "__enum__" in text:  # for which PyTorch would import a module
        raise ValueError(f"it has a structure {text!r}")
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise ValueError(f"{error}: import the library that has this type first") from None


def _name(text: Any) -> str:
    """A name that generated source may have."""
    if not isinstance(text, str) or not text.isidentifier() or keyword.iskeyword(text) or text.startswith("__"):
        raise ValueError(f"its graph has a name {text!r}")
    return text


class _Loader:
    """Makes the module again; what is not in the file is an error."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._functions = tensors, _functions()
        self._made_by: dict[str, str] = {}
        self._here = _versions()
        self._packed: dict[str, Tensor] = {}

    def module(self, document: dict[str, Any]) -> Optimized:
        if document["format"] != FORMAT:
            raise ValueError(
                f"it has format {document['format']}, this version reads {FORMAT}: optimize and save again"
            )
        self._made_by = document["made_by"]
        for what in ("byte order", "ai3_ops"):
            self.check_same(what)
        inputs, empty = document["inputs"], inspect.Parameter.empty
        signature = inspect.Signature(
            [
                inspect.Parameter(name, inspect._ParameterKind(kind), default=None if optional else empty)
                for name, kind, optional in inputs["signature"]
            ]
        )
        plans = {self.value(entry["key"]): self.plan(entry["plan"]) for entry in document["plans"]}
        report = self.value(document["report"])
        report["parts"] = [
            Optimization(**part | {name: [kind(**row) for row in part[name]] for name, kind in _ROWS.items()})
            for part in report["parts"]
        ]
        return Optimized.restored(
            Settings(selectors="default", thorough=False),
            first=list(plans.values())[document["first"]],
            plans=plans,
            shown=self.value(inputs["shown"]),
            types=self.value(inputs["types"]),
            spec=_spec(inputs["spec"]),
            plain=inputs["plain"],
            signature=signature,
            report=OptimizeReport(**report),
        )

    def check_same(self, what: str, otherwise: str = "") -> None:
        made, here = self._made_by[what], self._here[what]
        if made != here:
            raise ValueError(
                f"it was saved with {what} {made}, and this process has {here}: weights are packed for one; "
                f"optimize and save again here{otherwise}"
            )

    def plan(self, plan: dict[str, Any]) -> Plan:
        body = self.region(plan["region"]) if "region" in plan else self.graph(plan["graph"])
        spec = None if plan["out_spec"] is None else _spec(plan["out_spec"])
        return Plan(body, plan["dynamic"], spec, Optimization(""), plan["resolved"])

    def region(self, region: dict[str, Any]) -> Region:
        sources = [self.source(s) for s in region["sources"]] if "sources" in region else None
        examples = self.value(region["examples"])
        if sources is None:
            self.check_same("level", ", or there with portable=True")
        if sources is None or self._made_by["level"] == self._here["level"]:
            constants = [self.tensor(t) for t in region["constants"]]
            return Region(Program(region["program"], constants, examples, sources), tuple(region["algorithms"]))
        key = json.dumps(region["sources"])  # programs of one module for several sizes share their packs
        if key not in self._packed:
            self._packed[key] = joined(sources)
        program = Program(region["program"], [self._packed[key]], examples, sources)
        try:
            program.report()
        except RuntimeError as error:
            raise ValueError(
                f"it was saved for another instruction set, and with {level()} it cannot run: {error}"
            ) from None
        return Region(program, tuple(region["algorithms"]))

    def source(self, source: dict[str, Any]) -> Source:
        pack = source["pack"]
        if pack and not (pack.startswith("_") and pack.endswith("_pack")):
            raise ValueError(f"it packs weights by {pack!r}")
        return Source(
            self.tensor(source["given"]),
            pack,
            self.value(source["window"]),
            self.value(source["parameters"]),
            self.value(source["chw"]),
        )

    def graph(self, graph: dict[str, Any]) -> Body:
        held = {
            _name(name): self.region(value["region"]) if "region" in value else self.tensor(value["tensor"])
            for name, value in graph["held"].items()
        }
        made, nodes = fx.Graph(), dict[str, fx.Node]()
        for op, name, target, args, kwargs in graph["nodes"]:
            if op not in ("placeholder", "get_attr", "call_module", "call_function", "output"):
                raise ValueError(f"its graph has a node of kind {op!r}")
            if op in ("get_attr", "call_module") and target not in held:
                raise ValueError(f"its graph reads {target!r}, which is not there")
            called = self.target(target) if op == "call_function" else _name(target)
            given = self.value(kwargs, nodes)
            for key in given:
                _name(key)
            nodes[_name(name)] = made.create_node(op, called, self.value(args, nodes), given, name=name)
        return Body(held, made)

    def target(self, name: str) -> Callable[..., Any]:
        if not name.startswith("op."):
            return self._functions[name]
        namespace, packet, overload = name.removeprefix("op.").split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if not isinstance(op, OpOverload) or _unfit(op) is not None:
            raise ValueError(f"its graph calls {name!r}")
        return op

    def tensor(self, entry: dict[str, Any]) -> Tensor:
        tensor, order = self._tensors[entry["name"]], entry.get("order")
        return tensor if order is None else tensor.permute([order.index(d) for d in range(len(order))])

    def value(self, value: Any, nodes: Mapping[str, fx.Node] | None = None) -> Any:
        if not isinstance(value, list):
            return value
        word, *rest = value
        match word:
            case "tuple" | "list":
                values = [self.value(v, nodes) for v in rest]
                return tuple(values) if word == "tuple" else values
            case "dict":
                return {self.value(k, nodes): self.value(v, nodes) for k, v in rest}
            case "slice":
                return slice(*(self.value(v, nodes) for v in rest))
            case "node":
                return (nodes or {})[rest[0]]
            case "device":
                return torch.device(rest[0])
            case "float":
                return float(rest[0])
            case "torch":
                found = getattr(torch, rest[0])
                if isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
                    return found
        raise ValueError(f"it has a value {value!r}")
