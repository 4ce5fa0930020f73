"""Networks that no package has, for `python -m ai3_ops bench --models benchmarks.networks:super_resolution`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SuperResolution(nn.Module):
    """A compact network for upscaling: 32 convolutions 3x3 of 64 channels with PReLU, then a pixel shuffle (Shi et al. 2016).

    Sizes as in the networks that restore faces and drawings (Real-ESRGAN's compact ones).
    """

    def __init__(self, layers: int = 32, channels: int = 64, scale: int = 4) -> None:
        super().__init__()
        body: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.PReLU(channels)]
        for _ in range(layers):
            body += [nn.Conv2d(channels, channels, 3, padding=1), nn.PReLU(channels)]
        self.body = nn.Sequential(*body, nn.Conv2d(channels, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))
        self.upsample = nn.Upsample(scale_factor=scale, mode="nearest")

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 3, scale * H, scale * W)."""
        return self.body(x) + self.upsample(x)


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation" (2015), padded, with batch norms."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_Double(i, o) for i, o in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(o, i, 2, stride=2) for i, o in zip(sizes[-2::-1], sizes[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(_Double(2 * i, i) for i in sizes[-2::-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, classes, H, W); H and W are multiples of 2 ** depth."""
        seen = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            seen.append(x)
        seen.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([seen.pop(), up(x)], 1))
        return self.head(x)


def super_resolution() -> tuple[nn.Module, Tensor]:
    """With an image of 128x128."""
    return SuperResolution(), torch.rand(1, 3, 128, 128)


def unet() -> tuple[nn.Module, Tensor]:
    """With an image of 224x224."""
    return UNet(), torch.rand(1, 3, 224, 224)
