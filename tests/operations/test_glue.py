"""What the glue of the operations owes to ATen: argument forms, sizes, strides, refusals. Any sound kernel gives the values."""

from __future__ import annotations

import ctypes
import gc
import itertools
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import ai3_ops
from ai3_ops import _library, registry

ops = torch.ops.ai3
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "sliced": lambda t: torch.cat([t, t], -1)[..., ::2].copy_(t),
    "expanded": lambda t: t[..., :1].expand(t.shape),
}


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-2 if expected.dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual.stride() == expected.stride() or not expected.numel()


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (3, 9, 8), (0, 3, 9, 8), (1, 1, 9, 8)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pools(layout, shape, ceil_mode):
    x = LAYOUTS[layout](data(*shape))
    for kernel, stride, padding in itertools.product([2, 3, (3, 2)], [[], 1, 2, (2, 3), 4], [0, 1, (1, 0)]):
        same(
            ops.max_pool2d_direct(x, kernel, stride, padding, ceil_mode=ceil_mode),
            F.max_pool2d(x, kernel, stride or None, padding, ceil_mode=ceil_mode),
        )
        for include, divisor in [(True, None), (False, None), (True, 3), (False, -2)]:
            same(
                ops.avg_pool2d_direct(x, kernel, stride, padding, ceil_mode, include, divisor),
                torch.ops.aten.avg_pool2d(x, kernel, stride, padding, ceil_mode, include, divisor),
            )
    same(ops.max_pool2d_direct(x, [2], [2], [1], [2], ceil_mode), F.max_pool2d(x, 2, 2, 1, 2, ceil_mode))
    for size in [1, (2, 3), (11, 5), (0, 2)]:
        torch.testing.assert_close(ops.adaptive_avg_pool2d_direct(x, size), F.adaptive_avg_pool2d(x, size))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (2, 3, 0, 1)])
def test_max_pool2d_of_two_zeros(layout, window):
    """Of +0 and -0 the first one in the window stays."""
    x = torch.tensor([0.0, -0.0, -1.0])[torch.randint(3, (2, 20, 19, 45), generator=torch.Generator().manual_seed(0))]
    x = x.to(memory_format=layout)
    out, expected = ops.max_pool2d_direct(x, *window), F.max_pool2d(x, *window)
    same(out, expected)
    assert torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((17, 1, 1), ((2, 3), [], 1, 2, True)),
        ((2, 3, 2, 5), (2, (1, 2), 1, (3, 4))),
        ((1, 2, 3, 2), (2, 1, 1, (4, 3), True)),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_windows_that_meet_no_pixel(shape, window, layout):
    """A dilation steps over the input: ATen's gradient is written where its index points, which is nowhere (docs/pytorch.md)."""
    x = data(*shape).requires_grad_()
    form = layout if x.ndim == 4 else torch.contiguous_format
    given = x.detach().clone(memory_format=form).requires_grad_()
    x.grad = torch.zeros_like(x)
    out = ops.max_pool2d_direct(given, *window)
    (k, m), (a, b) = ((n, n) if isinstance(n, int) else n for n in (window[0], window[3]))
    s, t = (window[1], window[1]) if isinstance(window[1], int) else window[1] or (k, m)
    for i, j in itertools.product(*map(range, out.shape[-2:])):
        rows = [r for r in range(i * s - 1, i * s - 1 + k * a, a) if 0 <= r < shape[-2]]
        columns = [c for c in range(j * t - 1, j * t - 1 + m * b, b) if 0 <= c < shape[-1]]
        seen = x[..., rows, :][..., columns].flatten(-2)
        if seen.shape[-1]:
            seen.amax(-1).sum().backward()
            assert torch.equal(out[..., i, j], seen.amax(-1))
        else:
            assert (out[..., i, j] == -torch.inf).all()
    out.nan_to_num(neginf=0).sum().backward()
    assert torch.equal(given.grad, x.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 5), (3, 0, 2), (6,), ()])
