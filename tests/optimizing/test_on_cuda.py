"""optimize on a GPU, as far as the CPU shows it: what is chosen, captured and kept; the rest is `benchmarks.cuda`'s."""

import contextlib
import pickle
import types
import warnings

import pytest
import torch
from torch import nn

import ai3_ops
from ai3_ops import registry
from ai3_ops.optimizing import on_cuda
from ai3_ops.optimizing.pipeline import Settings

ALGORITHMS = "direct", "im2col", "winograd_f4"


class Block(nn.Module):
    """A residual block and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(self.second(x) + x).mean((2, 3)))


class Stand:
    """In the place of a GPU: calls are counted, and `fastest` takes a hundredth of the time of the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
        self.captures: list[tuple[int, ...]] = []
        self.timed: list[tuple[str, bool]] = []
        self.fails = ""

        def listed(operation: str, device: str) -> list[registry.AlgorithmInfo]:
            return [a for a in registry.algorithms(operation, "cpu") if a.name in ALGORITHMS]

        def seconds(call, deterministic) -> float:
            way = call.keywords.get("algorithm", on_cuda.FUSED if call.func is fused else "torch")
            call()
            self.timed.append((way, deterministic))
            return 1e-6 if way == fastest else 1e-4

        def captured(body, given, deterministic):
            if self.fails:
                raise RuntimeError(self.fails)
            self.captures.append(tuple(given[0].shape))
            return lambda inputs: body(*inputs)

        monkeypatch.setattr(on_cuda, "is_on_cuda", lambda values: any(isinstance(v, torch.Tensor) for v in values))
        found = types.SimpleNamespace(algorithms=listed, supports=registry.supports)
        monkeypatch.setattr(on_cuda, "registry", found)
        monkeypatch.setattr(on_cuda, "layouts_of", lambda network: ["nchw"])
        monkeypatch.setattr(on_cuda.Chooser.__init__, "__defaults__", (seconds,))
        monkeypatch.setattr(on_cuda, "captured", captured)
        monkeypatch.setattr(on_cuda, "conv2d_fused", fused)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(
            on_cuda.gpu, "in_turns", lambda calls, _: [call() is None or 1.0 / (i + 1) for i, call in enumerate(calls)]
        )


def fused(input, weight, bias, stride, padding, dilation, groups, *, residual=None):
    y = torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return torch.relu(y if residual is None else y + residual)


def chosen(model) -> dict[str, str]:
    return {
        row["layers"][0]: row["algorithm"] for row in model._ai3_report.to_dict()["parts"][0]["steps"] if row["layers"]
    }


