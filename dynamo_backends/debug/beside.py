"""Computes graphs beside another one, and only what they compute otherwise.

The graphs of a stage are much alike: a pass changes a few nodes. So one graph, the trunk, is computed node by node, in
eager and in float64, and each of the others reads along. A node that is the same operator of the same values has the
trunk's value. Any other is computed. Where its float64 value is that of its namesake in the trunk, but for float64's
own rounding, it counts as the same value from there on: behind a pass that is right, the graphs are one again.

What differs in float64 is looked at once more, in full. So float64 is all that is computed; eager's values follow when
they are asked for, as where float64 must not decide.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..events import count
from ..exporter.known_wrong import is_uninitialized
from ..numerics.differences import is_discrete, same_number
from ..numerics.distance import dense, is_same_in_float64
from ..numerics.exact import Environment, attribute, run_eager, run_exact_beside, widen
from ..numerics.randomness import PrivateRandomness, is_random
from ..numerics.twice import Deferred, Results
from ..regions import is_ordered

logger = logging.getLogger(__name__)


class _CannotReadAlongError(RuntimeError):
    """A node must run once, and the trunk has no such node."""


class Eager:
    """A node's result in the model's dtype, computed when it is asked for.

    Args:
        node: a call node.
        given: the results of what it reads.
    """

    def __init__(self, node: fx.Node | None, given: Mapping[fx.Node, Eager]) -> None:
        self._node = node
        self._given = given
        self._value: object = None

    @classmethod
    def of(cls, value: object) -> Eager:
        """A result that is known."""
        known = cls(None, {})
        known._value = value
        return known

    def __call__(self) -> object:
        waiting = [self]
        while waiting:  # not by recursion: graphs are deep
            item = waiting[-1]
            missing = [other for other in item._given.values() if other._node is not None]
            if item._node is not None and not missing:
                item._value = run_eager(item._node, {arg: other._value for arg, other in item._given.items()})
                item._node, item._given = None, {}
            if item._node is None:
                waiting.pop()
            waiting += missing
        return self._value


class _Value:
    """A node's result in eager and in float64. An argument's in float64 is made when it is asked for: it is twice its
    size, and all of them are there from the beginning."""

    def __init__(self, number: int, eager: Eager, *exact: object) -> None:
        self.number = number
        self.eager = eager
        self._exact: tuple[object, ...] = exact

    @property
    def exact(self) -> object:
        return self._exact[0] if self._exact else pytree.tree_map(widen, self.eager())

    def keep_exact(self) -> object:
        """The same object from now on: what two graphs return is one value then, and needs no comparison."""
        self._exact = (self.exact,)
        return self._exact[0]


class Beside:
    """A graph that reads along.

    Args:
        graph: of ATen operators, without subgraphs.
        arguments: a value for each placeholder; nothing writes into them.
    """

    def __init__(self, graph: fx.GraphModule, arguments: Sequence[object]) -> None:
        self.names = {node.name for node in graph.graph.nodes if node.op != "output"}
        self._graph = graph
        self._arguments = iter(arguments)
        self._nodes = collections.deque(node for node in graph.graph.nodes if node.op != "output")
        self._users = {node: len(node.users) for node in graph.graph.nodes}
        self._values: dict[fx.Node, _Value] = {}
        self._failed = False

    def results(self) -> Results | None:
        """What the graph returns, by position, when the trunk is through; ``None`` if it could not read along."""
        if self._failed or self._nodes:
            return None
        leaves = pytree.tree_leaves(self._graph.graph.output_node().args[0], is_leaf=lambda x: x is None)
        values = [self._values[leaf] if isinstance(leaf, fx.Node) else _Value(-1, Eager.of(leaf)) for leaf in leaves]
        eager = Deferred(dict(enumerate(value.eager for value in values)))
        return Results(eager, dict(enumerate(value.keep_exact() for value in values)))

    def advance(self, trunk: Trunk) -> list[str]:
        """Goes as far as the trunk's values lead; the names of the nodes that are done."""
        done = []
        while self._nodes and not self._failed and not trunk.is_awaited(self._nodes[0].name):
            node = self._nodes.popleft()
            done.append(node.name)
            try:
                self._values[node] = self._value(node, trunk)
            except (
                Exception
            ) as error:  # whatever it is, the stage is then looked at in full, where it shows and is said
                count("stages_compared_in_full")
                logger.debug("%s is looked at in full: %s: %s", node.name, type(error).__name__, error)
                self._failed = True
                self._values.clear()
                return [*done, *(left.name for left in self._nodes)]
            for arg in node.all_input_nodes:
                self._users[arg] -= 1
                if not self._users[arg]:
                    del self._values[arg]
        return done

    def _value(self, node: fx.Node, trunk: Trunk) -> _Value:
        if node.op in ("placeholder", "get_attr"):
            is_argument = node.op == "placeholder"
            given = next(self._arguments) if is_argument else attribute(self._graph, str(node.target))
            return trunk.argument(given)
        numbers = {arg: self._values[arg].number for arg in node.all_input_nodes}
        key = trunk.key(node, numbers)
        known = trunk.known(key)
        if known is not None:
            return known
        if is_ordered(node) or is_uninitialized(node):
            raise _CannotReadAlongError(f"{node.name} cannot be computed a second time")
        eager = Eager(node, {arg: self._values[arg].eager for arg in node.all_input_nodes})
        exact = run_exact_beside(node, {arg: self._values[arg].exact for arg in node.all_input_nodes}, eager)
        namesake = trunk.namesake(node.name)
        if namesake is not None and is_same(namesake.exact, exact):
            return namesake
        return trunk.new(key, eager, exact)


