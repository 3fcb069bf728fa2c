"""``dynamo-backends nan GRAPH``: the first node with NaN or infinity that its inputs did not have."""

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

DESCRIPTION = (
    "Says where NaN and infinities come from in the compared run of a graph, also where they are "
    "masked later, and whether eager has them too. Exit code 1 if one is born in a node."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows where NaN and infinities come from; returns the exit code."""
    from ..dumps.nonfinite import find_nonfinite

    return for_each_graph(
        arguments,
        find_nonfinite,
        text=lambda graph, found: _text(graph, found, arguments),
        is_wrong=lambda found: bool(found.births),
    )


def _text(graph: DumpedGraph, found: Nonfinite, arguments: argparse.Namespace) -> str:
    lines = []
    if found.births:
        lines += _first(graph, found.births[0])
        if len(found.births) > 1:
            lines += ["", f"all {len(found.births)}, in the order they run:", _table(found.births)]
    else:
        lines.append(f"{graph.name}: no node makes NaN or infinities of finite inputs; {found.values} values")
    if found.meant:
        title = "asked for by an infinite number in the code, as of a mask, or memory that is not written yet"
        lines += ["", f"{title}:", _table(found.meant)]
    if found.given:
        lines += ["", f"given to the graph: {', '.join(found.given)}"]
    if found.births:
        lines += ["", try_next(arguments, "show", graph.reference, "--stage", "aten")]
    return "\n".join(lines) + "\n"


def _first(graph: DumpedGraph, birth: Birth) -> list[str]:
    where = "PyTorch" if birth.region is None else f"region_{birth.region}"
    lines = [
        f"{graph.name}: the first {birth.kind} is born in {birth.node} ({birth.source or 'no source line'})",
        f"  operator  {birth.operator}, {birth.dtype} {'x'.join(map(str, birth.shape)) or 'scalar'}, in {where}",
    ]
    if birth.module:
        lines.append(f"  module    {birth.module}")
    if birth.why:
        lines.append(f"  why       {birth.why}")
    lines.append(f"  elements  {_counts(birth)}")
    lines += [f"  input     {item.name}: {_range(item.extent)}" for item in birth.inputs]
    lines += [f"  example   {_example(item)}" for item in birth.examples[:2]]
    lines.append(f"  then      {_then(birth)}")
    return lines


def _counts(birth: Birth) -> str:
    of = f"of {birth.elements}"
    if birth.side == "both" and birth.eager == birth.onnx:
        return f"{birth.eager} {of}, in eager as on ONNX Runtime"
    eager = "not known" if birth.eager is None else str(birth.eager)
    ours = "not known" if birth.onnx is None else str(birth.onnx)
    said = f"{ours} {of} on ONNX Runtime, {eager} in eager"
    return said + (", only in the session as it ran: not with its values exposed" if birth.only_in_session else "")


def _range(extent: ExtentEntry | None) -> str:
    if extent is None:
        return "integers"
    parts = [] if extent.smallest is None else [f"{extent.smallest:.4g} to {extent.largest:.4g}"]
    parts += [f"{count} {word}" for count, word in ((extent.nan, "NaN"), (extent.infinite, "infinite")) if count]
    return ", ".join(parts) or "empty"


def _example(element: ElementEntry) -> str:
    inputs = ", ".join(f"{name} = {_number(value)}" for name, value in element.inputs.items())
    return f"[{', '.join(map(str, element.index))}] is {element.value}" + (f" where {inputs}" if inputs else "")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


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
