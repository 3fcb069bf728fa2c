"""The pass manager: the stages in their order, the passes of each in theirs, and what each pass did.

::

    manager = PassManager(Switches(disable=("joint.*",)))
    for result in manager.run("post_grad", module):
        print(result.name, result.fired, result.nodes_before, result.nodes_after)

``stages.py`` lists the stages, ``passes/catalog.py`` our passes.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import fx

from .bisecting import bisect_command, register_backend
from .context import PassContext, Refusal, Target
from .registry import Pass, Switches, all_passes
from .stages import STAGES

__all__ = [
    "STAGES",
    "Checker",
    "Listener",
    "Pass",
    "PassContext",
    "PassError",
    "PassManager",
    "PassResult",
    "Refusal",
    "Switches",
    "Target",
    "all_passes",
    "bisect_command",
    "count_nodes",
    "register_backend",
]

logger = logging.getLogger(__name__)


_MOST_MATCHES = 5
"""Matches that the message about an undone pass names."""


class PassError(RuntimeError):
    """A pass failed. The message names it, the graph, and the option that turns it off."""

    def __init__(self, name: str, graph: str, error: Exception) -> None:
        super().__init__(
            f"pass {name!r} failed on {graph}: {type(error).__name__}: {error}. Turn it off with "
            f"options={{'passes': {{'disable': [{name!r}]}}}}"
        )
        self.name = name


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph.

    Attributes:
        name: the pass.
        fired: how many times it changed the graph.
        nodes_before, nodes_after: nodes of the graph, inputs and outputs not counted.
        milliseconds: how long it took, the numeric check not included.
        matches: where it fired, as far as it says so.
        refusals: its near misses, if they were asked for.
        undone: why the numeric check did not let the change stand; empty if it did.
    """

    name: str
    fired: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    matches: list[str] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    undone: str = ""


class Checker(Protocol):
    """The numeric check of a pass."""

    def problem(self, before: Any, after: Any) -> str | None:
        """What a pass changed in the results, naming the node and the error; ``None`` if nothing beyond rounding."""


class Listener(Protocol):
    """Who wants to see the graph around each pass that fired."""

    def start(self, stage: str, graph: Any) -> None:
        """A stage begins with this graph."""

    def fired(self, result: PassResult, graph: Any) -> None:
        """A pass fired; this is the graph after it, the copy if the check undoes it."""


