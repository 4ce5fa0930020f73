"""What algorithms there are, what they promise, and whether they can do a given call."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import numbers
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ai3_ops import _library
from ai3_ops._torch import OpOverload, alert_not_deterministic
from ai3_ops.problem import Problem

if TYPE_CHECKING:
    from ai3_ops.operations.base import Operation

DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in _library.DTYPES)
_loading = threading.RLock()
_entry_points_loaded = False
_generation = 0
preferred: dict[str, str | None] = {}  # by operation, what a user made its `default` run
digests: dict[tuple[str, str], str] = {}  # of the sources of algorithms that a user registered as headers
OPERATIONS: dict[str, Operation] = {}  # the rules of each operation; filled by ai3_ops.operations


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm's own: a keyword argument of its operators, and of `Algorithm`."""

    name: str
    kind: str  # "int", "float", "bool", "str" or "tensor"
    default: Any
    words: tuple[str, ...] = ()  # what a str may be
    required: bool = False  # a tensor that must be given

    @staticmethod
    def of_record(record: dict[str, Any]) -> Parameter:
        """As the registry's JSON has it, the default as C++ keeps it."""
        parameter = Parameter(record["name"], record["kind"], None, tuple(record["words"]), record["required"])
        return dataclasses.replace(parameter, default=parameter.decoded(record["default"]))

    def decoded(self, number: int) -> Any:
        """The value that C++ keeps as this number."""
        if self.kind == "float":
            return struct.unpack("d", struct.pack("q", number))[0]
        if self.kind == "str":
            return self.words[number]
        if self.kind == "tensor":
            return None
        return bool(number) if self.kind == "bool" else number

    def encoded(self, value: Any) -> int:
        """The number by which C++ keeps a value; RuntimeError for one that it cannot have."""
        number = self.number(value)
        return struct.unpack("q", struct.pack("d", number))[0] if self.kind == "float" else int(number)

    def value(self, text: str) -> Any:
        """Of a program's word for `number`."""
        if self.kind == "float":
            return float(text)
        number = int(text)
        return self.words[number] if self.kind == "str" else bool(number) if self.kind == "bool" else number

    def number(self, value: Any) -> int | float:
        """A word's place among those that are allowed, whether a tensor is there, else as it is; RuntimeError as `encoded`."""
        if self.kind == "tensor":
            return int(value is not None and value is not False)
        fits = {
            "int": isinstance(value, numbers.Integral) and not isinstance(value, bool),
            "float": isinstance(value, numbers.Real) and not isinstance(value, bool),
            "bool": isinstance(value, (bool, int)),
            "str": value in self.words,
        }[self.kind]
        if not fits:
            needs = " or ".join(map(repr, self.words)) or f"of type {self.kind}"
            raise RuntimeError(f"needs {self.name} {needs}, got {value!r}")
        return self.words.index(value) if self.kind == "str" else float(value) if self.kind == "float" else int(value)


@dataclasses.dataclass(frozen=True)
class AlgorithmInfo:
    """One algorithm on one device, as its own file (or its registration) describes it."""

    operation: str
    name: str
    device: str  # "cpu" or "cuda"
    accuracy: str  # "exact": only a sum of products' rounding; "bounded": within error_bound; "approximate"
    error_bound: float  # of max|y - y64| / max|y64| in float32, where accuracy is "bounded"
    deterministic: bool
    dtypes: tuple[str, ...]
    layout: str = "any"  # the memory layout it computes in; tensors in another one are converted: "any", "nchw", "nhwc"
    packs: bool = False  # has weights in a form of its own, made once by ai3::_<operation>_<name>_pack
    epilogue: bool = False  # its fused operators, of plain and packed weights, add a residual and apply an activation
    activations: tuple[str, ...] = ()  # those that they apply
    prologue: bool = False  # they apply scale, shift and relu to the input
    rule: bool = False  # no method of its own: names another algorithm for each problem
    vendor: bool = False  # calls PyTorch's own operators
    backward: str = (
        "aten"  # who computes its gradients: PyTorch ("aten"), or the project's kernels where they do so well ("own")
    )
    sliced: bool = (
        False  # reads, and its _out operators write, slices of channels or rows of larger tensors without a copy
    )
    python: bool = dataclasses.field(default=False, compare=False)  # a Python callable
    parameters: tuple[Parameter, ...] = ()  # of its own

    @property
    def operator(self) -> OpOverload:
        """`torch.ops.ai3.<operation>_<name>.default`."""
        return getattr(torch.ops.ai3, f"{self.operation}_{self.name}").default


