"""The logarithm of a sum of exponentials."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter


@converter(torch.ops.aten.logsumexp.default)
def logsumexp(self: ir.Value, dim: Sequence[int], keepdim: bool = False) -> ir.Value:
    """``log(sum(exp(x - m))) + m`` with the largest number ``m``, 0 where that is infinite, as ``logsumexp`` in
    ``aten/src/ATen/native/ReduceOps.cpp``.

    ONNX Runtime's ``ReduceLogSumExp`` takes 0 for the largest number where -inf comes first (1.31).
    """
    dtype = self.dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("logsumexp of integers")
    if shapes.rank(self) == 0:
        return op.Identity(self)
    wide = shapes.cast(self, shapes.computing_dtype(self))
    axes = op.Constant(value_ints=list(dim) or list(range(shapes.rank(self))))
    largest = op.ReduceMax(wide, axes, keepdims=1)
    largest = op.Where(op.IsInf(shapes.cast(largest, ir.DataType.FLOAT)), shapes.constant(0.0, wide.dtype), largest)
    total = op.Log(op.ReduceSum(op.Exp(op.Sub(wide, largest)), axes, keepdims=1))
    result = op.Add(total, largest)
    return shapes.cast(result if keepdim else op.Squeeze(result, axes), dtype)


@converter(torch.ops.aten._log_softmax.default)
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
