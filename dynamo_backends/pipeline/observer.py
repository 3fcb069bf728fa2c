"""What a pipeline tells of itself: each stage, as it is reached, and each compiled graph before its first run.

The production backend's observer is ``Observer`` itself, which looks at nothing. The debug backend's writes all down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..common.safety_net import caught
from ..errors import SessionError, first_line
from ..graphs.artifacts import CompiledGraph, GraphName, Runner
from .stage_logging import stage_reached

if TYPE_CHECKING:
    import onnx_ir as ir

    from passes.engine.manager import Listener
    from passes.engine.results import PassResult

    from ..partition.program import Loaded

T = TypeVar("T")

STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad", "regions", "onnx", "onnx_optimized", "session", "run")
"""The names of the stages, in order. Files of a dump, passes and headings use the same names."""


class Observer:
    """Is told of each stage of the pipeline; this one tells PyTorch's logs, where these are on."""

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        """A stage is reached.

        Args:
            name: one of ``STAGES``.
            graph: which graph.
            artifact: ``dynamo`` to ``post_grad``: the ``fx.GraphModule``; ``regions``: the ``Split``;
                ``onnx`` and ``onnx_optimized``: a ``CompiledRegion`` with its model; ``session``: with its session too.
        """
        stage_reached(name, graph, artifact)

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

    def not_compiled(self, graph: GraphName, why: str) -> None:
        """A forward, backward or inference graph runs in PyTorch, because its compile failed."""

    def failed(self, graph: GraphName, why: str) -> None:
        """What this observer was to do for a graph failed; nothing may call the graph right from now on."""

    def close(self) -> None:
        """Stops watching, and writes what is not written yet."""

    def runner(self, graph: CompiledGraph, loaded: Loaded) -> Runner:
        """What is called for a compiled graph; an observer that watches the runs wraps ``loaded.run``."""
        return loaded.run


class GuardedObserver(Observer):
    """Another observer whose failures do not end the user's call.

    What it returns to be called, of ``entry``, ``runner`` and ``pass_listener``, takes care of its own failures.

    Args:
        observer: the observer.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.explains = observer.explains

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        self._guarded(f"the stage {name}", graph, lambda: self._observer.stage(name, graph, artifact), None)

    def refused(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        self._guarded("a refused region", graph, lambda: self._observer.refused(graph, region, model, error), None)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._guarded("the passes", graph, lambda: self._observer.passes(graph, results), None)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        listener = self._guarded("the passes", graph, lambda: self._observer.pass_listener(graph, region), None)
        return None if listener is None else _GuardedListener(listener, self, graph)

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        return self._guarded("the comparison", graph, lambda: self._observer.entry(graph, compiled), compiled)

    def gave_up(self, graph: GraphName, why: str) -> None:
        self._guarded("the manifest", graph, lambda: self._observer.gave_up(graph, why), None)

    def not_compiled(self, graph: GraphName, why: str) -> None:
        self._guarded("the manifest", graph, lambda: self._observer.not_compiled(graph, why), None)

    def runner(self, graph: CompiledGraph, loaded: Loaded) -> Runner:
        return self._guarded("the comparison", graph.name, lambda: self._observer.runner(graph, loaded), loaded.run)

    def close(self) -> None:
        self._guarded("the end of the dump", GraphName(0), self._observer.close, None)

    def told(self, what: str, graph: GraphName, error: Exception) -> None:
        """An exception of the observer: it is told of, and the graph's verdict says it."""
        caught(f"{what} of {graph}, for the debug backend,", error, "The graph runs")
        try:
            self._observer.failed(graph, f"{what} failed: {type(error).__name__}: {first_line(str(error))}")
        except Exception as second:
            caught(f"the verdict of {graph}", second, "The graph runs")

    def _guarded(self, what: str, graph: GraphName, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self.told(what, graph, error)
            return otherwise


class _GuardedListener:
    """A listener of the pass manager whose failures do not end the compile."""

    def __init__(self, listener: Listener, observer: GuardedObserver, graph: GraphName) -> None:
        self._listener = listener
        self._observer = observer
        self._graph = graph

    def start(self, stage: str, graph: object) -> None:
        try:
            self._listener.start(stage, graph)
        except Exception as error:
            self._observer.told("the passes", self._graph, error)

    def fired(self, result: PassResult, graph: object) -> None:
        try:
            self._listener.fired(result, graph)
        except Exception as error:
            self._observer.told("the passes", self._graph, error)
