"""The main job, `python -m ai3_ops demo`: a real network and a trained one on every algorithm beside PyTorch's own.

Input are the two photographs that scikit-learn ships; accuracy is measured with a small network, trained in seconds on
scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _machine, registry
from ai3_ops.cli import doctor
from ai3_ops.cli.models import Network, network

CERTAIN_TURNS = 5  # of fewer, a median says little where the machine does other things too
SLOW_SECONDS = 2.0  # an algorithm that takes longer for one image is timed three times only
OPTIMIZED = "optimized"  # the row of ai3_ops.optimize
OPTIMIZE_SECONDS = 5.0  # for its search
SILENT_SECONDS = 5.0  # after so long a line says what is done, where there is no terminal for a bar


def photographs(net: Network) -> tuple[Tensor, list[Any]]:
    """scikit-learn's photographs as the network wants them (2, 3, size, size), and as they are."""
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from torchvision.transforms import v2

    images = [Image.fromarray(image) for image in load_sample_images().images]
    preset = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(net.size, antialias=True),
            v2.CenterCrop(net.size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(net.mean, net.std),
        ]
    )
    return torch.stack([preset(image) for image in images]), images


class Digits(NamedTuple):
    """A trained network, and digits that it has not seen."""

    model: nn.Module
    images: Tensor  # (N, 1, 8, 8)
    labels: Tensor


