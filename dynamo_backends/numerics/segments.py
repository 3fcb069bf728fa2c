"""Whether the values of a run are right: each is compared with PyTorch on the values that it was computed from.

::

    for judged in SegmentCheck(module.graph.nodes, given, known).judge():  # all results of all nodes
        judged.node, judged.value, judged.is_wrong, judged.found

A run has some of the values of a graph (``known``). Each is judged with its *segment*: the node, and the nodes before
it up to the nearest values that the run has. PyTorch runs the segment on these, the run's own numbers, so that no error
of another segment has to be excused. Steps are taken only while an element is in doubt:

1. eager on the run's numbers, within ``rule.judge``: enough for nearly all values;
2. the same, plus what the segment's sums may round, from the magnitudes of their terms;
3. float64 instead of eager, plus what a function may round inside;
4. the same without undefined elements: uninitialized memory, several writes to one place;
5. float64 with inputs perturbed by a rounding, up to ``rule.RUNS`` times: what that changes is added to the tolerance.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import UNINITIALIZED, value_in

from . import operator_facts as facts
from .arrays import as_array, dense, dtype_name, format_of, is_equal
from .exact import (
    BIT_CASTS,
    Environment,
    OperatorError,
    floats,
    is_floating,
    run_eager,
    run_only_exact,
    widen,
    widened,
)
from .function_runs import UnstableError
from .randomness import perturbed
from .rule import INSIDE, NOTHING, RUNS, UNITS, Beyond, Format, Measure, judge, spread, sum_units
from .verdicts import Verdict, difference_in_kind, verdict, verdict_on

_HALF = (torch.float16, torch.bfloat16)

_CALLS = ("call_function", "call_method", "call_module")

_QUICK_RUNS = 4
"""Perturbed runs that do not compute sums again, before those that do."""


class NotJudgedError(Exception):
    """A node does not run in PyTorch on the run's numbers, or not in float64."""


def _call(run: Callable[[fx.Node, Environment], Any], node: fx.Node, values: Environment) -> Any:
    """Runs a node. What its operator raises, for a wrong index or a dtype, is told as ``NotJudgedError``."""
    unknown = [arg.name for arg in node.all_input_nodes if arg not in values]
    if unknown:
        raise NotJudgedError(f"the value of {unknown[0]} is not known")
    try:
        return run(node, values)
    except OperatorError as error:
        raise NotJudgedError(str(error)) from error


