"""Finds the node at which a pass changed what a graph computes.

The graph after the pass runs once. Each of its nodes that the pass changed is judged by the graph before the pass: the
node of the same name there, computed from values of this run, see ``numerics.segments``. So a difference is of this
node, and not of those before it.

- In float64, more than rounding in the model's dtype is wrong: a pass may compute a constant in it.
- In the model's dtypes, for a pass that adds casts, which float64 does not see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.fx.editing import changes_memory, value_in

from ..common.random_state import RandomState
from ..exporter.upstream_faults import is_uninitialized
from ..graphs.descriptors import result_descriptors, result_of_tangent
from ..graphs.locations import Place, changed_nodes, operands, place_of
from ..numerics.exact import Environment, widened
from ..numerics.function_runs import copies
from ..numerics.randomness import PrivateRandomness
from ..numerics.segments import Judged, RecordedValues, SegmentCheck
from ..numerics.verdicts import RIGHT, Verdict, epsilon, verdict
from .call_runs import CallInterpreter, CallMode, constants_of, is_value, tangent
from .interpreter import flat


class ChangedNode(NamedTuple):
    """A node that differs, and how."""

    place: Place
    difference: Verdict


def first_changed_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: RandomState, *, casts: bool
) -> ChangedNode | None:
    """The first node of ``after`` that computes something else than that of the same name, or result, in ``before``.

    If that node reads one that the pass added, the added node is returned, see ``changed_nodes``. A node that now
    writes into its argument is returned first: it changes the values of earlier nodes.

    Args:
        before, after: graphs with the same placeholders.
        arguments: their values, in the model's dtypes.
        state: of the CPU's random numbers.
        casts: whether values are compared in the model's dtypes, not in float64.
    """
    names = {node.name: node for node in before.graph.nodes}
    for node in after.graph.nodes:
        if changes_memory(node) and (node.name not in names or not changes_memory(names[node.name])):
            return ChangedNode(place_of(node, names.get(node.name)), Verdict("writes into its argument"))
    run = _Values(after, CallMode(state, is_wide=not casts))
    with torch.no_grad(), run.mode.alone():
        run.run(*copies(arguments, wide=not casts), enable_io_processing=False)
    pairs = _pairs(before, after, names, run)
    changed = {theirs: ours for theirs, ours in pairs.items() if _is_changed(theirs, ours) and ours not in run.random}
    given = {theirs: run.values[ours] for theirs, ours in pairs.items() if theirs not in changed}
    with torch.no_grad(), _disable_current_modes(), PrivateRandomness(state):
        constants = _constants(before, given)
        for theirs, value in constants.items():
            if theirs in changed and (found := difference(value, run.values[changed[theirs]])).is_wrong:
                return ChangedNode(place_of(changed[theirs], theirs), found)
        given |= constants if casts else widened(constants)
        known = _Known({node: changed[node] for node in changed.keys() - constants.keys()}, pairs, run, casts=casts)
        for judged in SegmentCheck(before.graph.nodes, given, known, wide=not casts).judge():
            if judged.is_wrong and judged.node in changed:
                return _changed_node(judged, changed[judged.node], names, run)
    return None


def _changed_node(judged: Judged, ours: fx.Node, names: Mapping[str, fx.Node], run: _Values) -> ChangedNode:
    """Names the node that the pass added, with its own difference if it has the shape of what it replaces."""
    replaced, added = changed_nodes(judged.node, ours, names)
    fake = value_in(judged.node.meta)
    model = fake.dtype if isinstance(fake, torch.Tensor) and fake.is_floating_point() else None
    differs = judged.verdict()
    if added is not ours:
        expected = judged.expected if replaced is judged.node else judged.read.get(replaced)
        own = difference(expected, run.values.get(added), model)
        differs = own if own.elements is not None else dataclasses.replace(differs, elements=None)
    return ChangedNode(place_of(added, replaced), differs)


class _Values(CallInterpreter):
    """Runs a graph, and keeps the values of its nodes as they are before other nodes write into them.

    Attributes:
        mode: in which it runs.
        values: by node.
        random: the nodes that draw random numbers.
    """

    def __init__(self, module: fx.GraphModule, mode: CallMode) -> None:
        super().__init__(module, mode)
        self.mode = mode
        self.values: Environment = {}
        self.random: set[fx.Node] = set()
        self._writes = any(map(changes_memory, module.graph.nodes))

    def run_node(self, n: fx.Node) -> object:
        draws = self.mode.randomness.draws
        value = super().run_node(n)
        if self.mode.randomness.draws > draws:
            self.random.add(n)
        kept = widened(value) if self.mode.is_wide else value
        self.values[n] = copies([kept])[0] if self._writes and isinstance(kept, torch.Tensor) else kept
        return value


class _Known(RecordedValues):
    """The values of changed nodes. Those in half precision are not compared in the model's dtypes: they had no more
    digits before the pass."""

    def __init__(
        self, changed: Mapping[fx.Node, fx.Node], pairs: Mapping[fx.Node, fx.Node], run: _Values, *, casts: bool
    ) -> None:
        values: dict[tuple[fx.Node, int | None], object] = {}
        for theirs, ours in changed.items():
            value, fake = run.values[ours], value_in(theirs.meta)
            if casts and isinstance(fake, torch.Tensor) and epsilon(fake.dtype) > epsilon(torch.float32):
                continue
            several = isinstance(value, (tuple, list))
            values |= {(theirs, i if several else None): item for i, item in enumerate(flat(value))}
        super().__init__(values)
        self._pairs = pairs
        self._common = set(pairs.values())

    def reads(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether the node after the pass is computed from the value of ``source`` there."""
        waiting, wanted = list(self._pairs[node].all_input_nodes), self._pairs.get(source)
        while waiting:
            item = waiting.pop()
            if item is wanted:
                return True
            waiting += item.all_input_nodes if item not in self._common else []
        return False


