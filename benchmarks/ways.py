"""Whole networks in the ways that people run them: `swap(model, "default")` beside the model that it came from.

    python -m benchmarks.ways [--models resnet18,...] [--dtypes float32,...] [--layouts nchw,...] [--modes inference,...]
                              [--batches 1,8] [--forms] [--missing] [--seconds 2]

Every cell runs both models the same way (dtype, memory format of the input, inference or a training step, batch), in turns that
alternate in a process of its own, and shows how many times as long PyTorch's takes. `--forms` compares compiled, frozen and
AOTInductor forms of the swapped model, and models swapped or made under `inference_mode`, with the swapped model run eagerly.
BERT, GPT-2, Whisper and CLIP are transformers' own classes, with random weights; texts have no memory format.
Cells that were measured before stay in the table (docs/benchmarks/ways.json) until they are measured again. A call of PyTorch's
that takes more than `LIMIT` seconds (float16, mostly), and no less than ours, is ended; the cell shows what the ratio is above.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import ai3_ops
from benchmarks import measure

PAGE = measure.ROOT / "docs" / "benchmarks" / "ways.md"
MODELS = (
    "resnet18",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "googlenet",
    "densenet121",
    "vit_b_16",
    "swin_t",
    "fcn_resnet50",
    "bert",
    "gpt2",
    "whisper_tiny",
    "clip",
)
TOKENS = {"bert": 128, "gpt2": 128, "whisper_tiny": 16, "clip": 77}  # of transformers' networks, for each item
DTYPES = ("float32", "bfloat16", "float16", "float64", "autocast")
LAYOUTS = ("nchw", "channels_last")
MODES = ("inference", "training")
BATCHES = (1, 8)
FORMS = ("compile", "compile, frozen", "AOTInductor", "swapped in inference_mode", "made in inference_mode")
LIMIT = 30.0  # seconds of a call of PyTorch's
LONG = 20.0  # seconds of one call of each: above it their first calls are what is measured
REACHED = 0.97  # a ratio within 3 % of its target counts as reached


def build(name: str) -> nn.Module:
    """A network with random weights, the same every time: torchvision's, or of transformers as its configuration has it."""
    torch.manual_seed(0)
    if name in TOKENS:
        return _of_transformers(name).eval()
    import torchvision

    options: dict[str, Any] = {"weights_backbone": None} if name.startswith("fcn") else {}
    if name == "googlenet":
        options = {"init_weights": True, "aux_logits": False}
    model = torchvision.models.get_model(name, weights=None, **options)
    return model.eval()


