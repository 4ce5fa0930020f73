"""AOTInductor: one package per dtype that calls every operator, run from Python and from a C++ program without Python."""

import pathlib
import subprocess

import pytest
import torch
from modules import EveryOperator, each_device, each_dtype, swapped_net
from torch.export import Dim

import ai3_ops
from ai3_ops.cli import bench, models

PACKAGE = pathlib.Path(ai3_ops.__file__).parent
TORCH = pathlib.Path(torch.__file__).parent
RUNNER = pathlib.Path(__file__).parent / "aoti" / "runner.cpp"
LIBRARIES = [str(path) for name in ("_C.so", "_C_cuda.so") if (path := PACKAGE / name).exists()]
TOLERANCE = {2: 1e-2, 4: 1e-4, 8: 1e-4}  # by bytes per element, as the C++ program has it


@pytest.fixture(scope="session")
def runner(compiler, once):
    """The C++ program."""
    names = ["torch", "torch_cpu", "c10", *(["torch_cuda", "c10_cuda"] if torch.cuda.is_available() else [])]
    libraries = ["-Wl,--no-as-needed", f"-L{TORCH}/lib", *(f"-l{n}" for n in names), "-ldl", f"-Wl,-rpath,{TORCH}/lib"]
    includes = [f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]

    def build(program):
        command = [compiler, "-std=c++20", "-O0", *includes, str(RUNNER), "-o", str(program), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return once("aoti_runner", build)


def package(model, path, *inputs):
    """Writes the package of a model for any batch size."""
    batch = {0: Dim("batch")}
    shapes = (batch,) * len(inputs)
    program = torch.export.export(
        model, inputs, dynamic_shapes=(shapes,) if isinstance(model, EveryOperator) else shapes
    )
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@pytest.mark.full
@each_device
@each_dtype
def test_every_operator(device, dtype, runner, tmp_path):
    model = EveryOperator(device, dtype)
    path = package(model, tmp_path / "model.pt2", *model.inputs(31))
    loaded = torch._inductor.aoti_load_package(path)
    for batch in (3, 1):
        inputs = model.inputs(batch)
        with torch.no_grad():
            expected, actual = model(*inputs), loaded(*inputs)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=TOLERANCE[e.element_size()] * float(e.abs().max()))
    without_python(runner, path, inputs, expected, tmp_path)


def without_python(runner, path, inputs, expected, folder):
    """The C++ program gets the same from a package."""
    files = []
    for name, values in (("inputs", inputs), ("expected", expected)):
        files.append(str(folder / f"{name}.pt"))
        torch.save(values, files[-1])
    done = subprocess.run([runner, path, *files, *LIBRARIES], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", bench.MODELS)
def test_networks_without_python(name, runner, tmp_path):
    named = models.named(name)
    models.settle(named.model, named.inputs)
    swapped = ai3_ops.swap(named.model, {"*": "default"})
    with torch.no_grad():
        expected = named.model(named.inputs)
    exported = torch.export.export(swapped, (named.inputs,))
    assert [n for n in exported.graph.nodes if str(n.target).startswith("ai3.")]
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    without_python(runner, path, (named.inputs,), (expected,), tmp_path)


@each_device
def test_swapped_network(device, compiler, tmp_path):
    net, swapped = swapped_net(device)
    loaded = torch._inductor.aoti_load_package(
        package(swapped, tmp_path / "net.pt2", torch.randn(9, 3, 20, 21, device=device))
    )
    for batch in (4, 1):
        x = torch.randn(batch, 3, 20, 21, device=device)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), net(x), rtol=1e-4, atol=1e-5)
    constants = swapped.state_dict()
    for row in range(20):  # replaced by tensors that come to lie where others did
        given = {name: constants[name].clone() for name in loaded.get_constant_fqns()}
        for value in given.values():
            value[row % len(value)] = 0
        loaded.load_constants(given, check_full_update=True, user_managed=True)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), torch.func.functional_call(net, given, (x,)), rtol=1e-4, atol=1e-5)
        del given
