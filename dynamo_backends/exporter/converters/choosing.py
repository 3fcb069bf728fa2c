"""Choosing between two tensors by a condition.

ONNX Runtime's ``Where`` (1.31) makes 0.0 of a -0.0 that it takes where the condition is true; where it is false the
sign stays. So the tensor that may hold -0.0 stands on that side. Where both may, each is chosen beside a factor of 1,
and they are multiplied: a number times 1 is the number, with its sign. That takes 1.9 times as long as one ``Where`` (a
million numbers, EPYC, one thread).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant

aten = torch.ops.aten

_KEEP_ELEMENTS = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators whose results are elements of their first argument."""

_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_EXACT_IN = {ir.DataType.FLOAT: _HALVES, ir.DataType.DOUBLE: _HALVES | {ir.DataType.FLOAT}}
"""Of a dtype, those all of whose numbers it holds."""

_NEVER_MINUS_ZERO = frozenset({"Abs", "Exp", "Not", "Sigmoid", "Softmax"})


def select(condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """``x`` where the condition is true, else ``y``, with the sign of each zero.

    Args:
        condition: bool; the three shapes are broadcast.
        x: of the dtype of ``y``.
    """
    assert y.dtype is not None
    if not may_be_minus_zero(x):
        return op.Where(condition, x, y)
    if not may_be_minus_zero(y):
        return op.Where(_negated(condition), y, x)
    one = constant(1.0, y.dtype)
    return op.Mul(op.Where(_negated(condition), one, x), op.Where(condition, one, y))


def may_be_minus_zero(value: ir.Value) -> bool:
    """Whether an element may be -0.0: not of integers, nor of constants that have none."""
    if value.dtype is not None and not value.dtype.is_floating_point():
        return False
    node = value.producer()
    if node is None:
        return value.const_value is None or _has_minus_zero(value.const_value.numpy())
    if node.op_type == "Constant":
        tensor = value.const_value if value.const_value is not None else ir.convenience.get_const_tensor(value)
        return tensor is None or _has_minus_zero(tensor.numpy())
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is not None and _has_minus_zero(filled.as_tensor().numpy())
    if node.op_type in _KEEP_ELEMENTS | {"Cast"}:
        source = node.inputs[0]
        return source is None or may_be_minus_zero(source) or _rounds(source.dtype, value.dtype)
    return node.op_type not in _NEVER_MINUS_ZERO


def _rounds(source: ir.DataType | None, target: ir.DataType | None) -> bool:
    """Whether a cast may make zero of a small number."""
    return (
        source != target
        and source is not None
        and source.is_floating_point()
        and source not in _EXACT_IN.get(target, ())
    )


def _always_fits(source: ir.DataType | None, target: ir.DataType) -> bool:
    """Whether no number of a dtype is too large for another."""
    if source is None or source.is_floating_point():
        return source == target or source in _EXACT_IN.get(target, ())
    return source in (target, ir.DataType.BOOL) or target in _EXACT_IN


def _has_minus_zero(array: np.ndarray) -> bool:
    if array.dtype.kind not in "fV":  # the V are dtypes of ml_dtypes, as bfloat16
        return False
    return bool((np.signbit(array) & (array == 0)).any())


def _negated(condition: ir.Value) -> ir.Value:
    node = condition.producer()
    if node is not None and node.op_type == "Not" and node.inputs[0] is not None:
        return node.inputs[0]
    return op.Not(condition)


@converter(aten.where.self)
def where(condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """``x`` or ``y``, with the sign of zeros, which torchlib's loses."""
    return select(condition, x, y)


@converter(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: ir.Value, mask: ir.Value, value: float | ir.Value) -> ir.Value:
    """``value`` where the mask is true, else ``x``.

    A tensor of another dtype may hold a number that eager refuses to write, which is known at the call only.
    """
    assert x.dtype is not None
    if isinstance(value, ir.Value) and not _always_fits(value.dtype, x.dtype):
        raise NotTranslatable(f"a value of {value.dtype} may not fit into {x.dtype}, of which eager raises an error")
    filled = cast(value, x.dtype) if isinstance(value, ir.Value) else constant(value, x.dtype)
    return select(mask, filled, x)
