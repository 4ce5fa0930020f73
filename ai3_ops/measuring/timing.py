"""Times and errors of all ways to compute one layer, taken as they are in a network (docs/tuning.md)."""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops import _library, registry
from ai3_ops.calls.call import Call
from ai3_ops.calls.spec import Spec
from ai3_ops.measuring.gpu import event_seconds
from ai3_ops.problem import Problem
from ai3_ops.registry import operator_named
from ai3_ops.selecting.choice import Algorithm
from ai3_ops.selecting.plan import CHANNELS_LAST, CONTIGUOUS

FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}
HOPELESS = 2.0  # times the fastest in a first, rough look: not measured further
ROUNDS = 7, 21  # of samples, at least and at most
OUTLIER = (
    1.5  # times the fastest sample: a thread that loses its core is late by a turn of the scheduler, not by a fraction
)
_PATIENCE = 4  # times as many rounds as planned, until so many samples are left without outliers
ROUNDS_P99 = 100
SECONDS = 0.25  # of samples for one layer in one layout, between the two
REFERENCE_FLOPS = (
    3e8  # of a float64 reference: of larger convolutions one image and as many output channels as this allows
)
_HELD = 2**26  # bytes of packed weights that are in memory together while their algorithms take turns,
_CLOSEST = 2  # but for so many of the fastest
_WARM_SECONDS = 0.5  # a first call that takes longer is not repeated in the rough look
clock = time.perf_counter


