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
from .shapes import affine, as_size, cast, product, rank, reshape, size, sizes, vector

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


@converter(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """The elements at their positions in the flat matrix; torchlib multiplies the others by 0: NaN for infinity."""
    dim1, dim2 = dim1 % rank(x), dim2 % rank(x)
    rows, columns = size(x, dim1), size(x, dim2)
    others = [dim for dim in range(rank(x)) if dim not in (dim1, dim2)]
    order = [*others, dim1, dim2]
    matrix = x if order == sorted(order) else op.Transpose(x, perm=order)
    flat = op.Reshape(matrix, vector([*(size(x, dim) for dim in others), product([rows, columns])]), allowzero=1)
    below, right = max(-offset, 0), max(offset, 0)
    count = op.Min(vector([affine(rows, 1, -below)]), vector([affine(columns, 1, -right)]))
    numbers = op.Range(0, op.Squeeze(op.Max(count, [0])), 1)
    step, first = vector([affine(columns, 1, 1)]), vector([affine(columns, below, right)])
    return op.Gather(flat, op.Add(op.Mul(numbers, step), first), axis=-1)


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
