"""``onnx_compiler(record=...)``: what the runs of a record hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import dynamo_backends
from dynamo_backends.debug.record import Record, Snapshots


def recorded(model: Callable[..., object]) -> tuple[Callable[..., torch.Tensor], list[Record]]:
    records: list = []
    compiler = dynamo_backends.onnx_compiler(record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=dynamo_backends.decomposition_table(),
    )
    return torch.compile(model, backend=backend), records


def memory_of(records: list[Record]) -> int:
    """The bytes of the distinct tensors that the runs of records hold."""
    tensors = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for record in records
        for run in record.runs
        for value in [*run.inputs, *run.outputs]
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())


def test_a_weight_is_kept_once_for_all_calls() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 300))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    function, records = recorded(model)
    for _ in range(10):
        function(torch.randn(1, 300)).sum().backward()
    assert [len(record.runs) for record in records] == [10, 10]
    gradients = weights  # the backward returns them, other ones each time
    activations = 10 * 20 * 300 * 4
    assert memory_of(records) < weights + 10 * gradients + activations


def test_a_changed_weight_is_kept_as_it_was_at_each_call() -> None:
    model = nn.Linear(4, 4, bias=False)
    function, records = recorded(model)
    seen = []
    with torch.no_grad():
        for change in (lambda w: None, lambda w: w.mul_(2), lambda w: None, lambda w: w.data.add_(1)):
            change(model.weight)
            seen.append(model.weight.clone())
            function(torch.randn(2, 4))
    kept = [next(value for value in run.inputs if value.shape == (4, 4)) for run in records[0].runs]
    for ours, expected in zip(kept, seen, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert kept[1] is kept[2]


def test_an_input_that_the_graph_writes_into_is_kept_as_it_was() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    function, records = recorded(step)
    x = torch.zeros(3)
    for _ in range(2):
        function(x)
    assert [run.inputs[0].tolist() for run in records[0].runs] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.0, float("nan")]),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 3),
        torch.tensor(2.0).half(),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.zeros(0, 3),
        torch.tensor([[1.0, 0.0]]).to_sparse(),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_copies_of_all_kinds_of_tensors(value: torch.Tensor) -> None:
    snapshots = Snapshots()
    first, again = snapshots.of([value])[0], snapshots.of([value])[0]
    assert (first is again) == (value.layout is torch.strided)
    dense = value.to_dense() if value.is_sparse else value
    dense = dense.float() if value.dtype is torch.float8_e4m3fn else dense
    for copied in (first, again):
        copied = copied.to_dense() if copied.is_sparse else copied
        copied = copied.float() if copied.dtype is torch.float8_e4m3fn else copied
        torch.testing.assert_close(copied, dense, equal_nan=True)
    value.zero_() if value.is_sparse or 0 not in value.stride() else value[:, 0].zero_()
    changed = snapshots.of([value])[0]
    assert changed is not first or not value.numel()


def test_a_negative_zero_is_not_zero() -> None:
    snapshots, value = Snapshots(), torch.zeros(2)
    first = snapshots.of([value])[0]
    value.neg_()
    assert snapshots.of([value])[0] is not first


def test_what_no_run_has_any_more_is_not_kept() -> None:
    snapshots, value = Snapshots(), torch.zeros(2)
    copied = weakref.ref(snapshots.of([value])[0])
    assert copied() is None
