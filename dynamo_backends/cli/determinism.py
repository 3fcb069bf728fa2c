"""``dynamo-backends determinism GRAPH``: values of a dumped graph that differ from run to run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .common import add_dump_arguments, add_graph_argument, fit_table, print_json, reporting_errors, try_next

if TYPE_CHECKING:
    from ..dumps.determinism import RegionDeterminism, UnstableValue
    from ..dumps.reading import DumpedGraph


def add_parser(commands: argparse._SubParsersAction, summary: str) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "determinism",
        help=summary,
        description="Runs the regions of a dumped graph again and again on their recorded inputs, and names the nodes "
        "whose values differ from run to run, or with another number of threads. Exit code 1 if one differs by more "
        "than rounding.",
    )
    add_graph_argument(parser)
    add_dump_arguments(parser)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="how often each runs again (default: 10)")
    parser.add_argument("--threads", type=int, metavar="N", help="of ONNX Runtime (default: as in the dumped run)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows what differs; returns the exit code."""
    return reporting_errors("determinism", lambda: _determinism(arguments))


def _determinism(arguments: argparse.Namespace) -> int:
    from ..dumps.determinism import find_unstable
    from ..dumps.reading import find_run

    graphs = find_run(arguments.dump).graphs_of(arguments.graph)
    found = [(graph, find_unstable(graph, runs=arguments.runs, threads=arguments.threads)) for graph in graphs]
    if arguments.json:
        print_json([{"graph": graph.reference, "regions": [item.as_json() for item in all_]} for graph, all_ in found])
    else:
        sys.stdout.write("\n".join(_text(graph, all_, arguments.runs, arguments.dump) for graph, all_ in found))
    return int(not all(item.is_stable for _, all_ in found for item in all_))


def _text(graph: DumpedGraph, regions: Sequence[RegionDeterminism], runs: int, dump: str | None) -> str:
    if not regions:
        return f"{graph.name}: nothing of it ran on ONNX Runtime\n"
    values = [(item, "node", value) for item in regions for value in item.values]
    values += [(item, "result", value) for item in regions for value in item.results]
    threads, other = regions[0].threads
    how = f"{runs + 1} runs with {_threads(threads)}, one with {other}"
    if not values:
        more = try_next(["determinism", graph.reference, "--runs", str(10 * runs)], dump)
        return f"{graph.name}: the same bits each time, {how}\nA race is a matter of chance. {more}\n"
    lines = []
    culprit = next((value for _, kind, value in values if kind == "node" and not value.is_rounding), None)
    if culprit is not None:
        alone = ", also alone on the same inputs" if culprit.differs_alone else ""
        where = culprit.source or "no source line"
        lines.append(
            f"{graph.name}: not deterministic: {culprit.fx_node or culprit.value} ({where}), {culprit.operator}{alone}"
        )
    elif all(value.is_rounding for _, _, value in values):
        lines.append(f"{graph.name}: differs by rounding only")
    else:
        lines.append(f"{graph.name}: results differ by more than rounding, and no node did when all were looked at")
    lines += [f"{how}; nodes whose inputs were the same, and results of regions:", ""]
    rows = [
        (
            kind,
            value.fx_node or value.value,
            value.operator,
            f"{value.differing_runs} of {runs}"
            if value.other_threads == value.threads
            else f"{value.other_threads} threads",
            f"{value.difference.max_abs:.2e}",
            "rounding" if value.is_rounding else "more",
            value.module,
            value.source,
        )
        for _, kind, value in values
    ]
    lines.append(fit_table(rows, ["what", "value", "operator", "differs in", "by up to", "is", "module", "source"]))
    if culprit is not None:
        lines += ["", try_next(["determinism", graph.reference, "--threads", "1"], dump)]
    return "\n".join(lines) + "\n"


def _runs(value: UnstableValue, runs: int) -> str:
    """In which runs a value differs."""
    if value.other_threads == value.threads:
        return f"{value.differing_runs} of {runs}"
    return f"that with {_threads(value.other_threads)}"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"
