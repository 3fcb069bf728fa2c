"""The range of a tensor's elements, which of them are NaN or infinite, and how far they are off on average."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch

from .arrays import dense, format_of
from .element_records import Extent, NonfiniteElement, Number
from .exact import is_floating
from .rule import UNITS

_SHOWN = 3
"""Elements that are listed of a result with NaN or infinities."""

_MANY = 4096
"""The mean of so many random roundings is a hundredth of one."""

_SAMPLE = 2**16
"""Elements, evenly spaced, of which the mean is taken."""


def extent(value: object) -> Extent | None:
    """The extent of a tensor; ``None`` for integers and booleans, which are finite, and for anything else."""
    if not is_floating(value):
        return None
    elements = dense(value).detach()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    elif elements.itemsize == 1:
        elements = elements.float()  # float8 has no ``aminmax`` and no indexing
    if not elements.numel():
        return Extent(None, None)
    smallest, largest = map(float, torch.aminmax(elements))
    if math.isfinite(smallest) and math.isfinite(largest):  # usually: one pass; with a NaN, both are NaN
        return Extent(smallest, largest)
    finite = elements[elements.isfinite()]
    nan = int(elements.isnan().sum())
    infinite = elements.numel() - finite.numel() - nan
    if not finite.numel():
        return Extent(None, None, nan, infinite)
    smallest, largest = map(float, torch.aminmax(finite))
    return Extent(smallest, largest, nan, infinite)


def mean_difference(value: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The mean difference in units in the last place, of which none counts more than the tolerance: of right values it
    is near 0, and of many small errors of one sign it is not. ``None`` for few elements, and for discrete ones."""
    if not is_floating(value) or value.is_complex() or value.numel() < _MANY:
        return None
    step = value.numel() // _SAMPLE | 1  # odd: not the same column of each row
    ours, theirs = (dense(item).reshape(-1)[::step].float() for item in (value, expected))
    rule = format_of(value.dtype)
    return float(((ours - theirs) / (theirs * rule.epsilon)).nan_to_num_(0.0).clamp_(-UNITS, UNITS).mean())


def nonfinite_elements(result: torch.Tensor, inputs: Iterable[tuple[str, object]]) -> list[NonfiniteElement]:
    """The first elements of a real result that are NaN or infinite, NaN first."""
    if not result.is_floating_point() or result.layout is not torch.strided:
        return []
    positions = torch.cat([result.isnan().nonzero()[:_SHOWN], result.isinf().nonzero()[:_SHOWN]])[:_SHOWN]
    broadcast = {}
    for name, item in inputs:
        if isinstance(item, torch.Tensor) and not item.is_complex() and item.layout is torch.strided:
            with contextlib.suppress(RuntimeError):  # another shape: which elements count, only the operator knows
                broadcast[name] = item.expand(result.shape)
    return [
        NonfiniteElement(
            index, _number(result[index]), {name: _number(item[index]) for name, item in broadcast.items()}
        )
        for index in map(tuple, positions.tolist())
    ]


def _number(element: torch.Tensor) -> Number:
    value = float(element)
    return value if math.isfinite(value) else str(value)
