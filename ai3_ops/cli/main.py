"""The command line: `python -m ai3_ops {demo,list,explain,tune,optimize,bench,doctor}`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ai3_ops
from ai3_ops import registry
from ai3_ops.cli import bench, collect, demo, doctor, first_run, models, peers
from ai3_ops.selecting.choice import Algorithm, prefer
from ai3_ops.selecting.plan import Plan
from ai3_ops.tuning.settings import Interrupted


def selectors(text: str) -> Any:
    """Selectors from the command line: a file of JSON (a plan's, too), JSON itself, or a word such as `winograd`."""
    path = Path(text)
    if not text.lstrip().startswith(("{", "[", '"')):
        if not path.suffix and not path.exists():
            return text
        try:
            text = path.read_text()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(given, dict):
        return given
    try:
        if {"version", "layers"} <= set(given):
            return Plan.from_dict(given)
        return {key: _choice(value) for key, value in given.items()}
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _choice(value: Any) -> Any:
    """What a key's value means: {"prefer": [...]}, {"algorithm": name, parameters}, anything else as it is."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"prefer"} and isinstance(value["prefer"], list):
        return prefer(*map(_choice, value["prefer"]))
    if "algorithm" in value:
        return Algorithm(value["algorithm"], **{k: v for k, v in value.items() if k != "algorithm"})
    raise ValueError(
        f'an object as a value is {{"prefer": [names]}} or {{"algorithm": name, ...}}, got {json.dumps(value)}'
    )


def at_least_one(text: str) -> int:
    """A number of repetitions."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of 1 or more, got {text}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="python -m ai3_ops", description="Choose the algorithm of each layer of a PyTorch model."
    )
    commands = top.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="run a real network on chosen algorithms: errors, accuracy, latency, a picture"
    )
    demo.add_argument(
        "--output", type=Path, default=Path("demo.png"), help="where the picture goes (default: demo.png)"
    )
    demo.add_argument(
        "--repeats", type=at_least_one, default=7, help="timed runs of each algorithm, in turns (default: 7)"
    )
    demo.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest error that counts as agreement (default: 1e-3)"
    )
    demo.add_argument("--device", default="cpu", help="cpu (default) or cuda")

    explain = commands.add_parser("explain", help="say what computes each layer of a network, and why")
    explain.add_argument("--json", action="store_true", help="print JSON")
    tune = commands.add_parser("tune", help="measure every algorithm of each layer, and choose")
    tune.add_argument(
        "--output", type=Path, metavar="PLAN", help="where the plan goes, as JSON; else it is only printed"
    )
    tune.add_argument("--plot", type=Path, metavar="PICTURE", help="where a picture of the plan goes")
    tune.add_argument("--verify", type=Path, metavar="PLAN", help="a plan whose choices are timed again, instead")
    tune.add_argument(
        "--collect",
        nargs="*",
        metavar="MODEL",
        help="measure these networks (default: nine of torchvision) for the table that comes with the package, instead",
    )
    tune.add_argument("--no-cache", dest="cache", action="store_false", help="measure all of it now, and keep nothing")

    optimize = commands.add_parser("optimize", help="rewrite a whole network, and say what it gains and why")
    optimize.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the optimized module goes: a name that ends in .ai3 for ai3_ops.load and <ai3_ops/model.h>, another for "
        "torch.load(FILE, weights_only=False)",
    )
    optimize.add_argument("--json", action="store_true", help="print JSON")
    optimize.add_argument(
        "--alpha", type=float, default=1.05, help="how far the search follows slower networks (default: 1.05)"
    )
    optimize.add_argument(
        "--verify",
        choices=("quick", "full", "off"),
        default="quick",
        help="how much is compared with float64: the example's first item (default), every rewrite and random inputs, nothing",
    )
    optimize.add_argument(
        "--portable",
        action="store_true",
        help="keep the weights beside their packs: the file loads with any instruction set",
    )
    for command in (tune, optimize):
        command.add_argument("--objective", default="latency", help="latency (default), p99 or memory")
        for name, kind, text in (
            ("budget-seconds", float, "no further layer is measured after so long"),
            ("memory-limit", int, "bytes of packed weights and workspaces; of optimize, activations, too"),
            ("tolerance", float, "largest error of a layer (default: 5e-5)"),
            ("threads", at_least_one, "default: torch's"),
        ):
            command.add_argument(f"--{name}", type=kind, help=text)
        command.add_argument("--deterministic", action="store_true", help="leave out what may vary from run to run")
        command.add_argument("--allow-approximate", action="store_true", help="also algorithms that approximate")
    for command in (explain, tune, optimize):
        command.add_argument("--batch", type=at_least_one, default=1, help="number of images (default: 1)")
        command.add_argument("--size", type=at_least_one, help="their height and width (default: the network's)")
        command.add_argument(
            "--channels-last", action="store_true", help="give the network its images in channels_last (default: NCHW)"
        )

    bench = commands.add_parser("bench", help="whole networks on this package and on other engines")
    bench.add_argument("--models", nargs="+", metavar="MODEL", help="default: nine networks of torchvision")
    bench.add_argument(
        "--peers", nargs="*", metavar="ENGINE", help="default: all, ours too, but 'optimize approximate'"
    )
    bench.add_argument("--batch", type=at_least_one, default=1, help="images (default: 1)")
    bench.add_argument("--size", type=at_least_one, default=224, help="of the images (default: 224)")
    bench.add_argument("--dtype", choices=peers.DTYPES, default="float32", help="of model and input (default: float32)")
    bench.add_argument("--threads", type=at_least_one, help="default: torch's")
    bench.add_argument("--turns", type=at_least_one, default=5, help="of each engine (default: 5)")
    bench.add_argument(
        "--output", type=Path, help="a page; its JSON and picture go beside it, and networks not run now stay in them"
    )

    for command in (demo, explain, tune, optimize):
        network = "a network of torchvision (default: resnet18)"
        if command is not demo:
            network += ", of timm, or package:factory"
        command.add_argument("--model", help=network)
        command.add_argument("network", nargs="?", metavar="model", help="the same as --model")
        command.add_argument(
            "--weights",
            type=Path,
            help="a file with a state_dict; else pretrained weights if in torch's cache, else random ones",
        )
        if command is tune:
            continue
        command.add_argument(
            "--selectors",
            type=selectors,
            default="auto" if command is optimize else "default",
            metavar="JSON",
            help='JSON, a file of JSON, or an algorithm\'s name; a value may be {"prefer": ["winograd", "im2col"]} or '
            '{"algorithm": "default", "exclude": ["winograd*"]}',
        )

    listing = commands.add_parser("list", help="operations, their algorithms and their properties")
    listing.add_argument("operation", nargs="?", help="only this operation")
    listing.add_argument("--json", action="store_true", help="print JSON")

    health = commands.add_parser("doctor", help="what was built, what runs here, what is missing and how to get it")
    health.add_argument(
        "--first-run", action="store_true", help="on a machine with a GPU: what a new GPU must show, step by step"
    )
    return top


