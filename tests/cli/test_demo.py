"""The main job, `python -m ai3_ops demo`: what it swaps, measures and prints."""

from __future__ import annotations

import io
import re
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

for package in ("torchvision", "sklearn", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs ai3_ops[demo]")
import matplotlib  # noqa: E402
from rich.console import Console  # noqa: E402
from torchvision import models  # noqa: E402

import ai3_ops  # noqa: E402
from ai3_ops.cli import demo  # noqa: E402
from ai3_ops.cli import digits as digits_module  # noqa: E402
from ai3_ops.cli.digits import Digits, train_digits  # noqa: E402
from ai3_ops.cli.main import main  # noqa: E402
from ai3_ops.cli.models import Classifier  # noqa: E402
from ai3_ops.cli.runs import Run, for_digits, in_float64, measure, prepare  # noqa: E402

pytestmark = pytest.mark.usefixtures("built_in_only")


def small():
    """A network and one for digits, as the demo has them, in no time."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    net = Classifier("small", nn.Sequential(*layers).eval(), "random weights", 16, [0.0] * 3, [1.0] * 3, None)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)).eval()
    return net, Digits(model, torch.rand(6, 1, 8, 8), torch.arange(6)), torch.rand(2, 3, 16, 16)


def selected(selectors):
    net, digits, x = small()
    runs = prepare(net, digits, selectors, x)
    measure(runs, x, digits, 1, lambda _: None)
    return runs[2]


def used(model):
    return [layer.used for layer in ai3_ops.explain(model).layers]


def test_timed_calls_find_their_packs():
    """Latencies are those of a model in use, whose weights are packed once."""
    net, digits, x = small()
    runs = {run.label: run for run in prepare(net, digits, {"conv2d": "im2col", "linear": "gemm"}, x)}
    measure(list(runs.values()), x, digits, 1, lambda _: None)
    swapped = runs["selected"].model
    assert not any(p.is_inference() for p in swapped.parameters())
    assert all(swapped[i]._ai3.packs.bytes > 0 for i in (0, 2, 5))
    for a in ai3_ops.algorithms("conv2d", "cpu"):
        if a.packs and not a.rule and a.name in runs:
            assert runs[a.name].model[2]._ai3.packs.bytes > 0, a.name


def test_selectors_that_name_layers_speak_of_the_network_alone():
    run = selected({"0": "direct", "re:2": "im2col", "conv2d": "smm"})
    assert used(run.model)[:3] == ["direct", "torch", "im2col"]
    assert used(run.digits)[0] == "smm"
    run = selected(["direct", "im2col"])
    assert used(run.model)[0] == "direct"
    assert set(used(run.digits)) == {"torch"}
    run = selected({"conv2d": ["direct", "im2col"], "linear": "gemm"})
    assert used(run.digits) == ["torch", "torch", "gemm"]
    assert used(selected("direct").digits)[0] == "direct"
    assert used(selected({"*": "gemm"}).digits) == ["gemm", "torch", "gemm"]


def test_attention_is_chosen_and_has_rows_of_its_own():
    _, digits, _ = small()
    torch.manual_seed(0)
    model = models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=4).eval()
    torch.nn.init.normal_(model.heads.head.weight)
    net, x = Classifier("vit", model, "random weights", 32, [0.0] * 3, [1.0] * 3, None), torch.rand(2, 3, 32, 32)
    runs = prepare(net, digits, {"attention": "flash"}, x)
    measure(runs, x, digits, 1, lambda _: None)
    found = {run.label: run for run in runs}
    rows = [layer for layer in ai3_ops.explain(found["selected"].model).layers if layer.operation == "attention"]
    assert [layer.used for layer in rows] == ["flash", "flash"]
    assert {"attention: flash", "attention: math"} <= found.keys()  # `default` leaves so few tokens to PyTorch
    assert not any("longformer" in label for label in found)  # what approximates computes another network
    reference = in_float64(model, x)
    for label in ("selected", "attention: flash"):
        assert found[label].error(reference) <= 1e-5, label
    assert not any("attention" in run.label for run in prepare(*small()[:2], "torch", small()[2]))


def test_what_the_digits_do_not_take_is_said():
    assert for_digits({"0": "direct", "conv2d": "smm"}) == ({"conv2d": "smm"}, ["0"])
    assert for_digits("winograd") == ("winograd", [])
    assert for_digits(["direct"]) == ("torch", ["a list"])


def test_digits_are_learned_and_stay_learned():
    """Accuracy before and after are real numbers: a convolutional network names nearly all digits."""
    digits = train_digits()
    assert len(digits.labels) == 599
    net, _, x = small()
    runs = prepare(net, digits, "default", x)
    measure(runs, x, digits, 1, lambda _: None)
    before = runs[0].accuracy(digits)
    assert before > 0.95
    for run in runs:
        assert abs(run.accuracy(digits) - before) <= (0.01 if run.approximate else 0.002), run.label
    guessed = Run("ones", net.model, digits.model, "", predictions=torch.ones(599, dtype=torch.long))
    assert guessed.accuracy(digits) < 0.2


def test_weights_are_those_given_else_those_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    random = demo.classifier("squeezenet1_1")
    assert (random.origin, random.categories) == ("seeded random weights", None)
    again = demo.classifier("squeezenet1_1")
    assert torch.equal(random.model.classifier[1].weight, again.model.classifier[1].weight)
    state = {key: torch.full_like(value, 0.25) for key, value in random.model.state_dict().items()}
    torch.save(state, tmp_path / "mine.pth")
    given = demo.classifier("squeezenet1_1", tmp_path / "mine.pth")
    assert given.origin == f"weights from {tmp_path / 'mine.pth'}"
    assert len(given.categories) == 1000

    name = models.get_model_weights("squeezenet1_1").DEFAULT.url.rsplit("/", 1)[-1]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine.pth").rename(tmp_path / "checkpoints" / name)
    cached = demo.classifier("squeezenet1_1")
    assert cached.origin == "pretrained weights from torch's cache"
    for net in (given, cached):
        assert all((value == 0.25).all() for value in net.model.state_dict().values())
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"does not fit squeezenet1_1: \d+ keys differ"):
        demo.classifier("squeezenet1_1", tmp_path / "other.pth")
    torch.save({key: value[:1] for key, value in state.items()}, tmp_path / "narrow.pth")
    with pytest.raises(ValueError, match=r"narrow.pth does not fit squeezenet1_1: size mismatch for"):
        demo.classifier("squeezenet1_1", tmp_path / "narrow.pth")


def test_pretrained_inception_normalizes_its_input(tmp_path):
    random = demo.classifier("googlenet")
    assert not random.model.transform_input
    torch.save(random.model.state_dict(), tmp_path / "trained.pth")
    assert demo.classifier("googlenet", tmp_path / "trained.pth").model.transform_input


def classify(name):
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # RegNets compute their widths with tensors
        net = demo.classifier(name)
    return net.model.to("meta")(torch.empty(2, 3, net.size, net.size, device="meta")).shape


def test_a_network_takes_images_of_the_size_that_its_weights_want():
    assert classify("vit_h_14") == (2, 1000)


@pytest.mark.full
@pytest.mark.parametrize("name", models.list_models(module=models))
def test_every_classification_network_can_be_built(name):
    assert classify(name) == (2, 1000)


def test_progress_bar():
    out = io.StringIO()
    with demo._progress(4, Console(file=out, force_terminal=True, width=80, _environ={})) as step:
        for i in range(4):
            step(f"turn {i}")
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", out.getvalue())
    assert "turn 3" in shown
    assert "100 %" in shown
    assert "━" in shown


def test_progress_without_a_terminal(monkeypatch):
    """Lines while a step lasts, from a thread; each names the step."""
    monkeypatch.setattr(demo, "SILENT_SECONDS", 0.01)
    out, said = io.StringIO(), threading.Event()
    write = out.write
    monkeypatch.setattr(out, "write", lambda text: (write(text), said.set())[0])
    before = {*threading.enumerate()}  # of which those of other tests may end
    with demo._progress(2, Console(file=out, width=80, _environ={})) as step:
        step("resnet18: building")
        step("resnet18: turn 1 of 7, smm")
        said.clear()
        assert said.wait(60)
    assert "resnet18: turn 1 of 7, smm (step 2 of 2, 0 s)\n" in out.getvalue()
    assert {*threading.enumerate()} <= before
    with pytest.raises(ZeroDivisionError), demo._progress(1, Console(file=out, _environ={})):
        _ = 1 / 0
    assert {*threading.enumerate()} <= before


def shown(capsys, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = main(["demo", "--model", "squeezenet1_1", "--repeats", "1", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_demo(tmp_path, monkeypatch, capsys):
    """Layers by name, as its own example on the command line has them, on a network in full size."""
    for module in (demo, digits_module):
        monkeypatch.setattr(module, "DIGITS_EPOCHS", 3)
    bars = []
    progress = demo._progress

    @contextmanager
    def counting(total):
        steps = []
        with progress(total) as step:
            yield lambda text: (steps.append(text), step(text))
        bars.append((total, steps))

    monkeypatch.setattr(demo, "_progress", counting)
    settings = dict(matplotlib.rcParams)
    picture = tmp_path / "demo.png"
    selectors = '{"features.0": "direct", "conv2d": "implicit_gemm"}'
    status, out = shown(capsys, "--output", picture, "--selectors", selectors)
    assert status == 0, out
    for word in ("processor", "instruction set", "threads", "GPU", "versions", "random weights"):
        assert word in out
    assert "direct was asked for" in out
    assert "selectors that name layers of squeezenet1_1 (features.0) leave it alone" in out
    assert "All exact and bounded algorithms agree with PyTorch in float64" in out
    words = " ".join(out.split())
    assert "selected: what --selectors says" in words
    assert "from PyTorch's in float64" in words
    assert "names rightly of 599 digits" in words
    assert "~: of fewer than 5 turns" in words
    assert [len(steps) for _, steps in bars] == [total for total, _ in bars]
    words = [text for _, steps in bars for text in steps]
    assert words[:2] == ["squeezenet1_1: building the network", "measuring the machine's limits"]
    assert "squeezenet1_1: ai3_ops.optimize" in words
    assert words[-2].startswith("squeezenet1_1: turn 1 of 1, ")
    assert words[-1] == "drawing the picture"
    table = out[out.index("Each algorithm beside the other") :]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    found = {label: cells for label, *cells in rows}
    assert {"PyTorch", "PyTorch, channels last", "selected", "optimized", "direct", "im2col", "winograd_f4"} <= set(
        found
    )
    assert found["selected"][0].startswith("26 of ")
    for name, (_, latency, spread, speed, error, accuracy, agrees) in found.items():
        assert 1e-3 < float(latency.removesuffix(" ms")) < 1e5, name
        assert spread == "", name  # one turn has no quartiles, and its ratio says so
        ratio = float(found["PyTorch"][1].removesuffix(" ms")) / float(latency.removesuffix(" ms"))
        assert speed.startswith("~"), name
        assert float(speed[1:].removesuffix("x")) == pytest.approx(ratio, rel=0.1, abs=0.01), name
        assert float(error) < 1e-2, name
        assert float(accuracy.removesuffix("%")) > 85, name
        assert agrees in ("yes", "approximate"), name
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == settings


def test_wrong_selectors_are_refused_before_anything_takes_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "classifier", lambda *_: small()[0])
    monkeypatch.setattr(demo, "train_digits", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit, match="2"):
        shown(capsys, "--output", tmp_path / "demo.png", "--selectors", "wynograd")
    assert "did you mean 'winograd'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--weights", "README.md"], ["--output", "no/such/folder/demo.png"], ["--output", "demo.xyz"], ["--repeats", "0"]],
)
def test_mistakes_are_one_sentence_before_anything_takes_time(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("no weights")
    monkeypatch.setattr(demo, "train_digits", None)
    with pytest.raises(SystemExit) as end:
        main(["demo", "--model", "squeezenet1_1", *arguments])
    assert end.value.code == 2
    assert arguments[0] in (error := capsys.readouterr().err) or arguments[1] in error


def test_demo_fails_when_outputs_differ(tmp_path, monkeypatch, capsys):
    for module in (demo, digits_module):
        monkeypatch.setattr(module, "DIGITS_EPOCHS", 1)
    monkeypatch.setattr(demo, "classifier", lambda *_: small()[0])
    status, out = shown(capsys, "--output", tmp_path / "demo.png", "--tolerance", "0")
    assert status == 1
    assert "Outputs differ" in out


def test_times_and_their_quartiles():
    run = Run("of five", nn.Identity(), nn.Identity(), "", seconds=[5.0, 1.0, 4.0, 2.0, 3.0])
    assert (run.latency, run.quartiles, run.certain) == (3.0, (2.0, 4.0), True)
    assert not Run("of four", nn.Identity(), nn.Identity(), "", seconds=[1.0] * 4).certain


def test_a_head_of_zeros_gets_random_weights():
    """Else the output is 0, and so is what every error is divided by."""
    net = demo.classifier("vit_b_16")
    assert net.origin == "seeded random weights, also in heads.head, which begins as zeros"
    assert net.model.heads.head.weight.std() > 0
    assert demo.classifier("resnet18").origin == "seeded random weights"
    zero = Run("zero", nn.Identity(), nn.Identity(), "", outputs=torch.zeros(2, 3))
    assert zero.error(torch.zeros(2, 3)) == 0
    assert zero.error(torch.ones(2, 3)) == 1


def test_an_output_of_zeros_is_refused(tmp_path, monkeypatch, capsys):
    state = demo.classifier("squeezenet1_1").model.state_dict()
    torch.save({key: torch.zeros_like(value) for key, value in state.items()}, tmp_path / "zeros.pth")
    for module in (demo, digits_module):
        monkeypatch.setattr(module, "DIGITS_EPOCHS", 1)
    with pytest.raises(SystemExit) as exit:
        main(
            [
                "demo",
                "--model",
                "squeezenet1_1",
                "--weights",
                str(tmp_path / "zeros.pth"),
                "--output",
                str(tmp_path / "a.png"),
            ]
        )
    assert exit.value.code == 2
    assert "the output of squeezenet1_1 is 0 for both photographs" in capsys.readouterr().err
