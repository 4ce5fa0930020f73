"""The main job, `python -m ai3_ops demo`: a real network and a trained one on every algorithm beside PyTorch's own.

Input are the two photographs that scikit-learn ships; accuracy is measured with a small network, trained in seconds on
scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _machine
from ai3_ops.cli import doctor
from ai3_ops.cli.digits import DIGITS_EPOCHS, Digits, photographs, train_digits
from ai3_ops.cli.models import classifier
from ai3_ops.cli.picture import draw
from ai3_ops.cli.runs import (
    CERTAIN_TURNS,
    OPTIMIZED,
    Run,
    for_digits,
    in_float64,
    is_close,
    layer_errors,
    measure,
    prepare,
    singles,
)

SILENT_SECONDS = 5.0  # after so long a line says what is done, where there is no terminal for a bar


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
        net = classifier(arguments.model, arguments.weights)
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
    with _progress(3 + 2 * (device.type == "cpu") + len(singles(net.model, device))) as step:
        runs = prepare(net, digits, arguments.selectors, x, step)
        step(f"{net.name}: the reference in float64")
        reference = in_float64(net.model, x)
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
        agrees, error = is_close(run, reference, tolerance), run.error(reference)
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
        "layers that it can do, or in those of attention, PyTorch in the rest. "
        "Error: largest difference of the output from PyTorch's in float64, over its largest value. Digits right: the "
        f"share that the small network, computed likewise, names rightly of {len(digits.labels)} digits that it has not "
        "seen.",
        highlight=False,
        markup=False,
    )
    return agreed
