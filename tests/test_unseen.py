"""Code that no other test's models contain, found by trying models that were not used in the making."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager

INDEX = torch.tensor([[0, 2, 1], [1, 0, 2]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.gather(x, 1, INDEX),
        lambda x: x.scatter(1, INDEX, 2.0),
        lambda x: x.scatter(1, INDEX, x * 3),
        lambda x: x.scatter_add(1, INDEX, x * 3),
        lambda x: x.scatter_reduce(1, INDEX, x * 3, "amax"),
    ],
    ids=["gather", "scatter a number", "scatter", "scatter_add", "scatter_reduce"],
)
def test_indices_go_to_onnx(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same_as_eager(function, torch.randn(2, 3))
    assert_on_onnx()
