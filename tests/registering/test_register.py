"""A user's own algorithm: headers and callables, the cache, errors, replacement, entry points; a new built-in file."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from tester import PROFILE

import ai3_ops
from ai3_ops import _library, registry
from ai3_ops import register as register_function
from ai3_ops.checking.cases import CASES, Call, conv
from ai3_ops.checking.checks import CHECKS
from ai3_ops.programs.program import Builder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/your-own-algorithm.md"
module = sys.modules["ai3_ops.registering.register"]

# y = factor * conv2d for 1x1 kernels, to tell versions of one header from each other.
SCALED = """
#include <ai3/algorithm.h>
{include}
template <class T>
void conv2d_{name}(const ai3::Conv2dProblem& p, const T* x, const T* w, const T*, T* y, ai3::Workspace&) {{
  const ai3::Acc<T> scale = {factor} * ai3::widen(w[0]);
  for (int64_t i = 0; i < p.batch * p.in_height * p.in_width; i++) y[i] = ai3::narrowed<T>(scale * ai3::widen(x[i]));
}}
inline bool {name}_supports(const ai3::Conv2dProblem& p, ai3::Reason& reason) {{
  const int64_t weights = p.in_channels * p.out_channels * p.kernel_height * p.kernel_width;
  return weights == 1 || ai3::refuse(reason, "needs one weight");
}}
AI3_ALGORITHM(conv2d, {name}, {traits}.supports = {name}_supports)
"""


def scaled(name: str, factor: object = 1, include: str = "", traits: str = "") -> str:
    return SCALED.format(name=name, factor=factor, include=include, traits=traits)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/ai3_ops/algorithms"


@pytest.fixture
def header(tmp_path):
    """Writes a header and returns its path."""

    def write(text: str, name: str = "mine.h") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


X, W = torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 1, 1), 5.0)


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")
def test_worked_example(tmp_path, monkeypatch):
    """The page's code, as it stands there."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (header,) = [text for language, text in blocks if language == "cpp"]
    (tmp_path / "rows.h").write_text(header)
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # compilers look functions' modules up
    for number, text in enumerate(text for language, text in blocks if language == "python"):
        exec(compile(text, f"{PAGE.name}, Python block {number + 1}", "exec"), vars(page))


def test_a_callable_gets_a_number_for_each_dimension():
    """As ATen's operators take one for both."""
    seen = []

    def pairs(x, weight, bias, stride, padding, dilation, groups):
        seen.append([list(v) for v in (stride, padding, dilation)])
        return torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)

    operator = ai3_ops.register("conv2d", "user_pairs", pairs)
    operator(torch.ones(1, 1, 5, 5), torch.ones(1, 1, 1, 1), None, (2,), 1, [1, 1])
    assert seen == [[[2, 2], [1, 1], [1, 1]]]


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the tests")
def test_the_page_has_every_trait():
    header = (Path(ai3_ops.__file__).parent / "include/ai3/algorithm.h").read_text()
    (struct,) = re.findall(r"struct Traits \{\n(.*?)\n\};", header, re.DOTALL)
    fields = re.findall(r"(\w+)\)?(?:\([^)]*\))? = [^;]*;", struct)
    assert {"accuracy", "error_bound", "supports", "backward_workspace", "sliced"} <= set(fields)
    built_in = ("choose", "tensors")  # of rules and of what calls PyTorch's operators, which no header can do
    rows = " ".join(re.findall(r"^\| (`\..*?) \|", PAGE.read_text(), re.MULTILINE))
    assert re.findall(r"`\.(\w+)", rows) == [f for f in fields if f not in built_in]  # in the order that C++ insists on


def test_header_becomes_an_operator(header):
    op = register_function("conv2d", "user_operator", header(scaled("user_operator")))
    assert op is torch.ops.ai3.conv2d_user_operator
    assert torch.equal(op(X, W), X * 5)
    info = registry.algorithm("conv2d", "user_operator")
    assert (info.accuracy, info.deterministic, info.device) == ("exact", True, "cpu")
    assert ai3_ops.supports("conv2d", "user_operator", X, W) == (True, "")
    assert ai3_ops.supports("conv2d", "user_operator", X, W.expand(1, 1, 2, 2)) == (False, "needs one weight")
    torch.library.opcheck(op.default, (X.clone().requires_grad_(), W.clone().requires_grad_()))


def test_traits_of_the_macro_are_listed(header):
    text = scaled("user_traits", traits=".accuracy = ai3::Accuracy::approximate, .deterministic = false, ")
    register_function("conv2d", "user_traits", header(text))
    info = registry.algorithm("conv2d", "user_traits")
    assert (info.accuracy, info.deterministic) == ("approximate", False)


def test_a_refusal_without_words_gets_some(header):
    text = scaled("user_mute").replace('ai3::refuse(reason, "needs one weight")', "false")
    op = register_function("conv2d", "user_mute", header(text))
    with pytest.raises(
        RuntimeError, match="ai3::conv2d_user_mute: does not support this case; algorithms that support"
    ):
        op(X, W.expand(1, 1, 2, 2))


def test_guess_survives_a_cost_that_is_infinite(header):
    cost = "inline ai3::Cost user_endless_cost(const ai3::Conv2dProblem&) { return {1, 1, 0}; }"
    supports = ".supports = user_endless_supports"
    text = scaled("user_endless", include=cost).replace(supports, supports + ", .cost = user_endless_cost")
    register_function("conv2d", "user_endless", header(text))
    assert ai3_ops.resolve("conv2d", "guess", X, W) != "user_endless"


def test_rules_that_name_one_another_choose_nothing(header):
    rule = """
    #include <ai3/algorithm.h>
    inline ai3::Choice next_of_{name}(const ai3::Conv2dProblem& p, const ai3::Candidates<ai3::Conv2dProblem>& usable) {{
      return {{usable(p, "{other}") ? "{other}" : nullptr}};
    }}
    AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, {name}, .choose = next_of_{name})
    """
    for name, other in (("user_ping", "user_pong"), ("user_pong", "user_ping")):
        register_function("conv2d", name, header(rule.format(name=name, other=other), f"{name}.h"))
    for name in ("user_ping", "user_pong"):
        assert ai3_ops.supports("conv2d", name, X, W) == (
            False,
            "only chooses among other algorithms, and none that it may choose supports this case",
        )


