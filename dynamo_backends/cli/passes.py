"""``dynamo-backends passes``: which passes there are, what they did in a dump, and why one fired or did not."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from passes.engine.results import PassResult, Refusal

from ..common.suggestions import unknown_name
from ..common.text_table import fit_table
from ..dumps.reading import Run, find_run
from .common import add_dump_arguments, print_json, short_path, try_next

if TYPE_CHECKING:
    from passes.engine.manager import Pass

_MOST_LINES = 40
"""Of a diff that are shown."""

_LISTED = 6
"""Nodes that are named, of those with one reason."""

DESCRIPTION = "Lists all passes; with a dump folder of onnx_debug, shows what each did there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_dump_arguments(parser, positional=True)
    parser.add_argument(
        "--why", metavar="NAME", help="where this pass fired, and its near misses: why it did not match (more)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for. Exit code 2 if the dump or the pass is not there."""
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
    results = list(_results(find_run(arguments.dump)))
    if arguments.why is not None:
        results = _of_pass(results, arguments.why)
        if arguments.json:
            print_json(_why_as_json(arguments.why, results))
        else:
            sys.stdout.write(why_text(arguments.why, results))
        return 0
    done = _done(results)
    if arguments.json:
        print_json([dataclasses.asdict(item) for item in done])
        return 0
    sys.stdout.write(_done_text(done))
    missed = next((item.name for item in done if item.near_misses), None)
    if missed is not None:
        print("\n" + try_next(arguments, "passes", "--why", missed))
    return 0


def _all_passes() -> Sequence[Pass]:
    """The passes there are; this needs PyTorch, which reading a dump does not."""
    importlib.import_module("dynamo_backends.common.installation")
    from passes.engine.manager import all_passes

    return all_passes()


@dataclasses.dataclass(frozen=True)
class Result:
    """What one pass did on one graph: the manifest's entry, and the file of the diff if there is one."""

    graph: str
    entry: PassResult
    diff: Path | None


def _results(run: Run) -> Iterator[Result]:
    places = [(f"graph {item.index}", item.passes, f"graph_{item.index:03d}") for item in run.dynamo_graphs]
    for graph in run.graphs:
        places.append((graph.name, graph.entry.passes, graph.reference))
        for region in graph.regions:
            label = f"{graph.name} region {region.index}"
            places.append((label, region.entry.passes, f"{graph.reference}/region_{region.index}"))
    for label, passes, folder in places:
        for entry in passes:
            path = run.folder / folder / "passes" / f"{entry.name}.diff"
            yield Result(label, entry, path if path.is_file() else None)


def _of_pass(results: Sequence[Result], name: str) -> list[Result]:
    """The results of one pass.

    Raises:
        ValueError: no pass of that name ran.
    """
    found = [result for result in results if result.entry.name == name]
    if not found:
        if name in [item.name for item in _all_passes()]:
            raise ValueError(f"pass {name!r} did not run: it was turned off, or no graph reached its stage")
        raise ValueError(unknown_name("pass", name, list(dict.fromkeys(item.entry.name for item in results))))
    return found


@dataclasses.dataclass
class _Done:
    """What one pass did, over all graphs of a run."""

    name: str
    graphs: int = 0
    fired: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    milliseconds: float = 0.0
    near_misses: int = 0
    undone: list[dict[str, str]] = dataclasses.field(default_factory=list)
    """``graph`` and ``reason`` of each time."""


def _done(results: Sequence[Result]) -> list[_Done]:
    found: dict[str, _Done] = {}
    for result in results:
        entry = result.entry
        done = found.setdefault(entry.name, _Done(entry.name))
        done.graphs += 1
        done.milliseconds += entry.milliseconds
        done.near_misses += len(entry.refusals)
        if entry.undone:
            done.undone.append({"graph": result.graph, "reason": entry.undone})
        else:
            done.fired += entry.fired
            done.nodes_before += entry.nodes_before
            done.nodes_after += entry.nodes_after
    return list(found.values())


def _done_text(done: Sequence[_Done]) -> str:
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
        "near_misses": [{"graph": graph, **dataclasses.asdict(miss)} for graph, miss in _misses(results)],
    }


def _misses(results: Sequence[Result]) -> list[tuple[str, Refusal]]:
    return [(result.graph, miss) for result in results for miss in result.entry.refusals]


def why_text(name: str, results: Sequence[Result]) -> str:
    """Where one pass fired, the first of its diffs, and its near misses.

    Args:
        name: of the pass.
        results: what it did.
    """
    fired = [result for result in results if result.entry.fired]
    lines = [f"{name} fired {_times(sum(result.entry.fired for result in fired))}."]
    for result in fired:
        entry = result.entry
        places = f" at {_listed(entry.matches)}" if entry.matches else ""
        undone = f", and was undone: {entry.undone}" if entry.undone else ""
        size = f"{entry.nodes_before} nodes before and {entry.nodes_after} after"
        path = f"; {short_path(str(result.diff))}" if result.diff else ""
        lines.append(f"  {result.graph}: {_times(entry.fired)}{places}{undone}, {size}{path}")
    diff = next((result.diff for result in fired if result.diff), None)
    if diff is not None:
        changed = diff.read_text(encoding="utf-8").splitlines()
        lines += ["", *changed[:_MOST_LINES]]
        if len(changed) > _MOST_LINES:
            lines.append(f"... {len(changed) - _MOST_LINES} more lines in {short_path(str(diff))}")
    misses = sorted(_misses(results), key=lambda item: -item[1].matched / (item[1].of or 1))  # close to a match first
    groups = collections.defaultdict(list)
    for graph, miss in misses:
        progress = f"{miss.matched} of {miss.of} nodes matched" if miss.of else "near miss"
        pattern = f" [{miss.pattern}]" if miss.pattern else ""
        reason = re.sub(rf"(?<![\w.]){re.escape(miss.node)}(?![\w.])", "it", miss.reason)
        groups[f"\n{progress}, then: {reason}{pattern}"].append(f"{miss.node} ({graph})")
    for heading, nodes in groups.items():
        lines += [heading, f"  at {_listed(nodes)}"]
    if not misses and not fired:
        lines.append("No near misses: nothing in the graphs looks like what it replaces.")
    if fired:
        lines.append(f"\nTo run without it: options={{'passes': {{'disable': [{name!r}]}}}}")
    return "\n".join(lines) + "\n"


def _times(number: int) -> str:
    return f"{number} time{'s' * (number != 1)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
