"""The verdict on one run, from the comparisons of its stages, nodes and results."""

from __future__ import annotations

import collections
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

_STEPS = 3
"""The gradients of one module, of its weight and its bias, are at most so many nodes apart."""

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
    of_findings = [item for finding in findings for item in finding.unchecked]
    unchecked = list(dict.fromkeys([*comparison.unchecked, *of_findings]))
    culprits = [finding.culprit for finding in findings if finding.culprit is not None]
    wrong = [item for finding in findings for item in finding.wrong]
    blame, notes, not_comparable = comparison.blame, [comparison.note], comparison.not_comparable
    if culprits:
        found = next(finding for finding in findings if finding.culprit is not None)
        sizes = sizes if found.sizes is None else found.sizes
        row = comparison.row_of(culprits[0].value)
        blame = dataclasses.replace(culprits[0], user_name=row.user_name if row is not None else "")
        notes, not_comparable = [str(blame.difference)], ""
        if not comparison.ok:
            after = comparison.blame and _with_code(comparison.blame, comparison.row_of(comparison.blame.value))
            notes.append(f"the graph after it {dataclasses.replace(comparison, blame=after).verdict}")
    elif comparison.ok and wrong:
        notes = ["no stage, no pass and no node by itself explains it"]
        blame = _with_row(wrong[0], comparison.rows)
    if blame is not None:
        row = comparison.row_of(blame.value)
        elements = blame.difference.elements
        if elements is None and row is not None and not culprits:
            elements = row.wrong_elements
        blame = dataclasses.replace(
            _with_code(blame, row),
            gradients=_gradients(blame, comparison.rows),
            elements=elements,
        )
        notes += [elements.text] if elements is not None else []
        notes += [f"{row.name} is {row.user_name}"] if row is not None and row.user_name else []
    elif unchecked and not not_comparable:
        more = f" and {len(unchecked) - _MOST_UNCHECKED} more" if len(unchecked) > _MOST_UNCHECKED else ""
        notes.append(f"not checked: {'; '.join(unchecked[:_MOST_UNCHECKED])}{more}")
    errors = [(item.value, item.difference) for item in (*culprits, *wrong)]
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


def _with_code(blame: Blame, row: Row | None) -> Blame:
    """Adds the module, and the line of the pass or the converter."""
    return dataclasses.replace(
        blame,
        module=blame.module or (row.module if row is not None else ""),
        code=blame.code or _code(blame, row),
        has_own_converter=row is not None and row.is_registered,
    )


def _code(blame: Blame, row: Row | None) -> str:
    """The line of the pass or the converter that is to blame; ``""`` if it is not known."""
    if blame.cause.kind == CauseKind.PASS:
        return next((written_at(item.written) for item in all_passes() if item.name == blame.cause.name), "")
    return row.converter if row is not None and blame.cause.kind == CauseKind.NODE else ""


def _with_row(wrong: Blame, rows: Sequence[Row]) -> Blame:
    """Names a wrong result as its row, if it has one."""
    row = next((row for row in rows if row.is_output and wrong.value in (row.name, row.user_name)), None)
    if row is None:
        return wrong
    return dataclasses.replace(wrong, value=row.name, region=row.region, user_name=row.user_name)


def _gradients(blame: Blame, rows: Sequence[Row]) -> list[str]:
    """The names of the nearest gradients that depend on the blamed value; none if a result is blamed."""
    if blame.cause.kind == CauseKind.RESULT:
        return []
    readers: collections.defaultdict[str, dict[str, Row]] = collections.defaultdict(dict)
    for row in rows:
        for name in row.inputs:
            readers[name][row.name] = row
    reached = {row.name: row for row in rows if row.name == blame.value and row.is_computed}
    seen: set[str] = set()
    gradients: list[str] = []
    steps = 0  # since the first gradient
    while reached and steps < _STEPS:
        gradients += [
            row.user_name for row in reached.values() if row.is_output and row.user_name.startswith("grad of ")
        ]
        steps += bool(gradients)
        seen.update(reached)
        following = {name: reader for row in reached for name, reader in readers[row].items()}
        reached = {name: reader for name, reader in following.items() if name not in seen}
    return gradients
