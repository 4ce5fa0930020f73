"""Writes benchmarks/shapes/<network>.txt: every layer of a network, one line per distinct shape, with its count.

The benchmarks read these files. Run again after adding a network: ``python benchmarks/shapes.py``.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path

import torch
import torchvision
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down, and up again beside what came down."""
        levels = [x := self.down[0](x)]
        for block in self.down[1:]:
            levels.append(x := block(self.pool(x)))
        for widen, block, beside in zip(self.widen, self.up, levels[-2::-1], strict=True):
            x = block(torch.cat([beside, widen(x)], 1))
        return self.classes(x)


def _pair(value: int | tuple[int, ...]) -> str:
    a, b = (value, value) if isinstance(value, int) else value
    return str(a) if a == b else f"{a},{b}"


def _lines(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[str]:
    """What a call of a module computes itself, not by its children."""
    match module:
        case nn.Conv2d():
            n, c, h, w = x.shape
            return [
                f"conv2d N={n} C={c} H={h} W={w} K={module.out_channels} kernel={_pair(module.kernel_size)} "
                f"stride={_pair(module.stride)} pad={_pair(module.padding)} "
                f"dilation={_pair(module.dilation)} groups={module.groups}"
            ]
        case nn.Linear():
            return [_linear(x, y.shape[-1])]
        case nn.MultiheadAttention() | ShiftedWindowAttention():  # projections by functional calls
            return [_linear(x, 3 * x.shape[-1]), _linear(x, x.shape[-1])]
        case nn.MaxPool2d() | nn.AvgPool2d():
            name = "max_pool2d" if isinstance(module, nn.MaxPool2d) else "avg_pool2d"
            n, c, h, w = x.shape
            return [
                f"{name} N={n} C={c} H={h} W={w} kernel={_pair(module.kernel_size)} stride={_pair(module.stride)} "
                f"pad={_pair(module.padding)} ceil={int(module.ceil_mode)}"
            ]
        case nn.AdaptiveAvgPool2d():
            n, c, h, w = x.shape
            return [f"adaptive_avg_pool2d N={n} C={c} H={h} W={w} out={_pair(tuple(y.shape[-2:]))}"]
        case nn.ReLU():
            return [f"relu count={x.numel()}"]
    return []


def _linear(x: torch.Tensor, features: int) -> str:
    return f"linear M={x.numel() // x.shape[-1]} K={x.shape[-1]} N={features}"


def shapes(name: str, size: int, batch: int) -> Counter[str]:
    """The layers of one network at (batch, 3, size, size), with how often each occurs."""
    model = (UNet() if name == "unet" else torchvision.models.get_model(name, weights=None)).eval()
    found: Counter[str] = Counter()

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found.update(_lines(module, inputs[0], output))

    for module in model.modules():
        module.register_forward_hook(hook)
    with torch.inference_mode():
        model.to("meta")(torch.empty(batch, 3, size, size, device="meta"))
    return found


def main() -> None:
    """Write the file of each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="torchvision names, or unet")
    arguments = parser.parse_args()
    for name in arguments.networks:
        size = NETWORKS.get(name, 224)
        lines = [f"{line} # x{count}" for line, count in shapes(name, size, 1).items()]
        (HERE / f"{name}.txt").write_text(f"# {name}, ({1}, 3, {size}, {size})\n" + "\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} shapes")


if __name__ == "__main__":
    main()
