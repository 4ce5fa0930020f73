"""python -m ai3_ops {demo,list,explain,tune,optimize,bench,doctor}."""

import json
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ai3_ops
from ai3_ops import registry
from ai3_ops.cli import demo, doctor, first_run
from ai3_ops.cli.main import main, selectors
from ai3_ops.optimizing import pipeline

ROOT = Path(__file__).resolve().parents[2]
needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")


def test_list_shows_the_registry(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {(a["operation"], a["name"], a["device"]) for a in listed} == {
        (a.operation, a.name, a.device) for a in registry.algorithms()
    }
    assert main(["list", "conv2d"]) == 0
    shown = capsys.readouterr().out
    assert all(a.name in shown for a in registry.algorithms("conv2d"))
    assert "max_pool2d" not in shown


def test_mistakes_are_one_sentence(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["list", "covn2d"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message == "ai3_ops list: no operation 'covn2d'; did you mean 'conv2d' or 'conv1d'?\n"


@needs_torchvision
def test_a_size_that_a_network_cannot_take_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "squeezenet1_1", "--size", "5", "--selectors", "direct"])
    message = capsys.readouterr().err
    assert re.fullmatch(r"ai3_ops explain: .*Output size is too small.*\n", message)


def test_selectors_are_json_a_file_or_a_word(tmp_path):
    assert selectors("winograd") == "winograd"
    assert selectors('{"conv2d": "direct"}') == {"conv2d": "direct"}
    (tmp_path / "choice.json").write_text('["direct", null]')
    assert selectors(str(tmp_path / "choice.json")) == ["direct", None]
    for wrong in ("{conv2d}", str(tmp_path / "absent.json")):
        with pytest.raises(SystemExit):
            main(["explain", "--selectors", wrong])


@needs_torchvision
def test_explain_a_network(capsys):
    assert main(["explain", "--model", "squeezenet1_1", "--selectors", '{"conv2d": "direct"}', "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    convolutions = [layer for layer in layers if layer["operation"] == "conv2d"]
    assert len(convolutions) == 26
    assert {layer["used"] for layer in convolutions} == {"direct"}


@needs_torchvision
def test_explain_in_both_layouts(capsys):
    given = ["explain", "squeezenet1_1", "--size", "64", "--selectors", "direct"]
    assert main(given) == 0
    nchw = capsys.readouterr().out
    assert main([*given, "--channels-last"]) == 0
    last = capsys.readouterr().out
    assert "images 1x3x64x64 in NCHW" in nchw.splitlines()[0]
    assert "images 1x3x64x64 in channels_last" in last.splitlines()[0]
    first, second = (
        next(line for line in shown.splitlines() if line.startswith("features.0 ")) for shown in (nchw, last)
    )
    assert "NCHW" in first
    assert "NHWC" in second


@needs_torchvision
@pytest.mark.parametrize("name", [["resnet81"], ["--model", "resnet81"]])
@pytest.mark.parametrize("command", ["explain", "demo"])
def test_an_unknown_network(command, name, capsys, monkeypatch):
    """Known before anything is measured."""
    monkeypatch.setattr(doctor, "limits", lambda: pytest.fail("measures"))
    with pytest.raises(SystemExit):
        main([command, *name])
    shown = capsys.readouterr()
    assert "no classification network 'resnet81'; did you mean 'resnet18'" in shown.err
    assert not shown.out


def test_the_network_with_and_without_its_option(monkeypatch, capsys):
    names = []
    monkeypatch.setattr(demo, "main", lambda arguments, console: names.append(arguments.model) or 0)
    for given in ([], ["--model", "vgg16"], ["vgg16"], ["vgg16", "--model", "vgg16"]):
        assert main(["demo", *given]) == 0
    assert names == ["resnet18", "vgg16", "vgg16", "vgg16"]
    with pytest.raises(SystemExit):
        main(["explain", "vgg16", "--model", "resnet18"])
    assert "two networks: resnet18 and vgg16" in capsys.readouterr().err


def test_doctor_finds_nothing_broken(fork):
    """In a process of its own: scikit-learn, which other tests import, brings a second OpenMP runtime."""
    program = "import runpy; runpy.run_module('ai3_ops', run_name='__main__', alter_sys=True)"
    done = fork(program, "doctor", PYTHONPATH=str(Path(ai3_ops.__file__).parents[1]))
    report = done.stdout
    assert done.returncode == 0, report + done.stderr
    for word in (
        "instruction set",
        "multiply-add peak",
        "read bandwidth",
        "CUDA part",
        "OpenMP runtime",
        torch.__version__,
    ):
        assert word in report


def test_doctor_reports_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda: [("ai3::conv2d_direct", "error 1e+00")])
    monkeypatch.setattr(doctor, "openmp_runtimes", lambda: ["libgomp.so.1", "libomp.so"])
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "ai3::conv2d_direct" in report
    assert "2 OpenMP runtimes" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_first_run_needs_a_gpu(capsys):
    assert main(["doctor", "--first-run"]) == 1
    assert "needs a GPU" in capsys.readouterr().out


def test_a_first_run_tells_of_each_step(monkeypatch, capsys):
    """In the steps' processes there is no GPU: what fails is told, in a line and in JSON, and the others go on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in first_run.STEPS if name not in ("versions", "memcheck", "times")]:
        monkeypatch.delitem(first_run.STEPS, name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(first_run, "sanitizer", lambda: "")
    assert main(["doctor", "--first-run"]) == 1
    shown = capsys.readouterr().out
    facts = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert [f["step"] for f in facts if f["status"] == "FAILED"] == ["versions", "times"]
    assert "failed: versions, times" in shown


def test_doctor_remarks_on_threads(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", list)
    monkeypatch.setattr(doctor, "openmp_runtimes", list)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    rates = {1: (50e9, 10e9), 4: (150e9, 20e9)}
    monkeypatch.setattr(doctor._library, "machine", lambda threads: rates[threads])
    monkeypatch.setattr(doctor, "physical_cores", lambda: 4)

    def said():
        assert main(["doctor"]) == 0  # nothing is broken
        return " ".join(capsys.readouterr().out.split())

    assert "remark:" not in said()
    monkeypatch.setattr(doctor, "physical_cores", lambda: 2)
    assert "remark: 4 threads on 2 physical cores" in said()
    monkeypatch.setattr(doctor, "physical_cores", lambda: None)
    assert "remark:" not in said()
    rates[4] = (40e9, 20e9)
    assert "remark: 4 threads multiply slower than one (40 and 50 GFLOP/s)" in said()


def test_physical_cores_are_counted_once(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    monkeypatch.setattr(
        Path, "read_text", lambda self: {"cpu0": "0,4", "cpu4": "0,4"}.get(self.parts[-3], "1,5") + "\n"
    )
    assert doctor.physical_cores() == 2

    def absent(_):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert doctor.physical_cores() is None


def test_self_test_covers_every_operation(built_in_only):
    """A wrong operator would be seen: each operation has a case."""
    assert doctor.self_test() == []
    missing = set(registry.operations()) - set(doctor.CASES)
    assert not missing


def test_doctor_looks_for_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", list)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    main(["doctor"])
    report = " ".join(capsys.readouterr().out.split())
    assert "C++ compiler none: CXX names no-such-compiler" in report
    assert (
        "missing: a C++20 compiler for ai3_ops.register and torch.compile: install g++, or let CXX name one" in report
    )
    monkeypatch.setenv("CXX", sys.executable)
    main(["doctor"])
    report = capsys.readouterr().out
    assert sys.executable in report
    assert "a C++20 compiler" not in report


def test_doctor_says_what_the_demo_lacks(monkeypatch, capsys):
    project = ROOT / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert set(doctor.DEMO_PACKAGES.values()) == set(extras["demo"])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    main(["doctor"])
    report = capsys.readouterr().out
    for package in extras["demo"]:
        assert f"missing: {package} for demo" in report


def _factory():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)).eval()


def test_optimize_prints_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))
    path = tmp_path / "fast.pt"
    given = ["optimize", "test_cli:_factory", "--size", "12", "--selectors", "default", "--output", str(path)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "test_cli:_factory, made by its factory, images 1x3x12x12 in NCHW" in shown
    assert "the model: 2 ms before, 1 ms after" in shown
    fast, x = torch.load(path, weights_only=False), torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), _factory()(x), rtol=1e-4, atol=1e-5)
    assert main([*given, "--json", "--budget-seconds", "1", "--verify", "off"]) == 0
    part = json.loads(capsys.readouterr().out)["optimization"]["parts"][0]
    assert part["steps"]
    assert any('verify="off"' in note for note in part["notes"])
    assert main([*given[:-1], str(tmp_path / "fast.ai3")]) == 0
    assert torch.equal(ai3_ops.load(tmp_path / "fast.ai3")(x), fast(x))
    assert main([*given[:-1], str(tmp_path / "portable.ai3"), "--portable"]) == 0
    assert torch.equal(ai3_ops.load(tmp_path / "portable.ai3")(x), fast(x))
    assert (tmp_path / "portable.ai3").stat().st_size > (tmp_path / "fast.ai3").stat().st_size
    with pytest.raises(SystemExit):
        main(["optimize", "test_cli:_factory", "--alpha", "0.5"])
    assert "ai3_ops optimize: alpha needs a number of at least 1" in capsys.readouterr().err
