"""Bit shifts, by which models unpack weights of four and two bits.

ONNX's ``BitShift`` takes unsigned integers only. These multiply and divide in int64.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant

aten = torch.ops.aten

_INT64 = ir.DataType.INT64
_BITS = {ir.DataType.INT8: 8, ir.DataType.INT16: 16, ir.DataType.INT32: 32, ir.DataType.UINT8: 8}


def _power(x: ir.Value, shift: ir.Value | int, outside: int) -> ir.Value:
    """``2 ** shift``; ``outside`` if the shift is negative or not below the number of bits of ``x``."""
    if x.dtype not in _BITS:
        raise NotTranslatable("its translation is for integers of up to 32 bits")
    bits = constant(_BITS[x.dtype], _INT64)
    by = cast(shift, _INT64) if isinstance(shift, ir.Value) else constant(shift, _INT64)
    is_outside = op.Or(op.Less(by, constant(0, _INT64)), op.Greater(by, bits))
    powers = op.Constant(value=ir.tensor(np.array([2**i for i in range(_BITS[x.dtype])] + [outside], np.int64)))
    return op.Gather(powers, op.Where(is_outside, bits, by))


@converter(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Tensor)
def left_shift(x: ir.Value, shift: ir.Value | int) -> ir.Value:
    """``x * 2 ** shift``, which wraps; 0 if no bit is left."""
    factor = _power(x, shift, 0)
    assert x.dtype is not None
    return cast(op.Mul(cast(x, _INT64), factor), x.dtype)


@converter(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Tensor)
def right_shift(x: ir.Value, shift: ir.Value | int) -> ir.Value:
    """``floor(x / 2 ** shift)``; 0 or -1 if no bit is left.

    ``~(~x / power)`` rounds a negative number down, as integer division truncates.
    """
    factor = _power(x, shift, 2**32)
    assert x.dtype is not None
    wide = cast(x, _INT64)
    is_negative = op.Less(wide, constant(0, _INT64))
    quotient = op.Div(op.Where(is_negative, op.BitwiseNot(wide), wide), factor)
    return cast(op.Where(is_negative, op.BitwiseNot(quotient), quotient), x.dtype)
