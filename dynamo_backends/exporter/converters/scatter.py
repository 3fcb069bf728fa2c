"""Writes and sums at the positions that an index tensor gives: ``scatter``, ``scatter_add``, ``scatter_reduce``.

PyTorch reads the first elements of a source that is larger than the index; ONNX's must have the index' shape. Half
precision is added in float32, as ONNX Runtime's kernels do not support it.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter

aten = torch.ops.aten


_REDUCTIONS = {"sum": "add", "prod": "mul", "amin": "min", "amax": "max"}


@converter(aten.scatter.src)
def scatter(input: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    """``input`` with elements of ``src`` at indices of a dimension; see ``torch.Tensor.scatter``."""
    return _scattered(input, dim if shapes.rank(input) else None, index, _first(src, index), "none")


@converter(aten.scatter_add.default)
def scatter_add(input: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    """``input`` plus elements of ``src`` at indices of a dimension; see ``torch.Tensor.scatter_add``."""
    return scatter_reduce(input, dim, index, src, "sum")


@converter(aten.scatter_reduce.two)
def scatter_reduce(
    input: ir.Value, dim: int, index: ir.Value, src: ir.Value, reduce: str, include_self: bool = True
) -> ir.Value:
    """``input`` reduced with elements of ``src`` at indices of a dimension; see ``torch.Tensor.scatter_reduce``.

    Means, and extrema without ``input``, run in PyTorch, see ``exporter.upstream_faults``.
    """
    returned, dtype = input.dtype, shapes.computing_dtype(input)
    assert returned is not None
    given, source = shapes.cast(input, dtype), shapes.cast(_first(src, index), dtype)
    axis = dim if shapes.rank(input) else None
    if not include_self:
        start = op.ConstantOfShape(op.Shape(source), value=ir.tensor([int(reduce == "prod")], dtype=dtype))
        given = _scattered(given, axis, index, start, "none")
    return shapes.cast(_scattered(given, axis, index, source, _REDUCTIONS[reduce]), returned)


def _scattered(input: ir.Value, dim: int | None, index: ir.Value, source: ir.Value, reduction: str) -> ir.Value:
    """Without a dimension, ``input`` is a scalar."""
    if dim is not None:
        return op.ScatterElements(input, index, source, axis=dim, reduction=reduction)
    vectors = (op.Reshape(item, [-1]) for item in (input, index, source))
    return op.Squeeze(op.ScatterElements(*vectors, axis=0, reduction=reduction), [0])


def _first(src: ir.Value, index: ir.Value) -> ir.Value:
    """The first elements of each dimension, as many as the index has."""
    wanted = shapes.sizes(index)
    if not wanted or (src.shape is not None and index.shape is not None and list(src.shape) == list(index.shape)):
        return src
    starts, axes = (op.Constant(value_ints=list(item)) for item in ([0] * len(wanted), range(len(wanted))))
    return op.Slice(src, starts, shapes.vector(wanted), axes)
