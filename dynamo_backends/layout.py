"""How a fake tensor lies in memory: row-major, a permutation of row-major, or neither."""

from __future__ import annotations

import dataclasses

import torch


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


ROW_MAJOR = Layout()


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a fake or real tensor; symbolic sizes are judged by their hints, without adding guards."""
    sizes = [_hint(size) for size in tensor.shape]
    strides = [_hint(stride) for stride in tensor.stride()]
    if any(item is None for item in [*sizes, *strides]) or 0 in sizes:
        return ROW_MAJOR
    known = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size is not None and stride is not None]
    if _is_row_major(known):
        return ROW_MAJOR
    order = sorted(range(len(known)), key=lambda i: (-known[i][1], -known[i][0]))
    if _is_row_major([known[i] for i in order]):
        return Layout(permutation=tuple(order))
    if any(isinstance(item, torch.SymInt) for item in [*tensor.shape, *tensor.stride()]):
        return Layout(is_symbolic=True)
    return Layout(strides=tuple(stride for _, stride in known))


def _is_row_major(dims: list[tuple[int, int]]) -> bool:
    expected = 1
    for size, stride in reversed(dims):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _hint(value: int | torch.SymInt) -> int | None:
    return value if isinstance(value, int) else value.node.hint
