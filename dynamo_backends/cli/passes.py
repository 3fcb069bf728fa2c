"""``dynamo-backends passes``: the passes there are, what they did in a dump, and why one fired or not."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.engine.results import NearMiss, PassResult

from ..common.suggestions import unknown_name
from ..common.text_table import fit_table
from ..dumps.reading import DumpedRun, find_run
from .common import add_dump_arguments, count_text, print_json, short_path, try_next

if TYPE_CHECKING:
    from passes.engine.manager import Pass

_MAX_DIFF_LINES = 40
_MAX_NODES = 6
"""How many nodes are named that have the same reason."""

DETAILS = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser, positional=True)
    parser.add_argument("--why", metavar="NAME", help="show where this pass fired, and why it did not match elsewhere")


def run(arguments: argparse.Namespace) -> int:
    if arguments.dump is None and arguments.why is None:
        passes = _all_passes()
        if arguments.json:
            keys = ("stage", "name", "default", "sentence")
            print_json([{key: getattr(item, key) for key in keys} for item in passes])
        else:
            rows = [(item.stage, item.name, "on" if item.default else "off", item.sentence) for item in passes]
            print(fit_table(rows, ("stage", "pass", "default", "what it does")))
            print("\nSwitch them with options={'passes': {'disable': ['joint.*'], 'enable': [...]}}.")
        return 0
    dumped = find_run(arguments.dump)
    results = list(_results(dumped))
    if arguments.why is not None:
        results = _of_pass(results, arguments.why)
        if arguments.json:
            print_json(_why_as_json(arguments.why, results))
        else:
            sys.stdout.write(why_text(arguments.why, results))
        return 0
    totals = _totals(results)
    if arguments.json:
        print_json(totals)
        return 0
    sys.stdout.write(_totals_text(totals))
    _print_hint(arguments, dumped, totals)
    return 0


def _print_hint(arguments: argparse.Namespace, dumped: DumpedRun, totals: Sequence[dict[str, Any]]) -> None:
    """Suggests ``--why`` of a pass at fault, or else of one with near misses."""
    blamed = [graph.entry.blame.name for graph in dumped.graphs if graph.entry.blame is not None]
    at_fault = [item["name"] for item in totals if item["undone"] or item["name"] in blamed]
    missed = [item["name"] for item in totals if item["near_misses"]]
    for name in (at_fault or missed)[:1]:
        reason = "" if at_fault else f"{name} has near misses. "
        print(f"\n{reason}{try_next(arguments, 'passes', '--why', name)}")


def _all_passes() -> Sequence[Pass]:
    importlib.import_module("dynamo_backends.common.installation")
    from passes.engine.manager import all_passes  # imports PyTorch

    return all_passes()


@dataclasses.dataclass(frozen=True)
class Result:
    """What one pass did on one graph: the manifest's entry, and the file of the diff if there is one."""

    graph: str
    entry: PassResult
    diff: Path | None


def _results(run: DumpedRun) -> Iterator[Result]:
    graphs = [(f"graph {item.index}", item.passes, f"graph_{item.index:03d}") for item in run.dynamo_graphs]
    for graph in run.graphs:
        graphs.append((graph.name, graph.entry.passes, graph.reference))
        for region in graph.regions:
            label = f"{graph.name} region {region.index}"
            graphs.append((label, region.entry.passes, f"{graph.reference}/region_{region.index}"))
    for label, entries, folder in graphs:
        for entry in entries:
            path = run.folder / folder / "passes" / f"{entry.name}.diff"
            yield Result(label, entry, path if path.is_file() else None)


def _of_pass(results: Sequence[Result], name: str) -> list[Result]:
    """The results of one pass; ``ValueError`` if it did not run."""
    selected = [result for result in results if result.entry.name == name]
    if not selected:
        if name in [item.name for item in _all_passes()]:
            raise ValueError(f"pass {name!r} did not run: it was disabled, or no graph reached its stage")
        raise ValueError(unknown_name("pass", name, list(dict.fromkeys(item.entry.name for item in results))))
    return selected


