"""Matrix products of integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import converter


@converter(torch.ops.aten._int_mm.default)
def _int_mm(self: ir.Value, mat2: ir.Value) -> ir.Value:
    """The int32 product of a matrix of int8, or of uint8, with one of int8.

    uint8 becomes int8 with the zero point -128: ONNX Runtime's product of uint8 with int8 adds pairs in 16 bits on
    processors without VNNI, and saturates there. On others, ``onnx.quantized_products`` turns it back.
    """
    if self.dtype == ir.DataType.INT8:
        return op.MatMulInteger(self, mat2)
    sign = op.Constant(value=ir.tensor(np.array(128, np.uint8)))
    signed = op.Cast(op.BitwiseXor(self, sign), to=ir.DataType.INT8)
    return op.MatMulInteger(signed, mat2, op.Constant(value=ir.tensor(np.array(-128, np.int8))))
