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


def _extremum(x: ir.Value, dims: Sequence[int], keepdim: bool, *, largest: bool) -> ir.Value:
    """The maximum or minimum over ``dims`` (all if empty), and NaN where there is one."""
    _check(x)
    if rank(x) == 0:
        return op.Identity(x)
    reduced = [dim % rank(x) for dim in dims] or list(range(rank(x)))
    axes = op.Constant(value_ints=reduced)
    if x.dtype == ir.DataType.INT64:
        for dim in reduced:
            x, _ = _first(x, dim, largest=largest)
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


def _index(x: ir.Value, dim: int | None, keepdim: bool, *, largest: bool) -> ir.Value:
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


@converter(aten.amax.default)
def amax(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False) -> ir.Value:
    """The maximum over dimensions, all if none are given."""
    return _extremum(x, dim, keepdim, largest=True)


@converter(aten.amin.default)
def amin(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False) -> ir.Value:
    """The minimum over dimensions, all if none are given."""
    return _extremum(x, dim, keepdim, largest=False)


@converter(aten.max.default)
def max_of_all(x: ir.Value) -> ir.Value:
    """The maximum of all elements."""
    return _extremum(x, (), False, largest=True)


@converter(aten.min.default)
def min_of_all(x: ir.Value) -> ir.Value:
    """The minimum of all elements."""
    return _extremum(x, (), False, largest=False)


@converter(aten.argmax.default)
def argmax(x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """The index of the maximum."""
    return _index(x, dim, keepdim, largest=True)


@converter(aten.argmin.default)
def argmin(x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """The index of the minimum."""
    return _index(x, dim, keepdim, largest=False)


@converter(aten.max.dim)
def max_over(x: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value, ir.Value]:
    """The maximum over one dimension and its index."""
    return _extremum(x, [dim], keepdim, largest=True), _index(x, dim, keepdim, largest=True)


@converter(aten.min.dim)
def min_over(x: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value, ir.Value]:
    """The minimum over one dimension and its index."""
    return _extremum(x, [dim], keepdim, largest=False), _index(x, dim, keepdim, largest=False)


def _is_infinite(x: ir.Value, **detected: int) -> ir.Value:
    """Whether elements are infinities; torchlib asks a float64 in float32, where large numbers are infinite."""
    if not _is_float(x):
        raise NotTranslatable("an integer is never infinite")
    return op.IsInf(x if x.dtype == ir.DataType.DOUBLE else cast(x, ir.DataType.FLOAT), **detected)


converter(aten.isinf.default)(_is_infinite)
converter(aten.isposinf.default)(functools.partial(_is_infinite, detect_negative=0))
converter(aten.isneginf.default)(functools.partial(_is_infinite, detect_positive=0))
