"""The verdict on one run: what its stages, its nodes and its results say together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .captured import Finding
from .rows import OK, Blame, GraphComparison, Row

_SHOWN = 3
"""How many unchecked things the note names; the manifest has all."""


def conclude(comparison: GraphComparison, findings: Sequence[Finding]) -> GraphComparison:
    """The verdict on a run.

    The earliest stage that changed what is computed is the culprit: what comes after it only carries the fault on.
    Where no stage is, it is the node or rewrite that the comparison of the nodes names. A result that is wrong although
    nothing by itself is, is a fault too.

    Args:
        comparison: of the nodes of the compiled graph.
        findings: what the earlier stages and the results say, in the order of the stages.
    """
    unchecked = [*comparison.unchecked, *(item for finding in findings for item in finding.unchecked)]
    culprit = next((finding.culprit for finding in findings if finding.culprit is not None), None)
    wrong = [item for finding in findings for item in finding.wrong]
    verdict, notes, blame = comparison.verdict, [comparison.note], comparison.blame
    if culprit is not None:
        verdict, notes = culprit.verdict, [culprit.said]
        blame = Blame(culprit.node, None, culprit.cause, culprit.source)
        if not comparison.ok:
            notes.append(f"the graph after it {comparison.verdict}")
    elif comparison.ok and wrong:
        verdict = f"diverges at {wrong[0]}"
        because = next((finding.because for finding in findings if finding.because), "")
        notes = [because or "no stage, no pass and no node by itself explains it"]
    notes.extend(_about(row) for row in comparison.rows if blame is not None and row.name == blame.value)
    if unchecked and verdict == OK:
        more = f" and {len(unchecked) - _SHOWN} more" if len(unchecked) > _SHOWN else ""
        notes.append(f"not checked: {'; '.join(unchecked[:_SHOWN])}{more}")
    note = "; ".join(filter(None, notes))
    return dataclasses.replace(comparison, verdict=verdict, note=note, unchecked=unchecked, blame=blame)


def _about(row: Row) -> str:
    """What the user calls a value, and the library's line where it is not computed in the user's own files."""
    parts = [f"is {row.user_name}" if row.user_name else "", f"is at {row.library_line}" if row.library_line else ""]
    said = " and ".join(filter(None, parts))
    return f"{row.name} {said}" if said else ""
