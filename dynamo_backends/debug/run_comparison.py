"""Compares the runs of one compiled graph: its nodes, the passes of its stages, and the captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..common.operator_watchers import watchers_disabled
from ..common.safety_net import caught
from ..graphs.artifacts import CompiledGraph, GraphName
from ..numerics.function_runs import NotRepeatableError
from ..runtime.system_memory import give_back
from .captured_graph import (
    BACKWARD,
    FORWARD,
    CapturedGraph,
    ComparedCall,
    Interpretation,
    changing_step,
    wrong_step,
)
from .chosen_runs import RunSelector, SelectedRun
from .first_changed_node import with_tangents
from .interpreter import flat
from .node_comparison import compare_run
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun, can_be_compared
from .rows import Finding, GraphComparison, exception_text
from .stage_graphs import StageGraphs
from .wrong_rewrite import ModelStep

NodesAndStages = tuple[GraphComparison, list[Finding]]
"""The comparison of a run's nodes; the findings on its gradients and stages, in the order of the stages."""


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
    def interpretation(self) -> Interpretation | None:
        """What runs the graph now instead of its sessions: the stages are compared."""
        return self.captured.interpretation if self.captured is not None else None

    def call_of(self, args: Sequence[object]) -> ComparedCall | None:
        """The compared call of the captured graph that a run belongs to."""
        return None if self.captured is None or self.selects_runs else self.captured.current_call

    def judge(
        self, graph: CompiledGraph, run: RecordedRun, call: ComparedCall | None, sessions: NodeSessions
    ) -> NodesAndStages:
        """Compares a run; must be called before the user can write into its arguments and results."""
        arguments = [run.values[node] for node in graph.module.graph.find_nodes(op="placeholder")]
        state = torch.get_rng_state()
        try:
            comparison = compare_run(graph, run, self.models, sessions)
        except Exception as error:  # becomes the verdict
            caught(f"the comparison of {self.name}", error, "The graph runs")
            comparison = GraphComparison(not_comparable=exception_text(error))
        if self.captured is not None:
            return comparison, [self.captured.take_finding(self.name.direction)]
        give_back()  # the stages need memory of their own
        return comparison, [
            finding_of("the stage joint", lambda: self._judge_joint(arguments, state)),
            finding_of("the stage post_grad", lambda: _finding(self.post_grad, arguments, state)),
        ]

    def _judge_joint(self, arguments: Sequence[object], state: torch.Tensor) -> Finding:
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


def _finding(graphs: StageGraphs, arguments: Sequence[object], state: torch.Tensor) -> Finding:
    """Compares the passes of a stage, on the arguments of its graphs."""
    culprit = wrong_step(graphs, arguments, state) or changing_step(graphs, arguments, state, casts=True)
    return Finding(culprit)


def finding_of(what: str, compare: Callable[[], Finding]) -> Finding:
    """The finding of a comparison; an exception becomes an entry of ``unchecked``, so that the user's run goes on."""
    try:
        return compare()
    except NotRepeatableError as error:
        return Finding(unchecked=[f"{what}: {error}"])
    except Exception as error:
        caught(f"the comparison of {what}", error, "The graph runs")
        return Finding(unchecked=[f"{what}: {exception_text(error)}"])


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedEntry:
    """What Dynamo calls: the compiled graph, and for the selected calls the captured graph too.

    ``failed`` is called with an internal exception.
    """

    compiled: Callable[..., Any]
    captured: CapturedGraph
    selector: RunSelector
    is_open: Callable[[], bool]
    failed: Callable[[Exception], None]

    def __call__(self, *args: object) -> object:
        selected: SelectedRun | None = None
        call: ComparedCall | None = None
        try:
            selected = self.selector.begin(args) if self.is_open() and can_be_compared(args) else None
            if selected is not None:
                with watchers_disabled():
                    call = ComparedCall(self.captured, self.compiled, args, checks=selected.is_first)
                    call.selected = selected
        except Exception as error:
            self.failed(error)
        if selected is None:
            return self.compiled(*args)
        try:
            results = self.captured.run_in_call(self.compiled, args, call)
        except BaseException:
            self.selector.fail(selected)
            raise
        try:
            self._judge(call, results)
        except Exception as error:
            self.failed(error)
        return results

    def _judge(self, call: ComparedCall | None, results: object) -> None:
        self.selector.end()
        if call is None or call.finish is None:  # the graph was not compiled by us, or is empty
            return
        with watchers_disabled():
            finding = finding_of("the captured graph", lambda: call.finding(flat(results)))
        call.finish(finding)
        call.finish = None  # it holds all values of the run
