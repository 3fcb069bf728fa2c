"""How far one tensor is from another, and when a backend's error is explained by eager's own.

The reference is always float64, ``exact``. A backend's result is right if it is as near to exact as eager's, up to a
factor for another order of summation and a few units of rounding.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .rounding import FACTOR, HUGE, rounding_units

_VANISHES = 1e-12
_CANCELLED_UNITS = 4.0
"""Terms that cancel leave 1e-12 of the values beside them at most in float64, and four units of these in a dtype: the
gradient of a query that attends to a single key."""

_CHUNK = 2**14
"""Elements measured at a time. PyTorch runs an operator on so few in the calling thread; on its thread pool the many
small operators of a distance take up to fifty times as long when other processes use the cores."""

_EXPONENT = 0x7FF0000000000000
"""The bits of a float64 that alone make the power of two at or below its magnitude."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """The distance of a value to a reference, over all elements.

    Attributes:
        max_abs: largest absolute error.
        max_rel: largest error relative to the reference, where that is not zero.
        rmse: root of the mean squared error.
        max_ulp: largest error in units in the last place of the value's dtype; for integers and booleans the number
            of elements that differ.
        nonfinite: elements that are NaN or infinite on one side only, or infinite with another sign.
        scale: largest ordinary magnitude in the reference, that ``max_abs`` is judged by.
    """

    max_abs: float
    max_rel: float
    rmse: float
    max_ulp: float
    nonfinite: int
    scale: float

    def as_json(self) -> dict[str, float | int | None]:
        """For ``manifest.json``; JSON has no NaN or infinity, they become ``null``."""
        fields = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


EQUAL = Distance(0.0, 0.0, 0.0, 0.0, 0, 0.0)


def dense(value: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as a dense one, a jagged one as the values of its rows one behind the other."""
    if value.is_nested:
        return value.values()
    return value if value.layout is torch.strided else value.to_dense()


def distance(value: torch.Tensor, exact: torch.Tensor) -> Distance:
    """The distance of ``value`` to ``exact``, of the same shape.

    Args:
        value: any dtype; its precision is the unit of ``max_ulp``.
        exact: float64 or complex128 for a floating-point value, else of any dtype.
    """
    value, exact = dense(value), dense(exact)
    if value.numel() == 0:
        return EQUAL
    if value.is_complex() or exact.is_complex():
        dtype = value.dtype.to_real() if value.is_complex() else value.dtype
        return _distance(
            torch.view_as_real(value.to(torch.complex128)), torch.view_as_real(exact.to(torch.complex128)), dtype
        )
    if not value.is_floating_point():
        differing = int((value != exact.to(value.dtype)).sum())
        if not differing:
            return EQUAL
        return dataclasses.replace(_distance(value, exact, torch.float64), max_ulp=float(differing))
    return _distance(value, exact, value.dtype)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The measures of some of a tensor's elements, from which those of all are made."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    ordinary: int = 0
    max_ulp: float = 0.0
    nonfinite: int = 0
    scale: float = 0.0
    huge: float = 0.0