def test_relu_and_flatten(layout, shape):
    x = data(*shape) if not shape else LAYOUTS[layout](data(*shape))
    before = x.clone()
    same(ops.relu_direct(x), F.relu(x))
    for start, end in itertools.product(range(-max(x.dim(), 1), max(x.dim(), 1)), repeat=2):
        try:
            expected = torch.flatten(x, start, end).contiguous()
        except RuntimeError:
            with pytest.raises(RuntimeError, match="start_dim"):
                ops.flatten_direct(x, start, end)
        else:
            y = ops.flatten_direct(x, start, end)
            same(y, expected)
            assert y.data_ptr() != x.data_ptr() or not y.numel()
    assert torch.equal(x, before)
    with pytest.raises(RuntimeError, match="start_dim in"):
        ops.flatten_direct(x, 7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 1, 3, 4), (0, 4), (3, 0)])
def test_linear(layout, dtype, shape):
    x, w = LAYOUTS[layout](data(*shape, dtype=dtype)), LAYOUTS[layout](data(5, shape[-1], dtype=dtype))
    for bias in [None, data(5, dtype=dtype), data(10, dtype=dtype)[::2], data(1, dtype=dtype), data(dtype=dtype)]:
        if layout == "contiguous" or shape != (3, 4):
            same(ops.linear_gemm(x, w, bias), F.linear(x, w, bias))
    same(ops.linear_gemm(x, w[0]), F.linear(x, w[0]))
    scalar = data(dtype=dtype)
    torch.testing.assert_close(ops.linear_gemm(x, w[0], scalar), F.linear(x, w[0]) + scalar, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.linear_gemm(data(2, 3), data(5, 4)), "needs input of 4 features"),
        (lambda: ops.linear_gemm(data(2, 3), data(5, 3), data(4)), "needs a bias"),
        (lambda: ops.linear_gemm(data(2, 3), data(5, 3).double()), "one dtype"),
        (lambda: ops.linear_gemm(data(2, 3).int(), data(5, 3).int()), "needs float64, float32"),
        (lambda: ops.linear_gemm(data(), data(5, 3)), "at least one dimension"),
        (lambda: ops.max_pool2d_direct(data(1, 1, 4, 4), 2, padding=2), "half the kernel size"),
        (lambda: ops.max_pool2d_direct(data(1, 1, 2, 2), 3), "too small"),
        (lambda: ops.max_pool2d_direct(data(1, 0, 4, 4), 2), "no dimension of 0"),
        (lambda: ops.max_pool2d_direct(data(4, 4), 2), "needs input"),
        (lambda: ops.max_pool2d_direct(data(1, 1, 4, 4), [2, 2, 2]), "kernel_size needs 1 or 2 elements"),
        (lambda: ops.max_pool2d_direct(data(1, 1, 4, 4), 2, 0), "stride"),
        (lambda: ops.max_pool2d_direct(data(1, 1, 4, 4), 2, 2**40), "stride needs values from 1 to 2147483647, got"),
        (lambda: ops.avg_pool2d_direct(data(1, 1, 4, 4), 2, divisor_override=0), "divisor_override"),
        (lambda: ops.adaptive_avg_pool2d_direct(data(1, 1, 4, 4), -1), "output_size"),
        (lambda: ops.adaptive_avg_pool2d_direct(data(1, 1, 4, 4), 2**30), "too large|memory|allocate"),
        (lambda: ops.relu_direct(torch.ones(2, dtype=torch.int32)), "needs float64, float32"),
        (lambda: ops.conv2d_direct(data(1, 3, 4, 4), data(2, 4, 3, 3)), "needs input of 4 channels"),
        (lambda: ops.conv2d_direct(data(1, 3, 4, 4), data(2, 3, 5, 5)), "kernel's extent"),
        (lambda: ops.conv2d_direct(data(1, 3, 4, 4), data(2, 3, 1, 1), padding=2**31), "padding"),
        (lambda: ops.conv2d_direct(data(1, 3, 4, 4), data(2, 3, 1, 1), padding=2**31 - 1), "too large|memory|allocate"),
    ],
)
def test_bad_arguments_are_refused_readably(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


def shape_of(operator, *arguments):
    try:
        return operator(*arguments).shape
    except RuntimeError:
        return None


@pytest.mark.parametrize("operation", ["conv2d", "conv1d"])
def test_sizes_are_atens_in_the_kernel_and_in_the_fake(operation):
    """The fake's sizes, which may be symbolic, are Python's; the kernel's and those of queries are one C++ function's."""
    draw, space = Random(0), int(operation[4])
    operator, aten = getattr(ops, f"{operation}_direct"), getattr(F, operation)
    computed = refused = empty = 0
    for _ in range(600):
        groups = draw.choice([1, 1, 2])
        c, k = groups * draw.choice([1, 3]), groups * draw.choice([1, 2])
        image = [draw.choice([0, 0, 1, 2, 3, 6]) for _ in range(space)]
        batch = draw.choice([(), (0,), (0,), (1,), (2,)])
        kernel = [draw.randint(1, 4) for _ in range(space)]
        stride, padding, dilation = ([draw.randint(a, a + 2) for _ in range(space)] for a in (1, 0, 1))
        x, w = torch.zeros(*batch, c, *image), torch.zeros(k, c // groups, *kernel)
        window = (None, stride, padding, dilation, groups)
        expected = shape_of(aten, x, w, *window)
        assert shape_of(operator, x, w, *window) == expected, (x.shape, w.shape, window)
        assert shape_of(operator, x.to("meta"), w.to("meta"), *window) == expected, (x.shape, w.shape, window)
        assert ai3_ops.supports(operation, "direct", x, w, *window)[0] == (expected is not None)
        computed, refused = computed + (expected is not None), refused + (expected is None)
        empty += expected is not None and 0 in image
    assert min(computed, refused, empty) >= 20


def test_queries_of_images_without_pixels():
    """As calls with tensors are answered."""
    sizes = {
        "in_channels": 4, "in_height": 0, "in_width": 5, "out_channels": 4, "kernel_height": 3, "kernel_width": 3, "stride_h": 1,
        "stride_w": 1, "pad_h": 2, "pad_w": 0, "dilation_h": 1, "dilation_w": 1, "groups": 1,
    }  # fmt: skip

    def ask(**other):
        return registry.supports_sizes("conv2d", "direct", "cpu", torch.float32, **sizes | other)

    assert ask(batch=0) == ask() == (True, "")
    assert ask(batch=1) == (False, "needs input with no dimension of 0 but the batch, got images of 0x5")
    assert ask(batch=0, pad_h=1) == (False, "needs a padded input no smaller than the kernel's extent, got 2 and 3")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: ops.conv2d_direct(x, w, b),
        lambda x, w, b: ops.conv2d_im2col(x, w, b),
        lambda x, w, b: ops.conv2d_default(x, w.mT, b),
        lambda x, w, b: ops._conv2d_direct_backward(x[..., 2:, 2:], x, w, 1, 0, 1, 1, [True] * 3)[1],
        lambda x, w, b: ops._conv2d_direct_pack(w),
        lambda x, w, b: ops.linear_gemm(x.mT, x[0, 0], None),
        lambda x, w, b: ops._linear_gemm_backward(x[0, 0], x[0, 1].mT, x[0, 2], [True] * 3)[0],
        lambda x, w, b: ops.max_pool2d_direct(x.mT, 2),
        lambda x, w, b: ops.adaptive_avg_pool2d_direct(x.mT, 3),
        lambda x, w, b: ops.relu_direct(x[..., ::2]),
        lambda x, w, b: ops.flatten_direct(x.mT),
    ],
)
def test_kernels_run_on_the_device_of_their_tensors(call):
    """Whatever the current device: on the other one nothing is allocated, and a kernel launched there would fault."""
    tensors = data(1, 4, 6, 6), data(4, 4, 3, 3), data(4)
    expected = call(*tensors)
    with torch.cuda.device(0):
        torch.cuda.synchronize(0)
        before = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
        y = call(*(t.to("cuda:1") for t in tensors))
        assert torch.cuda.memory_stats(0).get("allocation.all.allocated", 0) == before
        assert torch.cuda.current_device() == 0
    assert y.device == torch.device("cuda:1")
    if y.shape == expected.shape:  # packs of the two devices are not alike
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-3, atol=1e-3)


