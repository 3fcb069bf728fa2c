"""``dynamo-backends bisect``: finds what makes a dumped graph wrong, or a script fail.

``bisect GRAPH`` searches a graph of a dump, without PyTorch. ``bisect COMMAND`` runs PyTorch's ``CompilerBisector``
with our backend added: it runs the script repeatedly with backends, stages of passes and matches disabled, and reads
from the exit code whether the result was right (0).
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
from .common import (
    GRAPH,
    add_dump_arguments,
    complete_graphs,
    count_text,
    print_json,
    run_of_graph,
    say,
    short_path,
    try_next,
)
from .parser import Parser

if TYPE_CHECKING:
    from ..dumps.bisection import Bisection, BisectionStep

DETAILS = (
    "With GRAPH (0, graph_000, graph_000/backward), names the decomposition, pass, converter, ONNX Runtime optimizer "
    "or kernel, and extracts the smallest model that fails, with its inputs and a repro.py that needs only "
    "onnxruntime and numpy; an interrupted search resumes. With COMMAND (python train.py), runs a script that calls "
    "torch.compile and exits with 0 if its results are right. Exit code 1: a fault was found, or a graph diverges."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dynamo-backends bisect [-d FOLDER] [--check COMMAND] [--rejected] [-o FOLDER] [--json] GRAPH\n"
        "       dynamo-backends bisect COMMAND ..."
    )
    _add_options(parser)
    target = parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="GRAPH | COMMAND ...",
        help="a graph of the dump, or a command to run",
    )
    target.completer = complete_graphs  # type: ignore[attr-defined]


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bisect GRAPH``."""
    add_dump_arguments(parser)
    parser.add_argument(
        "--check",
        metavar="COMMAND",
        help="a command that fails (exit code not 0) if a model has the fault: 'python check.py {model}'; {folder} is "
        "the folder of the model and its data set",
    )
    parser.add_argument(
        "--rejected",
        action="store_true",
        help="reduce a model that ONNX Runtime rejected, even if another node diverges",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="folder for the extracted model (default: bisect in the graph's folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    target = arguments.target
    if not target:
        raise ValueError("name a graph (graph_000/forward) or a command (python train.py)")
    if GRAPH.fullmatch(target[0]):
        return _bisect_graph(_with_later_options(arguments))
    return _bisect_command(target, as_json=arguments.json)


def _with_later_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """Parses the options after GRAPH, which ``argparse.REMAINDER`` has put into ``target``."""
    if len(arguments.target) == 1:
        return arguments
    parser = Parser(prog="dynamo-backends bisect")
    _add_options(parser)
    parser.set_defaults(**{key: value for key, value in vars(arguments).items() if key != "target"})
    parsed = parser.parse_args(arguments.target[1:])
    parsed.target = arguments.target[:1]
    return parsed


def _bisect_graph(arguments: argparse.Namespace) -> int:
    from ..dumps.bisect_graph import bisect

    run = run_of_graph(arguments, arguments.target[0])
    bisection = bisect(
        run,
        arguments.target[0],
        output=Path(arguments.output) if arguments.output else None,
        check=arguments.check,
        rejected=arguments.rejected,
        progress=say,
    )
    hints = [hint for line in bisection.advice for hint in _hints(line, arguments, run.folder)]
    if arguments.json:
        print_json({**_as_json(bisection), "advice": hints})
    else:
        sys.stdout.write("\n".join([_text(bisection), *hints]) + "\n")
    return 0 if bisection.place == "nothing" and bisection.verdict in (None, "ok") else 1


def _as_json(bisection: Bisection) -> dict[str, object]:
    fields = dataclasses.asdict(bisection)
    for trial in fields["trials"]:
        if trial["error"] is not None and not math.isfinite(trial["error"]):
            trial["error"] = None
    return fields


def _text(bisection: Bisection) -> str:
    verdicts = {bisection.graph: bisection.verdict, **bisection.others}
    lines = [f"{graph}: {verdict or 'no run was compared'}" for graph, verdict in verdicts.items()]
    rows = [(trial.what, trial.outcome, trial.value, _error(trial)) for trial in bisection.trials]
    if rows:
        lines += ["", fit_table(rows, ("part", "outcome", "value", "error"))]
    if bisection.place != "nothing" or bisection.cause:
        where = f" at {bisection.value}" if bisection.value else ""
        source = f" ({bisection.source})" if bisection.source else ""
        lines += ["", f"fault: {bisection.place}{where}{source}", f"cause: {bisection.cause or 'unknown'}"]
    if bisection.cut is not None:
        cut = bisection.cut
        operators = ", ".join(cut.operators)
        lines.append(
            f"extracted: {len(cut.operators)} of {cut.of} nodes ({operators}) in {short_path(str(cut.folder))}"
        )
        if cut.confirmed:
            lines.append(f"reproduced in a new process: {cut.said}")
        else:
            lines.append(f"NOT reproduced in a new process, so not a proof: {cut.said}")
    resumed = f", {bisection.resumed} results reused from an earlier search" if bisection.resumed else ""
    lines.append(f"{count_text(bisection.sessions, 'session')}{resumed}")
    return "\n".join(lines)


def _hints(line: str, arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A line of advice as shell commands: ours name the dump, and paths are quoted."""
    if line.startswith("python "):
        yield "try: " + shlex.join(["python", short_path(line.removeprefix("python "))])
        return
    prose, _, command = line.partition("dynamo-backends ")
    if prose:
        yield "try: " + prose.rstrip("; :")
    if command:
        yield try_next(arguments, *command.replace(f" {folder} ", " ").split())


def _error(trial: BisectionStep) -> str:
    if trial.error is None:
        return ""
    return f"{trial.error:.3g}" if math.isfinite(trial.error) else "NaN, infinity or shape"


def _bisect_command(command: Sequence[str], *, as_json: bool) -> int:
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is neither a graph (0, graph_000, graph_000/forward) nor an executable command")
    importlib.import_module("dynamo_backends.common.installation")
    from passes.engine.manager import bisect_command

    from ..pipeline.pass_target import BACKEND

    with tempfile.NamedTemporaryFile(
        "w", prefix="dynamo_backends_bisect_", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        say(f"output of the command and of PyTorch's bisector: {log.name}")
        fault = bisect_command(command, BACKEND, log.file)
    if as_json:
        print_json({"found": fault})
    else:
        print(fault or "no issue found: the command succeeds with every backend up to ours")
    return 0 if fault is None else 1
