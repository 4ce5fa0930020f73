"""From a module and example inputs to a Network: torch.export first, then torch.fx's symbolic trace."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import logging
import operator
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ai3_ops._torch import TorchDispatchMode, asked_in, pytree
from ai3_ops.graph import caches
from ai3_ops.graph.alike import Graphs, Made, Places, handed_on
from ai3_ops.graph.caches import Past, Update
from ai3_ops.graph.functional import functionalize
from ai3_ops.graph.network import SAYS, Lengths, Network, Returned, agree, batch_of, flat
from ai3_ops.graph.state import changes, copied, hooks_of, others
from ai3_ops.nn.computed import constant
from ai3_ops.selecting.selectors import listed
from ai3_ops.surveying import examples
from ai3_ops.surveying.examples import Inputs

# Of a captured graph's outputs against the module's, both in the model's own type, where it is not 1e-4: PyTorch may compute the
# module by other operators than those that export writes down, such as a layer's fast path.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Uncapturable(RuntimeError):
    """Why a module has no graph that does what it does; `state` names what its calls change."""

    def __init__(self, reason: str, state: list[str] | None = None) -> None:
        super().__init__(reason)
        self.state = state or []


class _NotPlain(Uncapturable):
    """Of a graph that writes in place or has graphs of its own, which `run_decompositions` may take out of it."""


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    functional: bool = False,
    first: Calls | None = None,
    graphs: Graphs | None = None,
) -> Network:
    """The graph of a module, checked against it on the example and on other inputs; Uncapturable where there is none.

    The graph holds for every batch size where the inputs that are tensors have their first dimension in common and the
    module treats it as a batch, else for the sizes of the example only. Copies of the module run, so that it stays as it is.
    `functional`: of a module that is a graph already, whose calls change nothing that the graph does not show.
    `first`: the first call of a copy of the module with these inputs, if it was made. `graphs`: of other parts of the model, and
    then of this one.
    """
    if functional:
        network = _captured(Calls(module, args, kwargs))
        if network.returned and network.returned.fixed:
            raise Uncapturable("it returns values that are no tensors")
        return network
    if isinstance(module, torch.jit.ScriptModule):
        raise Uncapturable("torch.jit compiled it: give the model as it was before")
    fresh = copied(module, sharing=True) if first is None else first.module
    with constant(fresh):
        hooked = [name for name, m in fresh.named_modules() if hooks_of(m)]
        if hooked:
            raise Uncapturable(
                f"hooks of {hooked[0] or 'the module itself'} would run once, at the capture, and then never"
            )
        calls = first or _alone(fresh, args, kwargs)
        calls.in_turn()
        if calls.alters:
            raise Uncapturable(f"a call writes into its argument {calls.alters!r}, which a graph would not")
        kinds = {type(x).__name__ for x in calls.made[0][1] if not isinstance(x, (Tensor, int, float, str, type(None)))}
        if kinds:  # which an export, too, finds out at its end
            raise Uncapturable(f"it returns what is no tensor ({listed(sorted(kinds))})")
        if calls.sized_by:  # an export would end there, too, but after a trace of minutes
            raise Uncapturable(f"sizes inside of it depend on values ({calls.sized_by})")
        return _captured(calls, graphs)


class _Sizing(TorchDispatchMode):
    """Notes an operator whose output has as many elements as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found and torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            self.found = func.name().partition(".")[0]
        return func(*args, **(kwargs or {}))


