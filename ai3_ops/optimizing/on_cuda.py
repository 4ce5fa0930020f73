"""Networks on a GPU: rewritten as on the CPU, computed by the fastest of PyTorch's, cuDNN's fused and our kernels, and replayed.

A call of a small network takes longer to launch than to compute: all launches of one are captured into a CUDA graph for each set
of input sizes, which launches them at once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ai3_ops import _torch, registry
from ai3_ops.explaining.report import Optimization, Step
from ai3_ops.graph import steps
from ai3_ops.graph.network import Network
from ai3_ops.measuring import gpu
from ai3_ops.operations.activations import ACTIVATIONS
from ai3_ops.operations.conv2d import Conv2dCall
from ai3_ops.optimizing import choose
from ai3_ops.programs.lower import module_of
from ai3_ops.registry import AlgorithmInfo
from ai3_ops.tuning.settings import TOLERANCE

# Sets of sizes with a graph of their own; others run step by step, since a capture takes longer than a call.
REPLAYS = 8
FUSED = "torch, fused"  # cuDNN adds bias and residual and takes the ReLU, in one kernel where it has one
_FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


def is_on_cuda(values: Sequence[Any]) -> bool:
    """Whether one of the inputs lies on a GPU."""
    return any(isinstance(x, Tensor) and x.is_cuda for x in values)


# What runs a plan ------------------------------------------------------------------------------------------------------
@dataclass
class _Replay:
    """A captured call: what its graph reads and writes, and an event after the last one."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    outputs: Any
    done: torch.cuda.Event
    device: torch.device

    def __call__(self, given: Sequence[Any]) -> Any:
        """The outputs, in memory of their own."""
        with torch.cuda.device(self.device):  # whose current stream is meant
            self.done.wait()  # of a call on another stream
            for held, x in zip(self.inputs, given, strict=True):
                if isinstance(held, Tensor):
                    held.copy_(x)
            self.graph.replay()
            several = isinstance(self.outputs, (tuple, list))
            outputs = [y.clone() if isinstance(y, Tensor) else y for y in (self.outputs if several else [self.outputs])]
            self.done.record()
        return tuple(outputs) if several else outputs[0]


class Replayed(nn.Module):
    """A body whose calls are captured, for each set of sizes once, and then replayed; on the CPU, and in captures, it just runs.

    A CUDA graph keeps the kernels that were chosen while it was captured: PyTorch's switches of precision and determinism are
    part of what it is found by. Calls from several threads wait for each other. `deterministic`: no engine is chosen by its time.
    """

    def __init__(self, body: nn.Module, replays: bool, deterministic: bool = False) -> None:
        super().__init__()
        self.body, self.replays, self.deterministic = body, replays, deterministic
        self.reason = ""  # why the first sizes that could not be captured could not
        self._forget()

    def _forget(self) -> None:
        self._replays: dict[Any, _Replay | None] = {}  # None: cannot be captured
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_replays", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def forward(self, *given: Any) -> Any:
        """The body's outputs."""
        if not self.replays or torch.compiler.is_compiling() or not is_on_cuda(given):
            return self.body(*given)
        # What lies on the CPU is read when a kernel is launched, not when it runs: a graph would keep the value.
        if (
            any(isinstance(x, Tensor) and not is_on_cuda([x]) for x in given)
            or torch.cuda.is_current_stream_capturing()
        ):
            return self.body(*given)
        key = _key(given)
        with self._lock:
            replay = self._replays.get(key)
            if replay is None and key not in self._replays and len(self._replays) < REPLAYS:
                try:
                    replay = captured(self.body, given, self.deterministic)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # it waits for the GPU, or reads what lies on the CPU
                    output = self.body(*given)  # or these inputs do not fit, which this says
                    self._replays[key], self.reason = None, self.reason or str(error).splitlines()[0]
                    return output
                self._replays[key] = replay
            if replay is not None:
                return replay(given)
        return self.body(*given)


def _key(given: Sequence[Any]) -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    switches = (
        Conv2dCall.allow_tf32(),
        matmul.fp32_precision,
        str(matmul.allow_fp16_reduced_precision_reduction),
        str(matmul.allow_bf16_reduced_precision_reduction),
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    return *switches, *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in given)


_capturing = threading.RLock()  # PyTorch has one capture at a time in a process


