"""``dynamo-backends passes``: which passes there are, what they did in a dump, and why one fired or did not.

::

    dynamo-backends passes                                       # all: sentence, stage, default
    dynamo-backends passes onnx_debug                            # what they did in the latest run of that folder
    dynamo-backends passes onnx_debug --why onnx.attention      # where it fired, with the diff; and its near misses
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dumps.reading import Run, find_run
from ..spelling import unknown_name
from ..tables import fit_table
from .common import add_dump_arguments, print_json, short_path, try_next

if TYPE_CHECKING:
    from passes.engine.manager import Pass


DESCRIPTION = "Lists all passes; with a dump folder of onnx_debug, shows what each did there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_dump_arguments(parser, positional=True)
    parser.add_argument(
        "--why", metavar="NAME", help="where this pass fired, and its near misses: why it did not match (more)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for. Exit code 2 if the dump or the pass is not there."""
    why, as_json = arguments.why, arguments.json
    if arguments.dump is None and why is None:
        if as_json:
            keys = ("stage", "name", "default", "sentence")
            print_json([{key: getattr(item, key) for key in keys} for item in _all_passes()])
        else:
            sys.stdout.write(list_text())
        return 0
    dumped = find_run(arguments.dump)
    manifest = {"dynamo_graphs": dumped.dynamo_graphs, "graphs": [graph.entry for graph in dumped.graphs]}
    if why is not None:
        text = why_text(manifest, why, dumped)  # raises, if there is no such pass
        if as_json:
            results = [run for run in _runs(manifest) if run.result["name"] == why]
            misses = [{"graph": run.graph, **miss} for run in results for miss in run.result["refusals"]]
            fired = [_fired_as_json(run, dumped) for run in results if run.result["fired"]]
            number = sum(run.result["fired"] for run in results)
            print_json({"name": why, "fired": number, "fired_in": fired, "near_misses": misses})
        else:
            sys.stdout.write(text)
        return 0
    done = _done(manifest)
    if as_json:
        print_json([dataclasses.asdict(item) for item in done])
        return 0
    sys.stdout.write(report_text(manifest))
    missed = next((item.name for item in done if item.near_misses), None)
    if missed is not None:
        print("\n" + try_next(arguments, "passes", "--why", missed))
    return 0


def list_text() -> str:
    """All passes in the order they run."""
    rows = [(item.stage, item.name, "on" if item.default else "off", item.sentence) for item in _all_passes()]
    table = fit_table(rows, ("stage", "pass", "default", "what it does"))
    return f"{table}\n\nSwitch them with options={{'passes': {{'disable': ['joint.*'], 'enable': [...]}}}}.\n"


def _all_passes() -> Sequence[Pass]:
    """The passes there are; this needs PyTorch, which reading a dump does not."""
    importlib.import_module("dynamo_backends.installation")
    from passes.engine.manager import all_passes

    return all_passes()


@dataclasses.dataclass(frozen=True)
class _Run:
    """One pass on one graph, as the manifest has it; ``folder`` has its diff, if the graph was not compiled by the
    process that forked this one."""

    graph: str
    result: Mapping[str, Any]
    folder: str

    def diff(self, dumped: Run | None) -> Path | None:
        """The file of its diff; ``None`` if there is none."""
        if dumped is None:
            return None
        path = dumped.folder / self.folder / "passes" / f"{self.result['name']}.diff"
        return path if path.is_file() else None


def _runs(manifest: Mapping[str, Any]) -> Iterator[_Run]:
    for graph in manifest["dynamo_graphs"]:
        for result in graph["passes"]:
            yield _Run(f"graph {graph['index']}", result, f"graph_{graph['index']:03d}")
    for graph in manifest["graphs"]:
        label = f"graph {graph['index']} {graph['direction']}"
        folder = f"graph_{graph['index']:03d}/{graph['direction']}"
        for result in graph["passes"]:
            yield _Run(label, result, folder)
        for region in graph["regions"]:
            for result in region["passes"]:
                yield _Run(f"{label} region {region['index']}", result, f"{folder}/region_{region['index']}")


@dataclasses.dataclass(frozen=True)
class _Done:
    """What one pass did, over all graphs of a run."""

    name: str
    graphs: int
    fired: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    near_misses: int
    undone: list[dict[str, str]]
    """``graph`` and ``reason`` of each time."""


def _done(manifest: Mapping[str, Any]) -> list[_Done]:
    runs: dict[str, list[_Run]] = {}
    for run in _runs(manifest):
        runs.setdefault(run.result["name"], []).append(run)
    found = []
    for name, of_pass in runs.items():
        kept = [run.result for run in of_pass if not run.result["undone"]]
        found.append(
            _Done(
                name,
                len(of_pass),
                sum(result["fired"] for result in kept),
                sum(result["nodes_before"] for result in kept),
                sum(result["nodes_after"] for result in kept),
                sum(run.result["milliseconds"] for run in of_pass),
                sum(len(run.result["refusals"]) for run in of_pass),
                [{"graph": run.graph, "reason": run.result["undone"]} for run in of_pass if run.result["undone"]],
            )
        )
    return found


