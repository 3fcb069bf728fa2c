"""Sorting. ONNX Runtime's ``TopK`` leaves equal values in their order, as a stable sort does."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import converter
from .shapes import constant, rank, size, vector

aten = torch.ops.aten


@converter(aten.sort.default)
def sort(x: ir.Value, dim: int = -1, descending: bool = False) -> tuple[ir.Value, ir.Value]:
    """The values in order, NaN as the largest, and their indices."""
    if rank(x) == 0:
        return op.Identity(x), constant(0, ir.DataType.INT64)
    values, indices = op.TopK(x, vector([size(x, dim)]), axis=dim, largest=int(descending), sorted=1)
    return values, indices


@converter(aten.sort.stable)
def stable_sort(
    x: ir.Value, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[ir.Value, ir.Value]:
    """The same for any ``stable``."""
    return sort(x, dim, descending)
