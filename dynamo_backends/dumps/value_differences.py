"""The difference of two values of ONNX models, and whether it is rounding.

::

    difference_from_reference(value, exact, [eager]).is_rounding  # against float64
    difference(first, second).is_rounding                         # neither of them is the reference

The rule is that of ``numerics/rule.py``. What another right computation differs from the reference is allowed some
times over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import ml_dtypes
import numpy as np

from ..numerics.rule import FORMATS, SPREAD, UNITS_OF_HALF, Measure, judge
from .models import shape_text, type_name

OnnxValue: TypeAlias = "np.ndarray | list[OnnxValue] | dict[object, object] | None"
"""A tensor, a sequence, a map, or an empty optional."""

_CHUNK = 2**20  # elements compared at a time, so that a weight of gigabytes is never in memory as a whole

EQUAL, ROUNDING, DIFFERENT, UNSURE, ONLY_FIRST, ONLY_SECOND = "=", "~", "!", "?", "-", "+"
LEGEND = {
    EQUAL: "equal",
    ROUNDING: "different, within the tolerance",
    DIFFERENT: "different beyond the tolerance",
    UNSURE: "different, and may not correspond: judged with the value that it computes",
    ONLY_FIRST: "only in the first model",
    ONLY_SECOND: "only in the second model",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two values."""

    measured: Measure = Measure()  # the errors of the second value, with the first as reference
    differing: int = 0  # how many elements differ
    dtype: str = ""  # the coarser dtype, whose rounding counts; ``""`` for integers and the like
    what: str = ""  # why they cannot be compared element by element, or ``""``

    @property
    def is_equal(self) -> bool:
        """Whether all elements are equal, or both NaN."""
        return not self.what and not self.differing

    @property
    def is_rounding(self) -> bool:
        """Whether each element is within its tolerance."""
        return not self.what and self.measured.is_rounding

    @property
    def error(self) -> float:
        """The largest error; infinite if elements are NaN or infinite in one value only, or cannot be compared."""
        return math.inf if self.what or self.measured.nonfinite else self.measured.max_abs

    def mark(self, otherwise: str = DIFFERENT) -> str:
        """``=``, ``~``, or ``otherwise`` if it is not rounding; keys of ``LEGEND``."""
        return EQUAL if self.is_equal else ROUNDING if self.is_rounding else otherwise

    def __str__(self) -> str:
        if self.what:
            return self.what
        if self.measured.nonfinite:
            several = self.measured.nonfinite > 1
            return f"{self.measured.nonfinite} element{'s are' if several else ' is'} NaN or infinite in one only"
        if not self.dtype:
            return f"{self.differing} elements differ" if self.differing > 1 else "1 element differs"
        return f"error {self.measured.error:.2g}, tolerance {self.measured.limit:.1g}"

    def as_json(self) -> dict[str, object]:
        """Its fields, with those of the measure."""
        relative = self.measured.relative
        return {
            **self.measured.as_json(),
            "differing": self.differing,
            "dtype": self.dtype,
            "what": self.what,
            "relative": relative if math.isfinite(relative) else None,
            "is_rounding": self.is_rounding,
        }


NOTHING = Difference()


def difference(first: OnnxValue, second: OnnxValue) -> Difference:
    """The difference of two values. Tensors of different shapes with equally many elements are compared flat."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _of_tensors(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return Difference(differing=1, what=f"{len(first)} and {len(second)} elements")
        return _worst([difference(*items) for items in zip(first, second, strict=True)])
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return Difference(differing=1, what="different keys")
        return _worst([difference(np.asarray(first[key]), np.asarray(second[key])) for key in first])
    if first is None and second is None:
        return NOTHING
    return Difference(differing=1, what=f"{described(first)} and {described(second)}")


def difference_from_reference(
    value: np.ndarray,
    exact: np.ndarray,
    others: Sequence[np.ndarray] = (),
    *,
    dtype: np.dtype | None = None,
    more: np.ndarray | float = 0.0,
) -> Difference:
    """The difference of a tensor from its reference.

    Args:
        value: the tensor.
        exact: the reference, in float64 or in the dtype of the tensor.
        others: other right results.
        dtype: whose rounding is allowed, by default the value's.
        more: is added to each element's tolerance.
    """
    dtype = value.dtype if dtype is None else dtype
    if value.shape != exact.shape or kind_of(value.dtype) != kind_of(exact.dtype):
        return Difference(differing=1, what=f"{described(value)} instead of {described(exact)}")
    return _measured(value, exact, others, dtype, more)


def tolerance(known: np.ndarray, right: np.ndarray) -> float:
    """The allowed error, as a multiple of the dtype's tolerance, if the right result ``known`` has an error itself."""
    found = difference_from_reference(known, right).measured
    if known.dtype.name not in FORMATS or found.max_ulp <= 1 or not math.isfinite(found.share):
        return 1.0
    return 1 + _spread(known.dtype) * found.share


