"""What the subcommands share: common arguments, error reporting, hints. It does not import PyTorch.

A subcommand is a module with

- ``DETAILS``: the help text after the sentence in ``COMMANDS``;
- ``add_arguments(parser)``;
- ``run(arguments)``, which returns the exit code and raises ``ValueError`` or ``OSError`` for a user's mistake.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ..dumps.reading import DumpedGraph, DumpedRun, DumpError, find_run
from ..errors import writing
from .parser import ArgumentsError

Analysis = TypeVar("Analysis")

GRAPH = re.compile(r"(?:(?:.*/)?graph_)?\d+(?:/(?:inference|forward|backward))?(?:/region_\d+)?/?")
"""The name of a graph or region of a dump."""

MODEL_HELP = (
    "a name listed by bench --help, file.py:function or package.module:function; the function returns "
    "(model, inputs), where inputs is a tensor, a tuple of positional or a dict of keyword arguments"
)


def add_dump_arguments(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Adds ``-d/--dump FOLDER`` (a string or ``None``), optionally as a positional argument too, and ``--json``."""
    group = parser.add_mutually_exclusive_group()
    if positional:
        group.add_argument("dump", nargs="?", default=argparse.SUPPRESS, metavar="DUMP", help="the same as -d")
    group.add_argument(
        "-d",
        "--dump",
        metavar="FOLDER",
        help="a folder given as dump_dir (its latest run), or a run folder in it; default: onnx_debug, else the only "
        "dump in the current folder",
    )
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``GRAPH`` and the arguments of ``add_dump_arguments``."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph: 0, graph_000, 0/backward, or its folder")
    add_dump_arguments(parser)


def add_inputs_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--inputs``, ``--dim`` and ``--seed``: the inputs of an ONNX file."""
    parser.add_argument(
        "--inputs",
        nargs="+",
        metavar="PATH",
        default=[],
        help="a folder with input_0.pb …, such as that of a dumped region, .pb files, or an .npz (default: those "
        "recorded in a dump, else random inputs)",
    )
    parser.add_argument(
        "--dim",
        action="append",
        type=_size,
        metavar="NAME=N",
        default=[],
        help="size of a symbolic dimension of random inputs (default: 3, and then 5 in compare)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random inputs (default: 0)")


def add_options_argument(parser: argparse.ArgumentParser, backends: str) -> None:
    """Adds ``--options NAME=VALUE …``, a list of pairs; ``backends`` are the names for the help text."""
    parser.add_argument(
        "--options",
        nargs="+",
        action="extend",
        type=pair,
        default=[],
        metavar="NAME=VALUE",
        help=f"options of {backends}, in the syntax of the environment variables",
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device``, where the model runs."""
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device of the model and its inputs, such as cuda (default: cpu)",
    )


def pair(text: str) -> tuple[str, str]:
    """An ``argparse`` type: ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _size(text: str) -> tuple[str, int]:
    name, size = pair(text)
    return name, positive(size)


def positive(text: str) -> int:
    """An ``argparse`` type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def run_of_graph(arguments: argparse.Namespace, reference: str) -> DumpedRun:
    """Finds the run that has a graph; ``DumpError`` if there is no dump, or it has no such graph.

    Args:
        arguments: the command's. If ``dump`` is ``None`` and ``reference`` is a folder, ``dump`` is set to its run.
        reference: the graph, as the user wrote it.
    """
    if reference.endswith(".onnx"):
        raise DumpError(f"{reference}: expected a graph of a dump, such as 0; compare, bisect and show take ONNX files")
    if arguments.dump is None and "/" in reference and Path(reference).is_dir():
        arguments.dump = str(find_run(reference).folder)
    run = find_run(arguments.dump)
    run.graphs_of(reference)
    return run


