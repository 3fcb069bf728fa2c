"""The range of a tensor's elements, and which of them are NaN or infinite."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable

import torch

from .arrays import dense
from .exact import is_floating

_SHOWN = 3
"""Elements that are listed of a result with NaN or infinities."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """The range of a floating-point tensor, or of the real and imaginary parts of a complex one."""

    smallest: float | None  # of the finite elements, as ``largest``; ``None`` if there are none
    largest: float | None
    nan: int = 0  # how many elements are NaN
    infinite: int = 0  # how many elements are infinite

    @property
    def is_finite(self) -> bool:
        return not self.nan and not self.infinite


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


def nonfinite_elements(result: torch.Tensor, inputs: Iterable[tuple[str, object]]) -> list[dict[str, object]]:
    """The first elements of a real result that are NaN or infinite, NaN first, for a JSON file.

    For each element its ``index``, its ``value``, and of the ``inputs`` that have the result's shape or are broadcast
    to it, the elements at this index, by name. ``nan``, ``inf`` and ``-inf`` are texts.
    """
    if not result.is_floating_point() or result.layout is not torch.strided:
        return []
    positions = torch.cat([result.isnan().nonzero()[:_SHOWN], result.isinf().nonzero()[:_SHOWN]])[:_SHOWN]
    broadcast = {}
    for name, item in inputs:
        if isinstance(item, torch.Tensor) and not item.is_complex() and item.layout is torch.strided:
            with contextlib.suppress(RuntimeError):  # another shape: which elements count, only the operator knows
                broadcast[name] = item.expand(result.shape)
    return [
        {
            "index": list(index),
            "value": _number(result[index]),
            "inputs": {name: _number(item[index]) for name, item in broadcast.items()},
        }
        for index in map(tuple, positions.tolist())
    ]


def _number(element: torch.Tensor) -> float | str:
    value = float(element)
    return value if math.isfinite(value) else str(value)
