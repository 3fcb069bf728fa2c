"""``dynamo-backends compare``: two ONNX models side by side, run on the same inputs."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import (
    GRAPH,
    add_dump_arguments,
    add_runtime_arguments,
    check_runtime,
    complete_graphs,
    pair,
    print_json,
    run_with,
    try_again,
)

if TYPE_CHECKING:
    from ..dumps.model_comparison import Comparison
    from ..dumps.model_rows import Row, Side
    from ..dumps.model_values import Runtime
    from ..dumps.value_differences import Difference

_MOST_ROWS = 200
"""Of a longer table, only what is different and the outputs are shown."""

DESCRIPTION = (
    "Runs two ONNX models on the same inputs, aligns their values, and names the first that diverges. "
    "A and B are files, or graphs of a dump: 0/forward, graph_000/forward/region_1, or the path of one. Exit code "
    "1 if an output differs by more than rounding explains."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    first = parser.add_argument("first", metavar="A", help="a model: a file, a graph of the dump, or the path of one")
    second = parser.add_argument("second", metavar="B", help="the other model")
    for action in (first, second):
        action.completer = complete_models  # type: ignore[attr-defined]
    parser.add_argument(
        "--inputs",
        nargs="+",
        metavar="PATH",
        default=[],
        help="a folder with input_0.pb …, .pb files, or an .npz; by default those of A's (or B's) dump, else made up",
    )
    parser.add_argument(
        "--dim",
        action="append",
        type=pair,
        metavar="NAME=N",
        default=[],
        help="the size of a symbolic dimension, 3 by default",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of made-up inputs")
    parser.add_argument(
        "--stage",
        choices=("onnx", "onnx_optimized", "session"),
        default="onnx",
        help="of a dump's graphs: the export, the model after our passes, or what ONNX Runtime made of it",
    )
    parser.add_argument("--optimize", action="store_true", help="compare what ONNX Runtime's optimizer makes of each")
    parser.add_argument("--all", action="store_true", help=f"all rows of a table of more than {_MOST_ROWS}")
    add_runtime_arguments(parser)
    add_dump_arguments(parser)


def complete_models(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The models and folders that a path begins, and the graphs of the dump; see ``argcomplete``."""
    from argcomplete.completers import FilesCompleter

    return [*FilesCompleter(("onnx",))(prefix), *complete_graphs(prefix, parsed_args)]


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an output differs by more than rounding explains, 2 if the models cannot be compared."""
    from ..dumps.model_comparison import compare_targets, paired, targets_of

    check_runtime(arguments)
    for reference in (arguments.first, arguments.second):
        if GRAPH.fullmatch(reference) and not Path(reference).exists():
            run_with(arguments, reference)  # says what is the matter where Dynamo gave it up
    sizes = {name: int(size) for name, size in arguments.dim}
    first = targets_of(arguments.first, arguments.dump, arguments.stage)
    second = targets_of(arguments.second, arguments.dump, arguments.stage)
    if arguments.inputs and len(first) > 1:
        raise ValueError(f"--inputs is for one model, A has {len(first)}: {', '.join(item.name for item in first)}")
    pairs, left_out = paired(first, second)
    runtime = _runtime(arguments)
    inputs = [_inputs(item, arguments.dump) for item in arguments.inputs]
    comparisons = [
        compare_targets(one, other, runtime, inputs=inputs, sizes=sizes, seed=arguments.seed) for one, other in pairs
    ]
    if arguments.json:
        print_json([*map(_as_json, comparisons), *({"left_out": item.name} for item in left_out)])
    else:
        for item in comparisons:
            sys.stdout.write(comparison_text(item, everything=arguments.all))
        if left_out:
            which, more, fewer = ("A", first, second) if len(first) > len(second) else ("B", second, first)
            names = ", ".join(item.name for item in left_out)
            print(f"left out, as {which} has {len(more)} models and the other {len(fewer)}: {names}")
        if not all(item.ok for item in comparisons) and arguments.runtime == "ort" and arguments.provider is None:
            print(try_again(arguments, "--runtime", "reference"))
        elif not arguments.optimize:
            print(try_again(arguments, "--optimize"))
    return 0 if all(item.ok for item in comparisons) else 1


def _inputs(path: str, dump: str | None) -> str:
    """A path, or the data of a region of the dump."""
    from ..dumps.model_comparison import targets_of

    if Path(path).exists() or path.endswith((".pb", ".npz")):
        return path
    targets = targets_of(path, dump)
    if len(targets) != 1 or targets[0].data is None:
        raise ValueError(f"--inputs {path}: name one region with stored inputs, as in graph_000/forward/region_0")
    return str(targets[0].data)


def _runtime(arguments: argparse.Namespace) -> Runtime:
    from ..dumps.model_sessions import available_provider
    from ..dumps.model_values import Runtime
    from ..dumps.schema import Settings

    settings = Settings()
    if arguments.provider is not None:
        settings = Settings(providers=(available_provider(arguments.provider),))
    return Runtime(arguments.runtime, settings, arguments.optimize)


def comparison_text(comparison: Comparison, *, everything: bool) -> str:
    """The table of a comparison, its legend, its notes, and the verdict."""
    from ..dumps.value_differences import EQUAL

    shown = list(comparison.rows)
    if len(shown) > _MOST_ROWS and not everything:
        outputs = {id(row) for row in comparison.outputs}
        shown = [row for row in shown if row.mark != EQUAL or id(row) in outputs][:_MOST_ROWS]
    headers = ("", "kind", "type", "shape", "digest", "operator", "name", "operator of B", "name in B", "difference")
    lines = [f"A  {comparison.names[0]}", f"B  {comparison.names[1]}", ""]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += [""] * bool(comparison.notes)
    lines += [fit_table([_cells(row, row is comparison.first_different) for row in shown], headers), ""]
    marks = collections.Counter(row.mark for row in comparison.rows)
    if len(shown) < len(comparison.rows):
        counts = ", ".join(f"{number} {mark}" for mark, number in marks.items())
        lines += [f"{len(comparison.rows)} rows: {counts}; --all shows them", ""]
    lines.append(legend_text(marks))
    measured = "10 times what one unit of rounding in all inputs and weights makes, and " * comparison.measured
    half = "(2 and 2 in half precision)"
    lines += [f"Rounding explains, at each element, {measured}8 units in the last place {half}.", ""]
    lines.append(f"{comparison.verdict}{_worst(comparison)}")
    return "\n".join(lines) + "\n"


def legend_text(marks: Collection[str]) -> str:
    """What the marks mean."""
    from ..dumps.value_differences import LEGEND

    return "; ".join(f"{mark} {said}" for mark, said in LEGEND.items() if mark in marks)


def _cells(row: Row, is_first: bool) -> Sequence[object]:
    side = row.first or row.second
    assert side is not None
    return (
        f"{row.mark}{'>' * is_first}",
        side.kind,
        _both(*(side.type if side else None for side in (row.first, row.second))),
        _both(_shape(row.first), _shape(row.second)),
        _both(*(side.digest if side else None for side in (row.first, row.second))),
        row.first and row.first.operator,
        row.first and row.first.name,
        row.second and row.second.operator,
        row.second and row.second.name,
        row.difference and amount(row.difference),
    )


def amount(difference: Difference) -> str:
    """How much is different, in a word or two."""
    if difference.is_equal:
        return "0"
    if difference.what:
        return difference.what
    if difference.measured.nonfinite:
        return f"{difference.measured.nonfinite} NaN or infinite"
    return f"{difference.measured.max_abs:.1e}" if difference.dtype else f"{difference.differing} differ"


def _both(first: str | None, second: str | None) -> str:
    """What both have, or ``float32→float16``."""
    if first is None or second is None or first == second:
        return first if first is not None else second or ""
    return f"{first}→{second}"


def _shape(side: Side | None) -> str | None:
    from ..dumps.models import shape_text

    return None if side is None else "" if side.shape is None else shape_text(side.shape)


def _worst(comparison: Comparison) -> str:
    """The largest difference of the outputs, where all are right."""
    found = [(row.difference, row) for row in comparison.outputs if row.difference and not row.difference.is_equal]
    if not comparison.ok:
        return ""
    if not found:
        return ": all outputs are equal"
    worst, row = max(found, key=lambda item: item[0].measured.relative)
    return f": {row.name} differs most, by {amount(worst)}; rounding explains {worst.measured.limit:.1e} there"


def _as_json(comparison: Comparison) -> dict[str, object]:
    def row_as_json(row: Row) -> dict[str, object]:
        return {
            "mark": row.mark,
            "first": row.first and dataclasses.asdict(row.first),
            "second": row.second and dataclasses.asdict(row.second),
            "difference": row.difference and row.difference.as_json(),
        }

    first = comparison.first_different
    return {
        "first": comparison.names[0],
        "second": comparison.names[1],
        "verdict": comparison.verdict,
        "ok": comparison.ok,
        "first_different": None if first is None else row_as_json(first),
        "notes": list(comparison.notes),
        "rounding_was_measured": comparison.measured,
        "rows": [row_as_json(row) for row in comparison.rows],
    }
