"""The error of computed numbers against a reference, and the tolerance for rounding, element by element.

::

    found = measure(value, exact, "float32", others=[eager])
    found.max_abs, found.share          # the largest error; the largest ratio of an error to its tolerance
    found.is_rounding                   # share <= 1

The tolerance of element i is

    units * epsilon * |exact_i|  +  factor * (the largest error of ``others`` at i)  +  4 * epsilon of float32 * inner_i
    +  floor

(epsilon of float64 for float64), where inner_i is ``inner_size``. ``Format`` has units, factor and floor.

``others`` are right computations, such as eager's, or float64 with inputs that are perturbed by a unit of rounding.
Their errors count if they exceed a unit in the last place. The tolerance does not depend on the size of other elements:
an outlier, or a mask of -1e9, hides no error.

This file needs only numpy, and is copied into each ``repro.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point dtype: the distance from 1 to the next number, the smallest normal and the largest number."""

    epsilon: float
    smallest: float
    largest: float

    @property
    def units(self) -> float:
        """The tolerance in units in the last place: kernels and approximations of float32 and float64 differ by up to
        three; half precision is computed in float32 and rounded once."""
        return 8.0 if self.epsilon < 2**-20 else 2.0 if self.epsilon < 2**-5 else 1.0

    @property
    def factor(self) -> float:
        """How many times an error may exceed that of another right computation."""
        return 10.0 if self.epsilon < 2**-20 else 2.0

    @property
    def floor(self) -> float:
        """The tolerance of the number 0. Subnormal numbers may be rounded to 0, except in float16, which is computed in
        float32."""
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
}
"""By the name of the dtype; for a complex one, that of its parts."""

_INNER_UNITS = 4.0
_SINGLE = FORMATS["float32"].epsilon

_FEW = 16
"""Elements whose errors show what size their errors have."""

_GROUPS = 16
"""Groups of a large tensor, at least."""

_EXPONENT = 0x7FF0000000000000
"""A mask for the bits of a float64 that are the largest power of two up to its magnitude."""

_SAMPLE = 2**13
"""Elements of which the errors of other computations are estimated."""

_USUAL = 0.99
"""The share of elements whose errors are no exception."""

_BINS = 2200
"""Powers of two."""

_FAR = 1e3
"""How many times larger than the lower quartile an outlier is."""

