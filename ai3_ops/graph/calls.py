"""Calls of a module in turn, which a captured graph is compared with, and what they change."""

from __future__ import annotations

import contextlib
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops._torch import TorchDispatchMode, pytree
from ai3_ops.graph.network import Network, agree, flat
from ai3_ops.graph.state import changes, copied, others
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
        before = [(name, value, *pytree.tree_flatten(value)) for name, value in named(self.module, own)]
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


def named(module: nn.Module, inputs: Inputs) -> list[tuple[str, Any]]:
    """Arguments by their names."""
    names: list[str] = []
    with contextlib.suppress(ValueError):  # of what torch.jit compiled
        names = [*inspect.signature(module.forward).parameters]
    names += [f"argument {i}" for i in range(len(names), len(inputs.args))]
    return [*zip(names, inputs.args, strict=False), *inputs.kwargs.items()]
