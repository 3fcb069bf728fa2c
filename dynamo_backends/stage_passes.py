"""Runs the passes of a stage on one graph, and counts what they did."""

from __future__ import annotations

from typing import Any

from passes.engine.manager import Checker, PassManager, PassResult

from .artifacts import GraphName
from .events import count
from .observer import Observer
from .options import Options
from .pass_target import pass_target
from .regions import Support


class StagePasses:
    """The passes of one pipeline; ``observer`` sees the graph around each pass that fires."""

    def __init__(self, options: Options, observer: Observer, support: Support) -> None:
        self._observer = observer
        self._manager = PassManager(
            options.passes,
            pass_target(options, support),
            explain=observer.explains,
            strict=options.fallback == "error",
        )

    def run(
        self,
        stage: str,
        graph: GraphName,
        artifact: Any,
        region: int | None = None,
        checker: Checker | None = None,
    ) -> list[PassResult]:
        """Runs the passes of a stage on a graph or a region's model; counts what they did.

        Args:
            stage: ``pre_grad``, ``joint``, ``post_grad`` or ``onnx``.
            graph: its name.
            artifact: the ``fx.GraphModule``, or the ``onnx_ir.Model`` of a region; changed in place.
            region: which region, for a model.
            checker: the numeric check of each pass that fires.
        """
        label = str(graph) if region is None else f"{graph} region {region}"
        listener = self._observer.pass_listener(GraphName(graph.index) if stage == "joint" else graph, region)
        results = self._manager.run(stage, artifact, name=label, checker=checker, listener=listener)
        for result in results:
            if result.undone:
                count(f"undone pass {result.name}")
            elif result.fired:
                count(f"pass {result.name}", result.fired)
        return results
