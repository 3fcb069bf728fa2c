"""``dynamo-backends compare``: runs two ONNX models on the same inputs and compares their values."""

from __future__ import annotations

import argparse
import collections
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
    run_of_graph,
    try_again,
)

if TYPE_CHECKING:
    from ..dumps.model_comparison import ModelComparison
    from ..dumps.model_rows import AlignedRow
    from ..dumps.model_values import Runtime
    from ..dumps.value_differences import Difference

_MAX_ROWS = 200
"""A longer table shows only values that differ, and outputs."""

DETAILS = (
    "A and B are files or graphs of a dump: 0/forward, graph_000/forward/region_1, or the path of one. Exit code 1: an "
    "output differs by more than rounding."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    first = parser.add_argument("first", metavar="A", help="a model: a file, a graph of the dump, or the path of one")
    second = parser.add_argument("second", metavar="B", help="the other model")
    for action in (first, second):
        action.completer = complete_models  # type: ignore[attr-defined]
    parser.add_argument(
        "--inputs",
        nargs="+",
        metavar="PATH",
        default=[],
        help="a folder with input_0.pb …, .pb files, an .npz, or a region of the dump (default: the recorded inputs of "
        "A or B, else random inputs)",
    )
    parser.add_argument(
        "--dim",
        action="append",
        type=pair,
        metavar="NAME=N",
        default=[],
        help="size of a symbolic dimension of random inputs (default: 3)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random inputs (default: 0)")
    parser.add_argument(
        "--stage",
        choices=("onnx", "onnx_optimized", "session"),
        default="onnx",
        help="which model of a dumped graph: exported, after our passes, or after ONNX Runtime's optimizers "
        "(default: %(default)s)",
    )
    parser.add_argument("--optimize", action="store_true", help="run ONNX Runtime's optimizers on both models first")
    parser.add_argument("--all", action="store_true", help=f"print all rows of a table of more than {_MAX_ROWS}")
    add_runtime_arguments(parser)
    add_dump_arguments(parser)


def complete_models(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """ONNX files, folders, and the graphs of the dump; an ``argcomplete`` completer."""
    from argcomplete.completers import FilesCompleter

    return [*FilesCompleter(("onnx",))(prefix), *complete_graphs(prefix, parsed_args)]


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.model_comparison import compare_targets, paired, targets_of

    check_runtime(arguments)
    for reference in (arguments.first, arguments.second):
        if GRAPH.fullmatch(reference) and not Path(reference).exists():
            run_of_graph(arguments, reference)  # its error says why Dynamo gave the graph up
    sizes = {name: int(size) for name, size in arguments.dim}
    first = targets_of(arguments.first, arguments.dump, arguments.stage)
    second = targets_of(arguments.second, arguments.dump, arguments.stage)
    if arguments.inputs and len(first) > 1:
        raise ValueError(f"--inputs requires one model, A has {len(first)}: {', '.join(item.name for item in first)}")
    pairs, left_out = paired(first, second)
    runtime = _runtime(arguments)
    inputs = [_inputs(item, arguments.dump) for item in arguments.inputs]
    comparisons = [
        compare_targets(one, other, runtime, inputs=inputs, sizes=sizes, seed=arguments.seed) for one, other in pairs
    ]
    ok = all(comparison.ok for comparison in comparisons)
    if arguments.json:
        print_json([*map(_as_json, comparisons), *({"left_out": item.name} for item in left_out)])
    else:
        for comparison in comparisons:
            sys.stdout.write(_text(comparison, everything=arguments.all))
        if left_out:
            which, more, fewer = ("A", first, second) if len(first) > len(second) else ("B", second, first)
            names = ", ".join(item.name for item in left_out)
            print(f"not compared, as {which} has {len(more)} models and the other {len(fewer)}: {names}")
        if not ok and arguments.runtime == "ort" and arguments.provider is None:
            print(try_again(arguments, "--runtime", "reference"))
        elif not arguments.optimize:
            print(try_again(arguments, "--optimize"))
    return 0 if ok else 1


def _inputs(path: str, dump: str | None) -> str:
    """A path, or the recorded inputs of a region of the dump."""
    from ..dumps.model_comparison import targets_of

    if Path(path).exists() or path.endswith((".pb", ".npz")):
        return path
    targets = targets_of(path, dump)
    if len(targets) != 1 or targets[0].data is None:
        raise ValueError(f"--inputs {path}: expected one region with recorded inputs, as graph_000/forward/region_0")
    return str(targets[0].data)


def _runtime(arguments: argparse.Namespace) -> Runtime:
    from ..dumps.model_sessions import available_provider
    from ..dumps.model_values import Runtime
    from ..dumps.schema import Settings

    provider = arguments.provider
    settings = Settings() if provider is None else Settings(providers=(available_provider(provider),))
    return Runtime(arguments.runtime, settings, arguments.optimize)


def _text(comparison: ModelComparison, *, everything: bool) -> str:
    """The table of a comparison, its legend and notes, and the verdict."""
    from ..dumps.value_differences import EQUAL

    shown = list(comparison.rows)
    if len(shown) > _MAX_ROWS and not everything:
        outputs = {id(row) for row in comparison.outputs}
        shown = [row for row in shown if row.mark != EQUAL or id(row) in outputs][:_MAX_ROWS]
    headers = ("", "kind", "type", "shape", "digest", "operator", "name", "operator of B", "name in B", "error")
    lines = [f"A  {comparison.names[0]}", f"B  {comparison.names[1]}", ""]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += [""] * bool(comparison.notes)
    lines += [fit_table([_cells(row, row is comparison.first_different) for row in shown], headers), ""]
    marks = collections.Counter(row.mark for row in comparison.rows)
    if len(shown) < len(comparison.rows):
        counts = ", ".join(f"{number} {mark}" for mark, number in marks.items())
        lines += [f"{len(comparison.rows)} rows: {counts}; --all prints them", ""]
    lines.append(legend_text(marks))
    measured = "10 times the effect of one unit of rounding in all inputs and weights, plus " * comparison.measured
    half = "(2 and 2 in half precision)"
    lines += [f"Tolerance of each element: {measured}8 units in the last place {half}.", ""]
    lines.append(f"{comparison.verdict}{_largest_error(comparison)}")
    return "\n".join(lines) + "\n"


def legend_text(marks: Collection[str]) -> str:
    """What the marks in a table mean."""
    from ..dumps.value_differences import LEGEND

    return "; ".join(f"{mark} {meaning}" for mark, meaning in LEGEND.items() if mark in marks)


def _cells(row: AlignedRow, is_first: bool) -> Sequence[object]:
    from ..dumps.models import shape_text

    sides = [side for side in (row.first, row.second) if side is not None]
    return (
        f"{row.mark}{'>' * is_first}",
        sides[0].kind,
        _change([side.type for side in sides]),
        _change(["" if side.shape is None else shape_text(side.shape) for side in sides]),
        _change([side.digest for side in sides]),
        row.first and row.first.operator,
        row.first and row.first.name,
        row.second and row.second.operator,
        row.second and row.second.name,
        row.difference and error_text(row.difference),
    )


def _change(values: Sequence[str]) -> str:
    """``float32``, or ``float32→float16`` if the models differ."""
    return "→".join(dict.fromkeys(values))


def error_text(difference: Difference) -> str:
    """The largest error, or a few words on another kind of difference."""
    if difference.is_equal:
        return "0"
    if difference.what:
        return difference.what
    if difference.measured.nonfinite:
        return f"{difference.measured.nonfinite} NaN or infinite"
    return f"{difference.measured.max_abs:.1e}" if difference.dtype else f"{difference.differing} differ"


def _largest_error(comparison: ModelComparison) -> str:
    """The largest error of the outputs, if all are right."""
    if not comparison.ok:
        return ""
    errors = [(row.difference, row) for row in comparison.outputs if row.difference and not row.difference.is_equal]
    if not errors:
        return ": all outputs are equal"
    worst, row = max(errors, key=lambda item: item[0].measured.relative)
    return f": largest error {error_text(worst)} in {row.name}, tolerance {worst.measured.limit:.1e}"


def _as_json(comparison: ModelComparison) -> dict[str, object]:
    def row_as_json(row: AlignedRow) -> dict[str, object]:
        return {
            "mark": row.mark,
            "first": row.first,
            "second": row.second,
            "difference": row.difference and row.difference.as_json(),
        }

    first_different = comparison.first_different
    return {
        "first": comparison.names[0],
        "second": comparison.names[1],
        "verdict": comparison.verdict,
        "ok": comparison.ok,
        "first_different": None if first_different is None else row_as_json(first_different),
        "notes": list(comparison.notes),
        "rounding_was_measured": comparison.measured,
        "rows": [row_as_json(row) for row in comparison.rows],
    }
