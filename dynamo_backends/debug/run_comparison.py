"""What a compared call does, in order, and how the runs of one compiled graph are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ..common.operator_watchers import watchers_disabled
from ..common.random_state import RandomState
from ..common.safety_net import caught
from ..dumps.blame import Cause, CauseKind
from ..graphs.artifacts import GraphName
from ..graphs.locations import where
from ..numerics.arrays import same_elements, same_number
from ..numerics.function_runs import NotRepeatableError
from ..numerics.verdicts import Verdict
from ..pipeline.stage_data import CompiledGraph
from ..runtime.system_memory import give_back
from .call_results import compare_call
from .call_runs import hashes
from .captured_graph import (
    BACKWARD,
    COMPARING,
    FORWARD,
    CapturedGraph,
    EagerCall,
    Interpretation,
    doing,
    what_is_done,
)
from .chosen_runs import RunSelector, SelectedRun, SizesByName
from .first_changed_node import with_tangents
from .interpreter import flat
from .node_comparison import compare_run
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun, can_be_compared
from .rows import Blame, Finding, GraphComparison, exception_text
from .stage_graphs import StageGraphs
from .wrong_rewrite import ModelStep
from .wrong_step import changing_step, wrong_step


@dataclasses.dataclass(frozen=True, eq=False)
class JudgedRun:
    """One run of a forward, backward or inference graph, and what its comparison found."""

    graph: CompiledGraph
    run: RecordedRun
    comparison: GraphComparison  # of its nodes
    findings: list[Finding]  # on its stages, in their order, and on its results


@dataclasses.dataclass(eq=False)
class RecordedForwards:
    """The runs of a captured graph's forwards in one of its calls."""

    captured: CapturedGraph
    runs: list[JudgedRun] = dataclasses.field(default_factory=list)
    has_failed: bool = False  # whether a run could not be judged, for an internal error


class Judge:
    """Compares the runs of one forward, backward or inference graph.

    Args:
        captured: the Dynamo graph it was made from; ``None`` if AOTAutograd was called with another one.
        joint: the graphs of the stage ``joint`` if there is no captured graph.

    Attributes:
        post_grad: the graphs of that stage.
        models: by region, its model after each pass of the stage ``onnx`` that fired.
        selects_runs: whether runs are selected one by one; not as part of a call of the captured graph.
    """

    def __init__(self, name: GraphName, captured: CapturedGraph | None, joint: StageGraphs | None) -> None:
        self.name = name
        self._joint = joint
        self.captured = captured
        self.post_grad = StageGraphs()
        self.models: dict[int, list[ModelStep]] = {}
        self.selects_runs = captured is None or name.direction == BACKWARD
        if captured is not None:
            captured.post_grad[BACKWARD if name.direction == BACKWARD else FORWARD] = self.post_grad

    @property
    def doing(self) -> object:
        """How this thread runs the graph: an ``Interpretation`` of it, a ``RecordedForwards`` of its call,
        ``COMPARING`` other values, or ``None``."""
        what = what_is_done()
        is_of_another = isinstance(what, (Interpretation, RecordedForwards)) and what.captured is not self.captured
        return None if is_of_another or (isinstance(what, RecordedForwards) and self.selects_runs) else what

    def judge(self, graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions) -> JudgedRun:
        """Compares a run; must be called before the user can write into its arguments and results."""
        arguments = [run.values[node] for node in graph.module.graph.find_nodes(op="placeholder")]
        state = RandomState.now()
        try:
            comparison = compare_run(graph, run, self.models, sessions)
        except Exception as error:  # becomes the verdict
            caught(f"the comparison of {self.name}", error, "The graph runs")
            comparison = GraphComparison(not_comparable=exception_text(error))
        findings = [finding_of("the results", lambda: _compare_results(graph, run))]
        if self.captured is None:
            give_back()  # the stages need memory of their own
            findings[:0] = [
                finding_of("the stage joint", lambda: self._judge_joint(arguments, state)),
                finding_of("the stage post_grad", lambda: _finding(self.post_grad, arguments, state)),
            ]
        elif self.name.direction == BACKWARD:
            findings[:0] = self.captured.gradients
        return JudgedRun(graph, run, comparison, findings)

    def _judge_joint(self, arguments: Sequence[object], state: RandomState) -> Finding:
        """Compares the joint graphs on the arguments of their forward."""
        graphs = self._joint
        if graphs is None or not graphs.steps or self.name.direction == BACKWARD:
            return Finding()
        known = dict(zip(self.post_grad.placeholders, arguments, strict=True))
        return _finding(graphs, with_tangents(graphs.first, known, state), state)

    def drop(self) -> None:
        """Frees what only comparisons need."""
        self.models.clear()
        if self.captured is None:
            self.post_grad.drop()
        elif not self.selects_runs:
            self.captured.drop()
        if self._joint is not None:
            self._joint.drop()