def _totals(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What each pass did on all graphs of a run; ``fired`` and the nodes leave out where it was undone."""
    of_pass: dict[str, list[Result]] = {}
    for result in results:
        of_pass.setdefault(result.entry.name, []).append(result)
    totals = []
    for name, results in of_pass.items():
        kept = [result.entry for result in results if not result.entry.undone]
        totals.append(
            {
                "name": name,
                "graphs": len(results),
                **{key: sum(getattr(entry, key) for entry in kept) for key in ("fired", "nodes_before", "nodes_after")},
                "milliseconds": sum(result.entry.milliseconds for result in results),
                "near_misses": len(_near_misses(results)),
                "undone": [{"graph": item.graph, "reason": item.entry.undone} for item in results if item.entry.undone],
            }
        )
    return totals


def _totals_text(totals: Sequence[dict[str, Any]]) -> str:
    if not totals:
        return "No pass ran: nothing was compiled, or all passes were disabled.\n"
    keys = ("name", "graphs", "fired", "nodes_before", "nodes_after")
    rows = [
        (
            *(total[key] for key in keys),
            f"{total['milliseconds']:.1f}",
            total["near_misses"] or "",
            len(total["undone"]) or "",
        )
        for total in totals
    ]
    text = fit_table(rows, ("pass", "graphs", "fired", "nodes", "after", "ms", "near misses", "undone")) + "\n"
    for total in totals:
        for item in total["undone"]:
            text += f"\n{total['name']} on {item['graph']} was undone: {item['reason']}\n"
    return text


def _why_as_json(name: str, results: Sequence[Result]) -> dict[str, object]:
    keys = ("fired", "nodes_before", "nodes_after", "matches", "undone")
    fired = [
        {
            "graph": result.graph,
            **{key: getattr(result.entry, key) for key in keys},
            "diff": str(result.diff) if result.diff else None,
        }
        for result in results
        if result.entry.fired
    ]
    return {
        "name": name,
        "fired": sum(result.entry.fired for result in results),
        "fired_in": fired,
        "near_misses": [{"graph": graph, **dataclasses.asdict(miss)} for graph, miss in _near_misses(results)],
    }


def _near_misses(results: Sequence[Result]) -> list[tuple[str, NearMiss]]:
    return [(result.graph, miss) for result in results for miss in result.entry.near_misses]


def why_text(name: str, results: Sequence[Result]) -> str:
    """Where a pass fired, the first of its diffs, and its near misses."""
    fired = [result for result in results if result.entry.fired]
    lines = [f"{name} fired {count_text(sum(result.entry.fired for result in fired), 'time')}."]
    for result in fired:
        entry = result.entry
        nodes = f" at {_listed(entry.matches)}" if entry.matches else ""
        undone = f", undone: {entry.undone}" if entry.undone else ""
        path = f"; {short_path(str(result.diff))}" if result.diff else ""
        counts = f"{entry.nodes_before} nodes before, {entry.nodes_after} after"
        lines.append(f"  {result.graph}: {count_text(entry.fired, 'time')}{nodes}{undone}, {counts}{path}")
    diff = next((result.diff for result in fired if result.diff), None)
    if diff is not None:
        changed = diff.read_text(encoding="utf-8").splitlines()
        lines += ["", *changed[:_MAX_DIFF_LINES]]
        if len(changed) > _MAX_DIFF_LINES:
            lines.append(f"... {len(changed) - _MAX_DIFF_LINES} more lines in {short_path(str(diff))}")
    misses = sorted(_near_misses(results), key=lambda item: -item[1].matched / (item[1].of or 1))  # closest first
    nodes_of = collections.defaultdict(list)
    for graph, miss in misses:
        progress = f"{miss.matched} of {miss.of} nodes matched" if miss.of else "near miss"
        pattern = f" [{miss.pattern}]" if miss.pattern else ""
        reason = re.sub(rf"(?<![\w.]){re.escape(miss.node)}(?![\w.])", "it", miss.reason)
        nodes_of[f"\n{progress}, then: {reason}{pattern}"].append(f"{miss.node} ({graph})")
    for heading, nodes_with_graph in nodes_of.items():
        lines += [heading, f"  at {_listed(nodes_with_graph)}"]
    if not misses and not fired:
        lines.append("No near misses: no graph has anything similar to its pattern.")
    if fired:
        lines.append(f"\nTo disable it: options={{'passes': {{'disable': [{name!r}]}}}}")
    return "\n".join(lines) + "\n"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NODES} more" if len(names) > _MAX_NODES else ""
    return ", ".join(names[:_MAX_NODES]) + more
