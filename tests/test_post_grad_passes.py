"""The passes of the stage ``post_grad``: each fires alone where its rule says; results and gradients stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import fx

from passes import PassContext
from passes.engine.manager import PassManager
from passes.post_grad.remove_unused import remove_unused


def only(*names: str) -> dict[str, object]:
    """Settings that turn all other passes off."""
    return {"options": {"passes": {"disable": ["*"], "enable": list(names)}}}


def alone(function: Callable[..., object], *args: object, name: str, **settings: object) -> int:
    """Compares with eager with one pass on; returns how often it fired."""
    assert_same_as_eager(function, *args, settings={**only(name), **settings})
    return counted(f"pass {name}")


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """The graphs after the stage ``post_grad``."""
    seen: list[fx.GraphModule] = []
    original = PassManager.run

    def spy(self, stage, graph, **settings):  # type: ignore[no-untyped-def]
        result = original(self, stage, graph, **settings)
        if stage == "post_grad":
            seen.append(graph)
        return result

    monkeypatch.setattr(PassManager, "run", spy)
    yield seen


def operators(module: fx.GraphModule) -> list[str]:
    return [
        node.target.overloadpacket.__name__ for node in module.graph.nodes if hasattr(node.target, "overloadpacket")
    ]


class TestMergeViews:
    NAME = "post_grad.merge_views"

    def test_views_of_views(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: (x @ x).view(2, 8).view(4, 2, 2).unsqueeze(0).squeeze(0).view(16).sin()  # noqa: E731
        with torch.no_grad():
            assert alone(function, double(4, 4), name=self.NAME) == 4
        assert operators(graphs[0]) == ["mm", "view", "sin"]
        assert_on_onnx()

    def test_permutations(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: (x * 2).permute(1, 2, 0).transpose(0, -1).exp()  # noqa: E731
        with torch.no_grad():
            assert alone(function, double(2, 3, 4), name=self.NAME) == 1
        assert operators(graphs[0]) == ["mul", "permute", "exp"]

    def test_what_undoes_each_other_is_gone(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: ((x * 2).t().t().view(12).view(3, 4)).permute(1, 0).permute(1, 0).exp()  # noqa: E731
        with torch.no_grad():
            assert alone(function, double(3, 4), name=self.NAME) == 3
        assert operators(graphs[0]) == ["mul", "exp"]

    def test_gradients(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = (x @ w.t().t()).view(2, 2, 6).view(4, 6).transpose(0, 1).transpose(0, 1)
            return y.unsqueeze(0).expand(1, 4, 6).expand(3, 4, 6).reshape(-1) * 2

        assert alone(function, double(4, 6), double(6, 6), name=self.NAME) > 0
        assert_on_onnx()

    def test_square_matrices(self) -> None:
        """A transposed square matrix has the shape of the matrix, and is another."""
        function = lambda x: (x * 2).t().transpose(0, 1).permute(1, 0) @ x.permute(1, 0).transpose(0, 1)  # noqa: E731
        assert alone(function, double(4, 4), name=self.NAME) > 0

    def test_square_views_of_equal_strides(self) -> None:
        """All strides zero: only the order tells the matrix from its transpose, and their values are equal."""
        function = lambda x: x.view(1, 1).expand(3, 3).t().exp() + x.view(1, 1).expand(3, 3)  # noqa: E731
        assert_same_as_eager(function, double(1), settings=only(self.NAME))

    def test_views_that_transposed_memory_does_not_have(self) -> None:
        """``[3, 4]`` transposed cannot be seen as 12 in a row; its rows can be split."""
        with torch.no_grad():
            assert alone(lambda x: (x * 2).t().reshape(12).view(4, 3).exp(), double(3, 4), name=self.NAME) <= 1
            function = lambda x: (x * 2).t().view(2, 2, 3).view(4, 3).exp()  # noqa: E731
            assert_same_as_eager(function, double(3, 4), settings=only(self.NAME))

    def test_results_stay_views_of_what_they_viewed(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return y, y.t().t(), y.view(12).view(3, 4), y.t().t().t(), x.t().t(), x.view(12).view(2, 6), x.t()

        assert_same_as_eager(function, double(3, 4), settings=only(self.NAME))
        assert_same_as_eager(function, torch.randn(3, 4), settings=only(self.NAME))

    def test_dynamic_shapes(self) -> None:
        function = lambda x: (x * 2).t().t().view(-1).view(x.shape[0], 2, 2).unsqueeze(-1).exp()  # noqa: E731
        run = compiled(function, dynamic=True, **only(self.NAME))
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            assert_same_values(run(x), function(x))
        assert counted(f"pass {self.NAME}") >= 2

    def test_names_are_kept(self, graphs: list[fx.GraphModule]) -> None:
        with torch.no_grad():
            alone(lambda x: (x * 2).view(12).view(2, 6).exp(), double(3, 4), name=self.NAME)
        assert [node.name for node in graphs[0].graph.nodes if node.op == "call_function"] == ["mul", "view_1", "exp"]


class TestCommonSubexpressions:
    NAME = "post_grad.common_subexpressions"

    def test_equal_expressions(self, graphs: list[fx.GraphModule]) -> None:
        with torch.no_grad():
            assert alone(lambda x: x.sin() * 2 + x.sin() * 2, double(3), name=self.NAME) == 2
        assert operators(graphs[0]) == ["sin", "mul", "add"]

    def test_several_results(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: x.max(0).values + x.max(0).values * x.max(0).indices  # noqa: E731
        with torch.no_grad():
            assert alone(function, double(3, 4), name=self.NAME) > 0
        assert operators(graphs[0]).count("max") == 1

    def test_draws_and_results(self) -> None:
        function = lambda x: (torch.rand_like(x) - torch.rand_like(x), x + 1, x + 1)  # noqa: E731
        with torch.no_grad():
            assert alone(function, double(3), name=self.NAME) == 0

    def test_conditions_with_equal_branches(self) -> None:
        """Operators of higher order may do anything."""

        def function(x: torch.Tensor) -> torch.Tensor:
            draws = [torch.cond(x.sum() > 0, lambda x: torch.rand_like(x), lambda x: x * 2, (x,)) for _ in range(2)]
            return draws[0] - draws[1]

        assert_same_as_eager(function, torch.ones(3), settings=only(self.NAME))


class TestRemoveUnused:
    def test_what_nobody_reads_goes_but_draws_and_effects_stay(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        unused = graph.call_function(torch.ops.aten.sin.default, (x,))
        graph.call_function(torch.ops.aten.cos.default, (unused,))
        draw = graph.call_function(torch.ops.aten.rand_like.default, (x,))
        write = graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
        graph.output((x,))
        module = fx.GraphModule(torch.nn.Module(), graph)
        assert remove_unused(module, PassContext("post_grad.remove_unused")) == 2
        assert [node for node in module.graph.nodes if node.op == "call_function"] == [draw, write]


def test_marks_of_autograd_go() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().exp()

    assert_same_as_eager(function, double(3), settings=only("post_grad.remove_noops"))
    assert counted("pass post_grad.remove_noops") > 0
