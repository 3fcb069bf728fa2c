"""The command ``dynamo-backends``.

Each subcommand is a module (see ``common``), which is imported when the subcommand is asked for. It imports what takes
time, PyTorch above all, when it does its work: ``--help`` and wrong arguments are answered at once. Exit codes: 0 all
is right, 1 something is wrong with what was computed, 2 the command could not do its work (bad arguments, a missing
package), which ``--json`` says as ``{"error": …}``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from .common import reporting_errors
from .parser import Parser

COMMANDS = {
    "demo": "run a Llama on ONNX Runtime, forward and backward, and check it node by node",
    "trace": "show a model's graph by torch.jit.trace, torch.jit.script, torch.export or Dynamo; save it as ONNX",
    "explain": "say what torch.compile makes of a model, and what of it would run on ONNX Runtime and why not",
    "ls": "list the runs and graphs of a dump, with their verdicts",
    "show": "show the graph of a stage",
    "diff": "show what changed between two stages of a graph, node by node",
    "report": "write report.html, a run to look at in a browser",
    "bisect": "find where the fault of a dumped graph lives and cut it out, or the pass that makes a script fail",
    "replay": "run a dumped model again on the dumped inputs, also elsewhere or otherwise",
    "compare": "run two ONNX models on the same inputs and show their values side by side",
    "nan": "find the first node of a dumped graph with NaN or infinity that its inputs did not have",
    "precision": "find the nodes of a float16 or bfloat16 graph that must stay in float32",
    "determinism": "find the nodes of a dumped graph whose values differ from run to run",
    "profile": "show where the time of a dumped graph goes: by operator, by module and by node",
    "op": "list and run operators that op_tools captured",
    "passes": "list the passes, or show what they did in a dump",
    "bench": "measure backends against each other on models: latency, first result, memory; and are they right",
    "cache": "show the cache of compiled graphs, or clear it",
}
"""The subcommands, each with what it does in the list of ``--help``."""

_WITH_TORCH = ("demo", "cache")
"""Subcommands that always need PyTorch."""


def build_parser(complete: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of the whole command.

    Args:
        complete: the subcommands whose parsers are complete, and set ``run`` to the function that does them. The others
            are names with a line of help.
    """
    parser = Parser(
        prog="dynamo-backends",
        description="Run and debug PyTorch models on ONNX Runtime through torch.compile.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('dynamo-backends')}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name not in complete:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f".{name}", __name__)
        subparser = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the command's name; those of the process by default.

    Returns:
        The exit code.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks, see docs/command_line.md
        import argcomplete

        argcomplete.autocomplete(build_parser())
    words = sys.argv[1:] if argv is None else argv
    return reporting_errors(words, lambda: _main(words))


def _main(argv: Sequence[str]) -> int:
    parser = build_parser(argv[:1])
    arguments = parser.parse_args(argv)
    arguments.words = argv
    if arguments.command is None:  # not the parser's own complaint, which would hide one of a misspelt option
        parser.error("the following arguments are required: COMMAND")
    if arguments.command in _WITH_TORCH:
        importlib.import_module("dynamo_backends.common.installation")
    code: int = arguments.run(arguments)
    return code
