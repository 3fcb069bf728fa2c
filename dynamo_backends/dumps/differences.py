"""How far two values of ONNX models are apart, in numpy, and what of it rounding explains.

A difference is explained if it is no larger than ``FACTOR`` times what rounding is known to make there, plus a few
units of the coarser dtype at the largest value (``numerics/rounding.py``). What rounding makes there is measured: by
how much the value moves when all floating-point inputs and weights of the model are moved by one unit of rounding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, TypeAlias

from ..numerics.rounding import FACTOR, HUGE, rounding_units

if TYPE_CHECKING:
    import numpy as np

OnnxValue: TypeAlias = "np.ndarray | list[OnnxValue] | dict[object, object] | None"
"""A tensor, a sequence, a map, or an optional that is empty."""

_CHUNK = 2**20
"""Elements that are compared at a time: a weight of gigabytes is never in memory as a whole."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is different in two values.

    Attributes:
        max_abs: the largest absolute difference.
        scale: the largest ordinary magnitude in either.
        differing: how many elements differ.
        nonfinite: elements that are NaN or infinite in one only, or infinite with another sign.
        dtype: the name of the coarser dtype, in whose units rounding is; ``""`` for values that are not rounded.
        unit: its epsilon.
        what: in words, why they cannot be compared element by element; else ``""``.
    """

    max_abs: float = 0.0
    scale: float = 0.0
    differing: int = 0
    nonfinite: int = 0
    dtype: str = ""
    unit: float = 0.0
    what: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same; NaN is NaN."""
        return not self.what and not self.differing

    @property
    def relative(self) -> float:
        """The largest difference, relative to the largest magnitude."""
        return self.max_abs / self.scale if self.scale else self.max_abs

    def limit(self, movement: Difference) -> float:
        """The largest difference that rounding explains: elements that differ where values are not rounded."""
        if not self.dtype:
            return FACTOR * movement.differing if movement.max_abs else 0.0
        return FACTOR * movement.max_abs + rounding_units(self.dtype) * self.unit * self.scale

    def is_explained(self, movement: Difference) -> bool:
        """Whether it may be rounding.

        Args:
            movement: by how much the value moves under one unit of rounding in all that it is computed from.
        """
        if self.what or self.nonfinite > movement.nonfinite:
            return False
        if not self.dtype:  # what is rounded to integers: a few elements, and by no more
            return self.differing <= self.limit(movement) and self.max_abs <= movement.max_abs
        return self.max_abs <= self.limit(movement)

    def as_json(self) -> dict[str, object]:
        """JSON has no infinity; it becomes ``null``."""
        fields = dataclasses.asdict(self) | {"relative": self.relative}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def difference(first: OnnxValue, second: OnnxValue) -> Difference:
    """The difference of two values. Tensors of other shapes but as many elements are compared in their order."""
    import numpy as np

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
        return Difference()
    return Difference(differing=1, what=f"{described(first)} and {described(second)}")


def described(value: OnnxValue) -> str:
    """``float32 2x3``, ``sequence of 4``, ``map``, ``empty``."""
    import numpy as np

    from .models import shape_text, type_name

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
    import ml_dtypes
    import numpy as np

    if dtype.kind == "c":
        return float(np.finfo(dtype).eps)
    return float(ml_dtypes.finfo(dtype).eps)


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
    a, b = first.reshape(-1), second.reshape(-1)
    parts = [_part(a[i : i + _CHUNK], b[i : i + _CHUNK]) for i in range(0, a.size, _CHUNK)]
    found = _worst([Difference(), *parts])
    if coarsest is None:
        return found
    return dataclasses.replace(found, dtype=coarsest.name, unit=epsilon(coarsest))


def _part(first: np.ndarray, second: np.ndarray) -> Difference:
    """The difference of some elements, without dtype and unit."""
    import numpy as np

    if kind_of(first.dtype) == "complex" or kind_of(second.dtype) == "complex":
        a, b = (array.astype(np.complex128).view(np.float64) for array in (first, second))
    elif {kind_of(first.dtype), kind_of(second.dtype)} <= {"integer", "bool"}:
        unequal = first != second
        count = int(np.count_nonzero(unequal))
        if not count:
            return Difference()
        apart = np.abs(first[unequal].astype(np.float64) - second[unequal].astype(np.float64))
        return Difference(float(apart.max()), float(np.abs(second[unequal].astype(np.float64)).max()), count)
    else:
        a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size = np.maximum(np.abs(a), np.abs(b))
        ordinary = finite & (size < HUGE)
        scale = float(size[ordinary].max(initial=0.0))
        count = int(np.count_nonzero(~same))
        if not count:
            return Difference(scale=scale)
        max_abs = float(np.abs(a - b)[ordinary].max(initial=0.0))
        huge = finite & ~ordinary
        if huge.any():
            relative = np.abs(a[huge] / size[huge] - b[huge] / size[huge])
            max_abs = max(max_abs, float(relative.max()) * max(scale, 1.0))
    return Difference(max_abs, scale, count, int(np.count_nonzero(~finite & ~same)))


def _worst(parts: list[Difference]) -> Difference:
    """The difference of all parts together."""
    return Difference(
        max_abs=max((part.max_abs for part in parts), default=0.0),
        scale=max((part.scale for part in parts), default=0.0),
        differing=sum(part.differing for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        dtype=max((part.dtype for part in parts), default=""),
        unit=max((part.unit for part in parts), default=0.0),
        what=next((part.what for part in parts if part.what), ""),
    )
