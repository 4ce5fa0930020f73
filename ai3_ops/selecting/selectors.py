"""Who computes what: the forms that `ai3_ops.swap` takes, and which of a model's calls each of them matches."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ai3_ops import registry
from ai3_ops._torch import OpOverload, OpOverloadPacket
from ai3_ops.registry import near
from ai3_ops.selecting.choice import Algorithm, Preference
from ai3_ops.selecting.plan import Plan

WORDS = ("auto", "default", "torch")  # bare strings that match every operation


@dataclass(frozen=True)
class Choice:
    """What a selector says about one call."""

    candidates: tuple[Algorithm | None, ...]  # in order of preference; None is PyTorch
    requested: str
    single: bool  # names this layer only: not being able to is an error
    layout: str | None = None  # of a conv2d's weight, where a plan has one
    times: tuple[float | None, float | None] = (
        None,
        None,
    )  # microseconds of it and of PyTorch's, where a plan has them


@dataclass
class Place:
    """A call as selectors see it."""

    operation: str
    module: nn.Module
    modules: list[str]  # the qualified names of the module that makes the call, several where it is shared
    suffix: str = ""  # ":relu_1" of a functional call
    shape: tuple[int, ...] | None = None  # of the first call's input, where example inputs were given
    watched: bool = False  # whether example inputs were given
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = [name + self.suffix for name in self.modules]


Selector = Any  # str | None | Algorithm | Preference | Sequence | Callable | Mapping | Plan: see swap
Tuner = Callable[[set[str]], Plan]  # measures calls, by name, of the model whose places are asked about


ITSELF = "the model itself"  # for a model whose name is ""
_SHOWN = 12  # names in a message


def listed(names: Sequence[str]) -> str:
    """For a message: the first of them."""
    return ", ".join([*names[:_SHOWN], *["…"] * (len(names) > _SHOWN)])


# How strongly a key matches a call: the smallest wins.
_CALL, _MODULE, _REGEX, _PARENT, _OPERATION, _ALL = range(6)


def assign(
    selectors: Selector,
    places: Sequence[Place],
    modules: Mapping[str, nn.Module],
    lost: Mapping[str, str],
    tune: Tuner | None = None,
) -> dict[int, Choice]:
    """The choice for each place (by index) that the selectors match.

    Lists count `places` in the order given. `modules` are the model's, by qualified name; `lost` has the reason for those
    whose calls cannot be reached. `tune` is called, once, where "auto" is asked for; None: there are no example inputs.
    ValueError and TypeError for selectors that make no sense, with near matches.
    """
    if isinstance(selectors, Plan):
        return _planned(selectors, places)
    chosen = assigned(selectors, places, modules, lost)
    automatic = {index for index, choice in chosen.items() if choice.requested == "auto"}
    if automatic:
        if tune is None:
            raise ValueError('"auto" measures, and needs example inputs')
        plan = _planned(tune({places[i].names[0] for i in automatic}), places)
        chosen |= {i: replace(plan[i], requested="auto", single=False) for i in automatic if i in plan}
    return chosen


def check_words(selectors: Selector, model: nn.Module) -> None:
    """Errors as `assign` raises, for what can be told of the model's names alone: calls are not looked at.

    ValueError for keys that are no operation and no module, regular expressions that are none, and names of no algorithm;
    TypeError for other forms.
    """
    if isinstance(selectors, Plan):
        for name, layer in selectors.layers.items():
            check_algorithm(name, layer.operation, layer.algorithm)
        return
    if not isinstance(selectors, Mapping):
        _check_form(selectors, "")
        selectors = {"*": selectors}
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for key, value in selectors.items():
        _check_form(value, f"selector {key!r}: ")
        if not isinstance(key, str) or ":" not in key:  # else perhaps a call's name
            _matches(key, [], modules, {})
        elif key.startswith("re:"):
            _pattern(key)
        if isinstance(value, (str, Algorithm, Preference)):
            _check_names(value, key)


def check_algorithm(name: str, operation: str, algorithm: str) -> None:
    """ValueError, which names both, where a plan's layer has an algorithm that does not exist."""
    if algorithm == "torch":
        return
    try:
        registry.algorithm(operation, registry.unspelled(algorithm)[0])
    except ValueError as error:
        raise ValueError(f"plan: layer {name!r} (algorithm {algorithm!r}): {error}") from None


