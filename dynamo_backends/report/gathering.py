"""Reads a dump into the values that the report shows: lists, texts and numbers, as they go into JSON.

A run becomes an overview, and for each graph five parts, which the page reads when they are looked at: ``comparison``
(the rows, and who reads whom), ``stages`` (texts and differences), ``placement`` (what went to ONNX, and why the rest
did not), ``time`` and ``passes``. What cannot be read of a graph becomes a notice in the place of that part.
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
from ..dumps.reading import MANIFEST, DumpedGraph, DumpError, Run
from ..dumps.stage_diff import diff_graphs
from ..dumps.stage_graphs import ONNX_STAGES, StageGraph, stage_graphs
from .differences import change_lines

Json = Any
"""What ``json`` reads and writes. What it has of a dump is checked where it is read."""

MEASURES = ("max_abs", "max_rel", "rmse", "max_ulp", "nonfinite", "scale")
"""The figures of a distance, in the order they are in the page."""

DISTANCES = ("onnx", "eager", "session", "local_onnx", "local_eager", "in_model_onnx", "in_model_eager")
"""The distances of a row, see ``debug.rows.Row``."""

FIELDS = (
    *("name", "user_name", "operator", "module", "source", "dtype"),
    *("shape", "region", "is_output", "mark", "complaint"),
    *DISTANCES,
    *("stack", "inputs"),
)
"""What the page has of a row, in this order. ``stack`` are indices of ``frames``; ``inputs`` of rows."""

_RUNS = 10
"""How often the models run to tell where the time goes."""

_NAME = re.compile(r"[A-Za-z_]\w*")

_DAMAGE = (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a file or a value that is not as we write it raises; ``DumpError`` is a ``ValueError``."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the page shows.

    Attributes:
        overview: the run and a line for each graph.
        parts: by name, such as ``graph_000/forward/stages``, what is read when it is looked at.
    """

    overview: Mapping[str, Json]
    parts: Mapping[str, Json]

    @property
    def notices(self) -> list[str]:
        """What of the dump could not be read."""
        of_graphs = (f"{graph['name']}: {notice}" for graph in self.overview["graphs"] for notice in graph["notices"])
        return [*self.overview["notices"], *of_graphs]


def gather(run: Run, *, times: bool = True) -> Report:
    """Reads a run.

    Args:
        run: the run.
        times: whether the models are run on their recorded inputs, to tell where the time goes.
    """
    manifest = run.manifest
    parts: dict[str, Json] = {}
    summaries = []
    dynamo_graphs, notice = _guarded({}, _dynamo_graphs, manifest)
    notices = [f"{MANIFEST}, dynamo_graphs: {notice}"] if notice else []
    entries = manifest.get("graphs")
    if not isinstance(entries, list):
        notices.append(f"{MANIFEST} is damaged: it has no list of graphs")
        entries = []
    for entry in entries:
        # Each by itself: one that is damaged does not hide the others.
        alone = Run(run.folder, {**manifest, "graphs": [entry]})
        graphs, notice = _guarded([], lambda run: run.graphs, alone)
        if notice:
            notices.append(f"graph {_label(entry)} cannot be shown: {notice}")
        for graph in graphs:
            dynamo = dynamo_graphs.get(graph.index, {})
            made, missing = {}, []
            for name, make in {**_PARTS, **({} if times else {"time": _time_recorded})}.items():
                made[name], notice = _guarded(None, make, run, graph, dynamo)
                if notice:
                    missing.append(notice)
                parts[f"{graph.reference}/{name}"] = made[name] if not notice else {"notice": notice}
            summary, notice = _guarded({}, _summary, graph, dynamo, made["comparison"])
            if notice:
                notices.append(f"{graph.name} cannot be shown: {notice}")
            else:
                summaries.append({**summary, "notices": missing})
    return Report(
        {
            "run": run.folder.resolve().name,
            "folder": str(run.folder.resolve()),
            "started": str(manifest.get("started") or ""),
            "forked_from": str(manifest.get("forked_from") or ""),
            "versions": _pairs(manifest.get("versions")),
            "options": _pairs(manifest.get("options")),
            "counters": _pairs(manifest.get("counters")),
            "given_up": _given_up(dynamo_graphs.values()),
            "graphs": summaries,
            "notices": notices,
            "fields": FIELDS,
            "measures": MEASURES,
        },
        parts,
    )


