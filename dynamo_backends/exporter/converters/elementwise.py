"""Elementwise operators that torchlib (onnxscript 0.7) does not have, or has wrong at special values.

The kernels followed are in ``aten/src/ATen/native/cpu/UnaryOpsKernel.cpp`` and ``BinaryOpsKernel.cpp``. What needs more
digits than the dtype has (``hypot``, ``frexp``) is computed in float64, and not translated for float64.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .arithmetic import expm1_ratio, log1p
from .choosing import select
from .registry import NotTranslatable, converter
from .shapes import cast, computing_dtype, constant

aten = torch.ops.aten

_BITS = {ir.DataType.INT8: 8, ir.DataType.INT16: 16, ir.DataType.INT32: 32, ir.DataType.INT64: 64, ir.DataType.UINT8: 8}


def _floating(x: ir.Value) -> ir.DataType:
    if x.dtype is None or not x.dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    return x.dtype


def in_double(x: ir.Value) -> ir.Value:
    """A float32 or half precision value as float64.

    Raises:
        NotTranslatable: it is an integer or float64 already.
    """
    if _floating(x) == ir.DataType.DOUBLE:
        raise NotTranslatable("its translation needs more digits than float64 has")
    return cast(x, ir.DataType.DOUBLE)


def _double(number: float) -> ir.Value:
    return constant(number, ir.DataType.DOUBLE)


def is_negative(x: ir.Value) -> ir.Value:
    """Whether a number's sign is negative, also that of -0.0. NaN counts as positive: ONNX cannot read its sign."""
    dtype = _floating(x)
    zero = constant(0.0, dtype)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))  # 1 / -0.0 is -infinity


@converter(aten.signbit.default)
def signbit(x: ir.Value) -> ir.Value:
    """Whether an element is negative; torchlib takes -0.0 for a positive number."""
    if x.dtype == ir.DataType.BOOL or (
        x.dtype is not None and not x.dtype.is_floating_point() and not x.dtype.is_signed()
    ):
        return op.And(cast(x, ir.DataType.BOOL), constant(False, ir.DataType.BOOL))
    if x.dtype is not None and not x.dtype.is_floating_point():
        return op.Less(x, constant(0, x.dtype))
    return is_negative(x)


@converter(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x: ir.Value, sign: ir.Value | float) -> ir.Value:
    """``|x|`` with the sign of another number; by a product, as ONNX Runtime's (1.31) Where loses the sign of -0.0."""
    dtype = _floating(x)
    if not isinstance(sign, ir.Value):
        return op.Mul(op.Abs(x), constant(math.copysign(1.0, sign), dtype))
    return op.Mul(op.Abs(x), op.Where(is_negative(sign), constant(-1.0, dtype), constant(1.0, dtype)))


@converter(aten.heaviside.default)
def heaviside(x: ir.Value, values: ir.Value) -> ir.Value:
    """``values`` where ``x`` is 0, else whether it is positive; torchlib takes NaN for a positive number."""
    if x.dtype is None or x.dtype == ir.DataType.BOOL:
        raise NotTranslatable("ONNX has no order of booleans")
    zero = constant(0, x.dtype)
    return select(op.Equal(x, zero), values, op.Cast(op.Greater(x, zero), to=x.dtype))


@converter(aten.angle.default)
def angle(x: ir.Value) -> ir.Value:
    """Pi for a negative number, NaN for NaN, else 0; torchlib loses NaN."""
    dtype = _floating(x)
    zero = constant(0.0, dtype)
    return op.Where(op.IsNaN(x), x, op.Where(op.Less(x, zero), constant(math.pi, dtype), zero))


