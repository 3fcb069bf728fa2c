"""Computes convolutions of quantized operands by ONNX Runtime's integer kernel; off by default.

Rule: a ``Conv`` of quantized operands (see ``onnx.quantized_products``), whose result, or its ``Relu`` or ``Clip``, is
quantized and has no other users, becomes ``QLinearConv``.

Before and after (x: uint8, w: int8, b: float32)::

    d = DequantizeLinear(x, 0.02, 119)        y = QLinearConv(x, 0.02, 119, w, s, z, 0.1, 0, round(b / (0.02 * s)))
    v = DequantizeLinear <axis=0> (w, s, z)
    y = QuantizeLinear(Relu(Conv(d, v, b)), 0.1, 0)

Off by default because the kernel rounds the bias to a multiple of the product of the operands' scales: 0.6 % of a
convolution's results differed from eager's by a quantization step, without the pass 0.002 %. The result is an ``If``:
``QLinearConv`` if that product is at most a 64th of the result's scale, and all channels have the same zero point; else
``Conv``. ONNX Runtime evaluates the condition when it makes the session. ResNet-50 takes 75 ms instead of 130 (two
threads of an AMD EPYC with AVX2).

Not for a convolution whose result is not quantized, as before a sum: ``ConvInteger`` and what follows it took as long
as ``Conv``.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import Builder, nodes_of, number, only_user, require, rewrite_each, sizes
from ..engine.onnx.inference import infer_types
from ..engine.registry import Pass
from .quantized_products.operands import (
    INT8,
    INT32,
    SHIFT,
    UINT8,
    fits,
    operand_of,
    second_operand,
    signed,
    to,
    unsigned,
    with_views,
)

_FINENESS = 64
"""How many rounding steps of the bias (the product of the operands' scales) the result's scale has at least."""

_LARGEST_BIAS = 2.0**30


def quantized_convolutions(model: ir.Model, context: PassContext) -> int:
    """Changes convolutions in place; returns how many."""
    if next(nodes_of(model, "QuantizeLinear"), None) is None:
        return 0
    infer_types(model.graph, model.opset_imports.get("", 1))  # of values inside the translation of one operator
    builder = Builder(model, context)
    fired = rewrite_each(context, nodes_of(model, "Conv"), 3, functools.partial(_rewrite, builder, context))
    builder.erase_unused()
    return fired


def _rewrite(builder: Builder, context: PassContext, convolution: ir.Node) -> bool:
    """Replaces a ``Conv`` of quantized operands, whose result is quantized, by an ``If`` with ``QLinearConv``."""
    first, second = operand_of(convolution.inputs[0]), operand_of(convolution.inputs[1])
    if second is None:
        return False
    activation = only_user(convolution.outputs[0], "Relu", "Clip")
    node = only_user((activation or convolution).outputs[0], "QuantizeLinear")
    require(first is not None, "its first operand is not quantized", 1)
    require(node is not None, "its result is not quantized, or has other users", 3)
    assert first is not None and node is not None
    require(node.outputs[0].dtype in (INT8, UINT8), "its result is not quantized to 8 bits", 3)
    scale, zero, bounds = number(node.inputs[1]), _number(node, 2), _bounds(activation)
    require(first.axis is None and second.axis in (None, 0), "a scale is not for a channel of the result", 3)
    require(fits(_terms(sizes(convolution.inputs[1])), 2), "a sum of its integers may exceed 32 bits", 3)
    require(None not in (scale, zero, *bounds), "the scale of its result, or a bound, is no constant number", 3)
    assert scale is not None and zero is not None
    result = node.outputs[0]
    shift = SHIFT if result.dtype == INT8 else 0
    factor, offset = builder.constant("scale", scale), builder.constant("zero_point", np.array(zero + shift, np.uint8))
    bias = (*convolution.inputs, None)[2]

    left, left_zero = unsigned(builder, first.integers, first.zero)
    left = with_views(builder, result, left, first.views)
    right, right_zero = second_operand(builder, context, second.integers, second.zero)
    right = with_views(builder, result, right, second.views)
    unit = builder.add(result, "Mul", [first.scale, second.scale])
    known = [_at_most(builder, unit, scale / _FINENESS)]
    if bias is not None:
        bias = builder.add(result, "Round", [builder.add(result, "Div", [bias, unit])])
        known.append(_at_most(builder, builder.add(result, "Abs", [bias]), _LARGEST_BIAS))
    if second.axis is not None and right_zero is not None:
        right_zero, is_equal = _single(builder, right_zero)
        known.append(is_equal)

    def on_integers() -> None:
        inputs = [left, first.scale, left_zero, right, second.scale, right_zero, factor, offset]
        if right_zero is None:
            inputs[5] = builder.constant("zero_point", np.array(0, np.int8))
        if bias is not None:
            inputs.append(builder.add(result, "Cast", [bias], to(INT32)))
        product = builder.add(result, "QLinearConv", inputs, *convolution.attributes.values())
        limits = [_quantized(bound, scale, zero + shift) for bound in bounds]
        if limits != [0, 255]:
            ends = [builder.constant("bound", np.array(limit, np.uint8)) for limit in limits]
            builder.add(result, "Clip", [product, *ends])

    def on_floats() -> None:
        value = builder.add(result, "Conv", convolution.inputs, *convolution.attributes.values())
        if activation is not None:
            inputs = [value, *activation.inputs[1:]]
            value = builder.add(result, activation.op_type, inputs, *activation.attributes.values())
        builder.add(result, "QuantizeLinear", [value, factor, offset])

    condition = known[0]
    for other in known[1:]:
        condition = builder.add(result, "And", [condition, other])
    chosen = builder.choose(result, condition, on_integers, on_floats, "the scales of its operands are too large")
    if shift:
        signed(builder, result, chosen)
    return builder.substitute([result])


def _number(node: ir.Node, index: int) -> int | None:
    """A constant zero point, 0 if the node has none."""
    value = node.inputs[index] if index < len(node.inputs) else None
    known = 0 if value is None else number(value)
    return None if known is None else int(known)


def _bounds(activation: ir.Node | None) -> tuple[float | None, float | None]:
    """The smallest and the largest result of an activation; ``None`` for a bound that is not a constant."""
    if activation is None:
        return -math.inf, math.inf
    if activation.op_type == "Relu":
        return 0.0, math.inf
    low, high = (*activation.inputs[1:], None, None)[:2]
    return -math.inf if low is None else number(low), math.inf if high is None else number(high)


def _terms(weight: list[int | str] | None) -> object:
    """How many products are summed for an element of the result."""
    known = [size for size in weight or () if isinstance(size, int)]
    return math.prod(known[1:]) if weight is not None and len(known) == len(weight) else None


def _at_most(builder: Builder, values: ir.Value, limit: float) -> ir.Value:
    largest = builder.add(values, "ReduceMax", [values], ir.AttrInt64("keepdims", 0))
    return builder.add(values, "LessOrEqual", [largest, builder.constant("limit", limit)])


def _single(builder: Builder, zeros: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The zero point of all channels, as a scalar, and whether they have the same."""
    wide = builder.add(zeros, "Cast", [zeros], to(INT32))
    keeps = ir.AttrInt64("keepdims", 0)
    low, high = (builder.add(zeros, operator, [wide], keeps) for operator in ("ReduceMin", "ReduceMax"))
    assert zeros.dtype is not None
    single = builder.add(zeros, "Cast", [low], to(zeros.dtype))
    return single, builder.add(zeros, "Equal", [low, high])


def _quantized(bound: float | None, scale: float, zero: int) -> int:
    """A bound as ``QuantizeLinear`` quantizes it to uint8."""
    assert bound is not None
    steps = np.rint(np.float32(bound) / np.float32(scale))
    return int(np.clip(steps + zero, 0, 255))


PASS = Pass(
    "onnx.quantized_convolutions",
    "Computes convolutions of quantized operands by ONNX Runtime's integer kernel, which rounds their bias.",
    quantized_convolutions,
    default=False,
)
