"""A model's calls, and which tensors go from one to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ai3_ops._torch import pytree
from ai3_ops.calls.call import Call
from ai3_ops.calls.spec import Spec
from ai3_ops.measuring.timing import Layer
from ai3_ops.nn.computed import copied
from ai3_ops.nn.layout import FORMER
from ai3_ops.nn.unswap import unswap
from ai3_ops.problem import is_channels_last
from ai3_ops.selecting.plan import CHANNELS_LAST, CONTIGUOUS
from ai3_ops.surveying.watching import survey


@dataclass
class Site:
    """A call of the model, as a node of the graph."""

    name: str
    layer: Layer
    weighs: bool  # an nn.Conv2d, whose weight's layout decides the output's
    count: int  # how often it is called
    nodes: list[int]  # of a conv2d one, whatever its calls: they have one weight; else one for each call


class Edge(NamedTuple):
    """A four-dimensional tensor that goes from one node to another; by their numbers."""

    first: int
    second: int
    shape: tuple[int, ...]


class CallGraph:
    """A model's calls, in order, and which tensors go from one to another: seen in one run on the example inputs.

    The functions that the run calls are watched, so that any model has a graph, whatever its control flow. Nodes are the calls
    that can be chosen for, other functions that make one four-dimensional tensor of another, and tensors from outside.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self._largest = 0  # of what functions returned, in bytes
        self.layouts: list[tuple[str, ...]] = []  # of each node, those that it can have
        self.sites: list[Site] = []
        self.edges: list[Edge] = []
        self._producers = WeakIdKeyDictionary()  # the node that made a tensor
        self._nodes: dict[Call, list[int]] = {}
        self._parameters: dict[Call, tuple[bool, ...]] = {}
        self._counts: dict[Call, int] = {}
        # Parameters are shared in evaluation mode, where no forward writes to them but the first of a lazy module: their copy
        # took longer than the run.
        shared = {} if model.training else {id(p): p for p in model.parameters() if not is_lazy(p)}
        for module in model.modules():
            if FORMER in vars(module):  # whose weight gets its former memory format
                shared.pop(id(module._parameters.get("weight")), None)
        model = unswap(copied(model, "ai3_ops.tune", memo=shared))
        for site in survey(model, example_inputs, self._record):
            call, example = site.call, site.call.example
            assert example is not None
            parameters = (*self._parameters[call], *[False] * len(example))[: len(example)]
            if any(isinstance(a, Spec) and (a.device == "meta" or not a.shape) for a in example[:1]):
                continue
            layer = Layer(call.operation, tuple(map(_plain, example)), parameters, site.in_place)
            weighs = site.site is None and call.operation == "conv2d" and parameters[1] and len(example[0].shape) == 4
            nodes = self._nodes.get(call) or [self._node(layer.layouts)]
            self.sites.append(Site(site.names[0], layer, weighs, self._counts[call], nodes))
        # What passes the caches during one call: weights, and a layer's input and output, whose memory the next ones get.
        self.bytes = sum(p.numel() * p.element_size() for p in model.parameters()) + 2 * self._largest

    def _node(self, layouts: tuple[str, ...]) -> int:
        self.layouts.append(layouts)
        return len(self.layouts) - 1

    def _record(self, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self._largest = max([self._largest, *(t.numel() * t.element_size() for t in outputs)])
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if call is not None:
            self._parameters.setdefault(call, tuple(type(a) is nn.Parameter for a in args))
            self._counts[call] = self._counts.get(call, 0) + 1
            inputs = inputs[:1]
        images = [t for t in inputs if t.ndim == 4 and not isinstance(t, nn.Parameter)]
        if not images or not (call or any(t.ndim == 4 for t in outputs)):
            return
        nodes = [] if call is None else self._nodes.setdefault(call, [])
        if not (nodes and call is not None and call.operation == "conv2d"):
            nodes.append(self._node((CHANNELS_LAST, CONTIGUOUS)))
        node = nodes[-1]
        for tensor in images:
            if tensor not in self._producers:
                layout = CHANNELS_LAST if is_channels_last(tensor) else CONTIGUOUS
                self._producers[tensor] = self._node((layout,))
            self.edges.append(Edge(self._producers[tensor], node, tuple(tensor.shape)))
        for tensor in outputs:
            if tensor.ndim == 4:
                self._producers[tensor] = node

    @property
    def layers(self) -> dict[Layer, int]:
        """The distinct ones, with how often each is called; those with most work first."""
        counts: dict[Layer, int] = {}
        for site in self.sites:
            counts[site.layer] = counts.get(site.layer, 0) + site.count
        return dict(sorted(counts.items(), key=lambda item: -item[0].work * item[1]))


def _plain(argument: Any) -> Any:
    """Without strides; lists as tuples."""
    if isinstance(argument, Spec):
        return argument._replace(stride=())
    return tuple(argument) if isinstance(argument, list) else argument
