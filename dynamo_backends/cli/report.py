"""``dynamo-backends report``: a run of ``onnx_debug`` as one HTML file to look at.

::

    dynamo-backends report --open       # writes report.html into the latest run under ./onnx_debug, and opens it
    dynamo-backends report dump -o run.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .common import add_dump_arguments, print_json, reporting_errors, short_path, try_next


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the subcommand ``report``, with its line in the list of them."""
    parser = commands.add_parser(
        "report",
        help=summary,
        description="Writes report.html: the graphs of a run with their stages, what ran where and why, the comparison "
        "as a table and a plot, and where the time goes. One file, which opens from disk and needs no network. Exit "
        "code 1: a graph diverges.",
    )
    parser.add_argument("folder", nargs="?", metavar="DUMP", help="the same as -d")
    add_dump_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the file (default: report.html of the run)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--no-times",
        dest="times",
        action="store_false",
        help="do not run the models again to tell the time of each operator",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the report. Exit code 1 if a graph diverges, 2 if it cannot be written."""
    return reporting_errors("report", lambda: _report(arguments))


def _report(arguments: argparse.Namespace) -> int:
    from ..dumps.reading import find_run
    from ..report import gather, write_page

    given = arguments.folder or arguments.dump
    dumped = find_run(given)
    report = gather(dumped, times=arguments.times)
    path = write_page(report, arguments.output or dumped.folder / "report.html")
    if arguments.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            raise OSError(f"there is no browser to open {path} with")
    wrong = [graph for graph in report.overview["graphs"] if graph["state"] == "wrong"]
    damaged = report.notices
    if arguments.json:
        print_json({"report": str(path), "diverging": [graph["reference"] for graph in wrong], "damaged": damaged})
    else:
        print(short_path(str(path)))
        for graph in wrong:
            print(f"{graph['name']}: {graph['verdict']}")
        for notice in damaged:
            sys.stderr.write(f"dynamo-backends report: not shown: {notice}\n")
        if not arguments.open:
            print("\n" + try_next(["report", "--open"], given))
    return 1 if wrong else 0
