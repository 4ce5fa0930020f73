"""`tune --collect`: the measurements that come with the package, made on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ai3_ops import _machine
from ai3_ops.cli import bench, models
from ai3_ops.graph import fusion
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.measuring import shipped, timing
from ai3_ops.measuring.steady import Steady
from ai3_ops.measuring.timing import Layer
from ai3_ops.optimizing import choose
from ai3_ops.surveying import examples
from ai3_ops.tuning.callgraph import CallGraph
from ai3_ops.tuning.meter import Meter
from ai3_ops.tuning.settings import Settings

NETWORKS = (*bench.CONVOLUTIONAL, "resnet18", "mobilenet_v3_large")
SIZE = 224
Case = tuple[Meter, Layer, str]  # with its layout


def main(names: Sequence[str], path: Path | None, budget: float | None, threads: int | None, console: Console) -> int:
    """Measures what `optimize`, then what `tune` measures of these networks for one image, and writes it as a table.

    Within the budget, of each network the largest layers first, with one thread and all in turn, or with `threads`; but what
    was disturbed is left out. On Ctrl-C what was measured until then is written.
    """
    before, found = torch.get_num_threads(), dict[int, list[tuple[dict[str, Any], Any]]]()
    path = path or Path(f"{_machine.family()} {shipped.level()}.json".lower().replace(" ", "-"))
    of_all: list[dict[str, Case]] = []
    for name in names or NETWORKS:
        console.print(name, highlight=False)
        net = models.named(name, size=SIZE)
        for layers in (_of_optimize, _of_tune):
            cases = {shipped.name_of(m.key(layer, layout)): (m, layer, layout) for m, layer, layout in layers(net)}
            of_all.append({name: cases[name] for name in sorted(cases, key=lambda n: -cases[n][1].work)})
    # What `optimize` asks for comes first, and of each network the largest, then of each the second, ...
    todo: dict[str, Case] = {}
    for of_each in (of_all[::2], of_all[1::2]):
        for row in zip_longest(*(cases.items() for cases in of_each)):
            todo |= dict(filter(None, row))
    steady = {}
    for count in [threads] if threads else sorted({1, before}):
        torch.set_num_threads(count)
        steady[count] = Steady()
    start, disturbed = timing.clock(), 0
    end = math.inf if budget is None else start + budget
    try:
        for number, (name, (meter, layer, layout)) in enumerate(todo.items()):
            console.print(f"{number + 1} of {len(todo)}: {name}", highlight=False)
            for count, machine in steady.items():
                torch.set_num_threads(count)
                quiet = machine.wait()
                measured = timing.measure(
                    layer, layout, layer.candidates(layout, False), meter.surroundings, seconds=end - timing.clock()
                )
                if quiet and machine.now():
                    found.setdefault(count, []).append((meter.key(layer, layout), timing.to_json(measured)))
                else:
                    disturbed += 1
    except (timing.OutOfTime, KeyboardInterrupt):
        console.print(f"{number} of {len(todo)} were measured", highlight=False)
    finally:
        torch.set_num_threads(before)
    kept = sum(map(len, found.values()))
    busy = f"{os.getloadavg()[1]:.1f} processes ran at a time on {os.cpu_count()} cores"
    took = f"{timing.clock() - start:.0f} s, at whose end {busy}"
    note = f"{', '.join(names or NETWORKS)} in {took}: {kept} measurements kept, {disturbed} disturbed ones left out"
    shipped.write(shipped.collected(found, note), path)
    console.print(path, highlight=False)
    return 0


def _of_optimize(net: models.Named) -> Iterator[Case]:
    model, (args, kwargs) = net.model, examples.arguments(net.inputs)
    with torch.no_grad():
        network = capture(model, args, kwargs)
        canonicalize(network)
        choose.follow(network, model, choose.AUTO, None)
        fusion.simplify(network)
    size = sum(value.numel() * value.element_size() for value in network.constants.values())
    meter = Meter(size, Settings(), cache=False)
    for node in network.calls(*choose.MEASURED):
        case = choose.Case.of(node, meter)
        yield meter, case.layer, case.layout


def _of_tune(net: models.Named) -> Iterator[Case]:
    graph = CallGraph(net.model, net.inputs)
    meter = Meter(graph.bytes, Settings(), cache=False)
    for layer in graph.layers:
        for layout in layer.layouts:
            yield meter, layer, layout
