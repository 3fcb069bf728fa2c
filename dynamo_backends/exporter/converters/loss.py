"""Log-softmax, the negative log-likelihood loss, and its gradient."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from ..indices import reject_negative
from . import shapes
from .registry import converter

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


@converter(aten._log_softmax.default)
def log_softmax(self: ir.Value, dim: int, half_to_float: bool) -> ir.Value:
    """``LogSoftmax``; in float64 ``x - m - log(sum(exp(x - m)))`` with the maximum ``m``.

    In float64, ONNX Runtime's kernel (1.31) returns -infinity for the other numbers of a row with an infinity.
    """
    if shapes.rank(self) == 0:
        axis = op.Constant(value_ints=[0])
        return op.Squeeze(log_softmax(op.Unsqueeze(self, axis), 0, half_to_float), axis)
    x = shapes.cast(self, ir.DataType.FLOAT) if half_to_float else self
    if x.dtype != ir.DataType.DOUBLE:
        return op.LogSoftmax(x, axis=dim)
    axes = op.Constant(value_ints=[dim])
    shifted = op.Sub(x, op.ReduceMax(x, axes, keepdims=1))
    return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), axes, keepdims=1)))


def _targets(target: ir.Value, ignore_index: int | ir.Value) -> tuple[ir.Value, ir.Value]:
    """Whether each target is ignored, and the targets with 0 in place of the ignored ones."""
    ignored = op.Equal(target, ignore_index)
    return ignored, op.Where(ignored, shapes.constant(0, ir.DataType.INT64), target)


@converter(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    input: ir.Value, target: ir.Value, weight: ir.Value | None, reduction: int, ignore_index: int | ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The loss, ``-weight[target] * input[target]``, and the sum of the weights, which is a scalar.

    input: [N, C, ...] or [C]; target: [N, ...] or a scalar. The loss has the target's shape, or is a scalar if reduced.
    Torchlib (0.7) returns the batch size instead of the sum. The operator is not decomposed, so that PyTorch's kernel
    raises its own error for a target out of range.
    """
    dtype = input.dtype
    assert dtype is not None
    channel = 1 if shapes.rank(input) > 1 else 0
    wide = shapes.computing_dtype(input)
    ignored, classes = _targets(target, ignore_index)
    classes = reject_negative(classes)
    at_target = op.GatherElements(input, op.Unsqueeze(classes, [channel]), axis=channel)
    losses = op.Neg(shapes.cast(op.Squeeze(at_target, [channel]), wide))
    zero, one = shapes.constant(0.0, wide), shapes.constant(1.0, wide)
    if weight is None:
        weights = op.Where(ignored, zero, one)
    else:
        weights = op.Where(ignored, zero, shapes.cast(op.Gather(weight, classes), wide))
        losses = op.Mul(losses, weights)
    losses = op.Where(ignored, zero, losses)
    if reduction == _NONE and shapes.rank(input) > 1:
        return shapes.cast(losses, dtype), shapes.constant(0.0, dtype)
    total = weights
    if shapes.rank(target) > 0:
        total = op.ReduceSum(weights, keepdims=0)
        if reduction != _NONE:
            losses = op.Add(op.ReduceSum(losses, keepdims=0), zero)  # as the kernel, which turns -0.0 into 0
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
    """``-weight[target] * grad_output`` at the target, zero elsewhere; shapes as in ``nll_loss_forward``.

    The values are scattered into zeros. PyTorch's decomposition scatters ones and then multiplies all of [N, C, ...].
    """
    dtype = input.dtype
    assert dtype is not None
    channel = 1 if shapes.rank(input) > 1 else 0
    ignored, classes = _targets(target, ignore_index)
    values = op.Neg(op.Div(grad_output, total_weight) if reduction == _MEAN else grad_output)
    if weight is not None:
        values = op.Mul(values, op.Gather(weight, classes))
    values = op.Where(ignored, shapes.constant(0.0, dtype), values)
    zeros = shapes.zeros(shapes.sizes(input), dtype)
    return op.ScatterElements(zeros, op.Unsqueeze(classes, [channel]), op.Unsqueeze(values, [channel]), axis=channel)
