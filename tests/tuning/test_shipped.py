"""Measurements that come with the package: when they decide, what is measured all the same, how they are made."""

import functools
import json
import math
import warnings
import zlib

import pytest
import torch
from torch import nn

import ai3_ops
from ai3_ops import _machine
from ai3_ops.calls.spec import Spec
from ai3_ops.cli import collect
from ai3_ops.cli.main import main
from ai3_ops.cli.models import Named
from ai3_ops.measuring import records, shipped, timing
from ai3_ops.measuring.steady import Steady
from ai3_ops.measuring.timing import Layer, Measured
from ai3_ops.tuning.choosing import Timed, doubt, to_measure
from ai3_ops.tuning.meter import Meter
from ai3_ops.tuning.settings import Settings

SHAPE = (1, 16, 10, 10)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, built_in_only):
    """An empty cache, and no tables but those that a test puts there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AI3_OPS_SHIPPED", raising=False)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "_table", functools.cache(shipped._table.__wrapped__))
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """The layers that are measured; all algorithms take 50 us, but "im2col" 10."""
    found = []

    def fake(layer, layout, names, surroundings, p99=False, seconds=math.inf, everything=False):
        found.append((layer.operation, layout))
        return {n: Measured(10.0 if n == "im2col" else 50.0, 0.1, 1e-7, *layer.memory(n, layout)) for n in names}

    monkeypatch.setattr(timing, "measure", fake)
    monkeypatch.setattr(timing, "conversion", lambda *_: 1.0)
    return found


def named(model, x):
    return Named("", model, x, "")


def network():
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)).eval(), torch.randn(SHAPE)


def table(folder, times, change=lambda about: None, without=(), noise=0.1):
    """A table that has all algorithms of the network's convolution: 100 us, or other times by name."""
    model, x = network()
    entries = []
    for meter, layer, layout in collect._of_tune(named(model, x)):
        names = [name for name in layer.candidates(layout, False) if name not in without]
        measured = {n: Measured(times.get(n, 100.0), noise, 1e-7, 0, 0) for n in names}
        entries.append((meter.key(layer, layout), timing.to_json(measured)))
    made = shipped.collected({1: entries}, "a test")
    change(made)
    shipped.write(made, folder / "table.json")


def tuned(**settings):
    return ai3_ops.tune(*network(), progress=False, **settings).layers["0"]


def test_a_record_decides_and_nothing_is_measured(folder, asked):
    table(folder, {"winograd_f4": 20.0, "fft": 41.0})
    layer = tuned()
    assert (layer.algorithm, layer.time_us, asked) == ("winograd_f4", 20.0, [])
    assert layer.reason.endswith(", shipped")
    assert all(m["shipped"] for m in layer.candidates.values() if "failed" not in m)
    # What was not measured here is no measurement of the user's.
    kept = [json.loads(path.read_text())["key"] for path in records.Cache().directory.glob("*.json")]
    assert all(key["operation"] == "conversion" for key in kept)


def test_optimize_says_where_times_are_from(folder, asked, monkeypatch):
    table(folder, {"winograd_f4": 20.0})
    model, x = network()
    fast = ai3_ops.optimize(model, x, verify="off", progress=False)
    report = fast._ai3_report.parts[0]
    assert [(s.algorithm, s.reason) for s in report.steps if s.operation == "conv2d"] == [("winograd_f4", "shipped")]
    assert any(n.startswith("times of 1 of 1 layers are shipped ones, from ") for n in report.notes)
    monkeypatch.setenv("AI3_OPS_SHIPPED", "0")
    report = ai3_ops.optimize(model, x, verify="off", progress=False)._ai3_report.parts[0]
    assert [(s.algorithm, s.reason) for s in report.steps if s.operation == "conv2d"] == [("im2col", "measured here")]
    assert asked == [("conv2d", "channels_last")]


