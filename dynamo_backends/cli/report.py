"""``dynamo-backends report``: a run of ``onnx_debug`` as one HTML file to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import add_dump_arguments, print_json, say, short_path, try_again

DESCRIPTION = (
    "Writes report.html: the graphs of a run with their stages, what ran where and why, the comparison "
    "as a table and a plot, and where the time goes. One file, which opens from disk and needs no network. Exit "
    "code 1: a graph diverges."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_dump_arguments(parser, positional=True)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the file (default: report.html of the run)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--no-times",
        dest="times",
        action="store_false",
        help="do not run the models again to tell the time of each operator",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the report. Exit code 1 if a graph diverges, 2 if it cannot be written."""
    from ..dumps.reading import find_run
    from ..report import gather, write_page

    dumped = find_run(arguments.dump)
    report = gather(dumped, times=arguments.times)
    path = arguments.output or dumped.folder / "report.html"
    write_page(report, path)
    if arguments.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            raise OSError(f"there is no browser to open {path} with")
    wrong = [graph for graph in report.overview["graphs"] if graph["state"] == "wrong"]
    if arguments.json:
        print_json(
            {"report": str(path), "diverging": [graph["reference"] for graph in wrong], "damaged": report.notices}
        )
    else:
        print(short_path(str(path)))
        for graph in wrong:
            print(f"{graph['name']}: {graph['verdict']}")
        for notice in report.notices:
            say(f"dynamo-backends report: not shown: {notice}")
        if not arguments.open:
            print("\n" + try_again(arguments, "--open"))
    return 1 if wrong else 0
