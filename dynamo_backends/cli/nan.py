"""``dynamo-backends nan GRAPH``: the first node that produces NaN or infinity from finite inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, for_each_graph, try_next

if TYPE_CHECKING:
    from ..dumps.nonfinite import Birth, Nonfinite
    from ..dumps.reading import DumpedGraph
    from ..dumps.schema import ElementEntry, ExtentEntry

DETAILS = "Also reports values that are masked later, and whether eager has them too. Exit code 1: a node produces one."

add_arguments = add_graph_arguments


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.nonfinite import find_nonfinite

    return for_each_graph(
        arguments,
        find_nonfinite,
        text=lambda graph, analysis: _text(graph, analysis, arguments),
        is_wrong=lambda analysis: bool(analysis.births),
    )


def _text(graph: DumpedGraph, analysis: Nonfinite, arguments: argparse.Namespace) -> str:
    if analysis.births:
        lines = _first(graph, analysis.births[0])
        if len(analysis.births) > 1:
            lines += ["", f"all {len(analysis.births)}, in execution order:", _table(analysis.births)]
    else:
        lines = [
            f"{graph.name}: no node produces NaN or infinity from finite inputs ({analysis.values} values checked)"
        ]
    if analysis.meant:
        title = "intended: from an infinite constant in the code, such as a mask, or from uninitialized memory"
        lines += ["", f"{title}:", _table(analysis.meant)]
    if analysis.given:
        lines += ["", f"in the inputs and constants of the graph: {', '.join(analysis.given)}"]
    if analysis.births:
        lines += ["", try_next(arguments, "show", graph.reference, "--stage", "aten")]
    return "\n".join(lines) + "\n"


def _first(graph: DumpedGraph, birth: Birth) -> list[str]:
    where = "PyTorch" if birth.region is None else f"region_{birth.region}"
    lines = [
        f"{graph.name}: the first {birth.kind} is produced by {birth.node} ({birth.source or 'no source line'})",
        f"  operator  {birth.operator}, {birth.dtype} {'x'.join(map(str, birth.shape)) or 'scalar'}, in {where}",
    ]
    if birth.module:
        lines.append(f"  module    {birth.module}")
    if birth.why:
        lines.append(f"  reason    {birth.why}")
    lines.append(f"  elements  {_counts(birth)}")
    lines += [f"  input     {item.name}: {_range(item.extent)}" for item in birth.inputs]
    lines += [f"  example   {_example(item)}" for item in birth.examples[:2]]
    lines.append(f"  then      {_then(birth)}")
    return lines


def _counts(birth: Birth) -> str:
    of = f"of {birth.elements}"
    if birth.side == "both" and birth.eager == birth.onnx:
        return f"{birth.eager} {of}, in eager and on ONNX Runtime"
    eager, onnx = ("unknown" if number is None else str(number) for number in (birth.eager, birth.onnx))
    only = ", only if intermediate values are not graph outputs" if birth.only_in_session else ""
    return f"{onnx} {of} on ONNX Runtime, {eager} in eager{only}"


def _range(extent: ExtentEntry | None) -> str:
    if extent is None:
        return "integers"
    parts = [] if extent.smallest is None else [f"{extent.smallest:.4g} to {extent.largest:.4g}"]
    parts += [f"{count} {word}" for count, word in ((extent.nan, "NaN"), (extent.infinite, "infinite")) if count]
    return ", ".join(parts) or "empty"


def _example(element: ElementEntry) -> str:
    inputs = ", ".join(
        f"{name} = {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in element.inputs.items()
    )
    return f"[{', '.join(map(str, element.index))}] is {element.value}" + (f" where {inputs}" if inputs else "")


def _then(birth: Birth) -> str:
    if birth.reaches:
        return f"it reaches {', '.join(birth.reaches[:3])}, returned by the graph"
    if birth.ends_at:
        name, operator, source = birth.ends_at[-1]
        return f"it is masked by {name}, {operator} ({source or 'no source line'}), and reaches no result"
    return "no result of the graph depends on it"


def _table(births: Sequence[Birth]) -> str:
    rows = [
        (
            birth.node,
            birth.kind,
            birth.operator.removeprefix("aten."),
            birth.side,
            "result" if birth.reaches else (f"masked by {birth.ends_at[-1][0]}" if birth.ends_at else "unused"),
            birth.module,
            birth.source,
        )
        for birth in births
    ]
    return fit_table(rows, ["node", "kind", "operator", "in", "then", "module", "source"])
