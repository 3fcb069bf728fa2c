"""What a pipeline tells of itself: each stage, as it is reached, and each compiled graph before its first run.

The production backend's observer is ``Observer`` itself, which does nothing. The debug backend's writes it all down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from passes.engine.manager import Listener, PassResult

if TYPE_CHECKING:
    from .pipeline import CompiledGraph

STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad", "regions", "onnx", "onnx_optimized", "session", "run")
"""The names of the stages, in order. Files of a dump, passes and headings use the same names."""

Runner = Callable[[list[object]], object]
"""A compiled graph: takes its arguments boxed (in one list, which it empties) and returns the results."""


@dataclasses.dataclass(frozen=True)
class GraphName:
    """Which graph: the number of the Dynamo graph, and ``forward``, ``backward``, ``inference`` or, before
    AOTAutograd told them apart, an empty direction."""

    index: int
    direction: str = ""

    def __str__(self) -> str:
        return f"graph {self.index} {self.direction}".rstrip()


class Observer:
    """Hears every arrow of the pipeline; this one does nothing."""

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        """A stage is reached.

        Args:
            name: one of ``STAGES``.
            graph: which graph.
            artifact: ``dynamo`` to ``post_grad``: the ``fx.GraphModule``; ``regions``: the ``Split``;
                ``onnx`` and ``onnx_optimized``: a ``CompiledRegion`` with its model; ``session``: with its session too.
        """

    explains = False
    """Whether passes are asked to keep their near misses."""

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """The passes of ``pre_grad`` or ``joint`` have run; those of later stages are in the ``CompiledGraph``."""

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        """Who is shown the graph around each pass that fires, or ``None``."""
        return None

    def runner(self, graph: CompiledGraph) -> Runner:
        """What is called for a compiled graph; an observer that watches the runs wraps ``graph.run``."""
        return graph.run
