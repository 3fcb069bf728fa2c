"""Checks whether rounding explains errors that are larger than eager's, by runs with random rounding.

Eager's error is one sample of what rounding does to a graph. If an error is larger, and no node alone is wrong, the
graph is run several times in float64, with each result perturbed by up to a unit in the last place of its dtype. These
runs do their own comparisons and indexing, so a value near a tie changes in them too. A second environment adds the
error of intermediate numbers near one, as inside SiLU, and propagates it through linear operators: an error that is
small relative to one need not be rounding after ``log(y)``. An error that these runs do not explain is a fault.

Before that, ties of quantizations are decided as the run decided them, and stay so: at random they would change results
by so much that a wrong quantization is not seen.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Container, Iterator, Mapping

import torch
from torch import fx

from ..errors import SessionError
from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledGraph
from ..numerics.exact import KERNEL_ERRORS, Environment
from ..numerics.graph_execution import FxExecution, PerturbedExecution
from ..numerics.local_error import is_quantization
from ..numerics.measure import Measure
from ..numerics.quantization_ties import TieExecution
from ..numerics.randomness import CHECK_AFTER, MOST_PERTURBATIONS
from ..numerics.tensor_measure import dense
from ..numerics.verdicts import further, verdict
from .lockstep import item_of, recorded_values
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun
from .rows import Row

_MOST_ROWS = 64
"""Rows that are checked in addition to the outputs."""


@dataclasses.dataclass(frozen=True)
class Ties:
    """The quantizations that round elements on ties to the other side than eager, see ``TieExecution``.

    Attributes:
        turned: by the name of a quantization, the number of these elements.
        decided: the results of quantizations in the sessions that ran.
        explained: the names of the rows whose errors are rounding once the ties are decided as the run did.
    """

    turned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decided: Environment = dataclasses.field(default_factory=dict)
    explained: Collection[str] = ()


def explained_by_ties(graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions, rows: Mapping[str, Row]) -> Ties:
    """The ties of quantizations, and the rows that they explain: their measures get another share of the tolerance.

    ``rows`` are of values whose error is larger than eager's, in the session that ran or in the exported model. The two
    may differ at ties, so each is compared with an execution of its own.
    """
    nodes = graph.module.graph.nodes
    if not rows or not any(map(is_quantization, nodes)):
        return Ties()
    recorded, named = recorded_values(graph, run), {name: node for node in nodes for name in value_names(node)}
    turned: dict[str, int] = {}
    for field in ("onnx", "session"):
        actual = _values(graph, run, sessions, named, optimized=field == "session")
        by_node = {named[name]: value for name, value in actual.items() if name in named}
        execution = TieExecution(graph.module, (), torch.get_rng_state(), recorded=recorded, actual=by_node)
        for node in _run(graph, execution):
            for i, name in enumerate(value_names(node)):
                found = getattr(rows.get(name), field, None)
                if found is None or found.is_rounding or not isinstance(actual.get(name), torch.Tensor):
                    continue
                index = i if isinstance(node.meta.get("val"), (tuple, list)) else None
                eager, exact = (item_of(item, index) for item in (execution.eager[node], execution.exact_of(node)))
                result = verdict(dense(actual[name]), eager, exact)
                if not result.is_wrong:
                    setattr(rows[name], field, found.with_tolerance_of(result.ours or Measure()))
        turned |= execution.turned
    explained = [name for name, row in rows.items() if row.explained and row.propagated_explained]
    return Ties(turned, execution.decided, explained)


def explained_by_rounding(
    graph: CompiledGraph,
    run: RecordedRun,
    sessions: NodeSessions,
    rows: Mapping[str, Row],
    decided: Environment | None = None,
) -> dict[str, bool]:
    """The rows whose errors rounding explains; their measures are replaced by ones with a larger tolerance.

    ``rows`` are of values whose error is larger than eager's; ``decided`` are results of quantizations, see ``Ties``.
    Returns by name whether only the errors of numbers near one explain the row. Rows that are not checked count as
    explained.
    """
    outputs = [name for name, row in rows.items() if row.is_output]
    checked = dict.fromkeys([*outputs, *list(rows)[:_MOST_ROWS]])
    explained = {name: False for name in rows if name not in checked}
    actual = _actual_values(graph, run, sessions, checked)
    positions = {}
    for node in graph.module.graph.nodes:
        for i, name in enumerate(value_names(node)):
            if name in actual and name not in positions:
                positions[name] = (node, i if isinstance(node.meta.get("val"), (tuple, list)) else None)
    recorded, state = recorded_values(graph, run) | (decided or {}), torch.get_rng_state()
    compared = {node.name for node, _ in positions.values()}
    execution = FxExecution(graph.module, (), state, recorded=recorded, compared=compared)
    collections.deque(_run(graph, execution, _needed_by(positions)), maxlen=0)
    positions = {name: item for name, item in positions.items() if item[0] in execution.eager}
    furthest: dict[str, torch.Tensor] = {}
    furthest_near_one: dict[str, torch.Tensor] = {}
    for seed in range(MOST_PERTURBATIONS):
        item = PerturbedExecution(graph.module, (), state, seed, recorded=recorded, has_near_one=True)
        named = collections.defaultdict(list)
        for name, (node, index) in positions.items():
            named[node].append((name, index))
        with contextlib.suppress(*KERNEL_ERRORS, IndexError):  # a shape depends on a comparison with another result
            for node in _run(graph, item, _needed_by(positions)):
                for name, index in named[node]:
                    for values, found in ((item.exact, furthest), (item.near_one, furthest_near_one)):
                        if node in values:
                            exact, value = (item_of(value, index) for value in (execution.exact_of(node), values[node]))
                            found[name] = further(value, found.get(name, exact), exact)
        if seed + 1 not in CHECK_AFTER:
            continue
        for name, (node, index) in list(positions.items()):
            eager, exact = (item_of(value, index) for value in (execution.eager[node], execution.exact_of(node)))
            for others in ((furthest,), (furthest, furthest_near_one)):
                result = verdict(actual[name], eager, exact, [values[name] for values in others if name in values])
                if not result.is_wrong:
                    explained[name] = len(others) > 1
                    if result.ours is not None:
                        rows[name].replace_ours(result.ours)
                    del positions[name]
                    break
        if not positions:
            break
    return explained


def _needed_by(positions: Mapping[str, tuple[fx.Node, int | None]]) -> set[fx.Node]:
    """The nodes on which some values depend, and those of the values."""
    needed: set[fx.Node] = set()
    waiting = [node for node, _ in positions.values()]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _run(graph: CompiledGraph, execution: FxExecution, needed: Container[fx.Node] | None = None) -> Iterator[fx.Node]:
    """Runs a graph, or only the ``needed`` nodes; yields each node while its value and its inputs are there."""
    for node in graph.module.graph.nodes:
        if node.op == "output":
            return
        if needed is None or node in needed:
            execution.run(node)
            yield node
        execution.release(*node.all_input_nodes)


def _actual_values(
    graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """The values of the run; for those inside regions, of the session that ran, or of the exported model."""
    found = _values(graph, run, sessions, names, optimized=False) | _values(graph, run, sessions, names, optimized=True)
    return {name: dense(found[name]) for name in names if isinstance(found.get(name), torch.Tensor)}


def _values(
    graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions, names: Collection[str], *, optimized: bool
) -> dict[str, object]:
    """The values of the run, and those of ``names`` inside regions: in their sessions, or exported models."""
    found: dict[str, object] = {}
    for node, value in run.values.items():
        results = value if isinstance(value, (tuple, list)) else [value]
        found |= dict(zip(value_names(node), results, strict=False))
    for compiled in graph.regions:
        nodes = [node for node in compiled.region.operators if any(name in names for name in value_names(node))]
        if not nodes:
            continue
        arguments = [run.values[item.node] for item in compiled.region.inputs]
        with contextlib.suppress(SessionError):  # ``Lockstep.unchecked`` names it
            if optimized:
                found = sessions.session_values(compiled, run.session_of(compiled), arguments, nodes) | found
            else:
                found |= sessions.region_values(compiled, arguments, nodes)
    return found