def captured(body: Callable[..., Any], given: Sequence[Any], deterministic: bool) -> _Replay:
    """A call of a body as a CUDA graph; RuntimeError where it cannot be one."""
    device = next(x.device for x in given if isinstance(x, Tensor) and x.is_cuda)
    # Not in inference mode: its tensors could not be written to by calls outside of it.
    with (
        _capturing,
        torch.cuda.device(device),
        torch.inference_mode(False),
        torch.no_grad(),
        _benchmarking(deterministic),
    ):
        inputs = [x.clone() if isinstance(x, Tensor) else x for x in given]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # handles, packs and cuDNN's choices are made before
            for _ in range(2):
                body(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        _torch.clear_cublas_workspaces()  # the graph gets one of its own
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = body(*inputs)
        finally:
            _torch.clear_cublas_workspaces()
        done = torch.cuda.Event()
        done.record()
    return _Replay(graph, inputs, outputs, done, device)


@contextlib.contextmanager
def _benchmarking(deterministic: bool = False) -> Iterator[None]:
    """CuDNN measures its engines: what it chooses is kept by the graph. Not where results must be the same in every run."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = not (deterministic or cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        cudnn.benchmark = before


# Steps that only a GPU has ---------------------------------------------------------------------------------------------
def conv2d_fused(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    *,
    residual: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """relu(conv2d(x) + bias + residual) by cuDNN's fused operators, which read PyTorch's switches."""
    window = [[*pair] for pair in (stride, padding, dilation)]
    if residual is None:
        return torch.ops.aten.cudnn_convolution_relu(input, weight, bias, *window, groups)
    return torch.ops.aten.cudnn_convolution_add_relu(input, weight, residual, 1.0, bias, *window, groups)


def _allows_tf32(input: Tensor) -> bool:
    """PyTorch's switch as it is in the call: graphs are kept by it."""
    return input.dtype == torch.float32 and Conv2dCall.allow_tf32()


def conv2d_by(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    *,
    algorithm: str,
    weight_size: Sequence[int] | None = None,
    activation: str = "none",
    parameter: Tensor | float | None = None,
    residual: Tensor | None = None,
    fuses: bool = False,
) -> Tensor:
    """activation(conv2d(x) + bias + residual) by an algorithm, which `fuses` the rest or not.

    `weight` is what it has packed where `weight_size` is given.
    """
    sizes = [] if weight_size is None else [[*weight_size]]
    window = [[*pair] for pair in (stride, padding, dilation)]
    form = "packed" if sizes else "fused" if fuses else ""
    operator = getattr(torch.ops.ai3, f"_conv2d_{algorithm}_{form}" if form else f"conv2d_{algorithm}").default
    fused = {"residual": residual, "activation": activation} if fuses else {}
    output = operator(input, weight, *sizes, bias, *window, groups, allow_tf32=_allows_tf32(input), **fused)
    if fuses:
        return output
    return ACTIVATIONS[activation](output if residual is None else output + residual, parameter)


# Choosing --------------------------------------------------------------------------------------------------------------
@dataclass
class _Way:
    """How a convolution is computed: the step, its positional arguments, and those by name."""

    name: str
    target: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def graph_seconds(call: gpu.Function, deterministic: bool = False, repeats: int = 8) -> float:
    """Of one call on the GPU, without what it takes to launch: several are captured and replayed; inf where none can be."""
    try:
        with _capturing, _benchmarking(deterministic):
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                for _ in range(repeats):
                    call()
    except RuntimeError:
        return math.inf
    times = [gpu.event_seconds(graph.replay) / repeats for _ in range(4)]
    return statistics.median(times[1:])


def _fits(info: AlgorithmInfo, settings: Any) -> bool:
    """Whether `auto` may choose an algorithm at all."""
    limit = TOLERANCE if settings.tolerance is None else settings.tolerance
    accurate = info.accuracy == "exact" or (info.accuracy == "bounded" and info.error_bound <= limit)
    return not (info.rule or info.python) and accurate and (info.deterministic or not settings.deterministic)


class Chooser:
    """Gives each convolution of a network the fastest way, by what selectors allow; equal ones are measured once."""

    def __init__(
        self, settings: Any, deadline: float, seconds: Callable[[gpu.Function, bool], float] = graph_seconds
    ) -> None:
        self.settings, self.deadline, self.seconds = settings, deadline, seconds
        self.known: dict[Any, str] = {}
        self.names: dict[fx.Node, tuple[str, str]] = {}  # by the step: who computes it, and why

    def choose(self, network: Network, layout: str) -> None:
        """Rewrites the network's convolutions, on images in a layout."""
        for node in network.calls(steps.conv2d):
            a = choose.arguments(node)
            if a.get("scale") is not None or a.get("input_relu") or str(a["weight"].target) not in network.constants:
                continue
            asked = node.kwargs.get("algorithm", "default")
            weight = network.value(a["weight"])
            x = torch.empty(node.args[0].meta["shape"], dtype=weight.dtype, device=weight.device)
            x = x.normal_().contiguous(memory_format=_FORMATS[layout])
            ways = {way.name: way for way in self._ways(network, node, a, x, asked)}
            name, why = next(iter(ways)), "" if asked in (choose.AUTO, "default") else "named"
            if asked == choose.AUTO and len(ways) > 1 and self.settings.thorough:
                window = (a["stride"], a["padding"], a["dilation"], a["groups"], a["activation"])
                key = (layout, x.dtype, x.shape, weight.shape, window, a["residual"] is None, a["bias"] is None)
                name = self.known.get(str(key)) or self._fastest(network, ways, x, layout)
                self.known[str(key)] = name
                why = "measured here"
            way = ways[name]
            node.target, node.args, node.kwargs = way.target, way.args, way.kwargs
            self.names[node] = name, why

    def _ways(self, network: Network, node: fx.Node, a: dict[str, Any], x: Tensor, asked: str) -> Iterator[_Way]:
        plain = {k: v for k, v in node.kwargs.items() if k != "algorithm"}
        if asked in (choose.AUTO, "default"):
            yield _Way("torch", steps.conv2d, node.args, plain)
            positional = tuple(a[k] for k in ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))
            if asked == choose.AUTO and a["activation"] == "relu":
                yield _Way(FUSED, conv2d_fused, positional, {"residual": a["residual"]})
        weight, bias = network.value(a["weight"]), network.value(a["bias"])
        window = (a["stride"], a["padding"], a["dilation"], a["groups"])
        tf32 = _allows_tf32(x)
        epilogue = {k: a[k] for k in ("activation", "parameter", "residual")}
        measures = asked == choose.AUTO and self.settings.thorough and self.settings.memory_limit is None
        if not measures and asked in steps.RULES:
            return
        for info in registry.algorithms("conv2d", "cuda"):
            wanted = _fits(info, self.settings) if asked == choose.AUTO else info.name == asked
            if not wanted or info.rule:
                continue
            if not registry.supports("conv2d", info.name, x, weight, bias, *window, allow_tf32=tf32)[0]:
                continue
            adds = epilogue["residual"] is not None or epilogue["activation"] != "none"
            fuses = (
                info.epilogue
                and epilogue["activation"] in ("none", *info.activations)
                and epilogue["parameter"] is None
            )
            named = {"algorithm": info.name, **epilogue, "fuses": adds and fuses}
            pack = getattr(torch.ops.ai3, f"_conv2d_{info.name}_pack", None) if info.packs else None
            if pack is None or not (packed := pack(weight.contiguous(), *map(list, window[:3]), window[3])).numel():
                yield _Way(info.name, conv2d_by, (a["input"], a["weight"], a["bias"], *window), named)
                continue
            with network.graph.inserting_before(node):
                held = network.graph.get_attr(f"{a['weight'].target}_{info.name}")
            network.constants[str(held.target)] = packed
            held.meta.update(a["weight"].meta)
            named["weight_size"] = [*weight.shape]
            yield _Way(info.name, conv2d_by, (a["input"], held, a["bias"], *window), named)
        if asked not in (choose.AUTO, "default"):  # where it does not fit after all
            yield _Way("torch", steps.conv2d, node.args, plain)

    def _fastest(self, network: Network, ways: dict[str, _Way], x: Tensor, layout: str) -> str:
        best, least = next(iter(ways)), math.inf
        for name, way in ways.items():
            if time.monotonic() > self.deadline and math.isfinite(least):
                break

            def value(node: Any, x: Tensor = x) -> Any:
                if not isinstance(node, fx.Node):
                    return node
                if node.op == "get_attr":
                    constant = network.constants[str(node.target)]
                    return constant.contiguous(memory_format=_FORMATS[layout]) if constant.ndim == 4 else constant
                made = torch.empty(node.meta["shape"], dtype=x.dtype, device=x.device)
                return made.normal_().contiguous(memory_format=_FORMATS[layout])

            args = [x, *(fx.node.map_aggregate(v, value) for v in way.args[1:])]
            kwargs = {k: fx.node.map_aggregate(v, value) for k, v in way.kwargs.items()}
            took = self.seconds(functools.partial(way.target, *args, **kwargs), self.settings.deterministic)
            # By less than this the next run may find it the other way round; the first is PyTorch's.
            if took < least * (0.98 if least < math.inf else 1.0):
                best, least = name, took
        return best