class Trunk:
    """The values of the graph that is computed.

    Args:
        graph: the graph.
        others: the graphs that read along.
    """

    def __init__(self, graph: fx.GraphModule, others: Sequence[Beside]) -> None:
        self._others = others
        self._awaited = {node.name for node in graph.graph.nodes if node.op != "output"}
        self._readers = collections.Counter(name for other in others for name in other.names)
        self._kept: dict[str, _Value] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._by_key: dict[object, int] = {}
        self._by_number: weakref.WeakValueDictionary[int, _Value] = weakref.WeakValueDictionary()
        self._count = 0

    def feed(self, node: fx.Node, eager: Eager, exact: object) -> None:
        """The next node of the graph is computed."""
        if self._others:
            key = self.key(node, self._numbers)
            self._feed(node, self.known(key) or self.new(key, eager, exact))

    def feed_argument(self, node: fx.Node, value: object) -> None:
        """The next node of the graph is an argument or attribute."""
        if self._others:
            self._feed(node, self.argument(value))

    def _feed(self, node: fx.Node, value: _Value) -> None:
        self._numbers[node] = value.number
        self._awaited.discard(node.name)
        if self._readers[node.name]:
            self._kept[node.name] = value
        for other in self._others:
            self._used(other.advance(self))

    def is_awaited(self, name: str) -> bool:
        """Whether the graph has a node of that name that is not computed yet."""
        return name in self._awaited

    def namesake(self, name: str) -> _Value | None:
        return self._kept.get(name)

    def argument(self, value: object) -> _Value:
        key = _identity(value)
        return self.known(key) or self.new(key, Eager.of(value))

    def known(self, key: object) -> _Value | None:
        """The value of a node that is the same operator of the same values."""
        number = self._by_key.get(key)
        return None if number is None else self._by_number.get(number)

    def new(self, key: object, eager: Eager, *exact: object) -> _Value:
        number = self._by_key.get(key)
        if number is None:
            self._count += 1
            number = self._by_key[key] = self._count
        value = self._by_number[number] = _Value(number, eager, *exact)
        return value

    @staticmethod
    def key(node: fx.Node, numbers: dict[fx.Node, int]) -> object:
        """What a node computes: the operator, and of which values.

        What must happen once is the same where it has the same name, too.
        """
        name = node.name if is_ordered(node) or is_uninitialized(node) else ""
        given = fx.map_arg((node.args, node.kwargs), lambda arg: _Number(numbers[arg]))
        return node.op, node.target, name, _hashable(given)

    def _used(self, names: Iterable[str]) -> None:
        for name in names:
            self._readers[name] -= 1
            if not self._readers[name]:
                self._kept.pop(name, None)


