"""Recognizes layer and RMS normalization written out in elementary operators.

Rule, for float32, over the last dimension, with vectors w and b of its size::

    x / sqrt(mean(x * x) + e) [* w]                          -> SimplifiedLayerNormalization(x, w)
    d / sqrt(mean(d * d) + e) [* w [+ b]], d = x - mean(x)   -> LayerNormalization(x, w, b)

The square may be ``Pow`` or ``Mul``, the division ``Div`` or a product with ``Reciprocal``, factors in either order.
``SimplifiedLayerNormalization`` is ONNX Runtime's ``RMSNormalization``, for any opset.

Before and after (x: [B, S, H], w: [H])::

    p = Pow(x, 2.0)                          y = SimplifiedLayerNormalization <axis=-1, epsilon=1e-6> (x, w)
    m = ReduceMean <keepdims=1> (p, [-1])
    a = Add(m, 1e-6)
    r = Reciprocal(Sqrt(a))
    n = Mul(x, r)
    y = Mul(w, n)

Not if an inner value has other users, as in training; nor for other dtypes, whose steps and epsilon round differently,
or other dimensions.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    MatchError,
    integers,
    is_only_used_by,
    new_constant,
    nodes_of,
    number,
    only_user,
    producer,
    require,
    rewrite_each,
    sizes,
    substitute,
)
from ..engine.registry import Pass

_OF = 8


@dataclasses.dataclass
class _Match:
    """A match; ``inside`` are its nodes, the last one first."""

    value: ir.Value
    epsilon: float
    is_centered: bool
    inside: list[ir.Node]
    result: ir.Value


def layer_norm(model: ir.Model, context: PassContext) -> int:
    """Replaces normalizations in place; returns how many."""
    nodes = nodes_of(model, "Mul", "Div")
    return rewrite_each(context, nodes, _OF, lambda node: _rewrite(model, context, node))


def _rewrite(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    match = _normalization(node)
    if match is None:
        return False
    require(match.result.dtype == ir.DataType.FLOAT, f"it is of {match.result.dtype}, not float32", 6)
    weight = _vector_after(match, "Mul")
    bias = _vector_after(match, "Add") if match.is_centered and weight is not None else None
    values = (output for part in match.inside for output in part.outputs if output is not match.result)
    is_closed = all(is_only_used_by(value, *match.inside) for value in values)
    require(is_closed, "an inner value has other users", 7)
    if weight is None:
        shape = sizes(match.value)
        if not shape or not isinstance(shape[-1], int):
            raise MatchError("there is no weight, and its size is unknown", 7)
        weight = new_constant(model, f"{match.result.name}__ones", np.ones(shape[-1], np.float32))
    operator = "LayerNormalization" if match.is_centered else "SimplifiedLayerNormalization"
    inputs = [match.value, weight] + ([bias] if bias is not None else [])
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", match.epsilon), ir.AttrInt64("stash_type", 1)]
    return substitute(model, context, [match.result], [ir.Node("", operator, inputs, attributes)], pattern=operator)


def _normalization(node: ir.Node) -> _Match | None:
    """``value / sqrt(mean(value ** 2) + epsilon)``, ending at ``node``."""
    for i, j in [(0, 1)] if node.op_type == "Div" else [(0, 1), (1, 0)]:
        value, divisor = node.inputs[i], node.inputs[j]
        inverse = producer(divisor, "Reciprocal") if node.op_type == "Mul" else None
        root = producer(divisor if inverse is None else inverse.inputs[0], "Sqrt")
        total = None if root is None else producer(root.inputs[0], "Add")
        if root is None or total is None or value is None or (node.op_type == "Mul") != (inverse is not None):
            continue
        mean, epsilon = _mean_and_number(total)
        square = None if mean is None else producer(mean.inputs[0], "Pow", "Mul")
        if mean is None or square is None or epsilon is None or not _is_square(square, value):
            continue
        inside = [node, *([] if inverse is None else [inverse]), root, total, mean, square]
        center = producer(value, "Sub")
        average = None if center is None else _mean_over_last(center.inputs[1])
        if center is not None and average is not None and average.inputs[0] is center.inputs[0]:
            assert center.inputs[0] is not None
            return _Match(center.inputs[0], epsilon, True, [*inside, center, average], node.outputs[0])
        return _Match(value, epsilon, False, inside, node.outputs[0])
    return None


def _mean_and_number(total: ir.Node) -> tuple[ir.Node | None, float | None]:
    for i, j in ((0, 1), (1, 0)):
        mean, epsilon = _mean_over_last(total.inputs[i]), number(total.inputs[j])
        if mean is not None and epsilon is not None and epsilon >= 0:
            return mean, epsilon
    return None, None


def _mean_over_last(value: ir.Value | None) -> ir.Node | None:
    """The ``ReduceMean`` over the last dimension, with ``keepdims``, that computes a value."""
    mean = producer(value, "ReduceMean")
    if mean is None or mean.inputs[0] is None or mean.inputs[0].shape is None:
        return None
    keeps = mean.attributes.get("keepdims")
    axes = integers(mean.inputs[1]) if len(mean.inputs) > 1 else None
    last = len(mean.inputs[0].shape) - 1
    return mean if axes in ([-1], [last]) and (keeps is None or keeps.as_int() == 1) else None


def _is_square(node: ir.Node, value: ir.Value) -> bool:
    if node.op_type == "Pow":
        return node.inputs[0] is value and number(node.inputs[1]) == 2
    return node.inputs[0] is value and node.inputs[1] is value


def _vector_after(match: _Match, operator: str) -> ir.Value | None:
    """The vector by which the result is multiplied, or which is added to it; extends the match."""
    user, shape = only_user(match.result, operator), sizes(match.result)
    if user is None or shape is None:
        return None
    first, second = user.inputs
    vector = second if first is match.result else first
    if vector is None or sizes(vector) != shape[-1:]:
        return None
    match.inside.insert(0, user)
    match.result = user.outputs[0]
    return vector


PASS = Pass("onnx.layer_norm", "Recognizes layer and RMS normalization written out.", layer_norm)
