"""The range of a value's elements, and how many are NaN or infinite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from .distance import dense


@dataclasses.dataclass(frozen=True)
class Extent:
    """What the elements of a floating-point or complex tensor are.

    Attributes:
        smallest, largest: of the finite elements; ``None`` if there are none. Of the parts of complex ones.
        nan: elements that are NaN.
        infinite: elements that are infinite.
    """

    smallest: float | None
    largest: float | None
    nan: int = 0
    infinite: int = 0

    @property
    def is_finite(self) -> bool:
        return not self.nan and not self.infinite

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def extent(value: object) -> Extent | None:
    """The extent of a tensor; ``None`` of anything else, and of integers and booleans, which are all finite."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    dense_value = dense(value).detach()
    if dense_value.dtype.is_floating_point and dense_value.dtype.itemsize == 1:
        dense_value = dense_value.float()  # PyTorch has no minimum, and no selection, of float8
    return _extent(torch.view_as_real(dense_value.resolve_conj()) if value.is_complex() else dense_value)


def _extent(value: torch.Tensor) -> Extent:
    if not value.numel():
        return Extent(None, None)
    smallest, largest = (float(bound) for bound in torch.aminmax(value))
    if math.isfinite(smallest) and math.isfinite(largest):  # of most values: one pass; a NaN is both bounds
        return Extent(smallest, largest)
    finite = value[value.isfinite()]
    nan = int(value.isnan().sum())
    infinite = value.numel() - finite.numel() - nan
    if not finite.numel():
        return Extent(None, None, nan, infinite)
    smallest, largest = (float(bound) for bound in torch.aminmax(finite))
    return Extent(smallest, largest, nan, infinite)


@dataclasses.dataclass(frozen=True)
class Element:
    """One element of a result, and what it was computed of.

    Attributes:
        index: where it is.
        value: it.
        inputs: for each input that has as many elements, or is broadcast to the result, its element there, by name.
    """

    index: tuple[int, ...]
    value: float
    inputs: dict[str, float]

    def as_json(self) -> dict[str, object]:
        """JSON has no NaN or infinity: ``nan``, ``inf`` and ``-inf`` are texts."""
        inputs = {name: number(value) for name, value in self.inputs.items()}
        return {"index": list(self.index), "value": number(self.value), "inputs": inputs}


def number(value: float) -> float | str:
    """A number for JSON; a text where it is NaN or infinite."""
    return value if math.isfinite(value) else str(value)


def nonfinite_elements(result: torch.Tensor, inputs: Iterable[tuple[str, object]], most: int = 3) -> list[Element]:
    """The first elements of a real result that are NaN or infinite; NaN first.

    Args:
        result: of any shape.
        inputs: what it was computed of, each with its name.
        most: how many elements.
    """
    if not result.is_floating_point() or result.layout is not torch.strided:
        return []
    found = torch.cat([result.isnan().nonzero()[:most], result.isinf().nonzero()[:most]])[:most]
    broadcast = []
    for name, item in inputs:
        if not isinstance(item, torch.Tensor) or item.is_complex() or item.layout is not torch.strided:
            continue
        try:
            broadcast.append((name, item.expand(result.shape)))
        except RuntimeError:  # of another shape: which of its elements count, only the operator knows
            continue
    elements = []
    for row in found.tolist():
        index = tuple(row)
        elements.append(Element(index, float(result[index]), {name: float(item[index]) for name, item in broadcast}))
    return elements