_python: dict[tuple[str, str], AlgorithmInfo] = {}
_functions: dict[tuple[str, str], Callable[..., Tensor]] = {}


def add_python_algorithm(
    operation: str,
    name: str,
    function: Callable[..., Tensor],
    *,
    replace: bool = False,
    exact: bool = True,
    deterministic: bool = True,
) -> None:
    """Makes `ai3::<operation>_<name>` of a Python callable, for every device that its own calls have.

    `function` gets the operator's positional arguments, in the order of the schema and with defaults filled in and
    a number for each dimension; its result must have the operation's output sizes and dtype. Gradients are ATen's.
    """
    key = (operation, name)
    _known(operation, OPERATIONS, "operation")
    defined = hasattr(torch.ops.ai3, f"{operation}_{name}")
    if defined and (key not in _python or not replace):
        kind = "" if key in _python else " in C++, which a Python callable cannot replace"
        raise ValueError(f"{operation} has an algorithm {name!r} already{kind}")
    shared = f"_{operation}_{name}_backward"
    if not defined and hasattr(torch.ops.ai3, shared):  # it would be taken for the callable's own
        raise ValueError(
            f"{operation} can have no algorithm {name!r}: ai3::{shared} is an operator of the operation itself; "
            "choose another name"
        )
    _functions[key] = function
    accuracy = "exact" if exact else "approximate"
    _python[key] = AlgorithmInfo(operation, name, "cpu", accuracy, 0.0, deterministic, DTYPE_NAMES, python=True)
    if not defined:

        def call(*args: Any) -> Tensor:  # looks the callable up, so that it can be replaced
            if not _python[key].deterministic:
                alert_not_deterministic(f"ai3::{operation}_{name}")
            return _functions[key](*args)

        OPERATIONS[operation].define(name, call)
    changed()


def generation() -> int:
    """A number that is another one after every registration and every change of a default: what caches are valid for."""
    return _generation


def changed() -> None:
    """Starts a new generation."""
    global _generation
    _generation += 1


def operations() -> list[str]:
    """The names of all operations."""
    return list(_library.registry()["operations"])


def algorithms(operation: str | None = None, device: str | torch.device | None = None) -> list[AlgorithmInfo]:
    """What is available in this process: one entry per algorithm and device, in alphabetical order.

    `operation` ("conv2d", ...) and `device` ("cpu" or "cuda") leave out the others; an unknown one is a ValueError.
    """
    load_entry_points()
    if operation is not None:
        _known(operation, operations(), "operation")
    try:
        kind = None if device is None else torch.device(device).type
    except RuntimeError:  # no word that PyTorch knows
        kind = str(device)
    if kind is not None:
        _known(kind, _library.DEVICES, "device")
    return [a for a in registered() if operation in (None, a.operation) and kind in (None, a.device)]


def registered() -> list[AlgorithmInfo]:
    """As `algorithms`, without those that packages only offer until they are asked."""
    found = list(_of_text(_text(generation())))
    if not _python:
        return found
    devices = [d for d in _library.DEVICES if d == "cpu" or torch.cuda.is_available()]
    found += [dataclasses.replace(info, device=d) for info in _python.values() for d in devices]
    return sorted(found, key=_order)


@functools.lru_cache(maxsize=1)  # to write it takes longer than a call, and choices ask for it thousands of times
def _text(_: int) -> bytes:
    return _library.registry_text()


def _order(info: AlgorithmInfo) -> tuple[str, str, str]:
    return info.operation, info.name, info.device


def _hashable(traits: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in traits.items()}