def _of_transformers(name: str) -> nn.Module:
    import transformers

    match name:
        case "bert":
            return transformers.BertModel(transformers.BertConfig())
        case "gpt2":
            return transformers.GPT2Model(transformers.GPT2Config())
        case "whisper_tiny":
            sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1536}
            sizes |= {"decoder_ffn_dim": 1536, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
            return transformers.WhisperModel(transformers.WhisperConfig(**sizes))
    return transformers.CLIPModel(transformers.CLIPConfig())  # ViT-B/32


def inputs(name: str, batch: int, dtype: torch.dtype, layout: str) -> Any:
    """Normal numbers: images of 224x224 pixels, 30 s of sound; and tokens by chance."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, 224, 224, generator=generator).to(dtype)
    x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
    if name not in TOKENS:
        return x
    ids = torch.randint(3, 30000, (batch, TOKENS[name]), generator=generator)
    match name:
        case "clip":
            return {"input_ids": ids, "pixel_values": x}
        case "whisper_tiny":
            sound = torch.randn(batch, 80, 3000, generator=generator).to(dtype)
            return {"input_features": sound, "decoder_input_ids": ids}
    return {"input_ids": ids}


def call(model: Any, x: Any) -> Any:
    """With a tensor, or keyword arguments."""
    return model(**x) if isinstance(x, dict) else model(x)


def tensor_of(output: Any) -> Tensor:
    """The main output of a network."""
    return output.get("out", next(iter(output.values()))) if isinstance(output, dict) else output


def inference(model: nn.Module, x: Any, autocast: bool) -> Callable[[], Any]:
    """One call under inference_mode."""

    def run() -> Any:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(model, x)

    return run


def training(model: nn.Module, x: Any, autocast: bool) -> Callable[[], Any]:
    """One step: forward, backward, and a change of every weight, as an optimizer makes it."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = tensor_of(call(model, x)).float().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def cell(name: str, dtype: str, layout: str, mode: str, batch: int, seconds: float) -> dict[str, Any]:
    """One cell of the table: milliseconds of both, and the ratio; "above" where it is a bound.

    Measured by a process of its own, which can be ended: a backward pass in float16 may take many minutes.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, name, dtype, layout, mode, batch, seconds))
    process.start()
    sender.close()
    try:
        ours = receiver.recv()
        limit = max(LIMIT, ours)
        if not receiver.poll(limit):
            return {"torch_ms": limit * 1e3, "ai3_ms": ours * 1e3, "ratio": limit / ours, "turns": 1, "above": True}
        theirs = receiver.recv()
        times = [[theirs], [ours]] if theirs + ours >= LONG else receiver.recv()
    except EOFError:
        raise RuntimeError(f"{name} {dtype} {layout} {mode} {batch}: its process ended without a result") from None
    finally:
        process.kill()
        process.join()
    theirs, ours = (statistics.median(t) for t in times)
    return {"torch_ms": theirs * 1e3, "ai3_ms": ours * 1e3, "ratio": theirs / ours, "turns": len(times[0])}


def _measure(to: Connection, name: str, dtype: str, layout: str, mode: str, batch: int, seconds: float) -> None:
    """Sends seconds of our second call (the first packs, unless it is long), of PyTorch's first, and of both in turns."""
    autocast = dtype == "autocast"
    kind = torch.float32 if autocast else getattr(torch, dtype)
    model = build(name).to(kind)
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    x = inputs(name, batch, kind, layout)
    warnings.simplefilter("ignore")
    swapped = ai3_ops.swap(model, "default")
    run = inference if mode == "inference" else training
    calls = [run(model, x, autocast), run(swapped, x, autocast)]
    ours = measure.once(calls[1])
    to.send(ours if ours > LONG else measure.once(calls[1]))
    to.send(measure.once(calls[0]))
    to.send(measure.turns(calls, seconds))


def form(name: str, which: str, seconds: float) -> dict[str, Any]:
    """A form of the swapped model beside the swapped model run eagerly: float32, NCHW, batch 1."""
    x = inputs(name, 1, torch.float32, "nchw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swapped = ai3_ops.swap(build(name), "default")
        other = _in_form(swapped, name, which, x)
    calls = [inference(swapped, x, False), inference(other, x, False)]
    for run in calls:
        run()
        run()
    times = measure.turns(calls, seconds)
    eager, ours = (statistics.median(t) for t in times)
    return {"eager_ms": eager * 1e3, "form_ms": ours * 1e3, "ratio": eager / ours, "turns": len(times[0])}


def _in_form(swapped: nn.Module, name: str, which: str, x: Any) -> Any:
    match which:
        case "compile":
            torch._dynamo.reset()
            return torch.compile(copy.deepcopy(swapped))
        case "compile, frozen":
            torch._dynamo.reset()
            compiled = torch.compile(copy.deepcopy(swapped), options={"freezing": True})
            with torch.inference_mode():
                call(compiled, x)
            return compiled
        case "AOTInductor":
            with torch.no_grad():
                args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
                exported = torch.export.export(swapped, args, kwargs)
            with tempfile.TemporaryDirectory() as folder:
                path = torch._inductor.aoti_compile_and_package(exported, package_path=str(Path(folder) / "model.pt2"))
                return torch._inductor.aoti_load_package(path)
        case "swapped in inference_mode":
            with torch.inference_mode():
                return ai3_ops.swap(build(name), "default")
        case "made in inference_mode":
            with torch.inference_mode():
                model = build(name)
            return ai3_ops.swap(model, "default")
    raise ValueError(f"no form {which!r}")


def page(data: dict[str, Any]) -> Iterator[str]:
    """The Markdown page."""
    yield "# Whole networks in the ways that people run them"
    yield ""
    yield 'Written by `python -m benchmarks.ways`. How many times as long PyTorch\'s own model takes as `swap(model, "default")`,'
    yield "run the same way (dtype, memory format of the input, mode, batch), 224x224 images, medians of turns that alternate;"
    yield 'below 0.97 in bold. "autocast" is to bfloat16. Empty: not measured on this machine.'
    yield "BERT-base and GPT-2 read 128 tokens, Whisper-tiny 30 s of sound and 16 tokens, CLIP (ViT-B/32) an image and 77 tokens."
    yield "Their attention stays PyTorch's in a swapped model, since transformers calls it in a function of its own, unless the"
    yield 'model is made with `attn_implementation="ai3"` ([attention](../attention.md)).'
    yield f'">": the call of the model from which it came was ended after {LIMIT:.0f} s, or when it had taken as long as ours.'
    yield ""
    yield from measure.table(("machine", ""), data.get("machine", {}).items())
    yield ""
    for mode in MODES:
        yield f"## {mode.capitalize()}"
        columns = [(d, layout, b) for d in DTYPES for layout in LAYOUTS for b in BATCHES]
        short = {"nchw": "NCHW", "channels_last": "NHWC"}
        rows = []
        for name in MODELS:
            row = [name]
            for dtype, layout, batch in columns:
                found = data["cells"].get(f"{name} {dtype} {layout} {mode} {batch}")
                row.append("" if found is None else _bound(found) if found.get("above") else _ratio(found["ratio"]))
            rows.append(row)
        head = ["network", *(f"{d} {short[layout]} {b}" for d, layout, b in columns)]
        yield from measure.table(head, rows, " " + "r" * len(columns))
        yield ""
    yield "## NCHW input"
    yield ""
    yield "How many times as long the swapped model takes for an NCHW input as for channels_last; inference, above 1.1 in bold."
    yield ""
    columns = [(d, b) for d in DTYPES for b in BATCHES]
    rows = [[name, *(_nchw(data["cells"], name, dtype, batch) for dtype, batch in columns)] for name in MODELS]
    yield from measure.table(["network", *(f"{d} {b}" for d, b in columns)], rows, " " + "r" * len(columns))
    yield ""
    yield "## Forms of the swapped model"
    yield ""
    yield "How many times as long the swapped model takes eagerly as in this form: float32, NCHW, batch 1, inference."
    yield ""
    rows = []
    for name in MODELS:
        found = [data["forms"].get(f"{name} {which}") for which in FORMS]
        rows.append([name, *("" if f is None else _ratio(f["ratio"], 1 / 1.05) for f in found)])
    yield from measure.table(["network", *FORMS], rows, " " + "r" * len(FORMS))


def _nchw(cells: dict[str, Any], name: str, dtype: str, batch: int) -> str:
    nchw, last = (cells.get(f"{name} {dtype} {layout} inference {batch}") for layout in LAYOUTS)
    if nchw is None or last is None or nchw.get("above") or last.get("above"):  # of one call
        return ""
    ratio = nchw["ai3_ms"] / last["ai3_ms"]
    return f"{ratio:.2f}" if ratio <= 1.1 / REACHED else f"**{ratio:.2f}**"


def _bound(found: dict[str, Any]) -> str:
    return f">{found['ratio']:.2f}"


def _ratio(value: float, least: float = REACHED) -> str:
    return f"{value:.2f}" if value >= least else f"**{value:.2f}**"


def main() -> int:
    """Measures the cells that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ways", description=__doc__.splitlines()[0])
    lists = {"models": MODELS, "dtypes": DTYPES, "layouts": LAYOUTS, "modes": MODES}
    for what, known in lists.items():
        parser.add_argument(f"--{what}", default=",".join(known))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--forms", action="store_true", help="forms of the swapped model instead of the cells")
    parser.add_argument("--missing", action="store_true", help="only what the page does not have yet")
    parser.add_argument("--seconds", type=float, default=1.0, help="of turns for each cell")
    parser.add_argument("--output", type=Path, default=PAGE)
    a = parser.parse_args()
    for what, known in lists.items():
        if unknown := [word for word in getattr(a, what).split(",") if word not in known]:
            parser.error(f"--{what}: {', '.join(unknown)}: of {', '.join(known)}")
    console = Console(width=140)
    load = measure.Load()
    wanted: list[tuple[str, ...]] = []
    for name in a.models.split(","):
        if a.forms:
            wanted += [(name, which) for which in FORMS]
            continue
        for dtype in a.dtypes.split(","):
            for mode in a.modes.split(","):
                for layout in ("nchw",) if name in TOKENS else a.layouts.split(","):
                    wanted += [(name, dtype, layout, mode, batch) for batch in a.batches.split(",")]
    data = measure.stored(a.output, {"cells": {}, "forms": {}})
    if "machine" not in data:
        data["machine"] = measure.machine(torch.get_num_threads(), load)
    if a.missing:
        wanted = [what for what in wanted if " ".join(what) not in data["forms" if a.forms else "cells"]]
    for what in wanted:
        gc.collect()
        if a.forms:
            result = data["forms"][" ".join(what)] = form(what[0], what[1], a.seconds)
        else:
            name, dtype, layout, mode, batch = what
            result = data["cells"][" ".join(what)] = cell(name, dtype, layout, mode, int(batch), a.seconds)
        measure.write(a.output, page(data), data)
        times = " ".join(f"{k} {v:.4g}" for k, v in result.items())
        console.print(f"{' '.join(what)}: {times}", highlight=False)
    data["machine"] = measure.machine(torch.get_num_threads(), load)
    measure.write(a.output, page(data), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
