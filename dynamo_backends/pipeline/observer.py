"""Observers: a pipeline notifies its observer of each stage, and lets it wrap the compiled callables.

``onnxrt`` uses ``Observer`` itself, which only logs. ``onnx_debug`` uses a subclass that writes the dump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..common.safety_net import caught, net
from ..errors import SessionError, first_line
from ..graphs.artifacts import GraphName, Runner
from ..pipeline.stage_data import CompiledGraph
from .stage_logging import stage_reached

if TYPE_CHECKING:
    import onnx_ir as ir

    from passes.engine.manager import Listener
    from passes.engine.results import PassResult

    from ..partition.program import LoadedProgram

T = TypeVar("T")

STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad", "regions", "onnx", "onnx_optimized", "session", "run")
"""The names of the stages, in order. Files of a dump, passes and headings use the same names."""


class Observer:
    """Is notified of each stage of the pipeline. This one writes PyTorch's logs, if they are on."""

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        """A stage is reached.

        Args:
            name: one of ``STAGES``.
            graph: its name.
            artifact: ``dynamo`` to ``post_grad``: the ``fx.GraphModule``; ``regions``: the ``Split``; ``onnx``,
                ``onnx_optimized`` and ``session``: a ``CompiledRegion``.
        """
        stage_reached(name, graph, artifact)

    def rejected(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        """ONNX Runtime rejected the model of a region; the graph will be split again.

        Args:
            graph: its name.
            region: index of the region in this split.
            model: the model after the passes of ``onnx``.
            error: of ONNX Runtime.
        """

    @property
    def watches(self) -> bool:
        """Whether this is a subclass: then graphs are compiled, not loaded from the cache, and not autotuned."""
        return type(self) is not Observer

    explains = False
    """Whether passes record their near misses."""

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """The passes of ``pre_grad`` or ``joint`` ran; the results of later stages are in the ``CompiledGraph``."""

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        """A listener that receives the graph before and after the passes that fire, or ``None``."""
        return None

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        """The callable for Dynamo, which takes the graph's arguments: ``compiled``, or a wrapper of it."""
        return compiled

    def gave_up(self, graph: GraphName, why: str) -> None:
        """One of Dynamo's graphs was discarded; Dynamo may trace the function again, as another graph."""

    def not_compiled(self, graph: GraphName, why: str) -> None:
        """A forward, backward or inference graph runs in PyTorch, because its compile failed."""

    def failed(self, graph: GraphName, why: str) -> None:
        """A method of this observer failed for a graph, whose verdict must not be ``ok`` from now on."""

    def close(self) -> Observer:
        """Stops observing, and writes what is left to write. Returns the observer of what is compiled later."""
        return self

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        """The runner of a compiled graph: ``loaded.run``, or a wrapper of it."""
        return loaded.run


class GuardedObserver(Observer):
    """A wrapper of an observer: exceptions of the observer's methods do not reach the user.

    The callables that ``entry`` and ``runner`` return must handle their own exceptions.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.explains = observer.explains

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        self.guarded(f"the stage {name}", graph, lambda: self._observer.stage(name, graph, artifact), None)

    def rejected(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        self.guarded("a rejected region", graph, lambda: self._observer.rejected(graph, region, model, error), None)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self.guarded("the passes", graph, lambda: self._observer.passes(graph, results), None)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        listener = self.guarded("the passes", graph, lambda: self._observer.pass_listener(graph, region), None)
        return None if listener is None else _GuardedListener(listener, self, graph)

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        return self.guarded("the comparison", graph, lambda: self._observer.entry(graph, compiled), compiled)

    def gave_up(self, graph: GraphName, why: str) -> None:
        self.guarded("the manifest", graph, lambda: self._observer.gave_up(graph, why), None)

    def not_compiled(self, graph: GraphName, why: str) -> None:
        self.guarded("the manifest", graph, lambda: self._observer.not_compiled(graph, why), None)

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        return self.guarded("the comparison", graph.name, lambda: self._observer.runner(graph, loaded), loaded.run)

    def close(self) -> Observer:
        self._observer = self.guarded("the end of the dump", GraphName(0), self._observer.close, Observer())
        return self

    def guarded(self, what: str, graph: GraphName, call: Callable[[], T], otherwise: T) -> T:
        """The result of ``call``, which messages name ``what``.

        If it raises, this logs the exception, adds it to the verdict of the graph, and returns ``otherwise``.
        """
        try:
            return call()
        except Exception as error:
            caught(f"{what} of {graph}, for the debug backend,", error, "The graph runs")
            with net(f"the verdict of {graph}", "The graph runs"):
                self._observer.failed(graph, f"{what} failed: {type(error).__name__}: {first_line(str(error))}")
            return otherwise


class _GuardedListener:
    """A wrapper of a listener whose exceptions do not end the compile."""

    def __init__(self, listener: Listener, observer: GuardedObserver, graph: GraphName) -> None:
        self._listener = listener
        self._observer = observer
        self._graph = graph

    def start(self, stage: str, graph: object) -> None:
        self._observer.guarded("the passes", self._graph, lambda: self._listener.start(stage, graph), None)

    def fired(self, result: PassResult, graph: object) -> None:
        self._observer.guarded("the passes", self._graph, lambda: self._listener.fired(result, graph), None)
