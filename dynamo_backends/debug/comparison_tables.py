"""The text and JSON of a comparison: ``side_by_side.txt``, ``side_by_side.json``, ``regions.txt``."""

from __future__ import annotations

import collections

import msgspec

from ..common.text_table import text_table
from ..dumps.schema import ComparisonEntry
from ..graphs.artifacts import CompiledGraph, operator_name
from ..graphs.locations import user_name, where
from ..numerics.measure import Measure
from .rows import GraphComparison

_LEGEND = """\
mark     '=' eager's bits   '~' another rounding   '!' wrong by itself   '?' different each time   ' ' not compared
value    the FX node, 'name__1' for the second of several results; '>' what the graph returns; (your name of it)
onnx, eager
         largest absolute error against float64, each on its own upstream values (propagated)
session  the same in the session that really ran, where its model still has the value
local    the node by itself, on what it is given in the model: onnx | eager, against float64 on the same, or against
         eager (| 0) where that is no more than rounding
ulp      the local error of onnx in units in the last place
share    the local error as a multiple of what rounding explains at that element: above 1 the node is wrong
region   which ONNX model computes it; 'PyTorch': it does not run on ONNX Runtime
source   the line; of a library's also the line of your own files that led there; what is wrong with a type follows
'3 NaN/Inf' instead of a number: so many elements are NaN or infinite on one side only
"""


def side_by_side_text(comparison: GraphComparison) -> str:
    """The table of a graph: what was computed, in execution order, and then what the graph takes and holds."""
    computed = [row for row in comparison.rows if row.is_computed]
    table = [
        [
            i,
            row.mark,
            row.name + (" >" if row.is_output else "") + (f" ({row.user_name})" if row.user_name else ""),
            row.operator.removeprefix("aten.").removesuffix(".default"),
            row.type,
            _number(row.onnx),
            _number(row.eager),
            _number(row.session),
            f"{_number(row.local_onnx)} | {_number(row.local_eager)}" if row.local_onnx else "",
            f"{row.local_onnx.max_ulp:.3g}" if row.local_onnx else "",
            f"{row.local_onnx.share:.2g}" if row.local_onnx else "",
            "PyTorch" if row.region is None else row.region,
            row.module,
            row.where + (f"  {row.complaint}" if row.complaint else ""),
        ]
        for i, row in enumerate(computed)
    ]
    taken = [(row.name, row.user_name, row.type) for row in comparison.rows if not row.is_computed]
    note = f"note: {comparison.note}\n" if comparison.note else ""
    tables = text_table(table, _HEADERS), text_table(taken, ["what it takes", "your name", "type"])
    return f"verdict of the graph: {comparison.verdict}\n{note}{_LEGEND}\n{tables[0]}\n\n{tables[1]}\n"


_MEASURES = ["onnx", "eager", "session", "local", "ulp", "share"]
_HEADERS = ["#", "mark", "value", "operator", "type", *_MEASURES, "region", "module", "source"]


def side_by_side_json(comparison: GraphComparison) -> str:
    """The rows with every measure, what the graph takes among them, for programs; each row on a line of its own."""
    content = ComparisonEntry(verdict=comparison.verdict, note=comparison.note, rows=[])
    head = msgspec.json.encode(content).decode().removesuffix("]}")
    rows = ",\n".join(msgspec.json.encode(row.entry).decode() for row in comparison.rows)
    return f"{head}\n{rows}\n]}}\n"


def regions_text(graph: CompiledGraph) -> str:
    """What went to ONNX Runtime, what stayed in PyTorch, and why."""
    split, coverage = graph.split, graph.split.coverage
    lines = [
        f"{graph.name}: {coverage.share:.1%} of the operators on ONNX Runtime, in {len(split.regions)} region(s)",
        "",
    ]
    for region in split.regions:
        counted = collections.Counter(operator_name(node) for node in region.operators)
        lines.append(f"region_{region.index}: {len(region.operators)} operators")
        lines.append(f"  inputs:  {', '.join(user_name(item.node) or item.node.name for item in region.inputs)}")
        lines.append(f"  outputs: {', '.join(item.node.name for item in region.outputs)}")
        lines.extend(f"  {number:5d}  {target}" for target, number in counted.most_common())
        lines.append("")
    in_pytorch = coverage.in_pytorch
    lines.append(f"PyTorch: {len(in_pytorch)} operators")
    table = [[node.name, operator_name(node), str(reason), where(node)] for node, reason in in_pytorch.items()]
    if table:
        lines.append(text_table(table, ["node", "operator", "why", "source"]))
    return "\n".join(lines) + "\n"


def _number(item: Measure | None) -> str:
    if item is None:
        return ""
    if item.nonfinite:
        return f"{item.nonfinite} NaN/Inf"
    return "0" if item.max_abs == 0 else f"{item.max_abs:.2e}"
