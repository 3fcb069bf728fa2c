"""The first node of a graph whose value is not what it was before a pass changed the graph.

Both graphs run side by side, node by node, on the same arguments. Nodes of the same name are compared as soon as both
are computed, and a value is let go when nobody needs it any more.

There are two measures. In eager, the later value may be as far from float64 as the earlier one and rounding explain.
That lets pass what rounding may do: a comparison or an index of floating-point values that comes out otherwise, in half
precision an error of one or two percent, and a fault that a layer norm behind it damps. So both graphs run in float64
alone too: there a right pass turns no comparison, and changes nothing but what it computed once and for all in the
graph's dtype.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.known_wrong import is_uninitialized
from ..exporter.locations import where
from ..numerics.differences import Deviation, discrete_difference, is_discrete, largest, value_difference
from ..numerics.distance import dense, distance
from ..numerics.exact import Environment, attribute, run_eager, run_exact, run_only_exact, widen
from ..numerics.randomness import PrivateRandomness
from ..numerics.twice import copies

_UNITS = 4.0
_UNITS_OF_HALF = 0.5
"""By how many units of its dtype a constant that a pass computes once and for all may change a value in float64."""

_NOISE = 1e-13
"""What is left in float64 of values that cancel."""


def first_wrong_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> tuple[str, str, Deviation] | None:
    """The first node of ``after`` whose value is not that of its namesake: name, line, in words by how much.

    A node that the pass made has no namesake. Where one is what the found node reads, it is named, with the line of
    what was read before.

    Args:
        before, after: graphs of any stage, with the same placeholders.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers at the start.
    """
    common = _common_names(before, after)
    old, new = _Steps(before, arguments, state, common, exact=True), _Steps(after, arguments, state, common)
    return _first(before, after, old, new, _difference)


def first_wrong_node_in_float64(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> tuple[str, str, Deviation] | None:
    """The same where both graphs compute in float64 alone.

    Raises:
        REFUSALS: PyTorch has no float64 of one of the operators.
    """
    unit = _coarsest_unit([*_values(before), *arguments])
    allowed = unit * (_UNITS_OF_HALF if unit >= torch.finfo(torch.float16).eps else _UNITS)
    common = _common_names(before, after)
    old, new = (_Steps(module, arguments, state, common, eager=False, exact=True) for module in (before, after))

    def difference(old: _Steps, new: _Steps, theirs: fx.Node, ours: fx.Node) -> Deviation:
        return _difference_in_float64(old.exact[theirs], new.exact[ours], allowed)

    return _first(before, after, old, new, difference)


def _common_names(before: fx.GraphModule, after: fx.GraphModule) -> set[str]:
    return {node.name for node in before.graph.nodes} & {node.name for node in after.graph.nodes}


def _values(module: fx.GraphModule) -> list[object]:
    """What the nodes of a graph return, as fake tensors."""
    return [leaf for node in module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]


def _coarsest_unit(values: Sequence[object]) -> float:
    """The largest epsilon of the dtypes of floating-point tensors."""
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _first(
    before: fx.GraphModule,
    after: fx.GraphModule,
    old: _Steps,
    new: _Steps,
    difference: Callable[[_Steps, _Steps, fx.Node, fx.Node], Deviation],
) -> tuple[str, str, Deviation] | None:
    namesakes = {node.name: node for node in before.graph.nodes}
    for node in after.graph.nodes:
        same = namesakes.get(node.name)
        if same is None or node.op == "output" or is_uninitialized(node) or _is_subgraph(after, node):
            continue
        new.reach(node)
        old.reach(same)
        said = Deviation() if node in new.rounding else difference(old, new, same, node)
        if said:
            for theirs, ours in zip(_read(same), _read(node), strict=False):
                if ours.name not in namesakes:
                    return ours.name, where(ours) or where(theirs), said
            return node.name, where(node) or where(same), said
        old.used(same)
        new.used(node)
    for theirs, ours in zip(_read(before.graph.output_node()), _read(after.graph.output_node()), strict=False):
        new.reach(ours)
        old.reach(theirs)
        said = Deviation() if ours in new.rounding else difference(old, new, theirs, ours)
        if said:
            return ours.name, where(ours) or where(theirs), said
    return None


def _is_subgraph(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node reads the graph of a higher-order operator, whose results tell what a pass made of it."""
    return node.op == "get_attr" and isinstance(attribute(module, str(node.target)), torch.nn.Module)


