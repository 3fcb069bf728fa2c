"""What a mixture of experts consists of: a histogram of tokens, and a product of each expert's rows with its weight."""

from __future__ import annotations

import itertools

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import as_size, cast, size, static_size, vector, zeros

aten = torch.ops.aten


@converter("transformers::grouped_mm_fallback")
def grouped_mm(x: ir.Value, weight: ir.Value, offsets: ir.Value) -> ir.Value:
    """``x[offsets[i - 1]:offsets[i]] @ weight[i]`` for each expert; zeros for the rows after the last offset.

    Args:
        x: [rows, inner], sorted by expert.
        weight: [experts, inner, columns].
        offsets: int32 or int64 of shape [experts], the end of each expert's rows.
    """
    experts, columns = static_size(weight, 0), as_size(static_size(weight, 2))
    limits = op.Concat([0], cast(offsets, ir.DataType.INT64), axis=0)
    bounds = [op.Gather(limits, [i], axis=0) for i in range(experts + 1)]
    parts = [op.Slice(x, start, end, [0]) for start, end in itertools.pairwise(bounds)]
    weights = op.Split(weight, axis=0, num_outputs=experts) if experts > 1 else [weight]
    products = [op.MatMul(part, op.Squeeze(item, [0])) for part, item in zip(parts, weights, strict=True)]
    rest = op.Sub(vector([size(x, 0)]), bounds[-1])
    assert x.dtype is not None
    return op.Concat(*products, zeros([rest, columns], x.dtype), axis=0)


@converter(aten.histc.default)
def histc(x: ir.Value, bins: int = 100, min: float = 0, max: float = 0) -> ir.Value:
    """How many elements are in each of ``bins`` bins from ``min`` to ``max``, which are in the last; as ``x.dtype``.

    As the kernel of ``aten/src/ATen/native/cpu/HistogramKernel.cpp`` computes bins.
    """
    if min >= max:
        raise NotTranslatable("the limits of the histogram are those of the values")
    dtype = x.dtype
    assert dtype is not None
    if dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise NotTranslatable(f"a histogram of {dtype}")
    flat = op.Reshape(x, [-1])
    first, last, number = (op.Constant(value=ir.tensor(item, dtype=dtype)) for item in (min, max, float(bins)))
    position = op.Div(op.Mul(op.Sub(flat, first), number), op.Sub(last, first))
    bin_of = op.Min(op.Cast(position, to=ir.DataType.INT64), vector([bins - 1]))
    inside = op.And(op.GreaterOrEqual(flat, first), op.LessOrEqual(flat, last))
    is_in = op.And(op.Equal(op.Unsqueeze(bin_of, [0]), op.Unsqueeze(vector(list(range(bins))), [1])), inside)
    return op.ReduceSum(op.Cast(is_in, to=dtype), [1], keepdims=0)
