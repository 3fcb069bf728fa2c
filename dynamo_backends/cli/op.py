"""``dynamo-backends op ls FOLDER`` and ``op run FOLDER``: the operator calls that ``op_tools.OpCapture`` captured."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys

from ..common.text_table import fit_table
from ..errors import first_line
from .common import add_json_argument, print_json, say

DETAILS = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="list captured calls", description="List captured calls.")
    running = actions.add_parser(
        "run",
        help="run captured calls again, and compare them",
        description="Run captured calls again, the forward, and the backward if gradients were captured, and compare "
        "them as OpAutoCompare does. Exit code 1: a result is wrong.",
    )
    for each in (listing, running):
        each.add_argument(
            "folder", metavar="FOLDER", help="the folder of a call, or one above it: of an operator or a run"
        )
        add_json_argument(each)
    running.add_argument("--forward-only", action="store_true", help="skip the backward")
    running.add_argument(
        "--reference",
        default="float64",
        help="float64; onnx, which is ONNX Runtime through the exporter; or a device (default: %(default)s)",
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
        print_json(calls)
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
    words = ["dynamo-backends", "op", "run"]
    namespace = call.name.removeprefix("torch.ops.").split(".")[0]
    is_of_user = namespace not in ("torch", "aten", "prims", "higher_order")
    print(f"try: {shlex.join([*words, *(['--import', 'MODULE'] * is_of_user), '--', str(call.folder)])}")
    if is_of_user:
        print(f"MODULE is the module that registers {call.name}")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def _run(arguments: argparse.Namespace) -> int:
    from ..op_tools import OpAutoCompare
    from ..op_tools.captured import CaptureError, find_calls, run_call

    calls = find_calls(arguments.folder)
    importlib.import_module("dynamo_backends.common.installation")
    for module in arguments.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"--import {module}: {error}") from error
    failed: dict[str, str] = {}
    compare = OpAutoCompare(reference=arguments.reference, capture=None, quiet=True)
    for call in calls:
        try:
            run_call(call, compare, forward_only=arguments.forward_only)
        except Exception as error:  # whatever the operator raises
            failed[str(call.folder)] = f"{type(error).__name__}: {error}"
            where = "" if isinstance(error, CaptureError) else f"{call.folder}: {type(error).__name__}: "
            say(f"dynamo-backends op run: {where}{first_line(str(error))}")
    if arguments.json:
        print_json({**compare.as_json(), "failed": failed})
    else:
        print(compare.table())
    return 1 if compare.failed else 2 if failed else 0
