"""Operators whose index must not be negative.

Of a negative index eager raises, and ONNX counts from the end: it is made one that is out of range before the
translation, so that the runtime fails as it does for one that is too large; PyTorch then runs the region and raises
its own error.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

aten = torch.ops.aten

INDEX_ARGUMENT: dict[object, int] = {
    aten.embedding.default: 1,
    aten.index_select.default: 2,
    aten.gather.default: 2,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
    aten.scatter.reduce: 2,
    aten.scatter.value_reduce: 2,
    aten.scatter_add.default: 2,
    aten.scatter_reduce.two: 2,
}
"""From an operator to the position of the index among its arguments."""


def refuse_negative(index: ir.Value) -> ir.Value:
    """``index``, with an index beyond any tensor's size in place of each negative one."""
    refused = op.Where(op.Less(index, 0), 2**31 - 1 if index.dtype == ir.DataType.INT32 else 2**62, index)
    refused.shape = index.shape  # torchlib's gather and scatter ask for the rank
    return refused
