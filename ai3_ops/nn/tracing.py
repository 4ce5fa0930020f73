"""Traces a module's own forward, and says what the graph hangs on.

torch.fx follows values; what a forward reads besides them (attributes, globals, modes, types) ends up in the graph as it is
during the trace. Each such read is either written down, so that it can be compared before the graph is used (`Guard`), or
refused with a reason (`Untraceable`).
"""

from __future__ import annotations

import copy
import dis
import enum
import functools
import gc
import inspect
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

MISSING: Any = object()
_STORES = ("_parameters", "_buffers", "_modules")
_ATOMS = (
    bool, int, float, complex, str, bytes, type, type(None), type(...), range, enum.Enum, torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)  # fmt: skip
_TYPE = "its forward asks for the type of a value"
_MODE = "its forward changes the gradient or autocast mode, or asks for it"
_ASKS = {  # functions whose answer the graph would keep
    "type": _TYPE,
    "id": "its forward asks for the identity of a value",
    "is_compiling": "its forward asks whether it is compiled",
    "is_dynamo_compiling": "its forward asks whether it is compiled",
    "is_exporting": "its forward asks whether it is exported",
    "is_tracing": "its forward asks whether it is traced",
}
_OUR_FRAMES = ("torch.fx", "ai3_ops")
_FRAMES_BETWEEN = (
    "torch.nn.parameter",
    "torch.utils._pytree",
    "torch.nn.modules.module",
    "torch.overrides",
    "torch._tensor",
)


class Untraceable(Exception):
    """Why a module's forward cannot be traced."""


class Guard(NamedTuple):
    """What an attribute of a module was during the trace."""

    path: tuple[str, ...]  # of the module, from the one whose forward was traced
    name: str
    kind: str  # "value", "class" (found there), "given" (a tensor or module that is not None), "missing", "names"
    value: Any


Global = tuple[dict[str, Any], str, Any]  # the globals of a file, a name there, and its value


class Traced(NamedTuple):
    """A graph, and what must be as it was for the graph to be what the forward does."""

    graph: fx.Graph
    guards: list[Guard]
    globals: list[Global]


# Values ---------------------------------------------------------------------------------------------------------------
def _by_torch(frame: FrameType | None) -> bool:
    """Whether the tracer or this file asks, perhaps through PyTorch's helpers; not the user's forward."""
    while frame and frame.f_globals.get("__name__") in _FRAMES_BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_OUR_FRAMES)


