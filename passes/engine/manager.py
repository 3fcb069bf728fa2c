"""The pass manager: runs the passes of a stage in order, checks each changed graph, and undoes faulty changes.

::

    manager = PassManager(Switches(disable=("joint.*",)))
    for result in manager.run("post_grad", module):
        print(result.name, result.fired, result.nodes_before, result.nodes_after)
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import onnx_ir as ir
from torch import fx

from .bisecting import bisect_command, register_backend
from .context import Inferred, PassContext, Target
from .fx.snapshot import FxSnapshot, with_subgraphs
from .onnx.editing import mark_weight
from .onnx.snapshot import OnnxSnapshot
from .registry import STAGES, Pass, Switches, all_passes
from .results import PassResult

__all__ = [
    "STAGES",
    "Checker",
    "Inferred",
    "Listener",
    "Pass",
    "PassContext",
    "PassError",
    "PassManager",
    "Switches",
    "Target",
    "all_passes",
    "bisect_command",
    "count_nodes",
    "mark_weight",
    "register_backend",
]

logger = logging.getLogger(__name__)

_Snapshot: TypeAlias = FxSnapshot | OnnxSnapshot

_MOST_MATCHES = 5
"""How many matches the message about an undone pass names."""


class PassError(RuntimeError):
    """A pass failed. The message names the pass, the graph, and the option that turns the pass off."""

    def __init__(self, item: Pass, graph: str, error: Exception) -> None:
        advice = f". Turn it off with options={{'passes': {{'disable': [{item.name!r}]}}}}"
        super().__init__(
            f"pass {item.name!r} failed on {graph}: {type(error).__name__}: {error}{'' if item.is_needed else advice}"
        )


class Checker(Protocol):
    """The numeric check of a pass."""

    def problem(self, before: Any, after: Any, *, is_needed: bool = False) -> str | None:
        """Which node's values a pass changed, and the error; ``None`` if by no more than rounding.

        Args:
            before, after: the graph.
            is_needed: whether results are right only with the pass; then ``after`` is compared with eager.
        """


class Listener(Protocol):
    """Receives the graph before the first pass and after each pass that changed it."""

    def start(self, stage: str, graph: Any) -> None:
        """The passes of a stage begin; this is the graph before them."""

    def fired(self, result: PassResult, graph: Any) -> None:
        """A pass changed the graph; this is the graph after it, before the change is undone if it is."""


class PassManager:
    """Runs the passes of a stage, in order.

    Args:
        switches: which passes are on.
        target: where the graphs will run.
        explain: whether near misses are recorded.
        strict: whether a failing pass raises an error; else it is skipped with a warning, unless it is needed.
        passes: the passes to run, in this order; by default all registered passes.
    """

    def __init__(
        self,
        switches: Switches | None = None,
        target: Target | None = None,
        *,
        explain: bool = False,
        strict: bool = False,
        passes: Sequence[Pass] | None = None,
    ) -> None:
        switches = switches or Switches()
        self._target = target or Target()
        self._explain = explain
        self._strict = strict
        self._by_stage: dict[str, list[Pass]] = {stage: [] for stage in STAGES}
        for item in all_passes() if passes is None else passes:
            if switches.is_on(item):
                self._by_stage[item.stage].append(item)

    def run(
        self,
        stage: str,
        graph: Any,
        *,
        name: str = "the graph",
        checker: Checker | None = None,
        listener: Listener | None = None,
    ) -> list[PassResult]:
        """Runs the passes of ``stage`` on ``graph``.

        After each pass that changed the graph, unused nodes are erased and the graph is checked: it is well formed, it
        can be computed, and its results have the same dtypes, shapes, strides and aliases as before. A pass that fails
        or breaks the graph is undone with a warning. A pass that would take a node from a user's converter
        (``Target.keeps``) is left out of this graph, unless it is needed.

        Args:
            stage: one of ``STAGES``.
            graph: an ``fx.GraphModule``, in the stage ``onnx`` an ``onnx_ir.Model``; changed in place.
            name: the name of the graph, for messages.
            checker: compares the results of the graph before and after each pass that changed it; if it reports a
                problem, the pass is undone.
            listener: receives the graph around each pass that fired.

        Returns:
            A result for each pass that ran.

        Raises:
            KeyError: there is no such stage.
            PassError: a pass failed or broke the graph, or the checker reported a problem, and the pass is needed; or
                it failed or broke the graph and the manager is strict.
        """
        passes = self._by_stage[stage]
        if listener is not None and passes:
            listener.start(stage, graph)
        snapshot: _Snapshot | None = None
        results = []
        for item in passes:
            start = time.perf_counter()
            if snapshot is None:
                snapshot, kept = take_snapshot(graph), _kept(graph, self._target)
            result, is_changed = self._run_one(item, graph, snapshot, kept, name)
            milliseconds = (time.perf_counter() - start) * 1e3
            result = dataclasses.replace(result, milliseconds=milliseconds)
            if result.fired:
                result = self._checked(item, result, graph, snapshot, name, checker)
                if listener is not None:
                    listener.fired(result, graph)
                if result.undone:
                    snapshot.restore()
            if is_changed:
                snapshot = None
            results.append(result)
        if any(result.fired for result in results):
            _recompile(graph)
        return results

    def _run_one(
        self, item: Pass, graph: Any, snapshot: _Snapshot, kept: collections.Counter[str], name: str
    ) -> tuple[PassResult, bool]:
        """Runs one pass; returns its result and whether it changed the graph. Undoes it if it failed or broke it, or if
        it rewrote a node that is ``kept``."""
        target = dataclasses.replace(self._target, keeps=lambda _: None) if item.is_needed else self._target
        context = PassContext(item.name, name, target, explain=self._explain)
        before = count_nodes(graph)
        fired, error, problem = 0, None, None
        try:
            fired = self._call(item, graph, context)
        except Exception as failure:  # a pass, maybe of another package, may raise anything
            error = failure
        is_changed = snapshot.changed()
        lost = kept - _kept(graph, target) if is_changed and not item.is_needed else None
        if error is None and lost:
            snapshot.restore()
            note = f"left out, because it would rewrite {', '.join(lost)}, which has a registered converter"
            return PassResult(item.name, 0, before, before, 0.0, near_misses=context.near_misses, note=note), True
        if error is None and is_changed:
            problem = snapshot.problem(self._target)
            error = None if problem is None else ValueError(problem)
        if error is None:
            result = PassResult(item.name, fired, before, count_nodes(graph), 0.0, context.matches, context.near_misses)
            return _corrected(result, is_changed, name), is_changed
        if self._strict or item.is_needed:
            raise PassError(item, name, error) from error
        traceback = error if problem is None else None
        logger.warning("%s. It is left out", PassError(item, name, error), exc_info=traceback)
        if is_changed:
            snapshot.restore()
        undone = problem or f"it failed: {error!r}"
        return PassResult(item.name, 0, before, before, 0.0, near_misses=context.near_misses, undone=undone), is_changed

    @staticmethod
    def _checked(
        item: Pass, result: PassResult, graph: Any, snapshot: _Snapshot, name: str, checker: Checker | None
    ) -> PassResult:
        """The result of a pass after the numeric check."""
        if checker is not None:
            _recompile(graph)
            problem = checker.problem(snapshot.before(), graph, is_needed=item.is_needed)
            if problem is not None and item.is_needed:
                raise PassError(item, name, ValueError(problem))
            if problem is not None:
                where = f"; it fired at {', '.join(result.matches[:_MOST_MATCHES])}" if result.matches else ""
                result = dataclasses.replace(result, undone=problem + where)
                logger.warning("pass %s on %s changed the results and is undone: %s", result.name, name, result.undone)
        logger.info(
            "pass %s on %s: fired %d, nodes %d -> %d, %.1f ms",
            *(result.name, name, result.fired, result.nodes_before, result.nodes_after, result.milliseconds),
        )
        return result

    @staticmethod
    def _call(item: Pass, graph: Any, context: PassContext) -> int:
        if not item.is_needed and not context.allows_pass():
            return 0
        parts = list(with_subgraphs(graph)) if isinstance(graph, fx.GraphModule) else [graph]
        return sum(_checked_count(item.run(part, context)) for part in parts)


def _checked_count(fired: object) -> int:
    if isinstance(fired, bool) or not isinstance(fired, int) or fired < 0:
        raise TypeError(f"a pass must return how many times it fired, an integer; it returned {fired!r}")
    return fired


def _corrected(result: PassResult, is_changed: bool, name: str) -> PassResult:
    """The result of a pass, corrected if it fired without changing the graph, or changed it without firing."""
    result = result if is_changed else dataclasses.replace(result, matches=[])
    if is_changed == bool(result.fired):
        return result
    note = f"it returned that it fired {result.fired} times, but changed nothing"
    if is_changed:
        note = "it returned that it fired 0 times, but changed the graph"
    logger.warning("pass %s on %s: %s", result.name, name, note)
    return dataclasses.replace(result, fired=int(is_changed), note=note)


def _kept(graph: Any, target: Target) -> collections.Counter[str]:
    """The operators with a user's converter in a graph and its subgraphs, with their number."""
    is_fx = isinstance(graph, fx.GraphModule)
    nodes = (node for part in with_subgraphs(graph) for node in part.graph.nodes) if is_fx else graph.graph.all_nodes()
    return collections.Counter(filter(None, map(target.keeps, nodes)))


def count_nodes(graph: Any) -> int:
    """Number of nodes of a graph and its subgraphs, without inputs and outputs."""
    if not isinstance(graph, fx.GraphModule):
        return len(graph.graph)
    return sum(
        node.op not in ("placeholder", "output", "get_attr")
        for part in with_subgraphs(graph)
        for node in part.graph.nodes
    )


def _recompile(graph: Any) -> None:
    if isinstance(graph, fx.GraphModule):
        for part in with_subgraphs(graph):
            part.recompile()


def take_snapshot(graph: fx.GraphModule | ir.Model) -> _Snapshot:
    return FxSnapshot(graph) if isinstance(graph, fx.GraphModule) else OnnxSnapshot(graph)
