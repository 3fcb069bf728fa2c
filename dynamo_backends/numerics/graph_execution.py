"""Runs an FX graph node by node in PyTorch: in eager and in float64, or in float64 with random rounding.

::

    execution = FxExecution(module, arguments, torch.get_rng_state())
    execution.reach(node)
    execution.eager[node], execution.exact_of(node)
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import is_view, written_nodes

from .exact import (
    KERNEL_ERRORS,
    Environment,
    attribute,
    floats,
    run_eager,
    run_exact,
    run_only_exact,
    widened,
    widened_copies,
)
from .local_error import SUMS, name_without_overload
from .randomness import NEAR_ONE, PrivateRandomness, computes, perturbed, perturbed_near_one


class FxExecution:
    """One execution of a graph. A value is dropped after its last use.

    Args:
        module: a graph of any stage.
        arguments: a value for each placeholder; the graph may write into them.
        state: of the CPU's random numbers.
        eager: whether eager runs. Without it, float64 decides comparisons itself and draws its own random numbers.
        exact: whether float64 runs.
        recorded: by node, results that are not computed again, such as random numbers.
        compared: names of nodes whose values are kept until ``release`` is called for them.

    Attributes:
        eager, exact: the values that are still needed; see ``exact_of`` for arguments. The two share no memory.
        inexact: by node name, why PyTorch has no float64 kernel; eager's result is used instead.
        drawn: the results of nodes that drew random numbers.
        decisions: nodes that computed discrete values from floating-point ones; rounding may change these.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        arguments: Sequence[object],
        state: torch.Tensor,
        *,
        eager: bool = True,
        exact: bool = True,
        recorded: Mapping[fx.Node, object] | None = None,
        compared: Collection[str] = (),
    ) -> None:
        self.eager: Environment = {}
        self.exact: Environment = {}
        self.inexact: dict[str, str] = {}
        self.decisions: set[fx.Node] = set()
        self.drawn: dict[fx.Node, object] = {}
        self._module = module
        self._has_eager, self._has_exact = eager, exact
        self._recorded = recorded if recorded is not None else {}
        self._nodes = iter(module.graph.nodes)
        self._arguments = iter(arguments)
        self._narrow: Environment = {}  # without eager: arguments and recorded results, which take half the memory
        self._copied = _copied(module) if not eager else set()
        self._randomness = PrivateRandomness(state)
        self._users = collections.Counter({node: len(node.users) for node in module.graph.nodes})
        self._users.update(node for node in module.graph.nodes if node.name in compared)

    def reach(self, node: fx.Node) -> None:
        """Runs the graph until a node is computed."""
        while node not in self.eager and node not in self._narrow and (self._has_eager or node not in self.exact):
            following = next(self._nodes)
            self.run(following)
            self.release(*following.all_input_nodes)

    def run(self, node: fx.Node) -> None:
        """Runs one node, whose inputs were computed. The inputs are kept until ``release``."""
        if node in self._recorded:
            value = self._recorded[node]
        elif node.op == "placeholder":
            value = next(self._arguments)
        elif node.op == "get_attr":
            value = attribute(self._module, str(node.target))
        elif self._has_eager:
            self._call(node)
            return
        else:
            with self._randomness:
                self.exact[node] = self._call_exact(node)
            return
        if self._has_eager:
            self.eager[node] = value
        elif node in self._copied:
            self.exact[node] = widened_copies(value)
        else:
            self._narrow[node] = value

    def _call(self, node: fx.Node) -> None:
        if self._has_exact:
            for arg in node.all_input_nodes:  # before the node writes into them
                self.exact_of(arg)
        draws = self._randomness.draws
        with self._randomness:
            eager = self.eager[node] = run_eager(node, self.eager)
        if not floats(eager) and floats([self.eager[arg] for arg in node.all_input_nodes]):
            self.decisions.add(node)
        if self._randomness.draws > draws:
            self.drawn[node] = eager
        elif self._has_exact:
            self.exact[node] = run_exact(node, self.exact, eager, self.inexact)

    def _call_exact(self, node: fx.Node) -> object:
        return run_only_exact(node, {arg: self.exact_of(arg) for arg in node.all_input_nodes})

    def exact_of(self, node: fx.Node) -> object:
        """A node's value in float64; eager's, widened, if the node was not computed or drew random numbers.

        Without eager, an argument is widened for each node that reads it.
        """
        if node in self._narrow:
            return widened(self._narrow[node])
        if node not in self.exact:
            self.exact[node] = widened_copies(self.eager[node])
        return self.exact[node]

    def hold(self, node: fx.Node) -> None:
        """Keeps the value of a node until it is released once more."""
        self._users[node] += 1

    def release(self, *nodes: fx.Node) -> list[fx.Node]:
        """Counts a use of each node. Returns the nodes that are not used any more, whose values are dropped."""
        self._users.subtract(nodes)
        dead = [node for node in nodes if self._users[node] <= 0]
        for node in dead:
            self.eager.pop(node, None)
            self.exact.pop(node, None)
            self._narrow.pop(node, None)
        return dead


