"""The verdict on the values of one run: the first that is wrong, and its cause.

Each value that the run has is judged with its segment, see ``numerics.segments``. For the first wrong one, the cause is
searched in this order: the session is not deterministic; it has an old weight; another session of the same model is
right; the segment's nodes, translated alone and not optimized, are wrong too; a pass or an optimizer is wrong.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..common.progress import progress
from ..common.safety_net import caught, net
from ..dumps.blame import Cause, CauseKind
from ..dumps.schema import Instability, node_of
from ..errors import SessionError, TranslationError, first_line
from ..exporter.translate import value_names
from ..graphs.fake_tensors import unlike_fake
from ..graphs.locations import where
from ..numerics.arrays import dense
from ..numerics.exact import Environment, widen
from ..numerics.segments import Judged, RecordedValues, SegmentCheck
from ..numerics.verdicts import Verdict
from ..pipeline.stage_data import CompiledGraph, CompiledRegion
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun, bitwise_differing
from .row_making import RowMaker
from .rows import Blame, ExpectedValues, GraphComparison, Row, exception_text
from .run_values import Hidden, NotShownError, RunValues, given_values
from .wrong_rewrite import ModelStep, find_rewrite, wrong_needed_pass

Models = Mapping[int, Sequence[ModelStep]]
"""By region, its model after each pass of the stage ``onnx`` that fired."""

_MOST_OPERATORS = 4
"""Operators of wrong nodes that the note names."""

_AGAIN = 4
"""Further runs of a region with a wrong value: whether it is wrong in the same way each time."""


def compare_run(graph: CompiledGraph, run: RecordedRun, models: Models, sessions: NodeSessions) -> GraphComparison:
    """Judges the values of one run.

    An exception of the comparison becomes an entry of ``unchecked``; what was found before it stays.
    """
    search = _Search(graph, run, models, sessions)
    failures: list[str] = []
    try:
        search.judge_values()
    except Exception as error:
        caught(f"the comparison of {graph.name}", error, "The graph runs")
        failures.append(f"the nodes after {len(search.rows)}: {exception_text(error)}")
    comparison = GraphComparison(note=search.note())
    try:
        if search.first is not None:
            comparison = search.verdict()
    except Exception as error:
        caught(f"the verdict on {graph.name}", error, "The graph runs")
        failures.append(f"the verdict on the nodes: {exception_text(error)}")
    if comparison.ok:
        reasons = failures or list(search.wrong_fakes())
        reasons = reasons or [f"PyTorch ran region_{i}: {why}" for i, why in run.rescued.items()]
        comparison.not_comparable = "; ".join(reasons)
    repeats = [f"region_{i} was not run again: {item.failure}" for i, item in run.repeated.items() if item.failure]
    unchecked = [*search.unchecked(), *repeats, *failures]
    return dataclasses.replace(comparison, rows=search.rows, unchecked=unchecked, expected=search.expected)


@dataclasses.dataclass(eq=False)
class _Search:
    """The judgement of one run, and the search for the cause of its first wrong value."""

    graph: CompiledGraph
    run: RecordedRun
    models: Models
    sessions: NodeSessions
    rows: list[Row] = dataclasses.field(default_factory=list)
    first: Row | None = None  # the first wrong or unstable value
    expected: ExpectedValues | None = None
    _hidden: Hidden = dataclasses.field(default_factory=Hidden)

    def judge_values(self) -> None:
        """Makes a row for each value, in execution order."""
        is_complete = False
        while not is_complete:
            self.rows.clear()
            self.first = None
            self._values = RunValues(self.graph, self.run, self.sessions.shown, self._hidden)
            self._check = SegmentCheck(self.graph.module.graph.nodes, given_values(self.graph, self.run), self._values)
            with contextlib.suppress(NotShownError):
                is_complete = self._judge_all()

    def _judge_all(self) -> bool:
        """Judges all values; stops at one whose name was guessed if it is wrong, and hides it: ``False``."""
        make = RowMaker(self.graph, self.run, self.sessions.opset)
        nodes = len(self.graph.module.graph.nodes)
        with progress(f"comparing {self.graph.name}", nodes - 1) as advance:
            for judged in self._check.judge(advance):
                row = make.row(judged)
                if judged.is_wrong and self._values.is_guessed(judged.node):
                    self._hidden.names.update(value_names(judged.node))
                    return False
                if row is not None:
                    self._compare_runs(row, judged)
                    self.rows.append(row)
                    if self.first is None and (not row.is_right or row.instability is not None):
                        self.first = row
                        row.judged = judged
        return True

    def _compare_runs(self, row: Row, judged: Judged) -> None:
        """Whether a result of a region is right in one run of its session, and wrong in another."""
        others = self._values.others(judged.node, judged.index)
        wrong = [found for value in others if (found := self._check.judge_other(judged, value)).is_wrong]
        if others and row.region is not None and (wrong or judged.is_wrong):
            worst = max([judged, *wrong], key=lambda item: item.found.share)
            row.instability = Instability(self.graph.regions[row.region].bound.threads, worst.found)

    def unchecked(self) -> list[str]:
        """What could not be judged, and why."""
        alone = [f"{name} was not judged: {why}" for name, why in self._check.unchecked.items()]
        inside = [f"the values inside region_{i}: {why}" for i, why in self._hidden.regions.items()]
        return list(dict.fromkeys([*inside, *alone]))

    def wrong_fakes(self) -> Iterator[str]:
        """The custom operators in PyTorch that returned other dtypes or shapes than their fakes said."""
        for node, value in self.run.values.items():
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
                pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(node.meta.get("val")), strict=False)
                unlike = [
                    unlike_fake(real, fake.dtype, fake.shape) for real, fake in pairs if isinstance(fake, torch.Tensor)
                ]
                yield from (f"{node.target} ({where(node)}) returned {text}" for text in unlike if text)

    def note(self) -> str:
        """What is said of a run that is right."""
        texts = [f"eager overflows at {row.name} ({row.where or 'no source line'})" for row in self._overflows()[:1]]
        texts += [] if self.graph.regions else ["nothing of it runs on ONNX Runtime"]
        row = max(self.rows, key=lambda row: abs(row.mean_difference or 0.0), default=None)
        if row is not None and row.mean_difference is not None and abs(row.mean_difference) > 1:
            place = row.where or "no source line"
            texts.append(f"{row.name} ({place}) is off by {row.mean_difference:.1f} units in the last place on average")
        return "; ".join(texts)

    def _overflows(self) -> list[Row]:
        """The values that are NaN or infinite in eager alone, with those before them that the session does not have."""
        found: list[Row] = []
        for row in self.rows:
            if row.eager_overflows:
                before = [item for item in self.rows if item.name in row.segment and item.eager_extent is not None]
                found += [item for item in before if item.eager_extent and not item.eager_extent.is_finite]
                found.append(row)
        return found

    # the cause

    def verdict(self) -> GraphComparison:
        """The verdict on the first wrong value."""
        row = self.first
        assert row is not None
        wrong = [item for item in self.rows if not item.is_right]
        names = {node_of(item.name) for item in wrong}  # what is computed together with one of them may be right
        wrong = [item for item in wrong if item is row or names.isdisjoint(map(node_of, item.segment))]
        nodes: dict[str, Row] = {}
        for item in sorted(wrong, key=lambda item: item.size_of_fault, reverse=True):
            nodes.setdefault(node_of(item.name), item)
        fault = row.fault
        cause, row = self._cause(row)
        found = Verdict(row.complaint)
        if cause.kind == CauseKind.UNSTABLE and row.instability is not None:
            found = Verdict(f"{row.operator}, {row.instability}")
        blame = Blame(
            row.name,
            cause,
            region=row.region,
            source=row.where,
            user_name=row.user_name,
            more=max(len(nodes) - 1, 0) if cause.kind != CauseKind.UNSTABLE else 0,
            difference=found,
        )
        note = "; ".join(filter(None, [fault, _by_operator(list(nodes.values()))]))
        return GraphComparison(blame, note=note, wrong_nodes=list(nodes.values()))

    def _cause(self, row: Row) -> tuple[Cause, Row]:
        """The cause of the first wrong value, and the value to name."""
        judged = row.judged
        if row.region is None or judged is None:
            return Cause(CauseKind.PYTORCH), row
        compiled = self.graph.regions[row.region]
        if row.instability is not None or self._differs_again(row, judged, compiled):
            return Cause(CauseKind.UNSTABLE, "runs"), row
        stale = self._stale_weight(compiled)
        if stale is not None:
            return stale
        if self._is_of_session(row, judged):
            return Cause(CauseKind.SESSION), row
        if row.name in compiled.model.graph.initializers:  # it was folded wrongly
            self._keep_expected(judged, compiled)
            return Cause(CauseKind.NODE), row
        alone = self._wrong_alone(row, judged, compiled)
        if alone is not None:
            with net(f"the search for what makes {alone.name} wrong", "The graph runs"):
                name = wrong_needed_pass(compiled, self.run.session_of(compiled), self.run.values, alone)
                if name:
                    return Cause(CauseKind.PASS, name), alone
            return Cause(CauseKind.NODE), alone
        bound, steps = self.run.session_of(compiled), self.models.get(row.region, ())
        cause, value = Cause(CauseKind.OPTIMIZER), row.name
        with net(f"the search for the rewrite that makes {row.name} wrong", "The graph runs"):
            cause, value = find_rewrite(compiled, bound, steps, self.run.values, row.name)
        if cause.kind == CauseKind.NODE:
            self._keep_expected(judged, compiled)
        return cause, next((item for item in self.rows if item.name == value), row)

    def _differs_again(self, row: Row, judged: Judged, compiled: CompiledRegion) -> bool:
        """Whether further runs of the same model give another wrong value, or a right one."""
        if row.complaint or not isinstance(judged.value, torch.Tensor) or row.is_returned:
            return False
        for _ in range(_AGAIN):
            value = self._values.run_again(compiled).get(row.name)
            if isinstance(value, torch.Tensor) and bitwise_differing([judged.value], [value]):
                row.instability = Instability(compiled.bound.threads, judged.found)
                return True
        return False

    def _stale_weight(self, compiled: CompiledRegion) -> tuple[Cause, Row] | None:
        """The weight of which the session has an old value, and the node that reads it."""
        inputs = compiled.region.inputs
        stale = compiled.session.stale([self.run.values[item.node] for item in inputs])
        names = {inputs[position].node: name for position, name in stale.items()}
        for node in compiled.region.nodes if names else ():
            for weight in node.all_input_nodes:
                if weight in names:
                    reader = next(row for row in self.rows if row.name == value_names(node)[0])
                    return Cause(CauseKind.STALE_WEIGHT, names[weight]), reader
        return None

    def _is_of_session(self, row: Row, judged: Judged) -> bool:
        """Whether another session of the same model gives a right value, on the same numbers."""
        other = self._values.of_shown(judged.node, judged.index)
        if other is None or not isinstance(judged.value, torch.Tensor):
            return False
        again = SegmentCheck(
            judged.segment, judged.inputs, RecordedValues({(judged.node, judged.index): other})
        ).judge()
        return not any(item.is_wrong for item in again if item.node is judged.node and item.index == judged.index)

    def _wrong_alone(self, row: Row, judged: Judged, compiled: CompiledRegion) -> Row | None:
        """The first wrong node of the segment if it is translated alone, and nothing is optimized; ``None`` if all are
        right then."""
        nodes = list(judged.segment)
        inputs: Environment = dict(judged.inputs)
        try:
            known = self.sessions.values_of(nodes, inputs)
        except (SessionError, TranslationError) as error:
            self._check.unchecked[row.name] = f"its nodes have no model of their own: {first_line(str(error))}"
            return None
        for item in SegmentCheck(nodes, inputs, RecordedValues(known)).judge():
            if item.is_wrong:
                self._keep_expected(item, compiled)
                if item.node is judged.node:
                    return row
                return self._added(item, row)
        return None

    def _added(self, judged: Judged, before: Row) -> Row:
        """A row for a value that the session does not have, before the row of the segment's."""
        row = RowMaker(self.graph, self.run, self.sessions.opset).row(judged)
        if row is None:
            return before
        self.rows = [item for item in self.rows if item.name != row.name]
        self.rows.insert(self.rows.index(before), row)
        return row

    def _keep_expected(self, judged: Judged, compiled: CompiledRegion) -> None:
        """Keeps what PyTorch computes for a node, so that ``dumps`` can bisect its region without PyTorch."""
        name = value_names(judged.node)[judged.index or 0]
        exact = judged.exact if judged.exact is not None else widen(judged.expected)
        self.expected = ExpectedValues(
            compiled.region.index,
            {value_names(node)[0]: dense(item) for node, item in _tensors(judged.inputs)},
            {name: dense(judged.expected)} if isinstance(judged.expected, torch.Tensor) else {},
            {name: dense(exact)} if isinstance(exact, torch.Tensor) else {},
        )


def _tensors(values: Mapping[fx.Node, object]) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    return ((node, item) for node, item in values.items() if isinstance(item, torch.Tensor))


def _by_operator(wrong: Sequence[Row]) -> str:
    """``wrong by themselves: 12 of aten.gelu.default, 1 of aten.silu.default``; ``""`` for a single node."""
    counted = collections.Counter(row.operator for row in wrong).most_common()
    texts = [f"{number} of {operator}" for operator, number in counted[:_MOST_OPERATORS]]
    hidden = len(counted) - _MOST_OPERATORS
    texts += [f"{hidden} more operator{'s' if hidden > 1 else ''}"] if hidden > 0 else []
    return f"wrong by themselves: {', '.join(texts)}" if wrong[1:] else ""
