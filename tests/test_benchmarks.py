"""The benchmark programs: what they measure is what they say. Their figures are no test's business."""

import pytest
import torch
from endless import never_ends

measure = pytest.importorskip("benchmarks.measure", reason="the benchmarks are not part of the wheel")
from benchmarks import figures, layers, others, paper, shapes, substitutions, threads, ways  # noqa: E402

pytestmark = pytest.mark.usefixtures("built_in_only")
LINES = sorted({layer for path in measure.SHAPES.glob("*.txt") for layer in measure.network(path.stem)}, key=str)


def test_figures_of_two_machines_do_not_share_a_page(tmp_path):
    page = tmp_path / "page.md"
    assert measure.stored(page, {"cells": {}}) == {"cells": {}}
    here = measure._machine.machine()
    measure.write(page, [], {"machine": here})
    assert measure.stored(page, {}) == {"machine": here}
    measure.write(page, [], {"machine": here | {"processor": "Abacus"}})
    with pytest.raises(
        SystemExit, match=r"page\.md has figures of processor Abacus, this is .*: --output names another page"
    ):
        measure.stored(page, {})


def test_shape_files_become_modules():
    assert len(LINES) > 400
    for layer in LINES:
        with torch.device("meta"):
            module, x = layer.module(), layer.input()
            y = module(x)
        if layer.operation == "conv2d":
            assert tuple(y.shape[-2:]) == layer.output_size, layer.line
            assert layer.flops == 2 * y.numel() * module.weight[0].numel(), layer.line
        assert layer.bytes > 0
        assert len(str(layer)) < 60


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.parametrize("name", shapes.NETWORKS)
def test_shape_files_are_what_the_networks_compute(name):
    assert (measure.SHAPES / f"{name}.txt").read_text() == shapes.text(name)


def test_batch():
    layer = measure.conv2d(1, 8, 14, 16).batch(10)
    assert layer.input().shape == (10, 8, 14, 14)
    assert layer.flops == 10 * measure.conv2d(1, 8, 14, 16).flops
    assert measure.linear(197, 768, 2304).batch(10) == measure.linear(1970, 768, 2304)
    for layer in measure.network("vit_b_16"):
        assert layer.batch(1) == layer


def test_every_own_method_is_measured_with_its_error():
    layer = measure.conv2d(1, 16, 9, 16)
    result = layers.compare(layer, 0.01)
    assert {"direct", "im2col", "winograd_f2", "smm"} <= set(result.own)
    assert set(result.peers) == {"eager", "eager nchw", "onednn"}
    assert result.default in result.own
    assert len({time.seconds for time in {**result.peers, **result.own}.values()}) > len(result.own)  # each its own
    for name, time in {**result.peers, **result.own}.items():
        assert time.error < 5e-5, name


def test_packs_are_kept_between_timed_calls():
    layer = measure.conv2d(1, 16, 9, 16)
    module, x = layer.module(), layer.input()
    with torch.inference_mode():
        swapped = measure.swapped(layer, module, "winograd_f2", x)
        swapped(x)
        assert not swapped.weight.is_inference()


def test_error_sees_a_wrong_result(monkeypatch):
    layer = measure.conv2d(2, 64, 14, 64)
    monkeypatch.setattr(measure, "REFERENCE_FLOPS", layer.flops / 8)  # only a part is compared
    module, x = layer.module(), layer.input()
    with torch.inference_mode():
        reference = measure.Reference(layer, module, x)
        y = module(x)
        assert reference.channels == 16
        assert reference.error(y) < 1e-5
        assert reference.error(y * 1.01) > 1e-3


def test_verdicts():
    row = figures.Row("case", "oneDNN", 2.0, lambda run: [], mean=3.0)
    good, low, absent = (
        figures.Sample("a", 4.0),
        figures.Sample("b", 1.5),
        figures.Sample("c", note="no such algorithm"),
    )
    assert figures.verdict(row, [good]) == "met"
    assert figures.verdict(row, [good, low]) == "missed: 1 of 2 below, mean below"
    assert figures.verdict(row, [good, absent]) == "missed: 1 not measured"
    assert figures.verdict(row, [absent]) == "not measured: no such algorithm"


def test_of_several_passes_the_median_counts():
    passes = [
        [figures.Sample("a", v, ours=v, fastest_ours=v, fastest_theirs=-v), figures.Sample("b", note="none")]
        for v in (1.0, 3.0, 2.0)
    ]
    measured, absent = figures.merged(passes)
    assert (measured.value, measured.ours, measured.passes) == (2.0, 2.0, [1.0, 3.0, 2.0])
    assert (measured.fastest_ours, measured.fastest_theirs) == (1.0, -3.0)
    assert (absent.value, absent.note) == (None, "none")
    assert figures.merged(passes[:2])[0].value == 1.0


