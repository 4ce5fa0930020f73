"""Layers of other people's models: what `swap(model, "default")` computes beside the layer that it came from.

    python -m benchmarks.others [MODEL ...] [--seconds 0.2] [--all]

Models of torchvision, timm and transformers, the latter two where they are installed, with random weights and small inputs. Every
distinct call of a swapped layer, with the sizes and memory format that it gets inside its model, swapped and not, and two whole
models, one swapped without example inputs and one in training, are measured in turns that alternate; a ratio is ours over
PyTorch's. Rows that were measured before stay in the table (docs/benchmarks/others.json) until they are measured again; each
names the processor and the instruction-set level.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

import ai3_ops
from ai3_ops import _library
from ai3_ops.nn.classes import Leaf
from benchmarks import measure, ways

PAGE = measure.ROOT / "docs" / "benchmarks" / "others.md"
WORTH = 0.97  # a ratio within 3 % of 1 counts as equal
TIMM = (
    "convnextv2_atto",
    "dla34",
    "edgenext_xx_small",
    "efficientvit_b0",
    "fastvit_t8",
    "ghostnet_100",
    "hrnet_w18_small",
    "levit_128",
    "mobilenetv4_conv_small",
    "mobilevit_s",
    "poolformer_s12",
    "regnetx_002",
    "repvgg_a0",
    "res2net50_26w_4s",
    "resnetv2_50",
    "tf_mixnet_s",
    "xcit_nano_12_p8_224",
)


def _image(side: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def _timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name)
    return model, _image(timm.data.resolve_data_config({}, model=model)["input_size"][-1])


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    import torchvision

    return torchvision.models.get_model(name, weights=None), _image(224)


def _detector(name: str, side: int) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import torchvision

        return torchvision.models.get_model(name, weights=None, weights_backbone=None), ([_image(side)[0]],)

    return make


def _tokens(name: str, length: int = 128, **config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import transformers

        made = transformers.AutoConfig.for_model(name, **config)
        return transformers.AutoModel.from_config(made), (torch.arange(length)[None] % 100,)

    return make


def _sequence(name: str, *size: int, **config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import transformers

        made = transformers.AutoConfig.for_model(name, **config)
        x = torch.randn(size, generator=torch.Generator().manual_seed(1))
        model = transformers.AutoModel.from_config(made)
        return (model.get_encoder() if name == "whisper" else model), x

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{name: (lambda name=name: _timm(name)) for name in TIMM},
    **{name: (lambda name=name: _torchvision(name)) for name in ("shufflenet_v2_x1_0", "mnasnet1_0", "resnet50")},
    "ssdlite320_mobilenet_v3_large": _detector("ssdlite320_mobilenet_v3_large", 320),
    "fasterrcnn_mobilenet_v3_large_320_fpn": _detector("fasterrcnn_mobilenet_v3_large_320_fpn", 320),
    "distilbert": _tokens("distilbert", n_layers=2),
    "convbert": _tokens("convbert", num_hidden_layers=2),
    "gpt2": _tokens("gpt2", n_layer=2),
    "segformer": _sequence("segformer", 1, 3, 224, 224),
    "wav2vec2": _sequence("wav2vec2", 1, 16000, num_hidden_layers=2),
    "wav2vec2-conformer": _sequence(
        "wav2vec2-conformer",
        1,
        16000,
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
    ),
    "whisper": _sequence("whisper", 1, 80, 3000, encoder_layers=2, d_model=384, encoder_attention_heads=6),
    "encodec": _sequence("encodec", 1, 1, 24000),
}


def _without_examples() -> tuple[str, measure.Function, measure.Function]:
    """A detector as `swap` leaves it that has seen no call of it: layers stay NCHW where it cannot know what reads them."""
    model, inputs = MODELS["ssdlite320_mobilenet_v3_large"]()
    swapped = ai3_ops.swap(model.eval(), "default")

    def calls(of: nn.Module) -> measure.Function:
        def call() -> Any:
            with torch.inference_mode():
                return _call(of, inputs)

        return call

    return "the whole model, swapped without example inputs", calls(swapped), calls(model)


def _training() -> tuple[str, measure.Function, measure.Function]:
    """A step of training."""
    import torchvision

    model = torchvision.models.mobilenet_v3_small(weights=None).to(memory_format=torch.channels_last).train()
    x = _image(224, batch=8).to(memory_format=torch.channels_last)
    swapped = ai3_ops.swap(model, "default", x)
    return "a training step, channels_last, batch 8", *(ways.training(m, x, autocast=False) for m in (swapped, model))


# Whole models, in ways that no single layer shows: what is measured, and a call of the swapped one and of the plain one.
WHOLE: dict[str, Callable[[], tuple[str, measure.Function, measure.Function]]] = {
    "ssdlite320_mobilenet_v3_large without examples": _without_examples,
    "mobilenet_v3_small training": _training,
}


class Case(NamedTuple):
    """A layer of a swapped model and one of its calls."""

    layer: nn.Module
    text: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    plain_stride: tuple[int, ...]


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _seen(model: nn.Module, inputs: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sizes and strides of what each leaf was given first."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                found.setdefault(name, (tuple(args[0].shape), args[0].stride()))

        return hook

    handles = [
        m.register_forward_pre_hook(watch(n)) for n, m in model.named_modules() if not any(True for _ in m.children())
    ]
    with torch.inference_mode():
        _call(model, inputs)
    for handle in handles:
        handle.remove()
    return found


def cases(model: nn.Module, swapped: nn.Module, inputs: Any) -> dict[str, Case]:
    """The distinct calls of swapped layers, by what is written in the table."""
    before, after = _seen(model, inputs), _seen(swapped, inputs)
    found: dict[str, Case] = {}
    for name, module in swapped.named_modules():
        if not isinstance(module, Leaf) or name not in before or name not in after:
            continue
        (size, plain), (same, stride) = before[name], after[name]
        if size != same or isinstance(module, (nn.ReLU, nn.Flatten)):
            continue
        layout = "" if len(size) != 4 else " nchw" if torch.empty_strided(size, stride).is_contiguous() else " nhwc"
        text = f"{type(module).__name__}({module.extra_repr()}) on {'x'.join(map(str, size))}{layout}"
        found.setdefault(text, Case(module, text, size, stride, plain))
    return found


def ratio(case: Case, seconds: float) -> tuple[float, float]:
    """Seconds of the swapped layer and of PyTorch's, each with the strides that it gets in its model."""
    plain = ai3_ops.unswap(copy.deepcopy(case.layer))
    if isinstance(plain, nn.Conv2d):
        plain.to(memory_format=torch.contiguous_format)
    for name, parameter in case.layer.named_parameters():  # the same memory, where it has the same order
        if parameter.stride() == plain.get_parameter(name).stride():
            setattr(plain, name, parameter)
    x = torch.randn(case.size)
    ours = torch.empty_strided(case.size, case.stride).copy_(x)
    theirs = torch.empty_strided(case.size, case.plain_stride).copy_(x)
    with torch.inference_mode():
        own, peer = measure.interleaved([lambda: case.layer(ours), lambda: plain(theirs)], seconds)
    return own, peer