class _Steps:
    """Runs a graph node by node, in eager and if asked for in float64.

    Args:
        module: the graph.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers.
        compared: names of nodes whose values are needed until ``used`` is called for them.
        eager: whether eager runs; float64 alone decides its own comparisons, and draws its own random numbers.
        exact: whether float64 runs.

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
        eager: bool = True,
        exact: bool = False,
    ) -> None:
        self.eager: Environment = {}
        self.exact: Environment = {}
        self.rounding: set[fx.Node] = set()
        self._module = module
        self._has_eager, self._has_exact = eager, exact
        self._nodes = iter(module.graph.nodes)
        self._arguments = iter(copies(arguments))
        self._randomness = PrivateRandomness(state)
        self._users = collections.Counter({node: len(node.users) for node in module.graph.nodes})
        self._users.update(node for node in module.graph.nodes if node.name in compared)

    def reach(self, node: fx.Node) -> None:
        """Runs the graph until the node is computed."""
        computed = self.eager if self._has_eager else self.exact
        while node not in computed:
            self._step(next(self._nodes))

    def used(self, node: fx.Node) -> None:
        """Lets go of a value if that was its last use."""
        self._users[node] -= 1
        if self._users[node] <= 0:
            self.eager.pop(node, None)
            self.exact.pop(node, None)

    def _step(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            is_argument = node.op == "placeholder"
            value = next(self._arguments) if is_argument else attribute(self._module, str(node.target))
            if self._has_eager:
                self.eager[node] = value
            if self._has_exact:
                self.exact[node] = pytree.tree_map(widen, value)
            return
        if self._has_eager:
            self._call(node)
        else:
            with self._randomness:
                self.exact[node] = run_only_exact(node, self.exact)
        for arg in node.all_input_nodes:
            self.used(arg)

    def _call(self, node: fx.Node) -> None:
        draws = self._randomness.draws
        with self._randomness:
            eager = self.eager[node] = run_eager(node, self.eager)
        is_random = self._randomness.draws > draws
        given = [leaf for arg in node.all_input_nodes for leaf in pytree.tree_leaves(self.eager[arg])]
        if all(map(is_discrete, pytree.tree_leaves(eager))) and not all(map(is_discrete, given)):
            self.rounding.add(node)
        if self._has_exact:
            self.exact[node] = pytree.tree_map(widen, eager) if is_random else run_exact(node, self.exact, eager)


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes a node reads, in the order of its arguments, repeated ones too."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def _difference(old: _Steps, new: _Steps, theirs: fx.Node, ours: fx.Node) -> Deviation:
    before, exact, after = (
        pytree.tree_leaves(item, is_leaf=lambda x: x is None)
        for item in (old.eager[theirs], old.exact[theirs], new.eager[ours])
    )
    if len(before) != len(after):
        return Deviation(f"{len(after)} results instead of {len(before)}")
    beside = largest(exact) if len(exact) > 1 else 0.0
    said = (value_difference(*values, beside) for values in zip(before, exact, after, strict=True))
    return next(filter(None, said), Deviation())


def _difference_in_float64(before: object, after: object, allowed: float) -> Deviation:
    """In words, how two results of float64 differ.

    Floating-point values: if by more than ``allowed`` of the root of their mean square. Others: if more elements do
    than chance lets happen where two values tie.
    """
    pairs = (pytree.tree_leaves(item, is_leaf=lambda x: x is None) for item in (before, after))
    for old, new in zip(*pairs, strict=True):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.shape != new.shape:
            continue  # eager's values have told
        old, new = dense(old), dense(new)
        if is_discrete(old):
            said = discrete_difference(old, new)
            if said:
                return Deviation(said)
            continue
        found = distance(new, old)
        size = float(torch.linalg.vector_norm(old[old.isfinite()])) / math.sqrt(max(old.numel(), 1))
        if found.nonfinite or found.rmse > max(allowed * size, _NOISE):
            said = f"in float64 another result: off by {found.max_abs:.3g}, at values up to {found.scale:.3g}"
            return Deviation(said, found)
    return Deviation()
