"""Reads a dump into the JSON values of the report.

These are an overview, and for each graph five parts, which the page reads lazily: ``comparison`` (the rows and their
readers), ``stages`` (texts and differences), ``placement`` (regions, and nodes in PyTorch), ``time`` and ``passes``. A
notice replaces a part that cannot be read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dumps.operator_times import GroupTime, by_module, by_operator, operator_times
from ..dumps.reading import DumpedGraph, DumpedRun, DumpError
from ..dumps.schema import DIRECTIONS, DynamoGraphEntry, GraphEntry, MeasureEntry, RowEntry
from ..dumps.stage_diff import StageDiff, diff_graphs
from ..dumps.stage_graphs import ONNX_STAGES, StageGraph, stage_graphs

Json = Any

MEASURES = ("max_abs", "max_rel", "rmse", "max_ulp", "nonfinite", "scale", "share")
"""The fields of an error, in the order of the page."""

ERRORS = ("onnx", "eager", "session", "local_onnx", "local_eager")
"""The errors of a row, see ``dumps.schema.RowEntry``."""

_TEXTS = ("name", "user_name", "operator", "module", "source", "dtype")

FIELDS = (*_TEXTS, "shape", "region", "is_output", "mark", "complaint", *ERRORS, "stack", "inputs")
"""The values of a row, in the order of the page. ``stack`` has indices of ``frames``, ``inputs`` indices of rows."""

_RUNS = 10
"""How often the models run to measure times."""

_DAMAGE = (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a damaged dump raises; ``DumpError`` is a ``ValueError``."""


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The values of the page.

    Attributes:
        overview: the run and a line for each graph.
        parts: by name, such as ``graph_000/forward/stages``; the page reads them lazily.
    """

    overview: Mapping[str, Json]
    parts: Mapping[str, Json]

    @property
    def notices(self) -> list[str]:
        """Why parts of the dump could not be read."""
        of_graphs = (f"{graph['name']}: {notice}" for graph in self.overview["graphs"] for notice in graph["notices"])
        return [*self.overview["notices"], *of_graphs]


def gather(run: DumpedRun, *, times: bool = True) -> ReportData:
    """Reads a run.

    Args:
        run: the run.
        times: whether the models are run on their recorded inputs to measure times.
    """
    parts: dict[str, Json] = {}
    summaries = []
    dynamo_graphs, notice = _guarded([], lambda: run.dynamo_graphs)
    notices = [notice] if notice else []
    for position, entry in enumerate(run.manifest.graphs):
        graph, notice = _guarded(None, run.graph, position)
        if graph is None:
            notices.append(f"{_name_of(entry, position)} cannot be read: {notice}")
            continue
        made = {}
        missing = []
        makers = {**_PARTS, "time": _time if times else _recorded_time}
        for name, make in makers.items():
            made[name], notice = _guarded({}, make, run, graph)
            parts[f"{graph.reference}/{name}"] = {"notice": notice} if notice else made[name]
            missing += [notice] if notice else []
        unknown = DynamoGraphEntry(graph.index, None, None, ())
        dynamo = next((item for item in dynamo_graphs if item.index == graph.index), unknown)
        culprit = made["comparison"].get("culprit")
        summaries.append({**_summary(graph, dynamo), "culprit": culprit, "notices": missing})
    return ReportData(
        {
            "run": run.folder.resolve().name,
            "folder": str(run.folder.resolve()),
            "started": run.manifest.started,
            "forked_from": run.manifest.forked_from or "",
            **{name: _pairs(getattr(run.manifest, name)) for name in ("versions", "options", "counters")},
            "given_up": _given_up(dynamo_graphs),
            "graphs": summaries,
            "notices": notices,
            "fields": FIELDS,
            "measures": MEASURES,
        },
        parts,
    )


def _guarded(default: Any, read: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What ``read`` returns and ``""``; ``default`` and a notice if the dump is damaged."""
    try:
        return read(*arguments), ""
    except _DAMAGE as error:
        return default, str(error) if isinstance(error, DumpError) else f"{type(error).__name__}: {error}"


