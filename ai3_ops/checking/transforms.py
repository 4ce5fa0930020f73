"""Checks of derivatives: `torch.func`'s transforms nested in each other, tangents, plain autograd, in every order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from ai3_ops.checking.calling import differentiable, has_gradients
from ai3_ops.checking.cases import Call, Tally, arranged, close, few_calls, require
from ai3_ops.checking.gradients import gradient_limit
from ai3_ops.registry import OPERATIONS, AlgorithmInfo

Function = Callable[[Tensor], Tensor]
_POINT = (0.5, -0.25)


# Derivatives of a function of a vector, as a program may take them ----------------------------------------------------
def _along(f: Function) -> Function:
    return lambda t: jvp(f, (t,), (torch.ones_like(t),))[1]


def _pulled(f: Function) -> Function:
    def compute(t: Tensor) -> Tensor:
        y, back, *_ = vjp(f, t)
        return back(torch.ones_like(y))[0]

    return compute


def _sum(f: Function) -> Function:
    return lambda t: f(t).sum()


def _batch(f: Function) -> Function:
    return lambda t: vmap(f)(_around(t))


def _dual(f: Function) -> Function:
    """The second derivatives along (1, ..., 1) of tensors with tangents: forward over reverse, and reverse over forward."""

    def compute(t: Tensor) -> Tensor:
        t = t.detach().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(t, torch.ones_like(t))
            y = f(dual)
            (g,) = torch.autograd.grad(y, dual, create_graph=True)
            (over_forward,) = torch.autograd.grad(forward_ad.unpack_dual(y).tangent, t)
            over_reverse = forward_ad.unpack_dual(g).tangent
            require(over_reverse is not None, "the gradient of a dual number has no tangent")
            return torch.stack([over_reverse, over_forward])

    return compute


# The same by plain autograd alone, row by row -------------------------------------------------------------------------
def _recorded(f: Function) -> Function:
    """The Jacobian."""

    def compute(t: Tensor) -> Tensor:
        t = t if t.requires_grad else t.detach().requires_grad_()
        y = f(t)
        rows = [torch.autograd.grad(v, t, create_graph=True, materialize_grads=True)[0] for v in y.reshape(-1)]
        return torch.stack(rows).reshape(*y.shape, *t.shape)

    return compute


def _recorded_along(f: Function) -> Function:
    return lambda t: _recorded(f)(t).sum(-1)


def _recorded_twice(f: Function) -> Function:
    return _recorded(_recorded(f))


def _loop(f: Function) -> Function:
    return lambda t: torch.stack([f(one) for one in _around(t)])


def _around(t: Tensor) -> Tensor:
    return torch.stack([t, t / 2, -t])


WAYS: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "grad": (grad, _recorded),
    "jacrev": (jacrev, _recorded),
    "jacfwd": (jacfwd, _recorded),
    "hessian": (torch.func.hessian, _recorded_twice),
    "jvp": (_along, _recorded_along),
    "vjp": (_pulled, _recorded),
    "vmap": (_batch, _loop),
    "sum": (_sum, _sum),
    "autograd": (_recorded, _recorded),
    "dual": (_dual, lambda f: lambda t: torch.stack([_recorded_along(_recorded(f))(t)] * 2)),
    **{
        f"autograd.functional.hessian{options or ''}": (
            lambda f, options=options: functools.partial(hessian, f, **options),  # type: ignore[misc]
            _recorded_twice,
        )
        for options in (
            {},
            {"vectorize": True},
            {"vectorize": True, "outer_jacobian_strategy": "forward-mode"},
        )
    },
}
# The last one is taken first. Sums make the gradient's function a scalar one again.
CHAINS: tuple[tuple[str, ...], ...] = (
    *((way,) for way in WAYS if way not in ("sum", "vmap")),
    *((outer, "grad") for outer in ("jacrev", "jacfwd", "jvp", "autograd")),
    *((outer, inner) for outer in ("jacrev", "jacfwd") for inner in ("jacrev", "jacfwd")),
    *((outer, "jvp") for outer in ("grad", "jvp", "autograd")),
    ("autograd", "autograd"),
    ("grad", "sum", "grad"),
    ("grad", "sum", "vjp"),
    ("grad", "sum", "grad", "sum", "grad"),
    ("grad", "sum", "jvp", "grad"),
    ("vmap", "grad", "sum", "grad"),
    ("vmap", "hessian"),
    ("grad", "sum", "grad", "sum", "vmap"),
    ("grad", "sum", "vmap", "jvp"),
    ("jvp", "vmap", "grad"),
)


def _taken(f: Function, chain: Sequence[str], which: int) -> Function:
    for way in reversed(chain):
        f = WAYS[way][which](f)
    return f


def check_transforms(info: AlgorithmInfo, tally: Tally) -> None:
    """Every chain of `CHAINS`, and mixed second derivatives, as plain autograd has them of PyTorch's functions."""
    for call in _some(info):
        leaves, ours, theirs = differentiable(call)
        leaves = [t.detach() for t in leaves]
        point = torch.tensor(_POINT).to(leaves[0])
        for chain in CHAINS:
            got, same = (_taken(_scalar(f, leaves), chain, 0) for f in (ours, theirs))
            wanted = _taken(_scalar(functools.partial(_by_pytorch, call), leaves), chain, 1)
            _compare(call, " of ".join(chain), tally, *(functools.partial(f, point) for f in (got, same, wanted)))
        for inner in range(len(leaves)):
            for outer in {*range(len(leaves))} - {inner}:
                what = f"gradient by tensor {outer} of the gradient by tensor {inner}"
                got, same = (functools.partial(_mixed, f, leaves, inner, outer) for f in (ours, theirs))
                _compare(call, what, tally, got, same, same)


