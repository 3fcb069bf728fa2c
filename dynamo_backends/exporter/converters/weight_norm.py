"""The gradient of weight normalization."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter


@converter(torch.ops.aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad_w: ir.Value, saved_v: ir.Value, saved_g: ir.Value, saved_norms: ir.Value, dim: int
) -> tuple[ir.Value, ir.Value]:
    """The gradients of v and g in ``w = g * v / |v|``, where the norm is over all dimensions but ``dim``.

    ``dg = sum(dw * v) / |v|`` and ``dv = g / |v| * (dw - v * sum(dw * v) / |v|^2)``, as in
    ``aten/src/ATen/native/WeightNorm.cpp``.
    """
    axes = [i for i in range(shapes.rank(saved_v)) if i != dim % shapes.rank(saved_v)]
    grad_g = op.Div(op.ReduceSum(op.Mul(grad_w, saved_v), axes, keepdims=1), saved_norms)
    across = op.Sub(grad_w, op.Mul(saved_v, op.Div(grad_g, saved_norms)))
    return op.Mul(op.Div(saved_g, saved_norms), across), grad_g
