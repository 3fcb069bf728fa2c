"""Compares arrays: the tolerance of each element, the error, and the elements beyond their tolerance.

::

    found, beyond = judge(value, reference, "float32")
    found.share, found.is_rounding      # the largest ratio of an error to its tolerance; up to 1 it is rounding
    beyond.positions                    # the elements with a share above 1

Element i is right if

    |value_i - reference_i|  <=  units * epsilon * |reference_i|  +  floor  +  more_i

``reference`` is another computation of the same numbers from the same inputs, in the same dtype or in float64.
``more`` is what else the computation may round, in absolute numbers: see ``sum_units``, ``INSIDE`` and ``spread``.
No element excuses another: an outlier, or a mask of -1e9, hides no error. A discrete element, of integers or booleans,
must be equal.

Arrays are numpy's, and this file needs only numpy: it is copied into each ``repro.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

UNITS = 8.0
"""Units in the last place of float32 and float64. Approximations of functions in kernels are off by up to three, the
reference's as much, and a fused function rounds its inner values once more each."""

UNITS_OF_HALF = 1.0
"""Of float16, bfloat16 and float8: they are computed in float32 and rounded once, to one of two neighbours."""

INSIDE = 4.0
"""Units of float32, of the largest number inside a function that is not accurate relative to its result: ``erf`` is
computed from numbers near one, so that its small results are off by units of one; the units of ``UNITS``, halved, as
only one side has such an approximation."""

SUM_UNITS = 4.0
"""The most units of a sum's magnitudes, up to some 10,000 terms. Rounding errors of K terms that are added one by one
grow with the square root of K; kernels add in blocks and lanes, in which 16 or more terms have separate sums."""

LANES = 24.0
"""For more terms, the units are sqrt(K) / LANES: if K terms are added one by one in 16 lanes, each addition
is off by 0.29 units of a sum that grows to 1/16 of the whole. Four standard deviations of all: sqrt(K) / 24 units."""

SPREAD = 4.0, 16.0
"""How many times an error may exceed the largest change that perturbed inputs make: few runs of random numbers find a
quarter of what K roundings can add up to in the worst case, growing with the square root of K."""

RUNS = 16
"""The most perturbed runs. A value that is still beyond its tolerance after them is wrong."""

_CHUNK = 2**15
"""Elements at a time, which fit into a processor's cache."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point dtype: the distance from 1 to the next number, the smallest normal and the largest number."""

    epsilon: float
    smallest: float
    largest: float

    @property
    def units(self) -> float:
        """The tolerance in units in the last place."""
        return UNITS if self.epsilon < 2**-20 else UNITS_OF_HALF

    @property
    def computed(self) -> float:
        """The epsilon of the dtype it is computed in: half precision is computed in float32."""
        return min(self.epsilon, 2.0**-23)

    @property
    def floor(self) -> float:
        """The tolerance of the number 0. Subnormal numbers may be rounded to 0, except in float16 and float8, which are
        computed in float32."""
        return self.smallest if self.smallest < 1e-30 else self.units * self.epsilon * self.smallest


