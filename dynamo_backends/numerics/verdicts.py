"""The one verdict on a value: whether it is as near to float64 as rounding makes a right computation of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch.utils import _pytree as pytree

from .distance import dense, distance, ordinary
from .measure import Measure, group_of


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a value compares with what it should be.

    Attributes:
        complaint: why elements cannot be compared, such as another dtype; ``""`` where they can.
        ours: the value's distance to float64; ``None`` where that is no matter of size.
        eager: the distance to float64 of the computation that it is compared with, if the value is wrong.
        index: of the element that is worst for its tolerance.
        is_of_size: whether it is a matter of elements, and of none of dtype, shape or kind.
    """

    complaint: str = ""
    ours: Measure | None = None
    eager: Measure | None = None
    index: tuple[int, ...] = ()
    is_of_size: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether it is further from float64 than rounding explains."""
        return bool(self.complaint) or (self.ours is not None and not self.ours.is_rounding)

    def __str__(self) -> str:
        if not self.is_wrong or self.ours is None:
            return self.complaint
        where = f" at element {list(self.index)}" if self.index else ""
        if self.ours.nonfinite:
            return f"{self.ours.nonfinite} elements are NaN or infinite and should not be, the first{where}"
        return f"off float64 by {self.ours.error:.3g}{where}, where rounding explains {self.ours.limit:.3g}"


RIGHT = Verdict()


def verdict(
    actual: object,
    eager: object,
    exact: object,
    others: Sequence[object] = (),
    *,
    group: int | None = None,
    inner: torch.Tensor | None = None,
    rounded_to: torch.dtype | None = None,
) -> Verdict:
    """The verdict on a value.

    The dtypes of floating-point values are no matter of it: within a graph a pass may change them, and some kernels of
    PyTorch return others than their fake tensors (the statistics of a layer norm of bfloat16 with float32 weights).

    Args:
        actual: a tensor or a number.
        eager: the same as PyTorch computes it.
        exact: the same in float64.
        others: more computations of it that are right, such as float64 with rounding at random.
        group, inner: see ``measure``; by default see ``group_of``.
        rounded_to: the dtype whose rounding is no fault; by default the coarser one of the two.
    """
    if (
        not isinstance(eager, torch.Tensor)
        or not isinstance(actual, torch.Tensor)
        or not isinstance(exact, torch.Tensor)
    ):
        return RIGHT if same_number(eager, actual) else Verdict(f"{_in_words(actual)} instead of {_in_words(eager)}")
    return _verdict(dense(actual), dense(eager), dense(exact), others, group, inner, rounded_to)


def _verdict(
    actual: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    others: Sequence[object],
    group: int | None,
    inner: torch.Tensor | None,
    rounded_to: torch.dtype | None,
) -> Verdict:
    is_rounded = actual.is_floating_point() and eager.is_floating_point()
    if actual.dtype != eager.dtype and not is_rounded:
        return Verdict(f"dtype {actual.dtype} instead of {eager.dtype}")
    if actual.shape != eager.shape:
        return Verdict(f"shape {tuple(actual.shape)} instead of {tuple(eager.shape)}")
    if torch.equal(actual, eager):
        return RIGHT
    coarser = rounded_to or max((actual.dtype, eager.dtype), key=epsilon)
    tensors = [dense(item) for item in others if isinstance(item, torch.Tensor) and item.shape == eager.shape]
    if is_discrete(actual):
        found = distance(actual, eager, *tensors)
        said = "" if found.is_rounding else f"{found.max_ulp:.0f} of {actual.numel()} elements differ"
        return Verdict(said, index=index_of(found, actual), is_of_size=True)
    ours = distance(actual, exact, eager, *tensors, group=group or group_of(eager.shape), inner=inner, dtype=coarser)
    theirs = None if ours.is_rounding else distance(eager, exact)
    return Verdict("", ours, theirs, index_of(ours, actual), is_of_size=True)


_TURNED = 0.01
_CHANGED = 64.0


def is_changed(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a value inside a model is another than in a model that should compute the same, of which one is known to
    be wrong: by 64 units at an element, or at the ordinary ones; of discrete elements, one in a hundred."""
    if is_discrete(old):
        return float((new != old).sum()) > _TURNED * old.numel()
    wide, right = (dense(item.detach()) for item in (new, old))
    same = (wide == right) | (wide.isnan() & right.isnan())
    right = right.nan_to_num(0.0, 0.0, 0.0)
    allowed = _CHANGED * epsilon(old.dtype) * (right.abs().double() + ordinary(right.abs()))
    return not bool((same | ((wide.double() - right.double()).abs() <= allowed)).all())


def index_of(found: Measure, value: torch.Tensor) -> tuple[int, ...]:
    """The index of the element that is worst for its tolerance."""
    if not value.numel():
        return ()
    position = found.position // 2 if value.is_complex() else found.position
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), value.shape))


def is_discrete(value: object) -> bool:
    """Whether a result has no floating-point values."""
    return not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex())


def largest(values: Iterable[object]) -> float:
    """The largest finite magnitude of floating-point tensors, nested or not; 0 if there is none."""
    tensors = (dense(leaf) for leaf in pytree.tree_leaves(list(values)) if not is_discrete(leaf) and leaf.numel())
    wide = (leaf.float() if leaf.itemsize == 1 else leaf for leaf in tensors)  # PyTorch has no largest of float8
    return max((float(leaf.abs().nan_to_num(0.0, 0.0, 0.0).max()) for leaf in wide), default=0.0)


def epsilon(dtype: torch.dtype) -> float:
    """The relative rounding of a dtype; 0 for one that does not round."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def same_number(first: object, other: object) -> bool:
    """Whether two results that are not both tensors are equal; NaN is NaN, and a tensor of one element its number."""
    if any(isinstance(item, torch.Tensor) and item.numel() != 1 for item in (first, other)):
        return False
    return bool(first == other) or bool(first != first and other != other)


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
