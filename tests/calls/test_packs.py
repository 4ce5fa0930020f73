"""Packed weights follow their parameter, whichever way it is replaced or written."""

import gc
import random

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ai3_ops
from ai3_ops import _library

LAYERS = {
    "conv2d": (lambda: nn.Conv2d(64, 64, 3, padding=1), (1, 64, 9, 9)),
    "conv1d": (lambda: nn.Conv1d(64, 96, 3, padding=1), (1, 64, 400)),
    "linear": (lambda: nn.Linear(256, 192), (1, 256)),
}
each_layer = pytest.mark.parametrize("operation", LAYERS)


def columns():
    """A linear layer whose weight is (in_features, out_features)."""
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(192, 256)


ALL = LAYERS | {"columns": (columns, (1, 256))}


def parameter(m, w):
    m.weight = nn.Parameter(w, False)


def wrapped(m, w):
    """Another parameter of the same memory, which counts changes by itself."""
    m.weight = nn.Parameter(m.weight.data, False)
    with torch.no_grad():
        m.weight.copy_(w)


def assigned(m, w):
    m.load_state_dict(m.state_dict() | {"weight": w}, assign=True)


def loaded(m, w):
    m.load_state_dict(m.state_dict() | {"weight": w})


def data(m, w):
    m.weight.data = w


def vector(m, w):
    nn.utils.vector_to_parameters(torch.cat([w.flatten(), m.bias.flatten()]), [m.weight, m.bias])


def moving_average(m, w):
    m.weight.data.mul_(0.9).add_(torch.randn_like(w), alpha=0.01)


def copied(m, w):
    m.weight.copy_(w)


def stepped(m, w):
    m.weight.grad = w
    torch.optim.SGD([m.weight], lr=0.5).step()
    m.weight.grad = None


def exchanged(m, w):
    torch.utils.swap_tensors(m.weight, nn.Parameter(w, False))


def converted(m, w):
    m.weight.data = w
    m.double().float()


WAYS = [parameter, wrapped, assigned, loaded, data, vector, moving_average, copied, stepped, exchanged, converted]


def reference(operation, module, x):
    """By PyTorch, with the parameters as they are."""
    layer = ALL[operation][0]()
    layer.weight, layer.bias = module.weight, module.bias
    return layer(x)


def running(run, operation):
    """The swapped layer, and what runs it and holds its parameters."""
    torch.manual_seed(0)
    make, shape = ALL[operation]
    x = torch.randn(shape)
    swapped = ai3_ops.swap(make().eval().requires_grad_(False), "default", x)
    if run == "compiled":
        torch.compiler.reset()
        return swapped, torch.compile(swapped, backend="aot_eager", fullgraph=True), x
    if run == "exported":
        program = torch.export.export(swapped, (x,)).module()
        del swapped
        gc.collect()  # which frees the slot that the program's calls name, too
        return program, program, x
    return swapped, swapped, x


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.parametrize("run", ["eager", "compiled", "exported"])
def test_a_thousand_replacements(run, operation):
    module, call, x = running(run, operation)
    choice = random.Random(0)
    first = module.weight.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for step in range(1000 if run == "eager" else 300):
            way = choice.choice(WAYS)
            w = first.clone()
            w[choice.randrange(len(w))] = 0
            way(module, w)
            del w
            expected = reference(operation, module, x)
            error = (call(x) - expected).abs().max() / expected.abs().max()
            assert error < 5e-5, f"{way.__name__} in step {step}"


@each_layer
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_functional_call_with_new_parameters(kind, operation):
    module, call, x = running("eager", operation)
    first = module.weight.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for k in range(60):
            w = first.clone()
            w[k] = 0
            given = {"weight": nn.Parameter(w, False) if kind is nn.Parameter else w, "bias": torch.zeros(len(w))}
            y = torch.func.functional_call(call, given, (x,))
            del w, given
            assert not y.movedim(1, 0)[k].any()


@pytest.mark.parametrize("run", ["eager", "compiled", "exported"])
def test_weights_that_were_replaced_are_freed(run):
    """At the next call, with their pack: nothing but that pack held them."""
    module, call, x = running(run, "conv2d")
    with torch.no_grad():
        call(x)
        slot = slot_of(module, run)
        size = _library.packs(slot).bytes
        assert size > 0
        held = []
        for _ in range(3):
            w = torch.randn(64, 64, 3, 3)
            held.append(StorageWeakRef(w.untyped_storage()))
            module.weight.data = w
            del w
            call(x)
            assert _library.packs(slot).bytes == size
        assert [not storage.expired() for storage in held] == [False, False, True]


def slot_of(module, run):
    if run != "exported":
        return module._ai3.slot
    return next(n.args[-1] for n in module.graph.nodes if "held" in str(n.target))


def test_calls_that_alternate_between_weights_keep_the_packs_of_all():
    """As of an exported program that was loaded several times."""
    module, call, x = running("eager", "conv2d")
    sets = [{"weight": nn.Parameter(torch.randn(64, 64, 3, 3), False)} for _ in range(4)]
    with torch.no_grad():
        made = []
        for _ in range(4):
            for given in sets:
                torch.func.functional_call(call, given, (x,))
            made.append(module._ai3.packs.made)
        assert made[-1] == made[-2]
        for _ in range(100):
            call(x)
        size = module._ai3.packs.bytes
        module._ai3.forget_packs()
        call(x)
        assert size == module._ai3.packs.bytes  # those that none used since are freed


def test_moving_a_model_frees_its_packs():
    module, call, x = running("eager", "conv2d")
    with torch.no_grad():
        call(x)
    assert module._ai3.packs.bytes > 0
    module.double()
    assert module._ai3.packs.bytes == 0