_CHUNK = 2**14
"""Elements measured at a time, to fit into a processor's cache."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """The error of a value against a reference, over all elements.

    Attributes:
        max_abs: largest absolute error.
        max_rel: largest error relative to the reference, where that is not zero.
        rmse: root mean square error.
        max_ulp: largest error in units in the last place of the value's dtype; for integers and booleans, how many
            elements differ.
        nonfinite: elements that are NaN or infinite on one side only, or infinite with another sign.
        scale: largest finite magnitude of the reference.
        share: largest ratio of an error to its tolerance: up to 1 it is rounding.
        position: of that element, in row-major order.
        error, limit: the error and the tolerance of that element.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    rmse: float = 0.0
    max_ulp: float = 0.0
    nonfinite: int = 0
    scale: float = 0.0
    share: float = 0.0
    position: int = 0
    error: float = 0.0
    limit: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether each element is within its tolerance."""
        return self.share <= 1.0

    @property
    def relative(self) -> float:
        """The largest error relative to the largest magnitude; infinite if only one side is NaN or infinite."""
        if self.nonfinite:
            return math.inf
        return self.max_abs / self.scale if self.scale else self.max_abs

    def as_json(self) -> dict[str, float | int | None]:
        """For a JSON file, which has no NaN and infinity: they become ``null``."""
        fields = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def measure(
    value: np.ndarray,
    exact: np.ndarray,
    dtype: str,
    others: Sequence[np.ndarray] = (),
    *,
    inner_size: np.ndarray | None = None,
    group_size: int = 1,
) -> Measure:
    """Measures a value.

    Args:
        value: any numpy dtype.
        exact: the reference, of the same shape; in float64 for floating-point values.
        dtype: the name of the dtype whose rounding is allowed.
        others: results of right computations.
        inner_size: for each element, the magnitude of numbers inside its computation, which is done in float32.
        group_size: how many consecutive elements have rounding errors of one size: those of a row, or all. The error
            of a single element is chance. The error of ``others`` that counts for an element is then the one that 99 %
            of all elements that are no larger, or are among the smallest quarter, do not exceed, but no more than the
            largest in the group.
    """
    if value.dtype.kind == "c" or exact.dtype.kind == "c":
        value, exact, *others = (_parts(item) for item in (value, exact, *others))
        inner_size, group_size = None if inner_size is None else np.repeat(inner_size.reshape(-1), 2), 2 * group_size
    arrays = [item.reshape(-1) for item in (value, exact, *others)]
    if not arrays[0].size:
        return Measure()
    if value.dtype.kind in "biu":
        return _discrete(*arrays)
    name = dtype.replace("complex64", "float32").replace("complex128", "float64")
    rule = FORMATS.get(name, FORMATS["float64"])
    inner_size = None if inner_size is None else inner_size.reshape(-1)
    with np.errstate(all="ignore"):
        found, beyond, reached = _measured(arrays, rule, inner_size, group_size)
        if beyond.size and not found.nonfinite and group_size > 1 and others:
            return _with_errors_of_group(found, beyond, arrays, rule, inner_size, reached[beyond // group_size])
    return found


def _measured(
    arrays: Sequence[np.ndarray], rule: Format, inner_size: np.ndarray | None, group_size: int
) -> tuple[Measure, np.ndarray, np.ndarray]:
    """The measure, chunk by chunk; the positions beyond their tolerance; the largest error of others in each group."""
    found, squares, finite, beyond = [], 0.0, 0, [np.zeros(0, np.intp)]
    reached = np.zeros(arrays[0].size // group_size + 1)
    for part in _chunks(arrays[0].size, group_size):
        value, exact, *others = (item[part].astype(np.float64, copy=False) for item in arrays)
        size = np.abs(exact)
        known = _known(others, exact, size, rule) if others else None
        if known is not None and group_size > 1:
            first, width = part.start // group_size, min(group_size, known.size)
            largest = known.reshape(-1, width).max(axis=1)
            reached[first : first + largest.size] = np.maximum(reached[first : first + largest.size], largest)
        tolerance = _tolerance(size, rule, None if inner_size is None else inner_size[part], known)
        one, error, shares = _chunk(value, exact, size, others, rule, tolerance, part.start)
        squares, finite = squares + float(np.dot(error, error)), finite + error.size
        found.append(one)
        if one.share > 1.0:
            beyond.append(part.start + np.flatnonzero(shares > 1.0))
    together = dataclasses.replace(
        max(found, key=lambda one: one.share),
        max_abs=max(one.max_abs for one in found),
        max_rel=max(one.max_rel for one in found),
        max_ulp=max(one.max_ulp for one in found),
        nonfinite=sum(one.nonfinite for one in found),
        scale=max(one.scale for one in found),
        rmse=math.sqrt(squares / max(finite, 1)),
    )
    return together, np.concatenate(beyond), reached


def _chunks(size: int, group_size: int) -> Iterator[slice]:
    """Slices of several groups, or of a part of a group."""
    step = max(_CHUNK // group_size, 1) * group_size
    for start in range(0, size, step):
        stop = min(start + step, size)
        width = stop - start if group_size <= _CHUNK else _CHUNK
        for part in range(start, stop, width):
            yield slice(part, min(part + width, stop))


def _with_errors_of_group(
    found: Measure,
    beyond: np.ndarray,
    arrays: Sequence[np.ndarray],
    rule: Format,
    inner_size: np.ndarray | None,
    reached: np.ndarray,
) -> Measure:
    """The measure if the elements ``beyond`` their tolerance may have the errors that others have at their magnitude.

    ``reached`` is the largest error in the group of each of these elements.
    """
    value, exact, *others = (item[beyond].astype(np.float64) for item in arrays)
    error, size = np.abs(value - exact), np.abs(exact)
    known = np.maximum(np.minimum(_usual_errors(arrays, rule, size), reached), _known(others, exact, size, rule))
    tolerance = _tolerance(size, rule, None if inner_size is None else inner_size[beyond], known)
    shares = error / tolerance
    worst = int(shares.argmax())
    return dataclasses.replace(
        found,
        share=float(shares[worst]),
        position=int(beyond[worst]),
        error=float(error[worst]),
        limit=float(tolerance[worst]),
    )


def _tolerance(size: np.ndarray, rule: Format, inner_size: np.ndarray | None, known: np.ndarray | None) -> np.ndarray:
    """The formula in the module's docstring; ``known`` are the errors of others."""
    tolerance = size * (rule.units * rule.epsilon)
    tolerance += rule.floor
    if not math.isfinite(float(tolerance.max())):
        tolerance[~np.isfinite(size)] = rule.floor
    if inner_size is not None:
        tolerance += _INNER_UNITS * min(rule.epsilon, _SINGLE) * np.nan_to_num(inner_size, nan=0.0, posinf=0.0)
    if known is not None:
        tolerance += rule.factor * known
    return tolerance


