"""Programs: many layers of a network in one dispatcher call, channels_last throughout (docs/decisions/program.md)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ai3_ops import _library, registry
from ai3_ops.calls.plan import CallPlan
from ai3_ops.operations.activations import ACTIVATIONS, SLOPED
from ai3_ops.operations.conv2d import WINDOW, Window
from ai3_ops.operations.program import PROGRAM, Line, problem, sizes
from ai3_ops.operations.step import Step
from ai3_ops.problem import spread
from ai3_ops.programs.constants import Constants, Source, joined, level, unpacked

Pair = int | Sequence[int]
Parameter = float | Tensor | None  # an activation's: a number, or a tensor of one element or of one for each channel


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor inside a program, with PyTorch's sizes: (N, C, H, W), (N, F) or (..., F)."""

    builder: object  # what stands for it: a reference would keep its weights until the garbage collector comes
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """Of an image, or features of a row."""
        return self.shape[1] if len(self.shape) == 4 else self.shape[-1]

    def like(self) -> Tensor:
        """A tensor without memory that has its sizes, in channels_last."""
        layout = torch.channels_last if len(self.shape) == 4 else torch.contiguous_format
        return torch.empty(self.shape, dtype=self.dtype, device="meta", memory_format=layout)


@dataclasses.dataclass
class _Step:
    """A line before its values and constants have numbers."""

    operation: str
    operands: list[Value]
    options: dict[str, str]
    tensors: dict[str, Tensor]  # options that are constants
    residual: Value | None = None
    algorithm: str = ""
    window: tuple[Any, ...] = ()  # what the weight's pack depends on
    parameters: tuple[tuple[str, Any], ...] = ()  # of the algorithm's own

    @property
    def reads(self) -> list[Value]:
        return self.operands if self.residual is None else [*self.operands, self.residual]


def _dimension(x: Value, dim: int) -> int:
    """From the front."""
    if not -len(x.shape) <= dim < len(x.shape):
        raise ValueError(f"no dimension {dim} of {x.shape}")
    return dim % len(x.shape)


def _refuses(error: Exception) -> ValueError:
    return ValueError(str(error))


