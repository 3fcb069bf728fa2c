"""Linear maps of single dimensions: average pooling, and its gradient.

Each is a constant matrix for each dimension, and so are its gradients, with the matrices transposed. Only the elements
with a weight are taken, as zero times infinity is NaN.
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


def apply(value: ir.Value, matrices: Sequence[Matrix]) -> ir.Value:
    """``matrices[i]``, [out, in], applied to the i-th of the last ``len(matrices)`` dimensions of
    ``value``.
    """
    dtype = value.dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    sizes = shapes.sizes(value)
    first = len(sizes) - len(matrices)
    for dim, matrix in enumerate(matrices, first):
        if not np.array_equal(matrix, np.eye(len(matrix))):
            value = _sum_of_few(value, matrix, dim, sizes)
            sizes[dim] = matrix.shape[0]
    return value


def _sum_of_few(value: ir.Value, matrix: Matrix, dim: int, sizes: Sequence[shapes.Size]) -> ir.Value:
    """A matrix [out, in] with zeros applied to dimension ``dim``: the elements with a weight, weighted and added up."""
    dtype = value.dtype
    assert dtype is not None
    taken = matrix != 0
    width = max(int(taken.sum(axis=1).max(initial=0)), 1)
    columns = np.argsort(~taken, axis=1, kind="stable")[:, :width]
    counts, weights = np.take_along_axis(taken, columns, axis=1), np.take_along_axis(matrix, columns, axis=1)
    per_window = (*weights.shape, *(1 for _ in sizes[dim + 1 :]))
    if np.array_equal(columns.ravel(), np.arange(matrix.shape[1])):
        value = shapes.reshape(value, [*sizes[:dim], *weights.shape, *sizes[dim + 1 :]])
    else:
        value = op.Gather(value, op.Constant(value=ir.tensor(columns.astype(np.int64))), axis=dim)
    if not counts.all():
        mask = op.Constant(value=ir.tensor(counts.reshape(per_window)))
        value = op.Where(mask, value, shapes.constant(0, dtype))
    if not np.array_equal(weights, counts):
        factors = np.ascontiguousarray(weights.reshape(per_window)).astype(dtype.numpy())
        value = op.Mul(value, op.Constant(value=ir.tensor(factors)))
    return op.ReduceSum(value, op.Constant(value_ints=[dim + 1]), keepdims=0)


def _spatial(value: ir.Value, dims: int) -> list[int]:
    """The sizes of the last ``dims`` dimensions."""
    return [shapes.static_size(value, dim) for dim in range(-dims, 0)]


# Average pooling


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
    """ONNX's ``AveragePool`` where it means the same; else matrices, which need static sizes.

    ``AveragePool`` divides the windows that ``ceil_mode`` adds by another number before opset 19, and ONNX Runtime has
    a kernel for float32 alone.
    """
    window = _window(dims, kernel_size, stride, padding, divisor_override)
    if ceil_mode or input.dtype == ir.DataType.DOUBLE:
        return apply(input, _average_matrices(_spatial(input, dims), window, ceil_mode, count_include_pad))
    kernel, strides, pads = map(list, zip(*window, strict=True))
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
    """Each window's gradient, divided as in the forward, added to all elements of the window."""
    window = _window(dims, kernel_size, stride, padding, divisor_override)
    matrices = _average_matrices(_spatial(input, dims), window, ceil_mode, count_include_pad)
    return apply(grad_output, [matrix.T for matrix in matrices])


for _dims, _forward, _backward in (
    (2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
    (3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default),
):
    converter(_forward)(functools.partial(_average_pool, _dims))
    converter(_backward)(functools.partial(_average_pool_backward, _dims))


def _window(
    dims: int, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], divisor: int | None
) -> list[tuple[int, int, int]]:
    """Kernel size, stride and padding of each dimension."""
    if divisor is not None:
        raise NotTranslatable("its translation knows no divisor_override")
    kernel = shapes.for_each(kernel_size, dims)
    strides = shapes.for_each(stride, dims) if stride else kernel
    return list(zip(kernel, strides, shapes.for_each(padding, dims), strict=True))


def _average_matrices(
    sizes: Sequence[int], window: Sequence[tuple[int, int, int]], ceil_mode: bool, count_include_pad: bool
) -> list[Matrix]:
    """For each dimension the weights of its elements in each window.

    A window is divided by the number of its elements that lie in the input, or in the padded input if
    ``count_include_pad``: a product of one number for each dimension.
    """
    result = []
    for size, (kernel, stride, padding) in zip(sizes, window, strict=True):
        matrix = np.zeros((_number_of_windows(size, kernel, stride, padding, ceil_mode), size))
        for i, row in enumerate(matrix):
            start = i * stride - padding
            row[max(start, 0) : start + kernel] = 1
            row /= min(start + kernel, size + padding) - start if count_include_pad else max(row.sum(), 1)
        result.append(matrix)
    return result


def _number_of_windows(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """``pooling_output_shape`` of ``aten/src/ATen/native/Pool.h``."""
    windows = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    starts_in_right_padding = ceil_mode and (windows - 1) * stride >= size + padding
    return windows - 1 if starts_in_right_padding else windows


@converter(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_average_pool(input: ir.Value, output_size: Sequence[int]) -> ir.Value:
    """The mean of the elements from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``, in each
    dimension.
    """
    return apply(input, _adaptive_matrices(_spatial(input, len(output_size)), output_size))


def _adaptive_average_pool_backward(dims: int, grad_output: ir.Value, input: ir.Value) -> ir.Value:
    """Each mean's gradient, divided by their number, added to its elements."""
    matrices = _adaptive_matrices(_spatial(input, dims), _spatial(grad_output, dims))
    return apply(grad_output, [matrix.T for matrix in matrices])


for _dims, _backward in (
    (2, aten._adaptive_avg_pool2d_backward.default),
    (3, aten._adaptive_avg_pool3d_backward.default),
):
    converter(_backward)(functools.partial(_adaptive_average_pool_backward, _dims))


def _adaptive_matrices(sizes: Sequence[int], output_size: Sequence[int | ir.Value]) -> list[Matrix]:
    matrices = []
    for size, outputs in zip(sizes, output_size, strict=True):
        if not isinstance(outputs, int):
            raise NotTranslatable("the number of windows is symbolic, and its translation needs the number")
        matrix = np.zeros((outputs, size))
        for i, row in enumerate(matrix):
            start, end = i * size // outputs, -(-(i + 1) * size // outputs)
            row[start:end] = 1 / (end - start)
        matrices.append(matrix)
    return matrices
