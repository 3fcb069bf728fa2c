"""Products of integers, and PyTorch's operators ``quantized_decomposed`` of exported quantized models (pt2e).

The latter become ONNX's ``QuantizeLinear`` and ``DequantizeLinear``, which every provider knows. Eager multiplies by a
rounded ``1 / scale`` where ``QuantizeLinear`` divides: results differ by one step at numbers that are on a tie up to
rounding.

A zero point in a tensor must be a number of the dtype, as all are that PyTorch's observers choose.

These operators exist once ``torch.ao.quantization`` is imported, so they are named by text here.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import HALF_PRECISION, cast, constant

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64

_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
_QUANTIZED = (*_EIGHT_BITS, ir.DataType.INT16, ir.DataType.UINT16)
_RANGES = {dtype: (np.iinfo(dtype.numpy()).min, np.iinfo(dtype.numpy()).max) for dtype in _QUANTIZED}
"""By dtype that ``QuantizeLinear`` returns (16 bits since opset 21), its smallest and largest number."""


def _check(dtype: ir.DataType, zero_point: ir.Value | int = 0) -> None:
    if dtype not in _RANGES:
        raise NotTranslatable(f"its translation quantizes to 8 or 16 bits only, not to {dtype}")
    low, high = _RANGES[dtype]
    if isinstance(zero_point, int) and not low <= zero_point <= high:
        raise NotTranslatable(f"its zero point {zero_point} is not in the range of {dtype}")


def _parameter(value: ir.Value | float, dtype: ir.DataType, *, scalar: bool) -> ir.Value:
    """A scale or zero point of a dtype, as a scalar or as it is."""
    if not isinstance(value, ir.Value):
        if dtype == _FLOAT and value == 0:
            raise NotTranslatable("its scale is 0, which is an error in eager")
        return constant(value, dtype)
    return cast(op.Reshape(value, op.Constant(value_ints=[])) if scalar else value, dtype)


def _check_precision(computed: ir.DataType, dtype: ir.DataType) -> None:
    """Checks that products in float32, rounded to the dtype in which eager computes, are eager's."""
    if computed != _FLOAT and not (computed in HALF_PRECISION and dtype in _EIGHT_BITS):
        raise NotTranslatable(f"eager dequantizes {dtype} in {computed}, its translation in float32")


def _clip(quantized: ir.Value, low: int, high: int, dtype: ir.DataType) -> ir.Value:
    """Numbers of ``QuantizeLinear``, which saturates to the range of the dtype, in a narrower range."""
    if (low, high) == _RANGES[dtype]:
        return quantized
    return op.Clip(quantized, constant(low, dtype), constant(high, dtype))


@converter(
    "quantized_decomposed::quantize_per_tensor",
    "quantized_decomposed::quantize_per_tensor.tensor",
)
def quantize_per_tensor(
    x: ir.Value, scale: ir.Value | float, zero_point: ir.Value | int, low: int, high: int, dtype: ir.DataType
) -> ir.Value:
    """``clamp(round(x / scale) + zero_point, low, high)``; scale and zero point have one element."""
    _check(dtype, zero_point)
    factor, zero = _parameter(scale, _FLOAT, scalar=True), _parameter(zero_point, dtype, scalar=True)
    return _clip(op.QuantizeLinear(cast(x, _FLOAT), factor, zero), low, high, dtype)


@converter("quantized_decomposed::quantize_per_channel")
def quantize_per_channel(
    x: ir.Value, scales: ir.Value, zero_points: ir.Value, axis: int, low: int, high: int, dtype: ir.DataType
) -> ir.Value:
    """The same with one scale and zero point for each index of ``axis``."""
    _check(dtype)
    quantized = op.QuantizeLinear(cast(x, _FLOAT), cast(scales, _FLOAT), cast(zero_points, dtype), axis=axis)
    return _clip(quantized, low, high, dtype)