def _finding(graphs: StageGraphs, arguments: Sequence[object], state: RandomState) -> Finding:
    """Compares the passes of a stage, on the arguments of its graphs."""
    culprit = wrong_step(state, graphs, arguments) or changing_step(state, graphs, arguments, casts=True)
    return Finding(culprit)


def _compare_results(graph: CompiledGraph, run: RecordedRun) -> Finding:
    """Whether the graph returned the values that it computed, each in its place."""
    nodes = flat(graph.module.graph.output_node().args[0])
    if len(run.results) != len(nodes):
        return Finding(unchecked=[f"{len(run.results)} results instead of {len(nodes)}"])
    wrong = [
        Blame(node.name, Cause(CauseKind.RESULT), source=where(node), difference=Verdict("another value is returned"))
        for node, computed, result in zip(nodes, run.computed, run.results, strict=True)
        if isinstance(node, fx.Node) and not _is_same(computed, result)
    ]
    return Finding(wrong=wrong)


def _is_same(computed: object, result: object) -> bool:
    if computed is result:
        return True
    if not isinstance(computed, torch.Tensor) or not isinstance(result, torch.Tensor):
        return same_number(computed, result)
    return computed.dtype == result.dtype and computed.shape == result.shape and same_elements(computed, result)


def finding_of(what: str, compare: Callable[[], Finding]) -> Finding:
    """The finding of a comparison; an exception becomes an entry of ``unchecked``, so that the user's run goes on."""
    try:
        return compare()
    except NotRepeatableError as error:
        return Finding(unchecked=[f"{what}: {error}"])
    except Exception as error:
        caught(f"the comparison of {what}", error, "The graph runs")
        return Finding(unchecked=[f"{what}: {exception_text(error)}"])


class Reporter(Protocol):
    """Receives what comparisons find: the observer."""

    is_open: bool

    def add_gradients(self, graph: GraphName, finding: Finding) -> bool:
        """The finding on the gradients of a call; returns whether the backward has a verdict of its own."""

    def conclude(self, judged: JudgedRun, findings: Sequence[Finding], sizes: SizesByName) -> None:
        """A run was judged, and its stages and its call."""

    def all_compared(self, graph: GraphName) -> None:
        """No further run of the graph is compared."""

    def comparison_failed(self, graph: GraphName, error: Exception) -> None:
        """A comparison ended with an exception."""


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedEntry:
    """What Dynamo calls: the compiled graph; in the selected calls, everything is compared."""

    graph: GraphName
    compiled: Callable[..., Any]
    captured: CapturedGraph
    selector: RunSelector
    observer: Reporter

    def __call__(self, *args: object) -> object:
        is_inside = isinstance(what_is_done(), Interpretation) or what_is_done() is COMPARING
        selected: SelectedRun | None = None
        try:
            if self.observer.is_open and not is_inside and can_be_compared(args):
                selected = self.selector.begin(args)
        except Exception as error:
            self.observer.comparison_failed(self.graph, error)
        if selected is not None:
            return self._compared(args, selected)
        with doing(COMPARING if is_inside else None):
            return self.compiled(*args)

    def _compared(self, args: Sequence[object], selected: SelectedRun) -> object:
        """All that a compared call does, in order. No exception of a comparison reaches the user."""
        captured, arguments = self.captured, self.captured.all_arguments(args)
        recording = RecordedForwards(captured)
        stages: Mapping[str, Finding] = {}
        eager = EagerCall()
        try:
            with doing(COMPARING), watchers_disabled():
                if selected.is_first:
                    stages, eager = captured.check(self.compiled, args)
                before = hashes(arguments)
        except Exception as error:
            self._fail(selected, error)
            with doing(None):
                return self.compiled(*args)
        try:
            with doing(recording):  # ``record_run`` and ``Judge.judge``, of each forward
                results = self.compiled(*args)
        except BaseException:
            self.selector.fail(selected)
            raise
        try:
            with doing(COMPARING), watchers_disabled():
                findings = [stages.get(FORWARD, Finding())]
                gradients = dataclasses.replace(stages.get(BACKWARD, Finding()), sizes=selected.sizes)
                if not self.observer.add_gradients(self.graph, gradients):
                    findings.append(gradients)
                returned = finding_of(
                    "the captured graph", lambda: compare_call(captured, arguments, before, eager, flat(results))
                )
                for judged in recording.runs:
                    self.observer.conclude(judged, [*findings, returned], selected.sizes)
        except Exception as error:
            self._fail(selected, error)
            return results
        if recording.has_failed:
            self.selector.fail(selected)
        elif self.selector.end():
            for judged in recording.runs:
                self.observer.all_compared(judged.graph.name)
        return results

    def _fail(self, selected: SelectedRun, error: Exception) -> None:
        self.selector.fail(selected)
        self.observer.comparison_failed(self.graph, error)
