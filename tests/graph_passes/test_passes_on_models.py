"""All passes on real models: the numeric check undoes none, and values that keep their names keep their contents."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import compiled
from torch import fx
from torch._dynamo.utils import counters
from zoo import ZOO, scalar

from dynamo_backends.graphs.artifacts import GraphName, Runner
from dynamo_backends.options import parse_options
from dynamo_backends.partition.pass_verification import ModelChecker, evaluate
from dynamo_backends.partition.program import LoadedProgram
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from dynamo_backends.pipeline.stage_data import CompiledGraph

VERIFY = {"options": {"verify_passes": True}}


def undone() -> list[str]:
    return [event for event in counters["dynamo_backends"] if event.startswith("undone pass")]


def fired() -> set[str]:
    return {event.split()[1] for event in counters["dynamo_backends"] if event.startswith("pass ")}


@pytest.mark.parametrize("name", ["swin", "clip", "t5"])
def test_no_pass_is_undone_in_inference(name: str) -> None:
    model, feeds = ZOO[name].build().eval(), ZOO[name].inputs()
    with torch.no_grad():
        compiled(model, **VERIFY)(**feeds)
    assert fired() and not undone()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_pass_is_undone_in_training(name: str) -> None:
    model, feeds = ZOO[name].build().train(), ZOO[name].inputs()
    scalar(compiled(model, **VERIFY)(**feeds)).backward()
    assert fired() and not undone()


class _Keeper(Observer):
    """Keeps the compiled graphs, and the arguments of their first runs."""

    def __init__(self) -> None:
        self.runs: list[tuple[CompiledGraph, list[object]]] = []

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        def run(args: list[object]) -> object:
            self.runs.append((graph, list(args)))
            return loaded.run(args)

        return run


@pytest.mark.parametrize("name", ["bert", "llama", "swin"])
def test_names_that_survive_hold_what_they_held(name: str) -> None:
    """Optimized models are compared with others at the values whose names survive, so these must be right.

    The names a user needs, those of the results, always survive.
    """
    model, feeds, keeper = ZOO[name].build().eval(), ZOO[name].inputs(), _Keeper()

    def backend(module: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        return Pipeline(parse_options(), keeper).compile_dynamo_graph(module, example_inputs)

    with torch.no_grad():
        torch.compile(model, backend=backend)(**feeds)
    assert keeper.runs
    for graph, arguments in keeper.runs:
        assert isinstance(graph.name, GraphName)
        evaluation = evaluate(graph.module, arguments)
        for compiled_region in graph.regions:
            region, bound = compiled_region.region, compiled_region.bound
            before, after = compiled_region.model, compiled_region.optimized_model
            assert [value.name for value in after.graph.outputs] == [value.name for value in before.graph.outputs]
            assert [value.name for value in after.graph.inputs] == [value.name for value in before.graph.inputs]
            checker = ModelChecker(
                evaluation,
                [item.node for item in region.inputs],
                [item.node for item in region.outputs],
                bound.inputs,
                bound.outputs,
                bound.settings,
            )
            assert checker.first_value(before, after) is None
