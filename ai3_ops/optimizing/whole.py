"""optimize: a whole network, rewritten and run as programs (docs/optimize.md)."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ai3_ops import _library
from ai3_ops._torch import pytree, users_level, without_autocast
from ai3_ops.explaining.report import Optimization
from ai3_ops.graph.alike import Graphs
from ai3_ops.graph.caches import is_cache
from ai3_ops.graph.calls import Calls, Uncapturable, named
from ai3_ops.graph.network import difference
from ai3_ops.graph.state import copied, others, same_random_numbers
from ai3_ops.nn.unswap import unswap
from ai3_ops.optimizing import pipeline
from ai3_ops.optimizing.module import GENERATE, GENERATES, Optimized
from ai3_ops.optimizing.outside import Outside
from ai3_ops.optimizing.pipeline import Budget, Settings
from ai3_ops.programs.timing import interleaved
from ai3_ops.selecting.plan import Plan
from ai3_ops.selecting.selectors import check_words, listed
from ai3_ops.surveying import examples
from ai3_ops.surveying.examples import Inputs
from ai3_ops.surveying.modules import refuse_meta, refuse_optimized
from ai3_ops.surveying.running import does_not_run
from ai3_ops.tuning.settings import check_flags


def optimize(
    model: nn.Module, example_inputs: Any, settings: Settings, *, keep_original: bool, progress: bool
) -> nn.Module:
    """As `ai3_ops.optimize`, which calls it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.optimize needs an nn.Module, got {type(model).__name__}")
    refuse_optimized(model, "ai3_ops.optimize", "optimize the original model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"ai3_ops.optimize: {name!r} of a lazy module has no size yet: run the model once")
    refuse_meta(model, "ai3_ops.optimize")
    check_flags("optimize", keep_original=keep_original, progress=progress)
    budget = Budget(settings.budget_seconds)
    check_words(settings.selectors, model)
    bounds = {"memory_limit": settings.memory_limit, "tolerance": settings.tolerance}
    if settings.selectors == "default" and (given := [name for name, value in bounds.items() if value is not None]):
        warnings.warn(
            f'ai3_ops.optimize: {" and ".join(given)} with selectors "default", which measures nothing, bounds nothing; "auto" '
            "keeps such bounds",
            stacklevel=users_level(),
        )
    if isinstance(settings.selectors, Plan):
        settings.selectors.check_machine(stacklevel=users_level() + 1)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        without_autocast(),
        same_random_numbers(),
        _status(progress) as show,
    ):
        original = unswap(copied(model))
        if model.training:
            original.eval()
        example_inputs, further = _each(original, example_inputs)
        args, kwargs = _own(example_inputs)
        state, first = _state_outside(original, args, kwargs, example_inputs)
        whole, left = Optimized(original, settings), Left()
        try:
            if state:
                raise Uncapturable(f"a call changes {listed(state)}, outside of its modules", state)
            whole.plan(args, kwargs, progress=show, budget=budget, first=first)
            if whole.changed and callable(getattr(original, GENERATE, None)):
                whole._ai3_report.parts[0].notes.append(GENERATES)
        except Uncapturable as reason:
            left.add("", reason)
            if state:
                whole._ai3_report.left = dict(left)
            else:
                whole = _by_parts(original, settings, args, kwargs, left, show, budget)
        for more in further:
            show("further examples")
            try:
                whole.plan_further(*_own(more))
            except Exception as error:
                raise does_not_run("ai3_ops.optimize", more, error) from error
        if not keep_original:
            for module in list(whole.modules()):
                if isinstance(module, Optimized):
                    module.forget_original()
    _library.release_workspace()  # graphs and folded weights are gone
    left.warn(whole)
    return whole


def _each(model: nn.Module, example_inputs: Any) -> tuple[Any, list[Any]]:
    """The first of several examples and the others; a list that the model takes as its one argument is one example."""
    several = type(example_inputs) is list and all(isinstance(e, (Tensor, tuple, Mapping)) for e in example_inputs)
    if not several or len(example_inputs) < 2:
        return example_inputs, []
    if all(isinstance(e, Tensor) for e in example_inputs) and (
        _runs(model, (example_inputs,)) or not _runs(model, example_inputs[0])
    ):
        return example_inputs, []
    return example_inputs[0], example_inputs[1:]