def formatted(network: Network, layout: str) -> None:
    """Images and the weights of convolutions in a layout."""
    if layout == "nchw":
        return
    for node in network.graph.nodes:
        if node.op == "get_attr" and any(u.target in (steps.conv2d, conv2d_fused, conv2d_by) for u in node.users):
            value = network.constants[str(node.target)]
            if value.ndim == 4:  # packs have other forms
                network.constants[str(node.target)] = value.contiguous(memory_format=_FORMATS[layout])
    for node in network.inputs:
        if len(node.meta["shape"] or ()) != 4 or not node.users:
            continue
        with network.graph.inserting_after(node):
            moved = network.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": _FORMATS[layout]}
            )
        moved.meta.update(node.meta)
        for user in [user for user in node.users if user is not moved]:
            user.replace_input_with(node, moved)


def layouts_of(network: Network) -> list[str]:
    """Those that may be fastest: tensor cores read channels_last; strict float32 products are in NCHW."""
    found = [network.value(choose.arguments(n)["weight"]) for n in network.calls(steps.conv2d)
             if str(choose.arguments(n)["weight"].target) in network.constants]  # fmt: skip
    if not found:
        return ["nchw"]
    cores = any(w.dtype.itemsize == 2 or _allows_tf32(w) for w in found)
    return ["nchw", "channels_last"] if cores else ["nchw"]