@pytest.mark.parametrize("fastest", [*ALGORITHMS, "torch", on_cuda.FUSED])
def test_the_fastest_way_computes_each_convolution(fastest, monkeypatch):
    stand = Stand(monkeypatch, fastest)
    model, x = Block().eval(), torch.randn(2, 3, 9, 9)
    optimized = ai3_ops.optimize(model, x)
    torch.testing.assert_close(optimized(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    steps = chosen(optimized)
    assert (steps["first"], steps["second"]) == (fastest, fastest)
    assert "captured in a CUDA graph" in str(optimized._ai3_report.parts[0].notes)
    assert stand.captures == [(2, 3, 9, 9)]
    again = pickle.loads(pickle.dumps(optimized))
    assert torch.equal(again(x), optimized(x))


def test_each_set_of_sizes_is_captured_once_and_what_comes_late_runs(monkeypatch):
    stand = Stand(monkeypatch, "torch")
    optimized = ai3_ops.optimize(Block().eval(), torch.randn(2, 3, 9, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (*range(3, 3 + on_cuda.REPLAYS), 2, 3 + on_cuda.REPLAYS - 1):
            assert optimized(torch.randn(batch, 3, 9, 9)).shape == (batch, 5)
    assert [shape[0] for shape in stand.captures] == [2, *range(3, 2 + on_cuda.REPLAYS)]


def test_what_lies_on_the_cpu_is_not_captured(monkeypatch):
    """A kernel's launch reads it."""
    stand = Stand(monkeypatch, "torch")
    scale = torch.tensor(2.0)
    monkeypatch.setattr(on_cuda, "is_on_cuda", lambda values: any(v is not scale for v in values))
    body = on_cuda.Replayed(Scaled(), replays=True)
    x = torch.ones(3)
    assert torch.equal(body(x, scale), 2 * x)
    assert not stand.captures
    assert torch.equal(body(x, x), x)
    assert stand.captures == [(3,)]


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


def test_later_sizes_are_planned_without_measuring(monkeypatch):
    stand = Stand(monkeypatch, "im2col")
    optimized = ai3_ops.optimize(Fixed().eval(), torch.randn(2, 3, 9, 9))
    timed = len(stand.timed)
    assert timed
    x = torch.randn(2, 3, 12, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(optimized(x), optimized._ai3_original[0](x).detach(), rtol=1e-4, atol=1e-5)
    assert len(stand.timed) == timed
    steps = optimized._ai3_plans[[*optimized._ai3_plans][-1]].report.steps
    assert [s.algorithm for s in steps if s.operation == "conv2d"] == ["im2col"]


class Fixed(nn.Module):
    """Its graph holds for the example's sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * (2.0 if x.shape[-1] == 9 else 3.0)


def test_settings_that_bound_the_choice(monkeypatch):
    stand = Stand(monkeypatch, "winograd_f4")
    x = torch.randn(2, 3, 9, 9)
    optimized = ai3_ops.optimize(Block().eval(), x, memory_limit=0, deterministic=True, objective="memory")
    assert {way for way, _ in stand.timed} <= {"torch", on_cuda.FUSED}
    assert all(deterministic for _, deterministic in stand.timed)
    notes = str(optimized._ai3_report.parts[0].notes)
    assert "memory_limit: of kernels on a GPU only PyTorch's are taken" in notes
    assert "objective 'memory'" in notes


def test_both_layouts_are_tried_where_tensor_cores_multiply(monkeypatch):
    layouts_of = on_cuda.layouts_of
    stand = Stand(monkeypatch, "torch")
    monkeypatch.setattr(on_cuda, "layouts_of", layouts_of)
    model, x = Block().eval().bfloat16(), torch.randn(2, 3, 9, 9).bfloat16()
    optimized = ai3_ops.optimize(model, x)
    assert len(stand.captures) == 2
    torch.testing.assert_close(optimized(x).float(), model(x).detach().float(), rtol=0.1, atol=0.05)


def test_what_cannot_be_captured_runs_and_says_why(monkeypatch):
    stand = Stand(monkeypatch, "torch")
    stand.fails = "operation not permitted when stream is capturing\nand more"
    model, x = Block().eval(), torch.randn(2, 3, 9, 9)
    optimized = ai3_ops.optimize(model, x)
    assert "not captured in a CUDA graph, but run step by step: operation not permitted when stream is capturing" in (
        optimized._ai3_report.parts[0].notes
    )
    torch.testing.assert_close(optimized(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_without_cuda_graphs_nothing_is_captured(monkeypatch):
    stand = Stand(monkeypatch, "torch")
    optimized = ai3_ops.optimize(Block().eval(), torch.randn(2, 3, 9, 9), cuda_graphs=False)
    assert not stand.captures
    assert not [note for note in optimized._ai3_report.parts[0].notes if "graph" in note]


def test_selectors_are_followed(monkeypatch):
    Stand(monkeypatch, "torch")
    x = torch.randn(2, 3, 9, 9)
    assert chosen(ai3_ops.optimize(Block().eval(), x, {"*": "default", "second": "im2col"}))["second"] == "im2col"
    assert chosen(ai3_ops.optimize(Block().eval(), x, "default"))["second"] == "torch"


def test_a_file_is_refused(monkeypatch, tmp_path):
    Stand(monkeypatch, "torch")
    optimized = ai3_ops.optimize(Block().eval(), torch.randn(2, 3, 9, 9))
    with pytest.raises(ValueError, match=r"on a GPU, for which there are no programs; torch\.save keeps it"):
        ai3_ops.save(optimized, tmp_path / "model.ai3")


class _Graph:
    """Of a captured doubling: `replay` reads and writes what was captured."""

    def __init__(self, inputs, outputs) -> None:
        self.inputs, self.outputs = inputs, outputs

    def replay(self) -> None:
        torch.mul(self.inputs[0], 2, out=self.outputs[0])


def test_a_replay_reads_and_returns_other_memory(monkeypatch):
    events, devices = [], []
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or contextlib.nullcontext())
    done = types.SimpleNamespace(wait=lambda: events.append("wait"), record=lambda: events.append("record"))
    inputs, outputs = [torch.zeros(3), "mode"], (torch.zeros(3),)
    replay = on_cuda._Replay(_Graph(inputs, outputs), inputs, outputs, done, torch.device("cuda:1"))
    x = torch.arange(3.0)
    (first,), (second,) = replay([x, "mode"]), replay([x + 1, "mode"])
    assert torch.equal(first, 2 * x)
    assert torch.equal(second, 2 * x + 2)
    assert events == ["wait", "record"] * 2
    assert devices == [torch.device("cuda:1")] * 2


def test_inputs_that_do_not_fit_are_the_callers_mistake(monkeypatch):
    stand = Stand(monkeypatch, "torch")
    body = on_cuda.Replayed(nn.Linear(3, 2), replays=True)
    stand.fails = "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        body(torch.randn(2, 4))
    stand.fails = ""
    assert body(torch.randn(2, 3)).shape == (2, 2)
    assert not body.reason
    assert stand.captures == [(2, 3)]


def test_what_auto_may_choose():
    (f2,) = [a for a in registry.algorithms("conv2d", "cpu") if a.name == "winograd_f2"]
    (exact,) = [a for a in registry.algorithms("conv2d", "cpu") if a.name == "direct"]
    (rule,) = [a for a in registry.algorithms("conv2d", "cpu") if a.name == "default"]
    assert on_cuda._fits(exact, Settings(tolerance=1e-12))
    assert on_cuda._fits(f2, Settings())
    assert not on_cuda._fits(f2, Settings(tolerance=1e-9))
    assert not on_cuda._fits(rule, Settings())


def test_a_graph_is_for_sizes_strides_and_switches():
    x = torch.randn(2, 3, 4, 4)
    others = [x[:1], x.double(), x.to(memory_format=torch.channels_last)]
    keys = {on_cuda._key([x]), *(on_cuda._key([other]) for other in others), on_cuda._key([x, 1]), on_cuda._key([x, 2])}
    torch.use_deterministic_algorithms(True)
    assert len({*keys, on_cuda._key([x])}) == 7
