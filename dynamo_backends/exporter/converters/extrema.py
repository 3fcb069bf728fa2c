"""Maxima and minima with their indices, and tests for infinity.

In eager, the extremum of numbers with a NaN is NaN, and its index is that of the first NaN. ONNX Runtime's (1.31)
ReduceMax, ReduceMin, ArgMax and ArgMin ignore NaN at some positions. They also compare only 32 bits of an int64, so the
converters use TopK for int64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant, rank, reshape

aten = torch.ops.aten

_FLOATING_POINT = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


def _check_supported(x: ir.Value) -> None:
    if x.dtype not in _FLOATING_POINT | {ir.DataType.INT32, ir.DataType.INT64}:
        raise NotTranslatable(f"ONNX Runtime has no maximum and minimum of {x.dtype}")
    if x.shape is None or 0 in x.shape.dims:
        raise NotTranslatable("eager raises an error for the extremum of an empty tensor")


def _extremum(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False, *, largest: bool) -> ir.Value:
    """The maximum or minimum over dimensions, by default all; NaN if an element is NaN."""
    _check_supported(x)
    if rank(x) == 0:
        return op.Identity(x)
    dims = [item % rank(x) for item in dim] or list(range(rank(x)))
    axes = op.Constant(value_ints=dims)
    if x.dtype == ir.DataType.INT64:
        for item in dims:
            x, _ = _top_one(x, item, largest=largest)
        return x if keepdim else op.Squeeze(x, axes)
    reduce = op.ReduceMax if largest else op.ReduceMin
    result = reduce(x, axes, keepdims=int(keepdim))
    if x.dtype not in _FLOATING_POINT:
        return result
    has_nan = op.ReduceMax(op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT), axes, keepdims=int(keepdim))
    return op.Where(op.Cast(has_nan, to=ir.DataType.BOOL), constant(math.nan, x.dtype), result)


def _top_one(x: ir.Value, dim: int, *, largest: bool) -> tuple[ir.Value, ir.Value]:
    """The largest or smallest integer along a dimension, which is kept with size 1, and its first index."""
    values, indices = op.TopK(x, op.Constant(value_ints=[1]), axis=dim, largest=int(largest), sorted=1)
    return values, indices


def _index_of_extremum(x: ir.Value, dim: int | None = None, keepdim: bool = False, *, largest: bool) -> ir.Value:
    """The index of the first NaN, else of the first extremum; into the flat tensor if ``dim`` is ``None``."""
    _check_supported(x)
    if rank(x) == 0:
        return constant(0, ir.DataType.INT64)
    if dim is None:
        index = _index_along(op.Reshape(x, op.Constant(value_ints=[-1])), 0, keepdim, largest=largest)
        return reshape(index, [1] * rank(x)) if keepdim else op.Reshape(index, op.Constant(value_ints=[]))
    return _index_along(x, dim % rank(x), keepdim, largest=largest)


def _index_along(x: ir.Value, dim: int, keepdim: bool, *, largest: bool) -> ir.Value:
    axis = op.Constant(value_ints=[dim])
    if x.dtype == ir.DataType.INT64:
        _, index = _top_one(x, dim, largest=largest)
        return index if keepdim else op.Squeeze(index, axis)
    if x.dtype == ir.DataType.FLOAT16:
        x = cast(x, ir.DataType.FLOAT)
    index = (op.ArgMax if largest else op.ArgMin)(x, axis=dim, keepdims=int(keepdim))
    if x.dtype not in _FLOATING_POINT:
        return index
    is_nan = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
    has_nan = op.ReduceMax(is_nan, axis, keepdims=int(keepdim))
    return op.Where(op.Cast(has_nan, to=ir.DataType.BOOL), op.ArgMax(is_nan, axis=dim, keepdims=int(keepdim)), index)


def _extremum_and_index(x: ir.Value, dim: int, keepdim: bool = False, *, largest: bool) -> tuple[ir.Value, ir.Value]:
    return _extremum(x, [dim], keepdim, largest=largest), _index_of_extremum(x, dim, keepdim, largest=largest)


converter(aten.amax.default, aten.max.default)(functools.partial(_extremum, largest=True))
converter(aten.amin.default, aten.min.default)(functools.partial(_extremum, largest=False))
converter(aten.argmax.default)(functools.partial(_index_of_extremum, largest=True))
converter(aten.argmin.default)(functools.partial(_index_of_extremum, largest=False))
converter(aten.max.dim)(functools.partial(_extremum_and_index, largest=True))
converter(aten.min.dim)(functools.partial(_extremum_and_index, largest=False))


def _is_infinite(x: ir.Value, **signs: int) -> ir.Value:
    """``IsInf``. Torchlib casts float64 to float32, which makes large numbers infinite."""
    return op.IsInf(x if x.dtype == ir.DataType.DOUBLE else cast(x, ir.DataType.FLOAT), **signs)


converter(aten.isinf.default)(_is_infinite)
converter(aten.isposinf.default)(functools.partial(_is_infinite, detect_negative=0))
converter(aten.isneginf.default)(functools.partial(_is_infinite, detect_positive=0))
