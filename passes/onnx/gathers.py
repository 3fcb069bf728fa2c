"""Replaces ``GatherND`` by simpler operators, and gathers that take everything by nothing.

Rule, for constant or other indices as said:

1. ``GatherND`` by indices of one number each, [..., 1], becomes ``Gather`` of the first dimension; the index is what
   was unsqueezed, or the constant without its last dimension;
2. ``GatherND`` by constant indices that name all there is, in order, becomes a ``Reshape``;
3. ``Gather`` by the constant vector 0, 1, ..., n - 1 of a dimension of that size returns its input.

Indexing by several tensors, ``mask[batch, positions]``, is a ``GatherND`` in the translation, as are table look-ups.

Before and after (x: [100, 8], i: [36])::

    u = Unsqueeze(i, [-1])                   y = Gather <axis=0> (x, i)
    y = GatherND(x, u)

It must not fire with batch dimensions, nor for 2. where sizes are symbolic. Negative and impossible indices mean the
same in both operators."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    constant,
    hidden_value,
    integers,
    new_constant,
    nodes_of,
    producer,
    sizes,
    substitute,
    use_existing,
)
from ..engine.registry import Pass


def gathers(model: ir.Model, context: PassContext) -> int:
    """Simplifies gathers in place; returns how many."""
    fired = 0
    for node in nodes_of(model, "GatherND"):
        batch = node.attributes.get("batch_dims")
        if batch is not None and batch.as_int() != 0:
            context.refuse(node, "it has batch dimensions", matched=1, of=2)
            continue
        fired += _to_reshape(model, context, node) or _to_gather(model, context, node)
    for node in nodes_of(model, "Gather"):
        value = node.inputs[0]
        if value is not None and _takes_all(node):
            fired += use_existing(node.outputs[0], value, context)
    return fired


def _to_reshape(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    data, result = node.inputs[0], node.outputs[0]
    indices, shape, target = constant(node.inputs[1]), sizes(data), sizes(result)
    if indices is None or indices.ndim == 0 or shape is None or target is None:
        return False
    named = shape[: indices.shape[-1]]
    if not all(isinstance(size, int) and size > 0 for size in [*shape, *target]):
        return False
    lengths = np.array(named, np.int64)
    if indices.size != math.prod(int(size) for size in named) * len(named):
        return False
    if ((indices < -lengths) | (indices >= lengths)).any():
        return False
    flat = np.ravel_multi_index(tuple(np.moveaxis(indices % lengths, -1, 0)), tuple(lengths))
    if not np.array_equal(flat.reshape(-1), np.arange(flat.size)):
        return False
    argument = new_constant(model, f"{result.name}__shape", np.array(target, np.int64))
    new = ir.Node("", "Reshape", [data, argument], outputs=[hidden_value(result, "view")])
    return substitute(model, context, [result], [new])


def _to_gather(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    shape = sizes(node.inputs[1])
    index = _single_index(model, node)
    if index is None:
        context.refuse(node, f"its indices, {shape}, are not known to be of one number each", matched=1, of=2)
        return False
    result = node.outputs[0]
    new = ir.Node(
        "", "Gather", [node.inputs[0], index], [ir.AttrInt64("axis", 0)], outputs=[hidden_value(result, "gathered")]
    )
    return substitute(model, context, [result], [new])


def _single_index(model: ir.Model, node: ir.Node) -> ir.Value | None:
    """[...] of indices [..., 1]."""
    indices = node.inputs[1]
    array = constant(indices)
    if array is not None:
        if array.ndim == 0 or array.shape[-1] != 1:
            return None
        return new_constant(model, f"{node.outputs[0].name}__index", array[..., 0])
    unsqueeze = producer(indices, "Unsqueeze")
    shape = sizes(indices)
    if unsqueeze is None or shape is None or integers(unsqueeze.inputs[1]) not in ([-1], [len(shape) - 1]):
        return None
    return unsqueeze.inputs[0]


def _takes_all(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    shape, indices = sizes(node.inputs[0]), constant(node.inputs[1])
    if shape is None or indices is None or indices.ndim != 1:
        return False
    size = shape[0 if axis is None else axis.as_int()]
    return (
        size == len(indices)
        and np.array_equal(indices % max(len(indices), 1), np.arange(len(indices)))
        and bool((indices >= -len(indices)).all() and (indices < len(indices)).all())
    )


PASS = Pass("onnx.gathers", "Replaces gathers of many dimensions by simpler operators.", gathers)