def report_text(manifest: Mapping[str, Any]) -> str:
    """What each pass did, over all graphs of a run, and which were undone."""
    done = _done(manifest)
    if not done:
        return "No pass ran: nothing was compiled, or all passes were turned off.\n"
    rows = [
        (
            item.name,
            item.graphs,
            item.fired,
            item.nodes_before,
            item.nodes_after,
            f"{item.milliseconds:.1f}",
            item.near_misses or "",
            len(item.undone) or "",
        )
        for item in done
    ]
    text = fit_table(rows, ("pass", "graphs", "fired", "nodes", "after", "ms", "near misses", "undone")) + "\n"
    for item in done:
        for undone in item.undone:
            text += f"\n{item.name} on {undone['graph']} was undone: {undone['reason']}\n"
    return text


def why_text(manifest: Mapping[str, Any], name: str, dumped: Run | None = None) -> str:
    """Where one pass fired, the diff of the first graph in which it did, and its near misses.

    Args:
        manifest: ``dynamo_graphs`` and ``graphs``.
        name: of the pass.
        dumped: the run, which has the diffs.

    Raises:
        ValueError: no pass of that name ran.
    """
    runs = list(_runs(manifest))
    names = list(dict.fromkeys(run.result["name"] for run in runs))
    if name not in names:
        known = [item.name for item in _all_passes()]
        if name in known:
            raise ValueError(f"pass {name!r} did not run: it was turned off, or no graph reached its stage")
        raise ValueError(unknown_name("pass", name, names))
    fired = [run for run in runs if run.result["name"] == name and run.result["fired"]]
    number = sum(run.result["fired"] for run in fired)
    lines = [f"{name} fired {number} time{'s' * (number != 1)}."]
    lines.extend(_fired_lines(fired, dumped))
    misses = [(run.graph, miss) for run in runs if run.result["name"] == name for miss in run.result["refusals"]]
    groups: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for graph, miss in sorted(misses, key=lambda item: _share(item[1]), reverse=True):  # close to a match first
        own = rf"(?<![\w.]){re.escape(miss['node'])}(?![\w.])"
        reason = re.sub(own, "it", miss["reason"])  # one for all nodes that are alike
        groups.setdefault((miss["pattern"], reason), []).append((graph, miss))
    for (pattern, reason), found in groups.items():
        first = found[0][1]
        progress = f"{first['matched']} of {first['of']} nodes matched" if first["of"] else "near miss"
        times = f"{len(found)} times, " if len(found) > 1 else ""
        lines.append(f"\n{times}{progress}, then: {reason}" + (f" [{pattern}]" if pattern else ""))
        nodes: dict[str, list[str]] = {}
        for graph, miss in found:
            nodes.setdefault(graph, []).append(miss["node"])
        lines.extend(f"  {graph}: at {_listed(names)}" for graph, names in nodes.items())
    if not misses and not fired:
        lines.append("No near misses: nothing in the graphs looks like what it replaces.")
    if fired:
        lines.append(f"\nTo run without it: options={{'passes': {{'disable': [{name!r}]}}}}")
    return "\n".join(lines) + "\n"


def _fired_lines(fired: Sequence[_Run], dumped: Run | None) -> Iterator[str]:
    """Where a pass fired, and the first of its diffs."""
    files = [path for run in fired if (path := run.diff(dumped)) is not None]
    for run in fired:
        result, path = run.result, run.diff(dumped)
        places = f" at {_listed(result['matches'])}" if result["matches"] else ""
        undone = f", and was undone: {result['undone']}" if result["undone"] else ""
        times = f"{result['fired']} time{'s' * (result['fired'] != 1)}{places}{undone}"
        nodes = f"{result['nodes_before']} nodes before and {result['nodes_after']} after"
        yield f"  {run.graph}: {times}, {nodes}" + (f"; {short_path(str(path))}" if path else "")
    if files:
        diff = files[0].read_text(encoding="utf-8").splitlines()
        yield "\n" + "\n".join(diff[:_MOST_LINES])
        if len(diff) > _MOST_LINES:
            yield f"... {len(diff) - _MOST_LINES} more lines in {short_path(str(files[0]))}"


def _fired_as_json(run: _Run, dumped: Run) -> dict[str, object]:
    keys = ("fired", "nodes_before", "nodes_after", "matches", "undone")
    path = run.diff(dumped)
    return {"graph": run.graph, **{key: run.result[key] for key in keys}, "diff": str(path) if path else None}


_MOST_LINES = 40
"""Of a diff that are shown."""

_LISTED = 6
"""How many nodes of a graph are named in a group of near misses."""


def _share(miss: Mapping[str, Any]) -> float:
    """How much of a pattern matched; nothing, where its nodes are not counted."""
    return miss["matched"] / miss["of"] if miss["of"] else 0.0


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
