"""Writes benchmarks/shapes/<network>.txt: every layer of a network, one line per distinct shape, with its count.

The benchmarks read these files. Run again after adding a network: ``python -m benchmarks.shapes``.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ai3_ops.calls.call import Call
from ai3_ops.registry import OPERATIONS

HERE = Path(__file__).resolve().parent / "shapes"
NETWORKS = {
    "alexnet": 224,
    "densenet121": 224,
    "googlenet": 224,
    "inception_v3": 299,
    "resnet152": 224,
    "squeezenet1_1": 224,
    "swin_b": 224,
    "vgg16": 224,
    "vit_b_16": 224,
    "mobilenet_v3_large": 224,
    "efficientnet_b0": 224,
    "convnext_tiny": 224,
    "unet": 256,
}


class UNet(nn.Module):
    """Ronneberger, Fischer & Brox, "U-Net", 2015, padded as most use it: 64 to 1024 channels, four levels, two classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(self._twice(c, k) for c, k in itertools.pairwise([3, *widths]))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(c, c // 2, 2, 2) for c in widths[:0:-1])
        self.up = nn.ModuleList(self._twice(c, c // 2) for c in widths[:0:-1])
        self.classes = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _twice(c: int, k: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(c, k, 3, padding=1), nn.ReLU(), nn.Conv2d(k, k, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Down, and up again beside what came down."""
        levels = [x := self.down[0](x)]
        for block in self.down[1:]:
            levels.append(x := block(self.pool(x)))
        for widen, block, beside in zip(self.widen, self.up, levels[-2::-1], strict=True):
            x = block(torch.cat([beside, widen(x)], 1))
        return self.classes(x)


def _linear(x: Tensor, features: int) -> str:
    return f"linear M={x.numel() // x.shape[-1]} K={x.shape[-1]} N={features}"


class _Layers(TorchFunctionMode):
    """Counts the layers that a network computes, whether its modules are called for them or functions."""

    calls: ClassVar[dict[Any, Call]] = {f: kind() for kind in Call.by_name.values() for f in kind.seen_as()}

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # the mode is off inside, where the projections are called
            x = args[0]
            self.found.update([_linear(x, 3 * x.shape[-1]), _linear(x, x.shape[-1])])
        elif call := self.calls.get(func):
            self.found[OPERATIONS[call.operation].line(y, *call.arguments(*args, **kwargs))] += 1
        return y


def text(name: str) -> str:
    """The file of a network for one image: its layers in order, with how often each occurs."""
    size = NETWORKS.get(name, 224)
    with torch.inference_mode(), torch.device("meta"):
        model = (UNet() if name == "unet" else torchvision.models.get_model(name, weights=None)).eval()
        x = torch.empty(1, 3, size, size)
        with _Layers() as layers:
            model(x)
    return "\n".join(
        [f"# {name}, {tuple(x.shape)}", *(f"{line} # x{n}" for line, n in layers.found.items() if line), ""]
    )


def main() -> None:
    """Write the file of each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="torchvision names, or unet")
    arguments = parser.parse_args()
    for name in arguments.networks:
        content = text(name)
        (HERE / f"{name}.txt").write_text(content)
        print(f"{name}: {len(content.splitlines()) - 1} shapes")


if __name__ == "__main__":
    main()
