"""``dynamo-backends bisect``: finds what makes a dumped graph or an ONNX file wrong, or a script fail.

``bisect COMMAND`` runs PyTorch's ``CompilerBisector`` with our backend added: it runs the script repeatedly with
backends, stages of passes and matches disabled, and reads from the exit code whether the result was right (0).
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.text_table import fit_table, listed
from ..dumps.reading import find_run
from .common import (
    GRAPH,
    add_dump_arguments,
    add_inputs_arguments,
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
    "onnxruntime, onnx and numpy. With FILE.onnx, names the kernel or optimizer. Without an argument, "
    "bisects all graphs of the newest run that are not ok. With COMMAND (python train.py), runs a script that calls "
    "torch.compile and exits with 0 if its results are right. Exit code 1: a fault was found, or a graph diverges."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dynamo-backends bisect [-d FOLDER] [--check COMMAND] [--rejected] [-o FOLDER] [--json] [GRAPH]\n"
        "       dynamo-backends bisect [--inputs PATH ...] [--check COMMAND] [-o FOLDER] [--json] FILE.onnx\n"
        "       dynamo-backends bisect COMMAND ..."
    )
    _add_options(parser)
    parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="GRAPH | FILE.onnx | COMMAND ...",
        help="a graph of the dump, an ONNX model, or a command to run; by default the graphs that are not ok",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bisect GRAPH`` and ``bisect FILE.onnx``."""
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
    add_inputs_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="folder for the extracted model (default: bisect in the graph's folder, FILE.bisect of a file)",
    )


def run(arguments: argparse.Namespace) -> int:
    target = arguments.target
    if target and not GRAPH.fullmatch(target[0]) and not target[0].endswith(".onnx"):
        return _bisect_command(target, as_json=arguments.json)
    arguments = _with_later_options(arguments)
    results = _bisect_file(arguments) if target and target[0].endswith(".onnx") else _bisect_graphs(arguments)
    texts, items = [], []
    for result in results:
        hints = [hint for line in result.advice for hint in _hints(line, arguments)]
        items.append({**vars(result), "advice": hints})
        texts.append("\n".join([_text(result), *hints]) + "\n")
    if arguments.json:
        print_json(items[0] if target else items)
    else:
        sys.stdout.write("\n".join(texts) or "no graph diverges\n")
    return int(any(result.place != "nothing" or result.verdict not in (None, "ok") for result in results))


def _with_later_options(arguments: argparse.Namespace) -> argparse.Namespace:
    """Parses the options after the target, which ``argparse.REMAINDER`` has put into ``target``."""
    if len(arguments.target) <= 1:
        return arguments
    parser = Parser(prog="dynamo-backends bisect")
    _add_options(parser)
    parser.set_defaults(**{key: value for key, value in vars(arguments).items() if key != "target"})
    parsed = parser.parse_args(arguments.target[1:])
    parsed.target = arguments.target[:1]
    return parsed


def _bisect_graphs(arguments: argparse.Namespace) -> list[Bisection]:
    """Bisects the graph that is named, or all of the newest run that are not ok."""
    from ..dumps.bisect_graph import bisect

    if arguments.target:
        run = run_of_graph(arguments, arguments.target[0])
        references = arguments.target
    else:
        run = find_run(arguments.dump)
        references = [graph.reference for graph in run.graphs if graph.verdict not in (None, "ok")]
        if arguments.output and len(references) > 1:
            raise ValueError(f"-o takes the model of one graph; name one of {', '.join(references)}")
    return [
        bisect(
            run,
            reference,
            output=Path(arguments.output) if arguments.output else None,
            check=arguments.check,
            rejected=arguments.rejected,
            progress=say,
        )
        for reference in references
    ]


def _bisect_file(arguments: argparse.Namespace) -> list[Bisection]:
    import numpy as np

    from ..dumps.bisect_graph import bisect_file
    from ..dumps.model_inputs import generated_inputs, read_feeds
    from ..dumps.models import load_model

    path = Path(arguments.target[0])
    model, sizes = load_model(path), dict(arguments.dim)
    feeds = read_feeds(arguments.inputs, model) if arguments.inputs else {}
    missing = [item for item in model.inputs if item.name not in feeds]
    feeds |= generated_inputs(model, sizes=sizes, seed=arguments.seed, wanted=missing)
    output = Path(arguments.output) if arguments.output else None
    tensors = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
    return [bisect_file(path, tensors, output=output, check=arguments.check, progress=say)]


def _text(bisection: Bisection) -> str:
    verdicts = {bisection.graph: bisection.verdict, **bisection.others}
    unknown = "" if bisection.graph.endswith(".onnx") else ": no run was compared"
    lines = [f"{graph}: {verdict}" if verdict else f"{graph}{unknown}" for graph, verdict in verdicts.items()]
    rows = [(trial.what, trial.outcome, trial.value, _error(trial)) for trial in bisection.trials]
    if rows:
        lines += ["", fit_table(rows, ("part", "outcome", "value", "error"))]
    if bisection.place != "nothing" or bisection.cause:
        where = f" at {bisection.value}" if bisection.value else ""
        source = f" ({bisection.source})" if bisection.source else ""
        lines += ["", f"fault: {bisection.place}{where}{source}", f"cause: {bisection.cause or 'unknown'}"]
    if bisection.cut is not None:
        cut = bisection.cut
        operators = listed(cut.operators, _OPERATORS)
        lines.append(
            f"extracted: {len(cut.operators)} of {cut.of} nodes ({operators}) in {short_path(str(cut.folder))}"
        )
        if cut.confirmed:
            lines.append(f"reproduced in a new process: {cut.said}")
        else:
            lines.append(f"NOT reproduced in a new process, so not a proof: {cut.said}")
    lines.append(count_text(bisection.sessions, "session"))
    return "\n".join(lines)


def _hints(line: str, arguments: argparse.Namespace) -> Iterator[str]:
    """A line of advice as shell commands: ours name the dump, and paths are quoted."""
    if line.startswith("python "):
        yield "try: " + shlex.join(["python", short_path(line.removeprefix("python "))])
        return
    prose, _, command = line.partition("dynamo-backends ")
    if prose:
        yield "try: " + prose.rstrip("; :")
    if command:
        yield try_next(arguments, *command.split())


_OPERATORS = 8
"""Operators of an extracted model that are named."""


def _error(trial: BisectionStep) -> str:
    if trial.error is None:
        return ""
    return f"{trial.error:.3g}" if math.isfinite(trial.error) else "NaN, infinity or shape"


def _bisect_command(command: Sequence[str], *, as_json: bool) -> int:
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is no graph (0, graph_000, graph_000/forward), ONNX file or executable command")
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
