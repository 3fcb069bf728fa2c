"""``measure`` for tensors, which share memory with numpy's arrays where possible."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .measure import FORMATS, Beyond, Format, Measure, judge, measure_with_others
from .measure import ordinary as ordinary_of_array

FLOAT64_ROUNDING = 1e-14
"""The error, relative to the largest value, that another order of operations may cause in float64. In a deep graph a
right pass may exceed it; then the nodes are compared. A fault may be damped to little more."""


def dense(value: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as a dense one, a jagged one as its concatenated rows; without a conjugate bit."""
    if value.is_nested:
        return value.values()
    return value.resolve_conj() if value.layout is torch.strided else value.to_dense()


def _plain(value: torch.Tensor) -> torch.Tensor:
    return dense(value).detach().resolve_neg().cpu()


def as_array(value: torch.Tensor) -> np.ndarray:
    """A tensor's elements; dtypes that numpy does not have, such as bfloat16, in float32."""
    value = _plain(value)
    if value.dtype is torch.bool:
        return np.from_dlpack(value.contiguous().view(torch.uint8)).view(bool)
    is_known = value.dtype in (torch.float16, torch.float32, torch.float64) or not value.is_floating_point()
    if value.dtype is torch.complex32:
        value = value.to(torch.complex64)
    return np.from_dlpack((value if is_known else value.float()).contiguous())


def measure_tensor(
    value: torch.Tensor,
    exact: torch.Tensor,
    *others: torch.Tensor,
    inner_size: torch.Tensor | None = None,
    group_size: int = 1,
    dtype: torch.dtype | None = None,
) -> Measure:
    """The error of ``value`` against ``exact``, see ``judge_tensor``."""
    return judge_tensor(value, exact, *others, inner_size=inner_size, group_size=group_size, dtype=dtype)[0]


def judge_tensor(
    value: torch.Tensor,
    exact: torch.Tensor,
    *others: torch.Tensor,
    inner_size: torch.Tensor | None = None,
    group_size: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[Measure, Beyond]:
    """The error of ``value`` against ``exact``, of the same shape, and the elements beyond their tolerance; see
    ``measure.judge``.

    ``exact`` is float64 or complex128 if the value is floating-point. The rounding of ``dtype`` is allowed, by default
    of the value's.
    """
    if value.is_floating_point() or value.is_complex():
        ours, right, *more = map(_plain, (value, exact, *others))
    else:
        ours, right, *more = (as_array(item.to(value.dtype)) for item in (value, exact, *others))
    inside = None if inner_size is None else _plain(inner_size)
    with _one_thread():
        return judge(ours, right, _name(dtype or value.dtype), more, inner_size=inside, group_size=group_size)


def measure_tensors(
    values: Sequence[torch.Tensor], exact: torch.Tensor, eager: torch.Tensor, *, group_size: int = 1
) -> tuple[list[Measure], Measure]:
    """The errors of values and of eager against ``exact``, all of one shape; faster than one by one.

    Values have eager's dtype. Eager is right by definition, so its error has no share of a tolerance.
    """
    if not (eager.is_floating_point() or eager.is_complex()):
        of_eager = dataclasses.replace(measure_tensor(eager, exact), share=0.0, position=0, error=0.0, limit=0.0)
        return [measure_tensor(value, exact, eager, group_size=group_size) for value in values], of_eager
    with _one_thread():
        found, others = measure_with_others(
            [*map(_plain, values)], _plain(exact), _name(eager.dtype), [_plain(eager)], group_size=group_size
        )
    return found, others[0]


def format_of(dtype: torch.dtype) -> Format:
    """The tolerance of a floating-point dtype."""
    return FORMATS[_name(dtype)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("complex32", "float16")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A context in which PyTorch computes with one thread.

    Its threads wait for each other after each operator. On these small chunks two are hardly faster than one, and many
    times slower if another process uses the cores too.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ordinary(value: torch.Tensor) -> float:
    """The magnitude of a tensor's elements that are no outliers, see ``measure.ordinary``."""
    return ordinary_of_array(as_array(value))


def same_elements(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and elements; NaN equals NaN."""
    if torch.equal(first, other):
        return True
    is_float = first.is_floating_point() or first.is_complex()
    return is_float and first.shape == other.shape and bool(((first == other) | (first.isnan() & other.isnan())).all())


def nearer(ours: Measure, eager: Measure) -> str:
    """Which is nearer to float64: ``runtime``, ``eager`` or ``equal``."""
    if ours.max_abs == eager.max_abs:
        return "equal"
    return "runtime" if ours.max_abs < eager.max_abs else "eager"
