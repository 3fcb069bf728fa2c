"""What is in a dump, in short: its runs, Dynamo's graphs of a run, and what was compiled of them.

::

    for graph in graphs_of_run(find_run()):
        print(graph.reference, graph.share_on_onnx, graph.verdict)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .reading import MANIFEST, DumpedGraph, DumpError, Run, read_run


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run folder."""

    folder: str  # its path
    started: str = ""  # when, as ISO 8601 in UTC
    graphs: int = 0  # how many were compiled
    diverging: int = 0  # how many of them diverge
    not_ok: int = 0  # how many more were not comparable or not compared
    error: str = ""  # why it cannot be read, or empty


@dataclasses.dataclass(frozen=True)
class DynamoGraphSummary:
    """A graph of Dynamo's."""

    index: int  # its number
    function: str  # the user's function that it is a part of; empty where that is not known, as under ``onnx_compiler``
    # begins, ends: ``file:line``, or empty; where it begins in a library's file, also the user's line that called it
    begins: str
    ends: str
    reason: str  # why it ends there: ``the end of the function``, ``graph break: …``
    given_up: str  # why Dynamo does not use it, or empty
    # why PyTorch runs its forward, backward or inference graph, by direction: their compile failed
    not_compiled: Mapping[str, str]
    passes_seconds: float  # how long its passes took, those of the stages ``pre_grad`` and ``joint``


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """A graph that was compiled: forward, backward or inference."""

    index: int
    direction: str
    reference: str  # what the commands take: ``0/forward``
    nodes: int
    share_on_onnx: float  # how many of its nodes ONNX Runtime runs, 0 to 1, in so many ``regions``
    regions: int
    runs: int
    files_in: str | None  # the run folder of the process that compiled it and forked this one, or ``None``
    compared_runs: int  # how many of its ``runs`` were compared
    runs_at_other_sizes: int  # how many ran at sizes at which none was compared
    seconds: Mapping[str, float]  # how long it took to compile, by stage
    # the value with the largest error against float64: an output, or where the graph diverges any value that is wrong
    worst: str
    # worst_error, eager_error: its largest absolute error, and eager's; ``None`` where nothing was compared, or the
    # fault is no matter of size, such as a wrong dtype
    worst_error: float | None
    eager_error: float | None
    worst_nonfinite: int  # how many of its elements are NaN or infinite on one side only
    verdict: str | None  # ``ok``, ``diverges at …``, ``not comparable: …``; ``None`` if no run was compared
    note: str  # what is known beside it

    @property
    def diverges(self) -> bool:
        """Whether what ran was found to be wrong."""
        return self.verdict is not None and self.verdict.startswith("diverges")


def runs_in(folder: Path) -> list[RunSummary]:
    """The runs in a dump folder, the oldest first; also those that cannot be read."""
    found = sorted(folder.glob("run_*"), key=lambda path: (path.stat().st_mtime, path.name))
    return [_summary(path) for path in found if path.is_dir()]


def _summary(folder: Path) -> RunSummary:
    if not (folder / MANIFEST).exists():
        return RunSummary(str(folder), error=f"no {MANIFEST}: nothing was compiled, or not yet")
    try:
        run = read_run(folder)
        graphs, dynamo_graphs = graphs_of_run(run), dynamo_graphs_of_run(run)
    except DumpError as error:
        return RunSummary(str(folder), error=str(error))
    diverging = sum(graph.diverges for graph in graphs)
    not_ok = sum(graph.verdict != "ok" for graph in graphs) - diverging
    not_ok += sum(len(graph.not_compiled) for graph in dynamo_graphs)
    return RunSummary(str(folder), run.manifest.get("started", ""), len(graphs), diverging, not_ok)


def dynamo_graphs_of_run(run: Run) -> list[DynamoGraphSummary]:
    """Dynamo's graphs, in the order they were compiled; ``DumpError`` if the manifest is damaged."""
    return [_dynamo_graph(entry) for entry in run.dynamo_graphs]


def _dynamo_graph(entry: Mapping[str, Any]) -> DynamoGraphSummary:
    begin, end = entry["where"] or {}, entry["end"] or {}
    return DynamoGraphSummary(
        entry["index"],
        begin.get("function", ""),
        begin.get("place", ""),
        ":".join(str(part) for part in (end.get("file"), end.get("line")) if part),
        end.get("reason", ""),
        entry["given_up"] or "",
        entry.get("not_compiled", {}),
        sum(result["milliseconds"] for result in entry["passes"]) / 1e3,
    )


def graphs_of_run(run: Run) -> list[GraphSummary]:
    """What was compiled, in the order of the numbers; ``DumpError`` if the manifest is damaged."""
    return [_summary_of(graph) for graph in run.graphs]


def _summary_of(graph: DumpedGraph) -> GraphSummary:
    entry = graph.entry
    worst = entry["worst"] or {}
    ours, eager = worst.get("onnx") or {}, worst.get("eager") or {}
    same = ("index", "direction", "nodes", "share_on_onnx", "runs", "compared_runs", "runs_at_other_sizes", "seconds")
    return GraphSummary(
        **{name: entry[name] for name in (*same, "verdict", "note")},
        reference=graph.short_reference,
        regions=len(graph.regions),
        files_in=str(graph.inherited) if graph.inherited is not None else None,
        worst=worst.get("value", ""),
        worst_error=ours.get("max_abs"),
        eager_error=eager.get("max_abs"),
        worst_nonfinite=ours.get("nonfinite", 0),
    )
