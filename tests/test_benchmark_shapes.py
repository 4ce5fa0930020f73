"""The accuracy bounds (DESIGN §6) of all own algorithms on every layer of the benchmark networks; tester.py makes up others.

The ordinary run takes a sample, `make test-full` the rest. None is left out for its time: the slowest, `fft` on the 1x1 layers of
most channels, takes seconds. Each error is a property in a JUnit report (`--junitxml=PATH -o junit_family=xunit1`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

measure = pytest.importorskip("benchmarks.measure", reason="the benchmarks are not part of the wheel")
from tester import ALGORITHMS  # noqa: E402

from ai3_ops import registry  # noqa: E402
from ai3_ops.checking.cases import Call, Case, allowed, tensors, terms  # noqa: E402
from benchmarks.measure import Layer  # noqa: E402

OWN = [a for a in ALGORITHMS if not (a.vendor or a.rule)]
LAYERS = sorted(
    {layer for path in measure.SHAPES.glob("*.txt") for layer in measure.network(path.stem)},
    key=lambda layer: (layer.flops, layer.bytes, layer.line),
)
SAMPLE_FLOPS = 2e9  # of a layer of the sample, at most
SAMPLE_PAIRS = 6e5  # of its channels, at most, times its strides: fft keeps 432 values or more of each
BAND = 8  # rows at each place where a large output is looked at: more than any tile of Winograd's


def sample() -> set[Layer]:
    """Of each operation, kernel, stride and depthwise or not: the median layer, that of most work, that of most channels."""
    kinds = defaultdict(list)
    for layer in LAYERS:
        s = layer.sizes
        pairs = s["C"] * s["K"] // s["groups"] * math.prod(s["stride"]) if layer.operation == "conv2d" else 0
        if layer.flops <= SAMPLE_FLOPS and pairs <= SAMPLE_PAIRS:
            kinds[layer.operation, s.get("kernel"), s.get("stride"), s.get("groups", 1) > 1].append(layer)
    return {
        layer
        for kind in kinds.values()
        for layer in (kind[len(kind) // 2], kind[-1], max(kind, key=lambda layer: layer.sizes.get("C", 0)))
    }


SAMPLE = sample()


def case_of(layer: Layer) -> Case:
    """The call that computes a layer on float32 in channels_last, with a bias."""
    with torch.device("meta"):
        arguments = measure.arguments(layer.module(), layer.input())
    shapes = tuple(tuple(a.shape) for a in arguments if isinstance(a, Tensor))
    return Case(shapes, arguments[len(shapes) :], ("channels_last",))


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The tester's data; no tensor of these calls is absent."""
    return [t for t in tensors(case, dtype, "cpu") if t is not None]


def calls(layer: Layer, inputs: list[Tensor]) -> list[Call]:
    """Those of the algorithms that support the layer."""
    case = case_of(layer)
    found = [Call(info, case, torch.float32) for info in OWN if info.operation == layer.operation]
    return [c for c in found if registry.supports(layer.operation, c.info.name, *inputs, *case.arguments)[0]]


def references(layer: Layer, case: Case, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """In float64 the outputs and the sums of products' magnitudes, and what takes the same part of an output.

    The part of a convolution above `REFERENCE_FLOPS`: rows at the upper edge, in the middle and at the lower edge, as edge tiles
    and inner ones need, and as many random output channels as that allows.
    """
    aten = registry.OPERATIONS[layer.operation].aten
    exact = [v.double() for v in inputs]
    magnitude = [v.abs() for v in exact]
    if layer.flops <= measure.REFERENCE_FLOPS or layer.sizes.get("groups") != 1:
        return aten(*exact, *case.arguments), aten(*magnitude, *case.arguments), lambda y: y
    stride, (above, beside), dilation, groups = case.arguments
    height = layer.output_size[0]
    starts = [0] if height <= 3 * BAND else [0, (height - BAND) // 2, height - BAND]
    bands = [range(start, height if len(starts) == 1 else start + BAND) for start in starts]
    rows = [row for band in bands for row in band]
    count = int(layer.sizes["K"] * measure.REFERENCE_FLOPS / layer.flops * height / len(rows))
    channels = torch.randperm(layer.sizes["K"])[: max(count, 1)]

    def part(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        reach = dilation[0] * (weight.shape[2] - 1) + 1
        x = F.pad(x, (0, 0, above, above))
        read = (x[:, :, band[0] * stride[0] : band[-1] * stride[0] + reach] for band in bands)
        window = stride, (0, beside), dilation, groups
        return torch.cat([aten(r, weight[channels], bias[channels], *window) for r in read], 2)

    return part(*exact), part(*magnitude), lambda y: y[:, channels][:, :, rows]


@pytest.mark.parametrize(
    "layer", [pytest.param(x, id=x.line, marks=() if x in SAMPLE else pytest.mark.full) for x in LAYERS]
)
def test_bounds_hold(layer, record_property):
    case = case_of(layer)
    inputs = inputs_of(case)
    exact, magnitude, part = references(layer, case, inputs)
    wrong = []
    for call in calls(layer, inputs):
        y = call.operator(*(t.to(call.info.device) for t in inputs)).cpu()
        assert part(y).shape == exact.shape, call
        error = (part(y).double() - exact).abs()
        bound = allowed(call.info, terms(layer.operation, case), torch.float32, "normal", exact, magnitude)
        relative = (error.max() / exact.abs().max()).item()
        record_property(call.info.name, relative)
        if beyond := int((~(error <= bound)).sum()):
            wrong.append(
                f"{call}: {beyond} outputs beyond the bound, errors up to {relative:.2g} of the largest output"
            )
    assert not wrong, "\n".join(wrong)


def test_part_is_of_the_whole(monkeypatch):
    layer = measure.conv2d(2, 5, 60, 12, 5, 2)
    case = case_of(layer)
    inputs = inputs_of(case, torch.float64)
    whole, _, _ = references(layer, case, inputs)
    monkeypatch.setattr(measure, "REFERENCE_FLOPS", layer.flops / 8)
    exact, _, part = references(layer, case, inputs)
    assert exact.numel() < whole.numel() / 8 * 1.2
    torch.testing.assert_close(exact, part(whole))


def shapes_of(case: Case) -> list[Tensor]:
    """Inputs without data: all that support depends on."""
    return [torch.empty(shape, device="meta") for shape in case.shapes if shape is not None]


def test_every_algorithm_has_layers():
    found = {call.info for layer in SAMPLE for call in calls(layer, shapes_of(case_of(layer)))}
    operations = {layer.operation for layer in LAYERS}
    assert operations >= {"conv2d", "linear", "max_pool2d", "relu"}
    assert found == {a for a in OWN if a.operation in operations}