def _runs(model: nn.Module, example_inputs: Any) -> bool:
    try:
        _outputs(copied(model, sharing=True), *examples.arguments(example_inputs))
    except Exception:
        return False
    return True


def _own(example_inputs: Any) -> Any:
    """Arguments and keyword arguments, tensors with memory of their own."""
    args, kwargs = examples.arguments(example_inputs)
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))


MASK = "attention_mask"  # of transformers' models: which tokens are no padding
TOKENS = 8  # that are generated to compare with
UNPLANNED = ".*: (planned anew|its programs|batches of other)"  # warnings about other sizes
OVER = "the budget was used up, a larger budget_seconds reaches it"


class Left(dict[str, str]):
    """By the names of modules that were not captured, why; and what their calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.state: list[str] = []

    def add(self, name: str, reason: Any) -> None:
        """One more, with the Uncapturable that says why."""
        self[name] = str(reason)
        self.state += [found for own in reason.state if (found := f"{name}.{own}" if name else own) not in self.state]

    def warn(self, whole: Any) -> None:
        """Says once what kept a model from being faster, or what it keeps between calls."""
        if self.state:
            warnings.warn(
                f"ai3_ops.optimize: a call changes {listed(self.state)}: the modules that do so are not captured and run as they "
                "were; ai3_ops.explain lists them",
                stacklevel=users_level(),
            )
        elif reason := whole._ai3_report.gains_nothing():
            warnings.warn(f"ai3_ops.optimize: the model is as fast as before: {reason}", stacklevel=users_level())
        elif late := [name for name, reason in self.items() if reason == OVER]:
            warnings.warn(
                f"ai3_ops.optimize: the budget was used up before {listed(late)}, which run as they were: a larger "
                "budget_seconds reaches them",
                stacklevel=users_level(),
            )
        elif reason := whole._ai3_report.gains_little():
            warnings.warn(f"ai3_ops.optimize: the model is only {reason}", stacklevel=users_level())


def _state_outside(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example_inputs: Any
) -> tuple[list[str], Calls]:
    """Runs a copy of a model: what each call changes outside of its modules, which is as before then; and the first call.

    What only the first call changes, as a table for its sizes, does not count.
    """
    before, cold = Outside(model), copied(model, sharing=True)
    first = _run(model, args, kwargs, example_inputs, cold)
    if not before.changes():
        return [], first
    after = Outside(model)
    with contextlib.suppress(Exception):  # of values that the model refuses
        _outputs(copied(cold, sharing=True), *others(args, kwargs))
    state = after.changes()
    if state:
        before.put_back()
    return state, first


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example_inputs: Any, cold: nn.Module
) -> Calls:
    """The first call, of a copy; RuntimeError, with what may be meant, where the model does not run."""
    try:
        return Calls(copied(model, sharing=True), args, kwargs, cold)
    except Exception as error:
        raise does_not_run("ai3_ops.optimize", example_inputs, error) from error


def _by_parts(
    original: nn.Module,
    settings: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    left: Left,
    show: Any,
    budget: Any,
) -> Any:
    """Replaces the largest submodules that can be captured, in place, as long as the model computes what it did.

    What runs meanwhile are copies that share its parameters, from the state that it is in.
    """
    calls: dict[nn.Module, list[Inputs]] = {}  # of each module the first, and those of generating that differ in sizes
    sizes: dict[nn.Module, set[Any]] = {}
    cached: dict[int, Any] = {}  # copies of caches, as they were when the model was called

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, Tensor) and x.is_nested for x in leaves):  # which no graph takes
            return
        if module is before:
            cached.clear()
        known = sizes.setdefault(module, set())
        key = tuple(x.shape if isinstance(x, Tensor) else repr(x) for x in leaves)
        if module not in calls or (expected and key not in known):
            as_now = functools.partial(_as_it_is_now, cached)
            calls.setdefault(module, []).append(Inputs(*pytree.tree_map(as_now, (args, kwargs))))
        known.add(key)

    before, after, again = (copied(original, sharing=True) for _ in range(3))  # the last one for a second opinion
    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in before.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    inputs, expected = [(args, kwargs)], list[Any]()
    with same_random_numbers():
        try:
            expected.append(_outputs(before, args, kwargs))
            generates = _generates(before, args, kwargs)
        finally:
            for handle in handles:
                handle.remove()
        with contextlib.suppress(Exception):  # of values that the model refuses
            more = others(args, kwargs)
            expected.append(_outputs(before, *more))
            inputs.append(more)
    # Of the model's modules those that were captured, by their own: what replaces each, the copy that ran, and where it is.
    done: dict[nn.Module, tuple[Optimized, nn.Module, list[str]]] = {}
    graphs = Graphs()
    replaced: list[str] = []
    parts: list[Optimization] = []

    def replace(path: str, module: nn.Module) -> None:
        replaced.append(path)
        after.set_submodule(path, module)

    def descend(parent: nn.Module, prefix: str) -> None:
        if isinstance(parent, torch.jit.ScriptModule):
            return
        for name, child in list(parent.named_children()):
            path = f"{prefix}{name}"
            if child in done:
                done[child][2].append(path)
                continue
            if budget.over:
                left[path] = OVER
                continue
            ran = before.get_submodule(path)
            if ran in calls and any(p.ndim > 1 for p in child.parameters()):
                optimized = Optimized(child, settings)
                try:
                    optimized.plan(*calls[ran][0], path, show, again, budget, again.get_submodule(path), graphs=graphs)
                except Uncapturable as error:
                    left.add(path, error)
                else:
                    optimized._ai3_most = max(optimized._ai3_most, len(sizes[ran]))
                    done[child] = optimized, ran, [path]
                    continue
            descend(child, f"{path}.")

    descend(original, "")
    most = max((len(calls[ran]) for _, ran, _ in done.values()), default=0)
    for turn in range(
        1, most
    ):  # of all parts the second calls, which are steps, and then the third: the budget may end
        for optimized, ran, (path, *_) in done.values():
            if turn < len(calls[ran]) and not budget.over:
                rehearsal = again.get_submodule(path)
                optimized.plan_call(*calls[ran][turn], settings, show, again, budget, rehearsal, graphs)
    for optimized, _, paths in done.values():
        parts.extend(optimized._ai3_report.parts)
        for path in paths if optimized.changed else ():
            replace(path, optimized)
    report = pipeline.Optimization("")
    if replaced:
        if wrong := _changes(after, inputs, expected, settings.allow_approximate):
            if _changes(again, inputs, expected, False):
                wrong = "what it returns depends on earlier calls through something outside of its modules"
            left[""] += f"; and with {len(parts)} parts optimized {wrong}"
            parts = []
        elif pipeline._slower(
            lambda: _again(before, args, kwargs), lambda: _again(after, args, kwargs), report, "in parts"
        ):
            left[""] += f"; and with {len(parts)} parts optimized it was not faster: {report.unchanged}"
            for part in parts:
                part.unchanged = part.unchanged or "the whole model was not faster with it"
        elif slower := generates and _generates_slower(before, after, args, kwargs, report):
            left[""] += f"; and with {len(parts)} parts optimized {slower}"
            for part in parts:
                part.unchanged = part.unchanged or "the whole model did not generate faster with it"
        else:
            for path in replaced:
                original.set_submodule(path, after.get_submodule(path))
    whole = Optimized(original, pipeline.unthorough(settings, {}))
    modules = [module for module in whole.modules() if isinstance(module, Optimized)]
    patience = whole._ai3_patience / max(1, len(modules) - 1)
    for module in modules:
        module._ai3_told, module._ai3_patience = whole._ai3_told, patience
    whole._ai3_report.parts, whole._ai3_report.left = parts, dict(left)
    whole._ai3_report.before_ms, whole._ai3_report.after_ms = report.before_ms, report.after_ms
    if report.notes and whole._ai3_report.parts:
        whole._ai3_report.parts[0].notes += report.notes
    return whole


def _as_it_is_now(cached: dict[int, Any], leaf: Any) -> Any:
    """An argument that a later call may change, as a cache that grows, with a state of its own; tensors as they are.

    Of a cache, which all layers are called with, there is one copy.
    """
    if isinstance(leaf, Tensor):
        return leaf
    if not is_cache(leaf):
        return examples.copied(leaf)
    if id(leaf) not in cached:
        cached[id(leaf)] = examples.copied(leaf)
    return cached[id(leaf)]


def _generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, **options: Any) -> Any:
    """Text after the example, by transformers' `generate`."""
    given = examples.copied(Inputs(args, kwargs))
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    first = given.args[:1]  # after which `generate` has other positions
    with torch.no_grad():
        return model.generate(*first, **dict(named(model, given)[len(first) :]) | options)


