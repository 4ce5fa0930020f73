"""The nine networks of the paper's Figure 4 agree with PyTorch under every conv2d algorithm, and with all at once.

Whole (224x224, each network with each algorithm) in `make test-full`; otherwise each network at a small size with the
algorithms taking turns, so that each network and each algorithm is covered.
"""

import itertools
import warnings
from functools import cache

import pytest
import torch
import torchvision
from torch import nn

import ai3_ops
from ai3_ops import explain, swap

# The smallest image that the network takes.
NETWORKS = {
    "alexnet": 63, "densenet121": 33, "googlenet": 33, "inception_v3": 75, "resnet152": 33, "squeezenet1_1": 33,
    "swin_b": 64, "vgg16": 33, "vit_b_16": 32,
}  # fmt: skip
FEW = "googlenet", "squeezenet1_1", "swin_b"
ALGORITHMS = sorted(
    {a.name for a in ai3_ops.algorithms("conv2d", "cpu") if a.accuracy != "approximate" and not a.python}
)
DEPTHWISE = "mobilenet_v2"  # none of the nine has as many groups as channels
SIZES = {**NETWORKS, DEPTHWISE: 33}


def pairs():
    """Each algorithm and each network at least once, an algorithm with a network that has layers for it."""
    winograd = [a for a in ALGORITHMS if a.startswith("winograd")]
    general = [a for a in ALGORITHMS if a not in winograd and a not in ("depthwise", "patch_gemm")]
    with_3x3 = [name for name in NETWORKS if name not in ("swin_b", "vit_b_16")]
    longest = max(len(general), len(NETWORKS))
    turns = zip(itertools.cycle(NETWORKS), itertools.islice(itertools.cycle(general), longest), strict=False)
    return [
        *turns,
        *zip(itertools.cycle(reversed(with_3x3)), winograd, strict=False),
        (DEPTHWISE, "depthwise"),
        ("swin_b", "patch_gemm"),
    ]


# max|y - y64| / max|y64| of the logits: float32 rounding through all layers; more where an algorithm states more.
TOLERANCE = 2e-4


def build(name, size):
    torch.manual_seed(0)
    options = {"image_size": size} if name.startswith("vit") else {}
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    model = getattr(torchvision.models, name)(weights=None, num_classes=20, **options).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.any():  # ViT's head starts at zero
                module.weight.normal_(std=0.05)
            if isinstance(module, nn.BatchNorm2d):  # keeps the activations' scale in networks that are not trained
                module.train()
                module.momentum = None
        images = torch.rand(4, 3, size, size)
        if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
            model(images)
    return model.eval(), images[:2]


@cache
def reference(name, size):
    model, images = build(name, size)
    with torch.no_grad():
        expected = model.double()(images.double())
    return model.float(), images, expected


def check(name, size, selectors, algorithms):
    model, images, expected = reference(name, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that an algorithm cannot do keep PyTorch's implementation
        swapped = swap(model, selectors, images)
    with torch.no_grad():
        actual = swapped(images)
        error = ((actual - expected).abs().max() / expected.abs().max()).item()
        eager = ((model(images) - expected).abs().max() / expected.abs().max()).item()
    bounds = [
        a.error_bound for a in ai3_ops.algorithms(device="cpu") if a.name in algorithms and a.accuracy == "bounded"
    ]
    assert error <= max(TOLERANCE, 20 * max(bounds, default=0.0), 10 * eager), (error, eager)
    rows = explain(swapped).layers
    for row in rows:
        if row.used != "torch":
            assert row.calls or "not called" in row.reason
            assert not row.torch_calls or "PyTorch is faster for some calls" in row.reason
    assert all(row.reason for row in rows if row.used == "torch" and row.requested)
    return rows


def check_conv2d(name, size, algorithm):
    """How many layers the algorithm computed."""
    rows = check(name, size, algorithm, [algorithm])
    return sum(row.used != "torch" and row.calls > 0 for row in rows if row.operation == "conv2d")


def every_operation():
    """For each operation the algorithm that is not conv2d's `direct` alone: its own default, or its first."""
    chosen = {}
    for operation in sorted({a.operation for a in ai3_ops.algorithms(device="cpu")}):
        names = [a.name for a in ai3_ops.algorithms(operation, "cpu") if a.accuracy != "approximate" and not a.python]
        preferred = [n for n in ("direct", "math") if n in names]
        chosen[operation] = [*preferred, *(n for n in names if n != "default"), "default"][0]
    return chosen


@pytest.mark.parametrize(("name", "algorithm"), pairs())
def test_networks_and_algorithms_in_turn(name, algorithm):
    assert check_conv2d(name, SIZES[name], algorithm) > 0


def test_turns_cover_networks_and_algorithms():
    names, algorithms = zip(*pairs(), strict=True)
    assert set(names) == set(SIZES)
    assert set(algorithms) == set(ALGORITHMS)


def check_every_operation(name, size):
    selectors = every_operation()
    rows = check(name, size, selectors, set(selectors.values()))
    assert {row.operation for row in rows} == {row.operation for row in rows if row.used != "torch"}


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in NETWORKS])
def test_all_operations_at_once(name):
    check_every_operation(name, NETWORKS[name])


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_whole(name, algorithm):
    vision = name in ("swin_b", "vit_b_16")  # transformers
    fits = {"winograd": not vision, "depthwise": False, "patch": vision}.get(algorithm.partition("_")[0], True)
    count = check_conv2d(name, 299 if name == "inception_v3" else 224, algorithm)
    assert count > 0 or not fits


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
def test_all_operations_at_once_whole(name):
    check_every_operation(name, 299 if name == "inception_v3" else 224)
