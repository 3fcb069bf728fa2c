"""``dynamo-backends profile GRAPH``: the time of a dumped graph by operator, by module and by node."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, count_text, for_each_graph, positive, try_next

if TYPE_CHECKING:
    from ..dumps.operator_times import NodeTime, OperatorTimes
    from ..dumps.reading import DumpedGraph

DETAILS = "Runs the regions on their recorded inputs under ONNX Runtime's profiler. Times are milliseconds per run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    for option, default, what in (("--runs", 20, "runs of each region"), ("--top", 15, "rows of each table")):
        parser.add_argument(option, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads of ONNX Runtime (default: as in the dumped run)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.operator_times import operator_times

    return for_each_graph(
        arguments,
        lambda graph: operator_times(graph, runs=arguments.runs, threads=arguments.threads),
        text=lambda graph, times: _text(graph, times, arguments),
    )


def _text(graph: DumpedGraph, times: OperatorTimes, arguments: argparse.Namespace) -> str:
    rows, total = times.rows, sum(row.milliseconds for row in times.rows)
    text = (
        f"{graph.name}: {total:.3f} ms per run in {len(rows)} nodes, {times.milliseconds:.3f} ms with ONNX Runtime's "
        f"overhead ({count_text(len(graph.regions), 'region')}, {count_text(times.threads, 'thread')}, "
        f"{arguments.runs} runs)\n"
    )
    if graph.entry.in_pytorch:
        text += f"operators in PyTorch, not measured: {len(graph.entry.in_pytorch)}\n"

    def table(title: str, cells: Sequence[Sequence[object]], *headers: str) -> str:
        shown = f"{title}, the {arguments.top} slowest of {len(cells)}" if len(cells) > arguments.top else title
        return f"\n{shown}:\n{fit_table(cells[: arguments.top], ['ms', 'share', *headers])}\n"

    def time(milliseconds: float) -> Sequence[str]:
        return f"{milliseconds:.3f}", f"{milliseconds / (total or 1):.1%}"

    def grouped(name_of: Callable[[NodeTime], str]) -> Sequence[Sequence[object]]:
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(name_of(row), []).append(row.milliseconds)
        slowest = sorted(groups.items(), key=lambda item: -sum(item[1]))
        return [(*time(sum(found)), len(found), name) for name, found in slowest]

    nodes = [
        (*time(row.milliseconds), row.operator.removeprefix("com.microsoft."), row.fx_node, row.module, row.source)
        for row in rows
    ]
    text += table("by operator", grouped(lambda row: row.operator), "nodes", "operator")
    text += table("by module, without submodules", grouped(_module), "nodes", "module")
    text += table("by node", nodes, "operator", "FX node", "module", "source")
    return text + "\n" + try_next(arguments, "show", graph.reference, "--stage", "aten") + "\n"


def _module(row: NodeTime) -> str:
    return (row.module or "(the model)") if row.fx_node else "(not attributed)"