class _Proxy(fx.Proxy):
    tracer: _Tracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(x, Tensor) would be baked into the graph with the wrong answer
        if _by_torch(sys._getframe(1)):
            return type(self)
        self.tracer.refuse(_TYPE)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(Tensor, name):
            if {"hasattr", "getattr"} & set(sys._getframe(1).f_code.co_names):
                self.tracer.refuse(f"its forward asks whether a value has an attribute {name!r}")
            if type(self) is _Proxy and self.node.op == "placeholder":  # only calls with tensors use the graph
                raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        return self.tracer.keep(_Attribute(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "root", "attr", "_node"):
            self.tracer.refuse(f"its forward sets the attribute {name!r} of a value")
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        self.tracer.refuse("its forward looks a value up")

    def __repr__(self) -> str:
        if self.tracer.running and not _by_torch(sys._getframe(1)):
            self.tracer.refuse("its forward turns a value into text")
        return super().__repr__()

    def __deepcopy__(self, memo: Any) -> Any:
        self.tracer.refuse("its forward copies a value")


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(
        _Proxy, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__"))
    )  # fx would compute x += y as x = x + y


class _Attribute(_Proxy, fx.proxy.Attribute):
    pass


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.refusal = ""
        self.running = False
        self.thread = threading.get_ident()
        self.of_attributes: dict[str, Any] = {}  # torch.fx's own memory of proxies
        self.proxies: list[weakref.ref[_Proxy]] = []
        self.paths = {m: tuple(name.split(".")) if name else () for name, m in module.named_modules()}
        self.guards: dict[tuple[Any, str], Guard] = {}
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any, Any]] = {}
        self.codes: set[CodeType] = set()

    def refuse(self, reason: str) -> NoReturn:
        """Ends the trace, also where the forward catches exceptions."""
        self.refusal = self.refusal or reason
        raise Untraceable(reason)

    # What torch.fx asks -----------------------------------------------------------------------------------------------
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    # torch.fx puts its own functions into nn.Module while it traces: other threads' modules are none of its business.
    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        self.of_attributes = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def keep(self, proxy: _Proxy) -> _Proxy:
        self.proxies.append(weakref.ref(proxy))
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return self.keep(_Proxy(node, self))

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.refuse("its forward has control flow on values")

    def iter(self, obj: fx.Proxy) -> Any:
        self.refuse("its forward has control flow on values: it iterates over one")

    def keys(self, obj: fx.Proxy) -> Any:
        self.refuse("its forward has control flow on values: it asks for keys")

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self.modes = _modes()
        names, _ = arguments_of(root_fn)

        def forward(*args: Any) -> Any:
            with self.recording():
                return root_fn(*args)

        return forward, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            self.refuse(_MODE)
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if type(a) in (_Proxy, _Attribute):
            return a.node
        if isinstance(a, Tensor):
            tensors = itertools.chain(self.root.parameters(), self.root.buffers())
            if not (a in self.tensor_attrs or any(a is t for t in tensors)):
                self.refuse("its forward makes a tensor without using its inputs")
        if isinstance(a, OrderedDict):
            return self.create_node("call_function", OrderedDict, (self.create_arg(list(a.items())),), {})
        if isinstance(a, dict) and type(a) is not dict:
            self.refuse(f"its forward makes a {type(a).__name__}")
        return super().create_arg(a)

    # What the forward does besides ------------------------------------------------------------------------------------
    @contextmanager
    def recording(self) -> Iterator[None]:
        """Sees reads of attributes, the code that runs, and functions of tensors that are not followed."""

        def attribute(module: nn.Module, name: str) -> Any:
            if threading.get_ident() == self.thread and self.running:
                self.read(module, name, sys._getframe(1))
            return object.__getattribute__(module, name)

        profiler, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # the callbacks and finalizers of a collection are no code of the forward's
        self.running = True
        nn.Module.__getattribute__ = attribute  # type: ignore[assignment]
        sys.setprofile(self.entered)
        try:
            with _OtherTensors(self):
                yield
        finally:
            self.running = False
            sys.setprofile(None)
            del nn.Module.__getattribute__
            if collecting:
                gc.enable()
            if profiler is not None:
                getattr(profiler, "enable", lambda: sys.setprofile(profiler))()

    def read(self, module: nn.Module, name: str, frame: FrameType) -> None:
        """Writes down what the forward gets from an attribute."""
        if name.startswith("__"):
            if name == "__dict__" and not str(frame.f_globals.get("__name__")).startswith(("torch.", "ai3_ops")):
                self.refuse("its forward reads the __dict__ of a module")
            return
        if (module is self.root and name == "training") or (module, name) in self.guards or _by_torch(frame):
            return
        path = self.paths.get(module)
        if path is None:
            self.refuse(f"its forward reads {name!r} of a module that is not its own")
        self.running = False
        try:
            kind, value = seen(module, name)
            if kind == "value" and not _plain(value):
                self.refuse(
                    f"its forward reads the attribute {name!r}, a {type(value).__name__}, which could change unseen"
                )
            self.guards[module, name] = Guard(path, name, kind, copy.deepcopy(value) if kind == "value" else value)
        finally:
            self.running = True

    def entered(self, frame: FrameType, event: str, _: Any) -> None:
        """Looks once at each function of the user's that runs."""
        code = frame.f_code
        if event != "call" or code in self.codes or self.refusal:
            return
        self.codes.add(code)
        root = str(frame.f_globals.get("__name__")).partition(".")[0]
        if root in ("torch", "ai3_ops") or root in sys.stdlib_module_names:
            return
        for kind, detail in _features(code):
            if kind == "refused":
                self.refusal = self.refusal or detail
            elif detail in frame.f_globals:
                value = frame.f_globals[detail]
                if detail.startswith("__") or (isinstance(value, _ATOMS) and not isinstance(value, _NUMBERS)):
                    continue
                if type(value).__module__.partition(".")[0] in ("torch", "typing"):
                    continue
                if not _plain(value):
                    self.refusal = self.refusal or (
                        f"its forward reads the global {detail!r}, a {type(value).__name__}, which could change unseen"
                    )
                    content = copy.copy(value) if isinstance(value, _CONTAINERS) else value
                else:
                    content = copy.deepcopy(value)
                self.globals[id(frame.f_globals), detail] = frame.f_globals, detail, value, content


