"""Extrema at indices: ``index_reduce``.

``ScatterElements`` with a reduction is right at repeated indices (``ScatterND`` is not, see ``runtime/kernels.py``).
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter
from .shapes import constant

aten = torch.ops.aten

_REDUCTIONS = {"amax": "max", "amin": "min"}
_IDENTITY = {"amax": -math.inf, "amin": math.inf}


def _reduce(
    self: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduction: str, include_self: bool
) -> ir.Value:
    """``index`` has the shape of ``source``, and no rank is 0."""
    dtype = self.dtype
    if reduction not in ("amax", "amin"):
        raise NotTranslatable("eager rounds to its dtype after each element, which may be bfloat16")
    if dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise NotTranslatable("its translation is for float32 and float64")
    one, none = constant(1.0, dtype), constant(0.0, dtype)
    ones = op.Expand(one, op.Shape(source))
    zeros = op.Expand(none, op.Shape(self))
    counts = op.ScatterElements(zeros, index, ones, axis=dim, reduction="add")
    is_reached = op.Greater(counts, none)
    start = self if include_self else op.Where(is_reached, constant(_IDENTITY[reduction], dtype), self)
    result = op.ScatterElements(start, index, source, axis=dim, reduction=_REDUCTIONS[reduction])
    unordered = op.Cast(op.IsNaN(source), to=dtype)
    found = op.ScatterElements(op.Cast(op.IsNaN(start), to=dtype), index, unordered, axis=dim, reduction="add")
    return op.Where(op.Greater(found, none), constant(math.nan, dtype), result)


@converter(aten.index_reduce.default)
def index_reduce(
    self: ir.Value, dim: int, index: ir.Value, source: ir.Value, reduce: str, *, include_self: bool = True
) -> ir.Value:
    """Slices of ``source`` reduced into those of ``self`` that ``index`` names."""
    if shapes.rank(self) == 0:
        flat = op.Constant(value_ints=[-1])
        parts = (op.Reshape(self, flat), op.Reshape(index, flat), op.Reshape(source, flat))
        places = op.Cast(parts[1], to=ir.DataType.INT64)
        return op.Squeeze(_reduce(parts[0], 0, places, parts[2], reduce, include_self), op.Constant(value_ints=[0]))
    dim = dim % shapes.rank(self)
    sizes: list[shapes.Size] = [1] * shapes.rank(self)
    sizes[dim] = -1
    places = op.Reshape(op.Cast(index, to=ir.DataType.INT64), shapes.vector(sizes))
    places = op.Expand(places, shapes.vector(shapes.sizes(source)))
    return _reduce(self, dim, places, source, reduce, include_self)
