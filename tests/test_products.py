"""Products in float64 that several graphs of one call compute: each once, and never another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynamo_backends.numerics.products import Products, SharedProducts

X = torch.randn(512, 384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(384, 448, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def computed(
    products: Products, compute: Callable[[], torch.Tensor], *, adds: bool = True
) -> tuple[torch.Tensor, bool]:
    """What is computed where products are shared, and whether it was taken from another."""
    before = products.taken
    with SharedProducts(products, adds=adds):
        return compute(), products.taken > before


def test_a_product_of_the_same_factors_is_taken_once() -> None:
    products = Products()
    first, was_taken = computed(products, lambda: X @ W)
    assert not was_taken
    second, was_taken = computed(products, lambda: X.clone() @ W)
    assert was_taken and torch.equal(first, second)
    first.zero_()
    assert second.any(), "it is in memory of its own"
    third, was_taken = computed(products, lambda: X @ W, adds=False)
    assert was_taken and third.data_ptr() == second.data_ptr(), "it is not, where nothing writes into it"
    assert not computed(products, lambda: X @ W, adds=False)[1]


def test_factors_that_differ_by_the_rounding_of_float64_are_the_same() -> None:
    products = Products()
    first, _ = computed(products, lambda: X @ W)
    second, was_taken = computed(products, lambda: (X * (1 + 2e-16)) @ W)
    assert was_taken and torch.equal(first, second)


@pytest.mark.parametrize("row", [0, -1])
def test_factors_that_differ_by_more_are_others(row: int) -> None:
    other = X.clone()
    other[row, 3] += 1e-12
    products = Products()
    computed(products, lambda: X @ W)
    second, was_taken = computed(products, lambda: other @ W)
    assert not was_taken and torch.equal(second, other @ W)


def test_other_arguments_are_other_products() -> None:
    bias = torch.ones(448, dtype=torch.float64)
    products = Products()
    computed(products, lambda: torch.addmm(bias, X, W, beta=2.0))
    assert not computed(products, lambda: torch.addmm(bias, X, W))[1]
    assert not computed(products, lambda: torch.addmm(bias + 1, X, W))[1]


@pytest.mark.parametrize("written", ["factor", "result"])
def test_what_was_written_into_is_not_taken(written: str) -> None:
    products, factor = Products(), X.clone()
    result, _ = computed(products, lambda: factor @ W)
    (factor if written == "factor" else result).add_(1.0)
    given = factor.clone()  # as it is now
    again, was_taken = computed(products, lambda: given @ W)
    assert not was_taken and torch.equal(again, given @ W)


def test_eagers_and_small_products_are_computed() -> None:
    products = Products()
    for x, w in ((X.float(), W.float()), (X[:64], W)):
        computed(products, lambda x=x, w=w: x @ w)  # type: ignore[misc]
        assert not computed(products, lambda x=x, w=w: x @ w)[1]  # type: ignore[misc]
    with torch.inference_mode():
        x = X.clone()
        computed(products, lambda: x @ W)
        assert not computed(products, lambda: x @ W)[1]


def test_what_is_kept_of_earlier_rounds() -> None:
    products = Products()
    computed(products, lambda: X @ W)
    products.next_round()
    computed(products, lambda: X @ (W + 1))
    products.drop_earlier()
    assert not computed(products, lambda: X @ W, adds=False)[1]
    assert computed(products, lambda: X @ (W + 1), adds=False)[1]


def test_gradients_flow_through_a_product_that_was_taken() -> None:
    products = Products()
    computed(products, lambda: X @ W)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    result, was_taken = computed(products, lambda: x @ w)
    assert was_taken
    result.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(result) @ W.T)  # type: ignore[arg-type]


def test_convolutions_and_their_gradients() -> None:
    products = Products()
    x = torch.randn(2, 64, 8, 8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(16, 64, 3, 3, dtype=torch.float64)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(torch.nn.functional.conv2d(x, weight).square().sum(), x)[0]

    first, _ = computed(products, gradient)
    assert products.taken == 0
    second, _ = computed(products, gradient)
    assert products.taken == 2 and torch.equal(first, second)
    assert not computed(products, lambda: torch.nn.functional.conv2d(x, weight, stride=2))[1]
