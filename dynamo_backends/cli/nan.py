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
    if analysis.origins:
        lines = _first(graph, analysis.origins[0])
        if len(analysis.origins) > 1:
            lines += ["", f"all {len(analysis.origins)}, in execution order:", _table(analysis.origins)]
    else:
        lines = [
            f"{graph.name}: no node produces NaN or infinity from finite inputs ({analysis.values} values checked)"
        ]
    if analysis.intended:
        title = "intended: from an infinite constant in the code, such as a mask, or from uninitialized memory"
        lines += ["", f"{title}:", _table(analysis.intended)]
    if analysis.graph_inputs:
        lines += ["", f"in the inputs and constants of the graph: {', '.join(analysis.graph_inputs)}"]
    if analysis.origins:
        lines += ["", try_next(arguments, "show", graph.reference, "--stage", "aten")]
    return "\n".join(lines) + "\n"


def _first(graph: DumpedGraph, origin: Origin) -> list[str]:
    row = origin.row
    where = "PyTorch" if row.region is None else f"region_{row.region}"
    lines = [
        f"{graph.name}: the first {origin.kind} is produced by {row.name} ({row.where or 'no source line'})",
        f"  operator  {row.operator}, {row.dtype} {'x'.join(map(str, row.shape)) or 'scalar'}, in {where}",
    ]
    lines += [f"  module    {row.module}"] if row.module else []
    lines += [f"  reason    {origin.why}"] if origin.why else []
    lines.append(f"  elements  {_counts(origin)}")
    lines += [f"  input     {name}: {_range(extent)}" for name, extent in origin.inputs.items()]
    lines += [f"  example   {_example(item)}" for item in origin.examples[:2]]
    lines.append(f"  then      {_then(origin)}")
    return lines


def _counts(origin: Origin) -> str:
    of = f"of {math.prod(origin.row.shape)}"
    if origin.onnx is None:
        return f"{origin.eager} {of} in eager; ONNX Runtime does not have the value, it computes several nodes as one"
    if origin.eager == origin.onnx:
        return f"{origin.eager} {of}, in eager and on ONNX Runtime"
    return f"{origin.onnx} {of} on ONNX Runtime, {'unknown' if origin.eager is None else origin.eager} in eager"


def _range(extent: Extent | None) -> str:
    if extent is None:
        return "integers"
    parts = [] if extent.smallest is None else [f"{extent.smallest:.4g} to {extent.largest:.4g}"]
    parts += [f"{count} {word}" for count, word in ((extent.nan, "NaN"), (extent.infinite, "infinite")) if count]
    return ", ".join(parts) or "empty"


def _example(element: NonfiniteElement) -> str:
    inputs = ", ".join(
        f"{name} = {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in element.inputs.items()
    )
    return f"[{', '.join(map(str, element.index))}] is {element.value}" + (f" where {inputs}" if inputs else "")


def _then(origin: Origin) -> str:
    """What becomes of it."""
    if origin.reaches:
        return f"it reaches {', '.join(row.user_name or row.name for row in origin.reaches[:3])}, returned by the graph"
    if not origin.ends_at:
        return "no result of the graph depends on it"
    last = origin.ends_at[-1]
    if origin.is_left_out:
        return (
            f"{last.name}, {last.operator} ({last.where or 'no source line'}), leaves it out; no result depends on it"
        )
    row = origin.depending[0]
    if not (row.extent is None or row.extent.is_finite):
        error = "which is not finite"
    elif row.eager is not None:
        error = f"eager's error against float64 is {row.eager.max_abs or 0:.2g}"
        error += f", ONNX Runtime's {row.error.max_abs or 0:.2g}" if row.error is not None else ""
    else:
        error = "eager and ONNX Runtime agree, which does not tell whether it is right"
    used = origin.used_by[0]
    then = f"{used.name}, {used.operator} ({used.where or 'no source line'}), makes finite numbers of it"
    return f"{then}, from which the result {row.name} is computed: {error}"


def _table(origins: Sequence[Origin]) -> str:
    rows = [
        (
            origin.row.name,
            origin.kind,
            origin.row.operator.removeprefix("aten."),
            origin.side,
            _short(origin),
            origin.row.module,
            origin.row.where,
        )
        for origin in origins
    ]
    return fit_table(rows, ["node", "kind", "operator", "in", "then", "module", "source"])


def _short(origin: Origin) -> str:
    if origin.reaches:
        return "in a result"
    if not origin.ends_at:
        return "unused"
    name = origin.ends_at[-1].name
    return f"left out by {name}" if origin.is_left_out else f"finite after {name}, used by a result"