def _guarded(otherwise: Any, make: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What ``make`` makes and ``""``; or ``otherwise`` and what is the matter, where the dump is damaged."""
    try:
        return make(*arguments), ""
    except DumpError as error:
        return otherwise, str(error)
    except _DAMAGE as error:
        return otherwise, f"the dump is damaged: {type(error).__name__}: {error}"


def _dynamo_graphs(manifest: Mapping[str, Json]) -> dict[int, Mapping[str, Json]]:
    return {int(item["index"]): item for item in manifest["dynamo_graphs"]}


def _label(entry: object) -> str:
    if not isinstance(entry, Mapping):
        return repr(entry)[:80]
    return f"{entry.get('index')} {entry.get('direction')}"


def _pairs(values: object) -> list[list[str]]:
    if not isinstance(values, Mapping):
        return []
    return [[str(key), item if isinstance(item, str) else json.dumps(item)] for key, item in values.items()]


def _given_up(dynamo_graphs: Iterable[Mapping[str, Json]]) -> list[str]:
    said = []
    for item in dynamo_graphs:
        if item.get("given_up"):
            said.append(f"Dynamo gave up graph {item['index']}: {item['given_up']}")
        failed: Mapping[str, Json] = item.get("not_compiled") or {}
        said.extend(f"graph {item['index']} {direction}: {why}" for direction, why in failed.items())
    return said


def _summary(graph: DumpedGraph, dynamo: Mapping[str, Json], comparison: Json) -> Json:
    entry = graph.entry
    worst = entry["worst"]
    verdict = graph.verdict
    return {
        "reference": graph.reference,
        "name": graph.name,
        "index": graph.index,
        "direction": graph.direction,
        "where": _place(dynamo.get("where")),
        "end": {"reason": str(dynamo["end"].get("reason", "")), **_place(dynamo["end"])} if dynamo.get("end") else None,
        "nodes": int(entry["nodes"]),
        "nodes_on_onnx": int(entry["nodes_on_onnx"]),
        "share": float(entry["share_on_onnx"]),
        "regions": len(graph.regions),
        "runs": int(entry["runs"]),
        "seconds": sum(_seconds(entry).values()),
        "worst": {"value": str(worst["value"]), **{side: _distance(worst.get(side)) for side in ("onnx", "eager")}}
        if worst
        else None,
        "verdict": str(verdict) if verdict is not None else "",
        "state": _state(verdict),
        "note": str(entry["note"]),
        "culprit": comparison["culprit"] if comparison else None,
        "unchecked": [str(item) for item in entry["unchecked"]],
        "reference_kind": str(entry["reference"]),
    }


def _state(verdict: str | None) -> str:
    """``ok``, ``wrong``, ``unknown`` (not comparable) or ``none`` (no run was compared)."""
    if verdict is None:
        return "none"
    if verdict == "ok":
        return "ok"
    return "wrong" if verdict.startswith("diverges") else "unknown"


def _place(place: Json) -> dict[str, Json]:
    if not place:
        return {"function": "", "source": ""}
    file, line = place.get("file") or "", place.get("line")
    said = place.get("place") or (f"{file}:{line}" if file and line else file)
    return {"function": str(place.get("function") or ""), "source": str(said)}


def _seconds(entry: Mapping[str, Json]) -> dict[str, float]:
    return {str(stage): float(seconds) for stage, seconds in entry.get("seconds", {}).items()}


# Comparison: the rows, and who reads whom.


def _comparison(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    rows = _rows(graph)
    frames: dict[tuple[str, int, str, str, bool], int] = {}
    index = {str(row["name"]): i for i, row in enumerate(rows)}
    inputs, notice = _guarded({}, _inputs, run, graph, index)
    return {
        "rows": [_row(row, inputs.get(i, ()), frames) for i, row in enumerate(rows)],
        "frames": [list(frame) for frame in frames],
        "culprit": _culprit(graph.entry, rows),
        "picture_notice": notice,
    }


def _rows(graph: DumpedGraph) -> list[Mapping[str, Json]]:
    """The rows of a comparison in execution order; none if no run was compared.

    Raises:
        DumpError: the file is damaged.
    """
    if graph.verdict is None and not (graph.folder / "side_by_side.json").exists():
        return []
    return list(graph.rows())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _row(row: Mapping[str, Json], inputs: Sequence[int], frames: dict[tuple[str, int, str, str, bool], int]) -> Json:
    stack = [
        frames.setdefault(
            (
                str(frame["file"]),
                int(frame["line"]),
                str(frame.get("function") or ""),
                str(frame.get("code") or ""),
                bool(frame.get("user")),
            ),
            len(frames),
        )
        for frame in row.get("stack") or ()
    ]
    region = row["region"]
    return [
        *(str(row.get(key) or "") for key in ("name", "user_name", "operator", "module", "source", "dtype")),
        "x".join(map(str, row["shape"])),
        None if region is None else int(region),
        bool(row["is_output"]),
        str(row["mark"]),
        str(row["complaint"]),
        *(_distance(row.get(key)) for key in DISTANCES),
        stack,
        list(inputs),
    ]


def _distance(distance: Json) -> list[float | None] | None:
    """The figures of a distance with as many digits as are shown; ``None`` for one that is NaN or infinite."""
    if distance is None:
        return None
    return [_shortened(distance[key]) for key in MEASURES]


def _shortened(value: Json) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _culprit(entry: Mapping[str, Json], rows: Sequence[Mapping[str, Json]]) -> int | None:
    """The row that the verdict names; none if it is no value of this graph."""
    name = str(entry["blame"]["value"]) if entry["blame"] else ""
    names = [str(row["name"]) for row in rows]
    if name in names:
        return names.index(name)
    results = re.compile(re.escape(name) + r"__\d+")
    return next((i for i, other in enumerate(names) if results.fullmatch(other)), None)


def _inputs(run: Run, graph: DumpedGraph, index: Mapping[str, int]) -> dict[int, list[int]]:
    """By row, the rows that its node reads."""
    (stage,) = stage_graphs(run, graph, "post_grad")
    made_of: dict[str, list[int]] = {}
    found: dict[int, list[int]] = {}
    for node in stage.nodes:
        names = dict.fromkeys(name for argument in node.arguments for name in _NAME.findall(argument))
        read = list(dict.fromkeys(row for name in names for row in made_of.get(name, ())))
        rows = _rows_of(node.name, index)
        if not rows:  # no value of its own, such as an element of a result: it stands for what it is made of
            element = index.get("__".join(node.arguments)) if node.operator == "getitem" else None
            made_of[node.name] = read if element is None else [element]
            continue
        made_of[node.name] = rows
        found.update(dict.fromkeys(rows, read))
    return found


def _rows_of(name: str, index: Mapping[str, int]) -> list[int]:
    """The rows of a node: that of its name, or those of its results, ``name__0``, ``name__1``."""
    if name in index:
        return [index[name]]
    rows: list[int] = []
    while f"{name}__{len(rows)}" in index:
        rows.append(index[f"{name}__{len(rows)}"])
    return rows


# Stages: their texts, and what changed from one to the next.


def _stages(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    shown: list[dict[str, Json]] = []
    before: list[StageGraph] = []  # of the last stage that can be read
    after = ""
    files = {str(item["name"]): item for entry in (dynamo, graph.entry) for item in entry.get("stages", ())}
    for name in [*files, *(ONNX_STAGES if graph.regions else ())]:
        same_as = str(files.get(name, {}).get("same_as") or "")
        graphs, notice = _guarded([], stage_graphs, run, graph, name)
        entry = _NO_STAGE
        if not notice:
            entry, notice = _guarded(_NO_STAGE, _stage, graph, before, graphs, same_as)
        shown.append({**entry, "name": name, "same_as": same_as, "after": after, "notice": notice})
        if not notice:
            before, after = graphs, name
    return {"stages": shown}


_NO_STAGE: dict[str, Json] = {"nodes": None, "lines": [], "difference": []}


def _stage(graph: DumpedGraph, before: list[StageGraph], graphs: list[StageGraph], same_as: str) -> dict[str, Json]:
    lines: list[str] = []
    for item in graphs:
        lines += [f"# region_{item.region}"] if len(graphs) > 1 else []
        lines += item.text.splitlines()
    is_same = bool(before) and [item.path for item in before] == [item.path for item in graphs]
    return {
        "nodes": sum(item.operators for item in graphs),
        "lines": [] if same_as else lines,
        "difference": change_lines(diff_graphs(graph, before, graphs)) if before and not is_same else [],
    }


# What went to ONNX and what did not.


def _placement(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    entry = graph.entry
    text, notice = _guarded([], _lines, run.file_of(graph, f"{entry['folder']}/regions.txt"))
    return {
        "in_pytorch": [
            [str(item[key] or "") for key in ("node", "operator", "reason", "source")] for item in entry["in_pytorch"]
        ],
        "regions": [
            [int(item["index"]), int(item["nodes"]), int(item["onnx_nodes"]), int(item["onnx_nodes_optimized"])]
            for item in entry["regions"]
        ],
        "text": text,
        "notice_of_text": notice,
    }


# Time: compiling by stage, the compared run by region, and operators.


def _time_recorded(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    cost = graph.entry.get("cost") or {}
    return {
        "seconds": list(_seconds(graph.entry).items()),
        "regions": [[str(index), float(ms)] for index, ms in cost.get("region_milliseconds", {}).items()],
        "pytorch": _shortened(cost.get("pytorch_milliseconds")),
        "crossing_tensors": cost.get("crossing_tensors"),
        "crossing_bytes": cost.get("crossing_bytes"),
        "operators": [],
        "by_operator": [],
        "by_module": [],
        "operators_notice": "The models were not run again for this report (--no-times).",
    }


def _time(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    recorded = _time_recorded(run, graph, dynamo)
    times, notice = _guarded([], lambda: operator_times(graph, runs=_RUNS))
    return {
        **recorded,
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
        "by_operator": [_group(group) for group in by_operator(times)],
        "by_module": [_group(group) for group in by_module(times)],
        "operators_notice": notice,
    }


def _group(group: GroupTime) -> Json:
    return [group.name or "(not attributed)", group.nodes, _shortened(group.milliseconds), _shortened(group.share)]


# Passes: what each did.


def _passes(run: Run, graph: DumpedGraph, dynamo: Mapping[str, Json]) -> Json:
    of = [("", dynamo.get("passes", ())), ("", graph.entry["passes"])]
    of += [(f"region_{region.index}", region.entry["passes"]) for region in graph.regions]
    places = {"": [graph.folder.parent / "passes", graph.folder / "passes"]}
    places.update({f"region_{region.index}": [region.folder / "passes"] for region in graph.regions})
    rows = []
    for where, results in of:
        for result in results:
            name = str(result["name"])
            paths = [place / f"{name}.diff" for place in places[where]]
            path = next((item for item in paths if item.is_file()), None)
            lines: list[str] = []
            notice = ""
            if path is not None:
                lines, notice = _guarded([], _lines, path)
            rows.append(
                {
                    "name": name,
                    "where": where,
                    **{key: int(result[key]) for key in ("fired", "nodes_before", "nodes_after")},
                    "milliseconds": float(result["milliseconds"]),
                    "near_misses": len(result["refusals"]),
                    "said": str(result["undone"] or result["note"] or notice),
                    "undone": bool(result["undone"]),
                    "difference": lines[2:],  # after the names of before and after
                }
            )
    return {"passes": rows}


_PARTS: dict[str, Callable[[Run, DumpedGraph, Mapping[str, Json]], Json]] = {
    "comparison": _comparison,
    "stages": _stages,
    "placement": _placement,
    "time": _time,
    "passes": _passes,
}
