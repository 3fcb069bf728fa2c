"""``dynamo-backends show``: the graph of a stage, with the lines of the user's code.

::

    dynamo-backends show 0                          # the stages, and the last FX graph
    dynamo-backends show 0/forward --stage onnx     # the ONNX models of its regions
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from ..dumps.reading import DumpedGraph, Run
from ..dumps.stage_graphs import FX_STAGES, STAGES, Stage, StageGraph, stage_graphs, stages_of
from ..tables import fit_table
from .common import (
    add_graph_arguments,
    is_coloured,
    print_json,
    run_with,
    try_next,
)

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
    run, stage = run_with(arguments, arguments.graph), arguments.stage
    shown = [_shown(run, graph, stage) for graph in run.graphs_of(arguments.graph)]
    if arguments.json:
        print_json([_as_json(item) for item in shown])
        return 0
    is_first = True
    seen: set[str] = set()
    for item in shown:
        if stage is None:
            print(("" if is_first else "\n") + item.graph.reference)
            print(_stages_text(item.stages))
        for graph in item.graphs:
            if graph.file not in seen:  # a forward and its backward share Dynamo's graph
                seen.add(graph.file)
                print(("" if is_first and stage is not None else "\n") + _heading(item, graph))
                sys.stdout.write(coloured(graph.text))
                is_first = False
    pair = _neighbours(shown[0])
    if pair is not None:
        print("\n" + try_next(arguments, "diff", shown[0].graph.short_reference, *pair))
    return 0


@dataclasses.dataclass(frozen=True)
class _Shown:
    """What is shown of a graph."""

    graph: DumpedGraph
    stages: Sequence[Stage]
    stage: str
    graphs: Sequence[StageGraph]


def _shown(run: Run, graph: DumpedGraph, stage: str | None) -> _Shown:
    stages = stages_of(run, graph)
    if stage is None:
        stage = [item.name for item in stages if item.name in FX_STAGES][-1]
    return _Shown(graph, stages, stage, stage_graphs(run, graph, stage))


def _neighbours(item: _Shown) -> tuple[str, str] | None:
    """The stage that is shown and the one before it, of those that changed something; of the first, the one after."""
    (same_as,) = [other.same_as or other.name for other in item.stages if other.name == item.stage]
    names = [other.name for other in item.stages if other.file is not None]
    if len(names) < 2:
        return None
    where = max(names.index(same_as), 1)
    return names[where - 1], names[where]


def _stages_text(stages: Sequence[Stage]) -> str:
    rows = [
        (stage.name, stage.nodes, stage.file if stage.file is not None else f"as {stage.same_as}") for stage in stages
    ]
    return fit_table(rows, ("stage", "nodes", "file"))


def _heading(item: _Shown, graph: StageGraph) -> str:
    number = graph.operators
    region = f", region {graph.region}" if graph.region is not None else ""
    return f"{item.stage}{region}: {number} node{'s' * (number != 1)}  {graph.file}"


def _as_json(item: _Shown) -> dict[str, object]:
    return {
        "graph": item.graph.reference,
        "stages": [dataclasses.asdict(stage) for stage in item.stages],
        "stage": item.stage,
        "graphs": [
            {"file": graph.file, "region": graph.region, "nodes": [dataclasses.asdict(node) for node in graph.nodes]}
            for graph in item.graphs
        ],
    }


def coloured(text: str) -> str:
    """A graph's text, with the colours of Python on a terminal; the text of ONNX models is near enough."""
    if not is_coloured(sys.stdout):
        return text
    import pygments
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer

    return str(pygments.highlight(text, PythonLexer(stripnl=False), TerminalFormatter()))
