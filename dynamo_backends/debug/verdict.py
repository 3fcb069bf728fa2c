"""The verdict on one run: what its stages, its nodes and its results say together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..dumps.blame import Cause, Kind
from ..numerics.distance import is_explained
from ..runtime.providers import Provider, only_cpu, options_for_float32, provider_name
from .captured import Finding, WrongResult
from .choice import SizesByName, sizes_text
from .rows import OK, Blame, Error, GraphComparison, Row

_NAMED = 2
"""How many gradients a verdict names; the manifest has all."""

_STEPS = 3
"""In how many steps from the first gradient that is reached those of the same module are."""

_SHOWN = 3
"""How many unchecked things the note names; the manifest has all."""


def conclude(comparison: GraphComparison, findings: Sequence[Finding], sizes: SizesByName) -> GraphComparison:
    """The verdict on a run.

    The earliest stage that changed what is computed is the culprit: what comes after it only carries the fault on.
    Where no stage is, it is the node or rewrite that the comparison of the nodes names. A result that is wrong although
    nothing by itself is, is a fault too.

    Args:
        comparison: of the nodes of the compiled graph.
        findings: what the earlier stages and the results say, in the order of the stages.
        sizes: those of the run that another run of a dynamic graph need not have.
    """
    unchecked = [*comparison.unchecked, *(item for finding in findings for item in finding.unchecked)]
    culprit = next((finding.culprit for finding in findings if finding.culprit is not None), None)
    wrong = [item for finding in findings for item in finding.wrong]
    verdict, notes, blame = comparison.verdict, [comparison.note], comparison.blame
    if culprit is not None:
        verdict, notes = culprit.verdict, [culprit.said]
        row = next((row for row in comparison.rows if row.name == culprit.node), None)
        blame = Blame(culprit.node, culprit.cause, None, culprit.source, row.user_name if row is not None else "")
        if not comparison.ok:
            notes.append(f"the graph after it {comparison.verdict}")
    elif comparison.ok and wrong:
        verdict = f"diverges at {wrong[0]}"
        because = next((finding.because for finding in findings if finding.because), "")
        notes = [because or "no stage, no pass and no node by itself explains it"]
        blame = _blame(wrong[0], comparison.rows)
    notes.extend(_about(row) for row in comparison.rows if blame is not None and row.name == blame.value)
    if unchecked and verdict == OK:
        more = f" and {len(unchecked) - _SHOWN} more" if len(unchecked) > _SHOWN else ""
        notes.append(f"not checked: {'; '.join(unchecked[:_SHOWN])}{more}")
    note = "; ".join(filter(None, notes))
    if blame is not None and (named := _gradients(blame, comparison.rows)):
        blame = dataclasses.replace(blame, gradients=named)
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        verdict = f"{verdict}, on the way to {', '.join(named[:_NAMED])}{more}"
    if verdict != OK and sizes:
        verdict = f"{verdict}, with {sizes_text(sizes)}"
    culprits = [(found.node, found.said) for finding in findings if (found := finding.culprit) is not None]
    said = [*culprits, *((item.name, item.said) for item in wrong)]
    faults = [Error(name, by.ours, by.theirs) for name, by in said if by.ours is not None]
    return dataclasses.replace(
        comparison, verdict=verdict, note=note, unchecked=unchecked, blame=blame, sizes=sizes, faults=faults
    )


def with_precision(comparison: GraphComparison, providers: Sequence[Provider]) -> GraphComparison:
    """A verdict whose note says that an execution provider may have computed float32 with fewer digits, where that
    would explain the error.

    Args:
        comparison: what ``conclude`` returned.
        providers: of the run.
    """
    row = next((row for row in comparison.rows if comparison.blame and row.name == comparison.blame.value), None)
    if row is None or row.region is None or row.dtype != "float32" or only_cpu(providers):
        return comparison
    pairs = ((row.local_onnx, row.local_eager), (row.session or row.onnx, row.eager))
    errors = [(ours, eager) for ours, eager in pairs if ours is not None and eager is not None]
    wrong = [pair for pair in errors if not is_explained(*pair, torch.float32, row.beside)]
    if not wrong or not all(is_explained(*pair, torch.bfloat16, row.beside) for pair in wrong):
        return comparison
    name, asked = provider_name(providers[0]), options_for_float32(providers[0])
    said = f"the error is no larger than rounding to bfloat16 makes: {name} may compute float32 with fewer digits"
    said += f"; the options {asked} ask for float32" if asked else ""
    return dataclasses.replace(comparison, note="; ".join(filter(None, [comparison.note, said])))


def _blame(wrong: WrongResult, rows: Sequence[Row]) -> Blame:
    """A result that is wrong; its row, if the graph computes it."""
    called = f"grad of {wrong.name.removeprefix('the gradient of ')}"
    row = next((row for row in rows if row.is_output and (wrong.name == row.name or called == row.user_name)), None)
    if row is None:
        return Blame(wrong.name, Cause(Kind.RESULT), None, wrong.source)
    return Blame(row.name, Cause(Kind.RESULT), row.region, wrong.source, row.user_name)


def _gradients(blame: Blame, rows: Sequence[Row]) -> list[str]:
    """The gradients that the user gets which are computed next of a value, or it is, by name: those of one module, of
    its weight and its bias, take one or two steps more or less. None of a result that is called so already."""
    if blame.cause.kind == Kind.RESULT:
        return []
    readers: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.inputs:
            readers.setdefault(name, []).append(row)
    reached = [row for row in rows if row.name == blame.value]
    seen: set[str] = set()
    found: list[str] = []
    steps_left = None
    while reached and steps_left != 0:
        found += [row.user_name for row in reached if row.is_output and row.user_name.startswith("grad of ")]
        if found:
            steps_left = (_STEPS if steps_left is None else steps_left) - 1
        seen.update(row.name for row in reached)
        following = {reader.name: reader for row in reached for reader in readers.get(row.name, ())}
        reached = [row for name, row in following.items() if name not in seen]
    return found


def _about(row: Row) -> str:
    """What the user calls a value."""
    return f"{row.name} is {row.user_name}" if row.user_name else ""
