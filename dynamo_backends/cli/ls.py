"""``dynamo-backends ls``: the runs and graphs of a dump."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from ..common.text_table import fit_table
from ..dumps.reading import DumpedGraph, DumpedRun, RunSummary, default_folder, find_run, runs_in
from ..dumps.schema import DynamoGraphEntry, MeasureEntry
from .common import add_dump_arguments, print_json, short_path, try_next

DETAILS = (
    "For each graph: operators, the share that runs on ONNX Runtime, the worst error and the verdict, then its lines "
    "in the user's code and why it ends. Graphs whose rows are equal share one. Exit code 1: a graph diverges, or ONNX "
    "Runtime failed to run a part of it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser, positional=True)
    parser.add_argument("--times", action="store_true", help="show the compile time of each stage, too")
    parser.add_argument("--all", action="store_true", help="a row for each graph, also if rows are equal")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.dump) if arguments.dump is not None else default_folder()
    runs = [] if (folder / "manifest.json").exists() else runs_in(folder)
    if len(runs) > 1 and not arguments.json:
        print(_runs_text(runs) + "\n")
    dumped = find_run(folder)
    dynamo_graphs, graphs = dumped.dynamo_graphs, dumped.graphs
    code = 1 if any(graph.is_wrong for graph in graphs) else 0
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
    text = (verdicts_text(graphs, all_rows=arguments.all) if graphs else "nothing was compiled") + "\n"
    sys.stdout.write(f"{short_path(str(dumped.folder))}\n\n{text}")
    for graph in graphs:
        if graph.is_wrong and str(graph.verdict) not in text:  # the table was cut to a narrow terminal
            print(f"\n{graph.short_reference} {graph.verdict}")
    for remark, names in _collected(graphs, lambda graph: graph.remarks).items():
        print(f"\n{names}: {remark}")
    for parent, names in _collected(graphs, lambda graph: [graph.inherited] if graph.inherited else ()).items():
        print(f"\n{names}: compiled by the parent process before a fork; files in {short_path(str(parent))}")
    for name, where, reason in _undone(dumped):
        print(f"\nundone in {where}: {name}: {reason}")
    if dumped.manifest.unused:
        print("\n" + "\n  ".join(("registered, but not used by any graph:", *dumped.manifest.unused)))
    for function, why in dumped.manifest.skipped.items():
        print(f"\nDynamo skipped {function}, which runs in Python: {why}")
    if any(0 < graph.entry.compared_runs < graph.entry.runs for graph in graphs):
        print("\n" + _uncompared_text(graphs))
    sys.stdout.write(_origins_text(dynamo_graphs, all_rows=arguments.all))
    if arguments.times:
        sys.stdout.write(_times_text(dynamo_graphs, graphs))
    if graphs:
        wrong = next((graph for graph in graphs if graph.is_wrong), None)
        nonfinite = [graph for graph in graphs if graph.entry.nonfinite]
        print("\n" + try_next(arguments, "bisect" if wrong else "show", (wrong or graphs[0]).short_reference))
        if nonfinite:
            print(try_next(arguments, "nan", nonfinite[0].short_reference))
    return code


_FROM_MANIFEST = (
    "index", "direction", "nodes", "share_on_onnx", "runs", "compared_runs", "runs_at_other_sizes", "seconds",
    "verdict", "note", "nonfinite", "dropout", "rescued",
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
        "eager_error": worst.eager.max_abs if worst and worst.eager else None,
        "worst_nonfinite": worst.onnx.nonfinite if worst else 0,
        "eager_nonfinite": worst.eager.nonfinite if worst and worst.eager else 0,
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


def _runs_text(runs: Sequence[RunSummary]) -> str:
    rows = [
        (short_path(item.folder), item.error, None, None, None)
        if item.error
        else (short_path(item.folder), item.started.replace("+00:00", "Z"), item.graphs, item.diverging, item.not_ok)
        for item in runs
    ]
    return fit_table(rows, ("run", "started", "graphs", "diverge", "not compared"))


def _origins_text(dynamo_graphs: Sequence[DynamoGraphEntry], *, all_rows: bool) -> str:
    """Where the graphs of Dynamo are from, as a table."""
    known = [item for item in dynamo_graphs if item.begins.place or item.given_up or item.not_compiled]
    rows: list[tuple[str, ...]] = [
        (
            str(item.index),
            item.begins.function,
            short_path(item.begins.place),
            short_path(item.ends.place),
            _reason(item),
        )
        for item in known
    ]
    rows = rows if all_rows else _equal_as_one(rows)
    return "\n" + fit_table(rows, ("graph", "function", "from", "to", "why it ends")) + "\n" if rows else ""


def _times_text(dynamo_graphs: Sequence[DynamoGraphEntry], graphs: Sequence[DumpedGraph]) -> str:
    """The compile times as a table."""
    stages = list(dict.fromkeys(stage for graph in graphs for stage in graph.entry.seconds))
    times = [(str(item.index), {"passes": item.passes_seconds}) for item in dynamo_graphs]
    times += [(graph.short_reference, dict(graph.entry.seconds)) for graph in graphs]
    times.sort(key=lambda item: int(item[0].split("/")[0]))
    rows = [
        (name, *(_seconds(seconds.get(stage)) for stage in stages), _seconds(sum(seconds.values())))
        for name, seconds in times
    ]
    return f"\n{fit_table(rows, ('compile s', *stages, 'total'))}\n" if rows else ""


def verdicts_text(graphs: Sequence[DumpedGraph], *, all_rows: bool = True) -> str:
    """The verdicts on graphs as a table; without ``all_rows``, graphs whose rows are equal share one."""
    rows: list[tuple[str, ...]] = [
        (
            graph.short_reference,
            str(graph.entry.nodes),
            f"{graph.share_that_ran:.1%}",
            f"{graph.entry.compared_runs} of {graph.entry.runs}",
            _error_text(graph.entry.worst.onnx if graph.entry.worst else None, "see verdict" * graph.diverges or "-"),
            _error_text(graph.entry.worst.eager if graph.entry.worst else None, "-"),
            graph.verdict or "not compared",
        )
        for graph in graphs
    ]
    rows = rows if all_rows else _equal_as_one(rows)
    return fit_table(rows, ("graph", "nodes", "on ONNX", "compared", "worst error", "eager error", "verdict"))


def _equal_as_one(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows, those that differ in the first cell alone as one: ``0/inference and 3 equal``."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [
        (found[0] + (f" and {len(found) - 1} equal" if found[1:] else ""), *cells) for cells, found in names.items()
    ]


def _collected(graphs: Sequence[DumpedGraph], of: Callable[[DumpedGraph], Iterable[Hashable]]) -> dict[Hashable, str]:
    """The names of the graphs that have something, by what they have."""
    names: dict[Hashable, list[str]] = {}
    for graph in graphs:
        for item in of(graph):
            names.setdefault(item, []).append(graph.short_reference)
    return {item: ", ".join(found) for item, found in names.items()}


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


def _error_text(error: MeasureEntry | None, unknown: str) -> str:
    if error is not None and error.nonfinite:
        return f"{error.nonfinite} NaN/Inf"
    return unknown if error is None or error.max_abs is None else f"{error.max_abs:.1e}"
