"""bench: engines in processes of their own, what is written about them; tune, explain and bench on the command line."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import ai3_ops
from ai3_ops import _machine
from ai3_ops.cli import bench, models, peers
from ai3_ops.cli.bench import Engine, Result
from ai3_ops.cli.main import main, selectors
from ai3_ops.measuring import steady as steady_module

needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="needs NumPy, as the engines do")
FACTORY = """
import torch
def small():
    layers = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers), torch.randn(2, 3, 8, 8)
def bare():
    return torch.nn.Conv2d(3, 4, 3)
def number():
    return 3
"""


@pytest.fixture(autouse=True)
def _factories(tmp_path, monkeypatch):
    (tmp_path / "factories_of_test_bench.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    sys.modules.pop("factories_of_test_bench", None)


SMALL = "factories_of_test_bench:small"


def test_models_by_name():
    made = models.named(SMALL)
    assert made.inputs.shape == (2, 3, 8, 8)
    assert not made.model.training
    assert models.named("factories_of_test_bench:bare", batch=2, size=16).inputs.shape == (2, 3, 16, 16)
    for name, error, words in (
        (
            "factories_of_test_bench:number",
            ValueError,
            "must return an nn.Module, or one and its example inputs, got int",
        ),
        ("factories_of_test_bench:absent", ValueError, "absent"),
        ("no_such_module_of_test_bench:f", ImportError, "no_such_module_of_test_bench"),
    ):
        with pytest.raises(error, match=words):
            models.named(name)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")
def test_models_of_timm():
    assert models.named("test_resnet").origin.startswith("timm")
    with pytest.raises(ValueError, match=r"nor has timm; did you mean.*'test_resnet'"):
        models.named("test_resnett")


def test_settled_networks_keep_the_size_of_their_numbers():
    model = nn.Sequential(*(m for _ in range(20) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)))).eval()
    x = torch.randn(4, 8, 16, 16)
    with torch.no_grad():
        assert model(x).std() < 0.1
        models.settle(model, x)
        assert 0.5 < model(x).std() < 2
    assert not any(m.training for m in model.modules())
    assert {m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}


@needs_numpy
def test_each_engine_in_its_process(monkeypatch):
    monkeypatch.setitem(bench.PACKAGES, "ncnn", ("no_such_module_of_test_bench", "a-package"))
    engines = ["eager", "swap default", "load", "ncnn"]
    found = bench.measure(models.named(SMALL), engines, 1, 2, Progress(disable=True))
    assert list(found) == engines
    assert found["ncnn"].absent == "not installed: pip install a-package"
    for name in engines[:3]:
        engine = found[name]
        # So small a network does not gain everywhere.
        if name == "load" and "the model stayed as it was" in engine.absent:
            continue
        assert not engine.absent, engine.absent
        assert engine.calls >= 2 * peers.TURN_CALLS
        assert 0 < engine.median_ms <= engine.p99_ms
        assert engine.images_per_second > 0
        assert 0 < engine.error < 1e-5
        assert engine.version


@needs_numpy
def test_bfloat16_beside_the_float64_of_the_float32_weights():
    engines = ["eager", "onnxruntime"]
    found = bench.measure(models.named(SMALL), engines, 1, 1, Progress(disable=True), "bfloat16")
    assert found["onnxruntime"].absent
    assert not found["eager"].absent, found["eager"].absent
    assert 1e-4 < found["eager"].error < 0.05


@needs_numpy
def test_an_engine_that_fails_is_named(tmp_path, monkeypatch):
    worker = bench.Worker("openvino", tmp_path, 1)  # no files
    assert worker.answer()["absent"]
    worker.close()
    worker = bench.Worker("nonsense", tmp_path, 1)
    assert "KeyError" in worker.answer()["absent"]
    assert "absent" in worker.turn()
    worker.close()


def results():
    engines = {
        "eager": Engine("2.15", "", 10.0, 11.0, 100.0, 2**20, 1e-6, 0.1, None, 50),
        "onnxruntime": Engine("1.0", "", 4.0, 5.0, 250.0, 2**20, 1e-6, 0.1, None, 50),
        "mnn": Engine("3", "", 8.0, 9.0, 125.0, 2**20, 1e-6, 0.1, None, 50),
        "openvino": Engine(absent="not | installed"),
        "swap default": Engine("0.1", "", 5.0, 6.0, 200.0, 2**21, 2e-6, 0.5, None, 50),
        "swap auto": Engine("0.1", "", 2.0, 3.0, 500.0, 2**21, 2e-6, 9.5, None, 50),
    }
    one = Result("small", 1, "1x3x8x8", 2, engines, {"processor": "Abacus"}, "abc", "python -m …", "2026-01-01")
    return {one.key: one}


def test_what_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "deep" / "networks.md"
    assert bench.load(path) == {}
    bench.save(path, results())
    assert bench.load(path) == results()
    page = path.read_text()
    assert "| small batch 1 | 10 | 4 | 8 | 5 | **2** | 2.00x (onnxruntime / swap auto) |" in page
    assert "| openvino | not / installed |" in page
    assert "| small batch 1 | **1** | **1** | **1** | 2 | 2 |" in page
    assert bench.NOTES["mnn"] in page
    assert "exposes no energy" in page
    assert (path.parent / "networks.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.with_suffix(".json").read_text())["small batch 1"]["commit"] == "abc"
    with_energy = results()
    with_energy["small batch 1"].engines["eager"].joules = 0.5
    assert "| 0.5 |" in "\n".join(bench.document(with_energy, "x.png"))


def test_approximate_engines_are_shown_and_compared_with_nobody():
    shown = results()
    shown["small batch 1"].engines["optimize approximate"] = Engine(
        "0.1", "", 1.0, 1.0, 999.0, 2**20, 1e-3, 9.5, None, 50
    )
    page = "\n".join(bench.document(shown, "x.png"))
    assert "| 10 | 4 | 8 | 5 | **2** | 1 | 2.00x (onnxruntime / swap auto) |" in page


@pytest.mark.parametrize("error", [2.0, float("nan")])
def test_a_wrong_output_is_compared_with_nobody(error):
    wrong = results()
    wrong["small batch 1"].engines["onnxruntime"].error = error
    assert wrong["small batch 1"].fastest(bench.PEERS) == "mnn"
    page = "\n".join(bench.document(wrong, "x.png"))
    assert "| 10 | 4 (wrong output) | 8 | 5 | **2** | 4.00x (mnn / swap auto) |" in page


def test_bench_on_the_command_line(tmp_path, monkeypatch, capsys):
    asked = []

    def fake(named, engines, threads, turns, bar, dtype):
        asked.append((named.name, list(engines), threads, turns, dtype))
        return {name: results()["small batch 1"].engines["swap auto"] for name in engines}

    monkeypatch.setattr(bench, "measure", fake)
    output = tmp_path / "page.md"
    foreign = results()
    bench.save(output, {key: replace(result, machine=_machine.machine()) for key, result in foreign.items()})
    command = [
        "bench",
        "--models",
        SMALL,
        "--peers",
        "eager",
        "swap-auto",
        "--threads",
        "1",
        "--turns",
        "3",
        "--output",
    ]
    assert main([*command, str(output)]) == 0
    assert asked == [(SMALL, ["eager", "swap auto"], 1, 3, "float32")]
    assert set(bench.load(output)) == {"small batch 1", f"{SMALL} batch 1"}  # what was there stays
    assert "1.00x (eager / swap auto)" in capsys.readouterr().out
    assert main([*command, str(output), "--dtype", "bfloat16"]) == 0
    assert bench.load(output)[f"{SMALL} batch 1 bfloat16"].dtype == asked.pop()[-1] == "bfloat16"
    with pytest.raises(SystemExit):
        main(["bench", "--models", SMALL, "--peers", "onnxruntim"])
    assert "no engine 'onnxruntim'; did you mean 'onnxruntime'" in capsys.readouterr().err
    bench.save(output, foreign)
    with pytest.raises(SystemExit):
        main([*command, str(output)])
    assert "has small batch 1 of processor Abacus, this is" in capsys.readouterr().err
    assert len(asked) == 1


def test_tune_and_explain_on_the_command_line(tmp_path, monkeypatch, capsys):
    from ai3_ops.measuring import timing
    from ai3_ops.measuring.timing import Measured

    monkeypatch.setattr(
        timing,
        "measure",
        lambda layer, layout, names, *_: {
            n: Measured(1.0 if n == "im2col" else 9.0, 0.1, 1e-6, *layer.memory(n, layout)) for n in names
        },
    )
    plan = tmp_path / "plan.json"
    assert main(["tune", SMALL, "--output", str(plan), "--threads", "1", "--memory-limit", "1000000"]) == 0
    shown = capsys.readouterr().out
    assert "im2col" in shown
    assert "4 layers" in shown
    loaded = selectors(str(plan))
    assert isinstance(loaded, ai3_ops.Plan)
    assert loaded.settings["memory_limit"] == 1000000
    assert main(["explain", SMALL, "--selectors", str(plan), "--json"]) == 0
    layers = {layer["name"]: layer for layer in json.loads(capsys.readouterr().out)["layers"]}
    assert layers["0"]["used"] == "im2col"
    assert main(["tune", SMALL, "--verify", str(plan)]) == 0
    assert "verified" in capsys.readouterr().out
    for wrong in (["--objective", "speed"], ["--verify", str(tmp_path / "absent.json")]):
        with pytest.raises(SystemExit) as stopped:
            main(["tune", SMALL, *wrong])
        assert stopped.value.code == 2


def test_ctrl_c_on_the_command_line_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    from ai3_ops.measuring import timing

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "measure", stop)
    plan = tmp_path / "plan.json"
    assert main(["tune", SMALL, "--output", str(plan)]) == 130
    assert {layer.reason for layer in ai3_ops.Plan.load(plan).layers.values()} == {"not measured"}


def test_a_table_for_the_terminal(capsys):
    bench.show(results()["small batch 1"], Console(width=160))
    shown = capsys.readouterr().out
    assert "2.00x (onnxruntime / swap auto)" in shown


def test_turns_wait_while_processors_are_slower_than_at_best(monkeypatch):
    steady = steady_module.Steady()
    assert 0 < steady.best < 1
    monkeypatch.setattr(steady_module.time, "sleep", lambda seconds: None)
    times = iter([1.5, 1.3, 1.1])
    monkeypatch.setattr(steady, "_seconds", lambda: next(times))
    steady.best = 1.0
    assert steady.wait()
    assert next(times, None) is None
    monkeypatch.setattr(steady_module, "WAIT", 0.0)
    monkeypatch.setattr(steady, "_seconds", lambda: 9.0)
    assert not steady.now()
    assert not steady.wait()
    assert steady.wait(), "a machine that always is so is waited for once"
