"""Summaries of the runs in a dump folder, and of Dynamo's graphs in a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from .reading import MANIFEST, DumpedRun, DumpError, read_run
from .schema import DynamoGraphEntry


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run folder."""

    folder: str  # its path
    started: str = ""  # ISO 8601, UTC
    graphs: int = 0  # compiled graphs
    diverging: int = 0  # graphs that diverge
    not_ok: int = 0  # other graphs that are not ``ok``: not comparable, not compared, or not compiled
    error: str = ""  # why the run cannot be read


@dataclasses.dataclass(frozen=True)
class DynamoGraphSummary:
    """A graph of Dynamo's."""

    index: int
    function: str  # the user's function; empty if unknown, as with ``onnx_compiler``
    begins: str  # ``file:line`` or empty; for a library's file, also the user's line that called it
    ends: str  # ``file:line`` or empty
    reason: str  # why it ends there: ``the end of the function``, ``graph break: …``
    given_up: str  # why Dynamo does not use it, or empty
    not_compiled: Mapping[str, str]  # why PyTorch runs it although it was compiled, by direction
    passes_seconds: float  # the time of the passes of the stages ``pre_grad`` and ``joint``


def runs_in(folder: Path) -> list[RunSummary]:
    """The runs in a dump folder, the oldest first, including those that cannot be read."""
    found = sorted(folder.glob("run_*"), key=lambda path: (path.stat().st_mtime, path.name))
    return [_summary(path) for path in found if path.is_dir()]


def _summary(folder: Path) -> RunSummary:
    if not (folder / MANIFEST).exists():
        return RunSummary(str(folder), error=f"no {MANIFEST}: nothing is compiled yet")
    try:
        run = read_run(folder)
        graphs, dynamo_graphs = run.graphs, dynamo_graphs_of_run(run)
    except DumpError as error:
        return RunSummary(str(folder), error=str(error))
    diverging = sum(graph.diverges for graph in graphs)
    not_ok = sum(graph.verdict != "ok" for graph in graphs) - diverging
    not_ok += sum(len(graph.not_compiled) for graph in dynamo_graphs)
    return RunSummary(str(folder), run.manifest.started, len(graphs), diverging, not_ok)


def dynamo_graphs_of_run(run: DumpedRun) -> list[DynamoGraphSummary]:
    """Dynamo's graphs in the order of compilation; ``DumpError`` if the manifest is damaged."""
    return [_dynamo_graph(entry) for entry in run.dynamo_graphs]


def _dynamo_graph(entry: DynamoGraphEntry) -> DynamoGraphSummary:
    begin, end = entry.where, entry.end
    return DynamoGraphSummary(
        entry.index,
        begin.function if begin else "",
        begin.place if begin else "",
        ":".join(str(part) for part in (end.file, end.line) if part) if end else "",
        end.reason if end else "",
        str(entry.given_up or ""),
        entry.not_compiled,
        sum(result.milliseconds for result in entry.passes) / 1e3,
    )
