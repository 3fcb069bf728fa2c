"""Rules 1 and 2 of ``onnx.quantized_products``: matrix products of 8-bit integers."""

from __future__ import annotations

import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, require, sizes
from .operands import (
    INT8,
    fits,
    is_ordinary,
    is_plain,
    operand_of,
    second_operand,
    source_and_views,
    unsigned,
    with_views,
)


def make_unsigned(builder: Builder, context: PassContext, node: ir.Node) -> bool:
    """Converts the first operand of a ``MatMulInteger`` of int8 with int8 to uint8; the second if it must be."""
    first, second, *zeros = node.inputs
    zero, other = (*zeros, None, None)[:2]
    if first is None or second is None or {first.dtype, second.dtype} != {INT8}:
        return False
    require(zero is None or sizes(zero) == [], "its zero point is not a scalar", 1)
    result = node.outputs[0]
    source, views = source_and_views(first)
    first, zero = unsigned(builder, source, zero)
    first = with_views(builder, result, first, views)
    second, other = second_operand(builder, context, second, other)
    builder.add(result, "MatMulInteger", [first, second, zero, *([] if other is None else [other])])
    return builder.substitute([result])


def convert_product(builder: Builder, context: PassContext, node: ir.Node) -> bool:
    """Replaces a ``MatMul`` or ``Gemm`` of quantized operands by ``MatMulIntegerToFloat``."""
    first, second = operand_of(node.inputs[0]), operand_of(node.inputs[1])
    if second is None:
        return False
    require(first is not None, "its first operand is not quantized", 1)
    assert first is not None
    result, bias = node.outputs[0], (*node.inputs, None)[2]
    columns, rank, inner = _columns(node), len(node.inputs[1].shape or ()), sizes(node.inputs[0])
    require(is_plain(node), "its alpha or beta is not 1, or it transposes its first operand", 2)
    require(first.axis is None, "its first operand has several scales", 2)
    require(second.axis is None or (rank == 2 and second.axis == columns), "scales are not of columns", 2)
    require(inner is not None and fits(inner[-1]), "a sum of its integers may exceed 32 bits", 2)
    shape = sizes(node.inputs[1])
    is_vector = bias is None or (shape is not None and sizes(bias) == [shape[columns]])
    require(is_vector, "its bias does not have one element for each column", 2)
    require(is_ordinary(first.scale) and is_ordinary(second.scale), "a scale is outside 1e-12 to 1e12", 2)
    left, zero = unsigned(builder, first.integers, first.zero)
    left = with_views(builder, result, left, first.views)
    right, other = second_operand(builder, context, second.integers, second.zero)
    right = with_views(builder, result, right, second.views)
    if columns == 0:
        right = builder.add(result, "Transpose", [right], ir.AttrInt64s("perm", [1, 0]))
    inputs = [left, right, first.scale, second.scale, zero, other, bias]
    builder.add(result, "MatMulIntegerToFloat", inputs, domain="com.microsoft")
    return builder.substitute([result])


def _columns(node: ir.Node) -> int:
    """The dimension of the second operand that the result's columns come from."""
    rank = len(node.inputs[1].shape or ()) if node.inputs[1] is not None else 0
    return 0 if node.attributes.get_int("transB", 0) else rank - 1
