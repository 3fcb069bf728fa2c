"""``dynamo-backends ls``: the runs and graphs of a dump."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..common.text_table import fit_table
from ..dumps.reading import DumpedGraph, DumpedRun, RunSummary, default_folder, find_run, runs_in
from ..dumps.schema import DynamoGraphEntry
from .common import add_dump_arguments, print_json, short_path, try_next

DETAILS = (
    "For each graph: its lines in the user's code and why it ends, compile time by stage, operators, the share that "
    "runs on ONNX Runtime, the worst error and the verdict. Exit code 1: a graph diverges."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser, positional=True)


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.dump) if arguments.dump is not None else default_folder()
    runs = [] if (folder / "manifest.json").exists() else runs_in(folder)
    if len(runs) > 1 and not arguments.json:
        print(_runs_text(runs) + "\n")
    dumped = find_run(folder)
    dynamo_graphs, graphs = dumped.dynamo_graphs, dumped.graphs
    code = 1 if any(graph.diverges for graph in graphs) else 0
    if arguments.json:
        print_json(
            {
                "run": str(dumped.folder),
                "runs": runs,
                "dynamo_graphs": [_dynamo_as_json(graph) for graph in dynamo_graphs],
                "graphs": [_as_json(graph) for graph in graphs],
            }
        )
        return code
    text = _graphs_text(dynamo_graphs, graphs)
    sys.stdout.write(f"{short_path(str(dumped.folder))}\n\n{text}")
    for graph in graphs:
        if graph.diverges and str(graph.verdict) not in text:  # the table was cut to a narrow terminal
            print(f"\n{graph.short_reference} {graph.verdict}")
        if (graph.diverges or graph.entry.unchecked) and graph.entry.note:
            print(f"\n{graph.short_reference}: {graph.entry.note}")
    for parent in dict.fromkeys(graph.inherited for graph in graphs if graph.inherited is not None):
        inherited = ", ".join(graph.short_reference for graph in graphs if graph.inherited == parent)
        print(f"\n{inherited}: compiled by the parent process before a fork; files in {short_path(str(parent))}")
    for name, where, reason in _undone(dumped):
        print(f"\nundone in {where}: {name}: {reason}")
    if dumped.manifest.unused:
        print("\n" + "\n  ".join(("registered, but not used by any graph:", *dumped.manifest.unused)))
    if any(0 < graph.entry.compared_runs < graph.entry.runs for graph in graphs):
        print("\n" + _uncompared_text(graphs))
    if graphs:
        wrong = next((graph for graph in graphs if graph.diverges), None)
        print("\n" + try_next(arguments, "bisect" if wrong else "show", (wrong or graphs[0]).short_reference))
    return code


_FROM_MANIFEST = (
    "index", "direction", "nodes", "share_on_onnx", "runs", "compared_runs", "runs_at_other_sizes", "seconds",
    "verdict", "note",
)  # fmt: skip


def _as_json(graph: DumpedGraph) -> dict[str, object]:
    worst = graph.entry.worst
    return {
        **{name: getattr(graph.entry, name) for name in _FROM_MANIFEST},
        "reference": graph.short_reference,
        "regions": len(graph.regions),
        "files_in": str(graph.inherited) if graph.inherited is not None else None,
        "worst": worst.value if worst else "",
        "worst_error": worst.onnx.max_abs if worst else None,
        "eager_error": _eager_error(graph),
        "worst_nonfinite": worst.onnx.nonfinite if worst else 0,
    }


def _dynamo_as_json(graph: DynamoGraphEntry) -> dict[str, object]:
    return {
        "index": graph.index,
        "function": graph.begins.function,
        "begins": graph.begins.place,
        "ends": graph.ends.place,
        "reason": graph.ends.reason,
        "given_up": graph.given_up or "",
        "not_compiled": graph.not_compiled,
        "passes_seconds": graph.passes_seconds,
    }


def _eager_error(graph: DumpedGraph) -> float | None:
    worst = graph.entry.worst
    return worst.eager.max_abs if worst is not None and worst.eager is not None else None


def _runs_text(runs: Sequence[RunSummary]) -> str:
    rows = [
        (short_path(item.folder), item.error, None, None, None)
        if item.error
        else (short_path(item.folder), item.started.replace("+00:00", "Z"), item.graphs, item.diverging, item.not_ok)
        for item in runs
    ]
    return fit_table(rows, ("run", "started", "graphs", "diverge", "not compared"))


def _graphs_text(dynamo_graphs: Sequence[DynamoGraphEntry], graphs: Sequence[DumpedGraph]) -> str:
    """Three tables: where the graphs come from, compile times, verdicts."""
    if not dynamo_graphs and not graphs:
        return "nothing was compiled\n"
    known = [item for item in dynamo_graphs if item.begins.place or item.given_up or item.not_compiled]
    rows: list[tuple[object, ...]] = [
        (item.index, item.begins.function, short_path(item.begins.place), short_path(item.ends.place), _reason(item))
        for item in known
    ]
    text = fit_table(rows, ("graph", "function", "from", "to", "why it ends")) + "\n\n" if rows else ""
    stages = list(dict.fromkeys(stage for graph in graphs for stage in graph.entry.seconds))
    times = [(str(item.index), {"passes": item.passes_seconds}) for item in dynamo_graphs]
    times += [(graph.short_reference, dict(graph.entry.seconds)) for graph in graphs]
    times.sort(key=lambda item: int(item[0].split("/")[0]))
    rows = [
        (name, *(_seconds(seconds.get(stage)) for stage in stages), _seconds(sum(seconds.values())))
        for name, seconds in times
    ]
    if graphs:
        text += f"{fit_table(rows, ('compile s', *stages, 'total'))}\n\n{verdicts_text(graphs)}\n"
    return text


def verdicts_text(graphs: Sequence[DumpedGraph]) -> str:
    """The verdicts on graphs as a table."""
    rows = [
        (
            graph.short_reference,
            graph.entry.nodes,
            f"{graph.entry.share_on_onnx:.1%}",
            f"{graph.entry.compared_runs} of {graph.entry.runs}",
            _error(graph),
            "-" if (error := _eager_error(graph)) is None else f"{error:.1e}",
            graph.verdict or "not compared",
        )
        for graph in graphs
    ]
    return fit_table(rows, ("graph", "nodes", "on ONNX", "compared", "worst error", "eager error", "verdict"))


def _undone(run: DumpedRun) -> Iterator[tuple[str, str, str]]:
    """The passes that were undone: name, graph, and why."""
    for captured in run.dynamo_graphs:
        yield from ((item.name, str(captured.index), item.undone) for item in captured.passes if item.undone)
    for graph in run.graphs:
        passes = [*graph.entry.passes, *(item for region in graph.regions for item in region.entry.passes)]
        yield from ((item.name, graph.short_reference, item.undone) for item in passes if item.undone)


def _uncompared_text(graphs: Sequence[DumpedGraph]) -> str:
    """Which runs were not compared, and the option that compares them."""
    others = [graph for graph in graphs if graph.entry.runs_at_other_sizes]
    text = "of runs with the same sizes, only the first is compared"
    if others:
        listed = ", ".join(f"{graph.entry.runs_at_other_sizes} of {graph.short_reference}" for graph in others)
        text = f"runs with other sizes than those compared: {listed}"
    return f"{text}; options={{'compare': 'every'}} compares all runs"


def _reason(item: DynamoGraphEntry) -> str:
    if item.not_compiled:
        return "; ".join(f"{direction}: {why}" for direction, why in item.not_compiled.items())
    return f"given up: {item.given_up}" if item.given_up else "".join(item.ends.reason.splitlines()[:1])


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _error(graph: DumpedGraph) -> str:
    error = graph.entry.worst.onnx if graph.entry.worst is not None else None
    if error is not None and error.nonfinite:
        return f"{error.nonfinite} NaN/Inf"
    if error is None or error.max_abs is None:
        return "see verdict" if graph.diverges else "-"
    return f"{error.max_abs:.1e}"