@converter(
    "quantized_decomposed::dequantize_per_tensor",
    "quantized_decomposed::dequantize_per_tensor.tensor",
)
def dequantize_per_tensor(
    x: ir.Value,
    scale: ir.Value | float,
    zero_point: ir.Value | int,
    low: int,
    high: int,
    dtype: ir.DataType,
    out_dtype: ir.DataType | None = None,
) -> ir.Value:
    """``(x - zero_point) * scale`` in ``out_dtype``; scale and zero point have one element."""
    _check_precision(out_dtype or _FLOAT, dtype)
    factor = _parameter(scale, _FLOAT, scalar=True)
    if dtype == ir.DataType.INT32 and zero_point == 0:  # a bias; ONNX has no other zero point for it
        return cast(op.DequantizeLinear(x, factor), out_dtype or _FLOAT)
    _check(dtype, zero_point)
    zero = _parameter(zero_point, dtype, scalar=True)
    return cast(op.DequantizeLinear(x, factor, zero), out_dtype or _FLOAT)


@converter("quantized_decomposed::dequantize_per_channel")
def dequantize_per_channel(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    axis: int,
    low: int,
    high: int,
    dtype: ir.DataType,
    out_dtype: ir.DataType | None = None,
) -> ir.Value:
    """The same in the scales' dtype, with one scale and zero point for each index of ``axis``."""
    _check(dtype)
    assert scales.dtype is not None
    _check_precision(scales.dtype, dtype)
    if zero_points is not None and zero_points.dtype not in (ir.DataType.INT32, _INT64):
        raise NotTranslatable("eager subtracts its zero points in another dtype, in which the difference may overflow")
    zeros = [] if zero_points is None else [cast(zero_points, dtype)]
    product = op.DequantizeLinear(x, cast(scales, _FLOAT), *zeros, axis=axis)
    return cast(cast(product, scales.dtype), out_dtype or _FLOAT)


def _extremes(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The smallest and largest number of a tensor, or 0 if that is smaller or larger; scalars of its dtype."""
    assert x.dtype is not None
    zero = constant(0, x.dtype)
    return op.Min(op.ReduceMin(x, keepdims=0), zero), op.Max(op.ReduceMax(x, keepdims=0), zero)


def _scale(numerator: ir.Value, divisor: float, smallest: float) -> ir.Value:
    """A float32 scale of at least ``smallest``, which eager rounds to float32."""
    assert numerator.dtype is not None
    quotient = op.Div(numerator, constant(divisor, numerator.dtype))
    return op.Max(cast(quotient, _FLOAT), constant(float(np.float32(smallest)), _FLOAT))


def _parameters(scale: ir.Value, zero_point: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Eager's dtypes and shape [1]."""
    one = op.Constant(value_ints=[1])
    return cast(op.Reshape(scale, one), ir.DataType.DOUBLE), cast(op.Reshape(zero_point, one), _INT64)


@converter("quantized_decomposed::choose_qparams.tensor")
def choose_qparams(x: ir.Value, low: int, high: int, eps: float, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """The scale and zero point with which the range of a tensor, and 0, becomes ``low`` to ``high``."""
    smallest, largest = _extremes(x)
    scale = _scale(op.Sub(largest, smallest), float(high - low), eps)
    zero_point = op.Sub(constant(low, _FLOAT), op.Round(op.Div(cast(smallest, _FLOAT), scale)))
    return _parameters(scale, op.Clip(zero_point, constant(low, _FLOAT), constant(high, _FLOAT)))


@converter("quantized_decomposed::choose_qparams_symmetric.tensor")
def choose_qparams_symmetric(
    x: ir.Value, low: int, high: int, eps: float, dtype: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """The same with the zero point in the middle: 0, or 128 for uint8."""
    smallest, largest = _extremes(x)
    scale = _scale(op.Max(op.Neg(smallest), largest), (high - low) / 2, eps)
    return _parameters(scale, constant(128 if dtype == ir.DataType.UINT8 else 0, _INT64))


@converter(torch.ops.aten._int_mm.default)
def _int_mm(self: ir.Value, mat2: ir.Value) -> ir.Value:
    """The int32 product of a matrix of int8, or of uint8, with one of int8.

    uint8 becomes int8 with the zero point -128: ONNX Runtime's product of uint8 with int8 adds pairs in 16 bits on
    processors without VNNI, and saturates there. On others, ``onnx.quantized_products`` turns it back.
    """
    if self.dtype == ir.DataType.INT8:
        return op.MatMulInteger(self, mat2)
    sign = op.Constant(value=ir.tensor(np.array(128, np.uint8)))
    signed = op.Cast(op.BitwiseXor(self, sign), to=ir.DataType.INT8)
    return op.MatMulInteger(signed, mat2, op.Constant(value=ir.tensor(np.array(-128, np.int8))))
