"""``dynamo-backends profile GRAPH``: where the time of a dumped graph goes, by operator, by module and by node."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, add_repeat_arguments, for_each_graph, try_next

if TYPE_CHECKING:
    from ..dumps.operator_times import GroupTime, OperatorTime, RegionTimes
    from ..dumps.reading import DumpedGraph


DESCRIPTION = (
    "Runs the regions of a dumped graph on their recorded inputs under ONNX Runtime's profiler, and "
    "shows the time of each operator, module and node. Times are milliseconds a run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    add_repeat_arguments(parser, 20)
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of each table (default: 15; 0 for all)")


def run(arguments: argparse.Namespace) -> int:
    """Shows the times; returns the exit code."""
    from ..dumps.operator_times import operator_times

    return for_each_graph(
        arguments,
        lambda graph: operator_times(graph, runs=arguments.runs, threads=arguments.threads),
        text=lambda graph, times: _text(graph, times, arguments),
    )


def _text(graph: DumpedGraph, times: Sequence[RegionTimes], arguments: argparse.Namespace) -> str:
    from ..dumps.operator_times import by_module, by_operator

    rows = [row for item in times for row in item.rows]
    threads, regions = times[0].threads, len(times)
    text = (
        f"{graph.name}: {sum(row.milliseconds for row in rows):.3f} ms a run in {len(rows)} nodes, "
        f"{sum(item.milliseconds for item in times):.3f} ms with what ONNX Runtime does between them "
        f"({regions} region{'s' if regions > 1 else ''}, {threads} thread{'s' if threads > 1 else ''}, "
        f"{arguments.runs} runs)\n"
    )
    in_pytorch = graph.entry.in_pytorch
    if in_pytorch:
        text += f"operators that run in PyTorch, and are not measured: {len(in_pytorch)}\n"
    top = arguments.top if arguments.top > 0 else len(rows)
    operators, modules = by_operator(times), by_module(times)
    slowest = sorted(rows, key=lambda row: -row.milliseconds)
    without = "by module, each without the modules in it"
    text += f"\n{_title('by operator', len(operators), top)}{_groups(operators[:top], 'operator')}\n"
    text += f"\n{_title(without, len(modules), top)}{_groups(modules[:top], 'module')}\n"
    text += f"\n{_title('by node', len(slowest), top)}{_nodes(slowest[:top])}\n\n"
    return text + try_next(arguments, "show", graph.reference, "--stage", "aten") + "\n"


def _title(text: str, rows: int, top: int) -> str:
    return f"{text}, the {top} slowest of {rows}:\n" if rows > top else f"{text}:\n"


def _groups(groups: Sequence[GroupTime], header: str) -> str:
    rows = [
        (group.name or "(not attributed)", group.nodes, f"{group.milliseconds:.3f}", f"{group.share:.1%}")
        for group in groups
    ]
    return fit_table(rows, [header, "nodes", "ms", "share"])


def _nodes(rows: Sequence[OperatorTime]) -> str:
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
    return fit_table(table, ["ms", "share", "operator", "stands for", "module", "source"])