HUGE = [-1, 1, 2, 3, 7, 64, 1000, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**63 - 1]


@pytest.mark.parametrize("operation", sorted(ai3_ops.registry.OPERATIONS))
def test_queries_of_any_sizes_are_answered_or_refused(operation):
    """What would overflow is refused, never multiplied: a size that wraps could end the process or ask for too little."""
    random, names = Random(0), _library.size_names(operation)
    algorithms = [a.name for a in ai3_ops.algorithms(operation, "cpu") if not a.python]
    answered = refused = 0
    for _ in range(3000):
        sizes = [random.choice(HUGE) if random.random() < random.choice([0.1, 0.5, 1]) else 3 for _ in names]
        algorithm, dtype = random.choice(algorithms), random.choice(list(_library.DTYPES))
        for ask in (_library.supports, _library.workspace, _library.packed_bytes):
            try:
                answer = ask(operation, algorithm, "cpu", dtype, _library.Sizes(sizes))
            except RuntimeError:
                refused += 1
            else:
                answered += 1
                assert ask is _library.supports or answer >= 0
    assert answered
    assert refused or len(names) == 1


@pytest.mark.parametrize("algorithm", [a.name for a in ai3_ops.algorithms("conv2d", "cpu")])
def test_sizes_that_overflow_are_refused(algorithm):
    sizes = {"batch": 2**40, "in_channels": 3, "in_height": 2**30, "in_width": 2**30, "out_channels": 3}
    sizes |= dict.fromkeys(("kernel_height", "kernel_width"), 3)
    sizes |= dict.fromkeys(("stride_h", "stride_w", "dilation_h", "dilation_w", "groups"), 1) | {"pad_h": 0, "pad_w": 0}
    with pytest.raises(RuntimeError, match="too large"):
        ai3_ops.registry.workspace_sizes("conv2d", algorithm, "cpu", torch.float32, **sizes)


