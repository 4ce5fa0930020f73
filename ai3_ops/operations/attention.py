"""attention: y = softmax(scale q k^T + mask) v, of every query over the keys that it sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ai3_ops import registry
from ai3_ops._torch import OpOverload, has_constant_sizes, is_exporting
from ai3_ops.calls.call import UNMEASURED, Call
from ai3_ops.calls.plan import CallPlan
from ai3_ops.calls.spec import PAIRS, leads_in
from ai3_ops.operations import base, multihead, of_transformers, patterns, windows
from ai3_ops.operations.base import Dims, Operation
from ai3_ops.operations.case import BadCall, Case, Draw
from ai3_ops.operations.plain_attention import Sight, fitted, plain, reduced
from ai3_ops.operations.step import Step, computed
from ai3_ops.problem import Problem, check, check_dtype, check_same
from ai3_ops.selecting.choice import Algorithm

if TYPE_CHECKING:
    from ai3_ops.operations.program import Line

_RANK = 5


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _by_definition(*args: Any, **options: Any) -> Tensor:
    """Not PyTorch's fused kernels: those have no second derivatives, and make zeros of a row of NaN."""
    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(*args, **options)


class Attention(Operation):
    """Rules of `ai3::attention_<algorithm>`, as torch.nn.functional.scaled_dot_product_attention."""

    name = "attention"
    aten = staticmethod(_by_definition)
    autocast = True
    rounding = "weights"

    def problem(
        self,
        label: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        key_projection: Tensor | None = None,
        **_: Any,
    ) -> Problem:
        """Query (..., H, L, E), key (..., H, S, E), value (..., H, S, Ev), mask broadcast to (..., H, L, S); RuntimeError."""
        check_dtype(label, query)
        check_same(label, query, key, "key")
        check_same(label, query, value, "value")
        for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
            needs = "needs query, key and value of 2 to 5 dimensions, got"
            check(2 <= tensor.ndim <= _RANK, label, f"{needs} {name} of sizes {tuple(tensor.shape)}")
        keys, size = key.shape[-2], query.shape[-1]
        check(key.shape[-1] == size, label, f"needs query and key of one size, got {size} and {key.shape[-1]}")
        fits = value.shape[-2] == keys
        check(fits, label, f"needs key and value of one length, got {keys} and {value.shape[-2]}")
        heads, kv_heads, value_heads = (_size(t, 2) for t in (query, key, value))
        if enable_gqa:
            least = min(t.ndim for t in (query, key, value))
            check(least > 2, label, "needs dimensions of heads with enable_gqa")
            check(
                value_heads == kv_heads,
                label,
                f"needs key and value of as many heads, got {kv_heads} and {value_heads}",
            )
            fits = heads % kv_heads == 0 if kv_heads > 0 else heads == 0
            what = f"got {heads} and {kv_heads}"
            check(fits, label, f"needs heads of the query that are a multiple of the key's, {what}")
        else:
            what = f"got {heads}, {kv_heads} and {value_heads}"
            needs = f"needs query, key and value of as many heads, or enable_gqa, {what}"
            heads = kv_heads = _broadcast(label, needs, heads, kv_heads, value_heads)
        rank = max(query.ndim, key.ndim, value.ndim)
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        needs = f"needs query, key and value of one batch, got sizes {shapes}"
        lead = [_broadcast(label, needs, *(_size(t, d) for t in (query, key, value))) for d in range(rank - 1, 2, -1)]
        shape = (*lead, *[heads][: rank - 2], query.shape[-2], value.shape[-1])
        if attn_mask is not None:
            _check_mask(label, query, attn_mask, (*shape[:-1], keys))
            check(not is_causal, label, "needs attn_mask or is_causal, got both")
        check(0 <= dropout_p <= 1, label, f"needs dropout_p from 0 to 1, got {dropout_p}")
        batch: Any = 1
        for n in lead:
            batch = batch * n
        sizes = {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": query.shape[-2], "keys": keys, "size": size,
            "value_size": value.shape[-1], "has_mask": attn_mask is not None, "is_causal": bool(is_causal),
            "has_dropout": dropout_p > 0, "projected": _size(key_projection, 1) if key_projection is not None else 0,
        }  # fmt: skip
        return Problem(str(query.device), query.dtype, sizes, shape)

    def asked(self, algorithm: str, *args: Any, **kwargs: Any) -> Problem:
        """Checks tensors among the algorithm's own parameters, too."""
        problem = super().asked(algorithm, *args, **kwargs)
        if "parameters" in problem.sizes:
            own = {p.name: kwargs.get(p.name, p.default) for p in registry.parameters(self.name, algorithm)}
            patterns.check_own(f"ai3::{self.name}_{algorithm}", args[0], problem.sizes, problem.shape, own)
        return problem

    tags = (torch.Tag.nondeterministic_seeded,)

    def draw(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """What dropout's masks are computed from, in both passes."""
        dropout = args[4] if len(args) > 4 else options.get("dropout_p", 0.0)
        return {"dropout_seed": torch.randint(2**62, (1,), device=args[0].device)} if dropout else {}

    def fake(self, algorithm: str, *args: Any, **kwargs: Any) -> Tensor:
        """(N, L, H, E) in memory where the query is, as models have it before they split heads and after they join them."""
        query = args[0]
        problem = self.checked(algorithm, *args, **kwargs)
        several = len(problem.shape) == query.ndim == 4 and query.shape[1] > 1 and query.shape[2] > 1
        if several and query.stride(1) < query.stride(2):
            n, h, q, e = problem.shape
            return problem._replace(shape=(n, q, h, e)).empty(query.device).transpose(1, 2)
        return problem.empty(query.device)

    def save(self, ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """With the log-sum-exp, where the algorithm keeps one."""
        query, key, value, mask, ctx.dropout, ctx.causal = inputs
        ctx.scale, ctx.grouped = options.get("scale"), options.get("enable_gqa", False)
        ctx.sight = Sight.of(ctx.causal, options)
        kept = output if isinstance(output, tuple) else (None, None)
        ctx.own, tensors = _own(ctx.algorithm, options)
        ctx.save_for_backward(query, key, value, mask, *kept, options.get("dropout_seed"), *tensors)

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the algorithm's own backward operator; a mask's gradient, and those without one, in PyTorch's functions."""
        query, key, value, mask, output, logsumexp, seed, *tensors = ctx.saved_tensors
        names = [name for name, value in ctx.own.items() if value is _TENSOR]
        given = dict(zip(names, tensors, strict=True))
        first = len(ctx.needs) - len(names)  # behind a seed, where the operator has one
        needs, own_needs, rank = ctx.needs[:4], dict(zip(names, ctx.needs[first:], strict=True)), grad.ndim
        of_seed = [None] * (first - 6)
        if ctx.operator is None or logsumexp is None or needs[3]:
            own = ctx.own | given | {"dropout_seed": seed}
            call = plain(ctx.algorithm, query, key, value, mask, ctx.sight, ctx.scale, ctx.grouped, own, ctx.dropout)
            found = call.backward(grad, needs[3])
            wanted = [*zip(("query", "key", "value", "attn_mask"), needs, strict=True), *own_needs.items()]
            back = [found.get(name) if needed else None for name, needed in wanted]
            return (*back[:4], None, None, *of_seed, *back[4:])
        lead = grad.shape[:-3]

        def wide(tensor: Tensor, heads: Any) -> Tensor:
            return _expanded(tensor, lead, heads if rank > 2 else None)

        heads = None if ctx.grouped else grad.shape[-3] if rank > 2 else None
        all_wide = [wide(t, heads) for t in (query, key, value)]
        for name, tensor in given.items():
            if tensor is not None and name in _LIKE:
                like = all_wide[_LIKE[name]]
                given[name] = wide(fitted(tensor, rank), like.shape[-3] if rank > 2 else None)
        options = {"scale": ctx.scale, "enable_gqa": ctx.grouped, "dropout_seed": seed, **ctx.options, **given}
        asked = [*needs[:3], *own_needs.values()]
        asked += [False] * (len(ctx.operator._schema.returns) - len(asked))
        grads = ctx.operator(grad, *all_wide, mask, output, logsumexp, ctx.dropout, ctx.causal, asked, **options)
        pairs = zip(grads, (query, key, value, *tensors), asked, strict=False)
        back = [reduced(g, t) if wanted and t is not None else None for g, t, wanted in pairs]
        return (*back[:3], None, None, None, *of_seed, *back[3:])

    def pytorch(self, *args: Any, **options: Any) -> Tensor:
        """In functions that have every derivative, which PyTorch's fused ones do not."""
        return self.by_definition("", *args, **options)

    def by_definition(self, algorithm: str, *args: Any, **options: Any) -> Tensor:
        """The same, of an algorithm's pattern."""
        query, key, value, mask, dropout, causal = self.in_full(f"ai3::{self.name}", args)
        scale, grouped = options.get("scale"), options.get("enable_gqa", False)
        sight = Sight.of(causal, options)
        return plain(algorithm, query, key, value, mask, sight, scale, grouped, options, dropout).forward()

    def derivable(self, algorithm: str) -> Callable[..., Tensor]:
        """`by_definition` of that algorithm."""
        return functools.partial(self.by_definition, algorithm)

    def vmap(self, op: Callable[..., Any], size: int, dims: Dims, *args: Any, **options: Any) -> tuple[Any, Any]:
        """One more dimension in front; of five already, one call for each sample."""
        tensors = [*args[:4], None][:4]
        at = [*dims, None][:4]
        moved = [t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, at, strict=True)]
        samples = [d is not None for d in at]
        rank = max(t.ndim - s for t, s in zip(moved[:3], samples[:3], strict=True))
        if rank < _RANK and options.get("dropout_seed") is None:
            if not any(samples[:3]):  # a mask of each sample's own
                moved[0], samples[0] = moved[0].expand(size, *moved[0].shape), True
            for i, (t, sample) in enumerate(zip(moved, samples, strict=True)):
                if sample:
                    moved[i] = t.reshape(size, *[1] * (rank + 1 - t.ndim), *t.shape[1:])
            result = op(*moved, *args[4:], **options)
        else:
            each = (
                op(*(t[i] if s else t for t, s in zip(moved, samples, strict=True)), *args[4:], **options)
                for i in range(size)
            )
            results = [*each]
            several = isinstance(results[0], tuple)
            result = tuple(map(torch.stack, zip(*results, strict=True))) if several else torch.stack(results)
        return result, (0, 0) if isinstance(result, tuple) else 0

    def flops(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        """Both products over all pairs."""
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    # Tests and benchmarks ---------------------------------------------------------------------------------------------
    signed_zeros = False  # a weighted sum of zeros
    cases = (
        Case(((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4))),
        Case(((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))),
        Case(((3, 5, 7), (3, 6, 7), (3, 6, 9))),
        Case(((2, 1, 2, 3, 4), (2, 1, 2, 5, 4), (2, 1, 2, 5, 4))),
        Case(((1, 2, 70, 16), (1, 2, 140, 16), (1, 2, 140, 24))),
        Case(((1, 2, 66, 8), (1, 2, 66, 8), (1, 2, 66, 8), None), (0.0, True)),
        Case(((1, 1, 19, 8), (1, 1, 5, 8), (1, 1, 5, 8), None), (0.0, True)),
        Case(((1, 1, 5, 8), (1, 1, 19, 8), (1, 1, 19, 8), None), (0.0, True)),
        Case(((2, 2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (9, 11))),
        Case(((2, 2, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (2, 1, 1, 11))),
        Case(((2, 2, 20, 8), (2, 2, 35, 8), (2, 2, 35, 8), (2, 2, 20, 35))),
        Case(((2, 2, 20, 8), (2, 2, 35, 8), (2, 2, 35, 8), (2, 1, 20, 35)), (), (), ("", "", "", "bool")),
        Case(((2, 2, 20, 8), (2, 2, 35, 8), (2, 2, 35, 8), (1, 1, 35)), (), (), ("", "", "", "bool")),
        Case(((2, 1, 1, 16), (2, 1, 40, 16), (2, 1, 40, 16))),
        Case(((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2))),
        Case(((1, 2, 150, 16), (1, 2, 150, 16), (1, 2, 150, 24))),
        Case(((3, 41, 8), (3, 41, 8), (3, 41, 8))),
        Case(((1, 2, 0, 4), (1, 2, 5, 4), (1, 2, 5, 4))),
        *(
            Case(((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)), (), (layout,) * 3)
            for layout in ("transposed", "sliced", "expanded", "channels_last")
        ),
    )
    layers = (
        Case(((1, 12, 197, 64),) * 3),
        Case(((1, 12, 128, 64),) * 3),
        Case((*((1, 8, 256, 64),) * 3, None), (0.0, True)),
        Case(((64, 4, 49, 32),) * 3),
    )

    def definition(self, algorithm: str) -> Callable[..., Tensor]:
        """Of the sparse ones, and linformer, in PyTorch's functions."""
        own = (*patterns.SPARSE, "linformer")
        return super().definition(algorithm) if algorithm not in own else self.derivable(algorithm)

    def own_options(self, algorithm: str) -> dict[str, Any]:
        """Patterns that are seen in small cases."""
        lists = dict.fromkeys(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), True)
        options: dict[str, dict[str, Any]] = {
            "block_sparse": {**lists, "block_size": 16},
            "longformer": {"window": 8, "global_tokens": 2},
            "bigbird": {"block_size": 4, "random_blocks": 2, "seed": 3},
            "linformer": dict.fromkeys(patterns.PROJECTIONS, True),
        }
        return options.get(algorithm, {})

    def own_operands(self, algorithm: str, args: Sequence[Any]) -> dict[str, Any]:
        """Projections; or lists of two partial blocks, one of them twice where there is no other, and of a full one."""
        options, (query, key) = self.own_options(algorithm), args[:2]
        if algorithm == "linformer":  # one for all heads, one for each
            keys = _size(key, 1)
            heads = () if query.ndim < 3 else (max(_size(query, 2), _size(key, 2)),)
            shapes = ((3, keys), (*heads, 3, keys))
            made = [torch.arange(math.prod(s), dtype=torch.float64).mul(2.4).sin().reshape(s) for s in shapes]
            return {n: (t / max(1, keys) ** 0.5).to(query) for n, t in zip(patterns.PROJECTIONS, made, strict=True)}
        if algorithm != "block_sparse":
            return options
        rows, blocks = (-(-_size(t, 1) // options["block_size"]) for t in (query, key))
        row, each = torch.arange(rows), 2 if blocks else 0
        near = torch.stack([row % max(blocks, 1), (row + 1) % max(blocks, 1)], -1)
        lists = {
            "kv_num_blocks": torch.full((rows,), each), "kv_indices": near,
            "full_kv_num_blocks": (row % 2).clamp_max(each), "full_kv_indices": (near[:, :1] + 2) % max(blocks, 1),
        }  # fmt: skip
        return options | {name: t.to(query.device) for name, t in lists.items()}

    def magnitudes(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the values: weights are what they are."""
        query, key, value, *rest = values
        return [query, key, None if value is None else value.abs(), *rest]

    def terms(self, case: Case) -> int:
        """Products of a score and of an output."""
        query, key = case.shapes[:2]
        assert query is not None
        assert key is not None
        return query[-1] + key[-2]

    def backward_call(self, call: Any) -> list[Any] | None:
        """Of cases whose tensors have one batch."""
        query, key, value, mask = [*call.tensors, None][:4]
        forward = getattr(torch.ops.ai3, f"_attention_{call.info.name}_forward").default
        options = call.options(query, key, value, mask)
        output, logsumexp = forward(query, key, value, mask, *call.case.arguments, **options)
        dropout, causal = call.case.arguments or (0.0, False)
        return [call.grad(), query, key, value, mask, output, logsumexp, dropout, causal]

    def made_up(self, draw: Draw) -> Case:
        """Any number of heads, lengths and sizes."""
        size = draw.pick((1, 3, 8, 16, 32, 40, 64, 80, 128))
        values = size if draw.chance(0.7) else draw.pick((1, 8, 24, 64))
        queries, keys = (draw.pick((1, 2, 7, 16, 17, 49, 64, 77, 127, 197)) for _ in range(2))
        lead = draw.pick(((1,), (2, 3), (1, 12), (4, 1), (1, 2, 3)))
        shapes = ((*lead, queries, size), (*lead, keys, size), (*lead, keys, values))
        if draw.chance(0.3):
            return Case((*shapes, draw.pick(((queries, keys), (1, keys)))))
        return Case((*shapes, None), (0.0, draw.chance(0.5)))

    def bad_calls(self, new: Callable[..., Tensor], other: Any) -> Iterator[BadCall]:
        """As `Tested.bad_calls`."""
        q, k, v = new(1, 2, 3, 4), new(1, 2, 5, 4), new(1, 2, 5, 4)
        yield "value longer than key", [q, k, new(1, 2, 6, 4)], []
        yield "key of another size", [q, new(1, 2, 5, 6), v], []
        yield "other heads", [q, new(1, 3, 5, 4), new(1, 3, 5, 4)], []
        yield "other batch", [q, new(2, 2, 5, 4), new(3, 2, 5, 4)], []
        yield "one dimension", [new(4), new(4), new(4)], []
        yield "value of another dtype", [q.double(), k.double(), v.float()], []
        yield "integers", [q.int(), k.int(), v.int()], []
        yield "mask that does not fit", [q, k, v, new(3, 4)], []
        yield "mask of more dimensions", [q, k, v, new(1, 1, 1, 3, 5)], []
        yield "integer mask", [q, k, v, new(3, 5).int()], []
        yield "mask and causal", [q, k, v, new(3, 5)], [0.0, True]
        yield "dropout beyond 1", [q, k, v, None], [1.5]


def _size(tensor: Tensor, d: int) -> Any:
    """Of dimension d, counted from the last one."""
    return tensor.shape[-1 - d] if d < tensor.ndim else 1


def _broadcast(label: str, needs: str, *sizes: Any) -> Any:
    size: Any = 1
    for other in sizes:
        if size == 1:
            size = other
        check(other == 1 or other == size, label, needs)
    return size


def _check_mask(label: str, query: Tensor, mask: Tensor, scores: Sequence[Any]) -> None:
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    fits = mask.ndim <= len(scores) and all(m == 1 or m == s for m, s in pairs)
    check(fits, label, f"needs attn_mask that broadcasts to {tuple(scores)}, got {tuple(mask.shape)}")
    fits = mask.dtype in (torch.bool, torch.float32, query.dtype)
    check(fits, label, f"needs attn_mask of bool, float32 or the query's dtype, got {mask.dtype}")
    what = f"got {query.device} and {mask.device}"
    check(mask.device == query.device, label, f"needs query and attn_mask on one device, {what}")


def _expanded(tensor: Tensor, lead: Sequence[Any], heads: Any) -> Tensor:
    """With the output's batch, and its heads where `heads` are given; nothing is copied."""
    rank = len(lead) + 3
    if heads is None and tensor.ndim < 3:
        return tensor
    tensor = tensor.reshape(*[1] * (rank - tensor.ndim), *tensor.shape)
    return tensor.expand(*lead, tensor.shape[-3] if heads is None else heads, *tensor.shape[-2:])


class _Marker:
    """In the place of a tensor, which is kept elsewhere."""


_TENSOR = _Marker()
_LIKE = {
    "global_query": 0,
    "global_key": 1,
    "global_value": 2,
    "rel_h": 0,
    "rel_w": 0,
}  # laid out as query, key and value


def _own(algorithm: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor | None]]:
    """An algorithm's own parameters, and the tensors among them, in the schema's order."""
    own, tensors = {}, []
    for p in registry.parameters("attention", algorithm):
        if p.kind == "tensor":
            own[p.name] = _TENSOR
            tensors.append(options.get(p.name))
        else:
            own[p.name] = options.get(p.name, p.default)
    return own, tensors


# Operators of gradients -----------------------------------------------------------------------------------------------
def register_forward(rules: Attention, op: OpOverload, algorithm: str) -> None:
    """ai3::_attention_<algorithm>_forward: output and log-sum-exp, which is only for the operator of the gradients.

    It has the output's derivatives: an outer level of torch.func's transforms takes them of this operator.
    """
    keep = rules.saver(algorithm)

    def fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output = rules.fake(algorithm, *args, **options)
        wide = torch.promote_types(output.dtype, torch.float32)
        return output, torch.empty(output.shape[:-1], dtype=wide, device=output.device)

    def save(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        if hasattr(ctx, "tangents"):
            ctx.tangents = ctx.tangents[0], None
        keep(ctx, inputs, options, output)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return rules.backward(ctx, grads[0])

    def pytorch(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output = rules.by_definition(algorithm, *args, **options)
        return output, output[..., 0].detach()

    base.register_fake(op, fake)
    base.register_autograd(op, backward, save, pytorch)
    base.register_vmap(op, rules.vmap)
    base.register_flops(op, rules.flops)


def register_backward(rules: Attention, op: OpOverload, algorithm: str) -> None:
    """ai3::_attention_<algorithm>_backward: its fake kernel, second derivatives, vmap."""
    own, count = [n for n in base.own_tensors(op) if n != "dropout_seed"], len(op._schema.returns)

    def fake(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        output: Tensor,
        logsumexp: Tensor,
        dropout: float,
        causal: bool,
        wanted: list[bool],
        **options: Any,
    ) -> tuple[Tensor, ...]:
        label = f"ai3::attention_{algorithm}"
        shape = rules.asked(algorithm, query, key, value, mask, dropout, causal, **options).shape
        fits = grad.shape == output.shape == shape
        what = f"got {tuple(output.shape)} and {tuple(grad.shape)}"
        check(fits, label, f"needs output and grad_output of sizes {tuple(shape)}, {what}")
        inputs = [query, key, value, *(options.get(name) for name in own)]
        inputs += [None] * (count - len(inputs))
        pairs = zip(inputs, wanted, strict=True)
        return tuple(query.new_empty(t.shape if w and t is not None and t.is_floating_point() else 0) for t, w in pairs)

    def pytorch(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        output: Tensor,
        logsumexp: Tensor,
        dropout: float,
        causal: bool,
        wanted: list[bool],
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> tuple[Tensor | None, ...]:
        sight = Sight.of(causal, options)
        found = plain(algorithm, query, key, value, mask, sight, scale, enable_gqa, options, dropout).backward(grad)
        names = ["query", "key", "value", *own]
        pairs = zip(names, wanted, strict=False)
        results = [found.get(name) if w else None for name, w in pairs]
        return (*results, *[None] * (count - len(results)))

    def save(ctx: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Not output and log-sum-exp: the second derivatives are those of query, key and value alone."""
        grad, query, key, value, mask, _, _, ctx.dropout, causal, ctx.wanted = inputs
        ctx.scale, ctx.grouped, ctx.sight = options["scale"], options["enable_gqa"], Sight.of(causal, options)
        ctx.own, tensors = _own(algorithm, options)
        ctx.save_for_backward(grad, query, key, value, mask, options["dropout_seed"], *tensors)

    def double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, query, key, value, mask, seed, *tensors = ctx.saved_tensors
        all_own = ctx.own | dict(zip(own, tensors, strict=True)) | {"dropout_seed": seed}
        call = plain(algorithm, query, key, value, mask, ctx.sight, ctx.scale, ctx.grouped, all_own, ctx.dropout)
        names = ["query", "key", "value", *own]
        given = {n: t if w else None for n, t, w in zip(names, grads, ctx.wanted, strict=False)}
        of_grad, found = call.second(grad, given)
        return (of_grad, *(found.get(n) for n in names[:3]), *[None] * 7, *(found.get(n) for n in own))

    base.register_fake(op, fake)
    base.register_autograd(op, double_backward, save, pytorch)
    base.register_vmap(op, vmap_backward)
    base.register_flops(op, lambda grad, *shapes, **_: 2 * rules.flops(*shapes))


def vmap_backward(
    op: Callable[..., tuple[Tensor, ...]], size: int, dims: Dims, *args: Any, **options: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """One call for each sample."""
    pairs = enumerate(zip(args, dims, strict=False))
    tensors = {i: a.movedim(d, 0) for i, (a, d) in pairs if isinstance(d, int)}
    results = [op(*(tensors[j][i] if j in tensors else a for j, a in enumerate(args)), **options) for i in range(size)]
    return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])


Attention.rules = {"forward": register_forward, "backward": register_backward}


# Steps of networks and programs ------------------------------------------------------------------------------------------
def _step_arguments(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> tuple[Any, ...] | None:
    """Of a call of four dimensions, whose batches and heads are the same or grouped."""
    shapes = [t.meta["shape"] for t in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or dropout:
        return None
    (n, heads, *_), (m, kv_heads, *_), (other, value_heads, *_) = shapes
    one = len({t.meta["scales"][0] for t in (query, key, value)}) == 1  # not one that is expanded at some batches
    fits = (
        one and n == m == other and kv_heads == value_heads and (heads == kv_heads or (gqa and heads % kv_heads == 0))
    )
    if not fits or (mask is not None and mask.meta["dtype"] not in (torch.bool, query.meta["dtype"])):
        return None
    return query, key, value, mask, bool(causal), scale


class AttentionStep(Step):
    """A line "attention_flash %0 %1 %2 %3 scale=0.125 is_causal=0 softcap=50.0", the last value a mask."""

    operation = "attention"
    values = ("key", "value", "attn_mask")

    @staticmethod
    def compute(
        input: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        *,
        algorithm: str = "default",
    ) -> Tensor:
        """As torch.nn.functional.scaled_dot_product_attention, with grouped heads where there are fewer of the key.

        `softcap` c: of c * tanh(scores / c), which PyTorch's function has not.
        """
        grouped = input.shape[-3] != key.shape[-3]
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(input.dtype)
        usual: Callable[..., Tensor] = _sdpa
        if softcap:
            own = torch.ops.ai3
            exact = input.dtype == torch.float64 or input.is_cuda  # where flash has no softcap
            usual = own.attention_math.default if exact else own.attention_flash.default
        function, capped = computed("attention", usual, algorithm, input), {"softcap": softcap} if softcap else {}
        return function(input, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=grouped, **capped)

    stands_for: ClassVar = {torch.ops.aten.scaled_dot_product_attention.default: _step_arguments}

    @staticmethod
    def works_on_rows(*_: Any) -> bool:
        """Rows see others."""
        return False

    def options(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """As the class says."""
        size, scale = arguments["input"].shape[-1], arguments["scale"]
        scale = 1 / math.sqrt(size) if scale is None else scale
        softcap = {"softcap": repr(float(arguments["softcap"]))} if arguments["softcap"] else {}
        return {"scale": repr(float(scale)), "is_causal": str(int(arguments["is_causal"]))} | softcap

    def arguments(self, line: Line, *operands: Tensor) -> tuple[Any, ...]:
        """As the class says."""
        query, key, value, *masks = operands
        causal, scale = bool(line.flag("is_causal")), float(line.options["scale"])
        return query, key, value, masks[0] if masks else None, 0.0, causal, scale, query.shape[-3] != key.shape[-3]


# Calls in models ------------------------------------------------------------------------------------------------------
def _unknown(module: nn.Module, input: Tensor) -> tuple[Any, ...]:
    raise LookupError("queries, keys and masks are known at the call")


class AttentionCall(Call):
    """torch.nn.functional.scaled_dot_product_attention."""

    operation = "attention"
    functions = (F.scaled_dot_product_attention,)
    function = staticmethod(_sdpa)
    modules: ClassVar = {nn.MultiheadAttention: _unknown}
    forwards: ClassVar = {nn.MultiheadAttention: multihead.attend}
    wholes: ClassVar = {windows.NAME: windows.attend}
    elsewhere: ClassVar = of_transformers.ENTRIES

    def arguments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Any, ...]:
        """The same, all by position."""
        return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa

    def choose(self, algorithm: Any) -> None:
        """The operator takes the last two by name."""
        if self.is_elsewhere and algorithm.name == "default":
            algorithm = Algorithm(self.elsewhere[self.whole].algorithms[0])
        super().choose(algorithm)
        operator: Any = self.operator

        def call(
            query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, gqa: Any, **options: Any
        ) -> Any:
            return operator(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa, **options)

        self.operator = call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`default` leaves to PyTorch what it has the faster call for (docs/algorithms/attention/default.md)."""
        if self.whole:
            return self.wholes[self.whole](self, *args, **kwargs)
        return self.run_or_leave(*self.arguments(*args, **kwargs))

    def unsuited(self, algorithm: Algorithm) -> str:
        """A module with a pattern of its own is computed by that alone."""
        if not self.is_elsewhere or algorithm.name == "default":
            return ""
        name, known = self.whole.rpartition(":")[2], self.elsewhere[self.whole].algorithms
        if algorithm.name not in known:
            return f"is not what {name} computes, which {' or '.join(known)} does"
        return f"takes its parameters from {name}" if algorithm.parameters else ""

    def of_elsewhere(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """By the entry's algorithm, or by the class itself where that does more, which is counted with the reason."""
        entry = self.elsewhere[self.whole]
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.operator is None:
            self.revive()
        if self.operator is None and self.watch:
            self.watch(self)
            self.example = self.example or self.specs(_like(entry, module, hidden))
            return forward(module, *args, **kwargs)
        reason = self.missing or entry.left(module, *args, **kwargs) or self._refused(entry, module, hidden)
        reason = reason or self._slower(entry, module, hidden)
        if not reason:
            return entry.forward(module, self, *args, **kwargs)
        if self.strict:
            raise RuntimeError(f"ai3_ops: {self.layer or 'the model itself'} ({self.operation}): {reason}")
        self.count_left(reason)
        return forward(module, *args, **kwargs)

    def _slower(self, entry: of_transformers.Entry, module: nn.Module, hidden: Tensor) -> str:
        """Why `default` leaves a call to the module's class, "" where it does not, or the sizes may change."""
        if self.requested != "default" or self.strict or not isinstance(hidden, Tensor):
            return ""
        if torch.compiler.is_compiling() and not has_constant_sizes((hidden,)):
            return ""
        trains = torch.is_grad_enabled() and not is_exporting()
        trains = trains and any(t.requires_grad for t in (hidden, *module.parameters()))
        return entry.slower(module, hidden, trains)

    def _refused(self, entry: of_transformers.Entry, module: nn.Module, hidden: Tensor) -> str:
        """Why the algorithm cannot compute such a module's call, which programs find out themselves."""
        if torch.compiler.is_compiling() or not isinstance(hidden, Tensor):
            return ""
        key = self.key((hidden,))
        if key not in self.refused:
            self.refused[key] = self.refusal_now(_like(entry, module, hidden))
        return self.refused[key]

    def own(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        **own: Any,
    ) -> Tensor:
        """The algorithm's answer with tensors among its own parameters, which entries of modules give it."""
        args = (query, key, value, mask, dropout, False, scale, False)
        if not torch.compiler.is_compiling():
            if self.example is None or self.calls == 0:
                self.example = self.specs(args)
            self.calls += 1
        operator: Any = self.operator
        return operator(*args, **own)

    def gains(self, args: tuple[Any, ...]) -> bool:
        """Where there is enough to compute, and PyTorch does not lead in its dtype."""
        query, key = args[:2]
        heads, queries, keys = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
        grouped = args[7] and query.shape[:-2] != key.shape[:-2]
        return self.gains_sizes(query, heads, queries, keys, grouped)

    def gains_sizes(self, like: Tensor, heads: int, queries: int, keys: int, grouped: bool = False) -> bool:
        """As `gains`, of so many heads in all batches, of a tensor's dtype and device."""
        few = queries <= _FEW
        return (
            like.device.type == "cpu"
            and not leads_in(like.dtype)
            and heads * queries * keys >= (_SCORES_OF_FEW if few else _SCORES)
            and not (few and keys < (_KEYS_OF_GROUPS if grouped and queries > 2 else _KEYS_OF_FEW))
        )

    def why_sizes_left(self, like: Tensor, heads: int, queries: int, keys: int) -> str:
        """Why PyTorch has the faster call, "" where it has not."""
        if self.gains_sizes(like, heads, queries, keys):
            return ""
        return UNMEASURED if like.is_cuda else self.why_left

    @property
    def is_free(self) -> bool:
        """Whether it may leave calls to PyTorch that gain nothing."""
        return self.algorithm is not None and self.algorithm.name == "default" and not self.strict

    def count_left(self, reason: str) -> None:
        """A call that PyTorch's module made."""
        if not torch.compiler.is_compiling():
            self.calls, self.torch_calls, self.reason = self.calls + 1, self.torch_calls + 1, reason

    def gains_in_training(self, args: tuple[Any, ...]) -> bool:
        """Where there is more to compute than the rules of gradients take, and the mask has none."""
        mask, dropout = args[3:5]
        needed, many = mask is not None and mask.requires_grad, args[0].shape[:-2].numel() >= _MANY_HEADS
        slow = dropout or (args[0].dtype == torch.bfloat16 and PAIRS)
        least = _SCORES_OF_SLOW_STEPS if slow else _SCORES_OF_MANY if many else _SCORES_IN_TRAINING
        several = args[0].shape[-2] > _FEW
        return several and self.gains(args) and not needed and scores_of(args[0], args[1]) >= least

    def resolved(self, rule: str, args: tuple[Any, ...]) -> str:
        """With the last two by name."""
        return registry.resolve(self.operation, rule, *args[:6], scale=args[6], enable_gqa=args[7])

    def plan(self, args: tuple[Any, ...]) -> CallPlan | None:
        """None: beside what it computes, a call takes no time."""
        return None


def _like(entry: of_transformers.Entry, module: nn.Module, hidden: Tensor) -> tuple[Any, ...]:
    """Arguments as a module's call has them, of hidden states."""
    q = of_transformers.split(torch.empty_like(hidden), getattr(module, entry.heads))
    return q, q, q, None, 0.0, False, None, False


_SCORES, _SCORES_IN_TRAINING = 2**15, 2**20
_FEW, _SCORES_OF_FEW = 4, 2**14  # queries that pass once over the keys (decoding)
_KEYS_OF_FEW = 2**7  # fewer were not measured
_KEYS_OF_GROUPS = 2**12  # from so many on four queries of grouped heads gain, whose product PyTorch's library does well
_MANY_HEADS, _SCORES_OF_MANY = 32, 2**18  # of all batches: short sequences, of which few are not faster in training
_SCORES_OF_SLOW_STEPS = 2**17  # PyTorch trains slowly with dropout, computed step by step, and in bfloat16


def scores_of(query: Tensor, key: Tensor) -> int:
    """How many there are, where both have one batch."""
    return query.shape[:-1].numel() * key.shape[-2]
