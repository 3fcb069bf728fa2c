"""``dynamo-backends replay``: a dumped model again, on the dumped inputs.

::

    dynamo-backends replay 0/forward                        # the very model and settings that ran
    dynamo-backends replay 0 --no-optimize
    dynamo-backends replay 0/forward/region_1 --provider cuda
    dynamo-backends replay 0 --opset 18 --runtime reference
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..tables import fit_table
from .common import add_graph_arguments, print_json, run_with, try_next

if TYPE_CHECKING:
    from ..dumps.replaying import Replayed, Variant


DESCRIPTION = (
    "Runs the model of each region of a graph again on the inputs that the dump holds, and compares "
    "with the outputs that it holds: the very model and settings that ran, but for what is given here. Exit code 1 "
    "if an output differs by more than rounding explains."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    parser.add_argument("--provider", metavar="NAME", help="execution provider: cpu, cuda or CUDAExecutionProvider …")
    parser.add_argument("--opset", type=int, metavar="N", help="convert the model to this opset first")
    parser.add_argument(
        "--runtime", choices=("ort", "reference"), default="ort", help="ONNX Runtime, or onnx's evaluator in Python"
    )
    parser.add_argument("--no-optimize", action="store_true", help="without ONNX Runtime's graph optimizations")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an output differs by more than rounding explains, 2 if a model cannot be run."""
    from ..dumps.replaying import Variant, replay

    if arguments.runtime == "reference" and arguments.provider is not None:
        raise ValueError("--provider is for --runtime ort; the reference evaluator has no execution providers")
    variant = Variant(arguments.provider, arguments.opset, arguments.runtime, not arguments.no_optimize)
    found = run_with(arguments, arguments.graph).regions_of(arguments.graph)
    replayed = [replay(graph, region, variant) for graph, region in found]
    if arguments.json:
        print_json([_as_json(item) for item in replayed])
    else:
        sys.stdout.write(replay_text(replayed))
        print(try_next(arguments, *_hint(arguments, variant, replayed)))
    return 0 if all(item.is_same for item in replayed) else 1


def replay_text(replayed: Sequence[Replayed]) -> str:
    """A table of the outputs of all regions, its legend, and the verdict of each."""
    from ..dumps.differences import LEGEND

    headers = ("", "region", "output", "type", "difference", "largest value", "explained")
    rows = []
    for item in replayed:
        for output in item.outputs:
            found = output.difference
            amount = f"{found.max_abs:.1e}" if found.dtype else f"{found.differing} differ"
            amount = found.what or (f"{found.nonfinite} NaN or infinite" if found.nonfinite else amount)
            equal = found.is_equal
            rows.append(
                (
                    output.mark,
                    item.name,
                    output.name,
                    output.described,
                    "0" if equal else amount,
                    f"{found.scale:.2g}" if found.dtype else "",
                    "" if equal else f"{output.limit:.1e}",
                )
            )
    marks = [mark for mark in LEGEND if any(row[0] == mark for row in rows)]
    lines = [fit_table(rows, headers), "", "; ".join(f"{mark} {LEGEND[mark]}" for mark in marks)]
    lines += ["explained: the largest difference that rounding explains", ""]
    for item in replayed:
        lines.append(f"{item.name}: {item.settings}: {item.verdict}")
        lines += [f"  note: {note}" for note in item.notes]
    return "\n".join(lines) + "\n"


def _hint(arguments: argparse.Namespace, variant: Variant, replayed: Sequence[Replayed]) -> list[str]:
    """What to do next."""
    from ..dumps.replaying import Variant

    if not all(item.is_same for item in replayed):
        return ["bisect", arguments.graph]
    if variant == Variant():
        return ["replay", arguments.graph, "--no-optimize"]
    return ["replay" if all(item.ok for item in replayed) else "bisect", arguments.graph]


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
                "limit": output.limit,
            }
            for output in item.outputs
        ],
    }
