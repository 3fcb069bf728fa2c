"""The rule of what is right: errors, tolerances, and the elements beyond them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dynamo_backends.numerics.arrays import as_array, dtype_name
from dynamo_backends.numerics.rule import FORMATS, RUNS, Measure, judge, spread, sum_units

NAN, INF = math.nan, math.inf
EPS = 2.0**-23
LOWEST = torch.finfo(torch.float32).min


def measured(value: object, exact: object, dtype: torch.dtype = torch.float32, more: object = None) -> Measure:
    actual = as_array(torch.tensor(value, dtype=torch.float64).to(dtype))
    extra = None if more is None else np.asarray(more, np.float64)
    return judge(actual, np.asarray(exact, np.float64), dtype_name(dtype), extra)[0]


def test_each_measure() -> None:
    found = measured([1.0, -2.5, 0.25, 4.0], [1.0, -2.0, 0.0, 4.0])
    assert (found.max_abs, found.scale, found.nonfinite) == (0.5, 4.0, 0)
    assert (found.position, found.error, found.relative) == (2, 0.25, 0.125), "0 has the smallest tolerance"
    assert found.share == pytest.approx(found.error / found.limit)
    found = measured([1.0 + 8 * EPS, 1024.0 * (1 + 2 * EPS)], [1.0, 1024.0])
    assert (found.max_ulp, found.max_abs, found.position) == (8.0, 2048 * EPS, 0), "the unit is that of the element"
    assert measured([3.0, -5.0], [3.0, -5.0]) == Measure(scale=5.0)
    assert measured([], []) == Measure()


@pytest.mark.parametrize("position", [0, 2**15 - 1, 2**15, 90_000])
@pytest.mark.parametrize("wide", [False, True])
def test_each_element_of_a_large_tensor_counts(position: int, wide: bool) -> None:
    exact = np.ones((300, 301), np.float64 if wide else np.float32)
    value = np.ones((300, 301), np.float32)
    value.reshape(-1)[position] = 1.5
    found, beyond = judge(value, exact, "float32")
    assert (found.max_abs, found.scale, found.position, list(beyond.positions)) == (0.5, 1.0, position, [position])
    assert not found.is_rounding
    more = np.zeros(exact.shape)
    more.reshape(-1)[position] = 0.6
    assert judge(value, exact, "float32", more)[0].is_rounding
    value.reshape(-1)[position] = NAN
    found, beyond = judge(value, exact, "float32")
    assert (found.nonfinite, found.position, found.relative, beyond.shares[0]) == (1, position, INF, INF)


def test_what_is_not_finite() -> None:
    found = measured([NAN, 1.5, INF, 2.0], [NAN, 1.0, INF, 2.0])
    assert (found.nonfinite, found.max_abs, found.scale, found.position) == (0, 0.5, 2.0, 1)
    assert measured([INF, 2.0], [-INF, 2.0]).nonfinite == 1
    found = measured([1.0, 2.0, NAN], [1.0, INF, INF])
    assert (found.nonfinite, found.missing, found.position) == (2, 1, 1)
    assert measured([NAN, NAN], [NAN, NAN]) == Measure()
    assert measured([INF, -INF, 1.0], [70000.0, -70000.0, 1.0], torch.float16).nonfinite == 0
    assert measured([INF, 1.0], [60000.0, 1.0], torch.float16).nonfinite == 1
    assert measured([INF, 1.0], [70000.0, 1.0]).nonfinite == 1  # float32 holds it
    assert not measured([INF, 1.0], [1.0, 1.0], more=[INF, NAN]).is_rounding


def test_complex_values_are_judged_by_their_parts() -> None:
    exact = np.array([1 + 2j, 3 - 4j])
    found, beyond = judge(np.array([1 + 2j, 3 - 4.5j], np.complex64), exact, "complex64")
    assert (found.max_abs, found.scale, found.position, list(beyond.positions)) == (0.5, 4.0, 1, [1])
    assert judge((exact * (1 + 4 * EPS)).astype(np.complex64), exact, "complex64")[0].is_rounding


def test_discrete_values_must_be_equal() -> None:
    found, beyond = judge(np.array([3, 4, 9]), np.array([3, 5, 5]), "int64")
    assert (found.max_ulp, found.max_abs, found.position, list(beyond.positions)) == (2.0, 4.0, 1, [1, 2])
    assert not found.is_rounding
    assert judge(np.array([True]), np.array([True]), "bool")[0] == Measure()


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.float64, 8), (torch.float32, 8), (torch.float16, 1), (torch.bfloat16, 1), (torch.float8_e4m3fn, 1)],
)
def test_some_units_in_the_last_place(dtype: torch.dtype, units: int) -> None:
    unit = torch.finfo(dtype).eps
    assert measured([1 + units * unit, 0.0], [1.0, 0.0], dtype).is_rounding
    assert not measured([1 + (units + 1) * unit, 0.0], [1.0, 0.0], dtype).is_rounding


def test_what_may_become_nothing() -> None:
    """Subnormal numbers; not in float16, which is computed in float32."""
    assert measured([0.0], [1e-39]).is_rounding
    assert not measured([0.0], [1e-37]).is_rounding
    assert not measured([0.0], [6e-6], torch.float16).is_rounding


@pytest.mark.parametrize("outlier", [-1e9, LOWEST, 1e30, INF])
def test_nothing_is_excused_by_another_element(outlier: float) -> None:
    assert not measured([1.01, outlier], [1.0, outlier]).is_rounding


def test_limits_grow_with_the_terms_up_to_a_limit() -> None:
    assert [sum_units(terms) for terms in (0, 1, 4, 16, 9216, 2400**2)] == [1, 1, 2, 4, 4, 100]
    assert [spread(terms) for terms in (1, 25, 10**6)] == [4, 5, 16]
    assert RUNS == 16 and all(item.computed <= 2**-23 for item in FORMATS.values())