@pytest.mark.parametrize("shape", [(0, 3, 0, 4), (0, 3, 4, 0)])
def test_conv2d_of_no_images_of_no_size(shape):
    x, w = data(*shape), data(5, 3, 3, 3)
    same(ops.conv2d_direct(x, w, None, 1, 2), F.conv2d(x, w, None, 1, 2))


def test_batches_of_nothing_take_no_memory():
    assert ops.conv2d_direct(torch.empty(0, 3, 100000, 100000), torch.empty(8, 3, 1, 1)).shape == (0, 8, 100000, 100000)
    assert ops.flatten_direct(torch.empty(0, 1 << 40, 1), 1).shape == (0, 1 << 40)


def test_the_c_interface_returns_failures(fork):
    """A program without Python's wrapper sees why; no exception leaves a C function."""
    library = Path(ai3_ops.__file__).parent / "_C.so"
    program = f"""
import ctypes, torch
torch.ops.load_library({str(library)!r})
library, error = ctypes.CDLL({str(library)!r}), ctypes.create_string_buffer(200)
library.ai3_registry.restype = ctypes.c_char_p
print(library.ai3_registry(error, 200), error.value.decode())
"""
    done = fork(program, AI3_OPS_ISA="bogus")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None ai3: AI3_OPS_ISA=bogus is not usable here; usable: ")


