"""Max pooling with indices and its gradient, in two and three dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter

aten = torch.ops.aten


def _max_pool_backward(
    dims: int,
    grad_output: ir.Value,
    input: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: ir.Value,
) -> ir.Value:
    """The gradient of each maximum, added at its index in its plane.

    ``ScatterND`` would lose sums where windows overlap. Half precision is added in float32, as ONNX Runtime's scatter
    operators do not support it.
    """
    returned, dtype = input.dtype, shapes.computing_dtype(input)
    assert returned is not None
    sizes = shapes.sizes(input)
    planes, elements = shapes.product(sizes[:-dims]), shapes.product(sizes[-dims:])
    windows = shapes.product(shapes.sizes(grad_output)[-dims:])
    scattered = op.ScatterElements(
        shapes.zeros([planes, elements], dtype),
        shapes.reshape(indices, [planes, windows]),
        shapes.reshape(shapes.cast(grad_output, dtype), [planes, windows]),
        axis=1,
        reduction="add",
    )
    return shapes.cast(shapes.reshape(scattered, sizes), returned)


def _max_pool(
    dims: int,
    input: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """The maxima and their indices within a plane; for a window with NaN, its last NaN.

    ONNX Runtime's ``MaxPool`` (1.31) ignores NaN. So a second ``MaxPool`` finds the last NaN of each window: its input
    is the position, counted from 1, at each NaN and 0 elsewhere.
    """
    kernel = shapes.for_each(kernel_size, dims)
    windows = {
        "kernel_shape": kernel,
        "strides": shapes.for_each(stride, dims) if stride else kernel,
        "pads": shapes.for_each(padding, dims) * 2,
        "ceil_mode": int(ceil_mode),
    }
    dilations = shapes.for_each(dilation, dims)
    unbatched = shapes.rank(input) == dims + 1
    batch = op.Unsqueeze(input, [0]) if unbatched else input
    maxima, indices = op.MaxPool(batch, **windows, dilations=dilations)
    plane = shapes.sizes(batch)[-dims:]
    elements = shapes.vector([shapes.product(plane)])
    indices = op.Mod(indices, elements)  # ONNX counts across planes
    if input.dtype is not None and input.dtype.is_floating_point():
        has_nan = _has_nan(batch, maxima, windows, dilations)
        maxima = op.Where(has_nan, shapes.constant(math.nan, input.dtype), maxima)
        one = op.Constant(value_int=1)
        positions = op.Range(one, op.Add(op.Squeeze(elements), one), one)
        positions = shapes.reshape(op.Cast(positions, to=ir.DataType.DOUBLE), plane)
        positions = op.Where(op.IsNaN(batch), positions, shapes.constant(0.0, ir.DataType.DOUBLE))
        last = op.Cast(op.MaxPool(positions, **windows, dilations=dilations)[0], to=ir.DataType.INT64)
        indices = op.Where(op.Greater(last, op.Constant(value_int=0)), op.Sub(last, one), indices)
    if unbatched:
        maxima, indices = op.Squeeze(maxima, [0]), op.Squeeze(indices, [0])
    return maxima, indices


def _has_nan(batch: ir.Value, maxima: ir.Value, windows: Mapping[str, Any], dilations: Sequence[int]) -> ir.Value:
    """Whether each window has NaN.

    The cheapest test is a NaN mean. Infinities of both signs have one too, so the maximum must not be infinite.
    """
    if batch.dtype == ir.DataType.FLOAT and not windows["ceil_mode"] and all(number == 1 for number in dilations):
        means = op.AveragePool(batch, **windows, count_include_pad=1)
        return op.And(op.IsNaN(means), op.Not(op.IsInf(maxima, detect_negative=0)))
    is_nan = op.Cast(op.IsNaN(batch), to=ir.DataType.FLOAT)
    return op.Cast(op.MaxPool(is_nan, **windows, dilations=dilations)[0], to=ir.DataType.BOOL)


for _dims, _pool, _backward in (
    (2, aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    (3, aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
):
    converter(_pool.default)(functools.partial(_max_pool, _dims))
    converter(_backward.default)(functools.partial(_max_pool_backward, _dims))