def _planned(plan: Plan, places: Sequence[Place]) -> dict[int, Choice]:
    """The choices of a plan, to the letter; ValueError, which names both, for layers or algorithms that do not exist."""
    indices = {name: i for i, place in enumerate(places) for name in place.names}
    chosen = {}
    for name, layer in plan.layers.items():
        what = f"layer {name!r} (algorithm {layer.algorithm!r})"
        if name not in indices:
            raise ValueError(f"plan: {what}: there is no such layer in this model{near(name, indices)}")
        place = places[indices[name]]
        if place.operation != layer.operation:
            raise ValueError(f"plan: {what}: is a {place.operation} in this model, a {layer.operation} in the plan")
        check_algorithm(name, layer.operation, layer.algorithm)
        candidates = _candidates(layer.algorithm, layer.operation, exact=True)
        chosen[indices[name]] = Choice(candidates, layer.algorithm, True, layer.layout, (layer.time_us, layer.torch_us))
    return chosen


def assigned(
    selectors: Selector, places: Sequence[Place], modules: Mapping[str, nn.Module], lost: Mapping[str, str]
) -> dict[int, Choice]:
    """As `assign`, where "auto" is still a word."""
    if not isinstance(selectors, Mapping):
        _check_form(selectors, "")
        every = selectors is None or (isinstance(selectors, str) and selectors in WORDS)
        if not every:
            _check_bare(selectors)
        selectors = {"*" if every else "conv2d": selectors}
    chosen: dict[int, tuple[tuple[int, int], Choice]] = {}
    for order, (key, value) in enumerate(selectors.items()):
        _check_form(value, f"selector {key!r}: ")
        strengths = _matches(key, places, list(modules), lost)
        if not strengths and not _leaves_alone(value):
            _check_reached(key, modules, lost)
        for index, choice in _choices(key, value, places, strengths).items():
            strength = (strengths[index][0], order if strengths[index][0] == _REGEX else -strengths[index][1])
            if index not in chosen or strength < chosen[index][0]:
                chosen[index] = strength, choice
    return {index: choice for index, (_, choice) in chosen.items()}


def _check_form(value: Selector, label: str) -> None:
    if label and isinstance(value, Mapping):
        raise TypeError(
            f"{label}dicts do not nest; write each name out, as in {{'layer1.conv': 'direct'}}, got {value!r}"
        )
    if isinstance(value, Plan):
        raise TypeError(f"{label}a plan is for a whole model, and is no value of a dict")
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        raise TypeError(
            f"{label}an operator is no selector; name its algorithm, as 'direct' for ai3::conv2d_direct, got {value}"
        )
    if isinstance(value, (Mapping, nn.Module, type, bytes, bytearray)) or not (
        value is None or isinstance(value, (str, Algorithm, Sequence)) or callable(value)
    ):
        raise TypeError(
            f"{label}a selector is a name, Algorithm(...), prefer(...), a list, a function or a dict, got {value!r}"
        )


def _matches(
    key: str, places: Sequence[Place], module_names: list[str], lost: Mapping[str, str]
) -> dict[int, tuple[int, int]]:
    """Which places a key matches, each with the kind of match and, for parents, the depth."""
    operations = registry.operations()
    if not isinstance(key, str):
        raise TypeError(f"a selector's key is a string, got {key!r}")
    if key in operations:
        return {i: (_OPERATION, 0) for i, p in enumerate(places) if p.operation == key}
    if key == "*":
        return dict.fromkeys(range(len(places)), (_ALL, 0))
    if key.startswith("re:"):
        pattern = _pattern(key)
        found = {i: (_REGEX, 0) for i, p in enumerate(places) if any(map(pattern.fullmatch, p.names + p.modules))}
        if not found and not any(map(pattern.fullmatch, module_names)):
            raise ValueError(
                f"selector {key!r} matches no module and no call{near(key.removeprefix('re:'), module_names)}"
            )
        return found
    found = {}
    for i, place in enumerate(places):
        if key in place.names and place.suffix:
            found[i] = (_CALL, 0)
        elif key in place.modules:
            found[i] = (_MODULE, 0)
        elif key == "":
            found[i] = (_PARENT, -1)
        elif any(name.startswith(f"{key}.") for name in place.modules):
            found[i] = (_PARENT, key.count("."))
    if not found and key not in module_names and key.partition(":")[0] not in lost:
        words = [*operations, *module_names, *(name for p in places for name in p.names)]
        hint = _as_regex(key, words) or near(key, words)
        raise ValueError(f"selector {key!r} is no operation and no name in this model{hint}")
    return found


def _as_regex(key: str, words: Sequence[str]) -> str:
    """The end of an error message: the regular expression that a shell's pattern such as "*conv*" stands for."""
    if not any(mark in key for mark in "*?["):
        return ""
    pattern = re.escape(key).replace(r"\*", ".*").replace(r"\?", ".").replace(r"\[", "[").replace(r"\]", "]")
    with contextlib.suppress(re.error):
        count = sum(re.fullmatch(pattern, word) is not None for word in dict.fromkeys(words))
        return f"; as a pattern of names it is {f're:{pattern}'!r}, which matches {count} of them"
    return ""


