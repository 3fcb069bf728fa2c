"""Judges the runs of one compiled graph: its nodes, the passes of its stages, and the captured graph beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.manager import PassResult

from .. import aot
from ..artifacts import CompiledGraph, GraphName
from ..errors import first_line
from ..numerics.twice import NotRepeatableError
from ..runtime.heap import give_back
from ..safety_net import caught
from ..watchers import unseen
from .beside import Beside
from .captured import Call, Captured, Finding, JointGraphs
from .choice import Choice, ChosenRun
from .compare import RunValues, compare_run
from .replay import Replay
from .rows import GraphComparison
from .stages import StageGraphs
from .suspects import ModelStep
from .watched import WatchedRun, are_plain


@dataclasses.dataclass(frozen=True)
class Judged:
    """What was found in one run of a graph, before its results are known to the user.

    Attributes:
        comparison: of its nodes.
        findings: what the captured graph says of gradients, and what the stages changed, in their order.
    """

    comparison: GraphComparison
    findings: list[Finding]


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
        self.post_grad.gives_gradients = name.direction == "backward"
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
        """Judges a run, before anything writes into its arguments."""
        values = RunValues(run.values, run.sessions, run.repeated, run.rescued, self.models)
        arguments = [run.values[node] for node in graph.module.graph.find_nodes(op="placeholder")]
        by_name = dict(zip(self._placeholders, arguments, strict=True))
        backward = self.name.direction == "backward"
        post_grad = self.post_grad.ends(arguments)
        joint_ends = self._joint_ends(by_name, call) if not backward else None
        beside = [end for ends in (post_grad, joint_ends) if ends is not None for end in ends]
        state = torch.get_rng_state()
        findings = []
        if call is not None and backward:  # before the nodes: autograd keeps much memory until it is asked
            findings = self._backward(call, by_name, arguments, run.results)
            give_back()
        try:
            # a backward starts from what ONNX Runtime's forward saved, and shares no products
            products = call.products if call is not None and not backward else None
            comparison = compare_run(graph, values, replay, beside, products)
        except Exception as error:  # the verdict says it
            said = f"{type(error).__name__}: {first_line(str(error))}"
            caught(f"the comparison of {self.name}", error, "The graph runs")
            comparison = GraphComparison(f"not comparable: {said}")
        give_back()  # the stages need memory of their own
        if call is not None and not backward:
            joint = attempt("the stage joint", lambda: call.judge_joint(by_name, gradients=False, ends=joint_ends))
            if self.name.direction == "forward":
                findings.append(attempt("the gradients", lambda: self._save(call, run.results)))
            findings.append(joint)
        elif call is None and (graphs := self._joint) is not None:
            findings.append(
                attempt(
                    "the stage joint",
                    lambda: graphs.judge(by_name, (), state, gradients=backward, ends=joint_ends)[0],
                )
            )
        findings.append(attempt("the stage post_grad", lambda: self._post_grad(arguments, state, post_grad)))
        return Judged(comparison, findings)

    def drop(self) -> None:
        """Forgets what only comparisons need."""
        self.post_grad.drop()
        self.models.clear()
        if self._joint is not None:
            self._joint.drop()
        if self.captured is not None:
            self.captured.drop()

    def _joint_ends(self, values: Mapping[str, object], call: Call | None) -> tuple[Beside, Beside] | None:
        if call is not None:
            return call.joint_ends(values)
        return self._joint.forward_ends(values, ()) if self._joint is not None else None

    def _post_grad(
        self, arguments: Sequence[object], state: torch.Tensor, ends: tuple[Beside, Beside] | None
    ) -> Finding:
        culprit, _ = self.post_grad.culprit(arguments, state, ends=ends)
        return Finding(culprit, unchecked=self.post_grad.unchecked)

    def _backward(
        self, call: Call, values: Mapping[str, object], arguments: Sequence[object], results: Sequence[object]
    ) -> list[Finding]:
        """What the captured graph says of the gradients, and what the passes of ``joint`` changed."""
        tangents: dict[object, torch.Tensor] = {}
        nameless = False
        for key, value in zip(self._arguments, arguments, strict=True):
            if isinstance(key, tuple) and key[0] == "tangent" and isinstance(value, torch.Tensor):
                nameless = nameless or key[1] is None
                tangents[key[1]] = value
        gradients = {
            key[1]: value
            for key, value in zip(self._results, results, strict=True)
            if isinstance(key, tuple) and key[0] == "gradient"
        }

        def differentiated() -> Finding:
            if nameless:
                return Finding(unchecked=["the gradients: one of the results has no name in the captured graph"])
            call.differentiate(tangents, list(gradients))
            return Finding()

        finding = attempt("the gradients", differentiated)
        joint = attempt("the stage joint", lambda: call.judge_joint(values, gradients=True))
        if not finding.unchecked:
            finding = attempt("the gradients", lambda: call.judge_backward(tangents, gradients))
        return [finding, joint]

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
        said = f"{type(error).__name__}: {first_line(str(error))}"
        caught(f"the comparison of {what}", error, "The graph runs")
        return Finding(unchecked=[f"{what}: {said}"])


class ComparedEntry:
    """What Dynamo calls: the compiled graph, and beside the calls that are compared the captured one.

    Args:
        compiled: the compiled graph.
        captured: Dynamo's graph.
        choice: which calls are compared.
        is_open: whether calls are compared at all, now.
        failed: is told of an exception of ours.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        captured: Captured,
        choice: Choice,
        *,
        is_open: Callable[[], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._is_open = is_open
        self._compiled = compiled
        self._captured = captured
        self._choice = choice
        self._failed = failed

    def __call__(self, *args: object) -> object:
        chosen: ChosenRun | None = None
        call: Call | None = None
        try:
            self._captured.release_references()
            chosen = self._choice.begin(args) if self._is_open() and are_plain(args) else None
            if chosen is not None:
                call = self._captured.call_for(args)
        except Exception as error:
            if chosen is not None:
                self._choice.fail(chosen)
                chosen = None
            self._failed(error)
        if chosen is None:
            return self._compiled(*args)
        try:
            results = self._captured.called(self._compiled, args, call)
        except BaseException:
            self._choice.fail(chosen)
            raise
        try:
            self._judge(chosen, call, results, args)
        except Exception as error:
            self._failed(error)
        return results

    def _judge(self, chosen: ChosenRun, call: Call | None, results: object, args: Sequence[object]) -> None:
        if call is None or call.finish is None:  # the graph was not compiled by us, or is empty
            self._choice.end(chosen, awaits_backward=False)
            return
        try:
            flat = pytree.tree_leaves(results, is_leaf=lambda x: x is None)
            with unseen():
                finding = attempt("the captured graph", lambda: call.judge_forward(flat, args))
        except Exception:
            self._choice.fail(chosen)
            raise
        call.chosen = chosen
        self._choice.end(chosen, awaits_backward=call.saved is not None)
        call.finish(finding)
        call.finish = None  # it holds all values of the run
        if call.saved is not None:
            with unseen():
                self._captured.keep_for_backward(call, call.new_nodes([*flat, *args]))


class Listeners:
    """Several listeners of the pass manager as one."""

    def __init__(self, listeners: Sequence[Any]) -> None:
        self._listeners = listeners

    def start(self, stage: str, graph: Any) -> None:
        for listener in self._listeners:
            listener.start(stage, graph)

    def fired(self, result: PassResult, graph: Any) -> None:
        for listener in self._listeners:
            listener.fired(result, graph)


class ModelGraphs:
    """Keeps a region's model after each pass that fires; a listener of the pass manager."""

    def __init__(self, models: dict[int, list[ModelStep]], region: int) -> None:
        self._models = models
        self._region = region

    def start(self, stage: str, graph: Any) -> None:
        self._models[self._region] = []

    def fired(self, result: PassResult, graph: Any) -> None:
        if not result.undone:
            self._models[self._region].append(ModelStep(result.name, graph.clone()))


class KeptGraphs:
    """Keeps an FX graph before and after the passes of its stage; a listener of the pass manager.

    Args:
        stage_graphs: where those of a stage are kept.
    """

    def __init__(self, stage_graphs: Callable[[str], StageGraphs | None]) -> None:
        self._stage_graphs = stage_graphs
        self._graphs: StageGraphs | None = None

    def start(self, stage: str, graph: Any) -> None:
        self._graphs = self._stage_graphs(stage)
        if self._graphs is not None:
            self._graphs.start(stage, graph)

    def fired(self, result: PassResult, graph: Any) -> None:
        if self._graphs is not None:
            self._graphs.fired(result, graph)
