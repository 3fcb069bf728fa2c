"""Moves transpositions behind elementwise operators, where that makes them fewer.

Rule, for transpositions by the same permutation ``p`` that nobody else reads::

    a = permute(x, p); b = permute(y, p); c = add(a, b)
    moved = add(x, y); c = permute(moved, p)

    a = permute(x, p); b = relu(a); c = permute(b, q)        # q undoes p, or both make one transposition
    moved = relu(x); b = permute(moved, p); c = permute(b, q)   # which post_grad.merge_views then cancels

Not if a tensor argument is not transposed by ``p`` and has dimensions (it would have to be transposed the other way),
if the operator would give its result other strides, or if nothing would get fewer. Off by default: ONNX Runtime's own
transpose optimizer does it, also through reductions and products.
"""

from __future__ import annotations

import torch
from torch import fx

from ..context import PassContext
from ..editing import call, is_pure, replace, same_tensor, value_of
from ..registry import Pass
from .merge_views import permutation

aten = torch.ops.aten

_PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}


def move_transposes(module: fx.GraphModule, context: PassContext) -> int:
    """Moves transpositions in place; returns how many operators they went behind."""
    fired = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_elementwise(node) and _move(node, context):
            fired += 1
    if fired:
        module.recompile()
    return fired


def _is_elementwise(node: fx.Node) -> bool:
    is_pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return is_pointwise and is_pure(node) and value_of(node) is not None


def _move(node: fx.Node, context: PassContext) -> bool:
    tensors = [item for item in node.all_input_nodes if _has_dimensions(item)]
    if not tensors or any(item.target not in _PERMUTES for item in tensors):
        return False
    orders = [permutation(item) for item in tensors]
    order = orders[0]
    if order is None or any(other != order for other in orders) or order == list(range(len(order))):
        return False
    if any(set(item.users) != {node} for item in tensors):
        context.refuse(node, "others read the transposed tensor", matched=1, of=2)
        return False
    if len(tensors) == 1 and not _meets_transposition(node, order):
        context.refuse(node, "transpositions would not get fewer", matched=1, of=2)
        return False
    sources = {item: item.args[0] for item in tensors}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: sources.get(item, item))
    moved = call(node, node.target, args, kwargs)
    behind = call(node, aten.permute.default, (moved, order))
    if not same_tensor(behind, node) or not context.allows(node):
        context.refuse(node, "its result would lie otherwise in memory", matched=2, of=2)
        node.graph.erase_node(behind)
        node.graph.erase_node(moved)
        return False
    replace(node, behind)
    moved._rename(f"{behind.name}_moved")
    for item in tensors:
        item.graph.erase_node(item)
    return True


def _meets_transposition(node: fx.Node, order: list[int]) -> bool:
    """Whether a chain of elementwise operators leads to a transposition, or to another tensor transposed alike."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in _PERMUTES:
            return True
        if not _is_elementwise(user):
            return False
        others = [item for item in user.all_input_nodes if item is not node and _has_dimensions(item)]
        if others:
            return all(item.target in _PERMUTES and permutation(item) == order for item in others)
        node = user
    return False


def _has_dimensions(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.ndim > 0


PASS = Pass(
    "post_grad.move_transposes", "Moves transpositions behind elementwise operators.", move_transposes, default=False
)
