"""The passes of the stage ``post_grad``: each fires alone where its rule says; results and gradients stay eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import assert_same_as_eager, counted
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
