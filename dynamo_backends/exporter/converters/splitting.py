"""``split`` and ``split_with_sizes``, whose results are parts of a tensor along one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten


@converter(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(value: ir.Value, split_size: int | ir.Value, dim: int = 0) -> list[ir.Value]:
    """Parts of size ``split_size`` along ``dim``; the last may be smaller. Torchlib returns an ONNX sequence."""
    total = shapes.static_size(value, dim)
    if not isinstance(split_size, int):
        raise NotTranslatable("the number of parts depends on a symbolic size")
    if split_size == 0:
        return [op.Identity(value)]
    lengths = [min(split_size, total - start) for start in range(0, total, split_size)] or [0]
    return split_with_sizes(value, lengths, dim)


@converter(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(value: ir.Value, split_sizes: Sequence[int | ir.Value], dim: int = 0) -> list[ir.Value]:
    """One part for each of ``split_sizes`` along ``dim``."""
    dim = dim % shapes.rank(value)
    lengths = [shapes.as_size(item) for item in split_sizes]
    if len(lengths) == 1:
        return [op.Identity(value)]
    if all(isinstance(length, int) and length == lengths[0] for length in lengths):
        return list(op.Split(value, num_outputs=len(lengths), axis=dim))
    parts, start = [], shapes.vector([0])
    for length in lengths:
        end = op.Add(start, shapes.vector([length]))
        parts.append(op.Slice(value, start, end, [dim]))
        start = end
    return parts
