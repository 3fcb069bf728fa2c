"""Finds the first pass of a stage that changed what the graph computes, and the node at which it did."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import torch

from ..common.random_state import RandomState
from ..dumps.blame import Cause
from ..graphs.locations import Place, place_of
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.verdicts import Verdict
from .call_runs import CallRuns, Outcome, interpreted
from .first_changed_node import ChangedNode, first_changed_node
from .rows import Blame
from .stage_graphs import StageGraphs, Step, place_of_result


def wrong_step(
    state: RandomState, graphs: StageGraphs, arguments: Sequence[object], wide: Sequence[object] | None = None
) -> Blame | None:
    """The first pass of a stage after AOTAutograd's trace that changed what the graph computes in float64.

    Args:
        state: of the CPU's random numbers.
        graphs: of the stage.
        arguments: of its graphs, in the model's dtypes.
        wide: the arguments in float64, if they are not those in the model's dtypes.
    """
    with torch.no_grad():
        return first_wrong_step(CallRuns(wide or arguments, state, narrow=arguments), graphs, arguments)


def first_wrong_step(runs: CallRuns, graphs: StageGraphs, narrow: Sequence[object]) -> Blame | None:
    """The first pass of a stage that changed what the graph computes; ``narrow``: arguments in the model's dtypes."""
    if graphs.is_unchanged:
        return None
    before, old = graphs.steps[0], runs.run(interpreted(graphs.first))
    if not runs.differing(interpreted(graphs.first), old, runs.run(interpreted(graphs.last))):
        return None
    for step in graphs.steps[1:]:
        new = runs.run(interpreted(step.graph))
        is_same = not runs.differing(interpreted(before.graph), old, new)
        found = None if is_same else _changed_place(runs, before, step, narrow, old, new)
        if found is not None:
            return blame_of(found.place, step.cause, found.difference)
        before, old = step, new
    return None


def _changed_place(
    runs: CallRuns,
    before: Step,
    step: Step,
    arguments: Sequence[object],
    old: Outcome,
    new: Outcome,
) -> ChangedNode | None:
    """The node that a pass changed, or else the result; ``None`` if it rounded a constant to the model's dtype."""
    with contextlib.suppress(*KERNEL_ERRORS, IndexError):
        node = first_changed_node(before.graph, step.graph, arguments, runs.state, casts=False)
        if node is not None:
            return node
    differing = runs.beyond_model(interpreted(before.graph), old, new)
    if not differing:
        return None
    key, found = next(iter(differing.items()))
    matched = next((node for node in before.graph.graph.nodes if node.name in step.matches), None)
    if matched is None:
        return ChangedNode(place_of_result(before.graph, key), found)
    return ChangedNode(place_of(matched), dataclasses.replace(found, elements=None))  # they are those of the result


def changing_step(
    state: RandomState, graphs: StageGraphs, arguments: Sequence[object], wide: object = None, *, casts: bool
) -> Blame | None:
    """The first pass of a stage that changed a node, see ``first_changed_node``.

    With ``casts``, the first of those that added casts to a lower precision, if these made a value less precise.
    ``arguments`` are those of the stage's graphs, in the model's dtypes; others are not needed.
    """
    if graphs.is_unchanged:
        return None
    for before, step in graphs.narrowing_steps if casts else itertools.pairwise(graphs.steps):
        node = first_changed_node(before.graph, step.graph, arguments, state, casts=casts)
        if node is not None:
            return blame_of(node.place, step.cause, node.difference)
    return None


def blame_of(place: Place, cause: Cause, found: Verdict) -> Blame:
    """The blame for a difference at a place."""
    if not found.is_wrong:  # less than the rounding of single operators
        found = dataclasses.replace(found, complaint="differs in float64")
    return Blame(place.name, cause, source=place.source, module=place.module, difference=found)
