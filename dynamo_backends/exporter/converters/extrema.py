"""Maxima and minima over dimensions, and infinities.

Eager's extremum of numbers with a NaN among them is NaN, and its index that of the first NaN. ONNX Runtime's
(1.31) ReduceMax, ReduceMin, ArgMax and ArgMin skip NaN or keep it depending on where it stands, and of int64
they compare 32 bits; PyTorch reduces those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
}


def _check(x: ir.Value) -> None:
    if x.dtype not in _ORDERED:
        raise NotTranslatable(f"ONNX Runtime's extrema are not for {x.dtype}")
    if x.shape is None or 0 in x.shape.dims:
        raise NotTranslatable("an extremum over nothing is an error of eager's")


def _is_float(x: ir.Value) -> bool:
    return x.dtype is not None and x.dtype.is_floating_point()


def _extremum(reduce: Callable[..., ir.Value], x: ir.Value, dims: Sequence[int], keepdim: bool) -> ir.Value:
    """``reduce`` (ReduceMax or ReduceMin) over ``dims`` (all if empty), and NaN where it meets one."""
    _check(x)
    if rank(x) == 0:
        return op.Identity(x)
    axes = op.Constant(value_ints=list(dims) or list(range(rank(x))))
    result = reduce(x, axes, keepdims=int(keepdim))
    if not _is_float(x):
        return result
    assert x.dtype is not None
    found = op.ReduceMax(op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT), axes, keepdims=int(keepdim))
    return op.Where(op.Cast(found, to=ir.DataType.BOOL), constant(math.nan, x.dtype), result)


def _index(arg: Callable[..., ir.Value], x: ir.Value, dim: int | None, keepdim: bool) -> ir.Value:
    """``arg`` (ArgMax or ArgMin), the first of equal elements; of the first NaN if there is one.

    Without ``dim`` the index counts through all elements.
    """
    _check(x)
    if rank(x) == 0:
        return constant(0, ir.DataType.INT64)
    if dim is None:
        index = _index(arg, reshape(x, [-1]), 0, False)
        return reshape(index, [1] * rank(x)) if keepdim else index
    if x.dtype == ir.DataType.FLOAT16:
        x = cast(x, ir.DataType.FLOAT)
    index = arg(x, axis=dim, keepdims=int(keepdim))
    if not _is_float(x):
        return index
    unordered = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
    found = op.ReduceMax(unordered, op.Constant(value_ints=[dim]), keepdims=int(keepdim))
    first = op.ArgMax(unordered, axis=dim, keepdims=int(keepdim))
    return op.Where(op.Cast(found, to=ir.DataType.BOOL), first, index)


@converter(aten.amax.default)
def amax(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False) -> ir.Value:
    """The maximum over dimensions, all if none are given."""
    return _extremum(op.ReduceMax, x, dim, keepdim)


@converter(aten.amin.default)
def amin(x: ir.Value, dim: Sequence[int] = (), keepdim: bool = False) -> ir.Value:
    """The minimum over dimensions, all if none are given."""
    return _extremum(op.ReduceMin, x, dim, keepdim)


@converter(aten.max.default)
def max_of_all(x: ir.Value) -> ir.Value:
    """The maximum of all elements."""
    return _extremum(op.ReduceMax, x, (), False)


@converter(aten.min.default)
def min_of_all(x: ir.Value) -> ir.Value:
    """The minimum of all elements."""
    return _extremum(op.ReduceMin, x, (), False)


@converter(aten.argmax.default)
def argmax(x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """The index of the maximum."""
    return _index(op.ArgMax, x, dim, keepdim)


@converter(aten.argmin.default)
def argmin(x: ir.Value, dim: int | None = None, keepdim: bool = False) -> ir.Value:
    """The index of the minimum."""
    return _index(op.ArgMin, x, dim, keepdim)


@converter(aten.max.dim)
def max_over(x: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value, ir.Value]:
    """The maximum over one dimension and its index."""
    return _extremum(op.ReduceMax, x, [dim], keepdim), _index(op.ArgMax, x, dim, keepdim)


@converter(aten.min.dim)
def min_over(x: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value, ir.Value]:
    """The minimum over one dimension and its index."""
    return _extremum(op.ReduceMin, x, [dim], keepdim), _index(op.ArgMin, x, dim, keepdim)


def _is_infinite(x: ir.Value, *, positive: bool, negative: bool) -> ir.Value:
    """IsInf, in the dtype of ``x``: torchlib asks a float64 in float32, where large numbers are infinite."""
    if not _is_float(x):
        raise NotTranslatable("an integer is never infinite")
    known = x if x.dtype == ir.DataType.DOUBLE else cast(x, ir.DataType.FLOAT)
    return op.IsInf(known, detect_positive=int(positive), detect_negative=int(negative))


@converter(aten.isinf.default)
def isinf(x: ir.Value) -> ir.Value:
    """Whether an element is an infinity."""
    return _is_infinite(x, positive=True, negative=True)


@converter(aten.isposinf.default)
def isposinf(x: ir.Value) -> ir.Value:
    """Whether an element is the positive infinity."""
    return _is_infinite(x, positive=True, negative=False)


@converter(aten.isneginf.default)
def isneginf(x: ir.Value) -> ir.Value:
    """Whether an element is the negative infinity."""
    return _is_infinite(x, positive=False, negative=True)
