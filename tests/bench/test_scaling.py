"""The cost of a compile is linear in the size of the graph, counted in calls of Python and C functions."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import pytest
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[2]))  # ``benchmarks`` is not installed

from benchmarks.compile_time import GRAPHS  # noqa: E402
from dynamo_backends.graphs.artifacts import GraphName  # noqa: E402
from dynamo_backends.options import Options  # noqa: E402
from dynamo_backends.partition import regions  # noqa: E402
from dynamo_backends.pipeline.observer import Observer  # noqa: E402
from dynamo_backends.pipeline.runners import Runners  # noqa: E402

SMALL = 120
"""Nodes of the smaller graph; the larger has four times as many."""


def calls_in_compile(name: str, size: int) -> int:
    """How many functions the pipeline calls to compile a graph of the benchmark."""
    module = GRAPHS[name](size)
    compile_graph = Runners(Options(cache=False), Observer()).on_onnx  # a graph that is found is no compile
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what other tests left would be counted; and before Python 3.11.5 it may crash while one counts
    sys.setprofile(count)
    try:
        compile_graph(GraphName(0, "inference"), module, is_joint=True)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GRAPHS)
def test_four_times_the_nodes_are_four_times_the_work(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In proportion it would be 4, quadratic 16; answers of the runtime about nodes are kept from the first compile."""
    caplog.set_level(logging.ERROR)
    calls_in_compile(name, 4 * SMALL)
    assert calls_in_compile(name, 4 * SMALL) < 5 * calls_in_compile(name, SMALL)


def test_a_quadratic_step_is_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A scan of the graph for each of its nodes, which is what the test above is there to find."""
    caplog.set_level(logging.ERROR)
    is_ordered = regions.is_ordered

    def scanning(node: fx.Node) -> bool:
        return dict(zip(node.graph.nodes, map(is_ordered, node.graph.nodes), strict=True))[node]

    monkeypatch.setattr(regions, "is_ordered", scanning)
    few = SMALL // 2
    calls_in_compile("chain", few)
    assert calls_in_compile("chain", 4 * few) > 5 * calls_in_compile("chain", few)
