"""Finds the node at which a pass changed what a graph computes.

The graph after the pass runs once, in the model's dtypes. Each of its nodes that the pass changed is compared with the
node of the same name in the graph before the pass, both computed from values of this run that both graphs have. So a
difference is of this node, and not of those before it.

- In float64, more than rounding in float32 is wrong: a pass may compute a constant in the model's dtype.
- In the model's dtypes, for a pass that adds casts, which float64 does not see.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from passes.engine.fx.editing import changes_memory

from ..exporter.upstream_faults import is_uninitialized
from ..graphs import aot
from ..graphs.locations import Place, changed_nodes, operands, place_of
from ..numerics.exact import KERNEL_ERRORS, widened
from ..numerics.function_runs import copies
from ..numerics.verdicts import RIGHT, Verdict, epsilon, verdict
from .interpreter import flat
from .wide_runs import WideInterpreter, WideMode, is_value, tangent, unexplained

_OF_HALF = 0.5
"""A constant that a pass computes in half precision may change a value by so many units of it."""


class ChangedNode(NamedTuple):
    """A node that differs, and how."""

    place: Place
    difference: Verdict


def first_changed_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor, *, casts: bool
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
    pairs = _changed_pairs(before, after, names)
    common = {node.name for node in after.graph.nodes} & names.keys()
    ends = [node for pair in pairs.items() for node in pair]
    needed = {name for node in ends for item in (node, *operands(node)) for name in _read(item, common)}
    run = Walk(after, copies(arguments), WideMode(state, widens=False))
    values = _Values(common, _computed(after), {}, state)
    for node in after.graph.nodes:
        if node.op == "output":
            break
        value = run.step(node)
        theirs = pairs.get(node)
        if theirs is not None:
            found = values.difference(theirs, node, value, casts=casts)
            if found.is_wrong:
                replaced, added = changed_nodes(theirs, node, names)
                if added is not node:  # its own difference, if it has the shape of what it replaces
                    own = values.difference(replaced, added, run.env.get(added), casts=casts)
                    found = own if own.elements is not None else dataclasses.replace(found, elements=None)
                return ChangedNode(place_of(added, replaced), found)
        if node.name in needed or node.op == "placeholder":
            values.known[node.name] = value
        run.free(node)
    return None


def _computed(module: fx.GraphModule) -> set[str]:
    """The names of the nodes that depend on arguments."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def _changed_pairs(
    before: fx.GraphModule, after: fx.GraphModule, names: Mapping[str, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The nodes of ``after`` that differ from those of the same name, or else result, in ``before``, with these."""
    results = dict(zip(operands(after.graph.output_node()), operands(before.graph.output_node()), strict=False))
    pairs = {node: names.get(node.name) or results.get(node) for node in after.graph.nodes}
    return {
        ours: theirs
        for ours, theirs in pairs.items()
        if theirs is not None and ours.op not in ("placeholder", "output")
        if not is_uninitialized(ours) and (_described(ours) != _described(theirs) or ours.op == "get_attr")
    }


def _described(node: fx.Node) -> tuple[object, ...]:
    return node.op, node.target, repr(node.args), repr(node.kwargs)


def _read(node: fx.Node, common: set[str]) -> set[str]:
    """The names of the nearest nodes, of those that both graphs have, that a node is computed from."""
    found: set[str] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        item = waiting.pop()
        if item.name in common:
            found.add(item.name)
        else:
            waiting += item.all_input_nodes
    return found


class Walk(WideInterpreter):
    """Runs a graph node by node."""

    def __init__(self, module: fx.GraphModule, arguments: Sequence[object], mode: WideMode) -> None:
        super().__init__(module, mode)
        self.mode = mode
        self.args_iter = iter(arguments)

    def step(self, node: fx.Node) -> object:
        """The value of the next node."""
        with torch.no_grad(), self.mode.alone():
            self.env[node] = value = self.run_node(node)
        return value

    def free(self, node: fx.Node) -> None:
        """Frees the values that no node after this one reads."""
        for item in self.user_to_last_uses.get(node, ()):
            self.env.pop(item, None)


@dataclasses.dataclass(frozen=True)
class _Values:
    """Computes nodes of two graphs from values of nodes that both have.

    Attributes:
        common: the names that both graphs have.
        computed: the names of nodes that depend on arguments.
        known: values by name, in the model's dtypes.
        state: of the CPU's random numbers.
    """

    common: set[str]
    computed: set[str]
    known: dict[str, object]
    state: torch.Tensor

    def difference(self, theirs: fx.Node, ours: fx.Node, actual: object, *, casts: bool) -> Verdict:
        """How the value of ``ours`` differs from that of ``theirs``, in float64 or in the model's dtypes.

        ``theirs`` may read a rounded value that ``ours`` does not read, and then is computed without it.
        """
        compare = self._difference_in_model if casts else self._difference_in_float64
        found = compare(theirs, ours, actual, self.common)
        read = _read(ours, self.common)
        if found.is_wrong and not _read(theirs, self.common) <= read:
            with contextlib.suppress(*KERNEL_ERRORS, IndexError):  # of an index that float64 does not have
                other = compare(theirs, ours, actual, read)
                return found if other.is_wrong else other
        return found

    def _difference_in_model(self, theirs: fx.Node, ours: fx.Node, actual: object, given: set[str]) -> Verdict:
        fake = theirs.meta.get("val", theirs.meta.get("example_value"))
        if isinstance(fake, torch.Tensor) and epsilon(fake.dtype) > epsilon(torch.float32):
            return RIGHT  # it had no more digits before the pass
        mode = WideMode(self.state, widens=False)
        expected = self._value(theirs, mode, given)
        if mode.draws:  # other random numbers than in the run
            return RIGHT
        dtype = fake.dtype if isinstance(fake, torch.Tensor) and fake.is_floating_point() else None
        return difference(expected, actual, self._value(theirs, WideMode(self.state), given), dtype=dtype)

    def _difference_in_float64(self, theirs: fx.Node, ours: fx.Node, actual: object, given: set[str]) -> Verdict:
        modes = WideMode(self.state), WideMode(self.state)
        others = self.common - {theirs.name}  # a node that the pass added may read the one that it replaces
        olds, news = flat(self._value(theirs, modes[0], given)), flat(self._value(ours, modes[1], others))
        if any(mode.draws for mode in modes):
            return RIGHT
        fake = theirs.meta.get("val", theirs.meta.get("example_value"))
        unit = epsilon(fake.dtype) if isinstance(fake, torch.Tensor) else 0.0
        relative = _OF_HALF * unit if unit > epsilon(torch.float32) else 0.0

        def again(seed: int) -> dict[int, object]:
            return dict(enumerate(flat(self._value(theirs, WideMode(self.state, seed, rounding=torch.float32), given))))

        pairs = dict(enumerate(zip(olds, news, strict=False)))
        if len(olds) == len(news) and not unexplained(pairs, again, relative):
            return RIGHT
        model = fake.dtype if isinstance(fake, torch.Tensor) and fake.is_floating_point() else None
        found = (difference(olds, news, dtype=dtype) for dtype in (model, None))
        return next((item for item in found if item.is_wrong), Verdict("differs in float64"))

    def _value(self, node: fx.Node, mode: WideMode, given: set[str]) -> object:
        """The value of a node, from those of ``given`` and the arguments."""
        module = node.graph.owning_module
        assert isinstance(module, fx.GraphModule)
        walk = Walk(module, (), mode)
        waiting = [node]
        if node.op == "placeholder":
            return widened(self.known[node.name]) if mode.widens else self.known[node.name]
        while waiting:
            item = waiting[-1]
            for read in item.all_input_nodes:
                if read not in walk.env and (read.name in given or read.op == "placeholder"):
                    with mode.alone():
                        walk.give(read, self.known[read.name], computed=read.name in self.computed)
            missing = [read for read in item.all_input_nodes if read not in walk.env]
            waiting += missing
            if not missing:
                waiting.pop()
                walk.step(item)
        return walk.env[node]


def difference(expected: object, actual: object, exact: object = None, *, dtype: torch.dtype | None = None) -> Verdict:
    """How values differ, by the tolerance of ``dtype`` or the expected value's; ``exact`` is that in float64."""
    olds, news = flat(expected), flat(actual)
    if len(olds) != len(news):
        return Verdict(f"{len(news)} results instead of {len(olds)}")
    triples = zip(news, olds, flat(expected if exact is None else exact), strict=True)
    found = (verdict(*values, dtype) for values in triples if any(map(is_value, values[:2])))
    return next((item for item in found if item.is_wrong), RIGHT)


def with_tangents(graph: fx.GraphModule, known: Mapping[str, object], state: torch.Tensor) -> list[object]:
    """The arguments of a joint graph: those of its forward, which are ``known`` by name, and random gradients.

    Sizes of gradients that are symbols are those of the results.
    """
    nodes = list(graph.graph.find_nodes(op="placeholder"))
    arguments = [known.get(node.name) for node in nodes]
    missing: dict[object, int] = {}
    for i, (node, key) in enumerate(zip(nodes, aot.keys_of_arguments(graph), strict=True)):
        if isinstance(key, tuple) and key[0] == "tangent" and node.name not in known:
            fake = node.meta["val"]
            if all(isinstance(size, int) for size in fake.shape):
                arguments[i] = tangent(i, fake)
            else:
                missing[key[1]] = i
    leaves = flat(graph.graph.output_node().args[0])
    keys = aot.keys_of_results(graph)
    results = {leaf: missing[key] for key, leaf in zip(keys, leaves, strict=True) if key in missing}
    run = Walk(graph, copies(arguments), WideMode(state, widens=False))
    for node in graph.graph.nodes if results else ():
        value = run.step(node)
        run.free(node)
        if node in results:
            i = results.pop(node)
            arguments[i] = tangent(i, value)
        if not results:
            break
    return arguments
