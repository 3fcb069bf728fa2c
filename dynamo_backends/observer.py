"""What a pipeline tells of itself: each stage, as it is reached, and each compiled graph before its first run.

The production backend's observer is ``Observer`` itself, which does nothing. The debug backend's writes it all down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .artifacts import CompiledGraph, GraphName, Runner
from .errors import SessionError

if TYPE_CHECKING:
    import onnx_ir as ir

    from passes.engine.manager import Listener, PassResult

STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad", "regions", "onnx", "onnx_optimized", "session", "run")
"""The names of the stages, in order. Files of a dump, passes and headings use the same names."""


class Observer:
    """Is told of each stage of the pipeline; this one does nothing."""

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        """A stage is reached.

        Args:
            name: one of ``STAGES``.
            graph: which graph.
            artifact: ``dynamo`` to ``post_grad``: the ``fx.GraphModule``; ``regions``: the ``Split``;
                ``onnx`` and ``onnx_optimized``: a ``CompiledRegion`` with its model; ``session``: with its session too.
        """

    def refused(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        """ONNX Runtime refused the model of a region; the graph is split anew.

        Args:
            graph: which graph.
            region: index of the region in this split.
            model: the model after the passes of ``onnx``.
            error: what the runtime said.
        """

    @property
    def watches(self) -> bool:
        """Whether it is another than this one, which looks at nothing."""
        return type(self) is not Observer

    explains = False
    """Whether passes are asked to keep their near misses."""

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """The passes of ``pre_grad`` or ``joint`` have run; those of later stages are in the ``CompiledGraph``."""

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        """Who is shown the graph around each pass that fires, or ``None``."""
        return None

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        """What Dynamo calls instead of its graph, with the graph's arguments; an observer that watches wraps it."""
        return compiled

    def gave_up(self, graph: GraphName, why: str) -> None:
        """One of Dynamo's graphs is not used after all; Dynamo may trace the function again, as another graph."""

    def runner(self, graph: CompiledGraph) -> Runner:
        """What is called for a compiled graph; an observer that watches the runs wraps ``graph.run``."""
        return graph.run
