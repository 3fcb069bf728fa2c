"""``dynamo-backends show``: the graph of a stage, with the lines of the user's code, or what a saved file holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..common.text_table import fit_table
from ..dumps.schema import StageEntry
from ..dumps.stage_graphs import FX_STAGES, STAGES, StageGraph, stage_graphs, stages_of
from .common import GRAPH, add_graph_arguments, coloured, count_text, print_json, run_of_graph, try_next
from .show_file import show_saved

DETAILS = (
    "FX graphs are printed as Python and ONNX models as text, with types and the lines of the user's code. Without "
    "--stage, lists the stages and prints the last FX graph. GRAPH may also be a file of save_compiled_function or "
    "save_cache_artifacts: its graphs are listed, and nothing in it is executed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument("-s", "--stage", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument(
        "--onnx",
        type=Path,
        metavar="FOLDER",
        help="write the ONNX models of a saved file to FOLDER; weights are inputs",
    )


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.graph)
    if path.suffix and not path.exists():
        raise ValueError(f"{path} does not exist; expected a graph of a dump, such as 0/forward, or a saved file")
    if path.is_file() and not GRAPH.fullmatch(arguments.graph):
        if arguments.stage is not None or arguments.dump is not None:
            raise ValueError(f"--stage and --dump are for graphs of a dump; {arguments.graph} is a file")
        return show_saved(arguments)
    if arguments.onnx is not None:
        raise ValueError(f"--onnx is for files of saved graphs; {arguments.graph} is no file")
    run = run_of_graph(arguments, arguments.graph)
    as_json: list[dict[str, object]] = []
    texts: list[str] = []
    hints: list[str] = []
    printed_files: set[str] = set()
    for graph in run.graphs_of(arguments.graph):
        stages = stages_of(run, graph)
        stage = arguments.stage or [item.name for item in stages if item.name in FX_STAGES][-1]
        shown = stage_graphs(run, graph, stage)
        as_json.append(
            {
                "graph": graph.reference,
                "stages": list(stages),
                "stage": stage,
                "graphs": [{"file": item.file, "region": item.region, "nodes": list(item.nodes)} for item in shown],
            }
        )
        if arguments.stage is None:
            texts.append(f"{graph.reference}\n{_stages_text(stages)}\n")
        for item in shown:
            if item.file not in printed_files:  # a forward and its backward share Dynamo's graph
                printed_files.add(item.file)
                texts.append(f"{_heading(stage, item)}\n{coloured(item.text, 'python')}")
        pair = _pair_to_diff(stages, stage)
        if pair:
            hints.append(try_next(arguments, "diff", graph.short_reference, *pair))
    if arguments.json:
        print_json(as_json)
    else:
        print("\n".join([*texts, *hints[:1]]))
    return 0


def _pair_to_diff(stages: Sequence[StageEntry], stage: str) -> Sequence[str]:
    """A stage and the changed stage before it; for the first stage, the one after it."""
    (same_as,) = [item.same_as or item.name for item in stages if item.name == stage]
    names = [item.name for item in stages if item.file is not None]
    last = max(names.index(same_as), 1)
    return names[last - 1 : last + 1] if len(names) > 1 else []


def _stages_text(stages: Sequence[StageEntry]) -> str:
    rows = [(stage.name, stage.nodes, stage.file or f"as {stage.same_as}") for stage in stages]
    return fit_table(rows, ("stage", "nodes", "file"))


def _heading(stage: str, graph: StageGraph) -> str:
    region = f", region {graph.region}" if graph.region is not None else ""
    return f"{stage}{region}: {count_text(graph.operators, 'node')}  {graph.file}"