def test_own_measurements_win(folder, asked, monkeypatch):
    monkeypatch.setenv("AI3_OPS_SHIPPED", "0")
    tuned()
    assert len(asked) == 2
    monkeypatch.delenv("AI3_OPS_SHIPPED")
    table(folder, {"winograd_f4": 1.0})
    layer = tuned()
    assert (layer.algorithm, layer.time_us, len(asked)) == ("im2col", 10.0, 2)
    assert "shipped" not in layer.reason


@pytest.mark.parametrize(
    "settings",
    [{"cache": False}, {"objective": "p99"}, {"objective": "memory"}, {"memory_limit": 1 << 30}, {"tolerance": 1e-6}],
)
def test_what_tables_do_not_tell_is_measured(folder, asked, settings):
    table(folder, {"winograd_f4": 20.0})
    tuned(**settings)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (lambda about: about.update(family="another"), True),  # the nearest
        (lambda about: about.update(level="another"), False),
        (lambda about: about.update(version=0), False),
        (lambda about: about.update(threads={"3": about["threads"]["1"]}), False),
    ],
)
def test_another_family_of_the_same_level_is_the_nearest(folder, asked, change, used):
    table(folder, {"winograd_f4": 20.0}, change)
    assert (tuned().algorithm, len(asked)) == (("winograd_f4", 0) if used else ("im2col", 2))


def test_the_own_family_comes_first(folder, asked):
    table(folder, {"winograd_f4": 20.0})
    (folder / "table.json").rename(folder / "own.json")
    table(folder, {"winograd_f2": 20.0}, lambda about: about.update(family="another"))
    (folder / "table.json").rename(folder / "another.json")
    assert tuned().algorithm == "winograd_f4"


def test_an_algorithm_that_is_not_in_the_table_is_measured(folder, asked):
    table(folder, {"winograd_f4": 20.0}, without=("im2col",))
    assert (tuned().algorithm, len(asked)) == ("im2col", 2)


def test_doubt_is_measured(folder, asked):
    table(folder, {"winograd_f4": 20.0, "winograd_f2": 20.2})
    assert (tuned().reason.endswith(", shipped"), len(asked)) == (True, 0)
    table(folder, {"winograd_f4": 20.0, "winograd_f2": 20.2}, noise=1.0)
    shipped._table.cache_clear()
    assert (tuned().algorithm, len(asked)) == ("im2col", 2)
    assert (tuned().algorithm, len(asked)) == ("im2col", 2)  # from the cache


def case(calls, size, **times):
    arguments = (Spec((1, 8, size, size), (), torch.float32, "cpu"), Spec((8, 8, 3, 3), (), torch.float32, "cpu"))
    layer = Layer("conv2d", (*arguments, None, (1, 1), (1, 1), (1, 1), 1), (False, True, *[False] * 5), False)
    found = {n: Measured(t, 3.0, 1e-7, 0, 0, shipped=True) for n, t in times.items()}
    return Timed(layer, calls, [found] if found else [])


def test_what_may_gain_most_comes_first():
    cases = {
        "sure": case(1, 8, direct=100.0, smm=150.0),
        "close": case(1, 8, direct=100.0, smm=100.5),
        "often": case(9, 8, direct=100.0, smm=100.5),
        "unknown": case(1, 8),
        "large": case(1, 80),
    }
    assert doubt(cases["close"].layer, cases["close"].found[0], Settings()) == pytest.approx(18**0.5 - 0.5)
    assert doubt(cases["sure"].layer, cases["sure"].found[0], Settings()) == 0
    # 37 of 1,100 us are in doubt, without the largest of them 4.
    assert to_measure(cases, Settings()) == ["large", "unknown", "often"]
    cases["sure"] = case(30, 8, direct=100.0, smm=150.0)  # 37 of 4,000
    assert to_measure(cases, Settings()) == ["large", "unknown"]
    own = {n: Measured(t, 5.0, 1e-7, 0, 0) for n, t in (("direct", 100.0), ("smm", 100.0))}
    assert to_measure({"own": Timed(cases["sure"].layer, 1, [own])}, Settings()) == []