_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)


def _plain(value: Any) -> bool:
    """Whether a copy tells later that the value is as it was."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return all(map(_plain, value)) and all(map(_plain, value.values()))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_plain, value))
    return isinstance(value, _ATOMS)


@functools.lru_cache(maxsize=4096)
def _features(code: CodeType) -> list[tuple[str, str]]:
    """What a function does that a graph would lose, and the globals that it reads."""
    found = []
    instructions = list(dis.get_instructions(code))
    for before, at, after in zip([None, *instructions], instructions, [*instructions[1:], None], strict=False):
        if at.opname.startswith("BEFORE_") or (at.opname == "LOAD_SPECIAL" and "enter" in at.argrepr):
            found.append(("refused", "its forward enters a context, such as a gradient or autocast mode"))
        elif at.opname == "IS_OP" and not (before and before.opname == "LOAD_CONST" and before.argval is None):
            found.append(("refused", "its forward compares values by `is`"))
        elif at.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found += [("global", at.argval), ("refused", f"its forward changes the global {at.argval!r}")]
        elif at.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_self = after is not None and after.opname.startswith("LOAD_FAST") and after.argval == "self"
            refused = at.argval in _ASKS and not of_self
            found.append(("refused", _ASKS[at.argval]) if refused else ("global", at.argval))
        elif at.opname in ("LOAD_ATTR", "LOAD_METHOD") and at.argval in _ASKS and at.argval not in ("type", "id"):
            found.append(("refused", _ASKS[at.argval]))
    return found


class _OtherTensors(TorchFunctionMode):
    """Refuses functions that make or look at tensors which are not followed: the graph would keep their answers."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(type(leaf) in (_Proxy, _Attribute) for leaf in leaves) and not _by_torch(sys._getframe(1)):
            if any(isinstance(leaf, Tensor) for leaf in leaves):
                self.tracer.refuse("its forward computes with a tensor that is no input")
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                self.tracer.refuse("its forward makes a tensor without using its inputs")
            return result
        return func(*args, **kwargs)


# Attributes -----------------------------------------------------------------------------------------------------------
def seen(owner: nn.Module, name: str) -> tuple[str, Any]:
    """Kind and value of a Guard: what a forward that reads this attribute gets, as far as its graph hangs on it."""
    attributes = object.__getattribute__(owner, "__dict__")
    if name in _STORES:
        return "names", tuple(attributes[name])
    for store in (attributes, *(attributes.get(s, {}) for s in _STORES)):
        if name in store:
            value = store[name]
            return ("given", None) if isinstance(value, (Tensor, nn.Module)) else ("value", value)
    for cls in type(owner).__mro__:
        if name in vars(cls) and "_ai3_original" not in vars(cls):
            value = vars(cls)[name]
            return ("value" if isinstance(value, (*_NUMBERS, *_CONTAINERS, tuple)) else "class"), value
    return "missing", None


