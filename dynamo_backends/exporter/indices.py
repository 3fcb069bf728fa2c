"""Rejects negative indices where eager does: embedding, index_select, index_copy, gather and scatter.

ONNX counts a negative index from the end. So it is replaced by an index out of range, for which ONNX Runtime fails.
PyTorch then runs the region and raises its own error.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

aten = torch.ops.aten

INDEX_ARGUMENT: dict[object, int] = {
    aten.embedding.default: 1,
    aten.index_select.default: 2,
    aten.index_add.default: 2,
    aten.index_copy.default: 2,
    aten.gather.default: 2,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
    aten.scatter.reduce: 2,
    aten.scatter.value_reduce: 2,
    aten.scatter_add.default: 2,
    aten.scatter_reduce.two: 2,
}
"""By operator, the position of the index among its arguments."""


def reject_negative(index: ir.Value) -> ir.Value:
    """``index`` with each negative element replaced by a number larger than the size of any tensor."""
    checked = op.Where(op.Less(index, 0), 2**31 - 1 if index.dtype == ir.DataType.INT32 else 2**62, index)
    checked.shape = index.shape  # torchlib's converters of gather and scatter need the rank
    return checked
