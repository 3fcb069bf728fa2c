"""Whether rounding explains values that are further from float64 than eager's: by runs with rounding at random.

Eager's error is one sample of what rounding does to a graph. Where a value is outside of it, and no node is wrong by
itself, the graph runs a few times more in float64, with each result perturbed by up to a unit in the last place
of its dtype. These runs compare and index by themselves: a value that lies near a tie turns in them too. Beside each of
them runs what a unit of one makes inside of functions like SiLU, and in what linear operators make of their results. Of
``log(y)`` an error of y is no rounding, however small it is beside one. What these runs do not explain is a fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import fx

from passes.engine.fx.editing import is_view

from ..artifacts import CompiledGraph
from ..errors import SessionError
from ..exporter.translate import value_names
from ..numerics.distance import dense
from ..numerics.exact import REFUSALS, Environment, run_only_exact
from ..numerics.graph_execution import FxExecution, perturbed_executions
from ..numerics.local_error import SUMS, name_of
from ..numerics.randomness import NEAR_ONE, perturbed_near_one
from ..numerics.verdicts import verdict
from .lockstep import recorded_values
from .replay import Replay
from .rows import Row
from .watched import WatchedRun

_MOST = 64
"""Rows that are looked at: the outputs, and the first of the others."""

_LINEAR = SUMS | {"add", "sub", "rsub", "mul", "neg", "cat", "where", "relu", "_to_copy"}
"""Operators, beside views, that carry an error on and make it no larger beside the numbers that it comes from."""


def explained_by_rounding(
    graph: CompiledGraph, run: WatchedRun, replay: Replay, rows: Mapping[str, Row]
) -> dict[str, bool]:
    """The names of the rows whose values rounding explains, each with whether only numbers near one do; those that are
    not looked at among them.

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
    perturbed = perturbed_executions(graph.module, tuple, state, recorded=recorded, compared=names)
    near_one = [_NearOne(torch.Generator().manual_seed(len(perturbed) + i)) for i in range(len(perturbed))]
    _run(graph, execution, None)
    for item, beside in list(zip(perturbed, near_one, strict=True)):
        try:
            _run(graph, item, beside)
        except (*REFUSALS, IndexError):  # a shape depends on a comparison that turned
            perturbed.remove(item)
            near_one.remove(beside)
    explained = {}
    for name, (node, index) in places.items():
        eager, exact = execution.eager[node], execution.exact_of(node)
        others = [item.exact[node] for item in perturbed] + [
            item.values[node] for item in near_one if node in item.values
        ]
        if index is not None:
            eager, exact, *others = (item[index] for item in (eager, exact, *others))  # type: ignore[index]
        for used in (others[: len(perturbed)], others):
            if name not in explained and not verdict(ours[name], eager, exact, used).is_wrong:
                explained[name] = used is others
    return explained | unseen


def _run(graph: CompiledGraph, execution: FxExecution, near_one: _NearOne | None) -> None:
    for node in graph.module.graph.nodes:
        if node.op == "output":
            continue
        execution.run(node)
        if near_one is not None:
            near_one.run(node, execution.exact)
        for dead in execution.release(*node.all_input_nodes):
            if near_one is not None:
                near_one.values.pop(dead, None)


class _NearOne:
    """Values beside those of a run in float64: with the errors of functions of numbers near one.

    Attributes:
        values: of the nodes that have such an error.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.values: Environment = {}
        self._generator = generator

    def run(self, node: fx.Node, exact: Environment) -> None:
        """Runs a node; ``exact`` has its value, and those of what it reads."""
        name, value, args = name_of(node), exact.get(node), node.all_input_nodes
        if name in NEAR_ONE and isinstance(value, torch.Tensor) and value.dtype is torch.float64:
            given = [exact[arg] for arg in args]
            self.values[node] = perturbed_near_one(name, value, given, node.meta["val"].dtype, self._generator)
        elif (name in _LINEAR or is_view(node.target)) and any(arg in self.values for arg in args):
            with contextlib.suppress(*REFUSALS):  # float64 has not the operator
                self.values[node] = run_only_exact(node, {arg: self.values.get(arg, exact[arg]) for arg in args})


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
