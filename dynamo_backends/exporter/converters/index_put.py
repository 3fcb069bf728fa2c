"""``index_put``: writes values at indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten


@converter(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    input: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool = False
) -> object:
    """``input`` with ``values`` at ``indices``; see ``torch.Tensor.index_put``.

    A vector of indices into an inner dimension, as in ``cache[:, :, positions] = keys``, becomes a ``ScatterND`` whose
    indices cover all dimensions up to that one. All other cases are left to torchlib, which transposes ``input`` twice:
    229 instead of 75 us for a cache of 8 heads and 1,024 keys of 64 numbers (AMD EPYC, one thread).
    """
    written = None if accumulate else _written_sizes(input, indices)
    if written is None:
        from onnxscript.function_libs.torch_lib.ops import core  # lazily: its import is slow

        return core.aten_index_put(input, indices, values, accumulate)
    dim = len(written) - 1
    index = indices[dim]
    assert index is not None
    target = [*written, *shapes.sizes(input)[dim + 1 :]]
    if shapes.sizes(values) != target:
        values = op.Expand(values, shapes.vector(target))
    column = op.Expand(op.Unsqueeze(shapes.cast(index, ir.DataType.INT64), [-1]), shapes.vector([*written, 1]))
    outer = np.ascontiguousarray(np.moveaxis(np.indices(written, np.int64)[:-1], 0, -1))
    return op.ScatterND(input, op.Concat(op.Constant(value=ir.tensor(outer)), column, axis=-1), values)


@converter(aten.index_add.default)
def index_add(input: ir.Value, dim: int, index: ir.Value, source: ir.Value, alpha: float = 1) -> ir.Value:
    """``input`` with slices of ``source`` added; for files only, see ``FAULTS``. Half precision is added in float32."""
    returned, dtype = input.dtype, shapes.computing_dtype(input)
    if returned is None or not shapes.rank(input):
        raise NotTranslatable("a tensor without dimensions")
    dim = dim % shapes.rank(input)
    others = [i for i in range(shapes.rank(input)) if i != dim]
    index = op.Expand(op.Unsqueeze(index, others) if others else index, shapes.vector(shapes.sizes(source)))
    input, source = shapes.cast_all(dtype, input, source)
    if alpha != 1:
        source = op.Mul(source, shapes.constant(alpha, dtype))
    return shapes.cast(op.ScatterElements(input, index, source, axis=dim, reduction="add"), returned)


def _written_sizes(input: ir.Value, indices: Sequence[ir.Value | None]) -> list[int] | None:
    """The sizes of the written part of ``input``, up to the indexed dimension.

    ``None`` unless one vector indexes an inner dimension, the sizes are static, and ``ScatterND`` needs fewer indices
    than ``input`` has elements.
    """
    dims = [i for i, index in enumerate(indices) if index is not None]
    index = indices[dims[0]] if len(dims) == 1 else None
    is_mask = index is not None and index.dtype not in (ir.DataType.INT64, ir.DataType.INT32)
    if index is None or is_mask or dims == [0] or shapes.rank(index) != 1:
        return None
    written = [*shapes.sizes(input)[: dims[0]], shapes.size(index, 0)]
    static = [size for size in written if isinstance(size, int)]
    elements = math.prod(size for size in shapes.sizes(input) if isinstance(size, int))
    return static if len(static) == len(written) and math.prod(static) * len(static) < elements else None
