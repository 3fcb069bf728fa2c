"""Logarithms of softmax, the negative log-likelihood loss, and its gradient."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from ..indices import refuse_negative
from . import shapes
from .registry import converter

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


@converter(aten._log_softmax.default)
def log_softmax(self: ir.Value, dim: int, half_to_float: bool) -> ir.Value:
    """``LogSoftmax``; in float64, where ONNX Runtime's (1.31) makes -infinity of what stands beside an infinity,
    ``x - m - log(sum(exp(x - m)))`` with the largest number ``m``."""
    if shapes.rank(self) == 0:
        axis = op.Constant(value_ints=[0])
        return op.Squeeze(log_softmax(op.Unsqueeze(self, axis), 0, half_to_float), axis)
    x = shapes.cast(self, ir.DataType.FLOAT) if half_to_float else self
    if x.dtype != ir.DataType.DOUBLE:
        return op.LogSoftmax(x, axis=dim)
    axes = op.Constant(value_ints=[dim])
    shifted = op.Sub(x, op.ReduceMax(x, axes, keepdims=1))
    return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), axes, keepdims=1)))


@converter(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    input: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: int | ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Minus the number at the target's place times its class weight, and the sum of the weights.

    input: [N, C, ...] or [C]; target: [N, ...] or a scalar; the result is like the target, or a scalar. Torchlib (0.7)
    returns the batch size as the second. Whole, so that PyTorch's own kernel names a target that is out of range.
    """
    dtype = input.dtype
    assert dtype is not None
    channel = 1 if shapes.rank(input) > 1 else 0
    wide = shapes.computing_dtype(input)
    ignored = op.Equal(target, ignore_index)
    safe_target = refuse_negative(op.Where(ignored, shapes.constant(0, ir.DataType.INT64), target))
    at_target = op.GatherElements(input, op.Unsqueeze(safe_target, [channel]), axis=channel)
    losses = op.Neg(shapes.cast(op.Squeeze(at_target, [channel]), wide))
    zero, one = shapes.constant(0.0, wide), shapes.constant(1.0, wide)
    if weight is None:
        weights = op.Where(ignored, zero, one)
    else:
        weights = op.Where(ignored, zero, shapes.cast(op.Gather(weight, safe_target), wide))
        losses = op.Mul(losses, weights)
    losses = op.Where(ignored, zero, losses)
    if reduction == _NONE and shapes.rank(input) > 1:
        return shapes.cast(losses, dtype), shapes.constant(0.0, dtype)
    total = weights
    if shapes.rank(target) > 0:
        total = op.ReduceSum(weights, keepdims=0)
        if reduction != _NONE:
            losses = op.Add(op.ReduceSum(losses, keepdims=0), zero)  # the kernel adds to 0, which makes 0 of -0.0
    if reduction == _MEAN:
        losses = op.Div(losses, total)
    return shapes.cast(losses, dtype), shapes.cast(total, dtype)


@converter(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: ir.Value,
    input: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: int | ir.Value,
    total_weight: ir.Value,
) -> ir.Value:
    """Minus the gradient of each loss times its class weight at the target's place, zero elsewhere.

    input: [N, C, ...] or [C]; target: [N, ...] or a scalar. The numbers are scattered once, into zeros;
    PyTorch's decomposition (``_nll_loss_backward``) scatters ones and then multiplies all of [N, C, ...].
    """
    dtype = input.dtype
    assert dtype is not None
    channel = 1 if shapes.rank(input) > 1 else 0
    ignored = op.Equal(target, ignore_index)
    safe_target = op.Where(ignored, shapes.constant(0, ir.DataType.INT64), target)
    if reduction == _MEAN:
        grad_output = op.Div(grad_output, total_weight)
    numbers = op.Neg(grad_output)
    if weight is not None:
        numbers = op.Mul(numbers, op.Gather(weight, safe_target))
    numbers = op.Where(ignored, shapes.constant(0.0, dtype), numbers)
    return op.ScatterElements(
        shapes.zeros(shapes.sizes(input), dtype),
        op.Unsqueeze(safe_target, [channel]),
        op.Unsqueeze(numbers, [channel]),
        axis=channel,
    )