def made(
    network: Network,
    inputs: list[Any],
    settings: Any,
    deadline: float,
    accurate: Callable[[Callable[[list[Any]], Any]], bool],
    report: Optimization,
) -> tuple[Replayed, list[Step]] | None:
    """The fastest of a network in the layouts that may be, and its steps; None where none is accurate."""
    found: list[tuple[float, Replayed, list[Step]]] = []
    layouts = layouts_of(network)
    for layout in layouts if settings.thorough else layouts[-1:]:
        one, chooser = network.copy(), Chooser(settings, deadline)
        chooser.choose(one, layout)
        formatted(one, layout)
        replayed = Replayed(module_of(one, []), settings.cuda_graphs, settings.deterministic)
        if not accurate(lambda given, run=replayed.body: run(*given)):  # type: ignore[misc]
            continue
        (took,) = gpu.in_turns([functools.partial(replayed, *inputs)], gpu.wall_seconds)
        found.append((took, replayed, steps_of(one, chooser)))
    if not found:
        return None
    _, replayed, listed = min(found, key=lambda f: f[0])
    if settings.memory_limit is not None:
        report.notes.append("memory_limit: of kernels on a GPU only PyTorch's are taken, which pack nothing")
    if settings.objective != "latency":
        report.notes.append(f"objective {settings.objective!r}: on a GPU kernels are chosen by their median time")
    if replayed.reason:
        report.notes.append(f"not captured in a CUDA graph, but run step by step: {replayed.reason}")
    elif replayed.replays:
        report.notes.append("captured in a CUDA graph for each set of input sizes, and replayed")
    return replayed, listed


def learned(listed: Sequence[Step], resolved: dict[str, str]) -> dict[str, str]:
    """The choices for further sizes: our algorithms that were measured for "auto" stay; else it is PyTorch's."""
    names = {step.layers[0]: step.algorithm for step in listed if step.operation == "conv2d" and step.layers}
    own = {name: a for name, a in names.items() if a not in ("torch", FUSED)}
    return {name: own.get(name, a) if a == choose.AUTO else a for name, a in resolved.items()}


def steps_of(network: Network, chooser: Chooser) -> list[Step]:
    """For the report."""
    found = []
    for node in network.graph.nodes:
        if node.op != "call_function":
            continue
        convolves = node.target in (conv2d_fused, conv2d_by)
        operation = "conv2d" if convolves else getattr(node.target, "__name__", str(node.target))
        named = node.kwargs.get("algorithm", "torch")
        algorithm, reason = chooser.names.get(node, ("torch", "") if named in steps.RULES else (named, "named"))
        detail = [k for k in ("residual",) if node.kwargs.get(k) is not None]
        if (activation := node.kwargs.get("activation", "none")) != "none" or node.target is conv2d_fused:
            detail.append("relu" if node.target is conv2d_fused else activation)
        shape = node.meta.get("shape") or ()
        found.append(Step([*node.meta["layers"]], operation, algorithm, shape, ", ".join(detail), reason))
    return found