def _some(info: AlgorithmInfo) -> list[Call]:
    """The smallest case, and the smallest one of another rank."""
    found = few_calls(info, 100)
    return [*found[:1], *[c for c in found if len(c.case.shapes[0] or ()) != len(found[0].case.shapes[0] or ())][:1]]


def _by_pytorch(call: Call, *present: Tensor) -> Tensor:
    left = iter(present)
    given = [next(left) if has else t for t, has in zip(call.tensors, has_gradients(call), strict=True)]
    made = arranged(call.info.operation, given, call.case.arguments)
    return OPERATIONS[call.info.operation].derivable(call.info.name)(*made, **call.options(*given))


def _scalar(function: Callable[..., Tensor], leaves: list[Tensor]) -> Function:
    """Of two numbers, by which all tensors move, each in directions of its own; it has every derivative."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((len(_POINT), *t.shape) for t in leaves)
    moves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(leaves[0]) / 4 for shape in shapes]

    def compute(t: Tensor) -> Tensor:
        moved = (
            x + sum(n * m for n, m in zip(t.unbind(), move, strict=True)) for x, move in zip(leaves, moves, strict=True)
        )
        return function(*moved).sin().sum()

    return compute


def _mixed(function: Callable[..., Tensor], leaves: list[Tensor], inner: int, outer: int) -> Tensor:
    """Each level of the transforms sees but its own tensor."""

    def loss(x: Tensor, z: Tensor) -> Tensor:
        values = [x if i == inner else z if i == outer else t for i, t in enumerate(leaves)]
        return function(*values).sin().sum()

    return grad(lambda z: grad(loss)(leaves[inner], z).square().sum())(leaves[outer])


def _compare(
    call: Call,
    name: str,
    tally: Tally,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
    wanted: Callable[[], Tensor],
) -> None:
    try:
        got = ours()
    except RuntimeError as error:
        if "algorithms that support this case" in str(error):
            return tally.skip("refuses what vmap folds the samples into")
        try:
            theirs()
        except RuntimeError:
            return tally.skip(f"{name}: ATen's function raises, too")
        raise AssertionError(f"{call}: {name}: {error}") from error
    expected = wanted()
    require(got.shape == expected.shape, f"{call}: {name}: sizes {tuple(got.shape)}, not {tuple(expected.shape)}")
    close(got, expected, 10 * gradient_limit(call.info, call.dtype), f"{call}: {name}")
    tally.passed += 1
