"""Optimized networks of other packages, saved and loaded: equal bit for bit. A few always, the rest in `make test-full`."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import ai3_ops
from ai3_ops._torch import pytree

TIMM = {
    "resnet18": 64, "mobilenetv3_small_050": 64, "efficientnet_lite0": 64, "convnext_atto": 64, "vit_tiny_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224, "ghostnet_050": 64, "repvgg_a0": 64, "mobilevit_xxs": 64, "densenet121": 64,
    "hrnet_w18_small": 64, "res2net50_26w_4s": 64,
}  # fmt: skip
TORCHVISION = {"shufflenet_v2_x0_5": 64, "mnasnet0_5": 64, "squeezenet1_1": 64, "regnet_y_400mf": 64}
ALWAYS = ("mobilenetv3_small_050", "squeezenet1_1", "bert")


def of_timm(name, size):
    timm = pytest.importorskip("timm")
    options = {"img_size": 224} if "224" in name else {}
    return timm.create_model(name, num_classes=7, **options), torch.randn(1, 3, size, size)


def of_torchvision(name, size):
    return getattr(pytest.importorskip("torchvision").models, name)(num_classes=7), torch.randn(1, 3, size, size)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def of_transformers(name):
    """Small, with random weights."""
    t = pytest.importorskip("transformers")
    tokens, image = {"input_ids": torch.randint(0, 90, (2, 9))}, {"pixel_values": torch.randn(2, 3, 32, 32)}
    match name:
        case "bert":
            return t.BertModel(t.BertConfig(vocab_size=99, **SMALL)), tokens
        case "distilbert":
            return t.DistilBertModel(
                t.DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
            ), tokens
        case "vit":
            return t.ViTModel(t.ViTConfig(image_size=32, patch_size=8, **SMALL)), image
        case "segformer":
            config = t.SegformerConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=16)
            return t.SegformerForSemanticSegmentation(config), {"pixel_values": torch.randn(2, 3, 64, 64)}
        case "convnext":
            return t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])), image


def saved(model, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast, file = ai3_ops.optimize(model.eval(), inputs, "default", progress=False), io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    with torch.no_grad():
        expected = pytree.tree_leaves(fast(*args, **kwargs))
        for again in (pickle.loads(pickle.dumps(fast)), torch.load(file, weights_only=False), copy.deepcopy(fast)):
            for ours, theirs in zip(pytree.tree_leaves(again(*args, **kwargs)), expected, strict=True):
                assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
        for ours, theirs in zip(expected, pytree.tree_leaves(model(*args, **kwargs)), strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    return fast


def marked(names):
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", marked(TIMM))
def test_timm(name):
    saved(*of_timm(name, TIMM[name]))


@pytest.mark.parametrize("name", marked(TORCHVISION))
def test_torchvision(name):
    saved(*of_torchvision(name, TORCHVISION[name]))


@pytest.mark.parametrize("name", marked(["bert", "distilbert", "vit", "segformer", "convnext"]))
def test_transformers(name):
    saved(*of_transformers(name))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Upsample(scale_factor=2))

    def forward(self, x):
        return self.stem(x) if float(x.sum()) > -1e9 else x


def test_one_whose_parts_are_optimized():
    assert saved(Branches(), torch.randn(1, 3, 9, 9))._ai3_report.parts[0].name == "stem"
