"""``dynamo-backends bisect``: which pass, and which of its matches, makes a script fail.

::

    dynamo-backends bisect python train.py

It is PyTorch's ``CompilerBisector`` with our backend in its list, before Inductor. The script is run again and again,
with other backends, stages of passes and matches left out; its exit code says whether the run was right (0) or wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the subcommand ``bisect``, with its line in the list of them."""
    parser = commands.add_parser(
        "bisect",
        help=summary,
        description="Runs a command again and again until PyTorch's bisector knows which backend, which stage of "
        "passes and which match makes it fail. The command compiles with torch.compile and exits with 0 if its "
        "results are right.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments: python train.py")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if a culprit was found, 0 if the command never failed, 2 without a command."""
    if not arguments.command:
        sys.stderr.write("dynamo-backends bisect: which command? For example: dynamo-backends bisect python train.py\n")
        return 2
    importlib.import_module("dynamo_backends.installation")
    from passes.engine.manager import bisect_command

    from ..pass_target import BACKEND

    try:
        found = bisect_command(arguments.command, BACKEND)
    except OSError as error:
        sys.stderr.write(f"dynamo-backends bisect: {error}\n")
        return 2
    if found is None:
        sys.stdout.write("no issue found: the command succeeds with every backend up to ours\n")
        return 0
    sys.stdout.write(found + "\n")
    return 1
