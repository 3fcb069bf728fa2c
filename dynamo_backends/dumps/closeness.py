"""Whether an array is as right as can be expected: the rule of ``numerics/distance.py``, for numpy's arrays."""

from __future__ import annotations

import numpy as np
import onnx

from ..numerics.rounding import FACTOR, rounding_units
from .differences import epsilon, kind_of


def allowed_error(number: int, scale: float, reference: float = 0.0) -> float:
    """The largest error that needs no explanation.

    Args:
        number: ONNX's number of the value's dtype; integers and booleans have no rounding.
        scale: the largest magnitude of the right value.
        reference: the error of a computation in that dtype that is known to be right.
    """
    dtype = onnx.helper.tensor_dtype_to_np_dtype(number)
    if kind_of(dtype) not in ("float", "complex"):
        return reference
    return FACTOR * reference + rounding_units(dtype.name) * epsilon(dtype) * scale


def rounded(exact: np.ndarray, number: int) -> np.ndarray:
    """A float64 array in the dtype of this number, in the form that candidates have."""
    if number == 16:
        bits = exact.astype(np.float32).view(np.uint32)
        even = (bits >> 16) & 1
        result = ((bits + 0x7FFF + even) >> 16).astype(np.uint16)
        return np.where(np.isnan(exact), np.uint16(0x7FC0), result).astype(np.uint16)
    with np.errstate(over="ignore"):
        return exact.astype({1: "f4", 10: "f2", 11: "f8"}[number]) if number in (1, 10, 11) else exact