@dataclass(frozen=True)
class Measured:
    """One way to compute a layer, in one layout."""

    time_us: float  # the median; under the objective "p99" the 99th percentile
    noise_us: float  # standard error of that
    error: float  # max|y - y64| / max|y64| on seeded normal numbers, y64 in float64
    workspace_bytes: int  # that a call allocates besides the pack; 0 where PyTorch computes, which does not tell
    packed_bytes: int  # of the packed weight that the layer keeps
    rough: bool = False  # of a first look only: far slower than the fastest
    failed: str = ""  # the error of its call, or, where rough, why it was not called: no times, and nothing chooses it
    shipped: bool = False  # from a table that came with the package, not of this machine

    @property
    def bytes(self) -> int:
        """All memory that this way takes besides tensors that the user sees."""
        return self.workspace_bytes + self.packed_bytes

    @classmethod
    def failure(cls, error: str) -> Measured:
        """Of a call that fails."""
        return cls(math.inf, 0.0, math.inf, 0, 0, failed=error)

    @classmethod
    def untried(cls, why: str, shipped: bool = False) -> Measured:
        """Of what needs no call to be known as hopeless."""
        return cls(math.inf, 0.0, math.inf, 0, 0, rough=True, shipped=shipped, failed=why)

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON, which has no infinity."""
        if self.failed:
            return {"failed": self.failed} | ({"rough": True} if self.rough else {})
        return {k: v for k, v in asdict(self).items() if k not in ("failed", "shipped") or v}


@dataclass(frozen=True)
class Layer:
    """A layer as measurements see it: layers that are equal here share them."""

    operation: str
    arguments: tuple[Any, ...]  # the operator's; tensors as Specs with strides of the memory format's order
    parameters: tuple[bool, ...]  # which of the arguments are nn.Parameters, whose packs are kept
    in_place: bool

    @property
    def layouts(self) -> tuple[str, ...]:
        """The memory formats that its input may have; one, as the model had it, where it is not four-dimensional."""
        return tuple(FORMATS) if len(self.arguments[0].shape) == 4 else (CONTIGUOUS,)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of its tensors."""
        return [a.shape for a in self.arguments if isinstance(a, Spec)]

    @property
    def dtype(self) -> torch.dtype:
        """Of its input."""
        return self.arguments[0].dtype

    @property
    def device(self) -> str:
        """Where its input is."""
        return self.arguments[0].device

    def __str__(self) -> str:
        numbers = [a for a in self.arguments if not isinstance(a, Spec)]
        return f"{self.operation} {' '.join('x'.join(map(str, s)) for s in self.shapes)} {numbers}"

    def key(self) -> dict[str, Any]:
        """All of it as JSON."""
        arguments = [
            {"shape": list(a.shape), "dtype": str(a.dtype), "device": a.device} if isinstance(a, Spec) else repr(a)
            for a in self.arguments
        ]
        return {
            "operation": self.operation, "arguments": arguments, "parameters": list(self.parameters),
            "in_place": self.in_place,
        }  # fmt: skip

    @property
    def work(self) -> float:
        """How long it may take, to put the largest first: multiplications, and numbers moved."""
        rules = registry.OPERATIONS[self.operation]
        moved = sum(map(math.prod, self.shapes))
        if rules.flops is None:
            return moved
        shapes = [a.shape if isinstance(a, Spec) else a for a in self.arguments]
        return rules.flops(*shapes, out_shape=self.problem(CONTIGUOUS).shape) / 20 + moved

    def meta(self, layout: str) -> tuple[Any, ...]:
        """The arguments with tensors on the meta device; four-dimensional ones, the weight too, in the layout."""
        return tuple(
            torch.empty(a.shape, dtype=a.dtype, device="meta", memory_format=_format(a.shape, layout))
            if isinstance(a, Spec)
            else a
            for a in self.arguments
        )

    def problem(self, layout: str) -> Problem:
        """What the registry is asked about."""
        call = Call.by_name[self.operation]()
        return call.problem(*self.meta(layout))._replace(device=self.device)

    def default(self, layout: str) -> str:
        """What `default` runs; "torch" where it leaves the layer to PyTorch."""
        if self.in_place or Call.by_name[self.operation].returns_view:  # as swap does
            return "torch"
        call = Call.by_name[self.operation]()
        on_cuda = self.device.startswith("cuda") and registry.preferred.get(self.operation) is None
        if on_cuda and not call.measured(self.meta(layout)):
            return "torch"
        p = self.problem(layout)
        try:
            return registry.resolve_sizes(self.operation, "default", p.device, p.dtype, **p.sizes)
        except RuntimeError:
            return "torch"

    def usual(self, layout: str) -> str:
        """What a module that was swapped to `default` runs: PyTorch's also where that is known to be the faster one."""
        name = self.default(layout)
        if name == "torch" or self.device != "cpu" or registry.preferred.get(self.operation) is not None:
            return name
        call = Call.by_name[self.operation]()
        return "torch" if call.never_gains or not call.gains(self.tensors(layout, filled=False)) else name

    def candidates(self, layout: str, approximate: bool) -> list[str]:
        """The default, PyTorch, and all other algorithms that support the layer, in alphabetical order."""
        found = [self.default(layout), "torch"]
        if not Call.by_name[self.operation].returns_view:  # a view there, a copy here
            problem = self.problem(layout)
            for info in registry.algorithms(self.operation, self.device):
                if info.rule or (info.accuracy == "approximate" and not approximate):
                    continue
                if registry.supports_problem(self.operation, info.name, problem)[0]:
                    found.append(info.name)
        return list(dict.fromkeys(found))

    def memory(self, name: str, layout: str) -> tuple[int, int]:
        """Bytes of workspace and of pack."""
        if name == "torch":
            return 0, 0
        p = self.problem(layout)
        both = registry.workspace_sizes(self.operation, name, p.device, p.dtype, **p.sizes)
        if operator_named(f"_{self.operation}_{name}_pack") is None:
            return both, 0
        packed = registry.packed_bytes_sizes(self.operation, name, p.device, p.dtype, **p.sizes)
        return max(both - packed, 0), packed

    def tensors(self, layout: str, *, filled: bool = True) -> tuple[Any, ...]:
        """The arguments with seeded normal numbers, weights of a size that keeps the input's scale; else with any numbers."""
        generator, variances = torch.Generator().manual_seed(0), Call.by_name[self.operation].variances
        made = []
        for i, (spec, parameter) in enumerate(zip(self.arguments, self.parameters, strict=True)):
            if not isinstance(spec, Spec):
                made.append(spec)
                continue
            format = _format(spec.shape, layout)
            if filled:
                tensor = torch.randn(spec.shape, generator=generator)
                if i == 1 and tensor.ndim > 1:
                    tensor /= math.sqrt(tensor[0].numel())
                if i in variances:
                    tensor = tensor.abs() + 0.5
                tensor = tensor.to(spec.device, spec.dtype).contiguous(memory_format=format)
            else:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device, memory_format=format)
            made.append(nn.Parameter(tensor, requires_grad=False) if parameter else tensor)
        return tuple(made)

    def function(self, name: str, arguments: tuple[Any, ...]) -> Callable[[], Tensor]:
        """What a swapped module does in eager inference."""
        call = Call.by_name[self.operation]()
        if name != "torch":
            call.choose(Algorithm(name))
            if self.in_place:
                return lambda: call(arguments[0], inplace=True)
            return lambda: call.run(*arguments)
        if self.in_place:
            return lambda: torch.relu_(arguments[0])
        function = type(call).function
        return lambda: function(*arguments)


