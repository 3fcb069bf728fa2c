"""The verdict on one run, from the comparisons of its stages, nodes and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from passes.engine.manager import all_passes
from passes.engine.origins import written_at

from ..dumps.blame import CauseKind
from ..dumps.schema import Error
from ..numerics.rule import FORMATS
from ..runtime.providers import Provider, only_cpu, options_for_float32, provider_name
from .chosen_runs import SizesByName
from .rows import Blame, Finding, GraphComparison, Row

_BFLOAT16_ERROR = 4 * FORMATS["bfloat16"].epsilon
"""The relative error of a provider that computes float32 as bfloat16."""

_MOST_UNCHECKED = 3
"""How many unchecked things the note names; the manifest has all."""


def conclude(comparison: GraphComparison, findings: Sequence[Finding], sizes: SizesByName) -> GraphComparison:
    """The verdict on a run.

    The earliest stage that changed the results is the culprit: later ones only propagate the fault. Without one, it is
    the node or rewrite that the comparison of the nodes blames. A wrong result is a fault even if nothing explains it.
    ``findings`` are those on the earlier stages and the results, in the order of the stages.
    """
    unchecked = list(dict.fromkeys([*comparison.unchecked, *(item for found in findings for item in found.unchecked)]))
    culprits = [(found.culprit, found.sizes) for found in findings if found.culprit is not None]
    wrong = [item for found in findings for item in found.wrong]
    blame, notes, not_comparable = comparison.blame, [comparison.note], comparison.not_comparable
    if culprits:
        blame, of_culprit = culprits[0]
        sizes = sizes if of_culprit is None else of_culprit
        notes, not_comparable = [str(blame.difference)], ""
        if not comparison.ok:
            after = comparison.blame and _with_row(comparison.blame, comparison.rows)
            notes.append(f"the graph after it {dataclasses.replace(comparison, blame=after).verdict}")
    elif comparison.ok and wrong:
        blame, notes = wrong[0], ["no stage, no pass and no node by itself explains it"]
    if blame is not None:
        blame = _with_row(blame, comparison.rows)
        row, elements = comparison.row_of(blame.value), blame.difference.elements
        if elements is None and row is not None and not culprits:
            elements = row.wrong_elements
        blame = dataclasses.replace(blame, gradients=_gradients(blame, comparison.rows), elements=elements)
        notes += [elements.text] if elements is not None else []
        notes += [f"{row.name} is {row.user_name}"] if row is not None and row.user_name else []
        notes.append(blame.cause.next_step)
    elif unchecked and not not_comparable:
        more = f" and {len(unchecked) - _MOST_UNCHECKED} more" if len(unchecked) > _MOST_UNCHECKED else ""
        notes.append(f"not checked: {'; '.join(unchecked[:_MOST_UNCHECKED])}{more}")
    errors = [(item.value, item.difference) for item in (*(culprit for culprit, _ in culprits), *wrong)]
    return dataclasses.replace(
        comparison,
        blame=blame,
        not_comparable=not_comparable,
        note="; ".join(filter(None, notes)),
        unchecked=unchecked,
        sizes=sizes,
        faults=[Error(name, found.ours, found.eager) for name, found in errors if found.ours is not None],
    )


def with_precision(comparison: GraphComparison, providers: Sequence[Provider]) -> GraphComparison:
    """Adds a note if an execution provider that computes float32 in bfloat16 would explain the error."""
    row = comparison.row_of(comparison.blame.value) if comparison.blame is not None else None
    if row is None or row.region is None or row.dtype != "float32" or only_cpu(providers):
        return comparison
    if row.error is None or row.error.is_rounding or row.error.relative > _BFLOAT16_ERROR:
        return comparison
    name, options = provider_name(providers[0]), options_for_float32(providers[0])
    note = f"the error is no larger than rounding to bfloat16 makes: {name} may compute float32 with fewer digits"
    note += f"; the options {options} ask for float32" if options else ""
    return dataclasses.replace(comparison, note="; ".join(filter(None, [comparison.note, note])))


def _with_row(blame: Blame, rows: Sequence[Row]) -> Blame:
    """Adds what the row of a value says, and the line of the pass or the converter. A result is named as its row."""
    kind, code = blame.cause.kind, blame.code
    if kind == CauseKind.PASS:
        code = code or next((written_at(item.written) for item in all_passes() if item.name == blame.cause.name), "")
    row = next((row for row in rows if row.name == blame.value), None)
    if kind == CauseKind.RESULT:
        row = next((row for row in rows if row.is_output and blame.value in (row.name, row.user_name)), None)
    if row is None:
        return dataclasses.replace(blame, code=code)
    return dataclasses.replace(
        blame,
        value=row.name,
        region=row.region if kind == CauseKind.RESULT else blame.region,
        user_name=row.user_name,
        module=blame.module or row.module,
        code=code or (row.converter if kind == CauseKind.NODE else ""),
        has_own_converter=row.is_registered,
    )


def _gradients(blame: Blame, rows: Sequence[Row]) -> list[str]:
    """The names of the gradients that depend on the blamed value, in execution order; none if a result is blamed."""
    reached = {blame.value} if blame.cause.kind != CauseKind.RESULT else set()
    gradients: list[str] = []
    for row in rows:
        if row.is_computed and (row.name in reached or not reached.isdisjoint(row.inputs)):
            reached.add(row.name)
            gradients += [row.user_name] if row.is_output and row.user_name.startswith("grad of ") else []
    return gradients