FORMATS = {
    "float64": Format(2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": Format(2.0**-23, 2.0**-126, float(np.finfo(np.float32).max)),
    "float16": Format(2.0**-10, 2.0**-14, 65504.0),
    "bfloat16": Format(2.0**-7, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": Format(2.0**-3, 2.0**-6, 448.0),
    "float8_e4m3fnuz": Format(2.0**-3, 2.0**-7, 240.0),
    "float8_e5m2": Format(2.0**-2, 2.0**-14, 57344.0),
    "float8_e5m2fnuz": Format(2.0**-2, 2.0**-15, 57344.0),
    "float8_e8m0fnu": Format(1.0, 2.0**-127, 2.0**127),
    "float4_e2m1fn": Format(2.0**-1, 1.0, 6.0),
}
"""By the name of the dtype; for a complex one, that of its parts."""


def sum_units(terms: int) -> float:
    """The tolerance of a sum of so many terms, in units of float32 (float64) of the sum of their magnitudes."""
    root = math.sqrt(max(terms, 1))
    return min(root, max(SUM_UNITS, root / LANES))


def spread(terms: int) -> float:
    """How many times the largest change by perturbed inputs is allowed, for sums of so many terms."""
    least, most = SPREAD
    return min(max(math.sqrt(max(terms, 1)), least), most)


@dataclasses.dataclass(frozen=True)
class Measure:
    """The error of a value against a reference, over all elements.

    Attributes:
        max_abs: largest absolute error.
        max_ulp: the error of the element with the largest share, in units in the last place; for discrete elements,
            how many differ.
        nonfinite: elements that are NaN or infinite on one side only, or infinite with another sign.
        scale: largest finite magnitude of the reference.
        share: largest ratio of an error to its tolerance: up to 1 it is rounding.
        position: of that element, in row-major order.
        error, limit: the error and the tolerance of that element; the error is infinite if the share is.
        missing: how many of ``nonfinite`` are finite in the value.
    """

    max_abs: float = 0.0
    max_ulp: float = 0.0
    nonfinite: int = 0
    scale: float = 0.0
    share: float = 0.0
    position: int = 0
    error: float = 0.0
    limit: float = 0.0
    missing: int = 0

    @property
    def is_rounding(self) -> bool:
        """Whether each element is within its tolerance."""
        return self.share <= 1.0

    @property
    def differs(self) -> bool:
        """Whether an element is not equal, and not NaN in both."""
        return bool(self.max_abs or self.nonfinite or self.share)

    @property
    def relative(self) -> float:
        """The largest error relative to the largest magnitude; infinite if only one side is NaN or infinite."""
        if self.nonfinite:
            return math.inf
        return self.max_abs / self.scale if self.scale else self.max_abs

    def text(self, where: str = "") -> str:
        """How the worst element differs, for people; ``where`` is its place, such as `` at element [3, 7]``."""
        if not self.nonfinite:
            return f"error {self.error:.3g}{where}, tolerance {self.limit:.3g}"
        made, lost = self.nonfinite - self.missing, self.missing
        counts = (made, "wrongly NaN or infinite"), (lost, "finite and should be NaN or infinite")
        texts = [f"{n} element{'s are' if n > 1 else ' is'} {what}" for n, what in counts if n]
        return " and ".join(texts) + (", the first" if made + lost > 1 else "," * bool(where)) + where


@dataclasses.dataclass(frozen=True)
class Beyond:
    """The elements beyond their tolerance.

    Attributes:
        positions: in row-major order.
        shares: the ratio of each one's error to its tolerance; infinite if only one side is NaN or infinite, or if
            elements must be equal.
    """

    positions: np.ndarray
    shares: np.ndarray


NOTHING = Beyond(np.zeros(0, np.int64), np.zeros(0))


def judge(
    value: np.ndarray, reference: np.ndarray, dtype: str, more: np.ndarray | None = None
) -> tuple[Measure, Beyond]:
    """Measures a value, and finds the elements beyond their tolerance.

    Args:
        value: of any shape; bfloat16 and float8 as float32.
        reference: of the same shape, in the value's dtype or in float64.
        dtype: the name of the floating-point dtype whose rounding is allowed; unused for discrete elements.
        more: for each element, what is added to its tolerance.
    """
    if value.dtype.kind == "c" or reference.dtype.kind == "c":
        return _judge_complex(value, reference, dtype, more)
    value, reference = value.reshape(-1), reference.reshape(-1)
    if value.dtype.kind in "biu":
        return _judge_discrete(value, reference)
    rule = FORMATS[dtype]
    found = Measure()
    beyond: list[tuple[np.ndarray, np.ndarray]] = []
    with np.errstate(all="ignore"):
        for start, part in _parts(value, reference, None if more is None else more.reshape(-1)):
            found = _measure_part(part, rule, start, found, beyond)
    if not beyond:
        return found, NOTHING
    return found, Beyond(*(np.concatenate(items) for items in zip(*beyond, strict=True)))


_Part = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _parts(value: np.ndarray, reference: np.ndarray, more: np.ndarray | None) -> Iterator[tuple[int, _Part]]:
    """Parts of the arrays in one dtype, float32 or float64, with their first positions."""
    both = {value.dtype, reference.dtype}
    work = np.float32 if both <= {np.dtype(np.float32), np.dtype(np.float16)} else np.float64
    for start in range(0, len(value), _CHUNK):
        place = slice(start, start + _CHUNK)
        extra = None if more is None else more[place].astype(work, copy=False)
        yield start, (value[place].astype(work, copy=False), reference[place].astype(work, copy=False), extra)


def _measure_part(
    part: _Part, rule: Format, start: int, found: Measure, beyond: list[tuple[np.ndarray, np.ndarray]]
) -> Measure:
    """The measure of all parts up to this one; its elements beyond their tolerance are added to ``beyond``."""
    value, reference, more = part
    error = np.abs(value - reference)
    size = np.abs(reference)
    scale, nonfinite, missing = float(size.max()), 0, 0
    if not math.isfinite(scale):
        size = np.where(np.isfinite(size), size, 0)
        scale = float(size.max())
    tolerance = size * value.dtype.type(rule.units * rule.epsilon)
    tolerance += value.dtype.type(rule.floor)
    if more is not None:
        tolerance += np.nan_to_num(more, nan=0.0, posinf=0.0)
    largest = float(error.max())
    wrong = None
    if not math.isfinite(largest):
        wrong = _differs_in_kind(value, reference, rule)
        nonfinite, missing = int(wrong.sum()), int(np.isfinite(value[wrong]).sum())
        error = np.where(np.isfinite(error), error, 0)
        largest = float(error.max())
    shares = error / tolerance
    if wrong is not None:
        shares[wrong] = math.inf
    share = float(shares.max())
    if share > found.share:
        worst = int(shares.argmax())
        off = math.inf if share == math.inf else float(error[worst])
        unit = rule.epsilon * max(float(size[worst]), rule.smallest)
        found = dataclasses.replace(
            found, share=share, position=start + worst, error=off, limit=float(tolerance[worst]), max_ulp=off / unit
        )
    if share > 1.0:
        positions = np.flatnonzero(shares > 1.0)
        beyond.append((start + positions, shares[positions].astype(np.float64)))
    return dataclasses.replace(
        found,
        max_abs=max(found.max_abs, largest),
        scale=max(found.scale, scale),
        nonfinite=found.nonfinite + nonfinite,
        missing=found.missing + missing,
    )


def _differs_in_kind(value: np.ndarray, reference: np.ndarray, rule: Format) -> np.ndarray:
    """Where one side is NaN or infinite and the other is not the same; infinity is the rounding of a reference that is
    larger than the dtype's largest number."""
    finite = np.isfinite(value) & np.isfinite(reference)
    same = (value == reference) | (np.isnan(value) & np.isnan(reference))
    rounded = np.isfinite(reference) & (np.abs(reference) > rule.largest * (1 - rule.epsilon))
    rounded &= np.isinf(value) & (np.signbit(value) == np.signbit(reference))
    return ~finite & ~same & ~rounded


def _judge_complex(
    value: np.ndarray, reference: np.ndarray, dtype: str, more: np.ndarray | None
) -> tuple[Measure, Beyond]:
    """Of the real and the imaginary parts."""
    value, reference = (_real_parts(item.astype(np.complex128)) for item in (value, reference))
    more = None if more is None else np.repeat(more.reshape(-1), 2)
    parts = dtype.replace("complex64", "float32").replace("complex128", "float64").replace("complex32", "float16")
    found, beyond = judge(value, reference, parts, more)
    positions, starts = np.unique(beyond.positions // 2, return_index=True)
    shares = np.maximum.reduceat(beyond.shares, starts) if len(starts) else beyond.shares
    return dataclasses.replace(found, position=found.position // 2), Beyond(positions, shares)


def _real_parts(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).reshape(-1).view(np.float64)


def _judge_discrete(value: np.ndarray, reference: np.ndarray) -> tuple[Measure, Beyond]:
    positions = np.flatnonzero(value != reference)
    if not len(positions):
        return Measure(), NOTHING
    apart = np.abs(value[positions].astype(np.float64) - reference[positions].astype(np.float64))
    found = Measure(
        max_abs=float(apart.max()),
        max_ulp=float(len(positions)),
        scale=float(np.abs(reference.astype(np.float64)).max()),
        share=math.inf,
        position=int(positions[0]),
        error=math.inf,
    )
    return found, Beyond(positions, np.full(len(positions), math.inf))