def _format(shape: Sequence[int], layout: str) -> torch.memory_format:
    return FORMATS[layout] if len(shape) == 4 else torch.contiguous_format


@functools.cache
def cache_bytes() -> int:
    """Of the largest cache of the first core, as Linux tells it; 32 MiB where it does not."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] if text[-1:] in "KM" else int(text))
    return max(sizes) or 2**25


def cache_of(device: torch.device) -> int:
    """Bytes of the largest cache of a processor or GPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else cache_bytes()


class Surroundings:
    """What the rest of a network does to a layer: between two calls, memory of the network's size passes the caches."""

    def __init__(self, network_bytes: int) -> None:
        self.network_bytes = network_bytes
        self.bytes = self.bytes_on(torch.device("cpu"))
        self._memory: Tensor | None = None

    def bytes_on(self, device: torch.device) -> int:
        """Of that memory: more than a cache and a quarter would not push out more."""
        return 2**20 * max(1, round(min(self.network_bytes, cache_of(device) * 5 // 4) / 2**20))

    def sample(self, function: Callable[[], Any], twin: Callable[[], Any], input: Tensor) -> float:
        """Seconds of one call, after the network's memory and then the layer before have been read.

        The layer before is the same with a weight of its own, `twin`: it leaves code, Python's objects and the memory of
        outputs as a network leaves them, in the caches, and this call's weight out of them. A GPU tells the time itself: the
        call is launched while it still computes what was before.
        """
        if self._memory is None or self._memory.device != input.device:
            self._memory = torch.zeros(self.bytes_on(input.device) // 4, device=input.device)
        self._memory.sum()
        twin()
        if input.is_cuda:
            with torch.cuda.device(input.device):
                return event_seconds(function)
        start = clock()
        function()
        return clock() - start


class OutOfTime(Exception):
    """The seconds for a measurement did not last."""


def measure(
    layer: Layer,
    layout: str,
    names: Sequence[str],
    surroundings: Surroundings,
    p99: bool = False,
    seconds: float = math.inf,
    everything: bool = False,
) -> dict[str, Measured]:
    """Times of each, which take turns; the first named is measured well however slow it is. OutOfTime after `seconds`.

    A first look drops those far slower than the fastest, marked rough, and the slower of those whose packed weights together
    would take much memory. An algorithm whose call fails, such as for want of
    memory, has the error in `failed`; PyTorch's own failing ("torch") raises. Of packs so large that to read them alone takes
    far longer than the fastest, nothing is called, unless `everything` is asked for, because of their errors.
    """
    try:
        return _measured(layer, layout, names, surroundings, p99, clock() + seconds, everything)
    finally:
        _library.release_workspace()  # some algorithm's may be gigabytes, and would be kept; so would packs on glibc's heap


def _measured(
    layer: Layer,
    layout: str,
    names: Sequence[str],
    surroundings: Surroundings,
    p99: bool,
    end: float,
    everything: bool,
) -> dict[str, Measured]:
    arguments = layer.tensors(layout)
    input = arguments[0]
    errors = _Reference(layer, arguments)
    others = tuple(_copy(a) if i else a for i, a in enumerate(arguments))  # weights of the layer before
    memory = {name: layer.memory(name, layout) for name in names}
    functions: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}  # with their packs
    found: dict[str, list[float]] = {}
    error: dict[str, float] = {}
    failed: dict[str, Measured] = {}
    with torch.inference_mode():
        before = input.clone() if layer.in_place else None

        def twins(name: str) -> bool:  # else the pack is out of the caches without another one
            return memory[name][1] <= cache_of(input.device)

        def look(name: str) -> None:
            function = twin = layer.function(name, arguments)
            if twins(name):
                twin = layer.function(name, others)
            start = clock()
            output = function()  # packs the weight
            first = clock() - start
            twin()
            error[name] = errors.of(output)
            if before is not None:
                input.copy_(before)
            looks = 2 if first < _WARM_SECONDS else 1
            found[name] = [surroundings.sample(function, twin, input) for _ in range(looks)]
            functions[name] = function, twin

        def attempt(name: str, step: Callable[[str], None]) -> None:
            if clock() > end:
                raise OutOfTime
            try:
                step(name)
            except Exception as cause:  # a user's algorithm may raise anything
                if name == "torch":
                    raise
                failed[name] = Measured.failure(f"{type(cause).__name__}: {cause}")
                found.pop(name, None)
                functions.pop(name, None)
                _library.release_workspace()  # for want of which it may have failed
                if before is not None:
                    input.copy_(before)

        def limit() -> float:
            return HOPELESS * min(map(min, found.values()), default=math.inf)

        def well() -> str:
            return next(name for name in names if name in found)

        def packs(name: str) -> int:
            packed = memory[name][1]
            return packed * 2 if twins(name) else packed

        # Those with much memory last: they are dropped, or not tried, where the others are far faster.
        for name in sorted(names, key=lambda name: (name != names[0], sum(memory[name]))):
            packed = memory[name][1]
            if not everything and input.device.type == "cpu" and _reading(packed) > HOPELESS * limit():
                failed[name] = Measured.untried(f"its packed weight of {packed} bytes takes too long to read")
                continue
            attempt(name, look)
            held = 0
            for place, n in enumerate(sorted(functions, key=lambda n: min(found[n]))):
                held += packs(n)
                if n != well() and (min(found[n]) > limit() or (place >= _CLOSEST and held > _HELD)):
                    del functions[n]
        close = list(functions)
        rounds = ROUNDS_P99
        if not p99:
            of_a_round = sum(min(found[name]) for name in close)
            rounds = min(max(int(SECONDS / max(of_a_round, 1e-9)), ROUNDS[0]), ROUNDS[1])
        for name in close:
            found[name] = []
        for i in range(rounds * (1 if p99 else _PATIENCE)):
            for name in close if i % 2 else reversed(close):
                attempt(name, lambda name: found[name].append(surroundings.sample(*functions[name], input)))
            close = [name for name in close if name not in failed]
            if all(len(_kept(found[name])) >= rounds for name in close):
                break
    results = {}
    for name in names:
        if name in failed:
            results[name] = failed[name]
            continue
        seconds, noise = percentile(found[name]) if p99 and name in close else median(found[name])
        workspace, packed = memory[name]
        rough = name not in close
        results[name] = Measured(
            round(seconds * 1e6, 2), round(noise * 1e6, 3), error[name], workspace, packed, rough
        )  # fmt: skip
    return results


def _reading(bytes: int) -> float:
    """Seconds that it takes to read so many; 0 where a cache may hold them."""
    return bytes / _library.machine(torch.get_num_threads())[1] if bytes > cache_bytes() else 0.0


def _copy(argument: Any) -> Any:
    """A tensor with memory of its own, a parameter where it was one."""
    if not isinstance(argument, Tensor):
        return argument
    copied = argument.detach().clone()
    return nn.Parameter(copied, requires_grad=False) if isinstance(argument, nn.Parameter) else copied


def _kept(samples: Sequence[float]) -> list[float]:
    limit = OUTLIER * min(samples)
    return [s for s in samples if s <= limit]


def median(samples: Sequence[float]) -> tuple[float, float]:
    """The median of the samples that are no outliers, and its standard error.

    That is 1.2533 deviations over the square root of their number; a deviation is 1.4826 times the median absolute one, as
    of a normal distribution, and of few samples at least half their range or a tenth.
    """
    kept = _kept(samples)
    middle = statistics.median(kept)
    deviation = 1.4826 * statistics.median(abs(s - middle) for s in kept)
    if len(kept) < ROUNDS[0]:  # too few to tell
        deviation = max(deviation, (max(kept) - min(kept)) / 2, 0.1 * middle)
    return middle, 1.2533 * deviation / math.sqrt(len(kept))


def percentile(samples: Sequence[float], share: float = 0.99) -> tuple[float, float]:
    """The 99th percentile, and its standard error: half the way to the samples that lie one deviation of the rank away."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    rank = share * last
    width = math.sqrt(len(ordered) * share * (1 - share))
    low, high = ordered[max(0, round(rank - width))], ordered[min(last, round(rank + width))]
    return ordered[round(rank)], (high - low) / 2


class _Reference:
    """A layer in float64; of convolutions with much work one image, and the first output channels."""

    def __init__(self, layer: Layer, arguments: tuple[Any, ...]) -> None:
        self.part: tuple[slice, ...] = ()
        # Contiguous: PyTorch 2.15 is wrong for some channels_last slices.
        args = [a.detach().contiguous() if isinstance(a, Tensor) else a for a in arguments]
        if layer.operation == "conv2d" and args[0].ndim == 4 and args[6] == 1:
            _, *output = layer.problem(CONTIGUOUS).shape
            flops = 2 * math.prod(output) * args[1][0].numel()
            channels = min(output[0], max(1, int(output[0] * REFERENCE_FLOPS / flops)))
            self.part = (slice(1), slice(channels))
            args[:3] = args[0][:1], args[1][:channels], None if args[2] is None else args[2][:channels]
        args = [a.double() if isinstance(a, Tensor) else a for a in args]
        with torch.inference_mode():
            self.value = Call.by_name[layer.operation].function(*args)
        self.scale = self.value.abs().max().item() if self.value.numel() else 0.0

    def of(self, output: Tensor) -> float:
        """max|y - y64| / max|y64|, to two digits; the largest number where something is not finite."""
        if not self.value.numel():
            return 0.0
        difference = (output[self.part] if self.part else output).double() - self.value
        error = float(f"{difference.abs().max().item() / (self.scale or 1.0):.1e}")
        return error if math.isfinite(error) else sys.float_info.max


def conversion(shape: Sequence[int], dtype: torch.dtype, device: str, surroundings: Surroundings) -> float:
    """Microseconds to bring a contiguous tensor into channels_last."""
    with torch.inference_mode():
        x = torch.randn(*shape).to(device, dtype)
        function = lambda: x.contiguous(memory_format=torch.channels_last)  # noqa: E731
        function()
        return round(median([surroundings.sample(function, function, x) for _ in range(ROUNDS[0])])[0] * 1e6, 2)


def to_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """By name."""
    return {name: m.to_dict() for name, m in measured.items()}


def from_json(data: Any) -> dict[str, Measured]:
    """TypeError or ValueError for what `to_json` does not make."""
    found = {}
    for name, values in data.items():
        if "failed" in values:
            if not isinstance(values["failed"], str) or values.keys() - {"failed"} not in ({}.keys(), {"rough"}):
                raise ValueError("no words")
            make = Measured.untried if values.get("rough") else Measured.failure
            found[name] = make(values["failed"])
            continue
        found[name] = m = Measured(**values)
        numbers = (m.time_us, m.noise_us, m.error)
        if not all(isinstance(n, (int, float)) for n in numbers) or not all(
            isinstance(n, int) for n in (m.workspace_bytes, m.packed_bytes, m.rough)
        ):
            raise ValueError("no numbers")
    return found
