"""Writes into a part of a tensor: ``index_put``, ``slice_scatter``, ``select_scatter``, ``index_copy``, ``index_add``.

A write at positions of one dimension becomes one ``ScatterND`` or ``ScatterElements`` on the tensor itself, so that a
session can do it in the tensor's memory (``pipeline.emission``). Torchlib's converters transpose the tensor
twice, and copy it: 229 instead of 75 us for a cache of 8 heads and 1,024 keys of 64 numbers (AMD EPYC, one thread).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter
from .shapes import Size

aten = torch.ops.aten


@converter(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    input: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool = False
) -> object:
    """``input`` with ``values`` at ``indices``; see ``torch.Tensor.index_put``.

    One vector of indices into an inner dimension, as in ``cache[:, :, positions] = keys``, is a write at positions.
    Indices of the first dimensions are those of a ``ScatterND``. All other cases are left to torchlib.
    """
    known = {i: index for i, index in enumerate(indices) if index is not None}
    are_numbers = all(index.dtype in (ir.DataType.INT64, ir.DataType.INT32) for index in known.values())
    if are_numbers and not accumulate and known:
        last = max(known)
        sizes = [shapes.sizes(index) for index in known.values()]
        given = [shapes.cast(index, ir.DataType.INT64) for index in known.values()]
        if last and len(given) == 1 and len(sizes[0]) == 1:
            target = [*shapes.sizes(input)[:last], *sizes[0], *shapes.sizes(input)[last + 1 :]]
            return _written(input, last, given[0], _expanded(values, target), target)
        if last == len(given) - 1:
            written = _broadcast(sizes)
            columns = [op.Expand(op.Unsqueeze(index, [-1]), shapes.vector([*written, 1])) for index in given]
            values = _expanded(values, [*written, *shapes.sizes(input)[last + 1 :]])
            return op.ScatterND(input, op.Concat(*columns, axis=-1) if last else columns[0], values)
    from onnxscript.function_libs.torch_lib.ops import core  # lazily: its import is slow

    return core.aten_index_put(input, indices, values, accumulate)


def _broadcast(shapes_of: Sequence[Sequence[Size]]) -> list[Size]:
    """The sizes to which tensors that can be broadcast together are broadcast."""
    rank = max(map(len, shapes_of))
    padded = [[*[1] * (rank - len(item)), *item] for item in shapes_of]
    return [
        next((size for size in sizes if not isinstance(size, int) or size != 1), 1)
        for sizes in zip(*padded, strict=True)
    ]


def _expanded(values: ir.Value, target: Sequence[Size]) -> ir.Value:
    if values.shape is not None and list(values.shape) == list(target):
        return values
    return op.Expand(values, shapes.vector(target))


@converter(aten.index_copy.default)
def index_copy(input: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    """``input`` with ``source`` at indices of a dimension, which are not negative, see ``exporter.indices``."""
    sizes, number = shapes.sizes(input), shapes.sizes(index) or [1]
    if not sizes:
        memory = op.Unsqueeze(input, [0])
        return op.Squeeze(_written(memory, 0, op.Reshape(index, [-1]), op.Reshape(source, [-1]), number), [0])
    dim = dim % len(sizes)
    target = [*sizes[:dim], *number, *sizes[dim + 1 :]]
    return _written(input, dim, op.Reshape(index, [-1]), _expanded(source, target), target)


@converter(aten.slice_scatter.default)
def slice_scatter(
    input: ir.Value,
    src: ir.Value,
    dim: int = 0,
    start: int | ir.Value | None = None,
    end: int | ir.Value | None = None,
    step: int | ir.Value = 1,
) -> ir.Value:
    """``input`` with ``src`` in ``input[start:end:step]`` of a dimension; ``src`` has the size that ``end`` implies."""
    dim = dim % shapes.rank(input)
    size, written = shapes.size(input, dim), shapes.size(src, dim)
    first = shapes.as_size(0 if start is None else start)
    if isinstance(first, int) and isinstance(size, int):
        first = slice(first, None).indices(size)[0]
    elif not isinstance(first, int) or first < 0:
        from_end = op.Add(_as_vector(first), _as_vector(size))
        first = op.Where(op.Less(_as_vector(first), [0]), from_end, _as_vector(first))
        first = op.Max(op.Min(first, _as_vector(size)), [0])
    if isinstance(first, int) and isinstance(written, int) and isinstance(step, int):
        positions = shapes.vector(list(range(first, first + written * step, step)))
    else:
        numbers = op.Range(0, op.Squeeze(_as_vector(written)), 1)
        positions = op.Add(op.Mul(numbers, _as_vector(shapes.as_size(step))), _as_vector(first))
    return _written(input, dim, positions, src, shapes.sizes(src))


@converter(aten.select_scatter.default)
def select_scatter(input: ir.Value, src: ir.Value, dim: int, index: int | ir.Value) -> ir.Value:
    """``input`` with ``src`` at an index of a dimension, which ``src`` lacks."""
    dim = dim % shapes.rank(input)
    values = op.Unsqueeze(src, [dim])
    target = shapes.sizes(src)
    target.insert(dim, 1)
    return _written(input, dim, _as_vector(shapes.as_size(index)), values, target)


def _as_vector(size: Size) -> ir.Value:
    return shapes.vector([size])


def _written(input: ir.Value, dim: int, positions: ir.Value, values: ir.Value, target: Sequence[Size]) -> ir.Value:
    """``input`` with ``values`` at positions of a dimension.

    ``ScatterND`` takes ``dim + 1`` indices for each block of the inner dimensions, ``ScatterElements`` one for each
    number; the one with fewer indices is used.

    Args:
        input: the tensor.
        dim: the dimension.
        positions: int64, of shape [n]; negative ones count from the end.
        values: what is written.
        target: the sizes of ``values``: those of ``input``, with n for ``dim``.
    """
    inner = math.prod(item for item in target[dim + 1 :] if isinstance(item, int))
    if inner <= dim + 1:
        others = [i for i in range(len(target)) if i != dim]
        index = op.Unsqueeze(positions, others) if others else positions
        return op.ScatterElements(input, op.Expand(index, shapes.vector(target)), values, axis=dim)
    written = list(target[: dim + 1])
    columns = [op.Unsqueeze(item, [-1]) for item in [*map(_numbers, written[:-1]), positions]]
    for i, column in enumerate(columns):  # index i varies along dimension i
        after, before = len(written) - 1 - i, i
        axes = [*range(before), *range(before + 1, before + 1 + after)]
        columns[i] = op.Expand(op.Unsqueeze(column, axes) if axes else column, shapes.vector([*written, 1]))
    return op.ScatterND(input, op.Concat(*columns, axis=-1) if dim else columns[0], values)


def _numbers(size: Size) -> ir.Value:
    """The numbers from 0 to a size, which is excluded."""
    if isinstance(size, int):
        return shapes.vector(list(range(size)))
    return op.Range(0, op.Squeeze(size), 1)


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
