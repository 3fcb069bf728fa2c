"""Tensors of every dtype, layout and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED_OF_OLD = [torch.uint8]
EVERY = [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED_OF_OLD, torch.bool]
BARE_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
"""PyTorch computes little with these: no add, no mul."""


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_arithmetic_in_every_dtype(dtype: torch.dtype) -> None:
    def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * x, x + x, x == x, x.t().clone(), x[1:] | x[:-1] if integral else x[1:] + x[:-1], x.sum()

    integral = not (dtype.is_floating_point or dtype.is_complex)
    assert_same_as_eager(compute, tensor_of(dtype, 4, 6))


@pytest.mark.parametrize("dtype", [*EVERY, *BARE_UNSIGNED], ids=str)
def test_moving_every_dtype(dtype: torch.dtype) -> None:
    def move(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.clone(),
            torch.cat([x, x]),
            x[1:],
            x.reshape(-1).clone(),
            x.t().contiguous(),
            torch.stack([x, x]),
        )

    assert_same_as_eager(move, tensor_of(dtype, 4, 6))


@pytest.mark.parametrize("dtype", [*FLOATS, *SIGNED, *UNSIGNED_OF_OLD, *BARE_UNSIGNED, torch.bool], ids=str)
def test_casts_of_every_dtype(dtype: torch.dtype) -> None:
    def cast(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(to) for to in EVERY]

    assert_same_as_eager(cast, torch.randint(0, 100, (4, 6)).to(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_gradients_in_every_dtype(dtype: torch.dtype) -> None:
    def compute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() * x.sum()

    shapes = tensor_of(dtype, 3, 4).requires_grad_(), tensor_of(dtype, 4, 5).requires_grad_()
    # Sums of at most twelve products, and two roundings after them.
    epsilon = torch.finfo(dtype).eps
    assert_same_as_eager(compute, *shapes, tolerance={"rtol": 8 * epsilon, "atol": 16 * epsilon})


def test_dtypes_meet() -> None:
    def promote(i: torch.Tensor, h: torch.Tensor, f: torch.Tensor, d: torch.Tensor, b: torch.Tensor) -> object:
        return i + h, h * f, f - d, b + i, b * f, i / i, i / 2, i * 2.5, h * 2, b & (f > 0), i + d, f**2, 2**f

    floats = [tensor_of(dtype, 3) for dtype in (torch.float16, torch.float32, torch.float64)]
    assert_same_as_eager(promote, tensor_of(torch.int32, 3) + 1, *floats, tensor_of(torch.bool, 3))


def test_float64_is_not_narrowed() -> None:
    """A Python number next to a float64 tensor is a double."""
    assert_same_as_eager(lambda x: (x * 0.1, x + 1 / 3, x.exp() / 7, x**0.7), torch.rand(5, dtype=torch.float64))
    assert_on_onnx()


def test_integers_beyond_float64() -> None:
    big = torch.tensor([2**53 + 1, -(2**62) + 3])
    assert_same_as_eager(lambda x: (x + 1, x * 1, x - 2, x.max(), x == 2**53, x.sum(), x.cumsum(0)), big)


def test_integers_wrap() -> None:
    assert_same_as_eager(lambda x: (x + 100, x * 3), torch.tensor([100, 127, -128], dtype=torch.int8))
    assert_same_as_eager(lambda x: (x + 100, x - 200), torch.tensor([100, 255, 0], dtype=torch.uint8))


def test_special_values() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    assert_same_as_eager(lambda x: (x * 2, x + 1, 1 / x, x.relu(), x.isnan(), x == x, x.sign()), special)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "expanded scalar": lambda: torch.randn(()).expand(3, 4),
    "sliced": lambda: torch.randn(8, 9)[::2, 1::3],
    "flipped by as_strided": lambda: torch.randn(30).as_strided((3, 4), (1, 7), 2),
    "overlapping": lambda: torch.randn(10).unfold(0, 4, 2),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "empty inside": lambda: torch.randn(3, 0, 2),
    "empty transposed": lambda: torch.randn(0, 3).t(),
    "size one": lambda: torch.randn(1, 3, 1).transpose(1, 2),
    "size one channels_last": lambda: torch.randn(1, 1, 4, 5).to(memory_format=torch.channels_last),
    "offset": lambda: torch.randn(24)[5:17].view(3, 4),
    "negative bit": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x * x, x.clone(), x.exp().contiguous(), x.sum(), torch.zeros_like(x), x > 0

    assert_same_as_eager(compute, LAYOUTS[layout]())
    assert_same_as_eager(compute, LAYOUTS[layout]().detach().requires_grad_())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_booleans(layout: str) -> None:
    mask = LAYOUTS[layout]() > 0
    assert_same_as_eager(lambda m: (~m, m & m, m.clone(), torch.where(m, 1.0, 2.0)), mask)


def test_layouts_change_between_calls() -> None:
    """The compiled graph takes tensors of other layouts, as Dynamo lets it or by compiling again."""
    function = compiled(lambda x: (x + 1) * 2)
    square = torch.randn(4, 4)
    for x in [square, square.t(), torch.randn(8, 8)[::2, ::2], torch.randn(4, 1).expand(4, 4)]:
        torch.testing.assert_close(function(x), (x + 1) * 2)


def test_convolution_keeps_channels_last() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert_same_as_eager(model.to(memory_format=torch.channels_last), images)


def test_empty_operands() -> None:
    def compute(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ w, x.sum(0), torch.cat([x, torch.ones(2, 3)]), x.reshape(3, -1), x.mean(), x.softmax(-1)

    assert_same_as_eager(compute, torch.randn(0, 3), torch.randn(3, 4))
    assert_same_as_eager(lambda x, w: x @ w, torch.randn(2, 0), torch.randn(0, 4))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 3)])
def test_operators_of_nothing_on_onnx(shape: tuple[int, ...]) -> None:
    def compute(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.functional.pad(x, (1, 2, 2, 0), value=7.0)
        return padded, x.softmax(-1), x.log_softmax(0), x.gather(-1, index), x.gather(0, index[:0])

    assert_same_as_eager(compute, torch.randn(shape), torch.zeros(shape, dtype=torch.int64))
    assert_on_onnx()


def test_reductions_of_nothing() -> None:
    """ONNX Runtime's mean of nothing is 0, and its any of nothing true."""

    def reduce(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.mean(), x.mean(0), (x > 0).any(), (x > 0).all(), x.sum(0), x.prod(0), x.logsumexp(0)

    assert_same_as_eager(reduce, torch.randn(0, 3))


def test_transposed_matrix_times_vector() -> None:
    """ONNX Runtime (1.31) forgets a Transpose before a product with a vector; it is given a matrix."""
    assert_same_as_eager(lambda a, v: torch.mv(a.t(), v), torch.randn(4, 6), torch.randn(4))
    assert_on_onnx()


def test_a_tensor_over_two_gigabytes() -> None:
    """More than a serialized model can hold, and than 32-bit sizes reach."""
    size = 2**31 + 5
    x = torch.zeros(size, dtype=torch.uint8)
    x[-3:] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with torch.no_grad():
        tail, equal, number = compiled(lambda x: (x[-4:] + 1, x[-1] == x[-2], x.numel()))(x)
    assert tail.tolist() == [1, 2, 3, 4]
    assert not equal
    assert number == size
    assert counted("nodes_on_onnx") > 0
    assert counted("runtime_failures") == 0


def test_weights_over_two_gigabytes() -> None:
    """They go in as they are, so neither the model's size nor its external data is a limit."""
    weight = torch.nn.Parameter(torch.zeros(2**20 + 3, 1025, dtype=torch.float16), requires_grad=False)
    with torch.no_grad():
        weight[-1] = 1.0
    table = torch.nn.Embedding.from_pretrained(weight)
    assert weight.nbytes > 2**31
    result = compiled(table)(torch.tensor([0, 2**20 + 2]))
    assert result.sum(dim=1, dtype=torch.float32).tolist() == [0, 1025]
    assert_on_onnx()
