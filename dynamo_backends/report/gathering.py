"""Reads a dump into the JSON values of the report.

These are an overview, and for each graph five parts, which the page reads lazily: ``comparison`` (the rows and their
readers), ``stages`` (texts and differences), ``placement`` (regions, and nodes in PyTorch), ``time`` and ``passes``. A
notice replaces a part that cannot be read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dumps.blame import CauseKind
from ..dumps.reading import DumpedGraph, DumpedRun, DumpError
from ..dumps.schema import DynamoGraphEntry, GraphEntry, MeasureEntry, RowEntry, WrongElements, node_of
from ..dumps.stage_diff import diff_graphs
from ..dumps.stage_graphs import StageGraph, stage_graphs, stages_of

Json = Any

_MEASURES = ("max_abs", "error", "limit", "share", "max_ulp", "nonfinite", "scale")

_FIELDS = (
    "name", "user_name", "operator", "module", "source", "dtype", "mark", "complaint", "origin", "step", "region",
    "is_output",
)  # fmt: skip
"""The fields of a row that the page has as they are."""

_VIEWS = frozenset(
    {
        "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand", "clone",
        "alias", "detach",
    }
)  # fmt: skip
"""Operators whose result has the elements of their input, in another shape or layout."""

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


def gather(run: DumpedRun) -> ReportData:
    """Reads a run."""
    parts: dict[str, Json] = {}
    summaries = []
    dynamo_graphs, notice = _guarded([], lambda: run.dynamo_graphs)
    notices = [notice] if notice else []
    for position in range(len(run.manifest.graphs)):
        graph, notice = _guarded(None, run.graph, position)
        if graph is None:
            notices.append(f"a graph cannot be read: {notice}")
            continue
        made = {name: _guarded({}, make, run, graph) for name, make in _PARTS.items()}
        parts |= {f"{graph.reference}/{name}": {"notice": why} if why else part for name, (part, why) in made.items()}
        unknown = DynamoGraphEntry(graph.index, None, None, ())
        dynamo = next((item for item in dynamo_graphs if item.index == graph.index), unknown)
        leads = {
            "culprit": made["comparison"][0].get("culprit"),
            "wrong_pass": _wrong_pass(graph.entry, made["passes"][0].get("passes", ())),
            "notices": [why for _, why in made.values() if why],
        }
        summaries.append({**_summary(graph, dynamo), **leads})
    overview = {
        "run": run.folder.resolve().name,
        "folder": str(run.folder.resolve()),
        "started": run.manifest.started,
        "forked_from": run.manifest.forked_from or "",
        **{name: _pairs(getattr(run.manifest, name)) for name in ("versions", "options", "counters")},
        "given_up": [text for item in dynamo_graphs for text in _given_up(item)],
        "unused": run.manifest.unused,
        "graphs": summaries,
        "notices": notices,
    }
    return ReportData(overview, parts)


def _guarded(default: Any, read: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What ``read`` returns and ``""``; ``default`` and a notice if the dump is damaged."""
    try:
        return read(*arguments), ""
    except _DAMAGE as error:
        return default, str(error) if isinstance(error, DumpError) else f"{type(error).__name__}: {error}"


def _pairs(values: Mapping[str, Json]) -> list[list[str]]:
    return [[key, item if isinstance(item, str) else json.dumps(item)] for key, item in values.items()]


def _given_up(item: DynamoGraphEntry) -> Iterator[str]:
    if item.given_up:
        yield f"Dynamo gave up graph {item.index}: {item.given_up}"
    yield from (f"graph {item.index} {direction}: {why}" for direction, why in item.not_compiled.items())


def _summary(graph: DumpedGraph, dynamo: DynamoGraphEntry) -> dict[str, Json]:
    entry = graph.entry
    worst = entry.worst
    begins, ends = dynamo.begins, dynamo.ends
    return {
        "reference": graph.reference,
        "name": graph.name,
        "where": {"function": begins.function, "source": begins.place},
        "end": {"reason": ends.reason, "source": ends.place} if ends.reason else None,
        "nodes": entry.nodes,
        "share": graph.share_that_ran,
        "regions": len(graph.regions),
        "runs": entry.runs,
        "seconds": sum(entry.seconds.values()),
        "worst": worst and {"value": worst.value, "onnx": _error(worst.onnx), "eager": _error(worst.eager)},
        "verdict": graph.verdict or "",
        "state": _state(graph),
        "note": "; ".join(graph.remarks),
        "blamed": entry.blame.value if entry.blame else "",
        "unchecked": entry.unchecked,
        "wrong_nodes": [[node.value, node.module] for node in entry.wrong_nodes],
        "more_wrong_nodes": entry.blame.more + 1 - len(entry.wrong_nodes) if entry.blame and entry.wrong_nodes else 0,
        "reference_kind": entry.reference,
    }


def _state(graph: DumpedGraph) -> str:
    """``ok``, ``wrong``, ``unknown`` (not comparable) or ``none`` (no run was compared)."""
    if graph.is_wrong:
        return "wrong"
    return {None: "none", "ok": "ok"}.get(graph.verdict, "unknown")


# Comparison: the rows and their readers.