def for_each_graph(
    arguments: argparse.Namespace,
    analyze: Callable[[DumpedGraph], Analysis],
    *,
    text: Callable[[DumpedGraph, Analysis], str],
    is_wrong: Callable[[Analysis], bool] = lambda _: False,
) -> int:
    """Analyzes each graph that GRAPH names and prints the results.

    Args:
        arguments: the command's, with ``graph``, ``dump`` and ``json``.
        analyze: returns the result.
        text: the text of a result.
        is_wrong: whether a result makes the exit code 1.
    """
    graphs = run_of_graph(arguments, arguments.graph).graphs_of(arguments.graph)
    results = [(graph, analyze(graph)) for graph in graphs]
    if arguments.json:
        print_json([{"graph": graph.reference, **vars(result)} for graph, result in results])
    else:
        texts = [text(graph, result) for graph, result in results]
        if not any("try: " in item for item in texts):
            texts[-1] += try_next(arguments, "report", "--open") + "\n"
        sys.stdout.write("\n".join(texts))
    return int(any(is_wrong(result) for _, result in results))


def reporting_errors(argv: Sequence[str], work: Callable[[], int]) -> int:
    """Runs a command and reports its errors on standard error, and as ``{"error": …}`` if ``--json`` was given.

    Returns:
        The exit code of ``work``; 2 if it raised, 0 if the reader of standard output closed it (``| head``). A
        traceback is printed unless the error is a user's mistake (``ValueError`` or ``OSError``) or an interrupt.

    Raises:
        ArgumentsError: the arguments are invalid; it ends the process with exit code 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    try:
        code = work()
        with writing("standard output"):
            sys.stdout.flush()
    except BrokenPipeError:  # ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return 0
    except ArgumentsError as error:  # printed by the parser
        _print_json_error(argv, error.message)
        raise
    except (ValueError, OSError) as error:  # DumpError is a ValueError
        return _fail(argv, str(error))
    except KeyboardInterrupt:
        return _fail(argv, "interrupted")
    except Exception as error:  # a bug; uncaught, it would give the exit code 1 of a wrong result
        traceback.print_exc()
        return _fail(argv, f"a bug in dynamo-backends: {type(error).__name__}: {error}")
    return code


def _fail(argv: Sequence[str], message: str) -> int:
    _print_json_error(argv, message)
    say(f"{' '.join(['dynamo-backends', *argv[:1]])}: {message}")
    return 2


def _print_json_error(argv: Sequence[str], message: str) -> None:
    if _has_json_option(argv):
        print_json({"error": message})
        sys.stdout.flush()


def _has_json_option(argv: Sequence[str]) -> bool:
    """Whether JSON goes to standard output; ``argv`` may be invalid, so it is not parsed."""
    if argv[:1] == ["bench"]:  # its --json takes a file
        return "--json=-" in argv or ("--json", "-") in zip(argv, argv[1:], strict=False)
    words = list(argv)
    if argv[:1] == ["bisect"] and not any(map(GRAPH.fullmatch, argv)):  # the bisected command has options of its own
        words = words[: next((i for i, word in enumerate(words) if i and not word.startswith("-")), len(words))]
    return "--json" in words


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Prints JSON; dataclasses become objects, paths strings, and numbers that are NaN or infinite ``null``."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    sys.stdout.write(text.decode() + "\n")


def try_next(arguments: argparse.Namespace, *words: str) -> str:
    """A hint at another command on the same dump: ``try: dynamo-backends show 0 -d FOLDER``."""
    dump = [] if arguments.dump is None else ["-d", arguments.dump]
    return "try: " + shlex.join(["dynamo-backends", *words, *dump])


def try_again(arguments: argparse.Namespace, *words: str) -> str:
    """A hint at the same command with ``words`` added; they replace the values of an option that was given."""
    given = list(arguments.words)
    if words[0] in given:
        start = given.index(words[0])
        del given[start : start + len(words)]
    return "try: " + shlex.join(["dynamo-backends", *given, *words])


def count_text(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def short_path(path: str) -> str:
    """A path, relative if it is below the current folder."""
    return path.removeprefix(os.getcwd().rstrip("/") + "/")


def coloured(text: str, language: str) -> str:
    """A text for standard output, in colours on a terminal, unless ``NO_COLOR`` or ``FORCE_COLOR`` is set."""
    if os.environ.get("NO_COLOR") or not (os.environ.get("FORCE_COLOR") or sys.stdout.isatty()):
        return text
    import pygments
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import get_lexer_by_name

    return str(pygments.highlight(text, get_lexer_by_name(language, stripnl=False), TerminalFormatter()))
