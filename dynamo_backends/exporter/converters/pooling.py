"""Max pooling: the gradients, which go where the maxima came from, and the adaptive kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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


@converter(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(input: ir.Value, output_size: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """The maxima and their places in their plane, where all windows have one size.

    ONNX counts the places from the first image on, hence the remainder.
    """
    dims = len(output_size)
    sizes = [shapes.static_size(input, dim) for dim in range(-dims, 0)]
    if any(size % outputs for size, outputs in zip(sizes, output_size, strict=True)):
        raise NotTranslatable("its windows differ in size")
    kernel = [size // outputs for size, outputs in zip(sizes, output_size, strict=True)]
    unbatched = shapes.rank(input) == dims + 1
    batch = op.Unsqueeze(input, [0]) if unbatched else input
    maxima, places = op.MaxPool(batch, kernel_shape=kernel, strides=kernel)
    if unbatched:
        maxima, places = op.Squeeze(maxima, [0]), op.Squeeze(places, [0])
    return maxima, op.Mod(places, shapes.product(sizes))
