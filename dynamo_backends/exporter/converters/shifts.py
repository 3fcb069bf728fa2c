"""Shifts of bits, by which models unpack weights of four and two bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant

aten = torch.ops.aten

_BITS = {ir.DataType.INT8: 8, ir.DataType.INT16: 16, ir.DataType.INT32: 32, ir.DataType.UINT8: 8}
"""ONNX's BitShift is for unsigned integers alone: these are multiplied and divided in int64."""


def _power(x: ir.Value, number: ir.Value | int, outside: int) -> ir.Value:
    """``2 ** number``; ``outside`` for a negative number and for all bits of ``x``."""
    if x.dtype not in _BITS:
        raise NotTranslatable("its translation is for integers of up to 32 bits")
    bits = _BITS[x.dtype]
    by = cast(number, ir.DataType.INT64) if isinstance(number, ir.Value) else constant(number, ir.DataType.INT64)
    is_outside = op.Or(op.Less(by, constant(0, ir.DataType.INT64)), op.Greater(by, constant(bits, ir.DataType.INT64)))
    powers = op.Constant(value=ir.tensor(np.array([2**i for i in range(bits)] + [outside], np.int64)))
    return op.Gather(powers, op.Where(is_outside, constant(bits, ir.DataType.INT64), by))


@converter(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Tensor)
def left_shift(x: ir.Value, number: ir.Value | int) -> ir.Value:
    """A product, which wraps; 0 if no bit is left."""
    factor = _power(x, number, 0)
    assert x.dtype is not None
    return cast(op.Mul(cast(x, ir.DataType.INT64), factor), x.dtype)


@converter(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Tensor)
def right_shift(x: ir.Value, number: ir.Value | int) -> ir.Value:
    """The quotient by a power of two, rounded down: 0 or -1 if no bit is left.

    ``~(~x / power)`` rounds a negative number down, as a division of integers rounds to zero.
    """
    factor = _power(x, number, 2**32)
    assert x.dtype is not None
    wide = cast(x, ir.DataType.INT64)
    is_below = op.Less(wide, constant(0, ir.DataType.INT64))
    quotient = op.Div(op.Where(is_below, op.BitwiseNot(wide), wide), factor)
    return cast(op.Where(is_below, op.BitwiseNot(quotient), quotient), x.dtype)