def test_a_rule_that_throws_takes_no_other_algorithm_away(header):
    rule = """
    #include <ai3/algorithm.h>
    #include <stdexcept>
    inline ai3::Choice broken_of_{name}(const ai3::Conv2dProblem&, const ai3::Candidates<ai3::Conv2dProblem>&) {{
      throw {thrown};
    }}
    AI3_ALGORITHM_WITHOUT_KERNEL(conv2d, {name}, .choose = broken_of_{name})
    """
    sentences = {
        'std::runtime_error("no library")': "no library",
        "5": "an exception that is no std::exception came out of its `choose`",
    }
    for thrown, sentence in sentences.items():
        name = f"user_broken_{len(thrown)}"
        register_function("conv2d", name, header(rule.format(name=name, thrown=thrown), f"{name}.h"))
        assert ai3_ops.supports("conv2d", name, X, W) == (False, sentence)
        with pytest.raises(
            RuntimeError, match=rf"^ai3::conv2d_{name}: {sentence}; algorithms that support this .*direct"
        ):
            getattr(torch.ops.ai3, f"conv2d_{name}")(X, W)
    with pytest.raises(RuntimeError, match=r"ai3::conv2d_winograd: .*; algorithms that support this case: .*direct"):
        torch.ops.ai3.conv2d_winograd(X, W, dilation=2)


def test_a_shared_operators_name_is_refused_and_leaves_nothing(header):
    with pytest.raises(RuntimeError, match=r"conv2d can have no algorithm 'mixed': .*choose another name"):
        register_function("conv2d", "mixed", header(scaled("mixed")))
    assert "mixed" not in [a.name for a in ai3_ops.algorithms("conv2d")]
    with pytest.raises(ValueError, match=r"conv2d can have no algorithm 'mixed': .*choose another name"):
        register_function("conv2d", "mixed", lambda x, w, b, *rest: torch.conv2d(x, w, b, *rest))
    assert "mixed" not in [a.name for a in ai3_ops.algorithms("conv2d")]
    assert not hasattr(torch.ops.ai3, "conv2d_mixed")


def test_a_taken_name_is_refused_unless_replaced(header):
    path = header(scaled("user_replaced", 1))
    op = register_function("conv2d", "user_replaced", path)
    with pytest.raises(ValueError, match="conv2d has an algorithm 'user_replaced' already; replace=True"):
        register_function("conv2d", "user_replaced", path)
    path.write_text(scaled("user_replaced", 2))
    assert register_function("conv2d", "user_replaced", path, replace=True) is op
    assert torch.equal(op(X, W), 2 * X * 5)


def test_a_built_in_name_stays_the_built_in_method_s(header):
    for replace in (False, True):
        for source in (header(scaled("direct", 7)), lambda x, w, b, *rest: torch.conv2d(x, w, b, *rest)):
            with pytest.raises(ValueError, match="conv2d has an algorithm 'direct' already, which is built in"):
                register_function("conv2d", "direct", source, replace=replace)
    assert torch.equal(torch.ops.ai3.conv2d_direct(X, W), X * 5)


def test_headers_and_callables_do_not_replace_each_other(header, capfd):
    path = header(scaled("user_kind"))
    op = register_function("conv2d", "user_kind", path)
    with pytest.raises(ValueError, match="'user_kind' already, a header that a Python callable cannot replace"):
        register_function("conv2d", "user_kind", lambda *arguments: X, replace=True)
    register_function("conv2d", "user_called", lambda x, w, b, *rest: torch.conv2d(x, w, b, *rest))
    with pytest.raises(ValueError, match="'user_called' already, a Python callable that a header cannot replace"):
        register_function("conv2d", "user_called", header(scaled("user_called")), replace=True)
    assert torch.equal(op(X, W), 5 * X)
    assert torch.equal(torch.ops.ai3.conv2d_user_called(X, W), 5 * X)
    assert not capfd.readouterr().err


def test_what_is_no_operation_or_no_name():
    with pytest.raises(ValueError, match="no operation 'conv9d'"):
        register_function("conv9d", "mine", "mine.h")
    for name in ("two words", "", "1st", "größe", "a;b", "auto", "torch"):
        with pytest.raises(ValueError, match="cannot name an algorithm"):
            register_function("conv2d", name, "mine.h")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.h"):
        register_function("conv2d", "user_missing", "nowhere.h")
    with pytest.raises(ValueError, match=r"\.accuracy = ai3::Accuracy::approximate"):
        register_function("conv2d", "user_flags", "mine.h", exact=False)


