"""Compares the results of two runs of one graph: kinds, dtypes, shapes, layouts, and values up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..graphs.layout import significant_strides
from .verdicts import epsilon, is_near, verdict

_SAMPLE = 2**18
"""Elements of the largest tensor that is compared as a whole."""

_UNITS = 64.0
"""Units in the last place up to which results are near, if float64 decides about the others."""

_CARRIED = 0.01
"""The largest relative error that rounding may accumulate in a graph, in any dtype."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some elements of a large tensor, spread evenly over its memory; all of a small one."""

    like: torch.Tensor  # of the same dtype, shape and strides; on ``meta`` if the tensor is large
    elements: torch.Tensor  # one-dimensional if the tensor is large


def sampled(results: Sequence[object]) -> list[object]:
    """The results, with a ``Sample`` for each tensor."""
    return [_sample(value) if isinstance(value, torch.Tensor) else value for value in results]


def _sample(value: torch.Tensor) -> Sample:
    if value.layout is not torch.strided or value.numel() <= _SAMPLE:
        return Sample(value, value)
    step = value.numel() // _SAMPLE | 1  # odd: not the same column of each row
    order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    memory = value.detach().permute(order).reshape(-1)
    return Sample(value.to("meta"), memory[::step].clone())


def difference_of_results(
    expected: Sequence[object],
    actual: Sequence[object],
    perturbed: Sequence[object] | None = None,
    *,
    exact: Callable[[], Sequence[object]] | None = None,
    float32_as: torch.dtype = torch.float32,
) -> str:
    """The first difference of two runs that is not rounding; empty if there is none.

    Without ``exact``, results that agree in half of their digits are equal: rounding accumulates in a graph.

    Args:
        expected: PyTorch's results: tensors, samples of tensors, or other objects.
        actual: the others, of the same kinds.
        perturbed: PyTorch's results on arguments that differ by a rounding, which show how much that changes.
        exact: computes the float64 results, which are the reference for results that are not near.
        float32_as: the dtype whose rounding float32 may have.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, expected {len(expected)}"
    expected, actual, others = sampled(expected), sampled(actual), sampled(perturbed or [])
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(ours, Sample) or not isinstance(theirs, Sample):
            if type(ours) is not type(theirs) or ours != theirs:
                return f"result {i} is {_in_words(ours)}, expected {_in_words(theirs)}"
            continue
        for kind in ("dtype", "shape", "layout"):
            is_, expected_kind = getattr(ours.like, kind), getattr(theirs.like, kind)
            if is_ != expected_kind:
                return f"result {i} has {kind} {is_}, expected {expected_kind}"
        if significant_strides(ours.like) != significant_strides(theirs.like):
            return f"result {i} has another memory layout"
        rounded_to = float32_as if ours.like.dtype is torch.float32 else ours.like.dtype
        unit = epsilon(rounded_to)
        if is_near(ours.elements, theirs.elements, min(unit**0.5, _CARRIED) if exact is None else _UNITS * unit):
            continue
        reference = theirs.elements if exact is None else exact()[i]
        more = [item.elements for item in others[i : i + 1] if isinstance(item, Sample)]
        if verdict(ours.elements, theirs.elements, reference, more, rounded_to=rounded_to).is_wrong:
            return f"result {i} has other values"
    return ""


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.like.shape)}" if isinstance(value, Sample) else repr(value)
