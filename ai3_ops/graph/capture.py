"""From a module and example inputs to a Network: torch.export first, then torch.fx's symbolic trace."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
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

from ai3_ops._torch import pytree
from ai3_ops.graph import caches
from ai3_ops.graph.alike import Graphs, Made, Places, handed_on
from ai3_ops.graph.caches import Past, Update
from ai3_ops.graph.calls import Calls, Uncapturable
from ai3_ops.graph.conditions import hold_for_any_batch, hold_for_any_cache
from ai3_ops.graph.functional import functionalize
from ai3_ops.graph.network import Network, Returned, batch_of, flat
from ai3_ops.graph.sizes import Sizes, plain
from ai3_ops.graph.state import copied, hooks_of
from ai3_ops.nn.computed import constant
from ai3_ops.selecting.selectors import listed


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
        if dynamic and not hold_for_any_batch(program, inputs):
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
        if isinstance(size := node.meta.get("val"), torch.SymInt) and isinstance(plain(size), int):
            names[node] = plain(size)  # left open, and a number to the model
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
    sizes, out_spec = Sizes(inputs, dynamic, graph, own), program.call_spec.out_spec
    if update is not None:
        past = next(x for x in inputs if isinstance(x, Past))
        if own and not hold_for_any_cache(program, own, sizes.lengths, past):
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


def _is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers: dropout does in training, attention where its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = getattr(node.target, "_schema", None)
    values = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    given = {a.name: values.get(a.name, a.default_value) for a in schema.arguments}
    trains = [given[name] for name in ("train", "training") if name in given]
    return all(trains) and given.get("dropout_p", given.get("p")) != 0