def list_algorithms(operation: str | None, as_json: bool, console: Console) -> int:
    """Prints the registry."""
    found = registry.algorithms(operation)
    if as_json:
        print(json.dumps([asdict(a) for a in found], indent=2))
        return 0
    table = Table("operation", "algorithm", "device", "accuracy", "deterministic", "dtypes", "computed by")
    for i, a in enumerate(found):
        accuracy = f"{a.accuracy} ({a.error_bound:.0e})" if a.accuracy == "bounded" else a.accuracy
        by = "a rule" if a.rule else "PyTorch" if a.vendor else "Python" if a.python else "ai3_ops"
        first = i == 0 or found[i - 1].operation != a.operation
        dtypes = "all" if len(a.dtypes) == 4 else ", ".join(a.dtypes)
        cells = (
            a.operation if first else "",
            a.name,
            a.device,
            accuracy,
            "yes" if a.deterministic else "no",
            dtypes,
            by,
        )
        table.add_row(*cells, end_section=i + 1 < len(found) and found[i + 1].operation != a.operation)
    console.print(table)
    return 0


def _laid_out(inputs: Any, channels_last: bool) -> Any:
    """Images in channels_last where that is wanted; what a factory gives stays as it is."""
    if channels_last and isinstance(inputs, torch.Tensor) and inputs.ndim == 4:
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def _described(inputs: Any) -> str:
    """The size and memory layout of images, after a comma."""
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4:
        return ""
    last = inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()
    return f", images {'x'.join(map(str, inputs.shape))} in {'channels_last' if last else 'NCHW'}"


