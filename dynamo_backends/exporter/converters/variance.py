"""Variance and standard deviation, alone or with the mean.

They are computed in float64 and in two passes, as PyTorch's kernels accumulate in float64 (``WelfordOps`` of
``aten/src/ATen/native/SharedReduceOps.h``): the variance of equal numbers is 0, and squares of large ones do not
overflow. For [64, 16384] float32 this takes 1.3 ms, float32 in stages 0.6, or 0.9 if sizes are symbolic; for [64, 256]
with symbolic sizes 0.018 instead of 0.025 (one thread; eager 4.9 and 0.08).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten

_END = 2**63 - 1


def _moments(
    x: ir.Value,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    is_root: bool,
    with_mean: bool,
) -> ir.Value | tuple[ir.Value, ir.Value]:
    """The sum of squared distances from the mean, divided by ``max(count - correction, 0)``, or its square root.

    ``dim`` are the dimensions, by default all, and ``correction`` is 1 by default. With an infinity among the numbers,
    the mean is NaN, unless it is the last number and the only one: then eager's running mean is that infinity.
    """
    if isinstance(correction, ir.Value) or x.dtype is None or not x.dtype.is_floating_point():
        raise NotTranslatable("its translation supports floating point, and a constant correction, only")
    returned, rank = x.dtype, shapes.rank(x)
    dims = sorted(item % rank for item in dim or range(rank)) if rank else [0]
    count = shapes.product([shapes.size(x, item) for item in dims] if rank else [1])
    wide = shapes.cast(x if rank else op.Reshape(x, [1]), ir.DataType.DOUBLE)
    axes, keepdims = op.Constant(value_ints=dims), int(keepdim and rank > 0)
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centered = op.Sub(wide, mean)
    squares = op.ReduceSum(op.Mul(centered, centered), axes, keepdims=keepdims)
    variance = op.Div(squares, _divisor(count, 1 if correction is None else correction))
    results = [op.Sqrt(variance) if is_root else variance]
    if with_mean:
        narrow = x if rank and returned == ir.DataType.FLOAT else wide  # IsInf has no float16 before opset 20
        infinities = op.ReduceSum(op.Cast(op.IsInf(narrow), to=ir.DataType.FLOAT), axes, keepdims=1)
        is_only = op.Equal(infinities, shapes.constant(1.0, ir.DataType.FLOAT))
        is_infinite = op.And(op.IsInf(_last(wide, dims)), is_only)
        mean, is_infinite = (item if keepdims else op.Squeeze(item, axes) for item in (mean, is_infinite))
        results.append(op.Where(op.And(op.IsNaN(squares), op.Not(is_infinite)), squares, mean))
    cast = shapes.cast_all(returned, *results)
    return cast if with_mean else cast[0]


def _last(x: ir.Value, dims: Sequence[int]) -> ir.Value:
    """The element at the last position in ``dims``, which stay, with size 1."""
    starts, ends = op.Constant(value_ints=[-1] * len(dims)), op.Constant(value_ints=[_END] * len(dims))
    return op.Slice(x, starts, ends, op.Constant(value_ints=dims))


def _divisor(count: shapes.Size, correction: float) -> ir.Value:
    """``max(count - correction, 0)`` in float64, a scalar."""
    zero = shapes.constant(0.0, ir.DataType.DOUBLE)
    if isinstance(count, int):
        return shapes.constant(float(max(count - correction, 0)), ir.DataType.DOUBLE)
    number = op.Cast(op.Squeeze(count, [0]), to=ir.DataType.DOUBLE)
    return op.Max(op.Sub(number, shapes.constant(float(correction), ir.DataType.DOUBLE)), zero)


for _target, _is_root, _with_mean in (
    (aten.var.correction, False, False),
    (aten.std.correction, True, False),
    (aten.var_mean.correction, False, True),
    (aten.std_mean.correction, True, True),
):
    converter(_target)(functools.partial(_moments, is_root=_is_root, with_mean=_with_mean))
