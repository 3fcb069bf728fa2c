"""Results that PyTorch leaves undefined (several values written to one place) are not reported as wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.debug.rows import Blame, GraphComparison
from dynamo_backends.debug.undefined_results import without_undefined
from dynamo_backends.dumps.blame import Cause, CauseKind

aten = torch.ops.aten
REPEATED, ONCE = torch.tensor([0, 2, -3, 1]), torch.tensor([0, 2, 3, 1])  # of five places, -3 is the third
ROWS, NUMBER = torch.randn(4, 3), torch.randn(1)
MASK = torch.tensor([True, False, True, True, True])

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], bool]] = {
    "index_put": (lambda x, i, v: aten.index_put(x, [i], v), (REPEATED, ROWS), True),
    "index_put of a column": (lambda x, i, v: aten.index_put(x, [None, i % 3], v), (REPEATED, torch.randn(5, 4)), True),
    "index_put of elements": (lambda x, i, v: aten.index_put(x, [i, i * 0], v), (REPEATED, torch.randn(4)), True),
    "index_put, once": (lambda x, i, v: aten.index_put(x, [i], v), (ONCE, ROWS), False),
    "index_put, adding": (lambda x, i, v: aten.index_put(x, [i], v, True), (REPEATED, ROWS), False),
    "index_put of one number": (lambda x, i, v: aten.index_put(x, [i], v), (REPEATED, NUMBER), False),
    "index_put of a mask": (lambda x, i, v: aten.index_put(x, [i], v), (MASK, ROWS), False),
    "index_copy": (lambda x, i, v: aten.index_copy(x, 0, i % 5, v), (REPEATED, ROWS), True),
    "index_copy, once": (lambda x, i, v: aten.index_copy(x, 0, i, v), (ONCE, ROWS), False),
    "put": (lambda x, i, v: aten.put(x, i, v), (torch.tensor([0, 14, -1, 1]), torch.randn(4)), True),
    "put, adding": (lambda x, i, v: aten.put(x, i, v, True), (torch.tensor([0, 14, -1, 1]), torch.randn(4)), False),
    "scatter": (lambda x, i, v: aten.scatter(x, 1, i, v), (torch.tensor([[0, 0], [1, 2]]), ROWS[:2, :2]), True),
    "scatter, once": (lambda x, i, v: aten.scatter(x, 0, i, v), (torch.tensor([[0, 0], [1, 2]]), ROWS[:2, :2]), False),
}


def judged(name: str, blame: str) -> tuple[GraphComparison, GraphComparison]:
    """A verdict that names a node between ``sin``, the operator and ``cos``, before and after ``without_undefined``."""
    write, arguments, _ = CASES[name]
    graph = make_fx(lambda x, *more: write(x.sin(), *more).cos())(torch.randn(5, 3), *arguments)
    values = dict(zip(graph.graph.find_nodes(op="placeholder"), (torch.randn(5, 3), *arguments), strict=True))
    given = GraphComparison(Blame(blame, Cause(CauseKind.NODE)))
    return given, without_undefined(given, graph, values)


@pytest.mark.parametrize("name", CASES)
def test_a_difference_behind_what_is_undefined(name: str) -> None:
    """The values inside a region are not known: what is written where is computed of those that are."""
    given, found = judged(name, "cos")
    if not CASES[name][2]:
        assert found is given
        return
    assert found.not_comparable and found.blame is None and "cos" in found.note


def test_a_fault_before_it_is_still_one() -> None:
    given, found = judged("index_put", "sin")
    assert found is given


def test_a_fault_in_a_branch_of_its_own_is_still_one() -> None:
    write, arguments, _ = CASES["index_put"]
    graph = make_fx(lambda x, *more: (write(x, *more), x.exp()))(torch.randn(5, 3), *arguments)
    values = dict(zip(graph.graph.find_nodes(op="placeholder"), (torch.randn(5, 3), *arguments), strict=True))
    given = GraphComparison(Blame("exp", Cause(CauseKind.NODE)))
    assert without_undefined(given, graph, values) is given


def test_what_agrees_is_ok() -> None:
    write, arguments, _ = CASES["index_put"]
    comparison = GraphComparison()
    assert without_undefined(comparison, make_fx(write)(torch.randn(5, 3), *arguments), {}) is comparison