def group_size_of(shape: Sequence[int]) -> int:
    """How many consecutive elements of a tensor are judged by errors that any of them has.

    All elements of a small tensor; else some rows, since eager may be exact in one of them by luck, but no more than a
    sixteenth of all rows.
    """
    row = max(shape[-1], 1) if shape else 1
    rows = math.prod(shape[:-1])
    if row * rows <= _FEW:
        return max(row * rows, 1)
    most = max(rows // _GROUPS, -(-_FEW // row), 1)
    return row * next((count for count in range(min(most, rows), 0, -1) if rows % count == 0), 1)


def ordinary(value: np.ndarray) -> float:
    """The root mean square of the elements that are neither 0 nor far larger than the lower quartile."""
    size = np.abs(value[np.isfinite(value) & (value != 0)]).reshape(-1).astype(np.float64)
    if not size.size:
        return 0.0
    quartile = np.partition(size, size.size // 4)[size.size // 4]
    return float(np.sqrt(np.square(size[size <= _FAR * quartile]).mean()))


def _parts(value: np.ndarray) -> np.ndarray:
    """Complex numbers as alternating real and imaginary parts."""
    if value.dtype.kind != "c":
        value = value.astype(np.complex128)
    return np.ascontiguousarray(value).view("f4" if value.dtype.itemsize == 8 else "f8")


def _discrete(value: np.ndarray, exact: np.ndarray, *others: np.ndarray) -> Measure:
    unequal = value != exact
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return Measure()
    turned = np.logical_or.reduce([other != exact for other in others]) if others else np.zeros(value.shape, bool)
    apart = np.abs(value[unequal].astype(np.float64) - exact[unequal].astype(np.float64))
    far = max((float(np.abs(other.astype(np.float64) - exact).max()) for other in others), default=0.0)
    outside = int(np.count_nonzero(unequal & ~turned))
    limit = float(np.count_nonzero(turned)) if apart.max() <= 2 * far else 0.0
    return Measure(
        max_abs=float(apart.max()),
        max_ulp=float(differing),
        scale=float(np.abs(exact.astype(np.float64)).max()),
        share=outside / limit if limit else math.inf,
        position=int((unequal & ~turned if outside else unequal).argmax()),
        error=float(outside),
        limit=limit,
    )


def _chunk(
    value: np.ndarray,
    exact: np.ndarray,
    size: np.ndarray,
    others: Sequence[np.ndarray],
    rule: Format,
    tolerance: np.ndarray,
    start: int,
) -> tuple[Measure, np.ndarray, np.ndarray]:
    """The measure of some elements, their errors (0 if not finite), and the ratios of errors to tolerances."""
    error = _difference(value, exact)
    largest = float(error.max())
    nonfinite, where = 0, 0
    if not math.isfinite(largest):
        finite = np.isfinite(value) & np.isfinite(exact)
        wrong = _one_sided(value, exact, rule)
        for other in others:  # another right computation cannot represent it either
            leaves = np.isfinite(exact) & (np.abs(other) > rule.largest)
            wrong &= ~_one_sided(other, exact, rule) & ~(leaves & (value == np.copysign(np.inf, other)))
        nonfinite, where = int(np.count_nonzero(wrong)), int(wrong.argmax())
        error, size = np.where(finite, error, 0.0), np.where(np.isfinite(exact), size, 0.0)
        largest = float(error.max())
    scale = float(size.max())
    if largest == 0.0:
        share = math.inf if nonfinite else 0.0
        return Measure(nonfinite=nonfinite, scale=scale, share=share, position=start + where), error, error
    shares = error / tolerance
    position = int(shares.argmax())
    share, worst = float(shares[position]), float(error[position])
    nonzero = np.where(size > 0, size, np.inf)
    max_rel = float((error / nonzero).max())
    nonzero.view(np.int64)[...] &= _EXPONENT
    unit = np.maximum(nonzero, rule.smallest, out=nonzero)
    found = Measure(
        max_abs=largest,
        max_rel=max_rel,
        max_ulp=float(np.divide(error, unit, out=unit).max()) / rule.epsilon,
        nonfinite=nonfinite,
        scale=scale,
        share=math.inf if nonfinite else share,
        position=start + (where if nonfinite else position),
        error=worst,
        limit=worst / share if share else 0.0,
    )
    return found, error, shares


def _difference(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    difference = value - exact
    return np.abs(difference, out=difference)


def _one_sided(value: np.ndarray, exact: np.ndarray, rule: Format) -> np.ndarray:
    """Where a value is NaN or infinite and should not be, or the reverse."""
    finite = np.isfinite(value) & np.isfinite(exact)
    same = (value == exact) | (np.isnan(value) & np.isnan(exact))
    beyond = np.isfinite(exact) & (np.abs(exact) > rule.largest * (1 - rule.epsilon))  # infinity is its rounding
    return ~finite & ~same & ~(beyond & (value == np.copysign(np.inf, exact)))


def _known(others: Sequence[np.ndarray], exact: np.ndarray, size: np.ndarray, rule: Format) -> np.ndarray:
    """For each element, the largest error of the other computations; 0 up to a unit in the last place.

    ``size`` is the magnitude of ``exact``.
    """
    errors = [_difference(other, exact) for other in others]
    known = np.maximum.reduce(errors) if len(errors) > 1 else errors[0]
    known *= known > rule.epsilon * size
    return known if math.isfinite(float(known.max())) else np.nan_to_num(known, copy=False, nan=0.0, posinf=0.0)


def _usual_errors(arrays: Sequence[np.ndarray], rule: Format, size: np.ndarray) -> np.ndarray:
    """For each magnitude, the error that 99 % of a sample of no larger elements do not exceed in other computations;
    for the smallest quarter of magnitudes, that of this quarter."""
    step = max(arrays[0].size // _SAMPLE, 1) | 1  # odd: not the same column of each row
    _, exact, *others = (item[::step].astype(np.float64) for item in arrays)
    sizes = np.abs(exact)
    errors, bins = _known(others, exact, sizes, rule), _binary(sizes)
    order = np.lexsort((errors, bins))
    errors, bins = errors[order], bins[order]
    present, starts, counts = np.unique(bins, return_index=True, return_counts=True)
    largest = np.zeros(_BINS)
    largest[present] = errors[starts + np.ceil(counts * _USUAL).astype(int) - 1]
    largest = np.maximum.accumulate(largest)
    nonzero = bins[bins > 0]
    if nonzero.size:
        quarter = int(nonzero[(nonzero.size - 1) // 4])
        largest[: quarter + 1] = largest[quarter]
    return largest[_binary(size)]


def _binary(size: np.ndarray) -> np.ndarray:
    """The index of the power of two next to each magnitude."""
    return np.clip(np.frexp(np.nan_to_num(size, nan=0.0, posinf=0.0))[1] + _BINS // 2, 1, _BINS - 1) * (size > 0)
