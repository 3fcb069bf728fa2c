"""Code forms from models that were not used during development."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, counted

INDEX = torch.tensor([[0, 2, 1], [1, 0, 2]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.gather(x, 1, INDEX),
        lambda x: x.scatter(1, INDEX, 2.0),
        lambda x: x.scatter(1, INDEX, x * 3),
        lambda x: x.scatter_add(1, INDEX, x * 3),
        lambda x: x.scatter_reduce(1, INDEX, x * 3, "prod"),
    ],
    ids=["gather", "scatter a number", "scatter", "scatter_add", "scatter_reduce"],
)
def test_indices_go_to_onnx(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same_as_eager(function, torch.randn(2, 3))
    assert_on_onnx()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).t().as_strided((2, 3), (1, 2)),
        lambda x: (x * 2)[1:].as_strided((2, 3), (2, 1), 1),
        lambda x: (x * 2)[1:].as_strided((2, 2), (2, 1)),
        lambda x: (x * 2).expand(3, 4, 5).as_strided((3, 4), (1, 4)),
        lambda x: (x * 2).split(2)[1].t().as_strided((3,), (3,)),
        lambda x: torch.empty_strided((4, 5), (1, 4)).copy_(x).sin().as_strided((3, 2), (1, 3), 2),
    ],
    ids=["transposed", "sliced", "sliced, from where it begins", "expanded", "split", "column-major"],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_as_strided_reads_memory_not_values(
    function: Callable[[torch.Tensor], torch.Tensor], requires_grad: bool
) -> None:
    assert_same_as_eager(lambda x: function(x) + 1, torch.randn(4, 5, requires_grad=requires_grad))
    if not requires_grad:
        assert counted("fallback aten.as_strided.default") == 0


def test_as_strided_of_an_argument_reads_beyond_it() -> None:
    table = torch.randn(4, 5)
    for x in (table, table[1:3], table.t()):
        assert_same_as_eager(lambda x: x.as_strided((2, 2), (5, 1), 3) + 1, x)


def test_cat_promotes() -> None:
    x, whole, half = torch.randn(2, 3), torch.arange(6, dtype=torch.int32).view(2, 3), torch.ones(2, 3).half()
    assert_same_as_eager(lambda *parts: (torch.cat(parts), torch.stack(parts[:2], 1)), whole, x, half, x > 0)
    assert_on_onnx()


def test_scatter_by_indices_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """``index_put`` with one index has an empty list of axes."""
    assert_same_as_eager(lambda x: x[INDEX[0]] * 2, torch.randn(3, requires_grad=True))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_strides_that_fake_tensors_do_not_foresee_are_compared(tmp_path: Path) -> None:
    """PyTorch 2.13 normalizes a transposed batch into a row-major one; its fake tensor stays transposed."""
    norm, linear = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    model = torch.compile(
        lambda x: linear(norm(x.transpose(1, 2)).transpose(1, 2)),
        backend="onnx_debug",
        options={"dump_dir": str(tmp_path)},
    )
    model(torch.randn(4, 3, 6)).sum().backward()
    (manifest,) = tmp_path.glob("run_*/manifest.json")
    assert {graph["verdict"] for graph in json.loads(manifest.read_text())["graphs"]} == {"ok"}
