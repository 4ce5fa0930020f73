"""Networks for `python -m ai3_ops bench --models benchmarks.networks:super_resolution`: those that no package has, and
transformers' own classes with random weights.
"""

from __future__ import annotations

from typing import Any

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


class First(nn.Module):
    """The first output of one of transformers' models: engines are compared on one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Of token ids (N, L), images (N, 3, H, W) or sound (N, bands, frames)."""
        return self.model(x)[0]


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 30000, (batch, length), generator=torch.Generator().manual_seed(1))


def bert_128(batch: int) -> tuple[nn.Module, Tensor]:
    """BERT-base on 128 tokens."""
    return _bert(), _tokens(batch, 128)


def bert_512(batch: int) -> tuple[nn.Module, Tensor]:
    """BERT-base on 512 tokens."""
    return _bert(), _tokens(batch, 512)


def _bert() -> nn.Module:
    import transformers

    return First(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False))


def gpt2_prompt(batch: int) -> tuple[nn.Module, Tensor]:
    """GPT-2 of 124 million parameters on a prompt of 128 tokens, without its cache."""
    import transformers

    return First(transformers.GPT2Model(transformers.GPT2Config(use_cache=False))), _tokens(batch, 128)


def whisper_tiny_encoder(batch: int) -> tuple[nn.Module, Tensor]:
    """Of 30 s of sound."""
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes: dict[str, Any] = {"d_model": 384, "encoder_layers": 4, "encoder_ffn_dim": 1536, "encoder_attention_heads": 6}

    return First(WhisperEncoder(transformers.WhisperConfig(**sizes))), torch.randn(batch, 80, 3000)


def clip_image(batch: int) -> tuple[nn.Module, Tensor]:
    """CLIP's tower for images, ViT-B/32, of 224x224."""
    import transformers

    return First(transformers.CLIPVisionModel(transformers.CLIPVisionConfig())), torch.randn(batch, 3, 224, 224)


def clip_text(batch: int) -> tuple[nn.Module, Tensor]:
    """CLIP's tower for texts of 77 tokens."""
    import transformers

    return First(transformers.CLIPTextModel(transformers.CLIPTextConfig())), _tokens(batch, 77)
