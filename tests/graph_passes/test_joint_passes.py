"""The passes of the stage ``joint``: each fires only where its rule says; results and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import nn
from torch.utils.checkpoint import checkpoint

ALL = ["joint.*", "post_grad.*"]


def only(*names: str) -> dict[str, object]:
    """Settings that turn all other passes off."""
    return {"options": {"passes": {"disable": ["*"], "enable": list(names)}}}


def alone(function: Callable[..., object], *args: object, name: str, **settings: object) -> int:
    """Compares with eager with one pass on; returns how often it fired."""
    assert_same_as_eager(function, *args, settings={**only(name), **settings})
    return counted(f"pass {name}")


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class TestRemoveNoops:
    NAME = "joint.remove_noops"

    def test_assertions_of_an_exported_model(self) -> None:
        """Of dtypes, which the traced tensors have."""

        class Converts(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.float().relu().double()

        module = torch.export.export(Converts(), (torch.randn(4, 6),)).module()
        assert_same_as_eager(module, torch.randn(4, 6))
        assert counted("pass joint.remove_noops") >= 2
        assert_on_onnx()

    @pytest.mark.parametrize(
        "noop",
        [
            lambda x: x * 1,
            lambda x: 1.0 * x,
            lambda x: x / 1,
            lambda x: x**1,
            lambda x: x - 0,
            lambda x: x + -0.0,
            lambda x: x * torch.ones(4, 6, dtype=torch.float64),
            lambda x: x.clone(),
            lambda x: x.view(4, 6),
            lambda x: x.expand(4, 6),
            lambda x: x.permute(0, 1),
            lambda x: x.transpose(1, -1),
            lambda x: x.repeat(1, 1),
            lambda x: F.pad(x, (0, 0)),
            lambda x: torch.cat([x]),
            lambda x: x.to(torch.float64, copy=True),
        ],
    )
    def test_fires_and_keeps_results_and_gradients(self, noop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        function = lambda x, w: noop(x @ w).sin() * 2  # noqa: E731
        assert_same_as_eager(function, double(4, 3), double(3, 6), settings=only(self.NAME))
        baseline = counted(f"pass {self.NAME}")
        assert baseline >= 1
        assert_on_onnx()

    def test_integers(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x * x
            return ((y + 0).floor().round() * 1) * y

        assert alone(function, torch.arange(12), name=self.NAME) == 4

    @pytest.mark.parametrize(
        "kept",
        [
            lambda x: x + 0.0,  # -0.0 becomes 0.0
            lambda x: x * 0,  # NaN stays NaN
            lambda x: x.float() + 0,  # and so does another dtype
            lambda x: x.abs() + x.abs().sum() * 0,
            lambda x: x.t(),
            lambda x: x.t().contiguous(),  # other strides
            lambda x: x.t().clone(memory_format=torch.contiguous_format).t(),
        ],
    )
    def test_leaves_what_changes_something(self, kept: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), -1.0, 2.0], [1.0, 2.0, 3.0]])
        assert alone(lambda x: kept(x.neg()).exp(), x, name=self.NAME) == 0

    def test_integers_and_floats_promote(self) -> None:
        assert alone(lambda x: (x * 1.0) + (x + 0.0) + (x / 1), torch.arange(6) + 1, name=self.NAME) == 0

    def test_an_integer_has_no_negative_zero(self) -> None:
        function = lambda x: 1 / (-(x - x) + torch.full((3,), -0.0, dtype=torch.int64))  # noqa: E731
        assert_same_as_eager(function, torch.randn(3))

    def test_broadcasting_is_no_noop(self) -> None:
        assert alone(lambda x: (x.sin() * torch.ones(3, 4)).cos(), torch.randn(4), name=self.NAME) == 0

    def test_results_stay_tensors_of_their_own(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x.sin()
            return y, y * 1, y.clone(), y.view(4, 6), (y * 1).view(-1), x * 1, x.clone()

        assert alone(function, double(4, 6), name=self.NAME) == 0
        with torch.no_grad():
            alone(function, double(4, 6), name=self.NAME)

    def test_copies_of_what_is_written(self) -> None:
        """The clone keeps the old value of an argument that is then changed."""

        def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            old = x.clone()
            y = (x * 1).mul_(w)
            x.mul_(3)
            return old * w, x + 1, y

        with torch.no_grad():
            assert alone(function, torch.randn(4, 6), torch.randn(4, 6), name=self.NAME) == 0

    def test_as_strided_reads_memory(self) -> None:
        assert_same_as_eager(lambda x: x[1:].clone().as_strided((2, 2), (1, 2)) * 2, double(5, 3))
        assert_same_as_eager(lambda x: (x * 2)[1:].clone().as_strided((2, 2), (1, 2)) * 2, double(5, 3))

    def test_dynamic_shapes(self) -> None:
        function = lambda x: (x.sin().expand(x.shape[0], x.shape[1]) * 1)[:].cos()  # noqa: E731
        run = compiled(function, dynamic=True, **only(self.NAME))
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            assert_same_values(run(x), function(x))
        assert counted(f"pass {self.NAME}") >= 2


class TestCommonSubexpressions:
    NAME = "joint.common_subexpressions"

    def test_forward_and_backward(self) -> None:
        """The gradient of ``x.exp() * w`` reads what two forward expressions compute."""
        function = lambda x, w: x.exp() * w + (x.exp() * w).sin()  # noqa: E731
        assert alone(function, double(4, 6), double(4, 6), name=self.NAME) >= 2
        assert_on_onnx()

    def test_numbers_of_other_types_and_signs(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x * 1).sum() + (x * 1.0).sum() + (x * True).sum(), (x / 0.0) * (x / -0.0), x.sum(0) + x.sum(-1)

        assert alone(function, torch.arange(1, 10).view(3, 3), name=self.NAME) == 0

    def test_results_stay_tensors_of_their_own(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2, x * 2, (x * 2).t(), (x * 2).view(-1)

        assert alone(function, double(4, 6), name=self.NAME) == 0

    def test_what_is_written_between(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = x.exp()
            x.add_(1)
            return before.sin(), x.exp().sin()

        assert alone(function, torch.randn(4), name=self.NAME) == 0

    @pytest.mark.parametrize(
        "draw",
        [
            torch.randn_like,
            torch.rand_like,
            lambda x: torch.randint_like(x, 9),
            lambda x: torch.empty_like(x).exponential_(),
            lambda x: torch.empty_like(x).normal_(),
            lambda x: torch.bernoulli(x.sigmoid()),
            lambda x: F.dropout(x, 0.5),
        ],
    )
    def test_equal_draws_are_two_draws(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """PyTorch 2.13's partitioner makes one of two ``randn_like``; see ``partitioning.min_cut_partition``."""
        assert_same_as_eager(lambda x: draw(x) * draw(x) + x, double(4, 6))