def _by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of an operator that may be so is: indexing is by masks alone."""
    if not func.name().startswith("aten::index"):
        return True
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


class Calls:
    """Calls of a module, in turn, and what they returned; the first one, with the example, at once."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cold: nn.Module | None = None
    ) -> None:
        """`cold`: a copy in the state that the module is in, which does not run."""
        self.module, self.args, self.kwargs, self.cold = module, args, kwargs, cold
        self.made: list[tuple[list[Any], list[Any]]] = []  # inputs, which a call may not change, and outputs
        self.alters = ""  # an argument, a list or dict, into which a call writes
        with _Sizing() if cold is not None else contextlib.nullcontext() as sizing:
            self.call(args, kwargs)
        self.sized_by = sizing.found if sizing is not None else ""  # an operator whose output's size depends on values

    def in_turn(self) -> None:
        """Other inputs, and the example again.

        Uncapturable where the second or third call changes the module, as none would that only fills a table for its sizes.
        """
        module, cold, other = self.module, self.cold, others(self.args, self.kwargs)
        assert cold is not None
        before = copied(module, sharing=True) if changes(cold, module) else cold
        with contextlib.suppress(Exception):  # of values that the module refuses
            self.call(*other)
        state = changes(before, module)
        self.call(self.args, self.kwargs)
        if state := list(dict.fromkeys([*state, *changes(before, module)])):
            raise Uncapturable(f"a call changes {listed(state)}, which a graph would not", state)
        if before is not cold:  # what the first call changed may depend on its inputs
            with contextlib.suppress(Exception):
                self.made += Calls(copied(cold, sharing=True), *other).made

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more, with copies of the inputs."""
        own = examples.copied(Inputs(args, kwargs))
        before = [(name, value, *pytree.tree_flatten(value)) for name, value in _named(self.module, own)]
        with torch.no_grad():
            returned = self.module(*own.args, **own.kwargs)
        for name, value, leaves, spec in before:
            now, structure = pytree.tree_flatten(value)
            if structure != spec or not all(map(operator.is_, now, leaves)):
                self.alters = name
        outputs = [x.clone() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(returned)]
        self.made.append((flat(args, kwargs), outputs))

    def compare(self, network: Network) -> None:
        """A trace that is not what the module does is refused."""
        ran: list[tuple[list[Any], tuple[Any, ...]]] = []  # a graph keeps nothing: equal inputs run once
        for inputs, expected in self.made:
            outputs = next((out for given, out in ran if all(map(operator.is_, given, inputs))), None)
            if outputs is None:
                outputs = network.run(inputs, sized=True)
                ran.append((inputs, outputs))
            leaves = outputs if network.returned is None else network.returned.leaves(outputs)
            for one, other in zip(leaves, expected, strict=True):
                worst = TOLERANCES.get(one.dtype, 1e-4) if isinstance(one, Tensor) else 0.0
                if not agree(one, other, worst):
                    raise Uncapturable(
                        "its graph computes something else than the module, in which what a call returns may depend on the calls "
                        "before it"
                    )


def _named(module: nn.Module, inputs: Inputs) -> list[tuple[str, Any]]:
    """Arguments by their names."""
    names: list[str] = []
    with contextlib.suppress(ValueError):  # of what torch.jit compiled
        names = [*inspect.signature(module.forward).parameters]
    names += [f"argument {i}" for i in range(len(names), len(inputs.args))]
    return [*zip(names, inputs.args, strict=False), *inputs.kwargs.items()]


def _alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
    """A call of a part of a model, which ran inside of it."""
    try:
        return Calls(module, args, kwargs, copied(module, sharing=True))
    except Exception as error:  # whatever the module's own code raises
        text = shortened(str(error).strip().partition("\n")[0])
        raise Uncapturable(f"it does not run by itself: {type(error).__name__}: {text}") from error


def _captured(calls: Calls, graphs: Graphs | None = None) -> Network:
    """As another module's that is alike, by torch.export, or by torch.fx."""
    module = calls.module
    if graphs is not None:
        network, numbers = graphs.of(module, (calls.args, calls.kwargs))
        try:
            if network is not None:
                return _compared(network, module, calls)
            if numbers:
                graphs.add(made := _exported(module, calls, numbers))
                return made.of(module)
        except Exception:  # it is not, after all, or its numbers say more
            graphs.refuse(module, numbers)
    reasons = []
    for name, make in (("torch.export", _exported), ("torch.fx", _traced)):
        try:
            made = make(module, calls)
            # A symbolic trace may hold what the module's own weights decided.
            if graphs is not None and made.module is module:
                graphs.add(made)
            return made.of(made.module)
        except Uncapturable as error:  # the graph says so: a trace of another kind would only not see it
            reasons.append(f"{name}: {error}")
            break
        except Exception as error:  # whatever the module's own code raises while it is traced
            text = str(error).strip().splitlines()
            reasons.append(f"{name}: {type(error).__name__}: {shortened(text[0] if text else '')}")
            if "attributes" in str(error) and "assigned" in str(error):  # which a symbolic trace would drop in silence
                break
    raise Uncapturable("; ".join(reasons))


