"""``dynamo-backends ls``: the runs and graphs of a dump."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from ..common.text_table import fit_table
from ..dumps.reading import DumpedGraph, DumpedRun, DumpError, default_folder, find_run, runs_in
from ..dumps.schema import DynamoGraphEntry, MeasureEntry
from .common import add_dump_arguments, print_json, short_path, try_next

DETAILS = (
    "For each graph: operators, the share that runs on ONNX Runtime, the worst error and the verdict, then its lines "
    "in the user's code and why it ends. Graphs whose rows are equal share one. --json prints the entries of "
    "manifest.json. Exit code 1: a graph diverges, or ONNX Runtime failed to run a part of it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser, positional=True)
    parser.add_argument("--times", action="store_true", help="show the compile time of each stage, too")
    parser.add_argument("--all", action="store_true", help="a row for each graph, also if rows are equal")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.dump) if arguments.dump is not None else default_folder()
    runs = [] if (folder / "manifest.json").exists() else runs_in(folder)
    if len(runs) > 1 and not arguments.json:
        rows = [(short_path(str(path)), *_run_cells(one)) for path, one in runs]
        print(fit_table(rows, ("run", "started", "graphs", "diverge", "not compared")) + "\n")
    dumped = find_run(folder)
    graphs = dumped.graphs
    wrong = next((graph for graph in graphs if graph.is_wrong), None)
    if arguments.json:
        names = [str(path) for path, _ in runs]
        entries = [{"graph": graph.short_reference, **vars(graph.entry)} for graph in graphs]
        print_json({"run": dumped.folder, "runs": names, "dynamo_graphs": dumped.dynamo_graphs, "graphs": entries})
        return int(wrong is not None)
    text = verdicts_text(graphs, all_rows=arguments.all) if graphs else "nothing was compiled"
    print("\n\n".join([short_path(str(dumped.folder)), text, *_remarks(dumped, text)]))
    if origins := [_origin(item) for item in dumped.dynamo_graphs if _has_origin(item)]:
        origins = origins if arguments.all else _equal_as_one(origins)
        print("\n" + fit_table(origins, ("graph", "function", "from", "to", "why it ends")))
    if arguments.times and graphs:
        print("\n" + _times_text(dumped))
    if graphs:
        print("\n" + try_next(arguments, "bisect" if wrong else "show", (wrong or graphs[0]).short_reference))
    for graph in [graph for graph in graphs if graph.entry.nonfinite][:1]:
        print(try_next(arguments, "nan", graph.short_reference))
    return int(wrong is not None)


def _run_cells(run: DumpedRun | DumpError) -> Sequence[object]:
    if isinstance(run, DumpError):
        return str(run), None, None, None
    diverging = sum(graph.diverges for graph in run.graphs)
    not_compiled = sum(len(graph.not_compiled) for graph in run.dynamo_graphs)
    not_ok = sum(graph.verdict != "ok" for graph in run.graphs) - diverging + not_compiled
    return run.manifest.started.replace("+00:00", "Z"), len(run.graphs), diverging, not_ok


def _remarks(dumped: DumpedRun, table: str) -> Iterator[str]:
    """What the table of the verdicts does not say."""
    graphs = dumped.graphs
    for graph in graphs:
        if graph.is_wrong and str(graph.verdict) not in table:  # it was cut to a narrow terminal
            yield f"{graph.short_reference} {graph.verdict}"
    for remark, names in _collected(graphs, lambda graph: graph.remarks).items():
        yield f"{names}: {remark}"
    for parent, names in _collected(graphs, lambda graph: [graph.inherited] if graph.inherited else ()).items():
        yield f"{names}: compiled by the parent process before a fork; files in {short_path(str(parent))}"
    for item in dumped.passes():
        if item.result.undone:
            yield f"undone in {item.place}: {item.result.name}: {item.result.undone}"
    if dumped.manifest.unused:
        yield "\n  ".join(("registered, but not used by any graph:", *dumped.manifest.unused))
    for function, why in dumped.manifest.skipped.items():
        yield f"Dynamo skipped {function}, which runs in Python: {why}"
    others = [graph for graph in graphs if graph.entry.runs_at_other_sizes]
    if others:
        listed = ", ".join(f"{graph.entry.runs_at_other_sizes} of {graph.short_reference}" for graph in others)
        yield f"runs with other sizes than those compared: {listed}; {_EVERY}"
    elif any(0 < graph.entry.compared_runs < graph.entry.runs for graph in graphs):
        yield f"of runs with the same sizes, only the first is compared; {_EVERY}"


_EVERY = "options={'compare': 'every'} compares all runs"


def _has_origin(item: DynamoGraphEntry) -> bool:
    return bool(item.begins.place or item.given_up or item.not_compiled)


def _origin(item: DynamoGraphEntry) -> tuple[str, ...]:
    """Where a graph of Dynamo begins and ends, and why."""
    why = "".join(item.ends.reason.splitlines()[:1])
    if item.not_compiled:
        why = "; ".join(f"{direction}: {reason}" for direction, reason in item.not_compiled.items())
    elif item.given_up:
        why = f"given up: {item.given_up}"
    return str(item.index), item.begins.function, short_path(item.begins.place), short_path(item.ends.place), why


def _times_text(dumped: DumpedRun) -> str:
    """The compile times as a table."""
    stages = list(dict.fromkeys(stage for graph in dumped.graphs for stage in graph.entry.seconds))
    times = [(str(item.index), {"passes": item.passes_seconds}) for item in dumped.dynamo_graphs]
    times += [(graph.short_reference, dict(graph.entry.seconds)) for graph in dumped.graphs]
    times.sort(key=lambda item: int(item[0].split("/")[0]))
    rows = [
        (
            name,
            *(f"{seconds[stage]:.3f}" if stage in seconds else "-" for stage in stages),
            f"{sum(seconds.values()):.3f}",
        )
        for name, seconds in times
    ]
    return fit_table(rows, ("compile s", *stages, "total"))


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


def _error_text(error: MeasureEntry | None, unknown: str) -> str:
    if error is not None and error.nonfinite:
        return f"{error.nonfinite} NaN/Inf"
    return unknown if error is None or error.max_abs is None else f"{error.max_abs:.1e}"