def _spread(dtype: np.dtype) -> float:
    """How many times an error may exceed that of another right computation, see ``rule.SPREAD``: how many terms a model
    adds up is not known. Values of half precision are rounded at each step, and so have each step's error anyway."""
    rule = FORMATS.get(dtype.name)
    return SPREAD[0] if rule is not None and rule.units == UNITS_OF_HALF else SPREAD[1]


def described(value: OnnxValue) -> str:
    """``float32 2x3``, ``sequence of 4``, ``map``, ``empty``."""
    if isinstance(value, np.ndarray):
        return f"{type_name(value.dtype)} {shape_text(value.shape)}"
    if value is None:
        return "empty"
    return "map" if isinstance(value, dict) else f"sequence of {len(value)}"


def kind_of(dtype: np.dtype) -> str:
    """``float``, ``complex``, ``integer``, ``bool`` or ``string``, also for the dtypes of ``ml_dtypes``."""
    if dtype.kind in "OSU":
        return "string"
    if dtype.kind in "biufc":
        return {"b": "bool", "f": "float", "c": "complex"}.get(dtype.kind, "integer")
    return "integer" if "int" in dtype.name else "float"


def epsilon(dtype: np.dtype) -> float:
    """The distance from 1 to the next larger number of a floating-point or complex dtype."""
    return float((np.finfo(dtype) if dtype.kind == "c" else ml_dtypes.finfo(dtype)).eps)


def _of_tensors(first: np.ndarray, second: np.ndarray) -> Difference:
    if first.size != second.size:
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    kinds = {kind_of(first.dtype), kind_of(second.dtype)}
    if kinds == {"string"}:
        differing = sum(a != b for a, b in zip(first.flat, second.flat, strict=True))
        return Difference(Measure(share=math.inf if differing else 0.0), differing)
    if "string" in kinds or ("float" in kinds and len(kinds) > 1):
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    dtypes = [array.dtype for array in (first, second) if kind_of(array.dtype) in ("float", "complex")]
    coarsest = max(dtypes, key=epsilon, default=first.dtype)
    return _measured(second.reshape(first.shape), first, (), coarsest)


def _measured(
    value: np.ndarray, right: np.ndarray, others: Sequence[np.ndarray], dtype: np.dtype, more: np.ndarray | float = 0.0
) -> Difference:
    value, right, *others = (_known_to_numpy(item.reshape(value.shape)) for item in (value, right, *others))
    found, _ = judge(value, right, dtype.name)
    if not found.is_rounding and kind_of(dtype) in ("float", "complex"):
        with np.errstate(all="ignore"):
            wide = right.astype(np.result_type(right.dtype, np.float64))
            errors = [np.nan_to_num(np.abs(item - wide), nan=0.0, posinf=0.0) for item in others]
        known = _spread(dtype) * functools.reduce(np.maximum, errors, np.full(right.shape, 0.0))
        found, _ = judge(value, right, dtype.name, known + more)
    elif not found.is_rounding:
        for item in others:  # another right computation may decide otherwise
            right = np.where(item == value, value, right)
        found, _ = judge(value, right, dtype.name)
    a, b = value.reshape(-1), right.reshape(-1)
    differing = sum(_differing(a[i : i + _CHUNK], b[i : i + _CHUNK]) for i in range(0, a.size, _CHUNK))
    return Difference(found, differing, dtype.name if kind_of(dtype) in ("float", "complex") else "")


def _known_to_numpy(value: np.ndarray) -> np.ndarray:
    """The array; one of ``ml_dtypes`` in a wider dtype of numpy."""
    if value.dtype.kind in "biufc":
        return value
    return value.astype(np.int64 if kind_of(value.dtype) == "integer" else np.float32)


def _differing(first: np.ndarray, second: np.ndarray) -> int:
    unequal = first != second
    if unequal.any() and first.dtype.kind in "fc" and second.dtype.kind in "fc":
        unequal &= ~(np.isnan(first) & np.isnan(second))
    return int(np.count_nonzero(unequal))


def _worst(parts: Sequence[Difference]) -> Difference:
    """The worst difference, with the differing elements of all."""
    worst = max(parts, key=lambda part: (bool(part.what), part.measured.share), default=NOTHING)
    return dataclasses.replace(worst, differing=sum(part.differing for part in parts))
