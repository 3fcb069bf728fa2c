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

FLOAT64_ROUNDING = 1e-14
"""Relative to the largest value: what another order of operations may change in float64. In a deep graph a right pass
may change more, and then the nodes are looked at; a fault may be damped to little more."""

_CHUNK = 2**15
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
    """A sparse tensor as a dense one, a jagged one as the values of its rows one behind the other; no conjugate bit."""
    if value.is_nested:
        return value.values()
    return value.resolve_conj() if value.layout is torch.strided else value.to_dense()


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


def same_elements(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and elements; NaN is NaN."""
    if torch.equal(first, other):
        return True
    is_float = first.is_floating_point() or first.is_complex()
    return is_float and first.shape == other.shape and bool(((first == other) | (first.isnan() & other.isnan())).all())


def _distance(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> Distance:
    """The distance of real values, whose dtype is ``dtype``; measured in parts."""
    value, exact = value.detach().reshape(-1), exact.detach().reshape(-1)
    parts = [_measure(*part, dtype) for part in zip(value.split(_CHUNK), exact.split(_CHUNK), strict=True)]
    scale = max(part.scale for part in parts)
    return Distance(
        max_abs=max(max(part.max_abs, part.huge * max(scale, 1.0)) for part in parts),
        max_rel=max(part.max_rel for part in parts),
        rmse=math.sqrt(sum(part.squares for part in parts) / max(sum(part.ordinary for part in parts), 1)),
        max_ulp=max(part.max_ulp for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        scale=scale,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """The measures of some of a tensor's elements, from which those of all are made.

    ``huge`` is the largest relative error of the values from ``HUGE`` on; the others count as ``ordinary``.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    ordinary: int = 0
    max_ulp: float = 0.0
    nonfinite: int = 0
    scale: float = 0.0
    huge: float = 0.0


def _measure(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> _Part:
    """The measures of one chunk, in few passes: all values of a model go through it."""
    value, exact = value.double(), exact.double()
    error, size = torch.sub(value, exact).abs_(), exact.abs()
    max_abs, scale = float(error.amax()), float(size.amax())
    if not math.isfinite(max_abs):
        return _measure_with_nonfinite(value, exact, dtype)
    if max_abs == 0.0 and scale < HUGE:
        return _Part(ordinary=error.numel(), scale=scale)
    relative = error / size
    max_rel = float(relative.amax())
    if not math.isfinite(max_rel):  # a quotient by zero
        relative.masked_fill_(size == 0, 0.0)
        max_rel = float(relative.amax())
    info = torch.finfo(dtype if dtype.is_floating_point else torch.float64)
    unit = size.clamp(min=info.tiny)
    unit.view(torch.int64).bitwise_and_(_EXPONENT)  # the power of two at or below each magnitude
    # a unit in the last place of zero is no measure of an error
    max_ulp = float(torch.div(size, unit, out=unit).mul_(relative).amax()) / info.eps
    huge = 0.0
    if scale >= HUGE:
        ordinary = size < HUGE
        huge = float(relative[~ordinary].amax())
        error, size = error[ordinary], size[ordinary]
        max_abs, scale = (float(item.amax()) if item.numel() else 0.0 for item in (error, size))
    return _Part(max_abs, max_rel, float(torch.dot(error, error)), error.numel(), max_ulp, 0, scale, huge)


def _measure_with_nonfinite(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> _Part:
    """Counts the elements that only one side can represent, and measures the others."""
    finite = value.isfinite() & exact.isfinite()
    if bool(finite.all()):  # their difference is not
        return _Part(max_rel=math.inf, max_ulp=math.inf, huge=math.inf)
    same = (value == exact) | (value.isnan() & exact.isnan())
    nonfinite = int((~finite & ~same & ~_overflows(exact, dtype)).sum())
    if not bool(finite.any()):
        return _Part(nonfinite=nonfinite)
    return dataclasses.replace(_measure(value[finite], exact[finite], dtype), nonfinite=nonfinite)


def _overflows(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where float64 holds a value that ``dtype`` cannot: there an infinity is the right rounding."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return exact.isfinite() & (exact.abs() > limit * (1 - torch.finfo(dtype).eps if dtype.is_floating_point else 1))


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
    return ours.max_abs <= allowed_error(eager, dtype, max(ours.scale, eager.scale))


def allowed_error(eager: Distance, dtype: torch.dtype, scale: float) -> float:
    """The largest absolute error that needs no explanation.

    Args:
        eager: the distance to exact that rounding is known to make.
        dtype: of the value, floating-point or complex.
        scale: the largest ordinary magnitude of the value.
    """
    info = torch.finfo(dtype)
    rounding = (
        rounding_units(str(dtype).removeprefix("torch.")) * info.eps * max(scale, info.tiny)
    )  # denormals are even
    return FACTOR * eager.max_abs + rounding


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
