"""optimize: a whole network, rewritten and run as programs (docs/optimize.md)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ai3_ops._torch import pytree

__all__ = ["optimize"]


def optimize(
    model: nn.Module,
    example_inputs: Any,
    selectors: Any = "auto",
    *,
    alpha: float = 1.05,
    budget_seconds: float | None = None,
    objective: str = "latency",
    memory_limit: int | None = None,
    tolerance: float | None = None,
    deterministic: bool = False,
    allow_approximate: bool = False,
    keep_original: bool = True,
    verify: str = "quick",
    progress: bool = True,
) -> nn.Module:
    """A module for inference that computes what `model` does, as fast as this package can on this machine.

    The model's graph is captured and rewritten (batch normalizations folded, activations and sums fused, relaxed
    substitutions searched), each layer gets an algorithm, and runs of layers become programs. What cannot be captured runs
    as it was, and so does what is not faster. `ai3_ops.explain` lists all of it. The model itself is not changed.

    Args:
        model: on the CPU; it is taken in evaluation mode.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, as they will come. Other batch sizes
            run at once, other sizes are planned when they first come, with a warning.
        selectors: "auto" measures algorithms; else as in `swap`: a name, a dict, a list, a function, a Plan.
        alpha: how much slower than the best known network, as a factor of at least 1, one may be that the search follows.
        budget_seconds: for everything, of all parts together where the model is captured in parts; None: a minute. What has
            begun is ended: capture and programs take seconds in a large model.
        objective: "latency", "p99" or "memory": what substitutions and algorithms are chosen for.
        memory_limit: bytes that all packed weights and the largest workspace of a layer may take together, in each part of a
            model that is captured in parts; with "auto".
        tolerance: the largest error of a layer, max|y - y64| / max|y64|; None: 5e-5; with "auto".
        deterministic: only algorithms that give the same bits in every run; with "auto".
        allow_approximate: also algorithms that approximate (bfloat16 weights); with "auto".
        keep_original: False frees the model's own weights: there is then no `state_dict()`, and sizes other than other batches
            are errors.
        verify: how much is computed in float64 to compare with. "quick": the outputs for the first item of the example. "full":
            also those of the whole example and of random inputs, the network after its rewrites and each substitution. "off":
            none; the captured graph is compared with the model all the same.
        progress: shows on a terminal's standard error what is done, and at the end what took how long.

    Returns:
        An `nn.Module` whose submodules, parameters and `state_dict()` are the model's. It can be pickled, copied, compiled,
        exported and called from several threads; `.train()`, `.to(…)` and `load_state_dict` raise.

    Raises:
        TypeError: no nn.Module.
        ValueError: settings or selectors that make no sense; a layer named singly that its algorithm cannot do; a module that
            `optimize` returned; a lazy module that has not run yet.
        RuntimeError: the model does not run on the example inputs.
        ai3_ops.tune.Interrupted: on Ctrl-C while algorithms are measured; a KeyboardInterrupt whose `plan` has what was measured.
    """
    from ai3_ops.nn.computed import copied
    from ai3_ops.optimize.capture import Uncapturable
    from ai3_ops.optimize.module import Optimized
    from ai3_ops.optimize.pipeline import Budget, Settings
    from ai3_ops.plan import Plan
    from ai3_ops.selectors import check_words
    from ai3_ops.steps.discover import refuse_optimized
    from ai3_ops.swap import unswap

    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.optimize needs an nn.Module, got {type(model).__name__}")
    refuse_optimized(model, "ai3_ops.optimize", "optimize the original model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"ai3_ops.optimize: {name!r} of a lazy module has no size yet: run the model once")
    settings = Settings(
        selectors, alpha, budget_seconds, objective, memory_limit, tolerance, deterministic, allow_approximate, verify
    )
    budget = Budget(budget_seconds)
    check_words(selectors, model)
    if isinstance(selectors, Plan):
        selectors.check_machine(stacklevel=3)
    args, kwargs = _arguments(example_inputs)
    with torch.inference_mode(False), torch.no_grad(), _status(progress) as show:
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        original = unswap(copied(model, "ai3_ops.optimize")).eval()
        try:
            original(*args, **kwargs)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            hint = "; a list is one argument, a tuple has several" if isinstance(example_inputs, list) else ""
            raise RuntimeError(
                f"ai3_ops.optimize: running the model on the example inputs failed{hint}: {what}"
            ) from error
        whole = Optimized(original, settings)
        try:
            whole.plan(args, kwargs, progress=show, budget=budget)
        except Uncapturable as reason:
            whole = _by_parts(original, settings, args, kwargs, str(reason), show, budget)
        if not keep_original:
            for module in list(whole.modules()):
                if isinstance(module, Optimized):
                    module.forget_original()
    return whole


def _by_parts(
    original: nn.Module,
    settings: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reason: str,
    show: Any,
    budget: Any,
) -> Any:
    """Replaces the largest submodules that can be captured, in place, as long as the model computes what it did."""
    from ai3_ops.optimize.capture import Uncapturable
    from ai3_ops.optimize.module import Optimized
    from ai3_ops.optimize.pipeline import unthorough

    calls: dict[nn.Module, tuple[Any, Any]] = {}  # the first of each module
    sizes: dict[nn.Module, set[Any]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        sizes.setdefault(module, set()).add(tuple(x.shape if isinstance(x, Tensor) else repr(x) for x in leaves))

    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in original.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        expected = pytree.tree_flatten(original(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    left = {"": reason}
    done: dict[nn.Module, Any] = {}
    before: list[tuple[nn.Module, str, nn.Module]] = []
    parts = []

    def descend(parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent.named_children()):
            path = f"{prefix}{name}"
            if child in done:
                before.append((parent, name, child))
                setattr(parent, name, done[child])
                continue
            if budget.over:
                left[path] = "the budget was used up"
                continue
            if child in calls and any(p.ndim > 1 for p in child.parameters()):
                optimized = Optimized(child, settings)
                try:
                    optimized.plan(*calls[child], path, show, original, budget)
                except Uncapturable as error:
                    left[path] = str(error)
                else:
                    optimized._ai3_most = max(optimized._ai3_most, len(sizes[child]))
                    parts.append(optimized._ai3_report.parts[0])
                    done[child] = optimized if optimized.changed else child
                    before.append((parent, name, child))
                    setattr(parent, name, done[child])
                    continue
            descend(child, f"{path}.")

    descend(original, "")
    if wrong := _changes(lambda: original(*args, **kwargs), expected, settings.allow_approximate):
        for parent, name, child in before:
            setattr(parent, name, child)
        left[""] += f"; and with {len(parts)} parts optimized {wrong}"
        parts = []
    whole = Optimized(original, unthorough(settings, {}))
    whole._ai3_report.parts, whole._ai3_report.left = parts, left
    return whole


def _changes(run: Callable[[], Any], expected: tuple[list[Any], Any], approximate: bool) -> str:
    """What is wrong with a model whose parts were replaced, "" where nothing is.

    It may use a part as only the part itself can be: as a list, or by its class. Each part kept its bounds; what differs here
    differs by much more.
    """
    from ai3_ops.optimize.network import difference

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*: planned anew")  # of a part that is called with several sizes
            leaves, spec = pytree.tree_flatten(run())
    except Exception as failure:
        return f"the model fails: {type(failure).__name__}: {failure}"
    if spec != expected[1]:
        return "the model returns another structure"
    for ours, theirs in zip(leaves, expected[0], strict=True):
        if not isinstance(theirs, Tensor):
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"an output is {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
        if theirs.is_floating_point() and (error := difference(ours, theirs)) > (0.2 if approximate else 1e-2):
            return f"an output differs by {error:.2g} of its largest value"
    return ""


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


@contextmanager
def _status(progress: bool) -> Iterator[Any]:
    """A line on a terminal's standard error that says what is being done."""
    if not progress or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("optimize") as status:
        yield lambda text: status.update(f"optimize: {text}")
