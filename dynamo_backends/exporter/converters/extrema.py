"""Maxima and minima over dimensions, and infinities.

Eager's extremum of numbers with a NaN among them is NaN, and its index that of the first NaN. ONNX Runtime's
(1.31) ReduceMax, ReduceMin, ArgMax and ArgMin skip NaN or keep it depending on where it stands, and of int64
they compare 32 bits; its TopK compares all.
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

_ORDERED = {
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
}


def _check(x: ir.Value) -> None:
    if x.dtype not in _ORDERED:
        raise NotTranslatable(f"ONNX Runtime's extrema are not for {x.dtype}")
    if x.shape is None or 0 in x.shape.dims:
        raise NotTranslatable("an extremum over nothing is an error of eager's")


def _is_float(x: ir.Value) -> bool:
    return x.dtype is not None and x.dtype.is_floating_point()


def _extremum(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False, *, largest: bool) -> ir.Value:
    """The maximum or minimum over dimensions, all if none are given; NaN where there is one."""
    _check(x)
    if rank(x) == 0:
        return op.Identity(x)
    reduced = [item % rank(x) for item in dim] or list(range(rank(x)))
    axes = op.Constant(value_ints=reduced)
    if x.dtype == ir.DataType.INT64:
        for item in reduced:
            x, _ = _first(x, item, largest=largest)
        return x if keepdim else op.Squeeze(x, axes)
    reduce = op.ReduceMax if largest else op.ReduceMin
    result = reduce(x, axes, keepdims=int(keepdim))
    if not _is_float(x):
        return result
    assert x.dtype is not None
    found = op.ReduceMax(op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT), axes, keepdims=int(keepdim))
    return op.Where(op.Cast(found, to=ir.DataType.BOOL), constant(math.nan, x.dtype), result)


def _first(x: ir.Value, dim: int, *, largest: bool) -> tuple[ir.Value, ir.Value]:
    """The largest or smallest of integers along a dimension, which is kept, and its first place."""
    values, indices = op.TopK(x, op.Constant(value_ints=[1]), axis=dim, largest=int(largest), sorted=1)
    return values, indices


def _index(x: ir.Value, dim: int | None = None, keepdim: bool = False, *, largest: bool) -> ir.Value:
    """The place of the first of equal extrema; of the first NaN if there is one.

    Without ``dim`` it counts through all elements.
    """
    _check(x)
    if rank(x) == 0:
        return constant(0, ir.DataType.INT64)
    if dim is None:
        index = _place(op.Reshape(x, op.Constant(value_ints=[-1])), 0, keepdim, largest=largest)
        return reshape(index, [1] * rank(x)) if keepdim else op.Reshape(index, op.Constant(value_ints=[]))
    return _place(x, dim % rank(x), keepdim, largest=largest)


def _place(x: ir.Value, dim: int, keepdim: bool, *, largest: bool) -> ir.Value:
    """``_index`` along one dimension, whatever the shape."""
    axis = op.Constant(value_ints=[dim])
    if x.dtype == ir.DataType.INT64:
        _, index = _first(x, dim, largest=largest)
        return index if keepdim else op.Squeeze(index, axis)
    if x.dtype == ir.DataType.FLOAT16:
        x = cast(x, ir.DataType.FLOAT)
    index = (op.ArgMax if largest else op.ArgMin)(x, axis=dim, keepdims=int(keepdim))
    if not _is_float(x):
        return index
    unordered = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
    found = op.ReduceMax(unordered, axis, keepdims=int(keepdim))
    first = op.ArgMax(unordered, axis=dim, keepdims=int(keepdim))
    return op.Where(op.Cast(found, to=ir.DataType.BOOL), first, index)


def _both(x: ir.Value, dim: int, keepdim: bool = False, *, largest: bool) -> tuple[ir.Value, ir.Value]:
    """The extremum over one dimension and its place."""
    return _extremum(x, [dim], keepdim, largest=largest), _index(x, dim, keepdim, largest=largest)


converter(aten.amax.default, aten.max.default)(functools.partial(_extremum, largest=True))
converter(aten.amin.default, aten.min.default)(functools.partial(_extremum, largest=False))
converter(aten.argmax.default)(functools.partial(_index, largest=True))
converter(aten.argmin.default)(functools.partial(_index, largest=False))
converter(aten.max.dim)(functools.partial(_both, largest=True))
converter(aten.min.dim)(functools.partial(_both, largest=False))


def _is_infinite(x: ir.Value, **detected: int) -> ir.Value:
    """Whether elements are infinities; torchlib asks a float64 in float32, where large numbers are infinite."""
    return op.IsInf(x if x.dtype == ir.DataType.DOUBLE else cast(x, ir.DataType.FLOAT), **detected)


converter(aten.isinf.default)(_is_infinite)
converter(aten.isposinf.default)(functools.partial(_is_infinite, detect_negative=0))
converter(aten.isneginf.default)(functools.partial(_is_infinite, detect_positive=0))