def _name_of(entry: Json, position: int) -> str:
    """The name of a damaged entry of ``graphs``."""
    index, direction = (entry.get("index"), entry.get("direction")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(index, int):
        return f"graphs[{position}]"
    return f"graph {index} {direction}" if direction in DIRECTIONS else f"graph {index}"


def _pairs(values: Mapping[str, Json]) -> list[list[str]]:
    return [[key, item if isinstance(item, str) else json.dumps(item)] for key, item in values.items()]


def _given_up(dynamo_graphs: Iterable[DynamoGraphEntry]) -> list[str]:
    texts = []
    for item in dynamo_graphs:
        if item.given_up:
            texts.append(f"Dynamo gave up graph {item.index}: {item.given_up}")
        texts += [f"graph {item.index} {direction}: {why}" for direction, why in item.not_compiled.items()]
    return texts


def _summary(graph: DumpedGraph, dynamo: DynamoGraphEntry) -> dict[str, Json]:
    entry = graph.entry
    worst = entry.worst
    begins, ends = dynamo.begins, dynamo.ends
    return {
        "reference": graph.reference,
        "name": graph.name,
        "index": graph.index,
        "direction": graph.direction,
        "where": {"function": begins.function, "source": begins.place},
        "end": {"reason": ends.reason, "source": ends.place} if ends.reason else None,
        "nodes": entry.nodes,
        "nodes_on_onnx": entry.nodes_on_onnx,
        "share": entry.share_on_onnx,
        "regions": len(graph.regions),
        "runs": entry.runs,
        "seconds": sum(entry.seconds.values()),
        "worst": worst and {"value": worst.value, "onnx": _error(worst.onnx), "eager": _error(worst.eager)},
        "verdict": graph.verdict or "",
        "state": _state(graph.verdict),
        "note": entry.note,
        "of_forward": entry.blame is not None and bool(entry.blame.because),
        "unchecked": entry.unchecked,
        "reference_kind": entry.reference,
    }


def _state(verdict: str | None) -> str:
    """``ok``, ``wrong``, ``unknown`` (not comparable) or ``none`` (no run was compared)."""
    if verdict is None:
        return "none"
    if verdict == "ok":
        return "ok"
    return "wrong" if verdict.startswith("diverges") else "unknown"


# Comparison: the rows and their readers.


def _comparison(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    is_compared = graph.verdict is not None or (graph.folder / "side_by_side.json").exists()
    rows = graph.rows() if is_compared else []
    frames: dict[tuple[Json, ...], int] = {}
    index = {row.name: i for i, row in enumerate(rows)}
    return {
        "rows": [_row(row, index, frames) for row in rows],
        "frames": [list(frame) for frame in frames],
        "culprit": _culprit(graph.entry, list(index)),
    }


def _row(row: RowEntry, index: Mapping[str, int], frames: dict[tuple[Json, ...], int]) -> Json:
    return [
        *(getattr(row, key) for key in _TEXTS),
        "x".join(map(str, row.shape)),
        row.region,
        row.is_output,
        row.mark,
        row.complaint,
        *(_error(getattr(row, key)) for key in ERRORS),
        [frames.setdefault(dataclasses.astuple(frame), len(frames)) for frame in row.stack],
        [index[name] for name in row.inputs if name in index],
    ]


def _error(error: MeasureEntry | None) -> list[float | None] | None:
    """``MEASURES`` with four digits; ``None`` for NaN and infinity."""
    return None if error is None else [_shortened(getattr(error, key)) for key in MEASURES]


def _shortened(value: Json) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _culprit(entry: GraphEntry, names: Sequence[str]) -> int | None:
    """The index of the row that the verdict names, or of its node's first result; ``None`` for another graph's."""
    name = entry.blame.value if entry.blame else ""
    value = re.compile(rf"{re.escape(name)}(__\d+)?")
    return next((i for i, other in enumerate(names) if value.fullmatch(other)), None)


# Stages: their texts, and the changes between them.


def _stages(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    shown: list[dict[str, Json]] = []
    before: list[StageGraph] = []  # the last stage that could be read
    after = ""
    dynamo = [item for item in run.dynamo_graphs if item.index == graph.index]
    stages = [*(stage for item in dynamo for stage in item.stages), *graph.entry.stages]
    earlier = {stage.name: stage.same_as or "" for stage in stages}
    for name in [*earlier, *(ONNX_STAGES if graph.regions else ())]:
        same_as = earlier.get(name, "")
        graphs, notice = _guarded([], stage_graphs, run, graph, name)
        stage: dict[str, Json] = {"nodes": None, "lines": [], "difference": []}
        if not notice:
            stage, notice = _guarded(stage, _stage, graph, before, graphs, same_as)
        shown.append({**stage, "name": name, "same_as": same_as, "after": after, "notice": notice})
        if not notice:
            before, after = graphs, name
    return {"stages": shown}


def _stage(graph: DumpedGraph, before: list[StageGraph], graphs: list[StageGraph], same_as: str) -> dict[str, Json]:
    lines: list[str] = []
    for item in graphs:
        lines += [f"# region_{item.region}"] if len(graphs) > 1 else []
        lines += item.text.splitlines()
    is_same = [item.path for item in before] == [item.path for item in graphs]
    return {
        "nodes": sum(item.operators for item in graphs),
        "lines": [] if same_as else lines,
        "difference": change_lines(diff_graphs(graph, before, graphs)) if before and not is_same else [],
    }


def change_lines(diffs: Iterable[StageDiff]) -> list[str]:
    """The changes between two stages, grouped by the user's line of code.

    Args:
        diffs: one, or one for each region.

    Returns:
        Lines that begin with ``@@`` (the line of code), ``-`` or ``+``.
    """
    lines: list[str] = []
    for diff in diffs:
        header = ""
        for change in diff.changes:
            code = next((node.code for node in (change.after, change.before) if node is not None and node.code), "")
            region = "" if diff.region is None else f"region_{diff.region} "
            new_header = f"@@ {region}{change.source or change.node.kind}  {code}".rstrip()
            lines += [new_header] if new_header != header else []
            header = new_header
            note = f"  ({change.note})" if change.note else ""
            lines += [f"-{change.before.text}{note}"] if change.before else []
            lines += [f"+{change.after.text}{note}"] if change.after else []
    return lines


# Placement: regions, and nodes in PyTorch.


def _placement(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    entry = graph.entry
    text, notice = _guarded([], _lines, run.file_of(graph, f"{entry.folder}/regions.txt"))
    keys = ("index", "nodes", "onnx_nodes", "onnx_nodes_optimized")
    return {
        "in_pytorch": [dataclasses.astuple(item) for item in entry.in_pytorch],
        "regions": [[getattr(item, key) for key in keys] for item in entry.regions],
        "products": [dataclasses.astuple(product) for item in entry.regions for product in item.products],
        "text": text,
        "notice_of_text": notice,
    }


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# Time: of the stages, of the compared run, and of operators.


def _recorded_time(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    cost = graph.entry.cost
    return {
        "seconds": list(graph.entry.seconds.items()),
        "regions": [(str(region), taken) for region, taken in cost.region_milliseconds.items()] if cost else [],
        "pytorch": cost and cost.pytorch_milliseconds,
        "crossing_tensors": cost and cost.crossing_tensors,
        "crossing_bytes": cost and cost.crossing_bytes,
        "operators": [],
        "by_operator": [],
        "by_module": [],
        "operators_notice": "The models were not run again for this report (--no-times).",
    }


def _time(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    times, notice = _guarded([], lambda: operator_times(graph, runs=_RUNS))
    return {
        **_recorded_time(run, graph),
        "operators": [
            [
                row.node,
                row.operator,
                item.region,
                _shortened(row.milliseconds),
                _shortened(row.share),
                list(row.fx_nodes),
                row.module,
                row.sources[-1] if row.sources else "",
            ]
            for item in times
            for row in item.rows
        ],
        "by_operator": [_group_row(group) for group in by_operator(times)],
        "by_module": [_group_row(group) for group in by_module(times)],
        "operators_notice": notice,
    }


def _group_row(group: GroupTime) -> Json:
    return [group.name or "(not attributed)", group.nodes, _shortened(group.milliseconds), _shortened(group.share)]


# Passes.


def _passes(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    places = [
        *(("", graph.folder.parent, item.passes) for item in run.dynamo_graphs if item.index == graph.index),
        ("", graph.folder, graph.entry.passes),
        *((f"region_{region.index}", region.folder, region.entry.passes) for region in graph.regions),
    ]
    rows = []
    for where, folder, passes in places:
        for result in passes:
            path = folder / "passes" / f"{result.name}.diff"
            lines, notice = _guarded([], _lines, path) if path.is_file() else ([], "")
            rows.append(
                {
                    "name": result.name,
                    "where": where,
                    **{key: getattr(result, key) for key in ("fired", "nodes_before", "nodes_after", "milliseconds")},
                    "near_misses": len(result.near_misses),
                    "said": result.undone or result.note or notice,
                    "undone": bool(result.undone),
                    "difference": lines[2:],  # without the header
                }
            )
    return {"passes": rows}


_PARTS: dict[str, Callable[[DumpedRun, DumpedGraph], dict[str, Json]]] = {
    "comparison": _comparison,
    "stages": _stages,
    "placement": _placement,
    "time": _time,
    "passes": _passes,
}