def _pairs(
    before: fx.GraphModule, after: fx.GraphModule, names: Mapping[str, fx.Node], run: _Values
) -> dict[fx.Node, fx.Node]:
    """The nodes of ``after``, by the node at the same place of the results, or of the
    same name, in ``before``."""
    results = dict(zip(operands(after.graph.output_node()), operands(before.graph.output_node()), strict=False))
    named = {names[ours.name]: ours for ours in run.values if ours.op != "output" and ours.name in names}
    pairs = {**named, **{theirs: ours for ours, theirs in results.items()}}
    return {theirs: ours for theirs, ours in pairs.items() if not is_uninitialized(ours)}


def _is_changed(theirs: fx.Node, ours: fx.Node) -> bool:
    return ours.op == "get_attr" or (ours.op != "placeholder" and _described(ours) != _described(theirs))


def _described(node: fx.Node) -> tuple[object, ...]:
    return node.op, node.target, repr(node.args), repr(node.kwargs)


def _constants(module: fx.GraphModule, given: Mapping[fx.Node, object]) -> Environment:
    """The values of nodes that depend on no argument and are not given, in the model's dtypes."""
    run = CallInterpreter(module, CallMode(RandomState.now(), is_wide=False))
    found = constants_of(module.graph)
    for node in module.graph.nodes:
        if node in found and node not in given and all(item in run.env for item in node.all_input_nodes):
            run.env[node] = run.run_node(node)
    return run.env


def difference(expected: object, actual: object, dtype: torch.dtype | None = None) -> Verdict:
    """How the results of a node differ, see ``verdict``."""
    olds, news = flat(expected), flat(actual)
    if len(olds) != len(news):
        return Verdict(f"{len(news)} results instead of {len(olds)}")
    pairs = zip(news, olds, strict=True)
    found = (verdict(new, old, dtype) for new, old in pairs if is_value(new) or is_value(old))
    return next((item for item in found if item.is_wrong), RIGHT)


def with_tangents(graph: fx.GraphModule, known: Mapping[str, object], state: RandomState) -> list[object]:
    """The arguments of a joint graph: those of its forward, which are ``known`` by name, and random gradients.

    Sizes of gradients that are symbols are those of the results.
    """
    nodes = list(graph.graph.find_nodes(op="placeholder"))
    arguments = [known.get(node.name) for node in nodes]
    missing: dict[object, int] = {}
    for i, node in enumerate(nodes):
        result = result_of_tangent(node)
        if result is not None and node.name not in known:
            fake = node.meta["val"]
            if all(isinstance(size, int) for size in fake.shape):
                arguments[i] = tangent(i, fake)
            else:
                missing[result] = i
    leaves = flat(graph.graph.output_node().args[0])
    described = zip(result_descriptors(graph), leaves, strict=False)
    results = {leaf: missing[result] for result, leaf in described if result in missing}
    run = _Values(graph, CallMode(state, is_wide=False))
    run.args_iter = iter(copies(arguments))
    with torch.no_grad(), run.mode.alone():
        for node in graph.graph.nodes if results else ():
            run.env[node] = value = run.run_node(node)
            if node in results:
                i = results.pop(node)
                arguments[i] = tangent(i, value)
            if not results:
                break
    return arguments
