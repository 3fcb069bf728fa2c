"""In-place changes of arguments, buffers and views."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager
from torch import nn


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def test_an_input_is_changed_in_place() -> None:
    assert_same_as_eager(lambda x: x.add_(1).mul_(2), x(), calls=2)
    assert_on_onnx()


def test_a_transposed_and_a_sliced_input_are_changed_in_place() -> None:
    assert_same_as_eager(lambda x: x.add_(1), x().t())
    assert_same_as_eager(lambda x: x.mul_(x), torch.randn(8, 8)[::2, ::3])


def test_a_view_of_an_input_is_changed_in_place() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        x[1].mul_(2)
        x.t()[2:4].zero_()
        return x.view(-1) * 1

    assert_same_as_eager(change, x(), calls=2)


def test_two_arguments_share_memory() -> None:
    base = torch.randn(8)

    def change(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    assert_same_as_eager(change, base[:6], base[2:], calls=2)


def test_the_same_tensor_twice() -> None:
    same = x()
    assert_same_as_eager(lambda a, b: (a.add_(1), b * 2)[1], same, same)


def test_reads_before_and_after_a_change_see_their_own_value() -> None:
    def change(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x * 3
        x.copy_(before.sin())
        return before, x * 5

    assert_same_as_eager(change, x(), calls=2)


def test_set_item() -> None:
    def change(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x[0, :3] = 7
        x[index] = x[index] * 2
        x[:, -1] += 1
        return x.sum()

    assert_same_as_eager(change, x(), torch.tensor([1, 3]))


def test_the_shape_of_an_input_is_changed_in_place() -> None:
    assert_same_as_eager(lambda x: x.unsqueeze_(0) * 2, x())
    assert_same_as_eager(lambda x: x.t_().add(1), x())


class Counter(nn.Module):
    """Counts its calls, and keeps a moving average of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.average


def test_buffers_are_changed_in_place() -> None:
    assert_same_as_eager(Counter(), x(), calls=3)
    assert_same_as_eager(Counter(), x().requires_grad_(), calls=3)


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + x.sum(0)
        return x * self.state


def test_a_buffer_is_replaced() -> None:
    assert_same_as_eager(Replaced(), x(), calls=3)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_moves_its_running_statistics(memory_format: torch.memory_format, training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=None))
    images = torch.randn(2, 3, 8, 8).to(memory_format=memory_format)
    assert_same_as_eager(model.train(training), images, calls=3, tolerance=FLOAT32_STATISTICS)


FLOAT32_STATISTICS = {"rtol": 1e-4, "atol": 1e-5}
"""Gradients through batch statistics of 144 values cancel: two orders of summation differ by some 1e-5."""


def test_batch_norm_in_training_without_gradients() -> None:
    with torch.no_grad():
        assert_same_as_eager(nn.BatchNorm1d(6), x(), calls=3)


def test_list_of_tensors_is_changed_by_foreach_operators() -> None:
    def step(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        torch._foreach_mul_(gradients, 0.5)
        torch._foreach_add_(parameters, gradients, alpha=-0.1)
        return torch._foreach_norm(parameters)

    assert_same_as_eager(step, [torch.randn(3), x()], [torch.randn(3), x()], calls=2)
