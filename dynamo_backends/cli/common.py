"""What the subcommands share: the arguments that name a dump, hints, errors. Nothing here imports PyTorch.

A subcommand is a module with ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit
code and raises ``ValueError`` or ``OSError`` for what its user can mend.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from ..dumps.listing import dynamo_graphs_of_run
from ..dumps.reading import DumpedGraph, DumpError, Run, find_run
from .parser import UsageError


class HasJson(Protocol):
    """What a command found of a graph, or of a region."""

    def as_json(self) -> Mapping[str, object]:
        """Its values, for ``json``."""


Found = TypeVar("Found", bound=HasJson | Sequence[HasJson])

GRAPH = re.compile(r"(?:(?:.*/)?graph_)?(\d+)(?:/(?:inference|forward|backward))?(?:/region_\d+)?/?")
"""How a graph of a dump, or a region of it, is named; the group is the number of Dynamo's graph."""


def add_dump_arguments(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Adds ``-d/--dump FOLDER`` (``arguments.dump``, a string or ``None``), also without ``-d``, and ``--json``."""
    if positional:
        parser.add_argument("dump", nargs="?", default=argparse.SUPPRESS, metavar="DUMP", help="the same as -d")
    parser.add_argument(
        "-d",
        "--dump",
        metavar="FOLDER",
        help="the dump: a folder given as dump_dir (its latest run), or a run folder in it; by default onnx_debug, "
        "or else the only dump folder here",
    )
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument ``GRAPH``, which the shell completes, and those of its dump."""
    action = parser.add_argument("graph", metavar="GRAPH", help="a graph: 0, graph_000, 0/backward, or its folder")
    action.completer = complete_graphs  # type: ignore[attr-defined]
    add_dump_arguments(parser)


def add_repeat_arguments(parser: argparse.ArgumentParser, runs: int) -> None:
    """Adds ``--runs``, ``runs`` by default, and ``--threads``, of what runs the regions of a graph again."""
    parser.add_argument(
        "--runs",
        type=int,
        default=runs,
        metavar="N",
        help="how often each region runs (default: %(default)s)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="of ONNX Runtime (default: as in the dumped run)")


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--runtime`` and ``--provider``, for ``check_runtime``."""
    parser.add_argument(
        "--runtime",
        choices=("ort", "reference"),
        default="ort",
        help="ONNX Runtime, or onnx's evaluator in Python (slow, and without most of com.microsoft)",
    )
    parser.add_argument(
        "--provider", metavar="NAME", help="execution provider of ONNX Runtime: cpu, cuda or CUDAExecutionProvider …"
    )


def check_runtime(arguments: argparse.Namespace) -> None:
    """Raises ``ValueError`` where ``--runtime`` and ``--provider`` exclude each other."""
    if arguments.runtime == "reference" and arguments.provider is not None:
        raise ValueError("--provider is for --runtime ort; the reference evaluator has no execution providers")


def add_options_argument(parser: argparse.ArgumentParser, backends: str) -> None:
    """Adds ``--options NAME=VALUE …``, a list of pairs; ``backends`` says in words whose options they are."""
    parser.add_argument(
        "--options",
        nargs="+",
        action="extend",
        type=pair,
        default=[],
        metavar="NAME=VALUE",
        help=f"options of {backends}, written as in the environment",
    )


def pair(text: str) -> tuple[str, str]:
    """An argument of the form ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def positive(text: str) -> int:
    """A number from 1, of an argument; for ``argparse``, as ``pair``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


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


def run_with(arguments: argparse.Namespace, reference: str) -> Run:
    """The run that a command is about, which has a graph.

    Args:
        arguments: the command's. Where ``dump`` is not given, and the graph is named by the path of its folder, that
            is the dump from now on.
        reference: the graph, as the user named it.

    Raises:
        DumpError: there is no dump, or no such graph in it; if Dynamo gave the graph up, the message says why.
    """
    if arguments.dump is None and "/" in reference and Path(reference).is_dir():
        arguments.dump = str(find_run(reference).folder)
    run = find_run(arguments.dump)
    try:
        run.graphs_of(reference)
    except DumpError as error:
        match = GRAPH.fullmatch(reference)
        for graph in dynamo_graphs_of_run(run):
            if match is not None and graph.index == int(match[1]) and graph.given_up:
                begins = f" ({graph.function}, {short_path(graph.begins)})" if graph.begins else ""
                raise DumpError(f"Dynamo gave up graph {graph.index}{begins}: {graph.given_up}") from error
        raise
    return run


def for_each_graph(
    arguments: argparse.Namespace,
    find: Callable[[DumpedGraph], Found],
    *,
    text: Callable[[DumpedGraph, Found], str],
    is_wrong: Callable[[Found], bool] = lambda _: False,
) -> int:
    """Does the work of a command for each graph that is meant, and prints what was found.

    Args:
        arguments: the command's, with ``graph``, ``dump`` and ``json``.
        find: the work, which gives one object, or one for each region.
        text: what is printed.
        is_wrong: whether it is exit code 1.
    """
    graphs = run_with(arguments, arguments.graph).graphs_of(arguments.graph)
    found = [(graph, find(graph)) for graph in graphs]
    if arguments.json:
        print_json([{"graph": graph.reference, **_as_json(item)} for graph, item in found])
    else:
        texts = [text(graph, item) if item else f"{graph.name}: nothing ran on ONNX Runtime\n" for graph, item in found]
        if not any("try: " in said for said in texts):
            texts[-1] += try_next(arguments, "report", "--open") + "\n"
        sys.stdout.write("\n".join(texts))
    return int(any(is_wrong(item) for _, item in found))


def _as_json(found: HasJson | Sequence[HasJson]) -> Mapping[str, object]:
    return {"regions": [item.as_json() for item in found]} if isinstance(found, Sequence) else found.as_json()


def reporting_errors(argv: Sequence[str], work: Callable[[], int]) -> int:
    """Runs a command; what its user can mend is a message on standard error, and with ``--json`` an object with
    ``error`` on standard output, too.

    Returns:
        The exit code of ``work``; 2 if it raised: 1 says that something is wrong in the dump. A traceback is printed
        only if it is no ``ValueError`` or ``OSError``.

    Raises:
        UsageError: the arguments are wrong; it ends the process with exit code 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of what a terminal's encoding does not have
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return 0
    except UsageError as error:  # the parser has said it
        _print_error(argv, error.said)
        raise
    except (ValueError, OSError) as error:  # DumpError is a ValueError
        return _failed(argv, str(error))
    except KeyboardInterrupt:
        return _failed(argv, "interrupted")
    except Exception as error:  # ours; Python would end with the exit code that says that something diverges
        traceback.print_exc()
        return _failed(argv, f"a fault of dynamo-backends: {type(error).__name__}: {error}")
    return code


def _failed(argv: Sequence[str], message: str) -> int:
    _print_error(argv, message)
    sys.stderr.write(f"{' '.join(['dynamo-backends', *argv[:1]])}: {message}\n")
    return 2


def _print_error(argv: Sequence[str], message: str) -> None:
    """``{"error": …}``, where JSON goes to standard output."""
    if _asks_for_json(argv):
        print_json({"error": message})
        sys.stdout.flush()


def _asks_for_json(argv: Sequence[str]) -> bool:
    """Whether there is a ``--json`` among arguments that may be wrong, and were not parsed therefore."""
    if argv[:1] == ["bench"]:  # its --json names a file
        return "--json=-" in argv or ("--json", "-") in zip(argv, argv[1:], strict=False)
    words = list(argv)
    if argv[:1] == ["bisect"] and not any(map(GRAPH.fullmatch, argv)):  # the command that is bisected has its own
        words = words[: next((i for i, word in enumerate(words) if i and not word.startswith("-")), len(words))]
    return "--json" in words


def say(text: str) -> None:
    """Says on standard error what is done."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Prints a value as JSON, indented, one object for the whole command."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def try_next(arguments: argparse.Namespace, *words: str) -> str:
    """The line that says what to do next, with the dump: ``try: dynamo-backends show 0 -d FOLDER``."""
    dump = [] if arguments.dump is None else ["-d", arguments.dump]
    return "try: " + shlex.join(["dynamo-backends", *words, *dump])


def try_again(arguments: argparse.Namespace, *words: str) -> str:
    """As ``try_next``: the same command with more arguments, or with another value of one."""
    given = list(arguments.words)
    if words[0] in given:
        start = given.index(words[0])
        del given[start : start + len(words)]
    return "try: " + shlex.join(["dynamo-backends", *given, *words])


def short_path(path: str) -> str:
    """A path, relative to the current folder if it is in it."""
    folder = os.getcwd().rstrip("/") + "/"
    return path.removeprefix(folder)


def is_coloured(stream: TextIO) -> bool:
    """Whether text for a stream has colours: it is a terminal, unless ``NO_COLOR`` or ``FORCE_COLOR`` is set."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