def test_rows_run():
    run = figures.Settings(torch.get_num_threads(), 0.01, lambda words: None)
    small, rows = measure.conv2d(1, 16, 9, 16), [measure.linear(4, 32, 16)]
    samples = [
        *figures.forward([small])(run),
        *figures.forward([small], ["no_such"])(run),
        *figures.training([small])(run),
    ]
    samples += [*figures.of_peak(rows)(run), *figures.of_bandwidth(rows)(run)]
    best, absent, trained, *shares = samples
    assert absent.value is None
    assert "no_such" in absent.note
    for sample in (best, trained, *shares):
        assert sample.value > 0
        assert sample.error < 1e-4
    page = "\n".join(figures.document({"processor": "one"}, [(figures.ROWS[0], samples)]))
    assert "missed" in page


def small():
    """Two convolutions, of which Winograd computes one."""
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1)), torch.randn(1, 3, 9, 9)


def test_figures_of_the_paper():
    line = measure.conv2d(1, 8, 9, 8, pad=0)
    found = paper.layer(line, 0.01)
    for figure in ("2", "3"):
        assert {"torch", "direct", "smm", "winograd_f4", "default"} <= set(found[figure])
        assert "depthwise" not in found[figure]  # does not support the layer
    whole = paper.network(f"{__name__}:small", 1, 0.01)
    assert whole["computed"]["direct"] == (2, 2)
    assert whole["computed"]["winograd_f4"] == (1, 2)
    text = "\n".join(paper.page({"layers": {line.line: found}, "networks": {"small": whole}}))
    assert "(1 of 2)" in text


def test_predicted_times_of_many_threads():
    """One layer alone: of eight tiles on four threads, then of five."""
    layer = measure.conv2d(1, 512, 28, 512)
    work = layer.flops / 32

    def split(items, used, last):
        return threads.Split("direct", (threads.Section(items, used, work, work * last / items),))

    found = {(layer, t): split(8, min(t, 8), max(1, 8 // t)) for t in (1, *threads.THREADS)}
    one, four, many = (threads.total(found, {layer: 2}, t) for t in (1, 4, 64))
    assert one.all == pytest.approx(2 * layer.flops / 192e9)
    assert (one.tiles, one.memory, one.starts) == (0, 0, 0)
    assert four.all == pytest.approx(one.all / 4 + 2 * threads.STARTS)
    assert four.alone(4) == pytest.approx(4)
    assert many.alone(64) == pytest.approx(8)
    found[layer, 4] = split(5, 4, 2)
    assert threads.total(found, {layer: 1}, 4).alone(4) == pytest.approx(2.5)
    assert found[layer, 4].largest == pytest.approx(1.6)
    text = "\n".join(threads.page(found, {("net", 1): {layer: 1}}))
    assert "| net | 1 |" in text
    assert f"| conv2d {layer} | 4 | direct | 5 | 1.60 |" in text
    relu = measure.Layer("relu count=1000000000")
    assert threads.total({(relu, t): split(1, 1, 1) for t in (1, 4)}, {relu: 1}, 4).memory > 0.2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.full
def test_ways_of_running():
    pytest.importorskip("torchvision")
    name = "mobilenet_v3_small"
    found = {f"{name} float32 nchw {mode} 1": ways.cell(name, "float32", "nchw", mode, 1, 0.01) for mode in ways.MODES}
    for one in found.values():
        assert one["ratio"] == one["torch_ms"] / one["ai3_ms"] > 0
        assert one["turns"] > 0
    forms = {f"{name} {which}": ways.form(name, which, 0.01) for which in ways.FORMS[3:]}
    text = "\n".join(ways.page({"cells": found, "forms": forms}))
    assert text.count(f"| {name} |") == 4


@pytest.mark.full
@pytest.mark.parametrize("name", ways.TOKENS)
def test_ways_of_transformers_models(name):
    pytest.importorskip("transformers")
    one = ways.cell(name, "float32", "nchw", "inference", 1, 0.01)
    assert one["ratio"] == one["torch_ms"] / one["ai3_ms"] > 0
    step = ways.training(ways.build(name), ways.inputs(name, 1, torch.float32, "nchw"), autocast=False)
    assert step().isfinite()


def test_a_call_of_pytorchs_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(ways, "LIMIT", 0.0)
    monkeypatch.setattr(ways, "_measure", never_ends)
    found = ways.cell("mobilenet_v3_small", "float16", "nchw", "training", 1, 60.0)
    assert found["above"]
    assert found["torch_ms"] == found["ai3_ms"] == 250


def test_gains_of_substitutions(monkeypatch):
    monkeypatch.setattr(substitutions, "SECONDS", 0.5)
    found = substitutions.compare(f"{__name__}:small", "latency")
    assert substitutions.ALL in found["gains"]
    assert "| small |" in "\n".join(substitutions.page({"networks": {"small": found}}))


def test_a_model_of_sequences_by_its_configuration_runs():
    pytest.importorskip("transformers")
    model, x = others.MODELS["wav2vec2-conformer"]()
    with torch.inference_mode():
        assert model.eval()(x).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", others.WHOLE)
def test_whole_models_of_others_run(name, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setattr(measure, "interleaved", lambda functions, _: [1.0 for f in functions if f() or True])
    (turn,) = others.timed(name, 0.0).values()
    assert turn() == (1.0, 1.0)