@pytest.mark.parametrize("name", ["winograd", "winograd_f2", "winograd_f4", "winograd_f6", "winograd_general"])
def test_a_window_that_is_not_known_is_not_refused(name):
    ask = ai3_ops.registry.supports_sizes
    assert ask("conv2d", name, "cpu", torch.float32, in_channels=4) == (True, "")
    assert not ask("conv2d", name, "cpu", torch.float32, in_channels=4, kernel_width=4)[0]
    assert not ask("conv2d", name, "cpu", torch.float32, in_channels=4, stride_w=2)[0]


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the system has no huge pages to ask for")
def test_large_outputs_are_asked_for_in_huge_pages():
    """docs/decisions/memory.md; the kernel lists what was asked of each mapping as its flags, `hg` among them."""
    output = torch.ops.ai3.relu_direct(torch.ones(1 << 24))
    place, inside, flags = output.data_ptr() + (2 << 20), False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if line.startswith("VmFlags:") and inside:
            flags = line
        elif rest and " " in rest and len(first) in (8, 12):
            inside = int(first, 16) <= place < int(rest.split()[0], 16)
    assert " hg" in flags


def test_queries_of_no_window_are_refused():
    """These divided by zero, which no process survives."""
    with pytest.raises(RuntimeError, match="kernel of at least 1x1"):
        ops._conv2d_fft_pack(torch.empty(8, 3, 0, 3, device="meta"))
    known = {"kernel_height": 3, "kernel_width": 3, "stride_h": 2, "stride_w": 2}
    for name in [a.name for a in ai3_ops.algorithms("conv2d", "cpu") if not a.python]:
        registry.supports_sizes("conv2d", name, "cpu", torch.float32, **known)
        for dimension in ("kernel_height", "stride_w", "dilation_h", "groups"):
            with pytest.raises(RuntimeError, match=r"of at least 1, got .*\b0\b"):
                registry.workspace_sizes("conv2d", name, "cpu", torch.float32, **{dimension: 0})


