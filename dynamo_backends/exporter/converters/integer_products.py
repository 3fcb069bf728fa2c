"""Matrix products of integers."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter


@converter(torch.ops.aten._int_mm.default)
def _int_mm(self: ir.Value, mat2: ir.Value) -> ir.Value:
    """The int32 product of int8 matrices.

    ONNX Runtime's product of uint8 with int8 adds pairs in 16 bits on processors without VNNI, and saturates there.
    """
    if {self.dtype, mat2.dtype} != {ir.DataType.INT8}:
        raise NotTranslatable("only the product of int8 with int8 is exact on all processors")
    return op.MatMulInteger(self, mat2)
