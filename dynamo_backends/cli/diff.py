"""``dynamo-backends diff``: what changed between two stages of a graph, node by node."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator

from ..dumps.reading import DumpedGraph
from ..dumps.stage_diff import Change, StageDiff, diff_stages
from ..dumps.stage_graphs import STAGES
from .common import add_graph_arguments, is_coloured, print_json, run_of_graph, short_path, try_next

_MARKS = {"added": "+", "removed": "-", "changed": "~", "translated": ">", "renamed": "="}
_COLOURS = {"added": "\x1b[32m", "removed": "\x1b[31m", "changed": "\x1b[33m", "translated": "\x1b[36m", "renamed": ""}

DETAILS = (
    "+ added, - removed, ~ changed operator, type or arguments, > translated from FX to ONNX, = renamed. Nodes are "
    "matched by name and by the line of the user's code; their order is not compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument("before", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument("after", choices=STAGES, metavar="STAGE", help="the stage to compare with")


def run(arguments: argparse.Namespace) -> int:
    run = run_of_graph(arguments, arguments.graph)
    diffs: list[tuple[DumpedGraph, StageDiff]] = []
    for graph in run.graphs_of(arguments.graph):
        for diff in diff_stages(run, graph, arguments.before, arguments.after):
            if (diff.before, diff.after) not in [(known.before, known.after) for _, known in diffs]:
                diffs.append((graph, diff))  # a forward and its backward share Dynamo's graph
    if arguments.json:
        print_json([{"graph": graph.reference, **dataclasses.asdict(diff)} for graph, diff in diffs])
        return 0
    sys.stdout.write("\n".join(_text(diff, coloured=is_coloured(sys.stdout)) for _, diff in diffs))
    print("\n" + try_next(arguments, "show", diffs[0][0].short_reference, "--stage", arguments.after))
    return 0


def _text(diff: StageDiff, *, coloured: bool) -> str:
    """The changes, below the lines of the user's code that the nodes come from."""
    counts = ", ".join(f"{diff.count(kind)} {kind}" for kind in _MARKS if diff.count(kind)) or "nothing changed"
    text = f"{diff.before} -> {diff.after}: {counts}, {diff.same} unchanged\n"
    nodes = [node for change in diff.changes for node in (change.before, change.after) if node is not None]
    codes = {node.source: node.code for node in nodes if node.code}
    printed_source = None
    for change in diff.changes:
        source = change.source
        if source != printed_source:
            printed_source = source
            code = codes.get(source, "")
            text += f"\n{short_path(source)}{f': {code}' if code else ''}\n" if source else "\n"
        for line in _lines(change):
            colour = _COLOURS[change.kind] if coloured else ""
            text += f"{colour}{line}\x1b[0m\n" if colour else f"{line}\n"
    return text


def _lines(change: Change) -> Iterator[str]:
    """A line for the change; of a changed node, one for each stage."""
    mark, before, after = _MARKS[change.kind], change.before, change.after
    if before is None or after is None:
        yield f"{mark} {change.node.text}" + (f"  # {change.note}" if change.note else "")
    elif change.kind == "renamed":
        yield f"{mark} {', '.join(before.results)} -> {', '.join(after.results)}"
    else:
        yield f"{mark} {before.text}"
        yield f"  {after.text}" + (f"  # other {' and '.join(change.what)}" if change.what else "")
