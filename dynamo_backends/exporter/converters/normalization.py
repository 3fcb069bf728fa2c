"""Layer normalization and batch normalization, forward where torchlib's differs, and backward."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter
from .shapes import Size

aten = torch.ops.aten


# Layer normalization


@converter(aten.native_layer_norm.default)
def layer_norm(
    input: ir.Value,
    normalized_shape: Sequence[Size],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> tuple[ir.Value, ...]:
    """The normalized input, and mean and 1 / standard deviation of the last ``len(normalized_shape)``
    dimensions.

    ONNX Runtime's ``LayerNormalization`` returns float32 statistics: float64 gets the formula, and the half
    precisions, whose statistics have the dtype of the weight, are computed in float32.
    """
    dims = list(range(-len(normalized_shape), 0))
    dtype = shapes.computing_dtype(input)
    returned, statistics = input.dtype, (input if weight is None else weight).dtype
    assert returned is not None and statistics is not None
    input, weight, bias = shapes.cast_all(dtype, input, weight, bias)
    if dtype != ir.DataType.DOUBLE:
        if weight is None:
            weight = op.Expand(shapes.constant(1.0, dtype), shapes.vector(_sizes(normalized_shape)))
        result, mean, inverse = op.LayerNormalization(input, weight, bias, axis=dims[0], epsilon=eps)
        return shapes.cast(result, returned), *shapes.cast_all(statistics, mean, inverse)
    mean = op.ReduceMean(input, dims, keepdims=1)
    centered = op.Sub(input, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), dims, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, eps)))
    result = op.Mul(centered, inverse)
    if weight is not None:
        result = op.Mul(result, weight)
    if bias is not None:
        result = op.Add(result, bias)
    return result, mean, inverse


@converter(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad_out: ir.Value,
    input: ir.Value,
    normalized_shape: Sequence[Size],
    mean: ir.Value,
    rstd: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """The gradients of input, weight and bias, ``None`` where ``output_mask`` does not ask for one.

    With x the normalized input and p = g * x: ``dx = rstd * (g * w - mean(g * w) - x * mean(p * w))``, ``dw =
    sum(p)``, ``db = sum(g)``. The means and sums are products with a vector, on the matrix [rows, features]:
    1.6 ms at 1024 x 768 against 2.2 ms of PyTorch's decomposition (2 threads).
    """
    dtype = input.dtype
    assert dtype is not None
    computing = shapes.computing_dtype(input)
    all_sizes = shapes.sizes(input)
    leading = all_sizes[: len(all_sizes) - len(normalized_shape)]
    rows, features = shapes.product(leading), shapes.product(_sizes(normalized_shape))
    grad, value = (shapes.reshape(shapes.cast(item, computing), [rows, features]) for item in (grad_out, input))
    mean, rstd = (shapes.reshape(shapes.cast(item, computing), [rows, 1]) for item in (mean, rstd))
    normalized = op.Mul(op.Sub(value, mean), rstd)
    products = op.Mul(grad, normalized)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        number = _number(features, computing)
        weighted = grad
        if weight is None:
            means = op.Expand(op.Reciprocal(number), shapes.vector([features, 1]))
        else:
            weight_row = shapes.reshape(shapes.cast(weight, computing), [1, features])
            means = shapes.reshape(op.Div(weight_row, number), [features, 1])
            weighted = op.Mul(grad, weight_row)
        across = op.Sub(op.Sub(weighted, op.MatMul(grad, means)), op.Mul(normalized, op.MatMul(products, means)))
        grad_input = shapes.cast(shapes.reshape(op.Mul(rstd, across), all_sizes), dtype)
    ones = op.Expand(shapes.constant(1.0, computing), shapes.vector([1, rows]))
    if output_mask[1] and weight is not None:
        grad_weight = _as_parameter(op.MatMul(ones, products), normalized_shape, weight)
    if output_mask[2] and bias is not None:
        grad_bias = _as_parameter(op.MatMul(ones, grad), normalized_shape, bias)
    return grad_input, grad_weight, grad_bias


def _as_parameter(row: ir.Value, normalized_shape: Sequence[Size], parameter: ir.Value) -> ir.Value:
    assert parameter.dtype is not None
    return shapes.cast(shapes.reshape(row, _sizes(normalized_shape)), parameter.dtype)


def _sizes(numbers: Sequence[Size]) -> list[Size]:
    return [shapes.as_size(number) for number in numbers]


def _number(count: Size, dtype: ir.DataType) -> ir.Value:
    """A number of elements as a floating-point scalar, or a vector of length one."""
    return shapes.constant(float(count), dtype) if isinstance(count, int) else op.Cast(count, to=dtype)


# Batch normalization


@converter(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]:
    """Batch normalization of dimension 1: the result, saved mean and 1 / standard deviation, new running
    statistics.

    Follows ``batch_norm_cpu`` of ``aten/src/ATen/native/Normalization.cpp``: the batch is normalized by its
    variance, the running variance takes the unbiased one. In evaluation the saved statistics are empty.
    ONNX's operator in training mode updates the running variance with the biased one and returns no
    statistics of the batch.

    The saved statistics have the input's dtype, but float32 where a half input comes with float32 weights; the new
    running statistics have the one it is computed in, as PyTorch's fake tensors do.
    """
    returned, dtype, sizes = input.dtype, shapes.computing_dtype(input), shapes.sizes(input)
    assert returned is not None
    others = [value.dtype for value in (weight, bias, running_mean, running_var) if value is not None]
    saved = returned if all(other == returned for other in others) else dtype
    input, weight, bias, running_mean, running_var = shapes.cast_all(
        dtype, input, weight, bias, running_mean, running_var
    )
    if not training:
        empty = shapes.zeros([0], saved)
        result = _normalize(input, sizes[1], running_mean, running_var, weight, bias, eps)
        return shapes.cast(result, returned), empty, empty, op.Identity(running_mean), op.Identity(running_var)
    axes = [dim for dim in range(len(sizes)) if dim != 1]
    count = _number(shapes.product([size for i, size in enumerate(sizes) if i != 1]), dtype)
    mean = op.ReduceMean(input, axes, keepdims=1)
    squares = op.ReduceSumSquare(op.Sub(input, mean), axes, keepdims=0)
    mean = op.Squeeze(mean, axes)
    variance = op.Div(squares, count)
    unbiased = op.Div(squares, op.Sub(count, shapes.constant(1.0, dtype)))
    result = _normalize(input, sizes[1], mean, variance, weight, bias, eps)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, eps)))
    return (
        shapes.cast(result, returned),
        *shapes.cast_all(saved, mean, inverse),
        _blend(running_mean, mean, momentum),
        _blend(running_var, unbiased, momentum),
    )


@converter(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    momentum: float,
    eps: float,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The result, and empty statistics of the batch; torchlib returns the running statistics in their place."""
    result, mean, inverse, _, _ = batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)
    return result, mean, inverse


def _blend(running: ir.Value, new: ir.Value, momentum: float) -> ir.Value:
    return op.Add(op.Mul(running, 1.0 - momentum), op.Mul(new, momentum))


def _normalize(
    input: ir.Value,
    channels: Size,
    mean: ir.Value,
    variance: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> ir.Value:
    """``(input - mean) / sqrt(variance + eps) * weight + bias``, all but ``input`` of shape [C]; one
    kernel.
    """
    assert input.dtype is not None
    if weight is None:
        weight = op.Expand(shapes.constant(1.0, input.dtype), shapes.vector([channels]))
    if bias is None:
        bias = op.Expand(shapes.constant(0.0, input.dtype), shapes.vector([channels]))
    if input.dtype == ir.DataType.DOUBLE:  # the attribute is float32
        variance, eps = op.Add(variance, eps), 0.0
    return op.BatchNormalization(input, weight, bias, mean, variance, epsilon=eps)
