"""The verdict on a value: whether its error against float64 is within the tolerance of ``measure``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from .element_records import WrongElements
from .exact import floats, is_floating
from .measure import Beyond, Measure, group_size_of
from .tensor_measure import as_array, dense, judge_tensor, measure_tensor, ordinary
from .wrong_elements import wrong_elements


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a value with its reference."""

    complaint: str = ""  # why elements cannot be compared, such as another dtype; or how many discrete ones differ
    ours: Measure | None = None  # the value's error against float64; ``None`` for discrete values
    eager: Measure | None = None  # eager's error against float64, if the value is wrong
    index: tuple[int, ...] = ()  # of the element whose error is the largest multiple of its tolerance
    is_of_size: bool = False  # whether elements were compared: dtype, shape and kind are as expected
    elements: WrongElements | None = None  # those that exceed the tolerance

    @property
    def is_wrong(self) -> bool:
        """Whether the error exceeds the tolerance."""
        return bool(self.complaint) or (self.ours is not None and not self.ours.is_rounding)

    def __str__(self) -> str:
        if not self.is_wrong or self.ours is None:
            return self.complaint
        where = f" at element {list(self.index)}" if self.index else ""
        if self.ours.nonfinite:
            made, lost = self.ours.nonfinite - self.ours.missing, self.ours.missing
            counts = (made, "wrongly NaN or infinite"), (lost, "finite and should be NaN or infinite")
            texts = [f"{n} element{'s are' if n > 1 else ' is'} {what}" for n, what in counts if n]
            return " and ".join(texts) + (", the first" if made + lost > 1 else "," * bool(where)) + where
        return f"error {self.ours.error:.3g}{where}, tolerance {self.ours.limit:.3g}"


RIGHT = Verdict()


def verdict(
    actual: object,
    eager: object,
    exact: object,
    others: Sequence[object] = (),
    *,
    group_size: int | None = None,
    inner_size: torch.Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> Verdict:
    """Compares a value with eager's and with float64.

    Floating-point dtypes may differ: a pass may change them within a graph, and some kernels of PyTorch return another
    dtype than their fake tensors (the statistics of a layer norm of bfloat16 with float32 weights).

    Args:
        actual: a tensor or a number.
        eager: the same as PyTorch computes it.
        exact: the same in float64.
        others: more right computations of it, such as float64 with random rounding.
        group_size, inner_size: see ``measure``; the default of ``group_size`` is ``group_size_of``.
        rounded_to: the dtype whose rounding is allowed; by default the coarser of ``actual`` and ``eager``.
        inputs: by name, those of an elementwise operator; the wrong elements are described with them.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)):
        return RIGHT if same_number(eager, actual) else Verdict(f"{_in_words(actual)} instead of {_in_words(eager)}")
    ours, theirs, wide = dense(actual), dense(eager), dense(exact)
    if ours.dtype != theirs.dtype and not (ours.is_floating_point() and theirs.is_floating_point()):
        return Verdict(f"dtype {ours.dtype} instead of {theirs.dtype}")
    if ours.shape != theirs.shape:
        return Verdict(f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    if torch.equal(ours, theirs):
        return RIGHT
    tensors = [dense(item) for item in others if isinstance(item, torch.Tensor) and item.shape == theirs.shape]
    if is_discrete(ours):
        found, beyond = judge_tensor(ours, theirs, *tensors)
        complaint = "" if found.is_rounding else f"{found.max_ulp:.0f} of {ours.numel()} elements differ"
        elements = _elements(found, ours, theirs, beyond, inputs)
        return Verdict(complaint, index=index_of(found, ours), is_of_size=True, elements=elements)
    coarser = rounded_to or max((ours.dtype, theirs.dtype), key=epsilon)
    found, beyond = judge_tensor(
        ours,
        wide,
        theirs,
        *tensors,
        group_size=group_size or group_size_of(theirs.shape),
        inner_size=inner_size,
        dtype=coarser,
    )
    of_eager = None if found.is_rounding else measure_tensor(theirs, wide)
    elements = _elements(found, ours, wide, beyond, inputs)
    return Verdict("", found, of_eager, index_of(found, ours), is_of_size=True, elements=elements)


def _elements(
    found: Measure,
    actual: torch.Tensor,
    expected: torch.Tensor,
    beyond: Beyond,
    inputs: Mapping[str, torch.Tensor] | None,
) -> WrongElements | None:
    if found.is_rounding:
        return None
    arrays = {name: as_array(item) for name, item in (inputs or {}).items()}
    return wrong_elements(as_array(actual), as_array(expected), beyond, arrays)


def further(value: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """For each element, the value that is further from the exact one, or is not finite.

    Of right computations, only the largest error counts, so this replaces both among ``others`` of a verdict.
    """
    if is_discrete(exact):
        return torch.where(value != exact, value, other)
    return torch.where((value - exact).abs() <= (other - exact).abs(), other, value)


_CHANGED_ELEMENTS = 0.01
_CHANGED_UNITS = 64.0


def is_changed(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether an intermediate value differs in two models that should be equal, one of which is known to be wrong.

    By more than 64 units in the last place, see ``is_near``; of discrete elements, more than one in a hundred.
    """
    if is_discrete(old):
        return float((new != old).sum()) > _CHANGED_ELEMENTS * old.numel()
    return not is_near(new, old, _CHANGED_UNITS * epsilon(old.dtype))


def is_near(value: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    """Whether elements differ by no more than ``share`` of themselves plus the tensor's ordinary elements.

    A filter where no float64 reference exists, or before one is computed. Discrete elements must be equal.
    """
    if not is_floating(other):
        return torch.equal(value, other)
    dtype = torch.complex128 if other.is_complex() else torch.float64
    wide, right = (dense(item.detach()).to(dtype) for item in (value, other))
    same = (wide == right) | (wide.isnan() & right.isnan())
    tolerance = share * (right.abs() + ordinary(right))
    return bool((same | (wide.isfinite() & right.isfinite() & ((wide - right).abs() <= tolerance))).all())


def index_of(found: Measure, value: torch.Tensor) -> tuple[int, ...]:
    """The index of the element whose error is the largest multiple of its tolerance."""
    if not value.numel():
        return ()
    position = found.position // 2 if value.is_complex() else found.position
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), value.shape))


def is_discrete(value: object) -> bool:
    """Whether a result has no floating-point values."""
    return not is_floating(value)


def largest(values: Iterable[object]) -> float:
    """The largest finite magnitude in floating-point tensors, nested or not; 0 if there is none."""
    tensors = (dense(leaf) for leaf in floats(list(values)) if leaf.numel())
    wide = (leaf.float() if leaf.itemsize == 1 else leaf for leaf in tensors)  # float8 has no ``max``
    return max((float(leaf.abs().nan_to_num(0.0, 0.0, 0.0).max()) for leaf in wide), default=0.0)


def epsilon(dtype: torch.dtype) -> float:
    """The relative rounding of a dtype; 0 for one that does not round."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def same_number(first: object, other: object) -> bool:
    """Whether two results that are not both tensors are equal. NaN equals NaN, a tensor of one element its number."""
    if any(isinstance(item, torch.Tensor) and item.numel() != 1 for item in (first, other)):
        return False
    return bool(first == other) or bool(first != first and other != other)


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
