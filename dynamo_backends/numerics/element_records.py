"""Dataclasses that describe the elements of a value, as a dump stores them. ``wrong_elements`` and ``value_range`` make
them.

This module does not import numpy, so that commands that read a dump start quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Number = float | str
"""``nan``, ``inf``, ``-inf`` and complex numbers are texts, for JSON."""


@dataclasses.dataclass(frozen=True)
class WrongElement:
    """An element that exceeds its tolerance."""

    index: Sequence[int]
    actual: Number
    expected: Number
    limit: float | None  # the tolerance; ``None`` if elements must be equal
    inputs: Mapping[str, Number]  # by name, the elements that an elementwise operator computes it from


@dataclasses.dataclass(frozen=True)
class WrongElements:
    """The elements of a value that exceed their tolerance."""

    wrong: int  # how many
    elements: int  # of the value
    worst: Sequence[WrongElement]  # those with the largest multiple of their tolerance
    pattern: str  # what all have in common, or ``""``

    @property
    def text(self) -> str:
        """How many, and what all have in common."""
        counted = f"{self.wrong} of {self.elements} elements {'exceeds' if self.wrong == 1 else 'exceed'} the tolerance"
        return f"{counted}, {self.pattern}" if self.pattern else counted


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


@dataclasses.dataclass(frozen=True)
class NonfiniteElement:
    """An element that is NaN or infinite, and the elements with its index of the inputs that have, or are broadcast to,
    the result's shape."""

    index: Sequence[int]
    value: Number
    inputs: Mapping[str, Number]  # by name
