"""<ai3_ops/model.h>: saved networks in a C++ program without Python."""

import os
import pathlib
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import ai3_ops
from ai3_ops import _machine
from ai3_ops.optimizing import pipeline

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(ai3_ops.__file__).parent
TORCH = pathlib.Path(torch.__file__).parent
HEADERS = ("zlib.h", "nlohmann/json.hpp")


@pytest.fixture(scope="session")
def headers(compiler):
    """What <ai3_ops/model.h> needs beside PyTorch's."""
    for header in HEADERS:
        command, text = [compiler, "-E", "-x", "c++", "-"], f"#include <{header}>"
        found = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if found.returncode:
            pytest.skip(f"needs {header}: install zlib1g-dev and nlohmann-json3-dev")


@pytest.fixture(scope="session")
def runner(compiler, headers, once):
    defines = [f'-DAI3_OPS_LIBRARY="{PACKAGE}/_C.so"', f'-DAI3_OPS_VERSION="{_machine.version()}"']
    includes = [f"-I{PACKAGE}/include", f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]
    libraries = [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10", "-lz", "-ldl", f"-Wl,-rpath,{TORCH}/lib"]
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror"]

    def build(program):
        source = str(ROOT / "tests" / "runtime" / "runner.cpp")
        command = [compiler, *flags, *defines, *includes, source, "-o", str(program), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return once("runtime_runner", build)


@pytest.fixture(autouse=True)
def gains(monkeypatch):
    """What is rewritten is what runs, however small."""
    monkeypatch.setattr(pipeline, "paired", lambda *_, **__: (2.0, 2e-3, 1e-3))


def call(runner, *args, **environment):
    limits = "ulimit -v 32000000; exec "  # a changed number may ask for any amount of memory
    command = ["bash", "-c", limits + '"$@"', "run", str(runner), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def saved(model, inputs, tmp_path):
    torch.manual_seed(0)
    fast = ai3_ops.optimize(model, inputs, "default", progress=False)
    path = tmp_path / "model.ai3"
    ai3_ops.save(fast, path)
    return fast, path


def runs(runner, fast, path, inputs, tmp_path):
    outputs = pytree.tree_leaves(fast(*inputs))
    torch.save(tuple(inputs), tmp_path / "inputs.pt")
    torch.save(tuple(outputs), tmp_path / "outputs.pt")
    done = call(runner, "run", path, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    assert done.returncode == 0, done.stderr


class Parts(nn.Module):
    """Two programs, with what PyTorch computes between, before and behind them; a constant; outputs by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.table = nn.Parameter(torch.randn(16, 8, 8).transpose(1, 2))

    def forward(self, x, y):
        z = torch.cumsum(self.first(x).relu(), 1) * self.table
        z = F.interpolate(self.second(z).relu(), scale_factor=2)
        largest, where = z.flatten(2).max(2)
        return {"image": z, "rows": z.mean((2, 3)) @ y, "largest": [largest, where], "any": z.sum().to(torch.float16)}


def small():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(128, 5)
    ).eval()


def test_one_number_is_no_batch_of_numbers(runner, tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, x):
            return F.gelu(self.linear(self.table(x)))

    fast, path = saved(Words().eval(), torch.arange(4), tmp_path)
    runs(runner, fast, path, [torch.arange(7)], tmp_path)
    torch.save((torch.tensor(3),), tmp_path / "inputs.pt")
    done = call(runner, "run", path, tmp_path / "inputs.pt", tmp_path / "inputs.pt")
    assert done.returncode == 1
    assert "optimized for inputs of sizes [4], got [] Long" in done.stderr


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x, y):
        return torch.relu(self.first(x)) * self.second(y)


def test_a_batch_beside_one_item(runner, tmp_path):
    x, y = torch.randn(2, 4, 16)
    fast, path = saved(Gated().eval(), [(x, y), (x, y[:1])], tmp_path)
    runs(runner, fast, path, [x, y[:1]], tmp_path)
    runs(runner, fast, path, [x[:3], y[:3]], tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_program(runner, tmp_path, dtype):
    inputs = [torch.randn(1, 3, 8, 8, dtype=dtype)]
    fast, path = saved(small().to(dtype), inputs[0], tmp_path)
    runs(runner, fast, path, inputs, tmp_path)
    runs(runner, fast, path, [torch.randn(5, 3, 8, 8, dtype=dtype)], tmp_path)


def test_programs_with_operators_between(runner, tmp_path):
    inputs = torch.randn(1, 3, 8, 8), torch.randn(16, 4)
    fast, path = saved(Parts().eval(), inputs, tmp_path)
    assert not fast._ai3_report.left
    runs(runner, fast, path, inputs, tmp_path)


def test_a_length_kept_by_a_reshape_between_programs(runner, tmp_path):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(F.gelu(self.up(x).view(*x.shape[:2], 4, 16).cumsum(1).flatten(2)))

    fast, path = saved(Between().eval(), torch.randn(1, 64, 16), tmp_path)
    for length in (40, 81):
        fast(torch.randn(1, length, 16))
    ai3_ops.save(fast, path)  # with the sizes that were called
    for sizes in ((1, 64, 16), (1, 40, 16), (3, 81, 16)):
        runs(runner, fast, path, [torch.randn(sizes)], tmp_path)


def test_a_transformer_of_two_inputs_with_any_batch(runner, tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")

        def forward(self, x, y):
            return self.layer(x) + y, y * 2

    inputs = torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    fast, path = saved(Masked().eval(), inputs, tmp_path)
    runs(runner, fast, path, inputs, tmp_path)
    runs(runner, fast, path, [torch.randn(3, 7, 32), torch.randn(3, 7, 32)], tmp_path)


def test_what_is_refused(runner, tmp_path):
    inputs = torch.randn(1, 3, 8, 8)
    _, path = saved(small(), inputs, tmp_path)
    for name, wrong, words in (
        ("sizes", [torch.randn(1, 3, 9, 8)], "optimized for inputs of sizes [1,3,8,8], got [1,3,9,8] Float"),
        ("types", [inputs.double()], "got [1,3,8,8] Double"),
        ("none", [], "got none"),
    ):
        torch.save(tuple(wrong), tmp_path / f"{name}.pt")
        done = call(runner, "run", path, tmp_path / f"{name}.pt", tmp_path / f"{name}.pt")
        assert done.returncode == 1, name
        assert words in done.stderr
    whole = path.read_bytes()
    for name, data, words in (
        ("cut", whole[:-100], "cut off"),
        ("short", whole[:4], "no file of ai3_ops.save"),
        ("other", whole[:-100] + bytes(100), "was altered"),
    ):
        (tmp_path / name).write_bytes(data)
        done = call(runner, "refuse", tmp_path / name)
        assert done.returncode == 1
        assert f"ai3::Model::load: {tmp_path / name}: " in done.stderr
        assert words in done.stderr
    done = call(runner, "refuse", tmp_path / "missing")
    assert done.returncode == 1
    assert "cannot be opened" in done.stderr
    if ai3_ops._library.registry()["level"] != "portable":
        done = call(runner, "refuse", path, AI3_OPS_ISA="portable")
        assert "and this process has portable: optimize and save again here" in done.stderr
    done = call(runner, "refuse", path, AI3_OPS_LIBRARY="/nowhere.so")
    assert "cannot load /nowhere.so" in done.stderr


def mutated(runner, tmp_path, network, count):
    """How many of so many changed files are refused; the others run."""
    inputs = (torch.randn(1, 3, 8, 8), torch.randn(16, 4))[: 1 if network == "program" else 2]
    _, path = saved(small() if network == "program" else Parts().eval(), inputs, tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    done = call(runner, "mutate", path, tmp_path / "inputs.pt", tmp_path / "copy", count)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("network", ["program", "parts"])
def test_changed_files_are_refused_or_run(runner, tmp_path, network):
    assert 150 < mutated(runner, tmp_path, network, 600) < 600


@pytest.mark.full
@pytest.mark.parametrize("network", ["program", "parts"])
def test_a_hundred_thousand_changed_files(runner, tmp_path, network):
    mutated(runner, tmp_path, network, 100_000)


def test_example(headers, tmp_path):
    """As examples/cpp/CMakeLists.txt says."""
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    _, path = saved(small(), torch.ones(1, 3, 8, 8), tmp_path)
    where = [f"-Dai3_ops_DIR={PACKAGE}/include", f"-DCMAKE_PREFIX_PATH={TORCH}"]
    quick = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]  # nor what a debugger reads, half of the time
    for command in (
        ["cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path / "build", *quick, *where],
        ["cmake", "--build", tmp_path / "build"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = call(tmp_path / "build" / "run_model", path, 1, 3, 8, 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1, 5] ")
    assert "milliseconds: " in done.stdout
    done = call(tmp_path / "build" / "run_model", path, 1, 3, 8, 9)
    assert done.returncode == 1
    assert "got [1,3,8,9] Float" in done.stderr
