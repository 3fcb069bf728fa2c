"""``dynamo-backends op ls FOLDER`` and ``op run FOLDER``: the operator calls that ``op_tools.OpCapture`` captured."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from typing import TYPE_CHECKING

import msgspec

from ..common.text_table import fit_table
from ..errors import first_line
from .common import add_json_argument, count_text, positive, print_json, say, try_again

if TYPE_CHECKING:
    from ..op_tools.captured_calls import RerunResult
    from ..op_tools.captures import CapturedCall

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
    from ..op_tools.captures import find_calls

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's modules; last, so that no file there hides a package
    calls = find_calls(arguments.folder)
    return _ls(calls, arguments) if arguments.action == "ls" else _run(calls, arguments)


def _ls(calls: list[CapturedCall], arguments: argparse.Namespace) -> int:
    from ..op_tools.captures import as_argument

    for call in calls:
        call.not_again = call.not_again or _missing_module(call.module)
    if arguments.json:
        print_json([msgspec.structs.asdict(call) for call in calls])
        return 0
    rows = [
        (
            *(call.operator, call.number, call.call.removeprefix(call.operator), ", ".join(call.files)),
            *(f"{call.bytes / 1e3:,.1f} kB", call.source, call.module_path),
        )
        for call in calls
    ]
    print(fit_table(rows, ["operator", "number", "arguments", "files", "size", "line", "module"]))
    first = next((call for call in calls if not call.not_again), None)
    if first is None:
        print(f"no call can be run again: {calls[0].not_again}")
        return 0
    importing = ["--import", first.module] if first.module else []
    words = ["dynamo-backends", "op", "run", as_argument(first.folder), "--compare", *importing]
    print(f"try: {shlex.join(words)}")
    return 0


def _missing_module(module: str) -> str:
    """That the module which registers an operator cannot be imported here; ``""`` if it can."""
    try:
        exists = not module or importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # the module is loaded and has no spec
        exists = module in sys.modules
    return "" if exists else f"the module {module}, which registers the operator, is not found"


def _run(calls: list[CapturedCall], arguments: argparse.Namespace) -> int:
    importlib.import_module("dynamo_backends.common.installation")
    for module in arguments.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--import {module}: {error}") from error
    from ..op_tools.captured_calls import load_call, run_call
    from ..op_tools.captures import CaptureError

    given = {name: getattr(arguments, name) for name in ("runs", "forward_only", "compare", "runtime")}
    results: list[RerunResult] = []
    failed: dict[str, str] = {}
    for call in calls:
        try:
            results.append(run_call(load_call(call), **given))
        except Exception as error:  # whatever the operator or the runtime raises
            failed[str(call.folder)] = f"{type(error).__name__}: {error}"
            where = "" if isinstance(error, CaptureError) else f"{call.folder}: {type(error).__name__}: "
            say(f"dynamo-backends op run: {where}{first_line(str(error))}")
            continue
        if not arguments.json:
            print(_text(results[-1]) + "\n")
    if arguments.json:
        print_json({"ran": [{**vars(result), "ok": result.ok} for result in results], "failed": failed})
    elif results and not arguments.compare:
        print(try_again(arguments, "--compare"))
    return 1 if any(not result.ok for result in results) else 2 if failed else 0


def _text(result: RerunResult) -> str:
    lines = [result.call]
    for name, seconds in (("forward", result.forward_seconds), ("backward", result.backward_seconds)):
        if seconds:
            lines.append(f"{name}: {min(seconds) * 1e3:.4f} ms, the fastest of {count_text(len(seconds), 'run')}")
    differences, verdicts = result.difference_to_captured, {verdict.value: verdict for verdict in result.verdicts}
    rows = []
    for name in dict.fromkeys([*verdicts, *differences]):
        row = [name, f"{differences[name]:.3g}" if name in differences else "", "", "", "", ""]
        if verdict := verdicts.get(name):
            tolerance = "" if verdict.allowed is None else f"{verdict.allowed:.3g}"
            row[2:] = [f"{verdict.max_diff:.3g}", tolerance, "yes" if verdict.allclose else "NO", verdict.complaint]
        rows.append(row)
    if rows:
        headers = ["value", "error to captured", "error to float64", "tolerance", "allclose", "complaint"]
        lines.append(fit_table(rows, headers))
    if result.not_compared:
        lines.append(f"not compared with float64: {result.not_compared}")
    return "\n".join(lines)
