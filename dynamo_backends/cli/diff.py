"""``dynamo-backends diff``: what changed between two stages of a graph, node by node."""

from __future__ import annotations

import argparse
from typing import get_args

from ..dumps.stage_diff import ChangeKind, diff_stages
from ..dumps.stage_graphs import STAGES
from .common import add_graph_arguments, coloured, print_json, run_of_graph, try_next

DETAILS = (
    "Nodes are matched by name and by the line of the user's code; their order is not compared. Lines with @@ are the "
    "user's, - and + what a node was and is."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument("before", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument("after", choices=STAGES, metavar="STAGE", help="the stage to compare with")


def run(arguments: argparse.Namespace) -> int:
    run = run_of_graph(arguments, arguments.graph)
    graphs = run.graphs_of(arguments.graph)
    pairs = [(graph, diff) for graph in graphs for diff in diff_stages(run, graph, arguments.before, arguments.after)]
    # A forward and its backward share Dynamo's graph.
    diffs = list({(diff.before, diff.after): (graph, diff) for graph, diff in reversed(pairs)}.values())[::-1]
    if arguments.json:
        print_json([{"graph": graph.reference, **vars(diff)} for graph, diff in diffs])
        return 0
    for _, diff in diffs:
        counts = ", ".join(f"{diff.count(kind)} {kind}" for kind in get_args(ChangeKind) if diff.count(kind))
        print(f"{diff.before} -> {diff.after}: {counts or 'nothing changed'}, {diff.same} unchanged\n")
        print(coloured("\n".join([*diff.lines, ""]), "diff"))
    print(try_next(arguments, "show", graphs[0].short_reference, "--stage", arguments.after))
    return 0