def _exported(module: nn.Module, calls: Calls, numbers: Places = frozenset()) -> Made:
    """With the batch left open where that works, and lengths. A batch of 1 would be taken for a constant, so that two are shown.

    What export then takes for granted, that there are more than one, is looked at: on the example, or on its first item.
    `numbers`: attributes of the module in whose places the graph has objects.
    """
    args, kwargs = calls.args, calls.kwargs
    inputs = flat(args, kwargs)

    def tried(lengths: frozenset[int] | None) -> Made | None:
        with handed_on(module, numbers):
            program, update = _export(module, args, kwargs, lengths)
        dynamic = lengths is not None
        if dynamic and not _any_batch(program, inputs):
            return None
        made = Made(module, (args, kwargs), _plain_network(program, update, module, inputs, dynamic), numbers)
        if lengths and any(n.meta["scales"] is None for n in caches.elsewhere(made.network.graph) if n.meta["shape"]):
            return None
        _compared(made.of(module), module, calls)
        return made

    tensors = [x for x in inputs if isinstance(x, Tensor)]
    batches = {x.shape[0] if x.ndim else 0 for x in tensors}
    if len(batches) == 1 and 0 not in batches:
        alone = module is not calls.module or calls.cold is None  # a second try, or of a graph
        # What unrolls steps needs their number; to find that out, export bounds the sizes of each: minutes, of dual paths.
        alone = alone or any(isinstance(m, nn.RNNBase) for m in module.modules())
        for lengths in dict.fromkeys((frozenset[int]() if alone else _lengths(tensors), frozenset[int]())):
            # It needs these sizes, or something else is amiss, which the last try says.
            with contextlib.suppress(Exception):
                if (found := tried(lengths)) is not None:
                    return found
    found = tried(None)
    assert found is not None
    return found


def _lengths(tensors: list[Tensor]) -> frozenset[int]:
    """Sizes that may be another length in each call: of rows and sequences, not of images alone. None on a GPU.

    Export finds out which of them are numbers to the model, as features are.
    """
    if any(not x.is_cpu for x in tensors):
        return frozenset()
    return frozenset(n for x in tensors if x.ndim in (2, 3) for n in x.shape[1:] if n > 1)


def _plain_network(
    program: ExportedProgram, update: Update | None, module: nn.Module, inputs: list[Any], dynamic: bool
) -> Network:
    """The network of a program, which may have to be taken apart further."""
    try:
        return _network(program, update, module, inputs, dynamic)
    except _NotPlain:
        with warnings.catch_warnings(), quiet(), torch.no_grad():
            warnings.simplefilter("ignore")
            return _network(program.run_decompositions({}), update, module, inputs, dynamic)


def _compared(network: Network, module: nn.Module, calls: Calls) -> Network:
    """The network, which does what the module does; where it updates a cache, a longer one, too."""
    if any(node.target is caches.update for node in network.graph.nodes):
        Calls(module, *caches.longer(calls.args, calls.kwargs)).compare(network)
    if network.dynamic and batch_of(flat(calls.args, calls.kwargs)) > 1:
        one = pytree.tree_map_only(Tensor, lambda x: x[:1], (calls.args, calls.kwargs))
        Calls(module, *one).compare(network)
    calls.compare(network)
    return network


