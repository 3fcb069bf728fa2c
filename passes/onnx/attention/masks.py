"""Masks as ONNX's ``Attention`` takes them, and what constants tell of the rows they hide."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from ...engine.onnx.editing import Builder, NearMiss, constant, integers, number, producer, sizes
from .finding import LOWEST, Heads, Mask

_LOW = -3e38
"""Hides a score as well as the lowest float32 does: any score added to it is lost."""


@dataclasses.dataclass(frozen=True)
class ReadyMask:
    """A mask as the operator takes it.

    Attributes:
        value: [S, T] or broadcastable to [B, H, S, T] in the first dimensions; ``None`` without one, or if causal.
        visible: where the mask lets a row see anything, [..., S, 1]; ``None`` if no row can be hidden altogether.
    """

    value: ir.Value | None = None
    visible: ir.Value | None = None
    is_causal: bool = False


def ready_mask(builder: Builder, mask: Mask | None, query: Heads, key: Heads) -> ReadyMask:
    """The mask as the operator takes it for these queries and keys; new nodes go behind the mask's.

    Raises:
        NearMiss: the operator does not take it.
    """
    if mask is None:
        return ReadyMask()
    if mask.low is None and _is_causal(mask.value):
        return ReadyMask(is_causal=True)
    value, shape = mask.value, sizes(mask.value)
    if shape is None or not 1 <= len(shape) <= 4:
        raise NearMiss(f"the mask is {'of unknown shape' if shape is None else shape}", 3)
    if mask.low is not None:
        low = max(mask.low, _LOW) if math.isfinite(mask.low) else -math.inf
        choices = [builder.constant("zero", 0.0), builder.constant("low", low)]
        value = builder.shared(value, "Where", [value, *(choices if mask.keep else choices[::-1])])
    elif value.dtype != ir.DataType.FLOAT:
        raise NearMiss(f"the mask is {value.dtype}", 3)
    batches, heads = ([1, 1, 1] + shape)[-4:-2]
    if batches not in (1, query.batch) or heads not in (1, query.heads):
        raise NearMiss(f"the mask of {shape} does not fit {query.batch} batches of {query.heads} heads", 3)
    raised, hides = _what_it_hides(value)
    visible = None
    if hides:
        axis, keep = builder.constant("last_axis", [-1]), ir.AttrInt64("keepdims", 1)
        highest = builder.shared(value, "ReduceMax", [value, axis], keep)
        lowest = builder.constant("minus_infinity", -math.inf)
        visible = builder.shared(highest, "Greater", [highest, lowest])
    if raised:
        value = builder.shared(value, "Max", [value, builder.constant("low", _LOW)])
    rows = [query.length, key.length]
    if shape[-2:] != rows:
        if not all(isinstance(size, int) for size in rows) or any(
            dim not in (1, size) for dim, size in zip(shape[::-1], rows[::-1], strict=False)
        ):
            raise NearMiss(f"the mask of {shape} has no {rows[0]} rows for {rows[1]} keys", 3)
        target = builder.constant("mask_sizes", [1] * (len(shape) - 2) + [int(size) for size in rows])
        value = builder.shared(value, "Expand", [value, target])
    return ReadyMask(value, visible)


def _what_it_hides(mask: ir.Value) -> tuple[bool, bool]:
    """Whether a mask must be raised for the kernel, and whether it may hide a row altogether by -inf."""
    array = constant(mask)
    if array is not None and array.size and not np.isnan(array).any() and (array.max(axis=-1) > LOWEST).all():
        return False, False
    bounds = _bounds(mask)
    if bounds is None:
        return True, True
    return bounds[0] <= LOWEST, bounds[0] == -math.inf


def _bounds(value: ir.Value | None, depth: int = 12) -> tuple[float, float] | None:
    """Numbers between which all elements of a value lie, none of them NaN; ``None`` if that is not known."""
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
    """Whether a mask hides the keys behind each query, counted from the first: the translation's ``is_causal``."""
    where = producer(mask, "Where")
    if where is None or number(where.inputs[1]) != -math.inf or number(where.inputs[2]) != 0:
        return False
    greater = producer(where.inputs[0], "Greater")
    if greater is None:
        return False
    columns, rows = (producer(item, "Unsqueeze") for item in greater.inputs)
    if columns is None or rows is None or integers(columns.inputs[1]) != [0] or integers(rows.inputs[1]) != [1]:
        return False
    ranges = [producer(item.inputs[0], "Range") for item in (columns, rows)]
    return all(item is not None and number(item.inputs[0]) == 0 and number(item.inputs[2]) == 1 for item in ranges)