def explain_network(arguments: argparse.Namespace, console: Console) -> int:
    """Swaps a network, runs it once, and prints what computes each layer."""
    net = models.named(arguments.model, batch=arguments.batch, size=arguments.size, weights=arguments.weights)
    inputs = _laid_out(net.inputs, arguments.channels_last)
    swapped = ai3_ops.swap(net.model, arguments.selectors, inputs)
    with torch.inference_mode():
        swapped(*inputs) if isinstance(inputs, tuple) else swapped(inputs)
    report = ai3_ops.explain(swapped)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console.print(f"{arguments.model}, {net.origin}{_described(inputs)}", highlight=False)
        print(report)
    return 0


def tune_network(arguments: argparse.Namespace, console: Console) -> int:
    """Tunes a network, or verifies a plan for it; prints the plan, and saves it where asked."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for path in filter(None, (arguments.output, arguments.plot)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    net = models.named(arguments.model, batch=arguments.batch, size=arguments.size, weights=arguments.weights)
    model, inputs = net.model, _laid_out(net.inputs, arguments.channels_last)
    status = 0
    try:
        if arguments.verify:
            plan = ai3_ops.Plan.load(arguments.verify).verify(model, inputs, cache=arguments.cache)
        else:
            names = (
                "objective", "budget_seconds", "memory_limit", "tolerance", "deterministic", "allow_approximate", "cache",
            )  # fmt: skip
            plan = ai3_ops.tune(model, inputs, **{name: getattr(arguments, name) for name in names})
    except Interrupted as stop:
        plan, status = stop.plan, 130
    console.print(f"{arguments.model}, {net.origin}{_described(inputs)}", highlight=False)
    print(plan)
    if arguments.output:
        plan.save(arguments.output)
    if arguments.plot:
        plan.plot(arguments.plot)
    return status


def optimize_network(arguments: argparse.Namespace, console: Console) -> int:
    """Optimizes a network, prints what was done to it, and saves it where asked."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.output and not arguments.output.parent.is_dir():
        raise FileNotFoundError(f"{arguments.output}: there is no folder {arguments.output.parent}")
    net = models.named(arguments.model, batch=arguments.batch, size=arguments.size, weights=arguments.weights)
    inputs = _laid_out(net.inputs, arguments.channels_last)
    names = (
        "alpha", "budget_seconds", "objective", "memory_limit", "tolerance", "deterministic", "allow_approximate",
        "verify", "portable",
    )  # fmt: skip
    settings = {name: getattr(arguments, name) for name in names}
    fast = ai3_ops.optimize(net.model, inputs, arguments.selectors, **settings)
    report = ai3_ops.explain(fast)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console.print(f"{arguments.model}, {net.origin}{_described(inputs)}", highlight=False)
        print(report)
    if arguments.output and arguments.output.suffix == ".ai3":
        ai3_ops.save(fast, arguments.output)
    elif arguments.output:
        torch.save(fast, arguments.output)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs a command; its exit status. A mistake in the arguments is one sentence and status 2."""
    top = parser()
    arguments = top.parse_args(argv)
    if "model" in arguments:
        names = {name for name in (arguments.model, arguments.network) if name is not None}
        if len(names) > 1:
            top.error(f"two networks: {' and '.join(sorted(names))}")
        arguments.model = next(iter(names), "resnet18")
    # Into a file or a pipe: wide enough for tables, whatever COLUMNS says.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        match arguments.command:
            case "list":
                return list_algorithms(arguments.operation, arguments.json, console)
            case "explain":
                return explain_network(arguments, console)
            case "tune" if arguments.collect is not None:
                given = arguments
                return collect.main(given.collect, given.output, given.budget_seconds, given.threads, console)
            case "tune":
                return tune_network(arguments, console)
            case "optimize":
                return optimize_network(arguments, console)
            case "bench":
                return bench.main(arguments, console)
            case "doctor":
                return first_run.main(console) if arguments.first_run else doctor.main(console)
            case _:
                return demo.main(arguments, console)
    except BrokenPipeError:  # who reads the pipe has enough; nothing more is to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as mistake:
        if type(mistake) is RuntimeError and not str(mistake).startswith("ai3_ops"):
            raise  # nobody's mistake but ours
        text = str(mistake).removeprefix(f"ai3_ops.{arguments.command}: ")
        top.exit(2, f"ai3_ops {arguments.command}: {text}\n")
