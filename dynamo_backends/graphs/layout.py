"""Classifies the memory layout of a fake or real tensor: row-major, a permutation of row-major, or neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..common.strides import ExactStrides, strides_in_order

Size: TypeAlias = "int | torch.SymInt"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor.

    Attributes:
        permutation: ``tensor.permute(permutation)`` is row-major; ``None`` if the tensor itself is, or neither is.
        strides: the strides in elements if neither is row-major (expanded, sliced), else ``None``.
        is_symbolic: neither is row-major, and the strides are unknown before the call.
    """

    permutation: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    is_symbolic: bool = False

    def exact_strides(self, tensor: torch.Tensor) -> ExactStrides | None:
        """The strides of a tensor of this layout if a new tensor would have others in dimensions of size one.

        Else ``None``; also if neither is row-major, or if the strides do not follow from symbolic sizes.
        """
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        if self.strides is not None or self.is_symbolic:
            return None
        own = tuple(range(len(sizes))) if self.permutation is None else self.permutation
        if _are_equal(strides_in_order(own, sizes), strides):
            return None
        if all(isinstance(item, int) for item in (*sizes, *strides)):
            return ExactStrides(numbers=strides)
        order = order_of(tensor, strides)
        return ExactStrides(order=order) if _are_equal(strides_in_order(order, sizes), strides) else None


ROW_MAJOR = Layout()


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor, for all values of the symbols, without new guards.

    Strides of empty tensors and of dimensions of size one are ignored; for the latter see ``Layout.exact_strides``.
    """
    sizes: list[Size] = list(tensor.shape)
    strides: list[Size] = list(tensor.stride())
    if 0 in [size for size in sizes if isinstance(size, int)] or _is_row_major(sizes, strides):
        return ROW_MAJOR
    known_strides = [stride for stride in map(hint_of, strides) if stride is not None]
    if len(known_strides) == len(strides):
        order = sorted(range(len(sizes)), key=lambda i: -known_strides[i])
        if _is_row_major([sizes[i] for i in order], [strides[i] for i in order]):
            return Layout(permutation=tuple(order))
    if any(isinstance(item, torch.SymInt) for item in [*sizes, *strides]):
        return Layout(is_symbolic=True)
    return Layout(strides=tuple(known_strides))


def significant_strides(tensor: torch.Tensor) -> list[int]:
    """The strides of a real tensor in dimensions larger than one; empty if it has no strides or elements."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return []
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def order_of(tensor: torch.Tensor, strides: Sequence[Size]) -> tuple[int, ...]:
    """The dimensions by decreasing stride, the slowest first; among equal strides, a size of one comes last."""
    hints = [hint_of(stride) for stride in strides]
    return tuple(sorted(range(len(hints)), key=lambda dim: (-(hints[dim] or 0), hint_of(tensor.shape[dim]) == 1)))


def memory_extent(tensor: torch.Tensor) -> int:
    """The number of elements from a tensor's first to its last in memory; for symbolic sizes, of their hints."""
    sizes, strides = list(map(hint_of, tensor.shape)), list(map(hint_of, tensor.stride()))
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0


def _are_equal(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether strides are equal for all values of the symbols."""
    return all(statically_known_true(a == b) for a, b in zip(first, second, strict=True))


def _is_row_major(sizes: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether a tensor is row-major; strides of dimensions of size one are ignored."""
    expected: Size = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def hint_of(value: Any) -> Any:
    """The value of a symbolic number in the first call, ``None`` if it depends on data; other values unchanged."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
