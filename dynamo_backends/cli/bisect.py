"""``dynamo-backends bisect``: where a fault lives, and the smallest model that has it; or why a script fails.

``bisect GRAPH`` bisects a graph of a dump. ``bisect COMMAND`` runs PyTorch's ``CompilerBisector`` with our backend in
its list: the script runs again and again, with other backends, stages of passes and matches left out; its exit code
says whether the run was right (0) or wrong. Only the second needs PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import GRAPH, add_dump_arguments, complete_graphs, print_json, run_with, say, short_path, try_next
from .parser import Parser

if TYPE_CHECKING:
    from ..dumps.bisection import Bisection, Trial

DESCRIPTION = (
    "GRAPH (0, graph_000, graph_000/backward): says where the fault of a dumped graph lives "
    "(decomposition, pass, translation, ONNX Runtime optimizer, kernel), and cuts out the smallest model that "
    "still has it, with its inputs and a repro.py that needs onnxruntime and numpy only. Stopped and started "
    "again, it goes on where it was. COMMAND (python train.py): runs it again and again until PyTorch's bisector "
    "knows which backend, which stage of passes and which match makes it fail; it compiles with torch.compile and "
    "exits with 0 if its results are right."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.usage = (
        "dynamo-backends bisect [-d FOLDER] [--check COMMAND] [--refused] [-o FOLDER] [--json] GRAPH\n"
        "       dynamo-backends bisect COMMAND ..."
    )
    parser.epilog = (
        "Exit codes: 0 nothing fails, 1 the fault was found or something diverges, 2 the command cannot do its work."
    )
    _add_options(parser)
    target = parser.add_argument("target", nargs=argparse.REMAINDER, metavar="GRAPH | COMMAND ...")
    target.completer = complete_graphs  # type: ignore[attr-defined]


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the form with GRAPH."""
    add_dump_arguments(parser)
    parser.add_argument(
        "--check",
        metavar="COMMAND",
        help="a command that decides what fails (exit code not 0): 'python check.py {model}'; {folder} has the model "
        "and its data set",
    )
    parser.add_argument(
        "--refused", action="store_true", help="a model that ONNX Runtime refused, also where something else diverges"
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", help="where the cut goes (bisect in the graph's folder)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if something fails, 0 if nothing does, 2 if the work cannot be done."""
    target = arguments.target
    if not target:
        raise ValueError("which graph (graph_000/forward), or which command (python train.py)?")
    if GRAPH.fullmatch(target[0]):
        return _bisect_graph(_parsed_again(arguments))
    return _bisect_command(target, as_json=arguments.json)


def _parsed_again(arguments: argparse.Namespace) -> argparse.Namespace:
    """The options that stand behind GRAPH, which the first reading leaves alone because a command has its own."""
    if len(arguments.target) == 1:
        return arguments
    parser = Parser(prog="dynamo-backends bisect")
    _add_options(parser)
    parser.set_defaults(**{key: value for key, value in vars(arguments).items() if key != "target"})
    found = parser.parse_args(arguments.target[1:])
    found.target = arguments.target[:1]
    return found


def _bisect_graph(arguments: argparse.Namespace) -> int:
    from ..dumps.bisecting import bisect

    run = run_with(arguments, arguments.target[0])
    found = bisect(
        run,
        arguments.target[0],
        output=Path(arguments.output) if arguments.output else None,
        check=arguments.check,
        refused=arguments.refused,
        progress=say,
    )
    hints = [hint for line in found.advice for hint in _hints(line, arguments, run.folder)]
    if arguments.json:
        print_json({**_as_json(found), "advice": hints})
    else:
        sys.stdout.write("\n".join([_text(found), *hints]) + "\n")
    return 0 if found.place == "nothing" and found.verdict in (None, "ok") else 1


def _as_json(found: Bisection) -> dict[str, object]:
    fields = dataclasses.asdict(found)
    for trial in fields["trials"]:
        if trial["error"] is not None and not math.isfinite(trial["error"]):
            trial["error"] = None
    if fields["cut"] is not None:
        fields["cut"]["folder"] = str(fields["cut"]["folder"])
    return fields


def _text(found: Bisection) -> str:
    verdicts = {found.graph: found.verdict, **found.others}
    lines = [f"{graph}: {verdict or 'no run was compared'}" for graph, verdict in verdicts.items()]
    rows = [(trial.what, trial.outcome, trial.value, _size(trial)) for trial in found.trials]
    if rows:
        lines += ["", fit_table(rows, ("switched off, or looked at", "outcome", "value", "off by"))]
    if found.place != "nothing" or found.cause:
        where = f" at {found.value}" if found.value else ""
        source = f" ({found.source})" if found.source else ""
        lines += ["", f"the fault is in: {found.place}{where}{source}", f"cause: {found.cause or 'not known'}"]
    if found.cut is not None:
        cut = found.cut
        operators = ", ".join(cut.operators)
        lines.append(f"cut: {len(cut.operators)} of {cut.of} nodes ({operators}) in {short_path(str(cut.folder))}")
        if cut.confirmed:
            lines.append(f"in a fresh process it fails in the same way: {cut.said}")
        else:
            lines.append(f"it does NOT fail in a fresh process ({cut.said}): it proves nothing")
    resumed = f", {found.resumed} answers kept of an earlier start" if found.resumed else ""
    lines.append(f"{found.sessions} session{'s' * (found.sessions != 1)}{resumed}")
    return "\n".join(lines)


def _hints(line: str, arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A line of advice, with what is to be run as it runs in a shell: our commands name the dump, paths are quoted."""
    if line.startswith("python "):
        yield "try: " + shlex.join(["python", short_path(line.removeprefix("python "))])
        return
    prose, _, command = line.partition("dynamo-backends ")
    if prose:
        yield "try: " + prose.rstrip("; :")
    if command:
        yield try_next(arguments, *command.replace(f" {folder} ", " ").split())


def _size(trial: Trial) -> str:
    if trial.error is None:
        return ""
    return f"{trial.error:.3g}" if math.isfinite(trial.error) else "NaN, infinity or shape"


def _bisect_command(command: Sequence[str], *, as_json: bool) -> int:
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"{command[0]} is neither a graph (0, graph_000, graph_000/forward) nor a command that can be started"
        )
    importlib.import_module("dynamo_backends.common.installation")
    from passes.engine.manager import bisect_command

    from ..pipeline.pass_target import BACKEND

    with tempfile.NamedTemporaryFile(
        "w", prefix="dynamo_backends_bisect_", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        say(f"what the command and PyTorch's bisector print goes to {log.name}")
        found = bisect_command(command, BACKEND, log.file)
    if as_json:
        print_json({"found": found})
    else:
        print(found or "no issue found: the command succeeds with every backend up to ours")
    return 0 if found is None else 1