class Random(nn.Module):
    """Random operators, some of them equal, between no-ops, views and equal expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.dropout(self.linear(x) * 1, 0.4, self.training).view(4, 6).clone()
        first, second = torch.randn_like(y), torch.randn_like(y)
        z = F.dropout(y.t().t(), 0.4, self.training) + F.dropout(y.t().t(), 0.4, self.training)
        flags = torch.bernoulli(torch.full_like(y, 0.5) * 1) * torch.bernoulli(torch.full_like(y, 0.5) * 1)
        return z * flags + first * second, torch.rand(3), torch.rand(3), torch.randint(0, 9, (2,)) * 1


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_and_the_generator_are_eagers(training: bool) -> None:
    """Two equal draws are two draws."""
    settings = {"options": {"passes": {"enable": ALL}}}
    assert_same_as_eager(Random().train(training), double(4, 6), settings=settings, calls=2)


def test_checkpointed_layers() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 6)).double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.layer, x * 1, use_reentrant=False)
            return (y.view(4, 6) - 0).t().t() * y.clone()

    assert_same_as_eager(Model(), double(4, 6), settings={"options": {"passes": {"enable": ALL}}})
    assert counted("pass joint.remove_noops") > 0


def test_subgraphs_of_a_condition() -> None:
    """Passes change the branches too; each returns what it returned."""

    def function(x: torch.Tensor) -> torch.Tensor:
        def positive(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * 1).view(4, 6).t().t().cos()

        def negative(x: torch.Tensor) -> torch.Tensor:
            return x.cos().clone() / 1

        return torch.cond(x.sum() > 0, positive, negative, (x,)) + 1

    settings = {"options": {"passes": {"enable": ALL}}}
    x = torch.randn(4, 6, dtype=torch.float64)
    assert_same_as_eager(function, x.abs(), settings=settings)
    assert_same_as_eager(function, -x.abs(), settings=settings)


def test_subgraphs_of_a_loop() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        def go_on(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return i < 3

        def step(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, (y.sin() * 1).view(4, 6).clone() + 0.5

        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(go_on, step, (torch.tensor(0), x))[1] * 2

    assert_same_as_eager(function, torch.randn(4, 6), settings={"options": {"passes": {"enable": ALL}}})
