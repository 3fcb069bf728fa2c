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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dumps.blame import CauseKind
from ..dumps.operator_times import GroupTime, by_module, by_operator, operator_times
from ..dumps.reading import DumpedGraph, DumpedRun, DumpError
from ..dumps.schema import DIRECTIONS, DynamoGraphEntry, GraphEntry, MeasureEntry, RowEntry, WrongElements, node_of
from ..dumps.stage_diff import StageDiff, diff_graphs
from ..dumps.stage_graphs import ONNX_STAGES, StageGraph, stage_graphs

Json = Any

MEASURES = ("max_abs", "error", "limit", "share", "max_ulp", "nonfinite", "scale")
"""The fields of an error, in the order of the page."""

ERRORS = ("error", "eager", "instability")
"""The errors of a row, see ``dumps.schema.RowEntry``; ``instability`` is that of the wrong run."""

_TEXTS = ("name", "user_name", "operator", "module", "source", "dtype", "mark", "complaint", "origin", "step")

_ROWS = ("inputs", "segment")

_ADDED = ("is_view", "elements", "onnx_nodes")

FIELDS = (*_TEXTS, "shape", "region", "is_output", *ERRORS, "stack", *_ROWS, *_ADDED)
"""The values of a row, in the order of the page. ``stack`` has indices of ``frames``, ``inputs`` and ``segment`` have
those of rows, ``is_view`` is whether it is a right view judged alone, ``elements`` are the wrong ones, ``onnx_nodes``
those of a wrong value."""

_VIEWS = frozenset(
    {
        "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand", "clone",
        "alias", "detach",
    }
)  # fmt: skip
"""Operators whose result has the elements of their input, in another shape or layout."""

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
        changed = _wrong_pass(graph.entry, made["passes"].get("passes", ()))
        summaries.append({**_summary(graph, dynamo), "culprit": culprit, "wrong_pass": changed, "notices": missing})
    return ReportData(
        {
            "run": run.folder.resolve().name,
            "folder": str(run.folder.resolve()),
            "started": run.manifest.started,
            "forked_from": run.manifest.forked_from or "",
            **{name: _pairs(getattr(run.manifest, name)) for name in ("versions", "options", "counters")},
            "given_up": _given_up(dynamo_graphs),
            "unused": run.manifest.unused,
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
        "note": "; ".join(graph.remarks),
        "blamed": entry.blame.value if entry.blame else "",
        "unchecked": entry.unchecked,
        "wrong_nodes": [[node.value, node.module] for node in entry.wrong_nodes],
        "more_wrong_nodes": entry.blame.more + 1 - len(entry.wrong_nodes) if entry.blame and entry.wrong_nodes else 0,
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
    culprit = _culprit(graph.entry, list(index))
    made = [[*_row(row, index, frames), _is_view(row), _elements(row.wrong_elements)] for row in rows]
    if culprit is not None and graph.entry.blame is not None and graph.entry.blame.elements is not None:
        made[culprit][-1] = _elements(graph.entry.blame.elements)
    wrong = {row.name for i, row in enumerate(rows) if i == culprit or row.mark in "!?"}
    onnx_nodes, _ = _guarded({}, _onnx_nodes, run, graph, wrong)  # the part "stages" has the notice
    return {
        "rows": [[*values, onnx_nodes.get(node_of(row.name), [])] for row, values in zip(rows, made, strict=True)],
        "frames": [list(frame) for frame in frames],
        "culprit": culprit,
    }


def _onnx_nodes(run: DumpedRun, graph: DumpedGraph, values: Collection[str]) -> dict[str, list[str]]:
    """By FX node, the nodes of ``model.onnx`` that values were translated to."""
    found: dict[str, list[str]] = {node_of(value): [] for value in values}
    for region in stage_graphs(run, graph, "onnx") if values and graph.regions else ():
        for node in region.nodes:
            if node.origin in found:
                found[node.origin].append(node.text)
    return found


def _is_view(row: RowEntry) -> bool:
    """Whether a value has the elements of its input, and was judged alone: its error says nothing."""
    name = row.operator.removeprefix("aten.").partition(".")[0]
    return name in _VIEWS and row.mark not in "!?" and not row.is_output and not row.segment


def _elements(found: WrongElements | None) -> Json:
    return None if found is None else {**dataclasses.asdict(found), "text": found.text}


def _wrong_pass(entry: GraphEntry, passes: Sequence[Json]) -> str | None:
    """The pass at fault as the page's address names it, if the dump has its diff: ``region_0 onnx.name``."""
    blame = entry.blame
    if blame is None or blame.kind != CauseKind.PASS:
        return None
    where = f"region_{blame.region}" if blame.stage == "onnx" else ""
    with_diff = {(item["where"], item["name"]) for item in passes if item["difference"]}
    return f"{where} {blame.name}".strip() if (where, blame.name) in with_diff else None


def _row(row: RowEntry, index: Mapping[str, int], frames: dict[tuple[Json, ...], int]) -> list[Json]:
    wrong_run = row.instability.difference if row.instability is not None else None
    return [
        *(getattr(row, key) for key in _TEXTS),
        "x".join(map(str, row.shape)),
        row.region,
        row.is_output,
        *map(_error, (row.error, row.eager, wrong_run)),
        [frames.setdefault(dataclasses.astuple(frame), len(frames)) for frame in row.stack],
        [index[name] for name in row.inputs if name in index],
        _positions(row.segment, index),
    ]


def _positions(nodes: Iterable[str], index: Mapping[str, int]) -> list[int]:
    """The rows of nodes, of each its first result."""
    found = (index.get(name, index.get(f"{name}__0")) for name in nodes)
    return [i for i in found if i is not None]


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
    keys = ("index", "nodes", "onnx_nodes", "onnx_nodes_optimized")
    return {
        "in_pytorch": [dataclasses.astuple(item) for item in entry.in_pytorch],
        "regions": [[getattr(item, key) for key in keys] for item in entry.regions],
        "products": [dataclasses.astuple(product) for item in entry.regions for product in item.products],
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
