"""How far one tensor is from another, and when a backend's error is explained by eager's own.

The reference is always float64, ``exact``. A backend's result is right if it is as near to exact as eager's, up to a
factor for another order of summation and a few units of rounding.
"""

from __future__ import annotations

import dataclasses
import math

import torch

_FACTOR = 10.0
"""How much larger than eager's own error the runtime's may be: another order of summation, another approximation."""

_ROUNDING_UNITS = {torch.float16: 4.0, torch.bfloat16: 4.0}
_ROUNDING_UNITS_DEFAULT = 64.0
"""Error in units of the dtype's epsilon times the largest value that needs no explanation: where eager is exactly
right by luck, rounding elsewhere must not read as a fault. 64 units of float32 are 8e-6; a wrong operator is far off."""

_HUGE = 1e30
"""Values from here on (masks filled with the smallest float) are judged by their relative error, or their size would
excuse every error beside them."""


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


def distance(value: torch.Tensor, exact: torch.Tensor) -> Distance:
    """The distance of ``value`` to ``exact``, of the same shape.

    Args:
        value: any dtype; its precision is the unit of ``max_ulp``.
        exact: float64 or complex128 for a floating-point value, else of any dtype.
    """
    if value.numel() == 0:
        return EQUAL
    if value.is_complex() or exact.is_complex():
        dtype = value.dtype.to_real() if value.is_complex() else value.dtype
        return _distance(torch.view_as_real(value.to(torch.complex128)), torch.view_as_real(exact.to(torch.complex128)), dtype)
    if not value.is_floating_point():
        differing = int((value != exact.to(value.dtype)).sum())
        if not differing:
            return EQUAL
        return dataclasses.replace(_distance(value, exact, torch.float64), max_ulp=float(differing))
    return _distance(value, exact, value.dtype)


def _distance(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> Distance:
    value, exact = value.detach().double().reshape(-1), exact.detach().double().reshape(-1)
    same = (value == exact) | (value.isnan() & exact.isnan())
    finite = value.isfinite() & exact.isfinite()
    nonfinite = int((~finite & ~same & ~_overflows(exact, dtype)).sum())
    value, exact = value[finite], exact[finite]
    if value.numel() == 0:
        return Distance(0.0, 0.0, 0.0, 0.0, nonfinite, 0.0)
    error, size = (value - exact).abs(), exact.abs()
    ordinary = size < _HUGE
    relative = torch.where(size > 0, error / size.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    huge_error = float(relative[~ordinary].max()) if bool((~ordinary).any()) else 0.0
    scale = float(size[ordinary].max()) if bool(ordinary.any()) else 0.0
    max_abs = float(error[ordinary].max()) if bool(ordinary.any()) else 0.0
    max_abs = max(max_abs, huge_error * max(scale, 1.0))
    rmse = float(error[ordinary].square().mean().sqrt()) if bool(ordinary.any()) else 0.0
    return Distance(max_abs, float(relative.max()), rmse, float((error / _ulp(size, dtype)).max()), nonfinite, scale)


def _overflows(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where float64 holds a value that ``dtype`` cannot: there an infinity is the right rounding."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return exact.isfinite() & (exact.abs() > limit * (1 - torch.finfo(dtype).eps if dtype.is_floating_point else 1))


def _ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype if dtype.is_floating_point else torch.float64)
    exponent = torch.floor(torch.log2(size.clamp_min(info.tiny)))
    return info.eps * torch.exp2(exponent)


def is_explained(ours: Distance, eager: Distance, dtype: torch.dtype) -> bool:
    """Whether an error is no more than eager's own and rounding account for.

    Args:
        ours: the runtime's distance to exact.
        eager: eager's distance to the same exact.
        dtype: the value's dtype.
    """
    if ours.nonfinite > eager.nonfinite:
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return ours.max_ulp <= eager.max_ulp
    rounding = _ROUNDING_UNITS.get(dtype, _ROUNDING_UNITS_DEFAULT) * torch.finfo(dtype).eps * max(ours.scale, eager.scale)
    return ours.max_abs <= _FACTOR * eager.max_abs + rounding


def nearer(ours: Distance, eager: Distance) -> str:
    """Which is nearer to exact: ``runtime``, ``eager`` or ``equal``."""
    if ours.max_abs == eager.max_abs:
        return "equal"
    return "runtime" if ours.max_abs < eager.max_abs else "eager"
