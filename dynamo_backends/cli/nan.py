"""``dynamo-backends nan GRAPH``: the first node that produces NaN or infinity from finite inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, for_each_graph, try_next

if TYPE_CHECKING:
    from ..dumps.nonfinite import Nonfinite, Origin
    from ..dumps.reading import DumpedGraph
    from ..numerics.element_records import Extent, NonfiniteElement

DETAILS = "Also reports values that are masked later, and whether eager has them too. Exit code 1: a node produces one."

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
    where = "PyTorch" if origin.region is None else f"region_{origin.region}"
    lines = [
        f"{graph.name}: the first {origin.kind} is produced by {origin.node} ({origin.source or 'no source line'})",
        f"  operator  {origin.operator}, {origin.dtype} {'x'.join(map(str, origin.shape)) or 'scalar'}, in {where}",
    ]
    if origin.module:
        lines.append(f"  module    {origin.module}")
    if origin.why:
        lines.append(f"  reason    {origin.why}")
    lines.append(f"  elements  {_counts(origin)}")
    lines += [f"  input     {item.name}: {_range(item.extent)}" for item in origin.inputs]
    lines += [f"  example   {_example(item)}" for item in origin.examples[:2]]
    lines.append(f"  then      {_then(origin)}")
    return lines


def _counts(origin: Origin) -> str:
    of = f"of {origin.elements}"
    if origin.side == "both" and origin.eager == origin.onnx:
        return f"{origin.eager} {of}, in eager and on ONNX Runtime"
    eager, onnx = ("unknown" if number is None else str(number) for number in (origin.eager, origin.onnx))
    return f"{onnx} {of} on ONNX Runtime, {eager} in eager"


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
    if origin.reaches:
        return f"it reaches {', '.join(origin.reaches[:3])}, returned by the graph"
    if origin.ends_at:
        name, operator, source = origin.ends_at[-1]
        return f"it is masked by {name}, {operator} ({source or 'no source line'}), and reaches no result"
    return "no result of the graph depends on it"


def _table(origins: Sequence[Origin]) -> str:
    rows = [
        (
            origin.node,
            origin.kind,
            origin.operator.removeprefix("aten."),
            origin.side,
            "result" if origin.reaches else (f"masked by {origin.ends_at[-1][0]}" if origin.ends_at else "unused"),
            origin.module,
            origin.source,
        )
        for origin in origins
    ]
    return fit_table(rows, ["node", "kind", "operator", "in", "then", "module", "source"])
