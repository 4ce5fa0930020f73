"""What a container's document says of programs and of the graphs around them, which `save` and pickles write and read.

Graphs are nodes, by the names of PyTorch's operators and of the steps in steps.py: reading a document calls nothing else. The
tensors are the programs' packed weights and the graphs' constants.
"""

from __future__ import annotations

import inspect
import json
import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ai3_ops import _machine
from ai3_ops._torch import OpOverload
from ai3_ops.graph import steps
from ai3_ops.operations.step import Step
from ai3_ops.programs import container
from ai3_ops.programs.body import Body
from ai3_ops.programs.constants import Source, joined, level
from ai3_ops.programs.lower import Region
from ai3_ops.programs.program import Program
from ai3_ops.programs.sized import PYTHON
from ai3_ops.programs.spelled import spelled

FORMAT = 3  # csrc/runtime/model.h reads the same
_FILES = ("aten::from_file",)  # operators that reach outside of tensors


def _functions() -> dict[str, Callable[..., Any]]:
    """What a graph may call besides operators, by name."""
    own = inspect.getmembers(steps, inspect.isfunction)
    known = {f"steps.{name}": f for name, f in own if f.__module__ == steps.__name__ and not name.startswith("_")}
    return PYTHON | known | {f"steps.{step.operation}": function for function, step in Step.by_function.items()}


# Writing --------------------------------------------------------------------------------------------------------------
class Refused(ValueError):
    """Names what a container cannot hold."""


def refuse(reason: str) -> NoReturn:
    """Raises Refused."""
    raise Refused(f"ai3_ops.save: {reason}")


class Writer:
    """Collects the tensors while a document is made; each is in the container once."""

    def __init__(self, spelling: bool) -> None:
        """`spelling`: whether steps between programs become PyTorch's operators, which a reader without Python needs."""
        self._spelling = spelling
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[Any, dict[str, Any]] = {}
        self._names = {function: name for name, function in _functions().items()}

    @property
    def head(self) -> dict[str, Any]:
        """What every document begins with: of which format it is, and where the weights were packed."""
        return {"format": FORMAT, "made_by": versions()}

    def body(self, body: Any) -> dict[str, Any]:
        """What runs a plan."""
        return {"region": self._region(body)} if isinstance(body, Region) else {"graph": self._graph(body)}

    def _region(self, region: Region) -> dict[str, Any]:
        program = region.program
        return {
            "program": program.text,
            "constants": [self._tensor(t) for t in program.constants],
            "examples": encoded(program.examples),
            "algorithms": list(region.algorithms),
        } | ({} if program.sources is None else {"sources": [self._source(s) for s in program.sources]})

    def _source(self, source: Source) -> dict[str, Any]:
        return {
            "given": self._tensor(source.given),
            "pack": source.pack,
            "window": encoded(tuple(source.window)),
            "parameters": encoded(source.parameters),
            "chw": encoded(source.chw and tuple(source.chw)),
        }

    def _graph(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, Body):
            refuse(f"a {type(body).__name__} computes the model, which is no graph")
        held = {
            str(n.target): getattr(body, str(n.target)) for n in body.graph.nodes if n.op in ("get_attr", "call_module")
        }
        nodes = (spelled(body) if self._spelling else body.graph).nodes
        return {
            "held": {
                name: {"region": self._region(value)} if isinstance(value, Region) else {"tensor": self._tensor(value)}
                for name, value in held.items()
            },
            "nodes": [[n.op, n.name, self._target(n), encoded(n.args), encoded(n.kwargs)] for n in nodes],
        }

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, str):
            return target
        if isinstance(target, OpOverload):
            if (why := _unfit(target)) is not None:
                refuse(f"{target} is computed between programs, {why}")
            return f"op.{target}"
        if target not in self._names:
            refuse(f"{getattr(target, '__name__', target)} is computed between programs, which a file cannot name")
        return self._names[target]

    def _tensor(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor) or not container.can_hold(value):
            what = (
                f"a {value.dtype} tensor on {value.device}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            refuse(f"{what} is among the constants, which a file cannot hold")
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


def versions() -> dict[str, str]:
    """What packed weights belong to."""
    return {
        "ai3_ops": _machine.version(),
        "torch": torch.__version__,
        "level": level(),
        "byte order": sys.byteorder,
    }


# Values that are no tensors, in JSON. What JSON has stands for itself, everything else is a list that begins with a word.
_WORDS: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.memory_format: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.layout: lambda v: ["torch", str(v).removeprefix("torch.")],
    torch.device: lambda v: ["device", str(v)],
    fx.Node: lambda v: ["node", v.name],
    slice: lambda v: ["slice", *map(encoded, (v.start, v.stop, v.step))],
    list: lambda v: ["list", *map(encoded, v)],
    dict: lambda v: ["dict", *([encoded(k), encoded(x)] for k, x in v.items())],
    float: lambda v: v if v - v == 0 else ["float", str(v)],
}


