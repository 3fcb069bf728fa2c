"""Finds the stage, pass or decomposition that changed what a graph computes.

The debug observer copies the graph of each stage, and the graph after each pass that fired. A comparison runs each on
the same inputs, in eager and in float64. A right pass leaves the float64 results unchanged, except for float64's own
rounding. If they differ by more, the later graph is wrong if

- the error of a result against the earlier graph's float64 is larger than eager's error and rounding explain, or
- the same holds for a node that both graphs have: the fault is damped before it reaches the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import changes_memory
from passes.engine.results import PassResult

from ..dumps.blame import Cause, CauseKind
from ..errors import first_line
from ..graphs.aot import forward_writes
from ..graphs.locations import place_of, user_name, where
from ..graphs.operators import is_collective
from ..numerics.exact import KERNEL_ERRORS, TOLERANT_REPLACEMENTS
from ..numerics.graph_execution import results_in_float64
from ..numerics.measure import group_size_of
from ..numerics.reference_runs import NotRepeatableError, ReferenceRuns, Results, SharedCopies
from ..numerics.tensor_measure import FLOAT64_ROUNDING, dense, format_of, measure_tensor, ordinary
from ..numerics.verdicts import RIGHT, Verdict, epsilon, is_discrete, same_number
from .first_changed_node import first_wrong_node, first_wrong_node_in_float64
from .interpreter import Interpreter, flat
from .rows import Blame

_UNITS = 64
"""How many times larger than eager's error float64's may be, both in units in the last place of their dtypes."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A graph within a stage, the pass or stage that made it, and the names of the nodes that the pass matched."""

    cause: Cause
    graph: fx.GraphModule
    is_pass: bool = False
    matches: Sequence[str] = ()