def _any_batch(program: ExportedProgram, inputs: list[Any]) -> bool:
    """Whether the graph depends on no condition on the batch size, such as a branch that was taken for it."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    values = [
        node.meta.get("val")
        for node in program.graph.nodes
        if node.op == "placeholder" and kinds[node.name] == InputKind.USER_INPUT
    ]
    lengths: dict[Any, int] = {}
    for value, given in zip(values, inputs, strict=False):  # keys and values of a cache are further ones
        if isinstance(value, Tensor) and isinstance(given, Tensor):
            sizes = [_plain(n) for n in value.shape[1:]]
            lengths |= {n: k for n, k in zip(sizes, given.shape[1:], strict=True) if getattr(n, "is_Symbol", False)}
    firsts = [x.shape[0] for x in values if isinstance(x, Tensor) and x.ndim and isinstance(x.shape[0], torch.SymInt)]
    batches = {_plain(size) for size in firsts}
    if not batches or not all(getattr(batch, "is_Symbol", False) for batch in batches):
        return False
    env = firsts[0].node.shape_env
    for guard in env.guards:
        asked = env.replace(guard.expr)
        if batches.isdisjoint(asked.free_symbols) or _holds_for_any_batch(guard):
            continue
        if not (_is_of_operators(guard) and _holds_for_batches(asked, batches, lengths)):
            return False
    return True


_BATCHES = 2, 3, 4, 7, 8, 16, 33, 1000  # of one item the example is, or its first


def _holds_for_batches(asked: Any, batches: set[Any], lengths: dict[Any, int]) -> bool:
    """Whether a condition on a batch and lengths holds for many batches, with the example's lengths and longer ones."""
    if not asked.free_symbols <= batches | lengths.keys():
        return False
    more = (dict.fromkeys(lengths, 0), lengths, dict.fromkeys(lengths, 1000))
    return all(
        bool(asked.subs(dict.fromkeys(batches, n) | {symbol: own + longer[symbol] for symbol, own in lengths.items()}))
        for n, longer in itertools.product((*_BATCHES, *_numbers_in(asked)), more)
    )


def _numbers_in(asked: Any) -> set[int]:
    """Those around the numbers of a condition, from two on, where it may begin or cease to hold."""
    own = {abs(int(n)) for n in asked.atoms() if n.is_Integer and abs(n) < 2**31}
    return {n for k in own for n in (k - 1, k, k + 1, 2 * k) if n > 1}


def _is_of_operators(guard: Any) -> bool:
    """Whether operators ask it, which choose among ways to compute the same, or refuse sizes; no module's own source."""
    where = r"(_prims_common/__init__|_prims/__init__|_refs/(\w+/)?\w+|_subclasses/\w+|nn/functional)\.py"
    return re.fullmatch(where, asked_in(guard)) is not None


