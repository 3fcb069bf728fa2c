"""The command ``dynamo-backends``.

::

    dynamo-backends demo                    # a Llama forward and backward, and the verdict on each graph
    dynamo-backends demo --part attention --mixed
    dynamo-backends passes                  # all passes, with what they do
    dynamo-backends passes onnx_debug       # what they did in the last run dumped there
    dynamo-backends bisect python train.py  # which pass and match makes the script fail
    dynamo-backends --version

Each subcommand is a module with ``add_parser``. Exit codes: 0 all is right, 1 something is wrong with what
was computed, 2 the command could not do its work (bad arguments, a missing package).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata

from . import bisect, demo, passes


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each subcommand sets ``run`` to the function that does it."""
    parser = argparse.ArgumentParser(
        prog="dynamo-backends",
        description="Run and debug PyTorch models on ONNX Runtime through torch.compile.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('dynamo-backends')}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    demo.add_parser(commands)
    passes.add_parser(commands)
    bisect.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the command's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = build_parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code
