"""Formats the files ``side_by_side.txt`` and ``side_by_side.json``."""

from __future__ import annotations

import msgspec

from ..common.text_table import listed, text_table
from ..dumps.schema import ComparisonEntry
from ..numerics.rule import Measure
from .rows import MOST_WRONG_NODES, GraphComparison, Row

_LEGEND = """\
mark     '=' bitwise equal to eager on the same inputs   '~' within rounding   '!' wrong   '?' not deterministic
         ' ' not judged: the session that ran does not have it, or it is given (random numbers, side effects)
value    the FX node, 'name__1' for its second result; '>': a result of the graph; (your name of it)
error    largest absolute error against PyTorch on the same inputs; against its float64 from the step 'float64' on
limit    the tolerance of the element whose error is the largest multiple of it
share    that multiple: above 1 the value is wrong
step     the last check: 'equal' to eager bit for bit, 'eager', 'sums' (eager, and what sums may round), 'float64',
         'undefined' (without elements that nothing defines), 'perturbed' (and what perturbed inputs change)
with     nodes before it that are judged together with it: the session does not have their values
region   the ONNX model that computes it; 'PyTorch' if it does not run on ONNX Runtime
source   the line; for a library's line also the line in your files that called it; then a wrong dtype or shape
'3 NaN/Inf' instead of a number: 3 elements are NaN or infinite on one side only
"""


_SHOWN = 3
"""Nodes of a segment that the table names, the nearest first."""


def side_by_side_text(comparison: GraphComparison) -> str:
    """The table of computed values in execution order, then a table of the graph's arguments and attributes."""
    computed = [row for row in comparison.rows if row.is_computed]
    table = [
        [
            i,
            row.mark,
            row.name + (" >" if row.is_output else "") + (f" ({row.user_name})" if row.user_name else ""),
            row.operator.removeprefix("aten.").removesuffix(".default"),
            row.type,
            _number(row.error),
            _shown(row.error.limit) if row.error is not None and row.error.limit else "",
            f"{row.error.share:.2g}" if row.error is not None and row.error.share else "",
            row.step,
            listed(row.segment[::-1], _SHOWN),
            "PyTorch" if row.region is None else row.region,
            row.module,
            row.where + (f"  {row.complaint}" if row.complaint else ""),
        ]
        for i, row in enumerate(computed)
    ]
    details = _wrong_elements_text(comparison) + _wrong_nodes_text(comparison)
    details += "\n" if details else ""
    arguments = [(row.name, row.user_name, row.type) for row in comparison.rows if not row.is_computed]
    note = f"note: {comparison.note}\n" if comparison.note else ""
    tables = text_table(table, _HEADERS), text_table(arguments, ["argument", "your name", "type"])
    return f"verdict of the graph: {comparison.verdict}\n{note}{details}{_LEGEND}\n{tables[0]}\n\n{tables[1]}\n"


def _wrong_elements_text(comparison: GraphComparison) -> str:
    """The worst elements of the blamed value; the ranges of its inputs if it is not elementwise."""
    blame = comparison.blame
    found = blame.elements if blame is not None else None
    if blame is None or found is None:
        return ""
    names = list(found.worst[0].inputs)
    rows = [
        [
            str(list(item.index)),
            *(_value(item.inputs[name]) for name in names),
            _value(item.actual),
            _value(item.expected),
            "" if item.limit is None else f"{item.limit:.3g}",
        ]
        for item in found.worst
    ]
    text = f"\n{blame.value}: {found.text}\n" + text_table(rows, ["worst", *names, "actual", "expected", "tolerance"])
    row = comparison.row_of(blame.value)
    if row is not None and not names:
        text += "".join(
            f"\nreads {item.name}, {item.type}{_range(item)}" for item in map(comparison.row_of, row.inputs) if item
        )
    return f"{text}\n"


def _wrong_nodes_text(comparison: GraphComparison) -> str:
    """The nodes that are wrong by themselves, if there are several."""
    wrong = comparison.wrong_nodes
    if not wrong[1:]:
        return ""
    shown = [row.wrong_node for row in wrong[:MOST_WRONG_NODES]]
    table = [
        [row.value, row.operator, _number(item.error), row.module, row.source, row.code, row.elements]
        for row, item in zip(shown, wrong, strict=False)
    ]
    head = f"{len(wrong)} nodes are wrong by themselves, the largest relative errors first:"
    more = f"\nand {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
    headers = ["value", "operator", "error", "module", "source", "converter", "elements"]
    return f"\n{head}\n{text_table(table, headers)}{more}\n"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _range(row: Row) -> str:
    found = row.extent
    if found is None or found.smallest is None or found.largest is None:
        return ""
    nonfinite = f", {found.nan + found.infinite} NaN or infinite" if not found.is_finite else ""
    return f", {found.smallest:.3g} to {found.largest:.3g}{nonfinite}"


_MEASURES = ["error", "limit", "share", "step", "with"]
_HEADERS = ["#", "mark", "value", "operator", "type", *_MEASURES, "region", "module", "source"]


def side_by_side_json(comparison: GraphComparison) -> str:
    """All rows, arguments included, with every measure; one row a line."""
    content = ComparisonEntry(verdict=comparison.verdict, note=comparison.note, rows=[])
    head = msgspec.json.encode(content).decode().removesuffix("]}")
    rows = ",\n".join(msgspec.json.encode(row.entry).decode() for row in comparison.rows)
    return f"{head}\n{rows}\n]}}\n"


def _number(item: Measure | None) -> str:
    if item is None:
        return ""
    if item.nonfinite:
        return f"{item.nonfinite} NaN/Inf"
    return _shown(item.max_abs)


def _shown(error: float) -> str:
    return "0" if error == 0 else f"{error:.2e}"
