"""Makes one view of a chain of views.

Rule:

1. a ``Reshape``, ``Squeeze``, ``Unsqueeze`` or ``Flatten`` of another one becomes one ``Reshape`` of the first input,
   if the value between has no other use, and the last shape has at most one symbolic size and no zero (or is the
   constant or computed argument of a ``Reshape`` that copies no size from its input);
2. a ``Transpose`` of a ``Transpose`` becomes one, if the value between has no other use;
3. a ``Transpose`` that moves nothing but dimensions of size one, as that of the heads of one token, counts as a view
   where it stands before or behind one of rule 1;
4. a ``Slice`` of a ``Slice`` of other dimensions becomes one, if all users of the value between are such;
5. where that leaves things as they were before the chain, nothing is left of it.

Before and after (x: [2, 64, 256])::

    v = Reshape(x, [128, 256])               y = Reshape(x, [2, 64, 4, 64])
    w = Reshape(v, [2, 64, 256])
    y = Reshape(w, [2, 64, 4, 64])

It must not fire where the value between is an output of the model, as in the forward graphs of training.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    constant,
    hidden_value,
    integers,
    is_only_used_by,
    new_constant,
    nodes_of,
    permutation,
    producer,
    same_shape,
    sizes,
    substitute,
    use_existing,
)
from ..engine.registry import Pass

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def merge_views(model: ir.Model, context: PassContext) -> int:
    """Merges chains of views in place; returns how many nodes are gone."""
    fired = sum(_merge_slices(model, context, node) for node in nodes_of(model, "Slice"))
    for node in nodes_of(model, "Transpose", *_VIEWS):
        inner = producer(node.inputs[0], "Transpose", *_VIEWS)
        if inner is None or inner.inputs[0] is None:
            continue
        if inner.op_type != node.op_type and not (_keeps_order(inner) and _keeps_order(node)):
            continue
        if not is_only_used_by(inner.outputs[0], node):
            context.refuse(node, f"{inner.outputs[0].name} is needed elsewhere", matched=1, of=2)
            continue
        merge = _merge_transposes if inner.op_type == node.op_type == "Transpose" else _merge_reshapes
        fired += merge(model, context, inner, node)
    return fired


def _keeps_order(node: ir.Node) -> bool:
    """Whether a node leaves all elements in their order."""
    if node.op_type in _VIEWS:
        return True
    shape, order = sizes(node.inputs[0]), permutation(node)
    if shape is None or order is None:
        return False
    moved = [dim for dim in order if shape[dim] != 1]
    return moved == sorted(moved)


def _merge_transposes(model: ir.Model, context: PassContext, inner: ir.Node, node: ir.Node) -> int:
    first, second = permutation(inner), permutation(node)
    if first is None or second is None:
        return 0
    order = [first[i] for i in second]
    if order == sorted(order):
        return _undo(context, inner, node)
    result = node.outputs[0]
    attribute = ir.AttrInt64s("perm", order)
    new = ir.Node("", "Transpose", inner.inputs, [attribute], outputs=[hidden_value(result, "merged")])
    return int(substitute(model, context, [result], [new]))


def _merge_reshapes(model: ir.Model, context: PassContext, inner: ir.Node, node: ir.Node) -> int:
    value, result = inner.inputs[0], node.outputs[0]
    if same_shape(value, result):
        return _undo(context, inner, node)
    target = _target(model, node)
    if target is None:
        context.refuse(node, "its shape cannot be told without what lies between", matched=2, of=2)
        return 0
    new = ir.Node("", "Reshape", [value, target], outputs=[hidden_value(result, "merged")])
    return int(substitute(model, context, [result], [new]))


def _merge_slices(model: ir.Model, context: PassContext, node: ir.Node) -> int:
    inner = producer(node.inputs[0], "Slice")
    first, second = _bounds(inner), _bounds(node)
    if inner is None or first is None or second is None:
        return 0
    value, result = inner.outputs[0], node.outputs[0]
    others = [_bounds(user) for user in value.consumers()]
    if value.is_graph_output() or any(other is None or set(other[2]) & set(first[2]) for other in others):
        context.refuse(node, f"{value.name} is needed elsewhere", matched=1, of=2)
        return 0
    merged = [np.array([*one, *other], np.int64) for one, other in zip(first, second, strict=True)]
    names = (f"{result.name}__{what}" for what in ("starts", "ends", "axes", "steps"))
    arguments = [new_constant(model, name, array) for name, array in zip(names, merged, strict=True)]
    new = ir.Node("", "Slice", [inner.inputs[0], *arguments], outputs=[hidden_value(result, "merged")])
    return int(substitute(model, context, [result], [new]))


def _bounds(node: ir.Node | None) -> list[list[int]] | None:
    """Starts, ends, axes from the front, and steps of a ``Slice``, if they are constant."""
    if node is None or node.op_type != "Slice" or node.domain not in ("", "ai.onnx"):
        return None
    shape = sizes(node.inputs[0])
    starts, ends = integers(node.inputs[1]), integers(node.inputs[2])
    if starts is None or ends is None or shape is None:
        return None
    axes = integers(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else list(range(len(starts)))
    steps = integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else [1] * len(starts)
    return None if axes is None or steps is None else [starts, ends, [axis % len(shape) for axis in axes], steps]


def _undo(context: PassContext, inner: ir.Node, node: ir.Node) -> int:
    """Uses the first input for the result of both; 2 nodes less."""
    value = inner.inputs[0]
    assert value is not None
    return 2 * use_existing(node.outputs[0], value, context)


def _target(model: ir.Model, node: ir.Node) -> ir.Value | None:
    """The argument of a ``Reshape`` from anything to the result of ``node``."""
    shape = sizes(node.outputs[0])
    if shape is not None and 0 not in shape and sum(isinstance(size, str) for size in shape) <= 1:
        array = np.array([-1 if isinstance(size, str) else size for size in shape], np.int64)
        if node.op_type == "Reshape" and node.inputs[1] is not None:
            given = constant(node.inputs[1])
            if given is not None and not (given == 0).any():
                return node.inputs[1]
        return new_constant(model, f"{node.outputs[0].name}__shape", array)
    if node.op_type != "Reshape":
        return None
    given = constant(node.inputs[1])
    copies_sizes = (given == 0).any() if given is not None else shape is None or 0 in shape
    return None if copies_sizes else node.inputs[1]


PASS = Pass("onnx.merge_views", "Makes one view of a chain of views.", merge_views)
