"""How far two values of ONNX models are apart, in numpy, and what of it rounding explains.

::

    distance(value, exact).is_explained(distance(eager, exact))       # against float64
    difference(first, second).is_explained(movement)                  # neither of them is the truth

The rule is that of ``numerics/distance.py``: an error is explained if it is no larger than ``FACTOR`` times one that
rounding is known to make there, plus a few units of the dtype at the largest value (``numerics/rounding.py``). The
known one is the error of another computation that is right, or by how much the value moves when all that it is computed
of moves by one unit of rounding (``movement.py``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import ml_dtypes
import numpy as np

from ..numerics.rounding import FACTOR, rounding_units
from .models import shape_text, type_name
from .repro import measured

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

    max_abs: float = 0.0  # the largest absolute difference
    scale: float = 0.0  # the largest ordinary magnitude: in either, or in the right one of the two
    differing: int = 0  # how many elements differ
    nonfinite: int = 0  # elements that are NaN or infinite in one only, or infinite with another sign
    dtype: str = ""  # the name of the coarser dtype, in whose units rounding is; ``""`` for values that are not rounded
    unit: float = 0.0  # its epsilon
    tiny: float = 0.0  # its smallest normal number; the smaller ones are as far apart as those
    what: str = ""  # in words, why they cannot be compared element by element; else ``""``

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same; NaN is NaN."""
        return not self.what and not self.differing

    @property
    def relative(self) -> float:
        """The largest difference, relative to the largest magnitude."""
        return self.max_abs / self.scale if self.scale else self.max_abs

    @property
    def error(self) -> float:
        """The largest difference; infinite where elements are NaN or infinite in one only, or cannot be compared."""
        return math.inf if self.what or self.nonfinite else self.max_abs

    def limit(self, known: Difference) -> float:
        """The largest difference that rounding explains: elements that differ where values are not rounded."""
        if not self.dtype:
            return FACTOR * known.differing if known.max_abs else 0.0
        return FACTOR * known.max_abs + rounding_units(self.dtype) * self.unit * max(self.scale, self.tiny)

    def is_explained(self, known: Difference) -> bool:
        """Whether it may be rounding; ``known`` is a difference that rounding makes there."""
        if self.what or self.nonfinite > known.nonfinite:
            return False
        if not self.dtype:  # what is rounded to integers: a few elements, and by no more
            return self.differing <= self.limit(known) and self.max_abs <= known.max_abs
        return self.max_abs <= self.limit(known)

    def mark(self, known: Difference, otherwise: str = DIFFERENT) -> str:
        """``=``, ``~`` or, where rounding does not explain it, another key of ``LEGEND``."""
        return EQUAL if self.is_equal else ROUNDING if self.is_explained(known) else otherwise

    def text(self, limit: float) -> str:
        """In words, how far the values are apart, and how far rounding would explain."""
        if self.what:
            return self.what
        if self.nonfinite:
            return f"{self.nonfinite} elements are NaN or infinite in one only"
        if not self.dtype:
            return f"{self.differing} elements differ"
        return f"off by {self.max_abs:.2g} at values up to {self.scale:.2g}; rounding explains {limit:.1g}"

    def as_json(self) -> dict[str, object]:
        """JSON has no infinity; it becomes ``null``."""
        fields = dataclasses.asdict(self) | {"relative": self.relative}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


NOTHING = Difference()


