"""Average pooling, adaptive average pooling and antialiased interpolation, with gradients, as linear maps.

Each spatial dimension has a constant matrix, and the gradient uses its transpose. Elements that eager does not read are
not read, as zero times infinity is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten

Matrix = npt.NDArray[np.float64]


def _apply(value: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
    """Applies ``matrices[i]``, [out, in], to the i-th of the last ``len(matrices)`` dimensions of ``value``."""
    if value.dtype is None or not value.dtype.is_floating_point():
        raise NotTranslatable("its translation supports floating point only")
    sizes = shapes.sizes(value)
    for dim, matrix in enumerate(matrices, len(sizes) - len(matrices)):
        if not np.array_equal(matrix, np.eye(len(matrix))):
            value = _apply_to_dimension(value, matrix, dim, sizes)
            sizes[dim] = matrix.shape[0]
    return value


def _apply_to_dimension(
    value: ir.Value,
    matrix: Matrix,
    dim: int,
    sizes: Sequence[shapes.Size],
    is_read: npt.NDArray[np.bool_] | None = None,
) -> ir.Value:
    """Gathers the elements that are read, [..., out, width, ...], and sums their products with weights over the width.

    By default, those with nonzero weights are read.
    """
    dtype = value.dtype
    assert dtype is not None
    is_read = matrix != 0 if is_read is None else is_read
    width = max(int(is_read.sum(axis=1).max(initial=0)), 1)
    columns = np.argsort(~is_read, axis=1, kind="stable")[:, :width]
    counts, weights = np.take_along_axis(is_read, columns, axis=1), np.take_along_axis(matrix, columns, axis=1)
    broadcast = (*weights.shape, *(1 for _ in sizes[dim + 1 :]))
    if np.array_equal(columns.ravel(), np.arange(matrix.shape[1])):
        value = shapes.reshape(value, [*sizes[:dim], *weights.shape, *sizes[dim + 1 :]])
    else:
        value = op.Gather(value, op.Constant(value=ir.tensor(columns.astype(np.int64))), axis=dim)
    if not counts.all():
        mask = op.Constant(value=ir.tensor(counts.reshape(broadcast)))
        value = op.Where(mask, value, shapes.constant(0, dtype))
    if not np.array_equal(weights, counts):
        factors = np.ascontiguousarray(weights.reshape(broadcast)).astype(dtype.numpy())
        value = op.Mul(value, op.Constant(value=ir.tensor(factors)))
    return op.ReduceSum(value, op.Constant(value_ints=[dim + 1]), keepdims=0)


def _spatial(value: ir.Value, dims: int) -> list[int]:
    """The sizes of the last ``dims`` dimensions."""
    return [shapes.static_size(value, dim) for dim in range(-dims, 0)]


def _average_pool(
    dims: int,
    input: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ir.Value:
    """``AveragePool`` where it is correct, else matrices, which need static sizes.

    Before opset 19, ``AveragePool`` has another divisor for the windows that ``ceil_mode`` adds. ONNX Runtime has no
    kernel for float64.
    """
    windows = _windows(dims, kernel_size, stride, padding, divisor_override)
    if ceil_mode or input.dtype == ir.DataType.DOUBLE:
        return _apply(input, _average_matrices(_spatial(input, dims), windows, ceil_mode, count_include_pad))
    kernel, strides, pads = map(list, zip(*windows, strict=True))
    unbatched = shapes.rank(input) == dims + 1
    pooled = op.AveragePool(
        op.Unsqueeze(input, [0]) if unbatched else input,
        kernel_shape=kernel,
        strides=strides,
        pads=pads * 2,
        count_include_pad=int(count_include_pad),
    )
    return op.Squeeze(pooled, [0]) if unbatched else pooled


def _average_pool_backward(
    dims: int,
    grad_output: ir.Value,
    input: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> ir.Value:
    windows = _windows(dims, kernel_size, stride, padding, divisor_override)
    matrices = _average_matrices(_spatial(input, dims), windows, ceil_mode, count_include_pad)
    return _apply(grad_output, [matrix.T for matrix in matrices])


def _windows(
    dims: int, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], divisor: int | None
) -> list[tuple[int, int, int]]:
    """The kernel size, stride and padding of each dimension."""
    if divisor is not None:
        raise NotTranslatable("its translation does not support divisor_override")
    kernel = shapes.for_each(kernel_size, dims)
    strides = shapes.for_each(stride, dims) if stride else kernel
    return list(zip(kernel, strides, shapes.for_each(padding, dims), strict=True))


def _average_matrices(
    sizes: Sequence[int], windows: Sequence[tuple[int, int, int]], ceil_mode: bool, count_include_pad: bool
) -> list[Matrix]:
    """For each dimension the weights of its elements in each window, [windows, elements].

    A weight is 1 / the number of the window's elements in the input, or with ``count_include_pad`` in the padded input.
    """
    result = []
    for size, (kernel, stride, padding) in zip(sizes, windows, strict=True):
        matrix = np.zeros((_number_of_windows(size, kernel, stride, padding, ceil_mode), size))
        for i, row in enumerate(matrix):
            start = i * stride - padding
            row[max(start, 0) : start + kernel] = 1
            row /= min(start + kernel, size + padding) - start if count_include_pad else max(row.sum(), 1)
        result.append(matrix)
    return result


def _number_of_windows(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Follows ``pooling_output_shape`` of ``aten/src/ATen/native/Pool.h``."""
    windows = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    starts_in_right_padding = ceil_mode and (windows - 1) * stride >= size + padding
    return windows - 1 if starts_in_right_padding else windows


