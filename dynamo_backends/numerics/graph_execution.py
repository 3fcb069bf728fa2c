"""Runs an FX graph node by node in PyTorch: as eager does, and in float64 beside it.

::

    execution = FxExecution(module, arguments, torch.get_rng_state())
    execution.reach(node)
    execution.eager[node], execution.exact_of(node)
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .exact import REFUSALS, Environment, attribute, run_eager, run_exact, run_only_exact, widened_copy
from .randomness import PrivateRandomness, perturbed
from .verdicts import is_discrete


class FxExecution:
    """One execution of a graph. A value is dropped after its last use.

    Args:
        module: a graph of any stage.
        arguments: a value for each placeholder; the graph may write into them.
        state: of the CPU's random numbers.
        eager: whether eager runs. Float64 alone decides its own comparisons, and draws its own random numbers.
        exact: whether float64 runs.
        recorded: by node, results that are not computed again, as of random numbers.
        compared: names of nodes whose values are needed until ``release`` is called for them.
        perturbing: without ``eager``, the random numbers by which each value that a node reads is perturbed, by up to a
            unit in the last place of its dtype in the graph: float64 with random rounding.

    Attributes:
        eager, exact: values that are still needed; an argument's in float64 from its first reader on. The two share no
            memory of floating-point values.
        inexact: by name of a node, why PyTorch has no float64 of it; eager's result stands for it.
        drawn: what nodes that drew random numbers returned.
        decisions: nodes that made discrete values of floating-point ones, which another rounding may turn.
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
        perturbing: torch.Generator | None = None,
    ) -> None:
        self.eager: Environment = {}
        self.exact: Environment = {}
        self.inexact: dict[str, str] = {}
        self.decisions: set[fx.Node] = set()
        self.drawn: dict[fx.Node, object] = {}
        self._module = module
        self._has_eager, self._has_exact = eager, exact
        self._recorded = recorded if recorded is not None else {}
        self._perturbing = perturbing
        self._nodes = iter(module.graph.nodes)
        self._arguments = iter(arguments)
        self._randomness = PrivateRandomness(state)
        self._users = collections.Counter({node: len(node.users) for node in module.graph.nodes})
        self._users.update(node for node in module.graph.nodes if node.name in compared)

    def reach(self, node: fx.Node) -> None:
        """Runs the graph until a node is computed."""
        computed = self.eager if self._has_eager else self.exact
        while node not in computed:
            following = next(self._nodes)
            self.run(following)
            self.release(*following.all_input_nodes)

    def run(self, node: fx.Node) -> None:
        """Runs one node; all that it reads was run. What it reads is kept until ``release``."""
        if node in self._recorded:
            value = self._recorded[node]
            if self._has_eager:
                self.eager[node] = value
            else:
                self.exact[node] = pytree.tree_map(widened_copy, value)
        elif node.op in ("placeholder", "get_attr"):
            is_argument = node.op == "placeholder"
            value = next(self._arguments) if is_argument else attribute(self._module, str(node.target))
            if self._has_eager:
                self.eager[node] = value
            else:
                self.exact[node] = pytree.tree_map(widened_copy, value)
        elif self._has_eager:
            self._call(node)
        else:
            with self._randomness:
                self.exact[node] = self._only_exact(node)

    def _call(self, node: fx.Node) -> None:
        if self._has_exact:
            for arg in node.all_input_nodes:  # before the node writes into them
                self.exact_of(arg)
        draws = self._randomness.draws
        with self._randomness:
            eager = self.eager[node] = run_eager(node, self.eager)
        if all(map(is_discrete, pytree.tree_leaves(eager))):
            given = pytree.tree_leaves([self.eager[arg] for arg in node.all_input_nodes])
            if not all(map(is_discrete, given)):
                self.decisions.add(node)
        if self._randomness.draws > draws:
            self.drawn[node] = eager
        elif self._has_exact:
            self.exact[node] = run_exact(node, self.exact, eager, self.inexact)

    def _only_exact(self, node: fx.Node) -> object:
        """A node's results where float64 alone runs."""
        if self._perturbing is None:
            return run_only_exact(node, self.exact)
        given = {arg: self.exact[arg] for arg in node.all_input_nodes}
        if not _returns_view(node):
            compares = all(map(is_discrete, pytree.tree_leaves(node.meta.get("val"))))
            given = {arg: _perturbed(arg, value, self._perturbing, compares) for arg, value in given.items()}
        try:
            return run_only_exact(node, given)
        except REFUSALS:
            return pytree.tree_map(
                widened_copy, run_eager(node, {arg: _narrowed(arg, value) for arg, value in given.items()})
            )

    def exact_of(self, node: fx.Node) -> object:
        """A node's value in float64; eager's, widened, where the node was not computed, or drew random numbers."""
        if node not in self.exact:
            self.exact[node] = pytree.tree_map(widened_copy, self.eager[node])
        return self.exact[node]

    def release(self, *nodes: fx.Node) -> list[fx.Node]:
        """Counts a use of each node; returns those that were used for the last time, whose values are dropped."""
        self._users.subtract(nodes)
        dead = [node for node in nodes if self._users[node] <= 0]
        for node in dead:
            self.eager.pop(node, None)
            self.exact.pop(node, None)
        return dead


def perturbed_execution(
    module: fx.GraphModule,
    arguments: Sequence[object],
    state: torch.Tensor,
    seed: int,
    *,
    recorded: Mapping[fx.Node, object],
    compared: Collection[str],
) -> FxExecution:
    """An execution of float64 with random rounding, see ``FxExecution``."""
    perturbing = torch.Generator().manual_seed(seed)
    options = {"recorded": recorded, "compared": compared, "perturbing": perturbing}
    return FxExecution(module, arguments, state, eager=False, **options)


def _perturbed(node: fx.Node, value: object, generator: torch.Generator, whole_stay: bool) -> object:
    """A node's value in float64, perturbed by up to a unit in the last place of the dtype that it has in the graph."""
    fake = node.meta.get("val")
    is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
    if not is_wide or not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return value
    return perturbed(value, generator, dtype=fake.dtype, whole_stay=whole_stay)


def _narrowed(node: fx.Node, value: object) -> object:
    """A node's value in the dtype that it has in the graph."""
    fake = node.meta.get("val")
    return value.to(fake.dtype) if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor) else value


def _returns_view(node: fx.Node) -> bool:
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def value_of(node: fx.Node, known: Environment) -> object:
    """The value of a node, computed in PyTorch where it is not known; ``known`` gets what was computed."""
    waiting = [node]
    while waiting:  # not by recursion: graphs are deep
        last = waiting[-1]
        unknown = [item for item in last.all_input_nodes if item not in known]
        if last not in known and unknown:
            waiting += unknown
            continue
        waiting.pop()
        if last not in known:
            known[last] = run_eager(last, known)
    return known[node]