def test_compile_errors_are_readable(header):
    path = header(scaled("user_broken", factor="undefined_name"))
    with pytest.raises(RuntimeError) as error:
        register_function("conv2d", "user_broken", path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"ai3_ops.register: {path} does not compile:"
    assert re.match(rf"{re.escape(str(path))}:\d+:\d+: error: .*undefined_name", lines[1])
    assert len(lines) < 30
    assert not hasattr(torch.ops.ai3, "conv2d_user_broken")
    path.write_text(scaled("user_broken"))  # nothing of the failure stays
    register_function("conv2d", "user_broken", path)


def test_errors_of_the_signature_name_the_macro(header):
    path = header(
        "#include <ai3/algorithm.h>\n"
        "template <class T> void conv2d_user_signature(int) {}\n"
        "AI3_ALGORITHM(conv2d, user_signature)\n"
    )
    with pytest.raises(RuntimeError, match=rf"(?s){re.escape(str(path))}:3:1: .*candidate"):
        register_function("conv2d", "user_signature", path)


def test_what_the_header_registers_must_be_what_was_asked_for(header):
    with pytest.raises(
        RuntimeError,
        match=r"needs one .*user_asked, .*has AI3_ALGORITHM\(conv2d, user_other\)",
    ):
        register_function("conv2d", "user_asked", header(scaled("user_other")))
    with pytest.raises(RuntimeError, match=r"has none"):
        register_function("conv2d", "user_asked", header("#include <ai3/algorithm.h>\n"))


@pytest.mark.parametrize("compiles", [False, True])
def test_a_macro_of_another_operation_is_an_error_that_names_both(header, compiles):
    """Whether its function has the name of the operation that was asked for or the macro's: nothing is compiled."""
    text = SCALED.replace("AI3_ALGORITHM(conv2d,", "AI3_ALGORITHM(linear,")
    if compiles:
        text = text.replace("conv2d_{name}", "linear_{name}").replace("Conv2dProblem", "LinearProblem")
        text = re.sub(r"p\.batch \* .*?; i\+\+", "p.rows; i++", text)
        text = re.sub(r"const int64_t weights = [^;]*;", "const int64_t weights = p.in_features;", text)
    path = header(text.format(name="user_macro", factor=1, include="", traits=""))
    with pytest.raises(RuntimeError) as error:
        register_function("conv2d", "user_macro", path)
    first, *rest = str(error.value).splitlines()
    assert first == (
        f"ai3_ops.register: {path} needs one AI3_ALGORITHM(conv2d, user_macro, ...), has AI3_ALGORITHM(linear, user_macro)"
    )
    assert not rest  # nothing was compiled


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ("conv2d_user_text(", "conv2d_user_txet("),
            "needs a function template conv2d_user_text, which its macro calls",
        ),
        (
            ("Conv2dProblem", "Conv2DProblem"),
            "names Conv2DProblem, which is declared nowhere; conv2d's is ai3::Conv2dProblem",
        ),
    ],
)
def test_what_a_header_lacks_is_named_before_it_is_compiled(header, wrong, message):
    path = header(scaled("user_text").replace(*wrong))
    with pytest.raises(RuntimeError) as error:
        register_function("conv2d", "user_text", path)
    assert str(error.value) == f"ai3_ops.register: {path} {message}"


def test_no_compiler_is_one_sentence(header, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+20 compiler: install g\+\+"):
        register_function("conv2d", "user_compiler", header(scaled("user_compiler")))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(RuntimeError, match="compiler /no/such/compiler does not run"):
        register_function("conv2d", "user_compiler", header(scaled("user_compiler")))


def test_the_cache_follows_everything_that_the_result_depends_on(header, cache, monkeypatch):
    included = header("#pragma once\nconstexpr int kFactor = 1;\n", "factor.h")
    path = header(scaled("user_cached", "kFactor", '#include "factor.h"'))
    op = register_function("conv2d", "user_cached", path)
    built = {p: p.stat().st_mtime_ns for p in cache.glob("*/*.so")}
    assert len(built) == 1

    path.write_text(path.read_text() + "// a comment changes nothing\n")
    register_function("conv2d", "user_cached", path, replace=True)
    assert {p: p.stat().st_mtime_ns for p in cache.glob("*/*.so")} == built

    included.write_text("#pragma once\nconstexpr int kFactor = 2;\n")
    register_function("conv2d", "user_cached", path, replace=True)
    assert len(list(cache.glob("*/*.so"))) == 2
    assert torch.equal(op(X, W), 2 * X * 5)

    monkeypatch.setattr(torch, "__version__", "0.0")
    register_function("conv2d", "user_cached", path, replace=True)
    assert len(list(cache.glob("*/*.so"))) == 3

    compiler, flags = module.find_compiler(), module._flags.COMMON
    other = header(f'#!/bin/sh\n[ "$1" = --version ] && echo "gcc 0.0" || exec {compiler[0]} "$@"\n', "other-compiler")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    register_function("conv2d", "user_cached", path, replace=True)
    assert len(list(cache.glob("*/*.so"))) == 4
    other.write_text(other.read_text().replace("gcc 0.0", "gcc 0.1"))  # the same path after an upgrade
    module._flags_for.cache_clear()
    register_function("conv2d", "user_cached", path, replace=True)
    assert len(list(cache.glob("*/*.so"))) == 5

    monkeypatch.setattr(module._flags, "COMMON", [*flags, "-fno-unroll-loops"])
    module._flags_for.cache_clear()
    register_function("conv2d", "user_cached", path, replace=True)
    assert len(list(cache.glob("*/*.so"))) == 6
    module._flags_for.cache_clear()
    assert [p.name for p in cache.glob("*/*") if p.name not in ("lock", "conv2d_user_cached.so")] == []


def test_the_cache_belongs_to_its_owner_alone(header, cache):
    path = header(scaled("user_private"))
    register_function("conv2d", "user_private", path)
    for directory in (cache.parent, cache, *cache.iterdir()):
        assert directory.stat().st_mode & 0o077 == 0
    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match="must belong to you and be writable by nobody else"):
        register_function("conv2d", "user_private", path, replace=True)


def test_what_takes_the_place_of_the_cache_is_never_loaded(header, cache, monkeypatch):
    """Between the look at its owner and the end of the build, somebody puts another directory there."""
    path, build = header(scaled("user_moved")), module._run

    def exchanged(command, unit, source):
        done = build(command, unit, source)
        if "-o" in command:
            (key,) = (p.name for p in cache.iterdir())
            cache.rename(cache.with_name("moved"))
            (cache / key).mkdir(parents=True)
            (cache / key / "conv2d_user_moved.so").write_text("hostile")
        return done

    monkeypatch.setattr(module, "_run", exchanged)
    assert register_function("conv2d", "user_moved", path)(X, W).shape == X.shape
    monkeypatch.undo()
    shutil.rmtree(cache.parent)  # emptied by hand: made anew
    register_function("conv2d", "user_moved", path, replace=True)