def _holds_for_any_cache(program: ExportedProgram, cache: dict[Any, int], lengths: dict[Any, int], past: Past) -> bool:
    """Whether the branches that were taken for a cache are those of others: longer and shorter ones, of prompts of any length.

    `lengths` are those that are open beside the cache's, as a prompt's. A call with an empty cache may take another branch where
    the example is one, and all such calls take it: the comparison with the example shows that it computes the same.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [n for x in values if isinstance(x, Tensor) for n in x.shape if isinstance(n, torch.SymInt)]
    env = sizes[-1].node.shape_env
    queries = _PROMPTS if lengths else (past.queries,)

    def holds(asked: Any, keys: int, count: int) -> bool:
        return bool(asked.subs(dict.fromkeys(cache, keys) | dict.fromkeys(lengths, count)))

    for guard in env.guards:
        asked = env.replace(guard.expr)
        if cache.keys().isdisjoint(asked.free_symbols) or _holds_for_any_batch(guard):
            continue
        if not asked.free_symbols <= cache.keys() | lengths.keys():
            return False
        longer = [(times * n + more, n) for n in (*queries, past.length) for times, more in _LONGER]
        longer += [(keys, n) for n in queries for k in _numbers_in(asked) for keys in (k, n + k) if keys > n]
        if not all(holds(asked, keys, count) for keys, count in longer):
            return False
        if _is_of_operators(guard):
            continue
        if not all(holds(asked, before + n, n) for n in queries for before in _PASTS):
            return False
        first = {holds(asked, n, n) for n in queries}
        if first != {True} and (past.queries != past.length or len(first) > 1):
            return False
    return True


_LONGER = (2, 1), (3, 1), (8, 5), (1000, 0), (1000, 7)  # as many times the queries, and some more
_PROMPTS, _PASTS = (*range(2, 20), 32, 33, 64, 100, 1000, 5000), (1, 2, 3, 7, 100)


def _holds_for_any_batch(guard: Any) -> bool:
    """Whether a condition says no more than that two sizes are one, or is an operator's own: of cuDNN, on CUDA, up to which size,
    and that a value is not empty.

    Operators ask for the latter to choose a kernel, when they are called; a module that asks does so in its own source.
    """
    expression = guard.expr
    if expression.is_Equality:
        return all(a.is_Symbol for a in expression.args)
    says = getattr(expression, "rel_op", "")
    if (says, expression.args[-1]) in (("!=", 0), (">", 0), (">", 1), (">=", 1), (">=", 2)):
        return asked_in(guard) in ("_prims_common/__init__.py", "_subclasses/fake_impls.py")
    asked = asked_in(guard) == "_ops.py"
    bounds = says in ("<", "<=")
    return asked and bounds and expression.args[0].is_Symbol and expression.args[1].is_Integer


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: frozenset[int] | None
) -> tuple[ExportedProgram, Update | None]:
    """With any batch, and any lengths in the place of some; None: with the example's sizes alone. A cache's length is open."""
    shapes = None
    if lengths is not None:
        args, kwargs = pytree.tree_map_only(Tensor, _twice, (args, kwargs))
    if any(isinstance(leaf, Past) for leaf in flat(args, kwargs)):
        with warnings.catch_warnings(), quiet(), torch.no_grad():
            warnings.simplefilter("ignore")
            return caches.exported(module, args, kwargs, lengths)
    if lengths is not None:
        shapes = pytree.tree_map(functools.partial(caches.open_sizes, lengths=lengths), (args, kwargs))
        positional, named = _grouped(module, shapes[0]), shapes[1]
        shapes = {**positional, **named} if kwargs else (*positional.values(),)
    with warnings.catch_warnings(), quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False), None


class _Held:
    """A standard error that keeps what one thread writes; other threads' words go through."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread, self.words = stream, threading.get_ident(), io.StringIO()

    def write(self, text: str) -> int:
        return (self.words if threading.get_ident() == self.thread else self.stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_LOGS = "fx.experimental.symbolic_shapes", "_subclasses.fake_tensor"
_holding = threading.RLock()  # sys.stderr is the process's: of two threads that put it back, the second would be wrong


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what torch.export logs and prints about a module that it refuses, with its graph: `explain` gives the reason."""
    logs, thread = [logging.getLogger(f"torch.{name}") for name in _LOGS], threading.get_ident()

    def others(_: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    with _holding:
        before, held = sys.stderr, _Held(sys.stderr)
        for log in logs:
            log.addFilter(others)
        sys.stderr = held
        try:
            yield
        finally:
            sys.stderr = before
            for log in logs:
                log.removeFilter(others)
    before.write(held.words.getvalue())


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x.detach(), x.detach()])


def shortened(text: str, most: int = 240) -> str:
    """Whole words of a long sentence."""
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0]} …"


def _grouped(module: nn.Module, given: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by their parameters' names, as export has them: what `*args` takes is one tuple."""
    found: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(inspect.signature(module.forward).parameters.items()):
        if place >= len(given):
            break
        if parameter.kind is parameter.VAR_POSITIONAL:
            return found | {name: tuple(given[place:])}
        found[name] = given[place]
    return found


def _traced(module: nn.Module, calls: Calls) -> Made:
    """Where export refuses the source: the graph that symbolic values leave, exported."""
    return _exported(fx.symbolic_trace(module), calls)


def _network(
    program: ExportedProgram, update: Update | None, module: nn.Module, inputs: list[Any], dynamic: bool
) -> Network:
    """Parameters, buffers and other tensors become constants; what the program would write to refuses it."""
    signature = program.graph_signature
    for spec in signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise Uncapturable(f"a call changes {spec.target or 'one of its inputs'} ({spec.kind.name.lower()})")
    stored = {**program.constants, **program.state_dict}
    modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    graph, constants = fx.Graph(), {}
    names: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if isinstance(size := node.meta.get("val"), torch.SymInt) and isinstance(_plain(size), int):
            names[node] = _plain(size)  # left open, and a number to the model
            continue
        if node.op == "placeholder" and specs[node.name].kind != InputKind.USER_INPUT:
            target = str(specs[node.name].target)
            if not isinstance(stored.get(target), Tensor):
                raise Uncapturable(f"it reads {target}, which is no tensor")
            constants[target] = stored[target].detach()
            names[node] = graph.create_node("get_attr", target, name=node.name)
        elif node.op == "call_function" and not isinstance(node.target, str):
            if node.target is torch.ops.aten.as_strided.default and not _is_whole(node.args[0].meta["val"]):
                raise Uncapturable("it reads memory by strides that a graph does not keep (as_strided)")
            copied = graph.node_copy(node, names.__getitem__)
            stack = node.meta.get("nn_module_stack") or {}
            path = [name for entry in stack.values() if (name := str(entry[0])) in modules]
            copied.meta = {"layers": (path[-1],) if path else (), "call": next(reversed(stack), "")}
            names[node] = copied
        elif node.op in ("placeholder", "output"):
            names[node] = graph.node_copy(node, names.__getitem__)
        else:
            raise _NotPlain(f"its graph has a node that calls {node.target}")
        meta = names[node].meta if node.op == "call_function" else {"layers": ()}
        names[node].meta = meta | {"val": node.meta.get("val")}
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    returned: Any = output.args[0]
    fixed = tuple((place, value) for place, value in enumerate(returned) if not isinstance(value, fx.Node))
    output.args = (tuple(value for value in returned if isinstance(value, fx.Node)),)
    if not output.args[0]:
        raise Uncapturable("it returns no tensor")
    if not functionalize(graph):
        raise _NotPlain("it writes in place what is read elsewhere")
    own = {} if update is None else update.lengths(program)
    if update is not None and any(isinstance(x, torch.SymInt) for x in pytree.tree_leaves(update.given)):
        raise Uncapturable("it gives sizes to its cache")
    sizes, out_spec = _Sizes(inputs, dynamic, graph, own), program.call_spec.out_spec
    if update is not None:
        past = next(x for x in inputs if isinstance(x, Past))
        if own and not _holds_for_any_cache(program, own, sizes.lengths, past):
            raise Uncapturable("how long the cache is decides what is computed")
        out_spec = update.out_spec
        update.put_into(graph)
        caches.group(graph)
    for node in graph.nodes:
        node.meta |= sizes.of(node.meta.pop("val"))
    network = Network(graph, constants, dynamic, Returned(out_spec, fixed), lengths=sizes.conditions())
    network.tidy()
    random = [node for node in network.graph.nodes if _is_random(node)]
    if random:
        named = [(".".join(n.meta["layers"]) or "its own code", str(n.target).split(".")[1]) for n in random]
        where = dict.fromkeys(f"{layer} ({operator})" for layer, operator in named)
        raise Uncapturable(f"a call draws random numbers: {listed(list(where))}")
    return network


def _is_whole(x: Tensor) -> bool:
    """Whether a value lies in memory as its elements are counted, from the memory's beginning on."""
    return bool(x.is_contiguous() and x.storage_offset() == 0)


def _plain(size: Any) -> Any:
    """A size as a number, or what export knows of it as an expression."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return expression if isinstance(size, torch.SymInt) and not expression.is_Integer else int(expression)


def _said(value: Any) -> Any:
    """A size, or a condition on sizes, as `Lengths` has it; Uncapturable where that has no word for it."""
    if isinstance(value, (int, torch.SymInt)):
        value = _plain(value)
    kind = type(value).__name__
    if isinstance(value, int) or value.is_Integer:
        return int(value)
    if value.is_Symbol:
        return str(value)
    if value.is_Rational:
        return "Div", int(value.p), int(value.q)
    if value.is_Pow and value.exp.is_Integer and value.exp > 0:
        return "Mul", *[_said(value.base)] * int(value.exp)
    if kind not in SAYS:
        raise Uncapturable(f"its lengths have to hold {value}")
    return kind, *map(_said, value.args)


class _Sizes:
    """What is known of values on the example, by what export noted of them; batch and lengths that are open are symbols there."""

    def __init__(self, inputs: list[Any], dynamic: bool, graph: fx.Graph, cache: dict[Any, int]) -> None:
        """`cache`: the symbols that stand for the length of a cache, which is no input of the network, with the example's."""
        self.batch, self.dynamic = batch_of(inputs), dynamic
        self.lengths: dict[Any, int] = {}  # those of the example, by their symbols
        self._cache = cache
        self._known: dict[Any, Any] = {}
        self._sizes = set[Any]()  # that follow from lengths, and from nothing else
        self._inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        del self._inputs[len(inputs) :]  # the keys and values of a cache
        for value, given in zip(self._inputs, inputs, strict=True):
            for size, own in zip(value.shape[1:], given.shape[1:], strict=True) if isinstance(value, Tensor) else ():
                if not isinstance(size := _plain(size), int) and not self._follows_cache(size):
                    self.lengths[size] = own
        self._batches = {_plain(x.shape[0]) for x in self._inputs if isinstance(x, Tensor) and x.ndim}
        if not self._batches.isdisjoint(self.lengths) or not all(size.is_Symbol for size in self.lengths):
            raise Uncapturable("its lengths depend on each other, or on the batch")

    def of(self, value: Any) -> dict[str, Any]:
        """As a node's meta has it."""
        if not isinstance(value, Tensor):
            length = (self._is_length(value),) if isinstance(value, torch.SymInt) else ()
            return {"shape": None, "dtype": None, "batched": False, "scales": None, "lengths": length}
        shape = tuple(map(self._size, value.shape))
        scales = tuple(map(self._scale, value.shape))
        if self.dynamic:
            first, *rest = [self._of_batch(s) if isinstance(s, torch.SymInt) else None for s in (*value.shape, 0)]
            batched = first is not None and first.is_Symbol and all(e is None or e.is_Integer for e in rest)
        else:
            batched = shape[:1] == (self.batch,) and None not in scales
        sizes = (_plain(n) for n in value.shape if self._is_length(n))
        self._sizes.update(n for n in sizes if n.free_symbols <= self.lengths.keys())
        known, lengths = None if None in scales else scales, tuple(map(self._is_length, value.shape))
        return {"shape": shape, "dtype": value.dtype, "batched": batched, "scales": known, "lengths": lengths}

    def conditions(self) -> Lengths | None:
        """What export took for granted of the lengths; None where none is open."""
        if not self.lengths:
            return None
        shapes: list[Any] = [x.shape[1:] if isinstance(x, Tensor) else () for x in self._inputs]
        env = next(n for shape in shapes for n in shape if self._is_length(n)).node.shape_env
        guards = {env.replace(guard.expr) for guard in env.guards}
        open_ones = self._batches | self._cache.keys()  # of which no condition is left
        own = [g for g in guards if open_ones.isdisjoint(g.free_symbols) and g != True]  # noqa: E712
        said = (tuple(None if self._follows_cache(_plain(n)) else _said(n) for n in shape) for shape in shapes)
        sizes = set[Any]()
        for n in self._sizes:
            with contextlib.suppress(Uncapturable):  # of what a file has no word for
                sizes.add(_said(n))
        return Lengths(tuple(said), tuple(map(_said, own)), tuple(sizes))

    def _follows_cache(self, size: Any) -> bool:
        return not isinstance(size, int) and not self._cache.keys().isdisjoint(size.free_symbols)

    def _of_batch(self, size: Any) -> Any:
        """What a size is with the example's lengths."""
        expression = size.node.expr
        if expression not in self._known:
            self._known[expression] = expression.subs(self.lengths)
        return self._known[expression]

    def _is_length(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and not self.lengths.keys().isdisjoint(size.node.expr.free_symbols)

    def _scale(self, size: Any) -> int | None:
        """How many of a dimension belong to one item of the batch; 0 where it does not depend on it, None where otherwise."""
        if not isinstance(size, torch.SymInt):
            return 0
        number, rest = self._of_batch(size).as_coeff_Mul()
        if number.is_Integer and rest.is_Symbol and rest not in self._cache:
            return int(number)
        return 0 if self._of_batch(size).is_Integer else None

    def _size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = self._of_batch(size)
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self.batch) | self._cache))


def _is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers: dropout does in training, attention where its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    values = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    given = {a.name: values.get(a.name, a.default_value) for a in schema.arguments}
    trains = [given[name] for name in ("train", "training") if name in given]
    return all(trains) and given.get("dropout_p", given.get("p")) != 0


__all__ = ["Calls", "Uncapturable", "capture"]
