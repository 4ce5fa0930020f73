"""What each graph substitution gains on each network: `python -m benchmarks.substitutions [--models googlenet,...]`.

Both networks of a comparison are captured and rewritten as `optimize` does, with algorithms by the same rules; one of them
has, besides, what the search finds with one substitution, or with all of them. They take turns in one process. Results that were
measured before stay on the page (docs/benchmarks/substitutions.json) until they are measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ai3_ops.cli import bench, models
from ai3_ops.explaining.report import Optimization
from ai3_ops.graph import fusion
from ai3_ops.graph.canonical import canonicalize
from ai3_ops.graph.capture import capture
from ai3_ops.graph.network import Network
from ai3_ops.graph.substitutions import SUBSTITUTIONS, Substitution
from ai3_ops.optimizing import choose, pipeline, search
from ai3_ops.programs.timing import COSTS, paired
from benchmarks import measure

PAGE = measure.ROOT / "docs" / "benchmarks" / "substitutions.md"
ALL = "all"
SECONDS = 120.0  # of search and of measuring algorithms, each time
RULES = {  # by the log's words
    "enlarge kernel": "enlarge_kernel",
    "fuse parallel convolutions": "fuse_parallel",
    "fuse addition into weights": "fuse_addition",
    "average before a 1x1 convolution": "pool_first",
    "split normalization of the input": "split_prologue",
}
# Percent that others publish for the networks' run time without and with their substitutions, on GPUs.
PUBLISHED = {
    "squeezenet1_1": "TASO 6.7, Tensat 24.5 (SqueezeNet)",
    "inception_v3": "TASO 6.3, Tensat 10.0 (Inception-v3)",
}


def compare(name: str, cost: str) -> dict[str, Any]:
    """Of one network: milliseconds without, and for all substitutions and each alone how often and what it gained."""
    named = models.named(name)
    models.settle(named.model, named.inputs)
    settings = pipeline.Settings()
    with torch.no_grad():
        plain = capture(named.model, (named.inputs,), {})
        canonicalize(plain)
        choose.follow(plain, named.model, settings.selectors, None)
        fusion.simplify(plain)
        start = (
            plain.copy()
        )  # as `optimize` searches: before algorithms are chosen, which substitutions would have to share
        body = _body(plain, named.inputs, settings)
        found: dict[str, Any] = {"cost": cost, "gains": {}}
        taken: Counter[str] = Counter()
        for substitutions in (SUBSTITUTIONS, *((s,) for s in SUBSTITUTIONS)):
            which = ALL if len(substitutions) > 1 else substitutions[0].__name__
            if which != ALL and which not in taken:
                continue
            changed = start.copy()
            counts = _search(changed, cost, settings, substitutions)
            taken |= counts if which == ALL else {}
            gain, before, after = 1.0, 0.0, 0.0
            if counts:
                other = _body(changed, named.inputs, settings)
                gain, before, after = paired(
                    lambda o=other: body(named.inputs), lambda o=other: o(named.inputs), rounds=31
                )
                found.setdefault("without_ms", before * 1e3)
            found["gains"][which] = {"taken": dict(counts), "gain": gain, "with_ms": after * 1e3}
    return found


def _search(
    network: Network, cost: str, settings: pipeline.Settings, substitutions: Sequence[Substitution]
) -> Counter[str]:
    """Applies what is found; how often each substitution was taken."""
    before = len(network.log)
    search.search(network, COSTS[cost], settings.alpha, time.monotonic() + SECONDS, None, substitutions)
    return Counter(RULES[r.rule] for r in network.log[before:] if r.rule in RULES)


def _body(network: Network, x: torch.Tensor, settings: pipeline.Settings) -> Any:
    choose.measured(network, settings, time.monotonic() + SECONDS, lambda _: None)
    return pipeline.body_of(network, pipeline.lowered(network, [x], Optimization(""), compare=False))


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    yield "# What graph substitutions gain"
    yield ""
    yield "Written by `python -m benchmarks.substitutions`. Percent of a network's time that the substitutions of `optimize`"
    yield "save, after folding and fusing, which is there in both; in brackets how many steps they rewrote. Float32, batch 1."
    yield "`optimize` keeps them only where the whole network gains. What the search with all of them does not take is empty."
    yield ""
    yield from measure.table(("machine", ""), data.get("machine", {}).items())
    yield ""
    columns = [ALL, *(s.__name__ for s in SUBSTITUTIONS)]
    rows = []
    for name, found in data["networks"].items():
        cells = []
        for which in columns:
            one = found["gains"].get(which)
            cells.append(_cell(one, sum(one["taken"].values())) if one else "")
        by = "" if found.get("cost", "latency") == "latency" else f", searched by {found['cost']}"
        rows.append([name + by, *cells, PUBLISHED.get(name, "")])
    yield from measure.table(["network", *columns, "published"], rows, " " + "r" * len(columns))


def _cell(one: dict[str, Any], count: int) -> str:
    return f"{(1 - 1 / one['gain']) * 100:.1f} ({count})" if count else "none found"


def main() -> int:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.substitutions", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(bench.CONVOLUTIONAL))
    parser.add_argument("--cost", choices=COSTS, default="latency", help="what the search follows (default: latency)")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    load = measure.Load()
    data = measure.stored(options.output, {"networks": {}})
    for name in options.models.split(","):
        data["networks"][name] = compare(name, options.cost)
        print(name, json.dumps(data["networks"][name]))
        data["machine"] = measure.machine(torch.get_num_threads(), load)
        measure.write(options.output, page(data), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
