"""``dynamo-backends op ls FOLDER`` and ``op run FOLDER``: the operator calls that ``op_tools.OpCapture`` captured."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from ..common.text_table import fit_table
from ..errors import first_line
from .common import add_json_argument, positive, print_json, say

if TYPE_CHECKING:
    from ..op_tools.captured import RerunResult

DETAILS = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="list captured calls", description="List captured calls.")
    running = actions.add_parser(
        "run",
        help="run captured calls again, and time and compare them",
        description="Run captured calls again: the forward, and the backward if gradients were captured. Exit code 1: "
        "--compare finds a wrong result.",
    )
    for each in (listing, running):
        each.add_argument(
            "folder", metavar="FOLDER", help="the folder of a call, or one above it: of an operator or a run"
        )
        add_json_argument(each)
    running.add_argument("--runs", type=positive, default=1, metavar="N", help="runs of each call (default: 1)")
    running.add_argument("--forward-only", action="store_true", help="skip the backward")
    running.add_argument("--compare", action="store_true", help="compare results and gradients with float64")
    running.add_argument(
        "--runtime",
        choices=["torch", "onnx"],
        default="torch",
        help="PyTorch, or ONNX Runtime through the exporter (default: %(default)s)",
    )
    running.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that registers operators, imported first; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's modules; last, so that no file there hides a package
    return _ls(arguments) if arguments.action == "ls" else _run(arguments)


def _ls(arguments: argparse.Namespace) -> int:
    from ..op_tools.captured import find_calls

    calls = find_calls(arguments.folder)
    if arguments.json:
        print_json([dataclasses.asdict(call) for call in calls])
        return 0
    rows = [
        (
            call.name,
            call.number,
            call.call.removeprefix(call.name),
            ", ".join(call.files),
            _size(call.bytes),
            call.source,
            call.module,
        )
        for call in calls
    ]
    print(fit_table(rows, ["operator", "number", "arguments", "files", "size", "line", "module"]))
    call = next((call for call in calls if not call.not_again), None)
    if call is None:
        print(f"no call can be run again: {calls[0].not_again}")
        return 0
    words = ["dynamo-backends", "op", "run", "--compare"]
    namespace = call.name.removeprefix("torch.ops.").split(".")[0]
    is_of_user = namespace not in ("torch", "aten", "prims", "higher_order")
    print(f"try: {shlex.join([*words, *(['--import', 'MODULE'] * is_of_user), '--', str(call.folder)])}")
    if is_of_user:
        print(f"MODULE is the module that registers {call.name}")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _run(arguments: argparse.Namespace) -> int:
    from ..op_tools.captured import CaptureError, find_calls, run_call

    calls = find_calls(arguments.folder)
    importlib.import_module("dynamo_backends.common.installation")
    for module in arguments.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--import {module}: {error}") from error
    results: list[RerunResult] = []
    failed: dict[str, str] = {}
    for call in calls:
        try:
            result = run_call(
                call,
                runs=arguments.runs,
                forward_only=arguments.forward_only,
                compare=arguments.compare,
                runtime=arguments.runtime,
            )
        except Exception as error:  # whatever the operator or the runtime raises
            failed[str(call.folder)] = f"{type(error).__name__}: {error}"
            names_folder = isinstance(error, CaptureError)
            where = "" if names_folder else f"{call.folder}: {type(error).__name__}: "
            say(f"dynamo-backends op run: {where}{first_line(str(error))}")
            continue
        results.append(result)
        if not arguments.json:
            sys.stdout.write(_text(result))
    if arguments.json:
        print_json({"ran": [{**vars(result), "ok": result.ok} for result in results], "failed": failed})
    if any(not result.ok for result in results):
        return 1
    return 2 if failed else 0


def _text(result: RerunResult) -> str:
    pairs = itertools.zip_longest(result.forward_seconds, result.backward_seconds)
    times = [
        (i, *("-" if seconds is None else f"{seconds * 1e3:.4f} ms" for seconds in pair))
        for i, pair in enumerate(pairs)
    ]
    lines = [result.call, fit_table(times, ["run", "forward", "backward"])]
    verdicts = {verdict.value: verdict for verdict in result.verdicts}
    rows = []
    for name in dict.fromkeys([*verdicts, *result.difference_to_captured]):
        row: list[Any] = [
            name,
            f"{result.difference_to_captured[name]:.3g}" if name in result.difference_to_captured else "",
        ]
        if name in verdicts:
            verdict = verdicts[name]
            tolerance = "" if verdict.allowed is None else f"{verdict.allowed:.3g}"
            right = "yes" if verdict.allclose else "NO"
            row += [f"{verdict.max_diff:.3g}", tolerance, right, verdict.complaint]
        rows.append([*row, *[""] * (6 - len(row))])
    if rows:
        headers = ["value", "error to captured", "error to float64", "tolerance", "allclose", "complaint"]
        lines.append(fit_table(rows, headers))
    if result.not_compared:
        lines.append(f"not compared with float64: {result.not_compared}")
    return "\n".join(lines) + "\n\n"
