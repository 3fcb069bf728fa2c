"""Elementwise operators for which torchlib's converters (onnxscript 0.7) or ONNX Runtime's kernels are wrong.

They differ from eager for NaN, infinities, -0.0, very small or large numbers; each docstring says where. The formulas
follow ``aten/src/ATen/native/cpu/UnaryOpsKernel.cpp`` and ``BinaryOpsKernel.cpp``.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import HALF_PRECISION, cast, computing_dtype, constant

aten = torch.ops.aten

Operand: TypeAlias = "ir.Value | float"
"""A tensor of the dtype in which the operator computes, or a Python number."""


def _dtype(*operands: Operand | None) -> ir.DataType:
    return next(item.dtype for item in operands if isinstance(item, ir.Value) and item.dtype is not None)


def _value(operand: Operand, dtype: ir.DataType) -> ir.Value:
    """An operand as an ONNX value; a Python number becomes a constant."""
    return operand if isinstance(operand, ir.Value) else constant(operand, dtype)


@converter(aten.maximum.default)
def maximum(x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger element, or NaN if either is NaN.

    For int64, ONNX Runtime's (1.31) Max, Min and Clip compare by a subtraction in 32 bits: max(0, 2**31) is 0. Its
    comparison operators are correct.
    """
    return op.Where(op.Less(x, y), y, x) if x.dtype == ir.DataType.INT64 else op.Max(x, y)


@converter(aten.minimum.default)
def minimum(x: ir.Value, y: ir.Value) -> ir.Value:
    """The smaller element, or NaN if either is NaN; int64 as in ``maximum``."""
    return op.Where(op.Less(y, x), y, x) if x.dtype == ir.DataType.INT64 else op.Min(x, y)


@converter(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: ir.Value, low: Operand | None = None, high: Operand | None = None) -> ir.Value:
    """``min(max(x, low), high)``; NaN if any of the three is NaN.

    With one bound, torchlib uses the largest finite number as the other, which clips infinities.
    """
    dtype = _dtype(x, low, high)
    is_static = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
    if is_static and dtype != ir.DataType.INT64:
        return op.Clip(x, _value(low, dtype), _value(high, dtype))  # ONNX Runtime fuses it into its producer
    result = x
    if low is not None:
        result = maximum(result, _value(low, dtype))
    if high is not None:
        result = minimum(result, _value(high, dtype))
    return result


converter(aten.clamp_min.default, aten.clamp_min.Tensor)(clamp)


@converter(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: ir.Value, high: Operand) -> ir.Value:
    """``min(x, high)``; NaN if either is NaN."""
    return clamp(x, None, high)


@converter(aten.hardtanh.default)
def hardtanh(x: ir.Value, low: Operand = -1.0, high: Operand = 1.0) -> ir.Value:
    """``clamp``, by default to [-1, 1]."""
    return clamp(x, low, high)


@converter(aten.sigmoid.default)
def sigmoid(x: ir.Value) -> ir.Value:
    """``1 / (1 + exp(-x))``.

    ONNX Runtime's ``Sigmoid`` (1.31) of float32 has a relative error of 17 % at -15 and returns 0 below -18, so that
    log(sigmoid(x)) is -infinity. In ``x * sigmoid(x)`` this does not matter: the pass ``onnx.gelu`` uses it there.
    """
    wide = cast(x, computing_dtype(x))
    return cast(op.Reciprocal(op.Add(op.Exp(op.Neg(wide)), constant(1.0, _dtype(wide)))), _dtype(x))


@converter(aten.tanh.default)
def tanh(x: ir.Value) -> ir.Value:
    """``Tanh``; in float32 ``x`` itself near zero.

    There ONNX Runtime's kernel (1.31) has an error of one ULP, as large as ``x - tanh(x)``, and returns 0 for the
    smallest denormal numbers. For a million numbers this takes 2.0 instead of 0.3 ms, eager 2.7 (EPYC, one thread).
    """
    if x.dtype != ir.DataType.FLOAT:
        return op.Tanh(x)
    is_exact = op.GreaterOrEqual(op.Abs(x), constant(2**-12, x.dtype))  # below, x - x**3 / 3 rounds to x
    return op.Where(is_exact, op.Tanh(x), x)


@converter(aten.hardswish.default)
def hardswish(x: ir.Value) -> ir.Value:
    """``x * clamp(x + 3, 0, 6) / 6`` in eager's order of operations, which overflows above 5e37."""
    dtype = _dtype(x)
    slope = op.Clip(op.Add(x, constant(3.0, dtype)), constant(0.0, dtype), constant(6.0, dtype))
    return op.Div(op.Mul(x, slope), constant(6.0, dtype))


@converter(aten.log1p.default)
def log1p(x: ir.Value) -> ir.Value:
    """Kahan's ``x * (log(u) / (u - 1))`` with ``u = 1 + x``, accurate to a few ULP.

    Torchlib's ``log(1 + x)`` cancels for small ``x``: it returns 0 for 1e-8.
    """
    dtype = _dtype(x)
    one = constant(1.0, dtype)
    u = op.Add(x, one)
    is_small_or_infinite = op.Or(op.Equal(u, one), op.IsInf(u, detect_negative=0))
    ratio = op.Div(op.Log(u), op.Sub(u, one))
    return op.Mul(x, op.Where(is_small_or_infinite, one, ratio))  # a product keeps the sign of zero


