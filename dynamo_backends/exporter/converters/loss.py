"""The gradient of the negative log-likelihood loss."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter

aten = torch.ops.aten

_MEAN = 1


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