def train_digits(progress: Callable[[], None] = lambda: None) -> Digits:
    """Trains a convolutional network on two thirds of scikit-learn's digits; takes seconds."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    train, test = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(DIGITS_EPOCHS):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        progress()
    return Digits(model.eval(), images[test], labels[test])


DIGITS_EPOCHS = 8


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
    net: Network, digits: Digits, selectors: Any, x: Tensor, step: Callable[[str], None] = lambda _: None
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
    for a in registry.algorithms("conv2d", device):
        step(f"{net.name}: swapping, {a.name}")
        model = swapped(net.model, {"conv2d": a.name}, example)
        if share := _share(model, "conv2d"):
            approximate = a.accuracy == "approximate"
            runs.append(Run(a.name, model, swapped(digits.model, {"conv2d": a.name}, digit), share, approximate))
    return runs


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


@contextmanager
def _progress(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is done: a bar on a terminal; elsewhere, in a log or a pipe, a line every few seconds.

    The function that it gives is called at the beginning of each of `total` steps.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        with _lines(total, console) as step:
            yield step
        return
    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(description: str) -> None:
            bar.update(task, description=description, advance=1)

        yield step


@contextmanager
def _lines(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """From a thread of its own, since a single step may take longer than anybody waits for a word."""
    done, description, begun = 0, "", time.monotonic()
    end = threading.Event()

    def tell() -> None:
        while not end.wait(SILENT_SECONDS):
            seconds = time.monotonic() - begun
            console.print(
                f"{description} (step {done} of {total}, {seconds:.0f} s)",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def step(text: str) -> None:
        nonlocal done, description
        done, description = done + 1, text

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield step
    finally:
        end.set()
        thread.join()


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the demo; 0 when every exact or bounded algorithm agreed with PyTorch."""
    with _progress(1) as step:
        step(f"{arguments.model}: building the network")
        net = network(arguments.model, arguments.weights)
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise ValueError(f"--device {arguments.device}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {arguments.device}: there is no GPU that PyTorch can use")
    for module, package in doctor.DEMO_PACKAGES.items():
        try:
            __import__(module)
        except ImportError:
            raise ImportError(f"needs {package}: pip install 'ai3_ops[demo]'") from None
    from matplotlib.backend_bases import FigureCanvasBase

    if not os.access(arguments.output.absolute().parent, os.W_OK):
        raise ValueError(f"--output {arguments.output}: its folder does not exist or cannot be written")
    formats = FigureCanvasBase.get_supported_filetypes()
    if arguments.output.suffix.lstrip(".").lower() not in formats:
        raise ValueError(f"--output {arguments.output}: pictures end in {', '.join(formats)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ai3_ops.swap(net.model, arguments.selectors)  # wrong selectors are refused before anything takes time
    with _progress(1) as step:
        step("measuring the machine's limits")
        facts = {**_machine.machine(), **doctor.limits()}
    _print_facts(facts, console)
    net.model.to(arguments.device)
    with _progress(1 + DIGITS_EPOCHS) as step:
        step("reading the photographs")
        photos, pictures = photographs(net)
        x = photos.to(arguments.device)
        digits = train_digits(lambda: step("digits: training"))
    digits.model.to(arguments.device)
    _, left = for_digits(arguments.selectors)
    without = f"; selectors that name layers of {net.name} ({', '.join(left)}) leave it alone" if left else ""
    _print_facts(
        {
            "network": f"{net.name}, {net.origin}; scikit-learn's {len(photos)} photographs at {net.size}x{net.size}",
            "digits": f"a convolutional network trained here; {len(digits.labels)} digits that it has not seen{without}",
        },
        console,
    )
    with _progress(3 + 2 * (device.type == "cpu") + len(registry.algorithms("conv2d", device))) as step:
        runs = prepare(net, digits, arguments.selectors, x, step)
        step(f"{net.name}: the reference in float64")
        reference = _reference(net.model, x)
        if not reference.any():
            raise ValueError(
                f"the output of {net.name} is 0 for both photographs ({net.origin}), so that no error has a meaning; other "
                "weights (--weights) help"
            )
        step(f"{net.name}: errors of its layers")
        errors = layer_errors(net.model, runs[2].model, x)
    with _progress(len(runs) * (1 + arguments.repeats)) as step:
        measure(runs, x, digits, arguments.repeats, step, net.name)

    _print_layers(runs[2].model, errors, arguments.selectors, console)
    agreed = _print_runs(runs, reference, digits, arguments.tolerance, console)
    worst = max(errors.items(), key=lambda item: item[1], default=None)
    if worst:
        console.print(
            f"Largest error of a module without children against PyTorch's: {worst[1]:.1e} of its largest output, in "
            f"{worst[0]}.",
            highlight=False,
        )
    if net.categories:
        for picture, row in zip(("china", "flower"), runs[2].outputs, strict=True):  # type: ignore[arg-type]
            console.print(f"{picture}: {net.categories[int(row.argmax())]}", highlight=False)
    with _progress(1) as step:
        step("drawing the picture")
        draw(net, runs, reference, digits, pictures, arguments.tolerance, arguments.output)
    console.print(f"Picture: {arguments.output}", highlight=False)
    verdict = "All exact and bounded algorithms agree" if agreed else "Outputs differ"
    console.print(
        f"{verdict} with PyTorch in float64 (tolerance {arguments.tolerance:.0e}).",
        style="bold green" if agreed else "bold red",
        highlight=False,
    )
    return 0 if agreed else 1


def _print_facts(facts: dict[str, str], console: Console) -> None:
    for name, value in facts.items():
        console.print(f"[bold]{name:<18}[/bold] {escape(value)}", highlight=False, soft_wrap=True)


def _reference(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return copy.deepcopy(model).double()(x.double()).cpu()


def _print_layers(model: nn.Module, errors: dict[str, float], selectors: Any, console: Console) -> None:
    table = Table(title=f"Selected: {selectors}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = []
    for layer in ai3_ops.explain(model).layers:
        shape = "x".join(map(str, layer.shapes[0])) if layer.shapes else ""
        asked = f"{layer.requested} was asked for" if layer.requested else "not asked for"
        error = f"{errors[layer.name]:.1e}" if layer.name in errors else ""
        why = f"{asked}; {layer.reason}" if layer.reason else asked
        rows.append((layer.name, layer.operation, shape, layer.used, error, why))
    for heading, cells in zip(
        ("layer", "operation", "input", "algorithm", "error"), zip(*rows, strict=True), strict=False
    ):
        table.add_column(heading, no_wrap=True, min_width=max(map(len, cells)))
    table.add_column("why")  # the one that may wrap
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _print_runs(runs: list[Run], reference: Tensor, digits: Digits, tolerance: float, console: Console) -> bool:
    table = Table("algorithm", "layers", title="Each algorithm beside the other, one image", title_justify="left")
    for heading in ("latency", "quartiles", "PyTorch's time / its", "error", "digits right", "agrees"):
        table.add_column(heading, justify="right")
    agreed = True
    last = next((run.label for run in runs if run.label == OPTIMIZED), runs[2].label)  # before the single algorithms
    for run in runs:
        agrees, error = _agrees(run, reference, tolerance), run.error(reference)
        agreed &= agrees or run.approximate
        accuracy = run.accuracy(digits)
        word = "approximate" if run.approximate else "yes" if agrees else "NO"
        speed = runs[0].latency / run.latency
        first, third = (1e3 * seconds for seconds in run.quartiles)
        spread = f"{first:.1f} to {third:.1f}" if len(run.seconds) > 2 else ""
        doubt = "" if run.certain and runs[0].certain else "~"
        cells = (f"{run.latency * 1e3:.1f} ms", spread, f"{doubt}{speed:.2f}x", f"{error:.1e}", f"{accuracy:.2%}", word)
        table.add_row(
            run.label,
            run.layers,
            *cells,
            end_section=run.label in (runs[1].label, last),
            style=None if agrees or run.approximate else "red",
        )
    console.print(table)
    if not all(run.certain for run in runs):
        console.print(
            f"~: of fewer than {CERTAIN_TURNS} turns, which are too few to compare: other work on the machine may explain the "
            "ratio (--repeats 7, the default, or more; what takes seconds is timed three times only).",
            highlight=False,
            markup=False,
        )
    console.print(
        "Latency: the median. PyTorch: its own eager kernels. selected: what --selectors says. "
        "optimized: ai3_ops.optimize. The others: that algorithm (default: the project's choice by rules) in the conv2d "
        "layers that it can do, PyTorch in the rest. "
        "Error: largest difference of the output from PyTorch's in float64, over its largest value. Digits right: the "
        f"share that the small network, computed likewise, names rightly of {len(digits.labels)} digits that it has not "
        "seen.",
        highlight=False,
        markup=False,
    )
    return agreed


def _agrees(run: Run, reference: Tensor, tolerance: float) -> bool:
    error = run.error(reference)
    return error <= tolerance  # NaN does not


def draw(
    net: Network, runs: list[Run], reference: Tensor, digits: Digits, pictures: list[Any], tolerance: float, path: Path
) -> None:
    """Saves the picture: inputs, latency and error of each algorithm, and what computes each layer."""
    import matplotlib

    style: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT}
    with matplotlib.rc_context(style):
        path.parent.mkdir(parents=True, exist_ok=True)
        _figure(net, runs, reference, digits, pictures, tolerance).savefig(path)


TEXT = "#2b2f36"  # the color of the picture's words


def _figure(
    net: Network, runs: list[Run], reference: Tensor, digits: Digits, pictures: list[Any], tolerance: float
) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ours, theirs, chosen = "#3b6fb6", "#8a8f98", "#d9822b"
    figure = Figure(
        figsize=(14, 8.2), dpi=110, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    )
    figure.suptitle(
        f"{net.name}, {net.origin}, on {_machine.cpu_name()} ({level()}, threads: {torch.get_num_threads()})",
        fontsize=13,
    )
    grid = figure.add_gridspec(4, 3, width_ratios=[0.8, 1.5, 0.75], height_ratios=[1, 1, 0.75, 0.75])

    assert runs[2].outputs is not None
    assert runs[2].predictions is not None
    for i, picture in enumerate(pictures):
        axes = figure.add_subplot(grid[i, 0])
        axes.imshow(picture)
        axes.set_axis_off()
        if net.categories:
            axes.set_title(net.categories[int(runs[2].outputs[i].argmax())], fontsize=10)

    axes = figure.add_subplot(grid[2, 0])
    pad = nn.functional.pad(digits.images[:16, 0], (1, 1, 1, 4))
    axes.imshow(torch.cat([torch.cat(list(half), dim=1) for half in pad.split(8)]), cmap="gray_r")
    for i, prediction in enumerate(runs[2].predictions[:16].tolist()):
        color = "#2e7d32" if prediction == digits.labels[i] else "#b3261e"
        axes.text(
            10 * (i % 8) + 4.5, 13 * (i // 8) + 10.4, str(prediction), ha="center", va="center", color=color, fontsize=9
        )
    before, after = runs[0].accuracy(digits), runs[2].accuracy(digits)
    axes.set_title(
        f"{len(digits.labels)} unseen digits: {before:.2%} right with PyTorch,\n"
        f"{after:.2%} with the selected algorithms",
        fontsize=10,
    )
    axes.set_axis_off()

    axes = figure.add_subplot(grid[3, 0])
    counts: dict[str, int] = {}
    for layer in ai3_ops.explain(runs[2].model).layers:
        key = f"{layer.operation}: {layer.used}"
        counts[key] = counts.get(key, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    shown = ranked if len(ranked) <= 8 else [*ranked[:7], ("others", sum(n for _, n in ranked[7:]))]
    colors = [theirs if key.endswith(": torch") else chosen for key, _ in shown]
    axes.barh(range(len(shown)), [n for _, n in shown], color=colors, height=0.7)
    axes.set_yticks(range(len(shown)), [key for key, _ in shown], fontsize=8)
    axes.invert_yaxis()
    for i, (_, n) in enumerate(shown):
        axes.text(n, i, f" {n}", va="center", fontsize=8)
    axes.set_xlim(0, max(counts.values()) * 1.15)
    axes.xaxis.set_visible(False)
    axes.set_title("selected: layers by algorithm", fontsize=10)

    tail = sorted((r for r in runs[3:] if r.label != OPTIMIZED), key=lambda run: run.latency)
    head = [run for run in runs if run not in tail]
    ordered = head + tail
    rows = range(len(ordered))
    colors = [theirs if run in runs[:2] else chosen if run in head else ours for run in ordered]
    latencies = [run.latency * 1e3 for run in ordered]
    doubts = ["" if run.certain and runs[0].certain else "~" for run in ordered]
    axes = figure.add_subplot(grid[:, 1])
    axes.barh(rows, latencies, color=colors, height=0.72)
    # A slow method must not squeeze the others: the axis ends at four times PyTorch, longer bars are marked.
    limit = min(max(latencies), 4 * latencies[0]) * 1.22
    for row, latency in zip(rows, latencies, strict=True):
        long = latency > 0.75 * limit
        axes.annotate(
            f"{latency:.1f} ms   {doubts[row]}{latencies[0] / latency:.2f}x"
            + ("  (bar cut) »" if latency > limit else ""),
            (min(latency, limit), row),
            (-5 if long else 5, 0),
            textcoords="offset points",
            ha="right" if long else "left",
            va="center",
            color="white" if long else TEXT,
        )
    axes.set_xlim(0, limit)
    axes.axvline(latencies[0], color=theirs, lw=1, ls=":")
    axes.set_yticks(rows, [f"{run.label}  ({run.layers})" if run.layers != "all" else run.label for run in ordered])
    axes.invert_yaxis()
    axes.set_title(
        "latency of one image (median), and speed against PyTorch;\nin brackets the layers that the algorithm computes",
        fontsize=10,
    )
    axes.set_xlabel("milliseconds")

    errors = [max(run.error(reference), 1e-12) for run in ordered]
    axes = figure.add_subplot(grid[:, 2], sharey=axes)
    axes.hlines(rows, 1e-12, errors, color="#e3e6ea", lw=1)
    axes.scatter(errors, rows, color=colors, zorder=3)
    for row, error in zip(rows, errors, strict=True):
        axes.annotate(f"{error:.0e}", (error, row), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(*errors, 1e-7) / 3, max(*errors, tolerance) * 6)
    axes.axvline(tolerance, color="#b3261e", lw=1, ls="--")
    axes.tick_params(labelleft=False)
    axes.set_title("largest error of the output\nagainst float64 (dashed: tolerance)", fontsize=10)
    axes.set_xlabel("error")

    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def level() -> str:
    """The instruction-set level that runs."""
    return _machine.machine()["instruction set"]
