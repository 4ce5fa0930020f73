"""What torch.compile(backend="ai3") made, for `ai3_ops.explain`: the graphs that read a module's weights."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ai3_ops.explaining.report import Optimization

Compiled = Callable[..., Any]


@dataclass(eq=False)
class Graph:
    """One of Dynamo's graphs, for `ai3_ops.explain`."""

    report: Optimization | None = None  # what was made of it
    left: str = ""  # why Inductor compiled it, where it did
    code: Callable[[], Any] = lambda: True  # None once Dynamo has dropped what was compiled


_graphs: MutableMapping[Tensor, list[Graph]] = WeakIdKeyDictionary()  # by the parameters and buffers that a graph reads
_FORGOTTEN = 16  # graphs of one parameter that are kept at most


def graphs_of(module: nn.Module) -> list[Graph]:
    """The graphs that were compiled of a module's code and read its weights, in the order in which they came."""
    tensors = [*module.parameters(), *module.buffers()]
    found = dict.fromkeys(graph for tensor in tensors for graph in _graphs.get(tensor, ()))
    return [graph for graph in found if graph.code() is not None]


def remember(graph: Graph, weights: Sequence[Any], code: Compiled) -> None:
    """For `graphs_of`: what was compiled of a graph, and the weights that it reads."""
    while hasattr(code, "_torchdynamo_orig_callable"):  # Dynamo keeps what is inside of its own wrappers
        code = code._torchdynamo_orig_callable
    with contextlib.suppress(TypeError):  # not everything can be referenced weakly
        graph.code = weakref.ref(code)
    for tensor in weights:
        if isinstance(tensor, Tensor):
            _graphs[tensor] = [*[g for g in _graphs.get(tensor, ()) if g.code() is not None], graph][-_FORGOTTEN:]
