"""torch.export of every operator: static and dynamic shapes, saved and loaded."""

import io

import torch
from modules import EveryOperator, assert_equal, each_device, each_dtype, swapped_net
from torch.export import Dim


def reloaded(program):
    """What is left of a program in a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@each_device
@each_dtype
def test_every_operator(device, dtype):
    model = EveryOperator(device, dtype)
    program = torch.export.export(model, model.inputs())
    wanted = {f"ai3.{name}.default" for name in model.calls}
    assert wanted <= operators(program)
    with torch.no_grad():
        expected = model(*model.inputs())
        for p in (program, reloaded(program), program.run_decompositions()):
            assert wanted <= operators(p)
            assert_equal(p.module()(*model.inputs()), expected)


@each_device
def test_any_batch_size(device):
    model = EveryOperator(device, "float32")
    batch = {0: Dim("batch")}
    program = reloaded(torch.export.export(model, model.inputs(31), dynamic_shapes=((batch,) * len(model.calls),)))
    with torch.no_grad():
        for size in (1, 2, 31):
            inputs = model.inputs(size)
            assert_equal(program.module()(*inputs), model(*inputs))


@each_device
def test_swapped_network(device):
    net, swapped = swapped_net(device)
    sizes = {0: Dim("batch"), 2: Dim("height", min=8), 3: Dim("width", min=8)}
    program = torch.export.export(swapped, (torch.randn(9, 3, 20, 21, device=device),), dynamic_shapes=(sizes,))
    assert not any(name.startswith(("aten.conv2d", "aten.linear", "aten.max_pool2d")) for name in operators(program))
    for shape in ((9, 3, 20, 21), (1, 3, 8, 13)):
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            torch.testing.assert_close(reloaded(program).module()(x), net(x), rtol=1e-4, atol=1e-5)
