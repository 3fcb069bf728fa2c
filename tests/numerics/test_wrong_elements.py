"""The elements of a wrong value that exceed their tolerance, and what they have in common."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.numerics.arrays import as_array, dtype_name
from dynamo_backends.numerics.element_records import WrongElements
from dynamo_backends.numerics.rule import judge
from dynamo_backends.numerics.wrong_elements import wrong_elements

ROWS, COLUMNS = 8, 256


def values() -> tuple[torch.Tensor, torch.Tensor]:
    """An input and its GELU."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[0, :20] = 0.0
    return x, F.gelu(x)


def described(actual: torch.Tensor, expected: torch.Tensor, **inputs: torch.Tensor) -> WrongElements:
    _, beyond = judge(as_array(actual), as_array(expected), dtype_name(actual.dtype))
    read = {name: as_array(item) for name, item in inputs.items()}
    return wrong_elements(as_array(actual), as_array(expected), beyond, read)


@pytest.mark.parametrize(
    ("where", "pattern"),
    [
        (lambda x: x < 0, "x is negative"),
        (lambda x: x > 0, "x is positive"),
        (lambda x: x == 0, "x is zero"),
        (lambda x: x < -1, "x <= -1"),
        (lambda x: x.abs() > 2.5, "|x| >= 2.5"),
        (lambda x: x.abs() < 0.02, "|x| <= 0.0"),
        (lambda x: torch.arange(ROWS)[:, None] == 3, "all in row 3 "),
        (lambda x: torch.arange(COLUMNS) == 7, "all in column 7 "),
        (lambda x: torch.arange(COLUMNS) >= 200, "all from column 200 on"),
        (lambda x: torch.arange(COLUMNS) < 50, "all up to column 49"),
        (lambda x: torch.ones_like(x, dtype=torch.bool), ""),
        (lambda x: torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 7 == 0, ""),
    ],
)
def test_what_all_have_in_common(where: Callable[[torch.Tensor], torch.Tensor], pattern: str) -> None:
    x, expected = values()
    wrong = where(x).expand(x.shape)
    found = described(torch.where(wrong, expected + 0.01, expected), expected, x=x)
    assert (found.wrong, found.elements) == (int(wrong.sum()), x.numel())
    assert (pattern in found.pattern) if pattern else not found.pattern


def test_the_worst_elements_have_their_inputs() -> None:
    """An input may be broadcast, and the worst is the largest multiple of its own tolerance."""
    x, bias = values()[0], torch.linspace(-1, 1, COLUMNS)
    expected = x + bias
    actual = expected.clone()
    actual[2, 5] += 0.1
    actual[6, 9] = math.nan
    nan, other = described(actual, expected, x=x, bias=bias).worst
    assert (list(nan.index), nan.actual, nan.limit) == ([6, 9], "nan", None)
    assert list(other.index) == [2, 5] and other.limit is not None and other.limit < 1e-5
    assert other.inputs == {"x": float(x[2, 5]), "bias": float(bias[5])}
    assert (other.actual, other.expected) == (float(actual[2, 5]), float(expected[2, 5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    expected = torch.arange(1, 13).view(3, 4).to(dtype)
    actual = (torch.arange(1, 13).view(3, 4) * torch.tensor([1, 1, 1, 2])).to(dtype)
    found = described(actual, expected)
    assert found.wrong == 3 and {item.index[-1] for item in found.worst} == {3}


def test_a_scalar_and_booleans() -> None:
    assert described(torch.tensor(1.0), torch.tensor(2.0)).worst[0].index == ()
    assert described(torch.tensor([True, False]), torch.tensor([False, False])).wrong == 1


def test_a_large_tensor_that_is_wrong_everywhere_needs_little_memory() -> None:
    x = torch.randn(2**10, 2**10, generator=torch.Generator().manual_seed(0))
    actual = x * 1.01
    actual[-1, -1] += 9
    tracemalloc.start()
    found = described(actual, x, x=x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.wrong == x.numel() and list(found.worst[0].index) == [2**10 - 1] * 2
    assert peak < 10 * x.nbytes
