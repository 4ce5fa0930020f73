"""The demo's picture: inputs, latency and error of each algorithm, and what computes each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _machine
from ai3_ops.cli.digits import Digits
from ai3_ops.cli.models import Classifier
from ai3_ops.cli.runs import OPTIMIZED, Run


def draw(
    net: Classifier,
    runs: list[Run],
    reference: Tensor,
    digits: Digits,
    pictures: list[Any],
    tolerance: float,
    path: Path,
) -> None:
    """Saves the picture: inputs, latency and error of each algorithm, and what computes each layer."""
    import matplotlib

    style: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT}
    with matplotlib.rc_context(style):
        path.parent.mkdir(parents=True, exist_ok=True)
        _figure(net, runs, reference, digits, pictures, tolerance).savefig(path)


TEXT = "#2b2f36"  # the color of the picture's words


def _figure(
    net: Classifier, runs: list[Run], reference: Tensor, digits: Digits, pictures: list[Any], tolerance: float
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
