"""In-place changes of arguments, buffers and views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from torch import nn

from dynamo_backends.runtime.ort_internals import CALLS


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


SLOTS = 8192
CACHE_BYTES = 4 * SLOTS * 16 * 4


def cache() -> torch.Tensor:
    """Keys of 4 heads, 16 numbers each."""
    return torch.randn(1, 4, SLOTS, 16)


def key(positions: int = 1) -> torch.Tensor:
    return torch.randn(1, 4, positions, 16)


def index_copy(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, positions, keys)
    return cache.amax()


def at_indices(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache[:, :, positions] = keys
    return cache.amax()


def at_a_slice(cache: torch.Tensor, position: int, keys: torch.Tensor) -> torch.Tensor:
    cache[:, :, position : position + keys.shape[2]] = keys
    return cache.amax()


def at_a_position(cache: torch.Tensor, position: int, keys: torch.Tensor) -> torch.Tensor:
    cache[0, :, position] = keys[0, :, 0]
    return cache.amax()


def at_a_slice_of_a_layer(cache: torch.Tensor, position: int, keys: torch.Tensor) -> torch.Tensor:
    cache[0, 1:3, position : position + keys.shape[2]] = keys[0, 1:3]
    return cache.amax()


def in_a_layer(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache[0].index_copy_(1, positions, keys[0])
    return cache.amax()


def every_other_number(cache: torch.Tensor, position: int, keys: torch.Tensor) -> torch.Tensor:
    cache[:, :, position, ::2] = keys[:, :, 0, ::2]
    return cache.amax()


def scattered(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache.scatter_(2, positions.view(1, 1, -1, 1).expand_as(keys), keys)
    return cache.amax()


def added(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache.index_add_(2, positions, keys)
    return cache.amax()


def written_twice(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, positions, keys)
    first = cache[:, :, 0].amax()
    cache.index_copy_(2, positions + 1, keys.sin())
    return cache.amax() + first


def norm_in_between(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The norm has an intermediate value as large as the cache."""
    cache.index_copy_(2, positions, keys)
    norm = torch.linalg.vector_norm(cache, float("inf"))
    cache.index_copy_(2, positions + 1, keys.sin())
    return cache.amax() + norm


