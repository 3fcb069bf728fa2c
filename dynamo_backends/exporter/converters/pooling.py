"""Max pooling: the gradients, which go where the maxima came from, and the adaptive kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten


def _max_pool_backward(dims: int, grad_output: ir.Value, input: ir.Value, indices: ir.Value) -> ir.Value:
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


def _max_pool_with_indices_backward(
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
    return _max_pool_backward(dims, grad_output, input, indices)


for _dims, _windows, _adaptive in (
    (2, aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default),
    (3, aten.max_pool3d_with_indices_backward.default, aten.adaptive_max_pool3d_backward.default),
):
    converter(_windows)(functools.partial(_max_pool_with_indices_backward, _dims))
    converter(_adaptive)(functools.partial(_max_pool_backward, _dims))


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


for _dims, _windows in ((2, aten.max_pool2d_with_indices.default), (3, aten.max_pool3d_with_indices.default)):
    converter(_windows)(functools.partial(_max_pool, _dims))


@converter(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(input: ir.Value, output_size: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """The maxima and their places in their plane.

    ONNX counts the places from the first image on, hence the remainder.
    """
    dims = len(output_size)
    sizes = [shapes.static_size(input, dim) for dim in range(-dims, 0)]
    if any(size % outputs for size, outputs in zip(sizes, output_size, strict=True)):
        if dims != 2:
            raise NotTranslatable("its windows differ in size")
        return _max_of_windows(input, sizes, output_size)
    kernel = [size // outputs for size, outputs in zip(sizes, output_size, strict=True)]
    unbatched = shapes.rank(input) == dims + 1
    batch = op.Unsqueeze(input, [0]) if unbatched else input
    maxima, places = op.MaxPool(batch, kernel_shape=kernel, strides=kernel)
    if unbatched:
        maxima, places = op.Squeeze(maxima, [0]), op.Squeeze(places, [0])
    return maxima, op.Mod(places, shapes.product(sizes))


def _max_of_windows(input: ir.Value, sizes: Sequence[int], output_size: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """The first maximum of each window, or its last NaN, and the place.

    Windows are made of one size: the last row and column of a smaller one are repeated, which changes neither.
    """
    if input.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise NotTranslatable("its windows differ in size")
    rows, columns = (_windows_of(size, outputs) for size, outputs in zip(sizes, output_size, strict=True))
    places = rows[:, None, :, None] * sizes[1] + columns[None, :, None, :]
    places = places.reshape(*output_size, -1)
    flat = shapes.reshape(input, [*shapes.sizes(input)[:-2], sizes[0] * sizes[1]])
    gathered = op.Gather(flat, op.Constant(value=ir.tensor(places)), axis=-1)
    last = op.Constant(value_ints=[-1])
    unordered = op.Cast(op.IsNaN(gathered), to=ir.DataType.FLOAT)
    has_nan = op.Cast(op.ReduceMax(unordered, last, keepdims=1), to=ir.DataType.BOOL)
    first = op.ArgMax(gathered, axis=-1, keepdims=1)
    chosen = op.Where(has_nan, op.ArgMax(unordered, axis=-1, keepdims=1, select_last_index=1), first)
    maxima = op.Squeeze(op.GatherElements(gathered, chosen, axis=-1), last)
    table = op.Expand(op.Constant(value=ir.tensor(places)), op.Shape(gathered))
    return maxima, op.Squeeze(op.GatherElements(table, chosen, axis=-1), last)


def _windows_of(size: int, outputs: int) -> npt.NDArray[np.int64]:
    """From ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``, [outputs, longest]; the last repeated."""
    starts = np.arange(outputs) * size // outputs
    ends = -(-(np.arange(outputs) + 1) * size // outputs)
    return np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1).astype(np.int64)
