"""What a mixture of experts consists of: a histogram of tokens, and a product of each expert's rows with its weight."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from ..torch_internals import OperatorSet
from .registry import NotTranslatable, converter
from .shapes import as_size, cast, constant, size, static_size, vector, zeros

aten = torch.ops.aten

GROUPED_PRODUCT = "transformers::grouped_mm_fallback"


@converter(GROUPED_PRODUCT)
def grouped_mm(x: ir.Value, weight: ir.Value, offsets: ir.Value) -> ir.Value:
    """``x[offsets[i - 1]:offsets[i]] @ weight[i]`` for each expert; zeros for the rows after the last offset.

    Args:
        x: [rows, inner], sorted by expert.
        weight: [experts, inner, columns].
        offsets: int32 or int64 of shape [experts], the end of each expert's rows.
    """
    experts, columns = static_size(weight, 0), as_size(static_size(weight, 2))
    ends = cast(offsets, ir.DataType.INT64)
    counts = op.Sub(op.Concat(ends, vector([size(x, 0)]), axis=0), op.Concat([0], ends, axis=0))
    *parts, rest = OperatorSet("", 18).Split(x, counts, axis=0, _outputs=experts + 1)
    weights = op.Split(weight, axis=0, num_outputs=experts) if experts > 1 else [weight]
    products = [op.MatMul(part, op.Squeeze(item, [0])) for part, item in zip(parts, weights, strict=True)]
    assert x.dtype is not None
    return op.Concat(*products, zeros([op.Shape(rest, start=0, end=1), columns], x.dtype), axis=0)


@converter(aten.histc.default)
def histc(x: ir.Value, bins: int = 100, min: float = 0, max: float = 0) -> ir.Value:
    """How many elements are in each of ``bins`` bins from ``min`` to ``max``, which are in the last; as ``x.dtype``.

    As the kernel of ``aten/src/ATen/native/cpu/HistogramKernel.cpp`` computes bins.
    """
    dtype = x.dtype
    assert dtype is not None
    if dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise NotTranslatable(f"a histogram of {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        first, last = np.array([min, max]).astype(dtype.numpy())
        is_finite = np.isfinite((last - first) * bins) and np.isfinite(first) and np.isfinite(last)
    if not is_finite or first >= last:
        raise NotTranslatable("the limits of the histogram are those of the values, or too large")
    flat = op.Reshape(x, [-1])
    scaled = op.Mul(op.Sub(flat, constant(first, dtype)), constant(bins, dtype))
    position = op.Cast(op.Div(scaled, constant(last - first, dtype)), to=ir.DataType.INT64)
    inside = op.And(op.GreaterOrEqual(flat, constant(first, dtype)), op.LessOrEqual(flat, constant(last, dtype)))
    bin_of = op.Where(inside, op.Min(position, vector([bins - 1])), vector([0]))
    return op.ScatterElements(zeros([bins], dtype), bin_of, op.Cast(inside, to=dtype), reduction="add")
