"""Medians, and what is cumulative: maxima and minima so far, products, sums of exponentials.

A median is one of the elements in order. ONNX Runtime's (1.31) TopK compares NaN as C++ does, so that it comes
anywhere; PyTorch takes it for the largest number. So keys are sorted that have no NaN: those of a float in float64,
where a number is left above its infinity. A sort stays in PyTorch all the same: that takes half the time (8 rows of
50,000 34 ms instead of 69, one thread of an AMD EPYC), and where equal elements were, if it need not be stable, is its
kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .choosing import select
from .elementwise import logaddexp
from .registry import NotTranslatable, converter
from .shapes import cast, constant

aten = torch.ops.aten

_SMALL = (ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32)
_LARGEST = torch.finfo(torch.float64).max


def _keys(x: ir.Value) -> ir.Value:
    """Numbers without NaN in the order of ``x``, equal where elements are."""
    dtype = x.dtype
    assert dtype is not None
    if dtype in _SMALL:
        return cast(x, ir.DataType.INT32)
    if dtype == ir.DataType.INT64:
        return x
    if not dtype.is_floating_point() or dtype == ir.DataType.DOUBLE:
        raise NotTranslatable(f"there is no type in which NaN is above the infinity of {dtype}")
    wide = cast(x, ir.DataType.DOUBLE)
    infinity = constant(math.inf, ir.DataType.DOUBLE)
    finite = op.Where(op.Equal(wide, infinity), constant(_LARGEST, ir.DataType.DOUBLE), wide)
    return op.Where(op.IsNaN(x), infinity, finite)


def _sorted(x: ir.Value) -> tuple[ir.Value, int]:
    """All elements in one dimension, in ascending order, and their number."""
    number = math.prod(shapes.static_size(x, dim) for dim in range(shapes.rank(x)))
    flat = op.Reshape(x, shapes.vector([-1]))
    _, indices = op.TopK(_keys(flat), op.Constant(value_ints=[number]), axis=0, largest=0, sorted=1)
    return op.Gather(flat, indices), number


@converter(aten.median.default)
def median(x: ir.Value) -> ir.Value:
    """The lower of the two in the middle; NaN if there is one."""
    if shapes.rank(x) == 0:
        return op.Identity(x)
    ordered, number = _sorted(x)
    middle = op.Gather(ordered, constant((number - 1) // 2, ir.DataType.INT64))
    if x.dtype is None or not x.dtype.is_floating_point():
        return middle
    last = op.Gather(ordered, constant(number - 1, ir.DataType.INT64))
    return op.Where(op.IsNaN(last), last, middle)


@converter(aten.nanmedian.default)
def nanmedian(x: ir.Value) -> ir.Value:
    """The median of what is not NaN; NaN if nothing is."""
    if x.dtype is None or not x.dtype.is_floating_point() or shapes.rank(x) == 0:
        return median(x)
    ordered, _ = _sorted(x)
    counted = op.ReduceSum(op.Cast(op.Not(op.IsNaN(ordered)), to=ir.DataType.INT64), keepdims=0)
    zero, one = constant(0, ir.DataType.INT64), constant(1, ir.DataType.INT64)
    last = op.Where(op.Greater(counted, zero), op.Sub(counted, one), zero)
    return op.Gather(ordered, op.Div(last, constant(2, ir.DataType.INT64)))


def scan(
    values: tuple[ir.Value, ...],
    dim: int,
    size: int,
    combine: Callable[[tuple[ir.Value, ...], tuple[ir.Value, ...]], tuple[ir.Value, ...]],
) -> tuple[ir.Value, ...]:
    """What an associative function makes of all elements so far, in as many steps as the size has binary digits.

    Args:
        values: tensors of one shape.
        dim: a dimension, not negative.
        size: of that dimension.
        combine: of the values of the elements before and of those after.
    """
    step = 1
    axes = shapes.vector([dim])

    def part(value: ir.Value, start: int, end: int) -> ir.Value:
        return op.Slice(value, shapes.vector([start]), shapes.vector([end]), axes)

    while step < size:
        before = tuple(part(value, 0, size - step) for value in values)
        after = tuple(part(value, step, size) for value in values)
        combined = combine(before, after)
        values = tuple(
            op.Concat(part(value, 0, step), new, axis=dim) for value, new in zip(values, combined, strict=True)
        )
        step *= 2
    return values


def _extremum_so_far(x: ir.Value, dim: int, *, largest: bool) -> tuple[ir.Value, ir.Value]:
    """The extremum so far, and the place of the last element that equals it; after NaN that is NaN."""
    if x.dtype == ir.DataType.BOOL:
        raise NotTranslatable("ONNX has no order of booleans")
    if shapes.rank(x) == 0:
        return op.Identity(x), constant(0, ir.DataType.INT64)
    dtype = x.dtype
    assert dtype is not None
    dim = dim % shapes.rank(x)
    is_float = dtype.is_floating_point()
    sizes, size = shapes.sizes(x), shapes.static_size(x, dim)
    if dtype in _SMALL:
        x = cast(x, ir.DataType.INT32)
    places = op.Range(
        constant(0, ir.DataType.INT64),
        constant(size, ir.DataType.INT64),
        constant(1, ir.DataType.INT64),
    )
    places = op.Reshape(places, shapes.vector([-1 if i == dim else 1 for i in range(len(sizes))]))
    places = op.Expand(places, shapes.vector(sizes))

    def combine(before: tuple[ir.Value, ...], after: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        compare = op.GreaterOrEqual if largest else op.LessOrEqual
        is_later = compare(after[0], before[0])
        if is_float:
            is_later = op.Or(op.IsNaN(after[0]), op.And(op.Not(op.IsNaN(before[0])), is_later))
        return select(is_later, after[0], before[0]), op.Where(is_later, after[1], before[1])

    value, place = scan((x, places), dim, size, combine)
    return cast(value, dtype), place


@converter(aten.cummax.default)
def cummax(x: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    """The maximum so far, and its last place."""
    return _extremum_so_far(x, dim, largest=True)


@converter(aten.cummin.default)
def cummin(x: ir.Value, dim: int) -> tuple[ir.Value, ir.Value]:
    """The minimum so far, and its last place."""
    return _extremum_so_far(x, dim, largest=False)


@converter(aten.logcumsumexp.default)
def logcumsumexp(x: ir.Value, dim: int) -> ir.Value:
    """The logarithm of the sum of the exponentials so far; torchlib's is wrong for infinities and NaN."""
    dtype = x.dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("logcumsumexp of integers")
    if shapes.rank(x) == 0:
        return op.Identity(x)
    dim = dim % shapes.rank(x)
    size = shapes.static_size(x, dim)

    def combine(before: tuple[ir.Value, ...], after: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        return (logaddexp(before[0], after[0]),)

    [result] = scan((cast(x, _accumulated(dtype)),), dim, size, combine)
    return cast(result, dtype)


def _accumulated(dtype: ir.DataType) -> ir.DataType:
    """The dtype in which eager's kernels on the CPU add or multiply up."""
    if dtype in shapes.HALF_PRECISION:
        return ir.DataType.FLOAT
    return ir.DataType.DOUBLE if dtype == ir.DataType.FLOAT else dtype


_LONGEST_PRODUCT = 64
"""Of more numbers PyTorch computes the cumulative product: here each is a node, and all in fewer steps could overflow
on the way where the product does not."""


@converter(aten.cumprod.default)
def cumprod(x: ir.Value, dim: int, dtype: ir.DataType | int | None = None) -> ir.Value:
    """The product so far, one number after the other."""
    if x.dtype is None or x.dtype == ir.DataType.BOOL:
        raise NotTranslatable("a product of booleans")
    if shapes.rank(x) == 0:
        return op.Identity(x)
    dim = dim % shapes.rank(x)
    size = shapes.static_size(x, dim)
    if size > _LONGEST_PRODUCT:
        raise NotTranslatable(f"a cumulative product of more than {_LONGEST_PRODUCT} numbers")
    numbers = cast(x, _accumulated(x.dtype))
    parts = list(op.Split(numbers, num_outputs=size, axis=dim)) if size > 1 else [numbers]
    for i in range(1, size):
        parts[i] = op.Mul(parts[i - 1], parts[i])
    return cast(op.Concat(*parts, axis=dim), x.dtype)
