"""``dynamo-backends determinism GRAPH``: values of a dumped graph that differ from run to run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, add_repeat_arguments, for_each_graph, try_again

if TYPE_CHECKING:
    from ..dumps.determinism import RegionDeterminism
    from ..dumps.reading import DumpedGraph


DESCRIPTION = (
    "Runs the regions of a dumped graph again and again on their recorded inputs, and names the nodes "
    "whose values differ from run to run, or with another number of threads. Exit code 1 if one differs by more "
    "than rounding."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    add_repeat_arguments(parser, 10)


def run(arguments: argparse.Namespace) -> int:
    """Shows what differs; returns the exit code."""
    from ..dumps.determinism import find_unstable

    return for_each_graph(
        arguments,
        lambda graph: find_unstable(graph, runs=arguments.runs, threads=arguments.threads),
        text=lambda graph, regions: _text(graph, regions, arguments),
        is_wrong=lambda regions: not all(item.is_stable for item in regions),
    )


def _text(graph: DumpedGraph, regions: Sequence[RegionDeterminism], arguments: argparse.Namespace) -> str:
    runs = arguments.runs
    values = [("node", value) for item in regions for value in item.values]
    values += [("result", value) for item in regions for value in item.results]
    threads, other = regions[0].threads
    how = f"{runs + 1} runs with {_threads(threads)}, one with {other}"
    if not values:
        more = try_again(arguments, "--runs", str(10 * runs))
        return f"{graph.name}: the same bits each time, {how}\nA race is a matter of chance. {more}\n"
    culprit = next((value for kind, value in values if kind == "node" and not value.is_rounding), None)
    if culprit is not None:
        alone = ", also alone on the same inputs" if culprit.differs_alone else ""
        where = culprit.source or "no source line"
        said = f"not deterministic: {culprit.fx_node or culprit.value} ({where}), {culprit.operator}{alone}"
    elif all(value.is_rounding for _, value in values):
        said = "differs by rounding only"
    else:
        said = "results differ by more than rounding, and no node did when all were looked at"
    lines = [f"{graph.name}: {said}", f"{how}; nodes whose inputs were the same, and results of regions:", ""]
    rows = [
        (
            kind,
            value.fx_node or value.value,
            value.operator,
            f"{value.differing_runs} of {runs}"
            if value.other_threads == value.threads
            else _threads(value.other_threads),
            f"{value.difference.measured.max_abs:.2e}",
            "rounding" if value.is_rounding else "more",
            value.module,
            value.source,
        )
        for kind, value in values
    ]
    lines.append(fit_table(rows, ["what", "value", "operator", "differs in", "by up to", "is", "module", "source"]))
    if culprit is not None:
        lines += ["", try_again(arguments, "--threads", "1")]
    return "\n".join(lines) + "\n"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"