def _pattern(key: str) -> re.Pattern[str]:
    """Of a key that begins with "re:"."""
    try:
        return re.compile(key.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"selector {key!r} is not a regular expression: {error}") from None


def _check_reached(key: str, modules: Mapping[str, nn.Module], lost: Mapping[str, str]) -> None:
    """ValueError, with the reason, where a key that matches no call names modules: operations may match nothing."""
    operations, owner = registry.operations(), key.partition(":")[0]
    if key in operations or key == "*":
        return
    if owner in lost and not key.startswith("re:"):
        raise ValueError(f"selector {key!r}: the calls that {owner!r} makes cannot be replaced: {lost[owner]}")
    matches = re.compile(key[3:]).fullmatch if key.startswith("re:") else lambda name: name.startswith(f"{key}.")
    for name, reason in lost.items():
        if matches(name):
            raise ValueError(f"selector {key!r}: the calls that {name!r} makes cannot be replaced: {reason}")
    what = type(modules[key]).__name__ if key in modules else "what it matches"
    inside = (
        "; a plain name reaches what lies inside, a regular expression as in 're:layer1\\..*'"
        if key.startswith("re:")
        else ""
    )
    raise ValueError(
        f"selector {key!r}: {what} makes no call that ai3_ops swaps; it swaps {', '.join(operations)}{inside}"
    )


def _choices(
    key: str, value: Selector, places: Sequence[Place], strengths: Mapping[int, tuple[int, int]]
) -> dict[int, Choice]:
    """What a key's value says about each place that the key matches."""
    if isinstance(value, (str, Algorithm, Preference)) or value is None:
        found = {}
        for index, (kind, _) in strengths.items():
            place = places[index]
            candidates = _candidates(value, place.operation, exact=kind == _OPERATION)
            if candidates:
                found[index] = Choice(candidates, _text(value), single=kind in (_CALL, _MODULE))
        _check_names(value, key)
        if strengths and not found and not _leaves_alone(value) and key not in (*registry.operations(), "*"):
            made = sorted({places[i].operation for i in strengths})
            raise ValueError(f"selector {key!r}: no call there has {_text(value)}; its calls are {', '.join(made)}")
        return found
    # A list or a function applies to the key's operation, of the layer or call of that name, otherwise of conv2d.
    indices = [
        i
        for i, (kind, _) in strengths.items()
        if kind in (_CALL, _OPERATION) or (kind == _MODULE and not places[i].suffix) or places[i].operation == "conv2d"
    ]
    if callable(value):
        answers: Sequence[Any] = [_ask(value, places[i]) for i in indices]
    elif len(value) != len(indices):
        names = [places[i].names[0] or ITSELF for i in indices]
        counts = f"{len(indices)} ({listed(names)}), got {len(value)}"
        kinds = " or ".join(sorted({places[i].operation for i in indices})) or "conv2d"
        raise ValueError(f"selector {key!r}: a list needs one algorithm per {kinds} layer: {counts}")
    else:
        answers = value
    found = {}
    for index, answer in zip(indices, answers, strict=True):
        place = places[index]
        given = f"selector {key!r} gives {answer!r} for {place.names[0]!r}"
        if not (answer is None or isinstance(answer, (str, Algorithm, Preference))):
            raise ValueError(f"{given}, which names no algorithm")
        try:
            candidates = _candidates(answer, place.operation, exact=True)
        except ValueError as error:
            raise ValueError(f"{given}: {error}") from None
        found[index] = Choice(candidates, _text(answer), single=True)
    return found


def _ask(function: Callable[..., Any], place: Place) -> Any:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    any_number = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if required == 1 and not any_number:  # further ones keep their defaults, as in lambda m, name=name: name
        return _answer(function, place, place.module)
    if not any_number and (required > 2 or len(positional) < 2):
        raise TypeError(f"a selector function takes (module) or (module, input_shape), got {function!r}")
    if place.shape is None:
        why = "needs example inputs" if not place.watched else "needs example inputs that reach every layer"
        raise ValueError(f"a selector function of (module, input_shape) {why}: no shape for {place.names[0]!r}")
    return _answer(function, place, place.module, place.shape)


