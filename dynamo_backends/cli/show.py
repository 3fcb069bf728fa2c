"""``dynamo-backends show``: the graph of a stage, with the lines of the user's code."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from ..common.text_table import fit_table
from ..dumps.schema import StageEntry
from ..dumps.stage_graphs import FX_STAGES, STAGES, StageGraph, stage_graphs, stages_of
from .common import add_graph_arguments, is_coloured, print_json, run_with, try_next

DESCRIPTION = (
    "Shows the graph of a stage: FX graphs as Python, ONNX models as text, with types and the lines of "
    "the user's code. Without --stage: which stages there are, and the last FX graph."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    parser.add_argument("-s", "--stage", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}")


def run(arguments: argparse.Namespace) -> int:
    """Prints the graphs. Exit code 2 if there is no such graph or stage."""
    run = run_with(arguments, arguments.graph)
    found: list[dict[str, object]] = []
    texts: list[str] = []
    hints: list[str] = []
    seen: set[str] = set()
    for graph in run.graphs_of(arguments.graph):
        stages = stages_of(run, graph)
        stage = arguments.stage or [item.name for item in stages if item.name in FX_STAGES][-1]
        shown = stage_graphs(run, graph, stage)
        found.append(
            {
                "graph": graph.reference,
                "stages": [dataclasses.asdict(item) for item in stages],
                "stage": stage,
                "graphs": [
                    {
                        "file": item.file,
                        "region": item.region,
                        "nodes": [dataclasses.asdict(node) for node in item.nodes],
                    }
                    for item in shown
                ],
            }
        )
        if arguments.stage is None:
            texts.append(f"{graph.reference}\n{_stages_text(stages)}\n")
        for item in shown:
            if item.file not in seen:  # a forward and its backward share Dynamo's graph
                seen.add(item.file)
                texts.append(f"{_heading(stage, item)}\n{coloured(item.text)}")
        pair = _neighbours(stages, stage)
        hints += [try_next(arguments, "diff", graph.short_reference, *pair)] * bool(pair)
    if arguments.json:
        print_json(found)
    else:
        print("\n".join([*texts, *hints[:1]]))
    return 0


def _neighbours(stages: Sequence[StageEntry], stage: str) -> Sequence[str]:
    """A stage and the one before it, of those that changed something; of the first, the one after."""
    (same_as,) = [item.same_as or item.name for item in stages if item.name == stage]
    names = [item.name for item in stages if item.file is not None]
    last = max(names.index(same_as), 1)
    return names[last - 1 : last + 1] if len(names) > 1 else []


def _stages_text(stages: Sequence[StageEntry]) -> str:
    rows = [
        (stage.name, stage.nodes, stage.file if stage.file is not None else f"as {stage.same_as}") for stage in stages
    ]
    return fit_table(rows, ("stage", "nodes", "file"))


def _heading(stage: str, graph: StageGraph) -> str:
    number = graph.operators
    region = f", region {graph.region}" if graph.region is not None else ""
    return f"{stage}{region}: {number} node{'s' * (number != 1)}  {graph.file}"


def coloured(text: str) -> str:
    """A graph's text, with the colours of Python on a terminal; the text of ONNX models is near enough."""
    if not is_coloured(sys.stdout):
        return text
    import pygments
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer

    return str(pygments.highlight(text, PythonLexer(stripnl=False), TerminalFormatter()))
