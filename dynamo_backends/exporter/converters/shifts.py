"""Shifts of bits, by which models unpack weights of four and two bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant

aten = torch.ops.aten

_BITS = {ir.DataType.INT8: 8, ir.DataType.INT16: 16, ir.DataType.INT32: 32, ir.DataType.INT64: 64, ir.DataType.UINT8: 8}


def _powers_of_two(dtype: ir.DataType) -> ir.Value:
    """1, 2, 4, … and at last 0, for which a shift leaves nothing; int64, in which the last but one is negative."""
    powers = [2**i for i in range(_BITS[dtype])] + [0]
    return op.Constant(value=ir.tensor(np.array(powers, dtype=np.uint64).astype(np.int64)))


@converter(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Tensor)
def left_shift(x: ir.Value, number: ir.Value | int) -> ir.Value:
    """A product of int64, which wraps. ONNX's BitShift is for unsigned integers alone; a shift by a negative number or
    by all bits is 0."""
    dtype = x.dtype
    if dtype not in _BITS:
        raise NotTranslatable("a shift is for integers")
    bits = constant(_BITS[dtype], ir.DataType.INT64)
    by = cast(number, ir.DataType.INT64) if isinstance(number, ir.Value) else constant(number, ir.DataType.INT64)
    outside = op.Or(op.Less(by, constant(0, ir.DataType.INT64)), op.GreaterOrEqual(by, bits))
    factor = op.Gather(_powers_of_two(dtype), op.Where(outside, bits, by))
    return cast(op.Mul(cast(x, ir.DataType.INT64), factor), dtype)


@converter(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Tensor)
def right_shift(x: ir.Value, number: ir.Value | int) -> ir.Value:
    """The quotient by a power of two, rounded down; by more bits than there are, 0 or -1.

    ``~(~x / power)`` rounds a negative number down, as a division of integers rounds to zero.
    """
    dtype = x.dtype
    if dtype not in _BITS:
        raise NotTranslatable("a shift is for integers")
    last = constant(min(_BITS[dtype], 63) - 1, ir.DataType.INT64)
    by = cast(number, ir.DataType.INT64) if isinstance(number, ir.Value) else constant(number, ir.DataType.INT64)
    if dtype == ir.DataType.INT64:
        last = constant(62, ir.DataType.INT64)
    elif dtype == ir.DataType.UINT8:
        last = constant(8, ir.DataType.INT64)
    outside = op.Or(op.Less(by, constant(0, ir.DataType.INT64)), op.Greater(by, last))
    wide = cast(x, ir.DataType.INT64)
    factor = op.Gather(_powers_of_two(ir.DataType.INT64), op.Where(outside, last, by))
    is_below = op.Less(wide, constant(0, ir.DataType.INT64))
    one = constant(1, ir.DataType.INT64)
    inverted = op.Where(is_below, op.Sub(op.Neg(wide), one), wide)
    quotient = op.Div(inverted, factor)
    if dtype == ir.DataType.INT64:  # by 63 bits and more nothing is left; the power of 63 is negative
        quotient = op.Where(outside, constant(0, ir.DataType.INT64), quotient)
    return cast(op.Where(is_below, op.Sub(op.Neg(quotient), one), quotient), dtype)
