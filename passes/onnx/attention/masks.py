"""Masks in the form of ONNX's ``Attention``, and bounds of their values, from constants."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from ...engine.onnx.editing import Builder, MatchError, constant, integers, number, operand, producer, sizes
from .finding import LOWEST, Heads, Mask

_LOW = -3e38
"""Hides a score as the lowest float32 does: adding a score does not change it."""


@dataclasses.dataclass(frozen=True)
class ReadyMask:
    """A mask for the operator.

    Attributes:
        value: [S, T], or broadcastable to [B, H, S, T] in the first dimensions; ``None`` without a mask, or if causal.
        visible: whether a row sees any key, [..., S, 1]; ``None`` if no row can be fully hidden.
    """

    value: ir.Value | None = None
    visible: ir.Value | None = None
    is_causal: bool = False


def ready_mask(builder: Builder, mask: Mask | None, query: Heads, key: Heads) -> ReadyMask:
    """The mask for the operator; new nodes follow the mask's producer.

    Raises:
        MatchError: the operator does not support it.
    """
    if mask is None:
        return ReadyMask()
    if mask.low is None and _is_causal(mask.value):
        return ReadyMask(is_causal=True)
    value, shape = mask.value, sizes(mask.value)
    if shape is None or not 1 <= len(shape) <= 4:
        raise MatchError(f"the mask is {'of unknown shape' if shape is None else shape}", 3)
    if mask.low is not None:
        low = max(mask.low, _LOW) if math.isfinite(mask.low) else -math.inf
        choices = [builder.constant("zero", 0.0), builder.constant("low", low)]
        value = builder.shared(value, "Where", [value, *(choices if mask.keep else choices[::-1])])
    elif value.dtype != ir.DataType.FLOAT:
        raise MatchError(f"the mask is {value.dtype}, not FLOAT", 3)
    batches, heads = ([1, 1, 1] + shape)[-4:-2]
    if batches not in (1, query.batch) or heads not in (1, query.heads):
        raise MatchError(f"the mask of {shape} does not fit {query.batch} batches of {query.heads} heads", 3)
    raised, hides = _what_it_hides(value)
    visible = None
    if hides:
        axis, keep = builder.constant("last_axis", [-1]), ir.AttrInt64("keepdims", 1)
        lowest = builder.constant("minus_infinity", -math.inf)
        highest, total = (
            builder.shared(value, operator, [value, axis], keep) for operator in ("ReduceMax", "ReduceSum")
        )
        are_lowest = [builder.shared(item, "Equal", [item, lowest]) for item in (highest, total)]
        both = builder.shared(are_lowest[0], "And", are_lowest)  # each is right after the first: the second is before
        visible = builder.shared(both, "Not", [both])
    if raised:
        value = builder.shared(value, "Max", [value, builder.constant("low", _LOW)])
    rows = [query.length, key.length]
    if shape[-2:] != rows:
        if not all(isinstance(size, int) for size in rows) or any(
            dim not in (1, size) for dim, size in zip(shape[::-1], rows[::-1], strict=False)
        ):
            raise MatchError(f"the mask of {shape} has no {rows[0]} rows for {rows[1]} keys", 3)
        target = builder.constant("mask_sizes", [1] * (len(shape) - 2) + [int(size) for size in rows])
        value = builder.shared(value, "Expand", [value, target])
    return ReadyMask(value, visible)


def _what_it_hides(mask: ir.Value) -> tuple[bool, bool]:
    """Whether a mask must be raised for the kernel, and whether it may fully hide a row by -inf."""
    array = constant(mask)
    if array is not None and array.size and not np.isnan(array).any() and (array.max(axis=-1) > LOWEST).all():
        return False, False
    bounds = _bounds(mask)
    if bounds is None:
        return True, True
    return bounds[0] <= LOWEST, bounds[0] == -math.inf


def _bounds(value: ir.Value | None, depth: int = 12) -> tuple[float, float] | None:
    """The smallest and largest possible element of a value without NaN; ``None`` if unknown."""
    array = constant(value)
    if array is not None:
        if array.size == 0 or array.dtype.kind not in "fiub" or np.isnan(array.astype(np.float64)).any():
            return None
        return float(array.min()), float(array.max())
    node = None if value is None else value.producer()
    if node is None or node.domain or depth == 0:
        return None
    inputs = list(node.inputs)
    if node.op_type == "Cast" and inputs[0] is not None and inputs[0].dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    if node.op_type in ("Identity", "Cast", "Expand", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Slice"):
        return _bounds(inputs[0], depth - 1)
    if node.op_type not in ("Where", "Concat", "Add", "Sub", "Mul", "Neg"):
        return None
    known = [_bounds(item, depth - 1) for item in inputs[node.op_type == "Where" :]]
    parts = [part for part in known if part is not None]
    if len(parts) != len(known):
        return None
    if node.op_type in ("Where", "Concat"):
        return min(low for low, _ in parts), max(high for _, high in parts)
    if node.op_type == "Neg":
        return -parts[0][1], -parts[0][0]
    operation = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}[node.op_type]
    with np.errstate(all="ignore"):
        corners = [float(operation(np.float32(a), np.float32(b))) for a in parts[0] for b in parts[1]]
    return None if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _is_causal(mask: ir.Value) -> bool:
    """Whether a mask is the translation's ``is_causal``: hides the keys after each query, from position 0."""
    where, greater = producer(mask, "Where"), producer(operand(mask, "Where"), "Greater")
    if where is None or number(where.inputs[1]) != -math.inf or number(where.inputs[2]) != 0 or greater is None:
        return False
    for side, axis in zip(greater.inputs, (0, 1), strict=True):  # columns, rows
        positions = producer(operand(side, "Unsqueeze"), "Range")
        if positions is None or integers(operand(side, "Unsqueeze", index=1)) != [axis]:
            return False
        if number(positions.inputs[0]) != 0 or number(positions.inputs[2]) != 1:
            return False
    return True
