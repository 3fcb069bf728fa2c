"""A graph run node by node, in eager and in float64: what is computed, recorded, and dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.numerics.graph_execution import FxExecution, value_of

X = torch.tensor([0.1, 0.5, 0.9])


def graph_of(function: Callable[..., object]) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = make_fx(function)(X.clone())
    return module, {node.name: node for node in module.graph.nodes}


def test_values_are_dropped_after_their_last_use() -> None:
    module, nodes = graph_of(lambda x: x.sin().exp().neg())
    execution = FxExecution(module, [X], torch.get_rng_state(), compared={"sin"})
    execution.reach(nodes["neg"])
    assert set(execution.eager) == {nodes["sin"], nodes["neg"]}
    torch.testing.assert_close(execution.exact_of(nodes["neg"]), X.double().sin().exp().neg())
    assert execution.release(nodes["sin"]) == [nodes["sin"]] and set(execution.exact) == {nodes["neg"]}


def test_what_is_recorded_is_not_computed_again() -> None:
    module, nodes = graph_of(lambda x: torch.rand_like(x) * x)
    drawn = torch.tensor([1.0, 2.0, 3.0])
    execution = FxExecution(module, [X], torch.get_rng_state(), recorded={nodes["rand_like"]: drawn})
    execution.reach(nodes["mul"])
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), drawn.double() * X.double())


def test_what_rounding_decides_is_told_and_eagers() -> None:
    module, nodes = graph_of(lambda x: (x * x > 0, x.long() > 0))
    tiny = torch.full((3,), 1e-30)
    execution = FxExecution(module, [tiny], torch.get_rng_state())
    for node in module.graph.nodes:
        if node.op != "output":
            execution.run(node)
    compared = [node for node in nodes.values() if node.target is torch.ops.aten.gt.Scalar]
    assert compared[0] in execution.decisions and compared[1] not in execution.decisions
    assert not execution.exact_of(compared[0]).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_a_node_that_writes_does_so_once_on_each_side(dtype: torch.dtype) -> None:
    module, nodes = graph_of(lambda x: x.add_(1) * 2)
    x = X.to(dtype)
    execution = FxExecution(module, [x.clone()], torch.get_rng_state())
    execution.reach(nodes["mul"])
    wide = x if dtype.is_complex else x.double()
    torch.testing.assert_close(execution.eager[nodes["mul"]], (x + 1) * 2)
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), (wide + 1) * 2)


def test_a_node_may_write_into_eagers_result_that_float64_took_over() -> None:
    """A bit-cast is not computed in float64."""
    module, nodes = graph_of(lambda x: x.double().view(torch.int64).view(torch.float64).add_(1) * 2)
    execution = FxExecution(module, [X.clone()], torch.get_rng_state())
    execution.reach(nodes["mul"])
    torch.testing.assert_close(execution.eager[nodes["mul"]], (X.double() + 1) * 2)
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), (X.double() + 1) * 2)


def test_float64_alone_does_not_write_into_the_graphs_tensors() -> None:
    module, nodes = graph_of(lambda x: x * 2)
    module.register_buffer("buffer", torch.zeros(3, dtype=torch.float64))
    with module.graph.inserting_before(nodes["mul"]):
        buffer = module.graph.get_attr("buffer")
        added = module.graph.call_function(torch.ops.aten.add_.Scalar, (buffer, 1))
    FxExecution(module, [X.clone()], torch.get_rng_state(), eager=False).reach(added)
    assert not module.buffer.any()


def test_a_value_that_is_not_known_is_computed_of_those_that_are() -> None:
    module, nodes = graph_of(lambda x: (x.sin() + 1).exp())
    known: dict[fx.Node, object] = {nodes["sin"]: torch.zeros(3)}
    torch.testing.assert_close(value_of(nodes["exp"], known), torch.ones(3).exp())
    assert nodes["add"] in known
