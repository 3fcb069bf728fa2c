"""Grouped products and histograms, of which a mixture of experts consists."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers the operator
from conftest import assert_on_onnx, assert_same_values, compiled, counted


class Experts(torch.nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(experts, 6, 5))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight, offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [[3, 0, 5, 2], [0, 0, 0], [4], [1] * 8, [2, 2, 1]])
def test_the_rows_of_each_expert(rows: list[int], dtype: torch.dtype) -> None:
    """An expert may have no rows, and rows of no expert are zeros."""
    model, offsets = Experts(len(rows)).to(dtype), torch.tensor(rows).cumsum(0).int()
    for end in (sum(rows), 11):
        x = torch.randn(end, 6, dtype=dtype) if end else torch.randn(1, 6, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(compiled(model)(x, offsets), model(x, offsets))
    assert_on_onnx()


@pytest.mark.parametrize(("settings", "is_training"), [({"weights": "inputs"}, False), ({"placement": "onnx"}, True)])
def test_weights_that_a_session_would_copy_are_left_to_pytorch(settings: dict[str, str], is_training: bool) -> None:
    model, x, ends = Experts(3), torch.randn(5, 6), torch.tensor([2, 2, 5]).int()
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(compiled(model, options=settings)(x, ends), model(x, ends))
    assert counted("fallback transformers.grouped_mm_fallback.default") == 1


def test_weights_that_are_cast_are_constants() -> None:
    class Cast(Experts):
        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            weight = self.weight.transpose(1, 2).float()
            return torch.ops.transformers.grouped_mm_fallback(x, weight, offsets)

    model, x, ends = Cast(3).half(), torch.randn(5, 5), torch.tensor([2, 2, 5]).int()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x, ends), model(x, ends))
    assert_on_onnx()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (100, -1, 1), (7, -0.3, 0.9), (1, 0, 1), (64, 0, 63)])
def test_histograms(bins: int, low: float, high: float, dynamic: bool) -> None:
    limits = torch.tensor([high, low, high + 1e-6, low - 1e-6, torch.nan, torch.inf, -torch.inf])
    for x in (torch.randn(5, 200), torch.randint(-2, 66, (300,)).double(), limits):
        with torch.no_grad():
            found = compiled(lambda x: torch.histc(x, bins, low, high), dynamic=dynamic)(x)
        assert_same_values(found, torch.histc(x, bins, low, high))
    if not dynamic:  # the limits are symbols, too
        assert_on_onnx()


@pytest.mark.parametrize(
    ("low", "high", "x"),
    [
        (-3e38, 3e38, [-3e38, -2.99e38, 1e38]),
        (0, 3e38, [1e38, 2e38]),
        (16777216, 16777217, [16777216.0] * 3),  # equal in float32
        (0, 0, [1.0, 2.0, 2.0]),
        (0, float("inf"), [1.0]),
        (0, 1e39, [1.0]),
    ],
)
def test_limits_that_float32_does_not_hold(low: float, high: float, x: list[float]) -> None:
    def histogram(x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4, low, high)

    try:
        expected = histogram(torch.tensor(x))
    except RuntimeError:
        with pytest.raises(RuntimeError, match="finite|overflow"):
            compiled(histogram)(torch.tensor(x))
    else:
        assert_same_values(compiled(histogram)(torch.tensor(x)), expected)