def timed(name: str, seconds: float) -> dict[str, Callable[[], tuple[float, float]]]:
    """By what is measured of a model, what measures it: seconds of ours and of PyTorch's."""
    if name in WHOLE:
        text, own, peer = WHOLE[name]()

        def both() -> tuple[float, float]:
            first, second = measure.interleaved([own, peer], 10 * seconds)
            return first, second

        return {text: both}
    model, inputs = MODELS[name]()
    found = cases(model.eval(), ai3_ops.swap(model, "default", inputs), inputs)
    return {text: functools.partial(ratio, case, seconds) for text, case in found.items()}


def document(stored: dict[str, Any]) -> list[str]:
    """The page: each level's rows that lose, and a summary by model."""
    lines = ["# Layers of other people's models", "", *(__doc__ or "").split("\n\n")[2:3], ""]
    for machine, found_there in stored.items():
        models = found_there["models"]
        lines += [f"## {machine}", "", found_there["limits"], ""]
        rows = [
            (
                name,
                str(len(found)),
                f"{measure.mean([o / p for o, p in found.values()]):.2f}",
                f"{max(o / p for o, p in found.values()):.2f}",
            )
            for name, found in models.items()
            if found
        ]
        lines += measure.table(("model", "distinct calls", "mean ratio", "worst"), rows, " rrr")
        slow = sorted(
            (
                (o / p, name, text, o, p)
                for name, found in models.items()
                for text, (o, p) in found.items()
                if o / p > 1 / WORTH
            ),
            reverse=True,
        )
        lines += ["", f"{len(slow)} calls above {1 / WORTH:.2f}:", ""]
        lines += measure.table(
            ("ratio", "ours", "PyTorch's", "model", "call"),
            [(f"{r:.2f}", measure.milliseconds(o), measure.milliseconds(p), n, t) for r, n, t, o, p in slow],
            "rrr",
        )
        lines.append("")
    return lines


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join((*MODELS, *WHOLE))} (default: all)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of turns for each call (default: 0.2)")
    parser.add_argument("--all", action="store_true", help="print calls that do not lose, too")
    arguments = parser.parse_args()
    console = Console()
    stored = measure.stored(PAGE, {})
    level = _library.registry()["level"]
    about = measure.machine(torch.get_num_threads(), measure.Load())
    machine = f"{about['processor']}, {level}"
    limits = ", ".join(
        f"{what} {about[what]}" for what in ("multiply-add peak", "read bandwidth", "threads", "versions", "date")
    )
    for name in arguments.models or (*MODELS, *WHOLE):
        torch.manual_seed(0)
        gc.collect()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                turns = timed(name, arguments.seconds)
        except ImportError as missing:
            console.print(f"{name}: left out, {missing}")
            continue
        times = {}
        for text, turn in turns.items():
            times[text] = own, peer = turn()
            if arguments.all or own / peer > 1 / WORTH:
                console.print(
                    f"{own / peer:5.2f} {own * 1e6:9.1f} us  {name}: {text}",
                    soft_wrap=True,
                    markup=False,
                    highlight=False,
                )
        here = stored.setdefault(machine, {"limits": "", "models": {}})
        here["limits"] = f"{limits[0].upper()}{limits[1:]}."
        here["models"][name] = times
        measure.write(PAGE, document(stored), stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