def test_processes_that_build_at_once_share_one_result(header, cache, fork):
    program = """
import os, sys, ai3_ops
other = os.fork()
ai3_ops.register("conv2d", "user_together", sys.argv[1])
os.write(1, b"done\\n")  # at once, unlike print
assert not other or os.waitpid(other, 0)[1] == 0
"""
    done = fork(program, header(scaled("user_together")), PYTHONPATH=str(Path(ai3_ops.__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "done"]
    assert len(list(cache.glob("*/*.so"))) == 1


def test_a_process_that_was_killed_leaves_no_lock(header, cache):
    """The lock is the kernel's: a file of that name, left by whoever, holds up nobody."""
    path = header(scaled("user_killed"))
    register_function("conv2d", "user_killed", path)
    (directory,) = cache.iterdir()
    (directory / "conv2d_user_killed.so").unlink()
    assert (directory / "lock").exists()
    register_function("conv2d", "user_killed", path, replace=True)


def test_default_runs_it_where_it_can(header):
    before = ai3_ops.resolve("conv2d", "default", X, W)
    register_function("conv2d", "user_default", header(scaled("user_default")), default=True)
    try:
        assert ai3_ops.resolve("conv2d", "default", X, W) == "user_default"
        assert ai3_ops.resolve("conv2d", "default", X, torch.randn(3, 1, 1, 1)) != "user_default"
    finally:
        module.set_default("conv2d", None)
    assert ai3_ops.resolve("conv2d", "default", X, W) == before


def test_what_could_not_be_asked_is_asked_again(header, monkeypatch):
    """As where memory is missing for a moment: the call that `default` prepared without the answer is not kept."""
    text = scaled("user_passing", 2).replace(
        "const int64_t weights",
        'if (std::getenv("AI3_TEST_NO_MEMORY")) throw std::runtime_error("not enough memory");\n  const int64_t weights',
    )
    text = text.replace(
        "#include <ai3/algorithm.h>", "#include <ai3/algorithm.h>\n#include <cstdlib>\n#include <stdexcept>"
    )
    x = torch.full((1, 1, 3, 17), 3.0)
    register_function("conv2d", "user_passing", header(text), default=True)
    try:
        monkeypatch.setenv("AI3_TEST_NO_MEMORY", "1")
        for _ in range(2):
            assert torch.equal(torch.ops.ai3.conv2d_default(x, W), 5 * x), "by another algorithm"
        assert ai3_ops.supports("conv2d", "user_passing", x, W) == (False, "not enough memory")
        monkeypatch.delenv("AI3_TEST_NO_MEMORY")
        assert torch.equal(torch.ops.ai3.conv2d_default(x, W), 10 * x)
    finally:
        module.set_default("conv2d", None)


def test_swapped_modules_see_what_is_registered_later(header, monkeypatch):
    model = ai3_ops.swap(torch.nn.Conv2d(1, 1, 1, bias=False), "default")
    asked = []
    resolve = registry.resolve_sizes
    monkeypatch.setattr(
        registry, "resolve_sizes", lambda *args, **options: asked.append(args) or resolve(*args, **options)
    )
    with torch.no_grad():
        model.weight.fill_(5)
        for _ in range(2):
            assert torch.equal(model(X), 5 * X)
        assert len(asked) == 1
        model.stride = (2, 2)
        assert torch.equal(model(X), 5 * X[..., ::2, ::2])
        assert len(asked) <= 2, "at most once; not where PyTorch computes calls of such an input anyway"
        model.stride = (1, 1)
        register_function("conv2d", "user_later", header(scaled("user_later", 2)), default=True)
        try:
            assert torch.equal(model(X), 10 * X)
            register_function("conv2d", "user_later", header(scaled("user_later", 3)), replace=True)
            assert torch.equal(model(X), 15 * X)
        finally:
            module.set_default("conv2d", None)
        assert torch.equal(model(X), 5 * X)


def test_python_callable():
    calls = []

    @register_function("relu", "user_clamp", exact=True)
    def clamp(x):
        calls.append(x.shape)
        return x.clamp(min=0)

    x = torch.randn(4, 5, requires_grad=True)
    assert torch.equal(torch.ops.ai3.relu_user_clamp(x), x.relu())
    assert calls == [(4, 5)]
    torch.library.opcheck(torch.ops.ai3.relu_user_clamp.default, (x,))
    with pytest.raises(ValueError, match="already"):
        register_function("relu", "user_clamp", clamp)
    listed = [info.device for info in ai3_ops.algorithms("relu") if info.name == "user_clamp"]
    assert listed == ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    calls.clear()
    register_function("relu", "user_clamp", torch.relu, replace=True)
    assert torch.equal(torch.ops.ai3.relu_user_clamp(x), x.relu())
    assert not calls
    with pytest.raises(ValueError, match="`default` runs without Python"):
        register_function("relu", "user_no_default", clamp, default=True)


def test_calls_of_a_callable_do_not_list_the_registry(monkeypatch):
    register_function("relu", "user_listed", lambda x: x.clamp(min=0))
    x = torch.randn(4, 5)
    monkeypatch.setattr(registry, "registered", lambda: pytest.fail("asked at a call"))
    assert torch.equal(torch.ops.ai3.relu_user_listed(x), x.relu())


def test_callables_take_the_operator_s_arguments():
    with pytest.raises(TypeError, match=r"conv2d 'few' is called with 7 arguments, \(input, weight, bias, stride"):
        ai3_ops.register("conv2d", "few", lambda input, weight: input)
    with pytest.raises(TypeError, match=r"relu 'many' .* missing a required argument: 'other'"):
        ai3_ops.register("relu", "many", lambda input, other: input)
    assert not hasattr(torch.ops.ai3, "conv2d_few")


def test_forward_mode_differentiation():
    relu, x = torch.ops.ai3.relu_direct, torch.tensor([-1.0, 2.0, 3.0])
    step = torch.diag(torch.tensor([0.0, 1.0, 1.0]))
    y, tangent = torch.func.jvp(relu, (x,), (x + 1,))
    assert torch.equal(torch.stack([y, tangent]), torch.stack([x.relu(), step @ (x + 1)]))
    assert torch.equal(torch.func.jacfwd(relu)(x), step)
    assert torch.equal(torch.func.hessian(lambda a: relu(a).square().sum())(x), 2 * step)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(relu(x), x.relu())
    torch.testing.assert_close(torch.func.jvp(lambda a: a + relu(x), (x,), (x,))[1], x)


def test_packed_weights_and_given_outputs_refuse_tangents():
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="ai3::_relu_direct_out: writes to out; does not support forward-mode"):
        torch.func.jvp(lambda a: torch.ops.ai3._relu_direct_out(a, out=torch.empty(3)), (x,), (x,))
    w = torch.ops.ai3._linear_gemm_pack(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="ai3::_linear_gemm_packed: does not support forward-mode"):
        torch.func.jvp(lambda a: torch.ops.ai3._linear_gemm_packed(a, w, [4, 3]), (x,), (x,))


def test_check_needs_no_mode_of_the_callers():
    ai3_ops.register("relu", "user_modeless", torch.relu, replace=True)
    with torch.inference_mode():
        assert ai3_ops.check("relu", "user_modeless").ok


def test_check_shows_the_failing_case():
    @register_function("relu", "user_wrong")
    def wrong(x):
        return torch.where(x > 2, x - 1, x.relu()) if x.dtype == torch.float16 else x.relu()

    with pytest.raises(AssertionError) as error:
        ai3_ops.check("relu", "user_wrong")
    message = str(error.value)
    assert re.search(r"values +cpu +FAILED", message)
    assert re.search(r"opcheck +cpu +passed", message)
    assert "values on cpu: ai3::relu_user_wrong on cpu, torch.float16" in message
    with pytest.raises(ValueError, match="did you mean 'user_wrong'"):
        ai3_ops.check("relu", "user_wrung")


def test_check_lets_an_algorithm_refuse_groups(header, capfd, monkeypatch):
    """vmap makes groups of samples whose weights, or whose weights' gradients, differ."""
    text = scaled("user_single").replace("weights == 1 ||", "(weights == 1 && p.groups == 1) ||")
    register_function("conv2d", "user_single", header(text))
    info, x, w = registry.algorithm("conv2d", "user_single"), X.double(), W.double()
    with pytest.raises(RuntimeError, match="needs one weight; algorithms that support this case"):
        torch.vmap(torch.func.grad(lambda w, x: info.operator(x, w).sum()), (None, 0))(w, torch.stack([x, x]))
    monkeypatch.setitem(CASES, "conv2d", [conv((1, 1, 4, 5), (1, 1, 1, 1), bias=False)])
    CHECKS["vmap"](info)
    CHECKS["workspace"](info)
    # PyTorch's profiler says on standard error that it starts and stops, once something else in the process has made it talk.
    assert [line for line in capfd.readouterr().err.splitlines() if not line.startswith("USDT:")] == []
    monkeypatch.setattr(registry, "supports", lambda *_: (True, ""))
    with pytest.raises(AssertionError, match=r"vmap over input, weight: .*needs one weight"):
        CHECKS["vmap"](info)


def test_a_failing_case_names_its_arguments():
    call = Call(registry.algorithm("conv2d", "direct"), CASES["conv2d"][18], torch.float32)
    assert str(call) == (
        "ai3::conv2d_direct on cpu, torch.float32, normal data, input (2, 4, 9, 8) channels_last, weight (6, 4, 3, 3) "
        "contiguous, bias (6,), stride=1, padding=1, dilation=1, groups=1"
    )


def test_a_nondeterministic_algorithm_is_told_what_to_say():
    calls = iter(range(1000))
    register_function("relu", "user_restless", lambda x: x.relu() + next(calls))
    with pytest.raises(AssertionError, match=r"differs with 1 threads; register it with deterministic=False"):
        CHECKS["determinism"](registry.algorithm("relu", "user_restless"))


def test_check_needs_something_to_check(header):
    register_function(
        "conv2d", "user_picky", header(scaled("user_picky").replace("weights == 1 ||", "weights == 1e9 ||"))
    )
    with pytest.raises(
        AssertionError, match=r"supports none of the operation's test cases, and none of \d{4} other shapes that"
    ):
        ai3_ops.check("conv2d", "user_picky")


# The sum as written, for every shape; what is wrong with it is up to the test.
NAIVE = """
#include <ai3/algorithm.h>
namespace {{
using namespace ai3;
bool {name}_supports(const Conv2dProblem& p, Reason& reason) {{
  return {supports} || refuse(reason, "needs another shape");
}}
int64_t {name}_workspace(const Conv2dProblem&) {{ return {stated}; }}
template <class T>
void conv2d_{name}(const Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, Workspace& workspace) {{
  {body}
  const int64_t cg = p.in_channels / p.groups, kg = p.out_channels / p.groups;
  Acc<T>* sum = workspace.take<Acc<T>>(1);
  for (int64_t n = 0; n < p.batch; n++)
    for (int64_t k = 0; k < p.out_channels; k++)
      for (int64_t i = 0; i < p.out_height; i++)
        for (int64_t j = 0; j < p.out_width; j++) {{
          *sum = b ? widen(b[k]) : 0;
          for (int64_t c = 0; c < cg; c++)
            for (int64_t r = 0; r < p.kernel_height; r++)
              for (int64_t s = 0; s < p.kernel_width; s++) {{
                const int64_t h = i * p.stride_h + r * p.dilation_h - p.pad_h, v = j * p.stride_w + s * p.dilation_w - p.pad_w;
                if (h < 0 || v < 0 || h >= p.in_height || v >= p.in_width) continue;
                const int64_t at = n * p.x_stride.n + (k / kg * cg + c) * p.x_stride.c + h * p.x_stride.h + v * p.x_stride.w;
                const Acc<T> scale = {scale};
                *sum += scale * widen(x[at]) * widen(w[((k * cg + c) * p.kernel_height + r) * p.kernel_width + s]);
              }}
          y[n * p.y_stride.n + k * p.y_stride.c + i * p.y_stride.h + j * p.y_stride.w] = narrowed<T>(*sum);
        }}
}}
AI3_ALGORITHM(conv2d, {name}, {traits}.supports = {name}_supports, .workspace = {name}_workspace)
}}  // namespace
"""


def naive(name: str, **parts: str) -> str:
    whole = {"supports": "true", "stated": "workspace_bytes<double>(1)", "body": "", "scale": "1", "traits": ""}
    return NAIVE.format(name=name, **whole | parts)


def test_check_finds_what_is_wrong_on_large_maps_alone(header):
    """One that does 1x1 kernels only and counts part of the sum twice from pixel 256 on: no small case shows it."""
    pointwise, twice = "(p.kernel_height * p.kernel_width == 1)", "i * p.out_width + j >= 256 && c == cg / 2 ? 2 : 1"
    register_function("conv2d", "user_twice", header(naive("user_twice", supports=pointwise, scale=twice)))
    info = registry.algorithm("conv2d", "user_twice")
    assert CHECKS["values"](info).passed >= 8 * len(info.dtypes)
    with pytest.raises(
        AssertionError, match=r"input \(1, 192, 28, 28\).*outputs are outside the bound of exact algorithms"
    ):
        CHECKS["sizes"](info)


def test_check_passes_a_correct_algorithm_of_one_dtype_and_few_shapes(header, monkeypatch):
    """What does not concern it is skipped with its reason, not passed."""
    monkeypatch.setattr("ai3_ops.checking.values.REALISTIC_SECONDS", 3.0)
    pointwise = (
        "(p.kernel_height * p.kernel_width == 1 && (p.in_channels < 0 || p.in_channels % 8 == 0) && p.groups == 1)"
    )
    traits = ".dtypes = dtype_bit(DType::f32), "
    register_function("conv2d", "user_floats", header(naive("user_floats", supports=pointwise, traits=traits)))
    report = ai3_ops.check("conv2d", "user_floats")
    assert report.ok
    assert list(report.searched) == ["float32"]
    found = report.searched["float32"]
    assert 50 < found.supported < found.tried
    assert max(shape[2] for case in found.realistic for shape in case.shapes[:1]) >= 56
    by = {result.check: result for result in report.results}
    assert by["values"].passed >= 16
    assert by["sizes"].passed >= 5
    for name, words in {
        "packed": "keeps no packed weights",
        "fused": "fuses no residual",
        "prologue": "applies no scale, shift or relu",
        "autocast": "needs float32 and bfloat16",
    }.items():
        assert (by[name].status, by[name].passed) == ("skipped", 0)
        assert words in str(by[name])
    assert "gradcheck: has no float64" in str(by["gradients"])
    assert {name for name, result in by.items() if result.status == "skipped"} <= {
        "packed",
        "fused",
        "prologue",
        "autocast",
        "zeros",
    }
    assert re.search(rf"float32 +\d+ cases, {found.supported} of {found.tried} shapes", str(report))


def test_too_little_stated_workspace_is_an_error_with_both_numbers(header):
    """The kernel runs to its end in borrowed memory, also on 1 TiB that it never touches."""
    op = register_function("conv2d", "user_greedy", header(naive("user_greedy", stated="0")))
    with pytest.raises(RuntimeError, match=r"^ai3::conv2d_user_greedy: states 0 bytes of workspace and takes 64$"):
        op(X, W)
    with pytest.raises(AssertionError, match="values on cpu: RuntimeError: ai3::conv2d_user_greedy: states 0 bytes"):
        ai3_ops.check("conv2d", "user_greedy")
    body = "workspace.take<char>(int64_t{1} << 62);"
    op = register_function("conv2d", "user_glutton", header(naive("user_glutton", body=body)))
    with pytest.raises(
        RuntimeError, match=r"^ai3::conv2d_user_glutton: not enough memory for 4611686018427387904 bytes"
    ):
        op(X, W)


def test_too_little_stated_workspace_is_an_error_in_programs_too(header):
    """A program's arena has what was stated; the rest is borrowed there as well."""
    register_function("conv2d", "user_greedy_step", header(naive("user_greedy_step", stated="0")))
    builder = Builder()
    image = builder.input(X.shape)
    program = builder.build([builder.conv2d(image, W, algorithm="user_greedy_step")])
    words = r"^ai3::conv2d_user_greedy_step: states 0 bytes of workspace and takes 64$"
    with pytest.raises(RuntimeError, match=words):
        program(X)
    with pytest.raises(RuntimeError, match=words):
        program.time(X, repeats=1)


def test_what_is_no_exception_is_an_error_that_names_the_operator(header):
    op = register_function("conv2d", "user_throws", header(naive("user_throws", body="throw 5;")))
    with pytest.raises(RuntimeError, match=r"^ai3::conv2d_user_throws: an exception that is no std::exception"):
        op(X, W)
    register_function("conv2d", "user_unsure", header(naive("user_unsure", supports="(throw 5, true)")))
    ok, reason = ai3_ops.supports("conv2d", "user_unsure", X, W)
    assert not ok
    assert reason.startswith("an exception that is no std::exception")


def test_supports_is_asked_about_the_call_s_precision(header):
    op = register_function("conv2d", "user_strict", header(naive("user_strict", supports="!p.allow_tf32")))
    for switch, answer in ((False, (True, "")), (True, (False, "needs another shape"))):
        assert ai3_ops.supports("conv2d", "user_strict", X, W, allow_tf32=switch) == answer
    op(X, W)
    with pytest.raises(RuntimeError, match="needs another shape"):
        op(X, W, allow_tf32=True)


@pytest.mark.parametrize(("device", "index"), [("cuda", -1), ("cuda:0", 0), ("cuda:1", 1), ("cpu", -1)])
def test_a_query_is_of_a_device_and_its_index(device, index, monkeypatch):
    asked = []

    def supports(operation, algorithm, question, *_):
        asked.append((question._obj.device, question._obj.index))
        return 1

    monkeypatch.setattr(_library.C, "ai3_supports", supports)
    assert registry.supports_sizes("relu", "direct", device, torch.float32) == (True, "")
    assert asked == [(_library.DEVICES[device.partition(":")[0]], index)]


def test_operators_that_draw_random_numbers_are_tagged():
    for operation in ("attention", "conv2d"):
        for info in registry.algorithms(operation):
            tags = getattr(torch.ops.ai3, f"{operation}_{info.name}").default.tags
            assert (torch.Tag.nondeterministic_seeded in tags) == (operation == "attention"), info


@pytest.mark.parametrize(
    ("plugins", "found", "warned"),
    [
        (None, True, True),
        ("0", False, False),
        ("good", True, False),
        ("bad, good", True, True),
        ("other", False, False),
    ],
)
def test_entry_points_register_when_names_are_asked_for(tmp_path, plugins, found, warned, fork):
    """One package offers an algorithm; another's entry point is broken, which is a warning that names it."""
    for package, body in {
        "good": "def offer():\n    import ai3_ops\n    ai3_ops.register('relu', 'offered', lambda x: x.clamp(min=0))\n",
        "bad": "def offer():\n    raise OSError('no disk')\n",
    }.items():
        (tmp_path / f"{package}_package.py").write_text(body)
        info = tmp_path / f"{package}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ai3_ops.algorithms]\n{package} = {package}_package:offer\n")
    done = fork(
        textwrap.dedent("""
        import warnings, torch, ai3_ops
        assert not hasattr(torch.ops.ai3, "relu_offered"), "loaded before it was asked for"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print("offered" in {a.name for a in ai3_ops.algorithms("relu")})
        if hasattr(torch.ops.ai3, "relu_offered"):
            assert ai3_ops.supports("relu", "offered", torch.ones(2)) == (True, "")
            assert torch.ops.ai3.relu_offered(torch.ones(2)).sum() == 2
        print(*[w.message for w in caught if "entry point" in str(w.message)], sep="\\n")
        """),
        PYTHONPATH=f"{tmp_path}{os.pathsep}{Path(ai3_ops.__file__).parent.parent}",
        **({} if plugins is None else {"AI3_OPS_PLUGINS": plugins}),
    )
    assert done.returncode == 0, done.stderr
    warning = ["ai3_ops: entry point 'bad' of bad-package failed: no disk"]
    assert list(filter(None, done.stdout.splitlines())) == [str(found), *(warning if warned else [])]


