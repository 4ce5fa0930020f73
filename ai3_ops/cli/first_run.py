"""What a GPU shows at first: `python -m ai3_ops doctor --first-run`.

Each step is a process of its own, so that one that breaks the GPU's context takes nothing along, and prints one line and one
object of JSON as it ends; they run side by side, but for the times, which come last. `python -m ai3_ops.cli.first_run STEP` runs
a single one, in this process.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ai3_ops
from ai3_ops import _library, registry
from ai3_ops.checking import values
from ai3_ops.checking.cases import DTYPES, Call, calls, few_calls
from ai3_ops.cli import bench, models
from ai3_ops.measuring import gpu

if TYPE_CHECKING:
    from rich.console import Console

Facts = dict[str, Any]
# The convolutions of the ai3 paper (arXiv 2410.08300): channels in and out, and the size of 10 images; 3x3, no padding.
PAPER = ((3, 224), (64, 112), (256, 28), (512, 14))
PAPER_METHODS = "implicit_gemm", "implicit_precomp_gemm"


@dataclass(frozen=True)
class Step:
    """`run` raises AssertionError for what is wrong, and returns what was found; its first value is for the line."""

    run: Callable[[], Facts]
    about: str
    seconds: int  # after which it has failed
    environment: dict[str, str]
    sanitizer: str


STEPS: dict[str, Step] = {}


def step(about: str, seconds: int = 300, **environment: str) -> Callable[[Callable[[], Facts]], Callable[[], Facts]]:
    """Adds a step under the function's name."""

    def add(run: Callable[[], Facts]) -> Callable[[], Facts]:
        STEPS[run.__name__] = Step(run, about, seconds, environment, "")
        return run

    return add


def _algorithms(operation: str | None = None) -> list[registry.AlgorithmInfo]:
    return [a for a in ai3_ops.algorithms(operation, "cuda") if not a.python]


def _convolutions() -> list[str]:
    """Those by cuDNN: what it names, and neither our kernels nor rules."""
    own = "direct", "smm", "im2col", "kn2row", "depthwise", "patch_gemm", "winograd_f2", "winograd_f4"
    return [a.name for a in _algorithms("conv2d") if a.name not in own and not a.rule]


@step("what is here")
def versions() -> Facts:
    """GPU, driver, libraries, and what the CUDA part was built for."""
    properties = torch.cuda.get_device_properties(0)
    smi = shutil.which("nvidia-smi")
    ask = [smi, "--query-gpu=driver_version", "--format=csv,noheader"] if smi else ["true"]
    driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "found": f"{properties.name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "gpus": torch.cuda.device_count(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "built for": _library.BUILD.get("cuda_architectures", ""),
    }


@step("relu in four types, each launch waited for", CUDA_LAUNCH_BLOCKING="1")
def relu() -> Facts:
    """The smallest kernel, launched and waited for."""
    for dtype in DTYPES.values():
        x = torch.arange(-500, 500, device="cuda").to(dtype)
        assert torch.equal(torch.ops.ai3.relu_direct(x), x.clamp_min(0)), dtype
    return {"found": f"{len(DTYPES)} types"}


@step("every kernel's smallest case of whole numbers", CUDA_LAUNCH_BLOCKING="1")
def kernels() -> Facts:
    """Of every algorithm and type, exact where the algorithm is."""
    each = (few_calls(info, 1, dtype, fill="integers") for info in _algorithms() for dtype in info.dtypes)
    return {"found": f"{_checked(itertools.chain.from_iterable(each))} calls", "algorithms": len(_algorithms())}


def _checked(given: Iterable[Call]) -> int:
    """How many calls there are; AssertionError with those that are wrong."""
    ran, wrong = 0, []
    for call in given:
        try:
            values.assert_within(call, call.run())
            ran += 1
        except (AssertionError, RuntimeError) as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {ran + len(wrong)}: " + "; ".join(wrong[:40])
    return ran


for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
    STEPS[tool] = Step(kernels, f"the same under compute-sanitizer's {tool}", 600, {}, tool)


