"""Strides of results, given as numbers or by an order of dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class ExactStrides:
    """The strides of a tensor: exactly one of both is set."""

    numbers: tuple[int, ...] | None = None  # the strides in elements
    order: tuple[int, ...] | None = None  # the dimensions of a contiguous memory, the slowest first

    def of(self, sizes: Sequence[int]) -> Sequence[int]:
        """The strides for a shape."""
        if self.numbers is not None:
            return self.numbers
        assert self.order is not None
        return strides_in_order(self.order, sizes)


def strides_in_order(order: Sequence[int], sizes: Sequence[Any]) -> list[Any]:
    """The strides of newly allocated memory.

    Args:
        order: the dimensions, the slowest first.
        sizes: the shape, possibly symbolic.
    """
    strides: list[Any] = [1] * len(sizes)
    stride: Any = 1
    for dim in reversed(order):
        strides[dim] = stride
        if not (isinstance(sizes[dim], int) and sizes[dim] == 0):  # as in PyTorch
            stride = stride * sizes[dim]
    return strides


def element_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of a strided tensor, row-major: a tensor of ``uint8`` of one dimension.

    PyTorch calls a single element contiguous whatever its stride, and does not view it in another dtype.
    """
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
