"""``where`` and ``masked_fill``, which keep the sign of zeros.

ONNX Runtime's ``Where`` (1.31) turns -0.0 in its second input into 0.0, but not in its third. So a tensor that may have
-0.0 becomes the third input. If both may have it, the result is ``Where(not c, 1, x) * Where(c, 1, y)``, which takes
1.9 times as long as one ``Where`` (a million numbers, EPYC, one thread).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import HALF_PRECISION, cast, constant

aten = torch.ops.aten

_KEEP_ELEMENTS = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators whose results contain only elements of the first argument."""

_EXACT_IN = {ir.DataType.FLOAT: HALF_PRECISION, ir.DataType.DOUBLE: (*HALF_PRECISION, ir.DataType.FLOAT)}
"""For a dtype, the narrower dtypes whose numbers it represents exactly."""

_NEVER_MINUS_ZERO = frozenset({"Abs", "Exp", "Not", "Sigmoid", "Softmax"})
"""Operators that never return -0.0."""


@converter(aten.where.self)
def where(condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """``x`` where the condition is true, else ``y``. Both have the same dtype; all shapes are broadcast."""
    assert y.dtype is not None
    if not _may_be_minus_zero(x):
        return op.Where(condition, x, y)
    if not _may_be_minus_zero(y):
        return op.Where(_negated(condition), y, x)
    one = constant(1.0, y.dtype)
    return op.Mul(op.Where(_negated(condition), one, x), op.Where(condition, one, y))


def _may_be_minus_zero(value: ir.Value) -> bool:
    if value.dtype is not None and not value.dtype.is_floating_point():
        return False
    node = value.producer()
    if node is None or node.op_type == "Constant":
        tensor = value.const_value if value.const_value is not None else ir.convenience.get_const_tensor(value)
        return tensor is None or _has_minus_zero(tensor.numpy())
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is not None and _has_minus_zero(filled.as_tensor().numpy())
    if node.op_type in _KEEP_ELEMENTS | {"Cast"}:
        source = node.inputs[0]
        return source is None or _may_be_minus_zero(source) or _may_underflow(source.dtype, value.dtype)
    return node.op_type not in _NEVER_MINUS_ZERO


def _may_underflow(source: ir.DataType | None, target: ir.DataType | None) -> bool:
    """Whether a cast may round a small number to zero."""
    is_exact = source is None or not source.is_floating_point() or source in _EXACT_IN.get(target, ())
    return source != target and not is_exact


def _may_overflow(source: ir.DataType | None, target: ir.DataType) -> bool:
    """Whether a cast may overflow."""
    if source == target or source in _EXACT_IN.get(target, ()):
        return False
    is_integer = source is not None and not source.is_floating_point()
    return not (is_integer and (source == ir.DataType.BOOL or target in _EXACT_IN))


def _has_minus_zero(array: np.ndarray) -> bool:
    if array.dtype.kind not in "fV":  # V: dtypes of ml_dtypes, such as bfloat16
        return False
    return bool((np.signbit(array) & (array == 0)).any())


def _negated(condition: ir.Value) -> ir.Value:
    node = condition.producer()
    if node is not None and node.op_type == "Not" and node.inputs[0] is not None:
        return node.inputs[0]
    return op.Not(condition)


@converter(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: ir.Value, mask: ir.Value, value: float | ir.Value) -> ir.Value:
    """``value`` where the mask is true, else ``x``.

    Eager raises an error if the value overflows the dtype of ``x``. A tensor of a wider dtype is rejected, as its value
    is known only at run time.
    """
    assert x.dtype is not None
    if isinstance(value, ir.Value) and _may_overflow(value.dtype, x.dtype):
        raise NotTranslatable(f"a value of {value.dtype} may overflow {x.dtype}, for which eager raises an error")
    return where(mask, cast(value, x.dtype) if isinstance(value, ir.Value) else constant(value, x.dtype), x)
