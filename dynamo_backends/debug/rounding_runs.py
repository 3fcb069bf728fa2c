"""Checks whether rounding explains errors that are larger than eager's, by runs with random rounding.

Eager's error is one sample of what rounding does to a graph. If an error is larger, and no node alone is wrong, the
graph is run several times in float64, with each result perturbed by up to a unit in the last place of its dtype. These
runs do their own comparisons and indexing, so a value near a tie changes in them too. A second environment adds the
error of intermediate numbers near one, as inside SiLU, and propagates it through linear operators: an error that is
small relative to one need not be rounding after ``log(y)``. An error that these runs do not explain is a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch

from ..errors import SessionError
from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledGraph
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.graph_execution import FxExecution, PerturbedExecution
from ..numerics.randomness import MOST_PERTURBATIONS, PERTURBATIONS
from ..numerics.tensor_measure import dense
from ..numerics.verdicts import verdict
from .lockstep import item_of, recorded_values
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun
from .rows import Row

_MOST_ROWS = 64
"""Rows that are checked in addition to the outputs."""

_CHECK_AFTER = (PERTURBATIONS, 2 * PERTURBATIONS, MOST_PERTURBATIONS)
"""Numbers of runs after which the errors are checked."""


def explained_by_rounding(
    graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions, rows: Mapping[str, Row]
) -> dict[str, bool]:
    """The rows whose errors rounding explains; their measures are replaced by ones with a larger tolerance.

    ``rows`` are of values whose error is larger than eager's. Returns by name whether only the errors of numbers near
    one explain the row. Rows that are not checked count as explained.
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
    recorded, state = recorded_values(graph, run), torch.get_rng_state()
    compared = {node.name for node, _ in positions.values()}
    execution = FxExecution(graph.module, (), state, recorded=recorded, compared=compared)
    _run(graph, execution)
    positions = {name: item for name, item in positions.items() if item[0] in execution.eager}
    furthest: dict[str, torch.Tensor] = {}
    furthest_near_one: dict[str, torch.Tensor] = {}
    for seed in range(MOST_PERTURBATIONS):
        item = PerturbedExecution(
            graph.module, (), state, seed, recorded=recorded, compared=compared, has_near_one=True
        )
        try:
            _run(graph, item)
        except (*KERNEL_ERRORS, IndexError):  # a shape depends on a comparison with another result
            continue
        for name, (node, index) in positions.items():
            for values, found in ((item.exact, furthest), (item.near_one, furthest_near_one)):
                if node in values:
                    exact, value = (item_of(value, index) for value in (execution.exact_of(node), values[node]))
                    found[name] = _further(value, found.get(name, exact), exact)
        if seed + 1 not in _CHECK_AFTER:
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


def _further(value: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """For each element, the value that is further from the exact one, or is not finite."""
    if not exact.is_floating_point():
        return torch.where(value != exact, value, other)
    return torch.where((value - exact).abs() <= (other - exact).abs(), other, value)


def _run(graph: CompiledGraph, execution: FxExecution) -> None:
    for node in graph.module.graph.nodes:
        if node.op != "output":
            execution.run(node)
            execution.release(*node.all_input_nodes)


def _actual_values(
    graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions, names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The values of the run; for those inside regions, of the session that ran, or of the exported model."""
    found: dict[str, object] = {}
    for compiled in graph.regions:
        if all(name in found for name in names):
            break
        arguments = [run.values[item.node] for item in compiled.region.inputs]
        with contextlib.suppress(SessionError):  # ``Lockstep.unchecked`` names it
            found |= sessions.region_values(compiled, arguments)
        with contextlib.suppress(SessionError):
            found |= sessions.session_values(compiled, run.session_of(compiled), arguments)
    for node, value in run.values.items():
        results = value if isinstance(value, (tuple, list)) else [value]
        found |= dict(zip(value_names(node), results, strict=False))
    return {name: dense(found[name]) for name in names if isinstance(found.get(name), torch.Tensor)}
