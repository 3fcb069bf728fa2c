"""A verdict on a value, and how it differs."""

from __future__ import annotations

import dataclasses

import torch

from .arrays import as_array, dense, dtype_name, is_equal, same_number
from .element_records import WrongElements
from .exact import is_floating
from .rule import Measure, judge
from .wrong_elements import wrong_elements


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a value with its reference."""

    complaint: str = ""  # why elements cannot be compared, such as another dtype; or how many discrete ones differ
    ours: Measure | None = None  # the value's error; ``None`` for discrete values
    eager: Measure | None = None  # eager's error against float64, if the value is wrong
    index: tuple[int, ...] = ()  # of the element whose error is the largest multiple of its tolerance
    elements: WrongElements | None = None  # those that exceed the tolerance

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds the tolerance."""
        return bool(self.complaint) or (self.ours is not None and not self.ours.is_rounding)

    def __str__(self) -> str:
        if not self.is_wrong or self.ours is None:
            return self.complaint
        return self.ours.text(f" at element {list(self.index)}" if self.index else "")


RIGHT = Verdict()


def verdict(actual: object, eager: object, exact: object, dtype: torch.dtype | None = None) -> Verdict:
    """Compares a value with eager's and, in its dtype's tolerance, with float64.

    Floating-point dtypes may differ: a pass may change them within a graph, and some kernels of PyTorch return another
    dtype than their fake tensors (the statistics of a layer norm of bfloat16 with float32 weights).

    Args:
        actual: a tensor or a number.
        eager: the same as PyTorch computes it.
        exact: the same in float64.
        dtype: whose rounding is allowed; by default the coarser of ``actual`` and ``eager``.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)):
        return RIGHT if same_number(eager, actual) else Verdict(f"{_in_words(actual)} instead of {_in_words(eager)}")
    ours, theirs = dense(actual), dense(eager)
    if ours.dtype != theirs.dtype and not (ours.is_floating_point() and theirs.is_floating_point()):
        return Verdict(f"dtype {ours.dtype} instead of {theirs.dtype}")
    if ours.shape != theirs.shape:
        return Verdict(f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    if ours.dtype == theirs.dtype and is_equal(ours, theirs):
        return RIGHT
    value, reference = as_array(ours), as_array(dense(exact) if is_floating(ours) else theirs)
    coarser = dtype or max((ours.dtype, theirs.dtype), key=epsilon)
    found, beyond = judge(value, reference, dtype_name(coarser))
    if found.is_rounding:
        return Verdict(ours=found)
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(found.position), ours.shape))
    elements = wrong_elements(value, reference, beyond)
    if not is_floating(ours):
        return Verdict(f"{found.max_ulp:.0f} of {ours.numel()} elements differ", index=index, elements=elements)
    of_eager, _ = judge(as_array(theirs), reference, dtype_name(coarser))
    return Verdict("", found, of_eager, index, elements)


def epsilon(dtype: torch.dtype) -> float:
    """The relative rounding of a dtype; 0 for one that does not round."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