@functools.lru_cache(maxsize=1)  # it is asked for at every swap of a layer, and changes with registrations only
def _of_text(text: bytes) -> list[AlgorithmInfo]:
    found = [
        AlgorithmInfo(o, name, d.lower(), **_hashable(traits | {"parameters": own}))
        for o, record in json.loads(text)["operations"].items()
        for name, devices in record["algorithms"].items()
        for d, traits in devices.items()
        for own in [tuple(map(Parameter.of_record, traits["parameters"]))]
    ]
    return sorted(found, key=_order)


def parameters(operation: str, algorithm: str) -> tuple[Parameter, ...]:
    """An algorithm's own parameters."""
    return _parameters(generation()).get((operation, algorithm), ())


# Each new length of a sequence asks, and to write the registry as a text takes longer than a call.
@functools.lru_cache(maxsize=1)
def _parameters(_: int) -> dict[tuple[str, str], tuple[Parameter, ...]]:
    return {(a.operation, a.name): a.parameters for a in _of_text(_text(generation())) if a.parameters}


def spelled(name: str, parameters: dict[str, Any]) -> str:
    """An algorithm and values of its own parameters in one word, as programs and plans name them: "mine(window=256)"."""
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in parameters.items())})" if parameters else name


def unspelled(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of what `spelled` returned; ValueError for anything else."""
    if "(" not in text:
        return text, {}
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            return call.func.id, {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"no algorithm {text!r}: parameters are written as in 'mine(window=256)'")


def approximate_default(operation: str, rule: str) -> str | None:
    """The algorithm that a user made the operation's `default` run, if `rule` is that and it approximates."""
    name = preferred.get(operation) if rule == "default" else None
    found = (a for a in registered() if (a.operation, a.name, a.accuracy) == (operation, name, "approximate"))
    return name if any(found) else None


def load_entry_points() -> None:
    """Calls the entry points of the group `ai3_ops.algorithms`, once per process; each calls `ai3_ops.register`.

    One that fails is a warning that names its package, so that one broken package does not take the others away. The
    environment variable AI3_OPS_PLUGINS says which are called: "0" none, names with commas between them those, unset all.
    """
    global _entry_points_loaded
    with _loading:
        if _entry_points_loaded:
            return
        _entry_points_loaded = True  # before the calls, which ask for names themselves
        wanted = os.environ.get("AI3_OPS_PLUGINS")
        if wanted == "0":
            return
        names = None if wanted is None else {name.strip() for name in wanted.split(",")}
        for point in metadata.entry_points(group="ai3_ops.algorithms"):
            if names is not None and point.name not in names:
                continue
            try:
                point.load()()
            except Exception as cause:
                package = point.dist.name if point.dist else point.value
                warnings.warn(f"ai3_ops: entry point {point.name!r} of {package} failed: {cause}", stacklevel=3)


def algorithm(operation: str, name: str, device: str | None = None) -> AlgorithmInfo:
    """One algorithm, on `device` where it has several; an unknown name is a ValueError that names near matches."""
    found = algorithms(operation)
    _known(name, [a.name for a in found], f"{operation} algorithm", _OWN)
    matches = [a for a in found if a.name == name]
    return next((a for a in matches if a.device == device), matches[0])


def operator_named(name: str) -> OpOverload | None:
    """`torch.ops.ai3.<name>.default`, if it is defined."""
    packet = getattr(torch.ops.ai3, name, None)
    return packet and packet.default


def is_rule(operation: str, name: str) -> bool:
    """Whether it names another algorithm for each problem, as `default` does."""
    return any(a.rule for a in algorithms(operation) if a.name == name)


def supports(operation: str, algorithm: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Whether `ai3::<operation>_<algorithm>` can do a call with these arguments, and the reason when it cannot.

    The arguments are the operator's own; tensors may be real, meta or fake ones (on the meta device the answer is yes where
    any device can). Arguments that no algorithm accepts, such as a wrong channel count, are a reason too. Unknown names
    are a ValueError. Nothing is computed.
    """
    _check_names(operation, algorithm)
    try:
        problem = _problem(operation, algorithm, args, kwargs)
    except RuntimeError as error:
        return False, str(error).removeprefix(f"ai3::{operation}_{algorithm}: ")
    return supports_problem(operation, algorithm, problem)


def resolve(operation: str, algorithm: str, *args: Any, **kwargs: Any) -> str:
    """The algorithm that a call with these arguments runs: `algorithm` itself, or what its rule (`default`) chooses.

    On the meta device the answer is the CPU's. RuntimeError where there is none, ValueError for unknown names.
    """
    _check_names(operation, algorithm)
    p = _problem(operation, algorithm, args, kwargs)
    return resolve_sizes(operation, algorithm, p.device, p.dtype, **p.sizes)


def workspace(operation: str, algorithm: str, *args: Any, **kwargs: Any) -> int:
    """Bytes that a direct call of `ai3::<operation>_<algorithm>` with these arguments needs beside its inputs and its output.

    The arguments are the operator's own, as `supports` takes them. Counted are the workspace, weights packed for the call
    (a swapped module keeps them instead, see `explain`), what oneDNN reorders and PyTorch's operators allocate, but no
    tensor converted to a memory layout that the algorithm computes in. Nothing of this is computed; what a rule
    (`default`) needs is what the algorithm needs that it chooses. 0 for a Python callable: it does not say.
    RuntimeError where the algorithm cannot do the call, ValueError for unknown names.
    """
    _check_names(operation, algorithm)
    p = _problem(operation, algorithm, args, kwargs)
    return workspace_sizes(operation, algorithm, p.device, p.dtype, **p.sizes)


def supports_problem(operation: str, algorithm: str, problem: Problem) -> tuple[bool, str]:
    """`supports_sizes` of a checked call; on the meta device, of any device."""
    devices = _library.DEVICES if problem.device == "meta" else (problem.device,)
    answers = [supports_sizes(operation, algorithm, d, problem.dtype, **problem.sizes) for d in devices]
    return next((a for a in answers if a[0]), answers[0])


def supports_sizes(
    operation: str, algorithm: str, device: str | torch.device, dtype: torch.dtype, **sizes: Any
) -> tuple[bool, str]:
    """As `supports`, from sizes by the names that the registry gives them, for callers that do not know all.

    A size left out, None, negative or symbolic is unknown: the answer is then no only where no value of it could help.
    `exclude` among them has the patterns of algorithms that a rule may not choose, between commas; `allow_tf32` is the
    operator's switch, and `parameters` has values of the algorithm's own.
    """
    place = torch.device(device)
    if place.type not in _library.DEVICES:
        return False, f"has no kernel for {place.type} tensors"
    info = _python.get((operation, algorithm))
    if info is not None:
        return True, ""
    try:
        query = _query(operation, algorithm, sizes)
    except RuntimeError as error:  # a parameter's value
        return False, str(error)
    return _library.supports(operation, algorithm, str(place), dtype, query)


def resolve_sizes(operation: str, algorithm: str, device: str | torch.device, dtype: torch.dtype, **sizes: Any) -> str:
    """As `resolve`, from sizes as `supports_sizes` takes them."""
    return choice_sizes(operation, algorithm, device, dtype, **sizes)[0]


def choice_sizes(
    operation: str, algorithm: str, device: str | torch.device, dtype: torch.dtype, **sizes: Any
) -> tuple[str, str]:
    """As `resolve_sizes`, and why the rule chose it, in a few words; "" where there is nothing to say."""
    if (operation, algorithm) in _python:
        return algorithm, ""
    kind = _kernel_device(operation, algorithm, device)
    return _library.resolve(operation, algorithm, kind, dtype, _query(operation, algorithm, sizes))


def workspace_sizes(
    operation: str, algorithm: str, device: str | torch.device, dtype: torch.dtype, **sizes: Any
) -> int:
    """Bytes of workspace, packed weights included, that a direct call of these sizes allocates."""
    if (operation, algorithm) in _python:
        return 0
    kind = _kernel_device(operation, algorithm, device)
    return _library.workspace(operation, algorithm, kind, dtype, _query(operation, algorithm, sizes))


def packed_bytes_sizes(
    operation: str, algorithm: str, device: str | torch.device, dtype: torch.dtype, **sizes: Any
) -> int:
    """Bytes of the tensor that ai3::_<operation>_<algorithm>_pack returns; on the meta device, what the CPU's does."""
    kind = _kernel_device(operation, algorithm, device)
    return _library.packed_bytes(operation, algorithm, kind, dtype, _query(operation, algorithm, sizes))


def _kernel_device(operation: str, algorithm: str, device: str | torch.device) -> str:
    """Whose kernels are asked about: on the meta device, the CPU's; RuntimeError for devices that have none."""
    place = torch.device(device)
    if place.type != "meta" and place.type not in _library.DEVICES:
        raise RuntimeError(f"ai3::{operation}_{algorithm}: has no kernel for {place.type} tensors")
    return "cpu" if place.type == "meta" else str(place)


def _problem(operation: str, algorithm: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
    name = f"{operation}_{algorithm}"
    schema = getattr(torch.ops.ai3, name).default._schema.arguments
    known = [a.name for a in schema]
    missing = [a.name for a in schema[len(args) :] if a.name not in kwargs and not a.has_default_value()]
    if missing:
        raise TypeError(f"ai3::{name} needs {' and '.join(missing)}")
    if len(args) > sum(not a.kwarg_only for a in schema):
        raise TypeError(f"ai3::{name} takes {', '.join(known)}, got {len(args)} positional arguments")
    for given in kwargs:
        if given not in known:
            hint = near(given, known, _CUTOFF) or f"; its arguments: {', '.join(known)}"
            raise TypeError(f"ai3::{name} has no argument {given!r}{hint}")
        if given in known[: len(args)]:
            raise TypeError(f"ai3::{name} got {given!r} by position and by name")
    for argument, value in [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]:
        kind = str(argument.type)
        wrong = kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None)
        if wrong and not isinstance(value, Tensor):
            raise TypeError(f"ai3::{name} needs a tensor as {argument.name}, got {type(value).__name__}")
    return OPERATIONS[operation].asked(algorithm, *args, **kwargs)


def _query(operation: str, algorithm: str, sizes: dict[str, Any]) -> _library.Sizes:
    names = _library.size_names(operation)
    unknown = sizes.keys() - {*names, "exclude", "allow_tf32", "parameters"}
    if unknown:
        raise TypeError(f"{operation} has no size {sorted(unknown)}; its sizes: {', '.join(names)}")
    given = sizes.get("parameters")
    own = given and [p.encoded(given.get(p.name, p.default)) for p in parameters(operation, algorithm)]
    known = [_known_size(sizes.get(name)) for name in names]
    return _library.Sizes(known, sizes.get("exclude", ""), bool(sizes.get("allow_tf32")), own or None)


def _known_size(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        size = size.node.maybe_as_int()
    return -1 if size is None else int(size)


def _check_names(operation: str, algorithm: str) -> None:
    load_entry_points()
    listed = _library.registry()["operations"]
    _known(operation, listed, "operation")
    names = [*listed[operation]["algorithms"], *(name for o, name in _python if o == operation)]
    _known(algorithm, names, f"{operation} algorithm", _OWN)


_OWN = "; one of your own needs ai3_ops.register first"


_CUTOFF = 0.6  # of names of operations, algorithms and arguments: they are short, and many are a little alike


def near(word: str, words: Iterable[str], cutoff: float = 0.5) -> str:
    """The end of an error message: words like `word`."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(words)), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _known(word: str, words: Iterable[str], what: str, more: str = "") -> None:
    words = sorted(set(words))
    if not isinstance(word, str):
        raise TypeError(f"{what}: a name is needed, got {word!r}")
    if word.endswith(".json"):
        more = f"{more}; a plan's file is read by ai3_ops.Plan.load({word!r})"
    if word in words:
        return
    hint = near(word, words, _CUTOFF) or f"; there are: {', '.join(words)}"
    raise ValueError(f"no {what} {word!r}{hint}{more}")