def _distance(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> Distance:
    value, exact = value.detach().reshape(-1), exact.detach().reshape(-1)
    pairs = zip(value.split(_CHUNK), exact.split(_CHUNK), strict=True)
    parts = [_measure(ours.double(), theirs.double(), dtype) for ours, theirs in pairs]
    scale = max(part.scale for part in parts)
    return Distance(
        max_abs=max(max(part.max_abs, part.huge * max(scale, 1.0)) for part in parts),
        max_rel=max(part.max_rel for part in parts),
        rmse=math.sqrt(sum(part.squares for part in parts) / max(sum(part.ordinary for part in parts), 1)),
        max_ulp=max(part.max_ulp for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        scale=scale,
    )


def _measure(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> _Part:
    """The measures of one chunk, float64 both. Written for few passes: all values of a model go through it."""
    error = value - exact
    squares = float(torch.dot(error, error))
    if not math.isfinite(squares):
        return _measure_with_nonfinite(value, exact, dtype)
    size = exact.abs()
    smallest, largest = (float(bound) for bound in torch.aminmax(size))
    if squares == 0.0 and largest < HUGE:
        return _Part(ordinary=error.numel(), scale=largest)
    error.abs_()
    relative = error / size if smallest > 0 else torch.where(size > 0, error / size, 0.0)
    max_rel = float(relative.max())
    candidates = relative >= max_rel / 2  # a unit in the last place is between eps / 2 and eps of the size
    max_ulp = float((error[candidates] / _ulp(size[candidates], dtype)).max())
    huge = 0.0
    if largest >= HUGE:
        ordinary = size < HUGE
        huge = float(relative[~ordinary].max())
        error, size = error[ordinary], size[ordinary]
        if error.numel() == 0:
            return _Part(max_rel=max_rel, max_ulp=max_ulp, huge=huge)
        squares, largest = float(torch.dot(error, error)), float(size.max())
    return _Part(float(error.max()), max_rel, squares, error.numel(), max_ulp, 0, largest, huge)


def _measure_with_nonfinite(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> _Part:
    """Counts the elements that only one side cannot represent, and measures the others."""
    finite = value.isfinite() & exact.isfinite()
    same = (value == exact) | (value.isnan() & exact.isnan())
    nonfinite = int((~finite & ~same & ~_overflows(exact, dtype)).sum())
    if bool(finite.all()):  # finite values whose squares are not
        relative = ((value - exact) / exact).abs().nan_to_num(0.0)
        worst = float(relative.max())
        return _Part(max_rel=worst, max_ulp=worst / torch.finfo(dtype).eps, huge=worst)
    if not bool(finite.any()):
        return _Part(nonfinite=nonfinite)
    return dataclasses.replace(_measure(value[finite], exact[finite], dtype), nonfinite=nonfinite)


def _overflows(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where float64 holds a value that ``dtype`` cannot: there an infinity is the right rounding."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return exact.isfinite() & (exact.abs() > limit * (1 - torch.finfo(dtype).eps if dtype.is_floating_point else 1))


def _ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of each magnitude: the dtype's epsilon times the power of two below it."""
    info = torch.finfo(dtype if dtype.is_floating_point else torch.float64)
    power = (size.clamp_min(info.tiny).view(torch.int64) & _EXPONENT).view(torch.float64)
    return power.mul_(info.eps)


def is_explained(ours: Distance, eager: Distance, dtype: torch.dtype, beside: float = 0.0) -> bool:
    """Whether an error is no more than eager's own and rounding account for.

    Args:
        ours: the runtime's distance to exact.
        eager: eager's distance to the same exact.
        dtype: the value's dtype.
        beside: the largest magnitude of the values that are computed together with this one. Where this one is 0 but
            for float64's rounding, because terms cancel, it tells what rounding the terms have.
    """
    if ours.nonfinite > eager.nonfinite:
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return ours.max_ulp <= eager.max_ulp
    if (
        max(ours.scale, eager.scale) <= _VANISHES * beside
        and ours.max_abs <= _CANCELLED_UNITS * _epsilon(dtype) * beside
    ):
        return True
    rounding = (
        rounding_units(str(dtype).removeprefix("torch.")) * torch.finfo(dtype).eps * max(ours.scale, eager.scale)
    )
    return ours.max_abs <= FACTOR * eager.max_abs + rounding


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def is_carried(difference: Distance, dtype: torch.dtype, beside: float = 0.0) -> bool:
    """Whether a difference may be rounding that grew on its way through a graph: up to half of the dtype's digits.

    Args:
        difference: of two values, at the end of the graph.
        dtype: theirs; one that is not floating-point counts as float64.
        beside: the largest of the gradients that were computed together; a hundredth of its rounding is nothing.
    """
    if difference.nonfinite:
        return False
    epsilon = torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps
    if difference.max_abs <= epsilon * beside / 100:
        return True
    return difference.max_abs <= math.sqrt(epsilon) * (difference.scale or 1.0)


def nearer(ours: Distance, eager: Distance) -> str:
    """Which is nearer to exact: ``runtime``, ``eager`` or ``equal``."""
    if ours.max_abs == eager.max_abs:
        return "equal"
    return "runtime" if ours.max_abs < eager.max_abs else "eager"
