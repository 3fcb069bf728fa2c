"""``dynamo-backends passes``: which passes there are, what they did in a dump, and why one did not fire.

::

    dynamo-backends passes                                       # all: sentence, stage, default
    dynamo-backends passes onnx_debug                            # what they did in the latest run of that folder
    dynamo-backends passes onnx_debug --why joint.attention      # its near misses: how far, which node, what stopped it
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..dumps.reading import find_run
from ..spelling import unknown_name
from ..tables import fit_table
from .common import add_dump_arguments, print_json, try_next

if TYPE_CHECKING:
    from passes.engine.manager import Pass


DESCRIPTION = "Lists all passes; with a dump folder of onnx_debug, shows what each did there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_dump_arguments(parser, positional=True)
    parser.add_argument("--why", metavar="NAME", help="the near misses of this pass: why it did not match (more)")


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
        text = why_text(manifest, why)  # raises, if there is no such pass
        if as_json:
            results = [run for run in _runs(manifest) if run.result["name"] == why]
            misses = [{"graph": run.graph, **miss} for run in results for miss in run.result["refusals"]]
            fired = sum(run.result["fired"] for run in results)
            print_json({"name": why, "fired": fired, "near_misses": misses})
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
    """One pass on one graph, as the manifest has it."""

    graph: str
    result: Mapping[str, Any]


def _runs(manifest: Mapping[str, Any]) -> Iterator[_Run]:
    for graph in manifest["dynamo_graphs"]:
        for result in graph["passes"]:
            yield _Run(f"graph {graph['index']}", result)
    for graph in manifest["graphs"]:
        label = f"graph {graph['index']} {graph['direction']}"
        for result in graph["passes"]:
            yield _Run(label, result)
        for region in graph["regions"]:
            for result in region["passes"]:
                yield _Run(f"{label} region {region['index']}", result)


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


def why_text(manifest: Mapping[str, Any], name: str) -> str:
    """The near misses of one pass.

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
    fired = sum(run.result["fired"] for run in runs if run.result["name"] == name)
    lines = [f"{name} fired {fired} time{'s' * (fired != 1)}."]
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
    if not misses:
        lines.append("No near misses: nothing in the graphs looks like what it replaces.")
    return "\n".join(lines) + "\n"


_LISTED = 6
"""How many nodes of a graph are named in a group of near misses."""


def _share(miss: Mapping[str, Any]) -> float:
    """How much of a pattern matched; nothing, where its nodes are not counted."""
    return miss["matched"] / miss["of"] if miss["of"] else 0.0


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
