"""How far two values of ONNX models are apart, and whether rounding explains it.

::

    distance(value, exact, [eager]).is_rounding         # against float64
    difference(first, second, moved).is_rounding        # neither of them is the truth

The rule is that of ``numerics/measure.py``. What rounding is known to make is the error of another computation that is
right, or of ``first`` where all that it is computed of is moved by one unit of rounding (``running.moved_values``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import ml_dtypes
import numpy as np

from ..numerics.measure import FORMATS, Measure, group_size_of, measure
from .models import shape_text, type_name

OnnxValue: TypeAlias = "np.ndarray | list[OnnxValue] | dict[object, object] | None"
"""A tensor, a sequence, a map, or an optional that is empty."""

_CHUNK = 2**20  # elements that are compared at a time: a weight of gigabytes is never in memory as a whole

EQUAL, ROUNDING, DIFFERENT, UNSURE, ONLY_FIRST, ONLY_SECOND = "=", "~", "!", "?", "-", "+"
LEGEND = {
    EQUAL: "the same in both",
    ROUNDING: "different by no more than rounding explains",
    DIFFERENT: "different by more",
    UNSURE: "different, aligned by operator and place only: maybe not meant to be the same",
    ONLY_FIRST: "only in the first model",
    ONLY_SECOND: "only in the second model",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is different in two values."""

    measured: Measure = Measure()  # of the second, as if the first were right; or of a value and the right one
    differing: int = 0  # how many elements differ
    dtype: str = ""  # the name of the coarser dtype, in whose units rounding is; ``""`` for values that are not rounded
    what: str = ""  # in words, why they cannot be compared element by element; else ``""``

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same; NaN is NaN."""
        return not self.what and not self.differing

    @property
    def is_rounding(self) -> bool:
        """Whether it may be rounding, at each element."""
        return not self.what and self.measured.is_rounding

    @property
    def error(self) -> float:
        """The largest difference; infinite where elements are NaN or infinite in one only, or cannot be compared."""
        return math.inf if self.what or self.measured.nonfinite else self.measured.max_abs

    def mark(self, otherwise: str = DIFFERENT) -> str:
        """``=``, ``~`` or, where rounding does not explain it, another key of ``LEGEND``."""
        return EQUAL if self.is_equal else ROUNDING if self.is_rounding else otherwise

    def __str__(self) -> str:
        if self.what:
            return self.what
        if self.measured.nonfinite:
            return f"{self.measured.nonfinite} elements are NaN or infinite in one only"
        if not self.dtype:
            return f"{self.differing} elements differ"
        return f"off by {self.measured.error:.2g}, where rounding explains {self.measured.limit:.1g}"

    def as_json(self) -> dict[str, object]:
        """The fields of the measure among the others."""
        fields = {"differing": self.differing, "dtype": self.dtype, "what": self.what}
        relative = self.measured.relative
        return {
            **self.measured.as_json(),
            **fields,
            "relative": relative if math.isfinite(relative) else None,
            "is_rounding": self.is_rounding,
        }


NOTHING = Difference()


def difference(first: OnnxValue, second: OnnxValue, moved: OnnxValue = None) -> Difference:
    """The difference of two values. Tensors of other shapes but as many elements are compared in their order.

    ``moved`` is the first where all that it is computed of is moved by rounding.
    """
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _of_tensors(first, second, [moved] if isinstance(moved, np.ndarray) else [])
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return Difference(differing=1, what=f"{len(first)} and {len(second)} elements")
        movements = moved if isinstance(moved, (list, tuple)) and len(moved) == len(first) else [None] * len(first)
        return _worst([difference(*items) for items in zip(first, second, movements, strict=True)])
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return Difference(differing=1, what="other keys")
        return _worst([difference(np.asarray(first[key]), np.asarray(second[key])) for key in first])
    if first is None and second is None:
        return NOTHING
    return Difference(differing=1, what=f"{described(first)} and {described(second)}")


def distance(
    value: np.ndarray,
    exact: np.ndarray,
    others: Sequence[np.ndarray] = (),
    *,
    dtype: np.dtype | None = None,
    inner: float = 0.0,
) -> Difference:
    """How far a tensor is from the right one, which is in float64 or in its dtype.

    Args:
        value, exact: the tensor, and the right one.
        others: other computations that are right.
        dtype: whose rounding is no fault, by default the value's.
        inner: see ``measure``; one number for all elements.
    """
    dtype = value.dtype if dtype is None else dtype
    if value.shape != exact.shape or kind_of(value.dtype) != kind_of(exact.dtype):
        return Difference(differing=1, what=f"{described(value)} instead of {described(exact)}")
    return _measured(value, exact, others, dtype, inner)


def tolerance(known: np.ndarray, right: np.ndarray) -> float:
    """How many times the tolerance of its dtype an error may have, where a right result has that of ``known``."""
    found = distance(known, right).measured
    rule = FORMATS.get(known.dtype.name)
    return (
        1.0 if rule is None or found.max_ulp <= 1 or not math.isfinite(found.share) else 1 + rule.factor * found.share
    )


def described(value: OnnxValue) -> str:
    """``float32 2x3``, ``sequence of 4``, ``map``, ``empty``."""
    if isinstance(value, np.ndarray):
        return f"{type_name(value.dtype)} {shape_text(value.shape)}"
    if value is None:
        return "empty"
    return "map" if isinstance(value, dict) else f"sequence of {len(value)}"


def kind_of(dtype: np.dtype) -> str:
    """``float``, ``complex``, ``integer``, ``bool`` or ``string``, also of the types of ``ml_dtypes``."""
    if dtype.kind in "OSU":
        return "string"
    if dtype.kind in "biufc":
        return {"b": "bool", "f": "float", "c": "complex"}.get(dtype.kind, "integer")
    return "integer" if "int" in dtype.name else "float"


def epsilon(dtype: np.dtype) -> float:
    """The distance of 1 and the next larger number of a floating-point or complex dtype."""
    return float(finfo(dtype).eps)


def finfo(dtype: np.dtype) -> np.finfo:
    """The limits of a floating-point or complex dtype."""
    return np.finfo(dtype) if dtype.kind == "c" else ml_dtypes.finfo(dtype)


def _of_tensors(first: np.ndarray, second: np.ndarray, moved: Sequence[np.ndarray]) -> Difference:
    if first.size != second.size:
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    kinds = {kind_of(first.dtype), kind_of(second.dtype)}
    if kinds == {"string"}:
        differing = sum(a != b for a, b in zip(first.flat, second.flat, strict=True))
        return Difference(Measure(share=math.inf if differing else 0.0), differing)
    if "string" in kinds or ("float" in kinds and len(kinds) > 1):
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    rounded = [array.dtype for array in (first, second) if kind_of(array.dtype) in ("float", "complex")]
    coarsest = max(rounded, key=epsilon, default=first.dtype)
    return _measured(second.reshape(first.shape), first, [item for item in moved if item.size == first.size], coarsest)


def _measured(
    value: np.ndarray, right: np.ndarray, others: Sequence[np.ndarray], dtype: np.dtype, inner: float = 0.0
) -> Difference:
    """The difference of a value from one that counts as right."""
    arrays = [_known_to_numpy(item.reshape(value.shape)) for item in (value, right, *others)]
    extents = np.broadcast_to(inner, value.shape) if inner else None
    found = measure(
        arrays[0], arrays[1], dtype.name, arrays[2:], inner_size=extents, group_size=group_size_of(value.shape)
    )
    a, b = (item.reshape(-1) for item in arrays[:2])
    differing = sum(_differing(a[i : i + _CHUNK], b[i : i + _CHUNK]) for i in range(0, a.size, _CHUNK))
    return Difference(found, differing, dtype.name if kind_of(dtype) in ("float", "complex") else "")


def _known_to_numpy(value: np.ndarray) -> np.ndarray:
    """An array of numpy's own dtypes: those of ``ml_dtypes`` in wider ones."""
    if value.dtype.kind in "biufc":
        return value
    return value.astype(np.int64 if kind_of(value.dtype) == "integer" else np.float32)


def _differing(first: np.ndarray, second: np.ndarray) -> int:
    unequal = first != second
    if unequal.any() and first.dtype.kind in "fc" and second.dtype.kind in "fc":
        unequal &= ~(np.isnan(first) & np.isnan(second))
    return int(np.count_nonzero(unequal))


def _worst(parts: Sequence[Difference]) -> Difference:
    """The difference of all parts together: of the one that is worst, with the elements of all."""
    worst = max(parts, key=lambda part: (bool(part.what), part.measured.share), default=NOTHING)
    return dataclasses.replace(worst, differing=sum(part.differing for part in parts))
