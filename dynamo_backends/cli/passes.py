"""``dynamo-backends passes``: the passes there are, what they did in a dump, and why one fired or not."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..common.suggestions import unknown_name
from ..common.text_table import fit_table, listed
from ..dumps.reading import DumpedPass, find_run
from .common import add_dump_arguments, coloured, count_text, print_json, short_path, try_next

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
        as_json, text = _known()
    elif arguments.why is None:
        as_json, text = _totals(arguments)
    else:
        passes = _of_pass(find_run(arguments.dump).passes(), arguments.why)
        as_json = [{"graph": item.place, "diff": item.diff, "result": item.result} for item in passes]
        text = why_text(arguments.why, passes)
    if arguments.json:
        print_json(as_json)
    else:
        sys.stdout.write(text)
    return 0


def _known() -> tuple[object, str]:
    passes = _all_passes()
    keys = ("stage", "name", "default", "sentence")
    rows = [(item.stage, item.name, "on" if item.default else "off", item.sentence) for item in passes]
    how = "Switch them with options={'passes': {'disable': ['joint.*'], 'enable': [...]}}."
    as_json = [{key: getattr(item, key) for key in keys} for item in passes]
    return as_json, f"{fit_table(rows, ('stage', 'pass', 'default', 'what it does'))}\n\n{how}\n"


def _all_passes() -> Sequence[Pass]:
    importlib.import_module("dynamo_backends.common.installation")
    from passes.engine.manager import all_passes  # imports PyTorch

    return all_passes()


def _of_pass(passes: Sequence[DumpedPass], name: str) -> list[DumpedPass]:
    """The results of one pass; ``ValueError`` if it did not run."""
    selected = [item for item in passes if item.result.name == name]
    if not selected:
        if name in [item.name for item in _all_passes()]:
            raise ValueError(f"pass {name!r} did not run: it was disabled, or no graph reached its stage")
        raise ValueError(unknown_name("pass", name, list(dict.fromkeys(item.result.name for item in passes))))
    return selected


def _totals(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """What each pass did on all graphs of a run; ``fired`` and the nodes leave out where it was undone."""
    dumped = find_run(arguments.dump)
    passes = dumped.passes()
    totals = []
    for name in dict.fromkeys(item.result.name for item in passes):
        own = [item for item in passes if item.result.name == name]
        kept = [item.result for item in own if not item.result.undone]
        totals.append(
            {
                "name": name,
                "graphs": len(own),
                **{key: sum(getattr(item, key) for item in kept) for key in ("fired", "nodes_before", "nodes_after")},
                "milliseconds": round(sum(item.result.milliseconds for item in own), 1),
                "near_misses": sum(len(item.result.near_misses) for item in own),
                "undone": [{"graph": item.place, "reason": item.result.undone} for item in own if item.result.undone],
            }
        )
    if not totals:
        return totals, "No pass ran: nothing was compiled, or all passes were disabled.\n"
    rows = [(*list(item.values())[:-2], item["near_misses"] or "", len(item["undone"]) or "") for item in totals]
    headers = ("pass", "graphs", "fired", "nodes", "after", "ms", "near misses", "undone")
    lines = [fit_table(rows, headers)]
    for item in totals:
        lines += [f"\n{item['name']} on {one['graph']} was undone: {one['reason']}" for one in item["undone"]]
    blamed = [graph.entry.blame.name for graph in dumped.graphs if graph.entry.blame is not None]
    at_fault = [item["name"] for item in totals if item["undone"] or item["name"] in blamed]
    missed = [item["name"] for item in totals if item["near_misses"]]
    for name in (at_fault or missed)[:1]:
        reason = "" if at_fault else f"{name} has near misses. "
        lines.append(f"\n{reason}{try_next(arguments, 'passes', '--why', name)}")
    return totals, "\n".join(lines) + "\n"


def why_text(name: str, passes: Iterable[DumpedPass]) -> str:
    """Where a pass fired, the first of its diffs, and its near misses."""
    results = [(item.result, item) for item in passes]
    fired = [(result, item) for result, item in results if result.fired]
    lines = [f"{name} fired {count_text(sum(result.fired for result, _ in fired), 'time')}."]
    for result, item in fired:
        nodes = f" at {listed(result.matches, _MAX_NODES)}" if result.matches else ""
        undone = f", undone: {result.undone}" if result.undone else ""
        counts = f"{result.nodes_before} nodes before, {result.nodes_after} after"
        path = f"; {short_path(str(item.diff))}" if item.diff else ""
        lines.append(f"  {item.place}: {count_text(result.fired, 'time')}{nodes}{undone}, {counts}{path}")
    diff = next((item.diff for _, item in fired if item.diff), None)
    if diff is not None:
        changed = diff.read_text(encoding="utf-8").splitlines()
        lines += ["", coloured("\n".join(changed[:_MAX_DIFF_LINES]), "diff").rstrip("\n")]
        if len(changed) > _MAX_DIFF_LINES:
            lines.append(f"... {len(changed) - _MAX_DIFF_LINES} more lines in {short_path(str(diff))}")
    misses = [(miss, item.place) for result, item in results for miss in result.near_misses]
    nodes_of: dict[str, list[str]] = {}
    for miss, place in sorted(misses, key=lambda pair: -pair[0].matched / (pair[0].of or 1)):  # closest first
        progress = f"{miss.matched} of {miss.of} nodes matched" if miss.of else "near miss"
        pattern = f" [{miss.pattern}]" if miss.pattern else ""
        reason = re.sub(rf"(?<![\w.]){re.escape(miss.node)}(?![\w.])", "it", miss.reason)
        nodes_of.setdefault(f"\n{progress}, then: {reason}{pattern}", []).append(f"{miss.node} ({place})")
    for heading, nodes_with_graph in nodes_of.items():
        lines += [heading, f"  at {listed(nodes_with_graph, _MAX_NODES)}"]
    if not misses and not fired:
        lines.append("No near misses: no graph has anything similar to its pattern.")
    if fired:
        lines.append(f"\nTo disable it: options={{'passes': {{'disable': [{name!r}]}}}}")
    return "\n".join(lines) + "\n"
