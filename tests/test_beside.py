"""Graphs that are computed beside another: only what they compute otherwise, and with the results they have alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from dynamo_backends.debug import beside
from dynamo_backends.debug.beside import Beside, can_read_along, compute
from dynamo_backends.numerics.twice import Results

aten = torch.ops.aten

X = torch.linspace(-2.0, 2.0, 24).reshape(4, 6)
W = torch.linspace(-1.0, 1.0, 36).reshape(6, 6)

Body = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def graph_of(body: Body) -> fx.GraphModule:
    """A graph of ``x`` and ``w`` with one result; its nodes are named by what they are."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output([body(graph, x, w)])
    return fx.GraphModule(torch.nn.Module(), graph)


def call(graph: fx.Graph, name: str, target: object, *args: object) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
    node.meta["val"] = X
    return node


def model(activation: Body) -> fx.GraphModule:
    def body(graph: fx.Graph, x: fx.Node, w: fx.Node) -> fx.Node:
        first = call(graph, "first", aten.mm.default, x, w)
        second = call(graph, "second", aten.mm.default, activation(graph, first, w), w)
        return call(graph, "third", aten.mm.default, second, w)

    return graph_of(body)


PLAIN = model(lambda graph, x, w: call(graph, "double", aten.mul.Tensor, x, 2.0))
REWRITTEN = model(lambda graph, x, w: call(graph, "added", aten.add.Tensor, x, x))
WRONG = model(lambda graph, x, w: call(graph, "triple", aten.mul.Tensor, x, 3.0))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that are computed in float64, in order."""
    return watched(monkeypatch, "run_exact_beside")


def watched(monkeypatch: pytest.MonkeyPatch, function: str) -> list[str]:
    names: list[str] = []
    run = getattr(beside, function)

    def counted(node: fx.Node, *args: object) -> object:
        names.append(node.name)
        return run(node, *args)

    monkeypatch.setattr(beside, function, counted)
    return names


def both(trunk: fx.GraphModule, other: fx.GraphModule) -> tuple[Results, Results | None]:
    along = Beside(other, [X, W])
    return compute(trunk, [X, W], torch.get_rng_state(), [along]), along.results()


def test_the_same_graph_is_computed_once(computed: list[str]) -> None:
    first, other = both(PLAIN, PLAIN)
    assert computed == ["first", "double", "second", "third"]
    assert other is not None and other.exact[0] is first.exact[0]


def test_behind_a_right_rewrite_the_graphs_are_one_again(computed: list[str]) -> None:
    first, other = both(PLAIN, REWRITTEN)
    assert sorted(computed) == ["added", "double", "first", "second", "second", "third"]
    assert other is not None and other.exact[0] is first.exact[0]


def test_what_follows_of_a_wrong_rewrite_is_computed() -> None:
    first, other = both(PLAIN, WRONG)
    expected = (X.double() @ W.double() * 3.0) @ W.double() @ W.double()
    assert other is not None and isinstance(other.exact[0], torch.Tensor)
    torch.testing.assert_close(other.exact[0], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(other.eager[0], expected.float())
    assert not beside.is_same(first.exact[0], other.exact[0])


def test_results_are_float64_and_eager_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    in_eager = watched(monkeypatch, "run_eager")
    first, other = both(PLAIN, REWRITTEN)
    assert isinstance(first.exact[0], torch.Tensor) and first.exact[0].dtype is torch.float64
    assert in_eager == []
    torch.testing.assert_close(first.eager[0], (X @ W * 2.0) @ W @ W)
    assert in_eager == ["first", "double", "second", "third"]
    assert other is not None and torch.equal(other.eager[0], first.eager[0]) and len(in_eager) == 4  # type: ignore[arg-type]


def test_what_float64_must_not_decide_is_eagers() -> None:
    """The sign of a product that is 0 in float32 only."""

    def is_positive(graph: fx.Graph, x: fx.Node, w: fx.Node) -> fx.Node:
        return call(graph, "sign", aten.gt.Scalar, call(graph, "square", aten.mul.Tensor, x, x), 0.0)

    graph = graph_of(is_positive)
    graph.graph.find_nodes(op="call_function", target=aten.gt.Scalar)[0].meta["val"] = X > 0
    results = compute(graph, [torch.full_like(X, 1e-30), W], torch.get_rng_state(), [])
    assert results.exact[0] is results.eager[0] and not results.exact[0].any()  # type: ignore[attr-defined]


def test_an_argument_that_is_returned_is_one_value() -> None:
    graph = graph_of(lambda graph, x, w: w)
    first, last = Beside(graph, [X, W]), Beside(graph, [X, W])
    compute(PLAIN, [X, W], torch.get_rng_state(), [first, last])
    results = first.results(), last.results()
    assert results[0] is not None and results[1] is not None
    assert results[0].eager[0] is W and results[0].exact[0] is results[1].exact[0]
    assert torch.equal(results[0].exact[0], W.double())  # type: ignore[arg-type]


def test_numbers_of_other_types_are_other_arguments() -> None:
    integer = model(lambda graph, x, w: call(graph, "double", aten.div.Tensor_mode, x, True))
    assert beside._hashable((1, 0.0)) != beside._hashable((True, 0.0)) != beside._hashable((True, -0.0))
    _, other = both(PLAIN, integer)
    assert other is None  # it cannot be computed: the stage is looked at in full, and says so


def test_random_numbers_are_the_trunks() -> None:
    random = model(lambda graph, x, w: call(graph, "noise", aten.rand_like.default, x))
    first, other = both(random, random)
    assert other is not None and other.exact[0] is first.exact[0]


def test_random_numbers_of_its_own_cannot_be_drawn() -> None:
    random = model(lambda graph, x, w: call(graph, "noise", aten.rand_like.default, x))
    assert both(PLAIN, random)[1] is None


def test_a_graph_that_writes_is_computed_alone() -> None:
    assert can_read_along(PLAIN)
    assert not can_read_along(graph_of(lambda graph, x, w: call(graph, "written", aten.add_.Tensor, x, 1.0)))
