"""Views: reshaping, expanding, slicing; and copying into a tensor.

Torchlib's views are right, and make a dozen nodes of each, to be folded again: a third of the time a translation takes.
These make one node and constants. Torchlib's copy has the shape of what is copied, not of what it is copied into.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import converter
from .shapes import as_size, cast, reshape, sizes, vector

aten = torch.ops.aten

_END = 2**63 - 1


@converter(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(x: ir.Value, target: Sequence[int | ir.Value]) -> ir.Value:
    """``Reshape``; a -1 means the same there as in ATen."""
    sizes = [as_size(item) for item in target]
    if any(item == -1 for item in target if isinstance(item, int)):
        return op.Reshape(x, vector(sizes))
    return reshape(x, sizes)


@converter(aten.expand.default)
def expand(x: ir.Value, target: Sequence[int | ir.Value], implicit: bool = False) -> ir.Value:
    """``Expand``, in which a 1 keeps a dimension as it is, as a -1 does in ATen."""
    return op.Expand(x, vector([1 if isinstance(item, int) and item == -1 else as_size(item) for item in target]))


@converter(aten.copy.default)
def copy(target: ir.Value, source: ir.Value, non_blocking: bool = False) -> ir.Value:
    """``source`` with the dtype and shape of ``target``, to which it may have to be broadcast."""
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
    """``Slice``; it counts negative bounds from the end and clamps bounds beyond it, as ATen does."""
    first = vector([as_size(0 if start is None else start)])
    last = vector([as_size(_END if end is None else end)])
    return op.Slice(x, first, last, vector([dim]), vector([as_size(step)]))
