"""Compares the runs of one compiled graph: its nodes, the passes of its stages, and the captured graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.engine.fx.editing import written_nodes

from ..common.operator_watchers import watchers_disabled
from ..common.safety_net import caught
from ..graphs import aot
from ..graphs.artifacts import CompiledGraph, GraphName
from ..graphs.locations import user_name
from ..numerics.reference_runs import NotRepeatableError, Results
from ..runtime.system_memory import give_back
from .captured_graph import CapturedGraph, ComparedCall, JointGraphs
from .chosen_runs import RunSelector, SelectedRun
from .interpreter import flat
from .node_comparison import compare_run
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun, can_be_compared
from .rows import Finding, GraphComparison, exception_text
from .stage_comparison import StageGraphs
from .wrong_rewrite import ModelStep

NodesAndStages = tuple[GraphComparison, list[Finding]]
"""The comparison of a run's nodes; the findings on its gradients and stages, in the order of the stages."""


class Judge:
    """Compares the runs of one forward, backward or inference graph.

    Args:
        captured: the Dynamo graph it was made from; ``None`` if AOTAutograd was called with another one.
        module: AOTAutograd's graph, before the passes of ``post_grad``.
        joint: the graphs of the stage ``joint`` if there is no captured graph.

    Attributes:
        post_grad: the graphs of that stage.
        models: by region, its model after each pass of the stage ``onnx`` that fired.
    """

    def __init__(
        self, name: GraphName, captured: CapturedGraph | None, module: fx.GraphModule, joint: JointGraphs | None
    ) -> None:
        self.name = name
        self._joint = joint
        self.captured = captured
        self.post_grad = StageGraphs()
        self.models: dict[int, list[ModelStep]] = {}
        placeholders = list(module.graph.find_nodes(op="placeholder"))
        self._placeholders = [node.name for node in placeholders]
        written = {arg for node in module.graph.nodes for arg in written_nodes(node)}
        self._written = [user_name(node) or node.name for node in placeholders if node in written]
        self._arguments = aot.keys_of_arguments(module)
        self._results = aot.keys_of_results(module)
        leaves = flat(module.graph.output_node().args[0])
        self._result_names = [leaf.name if isinstance(leaf, fx.Node) else "" for leaf in leaves]

    @property
    def is_shared_with_backward(self) -> bool:
        """Whether the backward of a forward is compared with the same captured or joint graphs."""
        return self.captured is not None or self._joint is not None

    def call_of(self, args: Sequence[object]) -> ComparedCall | None:
        """The compared call of the captured graph that a run with these arguments belongs to."""
        if self.captured is None:
            return None
        if self.name.direction != "backward":
            return self.captured.current_call
        named = zip(self._placeholders, self._arguments, args, strict=True)
        saved = {name: value for name, key, value in named if not (isinstance(key, tuple) and key[0] == "tangent")}
        return self.captured.find_call(saved)

    def judge(
        self, graph: CompiledGraph, run: RecordedRun, call: ComparedCall | None, sessions: NodeSessions
    ) -> NodesAndStages:
        """Compares a run; must be called before the user can write into its arguments and results."""
        arguments = [run.values[node] for node in graph.module.graph.find_nodes(op="placeholder")]
        by_name = dict(zip(self._placeholders, arguments, strict=True))
        is_backward = self.name.direction == "backward"
        state = torch.get_rng_state()
        try:
            comparison, exact = compare_run(graph, run, self.models, sessions)
        except Exception as error:  # becomes the verdict
            caught(f"the comparison of {self.name}", error, "The graph runs")
            comparison, exact = GraphComparison(not_comparable=exception_text(error)), None
        give_back()  # the stages need memory of their own
        final = self._final(exact)
        findings: list[Finding] = []
        if call is not None and is_backward:
            findings += self._backward_findings(call, by_name, arguments, run.results)
        elif call is not None:
            if self.name.direction == "forward":
                findings.append(finding_of("the gradients", lambda: self._save(call, run.results)))
            finding_of("the captured graph", call.run_forward)  # a failure is told by ``judge_forward``
            findings.append(
                finding_of("the stage joint", lambda: call.judge_joint(by_name, gradients=False, final=final))
            )
        elif (graphs := self._joint) is not None:
            findings.append(
                finding_of(
                    "the stage joint",
                    lambda: graphs.judge(by_name, (), state, gradients=is_backward, final=final)[0],
                )
            )
        findings.append(finding_of("the stage post_grad", lambda: self._post_grad(arguments, state)))
        return comparison, findings

    def _final(self, exact: Mapping[object, object] | None) -> Results | None:
        """The float64 results of the graph that runs, by their keys; ``None`` for a backward.

        A backward starts from values that the forward rounded, so the stage ``joint`` has others.
        """
        if exact is None or self.name.direction == "backward":
            return None
        return Results({}, exact)

    def drop(self) -> None:
        """Frees what only comparisons need."""
        self.post_grad.drop()
        self.models.clear()
        if self._joint is not None:
            self._joint.drop()
        if self.captured is not None:
            self.captured.drop()

    def _post_grad(self, arguments: Sequence[object], state: torch.Tensor) -> Finding:
        if self.post_grad.is_unchanged:
            return Finding()
        is_backward = self.name.direction == "backward"
        keys = {i: ("gradient", i) for i in range(len(self._results))} if is_backward else None
        culprit, _ = self.post_grad.culprit(arguments, state, keys)
        return Finding(culprit, unchecked=self.post_grad.unchecked)

    def _backward_findings(
        self,
        call: ComparedCall,
        values: Mapping[str, object],
        arguments: Sequence[object],
        results: Sequence[object],
    ) -> list[Finding]:
        """Compares the gradients with those of the captured graph, and the stage ``joint``."""
        tangents = {
            key[1]: value
            for key, value in zip(self._arguments, arguments, strict=True)
            if isinstance(key, tuple) and key[0] == "tangent" and isinstance(value, torch.Tensor)
        }
        gradients = {
            key[1]: value
            for key, value in zip(self._results, results, strict=True)
            if isinstance(key, tuple) and key[0] == "gradient"
        }
        if None in tangents:
            finding = Finding(unchecked=["the gradients: one of the results has no name in the captured graph"])
        else:
            finding = finding_of("the gradients", lambda: call.run_backward(tangents, list(gradients)))
        give_back()
        joint = finding_of("the stage joint", lambda: call.judge_joint(values, gradients=True, final=None))
        if call.reference is not None:
            finding = finding_of("the gradients", lambda: call.judge_backward(tangents, gradients))
        texts = [f"{name}, which the backward changes, is not compared with eager" for name in self._written]
        return [finding, joint, Finding(unchecked=texts)]

    def _save(self, call: ComparedCall, results: Sequence[object]) -> Finding:
        """Keeps what identifies the values saved for the backward.

        If the partitioner does not mark them, as with saved states of random numbers, any result may be one.
        """
        named = zip(self._result_names, self._results, results, strict=True)
        is_marked = "saved" in self._results
        call.save({name: value for name, key, value in named if key == "saved" or not is_marked})
        return Finding()


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
        try:
            selected = self.selector.begin(args) if self.is_open() and can_be_compared(args) else None
        except Exception as error:
            self.failed(error)
        if selected is None:
            return self.compiled(*args)
        call = self.captured.begin_call(args)
        try:
            results = self.captured.run_in_call(self.compiled, args, call)
        except BaseException:
            self.selector.fail(selected)
            raise
        try:
            self._judge(selected, call, results, args)
        except Exception as error:
            self.failed(error)
        return results

    def _judge(self, selected: SelectedRun, call: ComparedCall | None, results: object, args: Sequence[object]) -> None:
        if call is None or call.finish is None:  # the graph was not compiled by us, or is empty
            self.selector.end(selected, awaits_backward=False)
            return
        leaves = flat(results)
        with watchers_disabled():
            finding = finding_of("the captured graph", lambda: call.judge_forward(leaves, args))
        call.selected = selected
        self.selector.end(selected, awaits_backward=call.saved is not None)
        call.finish(finding)
        call.finish = None  # it holds all values of the run
        if call.saved is not None:
            with watchers_disabled():
                self.captured.keep_for_backward(call, call.new_nodes([*leaves, *args]))
