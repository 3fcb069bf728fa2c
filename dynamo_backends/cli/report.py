"""``dynamo-backends report``: a run of ``onnx_debug`` as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import writing
from .common import add_dump_arguments, print_json, say, short_path, try_again

DETAILS = (
    "The page has the stages of each graph, what runs in PyTorch and why, and the comparison with eager as a table and "
    "a plot. It needs no network. Exit code 1: a graph diverges, or ONNX Runtime failed to run a part of it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dump_arguments(parser, positional=True)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file to write (default: report.html in the run folder)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.reading import find_run
    from ..report import gather, write_page

    dumped = find_run(arguments.dump)
    report = gather(dumped)
    path = arguments.output or dumped.folder / "report.html"
    with writing(path):
        write_page(report, path)
    if arguments.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            say("dynamo-backends report: no browser found; open the file yourself")
    wrong = [graph for graph in report.overview["graphs"] if graph["state"] == "wrong"]
    if arguments.json:
        print_json({"report": path, "wrong": [graph["reference"] for graph in wrong], "damaged": report.notices})
    else:
        print("\n".join([short_path(str(path)), *(f"{graph['name']}: {graph['verdict']}" for graph in wrong)]))
        for notice in report.notices:
            say(f"dynamo-backends report: not shown: {notice}")
        if not arguments.open:
            print("\n" + try_again(arguments, "--open"))
    return 1 if wrong else 0
