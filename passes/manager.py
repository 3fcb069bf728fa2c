"""The pass manager: the stages in their order, the passes of each in theirs, and what each pass did.

::

    manager = PassManager()
    for result in manager.run("post_grad", graph_module):
        print(result.name, result.fired)

Stages, in the order a compile meets them:

1. ``pre_grad``   Dynamo's graph, torch IR.
2. ``joint``      forward and backward together, before the partitioner; or the inference graph.
3. ``post_grad``  the forward, backward or inference graph on its own, ATen.
4. ``onnx``       one region's ONNX model.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

STAGES = ("pre_grad", "joint", "post_grad", "onnx")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass: its name (``post_grad.remove_noops``), one sentence, and a function on its graph.

    ``run`` changes the graph in place (an ``fx.GraphModule``; in the stage ``onnx`` an ``onnx_ir.Model``) and returns
    how many times it fired.
    """

    name: str
    sentence: str
    run: Callable[[Any], int]

    @property
    def stage(self) -> str:
        return self.name.split(".", 1)[0]


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph."""

    name: str
    fired: int
    nodes_before: int
    nodes_after: int
    milliseconds: float


def all_passes() -> tuple[Pass, ...]:
    """Every pass, in the order it runs."""
    from .onnx import common_subexpressions, remove_unused
    from .post_grad import remove_noops

    return (remove_noops.PASS, common_subexpressions.PASS, remove_unused.PASS)


class PassManager:
    """Runs the passes of a stage, in order."""

    def __init__(self) -> None:
        self._by_stage: dict[str, list[Pass]] = {stage: [] for stage in STAGES}
        for item in all_passes():
            self._by_stage[item.stage].append(item)

    def run(self, stage: str, graph: Any) -> list[PassResult]:
        """Runs the passes of ``stage`` on ``graph``, in place.

        Raises:
            KeyError: there is no such stage.
        """
        results = []
        for item in self._by_stage[stage]:
            before = _count(graph)
            start = time.perf_counter()
            fired = item.run(graph)
            elapsed = (time.perf_counter() - start) * 1e3
            results.append(PassResult(item.name, fired, before, _count(graph), elapsed))
        return results


def _count(graph: Any) -> int:
    """Nodes of a graph, inputs and outputs not counted."""
    nodes = graph.graph.nodes if hasattr(graph.graph, "nodes") else graph.graph
    return sum(1 for node in nodes if getattr(node, "op", "") not in ("placeholder", "output"))
