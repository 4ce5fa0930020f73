"""One choice: an algorithm with its parameters, or several in the order of preference."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

import torch

from ai3_ops import registry
from ai3_ops._torch import OpOverload
from ai3_ops.registry import near


class Algorithm:
    """A choice with parameters: `Algorithm("winograd", backward_input="im2col")`.

    backward_input and backward_weight name the algorithms of the gradients (conv2d, linear); None: its own.
    exclude has names of algorithms, or patterns with * and ?, that a rule such as `default` or `guess` may not choose:
    `Algorithm("default", exclude=("winograd*",))`. It applies to what computes the output, in every form of the model:
    eager, compiled, exported, pickled. Further parameters are the operator's keyword arguments.
    TypeError for what is no name, ValueError for a pattern that could be none.
    """

    exclude: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        *,
        backward_input: str | None = None,
        backward_weight: str | None = None,
        exclude: Sequence[str] = (),
        **parameters: Any,
    ) -> None:
        for given in (name, backward_input or "", backward_weight or ""):
            if not isinstance(given, str):
                raise TypeError(f"Algorithm() takes names of algorithms, got {given!r}")
        self.name = name
        self.backward = (backward_input, backward_weight)
        self.parameters = parameters
        if isinstance(exclude, str) or not all(isinstance(pattern, str) for pattern in exclude):
            raise TypeError(f"Algorithm() takes exclude as a tuple of names or patterns, got {exclude!r}")
        if wrong := [p for p in exclude if not re.fullmatch(r"[\w*?]+", p)]:
            raise ValueError(f"Algorithm(): exclude has letters, digits, underscores, * and ?, got {wrong[0]!r}")
        self.exclude = tuple(exclude)
        if not parameters:
            return
        for parameter, value in parameters.items():
            if isinstance(value, torch.Tensor):
                raise TypeError(
                    f"Algorithm({name!r}) takes numbers and words, got a tensor as {parameter}: that is an argument of calls"
                )
        known = {a.name: str(a.type) for i in registry.registered() if i.name == name for a in _keywords(i.operator)}
        for parameter, value in parameters.items() if known else ():  # one of the user's own may not be registered yet
            if parameter not in known:
                words = sorted({*known, "backward_input", "backward_weight"})
                raise TypeError(f"Algorithm({name!r}) has no parameter {parameter!r}{near(parameter, words)}")
            if "Tensor" in known[parameter]:
                what = f"{parameter} is a tensor, an argument of calls; got {value!r}"
                raise TypeError(f"Algorithm({name!r}) takes numbers and words, and {what}")
            if known[parameter] == "bool" and not isinstance(value, bool):
                raise TypeError(f"Algorithm({name!r}) needs {parameter} to be True or False, got {value!r}")

    @classmethod
    def of(cls, text: str) -> Algorithm:
        """A choice from the one word by which programs and plans name it: "mine(window=256)"."""
        name, parameters = registry.unspelled(text)
        return cls(name, **parameters)

    @property
    def names(self) -> list[str]:
        """All algorithms that this choice needs."""
        return list(dict.fromkeys([self.name, *filter(None, self.backward)]))

    @property
    def excluded(self) -> str:
        """The patterns as operators and the registry take them."""
        return ",".join(self.exclude)

    def excludes(self, name: str) -> bool:
        """Whether a rule may not choose the algorithm of that name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def operator(self, operation: str) -> tuple[OpOverload, dict[str, Any]]:
        """What to call, and its further keyword arguments; ValueError for names and parameters that do not exist."""
        for name in self.names:
            registry.algorithm(operation, name)
        operator, options = registry.algorithm(operation, self.name).operator, dict(self.parameters)
        if self.exclude and not registry.is_rule(operation, self.name):
            raise ValueError(f"{operation} {self.name!r} is no rule that chooses among others, got {self}")
        excluding = self.exclude and any(self.excludes(a.name) for a in registry.algorithms(operation))
        if any(self.backward) or excluding:
            for name in self.names:
                if registry.algorithm(operation, name).python:
                    raise ValueError(f"{operation} {name!r} is a Python callable, which cannot be part of {self}")
            mixed = getattr(torch.ops.ai3, f"_{operation}_mixed", None)
            if mixed is None:
                raise ValueError(f"{operation} has no choice of backward algorithms and none to exclude, got {self}")
            given, weight = self.backward
            words = {"forward": self.name, "backward_input": given or "", "backward_weight": weight or ""}
            if self.exclude:
                words["exclude"] = self.excluded
            operator, options = mixed.default, options | words
        known = [a.name for a in _keywords(operator)]
        for parameter in options:
            if parameter not in known:
                raise ValueError(f"{operator.name()} has no parameter {parameter!r}{near(parameter, known)}")
        return operator, options

    def __repr__(self) -> str:
        backward = zip(("backward_input", "backward_weight"), self.backward, strict=True)
        given = {k: v for k, v in backward if v is not None}
        given |= ({"exclude": self.exclude} if self.exclude else {}) | self.parameters
        return f"Algorithm({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in given.items())])})"

    def __str__(self) -> str:
        return repr(self) if any(self.backward) or self.exclude or self.parameters else self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Algorithm) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.name, self.backward, self.exclude, *sorted(self.parameters)))


def _keywords(operator: OpOverload) -> list[torch.Argument]:
    return [a for a in operator._schema.arguments if a.kwarg_only]


_AUTO = 'prefer() takes no "auto", which measures and always finds an algorithm'


class Preference(tuple[Any, ...]):
    """What `prefer` returns."""

    def __repr__(self) -> str:
        return f"prefer({', '.join(map(repr, self))})"


def prefer(*choices: str | Algorithm | None) -> Preference:
    """The first of several algorithms that supports the layer; end with "torch" to leave the others alone."""
    if not choices:
        raise ValueError("prefer() needs at least one algorithm")
    if "auto" in choices:
        raise ValueError(_AUTO)
    for choice in choices:
        if not isinstance(choice, (str, Algorithm, type(None))):
            raise TypeError(f"prefer() takes names and Algorithm(...), got {choice!r}")
    return Preference(choices)
