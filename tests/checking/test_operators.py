"""Every algorithm of the registry against float64 and ATen, and as a citizen of PyTorch."""

from __future__ import annotations

import fnmatch
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tester import ALGORITHMS, STRATEGIES, each_algorithm, name_of, stands_for_its_like

import ai3_ops
from ai3_ops import registry
from ai3_ops.checking.cases import CASES, DTYPES, Call, arranged
from ai3_ops.checking.checks import CHECKS
from ai3_ops.checking.values import assert_within
from ai3_ops.operations.patterns import SPARSE

# Where a check may have nothing to do, and pass nowhere: by its reason, of which algorithms that holds.
NOTHING_TO_DO = {
    "ATen's own kernels differ in the signs of zeros": lambda a: not registry.OPERATIONS[a.operation].signed_zeros,
    "PyTorch has no function of its pattern": lambda a: a.operation == "attention" and a.name in (*SPARSE, "linformer"),
    "applies no scale, shift or relu to its input": lambda a: not a.prologue,
    "calls PyTorch's operators, which allocate": lambda a: a.vendor,
    "cuDNN refuses outputs in other strides": lambda a: a.device == "cuda",
    "cuDNN's method hides what is not finite": lambda a: (a.name, a.device) == ("winograd_nonfused", "cuda"),
    "cuDNN's transforms add zeros of both signs": lambda a: a.device == "cuda" and a.accuracy == "bounded",
    "converts what it reads to nhwc": lambda a: a.layout == "nhwc",
    "fuses no residual and no activation": lambda a: not a.epilogue,
    "has no backward operator: PyTorch computes its gradients": lambda a: a.backward == "aten",
    "has no operator that writes into a given output": lambda a: a.operation == "attention",
    "is a rule": lambda a: a.rule,
    "keeps no packed weights": lambda a: not a.packs,
    "runs on CUDA": lambda a: a.device == "cuda",
    "refuses none of the operation's cases": lambda a: (
        not any(o == a.operation and fnmatch.fnmatch(a.name, name) for o, name in MUST_SUPPORT)
    ),
}
BY_WORDS = {
    "does not compute in": lambda a: (
        a.vendor or a.device == "cuda"
    ),  # a processor may lack a dtype, cuDNN a bias in 16 bits
    "its operators for packed weights convert to": lambda a: a.layout != "any",
    "needs float32 and": lambda a: not {"float32", "bfloat16" if a.device == "cpu" else "float16"} <= {*a.dtypes},
}


# Checks of an operation's rules in Python.
OF_RULES = ("opcheck", "backward_opcheck", "transforms", "gradients", "vmap", "out")
# Of algorithms that only choose another one, those of conv2d stand for the others in these.
LONG = ("backward_opcheck", "transforms", "sizes", "out", "fused")


def _pairs():
    for info, check in itertools.product(ALGORITHMS, CHECKS):
        long = info.rule and info.operation != "conv2d" and check in LONG
        own = check == "gradients" and info.backward == "own"  # kernels of its own
        again = check in OF_RULES and not (
            stands_for_its_like(info) or own or (info.name == "default" and check == "opcheck")
        )
        # Attention's backward operators share their rules; the presets of block_sparse have the longest lists of operands.
        long |= (
            check == "backward_opcheck" and info.operation == "attention" and info.name not in ("flash", "longformer")
        )
        yield pytest.param(info, check, id=f"{name_of(info)}-{check}", marks=[pytest.mark.full] * (long or again))


@pytest.mark.parametrize(("info", "check"), [*_pairs()])
def test_algorithm(info, check):
    tally = CHECKS[check](info)
    if not tally.passed:
        assert tally.skipped, "did nothing, and says not why"
    for reason in tally.skipped if not tally.passed else ():
        holds = [f for words, f in BY_WORDS.items() if reason.startswith(words)]
        known = NOTHING_TO_DO.get(reason, holds[0] if holds else None)
        assert known is not None, f"passed nowhere: {reason}"
        assert known(info), f"passed nowhere, and it is not so: {reason}"


@pytest.mark.hypothesis  # which the plugin says of tests that are decorated themselves
@pytest.mark.parametrize("operation", sorted({a.operation for a in ALGORITHMS}))
def test_shapes_that_nobody_thought_of(operation):
    infos = [a for a in ALGORITHMS if a.operation == operation]
    torch.set_num_threads(2)

    @hypothesis.given(STRATEGIES[operation], st.sampled_from(["integers", "normal"]), st.sampled_from(list(DTYPES)))
    def agree(case, fill, dtype):
        for info in infos:
            call = Call(info, case, DTYPES[dtype], fill)
            if dtype in info.dtypes and call.supported():
                assert_within(call, call.run())

    agree()


# What DESIGN §4 says an algorithm must support; what is not named here must support everything.
def _winograd(p):
    return all(
        p[n] == v for n, v in {"kernel_height": 3, "kernel_width": 3, "stride_h": 1, "stride_w": 1}.items()
    ) and (p["dilation_h"] == p["dilation_w"] == 1)


def _of_one_length(p):
    return p["queries"] == p["keys"] and not p["is_causal"]


def _of_a_line(p):
    return p["kernel_length"] in (3, 7) and p["stride"] == p["dilation"] == 1


def _patches_follow(p):
    kernel, stride, padding, dilation = zip(
        *(
            (p[f"kernel_{n}"], p[f"stride_{n[0]}"], p[f"pad_{n[0]}"], p[f"dilation_{n[0]}"])
            for n in ("height", "width")
        ),
        strict=True,
    )
    return kernel == stride and not any(padding) and all(d == 1 for d in dilation)


