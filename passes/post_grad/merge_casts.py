"""Makes one cast of two.

Rule: of ``y = cast(cast(x, a), b)``, where every value of ``x``'s dtype is one of ``a``'s too, the inner cast goes; and
both go if ``b`` is ``x``'s dtype::

    wide: f32 = _to_copy(x, dtype=float32); y: bf16 = _to_copy(wide, dtype=bfloat16)        # x: bf16
    y = x

    i: i64 = _to_copy(mask, dtype=int64); y: f32 = _to_copy(i, dtype=float32)               # mask: bool
    y: f32 = _to_copy(mask, dtype=float32)

Not if

1. ``a`` is narrower than ``x``: the inner cast rounds, and rounding twice is not rounding once;
2. ``x`` is floating-point and ``b`` an integer type: what a number out of range becomes is the hardware's choice;
3. a cast changes device or layout, or the result would lie otherwise in memory;
4. both would go, and ``y`` or ``x`` is returned, or ``x`` is an input: ``y`` is a copy of it.

Off by default: no graph of seven model families had such casts, under ``autocast`` neither (those it makes round).
"""

from __future__ import annotations

import torch
from torch import fx

from ..context import PassContext
from ..editing import call, is_input, owner, remove, replace, same_tensor, shared_memory, value_of
from ..registry import Pass

aten = torch.ops.aten
prims = torch.ops.prims

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def merge_casts(module: fx.GraphModule, context: PassContext) -> int:
    """Merges casts in place; returns how many."""
    kept = shared_memory(module.graph)
    fired = 0
    for node in list(module.graph.nodes):
        inner = _cast_of(node)
        source = None if inner is None else _cast_of(inner)
        if inner is None or source is None:
            continue
        reason = _reason_against(source, inner, node, kept)
        if reason is not None:
            context.refuse(node, reason, matched=2, of=2)
        elif _merge(source, inner, node, context):
            fired += 1
    if fired:
        module.recompile()
    return fired


def _cast_of(node: fx.Node) -> fx.Node | None:
    """What a node casts to another dtype, if that is all it does."""
    if node.op != "call_function" or node.target not in (aten._to_copy.default, prims.convert_element_type.default):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or value_of(source) is None or value_of(node) is None:
        return None
    if any(key not in ("dtype", "memory_format") and item is not None for key, item in node.kwargs.items()):
        given, value = node.kwargs, value_of(source)
        assert value is not None
        same = given.get("device") in (None, value.device) and given.get("layout") in (None, torch.strided)
        if not same or given.get("pin_memory") or given.get("non_blocking"):
            return None
    return source


def _reason_against(source: fx.Node, inner: fx.Node, node: fx.Node, kept: set[fx.Node]) -> str | None:
    first, between, last = (item.meta["val"].dtype for item in (source, inner, node))
    if not holds_all(between, first):
        return f"the cast from {first} to {between} rounds"
    if first in _FLOATS and last in _INTEGERS:
        return "numbers out of range may become others"
    if first == last:
        if not same_tensor(source, node):
            return "its result lies otherwise in memory"
        if node in kept or source in kept or is_input(owner(source)):
            return "its memory is returned, or that of an input"
    return None


def _merge(source: fx.Node, inner: fx.Node, node: fx.Node, context: PassContext) -> bool:
    if source.meta["val"].dtype == node.meta["val"].dtype:
        if not context.allows(node):
            return False
        remove(node, source)
    else:
        new = call(node, node.target, (source, *node.args[1:]), dict(node.kwargs))
        if not same_tensor(new, node):
            node.graph.erase_node(new)
            context.refuse(node, "its result would lie otherwise in memory", matched=2, of=2)
            return False
        if not context.allows(node):
            node.graph.erase_node(new)
            return False
        replace(node, new)
    if not inner.users:
        inner.graph.erase_node(inner)
    return True


def holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``, so that a cast to ``wide`` loses nothing."""
    if wide == narrow or narrow is torch.bool:
        return wide in (*_FLOATS, *_INTEGERS, torch.bool)
    if wide in _FLOATS and narrow in _FLOATS:
        a, b = torch.finfo(wide), torch.finfo(narrow)
        return a.eps <= b.eps and a.max >= b.max and a.tiny * a.eps <= b.tiny * b.eps
    if wide in _INTEGERS and narrow in _INTEGERS:
        return torch.iinfo(wide).min <= torch.iinfo(narrow).min and torch.iinfo(wide).max >= torch.iinfo(narrow).max
    if wide in _FLOATS and narrow in _INTEGERS:
        return torch.iinfo(narrow).max <= 2 / torch.finfo(wide).eps
    return False


PASS = Pass("post_grad.merge_casts", "Makes one cast of two where the first loses nothing.", merge_casts, default=False)