def test_a_loaded_model_says_that_its_algorithm_is_not_registered(tmp_path, fork):
    """In a process of its own, which has not registered what the model was saved with, calls and all."""
    ai3_ops.register("conv2d", "user_saved", lambda x, w, b, *rest, **_: torch.conv2d(x, w, b, *rest[:4]))
    swapped = ai3_ops.swap(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3)), "user_saved")
    swapped(torch.ones(1, 1, 4, 4))
    torch.save(swapped, tmp_path / "model.pt")
    code = (
        "import sys, warnings, torch, ai3_ops\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    model(torch.ones(1, 1, 4, 4)), model(torch.ones(1, 1, 4, 4))\n"
        "(warning,) = seen\n"
        "assert 'user_saved' in str(warning.message) and 'PyTorch computes' in str(warning.message), warning\n"
        "try:\n"
        "    torch.compile(model, backend='eager', fullgraph=True)(torch.ones(1, 1, 4, 4))\n"
        "except Exception as error:\n"
        "    assert 'user_saved' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('compiled without the algorithm')\n"
        "assert 'user_saved' in ai3_ops.explain(model).layers[0].reason\n"
        "ai3_ops.register('conv2d', 'user_saved', lambda x, w, b, *rest, **_: 2 * torch.conv2d(x, w, b, *rest[:4]))\n"
        "layer = ai3_ops.explain(model).layers[0]\n"
        "assert (layer.used, layer.reason) == ('user_saved', ''), layer\n"
        "x = torch.ones(1, 1, 4, 4)\n"
        "torch.testing.assert_close(model(x), 2 * torch.conv2d(x, model[0].weight, model[0].bias))\n"
    )
    result = fork(code, tmp_path / "model.pt")
    assert result.returncode == 0, result.stderr


