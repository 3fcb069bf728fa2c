"""Whether two runs of one graph returned the same, but for rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..graphs.layout import significant_strides
from .distance import dense, ordinary
from .verdicts import is_discrete, verdict

_SAMPLE = 2**18
"""Elements of the largest tensor that is compared as a whole."""

_UNITS = 64.0
_CARRIED = 0.01
"""Units in the last place that are near; the share that rounding carried through a graph makes at most."""


def difference_of_results(
    expected: Sequence[object],
    actual: Sequence[object],
    perturbed: Sequence[object] | None = None,
    *,
    exact: Sequence[object] | None = None,
    float32_as: torch.dtype = torch.float32,
    is_checked: bool = False,
) -> str:
    """What distinguishes the results of two runs beyond rounding; empty if nothing does.

    Args:
        expected: the results of PyTorch, each as it is or a ``Sample`` of it.
        actual: the others, in the same way.
        perturbed: those of PyTorch on arguments that are a rounding away: how far they are from ``expected`` tells how
            much rounding grows.
        exact: those of float64, which tells what rounding accounts for.
        float32_as: the dtype by whose rounding float32 is judged.
        is_checked: whether what is no rounding is compared again, with ``exact``; else half of the digits are enough.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, not {len(expected)}"
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
        unit = torch.finfo(rounded_to).eps if rounded_to.is_floating_point or rounded_to.is_complex else 0.0
        if _is_near(actual_elements, expected_elements, _UNITS * unit if is_checked else min(unit**0.5, _CARRIED)):
            continue
        found = verdict(
            actual_elements,
            expected_elements,
            expected_elements if exact is None else exact[i],
            [] if perturbed is None else [_elements(perturbed[i])],
            rounded_to=rounded_to,
        )
        if found.is_wrong:
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


def _is_near(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> bool:
    """Whether each element is within a share of itself, and of the tensor's ordinary elements."""
    if is_discrete(theirs):
        return torch.equal(ours, theirs)
    dtype = torch.complex128 if theirs.is_complex() else torch.float64
    wide, right = (dense(item.detach()).to(dtype) for item in (ours, theirs))
    same = (wide == right) | (wide.isnan() & right.isnan())
    allowed = share * (right.abs() + ordinary(right))
    return bool((same | (wide.isfinite() & right.isfinite() & ((wide - right).abs() <= allowed))).all())