MUST_SUPPORT = {
    ("conv1d", "winograd"): _of_a_line,
    ("conv1d", "depthwise"): lambda p: p["groups"] == p["in_channels"],
    ("conv1d", "patch_gemm"): lambda p: p["kernel_length"] == p["stride"] and p["padding"] == 0 and p["dilation"] == 1,
    ("conv2d", "patch_gemm"): _patches_follow,
    ("conv2d", "winograd*"): _winograd,
    ("conv2d", "depthwise"): lambda p: p["groups"] == p["in_channels"],
    ("attention", "block_sparse"): lambda p: not p["is_causal"],
    ("attention", "longformer"): lambda p: _of_one_length(p) and not p["has_mask"],
    ("attention", "bigbird"): _of_one_length,
    ("attention", "linformer"): lambda p: not p["is_causal"] and not p["has_mask"],
}


@each_algorithm
def test_nothing_more_is_refused(info):
    rules = [f for (o, name), f in MUST_SUPPORT.items() if o == info.operation and fnmatch.fnmatch(info.name, name)]
    one_dtype = info.name.endswith("_bf16")  # computes in bfloat16 what float32 tensors hold
    for dtype in info.dtypes if info.vendor or info.device == "cuda" or one_dtype else DTYPES:
        for case in CASES[info.operation]:
            if not case.is_of(dtype):
                continue
            tensors = Call(info, case, DTYPES[dtype]).tensors
            call = arranged(info.operation, tensors, case.arguments)
            sizes = registry.OPERATIONS[info.operation].problem("test", *call).sizes
            own = registry.OPERATIONS[info.operation].own_operands(info.name, call)
            ok, reason = ai3_ops.supports(info.operation, info.name, *call, **own)
            if info.vendor and not ok and dtype in reason:  # a vendor's may lack a dtype on this processor
                continue
            if info.device == "cuda" and "cuDNN" in reason:
                continue
            assert ok or not all(rule(sizes) for rule in rules), f"{case} in {dtype}: {reason}"


def test_registry_lists_what_the_dispatcher_has():
    for info in ALGORITHMS:
        assert info.operator.name() == f"ai3::{info.operation}_{info.name}"
        assert info in ai3_ops.algorithms(info.operation, info.device)
        assert info.accuracy in ("exact", "bounded", "approximate")
        assert (info.accuracy == "bounded") == (info.error_bound > 0 and info.accuracy != "approximate")
        assert set(info.dtypes) <= set(DTYPES)


def test_unknown_names_are_answered_with_near_ones():
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    for call in (ai3_ops.supports, ai3_ops.resolve):
        with pytest.raises(ValueError, match="no operation 'conv2'; did you mean 'conv2d'"):
            call("conv2", "direct", x, w)
        with pytest.raises(ValueError, match=r"no conv2d algorithm 'dirct'; did you mean .*'direct'"):
            call("conv2d", "dirct", x, w)
    with pytest.raises(ValueError, match="no operation 'convd2'"):
        ai3_ops.algorithms("convd2")
    with pytest.raises(ValueError, match="no device 'mps'"):
        ai3_ops.algorithms(device="mps")
    with pytest.raises(TypeError, match="conv2d has no size"):
        registry.supports_sizes("conv2d", "direct", "cpu", torch.float32, kernel=3)


def test_supports_takes_real_meta_and_fake_tensors():
    x, w = torch.ones(1, 4, 6, 6), torch.ones(2, 4, 3, 3)
    fake = torch._subclasses.FakeTensorMode()
    for convert in (lambda t: t, lambda t: t.to("meta"), fake.from_tensor):
        assert ai3_ops.supports("conv2d", "direct", convert(x), convert(w), padding=1) == (True, "")
        ok, reason = ai3_ops.supports("conv2d", "direct", convert(x[:, :3]), convert(w))
        assert not ok
        assert "needs input of 4 channels" in reason
    assert registry.supports_sizes("conv2d", "direct", "cpu", torch.float32, kernel_height=3, kernel_width=3) == (
        True,
        "",
    )
    assert not registry.supports_sizes("conv2d", "direct", "cpu", torch.int32)[0]
    assert not registry.supports_sizes("conv2d", "direct", "mps", torch.float32)[0]
    for ask in (registry.choice_sizes, registry.workspace_sizes, registry.packed_bytes_sizes):
        with pytest.raises(RuntimeError, match="ai3::conv2d_direct: has no kernel for mps tensors"):
            ask("conv2d", "direct", "mps", torch.float32)
    assert ai3_ops.resolve("conv2d", "direct", x, w) == "direct"


def test_patches_of_an_unknown_kernel_may_follow():
    ask = registry.supports_sizes
    assert ask("conv2d", "patch_gemm", "cpu", torch.float32, dilation_h=2, dilation_w=2)[0]
    known = {"kernel_height": 2, "kernel_width": 2, "stride_h": 2, "stride_w": 2}
    assert ask("conv2d", "patch_gemm", "cpu", torch.float32, **known)[0]
    assert not ask("conv2d", "patch_gemm", "cpu", torch.float32, **known, dilation_h=2)[0]
    words = ask("conv1d", "winograd", "cpu", torch.float32, kernel_length=5, stride=1, dilation=1)[1]
    assert words.startswith("needs a kernel of 3 or 7 taps"), words