def test_a_table_is_what_was_measured():
    model, x = network()
    meter, layer, layout = next(collect._of_tune(named(model, x)))
    key = meter.key(layer, layout)
    times = {
        "direct": Measured(12.3456, 0.0123456, 3.1e-7, 5, 7),
        "torch": Measured(40.0, 1.0, 1e-7, 0, 0, rough=True),
        "fft": Measured.untried("too large"),
    }
    other = {"direct": Measured.failure("no memory"), "torch": times["torch"]}
    linear = key | {"operation": "linear"}
    made = shipped.collected(
        {
            2: [
                (key | {"bytes": 10}, timing.to_json(times)),
                (key | {"bytes": 5}, timing.to_json({"torch": times["torch"]})),
                (linear, timing.to_json(other)),
            ]
        },
        "a note",
    )
    name = f"conv2d 1x16x10x10 16x16x3x3 1,1 1,1 1,1 1 {layout}"
    assert shipped.name_of(key) == name
    assert made["threads"] == {"2": {name: {"direct": [12.3, 0.0123, 3.1e-7], "torch": [40.0, 1.0, 1e-7], "fft": None}}}
    assert (made["note"], made["family"], made["level"]) == ("a note", _machine.family(), shipped.level())


def test_other_types_devices_and_states_have_other_names():
    key = case(1, 8).layer.key() | {"layout": "contiguous"}
    half = [a | {"dtype": "torch.bfloat16"} if isinstance(a, dict) else a for a in key["arguments"]]
    there = [a | {"device": "cuda:0"} if isinstance(a, dict) else a for a in key["arguments"]]
    others = ({"arguments": half}, {"arguments": there}, {"layout": "channels_last"}, {"in_place": True})
    assert len({shipped.name_of(key | other) for other in ({}, *others)}) == 5


def two_layers():
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), torch.randn(1, 4, 6, 6)


def test_collect_writes_what_optimize_and_tune_ask_for(folder, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(Steady, "wait", lambda _: True)
    monkeypatch.setattr(Steady, "now", lambda _: True)
    network = f"{two_layers.__module__}:two_layers"
    arguments = ["tune", "--collect", network, "--threads", "1", "--output", str(folder / "made.json")]
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    assert main(arguments) == 0
    made = json.loads((folder / "made.json").read_text())
    assert network in made["note"]
    assert {name.split()[0] for name in made["threads"]["1"]} == {"conv2d", "relu"}
    model, x = two_layers()
    meter = Meter(1 << 20, Settings(), cache=True)
    known = [
        meter.known_in(layer, layout)
        for _, layer, layout in (*collect._of_optimize(named(model, x)), *collect._of_tune(named(model, x)))
    ]
    assert all(known)
    assert torch.get_num_threads() == 1
    (folder / "made.json").unlink()
    monkeypatch.setattr(Steady, "now", lambda _: False)
    assert main(arguments) == 0
    left = json.loads((folder / "made.json").read_text())
    assert left["threads"] == {}
    assert "0 measurements kept, 4 disturbed ones left out" in left["note"]
    assert main([*arguments, "--budget-seconds", "0"]) == 0
    assert json.loads((folder / "made.json").read_text())["threads"] == {}


def test_the_tables_that_come_with_the_package_can_be_read(monkeypatch):
    monkeypatch.undo()
    paths = sorted(shipped.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_bytes()
        assert len(zlib.compress(text)) < 200_000
        made = json.loads(text)
        assert made["version"] == shipped.VERSION
        assert made["note"]
        assert made["threads"]
        for rows in made["threads"].values():
            for name, record in rows.items():
                assert name == " ".join(name.split())
                assert "torch" in record
                assert all(numbers is None or len(numbers) == 3 for numbers in record.values())


def test_a_cache_that_cannot_be_kept_leaves_tables_as_they_are(folder, asked, monkeypatch):
    table(folder, {"winograd_f4": 20.0})
    monkeypatch.setattr(records, "cache_directory", lambda name: folder / "none" / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (tuned().algorithm, asked) == ("winograd_f4", [])
