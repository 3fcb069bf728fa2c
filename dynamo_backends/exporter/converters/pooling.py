"""Max pooling: the maxima, and the gradients, which go where the maxima came from."""

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
    """The gradient of each maximum, added at the place in its plane that ``indices`` names.

    By ``ScatterElements``, as ``ScatterND`` loses sums where windows overlap.
    """
    returned, dtype = input.dtype, shapes.computing_dtype(input)  # ONNX Runtime's scatters add no half precision
    assert returned is not None
    sizes = shapes.sizes(input)
    planes, places = shapes.product(sizes[:-dims]), shapes.product(sizes[-dims:])
    outer = shapes.product(shapes.sizes(grad_output)[-dims:])
    scattered = op.ScatterElements(
        shapes.zeros([planes, places], dtype),
        shapes.reshape(indices, [planes, outer]),
        shapes.reshape(shapes.cast(grad_output, dtype), [planes, outer]),
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
    """The maxima and their places in their plane; of a window with NaN its last one, which ONNX Runtime's ``MaxPool``
    (1.31) loses.
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
    found, places = op.MaxPool(batch, **windows, dilations=dilations)
    plane = shapes.sizes(batch)[-dims:]
    places = op.Mod(places, shapes.vector([shapes.product(plane)]))  # ONNX counts from the first image on
    dtype, maxima = input.dtype, found
    assert dtype is not None
    if dtype.is_floating_point():
        not_a_number = _has_not_a_number(batch, found, windows, dilations)
        maxima = op.Where(not_a_number, shapes.constant(math.nan, dtype), found)
        one = op.Constant(value_int=1)
        numbers = op.Range(one, op.Add(op.Squeeze(shapes.vector([shapes.product(plane)])), one), one)
        numbers = shapes.reshape(op.Cast(numbers, to=ir.DataType.DOUBLE), plane)
        numbers = op.Where(op.IsNaN(batch), numbers, shapes.constant(0.0, ir.DataType.DOUBLE))
        last = op.Cast(op.MaxPool(numbers, **windows, dilations=dilations)[0], to=ir.DataType.INT64)
        places = op.Where(op.Greater(last, op.Constant(value_int=0)), op.Sub(last, one), places)
    if unbatched:
        maxima, places = op.Squeeze(maxima, [0]), op.Squeeze(places, [0])
    return maxima, places


def _has_not_a_number(
    batch: ir.Value, maxima: ir.Value, windows: Mapping[str, Any], dilations: Sequence[int]
) -> ir.Value:
    """Whether each window has NaN.

    Its mean is NaN then, which costs least; also of infinities of both signs, so that one whose maximum is infinite is
    taken to have none.
    """
    if batch.dtype == ir.DataType.FLOAT and not windows["ceil_mode"] and all(number == 1 for number in dilations):
        means = op.AveragePool(batch, **windows, count_include_pad=1)
        return op.And(op.IsNaN(means), op.Not(op.IsInf(maxima, detect_negative=0)))
    unordered = op.Cast(op.IsNaN(batch), to=ir.DataType.FLOAT)
    return op.Cast(op.MaxPool(unordered, **windows, dilations=dilations)[0], to=ir.DataType.BOOL)


for _dims, _windows, _backward in (
    (2, aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    (3, aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
):
    converter(_windows)(functools.partial(_max_pool, _dims))
    converter(_backward)(functools.partial(_max_pool_backward, _dims))
