"""Which stage, pass or decomposition changed what a graph computes.

The debug observer keeps the graph of each stage, and between them the graph after each pass that fired. When a run is
compared, neighbours are run on the same inputs, in eager and in float64. A pass that is right leaves the float64
results as they are, but for float64's own rounding. Where they differ by more, the later graph is wrong if

- a result is further from the earlier graph's float64 than the earlier graph's eager and rounding explain, or
- the same holds for a node that both graphs have: the fault is damped on its way to the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.manager import PassResult

from ..collectives import is_collective
from ..dumps.blame import Cause, Kind
from ..errors import first_line
from ..exporter.locations import user_name, where
from ..numerics.differences import Deviation, is_discrete, same_number, value_difference
from ..numerics.distance import FLOAT64_ROUNDING, distance
from ..numerics.exact import REFUSALS, WHATEVER_THE_FAKE_RESULT
from ..numerics.twice import NotRepeatableError, Results, Twice
from .beside import Beside, can_read_along, compute
from .first_node import first_wrong_node, first_wrong_node_in_float64
from .interpreter import Interpreter


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What made a graph compute something else.

    Attributes:
        node: name of the first node that shows it.
        source: the line of that node, see ``exporter.locations.place``, or ``""``.
        cause: the pass, the decomposition, the stage.
        said: by how much.
    """

    node: str
    source: str
    cause: Cause
    said: Deviation

    @property
    def verdict(self) -> str:
        return f"diverges at {self.node} ({self.source or 'no source line'}): {self.cause}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A graph on its way through a stage, what made it (a pass or the stage), and where it was changed."""

    cause: Cause
    graph: fx.GraphModule
    is_pass: bool = False
    matches: Sequence[str] = ()


