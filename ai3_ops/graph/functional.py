"""An exported graph without writes in place, where they are simple: PyTorch's own way traces the whole graph anew."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

# Whose schemas do not tell that they update running statistics, by the argument that makes them.
_STATISTICS = {"batch_norm": "training", "native_batch_norm": "training", "instance_norm": "use_input_stats"}


def functionalize(graph: fx.Graph) -> bool:
    """Makes `relu(x)` of `relu_(x)` and the like; False, with the graph half changed, where a write is seen elsewhere, too.

    What shares memory is told by the example's values that export keeps at the nodes, as "val". A write is simple where only
    what was written to is read later: no view of it, nor what it is a view of; and where that is no input or constant.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in order:
        for memory in _memories(node):
            sharing[memory].append(node)
    for node, place in order.items():
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        if _updates_statistics(node, schema):
            return False
        if not schema.is_mutable:
            continue
        function, into = _without_write(node, schema), node.args[0] if node.args else None
        if function is None or not isinstance(into, fx.Node) or len(_memories(into)) != 1:
            return False
        same = [other for other in sharing[_memories(into)[0]] if order[other] < place]
        seen = [user for other in same if other is not into for user in other.users if order[user] > place]
        if seen or _memories(node) != _memories(into) or any(other.op != "call_function" for other in same):
            return False
        for user in [user for user in into.users if order[user] > place]:
            user.replace_input_with(into, node)
        node.target = function
    return True


def _memories(node: fx.Node) -> list[int]:
    """What tells the memory of a node's tensors from that of others."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)))


def _without_write(node: fx.Node, schema: Any) -> Any:
    """The operator that computes, in the same type, what another one writes into its first argument; None where none does."""
    namespace, _, name = schema.name.partition("::")
    arguments = [a.name for a in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    types = {a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)}
    if not name.endswith("_") or written != arguments[:1] or len(types) != 1:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    function = getattr(packet, schema.overload_name or "default", None)
    if function is None or function._schema.is_mutable:
        return None
    return function if [a.name for a in function._schema.arguments[1:]] == arguments[1:] else None


def _updates_statistics(node: fx.Node, schema: Any) -> bool:
    flag = _STATISTICS.get(schema.name.partition("::")[2])
    if flag is None:
        return False
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    return bool(given.get(flag)) and given.get("running_mean") is not None