def _generates(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model generates text after the example; it makes a prompt's and a step's calls, with masks, too."""
    if not callable(getattr(model, GENERATE, None)):
        return False
    try:
        _generate(model, args, kwargs, 2)
    except Exception:  # of a `generate` of another kind
        return False
    with contextlib.suppress(Exception):  # of a model without one
        _generate(model, args, kwargs, 2, cache_implementation="static")  # of which all but the first tokens are masked
    with contextlib.suppress(Exception):  # of a model without masks
        _generate(model, args, kwargs, 2, **_other_mask(model, args, kwargs))
    return True


def _other_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """A mask by which a first token is padding where the example has no mask, and none where it has one."""
    given = dict(named(model, Inputs(args, kwargs)))
    if MASK in given:
        return {MASK: torch.ones_like(given[MASK])}
    ids = next(iter(given.values()))
    return {MASK: (torch.arange(ids.shape[1]) > 0).to(ids.dtype).expand(ids.shape)}


def _generates_slower(
    before: Any, after: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: Optimization
) -> str:
    """How much longer tokens take after a prompt, in words; "" where they do not. The report notes the gain."""
    calls = [functools.partial(_generate, m, args, kwargs, n) for n in (1, 1 + TOKENS) for m in (before, after)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UNPLANNED)
        times = interleaved(calls, seconds=pipeline.COMPARE_SECONDS)
    plain, fast = times[2] - times[0], times[3] - times[1]  # the steps after the prompt
    if plain <= 0:  # a `generate` that makes no steps of equal length: all of it
        plain, fast = times[2], times[3]
    gain = plain / max(fast, 1e-9)
    if gain < 1:
        return f"its steps took {fast:.2g} s instead of {plain:.2g} for {TOKENS} tokens"
    report.notes.append(f"the steps of {TOKENS} tokens after a prompt were {gain:.2f} times as fast")
    return ""


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """What a call returns, in leaves and structure; it may write into copies of the inputs."""
    given = examples.copied(Inputs(args, kwargs))
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(model(*given.args, **given.kwargs))
    return [x.clone() if isinstance(x, Tensor) else x for x in leaves], spec


def _again(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that leaves lists and dicts as they were for the next one."""
    given = examples.renewed(args, kwargs)
    return model(*given.args, **given.kwargs)


def _changes(model: nn.Module, inputs: Sequence[Any], expected: Sequence[Any], approximate: bool) -> str:
    """What is wrong with a model whose parts were replaced, in calls with these inputs in turn; "" where nothing is.

    It may use a part as only the part itself can be: as a list, or by its class. Each part kept its bounds; what differs here
    differs by much more.
    """
    try:
        with warnings.catch_warnings(), same_random_numbers():
            # Of a part that is called with several sizes.
            warnings.filterwarnings("ignore", message=UNPLANNED)
            returned = [_outputs(model, *given) for given in inputs]
    except Exception as failure:
        return f"the model fails: {type(failure).__name__}: {failure}"
    for (leaves, spec), (wanted, structure) in zip(returned, expected, strict=True):
        if spec != structure:
            return "the model returns another structure"
        for ours, theirs in zip(leaves, wanted, strict=True):
            if not isinstance(theirs, Tensor):
                continue
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                return f"an output is {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
            if theirs.is_floating_point() and (error := difference(ours, theirs)) > (0.2 if approximate else 1e-2):
                return f"an output differs by {error:.2g} of its largest value"
    return ""


@contextmanager
def _status(progress: bool) -> Iterator[Any]:
    """A line on a terminal's standard error that says what is being done, and at the end what took how long."""
    if not progress or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    console, phases = Console(stderr=True), Phases()
    with console.status("optimize") as status:

        def show(text: str) -> None:
            phases(text)
            status.update(f"optimize: {text}")

        yield show
    console.print(f"optimize: {phases}", highlight=False)


class Phases:
    """How long each of the things took that are told to it as they begin; of "programs, 3 of 5" the first word."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self("the model's first run")

    def __call__(self, text: str) -> None:
        """What begins now."""
        self._end()
        self._current, self._since = text.partition(",")[0], time.monotonic()

    def _end(self) -> None:
        if hasattr(self, "_current"):
            took = time.monotonic() - self._since
            self.seconds[self._current] = self.seconds.get(self._current, 0.0) + took

    def __str__(self) -> str:
        self._end()
        self._since = time.monotonic()
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items()]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
