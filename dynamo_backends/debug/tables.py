"""The text and JSON of a comparison: ``side_by_side.txt``, ``side_by_side.json``, ``regions.txt``."""

from __future__ import annotations

import collections
import json

from tabulate import tabulate

from ..artifacts import CompiledGraph, Region
from ..exporter.locations import source_line
from ..exporter.translate import value_names
from ..numerics.distance import Distance
from .rows import GraphComparison, Row

_LEGEND = """\
mark: '=' eager's bits   '~' another rounding   '!' wrong by itself   '?' different each time   ' ' not compared
onnx, eager: largest absolute error against float64, each on its own upstream values (propagated)
session: the same in the session that really ran, where its model still has the value
local: the node alone on eager's inputs, onnx | eager against float64 on the same, or against eager (| 0) where that is
       no more than rounding; ulp: onnx's, in last places
"""


def side_by_side_text(comparison: GraphComparison, region: Region) -> str:
    """The table of one region: its inputs, then its nodes in execution order."""
    rows = rows_of_region(comparison, region)
    table = [
        [
            i,
            row.mark,
            row.name + (" >" if row.is_output else ""),
            row.operator.removeprefix("aten.").removesuffix(".default"),
            f"{row.dtype} {'x'.join(map(str, row.shape)) or 'scalar'}",
            _number(row.onnx),
            _number(row.eager),
            _number(row.session),
            f"{_number(row.local_onnx)} | {_number(row.local_eager)}" if row.local_onnx else "",
            f"{row.local_onnx.max_ulp:.3g}" if row.local_onnx else "",
            row.module,
            _short(row.source) + (f"  {row.complaint}" if row.complaint else ""),
        ]
        for i, row in enumerate(rows)
    ]
    headers = ["#", "", "value", "operator", "type", "onnx", "eager", "session", "local", "ulp", "module", "source"]
    note = f"note: {comparison.note}\n" if comparison.note else ""
    body = tabulate(table, headers=headers, tablefmt="simple", disable_numparse=True)
    return f"verdict of the graph: {comparison.verdict}\n{note}{_LEGEND}\n{body}\n"


def side_by_side_json(comparison: GraphComparison, region: Region) -> str:
    """The same rows with every measure, for programs."""
    rows = [row.as_json() for row in rows_of_region(comparison, region)]
    return json.dumps({"verdict": comparison.verdict, "note": comparison.note, "rows": rows}, indent=1)


def rows_of_region(comparison: GraphComparison, region: Region) -> list[Row]:
    """The values a region reads, whatever computed them, and those it computes."""
    read = {name for item in region.inputs for name in value_names(item.node)}
    return [row for row in comparison.rows if row.region == region.index or row.name in read]


def regions_text(graph: CompiledGraph) -> str:
    """What went to ONNX Runtime, what stayed in PyTorch, and why."""
    split, coverage = graph.split, graph.split.coverage
    lines = [
        f"{graph.name}: {coverage.share:.1%} of the operators on ONNX Runtime, in {len(split.regions)} region(s)",
        "",
    ]
    for region in split.regions:
        counted = collections.Counter(str(node.target) for node in region.operators)
        lines.append(f"region_{region.index}: {len(region.operators)} operators")
        lines.append(f"  inputs:  {', '.join(item.node.name for item in region.inputs)}")
        lines.append(f"  outputs: {', '.join(item.node.name for item in region.outputs)}")
        lines.extend(f"  {number:5d}  {target}" for target, number in counted.most_common())
        lines.append("")
    in_pytorch = coverage.in_pytorch
    lines.append(f"PyTorch: {len(in_pytorch)} operators")
    table = [
        [node.name, str(node.target), str(reason), _short(source_line(node))] for node, reason in in_pytorch.items()
    ]
    if table:
        lines.append(tabulate(table, headers=["node", "operator", "why", "source"], tablefmt="simple"))
    return "\n".join(lines) + "\n"


def _number(item: Distance | None) -> str:
    if item is None:
        return ""
    if item.nonfinite:
        return f"{item.nonfinite} NaN/Inf"
    return "0" if item.max_abs == 0 else f"{item.max_abs:.2e}"


def _short(source: str) -> str:
    """The last two parts of a path: enough to find the file, short enough for a table."""
    return "/".join(source.split("/")[-2:])
