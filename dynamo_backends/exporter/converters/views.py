"""Views (reshape, expand, slice) and ``copy``.

Torchlib's converters of views are correct but emit a dozen nodes each; folding these takes a third of the time of a
translation. The converters here emit one node and constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import converter
from .shapes import as_size, cast, reshape, sizes, vector

aten = torch.ops.aten


@converter(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(x: ir.Value, target: Sequence[int | ir.Value]) -> ir.Value:
    """``Reshape``; a size of -1 is inferred, as in ATen."""
    target_sizes = [as_size(item) for item in target]
    if any(isinstance(item, int) and item == -1 for item in target):
        return op.Reshape(x, vector(target_sizes))
    return reshape(x, target_sizes)


@converter(aten.expand.default)
def expand(x: ir.Value, target: Sequence[int | ir.Value], implicit: bool = False) -> ir.Value:
    """``Expand``; ATen's -1, which keeps a dimension, is 1 in ONNX."""
    return op.Expand(x, vector([1 if isinstance(item, int) and item == -1 else as_size(item) for item in target]))


@converter(aten.copy.default)
def copy(target: ir.Value, source: ir.Value, non_blocking: bool = False) -> ir.Value:
    """``source`` cast to the dtype and broadcast to the shape of ``target``; torchlib keeps the source's shape."""
    assert target.dtype is not None
    result = cast(source, target.dtype)
    return result if source.shape == target.shape else op.Expand(result, vector(sizes(target)))


@converter(aten.slice.Tensor)
def slice_(
    x: ir.Value,
    dim: int = 0,
    start: int | ir.Value | None = None,
    end: int | ir.Value | None = None,
    step: int | ir.Value = 1,
) -> ir.Value:
    """``Slice``, which handles negative and too large bounds as ATen does."""
    first = vector([as_size(0 if start is None else start)])
    last = vector([as_size(2**63 - 1 if end is None else end)])
    return op.Slice(x, first, last, vector([dim]), vector([as_size(step)]))
