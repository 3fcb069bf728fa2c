"""``dynamo-backends determinism GRAPH``: the values of a dumped graph that differ between runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, add_repeat_arguments, count_text, for_each_graph, try_again

if TYPE_CHECKING:
    from ..dumps.determinism import RegionDeterminism
    from ..dumps.reading import DumpedGraph

DETAILS = (
    "Runs each region on its recorded inputs --runs times more, and once with another number of threads. "
    "Exit code 1: a value differs by more than rounding."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    add_repeat_arguments(parser, 10)


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.determinism import find_unstable

    return for_each_graph(
        arguments,
        lambda graph: find_unstable(graph, runs=arguments.runs, threads=arguments.threads),
        text=lambda graph, regions: _text(graph, regions, arguments),
        is_wrong=lambda regions: not all(region.is_stable for region in regions),
    )


def _text(graph: DumpedGraph, regions: Sequence[RegionDeterminism], arguments: argparse.Namespace) -> str:
    values = [("node", value) for region in regions for value in region.values]
    values += [("result", value) for region in regions for value in region.results]
    threads, other_threads = regions[0].threads
    runs = f"{arguments.runs + 1} runs with {count_text(threads, 'thread')}, one with {other_threads}"
    if not values:
        hint = try_again(arguments, "--runs", str(10 * arguments.runs))
        return f"{graph.name}: no value differs in {runs}\nA race may need more runs to show. {hint}\n"
    culprit = next((value for kind, value in values if kind == "node" and not value.is_rounding), None)
    if culprit is not None:
        alone = ", also alone on the same inputs" if culprit.differs_alone else ""
        where = culprit.source or "no source line"
        summary = f"not deterministic: {culprit.fx_node or culprit.value} ({where}), {culprit.operator}{alone}"
    elif all(value.is_rounding for _, value in values):
        summary = "differs by rounding only"
    else:
        summary = "results differ by more than rounding, but no node does when all values are graph outputs"
    rows = [
        (
            kind,
            value.fx_node or value.value,
            value.operator,
            f"{value.differing_runs} of {arguments.runs}"
            if value.other_threads == value.threads
            else count_text(value.other_threads, "thread"),
            f"{value.difference.measured.max_abs:.2e}",
            "yes" if value.is_rounding else "no",
            value.module,
            value.source,
        )
        for kind, value in values
    ]
    headers = ["what", "value", "operator", "differs in", "max error", "rounding", "module", "source"]
    lines = [f"{graph.name}: {summary}", f"{runs}; nodes with equal inputs, and results of regions:", ""]
    lines.append(fit_table(rows, headers))
    if culprit is not None:
        lines += ["", try_again(arguments, "--threads", "1")]
    return "\n".join(lines) + "\n"
