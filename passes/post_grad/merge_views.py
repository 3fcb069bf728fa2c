"""Merges chains of views, and cancels those that undo each other.

Rule, for ``y = g(f(x))``:

1. ``view`` of ``view``, ``unsqueeze`` or ``squeeze``: ``y = view(x, ...)``;
2. ``permute``, ``transpose`` and ``t`` of each other: one ``permute``, that of both;
3. ``expand`` of ``expand``: the outer one;
4. ``squeeze`` of an ``unsqueeze``, and whatever of the above ends in ``x``'s own shape, strides and order: ``y = x``.

For example::

    t: f32[3, 2] = permute(x, [1, 0]); u: f32[1, 3, 2] = unsqueeze(t, 0); v = view(u, [6]); w = view(v, [2, 3])
    t: f32[3, 2] = permute(x, [1, 0]); w = view(t, [2, 3])

``f`` goes if nobody else reads it, so that nodes never get more.

Not if ``x`` cannot be viewed that way, or not without knowing the symbols in its shape; nor, where ``y`` would be
``x``, if ``y`` is a result of the graph, which must be a tensor of its own.
"""

from __future__ import annotations

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import call, is_row_major, replace, same_sizes, same_tensor, value_of
from ..engine.registry import Pass

aten = torch.ops.aten

_RESHAPES = {aten.view.default, aten._unsafe_view.default}  # not reshape, which may copy
_KEEP_ORDER = {*_RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
_PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}


def merge_views(module: fx.GraphModule, context: PassContext) -> int:
    """Merges views in place; returns how many are gone or became one with another."""
    fired = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _merge(node, context):
            fired += 1
    return fired


def _merge(node: fx.Node, context: PassContext) -> bool:
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or inner.op != "call_function" or not inner.args:
        return False
    source = inner.args[0]
    value, result = value_of(source), value_of(node)
    if not isinstance(source, fx.Node) or value is None or result is None:
        return False
    target, arguments = _merged(node, inner, value, result)
    if target is None:
        return False
    if same_tensor(source, node) and (target is not aten.permute.default or arguments == list(range(value.ndim))):
        merged = replace(node, source, context)
    else:
        reason = _reason_against(target, value, result)
        if reason is not None:
            context.refuse(node, reason, matched=2, of=2)
            return False
        merged = replace(node, call(node, target, (source, arguments), value=result), context)
    if merged and not inner.users:
        inner.graph.erase_node(inner)  # not left to the manager: the next view may be of the same source
    return merged


def _merged(
    node: fx.Node, inner: fx.Node, value: torch.Tensor, result: torch.Tensor
) -> tuple[torch._ops.OpOverload | None, list[object]]:
    """The one operator that does what both do, and its argument besides the tensor; ``None`` if there is none."""
    if node.target in _PERMUTES and inner.target in _PERMUTES:
        first, second = permutation(inner), permutation(node)
        if first is None or second is None:
            return None, []
        return aten.permute.default, [first[i] for i in second]
    if node.target in _KEEP_ORDER and inner.target in _KEEP_ORDER:
        sizes = _sizes(node, result)
        return (None, []) if sizes is None else (aten.view.default, sizes)
    if node.target is aten.expand.default and inner.target is aten.expand.default:
        sizes = node.args[1]
        assert isinstance(sizes, (list, tuple))
        if value.ndim != result.ndim:
            return None, []
        known = [size if size != -1 else result.shape[i] for i, size in enumerate(sizes)]
        return aten.expand.default, known
    return None, []


def _sizes(node: fx.Node, result: torch.Tensor) -> list[object] | None:
    """The sizes to view as, at most one of them left open as -1; ``None`` if more are symbolic and no node has them."""
    if node.target in _RESHAPES:
        sizes = node.args[1]
        assert isinstance(sizes, (list, tuple))
        return list(sizes)
    known = [size if isinstance(size, int) else -1 for size in result.shape]
    if known.count(-1) > 1 or (-1 in known and 0 in known):
        return None
    return list(known)


def permutation(node: fx.Node) -> list[int] | None:
    """The order a ``permute``, ``transpose`` or ``t`` puts its argument's dimensions in."""
    value = value_of(node)
    if value is None:
        return None
    order = list(range(value.ndim))
    if node.target is aten.permute.default:
        dims = node.args[1]
        return [dim % len(order) for dim in dims] if _are_integers(dims) else None
    if node.target is aten.t.default:
        return order[::-1]
    swapped = node.args[1:3]
    if node.target is not aten.transpose.int or not _are_integers(swapped):
        return None
    if order:
        first, second = (dim % len(order) for dim in swapped)
        order[first], order[second] = order[second], order[first]
    return order


def _are_integers(items: object) -> bool:
    return isinstance(items, (list, tuple)) and all(type(item) is int for item in items)


def _reason_against(target: torch._ops.OpOverload, value: torch.Tensor, result: torch.Tensor) -> str | None:
    if target is aten.permute.default:
        return None
    symbolic = [size for size in (*value.shape, *value.stride(), *result.shape) if isinstance(size, torch.SymInt)]
    if target is aten.expand.default:
        return "its sizes are symbolic" if symbolic else None
    if is_row_major(value) and is_row_major(result):
        return None
    if symbolic:
        return "whether its argument can be viewed that way depends on symbols"
    try:
        viewed = torch.empty_strided(value.shape, value.stride(), device="meta").view(result.shape)
    except RuntimeError:
        return "its argument cannot be viewed that way"
    return None if same_sizes(viewed.stride(), result.stride()) else "its result would lie otherwise in memory"


PASS = Pass(
    "post_grad.merge_views",
    "Merges chains of views, and cancels those that undo each other.",
    merge_views,
    cleans_up=True,
)
