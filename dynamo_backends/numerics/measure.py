"""The error of computed numbers against a reference, and the tolerance for rounding, element by element.

::

    found = measure(value, exact, "float32", others=[eager])
    found.max_abs, found.share          # the largest error; the largest ratio of an error to its tolerance
    found.is_rounding                   # share <= 1
    found, beyond = judge(value, exact, "float32")
    beyond.positions                    # the elements with a share above 1

The tolerance of element i is

    units * epsilon * |exact_i|  +  factor * (the largest error of ``others`` at i)  +  4 * epsilon of float32 * inner_i
    +  floor

(epsilon of float64 for float64), where inner_i is ``inner_size``. ``Format`` has units, factor and floor.

``others`` are right computations, such as eager's, or float64 with inputs that are perturbed by a unit of rounding.
Their errors count if they exceed a unit in the last place. The tolerance does not depend on the size of other elements:
an outlier, or a mask of -1e9, hides no error.

Arrays are numpy's, or PyTorch's tensors, which are measured by PyTorch's operators: it uses all cores, and numpy's one
thread is slowed down by PyTorch's other threads, which wait busily. This file needs only numpy, and is copied into each
``repro.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = Any  # np.ndarray or torch.Tensor


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

_CHUNK = 2**16
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
        error, limit: the error and the tolerance of that element; the error is infinite if the share is.
        missing: how many of ``nonfinite`` are finite in the value.
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
    missing: int = 0

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

    def with_tolerance_of(self, other: Measure) -> Measure:
        """This measure, with the share of the tolerance that another reference gives."""
        share, position, error, limit = other.share, other.position, other.error, other.limit
        return dataclasses.replace(self, share=share, position=position, error=error, limit=limit)

    def as_json(self) -> dict[str, float | int | None]:
        """For a JSON file, which has no NaN and infinity: they become ``null``."""
        fields = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


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


def measure(
    value: Array,
    exact: Array,
    dtype: str,
    others: Sequence[Array] = (),
    *,
    inner_size: Array | None = None,
    group_size: int = 1,
) -> Measure:
    """Measures a value; the arguments are those of ``judge``."""
    return judge(value, exact, dtype, others, inner_size=inner_size, group_size=group_size)[0]


def judge(
    value: Array,
    exact: Array,
    dtype: str,
    others: Sequence[Array] = (),
    *,
    inner_size: Array | None = None,
    group_size: int = 1,
) -> tuple[Measure, Beyond]:
    """Measures a value, and finds the elements beyond their tolerance.

    Args:
        value: any dtype of numpy, or a tensor on the CPU with a floating-point or complex dtype.
        exact: the reference, of the same shape; in float64 for floating-point values.
        dtype: the name of the dtype whose rounding is allowed.
        others: results of right computations.
        inner_size: for each element, the magnitude of numbers inside its computation, which is done in float32.
        group_size: how many consecutive elements have rounding errors of one size: those of a row, or all. The error
            of a single element is chance. The error of ``others`` that counts for an element is then the one that 99 %
            of all elements that are no larger, or are among the smallest quarter, do not exceed, but no more than the
            largest in the group.
    """
    if "complex" in str(value.dtype) + str(exact.dtype):
        value, exact, *others = (_parts(item) for item in (value, exact, *others))
        inner_size, group_size = None if inner_size is None else _pairs(inner_size, inner_size), 2 * group_size
        dtype = _dtype_of_parts(dtype)
        found, beyond = judge(value, exact, dtype, others, inner_size=inner_size, group_size=group_size)
        positions, starts = np.unique(beyond.positions // 2, return_index=True)
        return found, Beyond(positions, np.maximum.reduceat(beyond.shares, starts) if len(starts) else beyond.shares)
    value, exact, *others = (item.reshape(-1) for item in (value, exact, *others))
    if not len(value):
        return Measure(), _NONE
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        return _discrete(value, exact, *others)
    inner_size = None if inner_size is None else inner_size.reshape(-1)
    return _judge_each([value], exact, others, _rule(dtype), inner_size, group_size)[0][0]


def measure_with_others(
    values: Sequence[Array], exact: Array, dtype: str, others: Sequence[Array], *, group_size: int = 1
) -> tuple[list[Measure], list[Measure]]:
    """Measures floating-point or complex values and ``others`` against one reference, in one walk over it.

    The arguments are as for ``judge``. Others are right by definition: their measures have no share of a tolerance.
    """
    if "complex" in str(exact.dtype):
        exact, group_size, dtype = _parts(exact), 2 * group_size, _dtype_of_parts(dtype)
        values, others = ([_parts(item) for item in items] for items in (values, others))
    values, others = ([item.reshape(-1) for item in items] for items in (values, others))
    exact = exact.reshape(-1)
    if not len(exact):
        return [Measure() for _ in values], [Measure() for _ in others]
    judged, of_others = _judge_each(values, exact, others, _rule(dtype), None, group_size, with_others=True)
    return [found for found, _ in judged], of_others


_NONE = Beyond(np.zeros(0, np.int64), np.zeros(0))


def _library(array: Array) -> Any:
    """``numpy`` or ``torch``."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _float64(array: Array) -> Array:
    library = _library(array)
    return library.asarray(array, dtype=library.float64)