@converter(aten.expm1.default, aten.special_expm1.default)
def expm1(x: ir.Value) -> ir.Value:
    """Kahan's ``x * ((u - 1) / log(u))`` with ``u = exp(x)``, accurate to a few ULP.

    Torchlib's ``exp(x) - 1`` cancels for small ``x``: it returns 0 for 1e-8.
    """
    dtype = _dtype(x)
    one = constant(1.0, dtype)
    x = op.Max(x, constant(-40.0, dtype))  # the result is -1 already, and exp is not yet 0
    u = op.Exp(x)
    ratio = op.Where(op.IsInf(u), constant(math.inf, dtype), op.Div(op.Sub(u, one), op.Log(u)))
    return op.Mul(x, op.Where(op.Equal(u, one), one, ratio))  # a product keeps the sign of zero


@converter(aten.pow.Tensor_Scalar)
def power(x: ir.Value, exponent: float | ir.Value) -> ir.Value:
    """``Pow``; for exponents 0.5 and -0.5 ``Sqrt``, as in eager, which differs for -infinity and -0.0."""
    if isinstance(exponent, ir.Value):
        return op.Pow(x, exponent)
    if abs(exponent) == 0.5:
        root = op.Sqrt(x)
        return root if exponent > 0 else op.Reciprocal(root)
    return op.Pow(x, constant(exponent, _dtype(x)))


@converter(aten.sign.default)
def sign(x: ir.Value) -> ir.Value:
    """``(0 < x) - (x < 0)``, as in eager: 0 for NaN.

    ONNX's ``Sign`` returns NaN for NaN, and ONNX Runtime's kernel (1.31) reads only 32 bits of an int64.
    """
    dtype = _dtype(x)
    zero = constant(0, dtype)
    return op.Sub(op.Cast(op.Greater(x, zero), to=dtype), op.Cast(op.Less(x, zero), to=dtype))


def _without_minus_one(x: ir.Value, divisor: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Integers with the same quotient, which wraps: both are negated where the divisor is -1.

    ONNX Runtime (1.31) crashes if it divides the smallest integer by -1. For 0 it raises an error, as eager. Products,
    as its ``Where`` of a million int64 takes 16 ms (AMD EPYC, one thread).
    """
    dtype = _dtype(divisor)
    tensor = ir.convenience.get_const_tensor(divisor)
    if not dtype.is_signed() or (tensor is not None and -1 not in tensor.numpy()):
        return x, divisor
    is_minus_one = op.Cast(op.Equal(divisor, constant(-1, dtype)), to=dtype)
    sign = op.Sub(constant(1, dtype), op.Mul(is_minus_one, constant(2, dtype)))
    return op.Mul(x, sign), op.Mul(divisor, sign)


@converter(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Operand, divisor: Operand) -> ir.Value:
    """C's ``fmod``, plus the divisor if their signs differ, as in eager's ``remainder_kernel``.

    Torchlib's ``x - floor(x / divisor) * divisor`` is NaN for an infinite divisor and inexact for a large quotient.
    """
    dtype = _dtype(x, divisor)
    x, divisor = _value(x, dtype), _value(divisor, dtype)
    if not dtype.is_floating_point():
        return op.Mod(*_without_minus_one(x, divisor))  # it has the sign of the divisor, as in Python
    zero = constant(0.0, dtype)
    rest = op.Mod(x, divisor, fmod=1)
    signs_differ = op.Xor(op.Less(divisor, zero), op.Less(rest, zero))
    add = op.And(signs_differ, op.Not(op.Equal(rest, zero)))
    return op.Where(add, op.Add(rest, divisor), rest)


@converter(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(x: Operand, divisor: Operand, rounding_mode: str | None = None) -> ir.Value:
    """``x / divisor``, truncated or rounded down; torchlib divides integers in float32."""
    dtype = _dtype(x, divisor)
    x, divisor = _value(x, dtype), _value(divisor, dtype)
    if rounding_mode is None:
        return op.Div(x, divisor)
    if dtype.is_floating_point():
        if dtype in HALF_PRECISION:  # eager's kernels round after each step
            raise NotTranslatable("its translation supports rounding_mode in float32, float64 and of integers only")
        return _rounded_quotient(x, divisor, is_floor=rounding_mode == "floor")
    x, divisor = _without_minus_one(x, divisor)
    quotient = op.Div(x, divisor)
    if rounding_mode == "trunc" or not dtype.is_signed():
        return quotient  # ONNX Runtime's Div of integers truncates
    rest = op.Sub(x, op.Mul(quotient, divisor))
    zero = constant(0, dtype)
    below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(divisor, zero)))
    return op.Sub(quotient, op.Cast(below, to=dtype))


def _rounded_quotient(x: ir.Value, divisor: ir.Value, *, is_floor: bool) -> ir.Value:
    """The quotient of floating-point numbers, truncated or rounded down, with the sign of ``x / divisor`` if it is 0.

    The floor is ``div_floor_floating`` of ``c10/util/generic_math.h``, which does not round the quotient first. The
    sign is a product, as ONNX Runtime's ``Where`` loses that of zeros.
    """
    dtype = _dtype(x, divisor)
    zero, one = constant(0.0, dtype), constant(1.0, dtype)
    quotient = op.Div(x, divisor)
    result = quotient
    if is_floor:
        rest = op.Mod(x, divisor, fmod=1)
        is_below = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(divisor, zero), op.Less(rest, zero)))
        whole = op.Div(op.Sub(x, rest), divisor)
        whole = op.Where(is_below, op.Sub(whole, one), whole)
        floor = op.Floor(whole)
        result = op.Where(op.Greater(op.Sub(whole, floor), constant(0.5, dtype)), op.Add(floor, one), floor)
        result = op.Where(op.Equal(divisor, zero), quotient, result)
    size = op.Abs(result) if is_floor else op.Floor(op.Abs(result))
    is_negative = op.Or(op.Less(quotient, zero), op.Less(op.Reciprocal(quotient), zero))
    return op.Mul(size, op.Where(is_negative, constant(-1.0, dtype), one))
