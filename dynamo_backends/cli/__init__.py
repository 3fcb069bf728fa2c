"""The command ``dynamo-backends``: one module for each subcommand, imported when that subcommand runs.

``common`` and ``parser`` are what they share.

A subcommand imports PyTorch and other slow packages in its function ``run``, so that ``--help`` and argument errors
take no time. Exit codes: 0 success, 1 a computed result is wrong, 2 the command failed (invalid arguments, a missing
package). With ``--json`` a failure prints ``{"error": …}``.
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
    "demo": "Run a Llama with onnxrt and onnx_debug, and check each graph against float64.",
    "explain": "Show the graphs that torch.compile makes of a model, and which operators would run on ONNX Runtime.",
    "export": "Write a model to an ONNX file that runs without PyTorch, and check its results.",
    "ls": "List the runs and graphs of a dump, with their verdicts.",
    "show": "Print the graph of a stage or an ONNX file, or list the graphs of a saved file.",
    "diff": "Show what changed between two stages of a graph, node by node.",
    "report": "Write report.html, a run of onnx_debug as one HTML page.",
    "bisect": "Find what makes a dumped graph or an ONNX file wrong, or the pass that makes a script fail.",
    "compare": "Run two ONNX models on the same inputs and compare their values.",
    "nan": "Find the first node of a dumped graph that produces NaN or infinity from finite inputs.",
    "precision": "Find the nodes of a float16 or bfloat16 graph that must compute in float32.",
    "profile": "Show the time that each operator, module and node of a dumped graph takes.",
    "op": "List and run the operator calls that op_tools captured.",
    "passes": "List the passes, or show what they did in a dump.",
    "bench": "Measure backends on models: time to first result, latency, memory and correctness.",
    "providers": "List the execution providers and their devices, and what each would run of a model.",
    "cache": "Show the cache of compiled graphs, or clear it.",
}
"""The subcommands, and the sentence that ``--help`` has for each."""

_WITH_TORCH = ("demo", "cache")
"""Subcommands that always need PyTorch."""


def build_parser(complete: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of the command.

    Args:
        complete: the subcommands whose modules are imported, which gives them arguments and the default ``run``. The
            others have only a name and a line of help.
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
        subparser = commands.add_parser(name, help=summary, description=f"{summary} {module.DETAILS}".strip())
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        argv: the arguments after the command's name; by default those of the process.
    """
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's completion, see docs/command_line.md
        import argcomplete

        argcomplete.autocomplete(build_parser())
    words = sys.argv[1:] if argv is None else argv
    return reporting_errors(words, lambda: _main(words))


def _main(argv: Sequence[str]) -> int:
    parser = build_parser(argv[:1])
    arguments = parser.parse_args(argv)
    arguments.words = argv
    if arguments.command is None:  # a required subparser would hide the error of a misspelt option
        parser.error("the following arguments are required: COMMAND")
    if arguments.command in _WITH_TORCH:
        importlib.import_module("dynamo_backends.common.installation")
    code: int = arguments.run(arguments)
    return code
