"""``dynamo-backends nan GRAPH``: the first node that produces NaN or infinity from finite inputs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, for_each_graph, try_next

if TYPE_CHECKING:
    from ..dumps.nonfinite import Nonfinite, Origin
    from ..dumps.reading import DumpedGraph
    from ..dumps.schema import RowEntry
    from ..numerics.element_records import Extent, NonfiniteElement

DETAILS = (
    "Reads what the compared run recorded. Also reports what later nodes leave out, and whether eager has it too. "
    "Exit code 1: a node produces one."
)

add_arguments = add_graph_arguments


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.nonfinite import find_nonfinite

    return for_each_graph(
        arguments,
        find_nonfinite,
        text=lambda graph, analysis: _text(graph, analysis, arguments),
        is_wrong=lambda analysis: bool(analysis.origins),
    )


def _text(graph: DumpedGraph, analysis: Nonfinite, arguments: argparse.Namespace) -> str:
    checked = f"({analysis.values} values checked)"
    lines = [f"{graph.name}: no node produces NaN or infinity from finite inputs {checked}"]
    if analysis.origins:
        lines = [*_first(graph, analysis.origins[0]), "", _table(analysis.origins)]
    if analysis.intended:
        title = "intended: from an infinite constant in the code, such as a mask, or from uninitialized memory"
        lines += ["", f"{title}:", _table(analysis.intended)]
    if analysis.graph_inputs:
        lines += ["", f"in the inputs and constants of the graph: {', '.join(analysis.graph_inputs)}"]
    if any(origin.used_by for origin in analysis.origins):
        lines += ["", "What is computed from it may be wrong, though it is finite."]
    if analysis.origins:
        lines += ["", try_next(arguments, "show", graph.reference, "--stage", "aten")]
    return "\n".join(lines) + "\n"


def _first(graph: DumpedGraph, origin: Origin) -> list[str]:
    row = origin.row
    where = "PyTorch" if row.region is None else f"region_{row.region}"
    lines = [
        f"{graph.name}: the first {origin.kind} is produced by {row.name} ({_place(row)})",
        f"  operator  {row.operator}, {row.dtype} {'x'.join(map(str, row.shape)) or 'scalar'}, in {where}",
    ]
    lines += [f"  module    {row.module}"] if row.module else []
    counts = {"in eager": origin.eager, "on ONNX Runtime": "not known" if origin.onnx is None else origin.onnx}
    counted = ", ".join(f"{count} {side}" for side, count in counts.items())
    lines.append(f"  elements  of {math.prod(row.shape)}: {counted}")
    lines += [f"  input     {name}: {_range(extent)}" for name, extent in origin.inputs.items()]
    lines += [f"  example   {_example(item)}" for item in origin.examples[:2]]
    return lines


def _place(row: RowEntry) -> str:
    return row.where or "no source line"


def _range(extent: Extent | None) -> str:
    if extent is None:
        return "integers"
    parts = [] if extent.smallest is None else [f"{extent.smallest:.4g} to {extent.largest:.4g}"]
    parts += [f"{count} {word}" for count, word in ((extent.nan, "NaN"), (extent.infinite, "infinite")) if count]
    return ", ".join(parts) or "empty"


def _example(element: NonfiniteElement) -> str:
    read = [
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in element.inputs.items()
    ]
    return f"{list(element.index)} is {element.value}" + (f" where {', '.join(read)}" if read else "")


def _table(origins: Sequence[Origin]) -> str:
    rows = [
        (item.row.name, item.kind, item.row.operator.removeprefix("aten."), item.side, _then(item), item.row.module,
         item.row.where)
        for item in origins
    ]  # fmt: skip
    return fit_table(rows, ["node", "kind", "operator", "in", "then", "module", "source"])


def _then(origin: Origin) -> str:
    """What becomes of it."""
    if origin.reaches:
        return f"in the result {', '.join(row.user_name or row.name for row in origin.reaches[:3])}"
    if origin.used_by:
        return f"{origin.used_by[0].name} ({_place(origin.used_by[0])}) computes finite numbers from it"
    return f"left out by {origin.ends_at[-1].name} ({_place(origin.ends_at[-1])})" if origin.ends_at else "unused"
