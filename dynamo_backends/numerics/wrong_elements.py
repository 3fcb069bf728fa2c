"""Describes the elements of a value that exceed their tolerance: the worst, and what all have in common.

::

    found = wrong_elements(actual, expected, beyond, {"x": x})
    found.text       # "1033 of 2048 elements exceed the tolerance, all where x is negative (1040 elements)"

``rule.judge`` decides which elements these are. Arrays are numpy's. Booleans and complex numbers have no pattern of
values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .element_records import Number, WrongElement, WrongElements
from .rule import Beyond

_SHOWN = 5
"""Elements that are listed."""

_INPUTS = 2
"""Inputs whose values are grouped."""

_MOST = 0.9
"""A pattern that a larger share of all elements has is not shown."""

_CHANCE = 1e-3
"""A pattern is shown if as many elements, taken at random, have it with a smaller probability."""

_FITTED = 1.2
"""A pattern with a number chosen to fit must hold for fewer elements than one without, by this factor."""


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """What all wrong elements have in common."""

    text: str
    share: float  # of all elements, that have it
    is_fitted: bool = False  # whether it has a number that was chosen to fit


def wrong_elements(
    actual: np.ndarray, expected: np.ndarray, beyond: Beyond, inputs: Mapping[str, np.ndarray] | None = None
) -> WrongElements:
    """Describes the elements ``beyond`` their tolerance.

    Args:
        actual: the value, of any shape and dtype.
        expected: the reference, of the same shape.
        beyond: what ``rule.judge`` returned for them.
        inputs: by name, the inputs of an elementwise operator; one that is not broadcast to the value's shape is left
            out.
    """
    positions = beyond.positions
    read = {name: item for name, item in (inputs or {}).items() if _is_broadcast(item.shape, actual.shape)}
    values = {**dict(list(read.items())[:_INPUTS]), "expected": expected}
    patterns = list(_index_patterns(positions, actual.shape))
    worst = _largest(beyond.shares)
    with np.errstate(all="ignore"):
        for name, item in values.items():
            if item.dtype.kind in "fiu":
                patterns += _value_patterns(name, item, actual.shape, positions)
        errors = _errors(actual, expected, positions[worst])
    return WrongElements(
        len(positions),
        actual.size,
        [
            WrongElement(
                place := tuple(int(i) for i in np.unravel_index(positions[i], actual.shape)),
                _number(actual[place]),
                _number(expected[place]),
                float(error / beyond.shares[i]) if math.isfinite(beyond.shares[i]) else None,
                {name: _number(np.broadcast_to(item, actual.shape)[place]) for name, item in read.items()},
            )
            for i, error in zip(worst, errors, strict=True)
        ],
        _most_telling(patterns, len(positions), actual.size),
    )


def _is_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


def _largest(shares: np.ndarray) -> list[int]:
    """The positions of the largest shares, in descending order; of equal ones, the first."""
    place = max(len(shares) - _SHOWN, 0)
    least = np.partition(shares, place)[place]
    above = np.flatnonzero(shares > least)
    ordered = above[np.argsort(-shares[above], kind="stable")]
    return [int(i) for i in (*ordered, *np.flatnonzero(shares == least)[: _SHOWN - len(above)])]


def _errors(actual: np.ndarray, expected: np.ndarray, positions: np.ndarray) -> np.ndarray:
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    return np.abs(np.subtract(actual.reshape(-1)[positions], expected.reshape(-1)[positions], dtype=wide))


def _at(item: np.ndarray, shape: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
    """The elements of an array at positions in the shape to which it is broadcast; integers in float64."""
    if item.shape == shape:
        found = item.reshape(-1)[positions]
    else:
        found = np.broadcast_to(item, shape)[np.unravel_index(positions, shape)]
    return found if found.dtype.kind == "f" else found.astype(np.float64)


def _number(element: np.generic) -> Number:
    number = element.item()
    is_finite = not isinstance(number, complex) and math.isfinite(number)
    return float(number) if is_finite else str(number)


def _value_patterns(name: str, value: np.ndarray, shape: tuple[int, ...], positions: np.ndarray) -> Iterator[_Pattern]:
    """Properties of a value at all wrong elements. Broadcasting repeats each element of it equally often."""
    wrong, size = _at(value, shape, positions), max(value.size, 1)

    def pattern(text: str, *has: np.ndarray, is_fitted: bool = False) -> _Pattern:
        return _Pattern(f"all where {text}", sum(map(np.count_nonzero, has)) / size, is_fitted)

    if np.isnan(wrong).all():
        yield pattern(f"{name} is NaN", np.isnan(value))
    elif np.isinf(wrong).all():
        yield pattern(f"{name} is infinite", np.isinf(value))
    elif not wrong.any():
        yield pattern(f"{name} is zero", value == 0)
    elif np.isfinite(wrong).all():
        low, high, least = float(wrong.min()), float(wrong.max()), float(np.abs(wrong).min())
        most = max(-low, high)
        if high < 0:
            yield pattern(f"{name} is negative", value < 0)
            yield pattern(f"{name} <= {high:.3g}", value <= high, is_fitted=True)
        elif low > 0:
            yield pattern(f"{name} is positive", value > 0)
            yield pattern(f"{name} >= {low:.3g}", value >= low, is_fitted=True)
        if least > 0:
            yield pattern(f"|{name}| >= {least:.3g}", value >= least, value <= -least, is_fitted=True)
        yield pattern(f"|{name}| <= {most:.3g}", (-most <= value) & (value <= most), is_fitted=True)


def _index_patterns(positions: np.ndarray, shape: tuple[int, ...]) -> Iterator[_Pattern]:
    """Ranges of indices with all wrong elements."""
    names = [*(f"dimension {i}, index" for i in range(len(shape) - 2)), "row", "column"]
    is_wrong = np.zeros(math.prod(shape), bool)
    is_wrong[positions] = True
    for axis, size in enumerate(shape):
        name = names[axis] if shape[1:] else "element"
        others = tuple(i for i in range(len(shape)) if i != axis)
        indices = np.flatnonzero(is_wrong.reshape(shape).any(axis=others))
        low, high = int(indices[0]), int(indices[-1])
        if low == high:
            yield _Pattern(f"all in {name} {low}", 1 / size, is_fitted=True)
        elif low > 0:
            yield _Pattern(f"all from {name} {low} on", (size - low) / size, is_fitted=True)
        else:
            yield _Pattern(f"all up to {name} {high}", (high + 1) / size, is_fitted=True)


def _most_telling(patterns: Sequence[_Pattern], wrong: int, elements: int) -> str:
    """The pattern that the fewest elements have, unless chance explains it; else an empty text."""
    free = {True: wrong - 1, False: wrong}  # a fitted number is that of one of the wrong elements
    found = [item for item in patterns if item.share <= _MOST and item.share ** free[item.is_fitted] < _CHANCE]
    best = min(found, key=lambda item: item.share * (_FITTED if item.is_fitted else 1), default=None)
    count = round(best.share * elements) if best is not None else 0
    return f"{best.text} ({count} element{'s' * (count != 1)})" if best is not None else ""