def _comparison(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    is_compared = graph.verdict is not None or (graph.folder / "side_by_side.json").exists()
    rows = graph.rows() if is_compared else []
    frames: dict[tuple[Json, ...], int] = {}
    index = {row.name: i for i, row in enumerate(rows)}
    blame = graph.entry.blame
    culprit = next(iter(_positions([blame.value], index)), None) if blame is not None else None
    made = [_row(row, index, frames) for row in rows]
    if culprit is not None and blame is not None and blame.elements is not None:
        made[culprit]["elements"] = _elements(blame.elements)
    wrong = {row.name for i, row in enumerate(rows) if i == culprit or row.mark in "!?"}
    onnx_nodes, _ = _guarded({}, _onnx_nodes, run, graph, wrong)  # the part "stages" has the notice
    for row in made:
        row["onnx_nodes"] = onnx_nodes.get(node_of(row["name"]), [])
    return {"rows": made, "frames": [list(frame) for frame in frames], "culprit": culprit}


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


def _row(row: RowEntry, index: Mapping[str, int], frames: dict[tuple[Json, ...], int]) -> dict[str, Json]:
    """A row: ``stack`` has indices of ``frames``; ``inputs`` and ``segment`` have those of rows."""
    return {
        **{key: getattr(row, key) for key in _FIELDS},
        "shape": "x".join(map(str, row.shape)),
        "error": _error(row.error),
        "eager": _error(row.eager),
        "instability": _error(row.instability.difference if row.instability is not None else None),
        "stack": [frames.setdefault(dataclasses.astuple(frame), len(frames)) for frame in row.stack],
        "inputs": [index[name] for name in row.inputs if name in index],
        "segment": _positions(row.segment, index),
        "is_view": _is_view(row),
        "elements": _elements(row.wrong_elements),
    }


def _positions(nodes: Iterable[str], index: Mapping[str, int]) -> list[int]:
    """The rows of nodes, of each its first result."""
    found = (index.get(name, index.get(f"{name}__0")) for name in nodes)
    return [i for i in found if i is not None]


def _error(error: MeasureEntry | None) -> dict[str, float | None] | None:
    """The measures with four digits; ``None`` for NaN and infinity."""
    return None if error is None else {key: _shortened(getattr(error, key)) for key in _MEASURES}


def _shortened(value: Json) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


# Stages: their texts, and the changes between them.


def _stages(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    shown: list[dict[str, Json]] = []
    before: list[StageGraph] = []  # the last stage that could be read
    after = ""
    for entry in stages_of(run, graph):
        stage = {"name": entry.name, "same_as": entry.same_as or "", "nodes": entry.nodes, "after": after}
        graphs, notice = _guarded([], stage_graphs, run, graph, entry.name)
        texts, unread = _guarded({"lines": [], "difference": []}, _stage_texts, graph, before, graphs)
        shown.append({**stage, **texts, "notice": notice or unread})
        if not notice and not unread:
            before, after = graphs, entry.name
    return {"stages": shown}


def _stage_texts(graph: DumpedGraph, before: list[StageGraph], graphs: list[StageGraph]) -> dict[str, list[str]]:
    lines: list[str] = []
    for item in graphs:
        lines += [f"# region_{item.region}"] if len(graphs) > 1 else []
        lines += item.text.splitlines()
    is_same = [item.path for item in before] == [item.path for item in graphs]
    diffs = diff_graphs(graph, before, graphs) if before and graphs and not is_same else []
    return {"lines": [] if is_same else lines, "difference": [line for diff in diffs for line in diff.lines]}


# Placement: regions, and nodes in PyTorch.


def _placement(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    entry = graph.entry
    keys = ("index", "nodes", "onnx_nodes", "onnx_nodes_optimized")
    return {
        "in_pytorch": [dataclasses.astuple(item) for item in entry.in_pytorch],
        "regions": [[getattr(item, key) for key in keys] for item in entry.regions],
        "failed": list(entry.rescued.items()),
        "products": [dataclasses.astuple(product) for item in entry.regions for product in item.products],
    }


# Time: of the stages, and of the compared run.


def _time(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    cost = graph.entry.cost
    return {
        "reference": graph.short_reference,
        "seconds": list(graph.entry.seconds.items()),
        "regions": list(cost.region_milliseconds.items()) if cost else [],
        "pytorch": cost and cost.pytorch_milliseconds,
        "crossing_tensors": cost and cost.crossing_tensors,
        "crossing_bytes": cost and cost.crossing_bytes,
    }


# Passes.


def _passes(run: DumpedRun, graph: DumpedGraph) -> dict[str, Json]:
    rows = []
    for item in run.passes(graph):
        result, diff = item.result, item.diff
        lines, notice = _guarded([], _lines, diff) if diff is not None else ([], "")
        rows.append(
            {
                "name": result.name,
                "where": "" if item.region is None else f"region_{item.region}",
                **{key: getattr(result, key) for key in ("fired", "nodes_before", "nodes_after", "milliseconds")},
                "near_misses": len(result.near_misses),
                "said": result.undone or result.note or notice,
                "undone": bool(result.undone),
                "difference": lines[2:],  # without the header
            }
        )
    return {"passes": rows}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


_PARTS: Mapping[str, Callable[[DumpedRun, DumpedGraph], dict[str, Json]]] = {
    "comparison": _comparison,
    "stages": _stages,
    "placement": _placement,
    "time": _time,
    "passes": _passes,
}
