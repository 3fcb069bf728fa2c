"""Whether a value is as near to float64 as another computation of it, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

from .distance import Distance, dense, distance, is_explained


class Deviation(str):
    """In words, how a value is wrong; ``""`` if it is not.

    Attributes:
        ours, theirs: where that is a matter of size, the value's distance to float64, and that of what it is compared
            with; else ``None``.
    """

    ours: Distance | None
    theirs: Distance | None

    def __new__(cls, said: str = "", ours: Distance | None = None, theirs: Distance | None = None) -> Deviation:
        found = super().__new__(cls, said)
        found.ours, found.theirs = ours, theirs
        return found


def is_discrete(value: object) -> bool:
    """Whether a result has no floating-point values."""
    return not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex())


_TIES = 0.01
"""The share of comparisons and indices that may come out otherwise in float64, where two values are equal."""


def discrete_difference(old: torch.Tensor, new: torch.Tensor, share: float = _TIES) -> str:
    """In words, how many elements of two discrete results differ; ``""`` if no more than ``share`` of them."""
    differing = int((old != new).sum())
    return f"{differing} of {old.numel()} elements differ" if differing > share * old.numel() else ""


def value_difference(old: object, exact: object, new: object, beside: float = 0.0) -> Deviation:
    """In words, why ``new`` is further from ``exact`` than ``old`` and rounding explain; ``""`` if it is not.

    The dtypes of floating-point values are no matter of this: within a graph a pass may change them, and some kernels
    of PyTorch return others than their fake tensors (the statistics of a layer norm of bfloat16 with float32 weights).
    ``beside``: see ``is_explained``.
    """
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return Deviation("" if same_number(old, new) else f"{_in_words(new)} instead of {_in_words(old)}")
    return _tensor_difference(dense(old), dense(exact), dense(new), beside)


def _tensor_difference(old: torch.Tensor, exact: torch.Tensor, new: torch.Tensor, beside: float) -> Deviation:
    if old.dtype != new.dtype and not (old.is_floating_point() and new.is_floating_point()):
        return Deviation(f"dtype {new.dtype} instead of {old.dtype}")
    if old.shape != new.shape:
        return Deviation(f"shape {tuple(new.shape)} instead of {tuple(old.shape)}")
    if torch.equal(old, new):
        return Deviation()
    if is_discrete(old):
        return Deviation(discrete_difference(old, new, share=0))
    theirs, ours = distance(old, exact), distance(new, exact)
    coarser = max((old.dtype, new.dtype), key=_epsilon)
    explained = is_explained(ours, theirs, coarser, beside)
    return Deviation() if explained else Deviation(_error(ours, theirs), ours, theirs)


def largest(values: Iterable[object]) -> float:
    """The largest finite magnitude of floating-point tensors, nested or not; 0 if there is none."""
    tensors = (leaf for leaf in pytree.tree_leaves(list(values)) if not is_discrete(leaf) and leaf.numel())
    return max((float(dense(leaf).abs().nan_to_num(0.0, 0.0, 0.0).max()) for leaf in tensors), default=0.0)


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def same_number(first: object, other: object) -> bool:
    """Whether two results that are not both tensors are equal; NaN is NaN, and a tensor of one element its number."""
    if any(isinstance(item, torch.Tensor) and item.numel() != 1 for item in (first, other)):
        return False
    return bool(first == other) or bool(first != first and other != other)


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def _error(ours: Distance, theirs: Distance) -> str:
    if ours.nonfinite > theirs.nonfinite:
        return f"{ours.nonfinite} elements are NaN or infinite and should not be"
    return f"off float64 by {ours.max_abs:.3g}, {theirs.max_abs:.3g} before, at values up to {ours.scale:.3g}"
