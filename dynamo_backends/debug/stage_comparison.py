"""Which stage, pass or decomposition changed what a graph computes.

The debug observer keeps the graph of each stage, and between them the graph after each pass that fired. When a run is
compared, neighbours are run on the same inputs, in eager and in float64. A pass that is right leaves the float64
results as they are, but for float64's own rounding. Where they differ by more, the later graph is wrong if

- a result is further from the earlier graph's float64 than the earlier graph's eager and rounding explain, or
- the same holds for a node that both graphs have: the fault is damped on its way to the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.results import PassResult

from ..dumps.blame import Cause, Kind
from ..errors import first_line
from ..graphs.locations import user_name, where
from ..graphs.operators import is_collective
from ..numerics.distance import FLOAT64_ROUNDING, distance
from ..numerics.exact import REFUSALS, WHATEVER_THE_FAKE_RESULT
from ..numerics.program_execution import NotRepeatableError, ReferenceRuns, Results
from ..numerics.verdicts import RIGHT, Verdict, is_discrete, same_number
from .first_changed_node import first_wrong_node, first_wrong_node_in_float64
from .interpreter import Interpreter
from .rows import Blame


@dataclasses.dataclass(frozen=True)
class Step:
    """A graph on its way through a stage, what made it (a pass or the stage), and where it was changed."""

    cause: Cause
    graph: fx.GraphModule
    is_pass: bool = False
    matches: Sequence[str] = ()


@dataclasses.dataclass(eq=False)
class StageGraphs:
    """The graphs of one stage, from the one it was given to the one it made; a listener of the pass manager.

    Attributes:
        steps: the graphs.
        unchecked: what the last search for a culprit could not look at, with the reason.
    """

    steps: list[Step] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)

    def start(self, stage: str, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        self.steps = [Step(Cause(Kind.STAGE, stage), copy_of(graph))]

    def fired(self, result: PassResult, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        if not result.undone:
            self.steps.append(Step(Cause(Kind.PASS, result.name), copy_of(graph), True, result.matches))

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        """The stage is reached: ``graph`` is what goes on."""
        self.steps.append(Step(Cause(Kind.STAGE, stage), copy_of(graph)))

    def drop(self) -> None:
        """Forgets the graphs; no run will be compared any more."""
        self.steps = []

    @property
    def first(self) -> fx.GraphModule:
        return self.steps[0].graph

    @property
    def last(self) -> fx.GraphModule:
        return self.steps[-1].graph

    @property
    def is_unchanged(self) -> bool:
        """Whether no pass fired, and nothing else changed the graph."""
        return not any(step.is_pass for step in self.steps) and _described(self.first) == _described(self.last)

    def culprit(
        self, arguments: Sequence[object], state: torch.Tensor, keys: Mapping[int, object] | None = None
    ) -> tuple[Blame | None, Results]:
        """The first step that changed the results, and the results of the stage's first graph.

        Args:
            arguments: one value for each placeholder.
            state: of the CPU's random numbers.
            keys: of the results that count, by position: gradients of one backward have ``("gradient", j)``. By default
                all count, and the position is the key.
        """
        self.unchecked = []

        def run(step: Step) -> Results:
            module = step.graph if keys is None else _restricted(step.graph, keys)
            with torch.no_grad():
                results = ReferenceRuns(lambda *args: interpret(module, args), arguments, state).outputs
            return results if keys is None else results.under(dict(enumerate(keys.values())))

        start = run(self.steps[0])
        if self.is_unchanged or not changed(start, run(self.steps[-1])):
            return None, start
        return self.first_wrong(start, run, arguments, keys), start

    def first_wrong(
        self,
        start: Results,
        run: Callable[[Step], Results],
        arguments: Sequence[object],
        keys: Mapping[int, object] | None = None,
    ) -> Blame | None:
        """The first step that made results worse than its predecessor's.

        Args:
            start: the results of the first step; ``run`` gives those of the others.
            keys: see ``culprit``.
        """
        self.unchecked = []
        before, results = self.steps[0], start
        for step in self.steps[1:]:
            after = run(step)
            found = self._compare(before.graph, step, results, after, arguments, keys)
            if found is not None:
                return found
            before, results = step, after
        return None

    def _compare(
        self,
        before: fx.GraphModule,
        step: Step,
        old: Results,
        new: Results,
        arguments: Sequence[object],
        keys: Mapping[int, object] | None,
    ) -> Blame | None:
        """The culprit of a step, if it changed the float64 results, and something is beyond rounding."""
        if not changed(old, new):
            return None
        graphs = (before, step.graph)
        first, second = graphs if keys is None else (_restricted(graph, keys) for graph in graphs)
        with torch.no_grad():
            node = first_wrong_node(first, second, arguments, torch.get_rng_state())
        if node is not None:
            return Blame(node[0], step.cause, source=node[1], said=node[2])
        for key in old.eager:
            said = difference(old, new, key)
            if said.is_wrong:
                place = next((position for position, item in (keys or {}).items() if item == key), key)
                places = [(node.name, where(node)) for node in before.graph.nodes if node.name in step.matches]
                name, source = places[0] if places else name_of_result(before, place)
                return Blame(name, step.cause, source=source, said=said)
        try:  # the fault is one that rounding might make too
            with torch.no_grad():
                node = first_wrong_node_in_float64(first, second, arguments, torch.get_rng_state())
        except REFUSALS as error:  # an operator without float64
            self.unchecked.append(f"{step.cause}: what rounding may do, in float64 alone: {first_line(str(error))}")
            return None
        return Blame(node[0], step.cause, source=node[1], said=node[2]) if node is not None else None


def _described(module: fx.GraphModule) -> list[object]:
    return [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in module.graph.nodes]


def interpret(module: fx.GraphModule, arguments: Sequence[object]) -> list[object]:
    """The results of a graph of any stage, in a flat list.

    Raises:
        NotRepeatableError: it has operators that must run once.
    """
    once = next((node for node in module.graph.nodes if is_collective(node.target)), None)
    if once is not None:
        raise NotRepeatableError(f"{once.target} runs once, in all processes: not again for a comparison")
    results = _Interpreter(module).run(*arguments, enable_io_processing=False)
    return pytree.tree_leaves(results, is_leaf=lambda x: x is None)


class _Interpreter(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        return super().call_function(WHATEVER_THE_FAKE_RESULT.get(target, target), args, kwargs)


def changed(before: Results, after: Results) -> bool:
    """Whether two graphs' results differ by more than float64's rounding."""
    if before.exact.keys() != after.exact.keys():
        return True
    for key, old in before.exact.items():
        new = after.exact[key]
        if old is new:
            continue
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if not same_number(old, new):
                return True
            continue
        if old.dtype != new.dtype or old.shape != new.shape:
            return True
        if is_discrete(old):
            if not torch.equal(old, new):
                return True
            continue
        found = distance(new, old)
        if found.nonfinite or found.max_abs > FLOAT64_ROUNDING * (found.scale or 1.0):
            return True
    return False


def difference(before: Results, after: Results, key: object) -> Verdict:
    """The verdict on a result by the same result before.

    Discrete results do not count: rounding may turn a comparison.
    """
    if is_discrete(before.eager.get(key)) and is_discrete(after.eager.get(key)):
        return RIGHT
    return before.verdict(after.eager.get(key), key)


def name_of_result(graph: fx.GraphModule, key: object) -> tuple[str, str]:
    """What a result is called, and its line: of a gradient, where the argument is first read; of what the graph leaves
    in an argument, where it is last used.

    Args:
        graph: the captured graph, or one of its stage.
        key: the result's position; or ``("input", j)``, ``("gradient", j)`` for what belongs to argument j.
    """
    if isinstance(key, int):
        node = pytree.tree_leaves(graph.graph.output_node().args[0], is_leaf=lambda x: x is None)[key]
        return (node.name, where(node)) if isinstance(node, fx.Node) else (f"result {key}", "")
    assert isinstance(key, tuple)
    kind, position = key
    placeholder = list(graph.graph.find_nodes(op="placeholder"))[position]
    name = user_name(placeholder) or placeholder.name
    if kind == "gradient":
        return f"grad of {name}", _first_line(placeholder.users)
    return f"the input {name}", _first_line(reversed([*placeholder.users]))


def _first_line(nodes: Iterable[fx.Node]) -> str:
    """The line of the first of some nodes that has one."""
    return next(filter(None, map(where, nodes)), "")


def _restricted(graph: fx.GraphModule, judged: Iterable[int]) -> fx.GraphModule:
    """A copy of a graph with some of its results, and what they need."""
    result = copy_of(graph)
    output = result.graph.output_node()
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    output.args = ([leaves[i] for i in judged],)
    result.graph.eliminate_dead_code()
    return result


class _GraphWithoutCode(fx.GraphModule):
    """A graph module that is run node by node. Making its Python code takes longer than copying its nodes."""

    def recompile(self) -> Any:  # called when the graph is set
        return None


def copy_of(module: fx.GraphModule, kind: type[fx.GraphModule] = _GraphWithoutCode) -> fx.GraphModule:
    """A graph module with nodes of its own, the subgraphs of higher-order operators too; tensors are shared.

    By default the copy is for an interpreter, and cannot be called.
    """
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    graph.output(results)
    copied = kind(module, graph)
    for node in copied.graph.find_nodes(op="get_attr"):
        part = getattr(copied, str(node.target), None)
        if isinstance(part, fx.GraphModule):
            setattr(copied, str(node.target), copy_of(part, fx.GraphModule))  # the operator calls it
    return copied
