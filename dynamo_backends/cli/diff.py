"""``dynamo-backends diff``: what changed between two stages of a graph, node by node."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator

from ..dumps.reading import DumpedGraph
from ..dumps.stage_diff import Change, StageDiff, diff_stages
from ..dumps.stage_graphs import STAGES
from .common import add_graph_arguments, is_coloured, print_json, run_with, short_path, try_next

_MARKS = {"added": "+", "removed": "-", "changed": "~", "translated": ">", "renamed": "="}
_COLOURS = {"added": "\x1b[32m", "removed": "\x1b[31m", "changed": "\x1b[33m", "translated": "\x1b[36m", "renamed": ""}


DESCRIPTION = (
    "Shows what changed between two stages of a graph, node by node: + added, - removed, ~ another "
    "operator, type or arguments, > translated from FX to ONNX, = the same under another name. Nodes are matched "
    "by name and by the line of the user's code, not by their order."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    listed = f"one of {', '.join(STAGES)}"
    parser.add_argument("before", choices=STAGES, metavar="STAGE", help=listed)
    parser.add_argument("after", choices=STAGES, metavar="STAGE", help="the other")


def run(arguments: argparse.Namespace) -> int:
    """Prints the changes. Exit code 0 also if there are some, 2 if there is no such graph or stage."""
    run = run_with(arguments, arguments.graph)
    found: list[tuple[DumpedGraph, StageDiff]] = []
    for graph in run.graphs_of(arguments.graph):
        for item in diff_stages(run, graph, arguments.before, arguments.after):
            if (item.before, item.after) not in [(other.before, other.after) for _, other in found]:
                found.append((graph, item))  # a forward and its backward share Dynamo's graph
    if arguments.json:
        print_json([{"graph": graph.reference, **dataclasses.asdict(item)} for graph, item in found])
        return 0
    for i, (_, item) in enumerate(found):
        sys.stdout.write(("\n" if i else "") + diff_text(item, coloured=is_coloured(sys.stdout)))
    print("\n" + try_next(arguments, "show", found[0][0].short_reference, "--stage", arguments.after))
    return 0


def diff_text(item: StageDiff, *, coloured: bool = False) -> str:
    """What changed, under the lines of the user's code that the nodes come from."""
    kinds = [kind for kind in _MARKS if item.count(kind)]
    counted = ", ".join(f"{item.count(kind)} {kind}" for kind in kinds) or "nothing changed"
    text = f"{item.before} -> {item.after}: {counted}, {item.same} the same\n"
    nodes = [node for change in item.changes for node in (change.before, change.after) if node is not None]
    codes = {node.source: node.code for node in nodes if node.code}
    told = None
    for change in item.changes:
        source = change.source
        if source != told:
            told = source
            code = codes.get(source, "")
            text += f"\n{short_path(source)}{f': {code}' if code else ''}\n" if source else "\n"
        for line in _lines(change):
            colour = _COLOURS[change.kind] if coloured else ""
            text += f"{colour}{line}\x1b[0m\n" if colour else f"{line}\n"
    return text


def _lines(change: Change) -> Iterator[str]:
    """A change in one line; what was before in a line of its own."""
    mark, before, after = _MARKS[change.kind], change.before, change.after
    note = f"  # {change.note}" if change.note else ""
    if before is None or after is None:
        yield f"{mark} {change.node.text}{note}"
    elif change.kind == "renamed":
        yield f"{mark} {', '.join(before.results)} -> {', '.join(after.results)}"
    else:
        what = f"  # other {' and '.join(change.what)}" if change.what else ""
        yield f"{mark} {before.text}"
        yield f"  {after.text}{what}"
