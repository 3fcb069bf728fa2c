"""Matrix times vector, vector times vector."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter


@converter(torch.ops.aten.mv.default)
def mv(matrix: ir.Value, vector: ir.Value) -> object:
    """The vector goes in as a matrix of one column.

    ONNX Runtime (1.31) merges a Transpose into the MatMul after it also when the other factor has one dimension, and
    then multiplies by the matrix that was not transposed.
    """
    column = op.Unsqueeze(vector, op.Constant(value_ints=[1]))
    return op.Squeeze(op.MatMul(matrix, column), op.Constant(value_ints=[1]))


@converter(torch.ops.aten.addmv.default)
def addmv(self: ir.Value, matrix: ir.Value, vector: ir.Value, *, beta: float = 1, alpha: float = 1) -> object:
    """``beta * self + alpha * mv(matrix, vector)``, without ``self`` where ``beta`` is 0, though it were NaN."""
    if self.dtype is None or not self.dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    product = mv(matrix, vector)
    if alpha != 1:
        product = op.Mul(product, shapes.constant(alpha, self.dtype))
    if beta == 0:
        return product
    return op.Add(self if beta == 1 else op.Mul(self, shapes.constant(beta, self.dtype)), product)


@converter(torch.ops.aten.dot.default, torch.ops.aten.vdot.default)
def dot(self: ir.Value, other: ir.Value) -> object:
    """Products and their sum: ``MatMul`` of two vectors adds one product after the other (ONNX Runtime 1.31), so that a
    million of them are off by 2e-3; a sum is taken in parts. Integers are exact either way."""
    if self.dtype is None or not self.dtype.is_floating_point():
        return op.MatMul(self, other)
    dtype = shapes.computing_dtype(self)
    products = op.Mul(shapes.cast(self, dtype), shapes.cast(other, dtype))
    return shapes.cast(op.ReduceSum(products, keepdims=0), self.dtype)