def encoded(value: Any) -> Any:
    """A value in JSON, which `Reader.value` makes again."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return ["tuple", *map(encoded, value)]
    for kind, encode in _WORDS.items():
        if isinstance(value, kind):
            return encode(value)
    refuse(f"{value!r} is among the graph's arguments, which a file cannot hold")


# Reading --------------------------------------------------------------------------------------------------------------
@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever is wrong with a document is a ValueError that begins with `what`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, AssertionError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{what}: cannot be read: {type(error).__name__}: {words}") from error


def _name(text: Any) -> str:
    """A name that generated source may have."""
    if not isinstance(text, str) or not text.isidentifier() or keyword.iskeyword(text) or text.startswith("__"):
        raise ValueError(f"its graph has a name {text!r}")
    return text


class Reader:
    """Makes programs and graphs again; what is not in the container is an error."""

    def __init__(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """ValueError for a document of another format, byte order or version."""
        if document["format"] != FORMAT:
            raise ValueError(
                f"it has format {document['format']}, this version reads {FORMAT}: optimize and save again"
            )
        self._tensors, self._functions = tensors, _functions()
        self._made_by: dict[str, str] = document["made_by"]
        self._here = versions()
        self._packed: dict[str, Tensor] = {}
        for what in ("byte order", "ai3_ops"):
            self._check_same(what)

    def body(self, body: dict[str, Any]) -> Region | Body:
        """What runs a plan."""
        return self._region(body["region"]) if "region" in body else self._graph(body["graph"])

    def _check_same(self, what: str, otherwise: str = "") -> None:
        made, here = self._made_by[what], self._here[what]
        if made != here:
            raise ValueError(
                f"it was saved with {what} {made}, and this process has {here}: weights are packed for one; "
                f"optimize and save again here{otherwise}"
            )

    def _region(self, region: dict[str, Any]) -> Region:
        sources = [self._source(s) for s in region["sources"]] if "sources" in region else None
        examples = self.value(region["examples"])
        if sources is None:
            self._check_same("level", ", or there with portable=True")
        if sources is None or self._made_by["level"] == self._here["level"]:
            constants = [self._tensor(t) for t in region["constants"]]
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

    def _source(self, source: dict[str, Any]) -> Source:
        pack = source["pack"]
        if pack and not (pack.startswith("_") and pack.endswith("_pack")):
            raise ValueError(f"it packs weights by {pack!r}")
        return Source(
            self._tensor(source["given"]),
            pack,
            self.value(source["window"]),
            self.value(source["parameters"]),
            self.value(source["chw"]),
        )

    def _graph(self, graph: dict[str, Any]) -> Body:
        held = {
            _name(name): self._region(value["region"]) if "region" in value else self._tensor(value["tensor"])
            for name, value in graph["held"].items()
        }
        made, nodes = fx.Graph(), dict[str, fx.Node]()
        for op, name, target, args, kwargs in graph["nodes"]:
            if op not in ("placeholder", "get_attr", "call_module", "call_function", "output"):
                raise ValueError(f"its graph has a node of kind {op!r}")
            if op in ("get_attr", "call_module") and target not in held:
                raise ValueError(f"its graph reads {target!r}, which is not there")
            called = self._target(target) if op == "call_function" else _name(target)
            given = self.value(kwargs, nodes)
            for key in given:
                _name(key)
            nodes[_name(name)] = made.create_node(op, called, self.value(args, nodes), given, name=name)
        return Body(held, made)

    def _target(self, name: str) -> Callable[..., Any]:
        if not name.startswith("op."):
            return self._functions[name]
        namespace, packet, overload = name.removeprefix("op.").split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if not isinstance(op, OpOverload) or _unfit(op) is not None:
            raise ValueError(f"its graph calls {name!r}")
        return op

    def _tensor(self, entry: dict[str, Any]) -> Tensor:
        tensor, order = self._tensors[entry["name"]], entry.get("order")
        return tensor if order is None else tensor.permute([order.index(d) for d in range(len(order))])

    def value(self, value: Any, nodes: Mapping[str, fx.Node] | None = None) -> Any:
        """What `encoded` was given."""
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