def _answer(function: Callable[..., Any], place: Place, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        asked = repr(place.names[0]) if place.names[0] else ITSELF
        error.add_note(f"ai3_ops: the selector function was asked for {asked}")
        raise


def supporting(operation: str, supports: Callable[[Algorithm], bool]) -> str:
    """The end of a refusal: which of the operation's algorithms can do what the named one cannot."""
    names = [
        name for name in dict.fromkeys(a.name for a in registry.algorithms(operation)) if supports(Algorithm(name))
    ]
    return f"algorithms that support it: {', '.join(names) or 'none'}"


def _leaves_alone(value: Any) -> bool:
    if isinstance(value, Preference):
        return all(map(_leaves_alone, value))
    return value is None or value == "torch"


def _text(value: Any) -> str:
    return "torch" if value is None else value if isinstance(value, str) else repr(value)


def _candidates(value: Any, operation: str, *, exact: bool) -> tuple[Algorithm | None, ...]:
    """The algorithms of `operation` that a name, Algorithm or preference offers; all must exist when `exact`."""
    names = {a.name for a in registry.algorithms(operation)}
    found: list[Algorithm | None] = []
    for one in value if isinstance(value, Preference) else (value,):
        if _leaves_alone(one) or one == "auto":  # decided later
            found.append(None)
            continue
        algorithm = (Algorithm.of(one) if exact else Algorithm(one)) if isinstance(one, str) else one
        if exact or names.issuperset(algorithm.names):
            try:
                algorithm.operator(operation)
            except ValueError:  # an operation without a choice of what its rule excludes, or of gradients' algorithms
                if exact:
                    raise
                continue
            found.append(algorithm)
    return tuple(found)


def _named(value: Any) -> Iterator[str]:
    """The algorithms' names in one, an Algorithm or a preference."""
    for one in value if isinstance(value, Preference) else (value,):
        if not _leaves_alone(one) and one != "auto":
            yield from [one] if isinstance(one, str) else one.names


def _check_bare(value: Any) -> None:
    """ValueError where what is given without an operation, so for conv2d, is another operation's."""
    if not isinstance(value, (str, Algorithm, Preference)):
        return
    for name in _named(value):
        operations = sorted({a.operation for a in registry.algorithms() if a.name == name})
        if operations and "conv2d" not in operations:
            raise ValueError(
                f"{name!r} is an algorithm of {' and '.join(operations)}, and what is given alone is one of conv2d's: "
                f"name the operation, as in {{{operations[0]!r}: {value!r}}}"
            )


def _check_names(value: Any, key: str) -> None:
    names = {a.name for a in registry.algorithms()}
    for name in _named(value):
        if name not in names:
            raise ValueError(f"selector {key!r}: no algorithm {name!r}{near(name, [*names, 'torch'])}")
    for one in value if isinstance(value, Preference) else (value,):
        for pattern in one.exclude if isinstance(one, Algorithm) else ():
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"selector {key!r}: exclude: no algorithm {pattern!r}{near(pattern, names)}")


def idle(
    selectors: Selector, places: Sequence[Place], modules: Mapping[str, nn.Module], lost: Sequence[str]
) -> list[str]:
    """The operations and "*" that selectors, which make sense, name an algorithm for, and that no call has.

    Of operations in `lost` there may be calls out of reach.
    """
    if isinstance(selectors, Plan) or selectors is None or (isinstance(selectors, str) and selectors in WORDS):
        return []
    if not isinstance(selectors, Mapping):
        selectors = {"conv2d": selectors}
    found = []
    for key, value in selectors.items():
        if (key not in registry.operations() and key != "*") or _leaves_alone(value):
            continue
        if key in lost or (key == "*" and lost):
            continue
        strengths = _matches(key, places, list(modules), {})
        named = isinstance(value, (str, Algorithm, Preference))
        if not (_choices(key, value, places, strengths) if named else strengths):
            found.append(f"{key}: {_text(value)}" if named else key)
    return found


def matched(selectors: Selector, operation: str, module: nn.Module, names: list[str]) -> bool:
    """Whether the selectors, which make sense, ask for an algorithm for a call of `operation` that `module` makes."""
    if isinstance(selectors, Plan):  # of calls that can be reached
        return False
    if not isinstance(selectors, Mapping):
        every = isinstance(selectors, str) and selectors in WORDS
        selectors = {"*" if every else "conv2d": selectors}
    place = Place(operation, module, names, ":")
    best: tuple[tuple[int, int], bool] | None = None
    for order, (key, value) in enumerate(selectors.items()):
        if key.startswith("re:"):  # which need not match this call
            pattern = re.compile(key.removeprefix("re:"))
            strengths = {0: (_REGEX, 0)} if any(map(pattern.fullmatch, names)) else {}
        else:
            strengths = _matches(key, [place], [key], {})
        if 0 not in strengths:
            continue
        kind, depth = strengths[0]
        if isinstance(value, (str, Algorithm, Preference)) or value is None:
            candidates = _candidates(value, operation, exact=False)
            if not candidates:
                continue
            wanted = value == "auto" or None not in candidates  # else PyTorch is one of those asked for
        else:
            wanted = kind in (_MODULE, _OPERATION) or operation == "conv2d"
        strength = (kind, order if kind == _REGEX else -depth)
        if best is None or strength < best[0]:
            best = strength, wanted
    return best is not None and best[1]
