"""One engine in a process of its own, for `cli.bench`: `python -P peers.py ENGINE FOLDER THREADS`.

Imports nothing of this package but where it is the engine, so that a peer's process holds the peer alone. Answers with
lines of JSON on the standard output that it was started with: first what it is, then, for each line on its standard
input, the seconds of each call of one turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

WARM_SECONDS = 0.4  # before every turn: memory that lies idle is taken away and comes back by page faults
TURN_SECONDS, TURN_CALLS = 0.3, 5  # of a turn, at least
DTYPE = "dtype.txt"  # the file that says in which of DTYPES is computed
DTYPES = {"float32": "f32", "bfloat16": "bf16"}  # each with OpenVINO's name for it
Ready = tuple[Callable[[], Any], str]  # a call that returns the output, as NumPy takes it, and the engine's version


class Absent(Exception):
    """The engine is not installed, or cannot take the model."""


def _torch(folder: Path, threads: int) -> tuple[Any, Any, Any]:
    import torch

    torch.set_num_threads(threads)
    model = torch.load(folder / "model.pt", weights_only=False).eval()
    return torch, model, torch.load(folder / "inputs.pt", weights_only=True)


def _call(torch: Any, model: Any, inputs: Any) -> Callable[[], Any]:
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def call() -> Any:
        with torch.inference_mode():
            return model(*args)

    return call


def eager(folder: Path, threads: int) -> Ready:
    """PyTorch as it is."""
    torch, model, inputs = _torch(folder, threads)
    return _call(torch, model, inputs), torch.__version__


def channels_last(folder: Path, threads: int) -> Ready:
    """PyTorch with model and input in channels_last."""
    torch, model, inputs = _torch(folder, threads)
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4:
        raise Absent("its input has no channels")
    last = torch.channels_last
    return _call(torch, model.to(memory_format=last), inputs.contiguous(memory_format=last)), torch.__version__


def compile(folder: Path, threads: int) -> Ready:
    """torch.compile with frozen weights."""
    torch, model, inputs = _torch(folder, threads)
    from torch._inductor import config

    config.freezing = True
    return _call(torch, torch.compile(model), inputs), torch.__version__


def _ours(folder: Path, threads: int, make: Callable[..., Any]) -> Ready:
    torch, model, inputs = _torch(folder, threads)
    import ai3_ops

    made = make(ai3_ops, model, inputs)
    return _call(torch, made, inputs), ai3_ops.__version__


def swap_default(folder: Path, threads: int) -> Ready:
    """`swap(model, "default", x)`."""
    return _ours(folder, threads, lambda ai3, model, x: ai3.swap(model, "default", x, inplace=True))


def swap_auto(folder: Path, threads: int) -> Ready:
    """`swap(model, "auto", x)`."""
    return _ours(folder, threads, lambda ai3, model, x: ai3.swap(model, "auto", x, inplace=True))


def optimize(folder: Path, threads: int) -> Ready:
    """`optimize(model, x)`."""
    return _ours(folder, threads, lambda ai3, model, x: ai3.optimize(model, x, progress=False))


def approximate(folder: Path, threads: int) -> Ready:
    """`optimize(model, x, allow_approximate=True)`."""
    return _ours(folder, threads, lambda ai3, model, x: ai3.optimize(model, x, allow_approximate=True, progress=False))


SAVED = "model.ai3"


def save(folder: str, threads: str) -> None:
    """Makes the file that `load` reads."""
    _, model, inputs = _torch(Path(folder), int(threads))
    import ai3_ops

    ai3_ops.save(ai3_ops.optimize(model, inputs, progress=False), Path(folder) / SAVED)


def load(folder: Path, threads: int) -> Ready:
    """`load(path)` of what another process optimized and saved: as a network is deployed."""
    import torch

    import ai3_ops

    path, failure = folder / SAVED, folder / "save.txt"
    if not path.exists():
        said = failure.read_text().strip().splitlines() if failure.exists() else []
        raise Absent(f"not saved: {said[-1] if said else 'it was not optimized'}")
    torch.set_num_threads(threads)
    return _call(torch, ai3_ops.load(path), torch.load(folder / "inputs.pt", weights_only=True)), ai3_ops.__version__


def _numpy(folder: Path) -> Any:
    import numpy

    path = folder / "input.npy"
    if not path.exists():
        raise Absent("takes models with one tensor as input")
    return numpy.load(path)


def _onnx(folder: Path) -> str:
    path = folder / "model.onnx"
    if not path.exists():
        failure = folder / "onnx.txt"
        raise Absent(f"no ONNX file: {failure.read_text() if failure.exists() else 'was not exported'}")
    return str(path)


def onnxruntime(folder: Path, threads: int) -> Ready:
    """ONNX Runtime's CPU provider."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(_onnx(folder), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: _numpy(folder)}
    return lambda: session.run(None, feed)[0], ort.__version__


def openvino(folder: Path, threads: int) -> Ready:
    """OpenVINO's CPU plugin, in float32 or bfloat16, for latency."""
    import openvino as ov

    core = ov.Core()
    precision = DTYPES[(folder / DTYPE).read_text()]
    hints = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    x = _numpy(folder)
    model = core.read_model(_onnx(folder))
    model.reshape(list(x.shape))
    request = core.compile_model(model, "CPU", hints).create_infer_request()
    return lambda: request.infer([x], share_inputs=True, share_outputs=True)[0], ov.__version__.split("-")[0]


