"""The demo's runs: a network and the digits' on one choice of algorithms, their times and errors."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ai3_ops
from ai3_ops import registry
from ai3_ops.cli.digits import Digits
from ai3_ops.cli.models import Classifier

CERTAIN_TURNS = 5  # of fewer, a median says little where the machine does other things too
SLOW_SECONDS = 2.0  # an algorithm that takes longer for one image is timed three times only
OPTIMIZED = "optimized"  # the row of ai3_ops.optimize
OPTIMIZE_SECONDS = 5.0  # for its search


@dataclass(eq=False)
class Run:
    """One way to compute both networks, and what came out."""

    label: str
    model: nn.Module
    digits: nn.Module
    layers: str  # how many of the network's layers it computes
    approximate: bool = False
    channels_last: bool = True
    outputs: Tensor | None = None
    predictions: Tensor | None = None
    seconds: list[float] = field(default_factory=list)
    slow: bool = False

    @property
    def latency(self) -> float:
        """Median seconds for one image."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies the middle half of the times, in seconds."""
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        return seconds.quantile(0.25).item(), seconds.quantile(0.75).item()

    @property
    def certain(self) -> bool:
        """Whether it was timed often enough to be compared."""
        return len(self.seconds) >= CERTAIN_TURNS

    def accuracy(self, digits: Digits) -> float:
        """The share of unseen digits that it names rightly."""
        assert self.predictions is not None
        return int((self.predictions == digits.labels).sum()) / len(digits.labels)

    def error(self, reference: Tensor) -> float:
        """Largest difference from the reference, relative to its largest value; as it is where that is 0."""
        assert self.outputs is not None
        scale = reference.abs().max().item()
        return (self.outputs.double() - reference).abs().max().item() / (scale or 1.0)


def for_digits(selectors: Any) -> tuple[Any, list[str]]:
    """The selectors that may match any network, and so the one for digits; and those that name layers of the other one."""
    if isinstance(selectors, list):
        return "torch", ["a list"]
    if not isinstance(selectors, dict):
        return selectors, []
    general = {*registry.operations(), "*"}
    taken = {k: v for k, v in selectors.items() if k in general and not isinstance(v, list)}
    return taken, [k for k in selectors if k not in taken]


def prepare(
    net: Classifier, digits: Digits, selectors: Any, x: Tensor, step: Callable[[str], None] = lambda _: None
) -> list[Run]:
    """PyTorch in both memory layouts, what the selectors say, and each conv2d algorithm by itself."""
    device = x.device

    def swapped(model: nn.Module, choice: Any, example: Tensor) -> nn.Module:
        # Not under inference_mode: the copy's weights would be inference tensors, whose packs cannot be kept.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it counts layers that keep PyTorch's implementation; the tables list them
            result = ai3_ops.swap(model, choice, example)
            return result.to(memory_format=torch.channels_last)

    example = x[:1].contiguous(memory_format=torch.channels_last)
    digit = digits.images[:1].to(device)
    step(f"{net.name}: swapping, selected")
    runs = [
        Run("PyTorch", net.model, digits.model, "all", channels_last=False),
        Run(
            "PyTorch, channels last",
            copy.deepcopy(net.model).to(memory_format=torch.channels_last),
            digits.model,
            "all",
        ),
        Run(
            "selected",
            swapped(net.model, selectors, example),
            swapped(digits.model, for_digits(selectors)[0], digit),
            "",
        ),
    ]
    runs[2].layers = _share(runs[2].model, None)
    if device.type == "cpu":

        def fast(model: nn.Module, example: Tensor) -> nn.Module:
            return ai3_ops.optimize(model, example, "default", budget_seconds=OPTIMIZE_SECONDS, progress=False)

        step(f"{net.name}: ai3_ops.optimize")
        optimized = fast(net.model, x[:1])
        step("digits: ai3_ops.optimize")
        runs.append(Run(OPTIMIZED, optimized, fast(digits.model, digit), "all", channels_last=False))
    for a in singles(net.model, device):
        label = a.name if a.operation == "conv2d" else f"{a.operation}: {a.name}"
        step(f"{net.name}: swapping, {label}")
        choice = {a.operation: a.name}
        model = swapped(net.model, choice, example)
        if share := _share(model, a.operation):
            approximate = a.accuracy == "approximate"
            runs.append(Run(label, model, swapped(digits.model, choice, digit), share, approximate))
    return runs


def singles(model: nn.Module, device: torch.device) -> list[registry.AlgorithmInfo]:
    """The algorithms that get a row of their own: conv2d's, and attention's exact ones in a network that has it."""
    made = {layer.operation for layer in ai3_ops.explain(ai3_ops.swap(model, "torch")).layers}
    of_attention = registry.algorithms("attention", device) if "attention" in made else []
    return [*registry.algorithms("conv2d", device), *(a for a in of_attention if a.accuracy != "approximate")]


def _share(model: nn.Module, operation: str | None) -> str:
    layers = [layer for layer in ai3_ops.explain(model).layers if operation in (None, layer.operation)]
    taken = sum(layer.used != "torch" for layer in layers)
    return f"{taken} of {len(layers)}" if taken else ""


def measure(
    runs: list[Run], x: Tensor, digits: Digits, repeats: int, step: Callable[[str], None], name: str = "network"
) -> None:
    """Outputs, predictions and times of every run; timed in turns, so that all see the machine in the same states."""
    digit_images = digits.images.to(x.device)
    with torch.inference_mode():
        for run in runs:
            step(f"{name}: outputs, {run.label}")
            layout = torch.channels_last if run.channels_last else torch.contiguous_format
            start = time.perf_counter()
            run.outputs = run.model(x.contiguous(memory_format=layout)).cpu()
            run.predictions = run.digits(digit_images).argmax(1).cpu()
            run.slow = time.perf_counter() - start > SLOW_SECONDS * len(x)
        for i in range(repeats):
            for run in runs:
                step(f"{name}: turn {i + 1} of {repeats}, {run.label}")
                if i < 3 or not run.slow:
                    layout = torch.channels_last if run.channels_last else torch.contiguous_format
                    run.seconds.append(_time(run.model, x[:1].contiguous(memory_format=layout)))


def _time(model: nn.Module, x: Tensor) -> float:
    def synchronize() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    model(x)
    synchronize()
    return time.perf_counter() - start


def layer_errors(original: nn.Module, swapped: nn.Module, x: Tensor) -> dict[str, float]:
    """For each swapped module, its error against PyTorch's module on the input that the original network gives it."""
    errors: dict[str, float] = {}
    results: dict[str, list[Tensor]] = {}
    others = dict(swapped.named_modules())
    handles = []
    for name, module in original.named_modules():
        other = others[name]
        if type(other) is type(module) or list(module.children()):
            continue

        def before(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name, other: nn.Module = other) -> None:
            results.setdefault(name, []).append(other(inputs[0].clone()))

        def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            difference = (results[name].pop() - output).abs().max() / output.abs().max().clamp_min(1e-30)
            errors[name] = max(errors.get(name, 0.0), difference.item())

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    with torch.inference_mode():
        original(x)
    for handle in handles:
        handle.remove()
    return errors


def in_float64(model: nn.Module, x: Tensor) -> Tensor:
    """What a model computes, in float64."""
    with torch.inference_mode():
        return copy.deepcopy(model).double()(x.double()).cpu()


def is_close(run: Run, reference: Tensor, tolerance: float) -> bool:
    """Whether what a run computed is within the tolerance."""
    error = run.error(reference)
    return error <= tolerance  # NaN does not