SKETCH = """
#include "../core/algorithm.h"

namespace ai3::inline AI3_LEVEL {
namespace {

template <class T>
void relu_sketch(const ElementwiseProblem& p, const T* x, T* y, Workspace&) {
  for (int64_t i = 0; i < p.count; i++) y[i] = widen(x[i]) < 0 ? T{} : x[i];
}

AI3_ALGORITHM(relu, sketch)

}  // namespace
}  // namespace ai3::inline AI3_LEVEL
"""


needs_sources = pytest.mark.skipif(
    not (ROOT / "csrc").exists() or not shutil.which("ninja"), reason="needs the sources and ninja"
)


@pytest.fixture
def sketched(tmp_path, monkeypatch):
    """The sources with a new algorithm in one new file, configured; other kernels are left out for speed."""
    for part in ("ai3_ops", "cmake", "csrc/ops", "csrc/runtime", "csrc/algos/core", "csrc/algos/relu"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so", "include", "__pycache__"))
    for file in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "csrc/algos/relu/sketch.cpp").write_text(SKETCH)
    monkeypatch.chdir(tmp_path)
    build = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


@needs_sources
def test_a_new_file_is_built_for_every_level(sketched):
    """What it then is in the registry and under the tester, `make test-full` builds."""
    commands = json.loads((sketched / "build/compile_commands.json").read_text())
    built = [re.search(r"AI3_LEVEL=(\w+)", c["command"]).group(1) for c in commands if c["file"].endswith("sketch.cpp")]
    assert sorted(built) == sorted(module._flags.levels())


