"""Rule 3 of ``onnx.quantized_products``: views and max pooling of dequantized tensors, computed on the integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, constant, number, producer, use_existing
from .operands import operand_of, with_views


def move_integers(builder: Builder, context: PassContext, node: ir.Node) -> bool:
    """Replaces ``QuantizeLinear(view(DequantizeLinear(q)))`` by ``view(q)``, if scale and zero point are the same."""
    result, source = node.outputs[0], node.inputs[0]
    pool = _max_pool(source)
    found = operand_of(source if pool is None else pool.inputs[0])
    if found is None or found.axis is not None or found.integers.dtype != result.dtype:
        return False
    if pool is not None and not (number(node.inputs[1]) or 0) > 0:
        return False  # the largest integer is the smallest number
    if not _is_same(found.scale, node.inputs[1]) or not _is_same(found.zero, (*node.inputs, None)[2]):
        return False
    if pool is None and not found.views:
        return use_existing(result, found.integers, context)
    integers = with_views(builder, result, found.integers, found.views)
    if pool is not None:
        builder.add(result, "MaxPool", [integers], *pool.attributes.values())
    return builder.substitute([result])


def _is_same(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two scales or zero points are the same ordinary number."""
    first, second = (np.zeros(()) if value is None else constant(value) for value in (one, other))
    if first is None or second is None or first.size != 1 or second.size != 1:
        return False
    return bool(first.item() == second.item() and (first == 0 or 1e-30 < abs(first.item()) < 1e30))


def _max_pool(value: ir.Value | None) -> ir.Node | None:
    """The ``MaxPool`` that computes a value, also inside the ``Where`` of our translation.

    The translation writes NaN where the mean of a window is NaN (``exporter/converters/pooling.py``). Dequantized
    numbers are never NaN, so the ``Where`` can be left out.
    """
    choice = producer(value, "Where")
    if choice is None:
        return producer(value, "MaxPool")
    pool, condition = producer(choice.inputs[2], "MaxPool"), producer(choice.inputs[0], "And")
    fill = number(choice.inputs[1])
    is_nan = None if condition is None else producer(condition.inputs[0], "IsNaN")
    mean = None if is_nan is None else producer(is_nan.inputs[0], "AveragePool")
    if pool is None or mean is None or fill is None or fill == fill:
        return None
    return pool if mean.inputs[0] is pool.inputs[0] else None
