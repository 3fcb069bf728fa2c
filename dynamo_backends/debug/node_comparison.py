"""The verdict on the nodes of one run, from the rows of ``lockstep``.

The first node that is wrong alone is to blame. Without one, a value that is right in the exported model and wrong in
the session that ran is the fault of a rewrite. Without such a value, a result with a larger error than eager's is
checked by runs with random rounding, see ``rounding_runs``: what these do not explain is a fault without a known cause.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

from ..common.progress import progress
from ..common.safety_net import caught, net
from ..dumps.blame import Cause, CauseKind
from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledGraph
from ..numerics.tensor_measure import nearer
from ..numerics.verdicts import Verdict
from ..runtime.system_memory import give_back
from .lockstep import Lockstep
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun
from .repeated_runs import Instability
from .rounding_runs import Ties, explained_by_rounding, explained_by_ties
from .rows import Blame, GraphComparison, Row, exception_text
from .undefined_results import undefined_values
from .wrong_rewrite import ModelStep, find_rewrite, wrong_needed_pass

Models = Mapping[int, Sequence[ModelStep]]
"""By region, its model after each pass of the stage ``onnx`` that fired."""

_MOST_OPERATORS = 4
"""Operators of wrong nodes that the note names."""


def compare_run(
    graph: CompiledGraph, run: RecordedRun, models: Models, sessions: NodeSessions
) -> tuple[GraphComparison, Mapping[object, object] | None]:
    """Compares the nodes of one run with eager and float64; returns also ``Lockstep.exact``.

    An exception of the comparison becomes an entry of ``unchecked``; what was found before it stays.
    """
    lockstep = Lockstep(graph, run, sessions)
    rows: list[Row] = []
    failures: list[str] = []
    try:
        with progress(f"comparing {graph.name}", len(graph.module.graph.nodes) - 1) as advance:
            for rows_of_node in lockstep.rows():
                rows += rows_of_node
                advance()
    except Exception as error:
        caught(f"the comparison of {graph.name}", error, "The graph runs")
        failures.append(f"the nodes after {len(rows)}: {exception_text(error)}")
    exact, unchecked = lockstep.exact, lockstep.unchecked()
    del lockstep
    give_back()  # the verdict may need more runs
    comparison = GraphComparison()
    try:
        comparison = _RowVerdict(graph, run, models, rows, sessions).comparison()
    except Exception as error:
        caught(f"the verdict on {graph.name}", error, "The graph runs")
        failures.append(f"the verdict on the nodes: {exception_text(error)}")
    if comparison.ok:
        reasons = failures or [f"PyTorch ran region_{i}: {why}" for i, why in run.rescued.items()]
        comparison.not_comparable = "; ".join(reasons)
    repeats = [f"region_{i} was not run again: {item.failure}" for i, item in run.repeated.items() if item.failure]
    unchecked += [*repeats, *failures]
    compared = dataclasses.replace(comparison, rows=rows, unchecked=unchecked, rescued=run.rescued)
    return compared, exact


@dataclasses.dataclass(eq=False)
class _RowVerdict:
    """The verdict on the rows of one run."""

    graph: CompiledGraph
    run: RecordedRun
    models: Models
    rows: list[Row]
    sessions: NodeSessions

    def comparison(self) -> GraphComparison:
        found = self._stale_weight() or self._unstable()
        if found is not None:
            return found
        wrong = [row for row in self.rows if not row.locally_explained]
        wrong = [row for row in wrong if not self._is_undefined(row)] or wrong
        if wrong:
            nodes: dict[str, Row] = {}
            for row in sorted(wrong, key=lambda row: row.size_of_fault, reverse=True):
                nodes.setdefault(row.name.split("__")[0], row)
            wrong_nodes = list(nodes.values())
            note = "; ".join(filter(None, [wrong[0].local_fault, self._nearer(), _by_operator(wrong_nodes)]))
            found = self._diverges(wrong[0], self._cause(wrong[0]), note, more=len(nodes) - 1)
            return dataclasses.replace(found, wrong_nodes=wrong_nodes)
        all_in_pytorch = "" if self.graph.regions else "nothing of it runs on ONNX Runtime"
        return (
            self._wrong_rewrite()
            or self._unexplained()
            or GraphComparison(
                note="; ".join(filter(None, [self._nearer(self._ties.explained), self._by_chance(), all_in_pytorch])),
                has_tie=bool(self._ties.turned),
            )
        )

    @functools.cached_property
    def _undefined(self) -> Mapping[str, str]:
        return undefined_values(self.graph.module, self.run.values)

    def _is_undefined(self, row: Row) -> bool:
        return row.name.split("__")[0] in self._undefined

    @staticmethod
    def _diverges(row: Row, cause: Cause, note: str, difference: str = "", more: int = 0) -> GraphComparison:
        found = Verdict(", ".join(filter(None, [row.complaint, difference])))
        blame = Blame(
            row.name, cause, region=row.region, source=row.where, user_name=row.user_name, more=more, difference=found
        )
        return GraphComparison(blame, note=note)

    def _cause(self, row: Row) -> Cause:
        """The cause of a value that is wrong in its exported model, or in PyTorch."""
        if row.region is None:
            return Cause(CauseKind.PYTORCH)
        compiled = self.graph.regions[row.region]
        name = ""
        with net(f"the search for what makes {row.name} wrong", "The graph runs"):
            name = wrong_needed_pass(compiled, self.run.session_of(compiled), self.run.values, row)
        return Cause(CauseKind.PASS, name) if name else Cause(CauseKind.NODE)

    def _stale_weight(self) -> GraphComparison | None:
        """The verdict on a session that returned a wrong result, and has an old value of a weight."""
        wrong = {row.region for row in self.rows if row.session is not None and not row.explained}
        for compiled in self.graph.regions:
            if compiled.region.index not in wrong:
                continue
            inputs = compiled.region.inputs
            stale = compiled.session.stale([self.run.values[item.node] for item in inputs])
            names = {inputs[position].node: name for position, name in stale.items()}
            for node in compiled.region.nodes:
                for weight in node.all_input_nodes:
                    if weight in names:
                        reader = next(row for row in self.rows if row.name == value_names(node)[0])
                        return self._diverges(reader, Cause(CauseKind.STALE_WEIGHT, names[weight]), self._nearer())
        return None

    def _beyond_eager(self) -> dict[str, Row]:
        """The rows whose errors are larger than eager's, except undefined values."""
        rows = (row for row in self.rows if not row.explained or not row.propagated_explained)
        return {row.name: row for row in rows if not self._is_undefined(row)}

    @functools.cached_property
    def _ties(self) -> Ties:
        return explained_by_ties(self.graph, self.run, self.sessions, self._beyond_eager())

    @functools.cached_property
    def _rounded(self) -> dict[str, bool]:
        """The rows whose errors are larger than eager's, but explained by rounding or by undefined values.

        See ``explained_by_ties`` and ``explained_by_rounding``.
        """
        ties = self._ties
        undefined = [row.name for row in self.rows if self._is_undefined(row)]
        rows = self._beyond_eager()
        found = explained_by_rounding(self.graph, self.run, self.sessions, rows, ties.decided) if rows else {}
        return dict.fromkeys([*undefined, *ties.explained], False) | found

    def _wrong_rewrite(self) -> GraphComparison | None:
        """The verdict on a value that is right in the exported model, and wrong in the session that ran."""
        for row in self.rows:
            if row.session is None or row.onnx is None or row.region is None:
                continue
            if row.session.is_rounding or row.name in self._rounded or not row.onnx.is_rounding:
                continue  # in this order: ``_rounded`` changes ``row.onnx``
            found = row.session_instability
            if found is not None and found.between_runs:  # smaller than eager's error, and still the cause
                return self._differs_between_runs(row, found, "every node by itself is right")
            compiled = self.graph.regions[row.region]
            bound, steps = self.run.session_of(compiled), self.models.get(row.region, ())
            cause, value = Cause(CauseKind.OPTIMIZER), row.name
            with net(f"the search for the rewrite that makes {row.name} wrong", "The graph runs"):
                cause, value = find_rewrite(compiled, bound, steps, self.run.values, row.name)
            note = f"every node of region_{row.region} by itself is right: a rewrite of its model makes the fault"
            return self._diverges(next((item for item in self.rows if item.name == value), row), cause, note)
        return None

    def _unstable(self) -> GraphComparison | None:
        """The verdict on results that differ between runs, or with another number of threads."""
        for row in self.rows:
            if row.unstable_alone and row.local_instability is not None:
                return self._differs_between_runs(row, row.local_instability, "the node alone, on the same inputs")
        for row in self.rows:
            found = row.session_instability
            if found is None or not row.unstable_in_session or row.region is None:
                continue
            rounds = any(item.region == row.region and item.local_instability is not None for item in self.rows)
            if not found.between_runs and (rounds or row.name in self._rounded):
                continue  # threads change the order of additions, which may change a comparison downstream
            note = f"no node of region_{row.region} by itself gave other results in ten runs"
            return self._differs_between_runs(row, found, note)
        return None

    def _differs_between_runs(self, row: Row, found: Instability, where: str) -> GraphComparison:
        cause = Cause(CauseKind.UNSTABLE, "runs" if found.between_runs else "threads")
        difference = found.difference
        note = f"{where}: results {found} differ by {difference.max_abs:.3g}, at values up to {difference.scale:.3g}"
        if difference.nonfinite:
            note += f", {difference.nonfinite} of them NaN or infinite in one only"
        return self._diverges(row, cause, note, f"{row.operator}, {found}")

    def _unexplained(self) -> GraphComparison | None:
        """The verdict on a result with an error that no node, no rewrite and no rounding explains."""
        if not any(row.is_output and not row.explained and row.name not in self._rounded for row in self.rows):
            return None
        first = next(row for row in self.rows if not row.explained and row.name not in self._rounded)
        rows = {row.name: row for row in self.rows}
        while near_one := [rows[name] for name in first.inputs if self._rounded.get(name)]:
            first = near_one[0]  # its error is small relative to one, and becomes large in the node that reads it
        note = "every node by itself is right, and rounding does not explain the error here"
        return self._diverges(first, Cause(CauseKind.UNEXPLAINED), note)

    def _by_chance(self) -> str:
        """The results of a right graph whose errors only random rounding explains."""
        outputs = [row for row in self.rows if row.is_output]
        turned = [row for row in outputs if row.ours is not None and row.eager_extent is None and row.ours.max_ulp]
        texts = [f"{row.ours.max_ulp:.0f} elements of {row.name} turned by rounding" for row in turned if row.ours]
        by_ties = [row for row in outputs if row.name in self._ties.explained]
        if by_ties and self._ties.turned:
            texts.append(self._tie_in_words(by_ties))
        others = [row for row in outputs if row not in turned and row not in by_ties]
        carried = [row.name for row in others if row.name in self._rounded]
        if carried:
            more = f" and {len(carried) - 1} more" if carried[1:] else ""
            texts.append(f"random rounding of float64 makes errors like that of {carried[0]}{more}")
        return ", ".join(texts)

    def _tie_in_words(self, results: Sequence[Row]) -> str:
        """``tie of a quantization: eager rounds 2 elements of round_1 (model.py:7) to the other side; ...``."""
        (first, count), *others = self._ties.turned.items()
        where = next((row.where for row in self.rows if row.name == first), "")
        elements = f"{count} element{'s' if count > 1 else ''} of {first} ({where or 'no source line'})"
        elements += f" and some of {len(others)} more node{'s' if len(others) > 1 else ''}" if others else ""
        names = ", ".join(row.name for row in results)
        return f"tie of a quantization: eager rounds {elements} to the other side, and so differs at {names}"

    def _nearer(self, without: Collection[str] = ()) -> str:
        outputs = [row for row in self.rows if row.is_output and row.ours is not None and row.name not in without]
        sides = [nearer(row.ours, row.eager) for row in outputs if row.ours is not None and row.eager is not None]
        return ", ".join(
            f"{side} is nearer to float64 at {sides.count(name)} of {len(outputs)} results"
            for name, side in (("runtime", "onnx"), ("eager", "eager"))
            if name in sides
        )


def _by_operator(wrong: Sequence[Row]) -> str:
    """``wrong by themselves: 12 of aten.gelu.default, 1 of aten.silu.default``; ``""`` for a single node."""
    counted = collections.Counter(row.operator for row in wrong).most_common()
    texts = [f"{number} of {operator}" for operator, number in counted[:_MOST_OPERATORS]]
    hidden = len(counted) - _MOST_OPERATORS
    texts += [f"{hidden} more operator{'s' if hidden > 1 else ''}"] if hidden > 0 else []
    return f"wrong by themselves: {', '.join(texts)}" if wrong[1:] else ""
