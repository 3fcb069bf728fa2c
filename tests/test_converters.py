"""Our own translations against eager: values, gradients, dtypes, and that nothing stays in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from conftest import assert_on_onnx, assert_same_as_eager


def assert_equals_eager(function: Callable[..., object], *args: object, **tolerance: float) -> None:
    """Results and gradients are eager's, and nothing ran in PyTorch."""
    assert_same_as_eager(function, *args, tolerance=tolerance or None)
    assert_on_onnx()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def symbolic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Marks sizes that the compiled function must not take for constants."""
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


# Attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(dtype: torch.dtype, is_causal: bool) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3)

    query, key, value = randn(2, 3, 5, 8, dtype=dtype), randn(2, 3, 7, 8, dtype=dtype), randn(2, 3, 7, 8, dtype=dtype)
    half = {"rtol": 1e-2, "atol": 1e-3} if dtype is torch.float16 else {}  # eager rounds the probabilities to half
    assert_equals_eager(attention, query, key, value, **half)


@pytest.mark.parametrize("kind", ["bool", "float", "rows"])
def test_attention_with_a_mask_that_hides_a_row(kind: str) -> None:
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False  # the first two rows of the second sequence see nothing
    if kind == "rows":
        mask = mask[1, 0]
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    query, key, value = randn(2, 3, 5, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8)

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    assert_equals_eager(attention, query, key, value)


def test_logsumexp_of_attention() -> None:
    mask = torch.zeros(5, 5)
    mask[2] = -torch.inf
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    assert_equals_eager(lambda q, k, v: flash(q, k, v, attn_mask=mask), *tensors)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_symbolic_length(is_causal: bool) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    tensors = [symbolic(randn(2, 3, 5, 8), 0, 2) for _ in range(3)]
    assert_equals_eager(attention, *tensors)


# Convolution


@pytest.mark.parametrize("has_symbolic_sizes", [False, True])
@pytest.mark.parametrize(
    ("dims", "transposed", "settings"),
    [
        (1, False, {}),
        (1, False, {"stride": 3, "padding": 2, "dilation": 2}),
        (1, True, {"stride": 2, "output_padding": 1}),
        (2, False, {"padding": 1}),
        (2, False, {"padding": 4}),
        (2, False, {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 2)}),
        (2, False, {"groups": 2, "stride": 2}),
        (2, False, {"groups": 4, "padding": 1, "stride": 2}),
        (2, True, {"groups": 2, "stride": 2, "padding": 1}),
        (3, False, {"stride": 2, "padding": 1}),
    ],
)
def test_convolution_backward(
    dims: int, transposed: bool, settings: dict[str, int], has_symbolic_sizes: bool
) -> None:
    module = getattr(torch.nn, f"Conv{'Transpose' if transposed else ''}{dims}d")(4, 8, (3, 2, 3)[:dims], **settings)
    input = randn(2, 4, *(8, 9, 7)[:dims])
    if has_symbolic_sizes:
        symbolic(input, 0, *range(2, 2 + dims))
    assert_equals_eager(module, input, rtol=1e-4, atol=1e-4)


def test_convolution_backward_with_a_large_kernel() -> None:
    assert_equals_eager(torch.nn.Conv2d(4, 6, 7, padding=3, stride=2), randn(2, 4, 17, 16), rtol=1e-4, atol=1e-4)
    assert_equals_eager(torch.nn.Conv2d(4, 6, 6, groups=2, dilation=2), randn(2, 4, 17, 16), rtol=1e-4, atol=1e-4)