def difference(first: OnnxValue, second: OnnxValue) -> Difference:
    """The difference of two values. Tensors of other shapes but as many elements are compared in their order."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _of_tensors(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return Difference(differing=1, what=f"{len(first)} and {len(second)} elements")
        return _worst([difference(a, b) for a, b in zip(first, second, strict=True)])
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return Difference(differing=1, what="other keys")
        return _worst([difference(np.asarray(first[key]), np.asarray(second[key])) for key in first])
    if first is None and second is None:
        return NOTHING
    return Difference(differing=1, what=f"{described(first)} and {described(second)}")


def distance(value: np.ndarray, exact: np.ndarray, dtype: np.dtype | None = None) -> Difference:
    """How far a tensor is from the right one, which is in float64 or in its dtype.

    Rounding is in units of ``dtype``, by default the value's.
    """
    dtype = value.dtype if dtype is None else dtype
    if value.shape != exact.shape or kind_of(value.dtype) != kind_of(exact.dtype):
        return Difference(differing=1, what=f"{described(value)} instead of {described(exact)}")
    if kind_of(dtype) not in ("float", "complex"):
        return _of_chunks(value, exact)
    # But for the last place of the largest number, which float64's rounding may reach.
    found = _of_chunks(value, exact, float(finfo(dtype).max) * (1 - epsilon(dtype)))
    return _in_units_of(dtype, found)


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


def _of_tensors(first: np.ndarray, second: np.ndarray) -> Difference:
    if first.size != second.size:
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    kinds = {kind_of(first.dtype), kind_of(second.dtype)}
    if kinds == {"string"}:
        return Difference(differing=sum(a != b for a, b in zip(first.flat, second.flat, strict=True)))
    if "string" in kinds or ("float" in kinds and len(kinds) > 1):
        return Difference(differing=1, what=f"{described(first)} and {described(second)}")
    rounded = [array.dtype for array in (first, second) if kind_of(array.dtype) in ("float", "complex")]
    coarsest = max(rounded, key=epsilon, default=None)
    found = _of_chunks(first, second)
    return found if coarsest is None else _in_units_of(coarsest, found)


def _in_units_of(dtype: np.dtype, found: Difference) -> Difference:
    tiny = float(finfo(dtype).smallest_normal)
    return dataclasses.replace(found, dtype=dtype.name, unit=epsilon(dtype), tiny=tiny)


def _of_chunks(first: np.ndarray, second: np.ndarray, largest: float | None = None) -> Difference:
    """The difference of as many elements, without dtype and unit.

    With ``largest``, see ``measured``, the second is right, and its magnitudes count; else neither is.
    """
    a, b = first.reshape(-1), second.reshape(-1)
    parts = [_part(a[i : i + _CHUNK], b[i : i + _CHUNK], largest) for i in range(0, a.size, _CHUNK)]
    found = _worst([part for part, _ in parts])
    relative = max((huge for _, huge in parts), default=0.0)  # of the scale of all chunks
    return dataclasses.replace(found, max_abs=max(found.max_abs, relative * max(found.scale, 1.0)))


def _part(first: np.ndarray, second: np.ndarray, largest: float | None) -> tuple[Difference, float]:
    """The difference of some ordinary elements, and the relative difference of huge ones."""
    if kind_of(first.dtype) == "complex" or kind_of(second.dtype) == "complex":
        a, b = (np.ascontiguousarray(array, np.complex128).view(np.float64) for array in (first, second))
    elif {kind_of(first.dtype), kind_of(second.dtype)} <= {"integer", "bool"}:
        unequal = first != second
        count = int(np.count_nonzero(unequal))
        if not count:
            return NOTHING, 0.0
        apart = np.abs(first[unequal].astype(np.float64) - second[unequal].astype(np.float64))
        return Difference(float(apart.max()), float(np.abs(second[unequal].astype(np.float64)).max()), count), 0.0
    else:
        a, b = first.astype(np.float64), second.astype(np.float64)
    size = np.abs(b) if largest is not None else np.fmax(np.abs(a), np.abs(b))
    error, relative, nonfinite, scale = measured(a, b, size, math.inf if largest is None else largest)
    count = int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
    return Difference(error, scale, count, nonfinite), relative


def _worst(parts: list[Difference]) -> Difference:
    """The difference of all parts together."""
    return Difference(
        max_abs=max((part.max_abs for part in parts), default=0.0),
        scale=max((part.scale for part in parts), default=0.0),
        differing=sum(part.differing for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        dtype=max((part.dtype for part in parts), default=""),
        unit=max((part.unit for part in parts), default=0.0),
        tiny=max((part.tiny for part in parts), default=0.0),
        what=next((part.what for part in parts if part.what), ""),
    )
