"""Imports of the package go one way: docs/imports.py finds what does not, and the page shows what there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "docs/imports.py"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="the sources are not beside the tests")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("docs_imports", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_has_no_circle_and_no_import_that_goes_up(tool):
    assert tool.mistakes() == []
    assert len(tool.LATE) <= 5
    assert {i.imported for i in tool.imports(tool.PACKAGE)} >= {"registry", "calls.call", "nn.classes"}
    assert tool.render() == tool.PAGE.read_text(), "run `make docs`"


ORDER = ("root", "low", "high", "ai3_ops", "cli")


@pytest.fixture
def package(tmp_path):
    def make(**sources):
        for name, source in {"low": "", "high": "", **sources}.items():
            path = tmp_path / f"{name.replace('__', '/')}.py" if "__" in name else tmp_path / name / "__init__.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        (tmp_path / "__init__.py").write_text("from ai3_ops.high import a\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("sources", "wrong"),
    [
        ({"low__a": "import ai3_ops.high", "high__a": ""}, ["low.a imports high, which comes after it"]),
        ({"low__a": "from ai3_ops import high", "high__a": ""}, ["low.a imports high, which comes after it"]),
        ({"low__a": "from ..high.a import x", "high__a": ""}, ["low.a imports high.a, which comes after it"]),
        (
            {"low__a": "", "high__a": "def f():\n    from ai3_ops.low.a import x"},
            ["high.a imports low.a in a function, and no reason is known"],
        ),
        (
            {"high__a": "from ai3_ops.high import b", "high__b": "def f():\n    from ai3_ops.high.a import x"},
            ["high.b imports high.a in a function, and no reason is known", "a circle: high.a -> high.b -> high.a"],
        ),
        (
            {"low__a": "if TYPE_CHECKING:\n    from ai3_ops.high.a import x", "high__a": ""},
            ["low.a imports high.a, which comes after it"],
        ),
        ({"other": "", "high__a": ""}, ["other is in no place of the order"]),
        ({"low__a": "", "high__a": "from ai3_ops.low import a\nimport torch"}, []),
    ],
)
def test_what_breaks_the_order_is_found(tool, package, sources, wrong):
    assert tool.mistakes(package(**sources), ORDER, {}, {}) == wrong


def test_reasons_are_for_imports_that_there_are(tool, package):
    made = package(low__a="", high__a="def f():\n    import ai3_ops.low.a")
    late = {("high.a", "low.a"): "heavy"}
    assert tool.mistakes(made, ORDER, late, {}) == []
    made = package(low__a="", high__a="import ai3_ops.low.a")
    assert tool.mistakes(made, ORDER, late, {("low", "high"): ""}) == [
        "high.a imports low.a in no function",
        "low imports no types of high",
    ]


def test_drawing(tool, package):
    made = package(low__a="", high__a="from ai3_ops.low import a")
    assert tool.drawing(made, ORDER).splitlines() == [
        "```text",
        "root     ╲",
        "low      · ╲",
        "high     · ● ╲",
        "ai3_ops  · · ● ╲",
        "cli      · · · · ╲",
        "```",
    ]