@converter(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_average_pool(input: ir.Value, output_size: Sequence[int]) -> ir.Value:
    """In each dimension, the mean of the elements from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``."""
    return _apply(input, _adaptive_matrices(_spatial(input, len(output_size)), output_size))


def _adaptive_average_pool_backward(dims: int, grad_output: ir.Value, input: ir.Value) -> ir.Value:
    matrices = _adaptive_matrices(_spatial(input, dims), _spatial(grad_output, dims))
    return _apply(grad_output, [matrix.T for matrix in matrices])


def _adaptive_matrices(sizes: Sequence[int], output_size: Sequence[int | ir.Value]) -> list[Matrix]:
    matrices = []
    for size, outputs in zip(sizes, output_size, strict=True):
        if not isinstance(outputs, int):
            raise NotTranslatable("its translation needs the number of windows, which is symbolic")
        matrix = np.zeros((outputs, size))
        for i, row in enumerate(matrix):
            start, end = i * size // outputs, -(-(i + 1) * size // outputs)
            row[start:end] = 1 / (end - start)
        matrices.append(matrix)
    return matrices


def _antialiased_matrix(
    old: int, new: int, factor: float | None, align_corners: bool, dtype: type[np.floating[Any]], *, is_cubic: bool
) -> tuple[Matrix, npt.NDArray[np.bool_]]:
    """The weights of the old elements in each new one, [new, old], and which are read.

    Follows ``_compute_indices_min_size_weights_aa`` of ``aten/src/ATen/native/cpu/UpSampleKernel.cpp``, in its dtype.
    """
    scale = dtype(1.0 / factor) if factor is not None and factor > 0 else dtype(old) / dtype(new)
    if align_corners:
        scale = dtype(old - 1) / dtype(new - 1) if new > 1 else dtype(0)
    stretch = max(scale, dtype(1))
    support = dtype(2 if is_cubic else 1) * stretch
    matrix, is_read = np.zeros((new, old)), np.zeros((new, old), dtype=np.bool_)
    for i in range(new):
        center = scale * dtype(i + 0.5)
        first = max(int(center - support + dtype(0.5)), 0)
        last = min(int(center + support + dtype(0.5)), old)
        distances = np.abs((np.arange(first, last).astype(dtype) - center + dtype(0.5)) / stretch)
        weights = _cubic(distances) if is_cubic else np.maximum(1 - distances, 0)
        total = weights.sum()
        matrix[i, first:last] = weights / total if total else weights
        is_read[i, first:last] = True
    return matrix, is_read


def _cubic(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keys' cubic convolution of nonnegative distances, with ``a = -0.5``."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _interpolate_antialiased(
    value: ir.Value,
    output_size: Sequence[int | ir.Value],
    align_corners: bool,
    *factors: float | None,
    is_cubic: bool,
) -> ir.Value:
    """Antialiased interpolation of [N, C, H, W].

    ONNX Runtime's ``Resize`` (1.32) has other weights for aligned corners, for cubic interpolation, and where a size
    becomes smaller.
    """
    if value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise NotTranslatable("its translation supports float32 and float64 only")
    dtype = np.float32 if value.dtype == ir.DataType.FLOAT else np.float64
    sizes = shapes.sizes(value)
    for dim, new, factor in zip((2, 3), output_size, factors or (None, None), strict=True):
        old = sizes[dim]
        if not isinstance(old, int) or not isinstance(new, int):
            raise NotTranslatable("its translation needs the old and the new size, of which one is symbolic")
        if old != new:  # else eager copies, whatever the factor
            matrix, is_read = _antialiased_matrix(old, new, factor, align_corners, dtype, is_cubic=is_cubic)
            value = _apply_to_dimension(value, matrix, dim, sizes, is_read)
            sizes[dim] = new
    return value


converter(aten._upsample_bilinear2d_aa.default)(functools.partial(_interpolate_antialiased, is_cubic=False))
converter(aten._upsample_bicubic2d_aa.default)(functools.partial(_interpolate_antialiased, is_cubic=True))

for _dims, _pool, _backward, _adaptive_backward in (
    (2, aten.avg_pool2d, aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward),
    (3, aten.avg_pool3d, aten.avg_pool3d_backward, aten._adaptive_avg_pool3d_backward),
):
    converter(_pool.default)(functools.partial(_average_pool, _dims))
    converter(_backward.default)(functools.partial(_average_pool_backward, _dims))
    converter(_adaptive_backward.default)(functools.partial(_adaptive_average_pool_backward, _dims))