class PassManager:
    """Runs the passes of a stage, in order.

    Args:
        switches: which passes are on.
        target: where the graphs will run.
        explain: whether near misses are kept.
        strict: whether a pass that raises an error ends the compile; else it is left out, with a warning.
    """

    def __init__(
        self,
        switches: Switches | None = None,
        target: Target | None = None,
        *,
        explain: bool = False,
        strict: bool = False,
    ) -> None:
        switches = switches or Switches()
        self._target = target or Target()
        self._explain = explain
        self._strict = strict
        self._by_stage: dict[str, list[Pass]] = {stage: [] for stage in STAGES}
        for item in all_passes():
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

        Args:
            stage: one of ``STAGES``.
            graph: an ``fx.GraphModule``, in the stage ``onnx`` an ``onnx_ir.Model``; changed in place.
            name: which graph, for people.
            checker: compares the results of the graph with those of a copy each pass has run on; a pass it objects to
                does not run on the graph itself.
            listener: is shown the graph around each pass that fired.

        Returns:
            A result for each pass that ran.

        Raises:
            KeyError: there is no such stage.
            PassError: a pass raised an error, and the manager is strict.
        """
        passes = list(self._by_stage[stage])
        failed: list[PassResult] = []
        while passes:
            saved = _copy(graph)
            if listener is not None:
                listener.start(stage, graph)
            try:
                return [*self._run_all(passes, graph, name, checker, listener), *failed]
            except PassError as error:
                if self._strict:
                    raise
                logger.warning("%s. It is left out", error, exc_info=True)
                _restore(graph, saved)
                passes = [item for item in passes if item.name != error.name]
                nodes = count_nodes(graph)
                failed.append(PassResult(error.name, 0, nodes, nodes, 0.0, undone=f"it failed: {error.__cause__!r}"))
        return failed

    def _run_all(
        self, passes: Sequence[Pass], graph: Any, name: str, checker: Checker | None, listener: Listener | None
    ) -> list[PassResult]:
        results = []
        for item in passes:
            trial = None
            if checker is not None:
                trial, result = self._try(item, graph, name, checker)
            if trial is None or not result.undone:
                result = self._run_one(item, graph, name)
            if result.undone:
                logger.warning("pass %s on %s changed the results and is undone: %s", item.name, name, result.undone)
            if result.fired:
                logger.info(
                    "pass %s on %s: fired %d, nodes %d -> %d, %.1f ms",
                    *(item.name, name, result.fired, result.nodes_before, result.nodes_after, result.milliseconds),
                )
                if listener is not None:
                    listener.fired(result, trial if result.undone else graph)
            results.append(result)
        return results

    def _try(self, item: Pass, graph: Any, name: str, checker: Checker) -> tuple[Any, PassResult]:
        """A pass on a copy of the graph: the copy, and what the pass did, with what the checker has against it."""
        copied = _copy(graph)
        result = self._run_one(item, copied, name)
        problem = checker.problem(graph, copied) if result.fired else None
        if problem is None:
            return copied, result
        if result.matches:
            problem += f"; it fired at {', '.join(result.matches[:_MOST_MATCHES])}"
        return copied, dataclasses.replace(result, undone=problem)

    def _run_one(self, item: Pass, graph: Any, name: str) -> PassResult:
        context = PassContext(item.name, name, self._target, explain=self._explain)
        before = count_nodes(graph)
        start = time.perf_counter()
        fired = 0
        if context.allows_pass():
            for part in _with_subgraphs(graph) if item.visits_subgraphs else [graph]:
                try:
                    fired += _checked_count(item.run(part, context))
                except Exception as error:  # whatever goes wrong in a pass, anyone's, is told of the pass
                    raise PassError(item.name, name, error) from error
        elapsed = (time.perf_counter() - start) * 1e3
        if fired and not isinstance(graph, fx.GraphModule) and (said := self._target.objection(graph)) is not None:
            raise PassError(item.name, name, ValueError(f"the model it made must not run: {said}"))
        return PassResult(item.name, fired, before, count_nodes(graph), elapsed, context.matches, context.refusals)


def _checked_count(fired: object) -> int:
    if isinstance(fired, bool) or not isinstance(fired, int):
        raise TypeError(f"a pass returns how many times it fired, an integer; this one returned {fired!r}")
    return fired


def _with_subgraphs(graph: Any) -> Iterator[Any]:
    """The subgraphs of higher-order operators, innermost first, then the graph itself."""
    if isinstance(graph, fx.GraphModule):
        for node in graph.graph.find_nodes(op="get_attr"):
            part: object = graph
            for attribute in str(node.target).split("."):
                part = getattr(part, attribute, None)
            if isinstance(part, fx.GraphModule):
                yield from _with_subgraphs(part)
    yield graph


def count_nodes(graph: Any) -> int:
    """Nodes of a graph and its subgraphs, inputs and outputs not counted."""
    if not isinstance(graph, fx.GraphModule):
        return len(graph.graph)
    return sum(
        node.op not in ("placeholder", "output", "get_attr")
        for part in _with_subgraphs(graph)
        for node in part.graph.nodes
    )


def _copy(graph: Any) -> Any:
    """A graph of the same nodes and tensors, whose nodes and subgraphs are its own."""
    if not isinstance(graph, fx.GraphModule):
        return graph.clone()
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for old, new in zip(graph.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):  # AOTAutograd asks for it; torch.fx does not copy it
            new._dynamo_source = old._dynamo_source
    for node in copied.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." not in name and isinstance(getattr(copied, name), fx.GraphModule):
            setattr(copied, name, _copy(getattr(copied, name)))
    return copied


def _restore(graph: Any, saved: Any) -> None:
    """Makes a graph what its copy ``saved`` is; the copy must not be used any more."""
    if not isinstance(graph, fx.GraphModule):
        graph.graph = saved.graph
        graph.functions.clear()
        graph.functions.update(saved.functions)
        return
    for node in saved.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." not in name:
            setattr(graph, name, getattr(saved, name))
    graph.graph = saved.graph