def same(a: Any, b: Any) -> bool:
    """Whether a value that was read is what it was."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:  # values that cannot be compared
        return False


def _owner(module: nn.Module, path: tuple[str, ...]) -> Any:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module


def holds(module: nn.Module, guard: Guard) -> bool:
    """Whether an attribute is what it was, `module` being the one whose forward was traced."""
    try:
        kind, value = seen(_owner(module, guard.path), guard.name)
    except (KeyError, AttributeError):
        return False
    return kind == guard.kind and same(value, guard.value)


def holds_compiled(module: nn.Module, guards: list[Guard], spaces: list[Global]) -> bool:
    """Whether all are what they were, read so that torch.compile sees the reads and guards them itself."""
    for path, name, kind, value in guards:
        owner: Any = module
        for part in path:
            owner = getattr(owner, part)
        if kind == "value":
            now = getattr(owner, name, MISSING)
            if type(now) is not type(value) or now != value:
                return False
        elif kind == "names":
            if tuple(getattr(owner, name).keys()) != value:
                return False
        elif kind == "given":
            if getattr(owner, name, None) is None:
                return False
        elif kind == "missing" and hasattr(owner, name):
            return False
    return all(name in space and space[name] == value for space, name, value in spaces)


class Bound:
    """Guards of one module, as fast as they can be looked at: mostly what was read is still the same object."""

    def __init__(self, module: nn.Module, guards: list[Guard], spaces: list[Global]) -> None:
        objects: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.guards: list[tuple[nn.Module, Guard]] = []  # where other objects may be equal, or the same one may change
        self.spaces = [s for s in spaces if isinstance(s[2], _CONTAINERS)]

        def note(space: Any, name: str) -> None:
            objects[id(space), name] = space, name, space.get(name, MISSING)

        for guard in guards:
            for i, name in enumerate(guard.path):
                note(_owner(module, guard.path[:i])._modules, name)
            owner = _owner(module, guard.path)
            if guard.kind in ("names", "missing") or isinstance(guard.value, (*_CONTAINERS, tuple)):
                self.guards.append((owner, guard))
                continue
            attributes = vars(owner)
            note(attributes, guard.name)
            for store in (*(attributes[s] for s in _STORES), *map(vars, type(owner).__mro__)):
                if guard.name in store:
                    note(store, guard.name)
        for space, name, _ in spaces:
            note(space, name)
        self.objects = list(objects.values())

    def hold(self) -> bool:
        """False where one of them must be looked at closely."""
        for space, name, value in self.objects:
            if space.get(name, MISSING) is not value:
                return False
        for owner, guard in self.guards:
            if not same(seen(owner, guard.name), (guard.kind, guard.value)):
                return False
        return all(same(space[name], value) for space, name, value in self.spaces)


# Modes ----------------------------------------------------------------------------------------------------------------
def _modes() -> tuple[Any, ...]:
    autocast = [
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), torch.is_autocast_cache_enabled())
        for d in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@contextmanager
def _ambience(inference: bool) -> Iterator[None]:
    """Gradients without autocast, or inference with autocast: whichever a forward sets or asks for, one of them shows it."""
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    try:
        for device, _, _ in before:
            torch.set_autocast_enabled(device, inference)
            torch.set_autocast_dtype(device, torch.float16 if inference else torch.bfloat16)
        with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
            yield
    finally:
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


# Tracing --------------------------------------------------------------------------------------------------------------
def arguments_of(forward: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of the arguments without and with defaults, `self` left out."""
    names: list[str] = []
    defaults: dict[str, Any] = {}
    for p in list(inspect.signature(forward).parameters.values())[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.default is not p.empty:
            defaults[p.name] = p.default
        elif p.kind == p.KEYWORD_ONLY:
            raise Untraceable(f"its forward needs the keyword argument {p.name!r}")
        else:
            names.append(p.name)
    return names, defaults


_TRACING = threading.RLock()  # torch.fx's functions in nn.Module, and collections of garbage, are the process's


def trace(module: nn.Module, training: bool, inference: bool = False) -> Traced:
    """The graph of the module's own forward; Untraceable, with the reason, where that is not what the forward does.

    With `inference` under the modes of inference instead of those of training: the graph must be the same.
    """
    with _TRACING:
        return _trace(module, training, inference)


def _trace(module: nn.Module, training: bool, inference: bool) -> Traced:
    before, generators = {m: _attributes(m) for m in module.modules()}, _generators()
    tracer, reason = _Tracer(module), ""
    try:
        for m in before:
            m.__dict__["training"] = training
        with _ambience(inference):
            graph = tracer.trace(module)
    except Exception as error:  # whatever the user's forward raises when it is given proxies
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        changed = [f"{'.'.join((*tracer.paths[m], n))}" for m, b in before.items() for n in _restore(m, b)]
        drawn = _restore_generators(generators)
    reason = tracer.refusal or reason
    changed += [
        ".".join((*g.path, g.name))
        for (m, _), g in tracer.guards.items()
        if g.name != "training" and not holds(module, g)
    ]
    for space, name, value, content in tracer.globals.values():
        if space.get(name, MISSING) is not value or (value is not content and not _same_items(content, value)):
            reason = reason or f"its forward changes the global {name!r}"
            _put_back(space, name, value, content)
    if changed:
        reason = reason or f"its forward changes the attribute {changed[0]!r}"
    if drawn:
        reason = reason or "its forward draws random numbers without using its inputs"
    tracer.of_attributes.clear()  # which frames of other threads may still hold
    if _let_go(tracer.proxies):
        reason = reason or "its forward keeps a value somewhere"
    if reason:
        raise Untraceable(reason)
    return Traced(graph, list(tracer.guards.values()), [(s, n, c) for s, n, _, c in tracer.globals.values()])


def _let_go(proxies: list[weakref.ref[_Proxy]]) -> bool:
    """Whether values of the trace are still held, once lists and dicts that held them were cleared of them."""
    if not any(ref() is not None for ref in proxies):
        return False
    gc.collect()
    alive = [proxy for ref in proxies if (proxy := ref()) is not None]
    for holder in [h for proxy in alive for h in gc.get_referrers(proxy) if h is not alive]:
        if type(holder) is list:
            holder[:] = [v for v in holder if type(v) not in (_Proxy, _Attribute)]
        elif type(holder) is dict:
            for key in [k for k, v in holder.items() if type(v) in (_Proxy, _Attribute)]:
                del holder[key]
    return bool(alive)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: (v, copy.copy(v) if isinstance(v, _CONTAINERS) else v) for k, v in vars(module).items()}