def test_a_guess_without_the_batch_is_that_for_one_image():
    sizes = {
        "in_channels": 64, "in_height": 56, "in_width": 56, "out_channels": 64, "kernel_height": 3, "kernel_width": 3,
        "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1, "dilation_h": 1, "dilation_w": 1, "groups": 1,
    }  # fmt: skip
    names = {registry.resolve_sizes("conv2d", "guess", "cpu", torch.float32, batch=n, **sizes) for n in (1, None)}
    assert len(names) == 1
    assert names.pop().startswith("winograd")


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ((8, 8, 5, 5), "3x3 kernel"),
        ((8, 8, 3), "4-D weight"),
        ((8, 8, 3, 3, 3), "4-D weight"),
        ((0, 8, 3, 3), "output"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_that_cannot_be_packed(device, weight, words):
    with pytest.raises(RuntimeError, match=rf"ai3::conv2d_winograd_f4: .*{words}"):
        ops._conv2d_winograd_f4_pack(torch.empty(weight, device=device))


def test_a_copy_of_a_weight_is_never_taken_for_its_pack():
    """On CUDA a weight is copied, on the CPU packed: one moved to the other device has another size."""
    if not any(a.device == "cuda" for a in ai3_ops.algorithms("linear")):
        pytest.skip("needs the CUDA part")
    for size in ((512, 256), (32, 16), (31, 16)):
        sizes = {"in_features": size[1], "out_features": size[0]}
        packed = {d: registry.packed_bytes_sizes("linear", "gemm", d, torch.float32, **sizes) for d in ("cpu", "cuda")}
        assert packed["cpu"] != packed["cuda"]


def test_boxed_functions_check_how_many_arguments_they_are_given():
    names = [n.removeprefix("ai3::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("ai3::")]
    error, stack, checked = ctypes.create_string_buffer(2048), (ctypes.c_uint64 * 64)(), 0
    for name in names:
        packet, _, overload = name.partition(".")
        schema = getattr(getattr(ops, packet), overload or "default")._schema
        right = len(schema.arguments), len(schema.returns)
        for more in ((1, 0), (-1, 0), (0, 1)):
            given = tuple(map(sum, zip(right, more, strict=True)))
            assert not _library.C.ai3_call(
                name.encode(), stack, *map(ctypes.c_uint64, given), error, ctypes.c_int64(2048)
            )
            if b"no operator" in error.value:  # a Python callable's
                continue
            words = "takes {} arguments and has {} results, was called with {} and {}".format(*right, *given)
            assert words in error.value.decode()
            assert error.value.startswith(b"ai3::")
            checked += 1
    assert checked > 500


def test_refused_calls_keep_no_tensor():
    w = torch.ones(8, 8, 3, 3)
    pack = ops._conv2d_direct_pack(w)
    calls = (
        lambda x, y: ops._relu_direct_infer(x),
        lambda x, y: ops._flatten_direct_infer(x, _library.keep_numbers(ops, "0 -1")),
        lambda x, y: ops._max_pool2d_direct_infer(x, _library.keep_numbers(ops, "2 2 2 2 0 0 1 1 0")),
        lambda x, y: ops._conv2d_direct_packed_out(x, pack, w.shape, activation="foo", out=y),
        lambda x, y: ops._conv2d_direct_packed_out(x, pack, (8, 8), out=y),
    )
    for call in calls:
        x, y = torch.ones(1, 8, 9, 9), torch.empty(1, 8, 7, 7)
        storages = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
        with pytest.raises(RuntimeError) as error:
            call(x, y)
        del x, y, error
        gc.collect()  # the error's frames
        assert all(s.expired() for s in storages)


def test_workspace_of_what_cannot_be_done_is_refused():
    with pytest.raises(RuntimeError, match="3x3 kernel"):
        registry.workspace_sizes("conv2d", "winograd_f4", "cpu", torch.float32, kernel_height=5, kernel_width=5)


def test_a_stride_beyond_the_image_has_gradients():
    x = torch.rand(1, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    w = torch.rand(4, 1, 1, 3, requires_grad=True)
    window = ((2**31 - 1, 2**30), (0, 1), (1, 1), 4)
    given = torch.autograd.grad(ops.conv2d_depthwise(x, w, None, *window).sum(), (x, w))
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN cannot
        expected = torch.autograd.grad(F.conv2d(x, w, None, *window).sum(), (x, w))
    for a, e in zip(given, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_what_is_asked_is_what_the_operator_takes():
    x, w = torch.rand(1, 8, 9, 9), torch.rand(8, 8, 3, 3)
    for ask in (ai3_ops.supports, ai3_ops.resolve):
        with pytest.raises(TypeError, match=r"ai3::conv2d_direct has no argument 'strid'; did you mean 'stride'\?"):
            ask("conv2d", "direct", x, w, strid=2)
        with pytest.raises(TypeError, match="ai3::conv2d_direct needs weight"):
            ask("conv2d", "direct", x)
        with pytest.raises(TypeError, match="got 9 positional arguments"):
            ask("conv2d", "direct", x, w, None, 1, 0, 1, 1, False, False)
    assert ai3_ops.supports("conv2d", "direct", x, w, padding="same") == (False, "padding needs numbers, got 'same'")
    with pytest.raises(RuntimeError, match=r"ai3::conv2d_direct: .*got None"):
        ops.conv2d_direct(x, None)
    with pytest.raises(RuntimeError, match=r"ai3::linear_gemm: .*got None"):
        ops.linear_gemm(None, x)
    assert ai3_ops.supports("conv2d", "gemm", x, w) == (True, "")
    ok, reason = ai3_ops.supports("conv2d", "gemm", x, w, deterministic=True)
    assert (ok, "not deterministic" in reason) == (False, True)
    with pytest.raises(RuntimeError, match="not deterministic"):
        ai3_ops.resolve("conv2d", "gemm", x, w, deterministic=True)
    meta = x.to("meta"), w.to("meta")
    if any(a.deterministic for a in registry.registered() if (a.operation, a.name) == ("conv2d", "gemm")):  # CUDA's
        assert ops.conv2d_gemm(*meta, deterministic=True).shape == (1, 8, 7, 7)
    else:
        with pytest.raises(RuntimeError, match="not deterministic"):
            ops.conv2d_gemm(*meta, deterministic=True)
    assert ai3_ops.resolve("conv2d", "default", x.to("meta"), w.to("meta")) == ai3_ops.resolve(
        "conv2d", "default", x, w
    )
    with pytest.raises(ValueError, match="no device 'gpu'"):
        ai3_ops.algorithms(device="gpu")
