"""What runs a plan: an fx.GraphModule that is saved as its nodes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode
from torch.fx.node import map_aggregate

from ai3_ops._torch import HigherOrderOperator, OpOverload
from ai3_ops.programs.sized import Sized


class Body(fx.GraphModule):
    """fx itself pickles a graph as source and traces that on loading.

    A trace runs what the graph calls, steps that look at sizes among it, on values without any; and may give another graph.
    """

    def __init__(self, held: dict[str, Any], graph: fx.Graph) -> None:
        """`held`: the modules and constants that the graph's nodes name."""
        root = nn.Module()
        for name, value in held.items():
            if isinstance(value, nn.Module):
                root.add_module(name, value)
            else:
                root.register_buffer(name, value)
        super().__init__(root, graph)

    def recompile(self) -> PythonCode:
        """As fx does, but what follows from sizes alone is computed once for each of them."""
        code = super().recompile()
        own: Any = type(self)  # each graph module has a class of its own
        plain, made = own.forward, list[Sized]()

        @functools.wraps(plain)
        def forward(self: Body, *given: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(self, *given)
            if not made:  # graphs are put in order after this
                made.append(Sized(self))
            return made[0](*given) if made[0].runs(given) else plain(self, *given)

        own.forward = forward
        return code

    def __reduce__(self) -> tuple[Any, ...]:
        held = {str(n.target): getattr(self, str(n.target)) for n in self.graph.nodes if n.op in _NAMING}
        return _loaded, (held, [_Row.of(node) for node in self.graph.nodes])

    def __deepcopy__(self, memo: dict[int, Any]) -> Body:
        held, rows = self.__reduce__()[1]
        copied = memo[id(self)] = _loaded({name: copy.deepcopy(value, memo) for name, value in held.items()}, rows)
        return copied


_NAMING = ("get_attr", "call_module")


@dataclass(frozen=True)
class _Named:
    """A node, by its name, or an operator, which Python cannot pickle."""

    name: str
    kind: str = "node"

    def operator(self) -> Any:
        """The operator of such a name."""
        found: Any = torch.ops.higher_order if self.kind == "higher order" else torch.ops
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True)
class _Row:
    """A node of a graph in what any process can read."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, node: fx.Node) -> _Row:
        """With other nodes by their names."""
        target: Any = node.target
        if isinstance(target, OpOverload):
            target = _Named(str(target), "operator")
        elif isinstance(target, HigherOrderOperator):
            target = _Named(target.name(), "higher order")
        return cls(node.op, node.name, target, _plain(node.args), _plain(node.kwargs))


def _plain(value: Any) -> Any:
    """Lists, tuples and dicts of nodes' names, numbers and the like."""
    if isinstance(value, fx.Node):
        return _Named(value.name)
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _loaded(held: dict[str, Any], rows: list[_Row]) -> Body:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def node(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Named) else value

    for row in rows:
        target = row.target.operator() if isinstance(row.target, _Named) else row.target
        args, kwargs = map_aggregate(row.args, node), map_aggregate(row.kwargs, node)
        nodes[row.name] = graph.create_node(row.op, target, args, kwargs, name=row.name)
    return Body(held, graph)
