"""Average pooling and adaptive average pooling, with their gradients, as linear maps.

Each spatial dimension has a constant matrix, and the gradient uses its transpose. Elements with weight zero are not
read, as zero times infinity is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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


def _apply_to_dimension(value: ir.Value, matrix: Matrix, dim: int, sizes: Sequence[shapes.Size]) -> ir.Value:
    """Gathers the elements with nonzero weights, [..., out, width, ...], and sums the products over the width."""
    dtype = value.dtype
    assert dtype is not None
    is_read = matrix != 0
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


for _dims, _pool, _backward, _adaptive_backward in (
    (2, aten.avg_pool2d, aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward),
    (3, aten.avg_pool3d, aten.avg_pool3d_backward, aten._adaptive_avg_pool3d_backward),
):
    converter(_pool.default)(functools.partial(_average_pool, _dims))
    converter(_backward.default)(functools.partial(_average_pool_backward, _dims))
    converter(_adaptive_backward.default)(functools.partial(_adaptive_average_pool_backward, _dims))
