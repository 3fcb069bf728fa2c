"""Whether two runs of one graph returned the same, but for rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..layout import significant_strides
from .distance import dense, distance, is_carried, is_explained

_SAMPLE = 2**18
"""Elements of the largest tensor that is compared as a whole."""

_GROWN = 16.0
"""How many times the rounding of its arguments a graph may make itself: it has many nodes that round."""


def difference_of_results(
    expected: Sequence[object],
    actual: Sequence[object],
    moved: Sequence[object] | None = None,
    *,
    exact: Sequence[object] | None = None,
    float32_as: torch.dtype = torch.float32,
) -> str:
    """What distinguishes the results of two runs beyond rounding; empty if nothing does.

    Args:
        expected: the results of PyTorch, each as it is or a ``Sample`` of it.
        actual: the others, in the same way.
        moved: those of PyTorch on arguments that are a rounding away: how far they are from ``expected`` tells how much
            rounding grows.
        exact: those of float64, which tells what rounding accounts for; without it, half of the dtype's digits do.
        float32_as: the dtype by whose rounding float32 is judged.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, not {len(expected)}"
    largest = max((_largest(value) for value in expected), default=0.0)
    for i, (our, their) in enumerate(zip(actual, expected, strict=True)):
        ours, theirs = _like(our), _like(their)
        if ours is None or theirs is None:
            if type(our) is not type(their) or our != their:
                return f"result {i} is {our!r}, not {their!r}"
            continue
        for is_, is_to_be in ((ours.dtype, theirs.dtype), (ours.shape, theirs.shape), (ours.layout, theirs.layout)):
            if is_ != is_to_be:
                return f"result {i} is {is_}, not {is_to_be}"
        if significant_strides(ours) != significant_strides(theirs):
            return f"result {i} is laid out in another way"
        rounded_to = float32_as if ours.dtype is torch.float32 else ours.dtype
        actual_elements, expected_elements = _elements(our), _elements(their)
        if _is_near(actual_elements, expected_elements, largest, None if exact is None else exact[i], rounded_to):
            continue
        if moved is None or not _is_moved(actual_elements, expected_elements, _elements(moved[i])):
            return f"result {i} has other values"
    return ""


def _like(value: object) -> torch.Tensor | None:
    if isinstance(value, Sample):
        return value.like
    return value if isinstance(value, torch.Tensor) else None


def _elements(value: object) -> torch.Tensor:
    found = value.elements if isinstance(value, Sample) else value
    assert isinstance(found, torch.Tensor)
    return found


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some elements of a large tensor, spread evenly over its memory.

    Attributes:
        like: a tensor on ``meta`` of the same dtype, shape and strides.
        elements: one-dimensional.
    """

    like: torch.Tensor
    elements: torch.Tensor


def sampled(results: Sequence[object]) -> list[object]:
    """The results, with a ``Sample`` of each that is large."""
    return [_sample(value) if isinstance(value, torch.Tensor) else value for value in results]


def _sample(value: torch.Tensor) -> torch.Tensor | Sample:
    if value.layout is not torch.strided or value.numel() <= _SAMPLE:
        return value
    step = value.numel() // _SAMPLE | 1  # odd: not the same column of each row
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    memory = value.detach().permute(order).reshape(-1)
    return Sample(value.to("meta"), memory[::step].clone())


def _is_near(ours: torch.Tensor, theirs: torch.Tensor, largest: float, exact: object, rounded_to: torch.dtype) -> bool:
    between = distance(ours, theirs)
    if not isinstance(exact, torch.Tensor):
        return is_carried(between, rounded_to, largest)
    return is_carried(between, rounded_to, largest) or is_explained(
        distance(ours, exact), distance(theirs, exact), rounded_to, largest
    )


def _is_moved(ours: torch.Tensor, theirs: torch.Tensor, moved: torch.Tensor) -> bool:
    """Whether a difference is no more than ``_GROWN`` times what a rounding of the arguments makes."""
    between = distance(ours, theirs)
    return not between.nonfinite and between.max_abs <= _GROWN * distance(moved, theirs).max_abs


def _largest(value: object) -> float:
    value = value.elements if isinstance(value, Sample) else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return 0.0
    whole = dense(value.detach())
    whole = whole.float() if whole.itemsize == 1 else whole  # PyTorch has no largest of those
    largest = float(whole.abs().max())
    return largest if largest < float("inf") else 0.0