@dataclasses.dataclass(eq=False)
class StageGraphs:
    """The graphs of one stage, from its input to its output; a listener of the pass manager."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what the last search could not compare, and why

    def start(self, stage: str, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        self.steps = [Step(Cause(CauseKind.STAGE, stage), functional(graph))]

    def fired(self, result: PassResult, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        if not result.undone:
            self.steps.append(Step(Cause(CauseKind.PASS, result.name), functional(graph), True, result.matches))

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        """The stage ends with ``graph``."""
        self.steps.append(Step(Cause(CauseKind.STAGE, stage), functional(graph)))

    def drop(self) -> None:
        """Frees the graphs; no further run is compared."""
        self.steps = []

    @property
    def first(self) -> fx.GraphModule:
        return self.steps[0].graph

    @property
    def last(self) -> fx.GraphModule:
        return self.steps[-1].graph

    @property
    def lowers_precision(self) -> bool:
        """Whether the last graph computes in half precision, and the first does not: float64 sees no difference."""
        return _has_half(self.last) and not _has_half(self.first)

    @property
    def is_unchanged(self) -> bool:
        """Whether neither a pass nor anything else changed the graph."""
        return not any(step.is_pass for step in self.steps) and _described(self.first) == _described(self.last)

    def culprit(
        self,
        arguments: Sequence[object],
        state: torch.Tensor,
        keys: Mapping[int, object] | None = None,
        final: Results | None = None,
        reference: Results | None = None,
    ) -> tuple[Blame | None, Results | None]:
        """The first wrong step, and the results of the stage's first graph if they were needed.

        Args:
            arguments: of the stage's graphs.
            state: of the CPU's random numbers.
            keys: the results that are compared, by position; the key of a gradient is ``("gradient", j)``. By default
                these are all results, with the position as the key.
            final: the same results of the graph after all stages. If they are right, no step need run.
            reference: the same results, and maybe more, of the graph before all stages; ``final``, or the last step,
                is first compared with them.
        """
        self.unchecked = []
        if final is not None and keys is not None and not final.exact.keys() >= set(keys.values()):
            final = None  # the graph that runs has no names for them
        if final is None and self._keeps_results(arguments, state, keys, reference):
            return None, None
        copied = SharedCopies(arguments)

        def run(step: Step) -> Results:
            module = step.graph if keys is None else _restricted(step.graph, keys)
            with torch.no_grad():
                results = ReferenceRuns(lambda *args: run_graph(module, args), copied, state).outputs
            if keys is None:
                return results
            written: dict[Any, object] = {key: key for key in results.exact if isinstance(key, tuple)}
            return results.under(dict(enumerate(keys.values())) | written)

        last = None
        may_differ = self._writes(keys) or self.lowers_precision
        if reference is not None and not may_differ:
            end = final or (last := run(self.steps[-1]))
            if end.exact.keys() <= reference.exact.keys() and not changed(reference.under(_same(end)), end):
                return None, None
        start = last if last is not None and self.is_unchanged else run(self.steps[0])
        if self.is_unchanged or (final is not None and not may_differ and not changed(start, final)):
            return None, start
        if not self.lowers_precision and not changed(start, last or run(self.steps[-1])):
            return None, start
        return self.first_wrong(start, run, arguments, keys), start

    def _writes(self, keys: Mapping[int, object] | None) -> bool:
        """Whether changed arguments are results too: those of a forward are returned."""
        if keys is not None and not any(map(_is_gradient, keys.values())):
            return False
        return any(changes_memory(node) for step in self.steps for node in step.graph.graph.nodes)

    def _keeps_results(
        self,
        arguments: Sequence[object],
        state: torch.Tensor,
        keys: Mapping[int, object] | None,
        reference: Results | None,
    ) -> bool:
        """Whether the last step has, in float64, the results of the reference or of the first step.

        ``False`` also if that is not known without eager's decisions, random numbers and errors.
        """

        def results(step: Step) -> Iterator[tuple[object, object]]:
            graph = step.graph if keys is None else _restricted(step.graph, keys)
            names = None if keys is None else list(keys.values())
            for i, value in results_in_float64(graph, arguments, state):
                yield (i if names is None else names[i]), value

        if any(is_collective(node.target) for step in self.steps for node in step.graph.graph.nodes):
            return False
        if self._writes(keys) or self.lowers_precision:
            return False
        if keys is None and len(set(map(_number_of_results, self.steps))) > 1:
            return False
        missing = object()
        with torch.no_grad(), contextlib.suppress(*KERNEL_ERRORS, IndexError):
            expected = reference or Results({}, dict(results(self.steps[0])))
            known = (
                (expected.exact.get(key, missing), value, expected.eager.get(key))
                for key, value in results(self.steps[-1])
            )
            return not any(_is_changed(*values) for values in known)
        return False

    def first_wrong(
        self,
        start: Results,
        run: Callable[[Step], Results],
        arguments: Sequence[object],
        keys: Mapping[int, object] | None = None,
    ) -> Blame | None:
        """The first step whose results are wrong compared with the previous step's; see ``culprit``.

        ``start`` are the results of the first step; ``run`` computes those of the others.
        """
        self.unchecked = []
        before, old = self.steps[0], start
        for step in self.steps[1:]:
            new = run(step)
            if self.lowers_precision or changed(old, new):
                culprit = self._wrong_value(before.graph, step, old, new, arguments, keys)
                if culprit is not None:
                    return culprit
            before, old = step, new
        return None

    def _wrong_value(
        self,
        before: fx.GraphModule,
        step: Step,
        old: Results,
        new: Results,
        arguments: Sequence[object],
        keys: Mapping[int, object] | None,
    ) -> Blame | None:
        """A node or result that a step made wrong, if rounding does not explain what it changed."""
        graphs = (before, step.graph)
        first, second = graphs if keys is None else (_restricted(graph, keys) for graph in graphs)

        def blame(name: str, source: str, found: Verdict, module: str = "") -> Blame:
            return Blame(name, step.cause, source=source, module=module, difference=found)

        with torch.no_grad():
            node = first_wrong_node(first, second, arguments, torch.get_rng_state())
        if node is not None:
            return blame(*node)
        for key in old.eager:
            found = difference(old, new, key)
            if found.is_wrong:
                position = next((i for i, item in (keys or {}).items() if item == key), key)
                matched = next((node for node in before.graph.nodes if node.name in step.matches), None)
                if matched is None:
                    return blame(*name_of_result(before, position), found)
                place = place_of(matched)
                found = dataclasses.replace(found, elements=None)  # they are those of the result
                return blame(place.name, place.source, found, place.module)
        try:  # rounding could make the same fault in eager
            with torch.no_grad():
                node = first_wrong_node_in_float64(first, second, arguments, torch.get_rng_state())
        except KERNEL_ERRORS as error:  # an operator without float64
            self.unchecked.append(f"{step.cause}: its nodes in float64 alone: {first_line(str(error))}")
            return None
        return blame(*node) if node is not None else None


def _number_of_results(step: Step) -> int:
    return len(flat(step.graph.graph.output_node().args[0]))


def _same(results: Results) -> dict[object, object]:
    return {key: key for key in results.exact}


def _described(module: fx.GraphModule) -> list[object]:
    return [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in module.graph.nodes]


def run_graph(module: fx.GraphModule, arguments: Sequence[object]) -> list[object]:
    """Runs a graph of any stage; returns its results as a flat list.

    Raises:
        NotRepeatableError: it has operators that must run only once.
    """
    once = next((node for node in module.graph.nodes if is_collective(node.target)), None)
    if once is not None:
        raise NotRepeatableError(f"{once.target} communicates with other processes, and is not run again")
    return flat(_TolerantInterpreter(module).run(*arguments, enable_io_processing=False))


class _TolerantInterpreter(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        return super().call_function(TOLERANT_REPLACEMENTS.get(target, target), args, kwargs)


def changed(before: Results, after: Results) -> bool:
    """Whether two graphs' results differ by more than float64's rounding."""
    if before.exact.keys() != after.exact.keys():
        return True
    return any(_is_changed(old, after.exact[key], before.eager.get(key)) for key, old in before.exact.items())


def _is_changed(old: object, new: object, eager: object) -> bool:
    if old is new:
        return False
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return not same_number(old, new)
    if old.dtype != new.dtype or old.shape != new.shape:
        return True
    if is_discrete(old):
        return not torch.equal(old, new)
    if torch.equal(dense(old), dense(new)):
        return False
    ours, right = dense(new), dense(old)
    found = measure_tensor(ours, right)
    if found.nonfinite or found.max_abs <= FLOAT64_ROUNDING * (ordinary(right) or 1.0):
        return bool(found.nonfinite)
    others = []
    if isinstance(eager, torch.Tensor) and eager.shape == old.shape:
        # of numbers that cancel, nothing may be left but rounding, in eager's dtype and in float64
        share = _UNITS / format_of(torch.float64).factor * epsilon(torch.float64) / epsilon(eager.dtype)
        others.append(right.lerp(dense(eager).to(right), share))
    return not measure_tensor(ours, right, *others, group_size=group_size_of(right.shape)).is_rounding


def difference(before: Results, after: Results, key: object) -> Verdict:
    """The verdict on a result, with the same result before as the reference.

    Discrete results are not compared: rounding may change the result of a comparison.
    """
    if is_discrete(before.eager.get(key)) and is_discrete(after.eager.get(key)):
        return RIGHT
    return before.verdict(after.eager.get(key), key)


def name_of_result(graph: fx.GraphModule, key: object) -> tuple[str, str]:
    """The name and the source line of a result.

    The line of a gradient is where its argument is first read; that of a changed argument, where it is last used. The
    key is the result's position, ``("input", j)`` for the new value or ``("gradient", j)`` for the gradient of argument
    j.
    """
    if isinstance(key, int):
        node = flat(graph.graph.output_node().args[0])[key]
        return (node.name, where(node)) if isinstance(node, fx.Node) else (f"result {key}", "")
    assert isinstance(key, tuple)
    kind, position = key
    placeholder = list(graph.graph.find_nodes(op="placeholder"))[position]
    name = user_name(placeholder) or placeholder.name
    if kind == "gradient":
        return f"grad of {name}", _first_line(placeholder.users)
    return f"the input {name}", _first_line(reversed([*placeholder.users]))


def _first_line(nodes: Iterable[fx.Node]) -> str:
    return next(filter(None, map(where, nodes)), "")


def _restricted(graph: fx.GraphModule, keys: Mapping[int, object]) -> fx.GraphModule:
    """A copy of a graph with some of its results, and the nodes they need.

    Arguments are changed in a backward, so not if no result is a gradient.
    """
    result = copy_of(graph)
    output = result.graph.output_node()
    leaves = flat(output.args[0])
    output.args = ([leaves[i] for i in keys],)
    is_backward = any(map(_is_gradient, keys.values()))
    result.graph.eliminate_dead_code(None if is_backward else lambda node: node.op in ("placeholder", "output"))
    return result


def _is_gradient(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "gradient"


def _has_half(module: fx.GraphModule) -> bool:
    """Whether a node casts to a floating-point dtype below float32, or has a result of one."""
    for node in module.graph.nodes:
        fake = node.meta.get("val", node.meta.get("example_value"))
        for leaf in pytree.tree_leaves((node.args, node.kwargs, fake)):
            dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else leaf
            if isinstance(dtype, torch.dtype) and epsilon(dtype) > epsilon(torch.float32):
                return True
    return False


class _GraphWithoutCode(fx.GraphModule):
    """A graph module for an interpreter: generating its Python code would take longer than copying its nodes."""

    def recompile(self) -> Any:  # called when the graph is set
        return None


def copy_of(module: fx.GraphModule, kind: type[fx.GraphModule] = _GraphWithoutCode) -> fx.GraphModule:
    """A copy of the nodes, those of subgraphs of higher-order operators included; tensors are shared.

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


def functional(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, see ``copy_of``; what a forward copies into arguments becomes the last results."""
    copied = copy_of(module)
    pairs = [(new, copy) for _, new, copy in forward_writes(copied)]
    output = copied.graph.output_node()
    for new, copy in pairs:
        copy.replace_all_uses_with(new)
        copied.graph.erase_node(copy)
    if pairs:
        output.args = ([*flat(output.args[0]), *(new for new, _ in pairs)],)
    return copied