class KnownValues(Protocol):
    """The values that a run has."""

    def has(self, node: fx.Node, index: int | None) -> bool:
        """Whether it has a result of a node; ``index`` is its position if the node has several."""

    def get(self, node: fx.Node, index: int | None) -> object:
        """That result. Called once, in the order of the graph."""

    def reads(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether the run computes a node's value from the value of ``source`` that it has, and not from what that was
        rounded from."""


@dataclasses.dataclass(frozen=True)
class RecordedValues:
    """Known values in a dictionary, by node and index."""

    values: Mapping[tuple[fx.Node, int | None], object]

    def has(self, node: fx.Node, index: int | None) -> bool:
        return (node, index) in self.values

    def get(self, node: fx.Node, index: int | None) -> object:
        return self.values[node, index]

    def reads(self, node: fx.Node, source: fx.Node) -> bool:
        return True


@dataclasses.dataclass
class Judged:
    """A value of a run, and whether it is right."""

    node: fx.Node
    index: int | None  # the position among the node's results, if it has several
    segment: Sequence[fx.Node]  # the nodes that are judged together, ``node`` last
    value: object  # ``None`` if it is not judged
    expected: object  # eager's, on the run's numbers; a given value
    found: Measure = Measure()
    beyond: Beyond = NOTHING
    by: str = "equal"  # the last step that was taken
    complaint: str = ""  # another dtype, shape or number
    of_eager: Measure | None = None  # eager's error against float64, if that ran
    exact: torch.Tensor | None = None  # float64, of a wrong value
    inputs: Mapping[fx.Node, object] = dataclasses.field(
        default_factory=dict
    )  # what the segment read, of a wrong value
    read: Mapping[fx.Node, object] = dataclasses.field(default_factory=dict)  # what the node read

    @property
    def is_wrong(self) -> bool:
        return bool(self.complaint) or not self.found.is_rounding

    def verdict(self, inputs: Mapping[str, np.ndarray] | None = None) -> Verdict:
        """How it differs; for ``inputs`` see ``wrong_elements``."""
        if self.complaint or not isinstance(self.value, torch.Tensor) or not isinstance(self.expected, torch.Tensor):
            return Verdict(self.complaint)
        reference = as_array(self.expected if self.exact is None else self.exact)
        return verdict_on(as_array(self.value), reference, self.found, self.beyond, eager=self.of_eager, inputs=inputs)


@dataclasses.dataclass(frozen=True)
class _Segment:
    nodes: list[fx.Node]  # in execution order
    inputs: list[fx.Node]  # known or given
    is_bypassed: bool  # whether a known value within it is not what the run reads


class SegmentCheck:
    """Judges the values of a run, in execution order.

    Values are freed after the last segment that reads them.

    Args:
        nodes: of an ATen graph, in execution order.
        given: values that are not judged: arguments, random numbers, results of operators with side effects.
        known: the values of the run.
        wide: whether the run and PyTorch compute in float64. The tolerance is still that of the nodes' dtypes.

    Attributes:
        unchecked: by node name, why a known value could not be judged.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], given: Mapping[fx.Node, object], known: KnownValues, *, wide: bool = False
    ) -> None:
        self.unchecked: dict[str, str] = {}
        self._is_wide, self._run_node = wide, run_only_exact if wide else run_eager
        self._given, self._known = given, known
        self._exact: Environment = {}  # float64 of nodes between known values
        self._generator = torch.Generator().manual_seed(0)
        self._nodes = [node for node in nodes if node.op != "output"]
        self._running: tuple[_Segment, Environment] = _Segment([], [], False), {}
        self._order = {node: i for i, node in enumerate(self._nodes)}
        self._values: Environment = {node: value for node, value in given.items() if node not in self._order}
        self._is_known = {node: self._has_all(node) for node in self._nodes}
        self._segments = {node: self._segment_of(node) for node in self._nodes if self._is_judged(node)}
        self._last_uses = self._find_last_uses()

    def judge(self, advance: Callable[[], None] = lambda: None) -> Iterator[Judged]:
        """The values in execution order, each as it is judged; ``advance`` is called after each node."""
        for node in self._nodes:
            try:
                for judged in self._visit(node):
                    judged.read = {arg: self._values[arg] for arg in node.all_input_nodes if arg in self._values}
                    yield judged
            except NotJudgedError as error:
                self._fail(node, error)
            for dead in self._last_uses.get(node, ()):
                self._values.pop(dead, None)
                self._exact.pop(dead, None)
            advance()

    # the plan

    def _has_all(self, node: fx.Node) -> bool:
        """Whether all results of a node that others read are known or given."""
        if node in self._given:
            return True
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            return parent in self._given or self._known.has(parent, index)
        if node.op not in _CALLS:
            return False
        fake = value_in(node.meta)
        if not isinstance(fake, (tuple, list)):
            return self._known.has(node, None)
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        return all(self._known.has(node, index) for index in read if isinstance(index, int))

    def _is_judged(self, node: fx.Node) -> bool:
        if node in self._given or node.op not in _CALLS or node.target is operator.getitem:
            return False
        return any(self._known.has(node, index) for index, _ in _by_index(value_in(node.meta)))

    def _segment_of(self, node: fx.Node) -> _Segment:
        inside, inputs, waiting, is_bypassed = {node}, dict[fx.Node, None](), [node], False
        while waiting:
            reader = waiting.pop()
            for arg in reader.all_input_nodes:
                if arg in inside:
                    continue
                # of several results that were rounded, one is read as it was before
                is_item = reader is not node and reader.target is operator.getitem
                is_known = self._is_known.get(arg, True) and not (is_item and self._is_known.get(reader, True))
                bypassed = is_known and self._is_bypassed(arg, node)
                is_bypassed |= bypassed
                if is_known and not bypassed:
                    inputs[arg] = None
                else:
                    inside.add(arg)
                    waiting.append(arg)
        return _Segment(sorted(inside, key=self._order.__getitem__), list(inputs), is_bypassed)

    def _is_bypassed(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether the run computes a node from what a half-precision value was rounded from."""
        fake = value_in(source.meta)
        if source in self._given or not isinstance(fake, torch.Tensor) or fake.dtype not in _HALF:
            return False
        return source.op in _CALLS and not self._known.reads(node, source)

    def _find_last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """By node, the nodes whose values no later segment reads."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            segment = self._segments.get(node)
            read = [*segment.nodes, *segment.inputs] if segment else [node, *node.all_input_nodes]
            last.update(dict.fromkeys(read, node))
        dying: collections.defaultdict[fx.Node, list[fx.Node]] = collections.defaultdict(list)
        for node, user in last.items():
            dying[user].append(node)
        return dying

    # one node

    def _visit(self, node: fx.Node) -> Iterator[Judged]:
        if node in self._given:
            self._values[node] = self._given[node]
            yield from _unknown(node, self._given[node])
            return
        if node.op not in _CALLS:
            raise NotJudgedError("its value is not known")
        if node.target is operator.getitem:
            self._values[node] = _call(run_eager, node, self._values)
            return
        segment = self._segments.get(node)
        if node.target in UNINITIALIZED:
            known = segment is not None
            self._values[node] = (
                self._known.get(node, None) if known else facts.filled(_call(self._run_node, node, self._values), 0)
            )
            return
        values = self._values
        if segment is None:
            values[node] = _call(self._run_node, node, values)
            yield from _unknown(node, values[node])
            return
        if segment.is_bypassed:
            local = self._run(segment)
        else:
            read = (*segment.inputs, *segment.nodes[:-1])
            local = {item: values[item] for item in read} | {node: _call(self._run_node, node, values)}
        expected = _by_index(local[node])
        actual = [self._known.get(node, i) if self._known.has(node, i) else None for i, _ in expected]
        used = [
            item if _is_of_other_kind(ours, item) else ours for ours, (_, item) in zip(actual, expected, strict=True)
        ]
        values[node] = used if isinstance(local[node], (tuple, list)) else used[0]
        self._running = segment, local
        for ours, (index, item) in zip(actual, expected, strict=True):
            if item is not None:
                yield self._judge(segment, local, index, ours, item)

    def _fail(self, node: fx.Node, error: NotJudgedError) -> None:
        """Tells that a node does not run on the run's numbers; those that read it go on with the known value."""
        if node in self._segments:
            self.unchecked[node.name] = str(error)
        fake = value_in(node.meta)
        if node not in self._values and self._is_known[node] and node.target is not operator.getitem:
            found = [self._known.get(node, i) if self._known.has(node, i) else None for i, _ in _by_index(fake)]
            self._values[node] = found if isinstance(fake, (tuple, list)) else found[0]

    def _run(self, segment: _Segment) -> Environment:
        """Eager on a segment's inputs alone."""
        values = {node: self._values[node] for node in segment.inputs}
        for node in segment.nodes:
            values[node] = _call(self._run_node, node, values)
        return values

    # one value

    def format_of(self, dtype: torch.dtype) -> Format:
        """The format in which a value of the run was computed, if that is known."""
        return format_of(torch.float32 if self._is_wide else dtype)

    def name_of_format(self, node: fx.Node, index: int | None, actual: torch.Tensor) -> str:
        """The name of the format that the values of a node have in the model."""
        fake = value_in(node.meta)
        fake = fake[index] if isinstance(fake, (tuple, list)) and index is not None else fake
        dtype = fake.dtype if is_floating(fake) else torch.float32
        return dtype_name(dtype if self._is_wide and is_floating(actual) else actual.dtype)

    def judge_other(self, judged: Judged, value: object) -> Judged:
        """Judges another computation of the value that was yielded last."""
        segment, values = self._running
        return self._judge(segment, values, judged.index, value, judged.expected)

    def _judge(
        self, segment: _Segment, values: Environment, index: int | None, actual: object, expected: object
    ) -> Judged:
        judged = Judged(segment.nodes[-1], index, segment.nodes, actual, expected)
        if actual is None:
            return judged
        judged.complaint = difference_in_kind(actual, expected)
        if judged.complaint or not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return judged
        actual, expected = dense(actual), dense(expected)
        if is_equal(actual, expected):
            return judged
        value = _Value(self, segment, values, index, actual, expected)
        if is_floating(actual):
            value.judge(judged)
        else:
            value.judge_discrete(judged)
        if judged.is_wrong:
            judged.inputs = {node: values[node] for node in segment.inputs}
        return judged


def _unknown(node: fx.Node, expected: Any) -> Iterator[Judged]:
    """What is not judged: a value that the run does not have, or that is given."""
    for index, item in _by_index(expected):
        if item is not None:
            yield Judged(node, index, [node], None, item)


def _by_index(results: Any) -> list[tuple[int | None, Any]]:
    """The results of a node with their positions; ``None`` for a single one."""
    return list(enumerate(results)) if isinstance(results, (tuple, list)) else [(None, results)]


def _is_of_other_kind(actual: object, expected: object) -> bool:
    """Whether the graph cannot go on with a value: it has another dtype or shape, or is not known."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return bool(difference_in_kind(actual, expected))
    return actual is None or isinstance(actual, torch.Tensor) != isinstance(expected, torch.Tensor)


class _Value:
    """A value that differs from eager's, and the computations that may explain the difference."""

    def __init__(
        self,
        check: SegmentCheck,
        segment: _Segment,
        values: Environment,
        index: int | None,
        actual: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        self._check, self._segment, self._values, self._index = check, segment, values, index
        self._actual, self._expected = actual, expected
        self._array, self._dtype = as_array(actual), check.name_of_format(segment.nodes[-1], index, actual)
        self._format = format_of(actual.dtype) if is_floating(actual) else None
        self._wide_values: Environment = {}  # float64, after ``_exact``
        self._last: tuple[torch.Tensor, Callable[[], Any], object] | None = None  # of the last perturbed run

    def judge(self, judged: Judged) -> None:
        """The steps for floating-point and complex elements; see the module's docstring."""
        assert self._format is not None
        judged.by = "eager"
        if self._is_within(judged, as_array(self._expected), None):
            return
        summed = self._summed()
        if summed is not None:
            judged.by = "sums"
            if self._is_within(judged, as_array(self._expected), summed):
                return
        judged.by = "float64"
        exact = self._exact()
        judged.exact = torch.from_numpy(exact)
        judged.of_eager, _ = judge(as_array(self._expected), exact, self._dtype)
        inside = self._inside()
        more = None if summed is None and inside is None else _plus(summed, inside)
        if self._is_within(judged, exact, more):
            return
        defined = self._defined()
        if defined is not None:
            judged.by = "undefined"
            exact = np.where(defined, exact, self._array)
            if self._is_within(judged, exact, more):
                return
        if self._is_exact:
            return
        judged.by = "perturbed"
        factor = spread(max(facts.terms(node, self._values) for node in self._segment.nodes))
        largest = np.zeros(exact.shape)
        for changed in self._perturbed_runs(factor, quick=_QUICK_RUNS):
            with np.errstate(all="ignore"):
                change = np.nan_to_num(np.abs(as_array(changed) - exact), nan=0.0, posinf=0.0)
            largest = np.maximum(largest, change)
            if self._is_within(judged, exact, _plus(more, factor * largest)):
                break
        self._refuse_unstable()

    def judge_discrete(self, judged: Judged) -> None:
        """An integer, boolean or index is right if it equals eager's, or that of a perturbed run of the segment."""
        judged.by, expected = "eager", as_array(self._expected)
        defined = self._defined()
        if defined is not None:
            judged.by, expected = "undefined", np.where(defined, expected, self._array)
        if self._is_within(judged, expected, None) or self._is_exact:
            return
        judged.by = "perturbed"
        self._exact()
        for value in self._perturbed_runs(1.0, quick=0):
            changed = as_array(value.to(self._actual.dtype))
            expected = np.where(changed == self._array, changed, expected)
            if self._is_within(judged, expected, None):
                break
        self._refuse_unstable()

    def _is_within(self, judged: Judged, reference: np.ndarray, more: np.ndarray | None) -> bool:
        judged.found, judged.beyond = judge(self._array, reference, self._dtype, more)
        return judged.found.is_rounding

    @property
    def _is_exact(self) -> bool:
        """Whether rounding explains no more: the segment only compares and selects, or rounds once, and reads no half
        precision that was computed, which a session may read as it was before it was rounded."""
        read = floats(list(self._values_read()))
        computed = [node for node in self._segment.inputs if node not in self._check._given]
        is_rounded = any(map(_is_half, floats([self._values[node] for node in computed])))
        rounds_once = sum(not facts.moves(node) for node in self._segment.nodes) == 1 and not self._actual.is_complex()
        nodes = self._segment.nodes
        is_known = all(facts.is_exact(node) or (rounds_once and facts.is_rounded_once(node)) for node in nodes)
        return not read or (is_known and not is_rounded)

    def _values_read(self) -> Iterator[object]:
        return (self._values[node] for node in self._segment.inputs)

    def _of(self, results: Any) -> Any:
        return results if self._index is None or results is None else results[self._index]

    def _summed(self) -> np.ndarray | None:
        """What the sums of the segment may round; ``None`` if it has none, or something else beside them."""
        bound = self._of(self._bound(self._segment.nodes[-1]))
        return as_array(bound) if isinstance(bound, torch.Tensor) and bound.shape == self._actual.shape else None

    def _bound(self, node: fx.Node) -> Any:
        """What the sums up to a node may round, in absolute numbers; ``None`` if there are none."""
        sizes, counts = self._magnitudes
        if not counts.get(node):
            return None
        unit = sum_units(counts[node]) * self._unit
        return pytree.tree_map(lambda item: item.abs().mul_(unit) if is_floating(item) else item, sizes[node])

    @functools.cached_property
    def _magnitudes(self) -> tuple[Environment, dict[fx.Node, int]]:
        """By node, the sums of the magnitudes of its terms, and the most terms of a sum up to it; of nodes with sums,
        and nothing else, before them in the segment."""
        sizes: Environment = pytree.tree_map(
            facts.magnitude, {node: self._values[node] for node in self._segment.inputs}
        )
        counts: dict[fx.Node, int] = {}
        for node in self._segment.nodes:
            if not facts.keeps_magnitudes(node) or any(arg not in sizes for arg in node.all_input_nodes):
                continue
            try:
                sizes[node] = pytree.tree_map(facts.magnitude, facts.magnitudes(node, sizes, self._values))
            except OperatorError:  # no float32 kernel
                continue
            counts[node] = max(
                facts.terms(node, self._values) if facts.base_name(node) in facts.SUMS else 0,
                *(counts.get(arg, 0) for arg in node.all_input_nodes),
                0,
            )
        return sizes, counts

    @property
    def _unit(self) -> float:
        """The epsilon of the dtype that the segment computes in."""
        read = floats(list(self._values_read()))
        return min((self._check.format_of(item.dtype).computed for item in read), default=2.0**-23)

    def _inside(self) -> np.ndarray | None:
        """What the last function of the segment may round, if it is accurate relative to numbers inside of it."""
        node = next((item for item in reversed(self._segment.nodes) if not facts.moves(item)), self._segment.nodes[-1])
        most = self._most_inside(node, self._values)
        return as_array(most) if most is not None and most.shape == self._actual.shape else None

    def _most_inside(self, node: fx.Node, values: Environment) -> torch.Tensor | None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: _dense(values[arg]))
        size = facts.size_inside(node.target, args, kwargs)
        return None if size is None else size * (INSIDE * self._unit)

    def _exact(self) -> np.ndarray:
        """The value in float64, on the run's numbers."""
        known, nodes = self._check._exact, self._segment.nodes
        wide: Environment = {} if self._segment.is_bypassed else known
        for node in nodes:
            if node not in wide:
                result = self._run_wide(node, {arg: self._wide(arg, wide) for arg in node.all_input_nodes})
                wide[node] = result
        self._wide_values = {node: wide[node] for node in nodes}
        found = as_array(dense(self._of(wide[nodes[-1]])))
        known.pop(nodes[-1], None)  # later segments begin at the run's value
        if self._format is None:
            return found
        largest = self._format.largest
        with np.errstate(all="ignore"):  # where the exact number does not fit the dtype, eager's result is right too
            beyond = np.abs(found) > largest
        if not beyond.any():
            return found
        expected = as_array(self._expected)
        same = (self._array == expected) | ((self._array != self._array) & (expected != expected))
        return np.where(beyond & same, expected, found)

    def _wide(self, node: fx.Node, wide: Environment) -> object:
        return wide[node] if node in self._segment.nodes and node in wide else widened(self._values[node])

    def _run_wide(self, node: fx.Node, values: Environment) -> object:
        """A node in float64. Decisions are eager's; so are reinterpreted bits, and memory that is not initialized."""
        if node.target is operator.getitem:
            return _call(run_eager, node, values)
        known = self._values.get(node)
        if node.target in UNINITIALIZED or node.target in BIT_CASTS or (known is not None and not floats(known)):
            return widened(known)
        return _call(run_only_exact, node, values)

    def _perturbed_runs(self, factor: float, *, quick: int) -> Iterator[torch.Tensor]:
        """The value in up to ``RUNS`` perturbed runs, the first ``quick`` of them quick ones; see ``_perturbed``."""
        generator = self._check._generator
        with contextlib.suppress(NotJudgedError):  # a shape depends on a comparison with another result
            for run in range(RUNS):
                state, again = generator.get_state(), functools.partial(self._perturbed, factor, is_quick=run < quick)
                value = again()
                self._last = state, again, value
                yield value

    def _refuse_unstable(self) -> None:
        """Repeats the last perturbed run, which decided; raises ``NotJudgedError`` if the value is not the same then:
        such runs excuse anything."""
        if self._last is None:
            return
        state, again, first = self._last
        self._check._generator.set_state(state)
        dtype = None if self._format is None else getattr(torch, self._dtype)
        if verdict(again(), first, dtype).is_wrong:
            raise NotJudgedError(str(UnstableError()))

    def _perturbed(self, factor: float, *, is_quick: bool) -> Any:
        """The value in float64 with the segment's inputs, and values within it, off by a rounding.

        ``factor`` is what the change of the value is multiplied by. In a quick run, sums within the segment are off by
        what they may round, and are not computed again; others show what a single large term may round.
        """
        generator, last = self._check._generator, self._segment.nodes[-1]
        wide: Environment = {}
        only_adds = is_quick and not all(map(facts.only_adds, self._segment.nodes))  # so far

        def off(item: Any, most: Any) -> Any:
            if not is_floating(item):
                return item
            return _off_by(item, most + item.abs() * (UNITS * self._unit), factor, generator)

        def rounded(item: Any, known: Any) -> Any:
            unit = self._check.format_of(known.dtype).epsilon if is_floating(known) else 0.0
            return perturbed(item, unit, generator)

        for node in self._segment.nodes:
            only_adds &= facts.only_adds(node)
            if only_adds and self._magnitudes[1].get(node):
                exact = self._wide_values[node]
                wide[node] = exact if node is last else pytree.tree_map(off, exact, self._bound(node))
                if node is not last and not facts.moves(node) and _is_half(self._values[node]):
                    wide[node] = pytree.tree_map(rounded, wide[node], self._values[node])
                    only_adds = False  # later sums add what was rounded
                continue
            only_adds &= node is last or facts.moves(node) or not _is_half(self._values[node])
            read = {arg: wide[arg] if arg in wide else self._perturbed_input(arg, node) for arg in node.all_input_nodes}
            if node.target in UNINITIALIZED or node.target in BIT_CASTS:
                wide[node] = widened(self._values[node])
                continue
            result = _call(run_only_exact, node, read)
            if node is not last and not facts.moves(node):
                known = self._values[node]
                known = (
                    type(result)(known)
                    if isinstance(result, (tuple, list)) and isinstance(known, (tuple, list))
                    else known
                )
                result = pytree.tree_map(rounded, result, known)
                most = self._most_inside(node, read)
                if most is not None and isinstance(result, torch.Tensor) and most.shape == result.shape:
                    result = off(result, most)
            wide[node] = result
        return self._of(wide[last])

    def _perturbed_input(self, node: fx.Node, reader: fx.Node) -> object:
        """An input, off by a unit of the dtype that is computed in; half of a unit of its own, where a cast reads it:
        the run may read it as it was before it was rounded.

        Whole numbers that are compared stay: masks and indices are exact.
        """
        compares = not floats(self._values[reader])

        def one(value: Any) -> Any:
            if not is_floating(value):
                return value
            is_cast = facts.base_name(reader) in ("_to_copy", "convert_element_type") and value.dtype in _HALF
            rule = self._check.format_of(value.dtype)
            unit = rule.epsilon / 2 if is_cast else rule.computed
            wide = widen(dense(value))
            found = perturbed(wide, unit, self._check._generator)
            if compares and not wide.is_complex():
                found = torch.where(wide == wide.round(), wide, found)
            if is_cast:
                noise = torch.empty(found.shape, dtype=torch.float64).uniform_(
                    -0.5, 0.5, generator=self._check._generator
                )
                found = found + noise.to(found.device) * (rule.smallest * rule.epsilon)
            return found

        return pytree.tree_map(one, self._values[node])

    def _defined(self) -> np.ndarray | None:
        """The elements that do not depend on uninitialized memory, nor on the order of writes to one place, of which
        each may stay; ``None`` if all are defined."""
        nodes = self._segment.nodes
        if not any(facts.may_overwrite(node) or node.target in UNINITIALIZED for node in nodes):
            return None
        values = {node: self._values[node] for node in self._segment.inputs}
        for node in nodes:
            if node.target in UNINITIALIZED:
                values[node] = facts.filled(pytree.tree_map(torch.clone, self._values[node]), 77)
            elif facts.may_overwrite(node):
                values[node] = facts.with_reversed_writes(node, values)
            else:
                values[node] = _call(self._check._run_node, node, values)
        other, first = as_array(dense(self._of(values[nodes[-1]]))), as_array(self._expected)
        with np.errstate(all="ignore"):
            defined = (other == first) | ((other != other) & (first != first))
        if facts.may_overwrite(nodes[-1]):
            read = pytree.tree_leaves(fx.map_arg(nodes[-1].args, values.__getitem__))
            written = [item for item in read if isinstance(item, torch.Tensor) and item.dtype is self._actual.dtype][1:]
            numbers = np.concatenate([as_array(item).reshape(-1) for item in written]) if written else self._array
            defined[~defined] = ~np.isin(self._array[~defined], numbers)
        return defined


def _off_by(value: torch.Tensor, most: torch.Tensor, factor: float, generator: torch.Generator) -> torch.Tensor:
    """A value that is off by what its sums may round, to either side; by the part of it of which ``factor`` makes the
    whole."""
    sides = torch.empty(value.shape, dtype=torch.float32).uniform_(-1.0, 1.0, generator=generator).sign_()
    return value + sides.to(value.device).mul_(most) / factor


def _dense(value: object) -> object:
    return dense(value) if isinstance(value, torch.Tensor) else value


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _plus(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
