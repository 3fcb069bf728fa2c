"""Judges the runs of one compiled graph: its nodes, the passes of its stages, and the captured graph beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..common.operator_watchers import unseen
from ..common.safety_net import caught
from ..errors import first_line
from ..graphs import aot
from ..graphs.artifacts import CompiledGraph, GraphName
from ..numerics.program_execution import NotRepeatableError
from ..runtime.system_memory import give_back
from .captured_graph import Call, Captured, JointGraphs
from .chosen_runs import Choice, ChosenRun
from .node_comparison import compare_run
from .node_sessions import Replay
from .recorded_run import WatchedRun, are_plain
from .rows import Finding, GraphComparison
from .stage_comparison import StageGraphs
from .wrong_rewrite import ModelStep

Judged = tuple[GraphComparison, list[Finding]]
"""The comparison of the nodes of a run; what the captured graph says of gradients, and what the stages changed, in
their order."""


class Judge:
    """Judges the runs of one forward, backward or inference graph.

    Args:
        name: which graph.
        captured: Dynamo's graph it was made of; ``None`` where AOTAutograd was called without one of ours.
        module: the graph as AOTAutograd made it, before the passes of ``post_grad``.
        joint: the graphs of the stage ``joint`` where there is no captured graph, if that stage ran.

    Attributes:
        post_grad: the graphs of that stage.
        models: by index of a region, its model after each pass of the stage ``onnx`` that fired.
    """

    def __init__(
        self, name: GraphName, captured: Captured | None, module: fx.GraphModule, joint: JointGraphs | None
    ) -> None:
        self.name = name
        self._joint = joint
        self.captured = captured
        self.post_grad = StageGraphs()
        self.models: dict[int, list[ModelStep]] = {}
        self._placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
        self._arguments = aot.keys_of_arguments(module)
        self._results = aot.keys_of_results(module)
        leaves = pytree.tree_leaves(module.graph.output_node().args[0], is_leaf=lambda x: x is None)
        self._result_names = [leaf.name if isinstance(leaf, fx.Node) else "" for leaf in leaves]

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward shares what it is compared with, Dynamo's graph or the joint one, with its backward."""
        return self.captured is not None or self._joint is not None

    def call_of(self, args: Sequence[object]) -> Call | None:
        """The compared call of the captured graph that a run with these arguments belongs to."""
        if self.captured is None:
            return None
        if self.name.direction != "backward":
            return self.captured.call
        named = zip(self._placeholders, self._arguments, args, strict=True)
        saved = {name: value for name, key, value in named if not (isinstance(key, tuple) and key[0] == "tangent")}
        return self.captured.call_of(saved)

    def judge(self, graph: CompiledGraph, run: WatchedRun, call: Call | None, replay: Replay) -> Judged:
        """Judges a run, before anything writes into its arguments, and its results are known to the user."""
        arguments = [run.values[node] for node in graph.module.graph.find_nodes(op="placeholder")]
        by_name = dict(zip(self._placeholders, arguments, strict=True))
        is_backward = self.name.direction == "backward"
        state = torch.get_rng_state()
        try:
            comparison = compare_run(graph, run, self.models, replay)
        except Exception as error:  # the verdict says it
            caught(f"the comparison of {self.name}", error, "The graph runs")
            comparison = GraphComparison(not_comparable=f"{type(error).__name__}: {first_line(str(error))}")
        give_back()  # the stages need memory of their own
        findings: list[Finding] = []
        if call is not None:
            if self.name.direction == "forward":
                findings.append(attempt("the gradients", lambda: self._save(call, run.results)))
            joint = attempt("the stage joint", lambda: call.judge_joint(by_name, gradients=is_backward))
            if is_backward:
                findings.append(attempt("the gradients", lambda: self._gradients(call, arguments, run.results)))
            findings.append(joint)
        elif (graphs := self._joint) is not None:
            findings.append(
                attempt("the stage joint", lambda: graphs.judge(by_name, (), state, gradients=is_backward)[0])
            )
        findings.append(attempt("the stage post_grad", lambda: self._post_grad(arguments, state)))
        return comparison, findings

    def drop(self) -> None:
        """Forgets what only comparisons need."""
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

    def _gradients(self, call: Call, arguments: Sequence[object], results: Sequence[object]) -> Finding:
        """What the captured graph says of the gradients."""
        tangents = {
            key[1]: value
            for key, value in zip(self._arguments, arguments, strict=True)
            if isinstance(key, tuple) and key[0] == "tangent" and isinstance(value, torch.Tensor)
        }
        if None in tangents:
            return Finding(unchecked=["the gradients: one of the results has no name in the captured graph"])
        gradients = {
            key[1]: value
            for key, value in zip(self._results, results, strict=True)
            if isinstance(key, tuple) and key[0] == "gradient"
        }
        return call.judge_backward(tangents, gradients)

    def _save(self, call: Call, results: Sequence[object]) -> Finding:
        """Remembers what the backward will be given.

        Where the partitioner does not tell, as where states of random numbers are saved, that is any of the results.
        """
        named = zip(self._result_names, self._results, results, strict=True)
        is_told = "saved" in self._results
        call.save({name: value for name, key, value in named if key == "saved" or not is_told})
        return Finding()


def attempt(what: str, judge: Callable[[], Finding]) -> Finding:
    """A finding; one that could not be made is said, and does not end the user's run."""
    try:
        return judge()
    except NotRepeatableError as error:
        return Finding(unchecked=[f"{what}: {error}"])
    except Exception as error:
        caught(f"the comparison of {what}", error, "The graph runs")
        return Finding(unchecked=[f"{what}: {type(error).__name__}: {first_line(str(error))}"])


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedEntry:
    """What Dynamo calls: the compiled graph, and beside the calls that are compared the captured one.

    ``failed`` is told of an exception of ours.
    """

    compiled: Callable[..., Any]
    captured: Captured
    choice: Choice
    is_open: Callable[[], bool]
    failed: Callable[[Exception], None]

    def __call__(self, *args: object) -> object:
        chosen: ChosenRun | None = None
        try:
            chosen = self.choice.begin(args) if self.is_open() and are_plain(args) else None
        except Exception as error:
            self.failed(error)
        if chosen is None:
            return self.compiled(*args)
        call = self.captured.call_for(args)
        try:
            results = self.captured.called(self.compiled, args, call)
        except BaseException:
            self.choice.fail(chosen)
            raise
        try:
            self._judge(chosen, call, results, args)
        except Exception as error:
            self.failed(error)
        return results

    def _judge(self, chosen: ChosenRun, call: Call | None, results: object, args: Sequence[object]) -> None:
        if call is None or call.finish is None:  # the graph was not compiled by us, or is empty
            self.choice.end(chosen, awaits_backward=False)
            return
        flat = pytree.tree_leaves(results, is_leaf=lambda x: x is None)
        with unseen():
            finding = attempt("the captured graph", lambda: call.judge_forward(flat, args))
        call.chosen = chosen
        self.choice.end(chosen, awaits_backward=call.saved is not None)
        call.finish(finding)
        call.finish = None  # it holds all values of the run
        if call.saved is not None:
            with unseen():
                self.captured.keep_for_backward(call, call.new_nodes([*flat, *args]))
