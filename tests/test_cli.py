"""python -m ai3_ops {demo,list,explain,doctor}."""

import json
import warnings
from importlib.util import find_spec

import pytest
import torch

from ai3_ops import doctor, registry
from ai3_ops.__main__ import main, selectors

needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
needs_demo = pytest.mark.skipif(
    not all(map(find_spec, ("torchvision", "sklearn", "matplotlib", "PIL"))), reason="needs ai3_ops[demo]"
)


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
    assert message == "ai3_ops list: no operation 'covn2d'; did you mean 'conv2d'?\n"


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_commands_of_later_do_not_exist(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command])
    assert stopped.value.code == 2


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
def test_explain_an_unknown_network(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--model", "resnet81"])
    assert "resnet" in capsys.readouterr().err


def test_doctor_finds_nothing_broken(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
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


def test_self_test_covers_every_operation():
    """A wrong operator would be seen: each operation has a case."""
    assert doctor.self_test() == []
    missing = set(registry.operations()) - set(doctor.CASES)
    assert not missing


@needs_demo
def test_demo(tmp_path, monkeypatch, capsys):
    from ai3_ops import demo

    monkeypatch.setattr(demo, "DIGITS_EPOCHS", 2)
    picture = tmp_path / "demo.png"
    arguments = [
        "--model",
        "squeezenet1_1",
        "--repeats",
        "1",
        "--output",
        str(picture),
        "--selectors",
        '{"conv2d": "direct"}',
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    for word in (
        "processor",
        "instruction set",
        "random weights",
        "direct was asked for",
        "digits",
        "All outputs agree",
    ):
        assert word in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_demo
def test_demo_fails_when_outputs_differ(tmp_path, monkeypatch, capsys):
    from ai3_ops import demo

    monkeypatch.setattr(demo, "DIGITS_EPOCHS", 1)
    arguments = [
        "--model",
        "squeezenet1_1",
        "--repeats",
        "1",
        "--output",
        str(tmp_path / "demo.png"),
        "--tolerance",
        "0",
    ]
    assert main(["demo", *arguments]) == 1
    assert "Outputs differ" in capsys.readouterr().out
