"""Helpers of the converters: sizes, reshapes, constants and casts.

A size is a Python integer if it is static. A symbolic size is an ONNX value of shape [1] and dtype int64, which is
computed at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable

Size: TypeAlias = "int | ir.Value"

HALF_PRECISION = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _shape(value: ir.Value) -> ir.Shape:
    if value.shape is None:
        raise NotTranslatable("the shape of an argument is not known")
    return value.shape


def rank(value: ir.Value) -> int:
    """The number of dimensions."""
    return len(_shape(value))


def size(value: ir.Value, dim: int) -> Size:
    """The size of a dimension; a negative ``dim`` counts from the end."""
    dim = dim % rank(value)
    static = _shape(value)[dim]
    return static if isinstance(static, int) else op.Shape(value, start=dim, end=dim + 1)


def sizes(value: ir.Value) -> list[Size]:
    """The sizes of all dimensions."""
    return [size(value, dim) for dim in range(rank(value))]


def as_size(number: int | ir.Value) -> Size:
    """The size that an operator's argument gives; a symbolic one is a scalar value."""
    return number if isinstance(number, int) else op.Reshape(number, [1])


def static_size(value: ir.Value, dim: int) -> int:
    """The size of a dimension; raises ``NotTranslatable`` if it is symbolic."""
    static = size(value, dim)
    if not isinstance(static, int):
        raise NotTranslatable(f"its translation needs the size of dimension {dim}, which is symbolic")
    return static


def vector(items: Sequence[Size]) -> ir.Value:
    """The sizes as an int64 tensor of shape [len(items)]; a constant if all are static."""
    if all(isinstance(item, int) for item in items):
        return op.Constant(value=ir.Tensor(np.array(items, dtype=np.int64)))
    parts = [op.Constant(value_ints=[item]) if isinstance(item, int) else item for item in items]
    return op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]


def reshape(value: ir.Value, target: Sequence[Size]) -> ir.Value:
    """``value`` with the sizes ``target``; if only one is symbolic, ``Reshape`` infers it."""
    static = [item for item in target if isinstance(item, int)]
    if 0 in static:
        return op.Reshape(value, vector(target), allowzero=1)
    if len(static) == len(target) - 1:
        target = [item if isinstance(item, int) else -1 for item in target]
    return op.Reshape(value, vector(target))


def product(items: Sequence[Size]) -> Size:
    """The product of the sizes."""
    result: Size = 1
    for item in items:
        if isinstance(result, int) and isinstance(item, int):
            result = result * item
        elif isinstance(result, int) and result == 1:
            result = item
        elif not (isinstance(item, int) and item == 1):
            result = op.Mul(result, item)
    return result


def affine(item: Size, factor: int, offset: int) -> Size:
    """``item * factor + offset``."""
    if isinstance(item, int):
        return item * factor + offset
    scaled = item if factor == 1 else op.Mul(item, [factor])
    return scaled if offset == 0 else op.Add(scaled, [offset])


def for_each(values: Sequence[int], dims: int) -> list[int]:
    """One value for each of ``dims`` dimensions; in ATen a single value is for all."""
    return list(values) if len(values) == dims else list(values) * dims


def zeros(target: Sequence[Size], dtype: ir.DataType) -> ir.Value:
    """Zeros of a shape and dtype."""
    return op.ConstantOfShape(vector(target), value=ir.tensor(np.zeros(1, dtype=dtype.numpy())))


def constant(number: float, dtype: ir.DataType) -> ir.Value:
    """A scalar of a dtype."""
    return op.Constant(value=ir.tensor(number, dtype=dtype))


def computing_dtype(value: ir.Value) -> ir.DataType:
    """The dtype in which eager's kernels accumulate: float32 for half precision, else the value's dtype."""
    assert value.dtype is not None
    return ir.DataType.FLOAT if value.dtype in HALF_PRECISION else value.dtype


def cast(value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """``value`` cast to a dtype; unchanged if it has that dtype."""
    return value if value.dtype == dtype else op.Cast(value, to=dtype)


def cast_all(dtype: ir.DataType, *values: Any) -> tuple[Any, ...]:
    """Each value cast to a dtype; ``None`` stays ``None``."""
    return tuple(None if value is None else cast(value, dtype) for value in values)
