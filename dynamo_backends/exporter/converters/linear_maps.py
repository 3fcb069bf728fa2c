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
        if not np.array_equal(matrix, np.eye(*matrix.shape)):
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
        value = op.Mul(value, _constant(weights.reshape(per_window), dtype))
    return op.ReduceSum(value, op.Constant(value_ints=[dim + 1]), keepdims=0)


def _constant(matrix: Matrix, dtype: ir.DataType) -> ir.Value:
    return op.Constant(value=ir.tensor(np.ascontiguousarray(matrix).astype(dtype.numpy())))


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

    ``AveragePool`` knows no ``divisor_override``, divides the windows that ``ceil_mode`` adds by another
    number before opset 19, and ONNX Runtime has a kernel for float32 alone.
    """
    pool = _Pool(dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    if divisor_override is not None or ceil_mode or input.dtype == ir.DataType.DOUBLE:
        return apply(input, pool.matrices(_spatial(input, dims)))
    unbatched = shapes.rank(input) == dims + 1
    pooled = op.AveragePool(
        op.Unsqueeze(input, [0]) if unbatched else input,
        kernel_shape=pool.kernel,
        strides=pool.stride,
        pads=pool.padding * 2,
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
    pool = _Pool(dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return apply(grad_output, [matrix.T for matrix in pool.matrices(_spatial(input, dims))])


for _dims, _forward, _backward in (
    (2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
    (3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default),
):
    converter(_forward)(functools.partial(_average_pool, _dims))
    converter(_backward)(functools.partial(_average_pool_backward, _dims))


class _Pool:
    """The arguments of an average pooling, one number for each dimension."""

    def __init__(
        self,
        dims: int,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> None:
        self.kernel = shapes.for_each(kernel_size, dims)
        self.stride = shapes.for_each(stride, dims) if stride else self.kernel
        self.padding = shapes.for_each(padding, dims)
        self.ceil_mode, self.count_include_pad, self.divisor = ceil_mode, count_include_pad, divisor_override

    def matrices(self, sizes: Sequence[int]) -> list[Matrix]:
        """For each dimension the weights of its elements in each window.

        A window is divided by the number of its elements that lie in the input, or in the padded input if
        ``count_include_pad``: a product of one number for each dimension. ``divisor_override`` goes into the
        first.
        """
        result = []
        for size, kernel, stride, padding in zip(sizes, self.kernel, self.stride, self.padding, strict=True):
            matrix = np.zeros((self._windows(size, kernel, stride, padding), size))
            for window, row in enumerate(matrix):
                start = window * stride - padding
                row[max(start, 0) : start + kernel] = 1
                if self.divisor is None:
                    row /= min(start + kernel, size + padding) - start if self.count_include_pad else max(row.sum(), 1)
            result.append(matrix)
        if self.divisor is not None:
            result[0] = result[0] / self.divisor
        return result

    def _windows(self, size: int, kernel: int, stride: int, padding: int) -> int:
        """``pooling_output_shape`` of ``aten/src/ATen/native/Pool.h``."""
        windows = (size + 2 * padding - kernel + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        starts_in_right_padding = self.ceil_mode and (windows - 1) * stride >= size + padding
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
