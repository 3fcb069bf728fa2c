"""Computes products of quantized operands by ONNX Runtime's integer kernels.

An operand is quantized if it is ``(q - zero_point) * scale`` of a tensor q of 8 bits: a ``DequantizeLinear``, its
transpose, or a view of one with a single scale.

Rule:

1. ``MatMulInteger`` of int8 with int8, which is up to ten times slower than float32: the first operand becomes uint8
   and its zero point 128 more, by another ``QuantizeLinear`` if one computes it, else by flipping the sign bit;
2. ``MatMul`` or ``Gemm`` (alpha = beta = 1) of quantized operands, the first with one scale, the second with one or one
   for each column, becomes ``MatMulIntegerToFloat``, whose int32 sums are exact. Not if a sum may exceed 32 bits;
3. a view or ``MaxPool`` of a dequantized tensor that is quantized again with the same scale and zero point is computed
   on the integers;
4. ``MatMul`` or ``Gemm`` of float32 with weights ``(q - zero_point) * scale``, where q is int8 with one scale for each
   group of a row, and the size of a group is a multiple of 16, becomes an ``If``: ``MatMulNBits`` if all q are between
   -8 and 7, else the product in float32. ONNX Runtime evaluates the condition when it makes the session.

Before and after 2. (x: uint8 [M, K], w: int8 [N, K], b: float32 [N])::

    d = DequantizeLinear(x, 0.1, 128)                y = com.microsoft.MatMulIntegerToFloat
    v = DequantizeLinear <axis=0> (w, s, z)              (x, Transpose(w), 0.1, s, 128, z, b)
    y = Gemm <transB=1> (d, v, b)

The product of uint8 with int8 saturates on processors without VNNI, where the second operand becomes uint8 too.

Convolutions: ``onnx.quantized_convolutions``.
"""

from __future__ import annotations

import functools

import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, is_weight, nodes_of, rewrite_each
from ...engine.onnx.inference import infer_types
from ...engine.registry import Pass
from .four_bits import pack_weights
from .matrices import convert_product, make_unsigned
from .movement import move_integers

_INTEGERS = ("QuantizeLinear", "DequantizeLinear", "MatMulInteger")


def quantized_products(model: ir.Model, context: PassContext) -> int:
    """Changes products in place; returns how many."""
    if next(nodes_of(model, *_INTEGERS), None) is None and not any(map(_is_int8_weight, model.graph.inputs)):
        return 0
    infer_types(model.graph, model.opset_imports.get("", 1))  # of values inside the translation of one operator
    builder = Builder(model, context)
    steps = (
        (3, move_integers, ("QuantizeLinear",)),
        (2, make_unsigned, ("MatMulInteger",)),
        (3, convert_product, ("MatMul", "Gemm")),
        (4, pack_weights, ("MatMul", "Gemm")),
    )
    fired = 0
    for of, step, operators in steps:
        rewrite = functools.partial(step, builder, context)
        fired += rewrite_each(context, nodes_of(model, *operators), of, rewrite)
    builder.erase_unused()
    return fired


def _is_int8_weight(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.INT8 and is_weight(value)


PASS = Pass(
    "onnx.quantized_products",
    "Computes products of quantized operands by ONNX Runtime's integer kernels.",
    quantized_products,
)
