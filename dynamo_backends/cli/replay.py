"""``dynamo-backends replay``: a dumped model again, on the dumped inputs, also elsewhere or otherwise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, add_runtime_arguments, check_runtime, print_json, run_with, try_next
from .compare import amount, legend_text

if TYPE_CHECKING:
    from ..dumps.replay import Replayed


DESCRIPTION = (
    "Runs the model of each region of a graph again on the inputs that the dump holds, and compares "
    "with the outputs that it holds: the very model and settings that ran, but for what is given here. Exit code 1 "
    "if an output differs by more than rounding explains."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    add_runtime_arguments(parser)
    parser.add_argument("--opset", type=int, metavar="N", help="convert the model to this opset first")
    parser.add_argument("--no-optimize", action="store_true", help="without ONNX Runtime's graph optimizations")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an output differs by more than rounding explains, 2 if a model cannot be run."""
    from ..dumps.replay import Variant, replay

    check_runtime(arguments)
    variant = Variant(arguments.provider, arguments.opset, arguments.runtime, not arguments.no_optimize)
    found = run_with(arguments, arguments.graph).regions_of(arguments.graph)
    replayed = [replay(graph, region, variant) for graph, region in found]
    if arguments.json:
        print_json([_as_json(item) for item in replayed])
    else:
        sys.stdout.write(replay_text(replayed))
        is_varied = variant != Variant()
        if all(item.ok if is_varied else item.is_same for item in replayed):
            more = [] if is_varied else ["--no-optimize"]
            print(try_next(arguments, "replay", arguments.graph, *more))
        else:
            print(try_next(arguments, "bisect", arguments.graph))
    return 0 if all(item.is_same for item in replayed) else 1


def replay_text(replayed: Sequence[Replayed]) -> str:
    """A table of the outputs of all regions, its legend, and the verdict of each."""
    headers = ("", "region", "output", "type", "difference", "largest value", "explained")
    rows = [
        (
            output.mark,
            item.name,
            output.name,
            output.described,
            amount(output.difference),
            f"{output.difference.measured.scale:.2g}" if output.difference.dtype else "",
            "" if output.difference.is_equal else f"{output.difference.measured.limit:.1e}",
        )
        for item in replayed
        for output in item.outputs
    ]
    lines = [fit_table(rows, headers), "", legend_text({mark for mark, *_ in rows})]
    lines += ["explained: what rounding explains at the element that is worst for it", ""]
    for item in replayed:
        lines.append(f"{item.name}: {item.settings}: {item.verdict}")
        lines += [f"  note: {note}" for note in item.notes]
    return "\n".join(lines) + "\n"


def _as_json(item: Replayed) -> dict[str, object]:
    return {
        "region": item.name,
        "model": str(item.model),
        "settings": item.settings,
        "verdict": item.verdict,
        "ok": item.ok,
        "same_as_recorded": item.is_same,
        "recorded_verdict": item.recorded_verdict,
        "notes": list(item.notes),
        "outputs": [
            {
                "name": output.name,
                "type": output.described,
                "mark": output.mark,
                "difference": output.difference.as_json(),
            }
            for output in item.outputs
        ],
    }
