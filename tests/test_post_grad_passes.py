"""The passes of the stage ``post_grad``: each fires alone where its rule says; results and gradients stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import fx

from passes.context import PassContext
from passes.manager import PassManager
from passes.post_grad.merge_casts import holds_all
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


class TestMergeCasts:
    NAME = "post_grad.merge_casts"

    def test_widening_and_back(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: (x * 2).double().float().exp()  # noqa: E731
        assert alone(function, torch.randn(3), name=self.NAME) == 1
        assert operators(graphs[0]) == ["mul", "exp"]

    def test_widening_twice(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: (x > 0).to(torch.int64).float() + x  # noqa: E731
        assert alone(function, torch.randn(3), name=self.NAME) == 1
        assert operators(graphs[0]) == ["gt", "_to_copy", "add"]

    def test_gradients(self) -> None:
        function = lambda x: (x * 2).float().double().float().double().sin() * x  # noqa: E731
        assert alone(function, double(3), name=self.NAME) > 0

    def test_rounding_is_kept(self) -> None:
        """Through bfloat16 and back is not what it was; through float32 to bfloat16 is rounded twice."""
        function = lambda x: ((x * 1.001).bfloat16().float(), (x * 1.001).float().bfloat16().float() * 3)  # noqa: E731
        assert alone(function, torch.randn(99, dtype=torch.float64), name=self.NAME) == 0

    def test_floats_to_integers_are_left(self) -> None:
        function = lambda x: (x * 2).double().to(torch.int32) + 1  # noqa: E731
        assert alone(function, torch.tensor([1.5, -2.5, 1e4]), name=self.NAME) == 0

    def test_results_and_copies_of_inputs_are_left(self) -> None:
        function = lambda x: (x.double().float(), (x * 2).double().float())  # noqa: E731
        assert alone(function, torch.randn(3), name=self.NAME) == 0

    def test_transposed_memory(self) -> None:
        function = lambda x: (x * 2).t().double().float().exp()  # noqa: E731
        assert_same_as_eager(function, torch.randn(3, 4), settings=only(self.NAME))

    @pytest.mark.parametrize("name", ["bool", "uint8", "int8", "int16", "float16", "bfloat16"])
    @pytest.mark.parametrize("wide", [torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float32])
    def test_holds_all_is_what_casting_there_and_back_says(self, wide: torch.dtype, name: str) -> None:
        narrow = getattr(torch, name)
        bits = torch.arange(2**16).to(torch.int32).to(torch.uint16)
        if narrow is torch.bool:
            values = torch.tensor([False, True])
        else:
            values = bits.view(narrow) if narrow.itemsize == 2 else bits.view(torch.uint8).view(narrow)
        if narrow.is_floating_point:
            values = values[values.isfinite()]
        if holds_all(wide, narrow):
            assert torch.equal(values.to(wide).to(narrow), values)
        elif not (narrow.is_floating_point and not wide.is_floating_point):
            assert not torch.equal(values.to(wide).to(torch.float64), values.to(torch.float64))


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


class TestMoveTransposes:
    NAME = "post_grad.move_transposes"

    def test_it_is_off_by_default(self) -> None:
        assert_same_as_eager(lambda x: (x * 2).t() + (x * 3).t(), torch.randn(3, 4))
        assert counted(f"pass {self.NAME}") == 0

    def test_two_become_one(self, graphs: list[fx.GraphModule]) -> None:
        with torch.no_grad():
            assert alone(lambda x: ((x * 2).t() + (x * 3).t()) @ x, double(3, 4), name=self.NAME) == 1
        assert operators(graphs[0]) == ["mul", "mul", "add", "permute", "mm"]

    def test_two_that_undo_each_other_are_gone(self, graphs: list[fx.GraphModule]) -> None:
        function = lambda x: (x * 2).t().exp().sin().t() + 1  # noqa: E731
        with torch.no_grad():
            assert_same_as_eager(function, double(3, 4), settings=only(self.NAME, "post_grad.merge_views"))
        assert operators(graphs[0]) == ["mul", "exp", "sin", "add"]

    def test_gradients(self) -> None:
        function = lambda x, w: ((x * 2).t() * (w.exp()).t()).sin().t() @ w.t()  # noqa: E731
        settings = only(self.NAME, "post_grad.merge_views")
        assert_same_as_eager(function, double(3, 4), double(3, 4), settings=settings)
        assert counted(f"pass {self.NAME}") > 0

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x * 2).t() + x[:, 0],  # broadcasts along the other dimension
            lambda x: (x * 2).t().exp() @ x,  # nothing gets fewer
            lambda x: (x * 2).view(3, 2, 2).permute(1, 0, 2) + (x * 2).view(2, 3, 2),
        ],
    )
    def test_what_it_leaves(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            assert alone(function, double(3, 4), name=self.NAME) == 0


def test_marks_of_autograd_go() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().exp()

    assert_same_as_eager(function, double(3), settings=only("post_grad.remove_noops"))
    assert counted("pass post_grad.remove_noops") > 0
