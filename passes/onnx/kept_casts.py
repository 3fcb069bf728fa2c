"""Keeps ONNX Runtime from dropping casts that round.

Of two casts in a row, ONNX Runtime (1.31, 1.32) drops the first if the second is to a smaller dtype, even if the first
rounds or wraps, and with all optimizations off: 1.9999 in float32 by float16 to int8 is 1 instead of 2, and 5e9 by
int64 to int32 is the smallest integer. No option turns that off.

Rule: a reshape to the same shape, which copies nothing, goes between two such casts::

    y = Cast(Cast(x: float32[N], to=float16), to=int8)

    y = Cast(Reshape(Cast(x, to=float16), [0]), to=int8)

Needed: results would be wrong. It runs after all other passes, which may bring casts together.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from ..engine.context import PassContext
from ..engine.onnx.building import Replacement, sizes_of
from ..engine.onnx.editing import nodes_of
from ..engine.registry import Pass

_MAY_GO = {"Expand", "Identity", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that ONNX Runtime removes or moves, which brings the casts around them together."""


def kept_casts(model: ir.Model, context: PassContext) -> int:
    """Inserts a reshape after each cast that must not be dropped; returns how many."""
    found = [node for node in nodes_of(model, "Cast") if _rounds(node) and _is_cast_again(node.outputs[0], node)]
    for node in found:
        new = Replacement(node)
        source, (rounded,) = node.inputs[0], node.outputs
        assert rounded.dtype is not None
        cast = new.op("Cast", [source], to=rounded.dtype)
        sizes = sizes_of(rounded)
        shape = new.op("Shape", [cast]) if sizes is None else new.constant(np.zeros(len(sizes), np.int64))
        new.put([new.op("Reshape", [cast, shape])])
    return len(found)


def _is_cast_again(value: ir.Value, first: ir.Node) -> bool:
    """Whether another cast follows, unless back to the dtype before ``first``, for which nothing is dropped."""
    for user in value.consumers():
        if user.op_type == "Cast" and user.outputs[0].dtype != _source(first):
            return True
        if user.op_type in _MAY_GO and _is_cast_again(user.outputs[0], first):
            return True
    return False


def _source(cast: ir.Node) -> ir.DataType | None:
    return None if cast.inputs[0] is None else cast.inputs[0].dtype


def _rounds(cast: ir.Node) -> bool:
    """Whether a cast may change a number; true for unknown dtypes and those PyTorch lacks."""
    source, target = _source(cast), cast.outputs[0].dtype
    if source is None or target is None:
        return True
    try:
        return not _holds(ir.tensor_adapters.to_torch_dtype(target), ir.tensor_adapters.to_torch_dtype(source))
    except TypeError:  # strings, or 4-bit integers
        return True


def _holds(new: torch.dtype, old: torch.dtype) -> bool:
    """Whether ``new`` represents each number of ``old`` exactly."""
    if old is torch.bool or old is new:
        return True
    if new is torch.bool or (old.is_floating_point and not new.is_floating_point):
        return False
    if not old.is_floating_point:
        limits = torch.iinfo(old)
        if not new.is_floating_point:
            return torch.iinfo(new).min <= limits.min and limits.max <= torch.iinfo(new).max
        return max(-limits.min, limits.max) <= 2 / torch.finfo(new).eps
    given, wanted = torch.finfo(old), torch.finfo(new)
    return wanted.eps <= given.eps and wanted.max >= given.max and wanted.smallest_normal <= given.smallest_normal


PASS = Pass("onnx.kept_casts", "Keeps casts that round from being dropped.", kept_casts, cleans_up=True, is_needed=True)
