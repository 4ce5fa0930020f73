"""What the demo computes on: scikit-learn's photographs and handwritten digits, and a network trained on these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ai3_ops.cli.models import Classifier


def photographs(net: Classifier) -> tuple[Tensor, list[Any]]:
    """scikit-learn's photographs as the network wants them (2, 3, size, size), and as they are."""
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from torchvision.transforms import v2

    images = [Image.fromarray(image) for image in load_sample_images().images]
    preset = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(net.size, antialias=True),
            v2.CenterCrop(net.size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(net.mean, net.std),
        ]
    )
    return torch.stack([preset(image) for image in images]), images


class Digits(NamedTuple):
    """A trained network, and digits that it has not seen."""

    model: nn.Module
    images: Tensor  # (N, 1, 8, 8)
    labels: Tensor


def train_digits(progress: Callable[[], None] = lambda: None) -> Digits:
    """Trains a convolutional network on two thirds of scikit-learn's digits; takes seconds."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    train, test = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(DIGITS_EPOCHS):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        progress()
    return Digits(model.eval(), images[test], labels[test])


DIGITS_EPOCHS = 8