def ncnn(folder: Path, threads: int) -> Ready:
    """ncnn, converted by pnnx, float32."""
    import ncnn as engine
    import numpy

    x = _numpy(folder)
    param = next(folder.glob("*.ncnn.param"), None)
    if param is None:
        failure = folder / "pnnx.txt"
        raise Absent(f"pnnx made no model: {failure.read_text()[-200:] if failure.exists() else 'was not run'}")
    net = engine.Net()
    net.opt.num_threads = threads
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    net.load_param(str(param))
    net.load_model(str(param.with_suffix(".bin")))

    def one(image: Any) -> Any:
        with net.create_extractor() as extractor:
            extractor.input(net.input_names()[0], engine.Mat(image))
            return numpy.array(extractor.extract(net.output_names()[0])[1])

    # ncnn takes images one by one.
    return lambda: numpy.stack([one(image) for image in x]), metadata.version("ncnn")


def mnn(folder: Path, threads: int) -> Ready:
    """MNN, high precision."""
    import MNN
    import numpy

    path = folder / "model.mnn"
    if not path.exists():
        raise Absent("its converter made no model")
    expr = MNN.expr
    runtime = MNN.nn.create_runtime_manager(({"precision": "high", "backend": 0, "numThread": threads},))
    net = MNN.nn.load_module_from_file(str(path), [], [], runtime_manager=runtime)
    array = numpy.ascontiguousarray(_numpy(folder))
    x = expr.const(array, list(array.shape), expr.NCHW)
    return lambda: net.forward([x])[0].read(), metadata.version("MNN")


def opencv(folder: Path, threads: int) -> Ready:
    """OpenCV's dnn module."""
    import cv2

    cv2.setNumThreads(threads)
    net = cv2.dnn.readNetFromONNX(_onnx(folder))
    x = _numpy(folder)

    def call() -> Any:
        net.setInput(x)
        return net.forward()

    return call, cv2.__version__


ENGINES: dict[str, Callable[[Path, int], Ready]] = {
    "eager": eager, "channels_last": channels_last, "compile": compile, "onnxruntime": onnxruntime, "openvino": openvino,
    "ncnn": ncnn, "mnn": mnn, "opencv": opencv, "swap default": swap_default, "swap auto": swap_auto, "optimize": optimize,
    "load": load, "optimize approximate": approximate,
}  # fmt: skip


# What a process imports before its memory is counted from there.
LIBRARIES = {
    **dict.fromkeys(("eager", "channels_last"), ("torch",)),
    **dict.fromkeys(("swap default", "swap auto", "optimize", "load", "optimize approximate"), ("torch", "ai3_ops")),
    "compile": ("torch", "torch._dynamo", "torch._inductor.compile_fx"),
    "onnxruntime": ("onnxruntime",), "openvino": ("openvino",), "ncnn": ("ncnn",), "mnn": ("MNN",), "opencv": ("cv2",),
}  # fmt: skip


def _memory(field: str) -> int:
    """Bytes of resident memory that Linux says, 0 elsewhere: VmRSS now, VmHWM the largest."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _trim() -> None:
    """Gives the system what is allocated by nobody: glibc's free memory, and our own workspaces, activations among them."""
    if "ai3_ops" in sys.modules:
        sys.modules["ai3_ops"]._library.release_workspace()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _peak(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes resident before a call, with nothing free kept, and the most during it."""
    gc.collect()
    _trim()
    before = _memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the largest so far is now
    call()
    return before, _memory("VmHWM")


def _energy() -> float | None:
    """Joules that the processors took since some time, where the machine exposes it (RAPL)."""
    joules = None
    for path in glob.glob("/sys/class/powercap/intel-rapl:[0-9]*/energy_uj"):
        if path.count(":") == 1:
            with contextlib.suppress(OSError, ValueError):
                joules = (joules or 0.0) + int(Path(path).read_text()) / 1e6
    return joules


def _turn(call: Callable[[], Any]) -> dict[str, Any]:
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        call()
    seconds: list[float] = []
    before = _energy()
    while len(seconds) < TURN_CALLS or sum(seconds) < TURN_SECONDS:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    after = _energy()
    joules = None if before is None or after is None or after < before else (after - before) / len(seconds)
    return {"seconds": seconds, "joules": joules}


def _error(output: Any, folder: Path) -> float:
    """max|y - y64| / max|y64|."""
    import numpy

    expected = numpy.load(folder / "expected.npy")
    if hasattr(output, "detach"):
        output = output.detach().double().numpy()
    got = numpy.asarray(output, dtype=numpy.float64).reshape(expected.shape)
    return float(numpy.abs(got - expected).max() / numpy.abs(expected).max())


def main() -> None:
    """Loads, then answers."""
    engine, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        for library in ("numpy", *LIBRARIES[engine]):
            importlib.import_module(library)
        start = _memory("VmRSS")
        begin = time.perf_counter()
        call, version = ENGINES[engine](folder, threads)
        output = call()
        if isinstance(output, (tuple, list)):
            output = output[0]
        elif isinstance(output, dict):
            output = next(iter(output.values()))
        loaded = time.perf_counter() - begin
        error = _error(output, folder)
        del output
        call()
        before, peak = _peak(call)
        answer(
            {
                "version": version, "error": error, "load_seconds": loaded, "peak_bytes": peak - start,
                "call_bytes": peak - before if "torch" in LIBRARIES[engine] else None,
            }
        )  # fmt: skip
    except Exception as failure:
        answer({"absent": f"{type(failure).__name__}: {failure}" if not isinstance(failure, Absent) else str(failure)})
        return
    for _ in sys.stdin:
        answer(_turn(call))


if __name__ == "__main__":
    main()