class Builder:
    """Writes a program, layer by layer; the methods are named after PyTorch's functions and take their arguments.

    What a program cannot do is a ValueError when it is asked for. Rules such as "default" are resolved for the sizes that
    the inputs have here; the program runs on other batch sizes too, and on other heights and widths where they fit.
    """

    def __init__(self) -> None:
        self._own = object()
        self._steps: list[_Step] = []
        self._values: list[Value] = []

    # Values -----------------------------------------------------------------------------------------------------------
    def input(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        """The next tensor that the program is called with, in any memory format; all inputs come before all steps.

        A mask may be one of booleans.
        """
        if dtype not in _library.VALUES:
            raise ValueError(f"a program computes in float64, float32, bfloat16 or float16, got {dtype}")
        if len(shape) < 2 or any(s <= 0 for s in shape):
            raise ValueError(f"a program's input needs two or more dimensions, none of 0, got {tuple(shape)}")
        if any(s.operation != "input" for s in self._steps):
            raise ValueError("a program's inputs come before its steps")
        self._steps.append(_Step("input", [], {}, {}))
        self._values.append(Value(self._own, len(self._values), tuple(map(int, shape)), dtype))
        return self._values[-1]

    def constant(self, tensor: Tensor) -> Value:
        """A tensor that is known beforehand as a value, such as a table of positions; steps read it where it lies."""
        if tensor.dtype not in _library.VALUES or tensor.device.type != "cpu" or tensor.numel() == 0:
            raise ValueError(
                f"a program's constant needs elements of its types on the CPU, got {tensor.dtype} on {tensor.device}"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        options = {"dtype": dtype, "sizes": _list(tensor.shape), "value": "$0"}
        self._steps.append(_Step("constant", [], options, {"value": tensor.detach()}))
        self._values.append(Value(self._own, len(self._values), tuple(tensor.shape), tensor.dtype))
        return self._values[-1]

    def _add(self, step: _Step) -> Value:
        for value in step.reads:
            if value.builder is not self._own:
                raise ValueError("a program's values must be of one Builder")
            if torch.bool not in (value.dtype, step.operands[0].dtype) and value.dtype != step.operands[0].dtype:
                raise ValueError(
                    f"{step.operation} needs values of one dtype, got {step.operands[0].dtype} and {value.dtype}"
                )
        try:
            shape = sizes(Line(step.operation, (), step.options), [v.like() for v in step.operands])
        except RuntimeError as error:
            raise _refuses(error) from None
        if step.residual is not None and step.residual.shape != shape:
            raise ValueError(f"{step.operation} needs a residual of sizes {shape}, got {step.residual.shape}")
        self._steps.append(step)
        self._values.append(Value(self._own, len(self._values), tuple(shape), step.operands[0].dtype))
        return self._values[-1]

    # Layers with a weight ---------------------------------------------------------------------------------------------
    def conv2d(
        self,
        x: Value,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Pair = WINDOW.stride,
        padding: Pair = WINDOW.padding,
        dilation: Pair = WINDOW.dilation,
        groups: int = WINDOW.groups,
        *,
        algorithm: str = "default",
        activation: str = "none",
        parameter: Parameter = None,
        residual: Value | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        input_relu: bool = False,
    ) -> Value:
        """`activation(conv2d(f(x)) + residual)`, with f(x) = x * scale + shift of each channel, then relu if `input_relu`.

        `activation` and `parameter` as `unary` has them.
        """
        window = Window(_pair(stride, "stride"), _pair(padding, "padding"), _pair(dilation, "dilation"), groups)
        options = {"weight": f"$0:{_list(weight.shape)}"}
        options |= dict(zip(WINDOW._fields, (*map(_list, window[:3]), str(groups)), strict=True))
        info = self._algorithm("conv2d", algorithm, x, options, bias is not None)
        if (scale is not None or shift is not None or input_relu) and not info.prologue:
            x = self.affine(x, scale, shift, activation="relu" if input_relu else "none")
            scale, shift, input_relu = None, None, False
        step = self._weighted("conv2d", info, x, weight, bias, options)
        step.window = window
        if scale is not None or shift is not None or input_relu:
            for name, given, otherwise in (("scale", scale, 1.0), ("shift", shift, 0.0)):
                step.tensors[name] = _channels(given, x, otherwise, name)
            step.options["input_relu"] = str(int(input_relu))
        return self._finish(step, info, activation, parameter, residual)

    def linear(
        self,
        x: Value,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        algorithm: str = "default",
        activation: str = "none",
        parameter: Parameter = None,
        residual: Value | None = None,
    ) -> Value:
        """`activation(linear(x) + residual)` of rows: x is (..., in_features), of any number of dimensions.

        Of four the activation has no parameter: that would be one for each channel of an image.
        """
        if len(x.shape) == 4 and parameter is not None:
            raise ValueError(f"a program's linear needs rows for {activation}, got an image {x.shape}")
        if weight.ndim != 2:
            raise ValueError(
                f"a program's linear needs a weight (out_features, in_features), got {tuple(weight.shape)}"
            )
        options = {"weight": f"$0:{_list(weight.shape)}"}
        info = self._algorithm("linear", algorithm, x, options, bias is not None)
        step = self._weighted("linear", info, x, weight, bias, options)
        return self._finish(step, info, activation, parameter, residual)

    def _algorithm(
        self,
        operation: str,
        name: str,
        x: Value,
        options: dict[str, str],
        has_bias: bool = False,
        others: Sequence[Value] = (),
    ) -> registry.AlgorithmInfo:
        """What `name` stands for in such a layer, checked."""
        try:
            name, own = registry.unspelled(name)
            asked = registry.algorithm(operation, name, "cpu")
            if asked.python:
                raise ValueError(f"{operation}_{name} is a Python callable, which a program cannot run")
            p = problem(Line(f"{operation}_{name}", (), options), [value.like() for value in (x, *others)])
            known = dict(p.sizes)
            if asked.rule and operation in ("conv2d", "linear"):  # it takes the best of those that a program can run
                known["exclude"] = ",".join(a.name for a in registry.algorithms(operation, "cpu") if a.vendor)
            if "has_bias" in known:
                known["has_bias"] = has_bias
            if own:
                known["parameters"] = own
                options |= {p.name: CallPlan.word(p.number(own.get(p.name, p.default))) for p in asked.parameters}
            ok, reason = registry.supports_sizes(operation, name, "cpu", x.dtype, **known)
            if not ok:
                raise ValueError(f"ai3::{operation}_{name}: {reason}")
            info = registry.algorithm(
                operation, registry.resolve_sizes(operation, name, "cpu", x.dtype, **known), "cpu"
            )
        except RuntimeError as error:
            raise _refuses(error) from None
        if info.vendor or info.layout == "nchw":
            what = "calls PyTorch's own operators" if info.vendor else "computes in NCHW"
            raise ValueError(f"{operation}_{info.name} {what}, which a program cannot")
        return info

    def _weighted(
        self,
        operation: str,
        info: registry.AlgorithmInfo,
        x: Value,
        weight: Tensor,
        bias: Tensor | None,
        options: dict[str, str],
    ) -> _Step:
        for tensor, name in ((weight, "weight"), (bias, "bias")):
            if tensor is not None and (tensor.dtype != x.dtype or tensor.device.type != "cpu"):
                raise ValueError(
                    f"{operation} needs a {name} of {x.dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
                )
        tensors = {"weight": weight.detach()}
        if bias is not None:
            if bias.shape != weight.shape[:1]:
                raise ValueError(f"{operation} needs a bias of {weight.shape[0]} elements, got {tuple(bias.shape)}")
            tensors["bias"] = bias.detach()
        own = tuple((p.name, p.value(options[p.name])) for p in info.parameters if p.name in options)
        return _Step(f"{operation}_{info.name}", [x], options, tensors, algorithm=info.name, parameters=own)

    def _finish(
        self,
        step: _Step,
        info: registry.AlgorithmInfo,
        activation: str,
        parameter: Parameter,
        residual: Value | None,
    ) -> Value:
        """With residual and activation, in steps of their own where the algorithm does not fuse them."""
        if info.epilogue:
            step.residual = residual
            return self._activated(step, activation, parameter)
        _check_activation(activation, parameter)
        y = self._add(step)
        if residual is not None:
            return self.binary(y, residual, "add", activation, parameter)
        return y if activation == "none" else self.unary(y, activation, parameter)

    def _activated(self, step: _Step, activation: str, parameter: Parameter) -> Value:
        """Adds a step whose activation is its own."""
        _check_activation(activation, parameter)
        if activation != "none":
            step.options["activation"] = activation
        y = self._add(step)
        if activation in SLOPED:
            slope = torch.as_tensor(parameter, dtype=torch.float64).detach().flatten()
            slope = slope.expand(y.channels) if slope.numel() == 1 else slope
            step.tensors["slope"] = _channels(slope, y, 0.0, "a slope")
        return y

    # Pooling ----------------------------------------------------------------------------------------------------------
    def max_pool2d(
        self,
        x: Value,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        ceil_mode: bool = False,
    ) -> Value:
        """As torch.nn.functional.max_pool2d."""
        options = _window(kernel_size, stride, padding, dilation, ceil_mode)
        return self._pool("max_pool2d", x, options)

    def avg_pool2d(
        self,
        x: Value,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        """As torch.nn.functional.avg_pool2d."""
        options = _window(kernel_size, stride, padding, 1, ceil_mode)
        options["count_include_pad"] = str(int(count_include_pad))
        if divisor_override is not None:
            options["divisor"] = str(divisor_override)
        return self._pool("avg_pool2d", x, options)

    def adaptive_avg_pool2d(self, x: Value, output_size: int | Sequence[int | None]) -> Value:
        """As torch.nn.functional.adaptive_avg_pool2d."""
        given = [output_size] * 2 if isinstance(output_size, int) else list(output_size)
        if None in given:
            raise ValueError(f"a program's adaptive_avg_pool2d needs numbers as output_size, got {output_size}")
        return self._pool(
            "adaptive_avg_pool2d", x, {"output_size": _list(_pair([g or 0 for g in given], "output_size", 1))}
        )

    def _pool(self, operation: str, x: Value, options: dict[str, str]) -> Value:
        if len(x.shape) != 4:
            raise ValueError(f"{operation} needs an image (N, C, H, W), got {x.shape}")
        info = self._algorithm(operation, "default", x, options)
        return self._add(_Step(f"{operation}_{info.name}", [x], options, {}, algorithm=info.name))

    # Operations that say themselves how a program has them (ai3_ops.operations.step) --------------------------------------
    def operation(self, step: Step, arguments: Mapping[str, Any], algorithm: str = "default") -> Value:
        """A line of an operation's own: `arguments` are those of `step.compute`, by name, with values for the first."""
        bound = inspect.signature(step.compute).bind(**arguments)
        bound.apply_defaults()
        named = {name: value for name, value in bound.arguments.items() if name != "algorithm"}
        x = named.pop("input")
        others = [value for name in step.values if (value := named.pop(name, None)) is not None]
        tensors = {name: t for name in step.constants if (t := named.pop(name, None)) is not None}
        for name, tensor in tensors.items():
            if tensor.dtype != x.dtype or tensor.device.type != "cpu":
                what = f"{name} of {x.dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
                raise ValueError(f"{step.operation} needs a {what}")
        options = step.options(named | {"input": x}) | {name: "$0" for name in tensors}
        info = self._algorithm(step.operation, algorithm, x, options, others=others)
        line = _Step(f"{step.operation}_{info.name}", [x, *others], options, tensors, algorithm=info.name)
        return self._add(line)

    # Element by element -----------------------------------------------------------------------------------------------
    def unary(self, x: Value, name: str, parameter: Parameter = None) -> Value:
        """An activation: one of ACTIVATIONS.

        "leaky_relu" and "prelu" have a parameter, the slope for negative values, and "elu" its alpha: a number, a tensor of one
        element, or one of each channel (of rows: feature).
        """
        return self._activated(_Step("activate", [x], {"activation": name}, {}), name, parameter)

    def binary(self, x: Value, y: Value, name: str, activation: str = "none", parameter: Parameter = None) -> Value:
        """`activation(x + y)` ("add") or `activation(x * y)` ("mul"); one of them may be (N, C, 1, 1) beside (N, C, H, W).

        Of other sizes y is expanded to x's, where that is possible; its first dimension is 1 then, or x's.
        """
        operations = {"add": "add", "mul": "multiply"}
        if name not in operations:
            raise ValueError(f"no operation {name!r} of two values; there are: {', '.join(operations)}")
        ranks = len(x.shape), len(y.shape)
        if ranks[0] < ranks[1] or (ranks[0] == ranks[1] and x.shape != y.shape and x.shape[-2:] == (1, 1)):
            x, y = y, x
        scale = len(x.shape) == 4 and y.shape == (*x.shape[:2], 1, 1)
        if x.shape != y.shape and not scale:
            y = self._expanded(y, x)
        return self._activated(_Step(operations[name], [x, y], {}, {}), activation, parameter)

    def _expanded(self, y: Value, x: Value) -> Value:
        """With x's sizes."""
        if len(x.shape) < len(y.shape):
            raise ValueError(f"cannot expand {y.shape} to {x.shape}")
        y = self.widened(y, len(x.shape))
        if y.shape == x.shape:
            return y
        lead = 0 if y.shape[0] == 1 else -1
        return self.expand(y, [lead, *(n if s == 1 else -1 for n, s in zip(x.shape[1:], y.shape[1:], strict=True))], x)

    def widened(self, x: Value, rank: int) -> Value:
        """With further dimensions of one element in front, whatever x's sizes are."""
        own, missing = len(x.shape), rank - len(x.shape)
        if not missing:
            return x
        behind = self.reshape(x, [*[0] * own, *[1] * missing])
        return self.permute(behind, [*range(own, rank), *range(own)])

    def affine(
        self,
        x: Value,
        scale: Tensor | None,
        shift: Tensor | None,
        activation: str = "none",
        parameter: Parameter = None,
    ) -> Value:
        """`activation(x * scale + shift)` of each channel: (C,) tensors, such as a batch normalization's."""
        tensors = {
            name: _channels(t, x, 0.0, name) for name, t in (("scale", scale), ("shift", shift)) if t is not None
        }
        return self._activated(_Step("affine", [x], {}, tensors), activation, parameter)

    # Channels ---------------------------------------------------------------------------------------------------------
    def concat(self, values: Sequence[Value], dim: int | None = None) -> Value:
        """Along the channels (dimension 1), or `dim`. Costs nothing where the values' steps can write into it at once."""
        if not values:
            raise ValueError("concat needs values")
        options = {} if dim is None else {"dim": str(_dimension(values[0], dim))}
        return self._add(_Step("concat", list(values), options, {}))

    def slice(self, x: Value, start: int, stop: int, dim: int | None = None) -> Value:
        """Channels [start, stop), or those of `dim`."""
        options = {} if dim is None else {"dim": str(_dimension(x, dim))}
        channels = x.shape[int(options.get("dim", 1))] if dim is not None or len(x.shape) in (2, 4) else 0
        if not 0 <= start < stop <= channels:
            raise ValueError(f"slice needs 0 <= start < stop <= channels, got {start}, {stop} and {x.shape}")
        return self._add(_Step("slice", [x], options | {"start": str(start), "stop": str(stop)}, {}))

    # Views: nothing is moved where what reads the value can read it as it lies ----------------------------------------
    def reshape(self, x: Value, sizes: Sequence[int], *, channels_last: bool = False) -> Value:
        """0 keeps the dimension in its place, -1 is what is left; so a program fits other batch sizes, too.

        `channels_last`: of an image, whose channels are innermost where it is copied.
        """
        options = {"sizes": _list(sizes)} | ({"order": "channels_last"} if channels_last else {})
        return self._add(_Step("reshape", [x], options, {}))

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        """As torch.permute."""
        return self._add(_Step("permute", [x], {"dims": _list([_dimension(x, d) for d in dims])}, {}))

    def select(self, x: Value, dim: int, index: int) -> Value:
        """As torch.select."""
        at = _dimension(x, dim)
        place = index + x.shape[at] if index < 0 else index
        return self._add(_Step("select", [x], {"dim": str(at), "index": str(place)}, {}))

    def expand(self, x: Value, sizes: Sequence[int], like: Value | None = None) -> Value:
        """As torch.Tensor.expand, without new dimensions; -1 keeps one, 0 is the size of `like`'s first one."""
        operands = [x] if like is None else [x, like]
        return self._add(_Step("expand", operands, {"sizes": _list(sizes)}, {}))

    def roll(self, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
        """As torch.roll."""
        options = {"shifts": _list(shifts), "dims": _list([_dimension(x, d) for d in dims])}
        return self._add(_Step("roll", [x], options, {}))

    def flatten(self, x: Value) -> Value:
        """(N, C, H, W) as (N, C * H * W). Costs nothing before a linear, whose weight's columns are reordered."""
        if len(x.shape) == 2:
            return x
        return self._add(_Step("flatten", [x], {"order": "contiguous"}, {}))

    @property
    def count(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def algorithm_since(self, count: int) -> str:
        """The algorithm of the first layer that came after so many steps; "" where none did."""
        return next((step.algorithm for step in self._steps[count:] if step.algorithm), "")

    # The program ------------------------------------------------------------------------------------------------------
    def build(
        self,
        outputs: Sequence[Value],
        *,
        channels_last: bool | Sequence[bool] = False,
        keep: bool = False,
        pack: bool = True,
    ) -> Program:
        """The program that computes `outputs`; images are returned in channels_last, or contiguous, each where flags are given.

        Weights are packed here, by the algorithm of each layer: later changes of them are not seen. What no output
        depends on is left out, inputs stay. With `keep` the program holds the weights beside their packs. Without `pack`
        its constants have a size only, for `report`.
        """
        if not outputs or any(v.builder is not self._own for v in outputs):
            raise ValueError("a program needs outputs, of this Builder")
        needed = {v.index for v in outputs}
        for index in range(len(self._steps) - 1, -1, -1):
            step = self._steps[index]
            if index in needed:
                needed |= {v.index for v in step.reads}
            elif step.operation == "input":
                needed.add(index)
        order = sorted(needed)
        if not order or self._steps[order[0]].operation != "input":
            raise ValueError("a program needs an input")
        folded = self._folded_flattens(order, outputs)
        number = {index: i for i, index in enumerate(order)}
        constants = Constants()
        rows = []
        for index in order:
            step = self._steps[index]
            if step.operation == "input":
                value = self._values[index]
                rows.append(f"%{number[index]} = input {str(value.dtype).removeprefix('torch.')} {len(value.shape)}")
                continue
            options = dict(step.options)
            if index in folded:
                options["order"] = "channels_last"
            image = self._values[step.operands[0].index] if step.operands and step.operands[0].index in folded else None
            chw = None if image is None else self._steps[image.index].operands[0].shape[1:]
            for name, tensor in step.tensors.items():
                if name == "weight" and step.operation.startswith(("conv2d_", "linear_")):
                    number_of = constants.weight(step.operation, tensor, step.window, step.parameters, chw)
                    options[name] = options[name].replace("$0", f"${number_of}")
                else:
                    options[name] = f"${constants.plain(tensor)}"
            if step.residual is not None:
                options["residual"] = f"%{number[step.residual.index]}"
            words = [f"%{number[v.index]}" for v in step.operands] + [f"{k}={v}" for k, v in options.items()]
            rows.append(f"%{number[index]} = {step.operation} {' '.join(words)}")
        flags = [channels_last] * len(outputs) if isinstance(channels_last, bool) else channels_last
        layouts = ["channels_last" if last else "contiguous" for last in flags]
        results = [
            f"%{number[v.index]}" + (f":{layout}" if len(v.shape) == 4 else "")
            for v, layout in zip(outputs, layouts, strict=True)
        ]
        rows.append(f"return {' '.join(results)}")
        examples = [
            (v.shape, v.dtype) for v, s in zip(self._values, self._steps, strict=True) if s.operation == "input"
        ]
        whole = joined(constants.sources) if pack else unpacked(constants.sources)
        return Program("\n".join(rows) + "\n", [whole], examples, constants.sources if keep else None)

    def _folded_flattens(self, order: Sequence[int], outputs: Sequence[Value]) -> set[int]:
        """Flattens of more than a pixel that linears alone read: rows stay in NHWC order, and the weights follow."""
        flats = {i for i in order if self._steps[i].operation == "flatten"} - {v.index for v in outputs}
        for index in order:
            step = self._steps[index]
            for position, value in enumerate(step.reads):
                if not (step.operation.startswith("linear_") and position == 0):
                    flats.discard(value.index)
        return {i for i in flats if self._steps[i].operands[0].shape[2:] != (1, 1)}


@dataclasses.dataclass(frozen=True)
class StepReport:
    """How one step of a program is carried out."""

    operation: str  # "conv2d_direct", "add", ...; "copy" where a value is copied for a step that could not read it
    line: str  # of the text
    sizes: tuple[int, ...]  # of the output
    row: int  # elements from one pixel of the output to the next: more than channels in a concatenation
    workspace_bytes: int
    input: tuple[str, int]  # where: "arena", "input 0", "output 0", and the offset in bytes
    output: tuple[str, int]


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """How a program is carried out for inputs of certain sizes. `str()` is a table."""

    steps: tuple[StepReport, ...]
    arena_bytes: int  # activations and workspaces
    live_bytes: int  # the most of them that is needed at one time, which no plan goes below

    def __str__(self) -> str:
        rows = [
            f"{i:3} {s.operation:36} {s.sizes!s:24} {s.workspace_bytes:>12,}  {s.output[0]} + {s.output[1]:,}"
            for i, s in enumerate(self.steps)
        ]
        head = f"{'':3} {'step':36} {'output':24} {'workspace':>12}  written to"
        return "\n".join([head, *rows, f"arena: {self.arena_bytes:,} bytes; live at most {self.live_bytes:,}"])


class Program:
    """Layers that run in one call: `program(*tensors)` gives a list of tensors, fresh ones at every call.

    Inputs may have any memory format and batch size. For inference: gradients are an error. May be pickled, deep-copied,
    called from several threads, compiled and exported; `str()` is its text, which a person can read.
    """

    def __init__(
        self,
        text: str,
        constants: list[Tensor],
        examples: Sequence[tuple[tuple[int, ...], torch.dtype]],
        sources: Sequence[Source] | None = None,
    ) -> None:
        """`constants`: one tensor, of the bytes of packed weights and the like; `examples`: each input's sizes and dtype.

        `sources`: what the constants were made of, where it is kept.
        """
        self.text = text
        self.constants = constants
        self.examples = list(examples)
        self.sources = None if sources is None else list(sources)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"level": level()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = state.pop("level")
        vars(self).update(state)
        if made == level():
            return
        if self.sources is None:
            raise ValueError(
                f"ai3_ops: a program was pickled with {made}, and this process has {level()}: weights are packed for one; "
                "optimize again here, or there with portable=True"
            )
        self.constants = [joined(self.sources)]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs, in build's order."""
        return PROGRAM(inputs, self.constants, self.text)

    def __str__(self) -> str:
        return self.text

    def report(self, *inputs: Tensor) -> ProgramReport:
        """How it is carried out for these inputs; without any, for channels_last ones of the sizes it was built for."""
        shapes: list[tuple[Any, Any, int]] = [(tuple(t.shape), t.dtype, _row(t)) for t in inputs]
        if not inputs:
            shapes = [(shape, dtype, shape[1] if len(shape) == 4 else shape[-1]) for shape, dtype in self.examples]
        record = _library.program(self.text, shapes)
        steps = tuple(
            StepReport(
                s["operation"], s["text"], tuple(s["sizes"]), s["row"], s["workspace_bytes"], tuple(s["input"]),
                tuple(s["output"]),
            )
            for s in record["steps"]
        )  # fmt: skip
        return ProgramReport(steps, record["arena_bytes"], record["live_bytes"])

    def time(self, *inputs: Tensor, repeats: int = 20) -> list[float]:
        """Microseconds of each step of `report(*inputs)`, medians of `repeats` calls."""
        times = torch.ops.ai3._program_profile(inputs, self.constants, self.text, repeats)
        return times.median(0).values.tolist()


def _row(tensor: Tensor) -> int:
    if tensor.ndim != 4:
        return tensor.shape[-1]
    return tensor.shape[1] if tensor.is_contiguous(memory_format=torch.channels_last) else 0


def _check_activation(name: str, parameter: Parameter) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r} in a program; there are: {', '.join(ACTIVATIONS)}")
    if (parameter is None) == (name in SLOPED):
        raise ValueError(f"{name} needs {'a slope' if name in SLOPED else 'no parameter'}")


def _pair(value: Pair, name: str, least: int = 0) -> tuple[int, int]:
    try:
        first, second = spread("a program", value, 2, name, least)
    except RuntimeError as error:
        raise _refuses(error) from None
    return int(first), int(second)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(str(int(n)) for n in numbers)


def _window(kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil_mode: bool) -> dict[str, str]:
    stride = kernel if stride is None or stride == [] or stride == () else stride
    named = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return {name: _list(_pair(v, name)) for name, v in named.items()} | {"ceil_mode": str(int(ceil_mode))}


def _channels(given: Tensor | None, x: Value, otherwise: float, name: str) -> Tensor:
    """One number for each channel, in the type that kernels compute in."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if given is None:
        return torch.full((x.channels,), otherwise, dtype=dtype)
    if given.numel() != x.channels or given.device.type != "cpu":
        raise ValueError(f"needs {name} of {x.channels} elements on the CPU, got {tuple(given.shape)}")
    return given.detach().flatten().to(dtype)
