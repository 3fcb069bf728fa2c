"""The first node of a graph whose value is not what it was before a pass changed the graph.

Both graphs run side by side, node by node, on the same arguments. Nodes of the same name are compared as soon as both
are computed, and a value is let go when nobody needs it any more.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.known_wrong import is_uninitialized
from ..exporter.locations import source_line
from ..numerics.differences import is_discrete, value_difference
from ..numerics.exact import Environment, attribute, run_eager, run_exact, widen
from ..numerics.twice import copies


def first_wrong_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> tuple[str, str, str] | None:
    """The first node of ``after`` whose value is not that of its namesake: name, line, in words by how much.

    A node that the pass made has no namesake. Where one is what the found node reads, it is named, with the line of
    what was read before.

    Args:
        before, after: graphs of any stage, with the same placeholders.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers at the start.
    """
    namesakes = {node.name: node for node in before.graph.nodes}
    common = {node.name for node in after.graph.nodes if node.name in namesakes}
    old, new = _Steps(before, arguments, state, common, exact=True), _Steps(after, arguments, state, common)
    for node in after.graph.nodes:
        same = namesakes.get(node.name)
        if same is None or node.op == "output" or is_uninitialized(node):
            continue
        new.reach(node)
        old.reach(same)
        said = "" if node in new.rounding else _difference(old, new, same, node)
        if said:
            for theirs, ours in zip(_read(same), _read(node), strict=False):
                if ours.name not in namesakes:
                    return ours.name, source_line(ours) or source_line(theirs), said
            return node.name, source_line(node) or source_line(same), said
        old.used(same)
        new.used(node)
    for theirs, ours in zip(_read(before.graph.output_node()), _read(after.graph.output_node()), strict=False):
        new.reach(ours)
        old.reach(theirs)
        said = "" if ours in new.rounding else _difference(old, new, theirs, ours)
        if said:
            return ours.name, source_line(ours) or source_line(theirs), said
    return None


class _Steps:
    """Runs a graph node by node, in eager and if asked for in float64.

    Args:
        module: the graph.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers.
        compared: names of nodes whose values are needed until ``used`` is called for them.
        exact: whether float64 runs beside it.

    Attributes:
        eager, exact: values that are still needed.
        rounding: nodes that made discrete values of floating-point ones, which another rounding may turn.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        arguments: Sequence[object],
        state: torch.Tensor,
        compared: Collection[str],
        *,
        exact: bool = False,
    ) -> None:
        self.eager: Environment = {}
        self.exact: Environment = {}
        self.rounding: set[fx.Node] = set()
        self._module = module
        self._has_exact = exact
        self._nodes = iter(module.graph.nodes)
        self._arguments = iter(copies(arguments))
        self._state = state
        self._users = collections.Counter({node: len(node.users) for node in module.graph.nodes})
        self._users.update(node for node in module.graph.nodes if node.name in compared)

    def reach(self, node: fx.Node) -> None:
        """Runs the graph until the node is computed."""
        while node not in self.eager:
            self._step(next(self._nodes))

    def used(self, node: fx.Node) -> None:
        """Lets go of a value if that was its last use."""
        self._users[node] -= 1
        if self._users[node] <= 0:
            self.eager.pop(node, None)
            self.exact.pop(node, None)

    def _step(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.eager[node] = next(self._arguments)
        elif node.op == "get_attr":
            self.eager[node] = attribute(self._module, str(node.target))
        else:
            self._call(node)
            return
        if self._has_exact:
            self.exact[node] = pytree.tree_map(widen, self.eager[node])

    def _call(self, node: fx.Node) -> None:
        torch.set_rng_state(self._state)
        eager = self.eager[node] = run_eager(node, self.eager)
        state = torch.get_rng_state()
        is_random, self._state = not torch.equal(state, self._state), state
        given = [leaf for arg in node.all_input_nodes for leaf in pytree.tree_leaves(self.eager[arg])]
        if all(map(is_discrete, pytree.tree_leaves(eager))) and not all(map(is_discrete, given)):
            self.rounding.add(node)
        if self._has_exact:
            self.exact[node] = pytree.tree_map(widen, eager) if is_random else run_exact(node, self.exact, eager)
        for arg in node.all_input_nodes:
            self.used(arg)


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes a node reads, in the order of its arguments, repeated ones too."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def _difference(old: _Steps, new: _Steps, theirs: fx.Node, ours: fx.Node) -> str:
    before, exact, after = (
        pytree.tree_leaves(item, is_leaf=lambda x: x is None)
        for item in (old.eager[theirs], old.exact[theirs], new.eager[ours])
    )
    if len(before) != len(after):
        return f"{len(after)} results instead of {len(before)}"
    said = (value_difference(*values) for values in zip(before, exact, after, strict=True))
    return next(filter(None, said), "")
