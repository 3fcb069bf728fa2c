"""Matrix times vector."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from .registry import converter


@converter(torch.ops.aten.mv.default)
def mv(matrix: ir.Value, vector: ir.Value) -> object:
    """The vector goes in as a matrix of one column.

    ONNX Runtime (1.31) merges a Transpose into the MatMul after it also when the other factor has one dimension, and
    then multiplies by the matrix that was not transposed.
    """
    column = op.Unsqueeze(vector, op.Constant(value_ints=[1]))
    return op.Squeeze(op.MatMul(matrix, column), op.Constant(value_ints=[1]))
