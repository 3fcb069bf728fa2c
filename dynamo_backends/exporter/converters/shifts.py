"""Bit shifts, which models use to unpack 4-bit and 2-bit weights.

ONNX's ``BitShift`` takes only unsigned integers, so the converters multiply and divide in int64.
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


def _power_of_two(x: ir.Value, shift: ir.Value | int, otherwise: int) -> ir.Value:
    """``2 ** shift``, or ``otherwise`` if the shift is negative or at least the number of bits of ``x``."""
    if x.dtype not in _BITS:
        raise NotTranslatable("its translation supports integers of up to 32 bits only")
    bits = constant(_BITS[x.dtype], _INT64)
    by = cast(shift, _INT64) if isinstance(shift, ir.Value) else constant(shift, _INT64)
    is_outside = op.Or(op.Less(by, constant(0, _INT64)), op.Greater(by, bits))
    powers = op.Constant(value=ir.tensor(np.array([2**i for i in range(_BITS[x.dtype])] + [otherwise], np.int64)))
    return op.Gather(powers, op.Where(is_outside, bits, by))


@converter(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.__lshift__.Tensor)
def left_shift(x: ir.Value, shift: ir.Value | int) -> ir.Value:
    """``x * 2 ** shift``, which wraps; 0 if all bits are shifted out."""
    factor = _power_of_two(x, shift, 0)
    assert x.dtype is not None
    return cast(op.Mul(cast(x, _INT64), factor), x.dtype)


@converter(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Tensor)
def right_shift(x: ir.Value, shift: ir.Value | int) -> ir.Value:
    """``floor(x / 2 ** shift)``; 0 or -1 if all bits are shifted out.

    Integer division truncates, so a negative ``x`` is divided as ``~(~x / power)``.
    """
    factor = _power_of_two(x, shift, 2**32)
    assert x.dtype is not None
    wide = cast(x, _INT64)
    is_negative = op.Less(wide, constant(0, _INT64))
    quotient = op.Div(op.Where(is_negative, op.BitwiseNot(wide), wide), factor)
    return cast(op.Where(is_negative, op.BitwiseNot(quotient), quotient), x.dtype)