def _rule(dtype: str) -> Format:
    return FORMATS.get(dtype, FORMATS["float64"])


def _judge_each(
    values: Sequence[Array],
    exact: Array,
    others: Sequence[Array],
    rule: Format,
    inner_size: Array | None,
    group_size: int,
    *,
    with_others: bool = False,
) -> tuple[list[tuple[Measure, Beyond]], list[Measure]]:
    """The measures of values, with the elements beyond their tolerance; and the measures of others, if wanted."""
    library, size = _library(exact), len(exact)
    sums, of_others = ([_Total() for _ in items] for items in (values, others))
    reached = library.zeros(size // group_size + 1, dtype=library.float64)  # the largest error of each group
    with np.errstate(all="ignore"):
        for place in _chunks(size, group_size):
            inside = None if inner_size is None else inner_size[place]
            part = _Part(place.start, exact[place], [other[place] for other in others], rule, inside)
            if values and group_size > 1 and part.known is not None:
                first, width = place.start // group_size, min(group_size, len(part.known))
                largest = library.amax(part.known.reshape(-1, width), 1)
                groups = slice(first, first + len(largest))
                reached[groups] = library.maximum(reached[groups], largest)
            for value, total in zip(values, sums, strict=True):
                part.add(value[place], total)
            if with_others:
                for i, total in enumerate(of_others):
                    part.add_other(i, total)
        judged = []
        for value, total in zip(values, sums, strict=True):
            found, beyond = total.result()
            if len(beyond.positions) and group_size > 1 and others:
                arrays = [value, exact, *others]
                found, beyond = _with_errors_of_group(found, beyond, arrays, rule, inner_size, reached, group_size)
            judged.append((found, beyond))
    return judged, [total.result()[0] for total in of_others] if with_others else []


class _Total:
    """The measure of all elements, from those of their parts."""

    def __init__(self) -> None:
        self.share = -1.0
        self._found: list[Measure] = []
        self._beyond = [_NONE]
        self._squares, self._count = 0.0, 0

    def add(self, found: Measure, error: Array) -> None:
        """Adds the measure and the errors of a part."""
        self._squares += float(_library(error).dot(error, error))
        self._count += len(error)
        self._found.append(found)
        self.share = max(self.share, found.share)

    def add_beyond(self, start: int, shares: Array) -> None:
        """Adds the elements of the part at ``start`` that have a share above 1."""
        positions = _library(shares).where(shares > 1.0)[0]
        self._beyond.append(Beyond(np.asarray(start + positions), np.asarray(shares[positions])))

    def result(self) -> tuple[Measure, Beyond]:
        found = self._found
        together = dataclasses.replace(
            max(found, key=lambda one: one.share),
            max_abs=max(one.max_abs for one in found),
            max_rel=max(one.max_rel for one in found),
            max_ulp=max(one.max_ulp for one in found),
            nonfinite=sum(one.nonfinite for one in found),
            missing=sum(one.missing for one in found),
            scale=max(one.scale for one in found),
            rmse=math.sqrt(self._squares / max(self._count, 1)),
        )
        positions, shares = ([getattr(item, name) for item in self._beyond] for name in ("positions", "shares"))
        return together, Beyond(np.concatenate(positions), np.concatenate(shares))


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
    beyond: Beyond,
    arrays: Sequence[Array],
    rule: Format,
    inner_size: Array | None,
    reached: Array,
    group_size: int,
) -> tuple[Measure, Beyond]:
    """The same if the elements ``beyond`` their tolerance may have the errors that others have at their magnitude.

    ``reached`` is the largest error of each group. The arrays of ``beyond`` are overwritten.
    """
    usual, count = _usual_errors(arrays, rule), 0
    worst = dataclasses.replace(found, share=-1.0)
    for start in range(0, len(beyond.positions), _CHUNK):
        at = beyond.positions[start : start + _CHUNK]
        value, exact, *others = (np.asarray(_float64(item[at])) for item in arrays)
        error, size = np.abs(value - exact), np.abs(exact)
        known = np.minimum(usual[_binary(size)], np.asarray(reached[at // group_size]))
        known = np.maximum(known, _known([_error(other, exact) for other in others], size, rule))
        tolerance = _tolerance(size, rule, None if inner_size is None else np.asarray(inner_size[at]), known)
        shares = np.where(np.isfinite(error), error / tolerance, math.inf)
        i = int(shares.argmax())
        if shares[i] > worst.share:
            share, wrong, limit = float(shares[i]), float(error[i]), float(tolerance[i])
            worst = dataclasses.replace(found, share=share, position=int(at[i]), error=wrong, limit=limit)
        kept = shares > 1.0
        place = slice(count, count := count + int(np.count_nonzero(kept)))
        beyond.positions[place], beyond.shares[place] = at[kept], shares[kept]
    return found if found.nonfinite else worst, Beyond(beyond.positions[:count], beyond.shares[:count])


def _tolerance(size: Array, rule: Format, inner_size: Array | None, known: Array | None) -> Array:
    """The formula in the module's docstring; ``known`` are the errors of others."""
    library = _library(size)
    tolerance = size * (rule.units * rule.epsilon)
    tolerance += rule.floor
    if not math.isfinite(float(tolerance.max())):
        tolerance[~library.isfinite(size)] = rule.floor
    if inner_size is not None:
        finite = library.nan_to_num(_float64(inner_size), nan=0.0, posinf=0.0)
        tolerance += _INNER_UNITS * min(rule.epsilon, _SINGLE) * finite
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


def _dtype_of_parts(dtype: str) -> str:
    """The dtype of a complex number's parts."""
    return dtype.replace("complex64", "float32").replace("complex128", "float64")


def _parts(value: Array) -> Array:
    """Complex numbers as alternating real and imaginary parts."""
    library = _library(value)
    value = library.asarray(value, dtype=library.complex128)
    return _pairs(value.real, value.imag)


def _pairs(first: Array, second: Array) -> Array:
    """The elements of two arrays by turns."""
    return _library(first).stack([first, second], -1).reshape(-1)


def _discrete(value: np.ndarray, exact: np.ndarray, *others: np.ndarray) -> tuple[Measure, Beyond]:
    unequal = value != exact
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return Measure(), _NONE
    turned = np.logical_or.reduce([other != exact for other in others]) if others else np.zeros(value.shape, bool)
    apart = np.abs(value[unequal].astype(np.float64) - exact[unequal].astype(np.float64))
    far = max((float(np.abs(other.astype(np.float64) - exact).max()) for other in others), default=0.0)
    outside = int(np.count_nonzero(unequal & ~turned))
    limit = float(np.count_nonzero(turned)) if apart.max() <= 2 * far else 0.0
    positions = np.flatnonzero(unequal & ~turned if outside else unequal)
    found = Measure(
        max_abs=float(apart.max()),
        max_ulp=float(differing),
        scale=float(np.abs(exact.astype(np.float64)).max()),
        share=outside / limit if limit else math.inf,
        position=int(positions[0]),
        error=float(outside),
        limit=limit,
    )
    return found, _NONE if found.is_rounding else Beyond(positions, np.full(len(positions), math.inf))


class _Part:
    """Consecutive elements of a reference, with what the measures of all values need."""

    def __init__(
        self, start: int, exact: Array, others: Sequence[Array], rule: Format, inner_size: Array | None
    ) -> None:
        self._start, self._rule = start, rule
        self._exact = exact = _float64(exact)
        self._others = [_float64(other) for other in others]
        library, size = _library(exact), abs(exact)
        self._errors = [_error(other, exact) for other in self._others]
        self._magnitude, self._inner_size = size, inner_size
        self._scale, self._ratios = float(size.max()), library.empty_like(exact)
        if not math.isfinite(self._scale):
            size = library.where(library.isfinite(exact), size, 0.0)
            self._scale = float(size.max())
        # where the reference is 0, a relative error is 0
        self._size = size if float(size.min()) > 0.0 else library.where(size > 0, size, math.inf)
        unit = library.bitwise_and(self._size.view(library.int64), _EXPONENT).view(library.float64)
        self._unit = library.clip(unit, rule.smallest, None, out=unit)

    @functools.cached_property
    def known(self) -> Array | None:
        """The errors of others, see ``_known``."""
        return _known(self._errors, self._magnitude, self._rule) if self._errors else None

    @functools.cached_property
    def _tolerance(self) -> Array:
        return _tolerance(self._magnitude, self._rule, self._inner_size, self.known)

    def add(self, value: Array, total: _Total) -> None:
        """Adds the measure of a value to its total, and the elements beyond their tolerance."""
        value = _float64(value)
        found, error, positions = self._without_share(value, _error(value, self._exact), self._others)
        shares = _library(error).divide(error, self._tolerance, out=self._ratios)
        share = float(shares.max())
        if found.nonfinite:
            shares[positions] = share = math.inf
        if share > total.share:  # only the worst element of all parts has a position
            worst = int(shares.argmax())
            wrong = math.inf if found.nonfinite else float(error[worst])
            limit = float(self._tolerance[worst]) if wrong else 0.0
            found = dataclasses.replace(found, share=share, position=self._start + worst, error=wrong, limit=limit)
        total.add(found, error)
        if share > 1.0:
            total.add_beyond(self._start, shares)

    def add_other(self, i: int, total: _Total) -> None:
        """Adds the measure of one of the others to its total."""
        found, error, _ = self._without_share(self._others[i], self._errors[i], ())
        total.add(found, error)

    def _without_share(self, value: Array, error: Array, others: Sequence[Array]) -> tuple[Measure, Array, Any]:
        """The measure but for the tolerance, the errors, and the positions that are NaN or infinite on one side only.

        ``others`` excuse values that they cannot represent either.
        """
        library, exact, rule = _library(value), self._exact, self._rule
        largest = float(error.max())
        nonfinite, missing, positions = 0, 0, slice(0)
        if not math.isfinite(largest):
            finite = library.isfinite(value) & library.isfinite(exact)
            wrong = _one_sided(value, exact, rule)
            for other in others:
                leaves = library.isfinite(exact) & (library.abs(other) > rule.largest)
                wrong &= ~_one_sided(other, exact, rule) & ~(leaves & (value == _infinite(other)))
            positions = library.where(wrong)[0]
            nonfinite = len(positions)
            missing = int(library.isfinite(value[positions]).sum())
            error = library.where(finite, error, 0.0)
            largest = float(error.max())
        ratios = self._ratios
        found = Measure(
            max_abs=largest,
            max_rel=float(library.divide(error, self._size, out=ratios).max()),
            max_ulp=float(library.divide(error, self._unit, out=ratios).max()) / rule.epsilon,
            nonfinite=nonfinite,
            missing=missing,
            scale=self._scale,
        )
        return found, error, positions


def _error(value: Array, exact: Array) -> Array:
    library = _library(value)
    error = value - exact
    return library.abs(error, out=error)


def _infinite(value: Array) -> Array:
    """Infinity with the sign of each element."""
    return _library(value).where(value < 0, -math.inf, math.inf)


def _one_sided(value: Array, exact: Array, rule: Format) -> Array:
    """Where a value is NaN or infinite and should not be, or the reverse."""
    library = _library(value)
    finite = library.isfinite(value) & library.isfinite(exact)
    same = (value == exact) | (library.isnan(value) & library.isnan(exact))
    is_beyond = library.abs(exact) > rule.largest * (1 - rule.epsilon)  # infinity is its rounding
    return ~finite & ~same & ~(library.isfinite(exact) & is_beyond & (value == _infinite(exact)))


def _known(errors: Sequence[Array], size: Array, rule: Format) -> Array:
    """For each element, the largest of the errors of other computations; 0 up to a unit in the last place.

    ``size`` is the magnitude of the reference.
    """
    library = _library(size)
    known = functools.reduce(library.maximum, errors)
    counts = rule.epsilon * size  # 1 where the error is larger, else 0; faster than a comparison
    counts = library.sign(library.subtract(known, counts, out=counts), out=counts)
    known = known * library.clip(counts, 0.0, None, out=counts)
    return known if math.isfinite(float(known.max())) else library.nan_to_num(known, nan=0.0, posinf=0.0)


def _usual_errors(arrays: Sequence[Array], rule: Format) -> np.ndarray:
    """By ``_binary`` of a magnitude, the error that 99 % of a sample of no larger elements do not exceed in other
    computations; for the smallest quarter of magnitudes, that of this quarter."""
    step = max(len(arrays[0]) // _SAMPLE, 1) | 1  # odd: not the same column of each row
    _, exact, *others = (np.asarray(_float64(item[::step])) for item in arrays)
    sizes = np.abs(exact)
    errors, bins = _known([_error(other, exact) for other in others], sizes, rule), _binary(sizes)
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
    return largest


def _binary(size: np.ndarray) -> np.ndarray:
    """The index of the power of two next to each magnitude."""
    return np.clip(np.frexp(np.nan_to_num(size, nan=0.0, posinf=0.0))[1] + _BINS // 2, 1, _BINS - 1) * (size > 0)