@pytest.mark.full
@needs_sources
def test_a_built_in_algorithm_is_one_new_file(sketched):
    """No list is edited: the build, the registry, the tester find it."""
    done = subprocess.run(["cmake", "--build", "build", "--target", "_C"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(
        """
        import ai3_ops
        (info,) = [a for a in ai3_ops.algorithms("relu", "cpu") if a.name == "sketch"]
        print(ai3_ops.__file__, ai3_ops.check("relu", "sketch"))
        """,
        PYTHONPATH=str(sketched),
    )
    assert done.returncode == 0, done.stderr
    assert str(sketched) in done.stdout
    assert "ai3::relu_sketch" in done.stdout


def test_what_a_new_version_has_in_addition_gets_its_rules(header):
    """A pack that the first version lacked, and determinism that it had."""
    op = register_function("conv2d", "user_grows", header(scaled("user_grows")))
    packs = """, .packed_bytes = [](const ai3::Conv2dProblem&) -> int64_t { return 4; },
              .pack = [](const ai3::Conv2dProblem&, const void*, void* to) { *static_cast<float*>(to) = 5; })"""
    text = scaled("user_grows", traits=".deterministic = false, ").rstrip().removesuffix(")") + packs
    register_function("conv2d", "user_grows", header(text), replace=True)
    with torch._subclasses.FakeTensorMode() as mode:
        packed = torch.ops.ai3._conv2d_user_grows_pack(mode.from_tensor(W))
    assert packed.numel() > 0
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            op(X, W)
        register_function("conv2d", "user_grows", header(scaled("user_grows")), replace=True)
        assert torch.equal(op(X, W), 5 * X)
    finally:
        torch.use_deterministic_algorithms(False)


# y = window * gain * conv2d for 1x1 kernels, negated by a word; a window of 0 is refused, by name.
OWN = """
#include <ai3/algorithm.h>
template <class T>
void conv2d_{name}(const ai3::Conv2dProblem& p, const T* x, const T* w, const T*, T* y, ai3::Workspace& workspace) {{
  workspace.take<char>(p.parameters.whole(0));
  const double factor = p.parameters.whole(0) * p.parameters.real(1) * (p.parameters.whole(3) ? -1 : 1);
  const ai3::Acc<T> scale = static_cast<ai3::Acc<T>>(p.parameters.flag(2) ? 0 : factor) * ai3::widen(w[0]);
  for (int64_t i = 0; i < p.batch * p.in_height * p.in_width; i++) y[i] = ai3::narrowed<T>(scale * ai3::widen(x[i]));
}}
inline bool {name}_supports(const ai3::Conv2dProblem& p, ai3::Reason& reason) {{
  return p.parameters.whole(0) > 0 || ai3::refuse(reason, "needs a window of at least 1");
}}
inline int64_t {name}_workspace(const ai3::Conv2dProblem& p) {{ return (p.parameters.whole(0) + 63) / 64 * 64; }}
AI3_ALGORITHM(conv2d, {name}, .accuracy = ai3::Accuracy::approximate, .supports = {name}_supports, .workspace = {name}_workspace,
              .parameters = "int window={window}, float gain=0.5, bool off=False, str(plain|negated) form=plain")
"""


def own(name: str, window: int = 2) -> str:
    return OWN.format(name=name, window=window)


def test_an_algorithms_own_parameters(header):
    """Arguments of its operators by name; `supports`, the workspace and the fake kernel know their values."""
    op = register_function("conv2d", "user_own", header(own("user_own"))).default
    (info,) = [a for a in ai3_ops.algorithms("conv2d", "cpu") if a.name == "user_own"]
    assert [(p.name, p.kind, p.default) for p in info.parameters] == [
        ("window", "int", 2),
        ("gain", "float", 0.5),
        ("off", "bool", False),
        ("form", "str", "plain"),
    ]
    y = 5 * X
    assert torch.equal(op(X, W), y)
    assert torch.equal(op(X, W, window=4, gain=0.25, form="negated"), -y)
    assert torch.equal(op(X, W, off=True), 0 * y)
    assert ai3_ops.supports("conv2d", "user_own", X, W) == (True, "")
    assert ai3_ops.supports("conv2d", "user_own", X, W, window=0) == (False, "needs a window of at least 1")
    assert ai3_ops.workspace("conv2d", "user_own", X, W, window=200) == 256
    with pytest.raises(RuntimeError, match="needs a window of at least 1"):
        op(X, W, window=0)
    with pytest.raises(RuntimeError, match="needs form to be one of 'plain', 'negated', got 'loud'"):
        op(X, W, form="loud")
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(RuntimeError, match="window of at least 1"):
        op(mode.from_tensor(X), mode.from_tensor(W), window=0)
    with pytest.raises(RuntimeError, match="has other parameters than the one that it replaces"):
        register_function("conv2d", "user_own", header(own("user_own", window=3)), replace=True)


def test_a_model_with_an_algorithms_own_parameters(header):
    """Eager on the fast path, pickled, compiled, exported, optimized: the same values everywhere."""
    register_function("conv2d", "user_model", header(own("user_model")))
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.ReLU()).eval()
    torch.nn.init.constant_(model[0].weight, 5.0)
    choice = ai3_ops.Algorithm("user_model", window=3, gain=-2.0, form="negated")
    swapped = ai3_ops.swap(model, {"0": choice})
    with torch.inference_mode():
        assert torch.equal(swapped(X), 30 * X)
    (plan,) = swapped[0]._ai3.plans.values()
    assert plan is not None
    assert "window=3" in str(ai3_ops.explain(swapped))
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(swapped))(X), 30 * X)
        assert torch.equal(torch.export.export(swapped, (X,)).module()(X), 30 * X)
        assert torch.equal(torch.compile(swapped, backend="aot_eager")(X), 30 * X)


@pytest.mark.skipif(not shutil.which("clang++"), reason="no Clang")
@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_clang_compiles_every_header(level, tmp_path):
    """A user's compiler may be one; its names of processor features are others than GCC's. At full size one by one."""
    if level not in module._flags.levels():
        pytest.skip("no level of this architecture")
    include = module._INCLUDE / "ai3"
    ours = {"level.h"}  # for callers of kernels, which GCC compiles
    names = sorted(p.name for p in include.glob("*.h") if p.name not in ours)
    source = tmp_path / "all.cpp"
    for included in [names, *([name] for name in names if PROFILE == "full" and level == "portable")]:
        source.write_text("".join(f"#include <ai3/{name}>\n" for name in included))
        command = ["clang++", "-std=c++20", "-fsyntax-only", "-w", "-DAI3_LEVEL=user", f"-I{module._INCLUDE}"]
        done = subprocess.run([*command, *module._flags.levels()[level], source], capture_output=True, text=True)
        assert not done.returncode, f"{included}: {done.stderr}"