@converter(aten.hypot.default)
def hypot(x: ir.Value, y: ir.Value) -> ir.Value:
    """``sqrt(x * x + y * y)`` in float64, where the squares of all float32 have place; infinite also beside NaN."""
    dtype = _floating(x)
    wide_x, wide_y = in_double(x), in_double(y)
    root = op.Cast(op.Sqrt(op.Add(op.Mul(wide_x, wide_x), op.Mul(wide_y, wide_y))), to=dtype)
    infinite = op.Or(op.IsInf(cast(x, ir.DataType.FLOAT)), op.IsInf(cast(y, ir.DataType.FLOAT)))
    return op.Where(infinite, constant(math.inf, dtype), root)


@converter(aten.fmax.default)
def fmax(x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger number, of NaN and a number the number, of equal ones the first, which is a matter of -0.0 and 0."""
    _floating(x)
    return select(op.Or(op.IsNaN(x), op.Less(x, y)), y, x)


@converter(aten.fmin.default)
def fmin(x: ir.Value, y: ir.Value) -> ir.Value:
    """The smaller number, of NaN and a number the number, of equal ones as ``fmax``."""
    _floating(x)
    return select(op.Or(op.IsNaN(x), op.Greater(x, y)), y, x)


@converter(aten.frexp.Tensor)
def frexp(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A mantissa of at least 0.5 and below 1, and the exponent of two; zeros, infinities and NaN with exponent 0.

    The exponent is the rounded logarithm, corrected by what it makes of the mantissa.
    """
    dtype = _floating(x)
    wide = in_double(x)
    size = op.Abs(wide)
    special = op.Not(op.And(op.Greater(size, _double(0.0)), op.Less(size, _double(math.inf))))
    size = op.Where(special, _double(0.5), size)
    two = _double(2.0)
    exponent = op.Floor(op.Div(op.Log(size), _double(math.log(2.0))))
    mantissa = op.Mul(size, op.Pow(two, op.Neg(exponent)))
    exponent = op.Add(exponent, op.Cast(op.GreaterOrEqual(mantissa, _double(1.0)), to=ir.DataType.DOUBLE))
    mantissa = op.Mul(size, op.Pow(two, op.Neg(exponent)))
    exponent = op.Sub(exponent, op.Cast(op.Less(mantissa, _double(0.5)), to=ir.DataType.DOUBLE))
    scaled = op.Mul(wide, op.Pow(two, op.Neg(exponent)))  # a product keeps the sign of -0.0
    return op.Cast(scaled, to=dtype), op.Cast(exponent, to=ir.DataType.INT32)


def _log_add(x: ir.Value, y: ir.Value, scale: float) -> ir.Value:
    """``log(exp(x * scale) + exp(y * scale)) / scale``, and equal infinities as they are."""
    dtype = _floating(x)
    wide = computing_dtype(x)
    x, y = cast(x, wide), cast(y, wide)
    larger = op.Max(x, y)
    apart = op.Neg(op.Abs(op.Sub(x, y)))
    rest = log1p(op.Exp(op.Mul(apart, constant(scale, wide)) if scale != 1 else apart))
    result = op.Add(larger, op.Mul(rest, constant(1 / scale, wide)) if scale != 1 else rest)
    return cast(op.Where(op.And(op.Equal(x, y), op.IsInf(x)), x, result), dtype)


@converter(aten.logaddexp.default)
def logaddexp(x: ir.Value, y: ir.Value) -> ir.Value:
    """``log(exp(x) + exp(y))``; torchlib's is wrong for infinities."""
    return _log_add(x, y, 1.0)


@converter(aten.logaddexp2.default)
def logaddexp2(x: ir.Value, y: ir.Value) -> ir.Value:
    """``log2(2 ** x + 2 ** y)``; torchlib's is wrong for infinities."""
    return _log_add(x, y, math.log(2.0))


@converter(aten.celu.default)
def celu(x: ir.Value, alpha: float = 1.0) -> ir.Value:
    """``x`` above zero, ``alpha * expm1(x / alpha)`` below; torchlib's overflows at the largest double.

    A product with the argument, which keeps the sign of a zero, where a choice by ``Where`` does not.
    """
    dtype = _floating(x)
    x = cast(x, computing_dtype(x))
    wide = computing_dtype(x)
    bent = op.Max(x, constant(-40.0 * alpha, wide)) if alpha > 0 else x  # where the rest is -1 already
    below = expm1_ratio(op.Mul(bent, constant(1.0 / alpha, wide)))
    return cast(op.Mul(bent, op.Where(op.Greater(x, constant(0.0, wide)), constant(1.0, wide), below)), dtype)


@converter(aten.sinc.default, aten.special_sinc.default)
def sinc(x: ir.Value) -> ir.Value:
    """``sin(pi * x) / (pi * x)``, 1 at 0; the pi of torchlib's is float32's."""
    dtype, wide = _floating(x), computing_dtype(x)
    x = cast(x, wide)
    angle = op.Mul(x, constant(math.pi, wide))
    is_zero = op.Equal(x, constant(0.0, wide))
    return cast(op.Where(is_zero, constant(1.0, wide), op.Div(op.Sin(angle), angle)), dtype)


@converter(aten.special_entr.default)
def entr(x: ir.Value) -> ir.Value:
    """``-x * log(x)``, 0 at 0, and -infinity below; a product, which keeps the sign of a zero as eager's does."""
    dtype = _floating(x)
    x = cast(x, computing_dtype(x))
    zero, infinity = constant(0.0, computing_dtype(x)), constant(math.inf, computing_dtype(x))
    factor = op.Where(op.Equal(x, zero), constant(-1.0, computing_dtype(x)), infinity)
    factor = op.Where(op.Greater(x, zero), op.Log(x), factor)
    return cast(op.Neg(op.Mul(op.Abs(x), factor)), dtype)


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


@converter(aten.atan2.default)
def atan2(y: ir.Value, x: ir.Value) -> ir.Value:
    """The arctangent of the smaller size by the larger, turned to its octant; torchlib's is wrong for NaN and -0.0."""
    dtype = _floating(y)
    if dtype == ir.DataType.DOUBLE:
        raise NotTranslatable("ONNX Runtime has no arctangent of float64")
    wide = computing_dtype(y)
    y, x = cast(y, wide), cast(x, wide)
    zero, one = constant(0.0, wide), constant(1.0, wide)
    height, width = op.Abs(y), op.Abs(x)
    is_steep = op.Greater(height, width)
    larger, smaller = op.Max(height, width), op.Min(height, width)
    ratio = op.Where(op.Equal(larger, zero), zero, op.Div(smaller, larger))
    ratio = op.Where(op.And(op.IsInf(height), op.IsInf(width)), one, ratio)
    angle = op.Atan(ratio)
    angle = op.Where(is_steep, op.Sub(constant(math.pi / 2, wide), angle), angle)
    angle = op.Where(is_negative(x), op.Sub(constant(math.pi, wide), angle), angle)
    return cast(op.Mul(angle, op.Where(is_negative(y), constant(-1.0, wide), one)), dtype)


@converter(aten.gcd.default)
def gcd(x: ir.Value, y: ir.Value) -> ir.Value:
    """Euclid's algorithm in as many steps as the largest numbers of the dtype need (Lamé's theorem)."""
    dtype = x.dtype
    if dtype not in _BITS:
        raise NotTranslatable("its translation is for integers")
    wide = dtype if dtype == ir.DataType.INT64 else ir.DataType.INT32
    zero, one = constant(0, wide), constant(1, wide)
    larger, smaller = op.Abs(cast(x, wide)), op.Abs(cast(y, wide))
    for _ in range(math.ceil(_BITS[dtype] * math.log(2) / math.log((1 + math.sqrt(5)) / 2)) + 1):
        is_done = op.Equal(smaller, zero)
        divisor = op.Where(is_done, one, smaller)
        rest = op.Sub(larger, op.Mul(op.Div(larger, divisor), divisor))
        larger, smaller = op.Where(is_done, larger, smaller), op.Where(is_done, zero, rest)
    return cast(larger, dtype)
