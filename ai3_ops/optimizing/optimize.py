"""`ai3_ops.optimize`, `save` and `load`: what they take and promise. What they do is imported when it is asked for."""

from __future__ import annotations

import os
from typing import Any

from torch import nn


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
    portable: bool = False,
    cuda_graphs: bool = True,
    progress: bool = True,
) -> nn.Module:
    """A module for inference that computes what `model` does, as fast as this package can on this machine.

    The model's graph is captured and rewritten (batch normalizations folded, activations and sums fused, relaxed
    substitutions searched), each layer gets an algorithm, and runs of layers become programs. What cannot be captured runs
    as it was, and so does what is not faster. `ai3_ops.explain` lists all of it. The model itself is not changed.

    Args:
        model: on the CPU or a GPU; one in training mode is taken in evaluation mode, else each module keeps its own.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, as they will come; or a list of two or
            more of these, of which the first decides rewrites and algorithms and each has its plan. Other batch sizes and
            lengths of sequences run at once; other sizes, too, where the same programs compute them, else they are planned in
            less than a second or run as in the model, with a warning.
        selectors: "auto" takes the fastest algorithms, by shipped measurements where these leave no doubt, and measures the
            others; else as in `swap`: a name, a dict, a list, a function, a Plan.
        alpha: how much slower than the best known network, as a factor of at least 1, one may be that the search follows.
        budget_seconds: for everything, of all parts together where the model is captured in parts; None: a minute. What has
            begun is ended: capture and programs take seconds in a large model.
        objective: "latency", "p99" or "memory": what substitutions and algorithms are chosen for.
        memory_limit: bytes that packed weights and the arena of activations and workspaces may take together, on the example
            and in each part of a model that is captured in parts; with "auto".
        tolerance: the largest error of a layer, max|y - y64| / max|y64|; None: 5e-5; with "auto".
        deterministic: only algorithms that give the same bits in every run; with "auto".
        allow_approximate: also algorithms that approximate (bfloat16 weights); with "auto".
        keep_original: False frees the model's own weights: there is then no `state_dict()`, and sizes other than other batches
            and lengths of sequences are errors, unless they are among the examples.
        verify: how much is computed in float64 to compare with. "quick": the outputs for the first item of the example. "full":
            also those of the whole example and of random inputs, the network after its rewrites and each substitution. "off":
            none; the captured graph is compared with the model all the same.
        portable: also keeps the weights as they are before they are packed, in memory and in files of `save`, which then load on
            machines with other instruction sets, too.
        cuda_graphs: on a GPU, whether a call is captured into a CUDA graph, for each set of input sizes, and replayed; a model
            that waits for the GPU meanwhile, or reads what lies on the CPU, runs step by step.
        progress: shows on a terminal's standard error what is done, and at the end what took how long.

    Returns:
        An `nn.Module` whose submodules, parameters and `state_dict()` are the model's. It can be pickled, copied, compiled,
        exported and called from several threads; `.train()`, `.to(…)` and `load_state_dict` raise.

    Raises:
        TypeError: no nn.Module.
        ValueError: settings or selectors that make no sense; a layer named singly that its algorithm cannot do; a module that
            `optimize` returned; a lazy module that has not run yet.
        RuntimeError: the model does not run on the example inputs.
        ai3_ops.tuning.Interrupted: on Ctrl-C while algorithms are measured; a KeyboardInterrupt whose `plan` has what was
            measured.
    """
    from ai3_ops.optimizing import whole

    return whole.optimize(
        model,
        example_inputs,
        whole.Settings(
            selectors,
            alpha,
            budget_seconds,
            objective,
            memory_limit,
            tolerance,
            deterministic,
            allow_approximate,
            verify,
            portable,
            cuda_graphs=cuda_graphs,
        ),
        keep_original=keep_original,
        progress=progress,
    )


def save(optimized: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes what `optimize` returned into one file, from which any process with this ai3_ops and instruction set runs it.

    What was optimized with `portable=True` is written with its weights and runs with any instruction set.

    The file has the programs, the graph around them and the packed weights, and no code: it is a safetensors file, whose metadata
    is a JSON document. The original's modules and weights are not in it. `path` is replaced when the file is complete.

    Args:
        optimized: what `optimize` returned for a model that was captured as a whole.
        path: of the file.

    Raises:
        TypeError: no module that `optimize` returned.
        ValueError: what a file cannot hold, by name: a model that stayed as it was or was captured in parts, swapped layers
            (which torch.save and torch.export keep), operators of other libraries, outputs of types that pytrees cannot write.
        OSError: the file cannot be written.
    """
    from ai3_ops.optimizing import saved

    saved.write(optimized, path)


def load(path: str | os.PathLike[str]) -> nn.Module:
    """The module that `save` wrote: equal outputs, bit for bit, for the sizes that were planned and other batches as before.

    Of a portable file that was saved with another instruction set the weights are packed anew, for this one; the algorithms
    stay those that were chosen there, and outputs are equal within rounding.

    Weights are not copied but mapped from the file, so that processes which load one file share them: it must stay as it is
    while they run (`save` to the same path does not change it, but puts another in its place). There is no `state_dict()`, and
    sizes other than the planned ones, other batches and lengths are errors. Nothing of the file is run as code.

    Raises:
        ValueError: no such file, or a damaged one; one of another version or byte order; where weights were not kept, of another
            instruction set; where they were, a program of which this one cannot run an algorithm.
        OSError: the file cannot be read.
    """
    from ai3_ops.optimizing import saved

    return saved.read(path)