def read_before(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    before = cache.amin((2, 3))
    cache.index_copy_(2, positions, keys)
    return cache.amax() + before


def returned(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(2, positions, keys)


def view_returned(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(2, positions, keys)[:, :, :8]


INDICES = (
    index_copy, at_indices, in_a_layer, scattered, added, written_twice, norm_in_between, read_before, returned,
    view_returned,
)  # fmt: skip
POSITION = 3
WRITES = [
    *((function, torch.tensor([POSITION, 5]), 2) for function in INDICES),
    (at_a_slice, POSITION, 2),
    (at_a_slice_of_a_layer, POSITION, 2),
    (at_a_position, POSITION, 1),
]
"""Functions that write into a part of a cache, where, and how many keys."""


def largest_allocation(function: Callable[[], object]) -> int:
    """The most bytes that one kind of operator allocates in PyTorch; results of sessions are allocated there too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.key_averages())


@pytest.mark.parametrize(
    ("write", "where", "keys", "dynamic"),
    [*((*case, dynamic) for case in WRITES for dynamic in (False, True)), (every_other_number, POSITION, 1, False)],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_a_write_into_a_part_of_an_argument_copies_no_other_part(
    write: Callable[..., torch.Tensor], where: object, keys: int, dynamic: bool
) -> None:
    with torch.no_grad():
        function = assert_same_as_eager(write, cache(), where, key(keys), calls=2, settings={"dynamic": dynamic})
        arguments = cache(), where, key(keys)
        function(*arguments)
        assert largest_allocation(lambda: function(*arguments)) < CACHE_BYTES / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_a_part_of_an_argument_of_any_dtype_is_written(dtype: torch.dtype) -> None:
    def write(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, positions, keys)
        return cache.float().amax()

    with torch.no_grad():
        assert_same_as_eager(write, cache().to(dtype), torch.tensor([3]), key().to(dtype), calls=2)


def test_a_part_of_a_strided_argument_is_written() -> None:
    memory = torch.randn(1, 64, 4, 32)
    for view in (memory.transpose(1, 2), memory[..., :16].transpose(1, 2), memory.transpose(1, 2)[:, ::2]):
        keys = torch.randn(view[:, :, :1].shape)
        assert_same_as_eager(index_copy, view, torch.tensor([3]), keys, calls=2)


def test_a_part_of_memory_that_two_arguments_share_is_written() -> None:
    def write(first: torch.Tensor, second: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        before = second * 2
        first[3:5] = keys
        return before + second

    memory = torch.randn(16, 4)
    assert_same_as_eager(write, memory[:8], memory[4:12], torch.randn(2, 4), calls=2)


def test_a_view_of_the_new_value_is_returned() -> None:
    def write(x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x[position : position + 1], x.sin()

    for dynamic in (False, True):
        for argument in (x(), torch.randn(5, 6)[1:]):  # the second is not at the start of its memory
            with torch.no_grad():
                assert_same_as_eager(write, argument, 2, calls=2, settings={"dynamic": dynamic})
        assert_on_onnx()


def test_a_part_is_written_that_depends_on_the_old_values() -> None:
    def write(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache[:, :, positions] = cache[:, :, positions] * 2 + 1
        view = cache[:, :2]
        cache[:, :, 7] = view.sum((1, 2))[:, None]
        return view * 1

    assert_same_as_eager(write, cache()[:, :, :32].clone(), torch.tensor([3, 4]), calls=3)


def test_a_view_that_pytorch_makes_is_read_before_the_write() -> None:
    """A session does not know that the view is memory which it writes."""

    def write(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = cache.view(torch.int32) * 2
        cache.index_copy_(2, positions, keys)
        return bits, cache.amax()

    with torch.no_grad():
        assert_same_as_eager(write, cache(), torch.tensor([3]), key(), calls=2)


def test_a_copy_of_the_old_values_is_returned() -> None:
    def write(cache: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = cache.clone()
        cache.index_copy_(2, positions, keys)
        return before, cache[:, :, :4] + before[:, :, :4]

    assert_same_as_eager(write, cache(), torch.tensor([3]), key(), calls=2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cache_is_written_in_training(dynamic: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)
            self.register_buffer("cache", cache())

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            keys = self.project(x)
            with torch.no_grad():
                self.cache.index_copy_(2, positions, keys)
            return keys * self.cache[:, :, :1].detach()

    arguments = key().requires_grad_(), torch.tensor([0])
    assert_same_as_eager(Layer(), *arguments, calls=2, settings={"dynamic": dynamic})


def test_a_session_that_fails_after_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs the region on the written argument, with the same result."""
    function = compiled(index_copy)
    run = CALLS.run

    def fails(*args: object) -> object:
        run(*args)
        raise RuntimeError("failed after it ran")

    arguments = cache(), torch.tensor([3]), key()
    expected = [value.clone() for value in arguments]
    with torch.no_grad():
        function(cache(), torch.tensor([3]), key())
        monkeypatch.setattr(CALLS, "run", fails)
        assert torch.equal(function(*arguments), index_copy(*expected))
    assert counted("runtime_failures") == 1
    assert torch.equal(arguments[0], expected[0])


class MovingAverage(nn.Module):
    """Keeps a moving average of a layer's weights, as MoCo, BYOL and EMA do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                average.mul_(0.9).add_(weight, alpha=0.1)
            target = self.average(x)
        return (self.layer(x) - target).square().mean()


@pytest.mark.parametrize("placement", ["onnx", "measured"])
def test_a_parameter_that_is_only_written_has_no_gradient(placement: str) -> None:
    model = MovingAverage()
    function = assert_same_as_eager(model, x(), calls=3, settings={"options": {"placement": placement}})
    del function
    trained = torch.compile(model, backend="onnxrt", options={"placement": placement})
    trained(x()).backward()
    assert [name for name, item in model.named_parameters() if item.grad is None] == ["average.weight", "average.bias"]


def test_a_backward_reads_what_an_argument_was_before_it_was_written() -> None:
    """The partitioner saves the argument itself, which has the new value in the backward."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * (self.scale * 2)
            with torch.no_grad():
                self.scale.mul_(0.5)
            return y.sum()

    for placement in ("onnx", "measured"):
        settings = {"options": {"placement": placement}}
        assert_same_as_eager(Scaled(), x().requires_grad_(), calls=3, settings=settings)
