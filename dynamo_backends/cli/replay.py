"""``dynamo-backends replay``: runs the ONNX models of a dumped graph again on the recorded inputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, add_runtime_arguments, check_runtime, print_json, run_of_graph, try_next
from .compare import error_text, legend_text

if TYPE_CHECKING:
    from ..dumps.replay import Replayed

DETAILS = (
    "By default runs the same models with the same settings. Exit code 1: an output differs from the recorded one by "
    "more than rounding."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    add_runtime_arguments(parser)
    parser.add_argument("--opset", type=int, metavar="N", help="convert the model to this opset first")
    parser.add_argument("--no-optimize", action="store_true", help="disable ONNX Runtime's graph optimizations")


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.replay import Variant, replay

    check_runtime(arguments)
    variant = Variant(arguments.provider, arguments.opset, arguments.runtime, not arguments.no_optimize)
    regions = run_of_graph(arguments, arguments.graph).regions_of(arguments.graph)
    replayed = [replay(graph, region, variant) for graph, region in regions]
    if arguments.json:
        print_json([_as_json(item) for item in replayed])
    else:
        sys.stdout.write(_text(replayed))
        is_varied = variant != Variant()
        if all(item.ok if is_varied else item.is_same for item in replayed):
            more = [] if is_varied else ["--no-optimize"]
            print(try_next(arguments, "replay", arguments.graph, *more))
        else:
            print(try_next(arguments, "bisect", arguments.graph))
    return 0 if all(item.is_same for item in replayed) else 1


def _text(replayed: Sequence[Replayed]) -> str:
    headers = ("", "region", "output", "type", "error", "largest value", "tolerance")
    rows = [
        (
            output.mark,
            item.name,
            output.name,
            output.described,
            error_text(output.difference),
            f"{output.difference.measured.scale:.2g}" if output.difference.dtype else "",
            "" if output.difference.is_equal else f"{output.difference.measured.limit:.1e}",
        )
        for item in replayed
        for output in item.outputs
    ]
    lines = [fit_table(rows, headers), "", legend_text({mark for mark, *_ in rows}), ""]
    for item in replayed:
        lines.append(f"{item.name}: {item.settings}: {item.verdict}")
        lines += [f"  note: {note}" for note in item.notes]
    return "\n".join(lines) + "\n"


def _as_json(item: Replayed) -> dict[str, object]:
    outputs = [
        {
            "name": output.name,
            "type": output.described,
            "mark": output.mark,
            "difference": output.difference.as_json(),
        }
        for output in item.outputs
    ]
    return {
        "region": item.name,
        "model": item.model,
        "settings": item.settings,
        "verdict": item.verdict,
        "ok": item.ok,
        "same_as_recorded": item.is_same,
        "recorded_verdict": item.recorded_verdict,
        "notes": list(item.notes),
        "outputs": outputs,
    }