class StageGraphs:
    """The graphs of one stage, from the one it was given to the one it made; a listener of the pass manager.

    Attributes:
        steps: the graphs.
        gives_gradients: whether the judged results are gradients, all of one backward: see ``beside``.
        unchecked: what the last search for a culprit could not look at, with the reason.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.gives_gradients = False
        self.unchecked: list[str] = []

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

    def ends(self, arguments: Sequence[object], judged: Sequence[int] | None = None) -> tuple[Beside, Beside] | None:
        """The stage's first and last graph, to read along with another; ``None`` if they cannot.

        Args:
            arguments, judged: see ``culprit``.
        """
        if not self.steps or not all(map(can_read_along, (self.first, self.last))):
            return None
        graphs = [graph if judged is None else _restricted(graph, judged) for graph in (self.first, self.last)]
        return Beside(graphs[0], arguments), Beside(graphs[1], arguments)

    def culprit(
        self,
        arguments: Sequence[object],
        state: torch.Tensor,
        judged: Sequence[int] | None = None,
        ends: tuple[Beside, Beside] | None = None,
    ) -> tuple[Culprit | None, Results]:
        """The first step that changed the results, and the results of the stage's first graph.

        Args:
            arguments: one value for each placeholder.
            state: of the CPU's random numbers.
            judged: positions of the results that count; by default all.
            ends: the first and last graph after they read along with another; by default they are computed.
        """
        self.unchecked = []
        read = self._read_along(ends) if ends is not None else self._computed(arguments, state, judged)
        if read is not None and not self._changed(*read):
            return None, read[0]
        run = _runner(arguments, state, judged)
        start = run(self.steps[0])
        if all(step.graph is self.first for step in self.steps) or not self._changed(start, run(self.steps[-1])):
            return None, start
        return self.first_wrong(start, run, arguments, judged), start

    @staticmethod
    def _read_along(ends: tuple[Beside, Beside]) -> tuple[Results, Results] | None:
        first, last = (end.results() for end in ends)
        return None if first is None or last is None else (first, last)

    def _computed(
        self, arguments: Sequence[object], state: torch.Tensor, judged: Sequence[int] | None
    ) -> tuple[Results, Results] | None:
        """The results of the first and the last graph; ``None`` if these cannot be computed side by side."""
        if not all(map(can_read_along, (self.first, self.last))):
            return None
        first, last = (graph if judged is None else _restricted(graph, judged) for graph in (self.first, self.last))
        other = Beside(last, arguments)
        with torch.no_grad():
            results = compute(first, arguments, state, [other])
        after = other.results()
        return None if after is None else (results, after)

    def first_wrong(
        self,
        start: Results,
        run: Callable[[Step], Results],
        arguments: Sequence[object],
        judged: Sequence[int] | None = None,
    ) -> Culprit | None:
        """The first step that made results worse than its predecessor's.

        Args:
            start: the results of the first step.
            run: the results of a step.
            arguments: one value for each placeholder.
            judged: positions of the results that ``run`` gives; by default all.
        """
        self.unchecked = []
        before, results = self.steps[0], start
        for step in self.steps[1:]:
            after = run(step)
            if self._changed(results, after):
                found = self._compare(before.graph, step, results, after, arguments, judged)
                if found is not None:
                    return found
            before, results = step, after
        return None

    def _changed(self, before: Results, after: Results) -> bool:
        return changed(before, after, gradients=self.gives_gradients)

    def _compare(
        self,
        before: fx.GraphModule,
        step: Step,
        old: Results,
        new: Results,
        arguments: Sequence[object],
        judged: Sequence[int] | None,
    ) -> Culprit | None:
        """The culprit of a step after which the float64 results are others; ``None`` if nothing is beyond rounding."""
        graphs = (before, step.graph)
        first, second = graphs if judged is None else (_restricted(graph, judged) for graph in graphs)
        with torch.no_grad():
            node = first_wrong_node(first, second, arguments, torch.get_rng_state())
        if node is not None:
            name, source, said = node
            return Culprit(name, source, step.cause, said)
        for key in old.eager:
            said = difference(old, new, key, gradients=self.gives_gradients)
            if said:
                places = [node for node in before.graph.nodes if node.name in step.matches]
                if places:
                    return Culprit(places[0].name, where(places[0]), step.cause, said)
                place = judged[key] if judged is not None and isinstance(key, int) else key
                return Culprit(*name_of_result(before, place), step.cause, said)
        return self._in_float64(first, second, step, arguments)

    def _in_float64(
        self, before: fx.GraphModule, after: fx.GraphModule, step: Step, arguments: Sequence[object]
    ) -> Culprit | None:
        """The culprit of a step whose fault is one that rounding might make too."""
        try:
            with torch.no_grad():
                node = first_wrong_node_in_float64(before, after, arguments, torch.get_rng_state())
        except REFUSALS as error:  # an operator without float64
            self.unchecked.append(f"{step.cause}: what rounding may do, in float64 alone: {first_line(str(error))}")
            return None
        return Culprit(node[0], node[1], step.cause, node[2]) if node is not None else None


def _runner(
    arguments: Sequence[object], state: torch.Tensor, judged: Sequence[int] | None
) -> Callable[[Step], Results]:
    def run(step: Step) -> Results:
        module = step.graph if judged is None else _restricted(step.graph, judged)
        with torch.no_grad():
            return Twice(lambda *args: interpret(module, args), arguments, state).outputs

    return run


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


def changed(before: Results, after: Results, *, gradients: bool = False) -> bool:
    """Whether two graphs' results differ by more than float64's rounding; ``gradients``: see ``beside``."""
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
        error = found.max_abs / FLOAT64_ROUNDING
        if found.nonfinite or (error > (found.scale or 1.0) and error > beside(before, key, gradients=gradients)):
            return True
    return False


def difference(before: Results, after: Results, key: object, *, gradients: bool = False) -> Deviation:
    """In words, why a result is not as near to float64 as the same result before; ``""`` if it is.

    Discrete results do not count: rounding may turn a comparison.
    """
    if is_discrete(before.eager.get(key)) and is_discrete(after.eager.get(key)):
        return Deviation()
    old, exact, new = before.eager.get(key), before.exact.get(key), after.eager.get(key)
    return value_difference(old, exact, new, beside(before, key, gradients=gradients))


def beside(results: Results, key: object, *, gradients: bool = False) -> float:
    """The largest of the gradients, if a result is one, see ``is_explained``.

    Args:
        results: the results.
        key: of the result; ``("gradient", j)`` for a gradient.
        gradients: whether all results are gradients, whatever their keys.
    """
    if gradients:
        return results.largest
    return results.largest_gradient if isinstance(key, tuple) and key[0] == "gradient" else 0.0


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
        return f"the gradient of {name}", _first_line(placeholder.users)
    return f"the input {name}", _first_line(reversed([*placeholder.users]))


def _first_line(nodes: Iterable[fx.Node]) -> str:
    """The line of the first of some nodes that has one."""
    return next(filter(None, map(where, nodes)), "")


def _restricted(graph: fx.GraphModule, judged: Sequence[int]) -> fx.GraphModule:
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

    Args:
        module: what is copied.
        kind: of the copy; by default one for an interpreter, which cannot be called.
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
