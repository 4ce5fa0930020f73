"""swap: give the layers of a model chosen algorithms. Four steps: discover, describe, decide, apply."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ai3_ops.nn import layout
from ai3_ops.nn.classes import MARKS
from ai3_ops.nn.computed import copied
from ai3_ops.nn.unswap import revert_all, unswap
from ai3_ops.selecting.plan import Plan
from ai3_ops.selecting.selectors import ITSELF, Selector, Tuner, listed
from ai3_ops.surveying.discover import discover
from ai3_ops.surveying.examples import of_other_sizes
from ai3_ops.surveying.modules import is_lazy, is_optimized, refuse_optimized
from ai3_ops.surveying.running import run
from ai3_ops.surveying.watching import observe
from ai3_ops.swapping.apply import apply, lay_out
from ai3_ops.swapping.decide import Outcome, decide
from ai3_ops.tuning.tune import tune_calls


def swap(
    model: nn.Module,
    selectors: Selector = "default",
    example_inputs: Any = None,
    *,
    inplace: bool = False,
    strict: bool = False,
    allow_approximate: bool = False,
) -> nn.Module:
    """Gives layers of `model` chosen algorithms; everything else about the model stays as it is.

    Where PyTorch's convolution gives infinity, that of `default` may give NaN in the outputs around it: Winograd and FFT add and
    subtract inputs before they multiply (docs/decisions/infinity.md); `exclude=("winograd*",)` keeps them away.

    selectors: an algorithm's name, a list of names (one per layer), a function (module[, input_shape]) -> name, or a
    dict from module names, "re:<regex>", operations or "*" to these; see docs/swap.md. Layers that no selector
    matches keep what they have. example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, with
    which the model is run in evaluation mode (once; several times, also on made-up inputs of other sizes, where its code views
    activations), which gives lazy layers their weights; lists then count layers in call order, and support is decided with
    true shapes.
    inplace=False works on a deep copy. strict=True raises where a layer would keep PyTorch's implementation because its algorithm
    cannot do it, or because its call is out of reach; what `default` itself leaves to PyTorch (in-place ReLUs, views) stays.
    allow_approximate lets rules (`default`) choose algorithms that approximate.

    Returns the swapped model. Raises ValueError for module names and regular expressions that match nothing (an operation,
    as of a bare name, or "*" may), for what does not exist, and for a layer named singly that its algorithm cannot do;
    RuntimeError where the run with example inputs fails. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ai3_ops.swap needs an nn.Module, got {type(model).__name__}")
    if isinstance(selectors, Tensor):
        raise TypeError(
            "ai3_ops.swap: selectors is a tensor; example inputs come third: swap(model, selectors, example_inputs)"
        )
    advice = "swap the original model, or give the selectors to optimize(model, example_inputs, selectors)"
    if strict:
        refuse_optimized(model, "ai3_ops.swap", advice)
    if isinstance(selectors, Plan):
        selectors.check_machine(stacklevel=3)
    if not inplace:
        model = copied(model, "ai3_ops.swap", "; inplace=True swaps it as it stands")
    if example_inputs is not None and any(map(is_lazy, model.modules())):
        run(model, example_inputs)  # makes their weights
    before = [
        (module, type(module), {k: v for k, v in vars(module).items() if k in MARKS}) for module in model.modules()
    ]
    marks = {id(module): marked.get("_ai3") for module, _, marked in before}
    given, again = layout.given(model), revert_all(model)
    functions: set[str] = set()
    try:
        calls, lost = discover(model, marks)
        for described in calls:
            described.given = given.get(described.module)
        if example_inputs is not None:
            calls, functions = observe(model, calls, lost, example_inputs)
        outcome = decide(
            model,
            calls,
            lost,
            selectors,
            observed=example_inputs is not None,
            strict=strict,
            approximate=allow_approximate,
            tune=_tuner(model, example_inputs, allow_approximate),
        )
        apply(model, calls, lost)
        examples = None if example_inputs is None else chain([example_inputs], of_other_sizes(example_inputs))
        lay_out(model, calls, functions, partial(run, model), examples)
    except BaseException:
        unswap(model)
        for module, cls, marked in before:
            module.__class__ = cls
            vars(module).update(marked)
        again()
        raise
    _warn(outcome)
    if is_optimized(model):
        warnings.warn(
            f"ai3_ops.swap: the module is one that ai3_ops.optimize returned, and stays as it is: {advice}",
            stacklevel=2,
        )
    return model


def _tuner(model: nn.Module, example_inputs: Any, approximate: bool) -> Tuner | None:
    """What "auto" stands for."""
    if example_inputs is None:
        return None
    return lambda names: tune_calls(model, example_inputs, names, allow_approximate=approximate)


def _warn(outcome: Outcome) -> None:
    if outcome.scripted:
        warnings.warn(
            f"ai3_ops.swap: layers that torch.jit compiled stay as they are: {listed(outcome.scripted)}; swap before "
            "torch.jit.trace",
            stacklevel=3,
        )
    if outcome.idle:
        warnings.warn(
            f"ai3_ops.swap: no call of this model is one that these selectors speak of: {listed(outcome.idle)}",
            stacklevel=3,
        )
    if outcome.others:
        others = [name if name == ITSELF else repr(name) for name in outcome.others]
        warnings.warn(
            f"ai3_ops.swap: calls of {listed(others)} keep PyTorch's implementation, since they cannot be replaced; "
            "ai3_ops.explain gives each reason",
            stacklevel=3,
        )
    if outcome.stay:
        total = ", ".join(f"{word}: {count}" for word, count in outcome.stay.items())
        warnings.warn(
            f"ai3_ops.swap: {outcome.stay.total()} of {outcome.asked} layers keep PyTorch's implementation: the algorithm "
            f"cannot do them ({total}); ai3_ops.explain gives each reason",
            stacklevel=3,
        )