def _copied(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes into whose values a node writes; all, if one of these may be a view of an argument."""
    written = {arg for node in module.graph.nodes for arg in written_nodes(node)}
    return written if all(node.op == "placeholder" for node in written) else set(module.graph.nodes)


def results_in_float64(
    module: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> Iterator[tuple[int, object]]:
    """Runs a graph in float64 alone; yields each result with its position, as soon as it is known.

    Float64 decides comparisons itself and draws its own random numbers. Arguments are not changed. They are widened for
    each node that reads them, and other values are dropped after their last use, so that this takes little memory.

    Raises:
        KERNEL_ERRORS: PyTorch has no float64 of one of the operators.
    """
    *nodes, output = module.graph.nodes
    positions: collections.defaultdict[object, list[int]] = collections.defaultdict(list)
    for i, leaf in enumerate(pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)):
        positions[leaf].append(i)
        if not isinstance(leaf, fx.Node):
            yield i, leaf
    is_written = bool(_copied(module))  # by a later node
    execution = FxExecution(module, arguments, state, eager=False)
    for node in nodes:
        execution.run(node)
        if not is_written and node in positions:
            yield from ((i, execution.exact_of(node)) for i in positions[node])
            execution.release(node)
        execution.release(*node.all_input_nodes)
    for node in positions if is_written else ():
        if isinstance(node, fx.Node):
            yield from ((i, execution.exact_of(node)) for i in positions[node])


_LINEAR = SUMS | {"add", "sub", "rsub", "mul", "neg", "cat", "where", "relu", "_to_copy"}
"""Operators, besides views, that propagate an error and do not amplify it relative to the values that it comes from."""


class PerturbedExecution(FxExecution):
    """Float64 with random rounding.

    Each floating-point value that a node reads is perturbed by up to a unit in the last place of its dtype in the
    graph.

    Args:
        module, arguments, state, recorded, compared: see ``FxExecution``.
        seed: of the perturbations.
        has_near_one: whether ``near_one`` is computed.

    Attributes:
        near_one: by node, values with another error: functions such as SiLU are perturbed by the error of a unit of one
            inside, and linear operators propagate it. Not in ``exact``: an error that is small relative to one is not
            rounding of ``log(y)``.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        arguments: Sequence[object],
        state: torch.Tensor,
        seed: int,
        *,
        recorded: Mapping[fx.Node, object],
        compared: Collection[str] = (),
        has_near_one: bool = False,
    ) -> None:
        super().__init__(module, arguments, state, eager=False, recorded=recorded, compared=compared)
        self._generator = torch.Generator().manual_seed(seed)
        self._near_one_generator = torch.Generator().manual_seed(seed + 2**32) if has_near_one else None
        self.near_one: Environment = {}

    def run(self, node: fx.Node) -> None:
        """See ``FxExecution.run``."""
        super().run(node)
        name, generator = name_without_overload(node), self._near_one_generator
        if generator is None or node not in self.exact:
            return
        value, inputs = self.exact[node], node.all_input_nodes
        if name in NEAR_ONE and isinstance(value, torch.Tensor) and value.dtype is torch.float64:
            given = [self.exact_of(arg) for arg in inputs]
            self.near_one[node] = perturbed_near_one(name, value, given, node.meta["val"].dtype, generator)
        elif (name in _LINEAR or is_view(node.target)) and not self.near_one.keys().isdisjoint(inputs):
            with contextlib.suppress(*KERNEL_ERRORS):  # no float64 kernel
                wide = {arg: self.near_one[arg] if arg in self.near_one else self.exact_of(arg) for arg in inputs}
                self.near_one[node] = run_only_exact(node, wide)

    def _call_exact(self, node: fx.Node) -> object:
        if computes(node.target):
            compares = not floats(node.meta.get("val"))
            inputs = {arg: self._perturbed(arg, compares) for arg in node.all_input_nodes}
        else:
            inputs = {arg: self.exact_of(arg) for arg in node.all_input_nodes}
        try:
            return run_only_exact(node, inputs)
        except KERNEL_ERRORS:
            return widened_copies(run_eager(node, {arg: _narrowed(arg, value) for arg, value in inputs.items()}))

    def _perturbed(self, node: fx.Node, whole_stay: bool) -> object:
        fake, value = node.meta.get("val"), self._narrow[node] if node in self._narrow else self.exact[node]
        if not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
            return widened(value)
        return perturbed(value, self._generator, dtype=fake.dtype, whole_stay=whole_stay)

    def release(self, *nodes: fx.Node) -> list[fx.Node]:
        """See ``FxExecution.release``."""
        dead = super().release(*nodes)
        for node in dead:
            self.near_one.pop(node, None)
        return dead


def _narrowed(node: fx.Node, value: object) -> object:
    """A node's value in its dtype in the graph."""
    fake = node.meta.get("val")
    return value.to(fake.dtype) if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor) else value


def value_of(node: fx.Node, known: Environment) -> object:
    """The value of a node. Nodes that are not in ``known`` are computed in PyTorch, and added to it."""
    waiting = [node]
    while waiting:  # no recursion: graphs are deep
        last = waiting[-1]
        unknown = [item for item in last.all_input_nodes if item not in known]
        if last not in known and unknown:
            waiting += unknown
            continue
        waiting.pop()
        if last not in known:
            known[last] = run_eager(last, known)
    return known[node]