@step("strict float32 and TF32 of products")
def products() -> Facts:
    """1 + 2^-12 is 1 in TF32: a strict product keeps it, forward and in the gradients, whatever PyTorch's switch says."""
    odd = 1 + 2.0**-12
    x, w = (torch.full(shape, odd, device="cuda", requires_grad=True) for shape in ((64, 64), (32, 64)))
    found = {}
    for name, allowed in itertools.product(("linear_gemm", "linear_cublaslt", "conv2d_im2col"), (False, True)):
        exact = x.double() @ w.double().t()
        operator = getattr(torch.ops.ai3, name)
        if name.startswith("linear"):
            y = operator(x, w, allow_tf32=allowed)
        else:
            y = operator(x[:, :, None, None], w[:, :, None, None], allow_tf32=allowed)[:, :, 0, 0]
        gradients = torch.autograd.grad(y, (x, w), torch.full_like(y, odd))
        wanted = torch.autograd.grad(exact, (x, w), torch.full_like(exact, odd))
        errors = [
            ((a - b).abs().max() / b.abs().max()).item() for a, b in zip((y, *gradients), (exact, *wanted), strict=True)
        ]
        found[f"{name}, {'TF32' if allowed else 'strict'}"] = errors
        assert max(errors) < (1e-2 if allowed else 1e-6), (name, allowed, errors)
    rounded = max(found["linear_gemm, TF32"]) > 1e-5
    return {"found": f"TF32 rounds: {rounded}", **found}


