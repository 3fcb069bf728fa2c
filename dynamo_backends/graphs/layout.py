"""How a fake tensor lies in memory: row-major, a permutation of row-major, or neither."""

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
        permutation: ``tensor.permute(permutation)`` is row-major; ``None`` if the tensor itself is.
        strides: the strides in elements, if it is neither (expanded, sliced), else ``None``.
        is_symbolic: it is neither, and its strides are not known until the call.
    """

    permutation: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    is_symbolic: bool = False

    def exact_strides(self, tensor: torch.Tensor) -> ExactStrides | None:
        """All strides of a tensor of this layout, where those of dimensions of size one are not those of new memory in
        this order; else ``None``, as where they do not follow from symbolic sizes."""
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        if self.strides is not None or self.is_symbolic:
            return None
        own = tuple(range(len(sizes))) if self.permutation is None else self.permutation
        if _are(strides_in_order(own, sizes), strides):
            return None
        if all(isinstance(item, int) for item in (*sizes, *strides)):
            return ExactStrides(numbers=strides)
        order = order_of(tensor, strides)
        return ExactStrides(order=order) if _are(strides_in_order(order, sizes), strides) else None


ROW_MAJOR = Layout()


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a fake or real tensor.

    It holds for all sizes the graph is compiled for, and symbolic sizes get no guards. Strides that
    address no second element (of an empty tensor, of a dimension of size one) do not matter; for those of
    size one see ``Layout.exact_strides``.
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
    """The strides of a real tensor that address something; of a tensor without strides, or without elements, none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return []
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def order_of(tensor: torch.Tensor, strides: Sequence[Size]) -> tuple[int, ...]:
    """The dimensions in the order of memory, the slowest first; among equal strides, a size of one comes last."""
    hints = [hint_of(stride) for stride in strides]
    return tuple(sorted(range(len(hints)), key=lambda dim: (-(hints[dim] or 0), hint_of(tensor.shape[dim]) == 1)))


def _are(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether strides are the same, whatever symbolic sizes will be."""
    return all(statically_known_true(a == b) for a, b in zip(first, second, strict=True))


def _is_row_major(sizes: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether memory is read in order; strides of dimensions of size one do not matter."""
    expected: Size = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def hint_of(value: Any) -> Any:
    """What a number of a graph is in the first call; ``None`` if only the data will tell."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
