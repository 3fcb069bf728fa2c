"""Diagonals."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .choosing import select
from .registry import converter

aten = torch.ops.aten


@converter(aten.diag_embed.default)
def diag_embed(value: ir.Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> ir.Value:
    """Matrices in ``dim1`` and ``dim2`` with the last dimension of ``value`` on a diagonal, zero elsewhere.

    PyTorch's decomposition writes into a view, which AOTAutograd does not accept.
    """
    dtype = value.dtype
    assert dtype is not None
    rank, length = shapes.rank(value) + 1, shapes.static_size(value, -1)
    # Each element and as many zeros as there are elements, in a row: a diagonal, once cut to the size of the square.
    apart = op.Pad(op.Unsqueeze(value, [-1]), [0] * (2 * rank - 1) + [length])
    leading = shapes.sizes(value)[:-1]
    row = op.Slice(shapes.reshape(apart, [*leading, length * (length + 1)]), [0], [length * length], [-1])
    square = shapes.reshape(row, [*leading, length, length])
    if offset:
        before = [0] * (rank - 2) + [max(-offset, 0), max(offset, 0)]
        after = [0] * (rank - 2) + [max(offset, 0), max(-offset, 0)]
        square = op.Pad(square, before + after)
    order = list(range(rank - 2))
    for dim, source in sorted(((dim1 % rank, rank - 2), (dim2 % rank, rank - 1))):
        order.insert(dim, source)
    return square if order == list(range(rank)) else op.Transpose(square, perm=order)


@converter(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(value: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """The diagonal of ``dim1`` and ``dim2`` as the last dimension; torchlib's multiplies the others by zero, infinities
    too."""
    rank = shapes.rank(value)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rows, columns = shapes.static_size(value, dim1), shapes.static_size(value, dim2)
    places = np.flatnonzero(np.eye(rows, columns, k=offset, dtype=bool))
    others = [dim for dim in range(rank) if dim not in (dim1, dim2)]
    moved = op.Transpose(value, perm=[*others, dim1, dim2])
    sizes = shapes.sizes(value)
    flat = shapes.reshape(moved, [*(sizes[dim] for dim in others), rows * columns])
    return op.Gather(flat, op.Constant(value=ir.tensor(places.astype(np.int64))), axis=-1)


@converter(aten.diagonal_scatter.default)
def diagonal_scatter(value: ir.Value, source: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """``value`` with ``source`` on the diagonal of its dimensions ``dim1`` and ``dim2``.

    PyTorch's decomposition writes into a view, which AOTAutograd does not accept.
    """
    rank = shapes.rank(value)
    dim1, dim2 = dim1 % rank, dim2 % rank
    rows, columns = shapes.static_size(value, dim1), shapes.static_size(value, dim2)
    length = shapes.static_size(source, -1)
    if length == 0:
        return op.Identity(value)
    places = np.arange(rows) if offset >= 0 else np.arange(columns)
    along = op.Constant(value=ir.tensor(np.minimum(places, length - 1)))
    spread = op.Unsqueeze(op.Gather(source, along, axis=-1), [-1 if offset >= 0 else -2])
    on_diagonal = op.Constant(value=ir.tensor(np.eye(rows, columns, k=offset, dtype=bool)))
    order = [dim for dim in range(rank) if dim not in (dim1, dim2)] + [dim1, dim2]
    moved = select(on_diagonal, spread, op.Transpose(value, perm=order))
    return op.Transpose(moved, perm=[order.index(dim) for dim in range(rank)])
