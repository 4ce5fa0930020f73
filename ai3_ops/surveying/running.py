"""A model's run on example inputs, after which it is as before."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ai3_ops._torch import is_sharded
from ai3_ops.surveying.examples import Inputs, arguments, copied
from ai3_ops.surveying.modules import is_lazy


def run(model: nn.Module, example_inputs: Any) -> Any:
    """Calls the model in evaluation mode, without gradients, and returns what it does.

    Afterwards model and example inputs are as before, but for the weights of lazy layers.
    """
    example_inputs = copied(example_inputs)
    args, kwargs = arguments(example_inputs)
    with _restored(model), torch.random.fork_rng(devices=[]), torch.no_grad(), _eager():
        for module in model.modules():
            module.training = False  # not by eval(), which a module may do more in, such as merging weights
        try:
            return _resharded(model, model(*args, **kwargs))
        except Exception as error:
            raise does_not_run("ai3_ops", example_inputs, error) from error


def _resharded(model: nn.Module, output: Any) -> Any:
    """The output, after fully_shard's root gave up the whole parameters that it would keep for a backward pass."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None) if is_sharded(module) else None
        if reshard is not None:
            reshard()
    return output


def does_not_run(function: str, example_inputs: Any, error: Exception) -> RuntimeError:
    """What is raised where a model fails on the example inputs: their types, the model's error, and what may be meant."""
    args, kwargs = arguments(example_inputs)
    given = ", ".join([*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())])
    what = f"{type(error).__name__}: {error}"
    return RuntimeError(
        f"{function}: running the model on the example inputs ({given}) failed: {what}{meant(example_inputs)}"
    )


def meant(example_inputs: Any) -> str:
    """The end of an error message, for example inputs with which a model fails: what may have been meant."""
    if isinstance(example_inputs, Inputs):
        args, kwargs = example_inputs
        return "" if kwargs else meant(args)
    if isinstance(example_inputs, Mapping):
        keys = ", ".join(f"{key!r}: …" for key in list(example_inputs)[:1])
        return f"; a dict has arguments by name; of a model that takes a dict as one argument it is ({{{keys}}},)"
    sizes = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if len(sizes) == 1 and isinstance(sizes[0], Mapping):
        return "; a dict in a tuple is one argument; for arguments by name give the dict alone"
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        (sizes,) = sizes
    if sizes and all(isinstance(size, int) for size in sizes):
        return "; give a tensor, such as torch.randn(shape), not its shape"
    return "; a list is one argument, a tuple has several" if isinstance(example_inputs, list) else ""


@contextmanager
def _eager() -> Iterator[None]:
    """What is compiled would hide its calls. The compiler is not imported for it: without, nothing is compiled."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Puts back what a run changes: attributes, what lists, dicts and sets among them hold, values of buffers, training flags."""
    kept = [m for m in model.modules() if not is_lazy(m) and not isinstance(m, torch.jit.ScriptModule)]
    attributes = [
        (m, {k: (v, copy.copy(v) if type(v) in _CONTAINERS else None) for k, v in vars(m).items()})
        for m in kept
        if not is_sharded(m)  # what holds its parameters is FSDP's
    ]
    buffers = [(b, b.clone()) for m in kept for b in m._buffers.values() if b is not None and not b.is_meta]
    flags = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, before in attributes:
            for name in [name for name in vars(module) if name not in before]:
                del module.__dict__[name]
            for name, (value, content) in before.items():
                module.__dict__[name] = value
                if content is not None and _held(value) != _held(content):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(content)
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.layout != torch.strided or not torch.equal(buffer, value):  # sparse ones cannot be compared
                    buffer.copy_(value)


def _held(container: Any) -> list[Any]:
    """What a container holds, by identity: comparing tensors gives tensors."""
    if isinstance(container, dict):
        return [*zip(map(id, container), map(id, container.values()), strict=True)]
    return [*map(id, container)] if isinstance(container, list) else sorted(map(id, container))
