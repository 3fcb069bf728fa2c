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
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tabulate

from ..dumps.reading import find_run
from ..spelling import unknown_name

if TYPE_CHECKING:
    from passes.engine.manager import Pass


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the subcommand ``passes``, with its line in the list of them."""
    parser = commands.add_parser(
        "passes",
        help=summary,
        description="Lists all passes; with a dump folder of onnx_debug, shows what each did there.",
    )
    parser.add_argument("dump", nargs="?", help="a dump folder (its latest run), a run folder, or a manifest.json")
    parser.add_argument("--why", metavar="NAME", help="the near misses of this pass: why it did not match (more)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for. Exit code 2 if the dump or the pass is not there."""
    try:
        if arguments.dump is None:
            if arguments.why is not None:
                raise ValueError("--why needs a dump: dynamo-backends passes DUMP --why NAME")
            text = list_text()
        else:
            manifest = find_run(arguments.dump).manifest
            text = why_text(manifest, arguments.why) if arguments.why is not None else report_text(manifest)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"dynamo-backends passes: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def list_text() -> str:
    """All passes in the order they run."""
    rows = [(item.stage, item.name, "on" if item.default else "off", item.sentence) for item in _all_passes()]
    table = tabulate.tabulate(rows, headers=("stage", "pass", "default", "what it does"))
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


def report_text(manifest: Mapping[str, Any]) -> str:
    """What each pass did, over all graphs of a run, and which were undone."""
    runs = list(_runs(manifest))
    if not runs:
        return "No pass ran: nothing was compiled, or all passes were turned off.\n"
    rows = []
    for name in dict.fromkeys(run.result["name"] for run in runs):
        results = [run.result for run in runs if run.result["name"] == name]
        kept = [result for result in results if not result["undone"]]
        fired = sum(result["fired"] for result in kept)
        before, after = (sum(result[key] for result in kept) for key in ("nodes_before", "nodes_after"))
        milliseconds = sum(result["milliseconds"] for result in results)
        missed = sum(len(result["refusals"]) for result in results)
        undone = len(results) - len(kept)
        rows.append((name, len(results), fired, before, after, f"{milliseconds:.1f}", missed or "", undone or ""))
    headers = ("pass", "graphs", "fired", "nodes before", "after", "ms", "near misses", "undone")
    text = tabulate.tabulate(rows, headers=headers) + "\n"
    for run in runs:
        if run.result["undone"]:
            text += f"\n{run.result['name']} on {run.graph} was undone: {run.result['undone']}\n"
    missed_passes = [row[0] for row in rows if row[6]]
    if missed_passes:
        text += f"\nNear misses: --why {missed_passes[0]}\n"
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
    for run in runs:
        if run.result["name"] != name:
            continue
        for miss in run.result["refusals"]:
            progress = f"{miss['matched']} of {miss['of']} nodes matched" if miss["of"] else "near miss"
            pattern = f" [{miss['pattern']}]" if miss["pattern"] else ""
            lines.append(f"{run.graph}, at {miss['node']}{pattern}: {progress}, then: {miss['reason']}")
    if len(lines) == 1:
        lines.append("No near misses: nothing in the graphs looks like what it replaces.")
    return "\n".join(lines) + "\n"