@step("cuDNN's methods, asked and run", 600)
def cudnn() -> Facts:
    """Every method, type, layout, group count, dilation, with and without bias: refused with words, or right."""
    ran, refused, wrong = Counter[str](), {}, []
    for name, (key, dtype), layout in itertools.product(
        _convolutions(), DTYPES.items(), (torch.contiguous_format, torch.channels_last)
    ):
        for groups, dilation, stride, bias in itertools.product((1, 4, 16), (1, 2), (1, 2), (False, True)):
            x = torch.randint(-2, 3, (2, 16, 15, 17), device="cuda").to(dtype).to(memory_format=layout)
            w = torch.randint(-2, 3, (32, 16 // groups, 3, 3), device="cuda").to(dtype)
            b = torch.randint(-2, 3, (32,), device="cuda").to(dtype) if bias else None
            call = (x, w, b, stride, 1, dilation, groups)
            yes, reason = ai3_ops.supports("conv2d", name, *call)
            what = f"{name} {key} {layout} groups {groups} dilation {dilation} stride {stride} bias {bias}"
            if not yes:
                refused[what] = reason
                continue
            try:
                y = getattr(torch.ops.ai3, f"conv2d_{name}")(*call)
            except RuntimeError as error:
                wrong.append(f"{what}: {error}")
                continue
            exact = F.conv2d(x.double(), w.double(), None if b is None else b.double(), stride, 1, dilation, groups)
            bound = 1e-2 if any(part in name for part in ("fft", "winograd")) else 0
            if not ((y.double() - exact).abs().max() / exact.abs().max() <= bound):
                wrong.append(f"{what}: off by {(y.double() - exact).abs().max().item()}")
            ran[f"{name} {key}"] += 1
    for name, (channels, size), dtype in itertools.product(PAPER_METHODS, PAPER, DTYPES.values()):
        x = torch.randn(10, channels, size, size, device="cuda", dtype=dtype)
        w = torch.randn(channels, channels, 3, 3, device="cuda", dtype=dtype)
        yes, reason = ai3_ops.supports("conv2d", name, x, w)
        if not yes:
            wrong.append(f"the paper's layer of {channels} channels, {dtype}: {name}: {reason}")
    assert not wrong, f"{len(wrong)}: " + "; ".join(wrong[:40])
    return {"found": f"{sum(ran.values())} right, {len(refused)} refused", "right": ran, "refused": refused}


def _layer() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(2, 16, 14, 14, device="cuda"),
        torch.randn(32, 16, 3, 3, device="cuda"),
        torch.randn(32, device="cuda"),
    )


def _conv2d_names() -> list[str]:
    call = (*_layer(), 1, 1)
    found = [a.name for a in _algorithms("conv2d") if not a.rule and ai3_ops.supports("conv2d", a.name, *call)[0]]
    assert found, "no algorithm supports a plain 3x3 convolution"
    return found


@step("side stream, eight threads, another GPU, CUDA graphs")
def streams() -> Facts:
    """Every algorithm of conv2d: the same bits wherever it is called."""
    x, w, b = _layer()
    differ = []
    for name in _conv2d_names():
        op = getattr(torch.ops.ai3, f"conv2d_{name}")
        expected = op(x, w, b, 1, 1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = op(x, w, b, 1, 1)
        side.synchronize()
        if not torch.equal(other, expected):
            differ.append(f"{name} on a side stream")
        outputs: list[Tensor] = []

        def call(op: Callable[..., Tensor] = op, outputs: list[Tensor] = outputs) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    y = op(x, w, b, 1, 1)
                torch.cuda.current_stream().synchronize()
            outputs.append(y)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(outputs) != 8 or not all(torch.equal(y, expected) for y in outputs):
            differ.append(f"{name} in eight threads")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                y = op(x, w, b, 1, 1)
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(y, expected):
                differ.append(f"{name} in a CUDA graph")
        except RuntimeError as error:
            differ.append(f"{name} in a CUDA graph: {error}")
        if torch.cuda.device_count() > 1:
            y = op(*(t.to("cuda:1") for t in (x, w, b)), 1, 1)
            if not torch.equal(y.cpu(), expected.cpu()):
                differ.append(f"{name} on cuda:1")
    assert not differ, "; ".join(differ)
    return {"found": f"{len(_conv2d_names())} algorithms", "gpus": torch.cuda.device_count()}


@step("twenty times the same bits; gradients against float64")
def repeats() -> Facts:
    """Of all that call themselves deterministic."""
    differ = []
    for info in _algorithms():
        for call in (
            few_calls(info, 1, "float32", large=True) if "float32" in info.dtypes and info.deterministic else ()
        ):
            tensors = call.tensors
            first = call.operator(*tensors)
            if not all(torch.equal(call.operator(*tensors), first) for _ in range(20)):
                differ.append(str(call))
    errors = {}
    x, w, b = _layer()
    for name in _conv2d_names():
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        y = getattr(torch.ops.ai3, f"conv2d_{name}")(*given, 1, 1)
        wanted = [t.double().detach().requires_grad_() for t in given]
        exact = F.conv2d(wanted[0], wanted[1], wanted[2], 1, 1)
        ours = torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
        again = torch.autograd.grad(y, given, torch.ones_like(y))
        if not all(torch.equal(one, other) for one, other in zip(ours, again, strict=True)):
            differ.append(f"gradients of conv2d_{name}")
        theirs = torch.autograd.grad(exact, wanted, torch.ones_like(exact))
        errors[name] = max(((a - e).abs().max() / e.abs().max()).item() for a, e in zip(ours, theirs, strict=True))
    assert not differ, "; ".join(differ)
    assert max(errors.values()) < 1e-5, errors
    return {"found": f"largest error of a gradient {max(errors.values()):.1e}", "errors": errors}


@step("every algorithm's test cases in float32", 600)
def cases() -> Facts:
    """Random data, all cases that an algorithm supports."""
    each = (calls(info, "normal", ("float32",)) for info in _algorithms())
    return {"found": f"{_checked(itertools.chain.from_iterable(each))} calls"}


@step("the paper's networks against float64", 600)
def networks() -> Facts:
    """Swapped to each of the paper's methods, to our own products and transforms; what one refuses stays PyTorch's."""
    if importlib.util.find_spec("torchvision") is None:
        return {"found": "left out: needs torchvision"}
    found: dict[str, dict[str, float]] = {}
    warnings.simplefilter("ignore")  # of layers that an algorithm leaves to PyTorch
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for name in bench.MODELS:
        named = models.named(name, batch=2)
        models.settle(named.model, named.inputs)
        model, x = named.model.cuda(), named.inputs.cuda()
        with torch.inference_mode():
            exact = model.double()(x.double())
            model.float()
            scale = exact.abs().max()
            found[name] = {"torch": ((model(x) - exact).abs().max() / scale).item()}
            for algorithm in (*PAPER_METHODS, "im2col", "winograd_f4"):
                swapped = ai3_ops.swap(model, {"conv2d": algorithm}, x)
                found[name][algorithm] = ((swapped(x) - exact).abs().max() / scale).item()
    worst = max(max(errors.values()) for errors in found.values())
    assert worst < 1e-2, found
    return {"found": f"{len(found)} networks, largest error {worst:.1e}", "errors": found}


def microseconds(functions: Sequence[gpu.Function], turns: int = 15, repeats: int = 10) -> list[float]:
    """Medians of each on the GPU, by events, in turns."""
    return [s * 1e6 for s in gpu.in_turns(functions, lambda call: gpu.event_seconds(call, repeats), turns)]


@step("only now time: the paper's layers over PyTorch's convolution, and what a call costs", 600)
@torch.inference_mode()
def times() -> Facts:
    """Ratios of medians, in turns, strict float32; overhead is the host's, of a call whose kernel is shorter than that."""
    found: dict[str, Any] = {}
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False
    for channels, size in PAPER:
        x = torch.randn(10, channels, size, size, device="cuda")
        w = torch.randn(channels, channels, 3, 3, device="cuda")
        names = [a.name for a in _algorithms("conv2d") if not a.rule and ai3_ops.supports("conv2d", a.name, x, w)[0]]
        ops = [getattr(torch.ops.ai3, f"conv2d_{name}") for name in names]
        torch_us, *ours = microseconds([functools.partial(op, x, w) for op in (F.conv2d, *ops)])
        found[f"{channels} channels, {size}x{size}"] = {
            "torch_us": round(torch_us, 1),
            **{name: round(us / torch_us, 3) for name, us in zip(names, ours, strict=True)},
        }
    x = torch.zeros(8, device="cuda")

    def host(function: Callable[[], Any]) -> float:
        for _ in range(100):
            function()
        best = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                function()
            best.append((time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()
        return statistics.median(best)

    overhead = host(lambda: torch.ops.ai3.relu_direct(x)) - host(lambda: torch.relu(x))
    return {"found": f"a call costs {overhead:+.1f} us over ATen's", "overhead_us": overhead, **found}


def sanitizer() -> str:
    """The path of compute-sanitizer; "" where there is none."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else "")


def _run(name: str) -> Facts:
    """One step in a process of its own."""
    s = STEPS[name]
    command = [sys.executable, "-m", "ai3_ops.cli.first_run", name]
    if s.sanitizer:
        if not (found := sanitizer()):
            return {"step": name, "status": "skipped", "found": "needs compute-sanitizer, of the CUDA toolkit"}
        command = [found, "--tool", s.sanitizer, "--error-exitcode", "9", "--print-limit", "5", *command]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=s.seconds,
            env={**os.environ, **s.environment},
        )
    except subprocess.TimeoutExpired:
        return {"step": name, "status": "FAILED", "found": f"not done after {s.seconds} s", "seconds": s.seconds}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    facts: Facts = json.loads(lines[-1]) if lines else {"found": "it died"}
    failed = done.returncode != 0
    if failed and facts.get("status") != "FAILED":
        facts["output"] = (done.stdout + done.stderr)[-4000:]
    seconds = round(time.perf_counter() - start, 1)
    return {"step": name, **facts, "status": "FAILED" if failed else "passed", "seconds": seconds}


def main(console: Console) -> int:
    """All steps, those before the times side by side; 1 when one failed."""
    if not torch.cuda.is_available():
        console.print("a first run needs a GPU, and torch finds none", style="yellow")
        return 1
    results = []

    def tell(facts: Facts) -> None:
        results.append(facts)
        words = f"{facts['step']:<10} {facts['status']:<7} {facts.get('seconds', 0):6.1f} s  "
        style = {"FAILED": "red", "skipped": "yellow"}.get(facts["status"], "")
        text = words + STEPS[facts["step"]].about + ": " + str(facts.get("found", ""))
        console.print(text[:400], style=style, markup=False, highlight=False)
        console.print(json.dumps(facts), markup=False, highlight=False, soft_wrap=True)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_run, name) for name in STEPS if name != "times"]):
            tell(done.result())
    tell(_run("times"))
    failed = [facts["step"] for facts in results if facts["status"] == "FAILED"]
    if failed:
        console.print(f"failed: {', '.join(failed)}; report the lines of JSON", style="red", markup=False)
    else:
        console.print(
            "everything passed; report the lines of JSON: they are the first figures of this GPU", style="green"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    facts: Facts
    try:
        facts = {**STEPS[sys.argv[1]].run(), "status": "passed"}
    except AssertionError as error:
        facts = {"found": str(error), "status": "FAILED"}
    print(json.dumps(facts))
    sys.exit(facts["status"] == "FAILED")
