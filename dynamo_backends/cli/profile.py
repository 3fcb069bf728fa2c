"""``dynamo-backends profile GRAPH``: the time of a dumped graph by operator, by module and by node."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, count_text, for_each_graph, positive, try_next

if TYPE_CHECKING:
    from ..dumps.operator_times import GroupTime, NodeTime, RegionTimes
    from ..dumps.reading import DumpedGraph

DETAILS = "Runs the regions on their recorded inputs under ONNX Runtime's profiler. Times are milliseconds per run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument(
        "--runs", type=int, default=20, metavar="N", help="number of runs of each region (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads of ONNX Runtime (default: as in the dumped run)"
    )
    parser.add_argument(
        "--top", type=int, default=15, metavar="N", help="rows of each table, 0 for all (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.operator_times import operator_times

    return for_each_graph(
        arguments,
        lambda graph: operator_times(graph, runs=arguments.runs, threads=arguments.threads),
        text=lambda graph, regions: _text(graph, regions, arguments),
    )


def _text(graph: DumpedGraph, regions: Sequence[RegionTimes], arguments: argparse.Namespace) -> str:
    from ..dumps.operator_times import by_module, by_operator

    rows = sorted((row for region in regions for row in region.rows), key=lambda row: -row.milliseconds)
    text = (
        f"{graph.name}: {sum(row.milliseconds for row in rows):.3f} ms per run in {len(rows)} nodes, "
        f"{sum(region.milliseconds for region in regions):.3f} ms with ONNX Runtime's overhead "
        f"({count_text(len(regions), 'region')}, {count_text(regions[0].threads, 'thread')}, {arguments.runs} runs)\n"
    )
    if graph.entry.in_pytorch:
        text += f"operators in PyTorch, not measured: {len(graph.entry.in_pytorch)}\n"
    top = arguments.top if arguments.top > 0 else len(rows)
    operators, modules = by_operator(regions), by_module(regions)
    text += f"\n{_title('by operator', len(operators), top)}{_totals(operators[:top], 'operator')}\n"
    text += f"\n{_title('by module, without submodules', len(modules), top)}{_totals(modules[:top], 'module')}\n"
    text += f"\n{_title('by node', len(rows), top)}{_nodes(rows[:top])}\n\n"
    return text + try_next(arguments, "show", graph.reference, "--stage", "aten") + "\n"


def _title(text: str, rows: int, top: int) -> str:
    return f"{text}, the {top} slowest of {rows}:\n" if rows > top else f"{text}:\n"


def _totals(totals: Sequence[GroupTime], header: str) -> str:
    rows = [
        (total.name or "(not attributed)", total.nodes, f"{total.milliseconds:.3f}", f"{total.share:.1%}")
        for total in totals
    ]
    return fit_table(rows, [header, "nodes", "ms", "share"])


def _nodes(rows: Sequence[NodeTime]) -> str:
    table = [
        (
            f"{row.milliseconds:.3f}",
            f"{row.share:.1%}",
            row.operator.removeprefix("com.microsoft."),
            ", ".join(row.fx_nodes) or "(not attributed)",
            row.module,
            row.sources[-1] if row.sources else "",
        )
        for row in rows
    ]
    return fit_table(table, ["ms", "share", "operator", "FX nodes", "module", "source"])
