"""A verdict on a value, and how it differs from the expected one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from .arrays import as_array, dense, dtype_name, same_number
from .element_records import WrongElements
from .rule import Beyond, Measure, judge
from .wrong_elements import wrong_elements


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a value with its reference."""

    complaint: str = ""  # why elements cannot be compared, such as another dtype; or how many discrete ones differ
    ours: Measure | None = None  # the value's error; ``None`` for discrete values
    eager: Measure | None = None  # eager's error against float64, if that is known
    index: tuple[int, ...] = ()  # of the element whose error is the largest multiple of its tolerance
    elements: WrongElements | None = None  # those that exceed the tolerance
    untold: int = 0  # elements that are right, and whose tolerance is as large as the value

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds the tolerance."""
        return bool(self.complaint) or (self.ours is not None and not self.ours.is_rounding)

    def __str__(self) -> str:
        if not self.is_wrong or self.complaint or self.ours is None:
            return self.complaint
        return self.ours.text(f" at element {list(self.index)}" if self.index else "")


RIGHT = Verdict()


def verdict_on(
    value: np.ndarray,
    reference: np.ndarray,
    found: Measure,
    beyond: Beyond,
    *,
    eager: Measure | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> Verdict:
    """The verdict on a value that ``rule.judge`` has measured; for ``inputs`` see ``wrong_elements``."""
    if found.is_rounding:
        return Verdict(ours=found, eager=eager)
    index = tuple(int(i) for i in np.unravel_index(found.position, value.shape))
    elements = wrong_elements(value, reference, beyond, inputs)
    if value.dtype.kind in "biu":
        return Verdict(f"{elements.wrong} of {value.size} elements differ", index=index, elements=elements)
    return Verdict("", found, eager, index, elements)


def verdict(actual: object, expected: object, dtype: torch.dtype | None = None) -> Verdict:
    """Compares a value with another computation of it, within the rounding of single operators.

    Floating-point dtypes may differ: a pass may change them within a graph, and some kernels of PyTorch return another
    dtype than their fake tensors (the statistics of a layer norm of bfloat16 with float32 weights).

    Args:
        actual: a tensor or a number.
        expected: the same as PyTorch computes it.
        dtype: whose rounding is allowed; by default the coarser of both.
    """
    dtypes = [item.dtype for item in (actual, expected) if isinstance(item, torch.Tensor)]
    complaint = difference_in_kind(actual, expected, casts=all(item.is_floating_point for item in dtypes))
    if complaint or not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return Verdict(complaint)
    value, reference = as_array(actual), as_array(expected)
    return verdict_on(value, reference, *judge(value, reference, dtype_name(dtype or max(dtypes, key=epsilon))))


def difference_in_kind(actual: object, expected: object, *, casts: bool = False) -> str:
    """How values differ in dtype or shape, or as numbers; ``""`` if their elements can be compared, or are equal.

    With ``casts``, the dtype may be another.
    """
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return "" if same_number(actual, expected) else f"{in_words(actual)} instead of {in_words(expected)}"
    ours, theirs = dense(actual), dense(expected)
    if ours.dtype != theirs.dtype and not casts:
        return f"dtype {ours.dtype} instead of {theirs.dtype}"
    return "" if ours.shape == theirs.shape else f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"


def epsilon(dtype: torch.dtype) -> float:
    """The relative rounding of a dtype; 0 for one that does not round."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def in_words(value: object) -> str:
    """A value in a message."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
