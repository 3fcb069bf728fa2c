"""Random operators in several regions run in the order of the program: with one seed the numbers are eager's."""

from __future__ import annotations

import torch
from conftest import compiled
from torch.nn import functional as F


def same_with_seed(function: object, *args: torch.Tensor) -> None:
    results = []
    for run in (function, compiled(function, dynamic=False)):  # type: ignore[arg-type]
        torch.manual_seed(7)
        results.append(run(*args))  # type: ignore[operator]
        results.append(torch.rand(3))  # the generator is left where eager leaves it
    torch.testing.assert_close(results[2], results[0])
    assert torch.equal(results[3], results[1])


def test_draws_that_do_not_depend_on_each_other() -> None:
    """The last draw feeds the first region; by data alone it could be drawn first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        early = torch.relu(x + 1) * 2
        second = torch.randn_like(x)
        third = torch.bernoulli(torch.full_like(x, 0.3))
        return (third * x).exp() + early * second - first.sqrt()

    same_with_seed(function, torch.randn(4, 5))


def test_dropouts_between_matrix_products() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.relu(x @ w), 0.4)
        other = F.dropout(torch.tanh(x), 0.2)
        return F.dropout(hidden @ w, 0.5) + other

    same_with_seed(function, torch.randn(6, 6), torch.randn(6, 6))


def test_dropout_of_a_training_step() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))
    x = torch.randn(5, 4)
    gradients = []
    for run in (model, compiled(model, dynamic=False)):
        model.zero_grad()
        torch.manual_seed(3)
        run(x).square().sum().backward()  # type: ignore[operator, attr-defined]
        gradients.append([item.grad.clone() for item in model.parameters() if item.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_result_that_a_random_operator_writes_into() -> None:
    """In place, so functionalized: the draw and the copy keep their places."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.zeros_like(x)
        buffer.uniform_(2, 3)
        product = buffer * x
        buffer.normal_()
        return product, buffer + x

    same_with_seed(function, torch.randn(3, 3))


def test_attention_that_draws_nothing_keeps_no_order_with_draws() -> None:
    """Its operator is marked as random whatever its dropout is; a region around the draws must not wait for them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            y = F.scaled_dot_product_attention(x, x, x)
            x = x + y * (torch.rand(x.shape[0], 1, 1, 1) > 0.5)  # stochastic depth
        return x

    same_with_seed(function, torch.randn(2, 4, 6, 8))


def test_no_region_has_to_run_both_before_and_after_a_draw() -> None:
    """By data alone ``sigmoid`` and the sum could be one region; the draws between them must keep their order."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.sigmoid(x)
        first = torch.bernoulli(wide)
        second = torch.rand_like(x)
        return first, wide + second

    same_with_seed(function, torch.randn(4, 5))


def test_nor_where_the_first_draw_depends_on_the_region_through_others() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.sigmoid(x)
        first = torch.bernoulli(torch.nextafter(wide, wide) * 0.5)  # nextafter runs in PyTorch
        second = torch.rand_like(x)
        return first, wide + second

    same_with_seed(function, torch.randn(4, 5))