def _restore(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Puts changed attributes back and names them."""
    changed = [name for name in vars(module) if name not in before]
    for name in changed:
        del module.__dict__[name]
    for name, (value, content) in before.items():
        if name == "training":
            module.__dict__[name] = value
        elif module.__dict__.get(name, MISSING) is not value or (
            content is not value and not _same_items(content, value)
        ):
            changed.append(name)
            _put_back(module.__dict__, name, value, content)
    return changed


def _put_back(space: dict[str, Any], name: str, value: Any, content: Any) -> None:
    space[name] = value
    if isinstance(value, _CONTAINERS):
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(content)


def _same_items(a: Any, b: Any) -> bool:
    """Of lists, dicts and sets: the same objects. (Copies of plain values are equal to them.)"""
    if not isinstance(a, _CONTAINERS):
        return a is b or bool(a == b)
    if isinstance(a, set) or len(a) != len(b):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same_items(a[k], b[k]) if _plain(a[k]) else a[k] is b[k] for k in a)
    return all(x is y or (_plain(x) and _plain(y) and x == y) for x, y in zip(a, b, strict=True))


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()


def _restore_generators(before: tuple[Any, ...]) -> bool:
    now = _generators()
    drawn = now[0] != before[0] or not torch.equal(now[1], before[1])
    if before[2]:
        drawn = drawn or now[2][2] != before[2][2] or (now[2][1] != before[2][1]).any()
        if drawn:
            sys.modules["numpy"].random.set_state(before[2])
    if drawn:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
    return bool(drawn)
