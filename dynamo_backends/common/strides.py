"""The strides of results: those that follow from an order of dimensions, and those that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ExactStrides:
    """All strides of a tensor, in elements; one of both is there.

    Attributes:
        numbers: the strides.
        order: the dimensions in the order of memory, the slowest first, from which the strides follow.
    """

    numbers: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def of(self, sizes: Sequence[int]) -> Sequence[int]:
        """The strides of a tensor of some sizes."""
        if self.numbers is not None:
            return self.numbers
        assert self.order is not None
        return strides_in_order(self.order, sizes)


def strides_in_order(order: Sequence[int], sizes: Sequence[Any]) -> list[Any]:
    """The strides of new memory.

    Args:
        order: its dimensions, the slowest first.
        sizes: integers, maybe symbolic.
    """
    strides: list[Any] = [1] * len(sizes)
    stride: Any = 1
    for dim in reversed(order):
        strides[dim] = stride
        if not (isinstance(sizes[dim], int) and sizes[dim] == 0):  # as in PyTorch
            stride = stride * sizes[dim]
    return strides
