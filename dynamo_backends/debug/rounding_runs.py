"""Whether rounding explains values that are further from float64 than eager's: by runs with rounding at random.

Eager's error is one sample of what rounding does to a graph. Where a value is outside of it, and no node is wrong by
itself, the graph runs some times more in float64, with each result perturbed by up to a unit in the last place of
its dtype. These runs compare and index by themselves: a value that lies near a tie turns in them too. Beside each of
them runs what a unit of one makes inside of functions like SiLU, and in what linear operators make of their results. Of
``log(y)`` an error of y is no rounding, however small it is beside one. What these runs do not explain is a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from ..errors import SessionError
from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledGraph
from ..numerics.distance import dense
from ..numerics.exact import REFUSALS
from ..numerics.graph_execution import FxExecution, PerturbedExecution
from ..numerics.randomness import MOST_PERTURBATIONS, PERTURBATIONS
from ..numerics.verdicts import verdict
from .lockstep import item_of, recorded_values
from .node_sessions import Replay
from .recorded_run import WatchedRun
from .rows import Row

_MOST = 64
"""Rows that are looked at: the outputs, and the first of the others."""

_ASKED_AFTER = (PERTURBATIONS, 2 * PERTURBATIONS, MOST_PERTURBATIONS)
"""After how many runs it is asked whether they explain all."""


def explained_by_rounding(
    graph: CompiledGraph, run: WatchedRun, replay: Replay, rows: Mapping[str, Row]
) -> dict[str, bool]:
    """The names of the rows whose values rounding explains, each with whether only numbers near one do; those that are
    not looked at among them. The measures of these rows are then those that explain them.

    Args:
        graph, run, replay: as of ``compare_run``.
        rows: of values that eager's error does not explain, by name.
    """
    outputs = [name for name, row in rows.items() if row.is_output]
    chosen = dict.fromkeys([*outputs, *list(rows)[:_MOST]])
    unseen = dict.fromkeys((name for name in rows if name not in chosen), False)
    ours = _values(graph, run, replay, chosen)
    places = {}
    for node in graph.module.graph.nodes:
        for i, name in enumerate(value_names(node)):
            if name in ours and name not in places:
                places[name] = (node, i if isinstance(node.meta.get("val"), (tuple, list)) else None)
    wanted = {node for node, _ in places.values()}
    recorded, state = recorded_values(graph, run), torch.get_rng_state()
    names = {node.name for node in wanted}
    execution = FxExecution(graph.module, (), state, recorded=recorded, compared=names)
    _run(graph, execution)
    places = {name: place for name, place in places.items() if place[0] in execution.eager}
    furthest: dict[str, torch.Tensor] = {}
    furthest_near_one: dict[str, torch.Tensor] = {}
    explained: dict[str, bool] = {}
    for seed in range(MOST_PERTURBATIONS):
        item = PerturbedExecution(graph.module, (), state, seed, recorded=recorded, compared=names, has_near_one=True)
        try:
            _run(graph, item)
        except (*REFUSALS, IndexError):  # a shape depends on a comparison that turned
            continue
        for name, (node, index) in places.items():
            for values, found in ((item.exact, furthest), (item.near_one, furthest_near_one)):
                if node in values:
                    exact, value = (item_of(value, index) for value in (execution.exact_of(node), values[node]))
                    found[name] = _further(value, found.get(name, exact), exact)
        if seed + 1 not in _ASKED_AFTER:
            continue
        for name, (node, index) in list(places.items()):
            eager, exact = (item_of(value, index) for value in (execution.eager[node], execution.exact_of(node)))
            for others in ((furthest,), (furthest, furthest_near_one)):
                found_now = verdict(ours[name], eager, exact, [values[name] for values in others if name in values])
                if not found_now.is_wrong:
                    explained[name] = len(others) > 1
                    rows[name].explain(found_now.ours)
                    del places[name]
                    break
        if not places:
            break
    return explained | unseen


def _further(value: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each element, which of two values is further from the exact one, or is not finite."""
    if not exact.is_floating_point():
        return torch.where(value != exact, value, other)
    return torch.where((value - exact).abs() <= (other - exact).abs(), other, value)


def _run(graph: CompiledGraph, execution: FxExecution) -> None:
    for node in graph.module.graph.nodes:
        if node.op != "output":
            execution.run(node)
            execution.release(*node.all_input_nodes)


def _values(
    graph: CompiledGraph, run: WatchedRun, replay: Replay, names: Mapping[str, None]
) -> dict[str, torch.Tensor]:
    """What the run, or else the session that ran or the exported model, has under some names."""
    found: dict[str, object] = {}
    for compiled in graph.regions:
        if all(name in found for name in names):
            break
        arguments = [run.values[item.node] for item in compiled.region.inputs]
        with contextlib.suppress(SessionError):  # the rows say it
            found |= replay.region_values(compiled, arguments)
        with contextlib.suppress(SessionError):
            found |= replay.session_values(compiled, run.session_of(compiled), arguments)
    for node, value in run.values.items():
        named = value if isinstance(value, (tuple, list)) else [value]
        found |= dict(zip(value_names(node), named, strict=False))
    return {name: dense(found[name]) for name in names if isinstance(found.get(name), torch.Tensor)}