@dataclasses.dataclass(frozen=True)
class _Number:
    """In the place of a node among arguments, the number of its value."""

    number: int


def _identity(value: object) -> object:
    return ("tensor", id(value)) if isinstance(value, torch.Tensor) else _hashable(value)


def _hashable(value: object) -> object:
    """Something that is equal for equal arguments only: not for 1 and ``True``, nor for 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _hashable((value.start, value.stop, value.step))
    if isinstance(value, (int, float, complex)):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return value


def is_same(first: object, other: object) -> bool:
    """Whether two results of float64 are equal but for its rounding, and of one shape and dtype."""
    pairs = [pytree.tree_leaves(item, is_leaf=lambda x: x is None) for item in (first, other)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    for old, new in zip(*pairs, strict=True):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if not same_number(old, new):
                return False
            continue
        if old.dtype != new.dtype or old.shape != new.shape:
            return False
        old, new = dense(old), dense(new)
        if torch.equal(old, new):
            continue
        if is_discrete(old) or not is_same_in_float64(old, new):
            return False
    return True


def can_read_along(graph: fx.GraphModule) -> bool:
    """Whether all that a graph computes is in its nodes: no subgraphs, and nothing that writes."""
    return not any(
        isinstance(node.target, torch._ops.HigherOrderOperator)
        or node.op in ("call_module", "call_method")
        or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        for node in graph.graph.nodes
    )


def compute(
    graph: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor, others: Sequence[Beside]
) -> Results:
    """Computes a graph in float64, and the others beside it.

    Args:
        graph: the trunk.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers.
        others: the graphs that read along.

    Returns:
        What the graph returns, by position.
    """
    trunk = Trunk(graph, others)
    eager: dict[fx.Node, Eager] = {}
    exact: Environment = {}
    given = iter(arguments)
    randomness = PrivateRandomness(state)
    users = {node: len(node.users) for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        if node.op in ("placeholder", "get_attr"):
            value = next(given) if node.op == "placeholder" else attribute(graph, str(node.target))
            eager[node] = Eager.of(value)
            trunk.feed_argument(node, value)
        else:
            eager[node] = Eager(node, {arg: eager[arg] for arg in node.all_input_nodes})
            for arg in node.all_input_nodes:
                if arg not in exact:
                    exact[arg] = pytree.tree_map(widen, eager[arg]())
            if is_ordered(node) or is_random(node.target):  # numbers are drawn in the order of the graph
                with randomness:
                    value = eager[node]()
                exact[node] = pytree.tree_map(widen, value)
            else:
                exact[node] = run_exact_beside(node, exact, eager[node])
            trunk.feed(node, eager[node], exact[node])
        for arg in node.all_input_nodes:
            users[arg] -= 1
            if not users[arg]:
                del eager[arg], exact[arg]
    leaves = pytree.tree_leaves(graph.graph.output_node().args[0], is_leaf=lambda x: x is None)
    for leaf in leaves:
        if isinstance(leaf, fx.Node) and leaf not in exact:
            exact[leaf] = pytree.tree_map(widen, eager[leaf]())
    results = [(eager[leaf], exact[leaf]) if isinstance(leaf, fx.Node) else (Eager.of(leaf), leaf) for leaf in leaves]
    return Results(Deferred(dict(enumerate(one for one, _ in results))), dict(enumerate(wide for _, wide in results)))
