"""Writes to weights on a GPU, found by checksums; here of tensors on the CPU, where they are computed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import compiled, counted

from dynamo_backends.weights import region_session
from dynamo_backends.weights.gpu_changes import GpuWatch, checksum
from dynamo_backends.weights.watchable import CALLS

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "scaled": lambda p: p.mul_(2),
    "one element": lambda p: p[tuple(size - 1 for size in p.shape)].add_(1),
    "negated": lambda p: p.neg_(),
    "swapped": lambda p: p.copy_(p.flip(0)),
    "shifted": lambda p: p.copy_(p.roll(1, -1)),
}


def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(300, 17),
        torch.randn(5),
        torch.randn(64, 64).half(),
        torch.randn(33, 8, dtype=torch.float64).t(),
        torch.arange(1, 50, dtype=torch.int8),
        torch.randn(4, 2042)[1:],
        *[torch.randn(i + 2) for i in range(60)],
    ]


@pytest.mark.parametrize("write", WRITES)
def test_a_checksum_changes_with_the_content(write: str) -> None:
    for tensor in weights():
        before = checksum(tensor)
        assert torch.equal(checksum(tensor.clone()), before) and before.dtype is torch.int64
        other = tensor.clone()
        WRITES[write](other)
        assert not torch.equal(checksum(other), before), (write, tensor.shape)


@pytest.mark.parametrize("position", [0, 1, 3, 5, 17, 40, 65])
def test_a_write_is_found(position: int) -> None:
    tensors = weights()
    watch = GpuWatch(tensors)
    watch.session_was_made(tensors)
    assert all(watch.is_unchanged(tensors) for _ in range(2 * CALLS))
    assert len(set(watch._groups)) == len(watch._groups) > 3
    tensors[position].data.neg_()
    calls = next(i for i in range(2 * CALLS) if not watch.is_unchanged(tensors))
    assert 0 < calls <= CALLS
    assert watch.changed(tensors) == ([position], [position]) and watch.differing(tensors) == [position]

    watch = GpuWatch(tensors)
    tensors[position].mul_(2)
    assert not watch.is_unchanged(tensors), "PyTorch counts this one"
    assert watch.changed(tensors) == ([position], [])
    tensors[position].div_(2)
    assert watch.changed(tensors) == ([], []) and watch.is_unchanged(tensors), "the same content again"


def test_other_memory_and_writes_while_the_session_is_made() -> None:
    tensors = weights()
    watch = GpuWatch(tensors)
    tensors[1].add_(0)
    watch.session_was_made(tensors)
    assert not watch.is_unchanged(tensors) and watch.changed(tensors) == ([1], [])
    others = [tensors[0].clone(), *tensors[1:]]
    assert GpuWatch(tensors).changed(others) == ([0], [])


def test_every_call_compares_everything_if_asked() -> None:
    tensors = weights()
    watch = GpuWatch(tensors, complete=True)
    assert watch.is_unchanged(tensors)
    tensors[40].data.add_(1)
    assert not watch.is_unchanged(tensors)


def test_a_session_follows_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_session, "watch_of", GpuWatch)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), torch.randn(2, 8)
    function = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x))
        assert counted("constant_weights")
        model[0].weight.mul_(1.5)  # type: ignore[operator]
        torch.testing.assert_close(function(x), model(x))
        for _ in range(3):
            model[2].weight.data.mul_(1.5)  # type: ignore[operator]
            for _ in range(CALLS):
                function(x)
            torch.testing.assert_close(function(x), model(x))
