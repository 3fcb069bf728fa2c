"""What the subcommands share: the arguments that name a dump, tables that fit the terminal, errors without a traceback.

::

    def add_parser(commands, summary):
        parser = commands.add_parser("ls", help=summary)
        add_dump_arguments(parser)
        parser.set_defaults(run=run)

    def run(arguments):
        return reporting_errors("ls", lambda: _list(arguments))

Nothing here imports PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from ..dumps.reading import DumpError, find_run

_GAP = 2
"""Spaces that tabulate puts between two columns."""

_NARROWEST = 8
"""Columns are cut to this width, and no further."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?( ?%| m?s)?|nan|inf)|-|", re.IGNORECASE)
"""What is aligned at the right: numbers, with the units that our tables have, and the marks of nothing."""


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``-d/--dump FOLDER``, which names the dump (``arguments.dump``, a string or ``None``), and ``--json``."""
    parser.add_argument(
        "-d",
        "--dump",
        metavar="FOLDER",
        help="the dump: a folder given as dump_dir (its latest run), or a run folder in it; by default onnx_debug, "
        "or else the only dump folder here",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_graph_argument(parser: argparse.ArgumentParser, *, name: str = "graph") -> None:
    """Adds the positional argument ``GRAPH``, one of a dump, which the shell completes."""
    action = parser.add_argument(name, metavar=name.upper(), help="a graph: 0, graph_000, 0/backward, or its folder")
    action.completer = complete_graphs  # type: ignore[attr-defined]


def complete_graphs(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The graphs of the dump that is meant, in the form that was begun; see ``argcomplete``."""
    try:
        graphs = find_run(parsed_args.dump).graphs
    except (DumpError, OSError):
        return []  # there is nowhere to say it
    if prefix.startswith("g"):
        return [graph.reference for graph in graphs]
    both_forms = ([str(graph.index), graph.short_reference] for graph in graphs)
    return list(dict.fromkeys(name for forms in both_forms for name in forms))


def reporting_errors(command: str, work: Callable[[], int]) -> int:
    """Runs a command's work; what its user can mend is a message on standard error, not a traceback.

    Args:
        command: the subcommand's name, for the message.
        work: does it, and returns the exit code.

    Returns:
        The exit code of ``work``; 2 if it raised ``DumpError`` or another ``ValueError``, or an ``OSError``.
    """
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has seen enough
        _discard_output()
        return 0
    except (ValueError, OSError) as error:  # DumpError is a ValueError
        sys.stderr.write(f"dynamo-backends {command}: {error}\n")
        return 2
    return code


def print_json(value: object) -> None:
    """Prints a value as JSON, indented, one object for the whole command."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def try_next(arguments: Sequence[str], dump: str | None) -> str:
    """The line that says what to do next: ``try: dynamo-backends show 0 -d FOLDER``.

    Args:
        arguments: the command's.
        dump: the dump as it was given, ``None`` for the default one.
    """
    return "try: " + shlex.join(["dynamo-backends", *arguments, *(["-d", dump] if dump is not None else [])])


def short_path(path: str) -> str:
    """A path, relative to the current folder if it is in it."""
    folder = os.getcwd().rstrip("/") + "/"
    return path.removeprefix(folder)


def is_coloured(stream: TextIO) -> bool:
    """Whether text for a stream has colours: it is a terminal, unless ``NO_COLOR`` or ``FORCE_COLOR`` is set."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def fit_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """A table without a newline at its end; on a terminal, cut to its width.

    The widest columns are cut first, cells with ``…`` at their end, paths at their start.

    Args:
        rows: the cells; ``None`` is an empty one.
        headers: a name for each column.
    """
    import tabulate

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        cells = _cut(cells, headers, shutil.get_terminal_size().columns)
    aligned = ["right" if _is_of_numbers(row[i] for row in cells) else "left" for i in range(len(headers))]
    # As rows: tabulate's own header makes each column two wider than its name.
    rule = ["-" * width for width in _widths(cells, headers)]
    return tabulate.tabulate([headers, rule, *cells], tablefmt="plain", colalign=aligned, disable_numparse=True)


def _is_of_numbers(cells: Iterable[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


def _cut(cells: Sequence[Sequence[str]], headers: Sequence[str], width: int) -> list[list[str]]:
    """The cells, of which the longest are shortened until the table fits, or no column can give more."""
    widths = _widths(cells, headers)
    least = [max(len(header), _NARROWEST) for header in headers]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        i = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[i] <= least[i]:
            break
        widths[i] -= 1
    return [[_shortened(cell, width) for cell, width in zip(row, widths, strict=True)] for row in cells]


def _widths(cells: Sequence[Sequence[str]], headers: Sequence[str]) -> list[int]:
    return [max(map(len, column)) for column in zip(headers, *cells, strict=True)]


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    is_path = "/" in text and " " not in text
    return "…" + text[len(text) - width + 1 :] if is_path else text[: width - 1] + "…"


def _discard_output() -> None:
    """Lets Python end without a complaint of standard output, which nobody reads any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
