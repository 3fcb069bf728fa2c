"""Runs the passes of a stage on one graph, and counts what they did."""

from __future__ import annotations

from typing import Any

from passes.engine.manager import Checker, PassManager
from passes.engine.results import PassResult

from ..events import count
from ..graphs.artifacts import GraphName
from ..options import Options
from ..partition.regions import Support
from .observer import Observer
from .pass_target import pass_target


class StagePasses:
    """The passes of one pipeline."""

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
        """Runs the passes of a stage, and counts how often each fired.

        Args:
            stage: ``pre_grad``, ``joint``, ``post_grad`` or ``onnx``.
            graph: the name of the graph.
            artifact: an ``fx.GraphModule``, or the ``onnx_ir.Model`` of a region; changed in place.
            region: index of the region, for a model.
            checker: checks the results of each pass that fires.
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
